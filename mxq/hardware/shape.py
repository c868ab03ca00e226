"""How large a model is, part by part, from its config.json: what a pass reads and multiplies.

Counted as the published checkpoints are laid out (:mod:`mxq.models.qwen35`): layers of gated DeltaNet and of full
attention, each with an MLP or with routed experts, an MTP head of one layer of full attention. Sizes are numbers of
parameters, where nothing else is said.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mxq.errors import MxqError, UsageError
from mxq.hardware.model import ModelFacts
from mxq.models import qwen35
from mxq.models.dflash import DFlashConfig

BF16_BYTES = 2.0
MXFP4_BYTES = 17 / 32
"""Per parameter: half a byte, and a byte of scale for each 32."""
_STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Packed:
    """Which weights are MXFP4; the MTP head's layer, if it is, is as those of the language model. All else is bf16."""

    linears: bool = False
    experts: bool = False
    shared: bool = False
    mtp: bool = False

    @property
    def any(self) -> bool:
        """Whether any are."""
        return self.linears or self.experts or self.shared


BF16 = Packed()


@dataclass(frozen=True)
class TargetShape:
    """A Qwen3.5 model.

    Attributes:
        hidden, vocabulary: H and V.
        gdn_layers, attention_layers: how many layers of each kind.
        gdn, attention: linears of such a layer that recipes quantize.
        gates: in_proj_a and in_proj_b of a gated DeltaNet.
        mlp: of a layer of a dense model; 0 with experts.
        expert: one routed expert; 0 in a dense model, as are the next four.
        experts, experts_per_token: how many a layer has, and how many a token is sent through.
        shared, router: shared expert, and router with the shared expert's gate.
        heads_width: heads times their size, for operations of attention.
        kv_bytes: of a token's keys and values in one layer, in bf16.
        kv_heads: how many heads of keys and values.
        state_bytes: of a sequence's state in one gated DeltaNet, recurrent and of the convolution.
        state_values: elements of the recurrent one.
        has_mtp: whether it has an MTP head.
        small: everything else there is: norms, convolutions, embedding, vision tower.
        small_float32: of these, the ones in float32.
        tied: lm_head is the embedding.
    """

    hidden: int
    vocabulary: int
    gdn_layers: int
    attention_layers: int
    gdn: int
    attention: int
    gates: int
    mlp: int
    expert: int
    experts: int
    experts_per_token: int
    shared: int
    router: int
    heads_width: int
    kv_bytes: int
    kv_heads: int
    state_bytes: int
    state_values: int
    has_mtp: bool
    small: int
    small_float32: int
    tied: bool

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return self.gdn_layers + self.attention_layers

    @property
    def lm_head(self) -> int:
        """Parameters of lm_head."""
        return self.vocabulary * self.hidden

    @property
    def mtp(self) -> int:
        """Parameters of the MTP head's linears, experts among them; 0 if there is none."""
        if not self.has_mtp:
            return 0
        inner = self.mlp + self.experts * self.expert + self.shared + self.router
        return 2 * self.hidden**2 + self.attention + inner

    @property
    def parameters(self) -> int:
        """All of them, as the checkpoint's headers count."""
        linears = self.gdn_layers * (self.gdn + self.gates) + self.attention_layers * self.attention
        inner = self.mlp + self.experts * self.expert + self.shared + self.router
        head = 0 if self.tied else self.lm_head
        return linears + self.layers * inner + head + self.mtp + self.small

    def weight_bytes(self, packed: Packed = BF16) -> int:
        """Return the bytes of the checkpoint's tensors."""
        linears = self.gdn_layers * self.gdn + self.attention_layers * self.attention + self.layers * self.mlp
        quantized = linears * packed.linears
        layers = self.layers
        if packed.mtp and self.has_mtp:
            quantized += (self.attention + self.mlp) * packed.linears
            layers += 1
        quantized += layers * (self.experts * self.expert * packed.experts + self.shared * packed.shared)
        rest = self.parameters - quantized
        return round(quantized * MXFP4_BYTES + rest * BF16_BYTES + self.small_float32 * 2)

    def packed_by_recipe(self) -> Packed:
        """Return what the recipe ``mxfp4`` quantizes: all linears of a dense model, routed experts of an MoE."""
        return Packed(experts=True) if self.experts else Packed(linears=True)


@dataclass(frozen=True)
class DrafterShape:
    """A DFlash drafter.

    Attributes:
        layers: how many.
        linears: parameters of all layers' linears together.
        fc: of the matrix that merges the target's features.
        kv_bytes: of a token's keys and values in all layers, in bf16.
        small: norms.
        block: most tokens of a pass, K + 1.
    """

    layers: int
    linears: int
    fc: int
    kv_bytes: int
    small: int
    block: int

    @property
    def weight_bytes(self) -> int:
        """The bytes of its tensors; embedding and lm_head are the target's."""
        return round((self.linears + self.fc + self.small) * BF16_BYTES)


