"""The CPU kernel writes the reference's bytes and measures what the reference's error is."""

import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np
import pytest
import torch
from format_cases import DTYPES, LAYOUTS, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open

from mxq import testbed
from mxq.formats import cpu, cpu_kernel, cpu_rows, elements, kernels, machine_code, mxfp4
from mxq.formats.rules import RULES

Bytes = tuple[torch.Tensor, torch.Tensor]


def assert_same(got: Bytes, expected: Bytes, of: str = "tensor") -> None:
    for name, a, b in zip(("codes", "scales"), got, expected, strict=True):
        assert a.shape == b.shape, f"{name} of {of}"
        assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} {name} of {of} differ"


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices of the testbed that an MXFP4 recipe may quantize."""
    for path in sorted(Path(testbed.path("testbed:dense")).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
                    yield name, tensor


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_the_references(dtype: torch.dtype, rule: str) -> None:
    for name, x in numbers(dtype, every=13):
        expected = mxfp4.quantize(x, rule)
        assert_same(cpu.quantize(x, rule), expected, name)
        assert_same(cpu.quantize_measured(x, rule)[:2], expected, name)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_the_references_at_every_scale(dtype: torch.dtype, rule: str) -> None:
    for name, x in numbers(dtype):
        assert_same(cpu.quantize_measured(x, rule, threads=2)[:2], mxfp4.quantize(x, rule), name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("threads", [1, 3])
def test_any_layout(dtype: torch.dtype, layout: str, threads: int) -> None:
    x = LAYOUTS[layout](torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(dtype))
    assert_same(cpu.quantize(x, threads=threads), mxfp4.quantize(x))


@given(
    hnp.arrays(np.uint32, st.tuples(st.integers(1, 5), st.integers(1, 3).map(lambda blocks: 32 * blocks))),
    st.sampled_from(sorted(RULES)),
)
@settings(max_examples=150, deadline=None)
def test_any_bits(bits: np.ndarray, rule: str) -> None:
    x = torch.from_numpy(bits.view(np.int32)).view(torch.float32)
    assert_same(cpu.quantize(x, rule), mxfp4.quantize(x, rule))
    half = torch.from_numpy((bits >> 16).astype(np.uint16).view(np.int16))
    for dtype in (torch.bfloat16, torch.float16):
        assert_same(cpu.quantize(half.view(dtype), rule), mxfp4.quantize(half.view(dtype), rule))


@pytest.mark.parametrize(
    "columns", [32 * (cpu_kernel.AT_ONCE - 1), 32 * cpu_kernel.AT_ONCE, 32 * (2 * cpu_kernel.AT_ONCE + 1)]
)
def test_rows_of_more_blocks_than_are_scaled_at_once(columns: int) -> None:
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert_same(cpu.quantize(x), mxfp4.quantize(x))
    _, _, whole = cpu.quantize_measured(x)
    _, _, parts = cpu.quantize_measured(x.reshape(-1, 32))
    assert whole.signal == pytest.approx(parts.signal, rel=1e-12)
    assert whole.noise == pytest.approx(parts.noise, rel=1e-12)
    assert (whole.lowest, whole.highest, whole.saturated) == (parts.lowest, parts.highest, parts.saturated)


def test_real_weights() -> None:
    names = []
    for name, weight in weights():
        names.append(name)
        for rule in RULES:
            assert_same(cpu.quantize(weight, rule), mxfp4.quantize(weight, rule), f"{name}, {rule}")
    assert len(names) > 50


def expected_measures(x: torch.Tensor, rule: str) -> cpu_rows.Measures:
    """The same by definition, in double precision."""
    packed, scale = mxfp4.quantize(x, rule)
    exact = x.double().view(-1, 32)
    scale = scale.view(-1)
    finite = torch.isfinite(exact).all(-1)
    zero = (exact == 0).all(-1)
    scales = mxfp4.scale_values(scale).double()[:, None]
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).view(-1, 32).int()
    values = torch.tensor(elements.VALUES, dtype=torch.float64)[codes] * scales
    limit = 6 * scales
    used = scale[finite & ~zero].tolist()
    rows = (~finite).view(-1, x.shape[-1] // 32).any(-1).nonzero()
    return cpu_rows.Measures(
        signal=float(exact[finite].square().sum()),
        noise=float((exact - values)[finite].square().sum()),
        saturated=int((exact.abs() > limit)[finite].sum()),
        zero_blocks=int(zero.sum()),
        lowest=min(used, default=255),
        highest=max(used, default=0),
        bad_blocks=int((~finite).sum()),
        first_bad_row=int(rows[0]) if len(rows) else None,
    )


def assert_measures(got: cpu_rows.Measures, expected: cpu_rows.Measures) -> None:
    for name in ("saturated", "zero_blocks", "lowest", "highest", "bad_blocks", "first_bad_row"):
        assert getattr(got, name) == getattr(expected, name), name
    assert math.isclose(got.signal, expected.signal, rel_tol=1e-7)
    assert math.isclose(got.noise, expected.noise, rel_tol=1e-7)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_measures_are_what_they_are_called(dtype: torch.dtype, rule: str) -> None:
    for name, x in numbers(dtype, every=61):
        if name in ("normal", "heavy tails", "few values", "edges", "random bits", "every pattern"):
            assert_measures(cpu.quantize_measured(x, rule)[2], expected_measures(x, rule))


def test_squares_that_single_precision_does_not_hold_are_measured() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    for factor in (2.0**-100, 2.0**100):
        measures = cpu.quantize_measured(x * factor)[2]
        assert_measures(measures, expected_measures(x * factor, "even"))
        assert measures.noise > 0


def test_threads_change_nothing() -> None:
    x = torch.randn(37, 4160, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x[30, 5] = torch.nan
    first = cpu.quantize_measured(x)
    for threads in (2, 3, 64):
        again = cpu.quantize_measured(x, threads=threads)
        assert_same(again[:2], first[:2])
        assert again[2] == first[2]
    assert (first[2].bad_blocks, first[2].first_bad_row) == (1, 30)


def test_a_limit_that_is_one_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = cpu_rows._limits("BF16", False).copy()
    limits[:, 1] += 1  # what should be rounded up to 1 at its lower end becomes 0.5
    monkeypatch.setattr(cpu_rows, "_limits", lambda kind, signed_zero: limits)
    x = dict(numbers(torch.bfloat16, every=61))["rounding boundaries"]
    with pytest.raises(AssertionError, match="codes of tensor differ"):
        assert_same(cpu.quantize(x), mxfp4.quantize(x))


def test_out_is_written_again_and_has_to_fit() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    out = cpu.quantize(x)
    again = cpu.quantize(-x, out=out)
    assert again[0] is out[0]
    assert_same(out, mxfp4.quantize(-x))
    with pytest.raises(ValueError, match=r"out is torch.uint8 \[4, 32\], not contiguous uint8 \[8, 32\]"):
        cpu.quantize(torch.cat([x, x]), out=out)


def test_what_cannot_be_quantized_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[4, 48\] is not a multiple of 32"):
        cpu.quantize(torch.zeros(4, 48))
    with pytest.raises(TypeError, match="float64"):
        cpu.quantize(torch.zeros(32, dtype=torch.float64))
    with pytest.raises(ValueError, match="'nearest'"):
        cpu.quantize(torch.zeros(32), "nearest")


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is compiled with an empty directory for machine code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = []
    compile_ = machine_code._compile

    def compiling(source: str, *rest: Any) -> bytes:
        done.append(source)
        return compile_(source, *rest)

    monkeypatch.setattr(machine_code, "_compile", compiling)
    cpu_kernel.compiled.cache_clear()
    yield done
    cpu_kernel.compiled.cache_clear()


def quantize_like_a_new_process() -> None:
    cpu_kernel.compiled.cache_clear()
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    assert_same(cpu.quantize(x), mxfp4.quantize(x))


def test_machine_code_is_kept(compilations: list[str], tmp_path: Path) -> None:
    quantize_like_a_new_process()
    quantize_like_a_new_process()
    assert len(compilations) == 1
    (kept,) = (tmp_path / "mxq").iterdir()
    kept.write_bytes(kept.read_bytes()[:-100])  # as a full disk leaves it
    quantize_like_a_new_process()
    assert len(compilations) == 2
    quantize_like_a_new_process()
    assert len(compilations) == 2


def test_machine_code_of_another_version_is_not_taken(
    compilations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_like_a_new_process()
    monkeypatch.setattr(llvmlite, "__version__", "0")
    quantize_like_a_new_process()
    assert len(compilations) == 2
    assert len(list((tmp_path / "mxq").iterdir())) == 2


def nowhere(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "mxq").write_text("a file where the directory should be")


def homeless(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as of a user whom the system does not know


@pytest.mark.parametrize("place", [nowhere, homeless])
def test_without_a_place_for_machine_code_it_is_compiled_each_time(
    place: Callable[..., None], compilations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(tmp_path, monkeypatch)
    quantize_like_a_new_process()
    quantize_like_a_new_process()
    assert len(compilations) == 2


def test_what_is_no_file_of_this_user_is_not_taken_for_machine_code(
    compilations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_like_a_new_process()
    (kept,) = (tmp_path / "mxq").iterdir()
    whole = kept.rename(tmp_path / "whole")
    kept.symlink_to(whole)
    quantize_like_a_new_process()
    assert len(compilations) == 2
    kept.unlink()
    os.mkfifo(kept)
    quantize_like_a_new_process()
    assert len(compilations) == 3
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    quantize_like_a_new_process()
    assert len(compilations) == 4


def _quantize_in_child(queue: "multiprocessing.Queue[int]") -> None:
    queue.put(int(cpu.quantize(torch.ones(4, 64), threads=2)[0].sum()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    expected = int(cpu.quantize(torch.ones(4, 64), threads=2)[0].sum())
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[int] = context.Queue()
    child = context.Process(target=_quantize_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=600) == expected
    child.join()


def test_the_dispatcher_takes_the_cpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    assert_same(kernels.quantize(x, "mse", threads=2), mxfp4.quantize(x, "mse"))
    meta = kernels.quantize(x.to("meta"))  # a device that has no kernel
    assert [t.device.type for t in meta] == ["meta", "meta"]
    calls = []

    def quantize(x: torch.Tensor, rule: str, threads: int) -> Bytes:
        calls.append((rule, threads))
        return x, x

    monkeypatch.setattr(cpu, "quantize", quantize)
    kernels.quantize(x, "mse", threads=5)
    assert calls == [("mse", 5)]
