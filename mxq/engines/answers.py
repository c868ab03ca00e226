"""One streamed answer of a vLLM server: events of ``/v1/completions`` or ``/v1/chat/completions`` put together.

Pure: bytes and times go in, an :class:`Answer` comes out, or a ServerError that says what is wrong with them. What a
server says twice is compared: tokens that were sent with tokens that were counted, passes with their sums.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mxq.engines.process import ServerError
from mxq.engines.stream import Kept

_MOST_LINE = 1 << 24
_MOST_QUOTED = 200


@dataclass(frozen=True)
class Acceptance:
    """What vLLM says of a request's verify passes (v1/metrics/stats.py RequestSpecDecodeMetrics).

    It counts a pass in full, also what lies behind an end of text or the token limit. A pass without drafts is none.

    Attributes:
        histogram: passes by the number of drafts accepted, K + 1 entries.
        drafted: drafts in all passes together.
        per_pass: accepted and drafted in each pass, in order; None unless the server was asked for details.
    """

    histogram: tuple[int, ...]
    drafted: int
    per_pass: tuple[tuple[int, int], ...] | None

    @property
    def passes(self) -> int:
        """How many passes verified drafts."""
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        """How many drafts were accepted."""
        return sum(number * count for number, count in enumerate(self.histogram))


@dataclass(frozen=True)
class Answer:
    """An answered request; times are in seconds since it was sent.

    Attributes:
        text: what was generated.
        token_ids: the same as tokens, the end of text included; None if the server does not send them.
        output_tokens, prompt_tokens: as the server counted.
        finish_reason: "stop" or "length".
        arrivals_s: when each piece with tokens came; with speculation, a piece is what a pass committed.
        duration_s: when the stream had ended.
        acceptance: None if the server does not say.
    """

    text: str
    token_ids: tuple[int, ...] | None
    output_tokens: int
    prompt_tokens: int
    finish_reason: str
    arrivals_s: tuple[float, ...]
    duration_s: float
    acceptance: Acceptance | None

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.arrivals_s[0]

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Times between pieces, which ``vllm bench serve`` calls inter-token latencies."""
        return tuple(b - a for a, b in zip(self.arrivals_s, self.arrivals_s[1:], strict=False))

    @property
    def per_token_s(self) -> float | None:
        """Mean time of a token after the first one; None if there was one only."""
        after = self.output_tokens - 1
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / after if after > 0 else None

    def passes(self) -> tuple[tuple[int, int], ...] | None:
        """Return accepted and drafted in each pass, as :class:`mxq.engines.Completion` counts them.

        That leaves out what was accepted behind an end of text. None if the server does not give each pass.
        """
        said = self.acceptance
        if said is None or said.per_pass is None:
            return None
        made = 1 + said.passes + said.accepted  # the prefill's token, and of each pass the drafts and one of its own
        behind = made - self.output_tokens
        if self.finish_reason != "stop" or behind <= 0 or not said.per_pass:
            return said.per_pass
        *others, (accepted, drafted) = said.per_pass
        # The end of text was a draft: behind it are accepted ones, and the pass's own token.
        return (*others, (accepted - (behind - 1), drafted))


