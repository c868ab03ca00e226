"""tools/gpu: cells are timed by engines that are started together and timed alone, and shown with what they lack."""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tools" / "gpu"))

import engine as engine_module  # noqa: E402
import run  # noqa: E402
import shapes  # noqa: E402
import table  # noqa: E402

VLLM = '''
"""A stand-in for vLLM: answers at once, accepts what it is told, notes when it works; its core is a process."""
import json, multiprocessing, os, sys, time
__version__ = "0.25.1"
from types import SimpleNamespace as Some

class SamplingParams:
    def __init__(self, **how):
        self.tokens = how["max_tokens"]

def note(what, name):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(json.dumps([time.time(), what, name]) + "\\n")

def core(name):
    note("on the GPU", name)

class LLM:
    def __init__(self, model, speculative_config, num_gpu_blocks_override, max_num_seqs, **how):
        self.name = os.path.basename(model) + "-" + str(speculative_config and speculative_config["method"])
        process = multiprocessing.get_context(os.environ["VLLM_WORKER_MULTIPROC_METHOD"]).Process(
            target=core, args=(self.name,)
        )
        process.start()
        process.join()
        if self.name == os.environ.get("NEVER_STARTS"):
            time.sleep(100)
        if self.name == os.environ.get("FAILS"):
            raise RuntimeError("CUDA out of memory")
        self.rates = Some(copy_=lambda new: setattr(self, "length", 1 + sum(chain(new))), new_tensor=list)
        self.length, self.drafts, self.accepted = 1.0, 0, 0
        self.llm_engine = Some(model_config=Some(get_vocab_size=lambda: 1000))
        print("Maximum concurrency for 1,024 tokens per request: 26.31x")
        note("started", self.name)
        if speculative_config and "attention_backend" in speculative_config:
            note("attention " + speculative_config["attention_backend"], self.name)

    def generate(self, prompts, sampling, use_tqdm):
        note("begins", self.name)
        time.sleep(100 if self.name == os.environ.get("HANGS") else 0.05)
        drafts = round(len(prompts) * sampling.tokens / self.length)
        self.drafts += drafts
        self.accepted += round(drafts * (self.length - 1))
        note("ends", self.name)
        slow = 9.0 if len(prompts) > 26 else 1.0
        return [
            Some(outputs=[Some(token_ids=[0] * sampling.tokens)], metrics=Some(first_token_latency=[1.0, slow][i > 26]))
            for i in range(len(prompts))
        ]

    def get_metrics(self):
        names = {"drafts": self.drafts, "accepted_tokens": self.accepted}
        return [Some(name=f"vllm:spec_decode_num_{name}", value=value) for name, value in names.items()]

    def collective_rpc(self, function, args):
        sampler = Some(synthetic_conditional_rates=self.rates)
        return [function(Some(model_runner=Some(rejection_sampler=sampler)), *args)]

def chain(rates):
    kept = 1.0
    for rate in rates:
        kept *= rate
        yield kept
'''


