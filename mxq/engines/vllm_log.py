"""What a vLLM server's log says was really used: kernels, backends, drafter, version.

vLLM falls back in silence: a quantized model runs emulated, and answers are right and slow. The log is where it shows.
Facts are lines of one table, :data:`LINES`: a pattern, the fact it gives, and the source that prints it.

Logs are hostile: any bytes, of any length, with colours, prefixes of workers and of containers, and prompts in them.
Only lines that vLLM's logger printed give facts, and those that repeat a request give none. Of a log in which a server
was started several times, the last start counts.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

MOST_OF_A_LINE = 1 << 16
"""Bytes of a line that are looked at; the rest is passed over."""

_ANSI = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
_LOGGED = re.compile(
    r"(?P<process>\([\w .=-]{1,80} pid=\d+\) )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    r"\d\d-\d\d \d\d:\d\d:\d\d \[(?P<file>[\w./-]{1,120}):\d+\] ?(?P<message>.*)"
)
_OUTSIDE = re.compile(r"INFO: +(?P<message>Application startup complete\.)$")
_UVICORN = "uvicorn"
_REQUESTS = ("request_logger.py", "logger.py")  # they print prompts, which may look like anything
_MOST_TEXT = 300
_MOST_VALUES = 64  # of a fact; GPUs of one server, too, of which the first few say the same as all


@dataclass(frozen=True)
class Line:
    """A line that vLLM prints.

    Attributes:
        fact: the field of :class:`LogFacts` that it gives; several lines may give one.
        pattern: the message begins with it; its group is the value, or all of the message where it has none.
        source: what prints it, in vLLM.
        seen: versions of vLLM that print it: by the source of 0.32.0, by logs of 0.25.1.
    """

    fact: str
    pattern: re.Pattern[str]
    source: str
    seen: tuple[str, ...]


def _line(fact: str, pattern: str, source: str) -> Line:
    return Line(fact, re.compile(pattern), source, ("0.32.0",))


def _both(fact: str, pattern: str, source: str) -> Line:
    return Line(fact, re.compile(pattern), source, ("0.25.1", "0.32.0"))


_BANNER = "entrypoints/serve/utils/api_utils.py log_version_and_model"  # what a server prints first
_LINEAR = "model_executor/kernels/linear"
_MOE = "model_executor/layers/fused_moe"

LINES: tuple[Line, ...] = (
    _both("version", r"[ █▄▀]+ version (\S+)$", _BANNER),
    _line("version", r"vLLM server version (\S+), serving model ", _BANNER),
    _both("version", r"Initializing a V1 LLM engine \(v(\S+)\) with config: ", "v1/engine/core.py"),
    _both("model", r"Initializing a V1 LLM engine .*?: model='([^']*)'", "config/vllm.py VllmConfig.__str__"),
    _both("quantization", r"Initializing a V1 LLM engine .*?, quantization=(\w[\w-]*),", "config/vllm.py"),
    _both("prefix_caching", r"Initializing a V1 LLM engine .*?, enable_prefix_caching=(True|False)", "config/vllm.py"),
    _both("tensor_parallel", r"Initializing a V1 LLM engine .*?, tensor_parallel_size=(\d+)", "config/vllm.py"),
    _both("device", r"Initializing a V1 LLM engine .*?, device_config=(\w+)", "config/vllm.py"),
    _both(
        "speculation", r"Initializing a V1 LLM engine .*?speculative_config=(None|SpeculativeConfig)", "config/vllm.py"
    ),
    _both("method", r"Initializing a V1 LLM engine .*?SpeculativeConfig\(method='([\w-]+)'", "config/speculative.py"),
    _both(
        "drafter",
        r"Initializing a V1 LLM engine .*?SpeculativeConfig\(method='[\w-]+', model='([^']*)'",
        "config/speculative.py SpeculativeConfig.__repr__",
    ),
    _both("budget", r"Initializing a V1 LLM engine .*?, num_spec_tokens=(\d+)\)", "config/speculative.py"),
    _both("asked", r"non-default args: .*'speculative_config': \{", "entrypoints/serve/utils/api_utils.py"),
    _both("architectures", r"Resolved architecture: (\w+)$", "config/model.py"),
    _line("runner", r"Using (V2) Model Runner$", "v1/worker/gpu_worker.py"),
    _line("runner", r"Model Runner V2 .*using the (V1) model runner instead", "config/vllm.py use_v2_model_runner"),
    _both("linear_kernels", r"Using (\w+) for MXFP4 GEMM$", f"{_LINEAR}/__init__.py init_mxfp4_linear_kernel"),
    _line("linear_kernels", r"Using (\w+) for mixed-precision linear$", f"{_LINEAR}/__init__.py"),
    _line("linear_kernels", r"Selected (\w+) for \w+$", f"{_LINEAR}/__init__.py"),
    _line("moe_backends", r"Using '(\w+)' Mxfp4 MoE backend\.$", f"{_MOE}/oracle/mxfp4.py _make_log_backend"),
    _line(
        "moe_backends",
        r"Using (\w+) backend for (?:OCP_MX_Scheme\.)?w_mxfp4\w*$",
        "model_executor/layers/quantization/quark/quark_moe.py QuarkOCP_MX_MoEMethod",
    ),
    _both("moe_backends", r"Using (.{1,40} Unquantized) MoE backend out of ", f"{_MOE}/oracle/unquantized.py"),
    _line("moe_experts", r"Using (\w+Experts\w*)(?: MoE backend)?$", f"{_MOE}/oracle/mxfp4.py, unquantized.py"),
    _line(
        "moe_experts",
        r"Using (\w+) for MXFP4 MoE\b",
        "model_executor/layers/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w4a4_mxfp4.py",
    ),
    _line(
        "moe_experts",
        r"Using (\w+)(?: \(weight-only FP4\))? for AutoRound MXFP4 MoE$",
        "model_executor/layers/quantization/inc/schemes/inc_mxfp4_moe.py",
    ),
    _both("attention_backends", r"Using (\w+) attention backend out of potential backends", "platforms/cuda.py"),
    _line("attention_backends", r"Using (\w+) backend out of potential backends", "platforms/rocm.py"),
    _line("attention_backends", r"Using (\w+) backend \(selected via --attention-backend\)", "platforms/rocm.py"),
    _line(
        "attention_backends", r"Found incompatible backend\(s\) .* Overriding with (\w+) out of", "platforms/rocm.py"
    ),
    _line("attention_backends", r"Using AttentionBackendEnum\.(\w+) backend\.$", "platforms/cuda.py"),
    _both(
        "gdn_kernels",
        r"Using (.{1,40}) GDN prefill kernel \(",
        "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py _log_gdn_backend_decision",
    ),
    _line(
        "gdn_spec_kernels", r"GDN spec decode kernel: (\w+)$", "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"
    ),
    _both("weights_loaded", r"Loading weights took ([\d.]+) seconds", "model_executor/model_loader/default_loader.py"),
    _both("drafter_loading", r"Loading drafter model\.\.\.$", "v1/worker/gpu_model_runner.py, cpu_model_runner.py"),
    _line(
        "drafter_loading",
        r"Capturing model for \w+ speculator\.\.\.$",
        "v1/worker/gpu/spec_decode/dflash/speculator.py",
    ),
    _both("acceptance", r"SpecDecoding metrics: Mean acceptance length: ([\d.]+),", "v1/spec_decode/metrics.py"),
    _line("emulation", r".*Using EmulationMxfp4LinearKernel, with simulated weight", f"{_LINEAR}/mxfp4/emulation.py"),
    _line(
        "emulation",
        r"Using OCP_MXQuantizationEmulationTritonExperts MOE backend\.",
        f"{_MOE}/experts/ocp_mx_emulation_moe.py",
    ),
    _line("emulation", r"Using OCP MX emulation for ", f"{_MOE}/oracle/mxfp4.py select_mxfp4_moe_backend"),
    _line("emulation", r"Using Mxq\w+ for MXFP4 (?:GEMM|MoE), emulated by mxq: ", "mxq/engines/plugin/mxfp4.py"),
    _both(
        "simulated",
        r"The current platform does not support native MXFP4/MXFP6 computation\. Simulated weight dequantization",
        "model_executor/layers/quantization/quark/schemes/quark_ocp_mx.py QuarkOCP_MX",
    ),
    _line(
        "remarks",
        r"MarlinMxFp4LinearKernel is a weight-only \(A16\) kernel; the requested activation quantization",
        f"{_LINEAR}/mxfp4/marlin.py can_implement",
    ),
    _line(
        "remarks",
        r"This platform supports native MXFP4 W4A4 MOE computation via AITER MOE backend, but AITER is not found",
        f"{_LINEAR}/mxfp4/aiter.py is_supported",
    ),
    _line("remarks", r"AITER ASM FP4 GEMM requires weight_scale dims", f"{_LINEAR}/mxfp4/aiter.py"),
    _line("remarks", r"No Mxfp4 MoE backend supports activation=", f"{_MOE}/oracle/mxfp4.py _warn_on_bf16_fallback"),
    _line("remarks", r"Unknown vLLM environment variable detected: ", "platforms/interface.py validate_environ"),
    _line(
        "remarks", r"GDN prefill backend '\w+' (?:was requested but|is selected but)", "…/gdn/qwen_gdn_linear_attn.py"
    ),
    _line("remarks", r"Falling back to the Triton GDN spec decode path: ", "…/gdn/qwen_gdn_linear_attn.py"),
    _both("failures", r"((?:\w+\.)*\w*(?:Error|Exception)(?:: .+|$))", "tracebacks of workers and the engine"),
    _line("failures", r"(Failed to find a kernel that can implement .+)", f"{_LINEAR}/__init__.py"),
    _line("failures", r"(Mxfp4 MoE backend '\w+' does not support .+)", f"{_MOE}/oracle/mxfp4.py"),
    _line("died", r"EngineCore encountered a fatal error\.$", "v1/engine/core.py"),
    _both("ready", r"Starting vLLM server on ", "entrypoints/launchers/api_server/entry.py"),
    _both("ready", r"Application startup complete\.$", "uvicorn"),
)
"""What is read of a log."""

_ANY = re.compile("|".join(f"(?:{line.pattern.pattern})" for line in LINES))
_ONE = frozenset({"version", "model", "quantization", "prefix_caching", "tensor_parallel", "device", "speculation"})
_ONE |= {"method", "drafter", "budget", "asked", "runner"}


@dataclass(frozen=True)
class LogFacts:
    """What the last start of a server logged. A fact that it did not log is None, or empty.

    Attributes:
        lines: how many lines the log has, and vLLM logged (``logged``), in all its starts (``starts``).
        version: vLLM's.
        model, quantization, tensor_parallel, prefix_caching, device: of the engine's config.
        asked: the command line had a speculative config.
        method, drafter, budget: of the engine's speculative config; None if it has none.
        architectures: of the target, and of the drafter.
        runner: V1 or V2, the part of vLLM that calls the model.
        linear_kernels, moe_backends, moe_experts, attention_backends, gdn_kernels, gdn_spec_kernels: what was chosen.
        weights_loaded: how often weights were loaded by the process that did it most often.
        drafter_loading: it was said that a drafter is loaded.
        acceptance: the mean acceptance length last logged; that drafts were verified is certain only then.
        emulation: lines that say that MXFP4 is emulated.
        simulated: it was said that linears will be emulated; vLLM 0.32 may still find a kernel, and names it then.
        remarks: other lines that matter, of vLLM's own warnings.
        failures: errors, in the order in which they came; ``failure_line`` is the number of the first one's line.
        ready: the server takes requests.
        died: the engine ended with an error.
    """

    lines: int = 0
    logged: int = 0
    starts: int = 0
    version: str | None = None
    model: str | None = None
    quantization: str | None = None
    tensor_parallel: int | None = None
    prefix_caching: bool | None = None
    device: str | None = None
    asked: bool = False
    method: str | None = None
    drafter: str | None = None
    budget: int | None = None
    architectures: tuple[str, ...] = ()
    runner: str | None = None
    linear_kernels: tuple[str, ...] = ()
    moe_backends: tuple[str, ...] = ()
    moe_experts: tuple[str, ...] = ()
    attention_backends: tuple[str, ...] = ()
    gdn_kernels: tuple[str, ...] = ()
    gdn_spec_kernels: tuple[str, ...] = ()
    weights_loaded: int = 0
    drafter_loading: bool = False
    acceptance: float | None = None
    emulation: tuple[str, ...] = ()
    simulated: bool = False
    remarks: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    failure_line: int | None = None
    ready: bool = False
    died: bool = False

    @property
    def emulated(self) -> bool:
        """MXFP4 is emulated, in linears or in experts."""
        names = (*self.linear_kernels, *self.moe_backends, *self.moe_experts)
        simulated = self.simulated and self.ready and not self.linear_kernels
        return simulated or bool(self.emulation) or any("emulation" in name.lower() for name in names)

    @property
    def drafter_loaded(self) -> bool | None:
        """Whether drafts come from a drafter; None where none was asked for, none is needed (ngram, suffix), or the log
        ends before it could be said.

        vLLM's V2 runner does not say that it loads one; it loads weights a second time.
        """
        if not self.asked and self.method is None:
            return None
        if self.method in ("ngram", "ngram_gpu", "suffix"):
            return None
        if self.acceptance is not None:
            return True
        loading = self.method is not None and (self.drafter_loading or self.weights_loaded > 1)
        if not (loading or self.ready or self.failures or self.died):
            return None
        return loading and (self.ready or not self.failures)


def lines_of(stream: IO[bytes]) -> Iterator[str]:
    """Yield the lines of a log in pieces of at most :data:`MOST_OF_A_LINE` bytes, of each only the first."""
    while piece := stream.readline(MOST_OF_A_LINE):
        rest = piece
        while not rest.endswith(b"\n") and (rest := stream.readline(MOST_OF_A_LINE)):
            pass
        yield piece.decode(errors="replace")


@dataclass
class _Start:
    """What is gathered of one start of a server."""

    values: dict[str, dict[str, None]] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
    failure_line: int | None = None

    def note(self, fact: str, value: str) -> None:
        found = self.values.setdefault(fact, {})
        if fact == "acceptance":
            found.clear()  # the last one counts
        elif fact in _ONE and found:
            return
        if len(found) < _MOST_VALUES:
            found[value] = None

    def one(self, fact: str) -> str | None:
        return next(iter(self.values.get(fact, ())), None)

    def all(self, fact: str) -> tuple[str, ...]:
        return tuple(self.values.get(fact, ()))


def read_log(lines: Iterable[str]) -> LogFacts:
    """Return what a server's log says; pure, and in one pass.

    Args:
        lines: of the log, such as from :func:`lines_of`.
    """
    start, starts, count, logged = _Start(), 0, 0, 0
    for line in lines:
        count += 1
        found = _message(line)
        if found is None:
            continue
        process, file, message = found
        logged += file != _UVICORN  # which other servers run on, too
        if file.rpartition("/")[2] in _REQUESTS or _ANY.match(message) is None:
            continue
        for known in LINES:
            match = known.pattern.match(message)
            if match is None:
                continue
            if known.fact == "version" and known.source is _BANNER:
                start, starts = _Start(), starts + 1
            if known.fact == "weights_loaded" and (process in start.loads or len(start.loads) < _MOST_VALUES):
                start.loads[process] = start.loads.get(process, 0) + 1
            if known.fact == "failures" and start.failure_line is None:
                start.failure_line = count
            start.note(known.fact, _clean(match[1] if match.lastindex else message))
    return _facts(start, starts, count, logged)


def _message(line: str) -> tuple[str, str, str] | None:
    """Return process, file and message of a line that vLLM's logger, or uvicorn at its start, printed."""
    line = line.rstrip("\r\n")
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    found = _LOGGED.search(line) if ".py:" in line else None
    if found is not None:
        return found["process"] or "", found["file"], found["message"]
    if line.endswith("Application startup complete.") and (outside := _OUTSIDE.search(line)):
        return "", _UVICORN, outside["message"]
    return _json_message(line) if line.startswith("{") and '"message"' in line else None


