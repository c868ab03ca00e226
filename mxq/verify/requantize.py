"""Codes and scales against the source: are they what its weights round to, by which rule, and how far off are they?

mxq's own checkpoints must be what their rule makes of the source, bit for bit. Other tools' rules are mostly unknown,
so three questions are asked of every sampled block, with -0 taken for 0 and any scale for a block of zeros:

* Is it rounded: are its codes those of the source under the scale that is stored, and is that scale one that a rule
  could have chosen? GPTQ, AutoRound and the like choose codes otherwise; plain tools round every block, so that among
  nine that are rounded a tenth that is not is damage.
* Which of :data:`mxq.formats.rules.RULES` reproduces scale and codes?
* What is the signal to noise ratio (SQNR) of the matrix's sample? Gaussian weights have 19.0 dB with ``even`` and
  17.3 dB with ``ceil``. :data:`FLOOR_DB` is 10 dB: of what goes wrong with layouts the mildest, scales of half their
  size, cannot have more than 6.02 dB (every value halved), swapped halves or matrices have -3 dB; and no rounded block
  has less than 8.1 dB with ``even``: at worst 31 elements are a quarter of the scale and vanish beside one of 3.5.

Of a calibrated recipe of mxq's, scales and codes must be what the algorithm can have made
(:mod:`mxq.verify.calibrated`). GPTQ moves codes by any number of steps where the text's activations have no say: there
scales are compared byte for byte, and codes by SQNR alone, to :data:`TUNED_FLOOR_DB`. No codes leave 0 dB, those of
other rows about -3 dB.

Scales of other blocks, which are often the right ones by chance, leave more than that. They are told by codes that are
two steps and more from where the source is under that scale, in a quarter of a block: tuning moves a code by one.
"""

import hashlib
import math
import random
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from mxq.checkpoint import Checkpoint, fp8
from mxq.errors import MxqError
from mxq.formats import elements, mxfp4
from mxq.formats.rules import RULES
from mxq.progress import progress
from mxq.verify.calibrated import Calibrated
from mxq.verify.findings import Problem, about
from mxq.verify.misread import diagnose
from mxq.verify.structure import Module, modules

FLOOR_DB = 10.0
"""Lowest SQNR of a matrix that was quantized to MXFP4 and is read right."""

TUNED_FLOOR_DB = 3.0
"""Lowest SQNR of a matrix whose codes GPTQ chose; 11 dB has been seen, where there was little text."""

_APART = 0.01  # share of blocks whose codes and scale do not belong together
_PLAIN = 0.9  # share of rounded blocks from which a tool is taken to round
_ROWS_AT_ONCE = 1024
_RULE_ROWS = 64  # of a matrix's sample: to find the rule
_DIAGNOSED = 16  # matrices: most defects are the same all over


@dataclass
class _Sample:
    """What the sampled rows of one matrix show."""

    rows: int = 0
    blocks: int = 0
    unrounded: int = 0
    apart: int = 0
    first_row: int | None = None  # whose bytes the stated rule does not make; without one, that is not rounded
    not_finite: bool = False
    signal: float = 0.0
    noise: float = 0.0
    reproduced: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RULES, 0))
    compared: int = 0

    @property
    def sqnr_db(self) -> float:
        """Of the sample; infinite without noise, minus infinity where zeros became something."""
        if self.noise == 0:
            return math.inf
        sound = self.signal > 0 and math.isfinite(self.noise)
        return 10 * math.log10(self.signal / self.noise) if sound else -math.inf


