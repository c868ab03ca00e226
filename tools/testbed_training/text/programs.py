"""Short programs from a sentence: the same skill as ``functions``, with more ways to write and to name things."""

import random

from . import Example, mostly, table

_SUBJECTS = (
    "prices ages heights weights temperatures distances speeds grades votes points sales orders visits marks levels "
    "wages rents fares tolls depths"
).split()

_VERBS = "compute find return work_out get".split()

_ACCUMULATORS = "total result acc out answer value found state res current".split()
_ITEMS = "x item v element entry n each thing one val".split()
_COMMENTS = (
    "go through the {s} one by one",
    "look at each of the {s}",
    "visit all {s}",
    "loop over the {s}",
    "take the {s} in order",
)
_STARTS = (
    "start with nothing",
    "begin at the neutral value",
    "nothing seen yet",
    "set up the result",
    "prepare the answer",
)
_ENDS = ("hand back the result", "done", "give the answer", "this is what was asked", "all {s} were seen")

# name, words, start value, update with item {v} and accumulator {r}, constant used?
_TASKS = (
    ("sum_above", "the sum of all {s} above {c}", "0", "if {v} > {c}:\n            {r} += {v}"),
    ("sum_below", "the sum of all {s} below {c}", "0", "if {v} < {c}:\n            {r} += {v}"),
    ("count_above", "how many {s} are above {c}", "0", "if {v} > {c}:\n            {r} += 1"),
    ("count_equal", "how many {s} are equal to {c}", "0", "if {v} == {c}:\n            {r} += 1"),
    (
        "largest",
        "the largest of the {s}, or {c} if there are none larger",
        "{c}",
        "if {v} > {r}:\n            {r} = {v}",
    ),
    (
        "smallest",
        "the smallest of the {s}, or {c} if there are none smaller",
        "{c}",
        "if {v} < {r}:\n            {r} = {v}",
    ),
    ("scale", "a list of the {s} multiplied by {c}", "[]", "{r}.append({v} * {c})"),
    ("shift", "a list of the {s} with {c} added", "[]", "{r}.append({v} + {c})"),
    ("drop", "a list of the {s} without those equal to {c}", "[]", "if {v} != {c}:\n            {r}.append({v})"),
    ("clip", "a list of the {s} with everything above {c} replaced by {c}", "[]", "{r}.append(min({v}, {c}))"),
    ("sum_squares", "the sum of the squares of the {s}, plus {c}", "{c}", "{r} += {v} * {v}"),
    ("alternate", "the alternating sum of the {s}, minus {c}", "-{c}", "{r} = {v} - {r}"),
)

_INTROS = (
    "A loop is enough for this.",
    "One pass over the {s} does it.",
    "The idea is to keep a running value called {r}.",
    "We walk over the {s} and update {r}.",
    "This needs no more than a loop.",
    "I would write it with a plain loop.",
    "The {s} come in as a list.",
    "Let {r} collect what we need.",
)

_OUTROS = (
    "It takes time proportional to the number of {s}.",
    "For an empty list it gives {z}.",
    "Rename {r} if you prefer another word.",
    "The list of {s} itself is not changed.",
    "Each {v} is used once.",
    "You can call it with any list of numbers.",
)


def example(rng: random.Random) -> Example:
    """Return a request in words with the function's name, a program for it, and assertions."""
    task, subject = rng.choice(_TASKS), rng.choice(_SUBJECTS)
    c = rng.randint(2, 40)
    name = f"{task[0]}_{subject}"
    request = task[1].format(s=subject, c=c)
    prompt = rng.choice(
        (
            f"Write a Python function {name} that returns {request}.",
            f"I need a function {name}({subject}). It should return {request}.",
            f"Please write {name}, a function of a list, which gives {request}.",
        )
    )
    # Whoever writes about a subject has habits: names and comments go with it and with each other.
    r = mostly(rng, _ACCUMULATORS, "acc", subject, task[0], c % 8)
    v = mostly(rng, _ITEMS, "item", subject, r)
    start_comment = mostly(rng, _STARTS, "start", r, c)
    loop_comment = mostly(rng, _COMMENTS, "loop", v, c, start_comment)
    end_comment = mostly(rng, _ENDS, "end", loop_comment, c)
    start = task[2].format(c=c)
    code = (
        f"def {name}({subject}):\n"
        f"    # {start_comment}\n"
        f"    {r} = {start}\n"
        f"    # {loop_comment.format(s=subject)}\n"
        f"    for {v} in {subject}:\n"
        f"        {task[3].format(v=v, r=r, c=c)}\n"
        f"    # {end_comment.format(s=subject)}\n"
        f"    return {r}"
    )
    told = {"s": subject, "r": r, "v": v, "z": start}
    first = mostly(rng, _INTROS, "intro", subject, task[0]).format(**told)
    second = mostly(rng, [i for i in _INTROS if i.format(**told) != first], "intro", first, c, subject).format(**told)
    last = mostly(rng, _OUTROS, "outro", r, c).format(**told)
    more = mostly(rng, [o for o in _OUTROS if o.format(**told) != last], "outro", last, v, task[0]).format(**told)
    tests = _tests(code, name, table((name, c), 1 << 30), c)
    return Example(prompt, f"{first} {second}\n\n```python\n{code}\n```\n\n{last} {more}", tests=tests)


def _tests(code: str, name: str, seed: int, c: int) -> str:
    """Run the reference on a few lists and write down what it returns."""
    space: dict[str, object] = {}
    exec(code, space)  # our own text, made above
    rng = random.Random(seed)
    lists = [[], [c], *([rng.randint(-10, 60) for _ in range(rng.randint(3, 6))] for _ in range(3))]
    function = space[name]
    assert callable(function)
    return "\n".join(f"assert {name}({values}) == {function(list(values))!r}" for values in lists)
