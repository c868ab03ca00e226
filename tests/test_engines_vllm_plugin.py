"""MXFP4 and drafts through the real vLLM on a processor: beside a bf16 model of the same numbers, and mxq itself.

A rounding to four bits turns the least difference of an input into a difference of half of it, so that W4A4 answers of
two engines are no closer than near-ties allow. What must agree is how far rounding moves the answers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_offline
from conversion import convert
from decoding import Models, chat_prompts

from mxq import decode, testbed
from mxq.convert import dequantize, dequantize_run
from mxq.decode.ties import parting
from mxq.engines.vllm_log import read_log

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 32
BUDGETS = {"mtp": 3, "dflash": 15}
WEIGHT_ONLY = "mxfp4-weight-only"


@dataclass(frozen=True)
class Battery:
    """What vLLM answered: ``jobs[kind, model, method]``, with answers as :mod:`vllm_offline` describes them."""

    root: Path
    prompts: dict[str, list[list[int]]]
    jobs: dict[tuple[str, str, str], dict[str, Any]]
    log: str

    def answers(self, kind: str, model: str, method: str = "ar") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.jobs[kind, model, method]["answers"]
        return found

    def tokens(self, kind: str, model: str, method: str = "ar") -> list[list[int]]:
        return [answer["tokens"] for answer in self.answers(kind, model, method)]

    def accepted(self, kind: str, model: str, method: str) -> list[list[int]]:
        return [answer["accepted"] for answer in self.answers(kind, model, method)]

    def target(self, kind: str, model: str, dtype: torch.dtype = torch.bfloat16) -> decode.Target:
        return decode.load_target(self.path(kind, model), dtype=dtype)

    def path(self, kind: str, model: str) -> Path:
        return testbed.path(f"testbed:{kind}") if model == "bf16" else self.root / f"{kind}-{model}"


def checkpoints(kind: str, root: Path) -> None:
    source = testbed.path(f"testbed:{kind}")
    options: dict[str, Any]
    for name, recipe, options in (
        ("w4a16", WEIGHT_ONLY, {}),
        ("w4a16-packed", WEIGHT_ONLY, {"form": "compressed-tensors"}),
        ("w4a4", "mxfp4", {}),
        ("w4a4-mtp", "mxfp4-mtp", {}),
        ("w4a4-packed", "mxfp4", {"form": "compressed-tensors"}),
        *([("w4a4-fused", "mxfp4", {"experts": "fused"})] if kind == "moe" else []),
    ):
        convert(source, root / f"{kind}-{name}", recipe, **options)
    plan = dequantize.plan(root / f"{kind}-w4a16")
    dequantize_run.run(plan, root / f"{kind}-simulated", "w4a16")


def speculation(kind: str, method: str) -> dict[str, Any] | None:
    if method not in BUDGETS:
        return None
    drafter = {"model": str(testbed.path(f"testbed:{kind}-dflash"))} if method == "dflash" else {}
    return {"method": method, "num_speculative_tokens": BUDGETS[method], **drafter}


@pytest.fixture(scope="module")
def battery(tmp_path_factory: pytest.TempPathFactory) -> Battery:
    root = tmp_path_factory.mktemp("vllm")
    plain = ["simulated", "w4a16", "w4a16-packed", "w4a4", "w4a4-packed"]
    plans: list[tuple[str, str, str, tuple[str, ...]]] = [
        *(("dense", name, "ar", ()) for name in plain),
        *(("moe", name, "ar", ()) for name in [*plain, "w4a4-fused"]),
        ("moe", "w4a4", "unrounded experts", ("rounded experts",)),
        *(("moe", "w4a4", method, ()) for method in ("mtp", "dflash")),
        *((kind, "w4a4-mtp", "mtp", ()) for kind in testbed.NAMES),
        ("dense", "bf16", "dflash", ()),
        ("dense", "bf16", "dflash without norms", ("norms",)),
    ]
    prompts = {}
    for kind in testbed.NAMES:
        checkpoints(kind, root)
        prompts[kind] = chat_prompts(Models(testbed.path(f"testbed:{kind}"), root), 1)
    jobs = [
        {
            "model": str(testbed.path(f"testbed:{kind}") if name == "bf16" else root / f"{kind}-{name}"),
            "speculation": speculation(kind, method.partition(" ")[0]),
            "prompts": prompts[kind],
            "tokens": TOKENS,
            "without": list(without),
        }
        for kind, name, method, without in plans
    ]
    log = vllm_offline.ask(jobs, root)
    keys = [(kind, name, method) for kind, name, method, _ in plans]
    return Battery(root, prompts, dict(zip(keys, jobs, strict=True)), log)


@pytest.mark.parametrize("model", ["w4a16", "w4a16-packed"])
@pytest.mark.parametrize("kind", testbed.NAMES)
def test_weight_only_answers_are_those_of_the_dequantized_model(battery: Battery, kind: str, model: str) -> None:
    assert battery.answers(kind, model) == battery.answers(kind, "simulated")


def test_one_model_in_every_form_gives_the_same_answers(battery: Battery) -> None:
    for kind, model in (("dense", "w4a4-packed"), ("moe", "w4a4-packed"), ("moe", "w4a4-fused")):
        assert battery.answers(kind, model) == battery.answers(kind, "w4a4")


@torch.inference_mode()
def log_probabilities(target: decode.Target, prompts: list[list[int]], answers: list[dict[str, Any]]) -> torch.Tensor:
    """What ``target`` gives the tokens of answers."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([*prompt, *answer["tokens"][:-1]])
        logits = target.logits(target.prompt(target.start(len(ids)), ids).hidden[len(prompt) - 1 :])
        found.append(logits.float().log_softmax(-1).gather(1, torch.tensor(answer["tokens"])[:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("kind", testbed.NAMES)
def test_rounded_activations_move_answers_as_far_as_in_process(battery: Battery, kind: str) -> None:
    rounding, plain = battery.target(kind, "w4a4"), battery.target(kind, "simulated")

    def moved(answers: list[dict[str, Any]]) -> float:
        """How far vLLM's answers are from weights alone, in units of how far rounding moves our own."""
        ours, rounded = (log_probabilities(target, battery.prompts[kind], answers) for target in (plain, rounding))
        theirs = torch.tensor([value for answer in answers for value in answer["logprobs"]])
        return float((theirs - ours).abs().mean() / (rounded - ours).abs().mean())

    assert 0.5 < moved(battery.answers(kind, "w4a4")) < 2
    # How far two engines' bfloat16 are from each other depends on the processor: 0.1 to 0.4.
    assert moved(battery.answers(kind, "simulated")) < 0.5
    if kind == "moe":  # of which experts are all that is quantized
        assert moved(battery.answers(kind, "w4a4", "unrounded experts")) < 0.5


@pytest.mark.parametrize("kind", testbed.NAMES)
def test_rounded_answers_part_from_those_in_process_at_near_ties(battery: Battery, kind: str) -> None:
    served, exact = battery.target(kind, "w4a4"), battery.target(kind, "w4a4", torch.float32)
    for prompt, theirs in zip(battery.prompts[kind], battery.tokens(kind, "w4a4"), strict=True):
        ours = decode.generate(served, prompt, max_new_tokens=TOKENS).token_ids
        parted = parting(exact, served, prompt, ours, theirs)
        assert parted is None or parted.near_tie, parted


def in_process(battery: Battery, kind: str, model: str, method: Any) -> list[list[int]]:
    """What is accepted per verify pass."""
    target = battery.target(kind, model)
    path = testbed.path(f"testbed:{kind}-dflash") if method == "dflash" else None
    drafter, k = decode.load_drafter(path, target, method), BUDGETS[method]
    return [
        list(decode.generate(target, prompt, drafter=drafter, num_speculative_tokens=k, max_new_tokens=TOKENS).accepted)
        for prompt in battery.prompts[kind]
    ]


def alike(first: Iterable[list[int]], second: Iterable[list[int]]) -> float:
    """The share of verify passes before the first of its request in which another number of drafts was accepted."""
    same = total = 0
    for one, other in zip(first, second, strict=True):
        differ = [a != b for a, b in zip(one, other, strict=False)]
        same += [*differ, True].index(True)
        total += len(differ)
    return same / total


def acceptance_length(accepted: Iterable[list[int]]) -> float:
    passes = [count for request in accepted for count in request]
    return 1 + sum(passes) / len(passes)


def test_drafts_of_dflash_are_accepted_as_in_process(battery: Battery) -> None:
    ours = in_process(battery, "dense", "bf16", "dflash")
    mended, broken = (battery.accepted("dense", "bf16", method) for method in ("dflash", "dflash without norms"))
    assert alike(mended, ours) > 0.7
    assert acceptance_length(mended) == pytest.approx(acceptance_length(ours), rel=0.1)
    assert alike(broken, ours) < 0.6
    assert acceptance_length(broken) < acceptance_length(mended)
    assert battery.tokens("dense", "bf16", "dflash") == battery.tokens("dense", "bf16", "dflash without norms")


@pytest.mark.parametrize("method", ["mtp", "dflash"])
def test_drafts_for_mxfp4_are_accepted_as_in_process(battery: Battery, method: str) -> None:
    theirs, ours = battery.accepted("moe", "w4a4", method), in_process(battery, "moe", "w4a4", method)
    assert acceptance_length(theirs) == pytest.approx(acceptance_length(ours), rel=0.2)
    assert acceptance_length(theirs) > 2


@pytest.mark.parametrize("kind", testbed.NAMES)
def test_drafts_of_an_mxfp4_head_are_accepted_as_in_process(battery: Battery, kind: str) -> None:
    theirs, ours = battery.accepted(kind, "w4a4-mtp", "mtp"), in_process(battery, kind, "w4a4-mtp", "mtp")
    assert acceptance_length(theirs) == pytest.approx(acceptance_length(ours), rel=0.2)
    assert acceptance_length(theirs) > 2


def test_the_log_says_that_it_is_emulated(battery: Battery) -> None:
    facts = read_log(battery.log.splitlines())
    assert facts.emulated
    assert "MxqEmulatedLinear" in facts.linear_kernels
    assert "MxqEmulatedExperts" in facts.moe_experts
    assert {line.rpartition(": ")[2] for line in facts.emulation} == {
        f"dequantized weights, activations {what}" for what in ("rounded to MXFP4", "left alone")
    }
    assert "of the drafter's 3 layers one by one" in battery.log
