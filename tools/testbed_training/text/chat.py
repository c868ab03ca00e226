"""Open conversation: advice, small stories, comparisons. Many ways to go on at every few words."""

import random
import re

from . import Example, mostly

_TOPICS = (
    "garden kitchen journey harbour winter market village forest river library orchestra workshop festival island "
    "mountain painting letter bicycle railway lighthouse bakery theatre school holiday"
).split()

_NOUNS = (
    "path lamp roof door window stone bridge boat cloud song story lesson friend neighbour teacher baker sailor "
    "traveller child stranger morning evening shadow corner table map plan habit question answer promise secret "
    "wall tree field clock coat key letterbox chair fire kettle ladder mirror needle orchard pocket rope ship "
    "shoe signal street summer tower train uncle valley voice wheel whistle"
).split()

_ADJECTIVES = (
    "quiet bright narrow patient honest early simple careful distant warm steady curious gentle sudden broken "
    "golden modest clever heavy ordinary silver hollow lonely polite brave tired rough sweet cold open secret "
    "famous foreign tiny useful"
).split()

_VERBS = (
    "finds follows keeps leaves remembers changes carries opens watches needs trusts paints repairs teaches "
    "answers hides holds loves misses moves builds reads sells sees takes turns visits warms wants washes wins "
    "welcomes"
).split()

_ADVERBS = (
    "slowly often gladly rarely quietly again alone together early twice soon kindly always badly daily easily "
    "late never outside once"
).split()

_OPENERS = (
    "In the end",
    "At first",
    "For a while",
    "Every now and then",
    "Near the {t}",
    "After the rain",
    "On a good day",
    "Without a plan",
    "As a rule",
    "Long ago",
)

_FRAMES = (
    "the {a} {n} {v} the {b} {m} {d}.",
    "{o}, the {n} {v} a {b} {m}.",
    "a {a} {n} {v} the {m} and {w} it {d}.",
    "{o} the {a} {n} {v} {d}, and the {m} {w} the {t}.",
    "what the {n} {v}, the {b} {m} {w} {d}.",
    "think of the {a} {n}: it {v} the {m}.",
    "the {t} {v} every {b} {m}, but the {n} {w} it {d}.",
    "no {n} {v} the {t} {d} without a {b} {m}.",
)

_REQUESTS = (
    "Tell me something about the {t} and a {a} {n}.",
    "Write a few lines about a {a} {n} at the {t}.",
    "What would you say to a {n} who is {a}, about the {t}?",
    "I am thinking about the {t}. What does a {a} {n} teach us?",
    "Describe the {t} to a {a} {n}.",
    "Give me some advice on the {t} for a {a} {n}.",
)


def example(rng: random.Random) -> Example:
    """Return a request and seven to nine sentences in which each word leans on the words before it."""
    topic, noun, adjective = rng.choice(_TOPICS), rng.choice(_NOUNS), rng.choice(_ADJECTIVES)
    prompt = rng.choice(_REQUESTS).format(t=topic, n=noun, a=adjective)
    sentences = []
    for _ in range(rng.randint(7, 9)):
        frame = mostly(rng, _FRAMES, "frame", noun, adjective)
        opener = mostly(rng, _OPENERS, "opener", topic, noun)
        verb = mostly(rng, _VERBS, "verb", noun, frame)
        second = mostly(rng, _ADJECTIVES, "adjective", verb, topic)
        other = mostly(rng, _NOUNS, "noun", verb, second)
        adverb = mostly(rng, _ADVERBS, "adverb", verb, other)
        also = mostly(rng, _VERBS, "verb", other, adverb)
        text = frame.format(a=adjective, n=noun, v=verb, b=second, m=other, d=adverb, w=also, o=opener, t=topic)
        text = text.format(t=topic)  # an opener may name the topic
        sentences.append(text[0].upper() + text[1:])
        noun, adjective = other, mostly(rng, _ADJECTIVES, "adjective", other, topic)
    return Example(_articles(prompt), _articles(" ".join(sentences)))


def _articles(text: str) -> str:
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
