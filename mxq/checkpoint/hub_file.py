"""Pieces of a file on the hub, by HTTP range requests."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

from mxq import __version__
from mxq.checkpoint.headers import header_length
from mxq.checkpoint.hub_errors import asking, nonsense
from mxq.checkpoint.resolve import HubId

_GUESS = 16 << 10  # the header of a shard of a dense model, mostly; a longer one takes a second request
_TIMEOUT_S = 30.0
_TRIES = 3


@dataclass(frozen=True)
class HubFile:
    """A safetensors file on the hub of which the header is at hand (``head``), and any other piece is fetched."""

    model: HubId
    url: str
    size: int
    head: bytes

    @classmethod
    def open(cls, snapshot: Path, model: HubId, name: str) -> "HubFile":
        """Fetch the header of the file ``name`` of a model at the commit that ``snapshot`` is of.

        Raises:
            MxqError: the file is too short for the header it claims, or the answer is not the piece asked for.
            Exception: of the hub's library, which :func:`mxq.checkpoint.hub_errors.asking` explains.
        """
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(model.name, name, revision=snapshot.name)
        head, size = _piece(url, 0, _GUESS)
        end = 8 + header_length(snapshot / name, head[:8], size)
        if end > len(head):
            head += _piece(url, len(head), end - len(head))[0]
        return cls(model, url, size, head)

    def read(self, start: int, count: int) -> bytes:
        """Return ``count`` bytes from byte ``start`` on, which must be inside the file.

        Raises:
            UsageError, MxqError: they could not be fetched.
        """
        if start + count <= len(self.head):
            return self.head[start : start + count]
        with asking(self.model):
            return _piece(self.url, start, count)[0]


def _piece(url: str, start: int, count: int) -> tuple[bytes, int]:
    """Fetch up to ``count`` bytes from ``start`` on, fewer only at the file's end; return them and the file's size."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    for _ in range(_TRIES - 1):
        try:
            return _ask(url, start, count)
        except HfHubHTTPError:  # an answer, and where waiting helps it has been waited
            raise
        except HTTPError:  # a connection that broke
            time.sleep(1)
    return _ask(url, start, count)


def _ask(url: str, start: int, count: int) -> tuple[bytes, int]:
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    headers = build_hf_headers(library_name="mxq", library_version=__version__)
    headers |= {"Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
    data = bytearray()
    # It retries what the server refuses for now; after an exception in the block it cannot.
    with http_stream_backoff("GET", url, headers=headers, timeout=_TIMEOUT_S, retry_on_exceptions=()) as response:
        hf_raise_for_status(response)
        # A server that ignores ranges (status 200) sends the whole file: as much of it is read as is needed.
        told = response.headers.get("Content-Range") or f"bytes 0-/{response.headers.get('Content-Length')}"
        found = re.fullmatch(r"bytes (\d+)-\d*/(\d+)", told)
        if found is None or int(found[1]) not in (0, start):
            raise nonsense(f"{told!r:.60} for bytes {start} to {start + count} of {url}")
        skip, size = start - int(found[1]), int(found[2])
        for chunk in response.iter_bytes(_GUESS):
            data += chunk
            if len(data) >= skip + count:
                break
    piece = bytes(data[skip : skip + count])
    if len(piece) != min(count, size - start):
        raise nonsense(f"{len(piece)} bytes for bytes {start} to {start + count} of {url}")
    return piece, size
