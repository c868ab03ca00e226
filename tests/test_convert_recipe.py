"""Recipes: those that come with mxq, and mistakes in one's own, each an error in words before a byte is written."""

from pathlib import Path
from typing import Any

import list_recipes
import pytest
import yaml
from decoding import rewrite

from mxq.checkpoint import Checkpoint
from mxq.convert import recipe
from mxq.convert.plan import plan
from mxq.errors import UsageError

MXFP4 = recipe.load("mxfp4").as_dict()


def written(tmp_path: Path, content: object) -> str:
    file = tmp_path / "mine.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(file)


def changed(sections: dict[str, list[str]], family: str = "qwen3_5") -> dict[str, Any]:
    """The recipe mxfp4 with sections of one family replaced."""
    return MXFP4 | {"rules": {family: MXFP4["rules"][family] | sections}}


def without(section: str, pattern: str) -> list[str]:
    kept = [other for other in MXFP4["rules"]["qwen3_5"][section] if other != pattern]
    assert len(kept) < len(MXFP4["rules"]["qwen3_5"][section])
    return kept


def test_the_catalogue_lists_every_recipe() -> None:
    catalogue = (recipe.directory() / "README.md").read_text()
    assert len(recipe.names()) >= 3
    for name in recipe.names():
        loaded = recipe.load(name)
        assert loaded.name == name
        assert f"| `{name}` |" in catalogue


@pytest.mark.slow
def test_the_catalogue_is_as_the_recipes_are() -> None:
    text = list_recipes.PAGE.read_text(encoding="utf-8")
    assert list_recipes.page(text) == text, "python tools/list_recipes.py"
    assert "| `mxfp4` | 19.83 GB (0.714) |" in text


def test_the_default_quantizes_what_the_published_checkpoints_do(source: Path) -> None:
    planned = plan(Checkpoint.open(source), recipe.load("mxfp4"))
    quantized = {piece.module.split(".", 4)[-1] for group in planned.groups.values() for piece in group.pieces}
    if planned.family == "qwen3_5":
        assert quantized == {
            *(f"self_attn.{p}_proj" for p in "qkvo"),
            *(f"linear_attn.{p}" for p in ("in_proj_qkv", "in_proj_z", "out_proj")),
            *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
        }
    else:
        assert quantized == {f"mlp.experts.{e}.{p}_proj" for e in range(4) for p in ("gate", "up", "down")}
    assert not any(name.startswith(("mtp.", "model.visual.", "lm_head")) for name in planned.groups if "_scale" in name)


def test_variants_differ_where_they_say(moe_source: Path) -> None:
    source = Checkpoint.open(moe_source)
    weight_only, shared = recipe.load("mxfp4-weight-only"), recipe.load("mxfp4-moe-full")
    assert (weight_only.weight_only, shared.weight_only) == (True, False)
    assert weight_only.rules == recipe.load("mxfp4").rules
    base = {piece.module for group in plan(source, recipe.load("mxfp4")).groups.values() for piece in group.pieces}
    more = {piece.module for group in plan(source, shared).groups.values() for piece in group.pieces}
    assert more > base
    assert all(".mlp.shared_expert." in name for name in more - base)
    assert recipe.load("mxfp4-mse").rules == recipe.load("mxfp4").rules
    assert recipe.load("mxfp4-mse").scale_rule == "mse"


def actions(source: Checkpoint, name: str) -> dict[str, str]:
    return {decision.tensor.name: decision.action for decision in plan(source, recipe.load(name)).decisions}


def test_experts_alone_are_what_the_default_quantizes_of_moe_models(moe_source: Path, dense_source: Path) -> None:
    assert actions(Checkpoint.open(moe_source), "mxfp4-experts") == actions(Checkpoint.open(moe_source), "mxfp4")
    with pytest.raises(UsageError, match="mxfp4-experts has no rules for qwen3_5, the family of") as error:
        plan(Checkpoint.open(dense_source), recipe.load("mxfp4-experts"))
    assert error.value.hint is not None
    assert error.value.hint.startswith("take mxfp4,")


