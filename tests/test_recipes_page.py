"""What the page of tools/bench_recipes.py says follows from its numbers."""

import copy
from typing import Any

import bench_recipes
import pytest
import recipes_page

METHODS = ("dflash-15", "mtp-3")


def around(estimate: float, half: float) -> dict[str, Any]:
    return {"estimate": estimate, "lower": estimate - half, "upper": estimate + half, "prompts": 32}


def recipe(dflash: float, divergence: float, verdict: str = "degraded") -> dict[str, Any]:
    """A recipe that changes DFlash and the divergence so much from plain MXFP4, and MTP not at all."""
    row = {"base": around(10.0, 0.1), "new": around(9.5, 0.1), "change": around(-0.05, 0.01), "verdict": verdict}
    acceptance = dict.fromkeys(METHODS, row)
    quality = {"divergence": around(0.006 + divergence, 0.001), "agreement": around(0.97, 0.01)}
    changes = {"dflash-15": dflash, "mtp-3": 0.0, "divergence": divergence}
    return {
        "seconds": 30.0,
        "peak_bytes": 4e8,
        "error": None,
        "bytes": 5e6,
        **quality,
        "acceptance": acceptance,
        "workloads": {name: {**quality, "acceptance": acceptance} for name in ("sums", "talks")},
        "from_plain": {
            name: around(one, abs(one) / 2 or 0.1) | {"p": 0.0 if one else 1.0} for name, one in changes.items()
        },
    }


@pytest.fixture
def results() -> dict[str, Any]:
    plain = recipe(0, 0)
    del plain["from_plain"]
    recipes = {
        "mxfp4": plain,
        "longer": recipe(0.03, -0.001, "preserved"),
        "nearer": recipe(0, -0.001),
        "shorter": recipe(-0.03, -0.001),
        "farther": recipe(0, 0.001),
        "same": recipe(0, 0),
        "broken": {"seconds": 2.0, "peak_bytes": 1e8, "error": "error: no compiler"},
    }
    bench_recipes._adjust(list(recipes.values()))
    return {
        "command": "python tools/bench_recipes.py",
        "trial": False,
        "prompts": 16,
        "max_tokens": 96,
        "workloads": ["sums", "talks"],
        "hardware": {"cpu": "a processor", "cores": 2},
        "versions": {"mxq": "0.1.0", "amd-quark": None},
        "margin": 0.03,
        "resampling": {"confidence": 0.95, "resamples": 2000},
        "models": {"dense": {"bytes": 13e6, "recipes": recipes}},
    }


def said(results: dict[str, Any]) -> dict[str, str]:
    """The verdict in bold, by recipe."""
    bullets = [line for line in recipes_page.page(results) if line.startswith("* **`")]
    return {line.split("`")[1]: line.split("**")[1].partition(": ")[2].rstrip(".") for line in bullets}


def test_each_recipe_is_called_what_its_numbers_show(results: dict[str, Any]) -> None:
    assert said(results) == {
        "longer": "worth it",
        "nearer": "nearer to bf16, but no gain of acceptance is shown",
        "shorter": "not worth it: acceptance falls",
        "farther": "not worth it: no gain of acceptance is shown, and it is farther from bf16",
        "same": "no difference is shown",
        "broken": "not measured",
    }
    text = "\n".join(recipes_page.page(results))
    assert "DFlash K=15 +3.0% (+1.5% to +4.5%) (more), MTP K=3 +0.0% (-10.0% to +10.0%) (not told apart)" in text
    assert "preserved with `longer`" in text
    assert "`broken` has no numbers: error: no compiler" in text
    other = copy.deepcopy(results)
    other["models"]["moe"] = copy.deepcopy(other["models"]["dense"])
    other["models"]["moe"]["recipes"]["longer"] = other["models"]["dense"]["recipes"]["shorter"]
    assert said(other)["longer"] == "depends on the model or the method"


def test_what_may_be_chance_is_not_told(results: dict[str, Any]) -> None:
    claims = results["models"]["dense"]["recipes"]["longer"]["from_plain"]
    claims["dflash-15"]["p"] = 0.02  # by itself enough, among all claims of the page not
    bench_recipes._adjust(list(results["models"]["dense"]["recipes"].values()))
    assert said(results)["longer"] == "nearer to bf16, but no gain of acceptance is shown"
    results["trial"] = True
    assert set(said(results).values()) == {"no difference is shown", "not measured"}
    assert any("A trial" in line for line in recipes_page.page(results))
