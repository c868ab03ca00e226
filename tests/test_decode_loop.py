"""What a generation reports: where it ends, what counts, and which requests are refused."""

from typing import Any

import pytest
import torch
from decoding import GuessingDrafter, Models, random_prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from mxq import decode
from mxq.decode.target import Target
from mxq.errors import UsageError

PROMPT = random_prompt(2)


@pytest.fixture(scope="module")
def script(dense_target: Target) -> list[int]:
    return decode.generate(dense_target, PROMPT, max_new_tokens=40).token_ids


def speculate(target: Target, script: list[int], k: int, right: float = 0.8, **options: Any) -> decode.Generation:
    drafter = GuessingDrafter(PROMPT, script, target.config.vocab_size, right)
    return decode.generate(target, PROMPT, drafter=drafter, num_speculative_tokens=k, **options)


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_counts_add_up(dense_target: Target, script: list[int], data: Any) -> None:
    """Output = 1 + sum(accepted + 1) - overshoot, wherever the output ends."""
    k = data.draw(st.sampled_from([1, 3, 7]))
    limit = data.draw(st.integers(1, 24))
    eos = data.draw(st.sets(st.sampled_from(script[:24]), max_size=2))
    right = data.draw(st.sampled_from([0.0, 0.6, 1.0]))
    run = speculate(dense_target, script, k, right, max_new_tokens=limit, eos_token_ids=eos)
    plain = decode.generate(dense_target, PROMPT, max_new_tokens=limit, eos_token_ids=eos)
    assert run.token_ids == plain.token_ids
    assert run.finish_reason == plain.finish_reason
    assert run.drafted == [k] * len(run.accepted)
    assert all(0 <= n <= k for n in run.accepted)
    before_last = 1 + sum(n + 1 for n in run.accepted[:-1])
    if run.accepted:
        overshoot = before_last + run.accepted[-1] + 1 - len(run.token_ids)
        assert before_last < len(run.token_ids)
        assert 0 <= overshoot <= k
    else:
        assert len(run.token_ids) == 1
    assert (plain.accepted, plain.drafted) == ([], [])


def test_drafts_behind_an_end_of_text_do_not_count(dense_target: Target, script: list[int]) -> None:
    end = next(i for i in range(3, 7) if script[i] not in script[:i])
    run = speculate(dense_target, script, 15, right=1.0, max_new_tokens=40, eos_token_ids=[script[end]])
    assert run.token_ids == script[: end + 1]
    assert run.finish_reason == "stop"
    assert run.accepted == [end]  # script[0] is the prompt's; then `end` drafts up to the end of text, and no bonus


def test_the_last_pass_counts_in_full_when_max_new_tokens_cuts_it(dense_target: Target, script: list[int]) -> None:
    run = speculate(dense_target, script, 7, right=1.0, max_new_tokens=12)
    assert run.token_ids == script[:12]
    assert run.finish_reason == "length"
    assert run.accepted == [7, 7]


def test_end_of_text_as_the_first_token(dense_target: Target, script: list[int]) -> None:
    run = speculate(dense_target, script, 3, max_new_tokens=12, eos_token_ids=[script[0]])
    assert (run.token_ids, run.accepted, run.finish_reason) == (script[:1], [], "stop")


def test_end_of_text_beyond_the_limit_is_not_reached(dense_target: Target, script: list[int]) -> None:
    end = next(i for i in range(3, 8) if script[i] not in script[:i])
    run = speculate(dense_target, script, 7, right=1.0, max_new_tokens=end, eos_token_ids=[script[end]])
    assert (run.token_ids, run.finish_reason) == (script[:end], "length")


@pytest.mark.parametrize("k", [1, 7])
def test_output_ends_with_the_longest_sequence_of_the_model(
    dense_target: Target, script: list[int], monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    monkeypatch.setattr(dense_target.config, "max_position_embeddings", len(PROMPT) + 10)
    run = speculate(dense_target, script, k, right=1.0, max_new_tokens=100)
    assert run.token_ids == script[:10]
    assert run.finish_reason == "length"
    # No draft is made for which there would be no position.
    assert run.drafted == ([7, 1] if k == 7 else [1] * 5)
    assert decode.generate(dense_target, PROMPT, max_new_tokens=100).token_ids == script[:10]


def test_prompts_of_any_number_of_pieces(
    dense_models: Models, dense_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = (PROMPT * 20)[:100]
    drafters = {
        "mtp": decode.load_drafter(None, dense_target, "mtp"),
        "dflash": decode.load_drafter(dense_models.drafter, dense_target, "dflash"),
    }

    def outputs(piece: int) -> list[decode.Generation]:
        monkeypatch.setattr("mxq.decode.loop._PROMPT_PIECE", piece)
        return [
            decode.generate(dense_target, prompt, drafter=drafter, num_speculative_tokens=4, max_new_tokens=8)
            for drafter in drafters.values()
        ]

    def facts(runs: list[decode.Generation]) -> list[Any]:
        return [(run.token_ids, run.accepted) for run in runs]

    assert facts(outputs(30)) == facts(outputs(100)) == facts(outputs(1024))


def test_sampled_output_repeats_with_its_seed(dense_models: Models, dense_target: Target) -> None:
    drafter = decode.load_drafter(dense_models.drafter, dense_target, "dflash")

    def run(seed: int) -> list[int]:
        return decode.generate(
            dense_target,
            PROMPT,
            drafter=drafter,
            num_speculative_tokens=3,
            max_new_tokens=12,
            sampling=decode.Sampling(1.0, 0.95, 20),
            generator=torch.Generator().manual_seed(seed),
        ).token_ids

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_times_are_parts_of_the_whole(dense_models: Models, dense_target: Target) -> None:
    drafter = decode.load_drafter(dense_models.drafter, dense_target, "dflash")
    run = decode.generate(dense_target, PROMPT, drafter=drafter, num_speculative_tokens=3, max_new_tokens=8)
    assert 0 < run.ttft_s < run.duration_s
    assert min(run.target_s, run.draft_s) > 0
    assert run.target_s + run.draft_s < run.duration_s
    assert decode.generate(dense_target, PROMPT, max_new_tokens=8).draft_s == 0


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([5, 512], {}, "prompt token 512 is outside the vocabulary of 512"),
        ([-1], {}, "prompt token -1 is outside"),
        ([1] * 2048, {}, "the prompt has 2048 tokens and the model takes 2048"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([1], {"num_speculative_tokens": 3}, "3 speculative tokens without a drafter"),
        ([1], {"drafter": object()}, "0 speculative tokens with a drafter"),
        ([1], {"drafter": object(), "num_speculative_tokens": -1}, "-1 speculative tokens"),
    ],
)
def test_requests_that_cannot_be_run(
    dense_target: Target, prompt: list[int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        decode.generate(dense_target, prompt, **({"max_new_tokens": 4} | options))


def test_the_longest_prompt_yields_one_token(dense_target: Target) -> None:
    run = decode.generate(dense_target, [1] * 2047, max_new_tokens=5)
    assert (len(run.token_ids), run.finish_reason) == (1, "length")
