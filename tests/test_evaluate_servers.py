"""Evaluations on servers: every arm asked the same, every cell whole or not there, across crashes of all kinds."""

import json
import socket
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decoding import Models
from on_servers import Fakes, answers, measure, request, workloads

from mxq.convert import dequantize, dequantize_run
from mxq.engines import builds
from mxq.engines.base import Sampling
from mxq.engines.process import ServerError
from mxq.errors import MxqError, UsageError
from mxq.evaluate import Arm, read_run
from mxq.evaluate.servers import order

AR, MTP = Arm("bf16", "ar"), Arm("bf16", "mtp", 3)

KEPT_OPEN = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600"}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return workloads(tmp_path_factory.mktemp("prompts"))


@pytest.fixture
def target(dense_models: Models) -> Path:
    return dense_models.target


def test_every_arm_is_asked_the_same_at_every_concurrency(
    fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path
) -> None:
    run = measure(request(target, prompts), tmp_path / "run")
    assert run.finished
    assert [(c.arm, c.workload, c.concurrency) for c in run.cells] == [
        (arm, workload, c) for workload in ("sums", "talks") for c in (1, 3) for arm in (AR, MTP)
    ]
    assert len(fakes.starts) == 2
    assert "--speculative-config" not in fakes.starts[0]
    assert '"method": "mtp"' in fakes.starts[1]
    # Greedy stand-ins: tokens depend on the prompt alone.
    for workload in ("sums", "talks"):
        cells = [cell for cell in run.cells if cell.workload == workload]
        assert len({tuple(record.token_ids for record in cell.records) for cell in cells}) == 1
        ids = [prompt_id for prompt_id in ("sum-0", "talk-0") if prompt_id.startswith(workload[:3])]
        assert all(cell.records[0].prompt_id == ids[0] for cell in cells)
    asked = defaultdict(list)
    for sent in fakes.requests:
        asked[sent["start"]].append((tuple(sent["prompt"]), sent["seed"], sent["limit"]))
    assert sorted(asked[1]) == sorted(asked[2])
    seeds = {prompt: seed for prompt, seed, _ in asked[1] if seed}
    assert len(set(seeds.values())) == len(seeds) == 6 + 6
    talk = run.cells[4].records
    assert [record.turn for record in talk] == [1, 2] * 3
    assert talk[1].prompt_sha256 is not None
    assert any(talk[0].text.strip() and record.prompt_tokens > talk[0].prompt_tokens for record in talk[1:2])


def test_what_is_in_flight_and_what_warms_up(fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path) -> None:
    measure(request(target, prompts[:1], methods=[], concurrencies=[1, 2, 5]), tmp_path / "run")
    sent = fakes.requests
    measured = {tuple(one["prompt"]) for one in sent if sent.count(one) > 1 and one["seed"]}
    begin = 0
    for concurrency in (1, 2, 5):
        warm, cell = sent[begin : begin + concurrency], sent[begin + concurrency : begin + concurrency + 6]
        begin += concurrency + 6
        assert len({tuple(one["prompt"]) for one in warm}) == concurrency
        assert not measured & {tuple(one["prompt"]) for one in warm}
        assert max(one["running"] for one in cell) == concurrency - 1
        assert len({tuple(one["prompt"]) for one in cell}) == 6
    assert begin == len(sent)


