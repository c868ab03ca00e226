"""Records: one JSON line per request, appended as it completes or written all together, and never changed after.

A line is whole when it ends in a newline. A process that dies while writing leaves at most one line that is not, at
the end; it is dropped when the file is opened to continue, and that request is made again.
"""

import errno
import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mxq import files
from mxq.engines import Completion
from mxq.errors import MxqError
from mxq.stats import Passes
from mxq.stats.acceptance import check_passes

FINISH_REASONS = ("stop", "length")
_LONGEST_S = 1e12
"""No time is longer, the clock's included. JSON has integers of any length, and sums of floats may be infinite."""
_DIGITS = 40
_LONGEST_REASON = 200
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class Record:
    """One request. Times in seconds; ``started_at`` in seconds since the epoch, to look for drift afterwards.

    ``accepted`` and ``drafted``: per verify pass, see :mod:`mxq.stats.acceptance`; both None where a server does not
    say. The first output token comes from the prompt's own pass, so output_tokens = 1 + sum(accepted + 1), less what
    the last pass gave beyond the end. A server also makes passes without drafts: no verify passes, a token each.

    ``arrivals_s``: when each piece with tokens came, in seconds since the request was sent; None in-process, where
    nobody waits for pieces.

    ``turn`` is the request's place in its conversation. A later turn was sent behind what the arm itself had answered:
    ``prompt_sha256`` is the hash of its token ids, so that arms which were asked the same can be told.
    """

    prompt_id: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    ttft_s: float
    duration_s: float
    target_s: float | None
    draft_s: float | None
    started_at: float
    accepted: tuple[int, ...] | None
    drafted: tuple[int, ...] | None
    text_sha256: str
    text: str
    token_ids: tuple[int, ...]
    turn: int = 1
    prompt_sha256: str | None = None
    arrivals_s: tuple[float, ...] | None = None

    @classmethod
    def of(
        cls,
        prompt_id: str,
        prompt_tokens: int,
        completion: Completion,
        text: str,
        started_at: float,
        turn: int = 1,
        prompt_sha256: str | None = None,
    ) -> "Record":
        """Return the record of a completed request."""
        return cls(
            prompt_id=prompt_id,
            prompt_tokens=prompt_tokens,
            output_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            ttft_s=completion.ttft_s,
            duration_s=completion.duration_s,
            target_s=completion.target_s,
            draft_s=completion.draft_s,
            started_at=round(started_at, 3),
            accepted=completion.accepted,
            drafted=completion.drafted,
            text_sha256=files.sha256_text(text),
            text=text,
            token_ids=completion.token_ids,
            turn=turn,
            prompt_sha256=prompt_sha256,
            arrivals_s=completion.arrivals_s,
        )

    @property
    def passes(self) -> Passes | None:
        """Return the verify passes as statistics take them; None where they are not known one by one.

        Where an accepted draft was the end of the text, no draft after it could be accepted: that pass is censored
        there, not failed.
        """
        if self.accepted is None or self.drafted is None:
            return None
        if self.accepted and self.finish_reason == "stop" and _committed(self.accepted) > self.output_tokens:
            return Passes(self.accepted, (*self.drafted[:-1], self.accepted[-1]))
        return Passes(self.accepted, self.drafted)

    def check(self, num_speculative_tokens: int) -> None:
        """Raise ValueError unless the counts are possible and account for every output token."""
        self._check_kinds()
        if self.output_tokens != len(self.token_ids) or self.output_tokens < 1:
            raise ValueError(f"{self.output_tokens} output tokens but {len(self.token_ids)} token ids")
        if type(self.turn) is not int or self.turn < 1 or (self.turn > 1) != isinstance(self.prompt_sha256, str):
            raise ValueError(f"turn {self.turn} with prompt hash {self.prompt_sha256}")
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish reason {self.finish_reason!r}")
        if self.text_sha256 != files.sha256_text(self.text):
            raise ValueError("the text does not have the hash beside it")
        if not (0 <= self.ttft_s <= self.duration_s and 0 < self.duration_s < math.inf):
            raise ValueError(f"first token after {self.ttft_s} s of {self.duration_s} s")
        self._check_arrivals()
        self._check_passes(num_speculative_tokens)

    def _check_kinds(self) -> None:
        """Check what all that reads records counts on, whatever a file says."""
        for name in ("prompt_id", "text", "text_sha256"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is no text")
        for name in ("prompt_tokens", "output_tokens"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}")
        for name in ("ttft_s", "duration_s", "started_at", "target_s", "draft_s"):
            value = getattr(self, name)
            if value is None and name in ("target_s", "draft_s"):
                continue
            if type(value) not in (int, float) or not 0 <= value <= _LONGEST_S:
                raise ValueError(f"{name} is {repr(value)[:_DIGITS]}")

    def _check_arrivals(self) -> None:
        at = self.arrivals_s
        if at is None:
            return
        ordered = all(a <= b for a, b in itertools.pairwise((0.0, *at, self.duration_s)))
        if not ordered or not 0 < len(at) <= self.output_tokens or at[0] != self.ttft_s:
            raise ValueError(f"{len(at)} pieces of {self.output_tokens} tokens came at impossible times")

    def _check_passes(self, num_speculative_tokens: int) -> None:
        if self.accepted is None or self.drafted is None:
            if self.accepted is not self.drafted or not num_speculative_tokens or self.arrivals_s is None:
                raise ValueError("the verify passes are missing")
            return
        check_passes(Passes(self.accepted, self.drafted), num_speculative_tokens)
        if not num_speculative_tokens:
            if self.accepted:
                raise ValueError("plain decoding has no verify passes")
            return
        committed = _committed(self.accepted)
        beyond_end = self.accepted[-1] if self.accepted else 0
        most = committed if self.arrivals_s is None else math.inf  # a server's passes without drafts are not listed
        if not committed - beyond_end <= self.output_tokens <= most:
            raise ValueError(f"{self.output_tokens} output tokens but the passes committed {committed}")


class RecordFile:
    """A cell's records, open for appending. Dropping a torn last line is the only change ever made to what is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        with os.fdopen(os.dup(self._fd), "rb") as stream:
            content = stream.read()
        os.ftruncate(self._fd, content.rfind(b"\n") + 1)

    def append(self, record: Record) -> None:
        """Write one line and wait until it is on disk; a line that could not be written whole is taken back."""
        line = _line(record)
        size = os.fstat(self._fd).st_size
        try:
            view = memoryview(line)
            while view:
                view = view[os.write(self._fd, view) :]
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, size)
            raise cannot_write(self._path, error) from None

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def cannot_write(path: Path, error: OSError) -> MxqError:
    """Return what to say where a file of a run could not be written."""
    do = "make room" if error.errno in _NO_ROOM else "make it writable"
    return MxqError(f"cannot write {path}: {error.strerror}", f"{do} and run the same command to continue")


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write all records of a cell at once; the file is there whole or not at all. Raises MxqError."""
    try:
        with files.atomic_write(path, "wb") as stream:
            for record in records:
                stream.write(_line(record))
    except OSError as error:
        raise cannot_write(path, error) from None


def conversations(records: Sequence[Record]) -> list[str]:
    """Return for each record the prompt that its conversation began with, whose own record may be lost."""
    return [r.prompt_id.removesuffix(f", turn {r.turn}") if r.turn > 1 else r.prompt_id for r in records]


def read_records(path: Path, num_speculative_tokens: int) -> list[Record]:
    """Return the whole lines of a record file, checked; [] when there is none. For what goes on writing to it.

    Raises MxqError naming file and line for one that is not a possible record, or repeats a prompt.
    """
    records: list[Record] = []
    for found in _read(path, num_speculative_tokens):
        if isinstance(found, str):
            raise MxqError(found, "the file was changed after it was written")
        records.append(found)
    return records


def read_what_is_left(path: Path, num_speculative_tokens: int) -> tuple[list[Record], list[str]]:
    """Return the possible records of a file, and of each other line what is wrong with it. For analysis."""
    found = list(_read(path, num_speculative_tokens))
    return [one for one in found if isinstance(one, Record)], [one for one in found if isinstance(one, str)]


def _read(path: Path, num_speculative_tokens: int) -> Iterator[Record | str]:
    """Yield for each whole line the record, or the place and what is wrong there."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        try:
            record = _parse(json.loads(line))
            record.check(num_speculative_tokens)
            if record.prompt_id in seen:
                raise ValueError(f"prompt {record.prompt_id!r} is there already")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            yield f"{path}, line {number}: not a possible record ({_reason(error)})"
            continue
        seen.add(record.prompt_id)
        yield record


def _reason(error: Exception) -> str:
    missing = isinstance(error, KeyError)
    said = f"{error.args[0]} is missing" if missing else str(error).removeprefix("Record.__init__() ")
    return said[:_LONGEST_REASON]  # it may quote what is there, of any length


def _line(record: Record) -> bytes:
    return json.dumps(asdict(record), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _committed(accepted: Sequence[int]) -> int:
    return 1 + sum(accepted) + len(accepted)


def _parse(value: dict[str, Any]) -> Record:
    value = dict(value)
    for name, kind in (("accepted", int), ("drafted", int), ("token_ids", int), ("arrivals_s", float)):
        numbers = value[name]
        if numbers is None and name != "token_ids":
            continue
        if not all(type(number) is kind for number in numbers):
            raise TypeError(f"{name} is not a list of {kind.__name__} numbers")
        value[name] = tuple(numbers)
    return Record(**value)
