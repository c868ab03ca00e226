"""The first stage of a calibrated recipe: what it reads, what it leaves for the files of weights, what OUT keeps of it.

:mod:`mxq.calibrate` chooses codes and scales of decoder layers' matrices and, where its algorithm scales columns, new
norms in front of them. A file of weights then copies these where others quantize or copy the source.
"""

import dataclasses
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.beside import MANIFEST, SCALES
from mxq.checkpoint.writer import ShardWriter
from mxq.convert.partial import SpoiledError
from mxq.convert.plan import Group, Plan
from mxq.errors import UsageError
from mxq.formats.cpu_rows import Measures
from mxq.formats.rules import BLOCK, NAN_BYTE
from mxq.models import qwen35
from mxq.models.qwen35 import Piece

if TYPE_CHECKING:
    import torch

    from mxq.calibrate.results import Calibrated
    from mxq.calibrate.text import Samples

PACKAGES = ("transformers", "amd-quark")
"""Whose versions decide the bytes, beside torch's."""

_ELEMENTS_AT_ONCE = 1 << 20
_LARGEST_CODE = 6
_TEXTS, _F32_BYTES = 2, 4  # the text behind a block is written before that in front of it is removed


@dataclass(frozen=True)
class Stage:
    """A calibration that is prepared: all that can be refused without the weights has been.

    Attributes:
        algorithm, options: of the recipe.
        samples: the text.
        device: what computes, as torch calls it.
    """

    algorithm: str
    options: dict[str, Any]
    samples: "Samples"
    device: str

    @property
    def facts(self) -> dict[str, Any]:
        """What of it decides the bytes, beside the recipe: the text, and the kind of device."""
        return self.samples.facts | {"device": self.device.partition(":")[0]}

    def disk_bytes(self, plan: Plan) -> int:
        """Return how much what is finished takes until all is converted: codes and scales, and text on its way."""
        packed = sum(tensor.nbytes for group in plan.groups.values() if group.pieces for tensor in group.outputs)
        return packed + _TEXTS * _F32_BYTES * self.samples.ids.numel() * plan.hidden

    def run(self, plan: Plan, directory: Path) -> "Calibrated":
        """Calibrate, or continue; ``directory`` keeps what is finished.

        Raises:
            UsageError, MxqError: as :func:`mxq.calibrate.engine.calibrate`.
        """
        from mxq.calibrate import engine

        return engine.calibrate(
            plan.source,
            pieces(plan),
            self.algorithm,
            self.options,
            self.samples,
            directory,
            device=self.device,
        )


def prepare(
    plan: Plan, spec: str, given: Sequence[str], devices: Sequence[str], data_dir: Path | None = None
) -> Stage | None:
    """Return the calibration that a plan's recipe asks for, None if it asks for none.

    Args:
        plan: from headers; the tokenizer must be beside them.
        spec: the source as the user named it.
        given: what the user wants for the recipe's calibration set: names of workloads, or files.
        devices: as :func:`mxq.convert.devices.named`; the first one computes.
        data_dir: where published workloads are read from, if not from the hub.

    Raises:
        UsageError: there is no text, or too little; the tokenizer does not fit; Quark is missing; a set is given and
            the recipe does not calibrate.
    """
    recipe = plan.recipe
    if recipe.calibration is None and (given or data_dir is not None):
        option = "--calib" if given else "--data-dir"
        raise UsageError(
            f"{option} is for a recipe that reads a text, and {recipe.name} does not",
            "leave it out, or take one that calibrates or chooses, such as mxfp4-gptq or mxfp4-mixed",
        )
    if recipe.algorithm is None:
        return None
    samples = text(plan, spec, given, data_dir)
    from mxq.calibrate import quark

    quark.load()
    quark.check_algorithm(plan.family, recipe.algorithm)
    return Stage(recipe.algorithm, dict(recipe.options), samples, devices[0] if devices else "cpu")


def text(plan: Plan, spec: str, given: Sequence[str], data_dir: Path | None) -> "Samples":
    """Return the text of a plan's recipe, which has one; arguments and errors as of :func:`prepare`.

    Files are called by their names: what is published needs no paths of ours.
    """
    from mxq.calibrate.text import tokens

    asked = plan.recipe.calibration
    assert asked is not None
    if given:
        asked = dataclasses.replace(asked, set=",".join(given))
    longest = qwen35.text_config(plan.source.config).get("max_position_embeddings")
    if isinstance(longest, int) and asked.length > longest:
        raise UsageError(
            f"recipe {plan.recipe.name}: samples of {asked.length:,} tokens: {spec} takes at most {longest:,}",
            "make length in the recipe smaller",
        )
    samples = tokens(asked, spec, plan.source.path, plan.vocabulary, data_dir=data_dir)
    named = ",".join(Path(part).name for part in samples.facts["set"].split(","))
    return dataclasses.replace(samples, facts=samples.facts | {"set": named})


def pieces(plan: Plan) -> list[Piece]:
    """Return the matrices that are calibrated: what the recipe quantizes of decoder layers, MTP's apart."""
    return [piece for group in plan.groups.values() for piece in group.pieces if qwen35.part(piece.module) == "text"]


