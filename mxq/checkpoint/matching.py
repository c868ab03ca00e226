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

_MOST_REPEATS = 5
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


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
    """Compile a pattern of a config; raise MxqError if it is none, or one that could be matched without end."""
    try:
        found = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise MxqError(f"{where}: {pattern!r:.200} is not a regular expression: {error}", HINT) from None
    if _is_endless(pattern):
        raise MxqError(
            f"{where}: to match the pattern {pattern!r:.200} could take for ever, in engines as well",
            f"write it with at most {_MOST_REPEATS} repeats, and none of what has repeats or | in it",
        )
    return found


def _is_endless(pattern: str) -> bool:
    """Tell whether matching may try too many ways: repeats of what can itself match in several, or many in a row."""
    signs = re.sub(r"([*+?}])[?+]", r"\1", _ATOM.sub("a", pattern).replace("(?", "("))
    repeats, several, choices = 0, False, [False]  # several: what stands before this sign has; choices: of open groups
    for sign in signs:
        if sign in "*+?{":
            repeats += 1
            if several and sign != "?":
                return True
            choices[-1] = True
        elif sign == "(":
            choices.append(False)
        elif sign == "|":
            choices[-1] = True
        several = sign == ")" and len(choices) > 1 and choices.pop()
        choices[-1] |= several
    return repeats > _MOST_REPEATS


def names(value: Any, where: str, what: str) -> list[str]:
    """Return ``value``, the list that config.json has under ``what``; raise MxqError if it is no list of names."""
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise MxqError(f"{where}: quantization_config.{what} is not a list of names", HINT)
    return value
