"""What a conversion will need: memory, by what is held at once, and time, by how fast this machine does its parts.

The time is that of the processors. It holds if source and output are read and written as fast as that, from memory or
from disks that can.
"""

import hashlib
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mxq.checkpoint.fp8 import CODES
from mxq.convert.plan import Plan
from mxq.formats.cpu_rows import Rows
from mxq.formats.fp8 import dequantize
from mxq.formats.rules import BLOCK
from mxq.models import qwen35

_SAMPLE = 1 << 22
_TRIES = 5
# Measured: Python with numpy and LLVM, which compiles the kernel (up to 70 MB less where its machine code was kept and
# the system maps less of LLVM's); a thread's buffers, and what the allocator keeps for it; a tensor of the output, in
# plan, manifest and journal.
_BASE_BYTES, _THREAD_BYTES, _TENSOR_BYTES = 168_000_000, 10_000_000, 3_000
_READ_S, _WRITE_S = 0.2e-9, 0.4e-9  # of system calls, per byte
_START_S = 0.4
# Measured: Python with torch, transformers and Quark; copies in float32 of a decoder layer's weights and of the text
# between two layers. GPTQ has a [K, K] matrix for each linear that it treats together (all experts' up_proj, say), and
# factors of one of them.
_QUARK_BYTES, _WEIGHT_COPIES, _TEXT_COPIES, _FACTORS, _F32_BYTES = 900_000_000, 3, 6, 3, 4
_LAYER = re.compile(r"model\.(language_model\.)?layers\.\d+\.")


@dataclass(frozen=True)
class Estimate:
    """What a conversion needs.

    Attributes:
        jobs: with so many threads.
        peak_bytes: resident memory at most.
        seconds: of wall time, at least.
    """

    jobs: int
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class CalibrationEstimate:
    """What a calibration needs.

    Attributes:
        blocks: decoder layers, one after the other.
        peak_bytes: memory for one of them with its text, at most.
    """

    blocks: int
    peak_bytes: int


def calibration(plan: Plan) -> CalibrationEstimate | None:
    """Estimate what the calibration of a plan's recipe needs; None if it has none."""
    asked = plan.recipe.calibration
    if asked is None or plan.recipe.algorithm is None:
        return None
    elements: Counter[str] = Counter()
    statistics: Counter[tuple[str, str]] = Counter()
    largest = 0
    for decision in plan.decisions:
        name, shape = decision.tensor.name, decision.tensor.shape
        layer = _LAYER.match(name)
        if layer is None:
            continue
        elements[layer[0]] += math.prod(shape)
        if decision.action == "quantize" and plan.recipe.algorithm == "gptq":
            largest = max(largest, shape[-1] ** 2)
            for piece in qwen35.pieces(name, shape):
                statistics[layer[0], piece.module.rpartition(".")[2]] += shape[-1] ** 2
    text = _TEXT_COPIES * asked.samples * asked.length * plan.hidden
    block = _WEIGHT_COPIES * max(elements.values(), default=0) + max(statistics.values(), default=0)
    floats = block + _FACTORS * largest + text
    return CalibrationEstimate(len(elements), _QUARK_BYTES + _F32_BYTES * floats)


def estimate(plan: Plan, jobs: int) -> Estimate:
    """Estimate a conversion by ``jobs`` threads; takes a few tenths of a second, for measuring this machine."""
    quantized = sum(math.prod(decision.tensor.shape) for decision in plan.decisions if decision.action == "quantize")
    fp8 = sum(math.prod(decision.tensor.shape) for decision in plan.decisions if decision.tensor.dtype == CODES)
    tensors = sum(len(shard.tensors) for shard in plan.shards)
    return Estimate(
        jobs=jobs,
        peak_bytes=_BASE_BYTES + jobs * _THREAD_BYTES + tensors * _TENSOR_BYTES,
        seconds=_START_S
        + (
            quantized * _element_s(plan.recipe.scale_rule)
            + (fp8 * _fp8_s() if fp8 else 0)
            + plan.bytes_after * (_sha256_s() + _WRITE_S)
            + plan.bytes_before * _READ_S
        )
        / jobs,
    )


def _element_s(rule: str) -> float:
    """Return the seconds that the kernel takes for an element of bfloat16."""
    bits = (np.random.default_rng(0).standard_normal((_SAMPLE // 4096, 4096), np.float32) / 50).view(np.uint32) >> 16
    x = bits.astype(np.uint16).view(np.int16)
    packed, scale = (np.empty((len(x), x.shape[1] // n), np.uint8) for n in (2, BLOCK))
    rows = Rows("BF16", rule, measured=True)
    return _fastest(lambda: rows.quantize(x, packed, scale)) / x.size


def _fp8_s() -> float:
    """Return the seconds that it takes to read an element of block-FP8 as a number."""
    codes = np.random.default_rng(0).integers(0, 127, (_SAMPLE // 4096, 4096), np.uint8)
    scales, which = np.ones((len(codes) // 128, 4096 // 128), np.float32), np.arange(len(codes)) // 128
    out = np.empty(codes.shape, np.uint32)
    return _fastest(lambda: dequantize(codes, scales, which, 128, out)) / codes.size


def _sha256_s() -> float:
    data = bytes(_SAMPLE)
    return _fastest(lambda: hashlib.sha256(data)) / _SAMPLE


def _fastest(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some calls: others' work can only make it slower."""
    seconds = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
