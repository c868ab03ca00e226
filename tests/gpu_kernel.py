"""Runs the GPU kernel for tests: on a GPU where there is one, else on the CPU in Triton's interpreter.

Triton looks at TRITON_INTERPRET when it is imported, and transformers imports it: the interpreter needs a process of
its own, of which this module is what runs there. Packed bfloat16 arithmetic is inline assembly, which the interpreter
does not know; here it is carried out word by word after the PTX manual, in NumPy.
"""

import os
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from format_cases import LAYOUTS

Words = npt.NDArray[np.uint32]


def launch(
    bits: npt.NDArray[Any], dtype: torch.dtype, layout: str, rule: str, options: dict[str, Any]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Quantize the tensor of those bits and that layout; ``options`` are those of :func:`mxq.formats.gpu.launch`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        from triton.runtime import interpreter

        interpreter.InterpreterBuilder.create_inline_asm = _create_inline_asm
    from mxq.formats import gpu

    x = torch.from_numpy(bits).view(dtype).to(device)
    with np.errstate(all="ignore"):  # a GPU overflows in silence
        packed, scale = gpu.launch(LAYOUTS[layout](x), rule, **options)
    return packed.cpu().numpy(), scale.cpu().numpy()


def _create_inline_asm(
    builder: Any, asm: str, constraints: str, values: list[Any], types: list[Any], pure: bool, pack: int
) -> Any:
    from triton.runtime.interpreter import TensorHandle

    assert constraints == ",".join(["=r"] + ["r"] * len(values))
    assert pack == 1
    words = [value.data.view(np.uint32) for value in values]

    class Call:  # what the builder of real code returns
        def get_result(self, index: int) -> Any:
            assert index == 0
            return TensorHandle(run_ptx(asm, words).view(np.int32), values[0].dtype)

    return Call()


def run_ptx(asm: str, operands: list[Words]) -> Words:
    """Return the words that end up in $0, $1 and following being ``operands``."""
    registers: dict[str, Words] = {f"${i + 1}": words for i, words in enumerate(operands)}
    for statement in re.sub("//.*", "", asm).strip().strip("{}").split(";"):
        if not statement.strip() or statement.strip().startswith(".reg"):
            continue
        operation, *names = statement.replace(",", " ").split()
        arguments = [registers[name] if name in registers else np.uint32(int(name, 0)) for name in names[1:]]
        registers[names[0]] = _PTX[operation](*arguments)
    return registers["$0"]


def _halves(word: Any, dtype: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    word = np.asarray(word, dtype=np.uint32)
    return (word & 0xFFFF).astype(np.uint16).view(dtype), (word >> 16).astype(np.uint16).view(dtype)


def _by_halves(dtype: Any, operation: Callable[..., Any]) -> Callable[..., Words]:
    def run(*arguments: Any) -> Words:
        halves = zip(*(_halves(argument, dtype) for argument in arguments), strict=True)
        low, high = (np.asarray(operation(*half)).astype(dtype).view(np.uint16).astype(np.uint32) for half in halves)
        return np.asarray(low | high << 16, dtype=np.uint32)

    return run


def _fma(a: Any, b: Any, c: Any) -> Any:
    # Products of bfloat16, and their sums with numbers of three digits, are exact in double precision where it counts.
    return a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)


def _prmt(a: Any, b: Any, selector: Any) -> Words:
    pool = np.asarray(a, dtype=np.uint64) | np.asarray(b, dtype=np.uint64) << np.uint64(32)
    picked = [(pool >> np.uint64(8 * (int(selector) >> 4 * i & 7))) & np.uint64(255) for i in range(4)]
    assert not int(selector) & 0x8888
    return np.asarray(sum(byte << np.uint64(8 * i) for i, byte in enumerate(picked)), dtype=np.uint32)


def _lop3(a: Any, b: Any, c: Any, table: Any) -> Words:
    # The manual's rule: the table is what the function makes of these three bytes.
    assert table == (0xF0 & 0xCC) | 0xAA
    return (a & b) | c


_PTX: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "fma.rn.bf16x2": _by_halves(ml_dtypes.bfloat16, _fma),
    "min.bf16x2": _by_halves(ml_dtypes.bfloat16, np.minimum),
    "max.u16x2": _by_halves(np.uint16, np.maximum),
}
