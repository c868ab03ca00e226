"""MXFP4 on processors, for which vLLM has no kernel: weights are dequantized when they are loaded.

From then on vLLM multiplies them as it does those of a bf16 model, so that with bf16 activations (W4A16) it answers as
it does for what ``mxq dequantize`` writes, token by token. Where the checkpoint quantizes activations too (W4A4),
they are rounded to MXFP4 and back before each product, those of experts before both of theirs. What a model answers
and accepts is then what it does on kernels for MXFP4; how fast it is says nothing about them.

Whether activations are quantized is what the checkpoint's config says: ``input_tensors`` of Quark's form,
``input_activations`` of compressed-tensors'. (Of the latter vLLM 0.32 does not ask, and leaves it to the kernel.)
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel, MxFp4LinearLayerConfig
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    CompressedTensorsMoEMethod,
    compressed_tensors_moe_w4a4_mxfp4,
)
from vllm.model_executor.layers.quantization.quark import quark_moe
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Dynamic, kMxfp4Static
from vllm.platforms import PlatformEnum

from mxq.engines.plugin.experts import routed
from mxq.formats.mxfp4 import dequantize, fake_quantize

_logger: Any = None


def install(logger: Any) -> None:
    """Register the kernel for linears and the two methods for experts, unless vLLM has a kernel of its own."""
    global _logger
    if kernels._POSSIBLE_MXFP4_KERNELS.get(PlatformEnum.CPU):
        return
    _logger = logger
    config = compressed_tensors.CompressedTensorsConfig
    # All that is replaced is looked up before any of it is, so that nothing is left half done.
    scheme_of, quark, packed = (
        config._get_scheme_from_parts,
        quark_moe.QuarkMoEMethod.get_moe_method,
        CompressedTensorsMoEMethod.get_moe_method,
    )
    kernels.register_linear_kernel(MxqEmulatedLinear, PlatformEnum.CPU, "mxfp4")
    config._get_scheme_from_parts = _asking_for_inputs(scheme_of)
    quark_moe.QuarkMoEMethod.get_moe_method = staticmethod(_with_quark_experts(quark))
    compressed_tensors_moe_w4a4_mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod = MxqEmulatedCompressedTensorsExperts
    CompressedTensorsMoEMethod.get_moe_method = staticmethod(_with_packed_experts(packed))


def _say(name: str, what: str, rounds: bool) -> None:
    activations = "rounded to MXFP4" if rounds else "left alone"
    message = "Using %s for MXFP4 %s, emulated by mxq: dequantized weights, activations %s"
    _logger.info_once(message, name, what, activations)


class MxqEmulatedLinear(MxFp4LinearKernel):  # type: ignore[misc]
    """A linear: vLLM's unquantized one, with dequantized weights."""

    def __init__(self, config: MxFp4LinearLayerConfig) -> None:
        super().__init__(config)
        self._rounds = config.activation_quant_key is not None
        self._dtype: torch.dtype = get_current_vllm_config().model_config.dtype
        self._plain = UnquantizedLinearMethod()
        _say(type(self).__name__, "GEMM", self._rounds)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """It runs on every processor."""
        return True, None

    @classmethod
    def can_implement(cls, config: MxFp4LinearLayerConfig) -> tuple[bool, str | None]:
        """Activations are MXFP4, or as they are."""
        key = config.activation_quant_key
        return (True, None) if key in (None, kMxfp4Dynamic) else (False, f"activations are {key}")

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace ``weight`` [N, K/2] and ``weight_scale`` [N, K/32] by ``weight`` [N, K]."""
        weight = dequantize(layer.weight.data, layer.weight_scale.data, self._dtype)
        del layer.weight_scale
        layer.weight = Parameter(weight, requires_grad=False)
        self._plain.process_weights_after_loading(layer)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product [..., N] for ``x`` [..., K]."""
        product: Tensor = self._plain.apply(layer, fake_quantize(x) if self._rounds else x, bias)
        return product


