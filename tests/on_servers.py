"""Evaluations on stand-ins of vLLM's servers, with real chat templates and tokenizers of random models."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_vllm
import pytest

from mxq.engines import builds
from mxq.engines.launch import HARDWARE
from mxq.evaluate import Request, Run
from mxq.evaluate.fleet import Servers
from mxq.evaluate.servers import measure_on_servers

SUMS: list[dict[str, Any]] = [
    {"id": f"sum-{number}", "prompt": f"Ann has {number} apples and buys 4 more. How many?"} for number in range(6)
]
TALKS: list[dict[str, Any]] = [
    {"id": f"talk-{number}", "turns": [f"Tell me story {number}.", "Shorter."]} for number in range(3)
]


def pretend() -> None:
    """Let ``--hardware h200`` of this process be the stand-in, as vLLM 0.32."""
    HARDWARE["h200"] = replace(HARDWARE["h200"], command=(fake_vllm.__file__, "serve"))
    builds.installed = lambda hardware, program: "0.32.0"


class Fakes:
    """What the stand-ins do, and what they saw."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.directory, self._patch = directory, patch
        for name in ("h200", "mi355x"):
            patch.setitem(HARDWARE, name, replace(HARDWARE[name], command=(fake_vllm.__file__, "serve")))
        patch.setattr(builds, "installed", lambda hardware, program: "0.32.0")
        patch.setattr("mxq.engines.client._LOOK_S", 0.05)
        patch.setattr("mxq.evaluate.closed_loop._BACKOFF_S", 0.01)
        patch.setattr("mxq.engines.metrics._SETTLING_S", 0.02)
        patch.setenv("FAKE_VLLM_DIR", str(directory))
        patch.setenv("FAKE_VLLM_PAUSE", "0.001")
        self.do("")

    def do(self, how: str, log: str = "") -> None:
        """Say how servers behave that are started from now on; starts and requests are counted anew."""
        self._patch.setenv("FAKE_VLLM", f"answers {how}")
        self._patch.setenv("FAKE_VLLM_LOG", log)
        for name in ("starts", "requests.jsonl", "asked.jsonl"):
            (self.directory / name).unlink(missing_ok=True)

    def version(self, version: str) -> None:
        """Let the installed vLLM be another one."""
        self._patch.setattr(builds, "installed", lambda hardware, program: version)

    @property
    def starts(self) -> list[str]:
        """The command line of each start."""
        path = self.directory / "starts"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Every request: start, prompt, seed, limit, and how many others were running."""
        return [json.loads(line) for line in (self.directory / "requests.jsonl").read_text().splitlines()]


def workloads(directory: Path) -> list[str]:
    """Write a workload of single prompts and one of conversations."""
    found = []
    sets: dict[str, list[dict[str, Any]]] = {"sums": SUMS, "talks": TALKS}
    for name, lines in sets.items():
        path = directory / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        found.append(str(path))
    return found


def request(target: Path, workloads: Sequence[str], **more: Any) -> Request:
    """Return a plain arm and one of MTP, at one and at three requests in flight."""
    asked: dict[str, Any] = {"methods": ["mtp"], "budgets": [3], "max_tokens": 24, "concurrencies": [3, 1]}
    asked |= {"device": "h200", "workloads": workloads, "targets": {"bf16": str(target)}}
    return Request(**(asked | more))


def measure(asked: Request, out: Path, **servers: Any) -> Run:
    """Measure on stand-ins."""
    return measure_on_servers(asked, Servers(**({"hardware": "h200"} | servers)), out)


def answers(run: Run) -> Mapping[Any, Any]:
    """Return what was measured, without the times."""
    return {
        (cell.arm, cell.workload, cell.concurrency, cell.repeat): [
            (r.prompt_id, r.token_ids, r.accepted, r.prompt_sha256, r.text) for r in cell.records
        ]
        for cell in run.cells
        if cell.finished
    }


def environment() -> dict[str, str]:
    """Return variables for a process of its own that imports this file."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
