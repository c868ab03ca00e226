"""Errors of a conversion, from what a run keeps of them; nothing else is taken for them."""

import json
from pathlib import Path

import pytest
from scripted import ScriptedEngine, decode, small_plan

from mxq.analysis.layers import by_layer, matrix_errors
from mxq.errors import MxqError
from mxq.evaluate import Run, read_run, run
from mxq.evaluate.kept import layers_of


def matrix(module: str, error: float | None, **other: object) -> dict[str, object]:
    facts = {"saturated": 0.001, "zero_blocks": 2, "blocks": 64, "scale_exponents": [-9, -5], "shape": [64, 32]}
    sqnr = None if error is None else 18.0
    return {"module": module, "tensor": module, "sqnr_db": sqnr, "relative_error": error, **facts} | other


@pytest.fixture
def recorded(tmp_path: Path) -> Run:
    run(small_plan(), tmp_path / "run", ScriptedEngine(), decode)
    return read_run(tmp_path / "run")


def keep(recorded: Run, *lines: str) -> None:
    path = layers_of(recorded.path, "mxfp4")
    path.parent.mkdir()
    path.write_text("".join(f"{line}\n" for line in lines))


def test_they_are_grouped_by_kind_and_layer(recorded: Run) -> None:
    prefix = "model.language_model.layers"
    keep(
        recorded,
        json.dumps(matrix(f"{prefix}.1.mlp.experts.0.down_proj", 0.11)),
        json.dumps(matrix(f"{prefix}.1.mlp.experts.12.down_proj", 0.13)),
        json.dumps(matrix(f"{prefix}.1.mlp.experts.3.down_proj", 0.12)),
        json.dumps(matrix(f"{prefix}.0.mlp.experts.0.down_proj", 0.10)),
        json.dumps(matrix(f"{prefix}.0.self_attn.q_proj", 0.09)),
        json.dumps(matrix(f"{prefix}.0.self_attn.k_proj", None)),  # all zeros
        json.dumps(matrix("lm_head", 0.2)),
    )
    errors = matrix_errors(recorded)
    assert [error.layer for error in errors] == [1, 1, 1, 0, 0, None]
    assert errors[0].zero_blocks == 2 / 64
    found = by_layer(errors)
    assert list(found) == ["mlp.experts.down_proj", "self_attn.q_proj"]
    assert [(one.layer, one.matrices) for one in found["mlp.experts.down_proj"]] == [(0, 1), (1, 3)]
    layer = found["mlp.experts.down_proj"][1]
    assert (layer.lowest, layer.median, layer.highest) == (0.11, 0.12, 0.13)


def test_a_run_may_keep_none(recorded: Run) -> None:
    assert matrix_errors(recorded) == ()


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", "7", '{"module": "a"}', "[" * 100_000),
        json.dumps(matrix("a", 0.1, blocks=0)),
        json.dumps(matrix("a", 0.1) | {"module": 5}),
        json.dumps(matrix("a", 0.1, saturated="<script>")),
        json.dumps(matrix("a", float("nan"))),
    ],
)
def test_a_line_that_mxq_did_not_write_is_named(recorded: Run, line: str) -> None:
    keep(recorded, json.dumps(matrix("a", 0.1)), line)
    with pytest.raises(MxqError, match=r"mxfp4-layers.jsonl, line 2: not the error of a matrix") as caught:
        matrix_errors(recorded)
    assert len(caught.value.message) < 500
