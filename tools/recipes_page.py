"""The page of ``tools/bench_recipes.py``: tables, and what they say, made from the numbers alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mxq import files
from mxq.stats import ENOUGH

PLAIN = "mxfp4"
_SURE = 0.05
_NAMES = {"dflash-15": "DFlash K=15", "mtp-3": "MTP K=3"}
_HEAD = ["recipe", "size", "KL to bf16, nats per token", "same choice"]
_COST = ["conversion", "peak memory"]

Recipe = Mapping[str, Any]


def page(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of benchmarks/RECIPES.md."""
    around, hardware = results["versions"], results["hardware"]
    yield from ("# What recipes are worth: the testbed", "", f"`{results['command']}`", "")
    yield (
        f"In process, greedy, bf16 arithmetic, on {hardware['cpu']}, {hardware['cores']} cores, one thread, the models "
        f"side by side; {', '.join(f'{name} {version}' for name, version in around.items() if version)}. The first "
        f"{results['prompts']} prompts of each of {len(results['workloads'])} workloads, answers of up to "
        f"{results['max_tokens']} tokens."
    )
    if results["trial"]:
        yield from ("", f"**A trial: with fewer than {ENOUGH} prompts of each workload, nothing is told of recipes.**")
    yield from ("", "## Which are worth it", "", *_worth(results))
    for name, model in results["models"].items():
        yield from ("", f"## testbed:{name}", "", *_model(model, results["workloads"]))
    yield from ("", "## How to read this", "", _notes(results))


def claims(recipe: Recipe, *, trial: bool) -> dict[str, int]:
    """Return where a recipe differs from plain MXFP4: 1 better, -1 worse, 0 not told; held to Holm's procedure."""
    told = {}
    for name, change in recipe.get("from_plain", {}).items():
        better = -change["estimate"] if name == "divergence" else change["estimate"]
        sure = change["adjusted_p"] <= _SURE and not trial
        told[name] = ((better > 0) - (better < 0)) if sure else 0
    return told