@dataclass(frozen=True, slots=True)
class Take:
    """A matrix whose codes and scales are calibration's; ``place`` is the row of the output with which it begins."""

    source: Checkpoint
    calibrated: "Calibrated"
    group: Group
    piece: Piece
    place: int
    nbytes: int

    @property
    def reads(self) -> str:
        """The tensor of the source that it is held against."""
        return self.piece.tensor

    def __call__(self, writer: ShardWriter) -> list[Measures]:
        """Write them; return how far they are from the source's weight."""
        from mxq.formats.tables import SAFE_BYTE

        packed, scale = self.calibrated.codes(self.piece.module)
        if int(scale.max()) > SAFE_BYTE:
            raise SpoiledError(
                f"calibration gave {self.piece.module} scales under which its values are infinite",
                "look at its weights in the source; nothing was left behind",
            )
        for output, tensor in zip(self.group.outputs, (packed, scale), strict=True):
            writer.write(output.name, self.place * tensor.shape[-1], tensor.contiguous().numpy().data)
        return list(self._measures(packed, scale))

    def _measures(self, packed: "torch.Tensor", scale: "torch.Tensor") -> Iterator[Measures]:
        columns, rows = (
            scales.get(self.piece.module) for scales in (self.calibrated.column_scales, self.calibrated.row_scales)
        )
        step = max(1, _ELEMENTS_AT_ONCE // (packed.shape[-1] * 2))
        for start in range(0, packed.shape[0], step):
            some = slice(start, min(start + step, packed.shape[0]))
            x = self.source.read_rows(self.piece.tensor, self.piece.start + some.start, self.piece.start + some.stop)
            yield measure(x, packed[some], scale[some], columns, None if rows is None else rows[some])


def measure(
    x: "torch.Tensor",
    packed: "torch.Tensor",
    scale: "torch.Tensor",
    columns: "torch.Tensor | None",
    rows: "torch.Tensor | None",
) -> Measures:
    """Return how far codes and scales are from weights [n, K], which were scaled before they were quantized.

    Args:
        x: as the source has it.
        packed: uint8 [n, K/2].
        scale: uint8 [n, K/32].
        columns: float32 [K], by which columns were multiplied.
        rows: float32 [n], by which rows were divided.
    """
    from mxq.formats import scales, tables

    exact = x.double().numpy()
    factor = np.ones((1, 1))
    if columns is not None:
        factor = factor * columns.double().numpy()[None, :]
    if rows is not None:
        factor = factor / rows.double().numpy()[:, None]
    decoded = tables.dequantize(packed, scale).double().numpy()
    limits = np.repeat(scales.values(scale).double().numpy() * _LARGEST_CODE, BLOCK, axis=1)
    zero = (exact.reshape(len(exact), -1, BLOCK) == 0).all(axis=-1)
    used = scale.numpy()[~zero]
    return Measures(
        signal=float(np.square(exact).sum()),
        noise=float(np.square(exact - decoded / factor).sum()),
        saturated=int((np.abs(exact * factor) > limits).sum()),
        zero_blocks=int(zero.sum()),
        lowest=int(used.min(initial=NAN_BYTE)),
        highest=int(used.max(initial=0)),
        bad_blocks=0,
        first_bad_row=None,
    )


@dataclass(frozen=True, slots=True)
class Fold:
    """A tensor that is not quantized and has the values that calibration gave it."""

    values: "torch.Tensor"
    name: str

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.values.nbytes

    @property
    def reads(self) -> str:
        """The tensor of the source whose place it takes."""
        return self.name

    def __call__(self, writer: ShardWriter) -> None:
        """Write it."""
        import torch

        writer.write(self.name, 0, self.values.contiguous().view(-1).view(torch.uint8).numpy().data)


def results(calibrated: "Calibrated") -> dict[str, Any]:
    """Return what the manifest says of a calibration: norms that are not the source's, experts by what they saw."""
    experts: dict[str, dict[int, int]] = {}
    for name, count in calibrated.tokens_seen.items():
        block, _, number = name.rpartition(".")
        experts.setdefault(block, {})[int(number)] = count
    return {
        "folded": sorted(calibrated.kept),
        "rounded_to_nearest": sorted(calibrated.fallback),
        "tokens_per_expert": {block: [seen[i] for i in sorted(seen)] for block, seen in sorted(experts.items())},
    }


def unseen(calibrated: "Calibrated") -> str | None:
    """Return in words how many routed experts no token of the text reached; None if each saw some."""
    count = sum(seen == 0 for seen in calibrated.tokens_seen.values())
    if not count:
        return None
    of = f"{count} of {len(calibrated.tokens_seen)} routed experts saw no token of the calibration text"
    return f"{of}: they are rounded to the nearest, and {MANIFEST} names them"


def write_scales(calibrated: "Calibrated", directory: Path) -> None:
    """Write what columns and rows were scaled by, if any were; no engine reads such a file."""
    arrays = {f"{name}.columns": values.numpy() for name, values in calibrated.column_scales.items()}
    rows = calibrated.row_scales.items()
    arrays |= {f"{name}.rows": values.numpy() for name, values in rows if name in calibrated.modules}
    if arrays:
        content = io.BytesIO()
        np.savez(content, **{name: arrays[name] for name in sorted(arrays)})  # type: ignore[arg-type]
        (directory / SCALES).write_bytes(content.getvalue())
