"""``mxq predict`` shows what the cost model gives, projects runs and says so, and refuses what cannot be in a line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from click.testing import CliRunner, Result
from conversion import convert
from published_shapes import ARCHITECTURES, setup

from mxq.cli import main
from mxq.hardware.acceptance import of_length
from mxq.hardware.predict import Load, predict

DENSE: tuple[str, Path] = ("--architecture", ARCHITECTURES / "Qwen3.5-27B.json")
MOE = ("--architecture", ARCHITECTURES / "Qwen3.5-35B-A3B.json")
DRAFTER = ("--drafter", ARCHITECTURES / "Qwen3.5-27B-DFlash.json")
MI355X = ("--hardware", "mi355x")
RUN = Path(__file__).parent.parent / "notebooks" / "data" / "vllm-cpu"


def invoke(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["predict", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def as_json(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(invoke(*arguments, "--json").stdout)
    return found


def test_json_has_what_the_model_gives() -> None:
    found = as_json(*DENSE, *DRAFTER, *MI355X, "--spec", "dflash", "--acceptance", "8.829", "--concurrency", "32,1")
    assert (found["kind"], found["precision"], found["hardware"]) == ("prediction", "bf16", "mi355x")
    assert [one["concurrency"] for one in found["predictions"]] == [1, 32]
    expected = predict(setup("Qwen3.5-27B", "mi355x"), "dflash", Load(1, 1024), of_length(8.829, 15))
    assert found["predictions"][0] == json.loads(json.dumps(expected.as_json()))
    assert sum(found["predictions"][0]["parts_s"].values()) == pytest.approx(found["predictions"][0]["step_s"])
    assert found["sources"]["layer_us"]


def test_the_table_says_that_nothing_was_measured() -> None:
    shown = invoke(*DENSE, *MI355X, "--precision", "mxfp4", "--spec", "mtp", "-k", "7", "--acceptance", "6.027").stdout
    assert shown.startswith("Predicted, not measured: ")
    assert "mxfp4, mtp K 7, acceptance length 6.027, on one AMD Instinct MI355X" in shown
    for word in ("tok/s", "over plain bf16", "break-even length", "best K", "snapshots", "draft lm_head"):
        assert word in shown
    plain = invoke(*DENSE, *MI355X).stdout
    assert "plain decoding" in plain
    assert "snapshots" not in plain
    assert "best K" not in plain


def test_survival_decides_the_best_budget() -> None:
    falling = ("--survival", "0.9,0.8,0.1,0,0,0,0")
    found = as_json(*DENSE, *MI355X, "--spec", "mtp", *falling, "--concurrency", "8")["predictions"][0]
    assert (found["k"], found["acceptance_length"], found["best_k"]["k"]) == (7, pytest.approx(2.8), 2)


def test_prefill_counts_where_lengths_are_given() -> None:
    decode = as_json(*DENSE, *MI355X, "--context", "512", "--concurrency", "1")["predictions"][0]
    whole = as_json(*DENSE, *MI355X, "--prompt-tokens", "256", "--output-tokens", "512", "--concurrency", "1")
    assert whole["predictions"][0]["tokens_per_s"] < decode["tokens_per_s"]


@pytest.mark.parametrize("moe", [False, True])
def test_a_checkpoint_says_itself_what_is_packed(moe: bool, tmp_path: Path) -> None:
    source = tiny.write_target(tmp_path / "bf16", moe=moe)
    packed = convert(source, tmp_path / "mxfp4")
    assert as_json(source, *MI355X)["precision"] == "bf16"
    found, assumed = as_json(packed, *MI355X), as_json(source, *MI355X, "--precision", "mxfp4")
    assert found["precision"] == "mxfp4"
    assert found["predictions"] == assumed["predictions"]
    refused = invoke(packed, *MI355X, "--precision", "bf16", code=2)
    assert refused.stderr.startswith(f"error: {packed} is MXFP4, not bf16\n")


def test_a_run_is_projected_and_labelled() -> None:
    found = as_json("--run", RUN, *MI355X)
    assert (found["kind"], found["acceptance_of"], found["hardware"]) == ("projection", "testbed:dense", "mi355x")
    assert {one["kind"] for one in found["projections"]} == {"projection"}
    cells = {(one["workload"], one["method"], one["concurrency"]): one for one in found["projections"]}
    assert len(cells) == 2 * 3 * 2
    # The acceptance of the run's records, whatever the hardware.
    from mxq.analysis import summarise
    from mxq.evaluate import read_run

    for cell in summarise(read_run(RUN)).lowest:
        one = cells[cell.workload, cell.arm.method, 4]
        length = 1 if cell.acceptance is None else cell.acceptance.pooled
        assert one["acceptance_length"] == pytest.approx(length)
    shown = invoke("--run", RUN, *MI355X, "--concurrency", "32").stdout
    assert shown.startswith("Projection, nothing was run there: speed of testbed:dense on one AMD Instinct MI355X")
    assert "arm (projected)" in shown
    assert "Projected numbers are predictions" in shown


def test_a_run_is_projected_onto_another_model() -> None:
    shown = invoke("--run", RUN, *MI355X, *DENSE, *DRAFTER).stdout
    assert "speed of " in shown
    assert "Qwen3.5-27B.json" in shown.splitlines()[0]
    assert "acceptance of testbed:dense as measured" in shown.splitlines()[1]


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_a_recorded_run_is_projected_though_its_conversion_is_not_there(name: str) -> None:
    found = as_json("--run", f"example:{name}", *MI355X)
    assert found["notes"] == [f"{name}-mxfp4 is not there: mxfp4 is predicted as testbed:{name} by the recipe mxfp4."]
    arms = {(one["target"], one["method"], one["k"]) for one in found["projections"]}
    assert len(arms) == 2 * 7
    there = as_json("--run", f"example:{name}", *MI355X, f"testbed:{name}", "--drafter", f"testbed:{name}-dflash")
    assert (there["notes"], there["projections"]) == ([], found["projections"])
    assert found["notes"][0] in invoke("--run", f"example:{name}", *MI355X).stdout


def test_hardware_without_mxfp4_gets_the_arms_of_bf16() -> None:
    found = as_json("--run", "example:dense", "--hardware", "mi300x")
    assert found["notes"] == ["AMD Instinct MI300X has no kernel for MXFP4, whose arms are left out."]
    assert {one["target"] for one in found["projections"]} == {"bf16"}


def plain_run(tmp_path: Path) -> Path:
    """The run, with nothing but its plain arm."""
    run = tmp_path / "run"
    info = json.loads((RUN / "run.json").read_text())
    kept = {key: cell for key, cell in info["cells"].items() if cell["arm"]["method"] == "ar"}
    definition = info["definition"] | {"arms": info["definition"]["arms"][:1]}
    run.mkdir()
    (run / "run.json").write_text(json.dumps(info | {"cells": kept, "definition": definition}))
    (run / "cells").symlink_to(RUN / "cells")
    (run / "workloads").symlink_to(RUN / "workloads")
    return run


def other_version(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text(json.dumps({"format": 1}))
    return tmp_path


def test_a_run_without_speculation_has_nothing_to_project(tmp_path: Path) -> None:
    refused = invoke("--run", plain_run(tmp_path), *MI355X, code=2)
    assert "has no speculative arm, so there is no acceptance to project\n  -> run it with --spec" in refused.stderr


def test_a_run_of_another_version_is_refused(tmp_path: Path) -> None:
    refused = invoke("--run", other_version(tmp_path), *MI355X, code=2)
    assert "run.json has format 1\n  -> this mxq reads format 2" in refused.stderr


MTP = ("--spec", "mtp", "-k", "3")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            (*DENSE, "--hardware", "mi999"),
            2,
            "there is no hardware 'mi999'\n  -> use one of b200, h200, mi300x, mi355x",
        ),
        ((*DENSE, *MI355X, *MTP, "--acceptance", "4.2"), 2, "a pass commits 1 to K + 1 = 4 tokens"),
        ((*DENSE, *MI355X, *MTP, "--acceptance", "0.9"), 2, "a pass commits 1 to K + 1 = 4 tokens"),
        ((*DENSE, *MI355X, *MTP, "--survival", "0.5,0.6,0.1"), 2, "survival rises from 0.5 to 0.6 at position 2"),
        ((*DENSE, *MI355X, *MTP, "--survival", "0.5,0.4"), 2, "survival has 2 shares with K 3"),
        ((*DENSE, *MI355X, *MTP, "--survival", "high"), 2, "'high' is not a list of numbers"),
        ((*DENSE, *MI355X, *MTP, "--survival", "0.5,0.4,0.3", "--acceptance", "2"), 2, "one of --acceptance and"),
        ((*DENSE, *MI355X, *MTP), 2, "speculation needs one of --acceptance and --survival"),
        ((*DENSE, *MI355X, "--acceptance", "3"), 2, "--acceptance with plain decoding, which drafts nothing"),
        ((*DENSE, *MI355X, "--spec", "ar", "-k", "3"), 2, "-k with plain decoding, which drafts nothing"),
        ((*DENSE, *MI355X, *DRAFTER), 2, "a drafter with ar"),
        ((*DENSE, *MI355X, "--spec", "dflash", "--acceptance", "3"), 2, "DFlash needs the shape of a drafter"),
        ((*DENSE, *DRAFTER, *MI355X, "--spec", "dflash", "-k", "16", "--acceptance", "3"), 2, "a drafter of block 16"),
        ((*DENSE, "--hardware", "mi300x", "--precision", "mxfp4"), 2, "MI300X has no kernel for MXFP4"),
        ((*DENSE, *MI355X, "--concurrency", "0"), 2, "'0' is not a list of requests in flight"),
        ((*DENSE, *MI355X, "--concurrency", "9" * 5000), 2, "is not a list of requests in flight"),
        (("--run", "example:none", *MI355X), 2, "there is no recorded run 'example:none'"),
        ((*DENSE, *MI355X, "--prompt-tokens", "5"), 2, "prefill needs both"),
        ((*DENSE, *MI355X, "--prompt-tokens", "5", "--output-tokens", "5", "--context", "5"), 2, "--context beside"),
        ((*DENSE, "testbed:dense", *MI355X), 2, "give one of MODEL and --architecture"),
        (MI355X, 2, "give one of MODEL and --architecture"),
        (("--architecture", "no.json", *MI355X), 2, "there is no no.json"),
        (("--architecture", ARCHITECTURES, *MI355X), 2, "is a directory\n  -> give it as MODEL"),
        (
            ("--architecture", ARCHITECTURES / "Qwen3.5-27B-DFlash.json", *MI355X),
            2,
            "config.json names DFlashDraftModel",
        ),
        (("no-such-dir", *MI355X), 2, "no-such-dir is not a directory"),
        (
            ("--architecture", ARCHITECTURES / "Qwen3.5-397B-A17B.json", *MI355X),
            1,
            "528.71 GB too small for one request: 806.80 GB of",
        ),
        (("--run", RUN, *MI355X, "--spec", "mtp"), 2, "--spec with --run, which says that itself"),
        (("--run", RUN, *MI355X, "--acceptance", "3"), 2, "--acceptance with --run, which says that itself"),
        (("--run", RUN, *MI355X, "--precision", "bf16"), 2, "--precision with --run, which says that itself"),
        (("--run", RUN, *MI355X, *DENSE), 2, "the run has DFlash arms, and a model of its own was given"),
        (("--run", RUN, *MI355X, *DENSE, "testbed:dense"), 2, "MODEL and --architecture are both given"),
        (("--run", "no-such-dir", *MI355X), 2, "no-such-dir holds no run"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(arguments: tuple[object, ...], code: int, message: str) -> None:
    refused = invoke(*arguments, code=code)
    assert message in refused.stderr
    assert refused.stderr.startswith("error: ")
    assert refused.stdout == ""
    assert len(refused.stderr.splitlines()) <= 2


def test_the_model_that_does_not_fit_does_on_more() -> None:
    refused = invoke("--architecture", ARCHITECTURES / "Qwen3.5-397B-A17B.json", *MI355X, code=1)
    assert "  -> it fits with TP 4" in refused.stderr
    assert invoke("--architecture", ARCHITECTURES / "Qwen3.5-397B-A17B.json", *MI355X, "--precision", "mxfp4").stdout


def test_a_testbed_has_its_own_drafter() -> None:
    shown = invoke("testbed:moe", *MI355X, "--spec", "dflash", "-k", "7", "--acceptance", "3").stdout
    assert "testbed:moe, bf16, dflash K 7" in shown


def test_a_model_quantized_otherwise_is_not_taken_for_bf16(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    raw = json.loads(DENSE[1].read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    file.write_text(json.dumps(raw))
    refused = invoke("--architecture", file, *MI355X, code=2)
    assert "its quantization is not MXFP4" in refused.stderr
    assert as_json("--architecture", file, *MI355X, "--precision", "mxfp4")["precision"] == "mxfp4"


def test_requests_without_room_are_said_to_wait() -> None:
    many = (*DENSE, "--hardware", "h200", "--spec", "mtp", "--acceptance", "5", "--concurrency", "8,200")
    assert "of 200 requests, memory has room for 31 at once: the others wait\n" in invoke(*many).stdout
    found = as_json(*many)["predictions"]
    assert [one["running"] for one in found] == [8, 31]


def test_it_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom mxq.cli import main\n"
        f"main(['predict', '--architecture', {str(DENSE[1])!r}, '--hardware', 'h200', '--json'], "
        "standalone_mode=False)\n"
        "assert not {'torch', 'numpy', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
