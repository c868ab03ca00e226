"""The in-process engine: what it loads, when it lets go, and that it decodes as `mxq.decode` does."""

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import Models

from mxq import decode
from mxq.engines import EngineArm, Sampling
from mxq.engines.inprocess import InProcessEngine
from mxq.errors import UsageError

PROMPT = [5, 6, 7, 8, 9]


def engine(sampling: Sampling | None = None, eos: Sequence[int] = ()) -> InProcessEngine:
    return InProcessEngine(dtype="float32", device="cpu", sampling=sampling or Sampling(), eos_token_ids=eos)


def all_arms(models: Models, target: Path | None = None) -> list[EngineArm]:
    path = target or models.target
    return [
        EngineArm(path, "ar", 0, None),
        EngineArm(path, "mtp", 3, None),
        EngineArm(path, "dflash", 3, models.drafter),
        EngineArm(path, "dflash", 7, models.drafter),
    ]


def test_every_arm_gives_the_tokens_of_plain_decoding(dense_models: Models) -> None:
    target = decode.load_target(dense_models.target, dtype=torch.float32)
    expected = decode.generate(target, PROMPT, max_new_tokens=20)
    with engine().open(all_arms(dense_models)) as decoders:
        for arm, decoder in zip(all_arms(dense_models), decoders, strict=True):
            done = decoder.generate(PROMPT, max_tokens=20, seed=0)
            assert list(done.token_ids) == expected.token_ids
            assert done.finish_reason == "length"
            assert done.drafted is not None
            assert all(count == arm.num_speculative_tokens for count in done.drafted)
            assert bool(done.drafted) == (arm.method != "ar")
            assert done.duration_s >= done.ttft_s > 0
    with engine(eos=[expected.token_ids[4]]).open(all_arms(dense_models)[:1]) as (decoder,):
        done = decoder.generate(PROMPT, max_tokens=20, seed=0)
    assert done.finish_reason == "stop"
    assert list(done.token_ids) == expected.token_ids[: expected.token_ids.index(expected.token_ids[4]) + 1]


def test_sampling_follows_the_seed(dense_models: Models) -> None:
    with engine(Sampling(temperature=1.0, top_p=0.95)).open(all_arms(dense_models)[2:3]) as (decoder,):
        first, again, other = (decoder.generate(PROMPT, max_tokens=20, seed=seed).token_ids for seed in (1, 1, 2))
    assert first == again != other


def test_models_are_loaded_once_and_freed_before_the_next_group(
    dense_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[weakref.ref[Any]] = []

    def watched(load):  # type: ignore[no-untyped-def]
        def call(*args, **options):  # type: ignore[no-untyped-def]
            model = load(*args, **options)
            loaded.append(weakref.ref(model))
            return model

        return call

    monkeypatch.setattr(decode, "load_target", watched(decode.load_target))
    monkeypatch.setattr(decode, "load_drafter", watched(decode.load_drafter))
    with engine().open(all_arms(dense_models)) as decoders:
        assert len(decoders) == 4
        assert len(loaded) == 3
        assert all(model() is not None for model in loaded)
    gc.collect()
    # `decoders` is still in scope, as it is for whoever opens the next group.
    assert all(model() is None for model in loaded)


@pytest.mark.parametrize(("free_bytes", "groups"), [(1 << 40, 1), (1 << 20, 2)])
def test_targets_that_do_not_fit_together_are_parted(
    dense_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, groups: int
) -> None:
    other = tmp_path / "other"
    other.symlink_to(dense_models.target)
    monkeypatch.setattr(InProcessEngine, "free_bytes", lambda self: free_bytes)
    arms = all_arms(dense_models) + all_arms(dense_models, other)
    parted = engine().groups(arms)
    assert len(parted) == groups
    assert [arm for group in parted for arm in group] == arms
    assert engine().groups(arms[:4]) == [arms[:4]]  # a single target has nothing to be parted from


def test_free_memory_is_that_of_this_machine() -> None:
    assert 1 << 20 < engine().free_bytes() < 1 << 50


@pytest.mark.parametrize("device", ["abacus", "cuda:99"])
def test_a_device_that_is_not_there(device: str) -> None:
    with pytest.raises(UsageError, match=f"no device '{device}' here"):
        InProcessEngine(dtype="float32", device=device, sampling=Sampling(), eos_token_ids=())
