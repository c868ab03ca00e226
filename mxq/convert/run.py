"""Carry out a plan: the files of weights, then everything beside them."""

import contextlib
import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxq.checkpoint.beside import CARD, LAYERS, MANIFEST, SCALES, copied_files, left_files
from mxq.checkpoint.manifest import checksum
from mxq.checkpoint.manifest import read as read_manifest
from mxq.checkpoint.quantization import config_for
from mxq.checkpoint.reader import INDEX, inside
from mxq.checkpoint.resolve import HubId, hub_id
from mxq.checkpoint.writer import Shard, index
from mxq.convert import calibration, manifest
from mxq.convert.calibration import Stage
from mxq.convert.card import card
from mxq.convert.executors import Executor, local
from mxq.convert.origin import conversion, refuse_changed
from mxq.convert.partial import Partial, SpoiledError, held
from mxq.convert.plan import Plan
from mxq.convert.stream import Feed, most_at_once
from mxq.convert.work import Work
from mxq.errors import MxqError
from mxq.files import write_json
from mxq.progress import note, progress
from mxq.verify import structure

if TYPE_CHECKING:
    from mxq.calibrate.results import Calibrated


def run(
    plan: Plan,
    out: Path,
    spec: str,
    *,
    jobs: int = 1,
    devices: tuple[str, ...] = (),
    stream: bool = False,
    executor: Executor | None = None,
    stage: Stage | None = None,
) -> dict[str, Any]:
    """Convert as planned into ``out``, which appears when all of it is written and checked; returns the manifest.

    What is complete when it is stopped, however that is done, is kept, and the same call continues from there.

    Args:
        plan: from :func:`mxq.convert.plan.plan`.
        out: must not exist or be empty.
        spec: what the user called the source, for manifest and card.
        jobs: how many threads convert.
        devices: what quantizes, if it is not the CPU's kernel: GPUs, as torch calls them.
        stream: fetch files of weights that are not here one after the other, and remove them when they are done with.
        executor: who makes the files of weights that are all here, if it is not this process; without ``stage`` only.
        stage: the calibration, if the recipe has one.

    Raises:
        UsageError, InterruptedRunError: as :func:`mxq.convert.partial.held`.
        MxqError: a weight holds NaN or infinity, the source changed meanwhile, a file cannot be read or written; as
            :meth:`mxq.convert.calibration.Stage.run`.
    """
    if (plan.recipe.algorithm is None) != (stage is None):
        raise ValueError(f"recipe {plan.recipe.name} and its calibration do not go together: mxq.convert.calibration")
    if plan.recipe.budget is not None:
        raise ValueError(f"what recipe {plan.recipe.name} keeps must be chosen first: mxq.convert.mixed")
    for name in left_files(plan.source.path):
        note(f"not copied: {name}")
    made = conversion(plan, spec, stage=stage, stream=stream)
    beside = [INDEX, LAYERS, SCALES, "config.json", *copied_files(plan.source.path), CARD, MANIFEST]
    needed = disk_bytes(plan, stage, stream=stream)
    fetched = [*plan.source.sizes] if stream else []
    with held(out, made, needed, [shard.file for shard in plan.shards], beside, fetched) as partial:
        if not partial.published:
            try:
                calibrated = None if stage is None else stage.run(plan, partial.calibration)
                if calibrated is not None and (unseen := calibration.unseen(calibrated)):
                    note(unseen)
                if stream:
                    _stream_tensors(plan, spec, partial, jobs, devices)
                else:
                    _write_tensors(plan, partial, executor or local(jobs), devices, calibrated)
                _write_beside(plan, spec, partial, stage, calibrated)
            except (MxqError, OSError):
                refuse_changed(plan.source, made["source_files"], "converted")  # which may be why
                raise
            refuse_changed(plan.source, made["source_files"], "converted")
            partial.publish()
        facts = read_manifest(partial.out)
    assert facts is not None
    return facts


