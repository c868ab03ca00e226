"""The whole of an evaluation in one call, decoded in this process."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mxq.evaluate.after import After, Both, refuse_one_target, refuse_too_large
from mxq.evaluate.directory import refuse_unlike
from mxq.evaluate.matrix import Plan
from mxq.evaluate.prepare import Request, prepare
from mxq.evaluate.reading import Run, read_run
from mxq.evaluate.runner import environment, run
from mxq.workloads import ChatTemplate

if TYPE_CHECKING:
    from mxq.engines.inprocess import InProcessEngine


def measure(request: Request, out: Path, after: Sequence[After] = ()) -> Run:
    """Measure what ``out`` does not hold yet of ``request``, make what comes ``after``, and return the run.

    Raises what :func:`mxq.evaluate.prepare` and :func:`mxq.evaluate.run` do; what cannot be made afterwards is refused
    before anything is measured.
    """
    for one in after:
        refuse_one_target(one.option, request)
        one.refuse(request)
    plan, template, engine = prepared(request)
    both = Both(plan, template, out)
    if after and (out / "run.json").exists():
        refuse_unlike(out, plan, environment(engine))
    for one in after:
        refuse_too_large(one.option, engine, plan)
        one.look(both)
    run(plan, out, engine, template.decode, template.encode)
    for one in after:
        one.make(both)
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
