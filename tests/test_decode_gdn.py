"""The gated delta net reads a block and commits a part of it: against the token-by-token recurrence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, torch_recurrent_gated_delta_rule

from mxq.decode.gdn import GatedDeltaState, advance, delta_rule, read_block, read_prompt

HEADS, KEY, VALUE = 3, 16, 24


def inputs(length: int, seed: int, fade: float) -> tuple[Tensor, ...]:
    """Return queries, keys, values, g, beta and a state, as the block form takes them."""
    torch.manual_seed(seed)
    queries, keys = torch.nn.functional.normalize(torch.randn(2, HEADS, KEY, length), dim=2)
    g = -fade * torch.rand(HEADS, length)
    return (
        queries,
        keys,
        torch.randn(HEADS, length, VALUE),
        g,
        torch.rand(HEADS, length),
        torch.randn(HEADS, KEY, VALUE),
    )


@settings(deadline=None, max_examples=60)
@given(length=st.integers(1, 24), seed=st.integers(0, 1000), fade=st.sampled_from([0.0, 0.01, 1.0, 20.0, 200.0]))
def test_block_form_and_commit_equal_the_recurrence(length: int, seed: int, fade: float) -> None:
    queries, keys, values, g, beta, start = inputs(length, seed, fade)
    out, u, decay = delta_rule(queries, keys, values, g, beta, start)
    n = 1 + seed % length
    expected, _ = recurrence(queries, keys, values, g, beta, start, length)
    _, state = recurrence(queries, keys, values, g, beta, start, n)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(advance(start, keys[:, :, :n], u[:, :n], decay[:, :n]), state, rtol=1e-4, atol=1e-4)


def recurrence(
    queries: Tensor, keys: Tensor, values: Tensor, g: Tensor, beta: Tensor, start: Tensor, n: int
) -> tuple[Tensor, Tensor]:
    """Run transformers' token-by-token rule over the first ``n`` tokens."""
    out, state = torch_recurrent_gated_delta_rule(
        queries.permute(2, 0, 1)[None, :n] * KEY**0.5,  # it scales queries itself
        keys.permute(2, 0, 1)[None, :n],
        values.transpose(0, 1)[None, :n],
        g=g.T[None, :n],
        beta=beta.T[None, :n],
        initial_state=start[None],
        output_final_state=True,
    )
    assert state is not None
    return out[0].transpose(0, 1), state[0]


@pytest.fixture
def layer() -> Qwen3_5GatedDeltaNet:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        hidden_size=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=24, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    return Qwen3_5GatedDeltaNet(config, 0).eval()


@torch.inference_mode()
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 11])
def test_layer_resumes_from_any_part_of_a_block(layer: Qwen3_5GatedDeltaNet, n: int) -> None:
    """Key heads shared by value heads, a convolution longer and shorter than what is committed."""
    x = torch.randn(1, 100, 64)
    expected = layer(x)
    state = GatedDeltaState([layer], torch.float32, torch.device("cpu"))
    out = [read_prompt(layer, x[:, :80], state.recurrent[0], state.convolution[0])]
    block, update = read_block(layer, x[:, 80:91], state.recurrent[0], state.convolution[0])
    torch.testing.assert_close(block, expected[:, 80:91], rtol=1e-4, atol=1e-5)
    state.commit([update], n)
    out += [block[:, :n], read_block(layer, x[:, 80 + n :], state.recurrent[0], state.convolution[0])[0]]
    torch.testing.assert_close(torch.cat(out, dim=1), expected, rtol=1e-4, atol=1e-5)


def test_decay_strong_enough_to_overflow_is_harmless() -> None:
    queries, keys, values, _, beta, start = inputs(16, 0, 1.0)
    g = torch.full((HEADS, 16), -60.0)
    out, u, _ = delta_rule(queries, keys, values, g, beta, start)
    assert out.isfinite().all()
    torch.testing.assert_close(u, values * beta.unsqueeze(2), rtol=1e-4, atol=1e-6)
