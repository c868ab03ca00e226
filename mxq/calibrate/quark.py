"""AMD Quark in this process: imported late and quietly, asked through its API, its bytes taken as they are.

What it is given is a text model of one decoder layer, ``layers.0``; so whatever Quark does block by block it does once.
Three places differ from a run of Quark alone, on purpose:

* *Columns without input keep their weights.* Quark's GPTQ sets the weights of an input that was zero in every token to
  zero, and with it all of an expert that no token reached. Here such columns are rounded to nearest.
* *Only what is quantized is scaled.* Quark's tables for AWQ and SmoothQuant also scale linears that are left as they
  are (a shared expert, say), which would change tensors that a recipe keeps.
* *A scale is folded into a norm as it will be stored.* The norms are zero-centred (1 + w) and stored in bfloat16, so
  that w = (1 + w) / s - 1 loses up to two percent; s is chosen so that nothing is lost.
"""

import contextlib
import copy
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from mxq.errors import MxqError, UsageError

PREFIX = "layers.0."
"""What the names of the one layer's modules begin with."""

_SAME_INPUT = ("self_attn.[qkv]_proj", "linear_attn.in_proj_*", "mlp.[gu]*_proj", "mlp.shared_expert.[gu]*_proj")


@dataclass
class Outcome:
    """What Quark made of one decoder layer; names are the layer's own (``mlp.up_proj``).

    Attributes:
        codes: quantized module -> packed codes uint8 [N, K/2] and scales uint8 [N, K/32].
        norms: changed norm -> its weight, float32.
        columns: module -> float32 [K] by which its columns were multiplied.
        rows: linear -> float32 [N] by which its rows were divided.
        outputs: what the layer returned for each batch when it ran for the last time.
        routed: expert -> tokens, in that run.
        unseen_columns: module -> how many of its inputs were zero in every token (GPTQ).
    """

    codes: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    routed: dict[int, int] = field(default_factory=dict)
    unseen_columns: dict[str, int] = field(default_factory=dict)


def load() -> str:
    """Import Quark and return its version.

    Raises:
        UsageError: it is not installed, or its C++ extension cannot be built.
    """
    try:
        version = importlib.metadata.version("amd-quark")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "calibrated recipes need AMD Quark, which is not installed", "pip install 'mxq[quark]'"
        ) from None
    # Compiling its fake quantization takes longer than running it; vLLM's plugin has no business here.
    os.environ.setdefault("QUARK_DISABLE_COMPILE", "1")
    os.environ.setdefault("QUARK_LOG_LEVEL", "critical")
    try:
        with _quiet():
            importlib.import_module("quark.torch")
            importlib.import_module("quark.torch.utils.llm.model_preparation")
    except Exception as error:  # whatever an import, a compiler or a wrong QUARK_LOG_LEVEL raises
        raise _not_loaded(version, error) from error
    return version


def _not_loaded(version: str, error: Exception) -> UsageError:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return UsageError(
            f"AMD Quark {version} builds a C++ extension when it is first used, and there is no compiler {compiler}",
            "install one: apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora, RHEL)",
        )
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        return UsageError(
            f"AMD Quark {version} builds a C++ extension with ninja, which is not installed", "pip install ninja"
        )
    reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
    return UsageError(
        f"AMD Quark {version} cannot be imported: {reason}",
        "QUARK_LOG_LEVEL=info python -c 'import quark.torch' shows what it does",
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Quark's log, progress bars and warnings from the terminal, unless its log was asked for."""
    with contextlib.ExitStack() as stack:
        if os.environ.get("QUARK_LOG_LEVEL") == "critical":
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.WARNING)  # torch's about compilers, transformers' about faster kernels
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def check_algorithm(family: str, algorithm: str) -> None:
    """Raise UsageError unless Quark has ``algorithm`` for models of ``family``, by Quark's own tables."""
    from quark.torch.quantization.config.algo_configs import ALGORITHM_CONFIG_MAPS

    if ALGORITHM_CONFIG_MAPS.get(algorithm, {}).get(family) is None:
        exist = ", ".join(sorted(name for name, table in ALGORITHM_CONFIG_MAPS.items() if table.get(family)))
        raise UsageError(f"AMD Quark has no {algorithm} for {family}", f"it has {exist or 'none'} there")


def unfuse(model: Any) -> None:
    """Give every routed expert linears of its own, in place, as Quark needs them."""
    from quark.torch.utils.llm.model_preparation import preprocess_for_quantization

    with _quiet():
        preprocess_for_quantization(model)


