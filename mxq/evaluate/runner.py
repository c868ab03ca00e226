"""Running a plan: every arm gets the same prompts in the same order, one request at a time.

The order is prompts outside, arms inside: each prompt goes through all arms that are open before the next one starts,
and the arm that goes first changes with every prompt. A machine that slows down or speeds up then does so for all arms
alike, instead of looking like an effect of one. Engines say which arms can be open at once; large models, whose two
targets do not fit in memory together, are run target by target, and cell.json says which arms ran side by side.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mxq import files
from mxq.engines import Decoder, Engine
from mxq.errors import InterruptedRunError, MxqError, UsageError
from mxq.evaluate.directory import OpenCell, open_run, refuse_foreign
from mxq.evaluate.matrix import Arm, Plan, TokenizedWorkload
from mxq.evaluate.records import Record
from mxq.progress import note, progress

WARM_UP_TOKENS = 32

Encode = Callable[[Sequence[tuple[str, str]]], Sequence[int]]
Cells = dict[tuple[Arm, str], OpenCell]


def run(
    plan: Plan, path: Path, engine: Engine, decode: Callable[[Sequence[int]], str], encode: Encode | None = None
) -> None:
    """Measure every cell of ``plan`` that ``path`` does not hold yet; ``decode`` turns token ids into text.

    ``encode`` turns messages into token ids, for later turns of conversations: each is sent behind the texts of the
    arm's own earlier answers, as a client of a server would send them.

    A new directory is made only after the first models are loaded, so that a drafter that does not fit leaves nothing
    behind. Raises InterruptedRunError on Ctrl-C: what is recorded stays, and the same call continues it.
    """
    refuse_foreign(path)
    for workload in plan.workloads if encode is None else ():
        if None in workload.token_ids:
            raise UsageError(
                f"{workload.workload.name} has conversations, and {plan.settings.engine} takes one turn only",
                "give --turns 1",
            )
    around = environment(engine)
    by_engine_arm = {plan.engine_arm(arm): arm for arm in plan.arms}
    total = len(plan.arms) * sum(len(workload.token_ids) for workload in plan.workloads)
    cells: Cells | None = None
    with contextlib.ExitStack() as stack:
        if (path / "run.json").exists():
            cells = stack.enter_context(open_run(path, plan, around))
        try:
            for group in engine.groups(list(by_engine_arm)):
                arms = [arm for arm in map(by_engine_arm.__getitem__, group) if _pending(cells, arm)]
                if not arms:
                    continue
                note(f"loading {', '.join(dict.fromkeys(plan.targets[arm.target].spec for arm in arms))}")
                with engine.open([plan.engine_arm(arm) for arm in arms]) as decoders:
                    if cells is None:
                        cells = stack.enter_context(open_run(path, plan, around))
                    _measure(plan, dict(zip(arms, decoders, strict=True)), cells, decode, encode)
        except KeyboardInterrupt:
            done = sum(cell.done for cell in cells.values()) if cells else 0
            raise InterruptedRunError(
                f"interrupted; {done} of {total} requests are recorded", "run the same command again to continue"
            ) from None


def environment(engine: Engine) -> dict[str, Any]:
    """Return what a run happens in: a directory is continued only in the same."""
    return {
        "versions": files.versions("torch", "transformers", "safetensors", "numpy"),
        "hardware": files.hardware(),
        "engine": engine.facts(),
    }


def _pending(cells: Cells | None, arm: Arm) -> bool:
    return cells is None or any(not cell.finished for (owner, _), cell in cells.items() if owner == arm)


def _measure(
    plan: Plan,
    decoders: dict[Arm, Decoder],
    cells: Cells,
    decode: Callable[[Sequence[int]], str],
    encode: Encode | None,
) -> None:
    mine = {key: cell for key, cell in cells.items() if key[0] in decoders}
    left = sum(len(w.token_ids) - mine[arm, w.workload.name].done for w in plan.workloads for arm in decoders)
    facts = {"ran_beside": [arm.label for arm in decoders]}
    for decoder in decoders.values():
        decoder.generate(plan.warm_up_ids, max_tokens=min(WARM_UP_TOKENS, plan.settings.max_tokens), seed=0)
    with progress("requests", left, "requests") as advance:
        for number, workload in enumerate(plan.workloads, start=1):
            name = workload.workload.name
            for position, arm in _order(workload, list(decoders)):
                cell = mine[arm, name]
                if position >= cell.done:
                    ids = prompt_ids(workload, position, cell.answers, encode)
                    cell.append(complete(plan, workload, position, arm, decoders[arm], decode, ids))
                    advance(1, f"{name} ({number}/{len(plan.workloads)}), {arm.label}")
            for arm in decoders:
                mine[arm, name].finish(facts)


def _order(workload: TokenizedWorkload, arms: list[Arm]) -> Iterator[tuple[int, Arm]]:
    for position in range(len(workload.token_ids)):
        first = position % len(arms)
        for arm in arms[first:] + arms[:first]:
            yield position, arm


def prompt_ids(
    workload: TokenizedWorkload, position: int, answers: Sequence[str], encode: Encode | None
) -> Sequence[int]:
    """Return what is sent at ``position``, of which later turns depend on ``answers``: the arm's texts so far."""
    ids, prompt = workload.token_ids[position], workload.workload.prompts[position]
    if ids is not None:
        return ids
    assert encode is not None
    return encode(prompt.conversation(answers[position - prompt.turn + 1 : position]))


def complete(
    plan: Plan,
    workload: TokenizedWorkload,
    position: int,
    arm: Arm,
    decoder: Decoder,
    decode: Callable[[Sequence[int]], str],
    ids: Sequence[int],
) -> Record:
    """Make the request at ``position`` of ``workload``, which is ``ids``, in an arm and return its record.

    Raises MxqError where the engine's counts cannot be.
    """
    prompt = workload.workload.prompts[position]
    # One seed per prompt, the same in every arm and after every restart.
    seed = int(files.sha256_text(f"{plan.settings.sampling.seed}/{workload.workload.name}/{prompt.id}")[:15], 16)
    started_at = time.time()
    completion = decoder.generate(ids, max_tokens=plan.settings.max_tokens, seed=seed)
    sent = files.sha256_text(json.dumps(list(ids), separators=(",", ":"))) if prompt.turn > 1 else None
    text = decode(completion.token_ids)
    record = Record.of(prompt.id, len(ids), completion, text, started_at, prompt.turn, sent)
    try:
        record.check(arm.num_speculative_tokens)
    except ValueError as error:
        raise MxqError(
            f"{arm.label} on {prompt.id}: the engine's counts are impossible ({error})", "this is a defect: report it"
        ) from None
    return record
