"""Measuring quality: both targets over the bf16 target's own answers, and over texts that the user gave."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from mxq import files
from mxq.checkpoint import Checkpoint
from mxq.decode.divergence import compare_on
from mxq.errors import InterruptedRunError, MxqError, UsageError
from mxq.evaluate import Request
from mxq.evaluate.after import ROLES, Both
from mxq.evaluate.directory import hold
from mxq.evaluate.matrix import TokenizedWorkload
from mxq.models.qwen35 import text_config
from mxq.progress import note, progress
from mxq.quality.record import Kind, Read, Recorded, define, path_of, read, write
from mxq.quality.text import WINDOW, Windows, read_windows


@dataclass(frozen=True)
class Judging:
    """What ``--quality`` adds to a run: its answers, and ``texts`` in windows of ``window`` tokens."""

    option: ClassVar[str] = "--quality"
    texts: tuple[Path, ...] = ()
    window: int = WINDOW

    def refuse(self, request: Request) -> None:
        """Raise UsageError for a window that cannot be, and for two texts of one name."""
        if self.window < 2:
            raise UsageError(
                f"--quality-window {self.window}", "it is at least 2: the first token of a window is not asked about"
            )
        names = [path.stem for path in self.texts]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"two texts are called {name!r}", "give files different names")

    def look(self, both: Both) -> None:
        """Raise UsageError for a text that cannot be read, and for what a file of the run was made of otherwise."""
        if self.texts:
            path = both.plan.targets["bf16"].path
            longest = text_config(Checkpoint.open(path).config).get("max_position_embeddings", self.window)
            if self.window > longest:
                raise UsageError(
                    f"--quality-window {self.window} is longer than the model's {longest} positions",
                    "give a shorter one",
                )
        self._pending(both)

    def make(self, both: Both) -> None:
        """Write what is not measured yet; files that are there stay, and the same call makes the others."""
        with hold(both.out):
            pending = self._pending(both)
            if not pending:
                return
            total = sum(part.size for part in pending)
            done = 0
            begun = time.perf_counter()
            try:
                with progress("measuring quality", total, "answers and windows") as advance:
                    for part in pending:
                        started, found = time.perf_counter(), []
                        for one in part.measured(both):
                            found.append(one)
                            advance(1, f"measuring quality, {part.name}")
                        made = {
                            "command": files.command_line(),
                            "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
                            "seconds": round(time.perf_counter() - started, 3),
                        }
                        write(both.out, Recorded(part.kind, part.name, part.definition, made, tuple(found)))
                        done += 1
            except KeyboardInterrupt:
                raise InterruptedRunError(
                    f"interrupted; {done} of {len(pending)} parts of the quality were measured",
                    "run the same command again to continue",
                ) from None
            seconds = time.perf_counter() - begun
            note(f"quality: {total} answers and windows in {seconds:.1f} s, {seconds / total:.2f} s each")

    def _pending(self, both: Both) -> "list[_Part]":
        """Return what is to be made: the answers to each workload, and each text."""
        definition = json.loads(json.dumps(both.plan.definition()))  # as run.json gives it back
        by_name = {facts["name"]: facts for facts in definition["workloads"]}
        parts = [_answers(definition, by_name[one.workload.name], one) for one in both.plan.workloads]
        parts += [_text(definition, read_windows(path, self.window, both.template)) for path in self.texts]
        pending = []
        for part in parts:
            path = path_of(both.out, part.kind, part.name)
            if not path.exists():
                pending.append(part)
            elif (there := read(path, definition)).window not in (None, self.window):
                raise UsageError(
                    f"{path} was made with --quality-window {there.window}, not {self.window}",
                    "give that, or remove the file",
                )
            elif there.definition != part.definition:
                raise UsageError(f"{path} was made of another text", "give the file another name, or remove that one")
        return pending


@dataclass(frozen=True)
class _Part:
    """One file to be made."""

    kind: Kind
    name: str
    definition: Mapping[str, Any]
    size: int
    measured: Callable[[Both], Iterator[Read]]


def _answers(run: Mapping[str, Any], facts: Mapping[str, Any], workload: TokenizedWorkload) -> _Part:
    def measured(both: Both) -> Iterator[Read]:
        first: dict[tuple[tuple[str, str], ...], str] = {}
        cluster = ""
        for number, prompt in enumerate(workload.workload.prompts):
            if prompt.turn == 1:  # prompts that say the same are one
                cluster = first.setdefault(prompt.messages, prompt.id)
            ids, answer = both.text(workload, number)
            yield _read(both, prompt.id, cluster, (*ids, *answer), len(ids))

    name = workload.workload.name
    return _Part("answers", name, define(run, "answers", facts), len(workload.token_ids), measured)


def _text(run: Mapping[str, Any], windows: Windows) -> _Part:
    def measured(both: Both) -> Iterator[Read]:
        for one in windows.windows:
            yield _read(both, one.id, one.cluster, one.ids, 1)

    about = {name: getattr(windows, name) for name in ("name", "sha256", "texts", "window")}
    return _Part("text", windows.name, define(run, "text", about), len(windows.windows), measured)


def _read(both: Both, name: str, cluster: str, ids: tuple[int, ...], begin: int) -> Read:
    found = compare_on(both.targets, ids, begin)
    for role, nll in zip(ROLES, (found.first_nll, found.second_nll), strict=True):
        if not nll.isfinite().all():
            raise _not_finite(both.plan.targets[role].spec, name)
    if not found.divergence.isfinite().all():
        raise _not_finite(both.plan.targets["mxfp4"].spec, name)
    return Read(
        name,
        cluster,
        tuple(found.divergence.tolist()),
        tuple(found.first_nll.tolist()),
        tuple(found.second_nll.tolist()),
        tuple((~found.same).nonzero()[:, 0].tolist()),
    )


def _not_finite(spec: str, name: str) -> MxqError:
    return MxqError(
        f"{spec} gives logits that are not finite on {name}",
        "`mxq verify` looks at its weights; or try --dtype float32",
    )