IMPORT = """
import os, time, vllm
vllm.note("imports", "")
with open(os.environ["NOTES"]) as notes:
    time.sleep(3 if notes.read().count('"imports"') == 3 else 0)  # slower than the start of another engine
vllm.note("imported", "")
"""
CORE = """
import os, vllm
vllm.note("core imports", os.environ["MXQ_GATE"])
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("vllm")
    (place / "vllm" / "entrypoints").mkdir(parents=True)
    (place / "vllm" / "__init__.py").write_text(VLLM)
    (place / "vllm" / "entrypoints" / "__init__.py").touch()
    (place / "vllm" / "entrypoints" / "llm.py").write_text(IMPORT)
    (place / "vllm" / "v1" / "engine").mkdir(parents=True)
    (place / "vllm" / "v1" / "engine" / "core.py").write_text(CORE)
    return {**os.environ, "PYTHONPATH": str(place)}


def timed(environment: dict[str, str], place: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/gpu/run.py"), "--out", "cells", "--work", "work", "--cache", "cache"]
    env = environment | {"NOTES": str(place / "notes")} | more
    return subprocess.run([*command, *words], cwd=place, env=env, capture_output=True, text=True, timeout=300)


def cells(place: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in (place / "cells").glob("*.json")}


DENSE = ("--models", "Qwen3.5-27B", "--workloads", "humaneval", "mt-bench")


def test_engines_start_together_and_are_timed_alone(environment: dict[str, str], tmp_path: Path) -> None:
    done = timed(environment, tmp_path, *DENSE, "--methods", "ar", "mtp-3")
    assert done.returncode == 0, done.stderr
    found = cells(tmp_path)
    assert len(found) == 2 * 3 + 2 * 2 * 3
    mtp = found["Qwen3.5-27B-mxfp4-mtp-3-mt-bench-c8"]
    assert mtp["finished"]
    assert [repeat["output_tokens"] for repeat in mtp["repeats"]] == [8 * 512] * 3
    for repeat in mtp["repeats"]:
        assert 1 + repeat["accepted"] / repeat["drafts"] == pytest.approx(mtp["acceptance_length"], rel=0.01)
    assert mtp["acceptance_length"] < found["Qwen3.5-27B-mxfp4-mtp-3-humaneval-c8"]["acceptance_length"]
    assert mtp["room_for"] == 26.31
    assert mtp["engine_args"]["num_gpu_blocks_override"] >= 32 * (3 * (3 + 1) + 1), "3 groups of states, 1 of K/V"
    assert mtp["env"]["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] == "uniform_random"
    assert mtp["drafter_attention"] is None
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    started = [name for _, what, name in notes if what == "started"]
    ar, mtp_first = {"Qwen3.5-27B-bf16-None", "Qwen3.5-27B-mxfp4-None"}, "Qwen3.5-27B-mxfp4-mtp"
    assert set(started[:3]) == {*ar, mtp_first}, "two fit beside each other, and one that compiles what comes later"
    assert sorted(started[3:]) == ["Qwen3.5-27B-bf16-mtp", mtp_first]
    begun: list[str] = []  # an engine's work is one stretch: no other works meanwhile, imports or takes the GPU
    for _, what, name in notes:
        if what != "ends" and (not begun or begun[-1] != name):
            begun.append(name if what == "begins" else what)
    stretches = [name for name in begun if name in {*started}]
    assert len(stretches) == len(set(stretches)) == 4
    again = timed(environment, tmp_path, *DENSE, "--methods", "ar", "mtp-3")
    assert (again.returncode, again.stdout) == (0, "")
    assert cells(tmp_path) == found


def test_nothing_imports_while_cells_are_timed(environment: dict[str, str], tmp_path: Path) -> None:
    alone = ("--precisions", "bf16", "--memory", "90")
    done = timed(environment, tmp_path, *DENSE, "--methods", "mtp-3", "mtp-7", "mtp-15", *alone)
    assert done.stdout.count(": started after") == 3, "one after the other"
    what = [json.loads(line)[1] for line in (tmp_path / "notes").read_text().splitlines()]
    assert what.count("imported") == 3
    begun = [i for i, one in enumerate(what) if one == "begins"]
    assert all(what[:i].count("imports") == what[:i].count("imported") for i in begun)


def test_an_engine_that_fails_costs_only_itself(environment: dict[str, str], tmp_path: Path) -> None:
    words = (*DENSE, "--methods", "ar", "dflash-15", "--drafter-attention", "TRITON_ATTN")
    done = timed(environment, tmp_path, *words, FAILS="Qwen3.5-27B-bf16-None")
    assert done.returncode == 1, done.stderr
    assert "Qwen3.5-27B-bf16-ar-0: exit code 1" in done.stdout
    assert "CUDA out of memory" in done.stdout
    assert not any(name.startswith("Qwen3.5-27B-bf16-ar") for name in cells(tmp_path))
    assert len(cells(tmp_path)) == 3 + 2 * 2 * 3
    assert {(cell["engine"]["method"], cell["drafter_attention"]) for cell in cells(tmp_path).values()} == {
        ("ar", None),
        ("dflash", "TRITON_ATTN"),
    }
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert {what for _, what, name in notes if name.endswith("dflash") and "attention" in what} == {
        "attention TRITON_ATTN"
    }


def test_an_engine_that_is_stuck_says_where_and_costs_only_itself(environment: dict[str, str], tmp_path: Path) -> None:
    words = (*DENSE, "--methods", "ar", "--stuck", "3")
    done = timed(environment, tmp_path, *words, HANGS="Qwen3.5-27B-bf16-None")
    assert done.returncode == 1, done.stderr
    assert "Qwen3.5-27B-bf16-ar-0: stuck, printed nothing for 3 s" in done.stdout
    assert "in generate" in done.stdout, "what it was at"
    assert {name[:20] for name in cells(tmp_path)} == {"Qwen3.5-27B-mxfp4-ar"}


def test_an_engine_that_never_starts_costs_only_itself(environment: dict[str, str], tmp_path: Path) -> None:
    words = (*DENSE, "--methods", "ar", "--start", "8")
    done = timed(environment, tmp_path, *words, NEVER_STARTS="Qwen3.5-27B-bf16-None")
    assert done.returncode == 1, done.stderr
    assert "Qwen3.5-27B-bf16-ar-0: stuck, not started after 8 s" in done.stdout
    assert {name[:20] for name in cells(tmp_path)} == {"Qwen3.5-27B-mxfp4-ar"}


def test_a_run_that_is_ended_ends_its_engines(environment: dict[str, str], tmp_path: Path) -> None:
    env = environment | {"NOTES": str(tmp_path / "notes"), "NEVER_STARTS": "Qwen3.5-27B-bf16-None"}
    words = ["--out", "cells", "--work", "work", "--cache", "cache", "--models", "Qwen3.5-27B", "--methods", "ar"]
    command = [sys.executable, str(ROOT / "tools/gpu/run.py"), *words]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL) as run_:
        while not (tmp_path / "notes").exists():
            time.sleep(0.1)
        assert len(processes_of(tmp_path)) >= 3
        run_.terminate()
        assert run_.wait(20) == 143
    for _ in range(100):
        if not processes_of(tmp_path):
            return
        time.sleep(0.1)
    raise AssertionError("engines outlived the run")


def processes_of(place: Path) -> list[str]:
    """Those whose environment names the place."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(place / "notes").encode() in (process / "environ").read_bytes():
                found.append(process.name)
    return found