def disk_bytes(plan: Plan, stage: Stage | None = None, *, stream: bool = False) -> int:
    """Return how many bytes a conversion needs on the disk of its output at most."""
    fetched = most_at_once(plan, plan.source.elsewhere)[1] if stream else 0
    return plan.bytes_after + fetched + (0 if stage is None else stage.disk_bytes(plan))


def _write_beside(
    plan: Plan, spec: str, partial: Partial, stage: Stage | None, calibrated: "Calibrated | None"
) -> None:
    directory = partial.directory
    names = index(plan.shards)
    if names is not None:
        write_json(directory / INDEX, names)
    shards = partial.journal.shards
    layers = [layer for shard in plan.shards for layer in shards[shard.file]["layers"]]
    _write_layers(directory, layers)
    write_json(directory / "config.json", _config(plan))
    for name in copied_files(plan.source.path):
        shutil.copyfile(inside(plan.source.path, name), directory / name)
    known = {name: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for name, entry in shards.items()}
    results = None
    if calibrated is not None:
        calibration.write_scales(calibrated, directory)
        results = calibration.results(calibrated)
    facts = manifest.build(plan, spec, directory, known, stage, results)
    written = directory / CARD
    written.write_text(card(facts, layers), encoding="utf-8")  # from the manifest, and then itself a file of it
    facts["files"][written.name] = checksum(written)
    write_json(directory / MANIFEST, facts)
    problems = structure.problems_of(directory)
    if problems:
        raise SpoiledError(f"the checkpoint written is wrong, which is a defect of mxq: {problems[0].what}")


def _config(plan: Plan) -> dict[str, Any]:
    recipe = plan.recipe
    quantization = config_for(plan.form, plan.exclude, weight_only=recipe.weight_only, rule=recipe.scale_rule)
    return plan.source.config | {"quantization_config": quantization}


def _write_layers(directory: Path, layers: list[dict[str, Any]]) -> None:
    with (directory / LAYERS).open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(layer) + "\n" for layer in layers)


def _write_tensors(
    plan: Plan, partial: Partial, executor: Executor, devices: tuple[str, ...], calibrated: "Calibrated | None"
) -> None:
    """Write the shards that are not complete yet."""
    left = [shard for shard in plan.shards if shard.file not in partial.journal.shards]
    works = [_work(plan, shard, devices, calibrated) for shard in left]
    total = sum(work.bytes_before for work in works)
    with progress("converting", total, "B") as advance, contextlib.closing(executor(works, partial, advance)) as made:
        for work, known, layers in made:
            partial.complete(work.shard.file, known, layers)


def _stream_tensors(plan: Plan, spec: str, partial: Partial, jobs: int, devices: tuple[str, ...]) -> None:
    """Write the shards that are not complete yet, with files of the source fetched as they are needed."""
    from mxq.checkpoint.hub_shards import Shards  # which few need

    model = hub_id(spec)
    assert model is not None
    shards = Shards(HubId(model.name, plan.source.path.name), partial.source)
    left = [_work(plan, shard, devices) for shard in plan.shards if shard.file not in partial.journal.shards]
    feed = Feed(plan.source, [work.groups for work in left], partial.source, shards.fetch)
    works = [dataclasses.replace(work, source=feed.source) for work in left]
    with progress("converting", feed.nbytes + sum(work.bytes_before for work in works), "B") as advance:
        for work in works:
            batches = functools.partial(feed.batches, advance=advance)
            known, layers = work.make(partial.directory, jobs, advance, batches)
            partial.complete(work.shard.file, known, layers)
    partial.remove_source()


def _work(plan: Plan, shard: Shard, devices: tuple[str, ...], calibrated: "Calibrated | None" = None) -> Work:
    groups = tuple(plan.groups[outputs[0].name] for outputs in shard.groups)
    return Work(plan.source, plan.recipe.scale_rule, shard, groups, devices, calibrated)
