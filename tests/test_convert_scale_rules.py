"""Every scale rule goes through a conversion: into the bytes, and into a quantization_config that says so."""

import json
from pathlib import Path
from typing import Any

import mxfp4_oracle as oracle
import numpy as np
import pytest
import yaml
from checkpoints import edit_json, read_all, reseal

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.quantization import quantization_of
from mxq.convert import recipe
from mxq.convert.plan import plan
from mxq.convert.run import run
from mxq.formats.rules import RULES
from mxq.verify.run import verify

DATA = Path(__file__).parent / "data"
WEIGHT = "model.language_model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module", params=RULES)
def rule(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def converted(rule: str, dense_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(rule)
    file = directory / "recipe.yaml"
    file.write_text(yaml.safe_dump({"name": f"mxfp4-{rule}", "extends": "mxfp4", "scale_rule": rule}))
    run(plan(Checkpoint.open(dense_source), recipe.load(str(file))), directory / "out", "source")
    return directory / "out"


def specs(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """How weights and activations are said to be quantized."""
    scheme = json.loads((directory / "config.json").read_text())["quantization_config"]["global_quant_config"]
    return scheme["weight"], scheme["input_tensors"]


def test_weights_are_quantized_by_the_rule(rule: str, converted: Path, dense_source: Path) -> None:
    written = read_all(converted)
    source = read_all(dense_source)[f"{WEIGHT}.weight"].float().numpy()[:8]
    codes, scale = oracle.quantize(source.reshape(8, -1, 32), rule)
    np.testing.assert_array_equal(written[f"{WEIGHT}.weight_scale"].numpy()[:8], scale)
    np.testing.assert_array_equal(oracle.unpack(written[f"{WEIGHT}.weight"].numpy()[:8]), codes.reshape(8, -1))


def test_verify_finds_nothing_and_would_find_another_rule(rule: str, converted: Path, dense_source: Path) -> None:
    assert verify(converted, dense_source, rows=0).problems == []
    config = converted / "config.json"
    before = config.read_text()
    other = "even" if rule != "even" else "ceil"
    edit_json(config, lambda content: specs_of(content).update(observer_cls="", scale_calculation_mode=other))
    reseal(converted)
    found = [problem.what for problem in verify(converted, dense_source, rows=0).problems]
    config.write_text(before)
    reseal(converted)
    assert any("is not what the source's row quantizes to" in what for what in found)


def specs_of(config: dict[str, Any]) -> dict[str, Any]:
    return config["quantization_config"]["global_quant_config"]["weight"]


def test_the_config_says_the_rule_as_quark_would(rule: str, converted: Path) -> None:
    weight, inputs = specs(converted)
    quarks, quarks_inputs = (
        json.loads((DATA / "quark_quantization_config.json").read_text())["global_quant_config"][part]
        for part in ("weight", "input_tensors")
    )
    differs = {key: value for key, value in weight.items() if quarks[key] != value}
    if rule == "even":
        assert differs == {}
    elif rule == "diffs":  # OCP_MXFP4DiffsSpec
        assert differs == {"observer_cls": "PerBlockMXDiffsObserver"}
    else:
        assert differs == {"scale_calculation_mode": rule}
    assert inputs == quarks_inputs  # engines quantize activations by `even`, whatever made the weights
    read = quantization_of(json.loads((converted / "config.json").read_text()), "here")
    assert read is not None
    assert read.rule == rule


def test_manifest_and_card_name_the_rule(rule: str, converted: Path) -> None:
    assert json.loads((converted / "mxq_manifest.json").read_text())["recipe"]["scale_rule"] == rule
    assert f"scale rule `{rule}`" in (converted / "README.md").read_text()


def test_a_config_without_a_rule_means_even() -> None:
    raw = json.loads((DATA / "quark_quantization_config.json").read_text()) | {"exclude": []}
    for mode in ({"scale_calculation_mode": None}, {}):
        weight = {key: value for key, value in specs_of({"quantization_config": raw}).items() if "mode" not in key}
        scheme = raw["global_quant_config"] | {"weight": weight | mode}
        read = quantization_of({"quantization_config": raw | {"global_quant_config": scheme}}, "here")
        assert read is not None
        assert read.rule == "even"
