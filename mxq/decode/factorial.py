"""Which route costs acceptance: a drafter that reads one target or the other, judged by one target or the other.

A quantized target changes acceptance by two routes. Its drafter reads features that have drifted, and its verifier
chooses other tokens. Teacher-forced on one answer the two come apart: at any place of the answer, a drafter that has
read either target so far drafts K tokens, and each of the two drafts is judged by either target. That is four
*corners*, all behind the same tokens.

A draft is judged along itself, as in the verify loop: draft i + 1 by what the target says behind drafts 1 to i. Where
these are the answer's own tokens, one reading of the answer has told that already. Only where a draft leaves the answer
and the target goes along does the target have to run the draft. So a place costs two drafts and rarely more, where
four verify passes would cost ten times as much; what is accepted is the same but for rounding, since each row of a
pass depends on the tokens before it alone.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mxq.decode.drafting import Drafter, Session
from mxq.decode.forced import Forced, Reading
from mxq.decode.sampling import GREEDY
from mxq.decode.target import Pass, Target

CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))
"""Whose features the drafter reads, and whose logits judge its draft: 0 the first target, 1 the second."""

_PIECE = 1024
"""Tokens a drafter takes in at once, as in the verify loop."""


@dataclass(frozen=True)
class Corner:
    """What was accepted at each place, and how many drafts could have been: behind an end of text nothing counts."""

    accepted: list[int]
    drafted: list[int]


@torch.inference_mode()
def factorial(
    targets: tuple[Target, Target],
    drafters: tuple[Drafter, Drafter],
    forced: Forced,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    num_speculative_tokens: int,
    places: Sequence[int],
    eos_token_ids: Collection[int] = (),
) -> tuple[Corner, Corner, Corner, Corner]:
    """Draft and judge at ``places``, in all of :data:`CORNERS`.

    Args:
        targets: the two targets.
        drafters: one for each, reading what ``forced`` was made with.
        forced: both targets' readings of the text, from :func:`mxq.decode.forced.force`.
        prompt: token ids of the prompt.
        answer: token ids of the answer.
        num_speculative_tokens: K; fewer only where the model's longest sequence leaves no room.
        places: tokens of the answer, from 0 and ascending, behind which to draft. The verify loop never drafts behind
            the last one.
        eos_token_ids: tokens that end a text.
    """
    ids = torch.tensor([*prompt, *answer], device=targets[0].device)
    room = min(len(ids) + num_speculative_tokens, targets[0].max_positions)
    sessions = [drafter.start(room, num_speculative_tokens, GREEDY, None) for drafter in drafters]
    judges = [
        _Judge(target, reading, ids, len(prompt), room, eos_token_ids)
        for target, reading in zip(targets, forced.readings, strict=True)
    ]
    corners = (Corner([], []), Corner([], []), Corner([], []), Corner([], []))
    known = 0
    for place in places:
        last = len(prompt) + place
        for session, reading in zip(sessions, forced.readings, strict=True):
            _observe(session, reading.seen, ids, known, last)
        known = last
        k = min(num_speculative_tokens, targets[0].max_positions - last - 1)
        drafts = [session.propose(ids[last : last + 1], k).tokens for session in sessions]
        for (features, logits), corner in zip(CORNERS, corners, strict=True):
            accepted, drafted = judges[logits].judge(last, drafts[features])
            corner.accepted.append(accepted)
            corner.drafted.append(drafted)
    return corners


def _observe(session: Session, seen: Pass, ids: Tensor, begin: int, end: int) -> None:
    for first in range(begin, end, _PIECE):
        part = slice(first, min(first + _PIECE, end))
        features = None if seen.features is None else seen.features[part]
        session.observe(Pass(seen.hidden[part], features, seen.logits), ids[part.start + 1 : part.stop + 1])


class _Judge:
    """What one target accepts of drafts at places of a text, places ascending."""

    def __init__(
        self, target: Target, reading: Reading, ids: Tensor, prompt: int, room: int, eos: Collection[int]
    ) -> None:
        self._target = target
        self._ids = ids
        self._text: list[int] = ids.tolist()
        self._behind = {prompt - 1 + index: token for index, token in enumerate(reading.choices)}
        self._eos = eos
        self._room = room
        self._state = target.start(room)

    def judge(self, last: int, draft: Tensor) -> tuple[int, int]:
        """Return how many of ``draft`` [k] behind the token at index ``last`` count, and how many could have."""
        proposed = draft.tolist()
        for index, (token, choice) in enumerate(zip(proposed, self._choices(last, draft), strict=False)):
            if token != choice:
                return index, len(proposed)
            if token in self._eos:
                return index + 1, index + 1
        return len(proposed), len(proposed)

    def _choices(self, last: int, draft: Tensor) -> Iterator[int]:
        """Yield what the target says behind the token at ``last`` and behind each draft."""
        followed = 0
        for token in (None, *draft.tolist()):
            at = last + followed
            if token is not None and (at >= len(self._text) or self._text[at] != token):
                break
            yield self._behind[at]
            followed += 1
        yield from self._run(last, draft)[followed:]

    def _run(self, last: int, draft: Tensor) -> list[int]:
        """Return the target's choices in a verify pass over the token at ``last`` and ``draft``."""
        for begin in range(self._state.length, last, _PIECE):
            self._target.prompt(self._state, self._ids[begin : min(begin + _PIECE, last)])
        block = torch.cat([self._ids[last : last + 1], draft])
        choices: list[int] = self._target.verify(self._state, block).logits.argmax(-1).tolist()
        return choices
