"""What is known, before a vLLM server is started, of whether it will serve a model as it is: by config and headers.

Facts are those of vLLM 0.32. What it refuses, or would answer with nonsense, is an error; what it serves in another way
than one would think is a warning.
"""

import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.fitting import check_dflash, check_mtp
from mxq.checkpoint.quantization import claims_in_form
from mxq.engines import vllm_facts
from mxq.engines.base import Method
from mxq.engines.vllm_facts import Fact
from mxq.errors import UsageError
from mxq.models import qwen35
from mxq.models.dflash import DFlashConfig

_MXFP4_FORMS = ("quark", "compressed-tensors")
_BY_MARLIN = "--engine-arg moe-backend=marlin runs them by Marlin's kernels, which leave activations as they are"
_AUTOROUND = {"bits": 4, "data_type": "mx_fp"}


@dataclass(frozen=True)
class Kind:
    """What a target is, as far as the way it is served depends on it.

    Attributes:
        form: how it is MXFP4: "quark", "compressed-tensors" or "auto-round", which vLLM runs as the one before; None if
            it is not.
        weight_only: it is, and activations are not quantized.
        experts: its routed experts are MXFP4.
        linears: something else in it is.
        mrope_text_only: it has no vision tower, and yet the keys of its positions.
    """

    form: str | None = None
    weight_only: bool = False
    experts: bool = False
    linears: bool = False
    mrope_text_only: bool = False

    @property
    def experts_on_aiter(self) -> bool | None:
        """Whether AITER's kernels may have the routed experts; None if there is nothing to decide."""
        return None if not self.experts or self.form != "quark" else not self.weight_only


ASSUMED = {
    "bf16": Kind(),
    "dense-mxfp4": Kind("quark", linears=True),
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
    form, weight_only = _form(target)
    if form is None:
        return Kind(mrope_text_only=mrope)
    packed = [qwen35.role(name) for name in target.tensors if qwen35.scale_name(name) in target.tensors]
    experts = qwen35.Role.EXPERT in packed
    return Kind(form, weight_only, experts, any(role is not qwen35.Role.EXPERT for role in packed), mrope)


def _form(target: Checkpoint) -> tuple[str | None, bool]:
    """Return the form of its MXFP4, and whether it is weight-only."""
    raw = target.config.get("quantization_config")
    if not isinstance(raw, dict):
        return None, False
    if raw.get("quant_method") in _MXFP4_FORMS:
        claims = claims_in_form(target.config, str(target.path / "config.json"))
        assert claims is not None
        return claims.form, claims.weight_only
    if raw.get("quant_method") == "auto-round" and raw.items() >= _AUTOROUND.items():
        bits = raw.get("act_bits")
        return "auto-round", not isinstance(bits, int) or bits >= 16
    return None, False


def plugged_in() -> bool:
    """Whether vLLM's build for processors, where it is beside mxq, finds what :mod:`mxq.engines.plugin` adds to it."""
    wanted = os.environ.get("VLLM_PLUGINS")
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="mxq")
    return bool(found) and (wanted is None or "mxq" in wanted.split(","))


def check_kernels(kind: Kind, hardware: str, model: str) -> None:
    """Raise UsageError if vLLM has no kernel on the hardware for what is MXFP4 in ``model``, not even an emulation."""
    fact, emulated = None, hardware == "cpu" and plugged_in()
    if hardware == "cpu" and kind.linears and not emulated:
        fact = vllm_facts.CPU_LINEARS
    elif hardware in ("cpu", "mi355x") and kind.experts and kind.form != "quark":
        fact = None if emulated and kind.form == "compressed-tensors" else vllm_facts.MARLIN_EXPERTS
    if fact is not None:
        raise UsageError(f"{model}: {fact.text}", fact.do)


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
    check_kernels(kind, hardware, str(target.path))
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
            "give another --tp",
        )


def warnings(kind: Kind, hardware: str, method: Method, argv: Sequence[str]) -> list[str]:
    """Return what a user of a server with the command ``argv`` should know of it."""
    found = [f"{fact.text}; {fact.do}" for fact in _of_kernels(kind, hardware, argv)]
    if method == "mtp" and kind.mrope_text_only:
        found.append("; ".join(vllm_facts.MTP_MROPE))
    if method != "ar" and "--no-enable-prefix-caching" not in argv:
        found.append(
            f"{vllm_facts.PREFIX_CACHING.text} (vllm-project/vllm #53912); --engine-arg no-enable-prefix-caching turns "
            "it off"
        )
    return found


def _of_kernels(kind: Kind, hardware: str, argv: Sequence[str]) -> Iterator[Fact]:
    quark_experts = kind.experts and kind.form == "quark"
    if hardware == "cpu" and kind.form is not None and plugged_in():
        yield vllm_facts.CPU_EMULATES
        if kind.form == "auto-round" and kind.weight_only and kind.linears:
            yield vllm_facts.CPU_ACTIVATIONS_ANYWAY
    elif hardware == "cpu" and quark_experts:
        yield vllm_facts.CPU_EXPERTS_NEED_AMX
        if not kind.weight_only:
            yield vllm_facts.CPU_EXPERTS_ARE_WEIGHT_ONLY
    if hardware == "mi355x" and kind.weight_only:
        if quark_experts:
            yield vllm_facts.WEIGHT_ONLY_EXPERTS
        if kind.linears:
            yield vllm_facts.WEIGHT_ONLY_LINEARS if kind.form == "quark" else vllm_facts.ACTIVATIONS_ANYWAY
    if hardware == "h200":
        by_hand = "--moe-backend" in argv
        if quark_experts and not by_hand:
            if not kind.weight_only:
                yield vllm_facts.CUDA_EMULATES_EXPERTS._replace(do=_BY_MARLIN)
            yield vllm_facts.CUDA_EXPERTS_OF_GPT_OSS._replace(do=_BY_MARLIN)
        experts_by_marlin = kind.experts and (not quark_experts or ("--moe-backend", "marlin") in pairwise(argv))
        if not kind.weight_only and (kind.linears or experts_by_marlin):
            yield vllm_facts.CUDA_IS_WEIGHT_ONLY
