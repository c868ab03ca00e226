#!/usr/bin/env python3
"""Time whole conversions and hold them against a copy and against other tools, into benchmarks/CONVERT.md.

    python tools/bench_convert.py                          # all of it: half an hour, 30 GB of disk, 16 GB of memory
    python tools/bench_convert.py --sizes 1 2 --peers      # two sizes, no peers

The checkpoints have the layers of Qwen3.5-35B-A3B, fewer of them, with as many experts and words as the size asks for,
and random weights. They are in the page cache when a conversion begins. A conversion is a process of its own, timed
from its start to its end, imports included; its memory is the most that was resident. Peers get the same checkpoint and
are asked to quantize what mxq's recipe quantizes, into environments of their own that are made beside the checkpoints
and kept; each runs with the threads that it takes by itself.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_formats
import peak_memory
import torch
from safetensors.torch import save_file

from mxq import files
from mxq.progress import note

_HIDDEN = 2048
_SHARD_BYTES = 1_000_000_000
_PEER_GIGABYTES = 4.0
_LARGEST_SLICE = 2 * 512 * _HIDDEN  # an expert's matrix, in bytes
_QUARK = """
import sys
from quark.torch import LLMTemplate, ModelQuantizer
template = LLMTemplate.get("qwen3_5_moe")
quantizer = ModelQuantizer(template.get_config(scheme="mxfp4"))
quantizer.direct_quantize_checkpoint(*sys.argv[1:3], device="cpu", weight_converters=template.f2f_weight_converters)
"""
_LLM_COMPRESSOR = """
import sys
from llmcompressor import model_free_ptq
kept = ["linear_attn", "self_attn", "shared_expert", r"mlp\\.gate$", "norm", "embed_tokens", "lm_head"]
ignore = [f"re:.*{name}.*" for name in kept]
model_free_ptq(*sys.argv[1:3], scheme="MXFP4", ignore=ignore, device="cpu", max_workers=2)
"""
PEERS = {
    "quark": ("Quark 0.13", _QUARK, ("amd-quark==0.13", "transformers==5.16.0", "accelerate")),
    "llm-compressor": ("llm-compressor 0.14", _LLM_COMPRESSOR, ("llmcompressor==0.14.0.1",)),
}


@dataclass(frozen=True)
class Run:
    """A conversion: wall time in seconds, peak resident memory in bytes."""

    seconds: float
    peak: int


def measure(
    command: Sequence[str | Path], source: Path, out: Path, look: Callable[[Path], None] = lambda out: None
) -> Run:
    """Run a conversion of ``source`` into ``out``, which is removed after a ``look`` at it."""
    for file in source.glob("*.safetensors"):
        with file.open("rb") as stream:  # into the page cache
            while stream.read(1 << 24):
                pass
    os.sync()
    # What is installed starts from compiled Python, whatever is set here.
    start_as_installed = [
        "env",
        "-u",
        "PYTHONDONTWRITEBYTECODE",
        f"PATH={Path(command[0]).parent}:{os.environ['PATH']}",
    ]
    start = time.perf_counter()
    done, peak = peak_memory.measured([*start_as_installed, *command])
    seconds = time.perf_counter() - start
    if done.returncode or not list(out.glob("*.safetensors")):
        sys.exit(f"{shlex.join(map(str, command))} failed:\n{done.stderr[-3000:]}")
    look(out)
    shutil.rmtree(out)
    note(f"{Path(command[0]).name} {source.name}: {seconds:.2f} s, {peak / 1e6:.0f} MB")
    return Run(seconds, peak)


def convert(source: Path, jobs: int, *options: str) -> Run:
    """Convert with mxq."""
    out = source.with_name("out")
    mxq = Path(sys.executable).with_name("mxq")
    return measure([mxq, "--quiet", "quantize", source, out, "--jobs", str(jobs), *options], source, out)


def peer(work: Path, name: str, source: Path) -> Run:
    """Convert with a peer, in an environment of its own."""
    _, script, packages = PEERS[name]
    python = work / f"env-{name}" / "bin" / "python"
    if not python.exists():
        note(f"installing {', '.join(packages)}")
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"torch=={_torch()}", *packages], check=True)
    program = work / f"with-{name}.py"
    program.write_text(script)
    out = work / "out"
    return measure([python, program, source, out], source, out)


def _torch() -> str:
    return torch.__version__.partition("+")[0]


def write_checkpoint(directory: Path, gigabytes: float, shard_bytes: int = _SHARD_BYTES) -> Path:
    """Write a checkpoint of about that size."""
    layers = max(2, round(gigabytes / 2))
    experts = min(256, int(gigabytes / layers * 128) // 8 * 8)
    shapes = _shapes(layers, experts)
    held = sum(map(math.prod, shapes.values())) * 2
    words = max(1024, int((gigabytes * 1e9 - held) / (4 * _HIDDEN)) // 64 * 64)
    shapes |= {"model.language_model.embed_tokens.weight": (words, _HIDDEN), "lm_head.weight": (words, _HIDDEN)}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(_config(layers, experts, words), indent=1))
    generator = torch.Generator().manual_seed(0)
    noise = (torch.randn(1 << 26, generator=generator) * 0.02).to(torch.bfloat16)
    parts: list[dict[str, torch.Tensor]] = [{}]
    room = shard_bytes
    for name, shape in shapes.items():
        count = math.prod(shape)
        if room < count * 2 and parts[-1]:
            parts.append({})
            room = shard_bytes
        room -= count * 2
        dtype = torch.float32 if name.endswith(("A_log", "linear_attn.norm.weight")) else torch.bfloat16
        parts[-1][name] = noise.repeat(-(-count // len(noise)))[:count].view(shape).to(dtype)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for part in parts for tensor in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def _config(layers: int, experts: int, words: int) -> dict[str, Any]:
    """Qwen3.5-35B-A3B's config.json with fewer layers, experts and words, and without vision and MTP."""
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "hidden_size": _HIDDEN,
            "num_hidden_layers": layers,
            "layer_types": [
                "linear_attention" if (i + 1) % 4 and i < layers - 1 else "full_attention" for i in range(layers)
            ],
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "attn_output_gate": True,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": experts,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "vocab_size": words,
            "tie_word_embeddings": False,
        },
    }


