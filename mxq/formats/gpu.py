"""MXFP4 on a GPU: the bytes of :func:`mxq.formats.mxfp4.quantize` from one Triton kernel, for CUDA and ROCm.

The kernel reads every element once and is meant to take as long as that. Eight consecutive elements make one word of
packed codes, so tensors here have four columns per block: one thread works on a word. What keeps it short:

* A code is round(min(2y, y + 2, y / 2 + 4)), y being magnitude over scale: the grid of E2M1 is 0.5, then 1, then 2
  apart, and the first to grow slower is the one that counts. Adding 1.5 * 2^23 rounds, ties to even, and leaves the
  code in the low bits. Each of the three is one multiply-add with one rounding, and rounding keeps their order, so the
  minimum of the rounded is the rounded minimum.
* The value of a code c is max(c / 2, c - 2, 2c - 8).
* Two codes, and the signs of two elements, travel in one register as far as possible.

For bfloat16 on Hopper and later the same is written in its packed arithmetic, where 192 rounds instead of 1.5 * 2^23:
half the instructions. Nothing in it depends on the order of operations, so all variants give the same bytes.
"""

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxq.formats.mxfp4 import BLOCK
from mxq.formats.rules import scale_rule

# Blocks of a program, and its warps. tools/bench_formats.py tries others.
BLOCKS = 128
WARPS = 4

_WORDS = tl.constexpr(4)  # of packed codes, per block
_EXPONENT = tl.constexpr(0x7F800000)  # a float32's exponent field; as a value, infinity
_BINADE = tl.constexpr(1 << 23)
_INVERSE = tl.constexpr(254 << 23)  # minus the bits of a power of two: the bits of its reciprocal
_ONE = tl.constexpr(127 << 23)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_HIGH = tl.constexpr(-0x10000)  # the upper half of a word
_SEVENS = tl.constexpr(0x77777777)
_MAGIC = tl.constexpr(1.5 * 2**23)
_PACKED_MAGIC = tl.constexpr(0x74C00000)  # minus what the bits of _MAGIC add up to in `_four`


def _word_bfloat16_ptx(saturate: bool) -> str:
    """Return PTX for what :func:`_word` does, from words $1 to $4 of two bfloat16 each.

    $5, $6 and $7 are the scale's reciprocal, twice and half of it, as bits of float32.
    """

    def codes(register: str, words: str) -> str:
        # 0x4340, 0x4342, 0x4344 and 0x4347 are 192, 194, 196 and 199.
        return f"""
            and.b32 m, {words}, 0x7FFF7FFF;
            fma.rn.bf16x2 {register}, m, i2, m0;
            fma.rn.bf16x2 b, m, i1, m2;
            min.bf16x2 {register}, {register}, b;
            fma.rn.bf16x2 b, m, i0, m4;
            min.bf16x2 {register}, {register}, b;
            {f"min.bf16x2 {register}, {register}, m7;" if saturate else ""}"""

    def four(register: str, other: str, words: str, next_words: str) -> str:
        # Bytes of codes 0, 2, 1, 3; then the same of signs.
        return f"""{codes(register, words)}{codes(other, next_words)}
            prmt.b32 {register}, {register}, {other}, 0x6240;
            prmt.b32 s, {words}, {next_words}, 0x7351;
            shr.u32 s, s, 4;
            and.b32 s, s, 0x08080808;
            lop3.b32 {register}, {register}, 0x07070707, s, 0xEA; // and, or"""

    return f"""{{
            .reg .b32 b, m, s, a0, a1, a2, a3, i0, i1, i2, m0, m2, m4, m7;
            mov.b32 m0, 0x43404340;
            mov.b32 m2, 0x43424342;
            mov.b32 m4, 0x43444344;
            mov.b32 m7, 0x43474347;
            prmt.b32 i1, $5, $5, 0x3232;
            prmt.b32 i2, $6, $6, 0x3232;
            prmt.b32 i0, $7, $7, 0x3232;{four("a0", "a1", "$1", "$2")}{four("a2", "a3", "$3", "$4")}
            prmt.b32 a1, a0, a2, 0x7632;
            prmt.b32 a0, a0, a2, 0x5410;
            mad.lo.u32 $0, a1, 16, a0;
            }}"""


_WORD_BFLOAT16 = tl.constexpr(_word_bfloat16_ptx(saturate=False))
_WORD_BFLOAT16_SATURATED = tl.constexpr(_word_bfloat16_ptx(saturate=True))

