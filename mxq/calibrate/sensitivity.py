"""How far a model's output moves when a part of it alone is quantized, everything else staying as it was.

The output is what the target says of every token of a text: the distribution p of the unquantized model and q of the
changed one, at temperature 1, behind the same tokens (:mod:`mxq.decode.divergence`). The text is samples of one length;
they are what an interval is over, because tokens of one sample resemble each other.

One model is in memory, and the values of one unit beside it: a unit's weights are replaced in place by what their MXFP4
codes mean, its inputs rounded where the recipe quantizes activations, and the originals put back. Layers before the
first that a unit changes compute what they did, so that each unit begins there, from the hidden states that the
unquantized model had.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mxq.calibrate.groups import Group, Unit
from mxq.checkpoint import Checkpoint
from mxq.decode.divergence import compare
from mxq.decode.loading import ActivationQuantizer, round_inputs
from mxq.decode.target import Target, load_target
from mxq.engines.inprocess import device_named
from mxq.errors import MxqError, UsageError
from mxq.formats.kernels import quantize
from mxq.formats.mxfp4 import dequantize
from mxq.models.qwen35 import Piece
from mxq.progress import Advance
from mxq.stats import Interval, Resampling
from mxq.stats.bootstrap import LINEAR, SHARE, Scale, replicates
from mxq.stats.intervals import interval

_TEXT_MODEL = re.compile(r"model\.(language_model\.)?")
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj")


@dataclass(frozen=True)
class Effect:
    """What a change of the model does to its output.

    Attributes:
        divergence: KL(p || q), nats per token.
        agreement: share of tokens of which both would choose the same, greedily.
        hidden_error: |b - a| / |a| of the output of the final norm, mean over tokens.
    """

    divergence: Interval
    agreement: Interval
    hidden_error: float

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values; None for the ends of an interval over a single sample."""
        kl, agreement = (
            {name: value for name, value in one.as_json().items() if name != "prompts"}
            for one in (self.divergence, self.agreement)
        )
        return {"kl": kl, "agreement": agreement, "hidden_error": self.hidden_error}


def load(path: Path, ids: Tensor, dtype: str, device: str) -> Target:
    """Load a target that shall read samples ``ids`` [samples, length]; ``dtype`` and ``device`` are torch's names.

    Raises:
        UsageError: there is no such device; samples are longer than what the model takes.
        MxqError: as :func:`mxq.decode.load_target`.
    """
    target = load_target(path, dtype=getattr(torch, dtype), device=device_named(device))
    if ids.shape[1] > target.max_positions:
        raise UsageError(
            f"samples of {ids.shape[1]:,} tokens: {path} takes at most {target.max_positions:,}", "make them shorter"
        )
    return target