def requantize(
    checkpoint: Checkpoint,
    source: Checkpoint,
    rule: str | None,
    *,
    strict: bool,
    rows: int,
    seed: int,
    calibrated: Calibrated | None = None,
) -> tuple[str, list[Problem]]:
    """Hold codes and scales against the source; return what was covered, and what is wrong.

    Args:
        checkpoint: packed weights by Quark's names.
        source: what it was made from; every packed module is there, in its shape.
        rule: the scale rule that the config states.
        strict: mxq made it: every byte must be the rule's.
        rows: consecutive rows of every matrix to look at; 0 for all.
        seed: decides which.
        calibrated: what was done to weights before they were rounded, or instead; what is said of them is then of the
            weights scaled so.
    """
    ours, theirs = modules(checkpoint), modules(source)
    packed = {name: module for name, module in ours.items() if module.scale}
    samples: dict[str, _Sample] = {}
    with progress("quantizing again", len(packed), "matrices") as advance:
        for name, module in packed.items():
            span = _span(name, module.piece.stop - module.piece.start, rows, seed)
            try:
                samples[name] = _look(checkpoint, source, name, (module, theirs[name]), span, rule, strict, calibrated)
            except (MxqError, ValueError, TypeError) as error:
                if source.elsewhere and isinstance(error, MxqError):  # of the network, as a rule
                    raise
                return "codes", [Problem(f"{name} cannot be quantized again: {error}")]
            advance(1)
    low = [
        name
        for name, sample in samples.items()
        if not sample.not_finite and _is_low(sample, tuned=calibrated is not None and calibrated.is_tuned(name))
    ]
    problems = about(
        [name for name, sample in samples.items() if sample.not_finite],
        "{} holds NaN or infinity in the source, which MXFP4 cannot: here they became numbers",
        "the source is damaged: get it again, and convert it again",
    )
    problems += _explained(checkpoint, source, ours, theirs, low, samples)
    healthy = {name: sample for name, sample in samples.items() if name not in set(low) and not sample.not_finite}
    blocks = sum(sample.blocks for sample in healthy.values())
    rounded = blocks - sum(sample.unrounded for sample in healthy.values())
    if strict or (blocks and rounded >= _PLAIN * blocks):
        wrong = [name for name, sample in healthy.items() if sample.first_row is not None]
        tuned = [name for name in wrong if calibrated is not None and calibrated.is_tuned(name)]
        problems += about(
            [f"{name} row {samples[name].first_row}" for name in wrong if name not in tuned],
            "{} is not what the source's row quantizes to",
        )
        problems += about(
            [f"{name} row {samples[name].first_row}" for name in tuned],
            "{} has other scales than the source's row gets",
        )
    done = sum(sample.rows for sample in samples.values())
    covered = f"{done} {'all' if rows == 0 else 'sampled'} rows of {len(packed)} matrices quantized again"
    if not strict and blocks:
        covered += f"; {_rule_found(list(healthy.values()), rounded / blocks, rule)}"
    if healthy:
        worst = min(healthy, key=lambda name: healthy[name].sqnr_db)
        of = "" if rows == 0 else " of these rows"
        covered += f"; SQNR{of} from {healthy[worst].sqnr_db:.1f} dB ({worst})"
    return covered, problems


def _is_low(sample: _Sample, *, tuned: bool) -> bool:
    if tuned:
        return sample.sqnr_db < TUNED_FLOOR_DB
    return sample.sqnr_db < FLOOR_DB or sample.apart > _APART * sample.blocks


def _span(name: str, count: int, rows: int, seed: int) -> tuple[int, int]:
    if rows == 0 or rows >= count:
        return 0, count
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    start = random.Random(digest).randrange(count - rows + 1)
    return start, start + rows


def _look(
    checkpoint: Checkpoint,
    source: Checkpoint,
    name: str,
    both: tuple[Module, Module],
    span: tuple[int, int],
    rule: str | None,
    strict: bool,
    calibrated: Calibrated | None,
) -> _Sample:
    ours, theirs = both
    assert ours.scale is not None
    sample = _Sample(rows=span[1] - span[0])
    for start in range(*span, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, span[1])
        x = source.read_rows(theirs.piece.tensor, theirs.piece.start + start, theirs.piece.start + stop)
        first, last = ours.piece.start + start, ours.piece.start + stop
        packed, scale = (
            checkpoint.read_rows(ours.piece.tensor, first, last),
            checkpoint.read_rows(ours.scale, first, last),
        )
        if not torch.isfinite(x).all():
            sample.not_finite = True
            continue
        if calibrated is not None:
            x = calibrated.scaled(name, x, start)
        sample.signal += _energy(x.float())
        sample.noise += _energy(x.float() - mxfp4.dequantize(packed, scale, torch.float32))
        rounded, apart = _rounded(x, packed, scale)
        sources = [x]
        if not strict and fp8.rounded(source) is not source:
            sources.append(x.bfloat16())  # which some tools make of FP8 first
            rounded |= _rounded(sources[1], packed, scale)[0]
        sample.unrounded += int((~rounded).sum())
        sample.apart += int(apart.sum())
        if strict:
            assert rule is not None
            codes, bytes_ = mxfp4.quantize(x, rule)
            wrong = (codes != packed).any(dim=-1) | (bytes_ != scale).any(dim=-1)
            if calibrated is not None and calibrated.is_tuned(name):
                wrong = (bytes_ != scale).any(dim=-1) & (not calibrated.moves_scales)
            elif calibrated is not None and calibrated.is_clipped(name):
                wrong &= ~_clipped(x, packed, scale, bytes_).all(dim=-1)
        else:
            wrong = ~rounded.all(dim=-1)
            _try_rules(sample, sources, packed, scale)
        sample.blocks += scale.numel()
        if sample.first_row is None and wrong.any():
            sample.first_row = start + int(wrong.nonzero()[0])
    return sample


