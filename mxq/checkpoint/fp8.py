"""Block-FP8 checkpoints, the form in which the largest models are published, read as the numbers that they mean.

A linear's ``X.weight`` is F8_E4M3 [N, K], its ``X.weight_scale_inv`` BF16 (Qwen) or F32 (DeepSeek, transformers)
[ceil(N / 128), ceil(K / 128)], experts stored fused alike with ``_scale_inv`` and one more axis. An element is its
code's value times the scale of its block, the product taken in float32. config.json says::

    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128], "modules_to_not_convert": [...]}

Qwen3.5's have the linears of the language model so, routed experts one by one, and those of the MTP layer; routers,
``in_proj_a`` and ``in_proj_b``, norms, embeddings, ``lm_head``, ``mtp.fc`` and the vision tower stay bf16. Blocks may
be of other sizes too. Which tensors are FP8 the files say themselves; ``modules_to_not_convert`` also lists what no
checkpoint holds (``in_proj_ba``) and is not read.

For whoever reads it through :func:`numbers`, such a checkpoint has one float32 tensor where the files have codes and
scales, and no ``quantization_config``. MXFP4 is made from that product, as Quark does it, whose checkpoints of Qwen's
FP8 ones AMD publishes; bfloat16 in between, as in llm-compressor, moves one block in ten to other codes. Tensors
that stay unquantized are written through :func:`rounded` as the nearest bfloat16, which is what all tools and engines
make of them.
"""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxq.checkpoint.headers import SIZES, TensorInfo
from mxq.checkpoint.quantization import without
from mxq.checkpoint.reader import Checkpoint
from mxq.errors import MxqError, UsageError
from mxq.models import qwen35

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CODES = "F8_E4M3"
SCALE = "_scale_inv"
_SCALE_TYPES = ("BF16", "F32")
_SIZES = range(16, (1 << 16) + 1)  # of less, the tables of a block's values would be larger than the block
_WANTED = "give the bf16 checkpoint it was made from, or one in block-FP8 (e4m3, weight_scale_inv)"
_CONFIGS = ("quantization_config", "compression_config")
_DETAILS = ("quant_algo", "format", "fmt", "bits", "load_in_4bit")


class DamagedError(MxqError):
    """A weight cannot be read as numbers: NaN or infinity is among its scales or products."""


def numbers(source: Checkpoint) -> Checkpoint:
    """Return a checkpoint of the numbers that ``source`` holds: itself, or block-FP8 weights as float32.

    Raises:
        UsageError: it is quantized in another way; an FP8 weight's scales are missing, of another shape or type, or
            belong to nothing.
    """
    block = block_size(source)
    held = {name for name, tensor in source.tensors.items() if tensor.dtype.startswith("F8_")}
    if block is None:
        if held:
            raise UsageError(
                f"{source.path} holds {min(held)} {source.tensors[min(held)].dtype}, but its config.json has no "
                "quantization_config",
                "put the config.json back that belongs to these weights",
            )
        return source
    scales = {name for name in source.tensors if name.endswith(SCALE)}
    for name in sorted(held):
        _check(source, name, block)
    alone = scales - {name + SCALE for name in held}
    if alone:
        raise UsageError(f"{source.path}: {min(alone)} belongs to no FP8 weight", "the checkpoint is incomplete")
    return _BlockFp8(source, block, "F32")


def decodable(checkpoint: Checkpoint) -> Checkpoint:
    """Return what a model is loaded from: block-FP8 as :func:`rounded`, any other checkpoint as it is.

    Raises:
        UsageError: as :func:`numbers`, of FP8.
    """
    return rounded(numbers(checkpoint)) if is_fp8(checkpoint.config) else checkpoint


def is_fp8(config: dict[str, Any]) -> bool:
    """Tell whether a config.json says that weights are FP8 of the kind that :func:`numbers` may read."""
    raw = config.get("quantization_config")
    return isinstance(raw, dict) and raw.get("quant_method") == "fp8"


def rounded(source: Checkpoint) -> Checkpoint:
    """Return what :func:`numbers` returned with the nearest bfloat16 in place of the float32 products."""
    return source.in_bfloat16 if isinstance(source, _BlockFp8) else source


