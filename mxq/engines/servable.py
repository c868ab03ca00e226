"""What is known, before a vLLM server is started, of whether it will serve a model as it is: by config and headers.

Facts are those of vLLM 0.32. What it refuses, or would answer with nonsense, is an error; what it serves in another way
than one would think is a warning.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.fitting import check_dflash, check_mtp
from mxq.checkpoint.quantization import claims_in_form
from mxq.engines.base import Method
from mxq.errors import UsageError
from mxq.models import qwen35
from mxq.models.dflash import DFlashConfig

_MXFP4_FORMS = ("quark", "compressed-tensors")


@dataclass(frozen=True)
class Kind:
    """What a target is, as far as the way it is served depends on it.

    Attributes:
        form: how it is MXFP4: "quark" or "compressed-tensors"; None if it is not.
        weight_only: it is, and activations are not quantized.
        experts: its routed experts are MXFP4.
        mrope_text_only: it has no vision tower, and yet the keys of its positions.
    """

    form: str | None = None
    weight_only: bool = False
    experts: bool = False
    mrope_text_only: bool = False

    @property
    def experts_on_aiter(self) -> bool | None:
        """Whether AITER's kernels may have the routed experts; None if there is nothing to decide."""
        return None if not self.experts or self.form != "quark" else not self.weight_only


ASSUMED = {
    "bf16": Kind(),
    "dense-mxfp4": Kind("quark"),
    "moe-mxfp4": Kind("quark", experts=True),
}
"""Kinds of what `mxq quantize` makes and takes, for a target that cannot be looked at."""


def kind_of(target: Checkpoint) -> Kind:
    """Return what ``target`` is.

    Raises:
        UsageError: its architecture is none of Qwen3.5's.
        MxqError: its quantization_config cannot be read.
    """
    qwen35.family(target.config, str(target.path))
    text_only = not any(name.endswith("ForConditionalGeneration") for name in target.config["architectures"])
    rope = qwen35.text_config(target.config).get("rope_parameters")
    mrope = text_only and isinstance(rope, dict) and bool({"mrope_section", "mrope_interleaved"} & rope.keys())
    raw = target.config.get("quantization_config")
    if not isinstance(raw, dict) or raw.get("quant_method") not in _MXFP4_FORMS:
        return Kind(mrope_text_only=mrope)
    claims = claims_in_form(target.config, str(target.path / "config.json"))
    assert claims is not None
    experts = any(
        qwen35.role(name) is qwen35.Role.EXPERT and qwen35.scale_name(name) in target.tensors for name in target.tensors
    )
    return Kind(claims.form, claims.weight_only, experts, mrope)


def check(
    target: Checkpoint,
    kind: Kind,
    hardware: str,
    method: Method,
    budget: int,
    drafter: Checkpoint | None,
    tensor_parallel_size: int,
) -> None:
    """Raise UsageError or MxqError for what the hardware's vLLM refuses to serve, or serves as nonsense."""
    if hardware == "cpu" and kind.form is not None:
        raise UsageError(
            f"{target.path} is MXFP4, for which vLLM has no kernel on a CPU",
            "`mxq dequantize` writes it as bf16, which gives the tokens of the same weights",
        )
    if method == "mtp":
        check_mtp(target)
        heads = qwen35.text_config(target.config).get("mtp_num_hidden_layers")
        if type(heads) is int and budget > heads > 1 and budget % heads:
            raise UsageError(
                f"{budget} draft tokens with an MTP head of {heads} layers",
                "vLLM takes as many as there are layers, or a multiple of it",
            )
    if method == "dflash":
        assert drafter is not None
        config = check_dflash(drafter, target.path, qwen35.text_config(target.config))
        _check_drafter(config, str(drafter.path / "config.json"), hardware, budget, tensor_parallel_size)


def _check_drafter(config: DFlashConfig, where: str, hardware: str, budget: int, tensor_parallel_size: int) -> None:
    if budget >= config.block_size:
        raise UsageError(
            f"{budget} draft tokens per pass, but {where} has block_size {config.block_size}, the committed token "
            "included",
            f"--budget is at most {config.block_size - 1}: vLLM would draft more without a word, and badly",
        )
    sliding = config.layer_types.count("sliding_attention")
    if sliding and config.sliding_window is None:
        raise UsageError(f"{where}: layers of sliding_attention, and no sliding_window", "vLLM refuses it")
    if hardware == "cpu" and 0 < sliding < config.num_hidden_layers:
        raise UsageError(
            f"{where}: layer_types has sliding and full attention, which vLLM's runner for CPUs does not mix",
            "serve it on a GPU",
        )
    heads, pairs = config.num_attention_heads, config.num_key_value_heads
    if heads % tensor_parallel_size or (pairs % tensor_parallel_size and tensor_parallel_size % pairs):
        raise UsageError(
            f"{where}: {heads} attention heads and {pairs} of keys and values cannot be shared by "
            f"{tensor_parallel_size} GPUs",
            "give another --tensor-parallel-size",
        )


def warnings(kind: Kind, hardware: str, method: Method, argv: Sequence[str]) -> list[str]:
    """Return what a user of a server with the command ``argv`` should know of it."""
    found = []
    if hardware == "mi355x" and kind.form == "quark" and kind.weight_only:
        found.append(
            "vLLM 0.32 with AITER mixes up gate and up of weight-only experts of Quark's form and answers nonsense: "
            "VLLM_ROCM_USE_AITER=0 must stay, with which it emulates them slowly"
            if kind.experts
            else "vLLM has no kernel on AMD GPUs for MXFP4 in weights only, and emulates it slowly"
        )
    if hardware == "mi355x" and kind.experts and kind.form == "compressed-tensors":
        found.append(
            "vLLM 0.32 has no kernel on AMD GPUs for MXFP4 experts in the form of compressed-tensors: "
            "`mxq quantize --format quark` writes the other"
        )
    if hardware == "h200" and kind.form == "quark":
        found.append(
            "vLLM emulates MXFP4 in Quark's form on NVIDIA GPUs: acceptance is the model's, speed is not; "
            "weight-only in the form of compressed-tensors runs on Marlin's kernels"
        )
    if hardware == "cpu" and kind.mrope_text_only and method == "mtp":
        found.append(
            "vLLM 0.32 on a CPU hangs or crashes with MTP on text-only targets with mrope keys in rope_parameters"
        )
    if method != "ar" and "--no-enable-prefix-caching" not in argv:
        found.append(
            "vLLM caches prefixes unless told not to, and with speculation that has spoilt answers of Qwen3.5-like "
            "models (vllm-project/vllm #53912): --engine-arg no-enable-prefix-caching turns it off"
        )
    return found
