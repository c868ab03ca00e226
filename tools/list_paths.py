"""Write benchmarks/PATHS.md: what ``mxq plan --tp --ep`` says of the published models, and on what it rests.

    python tools/list_paths.py

Needs no weights: the checkpoints have the models' real dimensions and headers alone (``tests/architectures.py``).
"""

import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

OUT = ROOT / "benchmarks" / "PATHS.md"
TPS, EPS = (1, 2, 4, 8), (1, 8)
HEAD = """# Which kernels the published models would get on MI355X

`python tools/list_paths.py`

What `mxq plan MODEL --tp 1,2,4,8` says of each, with `--ep 1,8` of MoE models: read from the source of vLLM 0.32 and of
AITER after v0.1.20, and from issues; nothing here has run on the hardware. TP is `--tensor-parallel-size`, DP is
`--data-parallel-size`; EP is 1 without `--enable-expert-parallel`, and TP x DP with it. E, I, N and K are what one GPU
has. The dimensions of 122B-A10B are from secondary sources.
"""


def model(directory: Path, name: str) -> Iterator[str]:
    """Yield what is printed of a model."""
    import architectures

    from mxq.checkpoint import open_headers
    from mxq.cli.placement import show_placed
    from mxq.convert import recipe
    from mxq.convert.placement import place
    from mxq.convert.plan import plan

    source = open_headers(str(architectures.write(directory / name, name)))
    planned = plan(source, recipe.load("mxfp4"))
    eps = EPS if planned.family == "qwen3_5_moe" else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        show_placed(place(planned, TPS, eps))
    yield f"## {name}\n"
    yield "```"
    yield from (line.rstrip() for line in printed.getvalue().strip().splitlines()[2:])
    yield "```\n"


def known() -> Iterator[str]:
    """Yield the facts that decide, as a table."""
    from mxq.layouts.paths import EXPERTS_FACTS, LINEAR_FACTS
    from mxq.layouts.split import DIVIDED
    from mxq.layouts.tuned import TUNED

    yield "## What it rests on\n"
    yield "| of | fact | where it holds | source |\n|---|---|---|---|"
    yield from (f"| TP | `{one.key}` is no multiple | {one.verdict} | {one.source} |" for one in DIVIDED)
    yield from (f"| experts | `{fact.id}` | {fact.verdict} | {fact.source} |" for fact in EXPERTS_FACTS)
    yield from (f"| dense | `{fact.id}` | {fact.verdict} | {fact.source} |" for fact in LINEAR_FACTS)
    yield "\nTuned rows of AITER, by H, I, E and k as it counts them:\n"
    yield "| H | I | E | k | kernels, for up to 32768 tokens | file | since |\n|---|---|---|---|---|---|---|"
    for row in TUNED:
        key = f"{row.hidden} | {row.intermediate} | {row.experts} | {row.top_k}"
        yield f"| {key} | {row.kernels} | {row.file} | {row.since or 'not known'} |"


def main() -> None:
    """Write the page."""
    import architectures

    lines = [HEAD]
    with tempfile.TemporaryDirectory() as directory:
        for name in architectures.NAMES:
            lines += model(Path(directory), name)
    OUT.write_text("\n".join([*lines, *known()]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
