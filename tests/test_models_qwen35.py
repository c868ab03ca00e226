"""Names of a Qwen3.5 checkpoint: roles, what is fused, where an expert's rows lie."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import read_all

from mxq.errors import UsageError
from mxq.models import qwen35
from mxq.models.qwen35 import Role

LAYER = "model.language_model.layers.3."


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("lm_head.weight", Role.LM_HEAD),
        ("model.language_model.embed_tokens.weight", Role.EMBEDDING),
        ("model.embed_tokens.weight", Role.EMBEDDING),
        ("model.language_model.norm.weight", Role.NORM),
        (LAYER + "self_attn.q_proj.weight", Role.ATTENTION),
        (LAYER + "self_attn.q_norm.weight", Role.NORM),
        (LAYER + "linear_attn.in_proj_qkv.weight", Role.GDN),
        (LAYER + "linear_attn.in_proj_z.weight", Role.GDN),
        (LAYER + "linear_attn.in_proj_a.weight", Role.GDN_GATE),
        (LAYER + "linear_attn.conv1d.weight", Role.GDN_STATE),
        (LAYER + "linear_attn.A_log", Role.GDN_STATE),
        (LAYER + "linear_attn.dt_bias", Role.GDN_STATE),
        (LAYER + "linear_attn.norm.weight", Role.NORM),
        (LAYER + "mlp.gate_proj.weight", Role.MLP),
        (LAYER + "mlp.gate.weight", Role.ROUTER),
        (LAYER + "mlp.shared_expert_gate.weight", Role.ROUTER),
        (LAYER + "mlp.shared_expert.gate_proj.weight", Role.SHARED_EXPERT),
        (LAYER + "mlp.experts.gate_up_proj", Role.EXPERT),
        (LAYER + "mlp.experts.11.down_proj.weight", Role.EXPERT),
        ("mtp.fc.weight", Role.MTP_FC),
        ("mtp.pre_fc_norm_hidden.weight", Role.NORM),
        ("mtp.layers.0.self_attn.k_proj.weight", Role.ATTENTION),
        ("mtp.layers.0.mlp.experts.down_proj", Role.EXPERT),
        ("model.visual.blocks.0.attn.qkv.weight", Role.VISION_LINEAR),
        ("model.visual.merger.linear_fc1.weight", Role.VISION_LINEAR),
        ("model.visual.patch_embed.proj.weight", Role.VISION),
        ("model.visual.pos_embed.weight", Role.VISION),
        ("model.visual.blocks.0.norm1.bias", Role.VISION),
        ("transformer.h.0.attn.weight", Role.OTHER),
    ],
)
def test_roles(name: str, role: Role) -> None:
    assert qwen35.role(name) == role


def test_every_tensor_of_a_checkpoint_has_a_role(source: Path) -> None:
    for name, tensor in read_all(source).items():
        assert qwen35.role(name) != Role.OTHER, name
        for piece in qwen35.pieces(name, tensor.shape):
            assert 0 <= piece.start < piece.stop <= tensor.numel() // tensor.shape[-1]


def test_the_rows_of_a_fused_expert_are_gate_then_up() -> None:
    experts, intermediate, hidden = 3, 4, 8
    gate, up = torch.randn(2, experts, intermediate, hidden, generator=torch.Generator().manual_seed(0))
    fused = torch.cat([gate, up], dim=1)  # as the published checkpoints hold them
    rows = fused.view(-1, hidden)
    found = qwen35.pieces(LAYER + "mlp.experts.gate_up_proj", fused.shape)
    assert [piece.module.removeprefix(LAYER + "mlp.experts.") for piece in found] == [
        f"{e}.{projection}_proj" for e in range(experts) for projection in ("gate", "up")
    ]
    for expert in range(experts):
        for i, projection in enumerate((gate, up)):
            piece = found[2 * expert + i]
            assert torch.equal(rows[piece.start : piece.stop], projection[expert])
    with pytest.raises(ValueError, match="has 3 rows per expert"):
        qwen35.pieces(LAYER + "mlp.experts.gate_up_proj", (2, 3, 8))


def test_what_holds_no_matrix_has_no_pieces() -> None:
    for name, shape in ((LAYER + "linear_attn.conv1d.weight", (8, 1, 4)), (LAYER + "linear_attn.A_log", (4,))):
        assert qwen35.pieces(name, shape) == []
    assert qwen35.pieces(LAYER + "mlp.experts.down_proj", (1 << 60, 8, 0)) == []
    with pytest.raises(ValueError, match="is of 1048576 experts, which no model has"):
        qwen35.pieces(LAYER + "mlp.experts.down_proj", (1 << 20, 8, 32))


def test_groups_that_engines_merge() -> None:
    assert qwen35.fused_module(LAYER + "self_attn.k_proj") == LAYER + "self_attn.qkv_proj"
    assert qwen35.fused_module(LAYER + "mlp.up_proj") == LAYER + "mlp.gate_up_proj"
    assert qwen35.fused_module(LAYER + "self_attn.o_proj") is None
    assert qwen35.fused_module(LAYER + "mlp.experts.0.up_proj") is None
    assert qwen35.experts_module(LAYER + "mlp.experts.0.up_proj") == LAYER + "mlp.experts"
    assert qwen35.experts_module("mtp.layers.0.mlp.experts.gate_up_proj") == "mtp.layers.0.mlp.experts"
    assert qwen35.experts_module(LAYER + "mlp.shared_expert.up_proj") is None


def test_other_architectures_are_named_in_the_refusal() -> None:
    assert qwen35.family({"architectures": ["Qwen3_5MoeForCausalLM"]}, "x") == "qwen3_5_moe"
    with pytest.raises(UsageError, match=r"some/dir: config.json names LlamaForCausalLM; mxq converts Qwen3_5"):
        qwen35.family({"architectures": ["LlamaForCausalLM"]}, "some/dir")
    nameless: list[dict[str, Any]] = [
        {},
        {"architectures": None},
        {"architectures": []},
        {"architectures": [["Qwen3_5ForCausalLM"]]},
    ]
    for config in nameless:
        with pytest.raises(UsageError, match="names"):
            qwen35.family(config, "x")
