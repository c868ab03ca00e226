"""The directory of an unfinished conversion: held by one process, continued by the next.

::

    OUT.partial/.lock            held while a process works here
    OUT.partial/journal.jsonl    what is made, and what is complete (mxq.convert.journal)
    OUT.partial/checkpoint/      becomes OUT
    OUT.partial/attempts/        files that other machines make, until they are complete
    OUT.partial/calibration/     what is calibrated of a recipe that does so (mxq.calibrate)
    OUT.partial/source/          files of a source on the hub, while they are needed (mxq.convert.stream)

Nothing is ever removed here but files that a conversion writes, by their names, what the hub's library leaves in
``source``, and all of ``calibration``.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from mxq.checkpoint import manifest, staging
from mxq.checkpoint.beside import DEQUANTIZED, MANIFEST
from mxq.checkpoint.resolve import LEFTOVERS
from mxq.convert.journal import Journal, begun, published, recorded, refuse_unlike
from mxq.convert.journal import conversion as journal_conversion
from mxq.convert.lock import LOCK, locked, refuse_locked
from mxq.errors import InterruptedRunError, MxqError, UsageError, quoted
from mxq.files import sha256_file
from mxq.progress import note, progress

_JOURNAL = "journal.jsonl"
_CHECKPOINT = "checkpoint"
_ATTEMPTS = "attempts"
_ATTEMPT = re.compile(r"(.+)\.[0-9a-f]{16}")
_BUSY = ".nfs"  # how NFS keeps a file that was removed while somebody has it open
_TRIES = 10
_SOURCE = "source"
_CALIBRATION = "calibration"
_PARTS = (_CHECKPOINT, _ATTEMPTS, _SOURCE, _CALIBRATION)
_TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}\.tmp")  # of mxq.files.atomic_write
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_CONTINUE = "run the same command again to continue"


class SpoiledError(MxqError):
    """What a conversion has written is of no use, and is removed: no run could continue it."""


def path_of(out: Path) -> Path:
    """Return where the conversion to ``out`` is while it is unfinished."""
    out = out.resolve()
    return out.parent / f"{out.name}.partial"


class Partial:
    """An unfinished conversion that this process holds.

    Attributes:
        out: what it becomes.
        directory: where its files are until then.
        source: where files of its source are while they are needed.
        calibration: where what is calibrated is until it is converted; may not be there.
        journal: what is complete of it.
    """

    def __init__(
        self, out: Path, journal: Journal, shards: Collection[str], beside: Collection[str], fetched: Collection[str]
    ) -> None:
        self.out, self.journal = out, journal
        self.directory, self._attempts, self.source, self.calibration = (
            path_of(out) / name for name in (_CHECKPOINT, _ATTEMPTS, _SOURCE, _CALIBRATION)
        )
        self._shards, self._names, self._fetched = shards, {*shards, *beside}, fetched
        _refuse_unknown(self.directory, self._is_ours)
        _refuse_unknown(self._attempts, lambda file: self._is_attempt(file) or file.name.startswith(_BUSY))
        _refuse_unknown(self.source, self._is_fetched)

    @property
    def published(self) -> bool:
        """Whether ``out`` is there, complete."""
        return _is_published(self.out)

    def complete(self, shard: str, checksum: dict[str, Any], layers: list[dict[str, Any]]) -> None:
        """Record that a shard, which is on the disk, is complete; ``layers``: the errors of the matrices in it."""
        _sync(self.directory)
        self.journal.record({"shard": shard, **checksum, "layers": layers})

    def attempt(self, shard: str) -> Path:
        """Return a new name for a shard that another machine makes: one that is lost may be writing for long yet."""
        self._attempts.mkdir(exist_ok=True)
        return self._attempts / f"{shard}.{secrets.token_hex(8)}"

    def adopt(self, attempt: Path, shard: str) -> None:
        """Put the file that an attempt made among those that are complete."""
        attempt.rename(self.directory / shard)

    def publish(self) -> None:
        """Give the directory, in which all is written and checked, its name."""
        _refuse_unknown(self.directory, self._is_ours)
        for file in (*self.directory.iterdir(), self.directory):
            _sync(file)
        self.journal.record({"manifest": sha256_file(_manifest(self.directory))})
        self.directory.rename(self.out)
        _sync(self.out.parent)

    def begin(self) -> None:
        """Make sure of what is complete, and remove the rest, to be written again."""
        self.directory.mkdir(exist_ok=True)
        recorded = self.journal.shards
        with progress("checking what is complete", sum(entry["bytes"] for entry in recorded.values()), "B") as advance:
            for name, entry in list(recorded.items()):
                if not _is_as_recorded(self.directory / name, entry):
                    note(f"{name} is not what was written, and is converted again")
                    del recorded[name]
                advance(entry["bytes"])
        self.remove(all_but=recorded)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.source / LEFTOVERS)  # half a download, of which nobody makes a whole one
        if recorded or self._blocks():
            note(f"continuing: {self._progress()}")

    def remove(self, all_but: Collection[str] = ()) -> None:
        """Remove files of the checkpoint; those that are not stay."""
        with contextlib.suppress(FileNotFoundError):
            for file in self.directory.iterdir():
                if file.name not in all_but and self._is_ours(file):
                    file.unlink()

        for _ in range(_TRIES):
            with contextlib.suppress(OSError):  # a machine is just beginning a file; without the directory none can
                for file in self._attempts.iterdir():
                    if self._is_attempt(file):
                        file.unlink(missing_ok=True)
                self._attempts.rmdir()
                break

    def remove_source(self) -> None:
        """Remove what was fetched of the source."""
        with contextlib.suppress(FileNotFoundError):
            for file in self.source.iterdir():
                if file.name == LEFTOVERS:
                    shutil.rmtree(file)
                elif self._is_fetched(file):
                    file.unlink()
            self.source.rmdir()

    def discard(self) -> None:
        """Remove all that was written, the journal last."""
        self.remove_source()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.calibration)
        self.remove()
        if self.directory.exists():
            self.directory.rmdir()
        (path_of(self.out) / _JOURNAL).unlink()

    def failed(self, error: BaseException) -> BaseException:
        """Keep what can be continued, remove the rest, and return what the user is told."""
        done = (bool(self.journal.shards) or self._blocks() > 0) and not isinstance(error, SpoiledError)
        with contextlib.suppress(OSError):  # what cannot be removed is so the next time, and the error is still this
            if done:
                self.remove(all_but=self.journal.shards)
            else:
                self.discard()
        if isinstance(error, KeyboardInterrupt):
            if done:
                return InterruptedRunError(f"interrupted; {self._progress()}", _CONTINUE)
            return InterruptedRunError(
                f"interrupted; {self.out} was not written", "run the same command again to start over"
            )
        if isinstance(error, OSError):
            what = f"writing {self.out} failed: {error.strerror or error}"
            if not done:
                return MxqError(what, "nothing was left behind")
            hint = f"make room and {_CONTINUE}" if error.errno in _NO_ROOM else _CONTINUE
            return MxqError(f"{what}; {self._progress()}", hint)
        if done:
            note(self._progress())
        return error

    def _progress(self) -> str:
        blocks = self._blocks()
        calibrated = f"{blocks} blocks are calibrated and " if blocks else ""
        files = f"{len(self.journal.shards)} of {len(self._shards)} files are complete"
        return f"{calibrated}{files} in {path_of(self.out)}"

    def _blocks(self) -> int:
        """Return how many blocks of the model are calibrated, by their files."""
        return sum(1 for _ in self.calibration.glob("block-*.safetensors")) if self.calibration.is_dir() else 0

    def _is_ours(self, file: Path) -> bool:
        temporary = _TEMPORARY.fullmatch(file.name)
        return (temporary[1] if temporary else file.name) in self._names and (file.is_symlink() or not file.is_dir())

    def _is_attempt(self, file: Path) -> bool:
        attempt = _ATTEMPT.fullmatch(file.name)
        return attempt is not None and attempt[1] in self._shards and not file.is_dir()

    def _is_fetched(self, file: Path) -> bool:
        if file.name == LEFTOVERS:
            return file.is_dir() and not file.is_symlink()
        return file.name in self._fetched and (file.is_symlink() or not file.is_dir())


@contextlib.contextmanager
def held(
    out: Path,
    conversion: dict[str, Any],
    needed: int,
    shards: Collection[str],
    beside: Collection[str],
    fetched: Collection[str] = (),
) -> Iterator[Partial]:
    """Hold the partial directory of ``out``, new or to be continued; a failure in the block leaves what is complete.

    Args:
        out: must not exist, or be an empty directory, or be what this conversion has just become.
        conversion: from :func:`mxq.convert.origin.conversion`.
        needed: bytes that the whole output has, and what of the source is there at once.
        shards: names of the files that are recorded when they are complete.
        beside: names of the files that are written after them.
        fetched: names of the files of the source that are fetched.

    Raises:
        UsageError: as :func:`check`.
        MxqError: as :func:`check`, or writing failed; it says what is complete.
        InterruptedRunError: the user stopped the work; likewise.
    """
    check(out, needed, conversion)
    out, work = out.resolve(), path_of(out)
    try:
        with locked(work, out):
            _check(out, needed, conversion)  # whoever held the lock may have finished
            journal = Journal(work / _JOURNAL, conversion)
            try:
                if _is_tidied(out, conversion):
                    journal.record({"manifest": sha256_file(out / MANIFEST)})
                partial = Partial(out, journal, shards, beside, fetched)
                try:
                    if not partial.published:
                        partial.begin()
                    yield partial
                except BaseException as error:
                    said = partial.failed(error)
                    if said is error:
                        raise
                    raise said from error
                partial.discard()
            finally:
                journal.close()
    except OSError as error:
        raise MxqError(f"writing {out} failed: {error.strerror or error}") from error


def check(out: Path, needed: int, conversion: dict[str, Any]) -> None:
    """Raise what :func:`held` would raise before any work.

    Args:
        out: as for :func:`held`.
        needed: as for :func:`held`.
        conversion: as for :func:`held`, or a part of it.

    Raises:
        UsageError: ``out`` cannot be written, as :func:`mxq.checkpoint.staging.check`; its partial directory is of
            another conversion, holds something else, or is in use.
        MxqError: the disk has no room; the journal is damaged.
    """
    out = out.resolve()
    refuse_locked(path_of(out), out)  # first: nobody shall be told to delete what is in use
    _check(out, needed, conversion)


def conversion_there(out: Path) -> dict[str, Any] | None:
    """Return what is made by the conversion to ``out`` that is unfinished; None if there is none.

    It may be finished but for tidying up, and say so in its manifest alone. Raises MxqError if its journal is damaged.
    """
    work = path_of(out)
    if not work.is_dir():
        return None
    there = journal_conversion(work / _JOURNAL)
    return manifest.read(out) if there is None and (out / MANIFEST).is_file() else there


def _check(out: Path, needed: int, conversion: dict[str, Any]) -> None:
    work = path_of(out)
    if work.is_symlink() or (work.exists() and not work.is_dir()):
        raise UsageError(f"{work}, where the output is made, is not a directory", "remove it, or name another output")
    _refuse_unknown(work, _is_part)
    refuse_unlike(work / _JOURNAL, conversion)
    if any((work / name).exists() for name in (_CHECKPOINT, _CALIBRATION)) and not begun(work / _JOURNAL):
        raise UsageError(
            f"{work} holds no {_JOURNAL} that says what is in it", f"delete {quoted(work)}, or name another output"
        )
    if not _is_published(out) and not _is_tidied(out, conversion):
        staging.check(out, needed - sum(_occupied(work / name) for name in _PARTS))


def _is_published(out: Path) -> bool:
    """Tell whether a conversion has become ``out`` but was stopped before it could remove its journal."""
    work = path_of(out)
    done = None if (work / _CHECKPOINT).exists() else published(work / _JOURNAL)
    return done is not None and _manifest(out).is_file() and sha256_file(_manifest(out)) == done


def _manifest(directory: Path) -> Path:
    """Return the file that is written last of all: a directory has one of the two."""
    return directory / (DEQUANTIZED if (directory / DEQUANTIZED).is_file() else MANIFEST)


def _is_tidied(out: Path, conversion: dict[str, Any]) -> bool:
    """Tell whether a conversion has become ``out`` and was stopped when it had removed its journal, but not all.

    Nothing but the manifest of ``out`` says then what was converted.
    """
    work = path_of(out)
    if not work.is_dir() or (work / _CHECKPOINT).exists() or recorded(work / _JOURNAL):
        return False
    try:
        there = manifest.read(out)
    except MxqError:
        return False
    made = json.loads(json.dumps(conversion))
    sources = made.pop("source_files", {})
    for name in ("max_shard_size", "stream"):  # which it does not say
        made.pop(name, None)
    if there is None or any(there.get(key) != value for key, value in made.items()):
        return False
    written = (out / MANIFEST).stat().st_mtime
    try:
        return all(
            state[1] <= written if len(state) > 1 else there["files"][name]["sha256"] == state[0]
            for name, state in sources.items()
        )
    except (LookupError, TypeError):
        return False


def _occupied(directory: Path) -> int:
    """Return the bytes on the disk of files that either count, or will be removed or written over."""
    files = directory.rglob("*") if directory.is_dir() else ()
    return sum(file.lstat().st_blocks * 512 for file in files)


def _refuse_unknown(directory: Path, known: Callable[[Path], bool]) -> None:
    unknown = sorted(file.name for file in directory.iterdir() if not known(file)) if directory.is_dir() else []
    if unknown:
        raise UsageError(
            f"{directory} holds what mxq did not write: {', '.join(unknown)}", "move it away, or name another output"
        )


def _is_part(file: Path) -> bool:
    if file.name in (_SOURCE, _CALIBRATION):  # out of which a link would lead the removal of what is not needed
        return not file.is_symlink()
    return file.name in (LOCK, _JOURNAL, *_PARTS)


def _is_as_recorded(file: Path, entry: dict[str, Any]) -> bool:
    try:
        known = file.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(known.st_mode) and known.st_size == entry["bytes"] and sha256_file(file) == entry["sha256"]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
