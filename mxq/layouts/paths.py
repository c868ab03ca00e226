"""Which kernels vLLM 0.32 with AITER takes for MXFP4 layers of Qwen3.5 on MI355X, what it pads, what is known to fail.

Read from source and from issues; none of it has run on the hardware. What decides is a :class:`Fact`, or a small
function; each names its public source.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from mxq.layouts.kernels import KERNELS, Shapes, experts_shapes
from mxq.layouts.tuned import Tuned, tuned

VERDICTS = ("refused", "wrong", "emulated", "note")
"""From the worst: the engine stops, its results are wrong, no fp4 kernel computes them, worth knowing."""

SGLANG_INTERMEDIATE = 256
"""SGLang pads packed w2 to 128 bytes: ``python/sglang/srt/layers/moe/utils.py``, ``get_moe_weight_sizes``."""

_ORACLE = "vllm/model_executor/layers/fused_moe/oracle/mxfp4.py"
_QUARK_MOE = "vllm/model_executor/layers/quantization/quark/quark_moe.py"
_BLOCK = 32

C = TypeVar("C")


@dataclass(frozen=True)
class Fact(Generic[C]):
    """Something known about some cases.

    Attributes:
        id: a name for it.
        verdict: one of :data:`VERDICTS`.
        source: where that is to be read.
        holds: tells whether a case is one of them.
        text: says it of a case.
    """

    id: str
    verdict: str
    source: str
    holds: Callable[[C], bool]
    text: Callable[[C], str]


@dataclass(frozen=True)
class Found:
    """A fact of one case: see :class:`Fact`."""

    id: str
    verdict: str
    text: str
    source: str


def facts(case: C, among: Iterable[Fact[C]]) -> list[Found]:
    """Return what holds for a case, the worst first."""
    found = [Found(f.id, f.verdict, f.text(case), f.source) for f in among if f.holds(case)]
    return sorted(found, key=lambda one: VERDICTS.index(one.verdict))


def worst(found: Iterable[Found]) -> str:
    """Return the worst verdict among facts; ``ok`` if they are but notes."""
    order = [*VERDICTS[:-1], "ok"]
    verdicts = (one.verdict if one.verdict in order else "ok" for one in found)
    return min(verdicts, key=order.index, default="ok")


@dataclass(frozen=True)
class Deployment:
    """``--tensor-parallel-size`` tp, and experts shared by ``ep`` GPUs if that is more than 1.

    In vLLM expert parallelism is over all GPUs, EP = TP x DP, and leaves experts whole; everything else is shared by
    TP, in DP copies. Source: ``FusedMoEParallelConfig.make`` of ``vllm/model_executor/layers/fused_moe/config.py``.
    """

    tp: int
    ep: int = 1

    @property
    def dp(self) -> int:
        """``--data-parallel-size``."""
        return max(1, self.ep // self.tp)

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.tp * self.dp

    @property
    def of_expert(self) -> int:
        """GPUs that share every expert."""
        return self.tp if self.ep == 1 else 1

    def of_shared_expert(self, intermediate: int, packed: bool) -> int:
        """Return how many GPUs share the shared expert; 1 where each has all of it.

        That is so where tokens are shared instead (experts by EP, with DP and TP both), and where blocks of its scales
        would be cut and experts are shared by EP.

        Source: ``use_sequence_parallel_moe`` of ``vllm/config/parallel.py``, and
        ``_should_replicate_misaligned_shared_expert`` of ``vllm/model_executor/models/qwen3_next.py``.
        """
        tokens_shared = self.ep > 1 and self.tp > 1 and self.dp > 1
        misaligned = packed and intermediate % (self.tp * _BLOCK) > 0
        return 1 if tokens_shared or (misaligned and self.ep > 1) else self.tp


@dataclass(frozen=True)
class ExpertsCase:
    """Routed experts of MXFP4 as one GPU of a deployment has them.

    Attributes:
        experts: E of the model.
        hidden: H.
        intermediate: I of the model.
        top_k: experts of a token.
        on: how it is served.
        activations: they are quantized too (W4A4).
        quark: the checkpoint is in Quark's form.
        shared: there is a shared expert of the same I, in MXFP4 too.
    """

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    on: Deployment
    activations: bool = True
    quark: bool = True
    shared: bool = False

    @property
    def own_experts(self) -> int:
        """E of the GPU."""
        return self.experts // self.on.ep

    @property
    def own_intermediate(self) -> int:
        """I of the GPU."""
        return self.intermediate // self.on.of_expert

    @property
    def guarded(self) -> bool:
        """This exact shape is not left to AITER: ``_requires_qwen38_tep8_emulation`` of vLLM's ``oracle/mxfp4.py``."""
        shape = (self.experts, self.hidden, self.intermediate, self.on.ep)
        return self.activations and shape == (512, 2560, 640, 8)

    @property
    def padding(self) -> tuple[int, int]:
        """H and I become multiples of these: ``mxfp4_round_up_hidden_size_and_intermediate_size`` of the same file.

        Quark's method does not tell that function the activation, so weight-only experts get the larger numbers.
        """
        if self.guarded:
            return _BLOCK, _BLOCK
        kernel = KERNELS["moe-a4w4" if self.activations else "moe-interleaved"]
        return kernel.hidden, kernel.intermediate

    @property
    def padded(self) -> tuple[int, int]:
        """H and I of the GPU's operands in vLLM."""
        return _up(self.hidden, self.padding[0]), _up(self.own_intermediate, self.padding[1])

    @property
    def sglang_intermediate(self) -> int:
        """I of the GPU's operands in SGLang."""
        return _up(self.own_intermediate, SGLANG_INTERMEDIATE)

    def row(self, intermediate: int) -> Tuned | None:
        """Return AITER's tuned rows for operands of that I, with E and k as it counts them (``aiter/fused_moe.py``)."""
        if not self.activations or self.guarded:
            return None
        return tuned(self.padded[0], intermediate, self.own_experts, self.top_k - (self.on.ep > 1))

    @property
    def fused(self) -> Tuned | None:
        """AITER's tuned rows where the shared expert is one more, for every token: E and k are one more."""
        return tuned(*self.padded, self.own_experts + 1, self.top_k + 1)

    def bytes(self) -> tuple[int, int]:
        """Return what a GPU has of one layer: codes and scales before padding, and as vLLM gives them to the kernel.

        Padding of AITER's scales is in the second: their columns become a multiple of 8 (``e8m0_shuffle``).
        """
        sizes = (self.own_experts, self.hidden, self.own_intermediate)
        if self.guarded:
            return _bytes(experts_shapes(*sizes)), _bytes(experts_shapes(sizes[0], *self.padded))
        kernel = KERNELS["moe-a4w4" if self.activations else "moe-interleaved"]
        return _bytes(experts_shapes(*sizes)), _bytes(kernel.shapes(sizes))


