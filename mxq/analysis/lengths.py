"""Answers that became longer or shorter: a change of acceptance is then one of what is said, too.

A target that is damaged can fall into repeating itself until the token limit. Such text is easy to draft: acceptance
rises, and nothing else in a comparison would tell.
"""

from collections.abc import Iterator, Sequence

from mxq.analysis.pairs import Pair, cells_of

_DIFFERENT = 0.1
"""Mean lengths that differ by more than this share are said, and so are shares of answers cut at the limit."""


def differing(found: Sequence[Pair], base: str, new: str) -> Iterator[str]:
    """Yield a sentence for each workload that the two sides, of these names, answer at different lengths."""
    for workload in dict.fromkeys(pair.workload for pair in found):
        mine = [pair for pair in found if pair.workload == workload]
        sides = [[record for cell in cells_of(mine, base=side) for record in cell.records] for side in (True, False)]
        means = [sum(record.output_tokens for record in side) / len(side) for side in sides]
        cut = [sum(record.finish_reason == "length" for record in side) / len(side) for side in sides]
        if abs(means[1] / means[0] - 1) > _DIFFERENT or abs(cut[1] - cut[0]) > _DIFFERENT:
            yield (
                f"Answers to {workload} differ in length: {means[0]:.0f} tokens on average in {base} ({cut[0]:.0%} cut "
                f"at the limit), {means[1]:.0f} in {new} ({cut[1]:.0%}). Read some: text that repeats itself is easy "
                "to draft, so that acceptance can rise where answers have become worse."
            )
