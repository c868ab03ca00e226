"""Which kernels would compute what, what padding costs, and what is known to fail: ``mxq plan --tp`` and ``--ep``."""

import json
import shutil
from pathlib import Path
from typing import Any

import architectures
import pytest
from checkpoints import edit_json
from click.testing import CliRunner, Result

from mxq.checkpoint import open_headers
from mxq.cli import main
from mxq.cli.placement import as_dict, show_placed
from mxq.convert import recipe
from mxq.convert.placement import Placed, place
from mxq.convert.plan import plan
from mxq.layouts.paths import (
    EXPERTS_FACTS,
    LINEAR_FACTS,
    VERDICTS,
    Deployment,
    ExpertsCase,
    LinearCase,
    facts,
    worst,
)
from mxq.layouts.tuned import TUNED

# Worked out by hand from vLLM's, SGLang's and AITER's source: TP, I of a GPU, vLLM's I, SGLang's I, whose operands
# have tuned rows.
FEASIBILITY = {
    "Qwen3.5-35B-A3B": [
        (1, 512, 512, 512, "no"),
        (2, 256, 256, 256, "no"),
        (4, 128, 128, 256, "no"),
        (8, 64, 128, 256, "no"),
    ],
    "Qwen3.5-122B-A10B": [
        (1, 1024, 1024, 1024, "no"),
        (2, 512, 512, 512, "no"),
        (4, 256, 256, 256, "yes"),
        (8, 128, 128, 256, "SGLang"),
    ],
    "Qwen3.5-397B-A17B": [
        (1, 1024, 1024, 1024, "no"),
        (2, 512, 512, 512, "yes"),
        (4, 256, 256, 256, "yes"),
        (8, 128, 128, 256, "SGLang"),
    ],
}
PAGE = Path(__file__).resolve().parent.parent / "benchmarks" / "PATHS.md"
FILES = {"Qwen3.5-122B-A10B": "minimax_m25_fp4_tuned_fmoe.csv", "Qwen3.5-397B-A17B": "qwen3_5_397b_fp4_tuned_fmoe.csv"}