def _blocks(packed: torch.Tensor) -> torch.Tensor:
    """Return codes [n, K/32, 32] of packed [n, K/2], -0 as 0."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).view(packed.shape[0], -1, mxfp4.BLOCK)
    return torch.where(codes == 8, 0, codes)


def _rounded(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare blocks [n, K/32] with ``x`` under the scales that are stored.

    Returns:
        whether the codes are those of ``x`` and the scale is one that a rule could have chosen; and whether a quarter
        of the codes is two steps and more away.
    """
    y = x.float().view(*scale.shape, mxfp4.BLOCK).double() / mxfp4.scale_values(scale).double().unsqueeze(-1)
    codes, stored = elements.encode(y.clamp(-8, 8).float(), signed_zero=False).to(torch.uint8), _blocks(packed)
    largest = y.abs().amax(dim=-1)
    # Rules put a block's largest element between 2 and 8 of its scale, those that search for one further up to 16.
    chosen = (largest == 0) | (largest > 1) & (largest <= 16) | (scale <= 1)
    away = (_step(codes) - _step(stored)).abs() >= 2
    return (codes == stored).all(dim=-1) & chosen, away.sum(dim=-1) >= mxfp4.BLOCK // 4


def _clipped(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Tell of blocks [n, K/32] whether they are what ``even`` makes of ``x`` clipped to some share of the largest.

    Under the scale that ``even`` gives a block, the largest element gets code 6 or 7 (4.0 or 6.0), and so does all that
    was beyond it. ``largest`` is the scale of the block as it was, which half of the largest element makes one smaller.
    """
    y = x.float().view(*scale.shape, mxfp4.BLOCK) / mxfp4.scale_values(scale).unsqueeze(-1)
    codes, stored = elements.encode(y, signed_zero=False).to(torch.uint8), _blocks(packed)
    most = (stored & 7).amax(dim=-1, keepdim=True)
    same = ((codes & 7).minimum(most) | codes & 8) == stored
    below = largest.int() - scale.int()
    reached = (most.squeeze(-1) >= 6) | (codes == 0).all(dim=-1) | (scale <= 1)
    return same.all(dim=-1) & reached & (below >= 0) & (below <= 1)


def _step(codes: torch.Tensor) -> torch.Tensor:
    """Return the places of codes in the order of their values, that of 0 being 0."""
    return torch.where(codes > 7, 8 - codes.int(), codes.int())


def _try_rules(sample: _Sample, sources: list[torch.Tensor], packed: torch.Tensor, scale: torch.Tensor) -> None:
    """Count the blocks that each rule makes as they are stored, of one of ``sources``."""
    left = _RULE_ROWS - sample.compared // max(1, scale.shape[-1])
    if left <= 0:
        return
    packed, scale = packed[:left], scale[:left]
    codes = _blocks(packed)
    for rule in RULES:
        same = torch.zeros_like(scale, dtype=torch.bool)
        for x in sources:
            made, bytes_ = mxfp4.quantize(x[:left], rule)
            again = _blocks(made)
            zero = (again == 0).all(dim=-1)
            same |= (again == codes).all(dim=-1) & ((bytes_ == scale) | zero)
        sample.reproduced[rule] += int(same.sum())
    sample.compared += scale.numel()


def _rule_found(samples: list[_Sample], rounded: float, stated: str | None) -> str:
    total = sum(sample.compared for sample in samples)
    counts = {rule: sum(sample.reproduced[rule] for sample in samples) for rule in RULES}
    most = max(counts.values())
    best = " or ".join(rule for rule in counts if counts[rule] == most)
    share = most / total if total else 0.0
    if rounded < _PLAIN:
        return f"codes are tuned, not rounded (best rule: {best}, {share:.1%} of blocks)"
    said = f", though the config says {stated}" if stated is not None and most > counts.get(stated, 0) else ""
    return f"the scale rule {best} makes {share:.2%} of the blocks{said}"


def _explained(
    checkpoint: Checkpoint,
    source: Checkpoint,
    ours: dict[str, Module],
    theirs: dict[str, Module],
    low: list[str],
    samples: dict[str, _Sample],
) -> list[Problem]:
    """Name what is wrong with matrices of too low an SQNR, as far as something that explains it can be found."""
    found: dict[str, list[str]] = defaultdict(list)
    for number, name in enumerate(low):
        cause = diagnose(checkpoint, source, ours, theirs, name, FLOOR_DB) if number < _DIAGNOSED else None
        found[cause or ""].append(name)
    if len(found) == 2 and "" in found and len(low) > _DIAGNOSED:  # all that were looked into have the same
        (cause,) = (key for key in found if key)
        found = defaultdict(list, {cause: low})
    return [
        problem
        for cause, names in found.items()
        for problem in about(
            [f"{name} ({samples[name].sqnr_db:.1f} dB)" for name in names],
            f"{{}}: {cause}" if cause else "{} is not what the source's weight is in MXFP4, nor near it",
            "convert it again, with a tool that writes it as it comes" if cause else "convert it again",
        )
    ]


def _energy(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