def _shapes(layers: int, experts: int) -> dict[str, tuple[int, ...]]:
    """Every tensor but the embeddings."""
    from transformers import Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextModel

    with torch.device("meta"):
        model = Qwen3_5MoeTextModel(Qwen3_5MoeTextConfig(**_config(layers, experts, 64)["text_config"]))
    return {
        f"model.language_model.{name}": tuple(value.shape)
        for name, value in model.state_dict().items()
        if not name.startswith("embed_tokens")
    }


def kernel_rows(threads: int, repeats: int) -> list[str]:
    """Return rows of the kernel's share of ``copy_``."""
    torch.set_num_threads(threads)
    rates = bench_formats.measure(bench_formats.cpu_subjects(torch.bfloat16, threads), repeats, "cpu")
    (_, copied), *others = rates.items()
    return [
        f"| {name}, 4096 x 16384 bfloat16, share of copy_'s bandwidth "
        f"| {_spread([a / b for a, b in zip(values, copied, strict=True)])} "
        f"| {'at least 0.50' if name == 'cpu.quantize' else ''} |"
        for name, values in others
    ]


def conversion_rows(options: argparse.Namespace, work: Path) -> list[str]:
    """Return rows of conversions by size, against peers, and of their memory."""
    bare = peak_memory.measured([sys.executable, "-c", "import mxq"])[1]
    rows: list[str] = []
    sizes, medians = [], []
    for gigabytes in options.sizes:
        source = write_checkpoint(work / f"{gigabytes:g}GB", gigabytes)
        total = sum(file.stat().st_size for file in source.glob("*.safetensors")) / 1e9
        runs = [convert(source, options.jobs) for _ in range(options.repeats)]
        seconds = [run.seconds for run in runs]
        sizes.append(total)
        medians.append(statistics.median(seconds))
        rows.append(f"| conversion of {total:.2f} GB, seconds | {_spread(seconds)} | |")
        if gigabytes == _PEER_GIGABYTES:
            one = write_checkpoint(work / "one-file", gigabytes, shard_bytes=1 << 62)
            alone = [convert(one, options.jobs) for _ in range(options.repeats)]
            expected = json.loads(_mxq("plan", source, "--jobs", str(options.jobs), "--json"))["expected"]
            limit = f"under {(5e8 + 2 * _LARGEST_SLICE) / 1e6:.0f} MB"
            peaks = {
                "files of 1 GB": (max(run.peak for run in runs), limit),
                "one file": (max(run.peak for run in alone), limit),
                "expected by `mxq plan`": (expected["peak_bytes"], ""),
            }
            rows.append(f"| ... expected by `mxq plan` | {expected['seconds']:.2f} | |")
            rows += [
                f"| ... peak memory over `import mxq` ({bare / 1e6:.0f} MB), {what} "
                f"| {(peak - bare) / 1e6:.0f} MB | {must} |"
                for what, (peak, must) in peaks.items()
            ]
            shutil.rmtree(one)
            fused = [convert(source, options.jobs, "--experts", "fused").seconds for _ in range(options.repeats)]
            rows.append(f"| ... with --experts fused, whose matrices are large, seconds | {_spread(fused)} | |")
            for name in options.peers:
                run = peer(work, name, source)
                ratios = [run.seconds / mine for mine in seconds]
                must = "at least 20" if statistics.median(ratios) >= 20 else "at least 20: MISSED"
                rows += [
                    f"| ... by {PEERS[name][0]}, seconds; peak memory | {run.seconds:.1f}; {run.peak / 1e6:.0f} MB | |",
                    f"| ... by {PEERS[name][0]}, times as long as by mxq | {_spread(ratios, 1)} | {must} |",
                ]
        shutil.rmtree(source)
    if len(sizes) > 2:
        slope, fixed = statistics.linear_regression(sizes, medians)
        worst = max(abs(t - fixed - slope * n) / t for n, t in zip(sizes, medians, strict=True))
        fit = f"{fixed:.2f} + {slope:.3f} per GB; {worst:.0%}"
        rows.append(f"| seconds by size, least squares; largest residual | {fit} | linear |")
    return rows


