"""Output tokens per second of wall clock, with prefill (the definition of the published tables) and without.

* Tokens per second = all output tokens / wall clock of the cell, from the first request sent to the last answer ended;
  prefill, waiting and scheduling included. It is what the cards of the published drafters and ``vllm bench serve``
  ("output token throughput") give. Where requests run one after another, the wall clock is the sum of their durations.
* Decode tokens per second = sum(n_i - 1) / T, for answers of n_i tokens. T is the wall clock without prefill: every
  moment is shared equally among the requests in flight, and the shares of those that still wait for their first token
  are left out:

      T = integral of decoding(t) / in_flight(t) dt

  over the moments with requests in flight, of which decoding(t) have their first token and not their last. With one
  request at a time that is the time from first to last tokens, and the result is 1 / TPOT of ``vllm bench serve``,
  weighted by tokens. With C in flight all the time it is C times that. A neighbour's prefill in the same batch still
  slows the others: from outside it cannot be told apart. There is no published definition for more than one request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Throughput:
    """``tokens_per_s`` = all output tokens / wall clock; the quartiles are over single requests' own rates."""

    output_tokens: int
    wall_s: float
    tokens_per_s: float
    lower_quartile: float
    upper_quartile: float


def throughput(output_tokens: Sequence[int], durations_s: Sequence[float], wall_s: float | None = None) -> Throughput:
    """Summarise the requests of a cell; without ``wall_s`` they ran one after another.

    Raises ValueError without requests, for lists of different length, or a time that is not positive.
    """
    tokens = np.asarray(output_tokens, dtype=np.int64)
    seconds = np.asarray(durations_s, dtype=np.float64)
    wall = float(seconds.sum()) if wall_s is None else wall_s
    if not len(tokens) or len(tokens) != len(seconds) or not np.all(seconds > 0) or not wall > 0:
        raise ValueError("throughput needs one positive duration per request, and at least one request")
    quartiles = np.quantile(tokens / seconds, [0.25, 0.75])
    return Throughput(
        output_tokens=int(tokens.sum()),
        wall_s=wall,
        tokens_per_s=float(tokens.sum() / wall),
        lower_quartile=float(quartiles[0]),
        upper_quartile=float(quartiles[1]),
    )


class Span(NamedTuple):
    """A request on a common clock: when it was sent, when its first and last token came, and how many it has."""

    sent_s: float
    first_s: float
    last_s: float
    output_tokens: int


def decode_tokens_per_s(spans: Sequence[Span]) -> float | None:
    """Return tokens per second without prefill, as the module defines it; None if no answer has a second token.

    Raises ValueError for a request whose times are out of order.
    """
    if any(not span.sent_s <= span.first_s <= span.last_s for span in spans):
        raise ValueError("a request whose first token came before it was sent, or after its last")
    tokens = sum(span.output_tokens - 1 for span in spans)
    moments = np.unique([moment for span in spans for moment in span[:3]])
    in_flight, decoding = np.zeros(len(moments)), np.zeros(len(moments))
    for sent, first, last, _ in spans:
        sent_at, first_at, last_at = np.searchsorted(moments, (sent, first, last))
        in_flight[sent_at:last_at] += 1
        decoding[first_at:last_at] += 1
    lasting = np.diff(moments)
    busy = in_flight[:-1] > 0
    time = float(np.sum(lasting[busy] * decoding[:-1][busy] / in_flight[:-1][busy]))
    return tokens / time if tokens and time > 0 else None
