"""Two targets behind the same tokens, against torch's own loss functions and transformers' own logits."""

from pathlib import Path

import pytest
import torch
from conversion import convert
from decoding import Models, chat_prompts, end_of_text, random_prompt, reference, reference_logits, write_mxfp4
from torch import Tensor
from torch.nn import functional as F

from mxq import decode
from mxq.convert import dequantize, dequantize_run
from mxq.decode import divergence
from mxq.decode.divergence import Compared, compare, compare_on
from mxq.decode.target import Target


def expected(first: Tensor, second: Tensor, tokens: Tensor) -> Compared:
    """What torch's loss functions say in float64."""
    log_p, log_q = (F.log_softmax(logits.double(), -1) for logits in (first, second))
    kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    one, two = (F.cross_entropy(logits.double(), tokens, reduction="none") for logits in (first, second))
    return Compared(kl, one, two, first.argmax(-1) == second.argmax(-1))


def assert_same(got: Compared, wanted: Compared, rtol: float, atol: float) -> None:
    for name in ("divergence", "first_nll", "second_nll"):
        assert getattr(got, name).dtype == torch.float64
        torch.testing.assert_close(getattr(got, name), getattr(wanted, name), rtol=rtol, atol=atol)
    assert got.same.tolist() == wanted.same.tolist()


def some_logits(dtype: torch.dtype, tokens: int = 50, vocabulary: int = 1000) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    first = 5 * torch.randn(tokens, vocabulary, generator=generator)
    second = first + 0.3 * torch.randn(tokens, vocabulary, generator=generator)
    return first.to(dtype), second.to(dtype), torch.randint(0, vocabulary, (tokens,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 50])
def test_numbers_are_those_of_torch_in_float64(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "_ELEMENTS", 1000 * rows)
    logits = some_logits(dtype)
    got = compare(*logits)
    assert_same(got, expected(*logits), rtol=1e-12, atol=1e-14)
    assert got.divergence.min() > 0
    assert 0 < got.same.sum() < 50


def test_a_difference_far_below_float32_is_seen() -> None:
    first, _, tokens = some_logits(torch.float64)
    second = first.clone()
    second[:, 0] += 1e-4
    p = first.softmax(-1)[:, 0]
    torch.testing.assert_close(compare(first, second, tokens).divergence, p * (1 - p) * 1e-8 / 2, rtol=1e-3, atol=1e-15)


def test_equal_logits_differ_by_nothing_and_others_by_something() -> None:
    first, second, tokens = some_logits(torch.bfloat16)
    none = compare(first, first.clone(), tokens)
    assert none.divergence.tolist() == [0.0] * 50
    assert none.same.all()
    assert torch.equal(none.first_nll, none.second_nll)
    forth, back = compare(first, second, tokens), compare(second, first, tokens)
    assert not torch.allclose(forth.divergence, back.divergence, rtol=1e-3)  # of which the first is p
    assert torch.equal(forth.first_nll, back.second_nll)


def test_a_choice_among_equals_is_the_same() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]])
    lower = logits - torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    assert compare(logits, lower, torch.tensor([0, 0])).same.tolist() == [True, False]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_seen(wrong: float) -> None:
    first, second, tokens = some_logits(torch.float32, tokens=3)
    second[1, 7] = wrong
    got = compare(first, second, tokens)
    assert got.divergence.isfinite().tolist() == [True, False, True]
    assert got.first_nll.isfinite().all()


def test_a_text_longer_than_is_read_at_once(
    tiny_models: Models, target: Target, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_mxfp4(tiny_models.target, tmp_path_factory.mktemp("mxfp4") / "target", weight_only=True)
    pair = target, decode.load_target(path, dtype=torch.float32)
    ids = [token for seed in range(20) for token in random_prompt(seed)][:400]
    assert len(ids) == 400
    model = reference(tiny_models.target)
    logits = reference_logits(model, ids)
    for begin in (1, 128, 129, 130, 399):
        got = compare_on(pair, ids, begin)
        wanted = F.cross_entropy(logits[begin - 1 : -1].double(), torch.tensor(ids[begin:]), reduction="none")
        torch.testing.assert_close(got.first_nll, wanted, rtol=1e-4, atol=1e-4)
        assert len(got.divergence) == len(got.same) == len(ids) - begin
    whole, late = compare_on(pair, ids, 1), compare_on(pair, ids, 300)
    torch.testing.assert_close(whole.divergence[299:], late.divergence)
    assert compare_on((pair[0], pair[0]), ids, 1).divergence.max() == 0


@pytest.mark.slow
def test_the_testbed_against_transformers(trained: Models, tmp_path: Path) -> None:
    """Weights only: transformers does not round activations. It reads what they were rounded to as ordinary ones."""
    path = convert(trained.target, tmp_path / "mxfp4", "mxfp4-weight-only")
    dequantize_run.run(dequantize.plan(path), tmp_path / "dequantized", "mxfp4")
    pair = tuple(decode.load_target(one, dtype=torch.float32) for one in (trained.target, path))
    models = [reference(one) for one in (trained.target, tmp_path / "dequantized")]
    for prompt in chat_prompts(trained, 1)[:3]:
        answer = decode.generate(pair[0], prompt, max_new_tokens=64, eos_token_ids=end_of_text(trained)).token_ids
        ids = [*prompt, *answer]
        logits = [reference_logits(model, ids)[len(prompt) - 1 : -1] for model in models]
        wanted = expected(logits[0], logits[1], torch.tensor(answer))
        got = compare_on((pair[0], pair[1]), ids, len(prompt))
        assert_same(got, wanted, rtol=1e-3, atol=1e-4)
        assert got.divergence.sum() == pytest.approx(float(wanted.divergence.sum()), rel=1e-3)
        # One target in the place of the other, or a text shifted by a token, would be seen.
        swapped = compare_on((pair[1], pair[0]), ids, len(prompt))
        shifted = compare(logits[0], logits[1], torch.tensor([*answer[1:], answer[0]]))
        assert swapped.divergence.sum() != pytest.approx(float(wanted.divergence.sum()), rel=5e-3)
        assert shifted.first_nll.sum() != pytest.approx(float(wanted.first_nll.sum()), rel=5e-3)
