"""Models for the tests of decoding: tiny random ones for structure, the trained testbed where acceptance matters."""

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mxq import testbed
from mxq.checkpoint.quantization import exclude_entries
from mxq.checkpoint.quark import quark_config
from mxq.decode.drafting import Draft
from mxq.formats.mxfp4 import quantize
from mxq.models import qwen35


@dataclass(frozen=True)
class Models:
    """A target's directory, and that of a DFlash drafter for it."""

    target: Path
    drafter: Path


def random_prompt(seed: int, vocabulary: int = 500) -> list[int]:
    """Return 5 to 84 random tokens: some prompts shorter than a chunk of the gated delta rule, some longer."""
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(5, 85, (1,), generator=generator))
    return torch.randint(0, vocabulary, (length,), generator=generator).tolist()


def chat_prompts(models: Models, per_workload: int) -> list[list[int]]:
    """Return the first prompts of each workload as the target's chat template writes them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.target)
    prompts = []
    for workload in testbed.WORKLOADS:
        lines = (testbed.prompts_dir() / f"{workload}.jsonl").read_text().splitlines()
        for line in lines[:per_workload]:
            chat = [{"role": "user", "content": json.loads(line)["prompt"]}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return prompts


def end_of_text(models: Models) -> list[int]:
    """Return the tokens that end an answer."""
    return list(json.loads((models.target / "generation_config.json").read_text())["eos_token_id"])


def reference(directory: Path) -> Any:
    """Load a target with transformers alone, in float32; its text model and output head are the oracle."""
    from transformers import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration

    config = json.loads((directory / "config.json").read_text())
    moe = config["model_type"] == "qwen3_5_moe"
    kind = Qwen3_5MoeForConditionalGeneration if moe else Qwen3_5ForConditionalGeneration
    return kind.from_pretrained(directory, dtype=torch.float32).eval()


@torch.inference_mode()
def reference_logits(model: Any, ids: list[int]) -> Tensor:
    """Return transformers' logits [T, vocabulary] for a whole sequence without any cache."""
    text = model.model.language_model
    out: Tensor = model.lm_head(text(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state)[0]
    return out


def rewrite(source: Path, directory: Path, change: Any, config: Any = None) -> Path:
    """Copy a checkpoint with ``change`` applied to its dict of tensors and ``config`` to its config.json."""
    shutil.copytree(source, directory)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    if config is not None:
        values = json.loads((directory / "config.json").read_text())
        config(values)
        (directory / "config.json").write_text(json.dumps(values))
    return directory


def quantizes(name: str) -> bool:
    """Tell whether the MXFP4 test checkpoints quantize a tensor: what the default recipe does, in few words."""
    experts = {qwen35.Role.EXPERT}
    dense = {qwen35.Role.ATTENTION, qwen35.Role.GDN, qwen35.Role.MLP}
    return qwen35.part(name) == "text" and "norm" not in name and qwen35.role(name) in experts | dense


def write_mxfp4(source: Path, directory: Path, *, weight_only: bool) -> Path:
    """Write the MXFP4 form of a target, independently of ``mxq quantize``."""
    kept: list[str] = []
    done: list[str] = []

    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            modules = [piece.module for piece in qwen35.pieces(name, tensors[name].shape)]
            if quantizes(name):
                tensors[name], tensors[qwen35.scale_name(name)] = quantize(tensors[name])
                done.extend(modules)
            else:
                kept.extend(modules)

    def config(values: dict[str, Any]) -> None:
        values["quantization_config"] = quark_config(exclude_entries(kept, done), weight_only=weight_only, rule="even")

    return rewrite(source, directory, change, config)


class GuessingDrafter:
    """Knows what the target will say and is wrong at random: every number of accepted drafts occurs.

    ``right`` is the chance that a draft is right.
    """

    taps = ()

    def __init__(self, prompt: list[int], script: list[int], vocabulary: int, right: float = 0.8) -> None:
        self.prompt_length, self.script, self.vocabulary = len(prompt), script, vocabulary
        self.right = right
        self.rng = torch.Generator().manual_seed(0)

    def start(self, capacity: int, k: int, sampling: Any, generator: Any) -> "GuessingDrafter":
        self.seen = 0
        return self

    def observe(self, seen: Any, following: Tensor) -> None:
        assert len(seen.hidden) == len(following)
        self.seen += len(following)

    def propose(self, last: Tensor, k: int) -> Draft:
        done = self.seen - self.prompt_length + 1
        known = torch.tensor([*self.script[done : done + k], *[0] * k][:k])
        wrong = torch.rand(k, generator=self.rng) > self.right
        return Draft((known + wrong) % self.vocabulary, None)


class TiltedDrafter:
    """Samples from the target's own distributions after a fixed random change to the logits, one token at a time."""

    taps = ()

    def __init__(self, logits_after: Any, prompt: list[int]) -> None:
        self.logits_after, self.prompt = logits_after, prompt
        self.rows: dict[tuple[int, ...], Tensor] = {}

    def start(self, capacity: int, k: int, sampling: Any, generator: Any) -> "TiltedDrafter":
        self.sampling, self.generator = sampling, generator
        self.history = (self.prompt[0],)
        return self

    def observe(self, seen: Any, following: Tensor) -> None:
        self.history += tuple(following.tolist())

    def propose(self, last: Tensor, k: int) -> Draft:
        history, rows = self.history, []
        for _ in range(k):
            if history not in self.rows:
                logits = self.logits_after(history)
                noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(sum(history)))
                self.rows[history] = self.sampling.probabilities(logits + 0.5 * noise)
            rows.append(self.rows[history])
            history += tuple(torch.multinomial(rows[-1], 1, generator=self.generator).tolist())
        return Draft(torch.tensor(history[-k:]), torch.stack(rows))


