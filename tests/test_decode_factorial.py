"""Two targets on one text: what is compared, and that each corner of the factorial is what decoding would do there."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion import convert
from decoding import Models, chat_prompts, end_of_text, random_prompt, reference, reference_logits, write_mxfp4
from tiny import write_target
from torch import Tensor

from mxq import decode
from mxq.decode.drafting import Draft
from mxq.decode.factorial import CORNERS, Corner, factorial
from mxq.decode.forced import Forced, Reading, force
from mxq.decode.sampling import accept_greedy
from mxq.decode.target import Target

PROMPT = random_prompt(2)
LENGTH = 24
Pair = tuple[Target, Target]


@pytest.fixture(scope="module")
def pair(tiny_models: Models, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A random target and its MXFP4 form, both in float32.

    Weights only: rounded activations beside a boundary may fall to either side in passes of another length.
    """
    path = write_mxfp4(tiny_models.target, tmp_path_factory.mktemp("mxfp4") / "target", weight_only=True)
    return target, decode.load_target(path, dtype=torch.float32)


def say(target: Target, **options: Any) -> list[int]:
    return decode.generate(target, PROMPT, **({"max_new_tokens": LENGTH} | options)).token_ids


class TellingDrafter:
    """Knows the text, and is right as often as the last features tell: by the token that is second best there.

    Rounding changes the second best as rarely as the best; another target's features often do.
    """

    taps = ()

    def __init__(self, target: Target, text: Sequence[int]) -> None:
        self.target, self.text = target, list(text)

    def start(self, capacity: int, k: int, sampling: Any, generator: Any) -> "TellingDrafter":
        self.seen, self.told = 0, 0
        return self

    def observe(self, seen: Any, following: Tensor) -> None:
        self.seen += len(following)
        self.told = int(self.target.logits(seen.hidden[-1:]).topk(2).indices[0, 1])

    def propose(self, last: Tensor, k: int) -> Draft:
        known = self.text[self.seen + 1 : self.seen + 1 + k]
        right = self.told % (k + 1)
        vocabulary = self.target.config.vocab_size
        drafts = [
            (token + (index >= right)) % vocabulary for index, token in enumerate([*known, *[0] * (k - len(known))])
        ]
        return Draft(torch.tensor(drafts), None)


class GivenDrafter:
    """Proposes what it is given for each place."""

    taps = ()

    def __init__(self, drafts: dict[int, list[int]]) -> None:
        self.drafts = drafts

    def start(self, capacity: int, k: int, sampling: Any, generator: Any) -> "GivenDrafter":
        self.seen = 0
        return self

    def observe(self, seen: Any, following: Tensor) -> None:
        self.seen += len(following)

    def propose(self, last: Tensor, k: int) -> Draft:
        return Draft(torch.tensor(self.drafts[self.seen - len(PROMPT)][:k]), None)


def starts(accepted: Sequence[int]) -> list[int]:
    """The tokens of an answer behind which the verify loop drafted."""
    found = [0]
    for count in accepted[:-1]:
        found.append(found[-1] + count + 1)
    return found


def corners_of_decoding(
    pair: Pair, role: int, forced_by: Any = force, **options: Any
) -> tuple[decode.Generation, Corner, Corner]:
    """Decode with one target; return that, and at its own passes the corner it is alone in, and the opposite one."""
    text = [*PROMPT, *say(pair[role], max_new_tokens=LENGTH + 8)]
    drafters = (TellingDrafter(pair[0], text), TellingDrafter(pair[1], text))
    limits = {"max_new_tokens": LENGTH} | options
    run = decode.generate(pair[role], PROMPT, drafter=drafters[role], num_speculative_tokens=7, **limits)
    corners = factorial(
        pair,
        drafters,
        forced_by(pair, PROMPT, run.token_ids, ()),
        PROMPT,
        run.token_ids,
        num_speculative_tokens=7,
        places=starts(run.accepted),
        eos_token_ids=limits.get("eos_token_ids", ()),
    )
    return run, corners[CORNERS.index((role, role))], corners[CORNERS.index((1 - role, role))]


@pytest.mark.parametrize("role", [0, 1])
def test_a_corner_at_the_places_of_passes_is_decoding(pair: Pair, role: int) -> None:
    run, own, other = corners_of_decoding(pair, role)
    assert own.accepted == run.accepted
    assert own.drafted == run.drafted
    assert len(set(own.accepted)) > 2
    assert other.accepted != own.accepted


@pytest.mark.parametrize("role", [0, 1])
def test_features_of_the_other_target_are_noticed(pair: Pair, role: int) -> None:
    def swapped(*given: Any) -> Forced:
        forced = force(*given)
        first, second = forced.readings
        readings = Reading(second.seen, first.choices), Reading(first.seen, second.choices)
        return replace(forced, readings=readings)

    run, own, _ = corners_of_decoding(pair, role, swapped)
    assert own.accepted != run.accepted


