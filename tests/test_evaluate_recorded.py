"""The recorded runs that come with mxq: whole, of every arm, with nothing of the machine in them."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mxq import testbed
from mxq.analysis.comparison import compare
from mxq.errors import UsageError
from mxq.evaluate import recorded
from mxq.explain import read_explanations
from mxq.stats import Verdict

CONFIGURATIONS = ["ar", *(f"{method}-{k}" for method in ("mtp", "dflash") for k in (3, 7, 15))]
ARMS = {f"{target} {configuration}" for target in ("bf16", "mxfp4") for configuration in CONFIGURATIONS}


@pytest.mark.parametrize("spec", recorded.EXAMPLES)
def test_a_recorded_run_is_whole(spec: str) -> None:
    run = recorded.read(spec)
    assert run.finished
    assert run.name == spec
    assert run.warnings == ()
    assert {arm.label for arm in run.arms} == ARMS
    assert set(run.prompts) == set(testbed.WORKLOADS)
    assert min(run.prompts.values()) >= 32
    assert (run.path / "targets" / "mxfp4-layers.jsonl").stat().st_size > 1000
    explained = read_explanations(run.path, run.info["definition"])
    assert {(e.method, e.num_speculative_tokens) for e in explained} == {("mtp", 15), ("dflash", 15)}


@pytest.mark.parametrize(("spec", "verdict"), [("example:dense", Verdict.DEGRADED), ("example:moe", Verdict.UNDECIDED)])
def test_a_recorded_run_gives_verdicts(spec: str, verdict: Verdict) -> None:
    comparison = compare(recorded.read(spec))
    assert comparison.withheld is None
    assert comparison.verdict is verdict
    # As benchmarks/TESTBED.md and WHY.md say of other prompts: DFlash at K=15 loses by MXFP4, and at K=3 hardly.
    lengths = [row for row in comparison.rows if row.quantity == "acceptance length"]
    rows = {row.configuration: row for row in lengths if row.workload is None}
    assert rows["dflash-15"].change.upper < -0.03
    assert rows["dflash-3"].change.lower > -0.04
    assert {row.adjusted for row in lengths} >= {Verdict.PRESERVED, Verdict.UNDECIDED}


@pytest.mark.parametrize("spec", recorded.EXAMPLES)
def test_nothing_of_the_machine_is_in_it(spec: str) -> None:
    with zipfile.ZipFile(recorded.archive(spec)) as archive:
        assert all(name == name.lstrip("/") and ".." not in name for name in archive.namelist())
        for name in archive.namelist():
            found = re.search(rb"(?<![\w./-])/(?:home|Users|root|tmp|work|workspace)/", archive.read(name))
            assert found is None, name
    assert recorded.archive(spec).stat().st_size < 1_500_000


def test_an_unknown_one_is_named() -> None:
    with pytest.raises(UsageError, match="no recorded run 'example:none'") as error:
        recorded.read("example:none")
    assert "example:dense, example:moe" in str(error.value.hint)


def test_the_unpacked_run_goes_with_the_process() -> None:
    program = "from mxq.evaluate import recorded; print(recorded.read('example:dense').path)"
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not Path(made.stdout.strip()).exists()


def test_the_command_shows_it() -> None:
    words = [sys.executable, "-m", "mxq", "eval", "--show", "example:dense", "--json"]
    made = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(made.stdout)["finished"] is True
