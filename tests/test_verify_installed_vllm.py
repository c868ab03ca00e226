"""``mxq verify`` where vLLM is installed; here a package whose functions are vLLM's own, copied."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import edit_json
from conversion import convert

from mxq.models import qwen35
from mxq.verify.run import verify

_QUARK = """
from vllm_matching import should_ignore_layer
"""
_COMPRESSED_TENSORS = """
import vllm_matching
def should_ignore_layer(layer_name, ignore=(), fused_mapping={}, use_fnmatch=False):
    return vllm_matching.should_ignore_layer(layer_name, ignore, fused_mapping)
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed vLLM: the directory of its quantization modules."""
    root = tmp_path / "site" / "vllm" / "model_executor" / "layers" / "quantization"
    for name, text in (("quark", _QUARK), ("compressed_tensors", _COMPRESSED_TENSORS)):
        (root / name).mkdir(parents=True)
        (root / name / "utils.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield root
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.mark.parametrize("form", ["quark", "compressed-tensors"])
def test_it_is_asked_for_every_matrix(form: str, moe_source: Path, tmp_path: Path, vllm: Path) -> None:
    out = convert(moe_source, tmp_path / "out", form=form)
    report = verify(out)
    assert not report.problems
    (check,) = [check for check in report.checks if check.name == "vllm"]
    assert check.done
    assert "should_ignore_layer of vLLM" in check.covered

    listing = "exclude" if form == "quark" else "ignore"
    edit_json(out / "config.json", lambda config: config["quantization_config"].update({listing: ["lm_head"]}))
    report = verify(out)
    (check,) = [check for check in report.checks if check.name == "vllm"]
    places = {place for problem in check.problems for place in problem.places}
    assert "mtp.fc" in places
    assert any(".self_attn.q_proj" in place for place in places)
    assert all(problem.what.startswith("what vLLM takes for quantized") for problem in check.problems)


def test_another_versions_rules_decide(dense_source: Path, tmp_path: Path, vllm: Path) -> None:
    out = convert(dense_source, tmp_path / "out")
    (vllm / "quark" / "utils.py").write_text(
        "import fnmatch\ndef should_ignore_layer(name, ignore, fused, *, check_children=False):\n"
        "    return name in ignore\n"  # no patterns, no fused modules
    )
    report = verify(out)
    (problem,) = report.problems
    assert problem.what.startswith("what vLLM takes for quantized, and is not: ")
    merged = {part for parts in qwen35.FUSED.values() for part in parts} - {"in_proj_qkv", "in_proj_z"}
    assert {place.rpartition(".")[2] for place in problem.places} == merged  # GDN's two are quantized


def test_one_that_cannot_be_asked_is_said(dense_source: Path, tmp_path: Path, vllm: Path) -> None:
    out = convert(dense_source, tmp_path / "out")
    (vllm / "quark" / "utils.py").write_text("raise ImportError('libcudart.so.13 is not there')\n")
    report = verify(out)
    (check,) = [check for check in report.checks if check.name == "vllm"]
    assert not check.done
    assert "ImportError: libcudart.so.13 is not there" in check.covered
    assert not report.problems
