"""What verification says: problems, each with its places and what to do, and the checks that found them."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

CONVERT_AGAIN = "convert it again"


@dataclass(frozen=True)
class Problem:
    """Something wrong with a checkpoint, in words, and what to do about it.

    Attributes:
        what: what is wrong and where, with the first of its places and their number.
        fix: what to do.
        places: the names of all modules, tensors or files that it is about.
        rewritable: :mod:`mxq.verify.fix` can put it right, without touching a weight.
    """

    what: str
    fix: str = CONVERT_AGAIN
    places: tuple[str, ...] = ()
    rewritable: bool = False


@dataclass(frozen=True)
class Check:
    """One check: its name, what it covered, what it found; or why it was not done."""

    name: str
    covered: str
    problems: list[Problem]
    done: bool = True


@dataclass
class Report:
    """What was checked, in the order of checking, and what was found wrong."""

    checks: list[Check] = field(default_factory=list)

    def add(self, name: str, covered: str, problems: list[Problem]) -> None:
        """Note the outcome of a check: its name, what it covered, what it found."""
        self.checks.append(Check(name, covered, problems))

    def skip(self, name: str, reason: str) -> None:
        """Note that a check was not done."""
        self.checks.append(Check(name, reason, [], done=False))

    @property
    def problems(self) -> list[Problem]:
        """Everything found wrong."""
        return [problem for check in self.checks for problem in check.problems]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON can hold it."""
        return {
            "ok": not self.problems,
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }


def first(places: Sequence[str]) -> str:
    """Return the first of ``places`` and how many more there are."""
    return places[0] if len(places) == 1 else f"{places[0]} (and {len(places) - 1} more)"


def about(
    places: Iterable[str], what: str, fix: str = CONVERT_AGAIN, *, rewritable: bool = False, many: str | None = None
) -> list[Problem]:
    """Return the problem that all of ``places`` share, or none if there are none.

    Args:
        places: the names it is about.
        what: the sentence, with ``{}`` where the places go.
        fix: what to do.
        rewritable: see :class:`Problem`.
        many: the sentence for several places, if it is another.
    """
    names = tuple(places)
    if not names:
        return []
    sentence = many if many is not None and len(names) > 1 else what
    return [Problem(sentence.format(first(names)), fix, names, rewritable)]
