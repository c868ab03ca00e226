"""Moving the bytes of an array about, alike for numpy and torch, on the CPU and elsewhere."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]
Array = TypeVar("Array", npt.NDArray[np.uint8], "torch.Tensor")

_WORDS = {1: np.uint8, 16: np.complex128}  # types that numpy copies in one piece, by their bytes


@dataclass(frozen=True)
class Permutation:
    """An order of bytes: the array, seen with the shape ``split``, has its axes put in ``order``.

    ``word`` is how many bytes of the last axis stay together, there and last; if it is not 1, it divides that axis. It
    is for speed and changes no byte.
    """

    split: tuple[int, ...]
    order: tuple[int, ...]
    word: int = 1

    @property
    def inverse(self) -> "Permutation":
        """The permutation that undoes this one."""
        back = tuple(self.order.index(axis) for axis in range(len(self.order)))
        split = tuple(self.split[axis] for axis in self.order)
        return Permutation(split, back, self.word)

    def __call__(self, x: Array) -> Array:
        """Return the bytes of ``x`` in the new order: contiguous memory of its own, of the shape and device of ``x``.

        ``x`` may be any view. On a CPU torch's tensors are moved by numpy, which is several times faster at this.
        """
        if isinstance(x, np.ndarray):
            return self._moved(x).reshape(x.shape)
        if _numpy_can(x):
            import torch

            return torch.from_numpy(self._moved(x.numpy())).view(x.shape)
        moved = x.reshape(self.split).permute(self.order)
        return moved.clone(memory_format=_contiguous()).view(x.shape)

    def _moved(self, x: Bytes) -> Bytes:
        split = (*self.split[:-1], self.split[-1] // self.word)
        whole = x if self.word == 1 else np.ascontiguousarray(x)
        source: npt.NDArray[np.generic] = whole.view(_WORDS[self.word]).reshape(split)
        return np.array(source.transpose(self.order), order="C").reshape(-1).view(np.uint8)


def checked(x: Array, what: str) -> tuple[int, int, int]:
    """Return (matrices, rows, columns) of ``x`` [..., rows, columns], which ``what`` is said to be about.

    Raises:
        TypeError: ``x`` is not of bytes.
        ValueError: it has no rows and columns.
    """
    if str(x.dtype).removeprefix("torch.") != "uint8":
        raise TypeError(f"{what} moves bytes: uint8, not {x.dtype} (view it as uint8 first)")
    if x.ndim < 2:
        raise ValueError(f"{what} of {list(x.shape)}: rows and columns are needed")
    return math.prod(x.shape[:-2]), x.shape[-2], x.shape[-1]


def padded(x: Array, rows: int, columns: int, fill: int) -> Array:
    """Return ``x`` [..., R, C] as new memory [..., ``rows``, ``columns``]; what is added holds the byte ``fill``.

    Raises:
        TypeError: ``x`` is not of bytes.
        ValueError: it is larger than that.
    """
    _, least_rows, least_columns = checked(x, "padding")
    if rows < least_rows or columns < least_columns:
        raise ValueError(f"padding of {list(x.shape)}: it does not fit into {rows} rows of {columns}")
    shape = (*x.shape[:-2], rows, columns)
    out = np.full(shape, fill, np.uint8) if isinstance(x, np.ndarray) else x.new_full(shape, fill)
    out[..., :least_rows, :least_columns] = x
    return out


def copied(x: Array) -> Array:
    """Return ``x`` as contiguous memory of its own."""
    return np.array(x, order="C") if isinstance(x, np.ndarray) else x.clone(memory_format=_contiguous())


def _numpy_can(x: "torch.Tensor") -> bool:
    return x.device.type == "cpu"


def _contiguous() -> "torch.memory_format":
    import torch

    return torch.contiguous_format
