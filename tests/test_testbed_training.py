"""The generator's text is right and keeps its held-out prompts apart; the drafter's training leaks nothing."""

import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from testbed_training import dflash, features, measure, target, text
from testbed_training import tokenizer as tok
from tokenizers import Tokenizer
from torch import nn

from mxq import decode, testbed
from mxq.checkpoint import Checkpoint
from mxq.decode.dflash import DFlashModel
from mxq.decode.drafting import Method
from mxq.decode.mtp import MTPModel
from mxq.models.dflash import DFlashConfig

ROOT = Path(__file__).parents[1]
FAMILIES = text.families()
_NUMBER = r"(?:-?\d+|\(-\d+\))"
_CALCULATION = re.compile(rf"(?<![*/+-] )(?<!\w)({_NUMBER}(?: [*/+-] {_NUMBER})+) = (-?\d+)(?![\w^]| [*/+-])")


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_the_same_for_the_same_seed(family: str) -> None:
    first, again, other = (FAMILIES[family](random.Random(seed)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


@pytest.mark.parametrize("family", ["arithmetic", "maths"])
def test_every_calculation_in_an_answer_is_right(family: str) -> None:
    rng = random.Random(0)
    checked = 0
    for example in itertools.starmap(FAMILIES[family], itertools.repeat((rng,), 300)):
        for left, right in _CALCULATION.findall(example.response):
            assert eval(left) == int(right), example.response
            checked += 1
        for dividend, division in re.findall(r"(\d+) = (\d+ \* \d+ \+ \d+)\.", example.response):
            assert int(dividend) == eval(division), example.response
        assert example.response.endswith(f"The answer is {example.answer}.")
    assert checked > 600


@pytest.mark.parametrize("family", ["functions", "programs"])
def test_reference_code_passes_its_tests_and_broken_code_does_not(family: str) -> None:
    rng = random.Random(0)
    for example in itertools.starmap(FAMILIES[family], itertools.repeat((rng,), 5)):
        assert measure.right(example, example.response) is True
        assert measure.right(example, example.response.replace("    return ", "    return 1 or ")) is False
        assert measure.right(example, "I cannot write that.") is False


def test_code_that_never_ends_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TIMEOUT_S", 1)
    example = text.Example("", "", tests="assert True")
    assert measure.right(example, "```python\nwhile True:\n    pass\n```") is False


def test_held_out_prompts_are_distinct_and_never_trained_on() -> None:
    held = text.held_out(20)
    prompts = [e.prompt for examples in held.values() for e in examples]
    assert len(prompts) == len(set(prompts)) == 100
    # Draw what would be the training text from the held-out seed itself: all of its prompts must be passed over.
    excluded = frozenset(prompts)
    seen = [e.prompt for e in text.training("train", 3000, excluded, dict.fromkeys(FAMILIES, 1.0))]
    assert not excluded & set(seen)
    without = {e.prompt for e in text.training("train", 3000, frozenset(), dict.fromkeys(FAMILIES, 1.0))}
    one = next(iter(without))
    assert one not in {e.prompt for e in text.training("train", 3000, frozenset({one}), dict.fromkeys(FAMILIES, 1.0))}


def test_chat_template_writes_what_training_text_has(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = tok.train(["some text to train on"], 300)
    tok.save(tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    message = [{"role": "user", "content": "What is 12 + 30?"}]
    assert loaded.apply_chat_template(message, add_generation_prompt=True, tokenize=False) == tok.conversation(
        "What is 12 + 30?"
    )
    with pytest.raises(Exception, match="cannot think"):
        loaded.apply_chat_template(message, add_generation_prompt=True, tokenize=False, enable_thinking=True)


def _answers(length: int = 40, taps: int = 2, size: int = 32) -> features.Answers:
    generator = torch.Generator().manual_seed(0)
    return features.Answers(
        torch.randint(0, 50, (2, length), generator=generator),
        torch.tensor([5, 6]),
        torch.tensor([length, length]),
        torch.randn(2, length, size, generator=generator),
        torch.randn(2, length, taps * size, generator=generator),
    )


def _drafter(size: int = 32) -> tuple[DFlashModel, nn.Embedding]:
    config = DFlashConfig.from_dict(
        {
            "hidden_size": size,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "vocab_size": 50,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "block_size": 8,
            "dflash_config": {"mask_token_id": 49, "target_layer_ids": [0, 1]},
        }
    )
    return dflash.initial(config, seed=0).eval(), nn.Embedding(50, size)


@torch.inference_mode()
def test_a_block_does_not_see_the_tokens_it_drafts() -> None:
    model, embed = _drafter()
    data = _answers()
    anchors = torch.tensor([[10, 20], [7, 30]])
    before = dflash.blocks(model, embed, data, anchors, 8)
    changed = data.tokens.clone()
    changed[:, 11] = (changed[:, 11] + 1) % 49  # drafted by the first row's first block, an anchor of none
    data = features.Answers(changed, data.start, data.end, data.hidden, data.taps)
    after = dflash.blocks(model, embed, data, anchors, 8)
    torch.testing.assert_close(before, after, rtol=0, atol=0)


@torch.inference_mode()
def test_a_block_sees_the_context_strictly_before_its_anchor_and_no_other_block() -> None:
    model, embed = _drafter()
    data = _answers()
    anchors = torch.tensor([[10, 20], [10, 30]])
    before = dflash.blocks(model, embed, data, anchors, 8)

    def with_taps(position: int) -> torch.Tensor:
        taps = data.taps.clone()
        taps[:, position] += 1
        return dflash.blocks(
            model, embed, features.Answers(data.tokens, data.start, data.end, data.hidden, taps), anchors, 8
        )

    at_anchor = with_taps(10)
    torch.testing.assert_close(at_anchor[:, 0], before[:, 0], rtol=0, atol=0)  # the anchor's own feature is not known
    assert not torch.allclose(at_anchor[:, 1], before[:, 1])  # the later block may see it
    assert not torch.allclose(with_taps(9)[:, 0], before[:, 0])
    alone = dflash.blocks(model, embed, data, anchors[:, :1], 8)
    torch.testing.assert_close(alone[:, 0], before[:, 0], rtol=1e-4, atol=1e-5)


def test_acceptance_walks_from_draft_to_draft() -> None:
    # An answer of ten tokens. Drafts from anchor 2 are right twice, then wrong; all later drafts are wrong.
    tokens = torch.arange(12)[None]
    drafts = torch.full((1, 12, 3), -1)
    drafts[0, 2] = torch.tensor([3, 4, -1])
    data = features.Answers(tokens, torch.tensor([2]), torch.tensor([12]), torch.empty(1, 12, 1), torch.empty(1, 12, 1))
    # Passes: anchor 2 commits 3, 4, 5; then one token a pass from 5 to 11, six of them.
    assert measure.acceptance(data, drafts, 3) == pytest.approx(1 + 2 / 7)


@torch.inference_mode()
@pytest.mark.parametrize("method", ["mtp", "dflash"])
def test_training_measures_what_the_verify_loop_does(method: Method) -> None:
    """Acceptance read off an answer, all drafts made at once, is that of the loop which made the answer."""
    directory, drafter_directory = testbed.path("testbed:dense"), testbed.path("testbed:dense-dflash")
    loaded = decode.load_target(directory, dtype=torch.float32)
    drafter = decode.load_drafter(drafter_directory if method == "dflash" else None, loaded, method)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    lines = (testbed.prompts_dir() / "chat.jsonl").read_text().splitlines()[:2]
    prompts = [tokenizer.encode(tok.conversation(json.loads(line)["prompt"])).ids for line in lines]
    made = [decode.generate(loaded, p, drafter=drafter, num_speculative_tokens=7, max_new_tokens=100) for p in prompts]
    model, head = _as_training_sees_it(directory)
    config = DFlashConfig.from_dict(json.loads((drafter_directory / "config.json").read_text()))
    data = features.collect(model, prompts, [m.token_ids for m in made], list(config.target_layer_ids))
    if method == "mtp":
        drafts = measure.mtp_drafts(head, model, data, 7)
    else:
        network = DFlashModel(config)
        network.load_state_dict({k: v.float() for k, v in load_file(drafter_directory / "model.safetensors").items()})
        drafts = measure.dflash_drafts(network, model, data, 7)
    accepted, passes = sum(sum(m.accepted) for m in made), sum(len(m.accepted) for m in made)
    assert accepted > passes  # or the comparison would say little
    assert measure.acceptance(data, drafts, 7) == pytest.approx(1 + accepted / passes, rel=0.05)


def _as_training_sees_it(directory: Path) -> tuple[nn.Module, MTPModel]:
    from testbed_training.export import Shape

    checkpoint = Checkpoint.open(directory)
    config = checkpoint.config
    model = target.build(config, Shape(layers=config["text_config"]["num_hidden_layers"]), 0)
    target.load(model, directory)
    head = MTPModel(model.config)
    names = [name for name in checkpoint.tensors if name.startswith("mtp.")]
    head.load_state_dict({name.removeprefix("mtp."): checkpoint.read(name).float() for name in names})
    return model.eval(), head.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_smoke_training_writes_a_target_and_a_drafter_that_decode(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "tools/train_testbed.py", name, "--smoke", "--workers", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "prompts that also occur in the held-out set: 0" in done.stdout
    assert (tmp_path / f"{name}.log").read_text() == done.stdout
    loaded = decode.load_target(tmp_path / name)
    plain = decode.generate(loaded, [1, 2, 3], max_new_tokens=12)
    methods: tuple[tuple[Method, Path | None], ...] = (("mtp", None), ("dflash", tmp_path / f"{name}-dflash"))
    for method, where in methods:
        drafter = decode.load_drafter(where, loaded, method)
        made = decode.generate(loaded, [1, 2, 3], drafter=drafter, num_speculative_tokens=3, max_new_tokens=12)
        assert made.token_ids == plain.token_ids
    # And again from the target just made, as the second run of a training does.
    again = [*command[:-1], str(tmp_path / "more"), "--start-from", str(tmp_path), "--set", "target_steps=0"]
    assert subprocess.run(again, cwd=ROOT, capture_output=True, check=False).returncode == 0
    first, second = (Checkpoint.open(where / name) for where in (tmp_path, tmp_path / "more"))
    for tensor in first.tensors:
        if not tensor.startswith("mtp."):
            assert torch.equal(first.read(tensor), second.read(tensor)), tensor
