"""MXFP4 by its definition: scales found by comparing, errors in whole numbers, codes rounded and read by ml_dtypes."""

import math

import ml_dtypes
import numpy as np
import numpy.typing as npt

LOWEST, HIGHEST = -126, 126
_DENOMINATOR = 149  # every float32 and every MXFP4 value of a scale from 2^-126 on is a multiple of 2^-149
# m is a block's largest magnitude: the lowest of m / scale that the rule allows, or the highest
_FROM = {"floor": 4.0, "even": 3.5}
_TO = {"rceil": 6.0, "ceil": 4.0}
_SEARCHED = {"diffs": 1, "mse": 2}
ZERO_BYTES = {"even": 1, "floor": 104, "ceil": 104, "rceil": 0, "diffs": 104, "mse": 1}


def e2m1(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Values of four-bit codes."""
    return codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def e8m0(scale: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Values of scale bytes."""
    return scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def unpack(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Codes [..., K] of bytes [..., K/2]."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def codes_of(x: npt.NDArray[np.float32], exponent: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Codes of ``x`` [..., 32] under scales 2^``exponent`` [...], with the signs of zeros kept."""
    y = np.clip(np.ldexp(x.astype(np.float64), -exponent[..., None]), -6, 6)
    return y.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)


def error(x: npt.NDArray[np.float32], exponent: npt.NDArray[np.int64]) -> npt.NDArray[np.object_]:
    """Squared errors [...] of ``x`` [..., 32] under scales 2^``exponent`` [...], as integers of 2^-298."""
    value = e2m1(codes_of(x, exponent)).astype(np.float64)
    return ((_whole(x) - _whole(value, exponent[..., None])) ** 2).sum(axis=-1)


def exponents(x: npt.NDArray[np.float32], rule: str) -> npt.NDArray[np.int64]:
    """Scale exponents [...] of finite blocks ``x`` [..., 32] that are not all zero."""
    amax = np.abs(x).max(axis=-1).astype(np.float64)
    if rule in _SEARCHED:
        return _searched(x, exponents(x, "ceil"), _SEARCHED[rule])
    if rule in _FROM:
        found = np.full(amax.shape, LOWEST)
        for exponent in range(LOWEST, HIGHEST + 1):
            found = np.where(amax >= _FROM[rule] * 2.0**exponent, exponent, found)
    else:
        found = np.full(amax.shape, HIGHEST)
        for exponent in range(HIGHEST, LOWEST - 1, -1):
            found = np.where(amax <= _TO[rule] * 2.0**exponent, exponent, found)
    return found


def quantize(x: npt.NDArray[np.float32], rule: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Codes [..., 32] and scale bytes [...] of finite ``x`` [..., 32]."""
    zero = np.asarray(~x.any(axis=-1))
    exponent = exponents(np.where(zero[..., None], np.float32(1), x), rule)
    codes = codes_of(x, exponent)
    if rule != "rceil":
        codes[codes == 8] = 0
    return codes, np.where(zero, ZERO_BYTES[rule], exponent + 127).astype(np.uint8)


def _searched(x: npt.NDArray[np.float32], top: npt.NDArray[np.int64], finer: int) -> npt.NDArray[np.int64]:
    best, lowest = top, error(x, top)
    for step in range(1, finer + 1):
        candidate = np.maximum(top - step, LOWEST)
        this = error(x, candidate)
        better = (this < lowest).astype(bool)
        best, lowest = np.where(better, candidate, best), np.where(better, this, lowest)
    return best


def _whole(x: npt.NDArray[np.floating], exponent: npt.NDArray[np.int64] | int = 0) -> npt.NDArray[np.object_]:
    scaled = np.frompyfunc(lambda value, power: int(math.ldexp(value, power + _DENOMINATOR)), 2, 1)
    return scaled(x.astype(np.float64), exponent)
