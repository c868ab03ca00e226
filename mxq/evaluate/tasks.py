"""lm-eval's tasks, asked of the server of each target that decodes plainly, after a run is measured.

::

    RUN/lm-eval/<target>/<task>/results.json              what lm-eval says, and of what; written last
    RUN/lm-eval/<target>/<task>/samples_<task>.jsonl      its samples, one a line, as lm-eval logs them
    RUN/lm-eval/<target>/lm-eval.log                      what it printed

Tasks are chosen by name from lm-eval's own, or from a directory of YAML files; they are loaded, with their data, before
anything is measured. What lm-eval has a default for is left at it, seeds included, so that scores can be held beside
published ones. What a run directory holds of a task is not asked again.
"""

import asyncio
import contextlib
import difflib
import importlib.metadata
import importlib.util
import json
import logging
import math
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxq import files
from mxq.engines.client import Endpoint, Timeouts, connected
from mxq.engines.process import ServerError
from mxq.errors import InterruptedRunError, MxqError, UsageError
from mxq.evaluate.directory import hold, read_json
from mxq.evaluate.fleet import Fleet, Servers
from mxq.evaluate.matrix import Arm, Plan
from mxq.evaluate.task_model import served_model
from mxq.progress import note

DIRECTORY = "lm-eval"
FORMAT = 1

_LEFT_OUT = ("samples", "pretty_env_info", "git_hash", "upper_git_hash", "config")
"""Of what lm-eval returns: samples have files of their own, and run.json says what a run was made with."""


@dataclass(frozen=True)
class Asked:
    """What is asked: names of tasks, tags or groups of lm-eval, and how.

    Attributes:
        names: as lm-eval has them.
        include: a directory of further tasks, as YAML files.
        limit: only the first so many samples of each task.
        chat: prompts go through the chat template, few-shot examples as earlier turns.
    """

    names: tuple[str, ...]
    include: Path | None = None
    limit: int | None = None
    chat: bool = False


