"""Drafters propose what their networks say when run without any cache, and look only at what is committed."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conversion import convert
from decoding import Models, chat_prompts, random_prompt, rewrite
from torch import Tensor

from mxq import decode, testbed
from mxq.convert import dequantize, dequantize_run
from mxq.decode.dflash import masks
from mxq.decode.drafting import DFlashDrafter, MTPDrafter
from mxq.decode.target import Pass, Target
from mxq.errors import MxqError, UsageError
from mxq.models.dflash import DFlashConfig
from mxq.verify.run import verify

IDS = torch.randint(0, 500, (60,), generator=torch.Generator().manual_seed(3))
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}
WARM = decode.Sampling(temperature=1.0)


def run_target(target: Target, ids: Tensor, taps: Any) -> Pass:
    return target.prompt(target.start(len(ids)), ids, taps)


def observed(drafter: decode.Drafter, target: Target, ids: Tensor, *, pieces: tuple[int, ...] = ()) -> Any:
    """Return a session that has seen ``ids`` but the last, in ``pieces``; sampled, for distributions."""
    session = drafter.start(len(ids) + 32, 15, WARM, torch.Generator().manual_seed(0))
    seen = run_target(target, ids[:-1], drafter.taps)
    assert seen.features is None or len(seen.features) == len(ids) - 1
    begin = 0
    for end in (*pieces, len(ids) - 1):
        features = None if seen.features is None else seen.features[begin:end]
        session.observe(Pass(seen.hidden[begin:end], features, seen.logits), ids[begin + 1 : end + 1])
        begin = end
    return session


@torch.inference_mode()
@pytest.mark.parametrize("k", [1, 3, 15])
def test_dflash_equals_a_plain_recomputation(tiny_models: Models, target: Target, k: int) -> None:
    drafter = decode.load_drafter(tiny_models.drafter, target, "dflash")
    assert isinstance(drafter, DFlashDrafter)
    model: Any = drafter.model
    session = observed(drafter, target, IDS, pieces=(33, 34, 50))
    first = session.propose(IDS[-1:], k)
    again = session.propose(IDS[-1:], k)
    torch.testing.assert_close(again.probabilities, first.probabilities, rtol=0, atol=0)

    # One pass: features of positions 0 to p, then the block at p + 1 and on, all attended to by hand.
    features = run_target(target, IDS[:-1], drafter.taps).features
    assert features is not None
    past = len(IDS) - 1
    block = torch.cat([IDS[-1:], torch.full((k,), model.config.mask_token_id)])
    context = model.hidden_norm(model.fc(features))[None]
    x = target.embed(block[None])
    rotary = model.rotary(torch.arange(past + k + 1)[None], torch.float32)
    of_block = (rotary[0][:, :, past:], rotary[1][:, :, past:])
    for layer in model.layers:
        attention = layer.self_attn
        normed = layer.input_layernorm(x)
        key, value = attention.key_value(torch.cat([context, normed], dim=1), rotary)
        query = attention.q_norm(attention.q_proj(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2))
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
        half = query.shape[-1] // 2
        turned = torch.cat([-query[..., half:], query[..., :half]], dim=-1)
        query = query * of_block[0] + turned * of_block[1]
        weights = (query @ key.transpose(2, 3) * attention.head_dim**-0.5).softmax(-1)
        x = x + attention.o_proj((weights @ value).transpose(1, 2).flatten(-2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    expected = target.logits(model.norm(x)[0, 1:]).softmax(-1)
    torch.testing.assert_close(first.probabilities, expected, **CLOSE)


@torch.inference_mode()
@pytest.mark.parametrize("k", [1, 3, 15])
def test_mtp_chain_equals_a_plain_recomputation(target: Target, k: int) -> None:
    drafter = decode.load_drafter(None, target, "mtp")
    assert isinstance(drafter, MTPDrafter)
    session = observed(drafter, target, IDS, pieces=(33, 34, 50))
    draft = session.propose(IDS[-1:], k)
    assert draft.tokens.shape == (k,)
    # Entry i pairs the hidden state of i with the embedding of token i + 1; each chained entry is the last output.
    hidden = run_target(target, IDS[:-1], ()).hidden
    following = IDS[1:]
    rows = []
    for token in draft.tokens:
        length = len(hidden)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        out = drafter.model(target.embed(following[None]), hidden[None], torch.arange(length)[None], mask)[0]
        rows.append(target.logits(out[-1]).softmax(-1))
        hidden = torch.cat([hidden, out[-1:]])
        following = torch.cat([following, token[None]])
    torch.testing.assert_close(draft.probabilities, torch.stack(rows), **CLOSE)


@torch.inference_mode()
@pytest.mark.parametrize("method", ["mtp", "dflash"])
def test_a_proposal_leaves_nothing_behind(tiny_models: Models, target: Target, method: Any) -> None:
    drafter = decode.load_drafter(tiny_models.drafter if method == "dflash" else None, target, method)
    seen = run_target(target, IDS, drafter.taps)
    rest = Pass(seen.hidden[40:], None if seen.features is None else seen.features[40:], seen.logits)
    following = torch.cat([IDS[41:], IDS[:1]])

    def propose_after(*before: int) -> Tensor:
        session = observed(drafter, target, IDS[:41])
        for k in before:
            session.propose(IDS[40:41], k)
        session.observe(rest, following)
        session._generator.manual_seed(1)
        probabilities: Tensor = session.propose(following[-1:], 3).probabilities
        return probabilities

    torch.testing.assert_close(propose_after(15, 7), propose_after(), rtol=0, atol=0)


@torch.inference_mode()
def test_dflash_sees_no_feature_from_the_anchor_on(tiny_models: Models, target: Target) -> None:
    """What is drafted depends on the anchor's token and the features before it, and on every one of those."""
    drafter = decode.load_drafter(tiny_models.drafter, target, "dflash")

    def propose(features: Tensor, anchor: Tensor) -> Tensor:
        session = drafter.start(90, 7, WARM, torch.Generator())
        session.observe(Pass(features, features, features), IDS[1 : len(features) + 1])
        probabilities = session.propose(anchor, 7).probabilities
        assert probabilities is not None
        return probabilities

    features = run_target(target, IDS, drafter.taps).features
    assert features is not None
    plain = propose(features[:40], IDS[40:41])
    later = features.clone()
    later[40:] += 1  # the anchor's own feature, and what follows: never handed over, so without effect
    torch.testing.assert_close(propose(later[:40], IDS[40:41]), plain, rtol=0, atol=0)
    for position in (0, 17, 39):
        earlier = features.clone()
        earlier[position] += 1
        assert (propose(earlier[:40], IDS[40:41]) - plain).abs().amax(dim=1).min() > 0
    assert (propose(features[:40], IDS[41:42]) - plain).abs().amax(dim=1).min() > 0