def stored(source: Checkpoint) -> Checkpoint:
    """Return the checkpoint as its files have it, given what :func:`numbers` returned for it."""
    return source.files if isinstance(source, _BlockFp8) else source


def scale_of(source: Checkpoint, name: str) -> TensorInfo | None:
    """Return the scales of a tensor of what :func:`numbers` returned; None if it is not FP8."""
    found = stored(source).tensors
    return found[name + SCALE] if found[name].dtype == CODES else None


def block_size(source: Checkpoint) -> tuple[int, int] | None:
    """Return rows and columns of a block as config.json gives them; None for a checkpoint that is not quantized.

    Raises:
        UsageError: it is quantized, but not in block-FP8.
    """
    parts = (source.config, qwen35.text_config(source.config))
    found = [part[key] for part in parts for key in _CONFIGS if part.get(key) is not None]
    if not found:
        return None
    raw, where = found[0], source.path
    if any(other != raw for other in found):
        raise UsageError(f"{where}: config.json has two quantization_configs that differ", _WANTED)
    if not isinstance(raw, dict) or raw.get("quant_method") != "fp8":
        raise UsageError(f"{where} is already quantized ({_described(raw)})", _WANTED)
    if raw.get("fmt", "e4m3") != "e4m3":
        raise UsageError(f"{where} is quantized to FP8 of fmt {raw['fmt']!r:.40}, not e4m3", _WANTED)
    block = raw.get("weight_block_size")
    if block is None:
        raise UsageError(f"{where} is quantized to FP8 without weight_block_size: one scale for each tensor", _WANTED)
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n in _SIZES for n in block):
        sizes = f"two of {_SIZES.start} to {_SIZES.stop - 1}"
        raise UsageError(f"{where}: weight_block_size in config.json is {block!r:.40}, not {sizes}", _WANTED)
    if raw.get("activation_scheme", "dynamic") != "dynamic":
        what = f"activation_scheme {raw['activation_scheme']!r:.40}, whose scales MXFP4 has no use for"
        raise UsageError(f"{where} is quantized to FP8 with {what}", _WANTED)
    return block[0], block[1]


def _described(raw: Any) -> str:
    if not isinstance(raw, dict):
        return f"{raw!r:.40}"
    said = [f"{raw.get('quant_method')!r:.40}"]
    return ", ".join(said + [f"{key} {raw[key]!r:.40}" for key in _DETAILS if raw.get(key) is not None])


def _check(source: Checkpoint, name: str, block: tuple[int, int]) -> None:
    tensor, scale = source.tensors[name], source.tensors.get(name + SCALE)
    if tensor.dtype != CODES or len(tensor.shape) < 2:
        wrong, hint = f"is no matrix of {CODES}", "mxq reads block-FP8 as Qwen publishes it"
    elif scale is None:
        wrong, hint = f"has no {name + SCALE}", "the checkpoint is incomplete: get it again"
    elif scale.shape != (wanted := _scale_shape(tensor.shape, block)):
        by = f"by weight_block_size {list(block)} they would be {list(wanted)}"
        wrong = f"has scales {list(scale.shape)}, {by}"
        hint = "weights, scales and config.json do not belong together: get them again"
    elif scale.dtype not in _SCALE_TYPES:
        wrong, hint = f"has scales of {scale.dtype}", f"mxq reads {' and '.join(_SCALE_TYPES)}"
    else:
        return
    raise UsageError(f"{source.path}: {name} {tensor.dtype} {list(tensor.shape)} {wrong}", hint)


def _scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


