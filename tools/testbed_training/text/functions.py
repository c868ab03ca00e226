"""Complete a function from its signature and docstring: the most predictable family, as such code is."""

import random

from . import Example, mostly, table

# test of an item: name part, words, expression
_FILTERS = (
    ("even", "the even numbers", "{v} % 2 == 0"),
    ("odd", "the odd numbers", "{v} % 2 == 1"),
    ("positive", "the positive numbers", "{v} > 0"),
    ("negative", "the negative numbers", "{v} < 0"),
    ("large", "the numbers above {c}", "{v} > {c}"),
    ("small", "the numbers below {c}", "{v} < {c}"),
    ("multiples", "the multiples of {c}", "{v} % {c} == 0"),
    ("other", "the numbers other than {c}", "{v} != {c}"),
)

# change of an item
_CHANGES = (
    ("plain", "", "{v}"),
    ("doubled", "doubled", "2 * {v}"),
    ("squared", "squared", "{v} * {v}"),
    ("negated", "with the sign changed", "-{v}"),
    ("raised", "raised by {d}", "{v} + {d}"),
    ("lowered", "lowered by {d}", "{v} - {d}"),
    ("scaled", "multiplied by {d}", "{v} * {d}"),
)

# how the chosen items are brought together: name, words, start, update
_GOALS = (
    ("sum", "the sum of", "0", "{r} += {e}"),
    ("count", "how many there are of", "0", "{r} += 1"),
    ("list", "a list of", "[]", "{r}.append({e})"),
    ("product", "the product of", "1", "{r} *= {e}"),
    ("largest", "the largest of", "None", "if {r} is None or {e} > {r}:\n                {r} = {e}"),
    ("smallest", "the smallest of", "None", "if {r} is None or {e} < {r}:\n                {r} = {e}"),
)

_RESULTS = {
    "sum": ("total", "result", "answer"),
    "count": ("count", "found", "result"),
    "list": ("result", "chosen", "answer"),
    "product": ("product", "result", "answer"),
    "largest": ("best", "largest", "result"),
    "smallest": ("best", "smallest", "result"),
}

_BEFORE = (
    "look at every {v}",
    "go through the {s}",
    "only some of the {s} count",
    "one pass over the {s}",
    "update {r} where needed",
    "skip what does not fit",
)

_AFTER = (
    "hand back {r}",
    "all {s} were seen",
    "nothing else to do",
    "{r} is complete now",
    "done with the loop",
)

_INTROS = (
    "Here is the function.",
    "Here is the finished function.",
    "The function goes through the list once.",
    "This does what the docstring says.",
    "A simple loop is enough.",
    "The body follows the docstring.",
)

_OUTROS = (
    "It looks at every {v} and keeps the result in {r}.",
    "The variable {r} holds the result.",
    "Every {v} in {s} is looked at once.",
    "With an empty list it returns {z}.",
    "The list of {s} is not changed.",
    "The loop variable is called {v}.",
)

_INPUTS = "numbers values items data scores entries readings amounts".split()


def example(rng: random.Random) -> Example:
    """Return a function to complete, its completion, and assertions computed by running that completion."""
    item_filter, change, goal = rng.choice(_FILTERS), rng.choice(_CHANGES), rng.choice(_GOALS)
    if goal[0] == "count":
        change = _CHANGES[0]
    c, d = rng.randint(2, 9), rng.randint(2, 9)
    source = rng.choice(_INPUTS)
    parts = [goal[0], *([change[0]] if change[0] != "plain" else []), item_filter[0], source]
    if rng.random() < 0.5:
        parts = [*parts[1:-1], goal[0], source] if rng.random() < 0.5 else [*parts[:-1], "in", source]
    name = "_".join(parts)
    words = f"{item_filter[1].format(c=c)} in {source}"
    if change[0] != "plain":
        words += f", each {change[1].format(d=d)}"
    signature = f'def {name}({source}):\n    """Return {goal[1]} {words}."""'
    v = mostly(rng, (_singular(source), "x", "value", "item", "n"), "item", source, item_filter[0])
    r = mostly(rng, _RESULTS[goal[0]], "result", goal[0], source)
    e = change[2].format(v=v, d=d)
    before = mostly(rng, _BEFORE, "before", item_filter[0], v, r).format(s=source, v=v, r=r)
    after = mostly(rng, _AFTER, "after", before, goal[0], c).format(s=source, v=v, r=r)
    body = [
        f"    {r} = {goal[2]}",
        f"    # {before}",
        f"    for {v} in {source}:",
        f"        if {item_filter[2].format(v=v, c=c)}:",
        f"            {goal[3].format(r=r, e=e)}",
        f"    # {after}",
        f"    return {r}",
    ]
    code = signature + "\n" + "\n".join(body)
    prompt = rng.choice(("Complete this function.", "Please finish the function.", "Write the body of this function."))
    intro = mostly(rng, _INTROS, "intro", goal[0], source)
    outro = mostly(rng, _OUTROS, "outro", r, v).format(s=source, v=v, r=r, z=goal[2])
    tests = _tests(code, name, table((name, c, d), 1 << 30))
    return Example(f"{prompt}\n\n{signature}", f"{intro}\n\n```python\n{code}\n```\n\n{outro}", tests=tests)


def _singular(source: str) -> str:
    """Return the loop variable that goes with a list's name."""
    return {"data": "value", "entries": "entry"}.get(source, source.removesuffix("s"))


def _tests(code: str, name: str, seed: int) -> str:
    """Run the reference on a few lists and write down what it returns."""
    space: dict[str, object] = {}
    exec(code, space)  # our own text, made above
    rng = random.Random(seed)
    lists = [[], *([rng.randint(-20, 20) for _ in range(rng.randint(3, 7))] for _ in range(4))]
    function = space[name]
    assert callable(function)
    return "\n".join(f"assert {name}({values}) == {function(list(values))!r}" for values in lists)
