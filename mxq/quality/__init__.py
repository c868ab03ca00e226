"""How good the MXFP4 target is: perplexity, KL divergence and choices against the bf16 target, on one text.

``mxq eval --quality`` from Python::

    quality = measure_and_judge(Request(targets={"bf16": ..., "mxfp4": ...}, ...), Path("run"))
    quality.overall.ratio.estimate, quality.overall.ratio.lower, quality.overall.ratio.upper

and of a run that was measured::

    run = read_run(Path("run"))
    quality = judge(read_qualities(run.path, run.info["definition"]))
"""

from collections.abc import Sequence
from pathlib import Path

from mxq.evaluate import Request
from mxq.evaluate import measure as _measure
from mxq.quality.record import Read, Recorded, read_qualities
from mxq.quality.results import Means, Quality, TextQuality, judge
from mxq.quality.text import WINDOW
from mxq.stats import Resampling

__all__ = [
    "WINDOW",
    "Means",
    "Quality",
    "Read",
    "Recorded",
    "TextQuality",
    "judge",
    "measure_and_judge",
    "read_qualities",
]


def measure_and_judge(
    request: Request,
    out: Path,
    *,
    texts: Sequence[Path] = (),
    window: int = WINDOW,
    resampling: Resampling | None = None,
) -> Quality:
    """Measure what ``out`` does not hold yet of ``request`` and of its quality, and return the latter.

    ``texts`` are files as :mod:`mxq.quality.text` reads them, and ``window`` the tokens of their windows. Raises what
    ``mxq eval --quality`` says in a line: UsageError before anything runs, MxqError, InterruptedRunError.
    """
    from mxq.quality.measure import Judging

    run = _measure(request, out, [Judging(tuple(texts), window)])
    return judge(read_qualities(run.path, run.info["definition"]), resampling)