def test_the_mtp_layer_is_quantized_as_layers_of_the_model_are(source: Path, tmp_path: Path) -> None:
    base, mtp = (actions(Checkpoint.open(source), name) for name in ("mxfp4", "mxfp4-mtp"))
    moe = plan(Checkpoint.open(source), recipe.load("mxfp4")).family == "qwen3_5_moe"
    more = {name for name in base if base[name] != mtp[name]}
    layer = {name.removeprefix("mtp.layers.0.").removesuffix(".weight") for name in more}
    if moe:
        assert layer == {f"mlp.experts.{e}.{p}_proj" for e in range(4) for p in ("gate", "up", "down")}
    else:
        assert layer == {*(f"self_attn.{p}_proj" for p in "qkvo"), *(f"mlp.{p}_proj" for p in ("gate", "up", "down"))}

    def drop(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    headless = rewrite(source, tmp_path / "headless", drop)
    plan(Checkpoint.open(headless), recipe.load("mxfp4"))
    with pytest.raises(UsageError, match=r"'mtp\.layers\..*' under quantize matches nothing") as error:
        plan(Checkpoint.open(headless), recipe.load("mxfp4-mtp"))
    assert error.value.hint == "it has no MTP head: take a recipe that leaves MTP alone, such as mxfp4"


def test_what_a_recipe_extends_is_replaced_by_family(tmp_path: Path) -> None:
    loaded = recipe.load(
        written(
            tmp_path,
            {"name": "x", "extends": "mxfp4", "rules": {"qwen3_5": {"quantize": ["a"], "keep_if_present": ["b"]}}},
        )
    )
    assert [(rule.pattern, rule.section) for rule in loaded.rules["qwen3_5"]] == [
        ("a", "quantize"),
        ("b", "keep_if_present"),
    ]
    assert loaded.rules["qwen3_5_moe"] == recipe.load("mxfp4").rules["qwen3_5_moe"]
    assert (loaded.name, loaded.scale_rule) == ("x", "even")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (MXFP4 | {"scale_rul": "even"}, r"unknown key 'scale_rul'; did you mean scale_rule\?"),
        (MXFP4 | {"scale_rule": "nearest"}, "scale_rule is 'nearest'; use one of even, floor, ceil, rceil, diffs, mse"),
        (MXFP4 | {"scale_rule": "rcell"}, r"scale_rule is 'rcell'; did you mean rceil\?"),
        (MXFP4 | {"activations": "dynamc"}, r"activations is 'dynamc'; did you mean dynamic\?"),
        (MXFP4 | {"activations": None}, "activations is missing or not a text"),
        (MXFP4 | {"rules": {"qwen3": {}}}, r"rules: unknown key 'qwen3'; did you mean qwen3_5\?"),
        (MXFP4 | {"rules": {"qwen3_5": {"quantise": []}}}, r"unknown key 'quantise'; did you mean quantize\?"),
        (MXFP4 | {"rules": {"qwen3_5": {"keep": "lm_head"}}}, "keep is not a list of patterns"),
        (MXFP4 | {"rules": {"qwen3_5": ["lm_head"]}}, "rules.qwen3_5 is missing or not a table"),
        (MXFP4 | {"rules": None}, "rules is missing or not a table"),
        ({"name": "x", "extends": "mxfp"}, r"extends 'mxfp'; did you mean mxfp4"),
        ("[1, 2]", "is not a table of keys"),
        ("a: [", "is not valid YAML"),
        ("a: 2024-99-99", "is not valid YAML: month"),
        (f"a: {'9' * 5000}", "is not valid YAML: Exceeds"),
        (f"a: {'[' * 3000}", "is not valid YAML"),
        (f"{{extends: mxfp4-mixed, name: x, mixed: {{budget: 1{'0' * 400}}}}}", "mixed: budget is 1000"),
        ("{extends: mxfp4-gptq, name: x, options: {damp_percent: 1e-3}}", "1e-3 is text to YAML"),
        ("!!python/object/apply:os.getcwd []", "is not valid YAML"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, content: object, reason: str) -> None:
    file = written(tmp_path, content)
    with pytest.raises(UsageError, match=reason) as error:
        recipe.load(file)
    assert file in error.value.message
    assert "\n" not in str(error.value)


def test_recipes_that_do_not_exist(tmp_path: Path) -> None:
    for typed, meant in (
        ("mxfp4-weightonly", "mxfp4-weight-only"),
        ("mxfp4-expert", "mxfp4-experts"),
        ("mxfp4_mtp", "mxfp4-mtp"),
        ("mxfp4-full", "mxfp4-moe-full"),
        ("mxfp4-msa", "mxfp4-mse"),
    ):
        with pytest.raises(UsageError, match=rf"no recipe '{typed}'; did you mean {meant}\?"):
            recipe.load(typed)
    with pytest.raises(UsageError, match=r"none.yaml cannot be read: No such file"):
        recipe.load(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"keep": without("keep", "model.*embed_tokens")}, r"no rule for model.language_model.embed_tokens"),
        (
            {"keep": [*MXFP4["rules"]["qwen3_5"]["keep"], "model.*layers.*.self_atn.*"]},
            r"'model\.\*layers\.\*\.self_atn\.\*' under keep matches nothing in .*keep_if_present",
        ),
        (
            {"quantize": [*MXFP4["rules"]["qwen3_5"]["quantize"], "model.*layers.*.mlp.experts.*"]},
            "under quantize matches nothing",
        ),
        (
            {"keep": [*MXFP4["rules"]["qwen3_5"]["keep"], "model.*layers.0.*"]},
            r"quantizes \S+layers.0.linear_attn.in_proj_qkv by .* and keeps it by 'model.\*layers.0.\*'",
        ),
        (
            {
                "quantize": [*without("quantize", "model.*layers.*.self_attn.[qkvo]_proj"), "*.self_attn.[qko]_proj"],
                "keep": [*MXFP4["rules"]["qwen3_5"]["keep"], "model.*layers.*.self_attn.v_proj"],
                "keep_if_present": [
                    "lm_head",
                    "model.visual.*",
                    "mtp.[!l]*",
                    "mtp.layers.0.mlp.*",
                    "mtp.*norm",
                    "*v_proj",
                ],
            },
            r"k_proj would be quantized but .*v_proj not, and engines load both as one \(.*self_attn.qkv_proj\)",
        ),
        (
            {
                "quantize": [*without("quantize", "model.*layers.*.mlp.up_proj")],
                "keep": [*MXFP4["rules"]["qwen3_5"]["keep"], "model.*layers.*.mlp.up_proj"],
            },
            r"mlp.gate_proj would be quantized but .*mlp.up_proj not",
        ),
        (
            {
                "quantize": [*MXFP4["rules"]["qwen3_5"]["quantize"], "model.*layers.*.linear_attn.conv1d"],
                "keep": without("keep", "model.*layers.*.linear_attn.conv1d"),
            },
            "conv1d.weight BF16 .* is of a kind that engines do not load as MXFP4",
        ),
        (
            {
                "quantize": [*MXFP4["rules"]["qwen3_5"]["quantize"], "lm_head"],
                "keep_if_present": ["model.visual.*", "mtp.*"],
            },
            "lm_head.weight .* is of a kind that engines do not load as MXFP4: lm_head",
        ),
    ],
    ids=["unnamed", "keep-nothing", "quantize-nothing", "both", "split-qkv", "split-gate-up", "conv1d", "lm_head"],
)
def test_recipes_that_do_not_fit_the_checkpoint(
    tmp_path: Path, dense_source: Path, sections: dict[str, list[str]], reason: str
) -> None:
    loaded = recipe.load(written(tmp_path, changed(sections)))
    with pytest.raises(UsageError, match=reason):
        plan(Checkpoint.open(dense_source), loaded)