@dataclass(frozen=True)
class Tasks:
    """Tasks that are there, with their data. ``likelihoods``: some are answered by how likely given texts are."""

    asked: Asked
    manager: Any
    likelihoods: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Return what is asked."""
        return self.asked.names


def load_tasks(asked: Asked) -> Tasks:
    """Look every task up and load its data.

    Raises:
        UsageError: lm-eval has no such task, or a task would run code that a model writes.
        MxqError: a task, or its data, cannot be loaded.
    """
    if asked.include is not None and not asked.include.is_dir():
        raise UsageError(f"--lm-eval-include {asked.include} is no directory", "give one that holds tasks' YAML files")
    manager = _manager(asked)
    with _quietly(None):
        if unknown := next((name for name in asked.names if name not in manager.all_tasks), None):
            near = difflib.get_close_matches(unknown, manager.all_tasks, n=3)
            where = "" if asked.include is None else f", nor does {asked.include} have it"
            raise UsageError(
                f"lm-eval {importlib.metadata.version('lm_eval')} has no task {unknown!r}{where}",
                f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists them",
            )
        found: dict[str, Any] = {}
        for name in asked.names:
            try:
                found |= manager.load([name])["tasks"]
            except Exception as error:  # lm-eval passes on whatever loading YAML, code or data raises
                raise MxqError(
                    f"lm-eval's task {name} cannot be loaded: {_line(error)}",
                    "if its data is on the hub, load it once where there is a network (it is kept in HF_HOME); tasks "
                    "with data of your own: --lm-eval-include DIR",
                ) from None
    for name, task in found.items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UsageError(f"lm-eval's task {name} runs code that the model writes", "leave it out")
    return Tasks(asked, manager, any(task.OUTPUT_TYPE != "generate_until" for task in found.values()))


def check_asked(tasks: Asked, plan: Plan, servers: Servers, out: Path) -> None:
    """Raise UsageError where lm-eval or a plain server is missing, or ``out`` holds a task that was asked otherwise."""
    if any(importlib.util.find_spec(package) is None for package in ("lm_eval", "tenacity")):
        raise UsageError("--lm-eval needs lm-eval, which is not installed", "pip install 'mxq[lm-eval]'")
    for role in plan.targets:
        if servers.attached and Arm(role, "ar") not in servers.attached:
            raise UsageError(
                f"--lm-eval without a server that decodes plainly from {role}", f"give --base-url '{role} ar=URL'"
            )
        for name in tasks.names:
            _there(tasks, plan, role, name, out)


def ask_tasks(tasks: Tasks, plan: Plan, fleet: Fleet, out: Path) -> None:
    """Ask each target's plain server what ``out``, the directory of a run of ``plan``, does not hold yet.

    Raises:
        ServerError: a server does not start, is lost, or does not answer what is needed.
        MxqError: lm-eval fails.
        InterruptedRunError: Ctrl-C or SIGTERM.
    """
    with hold(out):
        try:
            for role in plan.targets:
                names = [name for name in tasks.names if not _there(tasks.asked, plan, role, name, out)]
                if names:
                    _ask_target(tasks, names, plan, role, fleet, out)
        except KeyboardInterrupt:
            raise InterruptedRunError(
                "interrupted while lm-eval asked; tasks that are finished are kept",
                "run the same command again to continue",
            ) from None


def _ask_target(tasks: Tasks, names: Sequence[str], plan: Plan, role: str, fleet: Fleet, out: Path) -> None:
    arm, directory = Arm(role, "ar"), out / DIRECTORY / role
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "lm-eval.log"
    if arm not in fleet.attached:
        note(f"starting a server for {arm.label}, for lm-eval")
    with fleet.open(arm, out, fleet.places[0], lambda: False) as server:
        length = asyncio.run(_longest(server.endpoint, plan.warm_ups[0][:8], tasks.likelihoods))
        model = served_model(
            server.endpoint,
            plan.targets[role].path,
            longest=length,
            concurrency=plan.concurrencies[-1],
            thinking=plan.settings.thinking,
        )
        for name in names:
            note(f"{arm.label}: asking {name} (what lm-eval prints is in {log})")
            begin = time.monotonic()
            found = _evaluated(tasks, name, model, server.endpoint, log)
            described = fleet.describe(arm, server, out, 0)
            facts = {"max_model_len": length, "seconds": round(time.monotonic() - begin, 1), "server": described}
            _write(_path(out, role, name), _definition(tasks.asked, plan, role, name), found, facts)


def _evaluated(tasks: Tasks, name: str, model: Any, endpoint: Endpoint, log: Path) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    try:
        with _quietly(log):
            found = simple_evaluate(
                model,
                tasks=[name],
                task_manager=tasks.manager,
                limit=tasks.asked.limit,
                apply_chat_template=tasks.asked.chat,
                fewshot_as_multiturn=tasks.asked.chat,
                log_samples=True,
            )
    except MxqError as error:
        raise type(error)(f"lm-eval's task {name}: {error.message}", error.hint) from None
    except Exception as error:  # tasks are anybody's code
        if endpoint.process is not None:
            endpoint.process.check()
        with log.open("a", encoding="utf-8") as stream:
            stream.write(f"{name}: {error!r}\n")
        raise MxqError(
            f"lm-eval's task {name} failed: {_line(error)}", f"see {log}; the same command continues the run"
        ) from None
    assert found is not None  # it is where there are several processes, and this is not the first
    return found


async def _longest(endpoint: Endpoint, ids: Sequence[int], likelihoods: bool) -> int:
    """Return how many tokens a server takes, once it is seen to answer as lm-eval needs it; raises ServerError."""
    async with connected(endpoint, Timeouts(answer_s=300.0)) as client:
        entries = (await client.get_json("/v1/models")).get("data")
        mine = [e for e in entries or () if isinstance(e, dict) and e.get("id") == endpoint.model]
        longest = mine[0].get("max_model_len") if mine else None
        if type(longest) is not int or longest < 2:
            raise ServerError(f"{endpoint.base_url} does not say how long a text may be (max_model_len)")
        if likelihoods:
            body = {"model": endpoint.model, "prompt": [list(ids)], "max_tokens": 1, "temperature": 0.0}
            said = await client.post_json("/v1/completions", body | {"logprobs": 1, "echo": True})
            if not _tells_likelihoods(said, len(ids)):
                raise ServerError(
                    f"{endpoint.base_url} does not say how likely the tokens of a prompt are (echo with logprobs)",
                    "vLLM does; tasks that only generate need it not",
                )
    return longest


def _tells_likelihoods(said: Mapping[str, Any], tokens: int) -> bool:
    try:
        (choice,) = said["choices"]
        first, *others = choice["logprobs"]["token_logprobs"]
        tops = choice["logprobs"]["top_logprobs"][1:]
        return (
            first is None
            and len(others) == len(tops) == tokens  # the token that is generated is one of them
            and all(-math.inf < value <= 1e-3 for value in others)
            and all(max(top.values()) <= 1e-3 for top in tops)
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def _manager(asked: Asked) -> Any:
    """Return lm-eval's list of tasks; that of the directory alone where it has them all.

    lm-eval reads 14,000 files for its own, in a quarter of a minute.
    """
    include = None if asked.include is None else str(asked.include)
    try:
        with _quietly(None):
            from lm_eval.tasks import TaskManager

            own = TaskManager(include_path=include, include_defaults=False)
        if set(asked.names) <= set(own.all_tasks):
            return own
        note("reading lm-eval's list of tasks")
        with _quietly(None):
            return TaskManager(include_path=include)
    except Exception as error:  # a YAML file can be anything
        raise UsageError(f"lm-eval cannot read its tasks: {_line(error)}", "is --lm-eval-include right?") from None


def _definition(asked: Asked, plan: Plan, role: str, name: str) -> dict[str, Any]:
    template = {"thinking": plan.settings.thinking, "sha256": plan.settings.template_sha256}
    return {
        "target": dict(plan.targets[role].fingerprint),
        "task": name,
        "limit": asked.limit,
        "chat_template": template if asked.chat else None,
        "lm_eval": importlib.metadata.version("lm_eval"),
    }


def _path(out: Path, role: str, name: str) -> Path:
    return out / DIRECTORY / role / re.sub(r"[^A-Za-z0-9._-]+", "-", name)


def _there(asked: Asked, plan: Plan, role: str, name: str, out: Path) -> bool:
    """Whether a run directory holds a task of a target; raises UsageError if it was asked otherwise."""
    path = _path(out, role, name) / "results.json"
    if not path.is_file():
        return False
    there, here = read_json(path).get("definition"), json.loads(json.dumps(_definition(asked, plan, role, name)))
    if there != here:
        unlike = [key for key in here if not isinstance(there, dict) or there.get(key) != here[key]]
        raise UsageError(
            f"{path.parent} was asked with another {unlike[0].replace('_', ' ')}",
            "use another run directory, or remove that one",
        )
    return True


def _write(path: Path, definition: Mapping[str, Any], found: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Write samples, then what seals them; lm-eval's numbers as it gives them."""
    from lm_eval.utils import handle_non_serializable

    try:
        path.mkdir(parents=True, exist_ok=True)
        sealed = {}
        for task, samples in found["samples"].items():
            name = f"samples_{re.sub(r'[^A-Za-z0-9._-]+', '-', task)}.jsonl"
            with files.atomic_write(path / name) as stream:
                for sample in samples:
                    line = json.dumps(sample, default=handle_non_serializable, ensure_ascii=False)
                    stream.write(line.encode(errors="backslashreplace").decode() + "\n")
            sealed[task] = {"file": name, "sha256": files.sha256_file(path / name)}
        kept = {key: value for key, value in found.items() if key not in _LEFT_OUT}
        kept = json.loads(json.dumps(kept, default=handle_non_serializable))
        about = {"format": FORMAT, "definition": definition, **facts, "samples": sealed, "lm_eval": _finite(kept)}
        files.write_json(path / "results.json", about)
    except OSError as error:
        raise MxqError(f"cannot write {path}: {error.strerror}", "make room and run the same command") from None


def _finite(value: Any) -> Any:
    """Return JSON values without NaN, which JSON has not: a standard error of one sample is one."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(error: BaseException) -> str:
    """Return the first line of what an error says."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return f"{text.strip().splitlines()[0][:300] if text.strip() else 'it does not say why'} ({type(error).__name__})"


@contextlib.contextmanager
def _quietly(log: Path | None) -> Iterator[None]:
    """Let lm-eval print and log into a file, or nowhere."""
    logger = logging.getLogger("lm_eval")
    kept = logger.level, logger.propagate
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        file: Any = stack.enter_context(Path("/dev/null" if log is None else log).open("a", encoding="utf-8"))
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        stack.enter_context(contextlib.redirect_stdout(file))
        stack.enter_context(contextlib.redirect_stderr(file))
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.level, logger.propagate = kept
