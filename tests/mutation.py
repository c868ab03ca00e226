"""Broken files by the thousand, each from a number: JSON changed where it means something, and bytes changed anywhere.

``MXQ_FUZZ_SEED=N`` in the environment makes mutation N alone; a test that fails says so.
"""

import contextlib
import copy
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_SEED = "MXQ_FUZZ_SEED"


@dataclass
class Raw:
    """Text that stands in JSON as it is."""

    text: str


@dataclass
class Table:
    """A JSON object, of which a key can occur twice."""

    pairs: list[list[Any]]


_WORDS = r"""
    NaN Infinity -Infinity 1e999 -1e999 -0 -0.0 0.0 2.0 2e0 0x10 01 +1 -1 0 1 2 3 7 16 31 4095 1000000 true false null
    undefined [] {} [[]] [0] [null] [0,0] {"a":1} {"a":1,"a":2} 'a' "" "0" "1" "." ".." "../x" "/etc/passwd" "a/b"
    "a\\b" "config.json" "model.safetensors" "BF16" "bf16" "F4" "F8_E8M0" "F64" "C64" "U8" "é" "\ud800"
    "\udc00\ud800" "\ud83d\ude00" "\u0000" "a\nb" "\u001b[2J" "\u202e" "\q" "__metadata__" "re:.*" "re:(" "*"
""".split()
_NUMBERS = [str(2**power + more) for power in (31, 32, 53, 60, 62, 63, 64, 70) for more in (-1, 0)]
_LARGE = [
    *("9" * 5000, '"' + "x" * 300 + '"', '"' + "x" * 70_000 + '"', f'"model.layers.{"9" * 5000}.mlp.up_proj.weight"'),
    *(f"[{'1,' * 100}1]", f"[{'4611686018427387904,' * 400}1]", "[0,4611686018427387904,4611686018427387904]"),
    *("[" * depth + "]" * depth for depth in (99, 900, 5000)),
    *("[" * 100_000, '{"a":' * 3000 + "1" + "}" * 3000, '"\n"', '"\u202e"', '"\ufeff"'),
]


def seeds(first: int, count: int) -> Iterator[tuple[int, random.Random]]:
    """Give the random numbers of each mutation: of so many, or of the one that was asked for."""
    for seed in [int(os.environ[_SEED])] if _SEED in os.environ else range(first, first + count):
        yield seed, random.Random(seed)


@contextlib.contextmanager
def telling(seed: int) -> Iterator[None]:
    """Say in an error from the block which mutation it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"{_SEED}={seed} makes this mutation alone")
        raise


def mutate(rng: random.Random, content: bytes, start: int = 0) -> bytes:
    """Change a file, from byte ``start`` on an object in JSON, in one to three places."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, content)
    length = int.from_bytes(content[:start], "little") if start else len(content)
    value = _tree(json.loads(content[start : start + length]))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _mutated(rng, value)
    head = text(value).encode()
    if start == 0:
        return head
    return len(head).to_bytes(start, "little") + head + content[start + length :]


def mutate_bytes(rng: random.Random, content: bytes) -> bytes:
    """Change bytes anywhere, and mostly near the beginning, where headers are."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(min(len(changed), rng.choice((9, 1000, len(changed)))) + 1) if changed else 0
        match rng.randrange(8):
            case 0 | 1:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 2:
                del changed[at : at + rng.choice((1, 2, 8, 100))]
            case 3:
                changed[at:at] = changed[at : at + rng.choice((1, 2, 8, 100))]
            case 4:
                changed[at:at] = rng.choice((b"\xef\xbb\xbf", b"\0", b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b'"', b"{"))
            case 5:
                del changed[at:]
            case 6:
                claimed = rng.choice((0, 1, 2, 1 << 20, 10**8, 10**8 + 1, 1 << 62, 1 << 63, 2**64 - 9, 2**64 - 1))
                changed[:8] = claimed.to_bytes(8, "little")
            case 7:
                changed += bytes(rng.choice((1, 8)))
    return bytes(changed)


def text(value: Any) -> str:
    """Write JSON, sound or not."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Table):
        return "{" + ",".join(f"{text(key)}:{text(inner)}" for key, inner in value.pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _tree(value: Any) -> Any:
    if isinstance(value, dict):
        return Table([[key, _tree(inner)] for key, inner in value.items()])
    return [_tree(inner) for inner in value] if isinstance(value, list) else value


def _mutated(rng: random.Random, value: Any) -> Any:
    lists: list[list[Any]] = []  # of which something can be exchanged
    rows: list[list[Any]] = []  # of which something can be missing, too much or in another order
    waiting = [value]
    while waiting:
        match waiting.pop():
            case Table(pairs):
                rows.append(pairs)
                lists += pairs
                waiting += [inner for _, inner in pairs]
            case list(elements) if elements:
                rows.append(elements)
                lists.append(elements)
                waiting += elements
    hostile = Raw(rng.choice(rng.choice((_WORDS, _WORDS, _NUMBERS, _LARGE))))
    if not lists or rng.random() < 0.01:
        return hostile
    row, held = rng.choice(rows), rng.choice(lists)
    at = rng.randrange(len(held))
    match rng.randrange(9):
        case 0 | 1:
            held[at] = hostile
        case 2 | 3:
            held, at = rng.choice(
                [(one, n) for one in lists for n in range(len(one)) if type(one[n]) is int] or [(held, at)]
            )
            old = held[at]
            held[at] = (
                rng.choice((old - 16, old - 1, old + 1, old + 2, old * 2, old // 2, -old)) if type(old) is int else 0
            )
        case 4 if row:
            del row[rng.randrange(len(row))]
        case 5 if row:
            row.insert(rng.randrange(len(row) + 1), copy.deepcopy(rng.choice(row)))
        case 6:
            other = rng.choice(lists)
            held[at] = copy.deepcopy(rng.choice(other))
        case 7:  # the same, or what a careless reader takes to be
            word, added = text(held[at]), rng.choice((r"\ud800", r"\n", r"\u001b", "\u202e", " ", ""))
            number = rng.choice((f"-{word}", f"{word}.0", f"{word}e0", f"0{word}", f" {word}\n"))
            held[at] = Raw(f'{word[:-1]}{added}"' if word.startswith('"') else number)
        case _:
            rng.shuffle(row)
    return value
