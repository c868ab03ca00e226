"""benchmarks/PREDICT.md: predicted against published or measured, for tools/fit_hardware.py."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mxq.hardware import machine
from mxq.hardware.measured import Cell

if TYPE_CHECKING:
    from fit_hardware import Fitted

_BOUNDS = {"b200": (0.15, None), "h200": (0.10, 0.25), "mi355x": (None, 0.15)}
"""Of held-out cells, the errors that were asked for before the model was made: median and worst."""

_HEAD = """\
# Predicted against published and measured

`python tools/fit_hardware.py`, which also writes the fitted constants into `recipes/hardware/`.

The cells of a machine are sorted by model, precision, method, K, workload and concurrency. One of every three is
fitted on, by turns the last, the middle and the first of them (always the last would be 32 requests only, where 1, 8
and 32 were measured); the rest is held out, and the rule looks at no number. Only constants were fitted so: which terms
the model has was decided with all cells in view. Errors are predicted tokens per second over those published or
measured, less one. The bounds were set before there was a model.
"""

_CONSTANTS = """
B200 is fitted first, with H200's `prompt_ms`. A constant of H200 is drawn towards B200's: a factor of two weighs as
much as one cell that is 5 % off. `scan_us` of B200 and H200 is 0: bytes of snapshots take longer there. `experts_us`
and those of the host are vLLM's, fitted on H200, and drawn so towards 15 us, and 5, 6 and 1 ms, which were chosen with
cells in view; SGLang's are taken to be 0. MI355X has H200's constants, since both ran vLLM, and two of its own,
`layer_us` and `scan_us`, fitted on one of its four figures and the one speedup that the text gives for 27B: plain
decoding has the one and not the other. MI300X has no cells and MI355X's overheads. H200's are fitted on passes, behind
the median first token, but for cells where requests waited. `matrix_share` and `prompt_ms` are from times to the first
token on H200 with bf16, those of held-out cells too but for `prompt_ms`, which is from one request; H200's rate of
MXFP4 is fitted with `packed_share`. What constants mean is in `mxq/hardware/machine.py`, the formulas are in
`mxq/hardware/cost.py`.
"""

_B200 = """\
## NVIDIA B200, SGLang, bf16

Published by z-lab (copies of its model cards), one request and 32, thinking on, at most 4,096 tokens. The cards' own
acceptance lengths for these cells are not known here. Those of AMD's tables are taken, for the same model, method, K
and workload: of vLLM, pooled over passes where the cards average over turns, and of a client that turns thinking off
unless told otherwise, which changes acceptance. So an error here is one of speed and acceptance together. Prompts of
150 and answers of 2,000 tokens are assumed, and for 35B-A3B the first of its two drafters.

Predicted / published tokens per second, and the error; * fitted on.
"""

_H200 = """\
## NVIDIA H200, vLLM 0.25.1

Real shapes with made-up weights, drafts accepted at a rate that is set, 256 prompt and 512 output tokens, all
requests sent at once (`tools/gpu`); MXFP4 weight-only on Marlin; experts of 35B-A3B drawn at random for each token.
Spreads, cells with fewer than three repeats so far, and what is not timed yet: [H200.md](H200.md).
"""

_MORE_OF_H200 = """\
Both parts of a request are in these numbers. Without prompts, behind the median first token, the {} held-out cells
where none waited are {:.1%} off at the median and {:.1%} at worst: that is what `mxq predict` prints where no lengths
are given; 25 % at worst were asked for whole requests. Those of 35B-A3B with one request and drafts are
the worst: their passes are slower than bytes and overheads explain, and differ most from repeat to repeat. The model
takes a step to have a least time, as if the GPU waited for vLLM's own process (`host_plain_ms`, `host_ms`, and
`host_draft_ms` for each more of MTP's passes); no cell measures what that process takes. That DFlash's pass costs it
what MTP's first does is assumed, and too little. Of the cells that were fitted on, these have it:

{}

Median first token, measured / predicted, in ms, of cells where none waited. Prompts that come at once are taken to be
three passes, which the host prepares while the GPU works; with several requests of 35B-A3B that is still too fast.
Marlin multiplies slower for so many tokens than the rate that fits its passes (27B):
"""

_TERMS = """
Reading packed weights and multiplying them one after the other (`packed_overlap` 0), an overhead of experts, times of
the host and three passes over prompts were added to the model when these cells were seen. Fitted without one of these,
held-out cells are off as follows; the first is for 27B with MXFP4:
"""

_MI355X = """\
## AMD Instinct MI355X, vLLM with AITER

