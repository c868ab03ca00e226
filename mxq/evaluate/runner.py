"""Running a plan: every arm gets the same prompts in the same order, one request at a time.

The order is prompts outside, arms inside: each prompt goes through all arms that are open before the next one starts,
and the arm that goes first changes with every prompt. A machine that slows down or speeds up then does so for all arms
alike, instead of looking like an effect of one. Engines say which arms can be open at once; large models, whose two
targets do not fit in memory together, are run target by target, and cell.json says which arms ran side by side. What is
repeated is repeated when all arms had their turn.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mxq import files
from mxq.engines import Decoder, Engine, EngineArm
from mxq.errors import InterruptedRunError, MxqError, UsageError
from mxq.evaluate.directory import OpenCell, open_run, refuse_foreign
from mxq.evaluate.matrix import Arm, Place, Plan, TokenizedWorkload
from mxq.evaluate.records import Record
from mxq.progress import note, progress
from mxq.workloads import Prompt

WARM_UP_TOKENS = 32

Encode = Callable[[Sequence[tuple[str, str]]], Sequence[int]]
Cells = dict[Place, OpenCell]


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
    if plan.concurrencies != (1,):
        raise UsageError(f"{plan.settings.engine} decodes one request at a time", "measure on servers: --engine vllm")
    for workload in plan.workloads if encode is None else ():
        if None in workload.token_ids:
            raise UsageError(
                f"{workload.workload.name} has conversations, and {plan.settings.engine} takes one turn only",
                "give --turns 1",
            )
    around = environment(engine)
    by_engine_arm = {plan.engine_arm(arm): arm for arm in plan.arms}
    total = len(plan.arms) * plan.repeats * sum(len(workload.token_ids) for workload in plan.workloads)
    cells: Cells | None = None
    with contextlib.ExitStack() as stack:
        if (path / "run.json").exists():
            cells = stack.enter_context(open_run(path, plan, around))
        try:
            for group, repeats in _rounds(engine.groups(list(by_engine_arm)), plan.repeats):
                arms = [arm for arm in map(by_engine_arm.__getitem__, group) if _pending(cells, arm, repeats)]
                if not arms:
                    continue
                note(f"loading {', '.join(dict.fromkeys(plan.targets[arm.target].spec for arm in arms))}")
                with engine.open([plan.engine_arm(arm) for arm in arms]) as decoders:
                    if cells is None:
                        cells = stack.enter_context(open_run(path, plan, around))
                    _measure(plan, dict(zip(arms, decoders, strict=True)), repeats, cells, decode, encode)
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


def _rounds(groups: list[list[EngineArm]], repeats: int) -> Iterator[tuple[list[EngineArm], range]]:
    """Yield what is opened one after the other, and which repeats are then measured: all where all is open at once."""
    if len(groups) == 1:
        yield groups[0], range(repeats)
        return
    for repeat in range(repeats):
        for group in groups:
            yield group, range(repeat, repeat + 1)


def _pending(cells: Cells | None, arm: Arm, repeats: range) -> bool:
    return cells is None or any(
        not cell.finished for (owner, _, _, repeat), cell in cells.items() if owner == arm and repeat in repeats
    )


def _measure(
    plan: Plan,
    decoders: dict[Arm, Decoder],
    repeats: range,
    cells: Cells,
    decode: Callable[[Sequence[int]], str],
    encode: Encode | None,
) -> None:
    rounds = [(repeat, workload) for repeat in repeats for workload in plan.workloads]
    left = sum(len(w.token_ids) - cells[arm, w.workload.name, 1, r].done for r, w in rounds for arm in decoders)
    facts = {"ran_beside": [arm.label for arm in decoders]}
    for decoder in decoders.values():
        decoder.generate(plan.warm_ups[0], max_tokens=min(WARM_UP_TOKENS, plan.settings.max_tokens), seed=0)
    with progress("requests", left, "requests") as advance:
        for number, (repeat, workload) in enumerate(rounds, start=1):
            name = workload.workload.name
            for position, arm in _order(workload, list(decoders), repeat):
                cell = cells[arm, name, 1, repeat]
                if position >= cell.done:
                    ids = prompt_ids(workload, position, cell.answers, encode)
                    cell.append(complete(plan, workload, position, arm, decoders[arm], decode, ids, repeat))
                    advance(1, f"{name} ({number}/{len(rounds)}), {arm.label}")
            for arm in decoders:
                cells[arm, name, 1, repeat].finish(facts)


def _order(workload: TokenizedWorkload, arms: list[Arm], repeat: int) -> Iterator[tuple[int, Arm]]:
    for position in range(len(workload.token_ids)):
        first = (position + repeat) % len(arms)
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
    repeat: int = 0,
) -> Record:
    """Make the request at ``position`` of ``workload``, which is ``ids``, in an arm and return its record.

    Raises MxqError where the engine's counts cannot be.
    """
    prompt = workload.workload.prompts[position]
    started_at = time.time()
    completion = decoder.generate(
        ids, max_tokens=plan.settings.max_tokens, seed=seed_of(plan, workload, position, repeat)
    )
    text = decode(completion.token_ids)
    record = Record.of(prompt.id, len(ids), completion, text, started_at, prompt.turn, sent_sha256(prompt, ids))
    check(record, arm)
    return record


def seed_of(plan: Plan, workload: TokenizedWorkload, position: int, repeat: int) -> int:
    """Return a prompt's seed: the same in every arm and after every restart, and another one in each repeat."""
    names = [plan.settings.sampling.seed, workload.workload.name, workload.workload.prompts[position].id]
    return int(files.sha256_text("/".join(map(str, names + [repeat] * (repeat > 0))))[:15], 16)


def sent_sha256(prompt: Prompt, ids: Sequence[int]) -> str | None:
    """Return the hash of what was sent for a later turn, which depends on the arm; None for a first one."""
    return files.sha256_text(json.dumps(list(ids), separators=(",", ":"))) if prompt.turn > 1 else None


def check(record: Record, arm: Arm) -> None:
    """Raise MxqError where a record of an arm cannot be."""
    try:
        record.check(arm.num_speculative_tokens)
    except ValueError as error:
        raise MxqError(
            f"{arm.label} on {record.prompt_id}: the engine's counts are impossible ({error})",
            "this is a defect: report it",
        ) from None
