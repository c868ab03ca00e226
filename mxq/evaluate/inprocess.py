"""The whole of an evaluation in one call, decoded in this process."""

from pathlib import Path
from typing import TYPE_CHECKING

from mxq.evaluate.matrix import Plan
from mxq.evaluate.prepare import Request, prepare
from mxq.evaluate.reading import Run, read_run
from mxq.evaluate.runner import run
from mxq.workloads import ChatTemplate

if TYPE_CHECKING:
    from mxq.engines.inprocess import InProcessEngine


def measure(request: Request, out: Path) -> Run:
    """Measure what ``out`` does not hold yet of ``request``, and return the run.

    Raises what :func:`mxq.evaluate.prepare` and :func:`mxq.evaluate.run` do.
    """
    plan, template, engine = prepared(request)
    run(plan, out, engine, template.decode, template.encode)
    return read_run(out)


def prepared(request: Request) -> "tuple[Plan, ChatTemplate, InProcessEngine]":
    """Return the plan and chat template of a request, as :func:`mxq.evaluate.prepare`, and what will decode it."""
    from mxq.engines.inprocess import InProcessEngine  # slow to import, and reading a run back does without it

    plan, template = prepare(request, engine=InProcessEngine.name, semantics=InProcessEngine.semantics)
    settings = plan.settings
    engine = InProcessEngine(
        dtype=settings.dtype,
        device=settings.device,
        sampling=settings.sampling,
        eos_token_ids=settings.eos_token_ids,
    )
    return plan, template, engine