def test_what_is_noted_of_a_cell(fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path) -> None:
    fakes.do("", log="Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN']")
    out = tmp_path / "run"
    run = measure(request(target, prompts[:1], engine_env=["A=b"], engine_args=["max-model-len=512"]), out)
    plain, cell = run.cells[2:]
    assert (cell.arm, cell.concurrency) == (MTP, 3)
    facts = cell.facts
    assert facts["wall_s"] < sum(record.duration_s for record in cell.records) < 3 * facts["wall_s"]
    assert facts["counters"]["requests"] == 6
    assert facts["counters"]["output_tokens"] == sum(record.output_tokens for record in cell.records)
    assert facts["counters"]["drafts"] == sum(len(record.accepted or ()) for record in cell.records)
    assert plain.facts["counters"]["drafts"] is None
    assert facts["passes_from"] == "server"
    assert {check["ok"] for check in facts["checks"]} == {True}
    assert (facts["refused"], facts["lost"], facts["near_ties"]) == (0, [], [])
    server = facts["server"]
    assert (server["build"], server["version"], server["started"]) == ("vllm", "0.32.0", 1)
    assert (server["gpu"], server["gpus_beside"], server["mxfp4"]) == (None, 0, None)
    assert server["env"] == {"A": "b"} | KEPT_OPEN
    assert "--max-model-len 512" in " ".join(server["command"])
    assert server["kernels"]["attention"] == ["FLASH_ATTN"]
    assert server["log"] == "servers/bf16-mtp-3.log"
    assert "serving model" in (out / server["log"]).read_text()
    for record in cell.records:
        assert record.arrivals_s is not None
        assert record.arrivals_s[0] == record.ttft_s
        assert len(record.arrivals_s) == 1 + len(record.accepted or ())
    settings = run.info["definition"]
    assert (settings["engine"], settings["device"], settings["engine_args"]) == ("vllm", "h200", ["max-model-len=512"])
    assert run.info["environment"]["engine"]["version"] == "0.32.0"
    with pytest.raises(UsageError, match="--env A=b there, None now"):
        measure(request(target, prompts[:1], engine_args=["max-model-len=512"]), out)


def test_a_finished_run_starts_nothing(fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path) -> None:
    first = measure(request(target, prompts), tmp_path / "run")
    fakes.do("memory")
    assert answers(measure(request(target, prompts), tmp_path / "run")) == answers(first)
    assert not fakes.starts


def test_repeats_are_interleaved_and_servers_reused(
    fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path
) -> None:
    asked = request(target, prompts[:1], budgets=[3, 7], repeats=2, concurrencies=[1])
    run = measure(asked, tmp_path / "one")
    assert [words.count("num_speculative_tokens") for words in fakes.starts] == [0, 1, 1, 0, 1, 1]
    assert ["7}" in words for words in fakes.starts] == [False, False, True, False, True, False]
    assert [cell.facts["server"]["started"] for cell in run.cells] == [1, 1, 1, 2, 2, 2]
    fakes.do("")
    assert answers(measure(asked, tmp_path / "three", at_once=3)) == answers(run)
    assert len(fakes.starts) == 3
    fakes.do("")
    measure(replace(asked, methods=[]), tmp_path / "same")
    assert len(fakes.starts) == 1


