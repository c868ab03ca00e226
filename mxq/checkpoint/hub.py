"""Models on the Hugging Face hub: fetching the files that are needed, or headers without the weights behind them.

Files go to the hub's own cache, where other tools find them again. Of a repository only names and the sizes of files
are believed; what to fetch is decided here, by plain names that the index and mxq itself give.
"""

import glob
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mxq import __version__
from mxq.checkpoint.hub_bars import Bars, stoppable
from mxq.checkpoint.hub_errors import asking, came_damaged, incomplete, nonsense
from mxq.checkpoint.hub_file import HubFile
from mxq.checkpoint.reader import INDEX, Checkpoint, read_config, weight_files
from mxq.checkpoint.resolve import HubId, is_commit
from mxq.errors import MxqError, UsageError
from mxq.files import sha256_file, size
from mxq.progress import progress

_CONFIG = "config.json"
# What a conversion copies and a tokenizer needs. Never pickles, other engines' weights, or code.
_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_PREFIXES = ("LICENSE", "NOTICE")
_NOT_NEEDED = ("pytorch_model.bin.index.json",)
_AT_ONCE = 8


@dataclass(frozen=True)
class _Snapshot:
    """A commit of a repository: its directory in the cache, complete or not, and the sizes of its files by name."""

    model: HubId
    path: Path
    sizes: dict[str, int]

    @property
    def weights(self) -> list[str]:
        """The safetensors files; raises UsageError or MxqError if the repository has none or not all of them."""
        files = weight_files(self.path, self.sizes, str(self.model))
        if missing := sorted(set(files) - self.sizes.keys()):
            raise incomplete(self.model, missing)
        return files

    @property
    def beside(self) -> list[str]:
        """What a conversion copies and a tokenizer needs."""
        return [name for name in self.sizes if name not in _NOT_NEEDED and _is_beside(name)]

    def absent(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that are not in the cache yet."""
        return [name for name in names if not (self.path / name).is_file()]


def download(model: HubId) -> Path:
    """Return the directory of a model, having fetched what it lacks of config, weights, tokenizer and licence.

    Raises:
        UsageError: the hub has no such model or revision, or does not let the user read it; it has no safetensors.
        MxqError: the hub cannot be reached or gives answers that cannot be, or there is no room for the files.
    """
    with asking(model):
        snapshot = _look(model, [])
        _complete(snapshot, [*snapshot.weights, *snapshot.beside])
    return snapshot.path


def open_headers(model: HubId, extra: Iterable[str], *, beside: bool = False) -> Checkpoint:
    """Open a model of which only config.json, index, ``extra`` and the headers of the weights are fetched.

    With ``beside`` also tokenizer, licence and what else a conversion copies.

    Raises:
        UsageError, MxqError: as :func:`download`, and if a header lies or is not one.
    """
    with asking(model):
        snapshot = _look(model, extra)
        if beside:
            _complete(snapshot, snapshot.beside)
        absent = snapshot.absent(snapshot.weights)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            try:
                begun = dict(zip(absent, pool.map(partial(HubFile.open, snapshot.path, model), absent), strict=True))
            except BaseException:
                pool.shutdown(cancel_futures=True)  # those that have begun are enough to wait for
                raise
    return Checkpoint.open(snapshot.path, begun)


def check_cached(model: HubId) -> None:
    """Compare the files of weights that are in the cache already with the sha256 that the hub lists.

    Raises:
        MxqError: one is not what the hub lists, and was removed.
        UsageError, MxqError: as :func:`download`.
    """
    with asking(model):
        snapshot = _look(model, [])
        absent = snapshot.absent(snapshot.weights)
        _check_content(snapshot, [name for name in snapshot.weights if name not in absent])


def _complete(snapshot: _Snapshot, names: list[str]) -> None:
    _fetch(snapshot, snapshot.absent(names))
    if missing := snapshot.absent(names):
        raise incomplete(snapshot.model, missing)


def _is_beside(name: str) -> bool:
    return name.endswith(_SUFFIXES) or name.startswith(_PREFIXES)


def _look(model: HubId, extra: Iterable[str]) -> _Snapshot:
    """Find out which commit is meant and which files it has, and fetch config.json and the index."""
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    api = HfApi(library_name="mxq", library_version=__version__)
    revision = api.resolve_revision(model.name, revision=model.revision)
    if not is_commit(revision.resolved):
        raise nonsense(f"{revision.resolved!r:.60} as the commit of {model}")
    path = _snapshot_download(model, revision, [_CONFIG, INDEX, *extra], Bars())
    try:
        listing = get_cached_repo_tree(model.name, revision=revision)
        sizes = {file.path: file.size for file in listing if _is_plain(file.path)}
    except CachedRepoTreeNotFoundError:  # fetched by another version, and no hub to ask
        sizes = {file.name: file.stat().st_size for file in path.glob("*") if file.is_file()}
    if _CONFIG not in sizes:
        raise UsageError(f"{model} holds no {_CONFIG}", "give the id of a model with its config and safetensors files")
    read_config(path)
    return _Snapshot(model, path, sizes)


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and not set(name) & set("/\\:\0")


def _fetch(snapshot: _Snapshot, names: list[str]) -> None:
    """Download files into the snapshot; Ctrl-C stops it at the next piece, and whole files stay."""
    if not names:
        return
    total = sum(snapshot.sizes[name] for name in names)
    _check_room(snapshot, total)
    with progress(f"downloading {snapshot.model}", total, "B") as advance:
        stoppable(
            lambda bars: _snapshot_download(snapshot.model, snapshot.path.name, names, bars),
            advance,
            "stopping; files that are complete stay in the hub's cache",
        )
    _check_content(snapshot, names)


def listed_sha256(model: HubId, commit: str) -> dict[str, str]:
    """Return the sha256 that the hub lists for large files of a commit, by name."""
    from huggingface_hub import HfApi

    listing = HfApi(library_name="mxq", library_version=__version__).list_repo_tree(model.name, revision=commit)
    return {file.path: file.lfs.sha256 for file in listing if getattr(file, "lfs", None) is not None}


def _check_content(snapshot: _Snapshot, names: list[str]) -> None:
    """Compare files with the sha256 that the hub lists for large files: its library compares sizes only."""
    expected = listed_sha256(snapshot.model, snapshot.path.name)
    files = [snapshot.path / name for name in names if name in expected]
    damaged = []
    total = sum(file.stat().st_size for file in files)
    with progress("checksums", total, "B") as advance, ThreadPoolExecutor(_AT_ONCE) as pool:
        for file, sha256 in zip(files, pool.map(sha256_file, files), strict=True):
            advance(file.stat().st_size)
            if sha256 != expected[file.name]:
                damaged.append(file)
    for file in damaged:
        for link in (file.resolve(), file.parent / file.readlink() if file.is_symlink() else file, file):
            link.unlink(missing_ok=True)
    if damaged:
        raise came_damaged(snapshot.model, damaged[0].name)


def _check_room(snapshot: _Snapshot, total: int) -> None:
    free = shutil.disk_usage(snapshot.path).free
    if free < total:
        raise MxqError(
            f"downloading {snapshot.model} takes {size(total)}, and the hub's cache {snapshot.path.parents[2]} has "
            f"{size(free)} free",
            "make room, or set HF_HOME to a directory on another disk",
        )


def _snapshot_download(model: HubId, revision: str, names: Iterable[str], bars: Bars) -> Path:
    from huggingface_hub import snapshot_download

    found = snapshot_download(
        model.name,
        revision=revision,
        allow_patterns=[glob.escape(name) for name in names],
        library_name="mxq",
        library_version=__version__,
        tqdm_class=bars.kind(),
        max_workers=_AT_ONCE,
    )
    return Path(found)
