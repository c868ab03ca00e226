"""Kernels by the names that ``mxq layout`` has for them: what each wants, as arrays of a file, and orders told apart.

A file holds contiguous arrays. So what ``moe-triton`` takes as transposed views is stored untransposed: [E, N, K/2] and
[E, N/32, K], of which its loader takes ``.transpose(1, 2)``.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np

from mxq.layouts import operands
from mxq.layouts.aiter import UNDEFINED_FILL, ungu16, unpairs, unswz, untile16
from mxq.layouts.operands import VLLM_SCALE_FILL, Experts, Linear, pad_experts, unpad_experts
from mxq.layouts.permutation import Bytes

Arrays = dict[str, Bytes]
Shapes = dict[str, tuple[int, ...]]

EXPERTS = ("w13", "w13_scale", "w2", "w2_scale")
LINEAR = ("weight", "weight_scale")

_ROWS: dict[str, Callable[[Bytes], Bytes]] = {"": lambda x: x, "GU16": ungu16, "pairs": unpairs}
_BYTES: dict[str, Callable[[Bytes], Bytes]] = {
    "": lambda x: x,
    "TILE16": untile16,
    "SWZ": unswz,
    "transposed": lambda x: x.reshape(x.shape[::-1]).T,  # vLLM's scales of dense layers for Triton's gemm_afp4wfp4
}
_PLAIN = "plain"


@dataclass(frozen=True)
class Kernel:
    """What a kernel reads.

    Attributes:
        name: as ``mxq layout`` calls it.
        lay: a function of :mod:`mxq.layouts.operands`, of padded operands.
        undo: its inverse.
        orders: by the tensor, the order of its bytes: a name that :func:`orders_of` gives.
        hidden: H is padded to a multiple of this; for a dense layer, K must be one.
        intermediate: I is padded to a multiple of this; for a dense layer, N must be one.
        read_by: what to call, and how.
        versions: what is known of AITER's versions.
        column_fill: what scales hold in columns added to make a multiple of 8.
        transposed: stored are the transposes of what the kernel takes.
    """

    name: str
    lay: Callable[..., object]
    undo: Callable[..., object]
    orders: dict[str, str]
    hidden: int
    intermediate: int
    read_by: str
    versions: str
    column_fill: int = UNDEFINED_FILL
    transposed: bool = False

    @property
    def is_moe(self) -> bool:
        """It is for routed experts, and not for a dense layer."""
        return set(self.orders) == set(EXPERTS)

    def padded(self, h: int, i: int) -> tuple[int, int]:
        """Return H and I of experts after padding."""
        return _up(h, self.hidden), _up(i, self.intermediate)

    def shapes(self, sizes: tuple[int, ...]) -> Shapes:
        """Return what is stored of (E, H, I) or of (N, K), all of them before padding: tensors and their shapes."""
        if not self.is_moe:
            n, k = sizes
            if self.name == "dense-triton":
                return {"weight": (n // 16, k * 8), "weight_scale": (n // 32, k)}
            return linear_shapes(n, k)
        h, i = self.padded(*sizes[1:])
        plain = experts_shapes(sizes[0], h, i)
        if not self.transposed:
            return {name: (*s[:2], _up(s[2], 8)) if name.endswith("_scale") else s for name, s in plain.items()}
        return {name: (s[0], s[1] // 32, s[2] * 32) if name.endswith("_scale") else s for name, s in plain.items()}

    def stored(self, plain: Arrays) -> Arrays:
        """Return plain operands padded and laid out: contiguous arrays of :meth:`shapes`.

        Raises:
            ValueError: a condition of the kernel does not hold.
        """
        if not self.is_moe:
            linear = self.lay(Linear(plain["weight"], plain["weight_scale"]))
            assert isinstance(linear, Linear)
            return {"weight": linear.weight, "weight_scale": linear.scale}
        experts = Experts(**plain)
        _, h, i = experts.sizes
        laid = self.lay(pad_experts(experts, *self.padded(h, i)))
        assert isinstance(laid, Experts)
        return {name: np.ascontiguousarray(self._turned(getattr(laid, name))) for name in EXPERTS}

    def plain(self, stored: Arrays, sizes: tuple[int, ...]) -> Arrays:
        """Undo :meth:`stored`, of (E, H, I) or (N, K) before padding.

        Raises:
            ValueError: these are not arrays of :meth:`shapes`, or a condition of the kernel does not hold.
        """
        if not self.is_moe:
            linear = self.undo(Linear(stored["weight"], stored["weight_scale"]))
            assert isinstance(linear, Linear)
            return {"weight": linear.weight, "weight_scale": linear.scale}
        experts = self.undo(Experts(**{name: self._turned(stored[name]) for name in EXPERTS}))
        assert isinstance(experts, Experts)
        own = unpad_experts(experts, *sizes[1:])
        return {name: np.ascontiguousarray(getattr(own, name)) for name in EXPERTS}

    def _turned(self, x: Bytes) -> Bytes:
        return x.swapaxes(1, 2) if self.transposed else x


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "moe-a4w4",
            operands.moe_a4w4,
            operands.undo_moe_a4w4,
            {"w13": "TILE16", "w13_scale": "SWZ", "w2": "TILE16", "w2_scale": "SWZ"},
            hidden=256,
            intermediate=128,
            read_by="aiter.fused_moe(..., quant_type=QuantType.per_1x32), gate mode separated",
            versions="these bytes from v0.1.5 on; I % 256 = 128 from v0.1.16, padded tokens right from v0.1.16.post2",
        ),
        Kernel(
            "moe-interleaved",
            operands.moe_interleaved,
            operands.undo_moe_interleaved,
            {"w13": "TILE16 of GU16", "w13_scale": "SWZ of GU16", "w2": "TILE16", "w2_scale": "SWZ"},
            hidden=256,
            intermediate=256,
            read_by="aiter.fused_moe(..., gate_mode='interleave')",
            versions="these bytes from v0.1.7 on; gate_mode from v0.1.14; columns of scales padded from v0.1.18",
            column_fill=0x7F,
        ),
        Kernel(
            "moe-triton",
            operands.moe_triton,
            operands.undo_moe_triton,
            {"w13": "pairs", "w13_scale": "SWZ of pairs", "w2": _PLAIN, "w2_scale": "SWZ"},
            hidden=256,
            intermediate=256,
            read_by="aiter's Triton moe_gemm_a16w4 or moe_gemm_a4w4(..., swizzle_mx_scale='CDNA4_SCALE', "
            "apply_swiglu=True, limit=None, swiglu_add_residual=False)",
            versions="read from AITER after v0.1.20",
            transposed=True,
        ),
        Kernel(
            "dense-asm",
            operands.dense_asm,
            operands.undo_dense_asm,
            {"weight": "TILE16", "weight_scale": "SWZ"},
            hidden=256,
            intermediate=32,
            read_by="aiter.gemm_a4w4(..., bpreshuffle=True)",
            versions="these bytes from v0.1.5 on",
        ),
        Kernel(
            "dense-triton",
            operands.dense_triton,
            operands.undo_dense_triton,
            {"weight": "TILE16", "weight_scale": "SWZ"},
            hidden=256,
            intermediate=32,
            read_by="aiter's Triton gemm_afp4wfp4_preshuffle or gemm_a16wfp4_preshuffle",
            versions="read from AITER after v0.1.20",
        ),
    )
}
PADDING = {"codes": 0, "scales": VLLM_SCALE_FILL}


def experts_shapes(e: int, h: int, i: int) -> Shapes:
    """Return the shapes of plain experts."""
    return {
        "w13": (e, 2 * i, h // 2),
        "w13_scale": (e, 2 * i, h // 32),
        "w2": (e, h, i // 2),
        "w2_scale": (e, h, i // 32),
    }


def linear_shapes(n: int, k: int) -> Shapes:
    """Return the shapes of a plain dense layer."""
    return {"weight": (n, k // 2), "weight_scale": (n, k // 32)}


@dataclass(frozen=True)
class Padding:
    """Which bytes a tensor holds in the places that padding has added.

    Attributes:
        read: of rows and columns that a kernel computes with.
        behind: of those behind them, which make rows or columns of scales a multiple of something.
    """

    read: frozenset[int] = frozenset()
    behind: frozenset[int] = frozenset()

    def __or__(self, other: "Padding") -> "Padding":
        """Both."""
        return Padding(self.read | other.read, self.behind | other.behind)


def orders_of(
    stored: Bytes, plain: Bytes, tensor: str, among: Collection[str] | None = None, size: tuple[int, int] | None = None
) -> dict[str, Padding]:
    """Return every order in which the bytes of ``stored`` are those of ``plain``; several where they do not differ.

    Args:
        stored: of one matrix, in any shape.
        plain: the matrix [N, X] that it may be an order of, not padded.
        tensor: which it is, a name of :data:`EXPERTS` or :data:`LINEAR`; for w13 rows are gate's, then up's.
        among: the orders that are tried, None for all.
        size: rows and columns that a kernel computes with, None for all that is stored.

    Returns:
        By the order, what padding holds.
    """
    gate_up, scale = tensor.startswith("w13"), tensor.endswith("_scale")
    orders = ["", "SWZ" if scale else "TILE16", *(["transposed"] if tensor == "weight_scale" else [])]
    found: dict[str, Padding] = {}
    for shape in set(_padded(stored.size, plain.shape, gate_up, scale, tensor in EXPERTS)):
        for order in orders:
            for rows in _ROWS if gate_up else ("",):
                name = " of ".join(part for part in (order, rows) if part) or _PLAIN
                if name in found or (among is not None and name not in among):
                    continue
                try:
                    back = _ROWS[rows](_BYTES[order](stored.reshape(shape)))
                except ValueError:
                    continue  # no order of such a shape
                if (padding := _around(back, plain, gate_up, size)) is not None:
                    found[name] = padding
    return found


def may_hold(stored: Bytes, plain: Bytes) -> bool:
    """Tell whether ``stored`` has every byte of ``plain`` as often: if not, it is no order of it whatever."""
    return bool((np.bincount(stored.reshape(-1), minlength=256) >= np.bincount(plain.reshape(-1), minlength=256)).all())


def _padded(size: int, plain: tuple[int, ...], gate_up: bool, scale: bool, experts: bool) -> Iterator[tuple[int, int]]:
    """Yield the shapes of ``size`` bytes to which ``plain`` may have been padded."""
    unit = 32 if scale else 2  # columns of the weight that a byte is for
    halves = 2 if gate_up else 1
    rows, columns = plain[0] // halves, plain[1] * unit
    multiples = (1, 128, 256) if experts else (1, 256)
    for down in multiples:
        for across in multiples:
            r, c = _up(rows, down) * halves, _up(columns, across) // unit
            yield from ((r, width) for width in {c, _up(c, 8) if scale else c} if r * width == size)


def _around(padded: Bytes, plain: Bytes, gate_up: bool, size: tuple[int, int] | None) -> Padding | None:
    """Return what ``padded`` holds around ``plain``, None if it does not begin with it."""
    halves = 2 if gate_up else 1
    rows, columns = plain.shape[0] // halves, plain.shape[1]
    both = padded.reshape(halves, -1, padded.shape[1])
    if not np.array_equal(both[:, :rows, :columns], plain.reshape(halves, rows, columns)):
        return None
    down, across = padded.shape if size is None else size
    down //= halves
    read = (both[:, rows:down, :across], both[:, :rows, columns:across])
    behind = (both[:, max(rows, down) :], both[:, : max(rows, down), max(columns, across) :])
    return Padding(*(frozenset(byte for part in parts for byte in _values(part)) for parts in (read, behind)))


def _values(x: Bytes) -> list[int]:
    return np.flatnonzero(np.bincount(x.reshape(-1), minlength=256)).tolist()


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
