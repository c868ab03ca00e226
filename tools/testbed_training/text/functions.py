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

# how the chosen items are brought together: name, words, start, update, result
_GOALS = (
    ("sum", "the sum of", "0", "{r} += {e}", "{r}"),
    ("count", "how many there are of", "0", "{r} += 1", "{r}"),
    ("list", "a list of", "[]", "{r}.append({e})", "{r}"),
    ("product", "the product of", "1", "{r} *= {e}", "{r}"),
    ("largest", "the largest of", "None", "if {r} is None or {e} > {r}:\n                {r} = {e}", "{r}"),
    ("smallest", "the smallest of", "None", "if {r} is None or {e} < {r}:\n                {r} = {e}", "{r}"),
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
    v, r = source_item(source), _result(goal[0], source)
    e = change[2].format(v=v, d=d)
    body = [f"    {r} = {goal[2]}", f"    for {v} in {source}:", f"        if {item_filter[2].format(v=v, c=c)}:"]
    body += [f"            {goal[3].format(r=r, e=e)}", f"    return {goal[4].format(r=r)}"]
    code = signature + "\n" + "\n".join(body)
    prompt = rng.choice(("Complete this function.", "Please finish the function.", "Write the body of this function."))
    intro = mostly(
        rng,
        (
            "Here is the function.",
            "Here is the finished function.",
            "The function goes through the list once.",
            "This does what the docstring says.",
        ),
        "intro", goal[0], source,
    )
    outro = mostly(
        rng,
        (
            f"It looks at every {v} and keeps the result in {r}.",
            f"The variable {r} holds the result.",
            f"Every {v} in {source} is looked at once.",
            f"With an empty list it returns {goal[2]}.",
        ),
        "outro", item_filter[0], source,
    )
    tests = _tests(code, name, table((name, c, d), 1 << 30))
    return Example(f"{prompt}\n\n{signature}", f"{intro}\n\n```python\n{code}\n```\n\n{outro}", tests=tests)


def source_item(source: str) -> str:
    """Return the loop variable that goes with a list's name."""
    return {"data": "value", "entries": "entry"}.get(source, source.removesuffix("s"))


def _result(goal: str, source: str) -> str:
    names = {"sum": "total", "count": "count", "list": "result", "product": "product"}
    return names.get(goal, "best") if table((goal, source), 3) else "answer"


def _tests(code: str, name: str, seed: int) -> str:
    """Run the reference on a few lists and write down what it returns."""
    space: dict[str, object] = {}
    exec(code, space)  # our own text, made above
    rng = random.Random(seed)
    lists = [[], *([rng.randint(-20, 20) for _ in range(rng.randint(3, 7))] for _ in range(4))]
    function = space[name]
    assert callable(function)
    return "\n".join(f"assert {name}({values}) == {function(list(values))!r}" for values in lists)
