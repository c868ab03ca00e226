"""Put a checkpoint's tensors onto modules: names, dtypes, experts in either layout, MXFP4.

Every parameter of a module must find its tensor, of exactly its shape; what is left over is the caller's to judge.
MXFP4 weights are dequantized. Where the checkpoint quantizes activations too (W4A4), each quantized linear rounds its
input to MXFP4 and back before it multiplies, and experts do so twice: before gate and up, and before down.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from mxq.checkpoint import Checkpoint
from mxq.errors import MxqError
from mxq.formats.mxfp4 import dequantize, fake_quantize
from mxq.models import qwen35

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Stored in float32 by the released models, and used in float32 by the recurrence whatever the model's dtype.
_KEPT_FLOAT32 = (".A_log", ".linear_attn.norm.weight")
_SHOWN = 5


class ActivationQuantizer:
    """Fake-quantize linear inputs, once where consecutive linears (q, k and v, say) read the same tensor."""

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._output: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x`` [..., K] rounded to MXFP4 and back."""
        # Holding the input keeps its identity from being reused; nobody writes to activations in place.
        if x is not self._input or self._output is None:
            self._input, self._output = x, fake_quantize(x)
        return self._output

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Forward pre-hook: quantize the first argument."""
        return (self(args[0]), *args[1:])


class Placer:
    """Moves tensors of one checkpoint onto modules and remembers which it has used."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.used: set[str] = set()
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._quantizer = ActivationQuantizer()

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Give every parameter of ``module`` the tensor named ``prefix`` + its own name.

        The module may have been built on the meta device; its parameters are replaced, not copied into. Raises
        MxqError for tensors that are missing, misshapen or at odds with the quantization_config.
        """
        tensors: dict[str, Tensor] = {}
        missing: list[str] = []
        quantized: set[str] = set()
        for name, parameter in module.named_parameters():
            owner = name.rpartition(".")[0]
            read = self._experts if owner.endswith(".experts") else self._parameter
            try:
                tensor, is_quantized = read(prefix + name, parameter.shape)
            except KeyError as error:
                missing.append(str(error.args[0]))
                continue
            tensors[name] = tensor
            if is_quantized:
                quantized.add(owner)
        if missing:
            raise MxqError(
                f"{self._checkpoint.path}: {len(missing)} tensors are missing: {_some(missing)}",
                "the checkpoint is incomplete, or its config.json describes another model",
            )
        module.load_state_dict(tensors, assign=True)
        module.requires_grad_(False)
        if self._checkpoint.quantization is not None and not self._checkpoint.quantization.weight_only:
            for owner in quantized:
                round_inputs(module.get_submodule(owner), self._quantizer)

    def _unquantized(self, name: str, shape: torch.Size) -> Tensor:
        self.used.add(name)
        tensor = self._stored(name, shape)
        if tensor.dtype not in _FLOATS:
            raise MxqError(
                f"{self._checkpoint.path}: tensor {name} is {_word(tensor.dtype)} and has no scale beside it",
                "unquantized weights are bfloat16, float16 or float32, MXFP4 weights uint8 with a scale",
            )
        kept = tensor.dtype == torch.float32 and name.endswith(_KEPT_FLOAT32)
        return tensor.to(self._device, torch.float32 if kept else self._dtype)

    def _stored(self, name: str, shape: torch.Size) -> Tensor:
        found = self._checkpoint.tensors[name].shape
        if tuple(found) != tuple(shape):
            raise MxqError(
                f"{self._checkpoint.path}: tensor {name} has shape {list(found)} where {list(shape)} is needed",
                "the weights and config.json do not belong together",
            )
        return self._checkpoint.read(name)

    def _parameter(self, name: str, shape: torch.Size) -> tuple[Tensor, bool]:
        return self._read(name, name.removesuffix(".weight"), shape)

    def _read(self, name: str, module: str, shape: torch.Size) -> tuple[Tensor, bool]:
        """Read ``name``, dequantized if it has a scale, and say which; ``module`` is the config's word for it."""
        scale_name = qwen35.scale_name(name)
        has_scale = scale_name in self._checkpoint.tensors
        quantization = self._checkpoint.quantization
        should = (
            quantization is not None and qwen35.role(name) in qwen35.QUANTIZABLE and quantization.is_quantized(module)
        )
        if has_scale != should:
            stored, said = ("in MXFP4", "unquantized") if has_scale else ("unquantized", "in MXFP4")
            raise MxqError(
                f"{self._checkpoint.path}: {module} is stored {stored}, but quantization_config says {said}",
                "engines would read its bytes wrongly; check quantization_config in config.json",
            )
        if not has_scale:
            return self._unquantized(name, shape), False
        self.used |= {name, scale_name}
        *rows, columns = shape
        packed = self._stored(name, torch.Size((*rows, columns // 2)))
        scale = self._stored(scale_name, torch.Size((*rows, columns // 32)))
        if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
            raise MxqError(
                f"{self._checkpoint.path}: {name} is {_word(packed.dtype)} with a {_word(scale.dtype)} scale",
                "MXFP4 weights and scales are stored as uint8",
            )
        return dequantize(packed.to(self._device), scale.to(self._device), self._dtype), True

    def _experts(self, name: str, shape: torch.Size) -> tuple[Tensor, bool]:
        """Read ``...experts.gate_up_proj`` or ``...experts.down_proj``: fused as stored, or one tensor per expert."""
        if name in self._checkpoint.tensors:
            return self._read(name, name, shape)
        owner, _, which = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
        count, rows, columns = shape
        part_shape = torch.Size((rows // len(parts), columns))
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        kinds = set()
        for expert in range(count):
            for part, target in zip(parts, out[expert].chunk(len(parts)), strict=True):
                tensor, is_quantized = self._parameter(f"{owner}.{expert}.{part}.weight", part_shape)
                target.copy_(tensor)
                kinds.add(is_quantized)
        if len(kinds) > 1:
            raise MxqError(
                f"{self._checkpoint.path}: some experts of {owner} are quantized and some are not",
                "engines run a layer's experts in one format; convert all of them or none",
            )
        return out, kinds.pop()


def round_inputs(module: nn.Module, quantizer: ActivationQuantizer) -> Callable[[], None]:
    """Let a linear, or the experts of a layer, round what it multiplies to MXFP4 and back; returns what undoes it."""
    handle = module.register_forward_pre_hook(quantizer.before)
    if not hasattr(module, "gate_up_proj"):
        return handle.remove
    # transformers calls this between an expert's two matrix products.
    gate: Callable[[Tensor], Tensor] = module._apply_gate  # type: ignore[assignment]
    module._apply_gate = lambda gate_up: fake_quantize(gate(gate_up))  # type: ignore[assignment]

    def undo() -> None:
        handle.remove()
        del module._apply_gate

    return undo


def refuse_unused(checkpoint: Checkpoint, used: Collection[str], ignored: tuple[str, ...]) -> None:
    """Raise MxqError if the checkpoint holds tensors that are neither ``used`` nor named with an ``ignored`` prefix."""
    unused = [name for name in checkpoint.tensors if name not in used and not name.startswith(ignored)]
    if unused:
        raise MxqError(
            f"{checkpoint.path}: {len(unused)} tensors do not belong to this model: {_some(sorted(unused))}",
            "config.json describes a smaller or another model than the weights",
        )


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
