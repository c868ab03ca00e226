"""Generated conversations in five families, named after the kind of benchmark they imitate.

Each family is a function ``example(random) -> Example``. Two things are wanted of the text:

* *The target can be right or wrong.* Word problems have one number as answer, functions have tests.
* *The next words are not all obvious.* How predictable a family is decides the acceptance length that speculative
  decoding reaches on it. Real text is predictable where it copies and where grammar decides, and hard to draft where
  something must be worked out (a sum, the next step of a derivation) or known (which adjective goes with which
  noun). The generator therefore draws its wording from :func:`mostly`: a choice that a large enough model can know
  from what came before, and a small drafter, which sees the words of a block all at once, often cannot.
"""

import dataclasses
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Example:
    """One exchange: what the user says, what the assistant says, and how to tell whether an answer is right."""

    prompt: str
    response: str
    answer: str | None = None  # the final number, for the families that end in "The answer is N."
    tests: str | None = None  # Python assertions that a right function passes


def table(context: object, size: int) -> int:
    """Return a fixed number below ``size`` for ``context``: a fact of this world, the same in every run."""
    return zlib.crc32(repr(context).encode()) % size


def mostly(rng: random.Random, options: Sequence[T], *context: object, usual: float = 0.8) -> T:
    """Choose the option that usually goes with ``context``, or with probability 1 - ``usual`` any other."""
    if rng.random() < usual:
        return options[table(context, len(options))]
    return rng.choice(options)


def families() -> dict[str, Callable[[random.Random], Example]]:
    """Return the five families by name, in the order in which they are reported."""
    from . import arithmetic, chat, functions, maths, programs

    return {
        "arithmetic": arithmetic.example,
        "maths": maths.example,
        "functions": functions.example,
        "programs": programs.example,
        "chat": chat.example,
    }


def held_out(per_family: int, seed: int = 20260916) -> dict[str, list[Example]]:
    """Return ``per_family`` examples of each family with distinct prompts, the same for the same arguments."""
    result: dict[str, list[Example]] = {}
    for name, example in families().items():
        rng = random.Random(f"{seed}-{name}")
        chosen: dict[str, Example] = {}
        while len(chosen) < per_family:
            drawn = example(rng)
            chosen.setdefault(drawn.prompt, drawn)
        result[name] = list(chosen.values())
    return result


def training(seed: str, count: int, excluded: frozenset[str], weights: dict[str, float]) -> Iterator[Example]:
    """Yield ``count`` examples whose prompts are not in ``excluded``, families mixed by ``weights``."""
    rng = random.Random(seed)
    makers = families()
    names = list(weights)
    shares = [weights[name] for name in names]
    while count:
        example = makers[rng.choices(names, shares)[0]](rng)
        if example.prompt not in excluded:
            count -= 1
            yield example