EXPERTS_FACTS: tuple[Fact[ExpertsCase], ...] = (
    Fact(
        "ep-multiple",
        "refused",
        "vllm/model_executor/layers/fused_moe/config.py, FusedMoEParallelConfig.make",
        lambda c: c.on.ep > 1 and c.on.ep % c.on.tp > 0,
        lambda c: f"EP is TP x DP in vLLM, and EP {c.on.ep} is no multiple of TP {c.on.tp}",
    ),
    Fact(
        "tp-experts",
        "refused",
        "vllm/model_executor/models/qwen3_next.py, Qwen3NextSparseMoeBlock",
        lambda c: c.on.tp > c.experts,
        lambda c: f"TP {c.on.tp} is more than there are experts, {c.experts}",
    ),
    Fact(
        "expert-divided",
        "refused",
        "vllm/model_executor/layers/fused_moe/config.py, FusedMoEConfig.__post_init__",
        lambda c: c.intermediate % c.on.of_expert > 0,
        lambda c: f"I = {c.intermediate} is no multiple of TP {c.on.of_expert}",
    ),
    Fact(
        "form",
        "refused",
        "vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors_moe/"
        "compressed_tensors_moe_w4a4_mxfp4.py: MarlinExperts, which is for Nvidia",
        lambda c: not c.quark,
        lambda c: "experts in compressed-tensors' form have no kernel on AMD GPUs: use --format quark",
    ),
    Fact(
        "block-cut",
        "wrong",
        "vllm/model_executor/layers/fused_moe/routed_experts.py, _load_w2",
        lambda c: c.intermediate % c.on.of_expert == 0 and c.own_intermediate % _BLOCK > 0,
        lambda c: (
            f"a GPU's I = {c.own_intermediate} cuts a scale's block of {_BLOCK}, and vLLM rounds down without an error"
        ),
    ),
    Fact(
        "weight-only",
        "wrong",
        f"{_ORACLE}, convert_gpt_oss_weight_to_mxfp4_moe_kernel_format; vllm-project/vllm #52240",
        lambda c: not c.activations and c.quark,
        lambda c: "weight-only experts are read as gpt-oss's pairs of rows: gate and up are mixed",
    ),
    Fact(
        "mxmoe-ep",
        "refused",
        "aiter/fused_moe.py: flydsl_mxmoe_* with an expert_mask raises NotImplementedError",
        lambda c: c.on.ep > 1 and (row := c.row(c.padded[1])) is not None and row.mxmoe,
        lambda c: "tuned rows name mxmoe kernels, which raise NotImplementedError under EP",
    ),
    Fact(
        "tep8-guard",
        "emulated",
        f"{_ORACLE}, _requires_qwen38_tep8_emulation",
        lambda c: c.guarded,
        lambda c: "vLLM emulates E 512, H 2560, I 640 under EP 8: AITER's results are not reliable there",
    ),
    Fact(
        "stage-2",
        "note",
        "ROCm/aiter #5233 (CK-Tile), #3476 (FlyDSL, first in 0.1.16); aiter/utility/fp4_utils.py, e8m0_shuffle",
        lambda c: c.activations and not c.guarded and c.padded[1] % 256 > 0,
        lambda c: (
            "padded I is no multiple of 256, as stage 2 of CK and CK-Tile needs: FlyDSL alone, AITER 0.1.16 on; "
            "w2's scales get columns that AITER leaves uninitialized"
        ),
    ),
    Fact(
        "padded-i",
        "note",
        "ROCm/aiter #3401, #3677 (0.1.16.post2), #5413 (open)",
        lambda c: c.padded[1] != c.own_intermediate,
        lambda c: "I is padded with zeros: AITER 0.1.16.post2 or later; CK ignores that it is padding",
    ),
    Fact(
        "fused-shared",
        "note",
        "vllm/model_executor/layers/fused_moe/utils.py, resolve_layer_fused_shared_expert",
        lambda c: c.shared and c.activations and c.quark and c.on.ep == 1,
        lambda c: (
            "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=1 makes the shared expert one more of them: "
            + (f"tuned, {c.fused.kernels}" if c.fused else "not tuned")
        ),
    ),
    Fact(
        "padded-h",
        "note",
        f"{_ORACLE}, mxfp4_round_up_hidden_size_and_intermediate_size",
        lambda c: c.padded[0] != c.hidden,
        lambda c: f"H = {c.hidden} is padded to {c.padded[0]}",
    ),
)


