"""The servers of an evaluation, one for each arm: how they are started, or where they are; what is known of them."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxq.checkpoint import Checkpoint
from mxq.engines import builds, servable
from mxq.engines.client import Endpoint, root_of
from mxq.engines.launch import HARDWARE, Launch, Served, launch
from mxq.engines.process import ServerError, free_port, no_vllm, vllm_program
from mxq.engines.server import attached, serving
from mxq.engines.vllm_log import LogFacts, lines_of, read_log
from mxq.errors import UsageError
from mxq.evaluate import caveats
from mxq.evaluate.fingerprint import fingerprint
from mxq.evaluate.matrix import Arm, Plan
from mxq.hardware.environment import gpus
from mxq.progress import note

_TENSOR_PARALLEL = "tensor-parallel-size"
_TRIES = 3
"""To listen on a free port: another process may take it before the server does."""


@dataclass(frozen=True)
class Servers:
    """Where arms are measured.

    Attributes:
        hardware: one of :data:`mxq.engines.launch.HARDWARE`.
        gpus: ids of GPUs, on each of which a server runs, or on several of them by tensor parallelism; () leaves it to
            vLLM, with one server at a time.
        at_once: so many servers stay open in one place, idle while another one is measured.
        attached: addresses of servers that run already. If there are any, there are no others.
        served_as: the name that those serve the model under.
    """

    hardware: str = "cpu"
    gpus: tuple[str, ...] = ()
    at_once: int = 1
    attached: Mapping[Arm, str] = field(default_factory=dict)
    served_as: str | None = None


@dataclass(frozen=True)
class Server:
    """One that is open; ``log`` is relative to the run directory, None for one that was not started here."""

    endpoint: Endpoint
    launch: Launch | None = None
    log: Path | None = None
    gpus: tuple[str, ...] = ()


class Fleet:
    """Starts servers and attaches to them. Everything that can be known before is checked when it is made.

    Raises UsageError or MxqError where vLLM is missing, refuses a model or a drafter, or an address is none.
    """

    def __init__(self, plan: Plan, servers: Servers) -> None:
        self._plan, self._servers = plan, servers
        self._parallel, self._options = _tensor_parallel(plan.settings.engine_args)
        self.attached: dict[Arm, Endpoint] = {}
        self._kinds: dict[str, servable.Kind] = {}
        self.version: str | None = None
        checkpoints = {role: Checkpoint.open(model.path) for role, model in plan.targets.items()}
        self._simulated = {role for role, target in checkpoints.items() if caveats.is_simulation(target)}
        self.places = _places(servers, self._parallel)
        if servers.attached:
            self.attached = {arm: self._attach(arm, url) for arm, url in servers.attached.items()}
            _check_apart(self.attached)
        else:
            self._check(checkpoints)

    def facts(self) -> dict[str, Any]:
        """Return what a run is continued in only if it is the same."""
        if self.attached:
            return {"name": "vllm", "servers": {arm.label: end.version for arm, end in self.attached.items()}}
        hardware = self._servers.hardware
        return {
            "name": "vllm",
            "hardware": hardware,
            "build": builds.BUILDS[hardware].distribution,
            "version": self.version,
            "gpus": [gpu.name for gpu in gpus()] if HARDWARE[hardware].visible else [],
        }

    @contextlib.contextmanager
    def open(self, arm: Arm, directory: Path, gpus: tuple[str, ...], given_up: Callable[[], bool]) -> Iterator[Server]:
        """Start an arm's server, and end it with the block; or give the one that is there.

        Args:
            arm: whose.
            directory: of the run, for the log.
            gpus: on which.
            given_up: see :func:`mxq.engines.server.serving`.

        Raises:
            ServerError: it does not start.
        """
        if arm in self.attached:
            yield Server(self.attached[arm])
            return
        name = arm.label.replace(" ", "-") + ("-gpu" + "-".join(gpus) if gpus else "")
        log = Path("servers") / f"{name}.log"
        (directory / log).parent.mkdir(exist_ok=True)
        model = str(self._plan.targets[arm.target].path)
        ready_s = builds.BUILDS[self._servers.hardware].ready_s
        with contextlib.ExitStack() as stack:
            for left in reversed(range(_TRIES)):
                made = self._launch(arm, gpus)
                try:
                    server = serving(made, model, directory / log, ready_s=ready_s, given_up=given_up)
                    endpoint = stack.enter_context(server)
                    break
                except (UsageError, ServerError) as error:
                    if "is taken" not in error.message or not left:
                        raise
            yield Server(endpoint, made, log, gpus)

    def describe(self, arm: Arm, server: Server, directory: Path, beside: int) -> dict[str, Any]:
        """Return what is to be noted of the server of a cell, ``beside`` others."""
        if server.launch is None or server.log is None:
            mxfp4 = self._mxfp4(arm, None)
            return {"url": server.endpoint.base_url, "version": server.endpoint.version, "mxfp4": mxfp4}
        with (directory / server.log).open("rb") as stream:
            log = read_log(lines_of(stream))
        return {
            "build": builds.BUILDS[self._servers.hardware].distribution,
            "version": server.endpoint.version or log.version,
            "command": list(server.launch.argv),
            "env": dict(server.launch.env),
            "started": log.starts,
            "gpu": ",".join(server.gpus) or None,
            "gpus_beside": beside,
            "log": str(server.log),
            "kernels": {
                "linear": list(log.linear_kernels),
                "moe": [*log.moe_backends, *log.moe_experts],
                "attention": list(log.attention_backends),
                "gdn": [*log.gdn_kernels, *log.gdn_spec_kernels],
            },
            "mxfp4": self._mxfp4(arm, log),
            "remarks": list(log.remarks),
        }

    def _mxfp4(self, arm: Arm, log: LogFacts | None) -> str | None:
        """Say how MXFP4 is computed; "unknown" where no log names a kernel, so that nobody takes it for native."""
        if arm.target != "mxfp4":
            return None
        if arm.target in self._simulated or (log is not None and log.emulated):
            return "emulated"
        named = log is not None and (log.linear_kernels or log.moe_backends or log.moe_experts)
        return "native" if named else "unknown"

    def _attach(self, arm: Arm, url: str) -> Endpoint:
        target = self._plan.targets[arm.target]
        names = [self._servers.served_as] if self._servers.served_as else [target.spec, str(target.path)]
        root_of(url)  # says how an address is written
        try:
            endpoint = None
            for name in names[:-1]:
                with contextlib.suppress(UsageError):
                    endpoint = attached(url, name)
            endpoint = endpoint or attached(url, names[-1])
        except UsageError as error:
            raise UsageError(f"{arm.label}: {error.message}", "give --served-as NAME: what it serves") from None
        # A name can be anything. Where the server says what it was started with, and that is here, it is looked at.
        root = Path(endpoint.root or "")
        if root.is_absolute() and (root / "config.json").is_file() and fingerprint(root) != target.fingerprint:
            raise UsageError(
                f"{arm.label}: {url} serves what is in {root}, which is not {target.spec}",
                "give the arm the server that has its target",
            )
        return endpoint

    def _check(self, checkpoints: Mapping[str, Checkpoint]) -> None:
        plan, program = self._plan, vllm_program(self._servers.hardware)
        self.version = None if program is None else builds.installed(self._servers.hardware, program)
        self._kinds = {role: servable.kind_of(target) for role, target in checkpoints.items()}
        drafter = Checkpoint.open(plan.drafter.path) if plan.drafter else None
        said: set[str] = set()
        for arm in plan.arms:
            kind, target, k = self._kinds[arm.target], checkpoints[arm.target], arm.num_speculative_tokens
            needed = drafter if arm.method == "dflash" else None
            servable.check(target, kind, self._servers.hardware, arm.method, k, needed, self._parallel)
            argv = self._launch(arm, ()).argv
            for warning in servable.warnings(kind, self._servers.hardware, arm.method, argv):
                if warning not in said:
                    note(f"warning: {arm.label}: {warning}")
                said.add(warning)
        if program is None:
            raise no_vllm(self._servers.hardware, "attach to a server: --base-url")

    def _launch(self, arm: Arm, gpus: tuple[str, ...]) -> Launch:
        plan = self._plan
        drafter = Served(str(plan.drafter.path)) if arm.method == "dflash" and plan.drafter else None
        env = dict(variable.split("=", 1) for variable in plan.settings.engine_env)
        visible = HARDWARE[self._servers.hardware].visible
        if gpus and visible:
            env[visible] = ",".join(gpus)
        made = launch(
            self._servers.hardware,
            Served(str(plan.targets[arm.target].path)),
            arm.method,
            arm.num_speculative_tokens,
            drafter,
            experts_on_aiter=self._kinds[arm.target].experts_on_aiter,
            tensor_parallel_size=self._parallel,
            port=free_port(),
            engine_args=self._options,
            env=env,
        )
        return builds.measurable(made, self.version)


def _check_apart(attached: Mapping[Arm, Endpoint]) -> None:
    """Raise UsageError where two arms have one server, or two targets have servers of one model."""
    for (arm, one), (other, two) in itertools.combinations(attached.items(), 2):
        if one.base_url == two.base_url:
            raise UsageError(
                f"{arm.label} and {other.label} have one server, {one.base_url}", "it is one arm: give each its own"
            )
        if arm.target != other.target and one.root is not None and one.root == two.root:
            raise UsageError(
                f"{arm.label} and {other.label} are on servers of one model, {one.root}",
                "give each arm the server that has its target",
            )


def _tensor_parallel(engine_args: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """Return the tensor parallel size, which is more than an option of vLLM's here, and the other options."""
    size, others = 1, []
    for argument in engine_args:
        name, _, value = argument.removeprefix("--").partition("=")
        if name.replace("_", "-") != _TENSOR_PARALLEL:
            others.append(argument)
        elif value.isdecimal() and value.isascii() and 0 < len(value) < 5 and int(value):
            size = int(value)
        else:
            raise UsageError(f"--engine-arg {argument}", f"write {_TENSOR_PARALLEL}=2")
    return size, tuple(others)


def _places(servers: Servers, parallel: int) -> list[tuple[str, ...]]:
    """Return the GPUs of each place where a server can run; one place without a name if none are given."""
    if not servers.gpus or servers.attached:
        return [()]
    if HARDWARE[servers.hardware].visible is None:
        raise UsageError(f"--gpus with --hardware {servers.hardware}", "leave it out")
    if len(servers.gpus) % parallel:
        raise UsageError(
            f"{len(servers.gpus)} GPUs for servers of {parallel}", f"give a multiple of {_TENSOR_PARALLEL} to --gpus"
        )
    return [servers.gpus[i : i + parallel] for i in range(0, len(servers.gpus), parallel)]