# The larger magnitudes of four words of two bfloat16 each, upper and lower halves apart. As integers, so that NaN wins.
_MAX_BFLOAT16 = tl.constexpr(
    """
    {
    .reg .b32 m, n;
    and.b32 m, $1, 0x7FFF7FFF;
    and.b32 n, $2, 0x7FFF7FFF;
    max.u16x2 m, m, n;
    and.b32 n, $3, 0x7FFF7FFF;
    max.u16x2 m, m, n;
    and.b32 n, $4, 0x7FFF7FFF;
    max.u16x2 $0, m, n;
    }
    """
)


def quantize(x: Tensor, rule: str = "even") -> tuple[Tensor, Tensor]:
    """Quantize ``x`` along its last axis, as :func:`mxq.formats.mxfp4.quantize` does and to the same bytes.

    Args:
        x: [..., K] in bfloat16, float16 or float32 on a CUDA or ROCm device, of any strides (what no single stride over
            the rows describes is copied first); K is a multiple of 32.
        rule: a name in :data:`mxq.formats.rules.RULES`.

    Returns:
        (packed, scale): uint8 [..., K/2] and uint8 [..., K/32], contiguous, on the device of ``x``.

    Raises:
        ValueError: K is not a multiple of 32, or the rule is unknown.
        TypeError: ``x`` is of another type.
    """
    return launch(x, rule)


