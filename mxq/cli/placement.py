"""What ``mxq plan --tp`` and ``--ep`` show: which kernels compute what is packed, by tensor and expert parallelism."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mxq.cli.tables import show, table
from mxq.files import size

if TYPE_CHECKING:
    from mxq.convert.placement import ExpertsPath, LinearPath, Placed
    from mxq.layouts.paths import Found

_HEADING = "MI355X, vLLM 0.32 with AITER after v0.1.20; from their source, not run:"
_ASM, _TRITON = "ASM or Triton", "Triton"


class Sizes(click.ParamType[tuple[int, ...]]):
    """``1,2,4,8`` -> positive integers, each once."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Parse what the user wrote."""
        if isinstance(value, tuple):
            return value
        found: list[int] = []
        for part in value.split(","):
            if not (part.strip().isdecimal() and part.isascii() and len(part) < 10 and int(part)):
                self.fail(f"{part!r:.40} is not a positive integer; write sizes as 1,2,4,8", param, ctx)
            if int(part) in found:
                self.fail(f"{int(part)} is there twice", param, ctx)
            found.append(int(part))
        return tuple(found)


def as_dict(placed: Sequence["Placed"]) -> dict[str, Any]:
    """Return every combination as JSON can hold it."""
    combinations = [
        {
            "tp": one.on.tp,
            "ep": one.on.ep,
            "dp": one.on.dp,
            "gpus": one.on.gpus,
            "verdict": one.verdict,
            "repeated_bytes": one.repeated_bytes,
            "facts": [asdict(fact) for fact in one.facts],
            "experts": [_experts(path, one.facts) for path in one.experts],
            "linear": [_linear(path, one.facts) for path in one.linear],
        }
        for one in placed
    ]
    known = {"hardware": "MI355X (gfx950)", "engine": "vLLM 0.32", "kernels": "AITER after v0.1.20", "run": False}
    return known | {"combinations": combinations}


def _experts(path: "ExpertsPath", more: Sequence["Found"]) -> dict[str, Any]:
    e, h, i = path.kind.sizes
    found: dict[str, Any] = {
        "name": path.kind.name,
        "layers": path.kind.layers,
        "packed": path.kind.packed,
        "model": {"experts": e, "hidden": h, "intermediate": i},
    }
    case = path.case
    if case is None:
        return found
    rows = {"vllm": case.row(case.padded[1]), "sglang": case.row(case.sglang_intermediate)}
    before_after = path.bytes
    return found | {
        "gpu": {"experts": case.own_experts, "intermediate": case.own_intermediate},
        "padded": {
            "vllm": {"hidden": case.padded[0], "intermediate": case.padded[1]},
            "sglang": {"intermediate": case.sglang_intermediate},
        },
        "bytes": before_after and {"before": before_after[0], "after": before_after[1]},
        "tuned": {engine: row and asdict(row) for engine, row in rows.items()},
        "computed_by": _computed(path, more),
        "facts": [asdict(fact) for fact in path.facts],
    }


def _linear(path: "LinearPath", more: Sequence["Found"]) -> dict[str, Any]:
    kind, case = path.kind, path.case
    return {
        "name": kind.name,
        "layers": kind.layers,
        "packed": kind.packed,
        "modules": {name: [n, k] for name, n, k in kind.modules},
        "gpu": case and {"n": case.n, "k": case.k, "repeated_rows": path.repeated},
        "assembly": case and case.assembly,
        "computed_by": _by(path, [*more, *path.facts]) if kind.packed else None,
        "facts": [asdict(fact) for fact in path.facts],
    }


def _computed(path: "ExpertsPath", more: Sequence["Found"]) -> str:
    from mxq.layouts.paths import worst

    verdict = worst([*more, *path.facts])
    if verdict != "ok" or path.case is None:
        return {"emulated": "emulation"}.get(verdict, verdict)
    return "FlyDSL" if path.case.row(path.case.padded[1]) is None else "tuned rows"


