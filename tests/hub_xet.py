"""Xet storage, from which the hub serves large files: what ``hf_xet`` asks for, after huggingface/xet-core's spec/.

A file is a run of chunks in an object called xorb; here each file has a xorb of its own, uncompressed.
"""

import json
from typing import Any

CHUNK = 1 << 16


def xorb(data: bytes) -> bytes:
    """The xorb of a file: chunks, each after 8 bytes of version, packed length, compression and length."""
    pieces = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    return b"".join(b"\0" + _u24(len(piece)) + b"\0" + _u24(len(piece)) + piece for piece in pieces)


def reconstruction(digest: str, size: int, start: int, stop: int, address: str) -> bytes:
    """How to put bytes ``start`` to ``stop`` of a file together: which chunks, and which bytes at which address."""
    first, last = start // CHUNK, -(-stop // CHUNK)
    chunks = {"start": first, "end": last}
    unpacked = min(last * CHUNK, size) - first * CHUNK
    until = last * (CHUNK + 8) if last * CHUNK <= size else size + 8 * last
    fetch = {"range": chunks, "url": address, "url_range": {"start": first * (CHUNK + 8), "end": until - 1}}
    answer: dict[str, Any] = {
        "offset_into_first_range": start - first * CHUNK,
        "terms": [{"hash": digest, "unpacked_length": unpacked, "range": chunks}],
        "fetch_info": {digest: [fetch]},
    }
    return json.dumps(answer).encode()


def _u24(value: int) -> bytes:
    return value.to_bytes(3, "little")
