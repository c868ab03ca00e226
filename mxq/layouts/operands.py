"""What a kernel of AITER wants of a whole layer: the permutations of :mod:`mxq.layouts.aiter`, put together.

================  ======================================  ==========================================================
function          kernels                                 who calls them
================  ======================================  ==========================================================
`dense_asm`       ``gemm_a4w4``, assembly and CK          vLLM 0.32 with ``VLLM_ROCM_USE_AITER_FP4_ASM_GEMM=1``
`dense_triton`    ``gemm_afp4wfp4_preshuffle``,           (vLLM's default, ``gemm_afp4wfp4``, reads plain bytes)
                  ``gemm_a16wfp4_preshuffle``
`moe_a4w4`        ``fused_moe`` in gate mode              Quark's W4A4 in vLLM and SGLang
                  "separated": assembly, CK, FlyDSL
`moe_interleaved` ``fused_moe`` in gate mode              gpt-oss and other a16w4 and a8w4
                  "interleave": CK-Tile
`moe_triton`      ``moe_gemm_a16w4``, ``moe_gemm_a4w4``   AITER's Triton experts
================  ======================================  ==========================================================

Read from AITER after v0.1.20 and vLLM 0.32; none of it has run on the hardware. Each function has its ``undo_...``. A
tensor's shape does not tell its layout, and ``fused_moe`` reads ``is_shuffled``, an attribute of the Python tensor
that ``view`` and ``to`` lose: the caller sets it last.
"""

import math
from dataclasses import dataclass
from typing import Any, Generic

from mxq.layouts.aiter import UNDEFINED_FILL, multiple, pad_scale, pairs, swz, tile16, unpairs, unswz, untile16
from mxq.layouts.permutation import Array, checked, copied, padded

VLLM_SCALE_FILL = 1  # vLLM's create_weights: weights 0, scales 1
_A16W4_FILL = 0x7F


@dataclass(frozen=True)
class Linear(Generic[Array]):
    """A dense layer: ``weight`` uint8 [N, K/2] and ``scale`` uint8 [N, K/32]; or a layout of it."""

    weight: Array
    scale: Array


