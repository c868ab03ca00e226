"""Files of weights fetched one by one, into a directory of the caller's, who removes them when they are done with."""

from dataclasses import dataclass, field
from pathlib import Path

from mxq import __version__
from mxq.checkpoint.hub import listed_sha256
from mxq.checkpoint.hub_bars import Bars, stoppable
from mxq.checkpoint.hub_errors import asking, came_damaged
from mxq.checkpoint.resolve import HubId
from mxq.files import sha256_file
from mxq.progress import Advance


@dataclass
class Shards:
    """Files of the model ``model``, whose revision is a commit, to be fetched into ``directory``."""

    model: HubId
    directory: Path
    _sha256: dict[str, str] | None = field(default=None, init=False)

    def fetch(self, name: str, size: int, advance: Advance) -> None:
        """Have a file of ``size`` bytes in the directory, and make sure that it is what the hub lists.

        One that is there already is fetched again only if it is not that.

        Args:
            name: which.
            size: its size in bytes.
            advance: told the bytes that are there.

        Raises:
            UsageError, MxqError: it cannot be had, or came damaged and was removed.
        """
        file = self.directory / name
        if self._is_right(file, size, advance):
            advance(size)
            return
        file.unlink(missing_ok=True)
        with asking(self.model, self.directory):
            stoppable(lambda bars: self._download(name, bars), advance, f"stopping the download of {name}")
        if not self._is_right(file, size, advance):
            file.unlink(missing_ok=True)
            raise came_damaged(self.model, name)

    def _is_right(self, file: Path, size: int, advance: Advance) -> bool:
        if file.is_symlink() or not file.is_file() or file.stat().st_size != size:
            return False
        if self._sha256 is None:
            with asking(self.model, self.directory):
                self._sha256 = listed_sha256(self.model, str(self.model.revision))
        advance(0, f"checking {file.name}")
        expected = self._sha256.get(file.name)
        return expected is None or sha256_file(file) == expected

    def _download(self, name: str, bars: Bars) -> None:
        from huggingface_hub import hf_hub_download

        hf_hub_download(
            self.model.name,
            name,
            revision=self.model.revision,
            local_dir=self.directory,
            library_name="mxq",
            library_version=__version__,
            tqdm_class=bars.kind(),
        )