class _MemoState:
    key: tuple[int, ...] = ()
    block: tuple[int, ...] = ()


class MemoTarget:
    """A target that computes each verify pass and each commit once per history, for thousands of short generations."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.passes: dict[Any, Any] = {}
        self.states: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def start(self, capacity: int) -> _MemoState:
        self.capacity = capacity
        return _MemoState()

    def prompt(self, state: _MemoState, ids: Tensor, taps: Any) -> Any:
        state.key = tuple(ids.tolist())
        if state.key not in self.states:
            real = self.target.start(self.capacity)
            self.passes[state.key] = self.target.prompt(real, ids, taps)
            self.states[state.key] = real
        return self.passes[state.key]

    def verify(self, state: _MemoState, ids: Tensor, taps: Any) -> Any:
        state.block = tuple(ids.tolist())
        key = state.key, state.block
        if key not in self.passes:
            real = copy.deepcopy(self.states[state.key])
            self.passes[key] = self.target.verify(real, ids, taps)
            self.states[key] = real
        return self.passes[key]

    def commit(self, state: _MemoState, n: int) -> None:
        verified, state.key = (state.key, state.block), state.key + state.block[:n]
        if state.key not in self.states:
            real = copy.deepcopy(self.states[verified])
            self.target.commit(real, n)
            self.states[state.key] = real


class MemoDrafter:
    """A drafter that computes each of its distributions once per history and samples from them as the drafter does."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.taps = drafter, drafter.taps
        self.rows: dict[Any, Tensor] = {}

    def start(self, capacity: int, k: int, sampling: Any, generator: Any) -> "MemoDrafter":
        self.capacity, self.sampling, self.generator = capacity, sampling, generator
        self.seen: list[Any] = []
        self.history: tuple[int, ...] = ()
        return self

    def observe(self, seen: Any, following: Tensor) -> None:
        self.seen.append((seen, following))
        self.history += tuple(following.tolist())

    def propose(self, last: Tensor, k: int) -> Draft:
        tokens: list[int] = []
        rows = []
        for _ in range(k):
            rows.append(self._row(last, k, tuple(tokens)))
            tokens += torch.multinomial(rows[-1], 1, generator=self.generator).tolist()
        return Draft(torch.tensor(tokens), torch.stack(rows))

    def _row(self, last: Tensor, k: int, before: tuple[int, ...]) -> Tensor:
        """Return the distribution of the draft after the drafts ``before``, from a session led to that point."""
        key = self.history, k, before
        if key not in self.rows:
            session = self.drafter.start(self.capacity, k, self.sampling, None)
            for seen, following in self.seen:
                session.observe(seen, following)
            forced, rows = [*before, *[0] * k], []

            def choose_forced(logits: Tensor, sampling: Any, generator: Any) -> tuple[Tensor, Tensor]:
                rows.extend(sampling.probabilities(logits))
                return torch.tensor([forced.pop(0) for _ in logits]), sampling.probabilities(logits)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("mxq.decode.drafting.choose", choose_forced)
                session.propose(last, k)
            self.rows[key] = rows[len(before)]
        return self.rows[key]
