#!/usr/bin/env python3
"""Measure what the scale rule of activations changes, AITER's ``rceil`` against ``even``, into benchmarks/ROUNDING.md.

    python tools/measure_rounding.py

Prompts of all five workloads run through the bf16 testbed models. What enters the experts of testbed:moe and the MLP's
linear layers of testbed:dense is then put through AITER's kernels, emulated (mxq.layouts.reader), with MXFP4 weights
and activations quantized by either rule or not at all.
"""

import argparse
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mxq import decode, files, testbed, workloads
from mxq.formats import mxfp4
from mxq.layouts import operands, reader
from mxq.layouts.operands import Experts, Linear
from mxq.workloads.chat import ChatTemplate

Kernel = Callable[[Tensor, list[Tensor], str | None], Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="prompts a workload (default: 8)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/ROUNDING.md"))
    options = parser.parse_args(argv)
    rows = [row for name in testbed.NAMES for row in _rows(name, options.prompts)]
    versions = ", ".join(f"{name} {version}" for name, version in files.versions("torch").items())
    lines = [
        "# AITER's rounding of activations and vLLM's emulation",
        "",
        f"`{shlex.join(['python', 'tools/measure_rounding.py', *(sys.argv[1:] if argv is None else argv)])}`",
        "",
        "AITER's a4w4 kernels for experts and its dense ones in assembly quantize activations by `rceil` "
        "(from 0.1.16), vLLM's emulation and AITER's Triton kernel for dense layers by `even`: outputs of the two "
        "cannot be equal.",
        "",
        "Norm of the difference between two outputs for a token, in percent of the output's with the same MXFP4 "
        "weights and activations in bfloat16: median over tokens (10th–90th percentile).",
        "",
        f"Kernels are emulated; layers get what the bf16 model computes for {options.prompts} prompts of each of "
        f"{len(testbed.WORKLOADS)} workloads; {versions}.",
        "",
        "| layer | tokens | rceil to bfloat16 | even to bfloat16 | even to rceil |",
        "|---|---|---|---|---|",
        *rows,
    ]
    print("\n".join(lines))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_write(options.out) as file:
        file.write("\n".join(lines) + "\n")
    return 0


@torch.inference_mode()
def _rows(name: str, prompts: int) -> list[str]:
    path = testbed.path(f"testbed:{name}")
    target, template = decode.load_target(path), ChatTemplate(path, thinking=False)
    seen: dict[str, list[tuple[Tensor, ...]]] = defaultdict(list)
    modules = dict(_measured(target.model))
    for label, module in modules.items():
        module.register_forward_pre_hook(lambda module, args, label=label: seen[label].append(args))
    for workload in testbed.WORKLOADS:
        for prompt in workloads.load(workload, prompts).prompts:
            ids = torch.tensor(template.encode(prompt.messages))
            target.prompt(target.start(len(ids) + 1), ids)
    return [_row(f"testbed:{name}, {label}", _kernel(modules[label]), calls) for label, calls in seen.items()]


def _row(label: str, kernel: Kernel, calls: Sequence[tuple[Tensor, ...]]) -> str:
    differences: list[Tensor] = []
    for x, *router in calls:
        exact, rceil, even = (kernel(x.reshape(-1, x.shape[-1]), router, rule) for rule in (None, "rceil", "even"))
        norms = torch.stack([(rceil - exact).norm(dim=1), (even - exact).norm(dim=1), (even - rceil).norm(dim=1)])
        differences.append(norms / exact.norm(dim=1))
    of_tokens = 100 * torch.cat(differences, dim=1)
    low, middle, high = of_tokens.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), dim=1).tolist()
    figures = " | ".join(f"{m:.1f} ({a:.1f}–{b:.1f})" for a, m, b in zip(low, middle, high, strict=True))
    return f"| {label} | {of_tokens.shape[1]} | {figures} |"


def _measured(model: Any) -> Sequence[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for i, layer in enumerate(model.layers):
        if hasattr(layer.mlp, "experts"):
            found.append((f"experts of layer {i}", layer.mlp.experts))
        elif i % 4 == 0:
            found += [(f"{part} of layer {i}", getattr(layer.mlp, part)) for part in ("gate_proj", "down_proj")]
    return found


def _kernel(module: Any) -> Kernel:
    if not hasattr(module, "gate_up_proj"):
        layer = operands.dense_asm(Linear(*mxfp4.quantize(module.weight)))
        return lambda x, router, rule: reader.gemm(x, layer, rule=rule)
    w13, w2 = mxfp4.quantize(module.gate_up_proj), mxfp4.quantize(module.down_proj)
    experts = operands.moe_a4w4(Experts(*w13, *w2))
    return lambda x, router, rule: reader.fused_moe(x, experts, router[1], router[0], rule=rule)


if __name__ == "__main__":
    sys.exit(main())