def run(
    model: Any,
    family: str,
    quantized: Sequence[str],
    algorithm: str,
    options: Mapping[str, Any],
    batches: Sequence[Tensor],
    stored: torch.dtype,
) -> Outcome:
    """Quantize linears of a model of one decoder layer, in place, and run it.

    Args:
        model: transformers' text model, whose only layer is in float32 and :func:`unfuse`'d.
        family: ``qwen3_5`` or ``qwen3_5_moe``.
        quantized: the layer's linears to quantize, by the layer's own names; all others stay as they are.
        algorithm, options: see :mod:`mxq.calibrate.algorithms`.
        batches: inputs of the layer, [batch, length, hidden] each, all of one shape.
        stored: the type in which norms are going to be stored.

    Raises:
        UsageError: ``quantized`` names what Quark cannot quantize.
        MxqError: Quark failed.
    """
    from quark.torch import LLMTemplate, ModelQuantizer

    layer = model.layers[0]
    chosen = set(quantized)
    linears = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
    strange = sorted(name for name in chosen if name not in linears or type(layer.get_submodule(name)) is not nn.Linear)
    if strange:
        raise UsageError(f"{strange[0]} is no linear that AMD Quark quantizes", "keep it in the recipe")
    template = LLMTemplate.get(family)
    config = copy.deepcopy(template.algo_config[algorithm])
    config.model_decoder_layers = "layers"
    for name, value in options.items():
        setattr(config, name, value)
    if algorithm == "gptq":
        config.inside_layer_modules = _steps(config.inside_layer_modules, chosen)
    else:
        config.scaling_layers = _pairs(config.scaling_layers, layer, linears, chosen)
    quark_config = template.get_config(
        scheme="mxfp4",
        algorithm=[algorithm],
        exclude_layers=[PREFIX + name for name in linears if name not in chosen],
        algo_configs={algorithm: config},
    )
    norms = {name: module.weight.clone() for name, module in layer.named_modules() if name.endswith("layernorm")}
    outcome = Outcome()
    quantizer = ModelQuantizer(quark_config)
    try:
        with _watched(layer, len(batches), outcome), _altered(layer, stored, outcome), _quiet(), torch.no_grad():
            model = quantizer.quantize_model(model, [{"inputs_embeds": batch} for batch in batches])
            model = quantizer.freeze(model)
            for name in quantized:
                outcome.codes[name] = _exported(layer.get_submodule(name))
    except Exception as error:  # Quark's own, torch's of a matrix that cannot be inverted, or of no memory
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        raise MxqError(f"AMD Quark's {algorithm} failed: {reason}", "--debug shows where") from error
    for name, before in norms.items():
        after = layer.get_submodule(name).weight
        if not torch.equal(before, after):
            outcome.norms[name] = after.detach().clone()
    return outcome


def _steps(patterns: Sequence[str], chosen: set[str]) -> list[str]:
    """Return what GPTQ quantizes one after the other: Quark's patterns, as few of them as give the same bytes.

    Quark runs the layer once more for every pattern, whether it matches or not; linears that read the same input can
    share a run. Routed experts do not: each linear keeps a float32 matrix [K, K] during a run.
    """
    together = (next((shared for shared in _SAME_INPUT if fnmatch(pattern, shared)), pattern) for pattern in patterns)
    steps = [pattern for pattern in dict.fromkeys(together) if any(fnmatch(name, f"*{pattern}") for name in chosen)]
    left = {name for name in chosen if not any(fnmatch(name, f"*{pattern}") for pattern in steps)}
    if left:
        raise UsageError(f"AMD Quark's GPTQ leaves out {min(left)}", "keep it in the recipe")
    return steps


def _pairs(
    entries: Sequence[Mapping[str, Any]], layer: nn.Module, linears: Sequence[str], chosen: set[str]
) -> list[dict[str, Any]]:
    """Return Quark's pairs of what is divided by a scale and what is multiplied, where the latter is quantized.

    What is divided must be a norm or quantized itself: else a tensor that the recipe keeps would change. An entry of
    bare names (``up_proj``, ``down_proj``) stands for every module that holds both, which are written out here.
    """
    modules = dict(layer.named_modules())
    pairs = []
    for entry in entries:
        first = entry["layers"][0]
        owners = [""] if first in modules else [name[: -len(first)] for name in linears if name.endswith(f".{first}")]
        for owner in owners:
            before = owner + entry["prev_op"]
            scaled = [owner + name for name in entry["layers"]]
            if chosen.issuperset(scaled) and (before in chosen or not isinstance(modules[before], nn.Linear)):
                pairs.append({**entry, "prev_op": before, "layers": scaled, "inp": owner + entry["inp"]})
    return pairs


