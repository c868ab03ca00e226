"""The options of ``mxq eval`` that are about vLLM servers, and what they mean together."""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mxq.cli.options import variable
from mxq.engines.launch import whole_option
from mxq.errors import UsageError

if TYPE_CHECKING:
    from mxq.evaluate import Arm
    from mxq.evaluate.fleet import Servers

F = TypeVar("F", bound=Callable[..., object])

_ARM = re.compile(r"(bf16|mxfp4) (ar|(mtp|dflash)-([1-9][0-9]{0,4}))")
_KEY = "VLLM_API_KEY"
_ELSEWHERE = {
    "api-key": f"put the key into {_KEY}: a command is recorded",
    "served-model-name": "servers that are started here serve a model under its own name",
    "disable-log-stats": "what a server counts is needed",
    "enable-prefix-caching": "prompts are measured more than once: a cached one would take no time to its first token",
    "port": "each server that is started here gets a free one",
    "host": "servers that are started here are on this machine; those elsewhere are for --base-url",
    "model": "give it as --bf16 or --mxfp4",
    "speculative-config": "give --spec, -k and --drafter",
    "stream-interval": "each pass is to be a piece: what a piece of several took says nothing of one",
}
"""Options of vLLM that an evaluation has no use for, or must not record."""
_OF_SERVERS = ("hardware", "concurrencies", "engine_args", "variables", "gpus", "at_once", "base_urls", "served_as")


def server_options(command: F) -> F:
    """Add the options."""
    options = [
        click.option(
            "--engine",
            type=click.Choice(["in-process", "vllm"]),
            default="in-process",
            show_default=True,
            help="What decodes: mxq itself, or vLLM servers.",
        ),
        click.option(
            "--hardware", type=click.Choice(["mi355x", "h200", "cpu"]), help="vLLM: what servers are started on."
        ),
        click.option(
            "--concurrency",
            "concurrencies",
            type=click.IntRange(min=1, max=4096),
            metavar="N",
            multiple=True,
            help="vLLM: requests in flight, repeatable.  [default: 1]",
        ),
        click.option(
            "--engine-arg",
            "engine_args",
            metavar="NAME[=VALUE]",
            multiple=True,
            help="vLLM: an option of vllm serve, such as tensor-parallel-size=8; repeatable.",
        ),
        click.option(
            "--env", "variables", metavar="NAME=VALUE", multiple=True, help="vLLM: an environment variable, repeatable."
        ),
        click.option(
            "--gpus", metavar="0,1,...", help="vLLM: GPUs to run a server each on; arms are spread over them."
        ),
        click.option(
            "--servers-at-once",
            "at_once",
            type=click.IntRange(min=1),
            metavar="N",
            help="vLLM: servers that may stay open in one place, idle while another is measured.  [default: 1]",
        ),
        click.option(
            "--base-url",
            "base_urls",
            metavar="ARM=URL",
            multiple=True,
            help="vLLM: measure this arm, as 'bf16 dflash-15', on a server that runs already; repeatable. "
            "No other arms are measured, and nothing is started: not with --spec, -k, --hardware, --gpus, "
            f"--engine-arg, --env or --servers-at-once. Its key is taken from {_KEY}.",
        ),
        click.option(
            "--served-as", metavar="NAME", help="vLLM: the name that servers of --base-url have for the model."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def servers_of(options: dict[str, Any], given: Mapping[str, bool]) -> "Servers | None":
    """Return where arms are measured; None is in this process.

    Args:
        options: all of the verb's; those of servers are taken out, and what they mean for a request is put in.
        given: which options the user wrote.
    """
    mine = {name: options.pop(name) for name in _OF_SERVERS}
    if options.pop("engine") != "vllm":
        wrong = [name for name in _OF_SERVERS if given.get(name)]
        if wrong:
            raise UsageError(
                f"{_option(wrong[0])} without --engine vllm", "in process, mxq decodes one request at a time"
            )
        return None
    from mxq.evaluate.fleet import Servers

    for name in ("device", "dtype"):
        if given.get(name):
            raise UsageError(f"--{name} with --engine vllm", "vLLM takes what the model has; say where by --hardware")
    attached = dict(map(_base_url, mine["base_urls"]))
    if len(attached) < len(mine["base_urls"]):
        raise UsageError("an arm has two servers", "give each arm of --base-url once")
    _check_attached(attached, mine, given)
    for argument in mine["engine_args"]:
        if (name := whole_option(argument)) in _ELSEWHERE:
            raise UsageError(f"{name} is not for --engine-arg", _ELSEWHERE[name])
    for text in mine["variables"]:
        if variable(text)[0] == _KEY:
            raise UsageError(f"{_KEY} is not for --env", "export it: a command is recorded")
    options["device"] = "attached" if attached else mine["hardware"]
    options["concurrencies"] = mine["concurrencies"] or (1,)
    options["engine_args"], options["engine_env"] = mine["engine_args"], mine["variables"]
    if attached:
        options["arms"] = tuple(attached)
        options["methods"] = tuple(dict.fromkeys(arm.method for arm in attached))
        options["budgets"] = tuple(dict.fromkeys(k for arm in attached if (k := arm.num_speculative_tokens)))
    return Servers(
        hardware=mine["hardware"] or "cpu",
        gpus=_gpus(mine["gpus"]),
        at_once=mine["at_once"] or 1,
        attached=attached,
        served_as=mine["served_as"],
    )


def _check_attached(attached: Mapping["Arm", str], mine: Mapping[str, Any], given: Mapping[str, bool]) -> None:
    if not attached:
        if mine["hardware"] is None:
            raise UsageError("--engine vllm without --hardware", "say what servers are started on, or give --base-url")
        if mine["served_as"] is not None:
            raise UsageError(
                "--served-as without --base-url", "servers that are started here are asked by their own name"
            )
        return
    for name in ("hardware", "engine_args", "variables", "gpus", "at_once", "methods", "budgets"):
        if given.get(name):
            raise UsageError(
                f"{_option(name)} with --base-url",
                f"leave {_option(name)} out: these servers run already, each for the arm it is given",
            )


def _base_url(text: str) -> tuple["Arm", str]:
    from mxq.evaluate import Arm

    label, _, url = text.partition("=")
    found = _ARM.fullmatch(label)
    if found is None or not url:
        raise UsageError(f"--base-url {text!r}", "write ARM=URL, as in --base-url 'bf16 dflash-15=http://host:8000'")
    drafting: Any = found[3]
    return Arm(found[1], drafting or "ar", int(found[4] or 0)), url


def _gpus(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    gpus = tuple(part.strip() for part in text.split(","))
    if not all(re.fullmatch(r"[0-9]{1,3}", gpu) for gpu in gpus) or len(set(gpus)) < len(gpus):
        raise UsageError(f"--gpus {text!r}", "write the numbers of GPUs, each once: 0,1,2,3")
    return gpus


def _option(name: str) -> str:
    return {
        "concurrencies": "--concurrency",
        "engine_args": "--engine-arg",
        "variables": "--env",
        "at_once": "--servers-at-once",
        "base_urls": "--base-url",
        "served_as": "--served-as",
        "methods": "--spec",
        "budgets": "-k",
    }.get(name, f"--{name}")