def mxq_plan(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["plan", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def placement(*arguments: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(mxq_plan(*arguments, "--json").stdout)["placement"]["combinations"]
    return found


def ids(case: ExpertsCase) -> set[str]:
    return {fact.id for fact in facts(case, EXPERTS_FACTS)}


@pytest.fixture(scope="module", params=["Qwen3.5-35B-A3B", *(pytest.param(n, marks=pytest.mark.slow) for n in FILES)])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Placed]]:
    """A published model, at TP 1, 2, 4 and 8 without EP and with EP 8."""
    path = architectures.write(tmp_path_factory.mktemp("published") / request.param, request.param)
    return request.param, place(plan(open_headers(str(path)), recipe.load("mxfp4")), (1, 2, 4, 8), (1, 8))


def test_the_table_of_published_models_comes_out(published: tuple[str, list[Placed]]) -> None:
    name = published[0]
    found = as_dict(published[1])["combinations"]
    text = architectures.config(name)["text_config"]
    assert [(one["tp"], one["ep"], one["dp"]) for one in found[4:]] == [(1, 8, 8), (2, 8, 4), (4, 8, 2), (8, 8, 1)]
    for one, (tp, own, vllm, sglang, tuned) in zip(found, FEASIBILITY[name], strict=False):
        (experts,) = (kind for kind in one["experts"] if kind["packed"])
        assert (one["tp"], one["gpus"], one["verdict"]) == (tp, tp, "ok")
        assert experts["layers"] == text["num_hidden_layers"]
        assert experts["gpu"] == {"experts": text["num_experts"], "intermediate": own}
        assert experts["padded"] == {
            "vllm": {"hidden": text["hidden_size"], "intermediate": vllm},
            "sglang": {"intermediate": sglang},
        }
        rows = {engine: row and row["file"] for engine, row in experts["tuned"].items()}
        assert rows == {
            "vllm": FILES[name] if tuned == "yes" else None,
            "sglang": FILES[name] if tuned != "no" else None,
        }
        assert experts["computed_by"] == ("tuned rows" if tuned == "yes" else "FlyDSL")
        # Codes and scales of gate, up and down; the scales of a down of 128 columns are 8 wide instead of 4.
        e, h = text["num_experts"], text["hidden_size"]
        before, after = (3 * e * i * h * 17 // 32 * experts["layers"] for i in (own, vllm))
        after += e * h * 4 * experts["layers"] * (vllm == 128)
        assert experts["bytes"] == {"before": before, "after": after}
        assert {fact["id"] for fact in experts["facts"]} == {
            *(("stage-2",) if vllm == 128 else ()),
            *(("padded-i",) if vllm != own else ()),
        }
    # The MTP head's experts are stored one by one, and not packed.
    sizes = {"experts": e, "hidden": h, "intermediate": text["moe_intermediate_size"]}
    assert all(kind["model"] == sizes for kind in found[0]["experts"])
    assert {kind["name"]: (kind["layers"], kind["packed"]) for kind in found[0]["experts"]} == {
        "mlp.experts": (text["num_hidden_layers"], True),
        "mtp.mlp.experts": (1, False),
    }
    for one in found[4:]:  # experts are whole, and the key of no row fits
        (experts,) = (kind for kind in one["experts"] if kind["packed"])
        assert experts["gpu"] == {"experts": text["num_experts"] // 8, "intermediate": text["moe_intermediate_size"]}
        assert experts["padded"]["vllm"]["intermediate"] == text["moe_intermediate_size"]
        assert experts["tuned"] == {"vllm": None, "sglang": None}
        assert (one["gpus"], experts["computed_by"], experts["facts"]) == (8, "FlyDSL", [])


@pytest.mark.parametrize("name", FEASIBILITY)
def test_the_table_follows_from_sizes_alone(name: str) -> None:
    text = architectures.config(name)["text_config"]
    e, h, i, k = (text[x] for x in ("num_experts", "hidden_size", "moe_intermediate_size", "num_experts_per_tok"))
    for tp, own, vllm, sglang, tuned in FEASIBILITY[name]:
        case = ExpertsCase(e, h, i, k, Deployment(tp))
        assert (case.own_intermediate, case.padded, case.sglang_intermediate) == (own, (h, vllm), sglang)
        assert [case.row(vllm) is not None, case.row(sglang) is not None] == [tuned == "yes", tuned != "no"]


def test_the_dense_model_at_real_dimensions(tmp_path: Path) -> None:
    path = architectures.write(tmp_path / "27b", "Qwen3.5-27B")
    found = placement(path, "--tp", "1,2,4,8,16")
    packed = {kind["name"]: kind for kind in found[0]["linear"] if kind["packed"]}
    assert {name: (kind["layers"], kind["gpu"]["n"], kind["gpu"]["k"]) for name, kind in packed.items()} == {
        "self_attn.qkv_proj": (16, 2 * 24 * 256 + 2 * 4 * 256, 5120),
        "self_attn.o_proj": (16, 5120, 24 * 256),
        "linear_attn.in_proj_qkvz": (48, 2 * 16 * 128 + 2 * 48 * 128, 5120),
        "linear_attn.out_proj": (48, 5120, 48 * 128),
        "mlp.gate_up_proj": (64, 2 * 17408, 5120),
        "mlp.down_proj": (64, 5120, 17408),
    }
    for one in found[:4]:
        assert one["verdict"] == "ok"
        for kind in one["linear"]:
            # 17408 / 8 is 8.5 times 256; and of the gates of DeltaNet, which are not packed, rows are few.
            name = kind["name"].removeprefix("mtp.")
            narrow = (name, one["tp"]) == ("mlp.down_proj", 8)
            few = name == "linear_attn.in_proj_ba" and one["tp"] > 1
            assert kind["assembly"] != (narrow or few), kind["name"]
            by = None if not kind["packed"] else "Triton" if narrow else "ASM or Triton"
            assert kind["computed_by"] == by
            assert {fact["id"] for fact in kind["facts"]} == ({"no-assembly"} if narrow and kind["packed"] else set())
    (qkv,) = (kind for kind in found[3]["linear"] if kind["name"] == "self_attn.qkv_proj")
    assert qkv["gpu"] == {"n": 3 * 512 + 2 * 256, "k": 5120, "repeated_rows": 2 * 4 * 256}  # 4 heads for 8 GPUs
    assert sum(kind["gpu"]["repeated_rows"] for kind in found[3]["linear"]) == 2 * 2 * 4 * 256  # and of the MTP head
    mxfp4, bf16 = (2 * 4 * 256 * 5120 // 8 * size for size in (16 * 17 / 32, 2))
    assert [one["repeated_bytes"] for one in found] == [0, 0, 0, mxfp4 + bf16, 0]
    assert found[4]["verdict"] == "refused"
    assert "TP 16 does not divide 24 attention heads" in found[4]["facts"][0]["text"]
    assert all(kind["gpu"] is None for kind in found[4]["linear"])


def test_it_fits_on_a_terminal_of_80_columns_and_is_what_the_page_shows(
    published: tuple[str, list[Placed]], moe_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_placed(published[1])
    shown = [capsys.readouterr().out]
    printed = "\n".join(line.rstrip() for line in shown[0].strip().splitlines()[2:])
    assert printed in PAGE.read_text(encoding="utf-8")
    for name in ("mxfp4-moe-full", "mxfp4-weight-only"):
        full = mxq_plan(moe_source, "--tp", "1,2,4,8", "--ep", "1,4", "--recipe", name).stdout
        shown.append(full[full.index("MI355X") :])
    for text in shown:
        assert max(len(line.rstrip()) for line in text.splitlines()) <= 80, text


def test_notes_are_said_once_and_refusals_say_why(moe_source: Path) -> None:
    shown = mxq_plan(moe_source, "--tp", "1,2,3,4", "--ep", "1,2").stdout
    lines = [line.split() for line in shown.splitlines() if line.strip().startswith(("1 ", "2 ", "3 ", "4 "))]
    # TP, EP, DP, E, I, padded, padding, SGLang, tuned, by
    assert [line[:6] for line in lines if "-" not in line] == [
        ["1", "1", "1", "4", "256", "256"],
        ["2", "1", "1", "4", "128", "128"],
        ["1", "2", "2", "2", "256", "256"],
        ["2", "2", "1", "2", "256", "256"],
    ]
    assert sum(line.startswith("(a) ") for line in shown.splitlines()) == 1
    assert "TP 3 does not divide" in shown
    assert "EP 2 is no multiple of TP 4" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--tp", "0"], "'0' is not a positive integer"),
        (["--tp", "2,-4"], "'-4' is not a positive integer"),
        (["--tp", "two"], "'two' is not a positive integer"),
        (["--tp", "1.5"], "'1.5' is not a positive integer"),
        (["--tp", ""], "'' is not a positive integer"),
        (["--tp", "²"], "'²' is not a positive integer"),
        (["--tp", "9" * 5000], "is not a positive integer"),
        (["--ep", "8,"], "'' is not a positive integer"),
        (["--tp", "4,8,4"], "4 is there twice"),
        (["--ep", "1,01"], "1 is there twice"),
        (["--ep", "3"], "--ep 3 does not divide the 4 experts"),
        (["--ep", "8"], "--ep 8 does not divide the 4 experts"),
    ],
)
def test_sizes_that_cannot_be_are_a_line(moe_source: Path, options: list[str], reason: str) -> None:
    lines = [line for line in mxq_plan(moe_source, *options, code=2).stderr.splitlines() if "rror: " in line]
    assert len(lines) == 1
    assert reason in lines[0]


def test_a_dense_model_has_no_experts_to_share(dense_source: Path) -> None:
    stderr = mxq_plan(dense_source, "--tp", "2", "--ep", "1", code=2).stderr
    assert "--ep is for MoE models" in stderr


def test_a_config_without_the_numbers_that_decide_is_a_line(dense_source: Path, tmp_path: Path) -> None:
    path = shutil.copytree(dense_source, tmp_path / "path")
    edit_json(path / "config.json", lambda config: config["text_config"].pop("num_key_value_heads"))
    assert "config.json has no number num_key_value_heads" in mxq_plan(path, "--tp", "2", code=2).stderr
    assert "placement" not in json.loads(mxq_plan(path, "--json").stdout)


MODEL: dict[str, Any] = {"experts": 256, "hidden": 2048, "intermediate": 512, "top_k": 8}


@pytest.mark.parametrize(
    ("change", "on", "found", "verdict"),
    [
        ({}, Deployment(4), {"stage-2"}, "ok"),
        ({}, Deployment(32), {"block-cut", "stage-2", "padded-i"}, "wrong"),
        ({"intermediate": 768}, Deployment(2), {"stage-2"}, "ok"),
        ({"intermediate": 768}, Deployment(3), set(), "ok"),
        ({"intermediate": 768}, Deployment(5), {"expert-divided", "padded-i"}, "refused"),
        ({"intermediate": 768}, Deployment(5, 5), set(), "ok"),
        ({"hidden": 2048 + 128}, Deployment(1), {"padded-h"}, "ok"),
        ({"experts": 4}, Deployment(8), {"tp-experts", "stage-2", "padded-i"}, "refused"),
        ({}, Deployment(8, 4), {"ep-multiple"}, "refused"),
        ({}, Deployment(2, 8), set(), "ok"),
        ({"activations": False}, Deployment(1), {"weight-only"}, "wrong"),
        ({"quark": False}, Deployment(1), {"form"}, "refused"),
    ],
)
def test_what_is_known_to_fail_is_said(change: dict[str, Any], on: Deployment, found: set[str], verdict: str) -> None:
    case = ExpertsCase(**MODEL | change, on=on)
    assert ids(case) == found
    assert worst(facts(case, EXPERTS_FACTS)) == verdict


def test_only_the_one_shape_is_guarded() -> None:
    shape: dict[str, Any] = {"experts": 512, "hidden": 2560, "intermediate": 640, "top_k": 10}
    case = ExpertsCase(**shape, on=Deployment(8, 8))
    assert ids(case) == {"tep8-guard"}
    assert case.padded == (2560, 640)
    assert case.bytes()[0] == case.bytes()[1]
    for name, value in shape.items():
        if name != "top_k":
            assert "tep8-guard" not in ids(ExpertsCase(**shape | {name: value * 2}, on=Deployment(8, 8)))
    for on in (Deployment(8), Deployment(4, 4), Deployment(2, 16)):
        assert "tep8-guard" not in ids(ExpertsCase(**shape, on=on))
    assert "tep8-guard" not in ids(ExpertsCase(**shape, on=Deployment(8, 8), activations=False))


def test_rows_are_looked_up_as_aiter_counts() -> None:
    """Under EP it has the GPU's experts and one expert per token less; rows of mxmoe kernels cannot serve there."""
    mxmoe = ExpertsCase(1024, 4096, 512, 11, Deployment(2, 2))
    assert ids(mxmoe) == {"mxmoe-ep"}
    assert worst(facts(mxmoe, EXPERTS_FACTS)) == "refused"
    other = ExpertsCase(1024, 4096, 256, 11, Deployment(2, 2))
    assert other.row(256) is not None
    assert ids(other) == set()
    assert ExpertsCase(1024, 4096, 512, 10, Deployment(2, 2)).row(512) is None
    fused = {on: ExpertsCase(512, 4096, 1024, 10, on, shared=True) for on in (Deployment(2), Deployment(4))}
    assert all("fused-shared" in ids(case) for case in fused.values())
    assert [case.fused is not None for case in fused.values()] == [True, False]
    assert "fused-shared" not in ids(ExpertsCase(512, 4096, 1024, 10, Deployment(2, 2), shared=True))
    assert ExpertsCase(512, 4096, 512, 10, Deployment(1), activations=False).row(512) is None
    assert len({(row.hidden, row.intermediate, row.experts, row.top_k) for row in TUNED}) == len(TUNED)


@pytest.mark.parametrize(
    ("case", "found", "assembly"),
    [
        (LinearCase(5120, 2176), {"no-assembly"}, False),  # K % 256 is 128
        (LinearCase(5120, 2304), set(), True),
        (LinearCase(24, 5120), {"no-assembly"}, False),  # in_proj_ba, if it were packed
        (LinearCase(32, 5120), set(), True),
        (LinearCase(5120, 16), {"block-cut", "no-assembly"}, False),
        (LinearCase(5120, 2304, activations=False), {"weight-only"}, False),
    ],
)
def test_dense_layers(case: LinearCase, found: set[str], assembly: bool) -> None:
    assert {fact.id for fact in facts(case, LINEAR_FACTS)} == found
    assert case.assembly == assembly


def test_every_fact_has_a_verdict_and_a_source() -> None:
    experts = [(fact.id, fact.verdict, fact.source) for fact in EXPERTS_FACTS]
    linear = [(fact.id, fact.verdict, fact.source) for fact in LINEAR_FACTS]
    for among in (experts, linear):
        assert all(source and verdict in VERDICTS for _, verdict, source in among)
        assert len({name for name, *_ in among}) == len(among)


def test_a_shared_expert_is_whole_where_tokens_are_shared(moe_source: Path) -> None:
    sizes = {}
    for one in placement(moe_source, "--tp", "2", "--ep", "1,2,4", "--recipe", "mxfp4-moe-full"):
        (experts,) = (kind for kind in one["experts"] if kind["packed"])
        assert ("fused-shared" in {fact["id"] for fact in experts["facts"]}) == (one["ep"] == 1)
        (down,) = (kind for kind in one["linear"] if kind["name"] == "mlp.shared_expert.down_proj")
        assert down["packed"]
        sizes[one["ep"]] = down["gpu"]["k"], [fact["id"] for fact in down["facts"]]
    whole = sizes[4][0]
    assert sizes[4] == (whole, ["whole"] if whole % 256 == 0 else ["no-assembly", "whole"])
    assert sizes[1][0] == sizes[2][0] == whole // 2