class _BlockFp8(Checkpoint):
    """A block-FP8 checkpoint seen as one of numbers; a tensor that is FP8 in the files has the place 0 to its size.

    Attributes:
        files: as the files have it.
    """

    def __init__(self, files: Checkpoint, block: tuple[int, int], dtype: str) -> None:
        tensors = {}
        for name, tensor in files.tensors.items():
            if tensor.dtype == CODES:
                size = tensor.nbytes * SIZES[dtype]
                tensors[name] = TensorInfo(name, dtype, tensor.shape, tensor.file, 0, size)
            elif not name.endswith(SCALE):
                tensors[name] = tensor
        super().__init__(
            files.path, without(files.config, _CONFIGS), tensors, files.metadata, files.index, files.elsewhere
        )
        self.files, self._block, self._dtype = files, block, dtype

    @functools.cached_property
    def in_bfloat16(self) -> "_BlockFp8":
        """The same with the nearest bfloat16 in place of the float32 products."""
        return _BlockFp8(self.files, self._block, "BF16")

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The size in bytes of every safetensors file that holds a tensor, by its name."""
        return self.files.sizes

    def files_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the safetensors files that must be there to read a tensor: also that of its scales."""
        needed = self.files.files_of(name)
        if self.files.tensors[name].dtype == CODES:
            needed += self.files.files_of(name + SCALE)
        return tuple(dict.fromkeys(needed))

    def with_files_in(self, directory: Path) -> "_BlockFp8":
        """Return the same checkpoint, whose files that are elsewhere are in ``directory`` when they are read."""
        return _BlockFp8(self.files.with_files_in(directory), self._block, self._dtype)

    def _fill(self, tensor: TensorInfo, start: int, view: memoryview) -> None:
        held = self.files.tensors[tensor.name]
        if held.dtype != CODES:
            self.files.read_into(tensor.name, start - held.start, view)
            return
        if not len(view):
            return
        import numpy as np

        from mxq.formats.fp8 import TYPES

        out, bits = np.frombuffer(view, np.uint8), TYPES[self._dtype]
        row_bytes = held.shape[-1] * SIZES[self._dtype]
        first, stop = start // row_bytes, -(-(start + len(view)) // row_bytes)
        if (first * row_bytes, stop * row_bytes) == (start, start + len(view)) and out.ctypes.data % 4 == 0:
            self._rows(held, first, stop, out.view(bits).reshape(stop - first, -1))
        else:
            whole = np.empty((stop - first, held.shape[-1]), bits)
            self._rows(held, first, stop, whole)
            out[:] = whole.view(np.uint8).reshape(-1)[start - first * row_bytes :][: len(view)]

    def _rows(self, held: TensorInfo, first: int, stop: int, out: "npt.NDArray[Any]") -> None:
        """Write the bits of rows ``first`` to ``stop`` of a tensor, seen as a matrix of its last axis."""
        import numpy as np

        from mxq.formats.fp8 import dequantize

        (height, width), (rows, columns) = self._block, held.shape[-2:]
        row = np.arange(first, stop)
        which = row // rows * -(-rows // height) + row % rows // height
        scales = self._scales(held.name, int(which[0]), int(which[-1]) + 1)
        codes = np.empty((stop - first, columns), np.uint8)
        self.files.read_into(held.name, first * columns, codes.data.cast("B"))
        dequantize(codes, scales, which - which[0], width, out)
        if self._dtype == "BF16" and (bad := (out & 0x7F80) == 0x7F80).any():
            raise DamagedError(
                f"{self.path}: tensor {held.name} holds {int(bad.sum())} values that are NaN or infinite, the first in "
                f"row {first + int(bad.any(axis=-1).argmax())}",
                "the source is damaged: get it again",
            )

    def _scales(self, name: str, first: int, stop: int) -> "npt.NDArray[np.float32]":
        """Return rows ``first`` to ``stop`` of a tensor's scales."""
        import numpy as np

        held = self.files.tensors[name + SCALE]
        bits = np.empty((stop - first, held.shape[-1]), np.uint16 if held.dtype == "BF16" else np.uint32)
        self.files.read_into(held.name, first * bits[0].nbytes, bits.data.cast("B"))
        scales = (bits.astype(np.uint32) << 16 if held.dtype == "BF16" else bits).view(np.float32)
        if not (finite := np.isfinite(scales)).all():
            raise DamagedError(
                f"{self.path}: tensor {held.name} holds {int((~finite).sum())} scales that are NaN or infinite, the "
                f"first in row {first + int((~finite).any(axis=-1).argmax())}",
                "the source is damaged: get it again",
            )
        return scales