@contextlib.contextmanager
def _watched(layer: nn.Module, batches: int, outcome: Outcome) -> Iterator[None]:
    """Keep what the layer returned, and where its router sent tokens, in its last run over all batches.

    For GPTQ that is the run behind the last linear, with quantized weights; for AWQ and SmoothQuant the only one, with
    the weights as they came. Either is what Quark gives to the next layer.
    """
    outputs: deque[Tensor] = deque(maxlen=batches)
    routed: deque[Tensor] = deque(maxlen=batches)
    handles = [layer.register_forward_hook(lambda module, args, output: outputs.append(output))]
    router = getattr(layer.mlp, "gate", None)
    if router is not None:
        count = router.weight.shape[0]
        handles.append(
            router.register_forward_hook(
                lambda module, args, output: routed.append(torch.bincount(output[2].flatten(), minlength=count))
            )
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    outcome.outputs = list(outputs)
    outcome.routed = dict(enumerate(torch.stack(list(routed)).sum(0).tolist())) if routed else {}
    if len(outputs) != batches:
        raise MxqError("AMD Quark did not run the layer on the calibration text", "see which version is installed")


@contextlib.contextmanager
def _altered(layer: nn.Module, stored: torch.dtype, outcome: Outcome) -> Iterator[None]:
    """Put in place what the module's docstring says, and note what was scaled."""
    from quark.torch.algorithm.awq import awq, smooth
    from quark.torch.algorithm.gptq.gptq import GPTQ

    quantize = GPTQ.quantize

    def keep_columns(self: Any, *args: Any, **kwargs: Any) -> None:
        unseen = torch.diagonal(self.H) == 0
        # Quark sets these to 1 as well, but only after it has found them; with 1, what is left of GPTQ is rounding.
        self.H[unseen, unseen] = 1
        if unseen.any():
            name = next(name for name, module in layer.named_modules() if module is self.layer)
            outcome.unseen_columns[name] = int(unseen.sum())
        quantize(self, *args, **kwargs)

    def folding(apply: Callable[..., None]) -> Callable[..., None]:
        def fold(
            module: nn.Module, scales: list[tuple[str, tuple[str, ...], Tensor]], *args: Any, **kwargs: Any
        ) -> None:
            exact = [(before, after, _storable(module.get_submodule(before), s, stored)) for before, after, s in scales]
            for before, after, s in exact:
                if isinstance(module.get_submodule(before), nn.Linear):
                    outcome.rows[before] = s.clone()
                outcome.columns.update({name: s.clone() for name in after})
            apply(module, exact, *args, **kwargs)

        return fold

    applied = {awq: awq.apply_scale, smooth: smooth.apply_scale}
    GPTQ.quantize = keep_columns
    for owner, apply in applied.items():
        owner.apply_scale = folding(apply)
    try:
        yield
    finally:
        GPTQ.quantize = quantize
        for owner, apply in applied.items():
            owner.apply_scale = apply


def _storable(before: nn.Module, scales: Tensor, stored: torch.dtype) -> Tensor:
    """Return scales near ``scales`` that a zero-centred norm of type ``stored`` can be divided by without loss."""
    if isinstance(before, nn.Linear) or stored == torch.float32:
        return scales
    weight = before.weight
    assert isinstance(weight, Tensor)
    gain = 1 + weight.float().to(scales.device)
    divided = 1 + (gain / scales - 1).to(stored).float()
    eps = torch.finfo(stored).eps
    next_to_it = torch.where(gain > 0, eps / 2, -eps)  # what w = -1 + x is stored for the smallest x
    divided = torch.where(divided == 0, next_to_it, divided)
    return torch.where(gain == 0, scales, gain / divided)


def _exported(linear: Any) -> tuple[Tensor, Tensor]:
    from quark.torch.export.nn.modules.qparamslinear import QParamsLinear

    packed = QParamsLinear.from_module(linear, "quark", "reorder")
    return packed.weight.detach().cpu(), packed.weight_quantizer.scale.detach().cpu()