def config_with(**changes: Any) -> DFlashConfig:
    base = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "block_size": 4, "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0]},
    }  # fmt: skip
    return DFlashConfig.from_dict(base | changes)


def test_masks_follow_layer_types_window_and_causality() -> None:
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
    cpu = torch.device("cpu")

    def rows(mask: Tensor | None) -> list[str] | None:
        return None if mask is None else ["".join("01"[int(x)] for x in row) for row in mask]

    assert masks(config_with(), 4, 2, cpu) == [None, None]
    # A sliding layer that nothing is said about is causal; a full one is not.
    assert [rows(mask) for mask in masks(config_with(**sliding), 4, 3, cpu)] == [
        ["0011100", "0001110", "0000111"],
        None,
    ]
    # Said to be non-causal, its window reaches both ways.
    both_ways = masks(config_with(**sliding, is_causal=False), 4, 3, cpu)
    assert [rows(mask) for mask in both_ways] == [["0011111", "0001111", "0000111"], None]
    # is_causal of the drafter counts before that of dflash_config.
    nested = {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [0], "causal": True}}
    assert rows(masks(config_with(**nested), 1, 2, cpu)[1]) == ["110", "111"]
    assert masks(config_with(**nested, is_causal=False), 1, 2, cpu) == [None, None]


@torch.inference_mode()
def test_sliding_layers_forget_what_is_out_of_the_window(
    dense_models: Models, dense_target: Target, tmp_path: Path
) -> None:
    def slide(config: dict[str, Any]) -> None:
        config |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}

    directory = rewrite(dense_models.drafter, tmp_path / "sliding", lambda tensors: None, slide)
    drafter = decode.load_drafter(directory, dense_target, "dflash")
    near, far = torch.tensor(random_prompt(0)[:20]), IDS[:40]
    distributions = []
    for start in (IDS[40:], far):
        ids = torch.cat([start[:20], near])
        session = drafter.start(90, 3, WARM, torch.Generator())
        features = torch.cat([torch.full((30, 512), float(start[0])), torch.ones(9, 512)])
        session.observe(Pass(features, features, features), ids[1:40])
        distributions.append(session.propose(ids[39:40], 3).probabilities)
    torch.testing.assert_close(distributions[0], distributions[1], rtol=0, atol=0)


