"""Which rule of a recipe decides over each tensor, and every objection to what the rules decide."""

from collections import defaultdict
from collections.abc import Iterable

from mxq.checkpoint import Checkpoint, TensorInfo
from mxq.checkpoint.beside import DEQUANTIZED
from mxq.convert.recipe import Recipe, Rule
from mxq.errors import UsageError
from mxq.formats.rules import BLOCK
from mxq.models import qwen35
from mxq.models.qwen35 import Piece
from mxq.verify.complete import lacks_mtp

_SOURCE_DTYPES = ("BF16", "F16", "F32")
_AITER_COLUMNS, _AITER_ROWS = 256, 32


def rules(source: Checkpoint, recipe: Recipe, family: str, held: dict[str, list[Piece]]) -> dict[str, Rule]:
    """Return the rule that decides over each tensor; biases of quantized weights are kept.

    Args:
        source: the checkpoint.
        recipe: its rules for ``family`` are applied.
        family: see :data:`mxq.models.qwen35.FAMILIES`.
        held: tensor -> the modules it holds, from :func:`mxq.models.qwen35.pieces`.

    Raises:
        UsageError: the recipe does not fit the checkpoint, or asks for what engines or the format cannot do.
    """
    used: set[Rule] = set()
    decided: dict[str, Rule] = {}
    for name, tensor in source.tensors.items():
        found = {_rule(source, recipe, family, module, used) for module in _modules(name, held)}
        if len({rule.quantizes for rule in found}) > 1:
            raise UsageError(f"recipe {recipe.name} quantizes only some of the experts in {name}")
        rule = min(found, key=lambda rule: rule.pattern)
        if rule.quantizes and name.endswith(".bias"):
            rule = Rule(rule.pattern, "keep")
        elif rule.quantizes:
            _check_quantizable(tensor, rule, held[name])
        decided[name] = rule
    for rule in recipe.rules[family]:
        if rule not in used and rule.section != "keep_if_present":
            raise UsageError(
                f"recipe {recipe.name}: {rule.pattern!r} under {rule.section} matches nothing in {source.path}",
                "it has no MTP head: take a recipe that leaves MTP alone, such as mxfp4"
                if qwen35.part(rule.pattern) == "mtp" and not any(qwen35.part(name) == "mtp" for name in decided)
                else "correct or remove it; what a checkpoint may lack goes under keep_if_present",
            )
    _check_together({piece.module for name in decided if decided[name].quantizes for piece in held[name]}, held)
    return decided


def _modules(name: str, held: dict[str, list[Piece]]) -> Iterable[str]:
    return [piece.module for piece in held[name]] or [qwen35.base_name(name)]


def _rule(source: Checkpoint, recipe: Recipe, family: str, module: str, used: set[Rule]) -> Rule:
    found = [rule for rule in recipe.rules[family] if rule.matches(module)]
    if not found:
        raise UsageError(
            f"recipe {recipe.name} has no rule for {module} of {source.path}", "add it under quantize or keep"
        )
    used.update(found)
    excepted = next((rule for rule in found if rule.section == "except"), None)
    if excepted is not None:
        return excepted
    if len({rule.quantizes for rule in found}) > 1:
        kept = next(rule for rule in found if not rule.quantizes)
        raise UsageError(
            f"recipe {recipe.name} quantizes {module} by {found[0].pattern!r} and keeps it by {kept.pattern!r}",
            "make one of the patterns narrower",
        )
    return found[0]


def _check_quantizable(tensor: TensorInfo, rule: Rule, pieces: list[Piece]) -> None:
    role = qwen35.role(tensor.name)
    if role not in qwen35.QUANTIZABLE or not pieces:
        wrong = (f"is of a kind that engines do not load as MXFP4: {role}", "put it under keep")
    elif tensor.dtype not in _SOURCE_DTYPES:
        wrong = ("is not in bf16, fp16 or fp32", "give an unquantized checkpoint")
    elif tensor.shape[-1] % BLOCK:
        wrong = (f"has {tensor.shape[-1]} columns, not a multiple of {BLOCK}", "put it under keep")
    else:
        return
    what = f"{tensor.name} {tensor.dtype} {list(tensor.shape)} (by the rule {rule.pattern!r})"
    raise UsageError(f"{what} {wrong[0]}", wrong[1])


def _check_together(chosen: set[str], held: dict[str, list[Piece]]) -> None:
    """Make sure that what engines merge is quantized as a whole or not at all."""
    together: dict[str, list[str]] = defaultdict(list)
    for pieces in held.values():
        for piece in pieces:
            whole = qwen35.experts_module(piece.module) or qwen35.fused_module(piece.module)
            if whole is not None:
                together[whole].append(piece.module)
    for whole, modules in together.items():
        kept = next((module for module in modules if module not in chosen), None)
        taken = next((module for module in modules if module in chosen), None)
        if kept is not None and taken is not None:
            raise UsageError(
                f"{taken} would be quantized but {kept} not, and engines load both as one ({whole})",
                "give both the same rule",
            )


def lints(source: Checkpoint, quantized: list[Piece]) -> list[str]:
    """Return a line for each shape that AITER's kernels do not like, and one if the source is not what it seems."""
    said = []
    if (source.path / DEQUANTIZED).is_file():
        said.append("mxq dequantize made this from MXFP4 weights: their error is in it, and will be measured as none")
    if lacks_mtp(source):
        said.append("config.json says that there is an MTP head, and there is none: MTP cannot draft for the result")
    narrow: dict[tuple[str, int, int], str] = {}
    for piece in quantized:
        rows, columns = piece.stop - piece.start, source.tensors[piece.tensor].shape[-1]
        if rows % _AITER_ROWS or columns % _AITER_COLUMNS:
            narrow.setdefault((qwen35.role(piece.tensor), rows, columns), piece.module)
    return said + [
        f"{module} [{rows}, {columns}]: AITER wants rows in multiples of {_AITER_ROWS} and columns in multiples of "
        f"{_AITER_COLUMNS}, after division by the tensor parallel size; others are padded or refused"
        for (_, rows, columns), module in narrow.items()
    ]
