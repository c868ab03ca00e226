"""The GPU kernel writes the reference's bytes. Without a GPU it runs in Triton's interpreter, and is compiled."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_kernel
import numpy as np
import pytest
import torch
from format_cases import DTYPES, LAYOUTS, numbers

from mxq.formats import mxfp4
from mxq.formats.rules import RULES

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

Launch = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def launch() -> Iterator[Launch]:
    """``launch(x, rule, layout=..., **options)`` of the kernel."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:

        def run(
            x: torch.Tensor, rule: str = "even", layout: str = "contiguous", **options: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            bits = x.view(torch.int32 if x.dtype == torch.float32 else torch.int16).numpy()
            options = {"blocks": 4096} | options  # in the interpreter a program takes long, however much is in it
            result = process.submit(gpu_kernel.launch, bits, x.dtype, layout, rule, options).result()
            return torch.from_numpy(result[0]), torch.from_numpy(result[1])

        yield run


def assert_same(
    got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], of: str = "tensor"
) -> None:
    for name, a, b in zip(("codes", "scales"), got, expected, strict=True):
        assert a.shape == b.shape, f"{name} of {of}"
        assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} {name} of {of} differ"


VARIANTS = [*((dtype, False) for dtype in DTYPES), (torch.bfloat16, True)]


def assert_all_same(launch: Launch, dtype: torch.dtype, packed_math: bool, rule: str, every: int) -> None:
    named = {name: x.reshape(-1, 32) for name, x in numbers(dtype, every=every)}
    packed, scale = launch(torch.cat(list(named.values())), rule, packed_math=packed_math)
    sizes = [len(x) for x in named.values()]
    for name, *got in zip(named, packed.split(sizes), scale.split(sizes), strict=True):
        assert_same((got[0], got[1]), mxfp4.quantize(named[name], rule), name)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "packed_math"), VARIANTS)
def test_bytes_are_the_references(launch: Launch, dtype: torch.dtype, packed_math: bool, rule: str) -> None:
    assert_all_same(launch, dtype, packed_math, rule, every=61)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "packed_math"), VARIANTS)
def test_bytes_are_the_references_at_every_scale(
    launch: Launch, dtype: torch.dtype, packed_math: bool, rule: str
) -> None:
    assert_all_same(launch, dtype, packed_math, rule, every=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(launch: Launch, dtype: torch.dtype, layout: str) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = mxfp4.quantize(LAYOUTS[layout](x))
    assert_same(launch(x, layout=layout, packed_math=False, blocks=32), expected)
    assert_same(launch(x, layout=layout, packed_math=True, blocks=128, warps=2), expected)


@pytest.mark.parametrize("blocks", [64, 128])
def test_programs_that_are_not_full(launch: Launch, blocks: int) -> None:
    x = torch.randn(67, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert_same(launch(x, blocks=blocks), mxfp4.quantize(x))


def test_what_cannot_be_quantized_is_refused(launch: Launch) -> None:
    with pytest.raises(ValueError, match=r"\[4, 48\] is not a multiple of 32"):
        launch(torch.zeros(4, 48))
    with pytest.raises(ValueError, match="'nearest'"):
        launch(torch.zeros(32), "nearest", "one axis")


def test_assembly_that_is_wrong_is_noticed() -> None:
    asm = "{ .reg .b32 a; and.b32 a, $1, 0x7FFF7FFF; max.u16x2 $0, a, $2; }"
    words = [np.array([0xFF80_0001, 5 << 16], dtype=np.uint32), np.array([0x0001_0002, 3], dtype=np.uint32)]
    assert gpu_kernel.run_ptx(asm, words).tolist() == [0x7F80_0002, (5 << 16) + 3]
    with pytest.raises(KeyError, match="min"):
        gpu_kernel.run_ptx("{ min.u16x2 $0, $1, $2; }", words)


# Triton and its assemblers need no GPU to compile for one.
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from mxq.formats import gpu
from mxq.formats.rules import RULES

backend, arch, warp_size, dtype, words, packed = sys.argv[1:]
arch = int(arch) if arch.isdigit() else arch
for rule in RULES.values():
    constants = {
        "WORDS": words == "1", "FLAT": True, "BFLOAT16": dtype == "bf16", "PACKED_MATH": packed == "1",
        "CARRY": rule.carry, "FINER": rule.finer, "SATURATE": True, "ZERO_BYTE": rule.zero_byte,
        "SIGNED_ZERO": rule.signed_zero, "BLOCKS": gpu.BLOCKS, "column_stride": 1, "row_stride": 1,
    }
    pointers = {"X": "*i32" if words == "1" else "*" + dtype, "PACKED": "*i32", "SCALE": "*u8"}
    signature = {**pointers, "count": "i32", "blocks_per_row": "i32", **dict.fromkeys(constants, "constexpr")}
    signature = {name: signature[name] for name in gpu._kernel.arg_names}
    source = triton.compiler.ASTSource(gpu._kernel, signature, constants)
    compiled = triton.compile(source, GPUTarget(backend, arch, int(warp_size)), {"num_warps": gpu.WARPS})
    print(len(compiled.kernel))
"""


TARGETS = ("cuda 80 32", "cuda 90 32", "cuda 100 32", "hip gfx942 64", "hip gfx950 64")
COMPILED = [(target, kind) for target in TARGETS for kind in ("bf16 1 0", "fp16 1 0", "fp32 0 0")]
COMPILED += [(target, "bf16 1 1") for target in ("cuda 90 32", "cuda 100 32")]  # the others lack the instructions


@pytest.mark.slow
@pytest.mark.parametrize(("target", "kind"), COMPILED)
def test_it_compiles_for(target: str, kind: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILE, *target.split(), *kind.split()]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert all(int(size) > 1000 for size in result.stdout.split())