def _mxq(*arguments: str | Path) -> str:
    command = [Path(sys.executable).with_name("mxq"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _spread(values: Sequence[float], digits: int = 2) -> str:
    return bench_formats.spread(values, f"{{:.{digits}f}}")


def main(argv: Sequence[str] | None = None) -> int:
    """Time, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0], help="gigabytes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="threads of mxq (default: one per core)")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS), help="default: both")
    parser.add_argument("--work", type=Path, default=Path("bench-convert"), help="for checkpoints and environments")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/CONVERT.md"))
    options = parser.parse_args(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    rows = [*kernel_rows(options.jobs, 20), *conversion_rows(options, options.work.resolve())]
    hardware = files.hardware()
    versions = ", ".join(f"{name} {version}" for name, version in files.versions("numpy", "llvmlite", "torch").items())
    lines = [
        "# Whole conversions",
        "",
        f"`python tools/bench_convert.py --sizes {' '.join(f'{size:g}' for size in options.sizes)} "
        f"--repeats {options.repeats} --jobs {options.jobs} --peers {' '.join(options.peers)}`",
        "",
        f"{hardware['cpu']}, {hardware['cores']} cores, load average {load:.1f} before and {os.getloadavg()[0]:.1f} "
        f"after; {options.jobs} threads; {versions}.",
        "",
        f"Median (lowest-highest) of {options.repeats} conversions, of 20 repeats for the kernel; peers ran once. "
        "Times are of whole processes. The GPU's kernel is in FORMATS-CUDA.md.",
        "",
        "| measure | value | must |",
        "|---|---|---|",
        *rows,
    ]
    with files.atomic_write(options.out) as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