class Events:
    """Takes a stream of server-sent events apart; gives the data of each as JSON objects."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self.done = False

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the events that are complete with this piece of the stream."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > _MOST_LINE:
            raise ServerError(f"the server sends a line of more than {_MOST_LINE >> 20} MiB")
        for line in lines:
            if line.startswith(b"data:"):
                yield from self._event(line[5:].strip())

    def end(self) -> None:
        """Raise ServerError if the stream ended before the server said that it has."""
        if not self.done:
            cut = " in the middle of an event" if self._rest.strip() else ""
            raise ServerError(f"the stream was cut{cut}", lost=True)

    def _event(self, data: bytes) -> Iterator[dict[str, Any]]:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise ServerError(f"the server sends broken JSON: {quoted_text(data.decode(errors='replace'))}") from None
        if not isinstance(event, dict):
            raise ServerError(f"the server sends what is no object: {quoted_text(data.decode(errors='replace'))}")
        yield event


@dataclass
class Assembly:
    """An answer that is on its way; ``max_tokens`` is how long it may become."""

    max_tokens: int
    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    with_ids: bool = False
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    acceptance: Acceptance | None = None

    def add(self, event: dict[str, Any], at: float) -> None:
        """Take one event that came at time ``at``."""
        if (error := event.get("error")) is not None:
            said, code = (error.get("message"), error.get("code")) if isinstance(error, dict) else (error, None)
            status = code if type(code) is int else 500
            raise ServerError(f"the server gave up an answer: {quoted_text(str(said))}", status=status)
        choices = _typed(event, "choices", list)
        if len(choices) > 1 or (choices and not isinstance(choices[0], dict)):
            raise ServerError("the server sends several answers to one request")
        if choices:
            self._add_choice(choices[0], at)
        if event.get("usage") is not None:
            self.usage = _typed(event, "usage", dict)
        if isinstance(metrics := event.get("metrics"), dict) and metrics.get("speculative_decoding") is not None:
            self.acceptance = _acceptance(_typed(metrics, "speculative_decoding", dict))

    def _add_choice(self, choice: dict[str, Any], at: float) -> None:
        delta = choice.get("delta")
        parts = [choice.get("text")] if delta is None else []
        if isinstance(delta, dict):
            parts = [delta.get("reasoning") or delta.get("reasoning_content"), delta.get("content")]
        text = "".join(part for part in parts if isinstance(part, str))
        ids: list[int] = []
        if choice.get("token_ids") is not None:
            ids = _counts(choice, "token_ids")
            self.with_ids = True
        if text or ids:
            self.texts.append(text)
            self.ids += ids
            self.arrivals.append(at)
        if max(len(self.ids), len(self.arrivals)) > self.max_tokens:
            raise ServerError(f"the server sends more than the {self.max_tokens} tokens it was asked for")
        if choice.get("finish_reason") is not None:
            self.finish_reason = _typed(choice, "finish_reason", str)

    def answer(self, duration_s: float) -> Answer:
        """Return the answer, now that the stream has ended; raises ServerError if what came is not a whole one."""
        if self.finish_reason is None:
            raise ServerError("the server ends an answer without saying why")
        if self.finish_reason not in ("stop", "length"):
            raise ServerError(f"the server ends an answer by {quoted_text(self.finish_reason)!r}")
        if self.usage is None:
            raise ServerError("the server does not count the tokens of an answer (usage)")
        output, prompt = _count(self.usage, "completion_tokens"), _count(self.usage, "prompt_tokens")
        if self.with_ids and len(self.ids) != output:
            raise ServerError(f"the server sent {len(self.ids)} tokens and counted {output}")
        if not 0 < output <= self.max_tokens or not self.arrivals:
            raise ServerError(f"the server counted {output} tokens, of at most {self.max_tokens} asked for")
        if self.finish_reason == "length" and output < self.max_tokens:
            raise ServerError(
                f"an answer was cut after {output} of {self.max_tokens} tokens: the model's length is reached",
                "start the server with a larger --engine-arg max-model-len, or ask for less",
            )
        said = self.acceptance
        if said is not None and 1 + said.passes + said.accepted - output >= len(said.histogram):
            raise ServerError(
                f"the server counted {output} tokens, but {said.passes} passes with {said.accepted} drafts"
            )
        ids = tuple(self.ids) if self.with_ids else None
        text, arrivals = "".join(self.texts), tuple(self.arrivals)
        return Answer(text, ids, output, prompt, self.finish_reason, arrivals, duration_s, said)


class Received:
    """A streamed answer as it came; ``max_tokens`` is how long it may become, ``begin`` when it was asked for.

    Reading it can wait until nothing is measured any more. That there is a whole answer, and no error in its stead, is
    seen at once.
    """

    def __init__(self, max_tokens: int, begin: float) -> None:
        self._begin, self._duration_s = begin, 0.0
        self._assembly, self._events = Assembly(max_tokens), Events()
        self._kept: Kept | None = None

    @property
    def tokens(self) -> int:
        """How many have been read."""
        return len(self._assembly.ids if self._assembly.with_ids else self._assembly.arrivals)

    @property
    def unread(self) -> int:
        """How many bytes have not been read."""
        return 0 if self._kept is None else self._kept.size

    def take(self, at: float, piece: bytes) -> None:
        """Read what came at a time; raises ServerError if it is no part of an answer."""
        for event in self._events.feed(piece):
            self._assembly.add(event, at - self._begin)

    def end(self, at: float, kept: Kept | None) -> None:
        """End, with what was kept to be read later; raises ServerError for an answer that was cut."""
        self._duration_s, self._kept = at - self._begin, kept
        if kept is None:
            self._events.end()

    def answer(self) -> Answer:
        """Return the answer; raises ServerError if what came is not a whole one."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            for at, piece in kept:
                self.take(at, piece)
            if not kept.whole:
                raise ServerError("the server sends chunks that are not as long as it says")
        return self._assembly.answer(self._duration_s)


def quoted_text(text: str) -> str:
    """Return what a server said as it can be shown in an error: one line, not long."""
    line = " ".join(text.split())
    line = "".join(sign for sign in line if sign.isprintable())
    return line if len(line) <= _MOST_QUOTED else f"{line[:_MOST_QUOTED]}…"


def _acceptance(said: dict[str, Any]) -> Acceptance:
    histogram = _counts(said, "acceptance_histogram")
    per_pass = None
    if said.get("per_step_accepted") is not None:
        accepted, drafted = _counts(said, "per_step_accepted"), _counts(said, "per_step_drafted")
        if len(accepted) != len(drafted) or any(a > d for a, d in zip(accepted, drafted, strict=True)):
            raise ServerError("the server counts more drafts accepted than drafted")
        per_pass = tuple(zip(accepted, drafted, strict=True))
    elif not sum(histogram):
        per_pass = ()
    made = Acceptance(tuple(histogram), _count(said, "num_draft_tokens"), per_pass)
    sums = (made.passes, made.accepted, made.drafted)
    if (_count(said, "num_spec_steps"), _count(said, "num_accepted_draft_tokens")) != sums[:2] or (
        per_pass is not None and (len(per_pass), sum(a for a, _ in per_pass), sum(d for _, d in per_pass)) != sums
    ):
        raise ServerError("the server's counts of a request's verify passes contradict each other")
    return made


def _typed(holder: dict[str, Any], key: str, kind: type[Any]) -> Any:
    value = holder.get(key)
    if not isinstance(value, kind):
        raise ServerError(f"the server sends no {key}: {quoted_text(json.dumps(holder))}")
    return value


def _count(holder: dict[str, Any], key: str) -> int:
    value = holder.get(key)
    if type(value) is not int or value < 0:
        raise ServerError(f"the server counts no {key}: {quoted_text(json.dumps(holder))}")
    return value


def _counts(holder: dict[str, Any], key: str) -> list[int]:
    values: list[Any] = _typed(holder, key, list)
    if not all(type(value) is int and value >= 0 for value in values):
        raise ServerError(f"the server's {key} are no counts: {quoted_text(json.dumps(holder))}")
    return values