def test_servers_that_fit_are_started_together_behind_the_first(
    fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = request(target, prompts[:1], budgets=[3, 7], concurrencies=[1])
    measure(asked, tmp_path / "all", at_once=3)
    said = [line.split()[0] for line in capsys.readouterr().err.splitlines() if "start" in line or "ready" in line]
    # The first one compiles what the others find.
    assert said == ["starting", "bf16", *["starting"] * 2, *["bf16"] * 2]
    fakes.do("")
    measure(asked, tmp_path / "two", at_once=2)
    said = [line.split()[0] for line in capsys.readouterr().err.splitlines() if "start" in line or "ready" in line]
    assert said == ["starting", "bf16"] * 3
    assert len(fakes.starts) == 3


def test_the_order_of_arms() -> None:
    arms = [Arm(t, m, k) for t in ("bf16", "mxfp4") for m, k in (("ar", 0), ("mtp", 3), ("dflash", 3))]  # type: ignore[arg-type]
    labels = [[arm.label for arm in order(arms, repeat)] for repeat in range(3)]
    assert labels[0] == [arm.label for arm in arms]
    assert labels[1] == ["mxfp4 ar", "mxfp4 dflash-3", "mxfp4 mtp-3", "bf16 ar", "bf16 dflash-3", "bf16 mtp-3"]
    assert labels[2] == labels[0]


def test_servers_on_several_gpus_run_side_by_side(
    fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path
) -> None:
    asked = request(target, prompts, budgets=[3, 7])
    alone = measure(asked, tmp_path / "alone")
    fakes.do("")
    run = measure(asked, tmp_path / "run", gpus=("0", "3"))
    assert answers(run) == answers(alone)
    servers = [cell.facts["server"] for cell in run.cells]
    assert {server["gpu"] for server in servers} == {"0", "3"}
    assert all(server["env"]["CUDA_VISIBLE_DEVICES"] == server["gpu"] for server in servers)
    assert {server["gpus_beside"] for server in servers} >= {1}
    assert all(server["log"].endswith(f"-gpu{server['gpu']}.log") for server in servers)
    assert all(cell.facts["near_ties"] == [] for cell in run.cells if cell.arm.method != "ar")
    fakes.do("")
    amd = measure(
        request(target, prompts[:1], methods=[], device="mi355x"), tmp_path / "amd", hardware="mi355x", gpus=("5",)
    )
    assert amd.cells[0].facts["server"]["env"] == {"HIP_VISIBLE_DEVICES": "5"} | KEPT_OPEN
    fakes.do("")
    tensor_parallel = replace(asked, engine_args=["tensor_parallel_size=2"], methods=[])
    run = measure(tensor_parallel, tmp_path / "parallel", gpus=("0", "1"))
    server = run.cells[0].facts["server"]
    assert (server["gpu"], server["env"]["CUDA_VISIBLE_DEVICES"]) == ("0,1", "0,1")
    assert "--tensor-parallel-size 2" in " ".join(server["command"])
    for wrong, gpus, reason in [
        ("tensor-parallel-size=2", ("0",), "1 GPUs for servers of 2"),
        ("tensor-parallel-size", (), "--engine-arg tensor-parallel-size"),
    ]:
        with pytest.raises(UsageError, match=reason):
            measure(replace(asked, engine_args=[wrong]), tmp_path / "no", gpus=gpus)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("how", ["dies", "cut", "engine-dies", "silent", "reset"])
def test_a_lost_server_is_started_again_and_the_cell_measured_whole(
    fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "silent":
        monkeypatch.setattr("mxq.evaluate.served_cell.TIMEOUTS", fake_timeouts(0.5))
    asked = request(target, prompts)
    whole = measure(asked, tmp_path / "whole")
    fakes.do(f"{how}@14#2")  # of MTP's server: one cell is finished, the second one is under way
    run = measure(asked, tmp_path / "run")
    assert answers(run) == answers(whole)
    assert len(fakes.starts) == 3
    lost = {(cell.arm, cell.workload, cell.concurrency): cell.facts["lost"] for cell in run.cells if cell.facts["lost"]}
    assert list(lost) == [(MTP, "sums", 3)]
    (reason,) = lost[MTP, "sums", 3]
    assert {
        "dies": "its log says: ValueError: planted",
        "cut": "broke off",
        "silent": "says nothing",
        "reset": "counts less",
    }.get(how, "EngineCore") in reason
    assert [cell.facts["server"]["started"] for cell in run.cells if cell.arm == MTP] == [1, 2, 2, 2]
    cell = next(cell for cell in run.cells if cell.facts["lost"])
    assert cell.facts["counters"]["requests"] == 6
    assert {check["ok"] for check in cell.facts["checks"]} == {True}


def fake_timeouts(silence_s: float) -> Any:
    from mxq.engines.client import Timeouts

    return Timeouts(silence_s=silence_s)


def test_lost_twice_in_a_cell_ends_the_run_and_the_same_command_goes_on(
    fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path
) -> None:
    asked, out = request(target, prompts), tmp_path / "run"
    whole = answers(measure(asked, tmp_path / "whole"))
    fakes.do("dies@14#2 dies@5#3")
    with pytest.raises(ServerError, match="cell 4/8: bf16 mtp-3, sums, 3 in flight: the server ended") as caught:
        measure(asked, out)
    assert "its log says: ValueError: planted" in caught.value.message
    assert "and once before" in caught.value.message
    assert caught.value.exit_code == 1
    assert len(caught.value.message.splitlines()) == 1
    kept = read_run(out)
    assert not kept.finished
    # The plain arm, and the first cell of the other: what was not finished has no records.
    assert answers(kept) == {place: whole[place] for place in answers(kept)}
    assert len(answers(kept)) == 5
    assert sum(len(cell.records) for cell in kept.cells if not cell.finished) == 0
    before = {path: path.read_bytes() for path in out.glob("cells/*/records.jsonl")}
    assert len(before) == 5
    fakes.do("")
    assert answers(measure(asked, out)) == whole
    assert len(fakes.starts) == 1
    assert all(path.read_bytes() == data for path, data in before.items())


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("500@14#2", "cell 4/8: bf16 mtp-3, sums, 3 in flight: .* answers 500: as it was asked"),
        ("broken@14#2", "broken JSON"),
        ("miscounted@14#2", "and counted"),
        ("contradicting@14#2", "contradict each other"),
        ("memory#2", "bf16 mtp-3: the server ended .*out of memory"),
        ("options#2", "unrecognized arguments"),
    ],
)
def test_what_no_new_server_helps_against_ends_the_run(
    fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path, how: str, reason: str
) -> None:
    fakes.do(f"{how} {how.replace('#2', '#3')}")
    with pytest.raises(MxqError, match=reason) as caught:
        measure(request(target, prompts), tmp_path / "run")
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.exit_code == 1
    kept = read_run(tmp_path / "run")
    assert {cell.arm for cell in kept.cells if cell.finished} >= {AR}
    assert all(cell.finished or not cell.records for cell in kept.cells)


