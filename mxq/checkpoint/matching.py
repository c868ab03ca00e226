"""Lists of modules as a ``quantization_config`` holds them: exact names and, behind ``re:``, patterns."""

import re
from collections.abc import Iterable
from typing import Any

from mxq.errors import MxqError
from mxq.models import qwen35

HINT = (
    "mxq reads MXFP4 (fp4, groups of 32, e8m0 scales) as Quark and compressed-tensors write it, and verifies "
    "AutoRound's too"
)


class Listing:
    """Entries that are names of modules or, behind ``re:``, patterns that match from a name's start.

    Attributes:
        names: the entries that are names, as vLLM calls them.
    """

    def __init__(self, entries: Iterable[str], where: str) -> None:
        """Raise MxqError, which names ``where``, for a pattern that is none."""
        entries = list(entries)
        self.names = frozenset(qwen35.engine_name(entry) for entry in entries if not entry.startswith("re:"))
        self._patterns = [compiled(entry[3:], where) for entry in entries if entry.startswith("re:")]

    def matches(self, engine_name: str) -> bool:
        """Tell whether an entry means the module that vLLM calls so."""
        return engine_name in self.names or any(pattern.match(engine_name) for pattern in self._patterns)


def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """Compile a pattern of a config; raise MxqError if it is none."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise MxqError(f"{where}: {pattern!r} is not a regular expression: {error}", HINT) from None


def names(value: Any, where: str, what: str) -> list[str]:
    """Return ``value``, the list that config.json has under ``what``; raise MxqError if it is no list of names."""
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise MxqError(f"{where}: quantization_config.{what} is not a list of names", HINT)
    return value
