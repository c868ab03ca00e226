"""A GPU as the cost model sees it: rates of its data sheet, the share of them that is reached, and overheads.

``recipes/hardware/NAME.yaml`` holds one; every constant has a value and its source. :func:`load` also takes the path of
a file of your own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mxq.errors import UsageError

FORMAT = 1
SHEET = {
    "memory_gib": 2.0**30,
    "bandwidth_tb_s": 1e12,
    "matrix_bf16_tflops": 1e12,
    "matrix_mxfp4_tflops": 1e12,
    "bandwidth_share": 1.0,
    "matrix_share": 1.0,
    "packed_overlap": 1.0,
    "prompt_passes": 1.0,
}
"""Constants that are looked up or measured by themselves, with their unit in bytes, operations and seconds."""
OVERHEADS = dict.fromkeys(("layer_us", "experts_us", "draft_us", "scan_us"), 1e-6) | dict.fromkeys(
    ("host_plain_ms", "host_ms", "host_draft_ms", "prompt_ms"), 1e-3
)
SHARES = {"packed_share": 1.0, "snapshot_share": 1.0}
FITTED = OVERHEADS | SHARES
"""Constants that are fitted on measured cells, with their unit in seconds."""
_UNSAID = {"packed_overlap": 1.0, "prompt_passes": 1.0} | dict.fromkeys(
    ("experts_us", "host_plain_ms", "host_ms", "host_draft_ms"), 0.0
)
"""Values of constants that a file does not say."""
_MAY_LACK = {"matrix_mxfp4_tflops", *_UNSAID}
_MAY_BE_0 = {*OVERHEADS, "packed_overlap"}
_SHARES = {"bandwidth_share", "matrix_share", "packed_overlap", *SHARES}


@dataclass(frozen=True)
class Machine:
    """One GPU, in bytes, operations and seconds.

    Attributes:
        name: of the file.
        gpu: what it is called.
        memory: bytes of it.
        bandwidth: bytes per second that large reads reach: of the data sheet, times ``bandwidth_share``.
        bf16: operations per second that large matrix products reach: of the data sheet, times ``matrix_share``.
        mxfp4: the same of MXFP4 weights with what activations the engine gives them; None without a kernel.
        packed_share: packed weights are read at this share of ``bandwidth``.
        packed_overlap: share of the shorter of reading packed weights and multiplying them that passes meanwhile; 1 if
            the file does not say.
        snapshot_share: so are a gated DeltaNet's states behind each token of a verify pass written.
        layer_s: of a layer in a pass, beyond bytes and operations: launches, small kernels, waiting between them.
        experts_s: more of a layer with experts: choosing them, sorting tokens, adding up; 0 if the file does not say.
        draft_s: of a drafter's pass: sampling, and what the engine does between passes.
        scan_s: of a token in one gated DeltaNet of a verify pass, since tokens wait for each other there.
        host_plain_s: what a step of plain decoding takes at least, however little the GPU has to do, since the engine's
            own process prepares it; 0 if the file does not say.
        host_s: the same of a step with drafts, whose drafter makes one pass; 0 if the file does not say.
        host_draft_s: more of it for each of the drafter's passes behind the first; 0 if the file does not say.
        prompt_s: of a pass over prompts, which runs outside of graphs: all that is no byte or operation.
        prompt_passes: that prompts take which come at once, if there are so many; 1 if the file does not say.
        sources: constant -> where its value is from.
    """

    name: str
    gpu: str
    memory: float
    bandwidth: float
    bf16: float
    mxfp4: float | None
    packed_share: float
    packed_overlap: float
    snapshot_share: float
    layer_s: float
    experts_s: float
    draft_s: float
    scan_s: float
    host_plain_s: float
    host_s: float
    host_draft_s: float
    prompt_s: float
    prompt_passes: float
    sources: dict[str, str]

    def host(self, passes: int) -> float:
        """Return the seconds that the host takes for a step in which the drafter makes so many passes."""
        return self.host_s + (passes - 1) * self.host_draft_s if passes else self.host_plain_s

    @classmethod
    def of(cls, name: str, gpu: str, constants: dict[str, float], sources: dict[str, str]) -> "Machine":
        """Make one of a file's constants, in the units that their names say."""
        said = _UNSAID | constants
        value = {key: said[key] * unit for key, unit in (SHEET | FITTED).items() if key in said}
        matrix = value["matrix_share"]
        packed = value.get("matrix_mxfp4_tflops")
        return cls(
            name=name,
            gpu=gpu,
            memory=value["memory_gib"],
            bandwidth=value["bandwidth_tb_s"] * value["bandwidth_share"],
            bf16=value["matrix_bf16_tflops"] * matrix,
            mxfp4=None if packed is None else packed * matrix,
            packed_share=value["packed_share"],
            packed_overlap=value["packed_overlap"],
            snapshot_share=value["snapshot_share"],
            layer_s=value["layer_us"],
            experts_s=value["experts_us"],
            draft_s=value["draft_us"],
            scan_s=value["scan_us"],
            host_plain_s=value["host_plain_ms"],
            host_s=value["host_ms"],
            host_draft_s=value["host_draft_ms"],
            prompt_s=value["prompt_ms"],
            prompt_passes=value["prompt_passes"],
            sources=sources,
        )


