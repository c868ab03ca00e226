"""Sampling and rejection sampling: against transformers' own rules, and in distribution."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from decoding import MemoDrafter, MemoTarget, Models, TiltedDrafter, chat_prompts, reference, reference_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mxq import decode
from mxq.decode.sampling import Sampling, accept_greedy, accept_sampled, choose
from mxq.errors import UsageError

LOOP = "mxq.decode.loop.accept_sampled"


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(0, 30),
    top_p=st.floats(0.05, 1.0),
)
def test_probabilities_follow_transformers(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(seed)) * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    ours = Sampling(temperature, top_p, top_k).probabilities(logits)
    torch.testing.assert_close(ours, expected.softmax(-1), rtol=1e-4, atol=1e-6)


def test_extremes() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert Sampling(1.0, top_k=1).probabilities(logits).tolist() == [[0.0, 1.0, 0.0]]
    assert Sampling(1.0, top_p=1e-6).probabilities(logits).tolist() == [[0.0, 1.0, 0.0]]
    assert choose(logits, Sampling(1e-6), None)[0].tolist() == [1]
    assert Sampling().greedy
    assert not Sampling(0.01).greedy


@pytest.mark.parametrize(
    "values", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_k": -1}]
)
def test_impossible_settings_are_usage_errors(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        Sampling(**values)


def test_greedy_accepts_the_longest_agreeing_prefix() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([3, 1, 4, 1]), 6).float()
    assert accept_greedy(logits, torch.tensor([3, 1, 4])) == (3, [3, 1, 4, 1])
    assert accept_greedy(logits, torch.tensor([3, 5, 4])) == (1, [3, 1])
    assert accept_greedy(logits, torch.tensor([0, 1, 4])) == (0, [3])


def test_a_draft_the_target_gives_no_chance_is_never_accepted() -> None:
    logits = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    q = torch.tensor([[0.0, 1.0]])
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        assert accept_sampled(logits, torch.tensor([1]), q, Sampling(1.0), generator) == (0, [0])


def test_the_target_as_its_own_drafter_is_always_accepted() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 50, generator=generator)
    for _ in range(50):
        drafts, q = choose(logits[:7], Sampling(0.8, 0.9, 20), generator)
        assert q is not None
        assert accept_sampled(logits, drafts, q, Sampling(0.8, 0.9, 20), generator)[0] == 7


def exact_distribution(
    logits_after: Callable[[tuple[int, ...]], Tensor], prompt: list[int], sampling: Sampling
) -> dict[tuple[int, ...], float]:
    """Enumerate the autoregressive probability of every sequence of three tokens."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for tokens, probability in found.items():
            row = sampling.probabilities(logits_after((*prompt, *tokens)))
            for token in row.nonzero()[:, 0].tolist():
                longer[*tokens, token] = probability * float(row[token])
        found = longer
    return found