def launch(
    x: Tensor, rule: str, *, blocks: int = BLOCKS, warps: int = WARPS, packed_math: bool | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`quantize` with the kernel's parameters open, for benchmarks and tests.

    Args:
        x, rule: as for :func:`quantize`.
        blocks: per program, a power of two.
        warps: per program.
        packed_math: whether to use packed bfloat16 arithmetic; by default, where the device has it.
    """
    chosen = scale_rule(rule)
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"MXFP4 is made from bfloat16, float16 or float32, not {x.dtype}")
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"the last axis of {list(x.shape)} is not a multiple of {BLOCK}")
    columns = x.shape[-1]
    packed = torch.empty(*x.shape[:-1], columns // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(*x.shape[:-1], columns // BLOCK, dtype=torch.uint8, device=x.device)
    count = scale.numel()
    if count == 0:
        return packed, scale
    rows = x.reshape(-1, columns)
    row, column = rows.stride()
    # Two elements in a word: what they are made of has to lie so.
    words = x.dtype != torch.float32 and column == 1 and row % 2 == 0 and rows.storage_offset() % 2 == 0
    flat = column == 1 and (row == columns or rows.shape[0] == 1)
    bfloat16 = words and x.dtype == torch.bfloat16
    if packed_math is None:
        packed_math = has_packed_math(x.device)
    with _on(x.device):
        _kernel[(triton.cdiv(count, blocks),)](
            rows.view(torch.int32) if words else rows,
            packed.view(-1).view(torch.int32),
            scale,
            count,
            1 if flat else columns // BLOCK,
            1 if flat else row // 2 if words else row,
            column,
            WORDS=words,
            FLAT=flat,
            BFLOAT16=bfloat16,
            PACKED_MATH=packed_math and bfloat16,
            CARRY=chosen.carry,
            FINER=chosen.finer,
            # Only below Quark's carry does a block's largest element lie at 7 times the scale or more.
            SATURATE=chosen.carry < 1 << 21 or chosen.finer > 0,
            ZERO_BYTE=chosen.zero_byte,
            SIGNED_ZERO=chosen.signed_zero,
            BLOCKS=blocks,
            num_warps=warps,
        )
    return packed, scale


def has_packed_math(device: torch.device) -> bool:
    """Whether ``device`` runs the packed bfloat16 instructions that the kernel has a variant for."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _on(device: torch.device) -> Any:
    """Make ``device`` the current one, where Triton launches; the interpreter runs on the CPU and needs none."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@triton.jit(do_not_specialize=["count", "blocks_per_row"])
def _kernel(
    X,  # float32 elements, or words of two 16-bit ones
    PACKED,  # int32 [count * 4]
    SCALE,  # uint8 [count]
    count,
    blocks_per_row,
    row_stride,
    column_stride,
    WORDS: tl.constexpr,
    FLAT: tl.constexpr,
    BFLOAT16: tl.constexpr,
    PACKED_MATH: tl.constexpr,
    CARRY: tl.constexpr,
    FINER: tl.constexpr,
    SATURATE: tl.constexpr,
    ZERO_BYTE: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    PER_BLOCK: tl.constexpr = 16 if WORDS else 32
    start = tl.program_id(0).to(tl.int64) * BLOCKS
    block = tl.arange(0, BLOCKS)[:, None]
    live = block < tl.minimum(count - start, BLOCKS).to(tl.int32)
    column = tl.arange(0, PER_BLOCK)[None, :]
    if FLAT:
        x = tl.load(X + start * PER_BLOCK + (block * PER_BLOCK + column), mask=live, other=0)
    else:
        row = (start + block) // blocks_per_row
        first = (start + block - row * blocks_per_row) * PER_BLOCK
        x = tl.load(X + row * row_stride + (first + column) * column_stride, mask=live, other=0)
    if WORDS:
        even, odd = tl.split(tl.reshape(x, (BLOCKS, _WORDS, 2, 2)))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        s0, s1, s2, s3 = w0, w1, w2, w3
        e0, e1 = _unpack(w0, BFLOAT16)
        e2, e3 = _unpack(w1, BFLOAT16)
        e4, e5 = _unpack(w2, BFLOAT16)
        e6, e7 = _unpack(w3, BFLOAT16)
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        even, odd = tl.split(tl.reshape(bits, (BLOCKS, _WORDS, 2, 2, 2)))
        even02, even13 = tl.split(even)
        odd02, odd13 = tl.split(odd)
        e0, e4 = tl.split(even02)
        e2, e6 = tl.split(even13)
        e1, e5 = tl.split(odd02)
        e3, e7 = tl.split(odd13)
        s0, s1, s2, s3 = _signs(e0, e1), _signs(e2, e3), _signs(e4, e5), _signs(e6, e7)

    a0, a1, a2, a3 = e0 & _MAGNITUDE, e1 & _MAGNITUDE, e2 & _MAGNITUDE, e3 & _MAGNITUDE
    a4, a5, a6, a7 = e4 & _MAGNITUDE, e5 & _MAGNITUDE, e6 & _MAGNITUDE, e7 & _MAGNITUDE
    if PACKED_MATH:
        pair = tl.inline_asm_elementwise(_MAX_BFLOAT16, "=r,r,r,r,r", [s0, s1, s2, s3], tl.int32, True, 1)
        largest = tl.maximum(pair << 16, pair & _HIGH)
    else:
        largest = tl.maximum(
            tl.maximum(tl.maximum(a0, a1), tl.maximum(a2, a3)), tl.maximum(tl.maximum(a4, a5), tl.maximum(a6, a7))
        )
    amax = tl.max(largest, axis=1, keep_dims=True)
    finite = amax < _EXPONENT
    scale = tl.maximum(((amax + CARRY) & _EXPONENT) - 2 * _BINADE, _BINADE)

    if FINER > 0:
        best = scale
        gain = tl.zeros_like(amax).to(tl.float32 if WORDS else tl.float64)
        for step in tl.static_range(1, FINER + 1):
            finer = tl.maximum(scale - step * _BINADE, _BINADE)
            mine = _gain(a0, scale, finer, WORDS) + _gain(a1, scale, finer, WORDS)
            mine += _gain(a2, scale, finer, WORDS) + _gain(a3, scale, finer, WORDS)
            mine += _gain(a4, scale, finer, WORDS) + _gain(a5, scale, finer, WORDS)
            mine += _gain(a6, scale, finer, WORDS) + _gain(a7, scale, finer, WORDS)
            finer_gain = tl.sum(mine, axis=1, keep_dims=True)
            best = tl.where(finer_gain > gain, finer, best)
            gain = tl.maximum(finer_gain, gain)
        scale = best

    if PACKED_MATH:
        word = _word_bfloat16(s0, s1, s2, s3, scale, SATURATE)
    else:
        word = _word(a0, a1, a2, a3, a4, a5, a6, a7, s0, s1, s2, s3, scale, SATURATE)
    if not SIGNED_ZERO:  # a code's sign stays where adding 7 carries into its place: where the code is not zero
        word &= ((word & _SEVENS) + _SEVENS) | _SEVENS
    word = tl.where(finite, word, 0)
    byte = tl.where(finite, scale >> 23, 255)
    if ZERO_BYTE != 1:
        byte = tl.where(amax == 0, ZERO_BYTE, byte)
    # Told that nothing is contiguous, the compiler leaves each word with the thread that made it, which is contiguous
    # across threads; else it would move them through shared memory to give each thread four.
    word_at = tl.max_contiguous(block * _WORDS + tl.arange(0, _WORDS)[None, :], (1, 1))
    tl.store(PACKED + start * _WORDS + word_at, word, mask=live)
    tl.store(SCALE + start + block, byte.to(tl.uint8), mask=live)


@triton.jit
def _unpack(w, BFLOAT16: tl.constexpr):
    """Return the two elements of words ``w``, lower half first, as bits of float32."""
    if BFLOAT16:
        return w << 16, w & _HIGH
    low = w.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)


@triton.jit
def _signs(low, high):
    """Return words with the signs of two float32 where those of their 16-bit halves are."""
    return ((low >> 16) & 0x8000) | (high & _HIGH)


@triton.jit
def _rounded(a, scale, SATURATE: tl.constexpr):
    """Return _MAGIC plus the codes of ``a`` (bits of float32 magnitudes) at ``scale`` (bits)."""
    y = a.to(tl.float32, bitcast=True)
    inverse = (-scale + _INVERSE).to(tl.float32, bitcast=True)
    code = tl.minimum(y * (inverse * 2.0) + _MAGIC, y * inverse + (_MAGIC + 2.0))
    code = tl.minimum(code, y * (inverse * 0.5) + (_MAGIC + 4.0))
    if SATURATE:
        code = tl.minimum(code, _MAGIC + 7.0)
    return code


@triton.jit
def _word(a0, a1, a2, a3, a4, a5, a6, a7, s0, s1, s2, s3, scale, SATURATE: tl.constexpr):
    """Return words of eight codes, from their magnitudes (bits of float32) and words that hold their signs."""
    low = _four(a0, a1, a2, a3, s0, s1, scale, SATURATE)
    high = _four(a4, a5, a6, a7, s2, s3, scale, SATURATE)
    even = (low & 0xFFFF) | (high << 16)
    odd = ((low >> 16) & 0xFFFF) | (high & _HIGH)
    return (odd << 4) + even


@triton.jit
def _four(a0, a1, a2, a3, s0, s1, scale, SATURATE: tl.constexpr):
    """Return four codes and their signs as bytes, in the order 0, 2, 1, 3."""
    c0 = _rounded(a0, scale, SATURATE).to(tl.int32, bitcast=True)
    c1 = _rounded(a1, scale, SATURATE).to(tl.int32, bitcast=True)
    c2 = _rounded(a2, scale, SATURATE).to(tl.int32, bitcast=True)
    c3 = _rounded(a3, scale, SATURATE).to(tl.int32, bitcast=True)
    signs = ((s0 >> 12) & 0x00080008) | ((s1 >> 4) & 0x08000800)
    return (c0 + (c1 << 16)) + ((c2 + (c3 << 16)) << 8) + signs + _PACKED_MAGIC


@triton.jit
def _word_bfloat16(w0, w1, w2, w3, scale, SATURATE: tl.constexpr):
    """Return what :func:`_word` does, from words of two bfloat16."""
    inverse = -scale + _INVERSE
    half = (inverse.to(tl.float32, bitcast=True) * 0.5).to(tl.int32, bitcast=True)
    operands = [w0, w1, w2, w3, inverse, inverse + _BINADE, half]
    if SATURATE:
        return tl.inline_asm_elementwise(_WORD_BFLOAT16_SATURATED, "=r,r,r,r,r,r,r,r", operands, tl.int32, True, 1)
    return tl.inline_asm_elementwise(_WORD_BFLOAT16, "=r,r,r,r,r,r,r,r", operands, tl.int32, True, 1)


@triton.jit
def _gain(a, scale, finer, SIXTEEN_BITS: tl.constexpr):
    """Return by how much the squared error of ``a`` (bits of magnitudes) falls from ``scale`` to ``finer`` (bits).

    It is in units of ``scale`` squared, and exact, as is its sum: see :mod:`mxq.formats.rules`.
    """
    inverse = (-scale + _INVERSE).to(tl.float32, bitcast=True)
    y = a.to(tl.float32, bitcast=True) * inverse
    coarse = _value(_rounded(a, scale, SATURATE=True))
    fine = _value(_rounded(a, finer, SATURATE=True)) * (finer - scale + _ONE).to(tl.float32, bitcast=True)
    return (coarse - fine).to(tl.float32 if SIXTEEN_BITS else tl.float64) * (coarse + fine - 2.0 * y)


@triton.jit
def _value(rounded):
    """Return the magnitudes of codes that have _MAGIC added (float32)."""
    code = rounded - _MAGIC
    return tl.maximum(code * 0.5, tl.maximum(code - 2.0, code * 2.0 - 8.0))
