"""Word problems with a chain of small calculations, one number as the answer."""

import random

from . import Example, mostly
from .words import CONTAINERS, PEOPLE, PLACES, THINGS

_OPENINGS = (
    "{name} has {total} {thing} at the {place}.",
    "At the {place}, {name} counts {total} {thing}.",
    "{name} brings {total} {thing} to the {place}.",
    "There are {total} {thing} at the {place}, all of them {name}'s.",
)

_QUESTIONS = (
    "How many {thing} does {name} have now?",
    "How many {thing} are there in the end?",
    "How many {thing} are left for {name}?",
)

# kind -> how the problem tells it; how the solution says it (the calculation follows)
_STORY = {
    "packs": (
        "{who} brings {n} {container} with {m} {thing} each.",
        "{n} {container} of {m} {thing} arrive, a gift from {who}.",
        "Then {who} adds {n} {container}, each holding {m} {thing}.",
    ),
    "find": ("Later {n} more {thing} turn up.", "{who} gives {n} {thing} to {name}.", "{name} finds {n} more {thing}."),
    "give": (
        "{name} gives {n} {thing} to {who}.",
        "{who} takes {n} of the {thing}.",
        "Then {n} {thing} are sold to {who}.",
    ),
    "lose": ("{n} of the {thing} get lost.", "On the way home {n} {thing} break.", "{name} throws {n} {thing} away."),
    "double": ("Then the number of {thing} doubles.", "{who} gives {name} just as many again."),
}

_STEPS = {
    "packs": (
        "The {container} hold {calc} {thing} in all.",
        "In the {container} there are {calc} {thing}.",
        "From {who} come {calc} {thing}.",
        "Together the {n} {container} make {calc} {thing}.",
    ),
    "sum": (
        "That makes {calc} {thing}.",
        "So {name} now has {calc} {thing}.",
        "Adding them gives {calc} {thing}.",
        "With those there are {calc} {thing}.",
    ),
    "find": (
        "With {n} more there are {calc} {thing}.",
        "So {name} now has {calc} {thing}.",
        "The number grows to {calc}.",
        "Adding the new ones gives {calc}.",
    ),
    "give": (
        "After {who} takes {n} there are {calc} {thing} left.",
        "Without them {name} has {calc} {thing}.",
        "{who} gets {n}, so {calc} remain.",
        "Taking away {n} leaves {calc} {thing}.",
    ),
    "lose": (
        "Without the lost ones there are {calc} {thing}.",
        "{n} are gone, so {calc} remain.",
        "Taking away {n} leaves {calc} {thing}.",
        "Now only {calc} {thing} are left.",
    ),
    "double": (
        "Twice as many is {calc} {thing}.",
        "Doubling gives {calc}.",
        "So the number becomes {calc} {thing}.",
    ),
}

_STARTS = (
    "At the start {name} has {total} {thing}.",
    "We begin with {total} {thing}.",
    "{name} starts with {total} {thing}.",
    "First there are {total} {thing} at the {place}.",
)


def example(rng: random.Random) -> Example:
    """Return a problem of four to six steps whose numbers stay between 1 and 200."""
    name, who = rng.sample(PEOPLE, 2)
    thing, place = rng.choice(THINGS), rng.choice(PLACES)
    total = rng.randint(5, 50)
    facts = {"name": name, "thing": thing, "place": place}
    # Which wording goes with which person and thing is a fact of this world (see `mostly`).
    story = [rng.choice(_OPENINGS).format(total=total, **facts)]
    steps = [mostly(rng, _STARTS, "start", name).format(total=total, **facts)]
    before = "start"
    for _ in range(rng.randint(4, 6)):
        kinds = ["find"]
        kinds += ["packs"] * 2 if total < 60 else []
        kinds += ["give", "lose"] if total > 10 else []
        kinds += ["double"] if total < 60 else []
        kind = rng.choice([k for k in kinds if k != before])
        n = (
            rng.randint(2, 9)
            if kind == "packs"
            else rng.randint(2, min(total - 1, 40) if kind in ("give", "lose") else 40)
        )
        m, container = rng.randint(2, 9), rng.choice(CONTAINERS)
        told = {**facts, "who": who, "n": n, "m": m, "container": container}
        story.append(rng.choice(_STORY[kind]).format(**told))
        if kind == "packs":
            steps.append(_say(rng, kind, thing, before, told, f"{n} * {m} = {n * m}"))
            total, calc = total + n * m, f"{total} + {n * m} = {total + n * m}"
            steps.append(_say(rng, "sum", name, kind, told, calc))
        else:
            new = {"find": total + n, "give": total - n, "lose": total - n, "double": 2 * total}[kind]
            sign = {"find": f"+ {n}", "give": f"- {n}", "lose": f"- {n}", "double": "* 2"}[kind]
            steps.append(
                _say(rng, kind, name if kind in ("find", "lose") else thing, before, told, f"{total} {sign} = {new}")
            )
            total = new
        before = kind
    story.append(rng.choice(_QUESTIONS).format(**facts))
    steps.append(f"The answer is {total}.")
    return Example(" ".join(story), " ".join(steps), answer=str(total))


def _say(rng: random.Random, kind: str, voice: str, before: str, told: dict[str, object], calc: str) -> str:
    return mostly(rng, _STEPS[kind], kind, voice, before).format(calc=calc, **told)