def test_an_end_of_text_ends_what_counts(pair: Pair) -> None:
    script = say(pair[0])
    last = max(index for index, token in enumerate(script) if token not in script[:index])
    run, own, _ = corners_of_decoding(pair, 0, eos_token_ids=[script[last]])
    assert run.finish_reason == "stop"
    assert own.accepted == run.accepted
    assert all(a <= d <= 7 for a, d in zip(own.accepted, own.drafted, strict=True))
    # What an accepted end of text leaves no room for was not refused.
    drafters = GivenDrafter({0: script[1:8]}), GivenDrafter({0: script[1:8]})
    forced = force(pair, PROMPT, script, ())
    told = factorial(
        pair, drafters, forced, PROMPT, script, num_speculative_tokens=7, places=[0], eos_token_ids=[script[3]]
    )
    end = script.index(script[3], 1)
    assert (told[0].accepted, told[0].drafted) == ([end], [end])


def test_no_draft_goes_beyond_the_longest_sequence(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in pair:
        monkeypatch.setattr(target.config, "max_position_embeddings", len(PROMPT) + 10)
    run, own, _ = corners_of_decoding(pair, 0)
    assert own.accepted == run.accepted
    assert own.drafted == run.drafted
    assert min(own.drafted) < 7


@torch.inference_mode()
def test_every_corner_is_a_verify_pass_made_afresh(pair: Pair) -> None:
    """Drafts that follow the text, leave it with the other target, leave it with neither, and go beyond its end."""
    answer = say(pair[0])
    ids = [*PROMPT, *answer]
    places = range(0, LENGTH - 1, 4)

    def continued(target: Target, place: int) -> list[int]:
        behind = [*PROMPT, *answer[: place + 1]]
        return decode.generate(target, behind, max_new_tokens=9).token_ids

    own = {place: continued(pair[0], place) for place in places}
    others = {place: continued(pair[1], place) for place in places}
    mixed = {place: [*own[place][:2], *others[place][2:]] for place in places}
    left = 0
    for drafts in (own, others, mixed):
        drafter = GivenDrafter(drafts), GivenDrafter(others)
        corners = factorial(
            pair, drafter, force(pair, PROMPT, answer, ()), PROMPT, answer, num_speculative_tokens=9, places=places
        )
        for (features, logits), corner in zip(CORNERS, corners, strict=True):
            for place, accepted in zip(places, corner.accepted, strict=True):
                draft = (drafts, others)[features][place]
                target = pair[logits]
                block = torch.tensor([*ids[: len(PROMPT) + place + 1], *draft])
                seen = target.prompt(target.start(len(block)), block)
                rows = target.logits(seen.hidden[len(PROMPT) + place :])
                assert accepted == accept_greedy(rows, torch.tensor(draft))[0]
                followed = draft[:accepted] == answer[place + 1 : place + 1 + accepted]
                left += accepted > 0 and not followed
    assert left > 5  # where reading the text alone would not tell


@torch.inference_mode()
@pytest.mark.parametrize("method", ["dflash", "mtp"])
def test_drafters_read_what_they_read_in_decoding(tiny_models: Models, pair: Pair, method: Any) -> None:
    """Random drafters are hardly ever right, so that here their drafts are looked at."""
    answer = say(pair[0])
    path = tiny_models.drafter if method == "dflash" else None
    drafters = [decode.load_drafter(path, target, method) for target in pair]
    forced = force(pair, PROMPT, answer, drafters[0].taps)
    drafted: dict[int, list[list[int]]] = {0: [], 1: []}

    class Recording:
        def __init__(self, role: int) -> None:
            self.role, self.taps = role, drafters[role].taps

        def start(self, *given: Any) -> "Recording":
            self.session = drafters[self.role].start(*given)
            self.observe = self.session.observe
            return self

        def propose(self, last: Tensor, k: int) -> Draft:
            draft = self.session.propose(last, k)
            drafted[self.role].append(draft.tokens.tolist())
            return draft

    places = [0, 5, 6, 17]
    factorial(pair, (Recording(0), Recording(1)), forced, PROMPT, answer, num_speculative_tokens=5, places=places)
    for role, target in enumerate(pair):
        for place, tokens in zip(places, drafted[role], strict=True):
            behind = torch.tensor([*PROMPT, *answer[: place + 1]])
            session = drafters[role].start(200, 5, decode.GREEDY, None)
            seen = target.prompt(target.start(len(behind)), behind[:-1], drafters[role].taps)
            session.observe(seen, behind[1:])
            assert tokens == session.propose(behind[-1:], 5).tokens.tolist()
    assert drafted[0] != drafted[1]


def test_a_target_beside_itself_changes_nothing(tiny_models: Models, target: Target) -> None:
    answer = say(target)
    drafter = decode.load_drafter(tiny_models.drafter, target, "dflash")
    same = (target, target)
    forced = force(same, PROMPT, answer, drafter.taps)
    assert forced.flips == ()
    assert forced.divergence.max() == 0
    assert forced.error.max() == 0
    assert forced.cosine.min() > 0.9999
    text = [*PROMPT, *answer]
    telling = TellingDrafter(target, text), TellingDrafter(target, text)
    for drafters in (telling, (drafter, drafter)):
        corners = factorial(same, drafters, forced, PROMPT, answer, num_speculative_tokens=7, places=range(LENGTH - 1))
        assert all(corner == corners[0] for corner in corners)


@pytest.fixture(scope="module")
def unlike(tiny_models: Models, target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, list[Path]]:
    """Two random targets that have nothing in common but their shape."""
    path = tmp_path_factory.mktemp("unlike") / "target"
    write_target(path, moe="moe" in str(tiny_models.target), seed=1)
    return (target, decode.load_target(path, dtype=torch.float32)), [tiny_models.target, path]


@pytest.mark.parametrize("piece", [7, 1000])
def test_comparisons_are_those_of_transformers(
    unlike: tuple[Pair, list[Path]], monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    pair, paths = unlike
    monkeypatch.setattr("mxq.decode.forced._PIECE", piece)
    answer = say(pair[0])
    ids = [*PROMPT, *answer]
    forced = force(pair, PROMPT, answer, (0, 2))
    begin = len(PROMPT) - 1
    logits = [reference_logits(reference(path), ids)[begin:] for path in paths]
    p, q = (one[:LENGTH].double().log_softmax(-1) for one in logits)
    expected = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(forced.divergence.double(), expected, rtol=1e-3, atol=1e-4)
    best = logits[0][:LENGTH].topk(2).values
    torch.testing.assert_close(forced.margin, best[:, 0] - best[:, 1], rtol=1e-3, atol=1e-4)
    for reading, one in zip(forced.readings, logits, strict=True):
        assert list(reading.choices) == one.argmax(-1).tolist()
    assert list(forced.readings[0].choices[:LENGTH]) == answer
    told = [one.argmax(-1).tolist() for one in logits]
    assert [flip.token for flip in forced.flips] == [i for i in range(LENGTH) if told[0][i] != told[1][i]]
    assert forced.flips
    for flip in forced.flips:
        a, b = told[0][flip.token], told[1][flip.token]
        first, second = (one[flip.token] for one in logits)
        assert flip.first_gap == pytest.approx(float(first[a] - first[b]), abs=1e-3)
        assert flip.second_gap == pytest.approx(float(second[b] - second[a]), abs=1e-3)
        assert min(flip.first_gap, flip.second_gap) > 0


@torch.inference_mode()
def test_drift_is_of_what_the_drafter_reads(unlike: tuple[Pair, list[Path]]) -> None:
    pair, _ = unlike
    answer = say(pair[0])
    ids = torch.tensor([*PROMPT, *answer])
    for taps in ((2, 0), ()):
        forced = force(pair, PROMPT, answer, taps)
        a, b = (target.prompt(target.start(len(ids)), ids, taps) for target in pair)
        read = [(a.hidden, b.hidden)]
        if taps:
            assert a.features is not None
            assert b.features is not None
            read = list(zip(a.features.chunk(2, dim=-1), b.features.chunk(2, dim=-1), strict=True))
        assert forced.cosine.shape == forced.error.shape == (len(read), len(ids))
        for index, (x, y) in enumerate(read):
            error = (y - x).norm(dim=-1) / x.norm(dim=-1)
            torch.testing.assert_close(forced.error[index], error, rtol=1e-3, atol=1e-4)
            cosine = (x * y).sum(-1) / x.norm(dim=-1) / y.norm(dim=-1)
            torch.testing.assert_close(forced.cosine[index], cosine, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mtp", "dflash"])
def test_corners_of_the_testbed_are_its_decoding(trained: Models, tmp_path: Path, method: Any) -> None:
    """Trained drafters, which are often right: each target on its own answers, and features of the other noticed."""
    mxfp4 = convert(trained.target, tmp_path / "mxfp4")
    first, second = (decode.load_target(path, dtype=torch.float32) for path in (trained.target, mxfp4))
    path = trained.drafter if method == "dflash" else None
    drafters = (decode.load_drafter(path, first, method), decode.load_drafter(path, second, method))
    eos = end_of_text(trained)
    differ = 0
    for role, target in enumerate((first, second)):
        for prompt in chat_prompts(trained, 1):
            run = decode.generate(
                target,
                prompt,
                drafter=drafters[role],
                num_speculative_tokens=15,
                max_new_tokens=64,
                eos_token_ids=eos,
            )
            forced = force((first, second), prompt, run.token_ids, drafters[0].taps)
            corners = factorial(
                (first, second),
                drafters,
                forced,
                prompt,
                run.token_ids,
                num_speculative_tokens=15,
                places=starts(run.accepted),
                eos_token_ids=eos,
            )
            assert corners[CORNERS.index((role, role))].accepted == run.accepted
            differ += corners[CORNERS.index((1 - role, role))].accepted != run.accepted
    assert differ
