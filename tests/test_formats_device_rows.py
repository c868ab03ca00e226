"""The GPU's way of quantizing rows gives the CPU kernel's bytes and measures (without a GPU, by torch on the CPU)."""

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from format_cases import DTYPES, numbers

from mxq.formats.cpu_rows import KINDS, Rows
from mxq.formats.device_rows import DeviceRows
from mxq.formats.rules import RULES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_and_measures_are_those_of_the_cpu(dtype: torch.dtype, rule: str) -> None:
    kind = _NAMES[dtype]
    for name, x in numbers(dtype, every=61):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        bits = rows.view(torch.int32 if kind == "F32" else torch.int16).numpy().view(KINDS[kind].bits)
        results = []
        for quantizer in (Rows(kind, rule, measured=True), DeviceRows(kind, rule, DEVICE)):
            packed, scale = (np.full((len(bits), bits.shape[1] // n), 77, np.uint8) for n in (2, 32))
            results.append((packed, scale, asdict(quantizer.quantize(bits, packed, scale))))
        (packed, scale, measures), (other_packed, other_scale, other) = results
        assert np.array_equal(packed, other_packed), name
        assert np.array_equal(scale, other_scale), name
        for sums in ("signal", "noise"):
            assert math.isclose(measures.pop(sums), other.pop(sums), rel_tol=1e-7), name
        assert measures == other, name