The four figures of AMD's text in tokens per second, one request; its other throughputs are pictures. It gives no
workload for the MXFP4 ones: HumanEval's is taken, where most is accepted. The one of MTP is a plateau behind block 8.
"""

_CHOICE = """
Which figure is fitted on, beside the speedup, matters. Errors of all four, by the one chosen:
"""

_END = """\
## What the model leaves out

- Tokens of one text prefer the same experts. Here each is sent through any, and so it was in H200's cells, so that
  DFlash on 35B-A3B with K 15 is predicted too slow on most texts.
- A slower or busier host than that of the H200: `host_ms` is MI355X's too.
- Queues: as many requests are in flight as the concurrency says, all the time and all equally long. The published runs
  of 128 requests end with fewer.
- Which kernel was chosen, sizes without a tuned one, and steps that no graph was captured for: one share of the data
  sheet stands for all matrix products.
- Memory for activations and graphs, and what vLLM's blocks of one size leave unused: a few more requests may have to
  wait than the model thinks. With 32 requests and K 15, where each has 16 states of 150 MB, it has 2 of them wait on
  H200 with bf16 and DFlash, where vLLM's log has room for 26 of 1,024 tokens, and none with MXFP4, where none did.
- Operations of attention, of which only bytes count; communication between GPUs: only one GPU is predicted.
- MXFP4 activations: no cell with them was fitted on. B200 and MI355X are taken to read packed weights at the share of
  bandwidth that Marlin reaches on H200.