@dataclass(frozen=True)
class LinearCase:
    """A dense MXFP4 module, or several that engines merge, as one GPU has it: N rows, K columns."""

    n: int
    k: int
    activations: bool = True

    @property
    def assembly(self) -> bool:
        """``gemm_a4w4`` takes it: N % 32 = 0 and K % 256 = 0 of what the GPU has.

        vLLM asks only with ``VLLM_ROCM_USE_AITER_FP4_ASM_GEMM=1``, and computes everything else by ``gemm_afp4wfp4``.
        Up to 64 tokens it then takes ``gemm_afp4wfp4_preshuffle``, which reads the same bytes, where AITER has a tuned
        configuration for N and K. Source: ``_asm_fp4_scale_swizzle_supported`` and ``gemm_with_dynamic_quant`` of
        ``vllm/model_executor/kernels/linear/mxfp4/aiter.py``.
        """
        kernel = KERNELS["dense-asm"]
        return self.activations and not (self.n % kernel.intermediate or self.k % kernel.hidden)


LINEAR_FACTS: tuple[Fact[LinearCase], ...] = (
    Fact(
        "block-cut",
        "refused",
        "vllm/model_executor/layers/quantization/quark/schemes/quark_ocp_mx.py, create_weights",
        lambda c: c.k % _BLOCK > 0,
        lambda c: f"a GPU's K = {c.k} cuts a scale's block of {_BLOCK}",
    ),
    Fact(
        "weight-only",
        "emulated",
        "vllm/model_executor/kernels/linear/mxfp4/aiter.py, can_implement; .../emulation.py",
        lambda c: not c.activations,
        lambda c: "weight-only dense layers are emulated, which needs amd-quark",
    ),
    Fact(
        "no-assembly",
        "note",
        "vllm/model_executor/kernels/linear/mxfp4/aiter.py, process_weights_after_loading",
        lambda c: c.activations and not c.assembly,
        lambda c: "N is no multiple of 32, or K none of 256: with ASM asked for, vLLM warns and falls back to Triton",
    ),
)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _bytes(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
