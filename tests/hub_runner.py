"""mxq in processes of their own that use a hub, whose library reads the environment only when it is imported."""

import hashlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hub import Hub


@dataclass
class Result:
    """What a run of mxq said."""

    code: int
    stdout: str
    stderr: str


class Runner:
    """Runs mxq against a hub in processes of their own, which read their environment for the first time.

    They are forked from one that has torch loaded already and the hub's library not.
    """

    def __init__(self, hub: Hub, home: Path) -> None:
        self.hub, self.home = hub, home
        self.environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
        self._context = multiprocessing.get_context("forkserver")
        ours = ("mxq.convert.run", "mxq.verify.requantize", "mxq.checkpoint.hub", "mxq.cli.plan", "hub_runner")
        self._context.set_forkserver_preload([*ours, "httpx2", "tqdm.auto", "filelock", "yaml"])

    def __call__(
        self,
        *arguments: object,
        code: int = 0,
        first: Callable[[], None] | None = None,
        environment: dict[str, str] | None = None,
    ) -> Result:
        """Run mxq, in which ``first`` is called first; the exit code must be ``code``."""
        self.home.mkdir(exist_ok=True)
        files = self.home / "stdout", self.home / "stderr"
        words = [str(argument) for argument in arguments]
        process = self._context.Process(
            target=_run, args=(words, self.environment | (environment or {}), *files, first)
        )
        process.start()
        process.join()
        result = Result(process.exitcode or 0, *(file.read_text() for file in files))
        process.close()
        assert result.code == code, result
        return result


def _run(
    words: list[str], environment: dict[str, str], stdout: Path, stderr: Path, first: Callable[[], None] | None
) -> None:
    for descriptor, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    assert "huggingface_hub" not in sys.modules
    for name in [name for name in os.environ if name.startswith("HF_")]:
        del os.environ[name]
    os.environ.update(environment)
    sys.argv = ["mxq", *words]
    from mxq.cli import main

    if first is not None:
        first()
    main(words)


def no_waiting() -> None:
    """Let a process take no pauses between attempts."""
    time.sleep = lambda seconds: None


def small_pieces() -> None:
    """Let the hub's library take what arrives in pieces of 64 KiB instead of 10 MiB, and no pauses."""
    no_waiting()
    from huggingface_hub import constants

    constants.DOWNLOAD_CHUNK_SIZE = 1 << 16


def share_blobs() -> None:
    """Arrange the cache as the hub's library does with what comes from Xet storage: links to a store of all models."""
    from huggingface_hub import constants
    from huggingface_hub.utils._shared_blobs import publish_blob_to_shared_store

    for blob in Path(constants.HF_HUB_CACHE).glob("models--*/blobs/*"):
        publish_blob_to_shared_store(
            blob_path=str(blob),
            xet_hash=hashlib.sha256(blob.name.encode()).hexdigest(),
            cache_dir=constants.HF_HUB_CACHE,
            expected_size=blob.stat().st_size,
            replace_existing=False,
        )