def p_value(draws: Iterable[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """Return chi-square's p for draws against exact probabilities; cells of fewer than 5 expected are one cell."""
    counts = Counter(draws)
    total = sum(counts.values())
    assert counts.keys() <= exact.keys(), "drew a sequence that cannot occur"
    rare = [tokens for tokens, p in exact.items() if p * total < 5]
    cells = [[tokens] for tokens in exact if tokens not in set(rare)] + ([rare] if rare else [])
    observed = [sum(counts[tokens] for tokens in cell) for cell in cells]
    expected = [sum(exact[tokens] for tokens in cell) * total for cell in cells]
    scale = total / sum(expected)  # float32 probabilities add up to 1 only nearly
    return float(chisquare(observed, [e * scale for e in expected]).pvalue)


def drawn(target: Any, drafter: Any, prompt: list[int], sampling: Sampling, draws: int) -> list[tuple[int, ...]]:
    """Generate three tokens ``draws`` times; every number of accepted drafts must have occurred."""
    generator = torch.Generator().manual_seed(0)
    runs = [
        decode.generate(
            target,
            prompt,
            drafter=drafter,
            num_speculative_tokens=3 if drafter else 0,
            max_new_tokens=3,
            sampling=sampling,
            generator=generator,
        )
        for _ in range(draws)
    ]
    if drafter:
        accepted = Counter(itertools.chain.from_iterable(run.accepted for run in runs))
        assert all(accepted[n] > 10 for n in range(4)), f"accepted drafts are one-sided: {accepted}"
    return [tuple(run.token_ids) for run in runs]


FEW = Sampling(temperature=1.0, top_k=3)
PROMPT = list(range(40, 60))


def tilted(models: Models, target: decode.Target) -> tuple[MemoTarget, TiltedDrafter, dict[tuple[int, ...], float]]:
    model = reference(models.target)
    logits_after = functools.cache(lambda history: reference_logits(model, list(history))[-1])
    return MemoTarget(target), TiltedDrafter(logits_after, PROMPT), exact_distribution(logits_after, PROMPT, FEW)


def test_sampled_output_is_distributed_as_without_drafts(tiny_models: Models, target: decode.Target) -> None:
    memo, drafter, exact = tilted(tiny_models, target)
    assert p_value(drawn(memo, drafter, PROMPT, FEW, 2000), exact) > 1e-3


def test_sampled_autoregressive_output_is_distributed_as_computed(dense_models: Models, dense_target: Any) -> None:
    memo, _, exact = tilted(dense_models, dense_target)
    assert p_value(drawn(memo, None, PROMPT, FEW, 2000), exact) > 1e-3


@pytest.mark.slow
def test_sampled_output_over_20000_draws(tiny_models: Models, target: decode.Target) -> None:
    memo, drafter, exact = tilted(tiny_models, target)
    assert p_value(drawn(memo, drafter, PROMPT, FEW, 20_000), exact) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mtp", "dflash"])
def test_sampled_output_of_the_testbed_over_20000_draws(trained_dense: Models, method: Any) -> None:
    target = decode.load_target(trained_dense.target, dtype=torch.float32)
    drafter = decode.load_drafter(trained_dense.drafter if method == "dflash" else None, target, method)
    model = reference(trained_dense.target)
    logits_after = functools.cache(lambda history: reference_logits(model, list(history))[-1])
    sampling = Sampling(temperature=2.0, top_k=3)
    prompt = chat_prompts(trained_dense, 1)[-1]  # of chat, the least predictable
    exact = exact_distribution(logits_after, prompt, sampling)
    draws = drawn(MemoTarget(target), MemoDrafter(drafter), prompt, sampling, 20_000)
    assert p_value(draws, exact) > 1e-3


def resample_from_p(logits: Tensor, drafts: Tensor, q: Tensor, sampling: Sampling, generator: Any) -> Any:
    """Planted defect: after a rejection, draw from p and not from what p has more than q."""
    n, tokens = accept_sampled(logits, drafts, q, sampling, generator)
    if n < len(drafts):
        tokens[-1] = int(torch.multinomial(sampling.probabilities(logits[n]), 1, generator=generator))
    return n, tokens


def accept_by_p_alone(logits: Tensor, drafts: Tensor, q: Tensor, sampling: Sampling, generator: Any) -> Any:
    """Planted defect: accept with probability p(d), whatever q(d) was."""
    return accept_sampled(logits, drafts, torch.where(q > 0, torch.ones_like(q), q), sampling, generator)


@pytest.mark.parametrize("defect", [resample_from_p, accept_by_p_alone])
def test_the_chi_square_test_notices_defects(
    dense_models: Models, dense_target: decode.Target, monkeypatch: pytest.MonkeyPatch, defect: Any
) -> None:
    memo, drafter, exact = tilted(dense_models, dense_target)
    monkeypatch.setattr(LOOP, defect)
    assert p_value(drawn(memo, drafter, PROMPT, FEW, 2000), exact) < 1e-6