@dataclass(frozen=True)
class Experts(Generic[Array]):
    """E experts of hidden size H and intermediate size I, or a layout of them; all uint8.

    ``w13`` [E, 2I, H/2] with ``w13_scale`` [E, 2I, H/32] is gate's rows, then up's; ``w2`` [E, H, I/2] with
    ``w2_scale`` [E, H, I/32] is down. E counts the experts that a GPU has, I is its part of the intermediate size.
    """

    w13: Array
    w13_scale: Array
    w2: Array
    w2_scale: Array

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(E, H, I), by the shape of ``w2``."""
        e, h, half = self.w2.shape
        return e, h, half * 2


def dense_asm(layer: Linear[Array]) -> Linear[Array]:
    """Return TILE16 of the weight and SWZ of the scale, in the same shapes.

    vLLM's conditions: N % 32 = 0 and K % 256 = 0, of the part that a GPU has; where they do not hold, it falls back to
    Triton. AITER's own helper pads the scale to 256 x 8 instead (:func:`mxq.layouts.aiter.pad_scale`).

    Raises:
        TypeError: not uint8.
        ValueError: shapes that break a condition or do not belong together.
    """
    _check_linear("dense_asm", layer)
    return Linear(tile16(layer.weight), swz(layer.scale))


def undo_dense_asm(layer: Linear[Array]) -> Linear[Array]:
    """Undo :func:`dense_asm`, of the same shapes and errors."""
    _check_linear("dense_asm", layer)
    return Linear(untile16(layer.weight), unswz(layer.scale))


def dense_triton(layer: Linear[Array]) -> Linear[Array]:
    """Return the bytes of :func:`dense_asm` as weight [N/16, K/2 * 16] and scale [N/32, K/32 * 32].

    N % 32 = 0 and K % 256 = 0. Raises as :func:`dense_asm`.
    """
    _check_linear("dense_triton", layer)
    n, width = layer.weight.shape
    return Linear(
        tile16(layer.weight).reshape(n // 16, width * 16),
        swz(layer.scale).reshape(n // 32, layer.scale.shape[1] * 32),
    )


def undo_dense_triton(layer: Linear[Array]) -> Linear[Array]:
    """Undo :func:`dense_triton`.

    Raises:
        TypeError: not uint8.
        ValueError: these are no shapes of :func:`dense_triton`.
    """
    if layer.weight.ndim != 2 or layer.weight.shape[1] % 16:
        raise ValueError(f"dense_triton: a weight of {[*layer.weight.shape]} is not [N/16, K/2 * 16]")
    n, width = layer.weight.shape[0] * 16, layer.weight.shape[1] // 16
    scale = math.prod(layer.scale.shape)
    if tuple(layer.scale.shape) != (n // 32, width * 2) or scale != n * (width // 16):
        raise ValueError(f"dense_triton: scale {[*layer.scale.shape]} is not [N/32, K] with N = {n}, K = {width * 2}")
    plain = Linear(layer.weight.reshape(n, width), layer.scale.reshape(n, width // 16))
    return undo_dense_asm(plain)


def pad_experts(
    experts: Experts[Array], hidden: int, intermediate: int, scale_fill: int = VLLM_SCALE_FILL
) -> Experts[Array]:
    """Return plain experts of a larger H and I: gate and up each padded behind their rows, down behind its columns.

    Codes become 0, scales ``scale_fill``, as vLLM's ``create_weights`` leaves them. vLLM pads H to 256, and I to 128
    for :func:`moe_a4w4`, to 256 for :func:`moe_interleaved`; SGLang pads I to 256.

    Args:
        experts: plain: of no layout.
        hidden: new H, a multiple of 32.
        intermediate: new I, a multiple of 32.
        scale_fill: byte of the scales that are added.

    Raises:
        TypeError: not uint8.
        ValueError: the new sizes are smaller or no multiple of 32, or shapes do not belong together.
    """
    what = "padding of experts"
    e, h, i = _check_experts(what, experts)
    for name, old, new in (("H", h, hidden), ("I", i, intermediate)):
        multiple(what, experts.w2.shape, name, new, 32)
        if new < old:
            raise ValueError(f"{what}: {name} = {old} does not fit into {new}")

    def halves(x: Array, columns: int, fill: int) -> Array:
        return padded(x.reshape(e, 2, i, x.shape[-1]), intermediate, columns, fill).reshape(e, -1, columns)

    return Experts(
        halves(experts.w13, hidden // 2, 0),
        halves(experts.w13_scale, hidden // 32, scale_fill),
        padded(experts.w2, hidden, intermediate // 2, 0),
        padded(experts.w2_scale, hidden, intermediate // 32, scale_fill),
    )


def unpad_experts(experts: Experts[Array], hidden: int, intermediate: int) -> Experts[Array]:
    """Undo :func:`pad_experts`: views of the plain experts with the H and I that they had.

    Raises:
        TypeError: not uint8.
        ValueError: those are larger or no multiple of 32, or shapes do not belong together.
    """
    what = "taking padding from experts"
    e, h, i = _check_experts(what, experts)
    for name, padded_size, size in (("H", h, hidden), ("I", i, intermediate)):
        multiple(what, experts.w2.shape, name, size, 32)
        if size > padded_size:
            raise ValueError(f"{what}: {name} = {size} is larger than {padded_size}")

    def halves(x: Array, columns: int) -> Array:
        return x.reshape(e, 2, i, x.shape[-1])[:, :, :intermediate, :columns].reshape(e, -1, columns)

    return Experts(
        halves(experts.w13, hidden // 2),
        halves(experts.w13_scale, hidden // 32),
        experts.w2[:, :hidden, : intermediate // 2],
        experts.w2_scale[:, :hidden, : intermediate // 32],
    )


def part_of_experts(
    experts: Experts[Array], *, tp: int = 1, tp_rank: int = 0, ep: int = 1, ep_rank: int = 0
) -> Experts[Array]:
    """Return what one GPU has of plain experts: a part of every I (tensor parallel), or some of the experts (EP).

    Args:
        experts: plain: of no layout, not padded.
        tp: how many GPUs share I: I / tp is a multiple of 32, since a block has one scale. vLLM rounds down silently.
        tp_rank: which of them, from 0.
        ep: how many share E.
        ep_rank: which of them.

    Returns:
        Views where that is possible; gate's part, then up's.

    Raises:
        TypeError: not uint8.
        ValueError: the sizes cannot be shared like that, there is no such rank, or shapes do not belong together.
    """
    what = f"part of experts under TP {tp}, EP {ep}"
    e, _, i = _check_experts(what, experts)
    if not (0 <= tp_rank < tp and 0 <= ep_rank < ep):
        raise ValueError(f"{what}: there is no rank {tp_rank} of {tp}, or no rank {ep_rank} of {ep}")
    multiple(what, experts.w2.shape, "I", i, 32 * tp)
    multiple(what, experts.w2.shape, "E", e, ep)
    own, n = slice(e // ep * ep_rank, e // ep * (ep_rank + 1)), i // tp

    def halves(x: Array) -> Array:
        both = x.reshape(e, 2, i, x.shape[-1])
        return both[own, :, n * tp_rank : n * (tp_rank + 1)].reshape(e // ep, 2 * n, x.shape[-1])

    return Experts(
        halves(experts.w13),
        halves(experts.w13_scale),
        experts.w2[own, :, n // 2 * tp_rank : n // 2 * (tp_rank + 1)],
        experts.w2_scale[own, :, n // 32 * tp_rank : n // 32 * (tp_rank + 1)],
    )


def moe_a4w4(experts: Experts[Array]) -> Experts[Array]:
    """Return TILE16 of the weights and SWZ of the scales, gate's and up's rows left as they are.

    H % 256 = 0 and I % 128 = 0: pad first. Shapes stay, but for ``w2_scale``, whose columns are padded to a multiple of
    8 (where I % 256 is 128): with 0, where ``e8m0_shuffle`` leaves them uninitialized. I = 128, 384, ... is for FlyDSL
    (from v0.1.16): stage 2 of CK and CK-Tile needs I % 256 = 0.

    Source: vLLM's ``convert_gpt_oss_weight_to_mxfp4_moe_kernel_format`` for ``AITER_MXFP4_MXFP4``, and AITER's
    ``op_tests/test_moe_2stage.py``.

    Raises:
        TypeError: not uint8.
        ValueError: shapes that break a condition or do not belong together.
    """
    _check_moe("moe_a4w4", experts, hidden=256, intermediate=128)
    # e8m0_shuffle would append rows where an expert's, H or 2I, were no multiple of 256; they are.
    return Experts(
        tile16(experts.w13),
        swz(experts.w13_scale),
        tile16(experts.w2),
        swz(pad_scale(experts.w2_scale, rows=1, fill=UNDEFINED_FILL)),
    )


def undo_moe_a4w4(experts: Experts[Array]) -> Experts[Array]:
    """Undo :func:`moe_a4w4`, of the same conditions and errors; padded columns of ``w2_scale`` are taken off."""
    _check_moe("moe_a4w4", experts, hidden=256, intermediate=128, padded_scales=True)
    return _unpadded(
        Experts(
            untile16(experts.w13),
            unswz(experts.w13_scale),
            untile16(experts.w2),
            unswz(experts.w2_scale),
        )
    )


def moe_interleaved(experts: Experts[Array]) -> Experts[Array]:
    """Return what :func:`moe_a4w4` does, with gate and up in alternate blocks of 16 rows (GU16).

    H % 128 = 0 and I % 128 = 0. Columns of scales are padded to multiples of 8 with 0x7F (AITER from v0.1.18; earlier
    ones fail there). CK-Tile reads scales wrongly where I % 256 is not 0, without an error (ROCm/aiter #5233).

    Source: ``shuffle_weight_a16w4(gate_up)`` and ``shuffle_scale_a16w4(gate_up)``, with ``gate_up`` for ``w13`` only.
    vLLM 0.32 first takes the rows for :func:`mxq.layouts.aiter.pairs`, gpt-oss's order, and mixes gate with up if they
    are not: so with a weight-only Quark checkpoint of Qwen3.5.

    Raises:
        TypeError: not uint8.
        ValueError: shapes that break a condition or do not belong together.
    """
    _check_moe("moe_interleaved", experts, hidden=128, intermediate=128)
    return Experts(
        tile16(experts.w13, gate_up=True),
        swz(pad_scale(experts.w13_scale, rows=1, fill=_A16W4_FILL), gate_up=True),
        tile16(experts.w2),
        swz(pad_scale(experts.w2_scale, rows=1, fill=_A16W4_FILL)),
    )


def undo_moe_interleaved(experts: Experts[Array]) -> Experts[Array]:
    """Undo :func:`moe_interleaved`, of the same conditions and errors; padded columns of scales are taken off."""
    _check_moe("moe_interleaved", experts, hidden=128, intermediate=128, padded_scales=True)
    return _unpadded(
        Experts(
            untile16(experts.w13, gate_up=True),
            unswz(experts.w13_scale, gate_up=True),
            untile16(experts.w2),
            unswz(experts.w2_scale),
        )
    )


def moe_triton(experts: Experts[Array]) -> Experts[Array]:
    """Return what AITER's Triton experts take: gate and up in pairs of rows, plain weights by columns, scales in SWZ.

    H % 256 = 0 and I % 256 = 0. Shapes become ``w13`` [E, H/2, 2I], ``w13_scale`` [E, H, 2I/32],
    ``w2`` [E, I/2, H] and ``w2_scale`` [E, I, H/32]. All four are transposed views: a column is contiguous
    (``stride(-2) == 1``).

    Source: ``aiter/ops/triton/moe/moe_op_gemm_a16w4.py``, ``swizzle_scales_gfx950`` ("CDNA4_SCALE"). There are no bytes
    of AITER's to compare with: it is held to how the kernels themselves read a tile. Their ``apply_swiglu`` is by
    default gpt-oss's: SiLU(gate) * up is ``limit=None, swiglu_add_residual=False``.

    Raises:
        TypeError: not uint8.
        ValueError: shapes that break a condition or do not belong together.
    """
    _check_moe("moe_triton", experts, hidden=256, intermediate=256)

    def scale(x: Array) -> Array:
        e, rows, columns = x.shape
        return swz(x).reshape(e, rows // 32, columns * 32).swapaxes(1, 2)

    return Experts(
        pairs(experts.w13).swapaxes(1, 2),
        scale(pairs(experts.w13_scale)),
        copied(experts.w2).swapaxes(1, 2),
        scale(experts.w2_scale),
    )


def undo_moe_triton(experts: Experts[Array]) -> Experts[Array]:
    """Undo :func:`moe_triton`.

    Raises:
        TypeError: not uint8.
        ValueError: these are no shapes of :func:`moe_triton`.
    """
    for x in (experts.w13, experts.w13_scale, experts.w2, experts.w2_scale):
        checked(x, "moe_triton")
    e, half, h = _three("moe_triton", experts.w2)
    i = half * 2
    expected: dict[str, tuple[int, ...]] = {
        "w13": (e, h // 2, 2 * i),
        "w13_scale": (e, h, 2 * i // 32),
        "w2_scale": (e, i, h // 32),
    }
    _expect("moe_triton", experts, expected)

    def scale(x: Array, rows: int) -> Array:
        return unswz(x.swapaxes(1, 2).reshape(e, rows, -1))

    plain = Experts(
        unpairs(experts.w13.swapaxes(1, 2)),
        unpairs(scale(experts.w13_scale, 2 * i)),
        copied(experts.w2.swapaxes(1, 2)),
        scale(experts.w2_scale, h),
    )
    _check_moe("moe_triton", plain, hidden=256, intermediate=256)
    return plain


def _check_linear(what: str, layer: Linear[Array]) -> None:
    for x in (layer.weight, layer.scale):
        checked(x, what)
    if layer.weight.ndim != 2:
        raise ValueError(f"{what} of {[*layer.weight.shape]}: a weight is [N, K/2]")
    n, width = layer.weight.shape
    multiple(what, layer.weight.shape, "N", n, 32)
    multiple(what, layer.weight.shape, "K", width * 2, 256)
    if tuple(layer.scale.shape) != (n, width // 16):
        raise ValueError(f"{what}: scale {[*layer.scale.shape]} is not [N, K/32] with N = {n}, K = {width * 2}")


def _check_experts(what: str, experts: Experts[Array], columns: int = 1) -> tuple[int, int, int]:
    """Return (E, H, I) of experts whose scales have their columns padded to a multiple of ``columns``."""
    for x in (experts.w13, experts.w13_scale, experts.w2, experts.w2_scale):
        checked(x, what)
    e, h, half = _three(what, experts.w2)
    i = half * 2
    multiple(what, experts.w2.shape, "H", h, 32)
    multiple(what, experts.w2.shape, "I", i, 32)
    of_h, of_i = (-(-size // 32 // columns) * columns for size in (h, i))
    _expect(what, experts, {"w13": (e, 2 * i, h // 2), "w13_scale": (e, 2 * i, of_h), "w2_scale": (e, h, of_i)})
    return e, h, i


def _check_moe(
    what: str, experts: Experts[Array], *, hidden: int, intermediate: int, padded_scales: bool = False
) -> None:
    _, h, i = _check_experts(what, experts, columns=8 if padded_scales else 1)
    multiple(what, experts.w2.shape, "H", h, hidden)
    multiple(what, experts.w2.shape, "I", i, intermediate)


def _three(what: str, w2: Array) -> tuple[int, int, int]:
    if w2.ndim != 3:
        raise ValueError(f"{what}: w2 of {[*w2.shape]} has no three axes")
    a, b, c = w2.shape
    return a, b, c


def _expect(what: str, experts: Experts[Any], shapes: dict[str, tuple[int, ...]]) -> None:
    for name, asked in shapes.items():
        given = getattr(experts, name).shape
        if tuple(given) != asked:
            w2 = [*experts.w2.shape]
            raise ValueError(f"{what}: {name} is {[*given]}, not {[*asked]} as w2 of {w2} asks for")


def _unpadded(experts: Experts[Array]) -> Experts[Array]:
    _, h, i = experts.sizes
    return Experts(experts.w13, experts.w13_scale[..., : h // 32], experts.w2, experts.w2_scale[..., : i // 32])
