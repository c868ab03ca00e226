"""Mixed recipes: what is kept is what harms most, in the budget, to the byte; chosen once, and then as any recipe."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_matching as vllm
import yaml
from calibrated import TEXT
from click.testing import CliRunner, Result
from decoding import rewrite
from hub import Hub
from hub_runner import Runner
from safetensors import safe_open
from test_calibrate_sensitivity import plant

from mxq.calibrate import Calibration
from mxq.calibrate.groups import Group
from mxq.calibrate.text import tokens
from mxq.checkpoint import Checkpoint
from mxq.cli import main
from mxq.convert import mixed, recipe
from mxq.convert.partial import Partial
from mxq.convert.plan import plan
from mxq.decode import load_target
from mxq.decode.divergence import compare
from mxq.errors import UsageError
from mxq.models import qwen35


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def mxq(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def budgeted(tmp_path: Path, budget: object, **keys: Any) -> Path:
    file = tmp_path / f"mixed-{budget}.yaml"
    calibration = {"set": None, "samples": 4, "length": 32, "seed": 0}
    content = {"name": "mine", "extends": "mxfp4-mixed", "mixed": {"budget": budget}, "calibration": calibration}
    file.write_text(yaml.safe_dump(content | keys))
    return file


def sizes(source: Path) -> tuple[int, list[Group]]:
    made = plan(Checkpoint.open(source), recipe.load("mxfp4"))
    return made.bytes_after, mixed.candidates(made)


def manifest(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "mxq_manifest.json").read_text())
    return found


def bytes_of(out: Path) -> int:
    """All tensors, as safetensors itself reads them."""
    total = 0
    for file in out.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            total += sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118
    return total


@pytest.mark.parametrize("options", [(), ("--format", "compressed-tensors", "--experts", "fused")], ids=["quark", "ct"])
def test_the_worst_group_is_kept_in_the_budget(
    source: Path, text: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    bad = rewrite(source, tmp_path / "bad", lambda tensors: plant(tensors, 0))
    least, found = sizes(bad)
    worst = next(group for group in found if group.name in ("layer 0 MLP down", "layer 0 routed experts"))
    budget = round((least + worst.bytes_saved) / least + 0.001, 4)
    out = tmp_path / "out"
    shown = mxq("quantize", bad, out, "--recipe", budgeted(tmp_path, budget), "--calib", text, *options).stdout
    facts = manifest(out)
    choice = facts["choice"]
    assert choice["groups"][0]["group"] == worst.name
    kept = [group["group"] for group in choice["groups"] if group["kept"]]
    assert worst.name in kept
    assert f"kept, of {len(found)} groups: {', '.join(kept)};" in shown
    # To the byte: the files, what was said of them, and the budget.
    assert bytes_of(out) == facts["bytes"] == choice["bytes"]["chosen"] <= choice["bytes"]["at_most"]
    assert choice["bytes"]["at_most"] == int(round(budget * 10_000) * least // 10_000)
    assert choice["bytes"]["everything_quantized"] == least
    assert facts["bytes"] == least + sum(group.bytes_saved for group in found if group.name in kept)
    # The model that decoding loads is as far from the source as the choice says.
    seen = tokens(Calibration(str(text), 4, 32, 0), str(bad), bad, 512).ids
    targets = [load_target(path) for path in (bad, out)]
    with torch.inference_mode():
        logits = [torch.stack([t.logits(t.prompt(t.start(32), ids).hidden[:-1]) for ids in seen]) for t in targets]
    kl = compare(logits[0].flatten(0, 1), logits[1].flatten(0, 1), seen[:, 1:].flatten()).divergence.mean()
    assert choice["chosen"]["kl"]["estimate"] == pytest.approx(float(kl), rel=1e-9)
    assert choice["chosen"]["kl"]["estimate"] < 0.5 * choice["everything_quantized"]["kl"]["estimate"]
    # So vLLM takes it to be: its own function, for the module that it builds for each group.
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    asks = vllm.compressed_tensors_quantized if options else vllm.quantized
    for group in found:
        for module in {
            qwen35.experts_module(piece.module) or qwen35.fused_module(piece.module) or piece.module
            for piece in group.pieces
        }:
            name = qwen35.engine_name(module)
            listed = config["ignore" if options else "exclude"]
            assert asks(listed, name, vllm.MULTIMODAL) == (group.name not in kept), name
    # As any other checkpoint: the tools and the card.
    assert " ok " in mxq("verify", out, "--against", bad).stdout
    card = (out / "README.md").read_text()
    assert f"| {worst.name} | {choice['groups'][0]['kl']['estimate']:.6f} | " in card
    assert card.count("\n| layer ") == len(kept)
    names = {name for group in found if group.name in kept for pattern in group.patterns for name in [pattern]}
    assert set(facts["recipe"]["rules"][plan(Checkpoint.open(bad), recipe.load("mxfp4")).family]["except"]) == names
    assert {tensor["rule"] for tensor in facts["tensors"].values() if tensor["rule"] in names} == names


def test_the_recipe_chosen_does_the_same_by_itself(dense_source: Path, text: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    mxq("quantize", dense_source, out, "--recipe", budgeted(tmp_path, 1.05), "--calib", text)
    fixed = tmp_path / "fixed.yaml"
    fixed.write_text(yaml.safe_dump(manifest(out)["recipe"]))
    mxq("quantize", dense_source, again, "--recipe", fixed)
    for name in ("model.safetensors", "config.json", "layers.jsonl"):
        assert (out / name).read_bytes() == (again / name).read_bytes()
    assert "choice" not in manifest(again)


def test_a_conversion_that_was_stopped_keeps_its_choice(
    dense_source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = budgeted(tmp_path, 1.05)
    command = ["quantize", dense_source, tmp_path / "out", "--recipe", mine, "--max-shard-size", "1MB", "--calib"]
    mxq(
        *["whole" if part == tmp_path / "out" else part for part in command][:2], tmp_path / "whole", *command[3:], text
    )
    real = Partial.complete

    def stopped(self: Partial, *arguments: Any) -> None:
        real(self, *arguments)
        raise KeyboardInterrupt

    def again(*arguments: object) -> None:
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr(Partial, "complete", stopped)
        assert "1 of " in mxq(*command, text, code=4).stderr
    monkeypatch.setattr(mixed, "_measured", again)
    other = tmp_path / "other.txt"
    other.write_text(TEXT[100:])
    for changed, reason in (
        ([*command, other], "mixed.text.sha256 is"),
        ([*command[:4], budgeted(tmp_path, 1.06), *command[5:], text], "mixed.budget is 1.05 there, 1.06 now"),
        ([*command[:4], "mxfp4", *command[5:-1]], "is of another conversion: recipe"),
        ([*command[:4], budgeted(tmp_path, 1.05, scale_rule="mse"), *command[5:], text], "recipe.scale_rule is even"),
    ):
        assert reason in mxq(*changed, code=2).stderr
    budgeted(tmp_path, 1.05)  # the last of these has its name
    said = mxq(*command, text).stderr
    assert "what is kept was chosen when this conversion began" in said
    files = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    assert not (tmp_path / "out.partial").exists()


def test_nothing_is_left_of_what_was_stopped_while_measuring(
    dense_source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mixed, "_measured", stopped)
    before = {*tmp_path.iterdir()}
    mine = budgeted(tmp_path, 1.05)
    assert (
        "interrupted"
        in mxq("quantize", dense_source, tmp_path / "out", "--recipe", mine, "--calib", text, code=4).stderr
    )
    assert {*tmp_path.iterdir()} == before | {mine}


@pytest.mark.slow
def test_a_model_on_the_hub(dense_source: Path, text: Path, tmp_path: Path, hub: Hub, mxq: Runner) -> None:
    hub.add("org/full", dense_source)
    out, mine = tmp_path / "out", budgeted(tmp_path, 1.05)
    refused = mxq("quantize", "org/full", out, "--recipe", budgeted(tmp_path, 1.0), "--calib", text, code=2)
    assert "or more" in refused.stderr
    assert hub.sent("safetensors") < 100_000  # the headers
    mxq("quantize", "org/full", out, "--recipe", mine, "--calib", text)
    CliRunner().invoke(
        main, ["quantize", str(dense_source), str(tmp_path / "here"), "--recipe", str(mine), "--calib", str(text)]
    )
    assert manifest(out)["choice"] == manifest(tmp_path / "here")["choice"]
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "here" / "model.safetensors").read_bytes()


def test_budgets_that_cannot_be_met(source: Path, text: Path, tmp_path: Path) -> None:
    least, found = sizes(source)
    smallest = min(group.bytes_saved for group in found)
    enough = -(-(least + smallest) * 10_000 // least) / 10_000
    everything = (least + sum(group.bytes_saved for group in found)) / least
    for budget, reason in (
        (0.5, f"a budget of {enough:g} or more"),
        (1.0, f"a budget of {enough:g} or more"),
        (round(enough - 0.0001, 4), f"a budget of {enough:g} or more"),
        (everything + 0.001, "nothing would be quantized"),
    ):
        mine = budgeted(tmp_path, budget)
        for verb in (("plan", source), ("quantize", source, tmp_path / "out", "--calib", text)):
            result = mxq(*verb, "--recipe", mine, code=2)
            assert reason in result.stderr
            assert len(result.stderr.splitlines()) == 2
    assert not (tmp_path / "out").exists()
    mine = budgeted(tmp_path, enough)
    assert f"as far as the budget of {enough:g} goes" in mxq("plan", source, "--recipe", mine).stdout
    at_most = json.loads(mxq("plan", source, "--recipe", mine, "--json").stdout)["mixed"]["bytes_at_most"]
    assert least + smallest <= at_most < least * (enough + 0.0001)


def test_the_choice_is_the_best_there_is() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        weights = (torch.randint(1, 9, (9,), generator=generator) * 1024).tolist()
        errors = torch.rand(9, generator=generator).tolist()
        errors[0] = 0.0
        found = [Group(number, "MLP down", (), saved) for number, saved in enumerate(weights)]
        room = int(torch.randint(1024, 20 * 1024, (1,), generator=generator))
        kept = mixed.choose(found, errors, room)
        subsets = [
            s for n in range(10) for s in itertools.combinations(range(9), n) if sum(weights[i] for i in s) <= room
        ]
        best = max(sum(errors[i] for i in subset) for subset in subsets)
        assert sum(group.bytes_saved for group in kept) <= room
        assert sum(errors[group.layer] for group in kept) == pytest.approx(best)
        assert found[0] not in kept
        assert [group.layer for group in kept] == sorted(group.layer for group in kept)


def test_sizes_without_a_common_divisor_stay_in_the_budget() -> None:
    found = [Group(number, "MLP down", (), 1_000_000_007 + number * 1_009) for number in range(20)]
    errors = [1 / (number + 1) for number in range(20)]
    kept = mixed.choose(found, errors, 5_000_020_000)
    assert [group.layer for group in kept] == [0, 1, 2, 3]  # a fifth would fit, but for the rounding


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"mixed": {"budget": "large"}}, "budget is 'large'"),
        ({"mixed": {"budget": float("nan")}}, "budget is nan"),
        ({"mixed": {"budget": True}}, "budget is True"),
        ({"mixed": {}}, "budget is None"),
        ({"mixed": {"budgte": 1.1}}, r"unknown key 'budgte'; did you mean budget\?"),
        ({"mixed": 1.1}, "mixed is missing or not a table"),
        ({"calibration": None}, "calibration is missing or not a table"),
        ({"algorithm": "gptq"}, "algorithm and mixed do not go together"),
        ({"options": {"alpha": 1}}, "options is for an algorithm"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        recipe.load(str(budgeted(tmp_path, 1.1, **keys)))


def test_what_a_mixed_recipe_cannot_be_used_with(dense_source: Path, tmp_path: Path) -> None:
    loaded = recipe.load("mxfp4-mixed")
    assert recipe.load(str(written(tmp_path, loaded.as_dict()))) == loaded
    assert loaded.rules == recipe.load("mxfp4").rules
    assert (
        "no calibration text"
        in mxq("quantize", dense_source, tmp_path / "out", "--recipe", "mxfp4-mixed", code=2).stderr
    )
    assert (
        "--stream is for recipes that read no text"
        in mxq("quantize", "some/model", tmp_path / "out", "--recipe", "mxfp4-mixed", "--stream", code=2).stderr
    )
    shutil.copytree(dense_source, tmp_path / "out")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    mine = budgeted(tmp_path, 1.05)
    result = mxq("quantize", dense_source, tmp_path / "out", "--recipe", mine, "--calib", text, code=2)
    assert "exists" in result.stderr or "not empty" in result.stderr


def written(tmp_path: Path, content: dict[str, Any]) -> Path:
    file = tmp_path / "again.yaml"
    file.write_text(yaml.safe_dump(content))
    return file