def test_finished_cells_are_kept_beside_those_that_are_timed(environment: dict[str, str], tmp_path: Path) -> None:
    words = ("--models", "Qwen3.5-27B", "--precisions", "mxfp4", "--methods", "mtp-3", "--workloads")
    assert timed(environment, tmp_path, *words, "humaneval").returncode == 0
    before = cells(tmp_path)
    assert len(before) == 3
    assert timed(environment, tmp_path, *words, "humaneval", "gsm8k").returncode == 0
    after = cells(tmp_path)
    assert len(after) == 6
    assert {name: after[name] for name in before} == before


def test_a_gpu_that_is_too_small_is_told_by_how_much(environment: dict[str, str], tmp_path: Path) -> None:
    done = timed(environment, tmp_path, *DENSE, "--methods", "ar", "--memory", "24")
    assert done.returncode == 0
    assert [line.split(" GB")[0] for line in done.stdout.splitlines()] == [
        "Qwen3.5-27B-bf16-ar-0: not started, the GPU is 38.7",
        "Qwen3.5-27B-mxfp4-ar-0: not started, the GPU is 2.9",
    ]
    assert cells(tmp_path) == {}
    for wrong in (("--repeats", "0"), ("--concurrency", "-1")):
        assert timed(environment, tmp_path, *DENSE, *wrong).returncode == 2


def test_what_was_timed_before_stays_as_it_is(environment: dict[str, str], tmp_path: Path) -> None:
    timed(environment, tmp_path, *DENSE, "--methods", "ar", "--repeats", "1")
    path = tmp_path / "cells/Qwen3.5-27B-bf16-ar-0-any-c1.json"
    cut = json.loads(path.read_text()) | {"finished": False, "room_for": 7.0}
    path.write_text(json.dumps(cut))
    done = timed(environment, tmp_path, *DENSE, "--methods", "ar", FAILS="Qwen3.5-27B-bf16-None")
    assert "exit code 1" in done.stdout
    assert json.loads(path.read_text()) == cut
    late = timed(environment, tmp_path, *DENSE, "--methods", "ar", "--seconds", "1")
    assert "not started" in late.stdout