class _Notes:
    """Texts with a letter each, in the order in which they are first met."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def letters(self, texts: Sequence[str]) -> str:
        """Return `` (a, c)`` for texts."""
        self._texts += [text for text in dict.fromkeys(texts) if text not in self._texts]
        letters = sorted({_letter(self._texts.index(text)) for text in texts}, key=lambda x: (len(x), x))
        return f" ({','.join(letters)})" if letters else ""

    def show(self) -> None:
        """Print them."""
        for number, text in enumerate(self._texts):
            _wrapped(f"({_letter(number)}) {text}", "    ")


def show_placed(placed: Sequence["Placed"]) -> None:
    """Print a table for each kind of packed experts, one for packed dense layers, and notes."""
    notes = _Notes()
    click.echo(f"\n{_HEADING}\n")
    for number, path in enumerate(placed[0].experts):
        if path.kind.packed:
            _show_experts(placed, number, notes)
    if any(path.kind.packed for path in placed[0].linear):
        _show_linear(placed, notes)
    notes.show()
    _show_repeated(list({one.on.tp: one for one in placed}.values()))
    kept = [path.kind.name for path in placed[0].experts if not path.kind.packed]
    kept += [path.kind.name for path in placed[0].linear if not path.kind.packed]
    if kept:
        _wrapped("not packed: " + ", ".join(kept))


def _show_experts(placed: Sequence["Placed"], number: int, notes: _Notes) -> None:
    kind = placed[0].experts[number].kind
    e, h, i = kind.sizes
    click.echo(f"{kind.name} of {kind.layers} layers: E {e}, H {h}, I {i}; EP shares E, else TP shares I")
    shown = table(">TP", ">EP", ">DP", ">E", ">I", ">padded", ">padding/GPU", ">SGLang", "tuned", "computed by")
    computed = set()
    for one in placed:
        path = one.experts[number]
        case = path.case
        assert case is not None
        row = case.row(case.padded[1])
        by = _computed(path, one.facts)
        texts = _texts([*one.facts, *path.facts])
        if by == "tuned rows" and row is not None:
            texts.append(f"{row.kernels}: {row.file}" + (f", AITER {row.since} or later" if row.since else ""))
        tuned = _tuned(row is not None, case.row(case.sglang_intermediate) is not None)
        own: list[object] = [case.own_experts, case.own_intermediate, case.padded[1], _more(path)]
        own += [case.sglang_intermediate, tuned] if by != "wrong" else ["-"] * 2
        sizes = ["-"] * len(own) if by == "refused" else [str(x) for x in own]
        shown.add_row(str(one.on.tp), str(one.on.ep), str(one.on.dp), *sizes, by + notes.letters(texts))
        computed.add(by)
    show(shown)
    if computed & {"FlyDSL", "tuned rows"}:
        _wrapped(
            "Padded and padding are vLLM's. Where nothing is tuned AITER decides by a heuristic. "
            "Without VLLM_ROCM_USE_AITER=1 experts are emulated."
        )
    click.echo()


def _more(path: "ExpertsPath") -> str:
    if path.bytes is None:
        return "-"
    before, after = path.bytes
    return "0" if after == before else f"{size(after - before)}, {100 * (after - before) / before:.0f} %"


def _tuned(vllm: bool, sglang: bool) -> str:
    return {(True, True): "yes", (True, False): "vLLM", (False, True): "SGLang"}.get((vllm, sglang), "no")


def _show_linear(placed: Sequence["Placed"], notes: _Notes) -> None:
    click.echo("dense layers, N and K of a GPU:")
    shown = table("module", ">layers", ">TP", ">N", ">K", "computed by")
    computed = set()
    for number, first in enumerate(placed[0].linear):
        if not first.kind.packed:
            continue
        seen: list[tuple[int, object]] = []
        for one in placed:
            path = one.linear[number]
            if (one.on.tp, path.case) in seen:
                continue
            of = str(one.on.tp) if one.on.tp not in (tp for tp, _ in seen) else f"{one.on.tp}, EP {one.on.ep}"
            seen.append((one.on.tp, path.case))
            found = [*one.facts, *path.facts]
            sizes = ("-", "-") if path.case is None else (str(path.case.n), str(path.case.k))
            name = (first.kind.name, str(first.kind.layers)) if one is placed[0] else ("", "")
            by = _by(path, found)
            shown.add_row(*name, of, *sizes, by + notes.letters(_texts(found)))
            computed.add(by)
    show(shown)
    if computed & {_ASM, _TRITON}:
        _wrapped(
            "Triton is gemm_afp4wfp4. With VLLM_ROCM_USE_AITER_FP4_ASM_GEMM=1 ASM is gemm_a4w4, or to 64 tokens "
            "Triton's gemm_afp4wfp4_preshuffle where that is tuned. Which dense shapes are is not recorded here."
        )
    click.echo()


def _by(path: "LinearPath", found: Sequence["Found"]) -> str:
    from mxq.layouts.paths import worst

    verdict = worst(found)
    if verdict != "ok" or path.case is None:
        return {"emulated": "emulation"}.get(verdict, verdict)
    return _ASM if path.case.assembly else _TRITON


def _texts(found: Sequence["Found"]) -> list[str]:
    """Return what is worth a note: of what fails, only why."""
    bad = [fact.text for fact in found if fact.verdict in ("refused", "wrong")]
    return bad or [fact.text for fact in found]


def _show_repeated(placed: Sequence["Placed"]) -> None:
    found = [f"{size(one.repeated_bytes)} under TP {one.on.tp}" for one in placed if one.repeated_bytes]
    if found:
        _wrapped(f"Key and value heads are fewer than GPUs and repeated, for more on each GPU: {', '.join(found)}")


def _letter(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else _letter(number // 26 - 1) + _letter(number % 26)


def _wrapped(text: str, indent: str = "") -> None:
    import textwrap

    click.echo(textwrap.fill(text, 80, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))