def test_exceptions_are_kept_whatever_is_quantized(tmp_path: Path, source: Path) -> None:
    family = plan(Checkpoint.open(source), recipe.load("mxfp4")).family
    layer = "model.*layers.1.mlp.experts.*" if family == "qwen3_5_moe" else "model.*layers.[12].mlp.*"
    loaded = recipe.load(written(tmp_path, changed({"except": [layer]}, family)))
    assert recipe.load(written(tmp_path, loaded.as_dict())) == loaded
    before, after = (plan(Checkpoint.open(source), one) for one in (recipe.load("mxfp4"), loaded))
    left = {d.tensor.name: d for d in after.decisions if d.rule == layer}
    assert {d.action for d in left.values()} == {"keep"}
    assert len(left) == (2 if family == "qwen3_5_moe" else 6)
    for old, new in zip(before.decisions, after.decisions, strict=True):
        assert new == (left.get(new.tensor.name) or old)
    saved = sum(d.bytes_before for d in left.values()) - sum(
        d.bytes_after for d in before.decisions if d.tensor.name in left
    )
    assert after.bytes_after == before.bytes_after + saved


def test_exceptions_must_match_and_split_nothing(tmp_path: Path, dense_source: Path) -> None:
    for pattern, reason in (
        ("model.*layers.9.*", "under except matches nothing"),
        ("*layers.1.mlp.up_proj", "gate_proj would be quantized but .*up_proj not"),
    ):
        with pytest.raises(UsageError, match=reason):
            plan(Checkpoint.open(dense_source), recipe.load(written(tmp_path, changed({"except": [pattern]}))))


def test_experts_quantized_in_part(tmp_path: Path, moe_source: Path) -> None:
    source = Checkpoint.open(moe_source)
    keep = MXFP4["rules"]["qwen3_5_moe"]["keep"]
    for rules, reason in (
        ({"quantize": ["model.*experts.[01].*"], "keep": [*keep, "model.*experts.[23].*"]}, "only some of the experts"),
        (
            {
                "quantize": ["model.*experts.*.down_proj"],
                "keep": [*keep, "model.*experts.*.*e_proj", "model.*.up_proj"],
            },
            "engines load both as one .*mlp.experts",
        ),
    ):
        loaded = recipe.load(written(tmp_path, changed(rules, "qwen3_5_moe")))
        with pytest.raises(UsageError, match=reason):
            plan(source, loaded)
    with pytest.raises(UsageError, match="has no rules for qwen3_5_moe"):
        plan(source, recipe.load(written(tmp_path, changed({}))))
