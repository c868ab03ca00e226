"""Texts that are only read: plain text, or rows of ``{"text": "..."}``, as tokens in windows of one length.

Windows do not overlap, and nothing is known before a window's first token, which is therefore not asked about: of a
window of 2048 tokens, 2047 are. What a text leaves for its last window is read, too, if it is two tokens or more. No
chat template and no special token is added. This is how perplexity on WikiText-2 is usually given, where the test split
is one text.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mxq import files
from mxq.errors import UsageError
from mxq.workloads import ChatTemplate
from mxq.workloads.rows import SUFFIXES, read_rows, read_text

WINDOW = 2048

_AS_LINES = 'plain text in UTF-8, or one {"text": "..."} per line of a .jsonl file'


@dataclass(frozen=True)
class Window:
    """Tokens that are read from the first on. ``cluster`` is what is drawn as one when intervals are made."""

    id: str
    cluster: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Windows:
    """A file of texts. ``sha256`` is of the texts, in order."""

    name: str
    sha256: str
    texts: int
    window: int
    windows: tuple[Window, ...]


def read_windows(path: Path, window: int, template: ChatTemplate) -> Windows:
    """Return the windows of a file's texts.

    Windows of a text resemble each other, so that texts are drawn whole; a single text's windows are drawn one by one,
    as if they were texts. Raises UsageError for a file that cannot be read or holds too little.
    """
    texts = list(_texts(path))
    windows = []
    first: dict[str, str] = {}
    for number, text in enumerate(texts, start=1):
        cluster = first.setdefault(text, f"text {number}")
        ids = template.tokens(text)
        for begin in range(0, len(ids) - 1, window):
            part = tuple(ids[begin : begin + window])
            if len(part) > 1:
                name = f"text {number}, tokens {begin + 1} to {begin + len(part)}"
                windows.append(Window(name, name if len(texts) == 1 else cluster, part))
    if not windows:
        raise UsageError(f"{path} holds no text of two tokens or more", f"give {_AS_LINES}")
    return Windows(path.stem, files.sha256_text("\0".join(texts)), len(texts), window, tuple(windows))


def _texts(path: Path) -> Iterator[str]:
    if path.name.endswith(SUFFIXES):
        for where, row in read_rows(path):
            yield _checked(row.get("text"), where)
    else:
        yield _checked(read_text(path), str(path))


def _checked(text: object, where: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"{where}: no text", f"give {_AS_LINES}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{where}: half a character", "write both surrogates, or neither") from None
    return text