"""


def page(
    machines: "Mapping[str, Fitted]",
    others: "Sequence[Fitted]",
    without: "Mapping[str, Fitted]",
    decoding: Sequence[float],
    prompts: Mapping[tuple[str, str, int], tuple[float, float]],
    waiting: Sequence[Cell],
    statements: Sequence[tuple[str, str, str]],
) -> str:
    """Return the page.

    Args:
        machines: by name.
        others: MI355X fitted on each of its figures in turn.
        without: H200 fitted without a term of the model, by what that is called.
        decoding: errors of H200's held-out cells without their prompts.
        prompts: median seconds to H200's first token, measured and predicted, by model, precision and concurrency.
        waiting: cells that H200 was fitted on and that wait for the host.
        statements: of AMD's text on MI355X: of what, published, predicted.
    """
    mi355x = _mi355x(machines["mi355x"], others, statements)
    h200 = _h200(machines["h200"], without, decoding, prompts, waiting)
    return "\n".join([*_head(machines), *_b200(machines["b200"]), *h200, *mi355x, _END])


def _head(machines: "Mapping[str, Fitted]") -> Iterator[str]:
    yield _HEAD
    yield from _titles("machine", "cells", "fitted on", "held out: median", "bound", "worst", "bound")
    for name, bounds in _BOUNDS.items():
        one = machines[name]
        pairs = zip(_held_out(one), bounds, strict=True)
        yield _row(
            one.gpu, len(one.cells), len(one.on), *(text for found, bound in pairs for text in _held(found, bound))
        )
    yield "\nFitted constants, and where a machine has no cells for one, another's:\n"
    yield from _titles("machine", *(f"`{name}`" for name in machine.FITTED))
    for name, one in machines.items():
        yield _row(name, *(f"{one.constants[constant]:g}" for constant in machine.FITTED))
    yield _CONSTANTS


def _held_out(one: "Fitted") -> tuple[float, float]:
    """Return median and largest error of the cells that were held out."""
    errors = [abs(one.error(cell)) for cell in one.cells if cell not in one.on]
    return statistics.median(errors), max(errors)


def _held(found: float, bound: float | None) -> tuple[str, str]:
    if bound is None or found <= bound:
        return f"{found:.1%}", "-" if bound is None else f"{bound:.0%}"
    return f"{found:.1%}", f"**{bound:.0%}, missed by {100 * (found - bound):.1f} points**"


def _b200(one: "Fitted") -> Iterator[str]:
    yield _B200
    methods = list(dict.fromkeys((cell.method, cell.k) for cell in one.cells))
    yield from _titles("model", "c", "workload", *(_method(*method) for method in methods))
    for row in sorted({(cell.model, cell.concurrency, cell.workload) for cell in one.cells}):
        mine = {(c.method, c.k): c for c in one.cells if (c.model, c.concurrency, c.workload) == row}
        yield _row(*row, *(_short(one, mine[method]) for method in methods))
    yield from _by_arm(one, lambda cell: f"{cell.model}, {cell.method}")


def _by_arm(one: "Fitted", arm: Callable[[Cell], str]) -> Iterator[str]:
    yield ""
    yield from _titles("held out", "cells", "median", "worst")
    for name in dict.fromkeys(arm(cell) for cell in one.cells):
        errors = [abs(one.error(cell)) for cell in one.cells if arm(cell) == name and cell not in one.on]
        if errors:
            yield _row(name, len(errors), f"{statistics.median(errors):.1%}", f"{max(errors):.1%}")
    yield ""


def _h200(
    one: "Fitted",
    without: "Mapping[str, Fitted]",
    decoding: Sequence[float],
    prompts: Mapping[tuple[str, str, int], tuple[float, float]],
    waiting: Sequence[Cell],
) -> Iterator[str]:
    yield _H200
    yield from _long(one, "measured")
    yield from _by_arm(one, lambda cell: f"{cell.model}, {cell.method}, {cell.concurrency} at once")
    errors = [abs(error) for error in decoding]
    those = "\n".join(f"- {_name(cell)}, {cell.workload}, {cell.concurrency} at once" for cell in waiting)
    yield _MORE_OF_H200.format(len(errors), statistics.median(errors), max(errors), those)
    counts = sorted({concurrency for _, _, concurrency in prompts})
    yield from _titles("model", "precision", *(f"{count} at once" for count in counts))
    for model, precision in sorted({arm[:2] for arm in prompts}):
        found = [prompts.get((model, precision, count)) for count in counts]
        yield _row(model, precision, *("-" if pair is None else _milliseconds(*pair) for pair in found))
    yield _TERMS
    yield from _titles("the model", "median", "worst", "of 27B, MXFP4: median", "worst")
    for name, other in {"as it is": one, **without}.items():
        packed = replace(
            other, cells=tuple(c for c in other.cells if (c.model, c.precision) == ("Qwen3.5-27B", "mxfp4"))
        )
        yield _row(name, *(f"{error:.1%}" for found in (other, packed) for error in _held_out(found)))
    yield ""


def _milliseconds(measured: float, predicted: float) -> str:
    return f"{1e3 * measured:.0f} / {1e3 * predicted:.0f}"


def _mi355x(one: "Fitted", others: "Sequence[Fitted]", statements: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    yield _MI355X
    yield from _long(one, "published")
    yield ""
    yield from _titles("what else the text says, one request where no number is given", "published", "predicted")
    for statement in statements:
        yield _row(*statement)
    yield _CHOICE
    yield from _titles("fitted on", *map(_name, one.cells))
    for other in others:
        yield _row(_name(other.on[0]), *(f"{other.error(cell):+.1%}" for cell in other.cells))
    yield ""


def _long(one: "Fitted", source: str) -> Iterator[str]:
    yield from _titles(
        *("model", "precision", "method", "workload", "c", "acceptance length"),
        *(f"{source} tok/s", "predicted", "error", "used"),
    )
    for cell in one.cells:
        yield _row(
            *(cell.model, cell.precision, _method(cell.method, cell.k), cell.workload, cell.concurrency),
            *(f"{cell.acceptance_length:.3f}", _digits(cell.tokens_per_s), _digits(one.predicted(cell))),
            *(f"{one.error(cell):+.1%}", "fitted on" if cell in one.on else "held out"),
        )


def _titles(*names: str) -> Iterator[str]:
    yield _row(*names)
    yield "|" + "---|" * len(names)


def _row(*values: object) -> str:
    return f"| {' | '.join(map(str, values))} |"


def _name(cell: Cell) -> str:
    return f"{cell.model} {cell.precision} {_method(cell.method, cell.k)}"


def _method(method: str, k: int) -> str:
    return f"{method}-{k}" if k else method


def _short(one: "Fitted", cell: Cell) -> str:
    rates = f"{_digits(one.predicted(cell))} / {_digits(cell.tokens_per_s)}"
    error = f"{one.error(cell):+.0%}".replace("-0%", "0%").replace("+0%", "0%")
    return f"{rates}, {error}{'*' if cell in one.on else ''}"


def _digits(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"