def _worth(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the answer, recipe by recipe."""
    models: Mapping[str, Any] = results["models"]
    recipes = list(dict.fromkeys(recipe for model in models.values() for recipe in model["recipes"]))
    yield from _against_bf16(models, recipes)
    yield from ("", f"Against plain `{PLAIN}`, over all workloads:", "")
    grouped: dict[str, list[str]] = {}
    for recipe in (one for one in recipes if one != PLAIN):
        of_models = {name: model["recipes"][recipe] for name, model in models.items()}
        found = {name: claims(one, trial=results["trial"]) for name, one in of_models.items()}
        accepted = [value for told in found.values() for name, value in told.items() if name != "divergence"]
        nearer = [told.get("divergence", 0) for told in found.values()]
        if all(one["error"] for one in of_models.values()):
            word = "not measured"
        elif 1 in accepted and -1 not in accepted:
            word = "worth it"
        elif -1 in accepted and 1 not in accepted:
            word = "not worth it: acceptance falls"
        elif {1, -1} <= set(accepted):
            word = "depends on the model or the method"
        elif 1 in nearer and -1 not in nearer:
            word = "nearer to bf16, but no gain of acceptance is shown"
        elif -1 in nearer:
            word = "not worth it: no gain of acceptance is shown, and it is farther from bf16"
        else:
            word = "no difference is shown"
        grouped.setdefault(word, []).append(recipe)
        sentences = "; ".join(
            _sentence(name, one, models[name]["recipes"][PLAIN], found[name]) for name, one in of_models.items()
        )
        yield f"* **`{recipe}`: {word}.** {sentences}."
    yield from ("", "In short: " + "; ".join(f"{_listed(names)}: {word}" for word, names in grouped.items()) + ".")


def _against_bf16(models: Mapping[str, Any], recipes: Sequence[str]) -> Iterator[str]:
    sentences = []
    for configuration, words in _NAMES.items():
        of_models = []
        for name, model in models.items():
            verdicts: dict[str, list[str]] = {}
            for recipe in recipes:
                found = model["recipes"][recipe].get("acceptance", {}).get(configuration)
                verdicts.setdefault(found["verdict"] if found else "not measured", []).append(recipe)
            told = (f"{verdict} with {_listed(names)}" for verdict, names in verdicts.items())
            of_models.append(f"testbed:{name}: {'; '.join(told)}")
        sentences.append(f"Acceptance of {words} against bf16, over all workloads: {'. '.join(of_models)}.")
    yield " ".join(sentences)


def _sentence(name: str, recipe: Recipe, plain: Recipe, told: Mapping[str, int]) -> str:
    if recipe["error"]:
        return f"testbed:{name} has no numbers ({recipe['error'].removeprefix('error: ')})"
    if "from_plain" not in recipe:
        return f"testbed:{name}: plain `{PLAIN}` is not measured"
    changes = recipe["from_plain"]
    words = {1: "more", -1: "less", 0: "not told apart"}
    accepted = [
        f"{_NAMES.get(key, key)} {_percent(change)} ({words[told[key]]})"
        for key, change in changes.items()
        if key != "divergence"
    ]
    share = recipe["divergence"]["estimate"] / plain["divergence"]["estimate"] - 1
    nearer = {1: "nearer", -1: "farther", 0: "not told apart"}[told["divergence"]]
    cost = f"{recipe['bytes'] / plain['bytes'] - 1:+.0%} bytes, {recipe['seconds'] / plain['seconds']:.0f}x the time"
    return f"testbed:{name}: {', '.join(accepted)}, KL {share:+.0%} ({nearer}), {cost}"


def _model(model: Mapping[str, Any], workloads: Sequence[str]) -> Iterator[str]:
    recipes = model["recipes"]
    done = {name: one for name, one in recipes.items() if not one["error"]}
    configurations = list(dict.fromkeys(name for one in done.values() for name in one["acceptance"]))
    heads = [text for name in configurations for text in (f"{_NAMES.get(name, name)}", "against bf16")]
    bf16 = [text for name in configurations for text in (_length(done, name, "base"), "")]
    rows = [["bf16", files.size(model["bytes"]), "0", "100%", *bf16, "", ""]]
    for name, one in recipes.items():
        if one["error"]:
            rows.append([f"`{name}`", "no numbers", *[""] * (len(heads) + 4)])
            continue
        lengths = [
            text
            for configuration in configurations
            for text in (_length({name: one}, configuration, "new"), _judged(one["acceptance"][configuration]))
        ]
        size, kl = files.size(one["bytes"]), _interval(one["divergence"], "{:.5f}")
        cost = [f"{one['seconds']:.1f} s", files.size(one["peak_bytes"])]
        rows.append([f"`{name}`", size, kl, _interval(one["agreement"], "{:.2%}"), *lengths, *cost])
    yield from _table([*_HEAD, *heads, *_COST], rows)
    for name, one in recipes.items():
        if one["error"]:
            yield from ("", f"`{name}` has no numbers: {one['error']}")
    if len(workloads) > 1:
        for configuration in configurations:
            yield from ("", f"Change of acceptance of {_NAMES.get(configuration, configuration)} by workload:", "")
            rows = [
                [
                    f"`{name}`",
                    *(_judged(one["workloads"][workload]["acceptance"][configuration]) for workload in workloads),
                ]
                for name, one in done.items()
            ]
            yield from _table(["recipe", *workloads], rows)


def _notes(results: Mapping[str, Any]) -> str:
    resampling = results["resampling"]
    return (
        "Size: bytes of all tensors. KL(bf16 || MXFP4) and the share of tokens for which both choose the same are of "
        "every token of bf16's own plain answers. Acceptance length: tokens committed per verify pass, the geometric "
        "mean over workloads; its change is paired by prompt. Over all workloads, each weighs alike. "
        f"{resampling['confidence']:.0%} intervals: bootstrap over prompts, {resampling['resamples']} resamples, each "
        f"for its row alone. Verdicts as of `mxq compare`: preserved is within {results['margin']:.0%} with all of the "
        "interval, degraded and improved beyond it, undecided neither; claims of one comparison are held to Holm's "
        f"procedure. Better or worse than plain `{PLAIN}` is said where the interval of the change leaves out 0 also "
        "among all such claims of this page (Holm again, at 5%). "
        "Time and peak memory are those of the whole process, start of Python and import of Quark included, taken once "
        "with the other model's beside it: tenths of a second say nothing. Both models are small and were trained on "
        "generated text: what recipes do about a large model's outliers is not in here."
    )


def _length(recipes: Mapping[str, Recipe], configuration: str, side: str) -> str:
    found = next((one["acceptance"][configuration][side]["estimate"] for one in recipes.values()), None)
    return "" if found is None else f"{found:.2f}"


def _judged(row: Mapping[str, Any]) -> str:
    return f"{_percent(row['change'])} {row['verdict']}"


def _percent(change: Mapping[str, Any]) -> str:
    return _interval(change, "{:+.1%}")


def _interval(one: Mapping[str, Any], form: str) -> str:
    if one["lower"] is None or one["upper"] is None:
        return f"{form.format(one['estimate'])} (no interval)"
    return f"{form.format(one['estimate'])} ({form.format(one['lower'])} to {form.format(one['upper'])})"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