def directory() -> Path:
    """Return where the files that come with mxq are: in the installed package, or at a checkout's top."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    return (installed if installed.is_dir() else package.parent / "recipes") / "hardware"


def names() -> list[str]:
    """Return the names of the hardware that mxq knows."""
    return sorted(file.stem for file in directory().glob("*.yaml"))


def load(spec: str) -> Machine:
    """Return the hardware of a name (see :func:`names`) or of a YAML file.

    Raises:
        UsageError: there is none, or the file is of another version, or a constant is missing or impossible.
    """
    file = Path(spec)
    if not (file.suffix in (".yaml", ".yml") or "/" in spec):
        if spec not in names():
            raise UsageError(
                f"there is no hardware {spec!r}", f"use one of {', '.join(names())}, or the path of a YAML file"
            )
        file = directory() / f"{spec}.yaml"
    gpu, constants, sources = read(file)
    return Machine.of(file.stem, gpu, constants, sources)


def read(file: Path) -> tuple[str, dict[str, float], dict[str, str]]:
    """Return a file's GPU, its constants, and their sources; raises UsageError as :func:`load`."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        hint = f"use one of {', '.join(names())}, or the path of a YAML file"
        raise UsageError(f"hardware {file} cannot be read: {error.strerror}", hint) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # dates and numbers that there are not, deep nesting
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = "" if line is None else f", line {line + 1}"
        raise UsageError(f"hardware {file}{where} is not YAML", "write it like recipes/hardware/h200.yaml") from None
    found = content.get("format") if isinstance(content, dict) else None
    if not isinstance(content, dict) or type(found) is not int or found != FORMAT:
        raise UsageError(f"hardware {file} has format {found!r}", f"this mxq reads format {FORMAT}")
    entries = content.get("constants")
    gpu = content.get("gpu")
    if not isinstance(entries, dict) or not isinstance(gpu, str) or not gpu.isprintable():
        raise UsageError(f"hardware {file} has no gpu or no constants", "write it like recipes/hardware/h200.yaml")
    known = (SHEET | FITTED).keys()
    wrong = [key for key in entries if key not in known] + [
        key for key in known if key not in entries and key not in _MAY_LACK
    ]
    if wrong:
        problem = "does not exist" if wrong[0] in entries else "is missing"
        raise UsageError(f"hardware {file}: the constant {wrong[0]} {problem}", f"it has {', '.join(known)}")
    return (
        gpu,
        {key: _constant(file, key, entry) for key, entry in entries.items()},
        {key: str(entry.get("source", "not said")) for key, entry in entries.items()},
    )


def _constant(file: Path, key: str, entry: Any) -> float:
    value = entry.get("value") if isinstance(entry, dict) else None
    most = 1.0 if key in _SHARES else 1e9
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= most
        or (value == 0 and key not in _MAY_BE_0)
    ):
        said = "a number that can be"
        if key in _SHARES:
            said = "a share from 0 to 1" if key in _MAY_BE_0 else "a share above 0, of at most 1"
        hint = "give it as {value: ..., source: ...}, the value like 0.5 or 1.0e+9"
        raise UsageError(f"hardware {file}: {key} is {value!r:.40}, not {said}", hint)
    return float(value)