class _Experts(FusedMoEMethodBase):  # type: ignore[misc]
    """Routed experts, whichever form they are stored in: vLLM's unquantized ones, or those that round.

    Derived classes create the parameters, ``w13_weight``, ``w2_weight`` (with a suffix), and ``_scale`` of both.
    """

    suffix = ""
    rounds: bool
    _plain: UnquantizedFusedMoEMethod | None = None

    def maybe_roundup_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """No kernel of MXFP4's wants larger ones."""
        sizes: tuple[int, int] = FusedMoEMethodBase.maybe_roundup_sizes(self, *args, **kwargs)
        return sizes

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        """Nothing is quantized for the kernel."""
        return FusedMoEQuantConfig.make()

    @property
    def supports_eplb(self) -> bool:
        """Experts move as they did before they were dequantized: not at all."""
        return False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace packed weights and scales by ``w13_weight`` [E, 2 I, H] and ``w2_weight`` [E, H, I]."""
        for name in ("w13_weight", "w2_weight"):
            packed, scale = (getattr(layer, name + end) for end in (self.suffix, "_scale"))
            weight = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=self.moe.in_dtype)
            for expert, into in enumerate(weight):  # one at a time: what is between is sixteen times the packed weight
                into.copy_(dequantize(packed.data[expert], scale.data[expert], weight.dtype))
            delattr(layer, name + self.suffix)
            delattr(layer, f"{name}_scale")
            layer.register_parameter(name, Parameter(weight, requires_grad=False))
        if not self.rounds:
            self._plain = UnquantizedFusedMoEMethod(self.moe)
            self._plain.process_weights_after_loading(layer)
            self.moe_kernel = self._plain.moe_kernel
        elif layer.activation != MoEActivation.SILU or layer.apply_router_weight_on_input or self.moe.has_bias:
            raise ValueError("mxq emulates MXFP4 experts with SiLU, without biases, weighted after they have run")
        _say("MxqEmulatedExperts", "MoE", self.rounds)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """Return what the experts ``topk_ids`` [T, k] make of ``x`` [T, H]."""
        if self._plain is not None:
            out: Tensor = self._plain.apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
            return out
        experts = topk_ids.long() if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        return routed(x, layer.w13_weight, layer.w2_weight, topk_weights, experts)


class MxqEmulatedQuarkExperts(_Experts, quark_moe.QuarkOCP_MX_MoEMethod):  # type: ignore[misc]
    """Experts in Quark's form."""

    def __init__(self, moe: Any, weight_key: Any, activation_key: Any) -> None:
        # Not the constructor of the class it derives from, which looks for a kernel.
        quark_moe.QuarkMoEMethod.__init__(self, moe, weight_key, activation_key)
        self.weight_dtype, self.static_input_scales = "mxfp4", False
        self.rounds = activation_key is not None


class MxqEmulatedCompressedTensorsExperts(
    _Experts,
    compressed_tensors_moe_w4a4_mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod,  # type: ignore[misc]
):
    """Experts in the form of compressed-tensors; vLLM wants that to be in the class's name."""

    suffix = "_packed"
    rounds = True

    def __init__(self, moe: Any) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        self.group_size = 32


def _asking_for_inputs(scheme_of: Any) -> Any:
    def get_scheme(self: Any, weight_quant: Any, input_quant: Any, *args: Any, **kwargs: Any) -> Any:
        if input_quant is None and self._is_mxfp4(weight_quant):
            return compressed_tensors.CompressedTensorsW4A4Mxfp4(activation_quant_key=None)
        return scheme_of(self, weight_quant, input_quant, *args, **kwargs)

    return get_scheme


def _with_quark_experts(get: Any) -> Any:
    def get_moe_method(
        quant_config: Any, module: Any, method_cls: Any, weight_quant_key: Any, activation_quant_key: Any, **rest: Any
    ) -> Any:
        ours = method_cls is quark_moe.QuarkOCP_MX_MoEMethod and weight_quant_key == kMxfp4Static
        if ours and activation_quant_key in (None, kMxfp4Dynamic):
            return MxqEmulatedQuarkExperts(module.moe_config, weight_quant_key, activation_quant_key)
        return get(quant_config, module, method_cls, weight_quant_key, activation_quant_key, **rest)

    return get_moe_method


def _with_packed_experts(get: Any) -> Any:
    def get_moe_method(quant_config: Any, layer: Any, layer_name: str) -> Any:
        method = get(quant_config, layer, layer_name)
        if isinstance(method, MxqEmulatedCompressedTensorsExperts):
            scheme = quant_config.get_scheme_dict(layer, f"{layer_name}.0.{layer.ckpt_down_proj_name}")
            method.rounds = scheme["input_activations"] is not None
        return method

    return get_moe_method