@pytest.fixture
def other_drafter(dense_models: Models, tmp_path: Path) -> Any:
    def write(**changes: Any) -> Path:
        def config(values: dict[str, Any]) -> None:
            inner = changes.pop("dflash_config", {})
            values.update(changes)
            values["dflash_config"].update(inner)
            for key in [key for key, value in values["dflash_config"].items() if value is None]:
                del values["dflash_config"][key]

        return rewrite(dense_models.drafter, tmp_path / "other", lambda tensors: None, config)

    return write


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "hidden_size is 128, the target's hidden_size 256"),
        ({"vocab_size": 1024}, "vocab_size is 1024, the target's vocab_size 512"),
        ({"num_target_layers": 8}, "num_target_layers is 8, the target's layers 4"),
        (
            {"dflash_config": {"target_layer_ids": [1, 4]}},
            r"target_layer_ids is \[1, 4\], the target's layers are 0 to 3",
        ),
        ({"dflash_config": {"target_layer_ids": []}}, r"target_layer_ids is \[\]"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    dense_target: Target, other_drafter: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        decode.load_drafter(other_drafter(**changes), dense_target, "dflash")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"mask_token_id": None}}, r"config\.json: mask_token_id is missing"),
        ({"dflash_config": {"mask_token_id": 512}}, "mask_token_id is 512, outside the vocabulary of 512"),
        ({"dflash_config": {"target_layer_ids": [0, 1, 2]}}, r"tensor fc\.weight has shape"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "11 tensors are missing: layers.2"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "11 tensors do not belong to this model"),
        ({"num_attention_heads": "four"}, r"config\.json: num_attention_heads is 'four', not a positive integer"),
        ({"layer_types": ["full_attention"]}, "layer_types is not 2 times"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types is not 2 times"),
    ],
)
def test_a_broken_drafter_is_refused(
    dense_target: Target, other_drafter: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(MxqError, match=message):
        decode.load_drafter(other_drafter(**changes), dense_target, "dflash")


def test_a_target_without_mtp_head(dense_models: Models, tmp_path: Path) -> None:
    def strip(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    target = decode.load_target(rewrite(dense_models.target, tmp_path / "m", strip))
    with pytest.raises(MxqError, match=r"no mtp\.\* tensors"):
        decode.load_drafter(None, target, "mtp")


def test_an_incomplete_mtp_head(dense_models: Models, tmp_path: Path) -> None:
    target = decode.load_target(rewrite(dense_models.target, tmp_path / "m", lambda t: t.pop("mtp.norm.weight")))
    with pytest.raises(MxqError, match=r"missing: mtp\.norm\.weight"):
        decode.load_drafter(None, target, "mtp")


@pytest.mark.parametrize("kind", testbed.NAMES)
def test_an_mxfp4_head_drafts_with_the_numbers_of_its_weights(kind: str, tmp_path: Path) -> None:
    recipe = tmp_path / "w4a16.yaml"
    recipe.write_text("name: w4a16\ndescription: weights alone\nextends: mxfp4-mtp\nactivations: none\n")
    source = testbed.path(f"testbed:{kind}")
    w4a16, w4a4 = (convert(source, tmp_path / name, str(by)) for name, by in (("a", recipe), ("b", "mxfp4-mtp")))
    assert not verify(w4a4, source).problems
    dequantize_run.run(dequantize.plan(w4a16), tmp_path / "simulated", "w4a16")
    prompt = chat_prompts(Models(source, source), 1)[-1]
    drafted = {}
    for name in ("a", "b", "simulated"):
        target = decode.load_target(tmp_path / name, dtype=torch.float32)
        drafter = decode.load_drafter(None, target, "mtp")
        made = decode.generate(target, prompt, drafter=drafter, num_speculative_tokens=3, max_new_tokens=64)
        assert made.token_ids == decode.generate(target, prompt, max_new_tokens=64).token_ids
        drafted[name] = made.accepted
    assert drafted["a"] == drafted["simulated"]
    assert sum(drafted["b"]) > len(drafted["b"])
    # And the head is not that of the source: in float32 its output moves by what MXFP4 costs, and by more with W4A4.
    moved = [drift(source, tmp_path / name) for name in ("a", "b")]
    assert 0.01 < moved[0] < moved[1] < 0.5


@torch.inference_mode()
def drift(source: Path, other: Path) -> float:
    """How far another checkpoint's head is from the source's on the same inputs, relative."""
    hidden = torch.randn(2, 1, 12, 256, generator=torch.Generator().manual_seed(0))
    outputs = []
    for path in (source, other):
        drafter = decode.load_drafter(None, decode.load_target(path, dtype=torch.float32), "mtp")
        assert isinstance(drafter, MTPDrafter)
        outputs.append(drafter.model(hidden[0], hidden[1], torch.arange(12)[None], None))
    return float((outputs[0] - outputs[1]).norm() / outputs[0].norm())


def test_methods_and_paths_must_fit(dense_models: Models, dense_target: Target) -> None:
    for path, method in [(None, "dflash"), (dense_models.drafter, "mtp"), (None, "eagle")]:
        with pytest.raises(UsageError):
            decode.load_drafter(path, dense_target, method)  # type: ignore[arg-type]


def test_more_drafts_than_the_block_is_said_once(
    dense_models: Models, dense_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tiny.write_drafter(tmp_path / "small", dense_models.target, block_size=4)
    assert json.loads((small / "config.json").read_text())["block_size"] == 4
    drafter = decode.load_drafter(small, dense_target, "dflash")
    run: dict[str, Any] = {"drafter": drafter, "max_new_tokens": 2}
    decode.generate(dense_target, [1, 2, 3], num_speculative_tokens=3, **run)
    assert capsys.readouterr().err == ""
    decode.generate(dense_target, [1, 2, 3], num_speculative_tokens=4, **run)
    decode.generate(dense_target, [1, 2, 3], num_speculative_tokens=7, **run)
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert "4 speculative tokens" in warning
    assert "block_size 4" in warning