class Probe:
    """A model of which parts are quantized, and what it said of a text before."""

    @torch.inference_mode()
    def __init__(
        self, target: Target, source: Checkpoint, ids: Tensor, *, rule: str, weight_only: bool, advance: Advance
    ) -> None:
        """Let the model read the text.

        Args:
            target: the unquantized model, this probe's from now on.
            source: its checkpoint as :func:`mxq.checkpoint.fp8.numbers` gives it: what weights are quantized from.
            ids: int64 [samples, length], at least two tokens long.
            rule: the scale rule of the weights.
            weight_only: whether activations stay as they are.
            advance: told how many layers have been run over a sample.

        Raises:
            MxqError: the model's output is not finite.
        """
        self._target, self._source, self._rule, self._weight_only = target, source, rule, weight_only
        self._ids = ids.to(target.device)
        self._layers = len(target.model.layers)
        self._advance = advance
        self._entered, self._inputs = 0, [target.embed(sample) for sample in self._ids]
        self._hidden = [self._rest(inputs) for inputs in self._inputs]
        if not all(hidden.isfinite().all() for hidden in self._hidden):
            raise MxqError(f"{target.path}: what the model computes is not finite", "run mxq verify on it")

    def alone(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, Effect]]:
        """Quantize each unit by itself and yield what that does, units by the first layer that they change."""
        for unit in sorted(units, key=lambda unit: unit.first_layer):
            self._enter(unit.first_layer)
            undo = self._quantize(unit.groups, reversible=True)
            try:
                effect = self._effect(unit.name)
            finally:
                for step in undo:
                    step()
            yield unit, effect

    def together(self, groups: Sequence[Group], name: str) -> Effect:
        """Quantize groups, for good, beside those that already are; return what all of that does.

        Their originals are not kept, which would take a second model; so nothing can be measured :meth:`alone` after.
        """
        if self._entered:
            self._entered, self._inputs = 0, [self._target.embed(sample) for sample in self._ids]
        self._quantize(groups, reversible=False)
        return self._effect(name)

    @torch.inference_mode()
    def _enter(self, layer: int) -> None:
        """Have the hidden states ready that the unquantized model has before a layer."""
        if layer > self._entered:
            for number, inputs in enumerate(self._inputs):
                self._inputs[number] = self._target.read(inputs, self._entered, layer)
                self._advance(layer - self._entered)
            self._entered = layer

    def _rest(self, inputs: Tensor) -> Tensor:
        """Return the output [T, hidden] of the final norm for what goes into the layer that was entered."""
        out = self._target.read(inputs, self._entered, self._layers)
        self._advance(self._layers - self._entered)
        hidden: Tensor = self._target.model.norm(out)
        return hidden

    @torch.inference_mode()
    def _effect(self, name: str) -> Effect:
        sums = np.zeros((3, len(self._ids)))
        for number, (ids, inputs, before) in enumerate(zip(self._ids, self._inputs, self._hidden, strict=True)):
            after = self._rest(inputs)
            p, q = before[:-1], after[:-1]  # nothing is behind the last token
            found = compare(self._target.logits(p), self._target.logits(q), ids[1:])
            a, b = p.float(), q.float()
            errors = (b - a).norm(dim=-1) / a.norm(dim=-1)
            sums[:, number] = [float(one.double().sum()) for one in (found.divergence, found.same, errors)]
        if not np.isfinite(sums).all():
            raise MxqError(
                f"{self._target.path}: with {name} quantized, what the model computes is not finite",
                "its weights hold NaN or infinity: get the checkpoint again",
            )
        tokens = np.full(len(self._ids), self._ids.shape[1] - 1.0)
        return Effect(
            _mean(sums[0], tokens, LINEAR, (0.0, math.inf)),
            _mean(sums[1], tokens, SHARE, (0.0, 1.0)),
            float(sums[2].sum() / tokens.sum()),
        )

    def _quantize(self, groups: Sequence[Group], *, reversible: bool) -> list[Callable[[], None]]:
        """Quantize groups in place; returns what undoes it, nothing if it cannot be."""
        undo: list[Callable[[], None]] = []
        quantizer = ActivationQuantizer()
        for group in groups:
            modules: dict[str, list[Piece]] = defaultdict(list)
            for piece in group.pieces:
                expert = _EXPERT.fullmatch(piece.module)
                modules[_TEXT_MODEL.sub("", expert[1] if expert else piece.module, count=1)].append(piece)
            for path, pieces in modules.items():
                module = self._target.model.get_submodule(path)
                for name, values in self._values(module, pieces).items():
                    parameter = module.get_parameter(name)
                    if reversible:
                        undo.append(_putter(parameter, parameter.data))
                    parameter.data = values
                if not self._weight_only:
                    undo.append(round_inputs(module, quantizer))
        return undo if reversible else []

    def _values(self, module: torch.nn.Module, pieces: Sequence[Piece]) -> dict[str, Tensor]:
        """Return what the codes of a module's weights mean, by the names of its parameters."""
        values = {name: torch.empty_like(parameter) for name, parameter in module.named_parameters() if name != "bias"}
        tensors: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            tensors[piece.tensor].append(piece)
        for name, parts in tensors.items():
            tensor = self._source.read(name).to(self._target.device)
            rows = tensor.view(-1, tensor.shape[-1])
            for part in parts:
                codes, scales = quantize(rows[part.start : part.stop], self._rule, threads=torch.get_num_threads())
                _place(values, part.module).copy_(dequantize(codes, scales, self._target.dtype))
        return values


def cost_of(units: Sequence[Unit], layers: int, samples: int, *, together: int = 1) -> int:
    """Return how often a layer is run over a sample by a probe that measures units alone, and so often ``together``."""
    first = [unit.first_layer for unit in units]
    return samples * (sum(layers - layer for layer in first) + max(first) + (1 + together) * layers)


def _place(values: dict[str, Tensor], module: str) -> Tensor:
    """Return the part of a parameter that holds a module's weight: of experts, transformers has all in two."""
    expert = _EXPERT.fullmatch(module)
    if expert is None:
        return values["weight"]
    if expert[3] == "down":
        return values["down_proj"][int(expert[2])]
    return values["gate_up_proj"][int(expert[2])].chunk(2)[expert[3] == "up"]


def _putter(parameter: torch.nn.Parameter, original: Tensor) -> Callable[[], None]:
    def put() -> None:
        parameter.data = original

    return put


def _mean(sums: Any, tokens: Any, scale: Scale, within: tuple[float, float]) -> Interval:
    resampling = Resampling()
    return interval(replicates(sums[None, :, None], tokens[None, :, None], resampling, scale), resampling, within)
