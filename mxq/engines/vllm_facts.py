"""What is known of vLLM 0.32 and said twice: by ``mxq serve`` before a start, by ``mxq doctor`` of a machine.

Where it can be looked up is beside the rules of :mod:`mxq.hardware.catalogue` that speak these texts.
"""

from typing import NamedTuple


class Fact(NamedTuple):
    """What goes wrong, or otherwise than one would think; and what to do."""

    text: str
    do: str


_DEQUANTIZE = "write the same numbers as bf16: mxq dequantize"
_ACTIVATIONS = "to have activations quantized, decode with mxq eval, on a processor or on MI355X"
_PLUGIN = (
    f"install mxq in vLLM's environment: its plugin, unless VLLM_PLUGINS leaves it out, emulates them; or {_DEQUANTIZE}"
)

CPU_LINEARS = Fact(
    "vLLM has no kernel for MXFP4 linears on processors and ends with `Failed to find a kernel that can implement the "
    "MXFP4 linear layer`",
    _PLUGIN,
)
CPU_EMULATES = Fact(
    "vLLM has no kernels for MXFP4 on processors: mxq's plugin emulates them, so that answers and acceptance are those "
    "of MXFP4 and speed is not",
    "for speed, measure where there are kernels",
)
CPU_EXPERTS_NEED_AMX = Fact("vLLM's kernel for MXFP4 experts on processors needs AMX", f"without it, {_PLUGIN}")
CPU_EXPERTS_ARE_WEIGHT_ONLY = Fact(
    "on processors vLLM runs MXFP4 experts with bf16 activations (W4A16): what is measured is a weight-only "
    "quantization",
    _PLUGIN,
)
CPU_ACTIVATIONS_ANYWAY = Fact(
    "of linears in AutoRound's form vLLM has the activations quantized on processors, whatever the checkpoint says",
    "for what weights alone do: mxq dequantize, or --format quark",
)
MARLIN_EXPERTS = Fact(
    "vLLM takes Marlin's kernels for MXFP4 experts in the form of compressed-tensors or AutoRound, and they are for "
    "NVIDIA GPUs",
    "convert with --format quark",
)
CUDA_IS_WEIGHT_ONLY = Fact(
    "before Blackwell vLLM runs MXFP4 by Marlin's kernels, which leave activations as they are (W4A16): what is "
    "measured is a weight-only quantization",
    _ACTIVATIONS,
)
CUDA_EMULATES_EXPERTS = Fact(
    "before Blackwell, where amd-quark is installed, vLLM emulates MXFP4 experts in Quark's form whose activations are "
    "quantized too, and dequantizes all of them in every step",
    "for speed: --moe-backend marlin, which leaves activations as they are",
)
CUDA_EXPERTS_OF_GPT_OSS = Fact(
    "where FlashInfer has its kernels (flashinfer-cubin) or can compile them, vLLM 0.32 gives MXFP4 experts in Quark's "
    "form to one that it can prepare for gpt-oss only: loading ends with an AssertionError (tried with vLLM's "
    "own functions on a processor; not seen on a GPU)",
    "give --moe-backend marlin",
)
WEIGHT_ONLY_EXPERTS = Fact(
    "without AITER vLLM runs weight-only experts emulated, dequantizing all of them in every step; with it, vLLM 0.32 "
    "mixes up their gate and up",
    "quantize activations too (recipe mxfp4)",
)
WEIGHT_ONLY_LINEARS = Fact(
    "weight-only MXFP4 linears in Quark's form: vLLM has no kernel of AITER's for them, and dequantizes the weights in "
    "every step",
    "quantize activations too (recipe mxfp4), or set VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD=1",
)
ACTIVATIONS_ANYWAY = Fact(
    "of linears in the form of compressed-tensors or AutoRound vLLM quantizes the activations on MI355X, whatever the "
    "checkpoint says of them",
    "for what weights alone do: mxq dequantize, or --format quark, which vLLM emulates",
)
MTP_MROPE = Fact(
    "the target is text-only and its rope_parameters have mrope_section or mrope_interleaved: vLLM 0.32 hangs or "
    "crashes at the first request with MTP (seen on processors)",
    "take the two keys out of config.json, which changes no token; or serve the multimodal layout",
)
PREFIX_CACHING = Fact(
    "with speculative decoding, prefix caching (on by default) has been reported to spoil answers of models with "
    "gated DeltaNet, and to find nothing in its cache",
    "with --speculative-config, give --no-enable-prefix-caching too",
)