def target_shape(config: dict[str, Any], where: str) -> TargetShape:
    """Return the shape of the Qwen3.5 model that a config.json describes.

    Raises:
        UsageError: it is no Qwen3.5, or lacks a size; ``where`` is named.
    """
    moe = qwen35.family(config, where) == "qwen3_5_moe"
    text = qwen35.text_config(config)

    def size(key: str, source: Mapping[str, Any] = text) -> int:
        value = source.get(key)
        if type(value) is not int or not 0 < value < 1 << 24:
            found = "is missing" if value is None else f"is {value!r:.40}"
            raise UsageError(f"{where}: {key} {found}", "give the model's own config.json, which has its sizes")
        return value

    kinds = text.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != size("num_hidden_layers"):
        raise UsageError(f"{where}: layer_types does not say of each layer what it is", "give the model's own")
    gdn_layers, attention_layers = kinds.count("linear_attention"), kinds.count("full_attention")
    if gdn_layers + attention_layers != len(kinds):
        raise UsageError(f"{where}: layer_types has others than linear and full attention", "give a Qwen3.5 model")
    hidden, head = size("hidden_size"), size("head_dim")
    heads, kv_heads = size("num_attention_heads"), size("num_key_value_heads")
    keys = size("linear_num_key_heads") * size("linear_key_head_dim")
    value_heads, value_dim = size("linear_num_value_heads"), size("linear_value_head_dim")
    values, kernel = value_heads * value_dim, size("linear_conv_kernel_dim")
    channels = 2 * keys + values
    state_values = value_heads * size("linear_key_head_dim") * value_dim
    experts = size("num_experts") if moe else 0
    per_token = size("num_experts_per_tok") if moe else 0
    if per_token > experts:
        raise UsageError(f"{where}: a token takes {per_token} of {experts} experts", "give the model's own config.json")
    query = (2 if text.get("attn_output_gate", True) else 1) * heads * head
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    has_mtp = text.get("mtp_num_hidden_layers", 0) == 1
    attention_norms = 2 * hidden + 2 * head
    small = gdn_layers * (2 * hidden + value_dim + channels * kernel + 2 * value_heads)
    small += attention_layers * attention_norms + hidden + size("vocab_size") * hidden
    small += (attention_norms + 3 * hidden) if has_mtp else 0
    if isinstance(vision := config.get("vision_config"), dict):
        small += _vision(vision, size)
    return TargetShape(
        hidden=hidden,
        vocabulary=size("vocab_size"),
        gdn_layers=gdn_layers,
        attention_layers=attention_layers,
        gdn=hidden * (channels + values) + values * hidden,
        attention=hidden * (query + 2 * kv_heads * head) + heads * head * hidden,
        gates=2 * value_heads * hidden,
        mlp=0 if moe else 3 * hidden * size("intermediate_size"),
        expert=3 * hidden * size("moe_intermediate_size") if moe else 0,
        experts=experts,
        experts_per_token=per_token,
        shared=3 * hidden * size("shared_expert_intermediate_size") if moe else 0,
        router=(experts + 1) * hidden if moe else 0,
        heads_width=heads * head,
        kv_bytes=round(2 * kv_heads * head * BF16_BYTES),
        kv_heads=kv_heads,
        state_bytes=state_values * _STATE_BYTES.get(str(text.get("mamba_ssm_dtype")), 4)
        + round(channels * (kernel - 1) * BF16_BYTES),
        state_values=state_values,
        has_mtp=has_mtp,
        small=small,
        small_float32=gdn_layers * (value_dim + value_heads),
        tied=tied,
    )


def _vision(vision: Mapping[str, Any], size: Any) -> int:
    width, inner = size("hidden_size", vision), size("intermediate_size", vision)
    patch = size("in_channels", vision) * size("temporal_patch_size", vision) * size("patch_size", vision) ** 2
    merged = width * size("spatial_merge_size", vision) ** 2
    block = 4 * width**2 + 4 * width + 2 * width * inner + inner + width + 4 * width
    merger = 2 * width + merged**2 + merged + merged * size("out_hidden_size", vision)
    merger += size("out_hidden_size", vision)
    around = width * patch + width + size("num_position_embeddings", vision) * width
    return size("depth", vision) * block + merger + around


def packed_of(facts: ModelFacts) -> Packed:
    """Return what of a checkpoint is MXFP4, as its ``quantization_config`` says."""
    return Packed(facts.linears_quantized, facts.experts_quantized, facts.shared_quantized, facts.mtp_quantized)


def drafter_shape(config: dict[str, Any], where: str) -> DrafterShape:
    """Return the shape of a DFlash drafter from its config.json.

    Raises:
        UsageError: it is none that mxq can read; ``where`` is named.
    """
    try:
        drafter = DFlashConfig.from_dict(config)
    except KeyError as error:
        raise UsageError(f"{where}: config.json has no {error.args[0]}", "give a DFlash drafter's") from None
    except (ValueError, MxqError) as error:
        raise UsageError(f"{where}: {error}", "give a DFlash drafter's config.json") from None
    hidden, head = drafter.hidden_size, drafter.head_dim
    query, kv = drafter.num_attention_heads * head, drafter.num_key_value_heads * head
    layer = 2 * hidden * query + 2 * hidden * kv + 3 * hidden * drafter.intermediate_size
    return DrafterShape(
        layers=drafter.num_hidden_layers,
        linears=drafter.num_hidden_layers * layer,
        fc=len(drafter.target_layer_ids) * hidden**2,
        kv_bytes=round(drafter.num_hidden_layers * 2 * kv * BF16_BYTES),
        small=drafter.num_hidden_layers * (2 * hidden + 2 * head) + 2 * hidden,
        block=drafter.block_size,
    )