def test_a_server_that_is_never_ready_ends_the_run(
    fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(builds.BUILDS, "h200", replace(builds.BUILDS["h200"], ready_s=2.0))
    fakes.do("slow#2")
    with pytest.raises(ServerError, match="bf16 mtp-3: the server was not ready after 2 s; its log names no error"):
        measure(request(target, prompts[:1]), tmp_path / "run")
    assert [cell.finished for cell in read_run(tmp_path / "run").cells] == [True, False, True, False]
    fakes.do("")
    assert measure(request(target, prompts[:1]), tmp_path / "run").finished


def test_a_server_that_has_too_much_to_do_is_asked_again_and_counted(
    fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path
) -> None:
    fakes.do("429@12#2 503@13#2")
    run = measure(request(target, prompts), tmp_path / "run")
    assert run.finished
    (cell,) = [cell for cell in run.cells if cell.facts["refused"]]
    assert (cell.arm, cell.concurrency, cell.facts["refused"]) == (MTP, 3, 2)
    assert [check["name"] for check in cell.facts["checks"] if not check["ok"]] == ["no request was refused"]
    fakes.do(" ".join(f"429@{number}" for number in range(9, 20)))
    with pytest.raises(ServerError, match=r"answers 429: .*it has too much to do"):
        measure(request(target, prompts), tmp_path / "other")
    assert not [cell for cell in read_run(tmp_path / "other").cells if cell.concurrency == 3 and cell.records]


def test_a_request_that_met_a_closing_connection_is_sent_once_more_and_counted(
    fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path
) -> None:
    fakes.do("closes@15#2")
    run = measure(request(target, prompts[:1]), tmp_path / "run")
    assert run.finished
    (cell,) = [cell for cell in run.cells if cell.facts["resent"]]
    assert (cell.facts["resent"], cell.facts["refused"], cell.facts["lost"]) == (1, 0, [])
    assert [check["name"] for check in cell.facts["checks"] if not check["ok"]] == ["no request was sent again"]


def test_without_counters_or_without_passes(fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path) -> None:
    asked = request(target, prompts[:1])
    fakes.do("uncounting")
    cell = measure(asked, tmp_path / "uncounted").cells[3]
    assert cell.facts["counters"] is None
    assert "/metrics answers 404" in cell.facts["counters_missing"]
    assert cell.facts["passes_from"] == "server"
    fakes.version("0.25.1")
    fakes.do("")
    cell = measure(asked, tmp_path / "counted").cells[3]
    assert cell.facts["passes_from"] == "counters"
    assert {(record.accepted, record.drafted) for record in cell.records} == {(None, None)}
    assert cell.facts["counters"]["drafts"] > 0
    assert len(cell.facts["counters"]["per_position"]) == 3
    fakes.do("uncounting")
    with pytest.raises(ServerError, match="neither per request nor in sum how many drafts"):
        measure(asked, tmp_path / "neither")


def test_differences_from_plain_answers_are_looked_into(
    fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path
) -> None:
    fakes.do("parts")
    asked = request(target, prompts)
    run = measure(asked, tmp_path / "run")
    plain = {cell.workload: cell.records for cell in run.cells if (cell.arm, cell.concurrency) == (AR, 1)}
    found = 0
    for cell in run.cells:
        if cell.arm == AR:
            assert "near_ties" not in cell.facts
            continue
        assert cell.facts["near_ties_against"] == {"arm": "bf16 ar", "concurrency": 1}
        differing = [
            a.prompt_id
            for a, b in zip(cell.records, plain[cell.workload], strict=True)
            if a.token_ids != b.token_ids and a.prompt_sha256 == b.prompt_sha256
        ]
        ties = cell.facts["near_ties"]
        assert [tie["prompt_id"] for tie in ties] == differing
        assert all((tie["position"], tie["gap"], tie["both_on_top"]) == (4, 0.01, True) for tie in ties)
        found += len(ties)
    assert found
    fakes.do("parts silent-likelihoods")
    cell = measure(asked, tmp_path / "silent").cells[1]
    assert cell.facts["near_ties"] is None
    assert "answers 404" in cell.facts["near_ties_missing"]
    sampled = measure(replace(asked, sampling=Sampling(temperature=1.0)), tmp_path / "sampled")
    assert "near_ties" not in sampled.cells[1].facts


def test_near_ties_that_were_not_asked_about_are_later(
    fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path
) -> None:
    fakes.do("parts")
    asked, out = request(target, prompts[:1]), tmp_path / "run"
    first = measure(asked, out)
    for path in out.glob("cells/*/near_ties.json"):
        path.unlink()
    assert "near_ties" not in read_run(out).cells[1].facts
    fakes.do("parts")
    assert measure(asked, out).cells == first.cells
    assert len(fakes.starts) == 1
    fakes.do("parts dies-of-likelihoods")
    out = tmp_path / "other"
    lost = measure(asked, out)
    assert lost.finished
    assert not any("near_ties" in cell.facts for cell in lost.cells)
    fakes.do("parts")
    again = [cell.facts.get("near_ties") for cell in measure(asked, out).cells]
    assert again == [cell.facts.get("near_ties") for cell in first.cells]


def test_a_full_disk_leaves_no_part_of_a_cell(
    fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, out = request(target, prompts[:1]), tmp_path / "run"
    with monkeypatch.context() as patch:

        def full(path: Path, *more: Any) -> Any:
            if path.name == "records.jsonl" and "mtp-3-sums-c3" in str(path):
                raise OSError(28, "No space left on device")
            return real(path, *more)

        from mxq import files

        real = files.atomic_write
        patch.setattr(files, "atomic_write", full)
        with pytest.raises(MxqError, match=r"cannot write .*records.jsonl: No space left on device"):
            measure(asked, out)
    assert [cell.finished for cell in read_run(out).cells] == [True, True, True, False]
    assert not list(out.glob("cells/*c3*/.records*"))
    fakes.do("")
    assert measure(asked, out).finished
    assert len(fakes.starts) == 1


def test_no_room_for_a_run_at_all_is_a_line(
    fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mxq import files

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_json", full)
    with pytest.raises(MxqError, match=r"cannot write .*run.json: No space left on device; make room"):
        measure(request(target, prompts[:1]), tmp_path / "run")
    assert not fakes.starts


EMULATED, NATIVE = "Using EmulationMxfp4LinearKernel for MXFP4 GEMM", "Using MarlinMxFp4LinearKernel for MXFP4 GEMM"


@pytest.mark.parametrize(("log", "said"), [(EMULATED, "emulated"), (NATIVE, "native"), ("", "unknown")])
def test_how_mxfp4_is_computed_is_noted(
    fakes: Fakes, converted_dense: Path, prompts: list[str], tmp_path: Path, log: str, said: str
) -> None:
    fakes.do("", log=log)
    asked = request(converted_dense, prompts[:1], methods=[], targets={"mxfp4": str(converted_dense)})
    run = measure(asked, tmp_path / "run")
    assert {cell.facts["server"]["mxfp4"] for cell in run.cells} == {said}
    assert run.cells[0].facts["server"]["kernels"]["linear"] == ([log.split()[1]] if log else [])


def test_a_dequantized_target_has_no_kernels_of_mxfp4(
    fakes: Fakes, converted_dense: Path, prompts: list[str], tmp_path: Path
) -> None:
    dequantize_run.run(dequantize.plan(converted_dense), tmp_path / "simulation", "mxfp4")
    fakes.do("", log=NATIVE)
    targets = {"mxfp4": str(tmp_path / "simulation")}
    run = measure(request(converted_dense, prompts[:1], methods=[], targets=targets), tmp_path / "run")
    assert {cell.facts["server"]["mxfp4"] for cell in run.cells} == {"emulated"}


def test_what_a_killed_writer_left_is_not_taken(fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path) -> None:
    """Killed between the records and the cell's seal."""
    asked, out = request(target, prompts[:1]), tmp_path / "run"
    whole = answers(measure(asked, out))
    path = next(out.glob("cells/bf16-mtp-3-sums-c3-*"))
    state = json.loads((path / "cell.json").read_text())
    (path / "cell.json").write_text(
        json.dumps(
            {k: state[k] for k in ("arm", "workload", "concurrency", "repeat", "definition")} | {"state": "running"}
        )
    )
    cell = read_run(out).cells[3]
    assert (cell.finished, cell.records, cell.facts) == (False, (), {})
    assert answers(measure(asked, out)) == whole


def test_a_port_that_is_taken_meanwhile_is_no_trouble(
    fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mxq.engines.process import free_port

    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports = iter([listener.getsockname()[1]] * 3)  # of the check before the run, then of two tries
        monkeypatch.setattr("mxq.evaluate.fleet.free_port", lambda: next(ports, None) or free_port())
        assert measure(request(target, prompts[:1], methods=[]), tmp_path / "run").finished
        monkeypatch.setattr("mxq.evaluate.fleet.free_port", lambda: listener.getsockname()[1])
        with pytest.raises(MxqError, match="is taken"):
            measure(request(target, prompts[:1], methods=[]), tmp_path / "other")


def test_what_cannot_be_measured_is_refused_before_anything_is_made(
    fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="--gpus with --hardware cpu"):
        measure(request(target, prompts), tmp_path / "run", hardware="cpu", gpus=("0",))
    monkeypatch.setattr("mxq.evaluate.fleet.vllm_program", lambda hardware: None)
    with pytest.raises(MxqError, match="vLLM is not installed where mxq is"):
        measure(request(target, prompts), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not fakes.starts


def test_few_prompts_for_many_in_flight_are_said(
    fakes: Fakes, target: Path, prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = measure(request(target, prompts[:1], methods=[], concurrencies=[9, 2, 8]), tmp_path / "run")
    assert "sums has 6 conversations: no more than 6 are in flight at concurrency 8 and 9" in capsys.readouterr().err
    assert any("no more than 6 are in flight" in warning for warning in run.warnings)