def options_of(memory: float) -> argparse.Namespace:
    return argparse.Namespace(
        models=["Qwen3.5-27B", "Qwen3.5-35B-A3B"],
        precisions=["bf16", "mxfp4"],
        methods=list(run.METHODS),
        workloads=["humaneval"],
        concurrency=[1, 8, 32],
        memory=memory,
        published=run.PUBLISHED,
        work=Path("nowhere"),
        out=Path("nowhere"),
        repeats=3,
    )


@pytest.mark.parametrize("memory", [150.7, 200, 250, 300, 350, 400, 1000])
def test_no_code_is_compiled_twice_at_once(memory: float) -> None:
    compiled: set[tuple[str, str, str]] = set()
    for group in run._groups(list(run._engines(options_of(memory))), 0.95 * memory * 1e9):
        families = [engine.family for engine in group if engine.family not in compiled]
        assert len(families) == len(set(families))
        compiled |= set(families)
    assert len(compiled) == 2 * 2 * 3


def test_engines_fit_into_the_memory_together() -> None:
    engines = list(run._engines(options_of(150.7)))
    assert len(engines) == 2 * 7 * 2
    groups = list(run._groups(engines, 0.95 * 150.7e9))
    started = [engine for group in groups for engine in group]
    assert sorted(e.name for e in started if not e.compiles) == sorted(engine.name for engine in engines)
    assert all(sum(engine.bytes for engine in group) <= 0.95 * 150.7e9 for group in groups)
    assert groups[0][0].name == "Qwen3.5-27B-bf16-ar-0"
    assert len(groups) < len(engines)
    (large,) = [engine for engine in engines if engine.name == "Qwen3.5-27B-bf16-dflash-15"]
    assert large.weights == pytest.approx(59e9, rel=0.02), "27B and a drafter of 2B in bfloat16"
    assert large.number < 32 * large.blocks.each, "32 requests do not fit"
    assert large.number * large.blocks.bytes > 75e9


