"""Imports go one way, and `mxq --help` loads nothing heavy."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import block_fp8
import pytest

import mxq
from mxq.cli import _VERBS

PACKAGE = Path(mxq.__file__).parent

# Lowest first. An area may import lower layers, and others of its own layer as long as no cycle arises.
LAYERS = [
    {"errors", "files", "progress"},
    {"formats", "models", "testbed"},
    {"checkpoint", "decode", "engines", "layouts", "stats", "workloads"},
    {"calibrate", "verify"},
    {"convert", "evaluate", "hardware"},
    {"analysis", "explain", "quality"},
    {"report"},
    {"cli"},
    {"__main__"},
]
STRANGERS = {frozenset({"convert", "evaluate"})}  # they meet in files only
HEAVY = {"huggingface_hub", "jinja2", "llvmlite", "matplotlib", "numpy", "rich", "safetensors", "scipy", "torch"}
HEAVY |= {"transformers"}


def imported_modules(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno}: relative import"
            # `from mxq import files` names an area only after the import keyword.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def area_imports(package: Path) -> dict[str, set[str]]:
    """Which areas (`mxq.AREA`) each area imports, anywhere in its code."""
    found: dict[str, set[str]] = {}
    for source in package.rglob("*.py"):
        area = source.relative_to(package).parts[0].removesuffix(".py")
        targets = found.setdefault(area, set())
        for module in imported_modules(source):
            parts = module.split(".")
            if parts[0] == "mxq" and len(parts) > 1 and parts[1] not in {"__version__", area}:
                targets.add(parts[1])
    found.pop("__init__", None)
    return found


def violations(imports: dict[str, set[str]]) -> list[str]:
    level = {area: depth for depth, layer in enumerate(LAYERS) for area in layer}
    wrong = [f"{area} has no layer" for area in imports if area not in level]
    for area, targets in imports.items():
        for target in targets & level.keys():
            if area in level and level[target] > level[area]:
                wrong.append(f"{area} imports {target}")
            if frozenset({area, target}) in STRANGERS:
                wrong.append(f"{area} imports {target}")
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        wrong.append("cycle: " + " -> ".join(error.args[1]))
    return wrong


def test_imports_go_one_way() -> None:
    imports = area_imports(PACKAGE)
    assert {"cli", "convert", "evaluate", "decode"} <= imports.keys()
    assert violations(imports) == []
    assert not imports["errors"] | imports["files"] | imports["progress"]


@pytest.mark.parametrize(
    ("area", "line", "complaint"),
    [
        ("formats", "from mxq.convert.run import convert", "formats imports convert"),
        ("convert", "import mxq.evaluate", "convert imports evaluate"),
        ("evaluate", "def f():\n    from mxq import convert", "evaluate imports convert"),
        ("checkpoint", "from mxq import decode", "cycle: "),
        ("novel", "import json", "novel has no layer"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, area: str, line: str, complaint: str) -> None:
    for name, text in {"decode": "from mxq.checkpoint import resolve", area: line}.items():
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "module.py").write_text(text)
    assert any(found.startswith(complaint) for found in violations(area_imports(tmp_path)))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([verb, "--help"] for verb in _VERBS)], ids=" ".join)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from mxq.cli import main; code = main(sys.argv[1:], standalone_mode=False);"
        "print('loaded:', *sorted({name.partition('.')[0] for name in sys.modules})); sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.splitlines()[-1].split())
    assert "click" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize(("verb", "fp8"), [("plan", False), ("quantize", False), ("quantize", True)])
def test_conversions_do_without_torch(verb: str, fp8: bool, dense_source: Path, tmp_path: Path) -> None:
    """It takes longer to import than the largest model takes to plan, or a gigabyte to convert."""
    source = block_fp8.write(dense_source, tmp_path / "fp8") if fp8 else dense_source
    code = (
        "import sys; from mxq.cli import main; main(sys.argv[1:], standalone_mode=False);"
        "print('loaded:', *sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    out = [str(tmp_path / "out")] if verb == "quantize" else []
    command = [sys.executable, "-c", code, verb, str(source), *out]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1].split()
    assert loaded[0] == "loaded:"
    assert not {"torch", "transformers"} & set(loaded)