def _json_message(line: str) -> tuple[str, str, str] | None:
    """As :func:`_message`, of vLLM's JSON format (vllm/logging_utils/formatter.py JSON_FORMAT)."""
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    name, message = (record.get("name"), record.get("message")) if isinstance(record, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(message, str) or not name.startswith("vllm"):
        return None
    return str(record.get("process")), f"{name.rpartition('.')[2]}.py", message.partition("\n")[0]


def _clean(text: str) -> str:
    return "".join(sign for sign in text[:_MOST_TEXT] if sign.isprintable()).strip()


def _facts(start: _Start, starts: int, lines: int, logged: int) -> LogFacts:
    engine_speculates = start.one("speculation") == "SpeculativeConfig"
    acceptance, parallel, budget = start.one("acceptance"), start.one("tensor_parallel"), start.one("budget")
    caching, quantization = start.one("prefix_caching"), start.one("quantization")
    return LogFacts(
        lines=lines,
        logged=logged,
        starts=max(starts, 1) if logged else 0,
        version=start.one("version"),
        model=start.one("model"),
        quantization=None if quantization == "None" else quantization,
        tensor_parallel=None if parallel is None else int(parallel[:9]),
        prefix_caching=None if caching is None else caching == "True",
        device=start.one("device"),
        asked=start.one("asked") is not None or engine_speculates,
        method=start.one("method"),
        drafter=start.one("drafter"),
        budget=None if budget is None else int(budget[:9]),
        architectures=start.all("architectures"),
        runner=start.one("runner"),
        linear_kernels=start.all("linear_kernels"),
        moe_backends=start.all("moe_backends"),
        moe_experts=start.all("moe_experts"),
        attention_backends=start.all("attention_backends"),
        gdn_kernels=start.all("gdn_kernels"),
        gdn_spec_kernels=start.all("gdn_spec_kernels"),
        weights_loaded=max(start.loads.values(), default=0),
        drafter_loading=bool(start.all("drafter_loading")),
        acceptance=None if acceptance is None else _number(acceptance),
        emulation=start.all("emulation"),
        simulated=bool(start.all("simulated")),
        remarks=start.all("remarks"),
        failures=start.all("failures"),
        failure_line=start.failure_line,
        ready=bool(start.all("ready")),
        died=bool(start.all("died")),
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