def test_requests_take_the_blocks_that_vllm_says() -> None:
    said = 0
    for cell in table.read(ROOT / "benchmarks/results/h200").values():
        engine, args = cell["engine"], cell["engine_args"]
        blocks = shapes.blocks_needed(
            engine["model"], engine["method"], engine["num_speculative_tokens"], 15, engine_module.MOST_TOKENS
        )
        number = args.get("num_gpu_blocks_override", args.get("kv_cache_memory_bytes", 0) // blocks.bytes)
        if cell.get("room_for"):
            assert cell["room_for"] == round(number / blocks.each, 2), "as its log says"
            said += 1
    assert said >= 36


def cell(method: str, k: int, workload: str, concurrency: int, rates: list[float], **more: Any) -> dict[str, Any]:
    repeats = [{"tokens_per_s": r, "drafts": 10 * k, "accepted": 30, "median_ttft_s": 0.7, **more} for r in rates]
    return {
        "engine": {"model": "Qwen3.5-27B", "precision": "bf16", "method": method, "num_speculative_tokens": k},
        "workload": workload,
        "concurrency": concurrency,
        "acceptance_length": 4.0 if k else None,
        "repeats": repeats,
        "finished": len(rates) == 3,
        "room_for": 26.3,
        "engine_args": {} if method == "ar" else {"num_gpu_blocks_override": 5},
        "env": {},
        "gpu": "GPU",
        "versions": {"vllm": "1"},
        "prompt_tokens": 256,
        "output_tokens": 512,
    }


def test_the_page_has_ratios_who_waited_and_what_is_missing(tmp_path: Path) -> None:
    made = [
        cell("ar", 0, "any", 32, [100.0, 110.0, 120.0]),
        cell("dflash", 15, "humaneval", 32, [210.0, 220.0, 231.0], last_ttft_s=4.4),
        cell("dflash", 15, "humaneval", 1, [20.0], last_ttft_s=0.7),
    ]
    for number, one in enumerate(made):
        (tmp_path / f"{number}.json").write_text(json.dumps(one))
    text = "\n".join(table.page(table.read(tmp_path)))
    waited = "220.0 (210.0–231.0), some waited (room for 26) [2.00x]"
    assert f"| dflash-15 | 4.000, 1.200 | bf16 | 20.0 (20.0–20.0) | {waited} |" in text
    assert "- Qwen3.5-27B bf16 dflash-15, 1 in flight: 1 repeats only" in text
    assert "- Qwen3.5-27B, gsm8k: everything" in text
    assert "with a cache and graphs of other sizes: Qwen3.5-27B ar bf16.\n" in text
    assert "Experts are drawn at random" not in text
    (left,) = [line for line in text.splitlines() if line.startswith("- Qwen3.5-27B, humaneval: ")]
    assert "ar mxfp4" in left
    assert "dflash-15 mxfp4" in left
    assert "ar bf16" not in left
    assert "dflash-15 bf16" not in left
    with pytest.raises(SystemExit, match="no cells in"):
        table.read(tmp_path / "none")
    with pytest.raises(SystemExit, match="no place for the table"):
        table.with_table("text", table.read(tmp_path))


def test_figures_of_the_scripts_page_are_those_of_the_cells() -> None:
    text = " ".join((ROOT / "tools/gpu/README.md").read_text().split())
    started = sorted(
        {
            cell["started_s"]
            for cell in table.read(ROOT / "benchmarks/results/h200").values()
            if "num_gpu_blocks_override" in cell["engine_args"]
        }
    )
    *later, one, other = (f"{seconds:.0f}" for seconds in started)
    assert f"first starts took {one} and {other} s so, later ones {later[0]} to {later[-1]} s" in text

    arms = {key[:4] for key in table.read(ROOT / "benchmarks/results/h200") if key[0] == "Qwen3.5-35B-A3B"}
    assert f"and {len(arms)} of 35B-A3B's {2 + 2 * 6 * 3} arms" in (ROOT / "CHANGELOG.md").read_text()

    def pass_ms(method: str) -> float:
        cells = table.read(ROOT / "benchmarks/results/h200-own-routing")
        (cell,) = (cell for key, cell in cells.items() if key[2] == method and key[4] == 32)
        passes = (cell["output_tokens"] - 1) / (cell["acceptance_length"] or 1)
        took = [repeat["wall_s"] - repeat["median_ttft_s"] for repeat in cell["repeats"]]
        return 1e3 * statistics.median(took) / passes

    assert f"DFlash with K 3 took {pass_ms('dflash-3'):.1f} ms behind the first token" in text
    assert f"with a quarter of its tokens, {pass_ms('ar'):.1f} " in text


def test_what_the_readme_says_of_mxfp4_is_so() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert (
        "with 27B whole requests gain with up to 32 tokens in a pass (requests times K + 1) and lose from 64 on"
        in readme
    )
    assert (
        "35B-A3B, which reads more experts the more tokens a pass has, gains in all cells but plain decoding" in readme
    )
    committed = table.read(ROOT / "benchmarks/results/h200")
    rates = {
        key: statistics.median(repeat["tokens_per_s"] for repeat in cell["repeats"]) for key, cell in committed.items()
    }
    for (model, precision, method, workload, count), rate in rates.items():
        wide = rates.get((model, "bf16", method, workload, count))
        if precision == "bf16" or wide is None:
            continue
        tokens = count * (1 + int(method.partition("-")[2] or 0))
        gains = tokens <= 32 if model == "Qwen3.5-27B" else tokens > 1
        # Plain decoding drafts nothing, and has as many tokens in a pass as requests.
        assert tokens <= 32 or tokens >= 64
        assert (rate > wide) == gains, (model, method, workload, count)


def test_pages_are_those_of_the_committed_cells() -> None:
    committed = table.read(ROOT / "benchmarks/results/h200")
    assert (ROOT / "benchmarks/H200.md").read_text() == "\n".join(table.page(committed)) + "\n"
    readme = (ROOT / "README.md").read_text()
    assert table.with_table(readme, committed) == readme
