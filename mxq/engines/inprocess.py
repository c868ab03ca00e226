"""The in-process engine: :mod:`mxq.decode` behind the engine interface.

Targets are computed as :mod:`mxq.decode` does it: MXFP4 weights are dequantized when loaded and, unless the checkpoint
is weight-only, activations are rounded to MXFP4 in the quantized linears. What is accepted is therefore what the
quantized model accepts, while its speed says nothing about MXFP4 kernels.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mxq import decode
from mxq.engines.base import Completion, Decoder, EngineArm, Sampling
from mxq.errors import UsageError

_MEMORY_SHARE = 0.5
"""Of the memory that is free, what all targets together may take to be open at once; the rest is for activations."""


class InProcessEngine:
    """Decodes on this process's torch. ``dtype`` and ``device`` are torch's names ("bfloat16", "cpu", "cuda:0")."""

    name = "in-process"
    semantics = 1

    def __init__(self, *, dtype: str, device: str, sampling: Sampling, eos_token_ids: Sequence[int]) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._device = device_named(device)
        self._sampling = sampling
        self._eos = frozenset(eos_token_ids)

    def facts(self) -> dict[str, Any]:
        """Return the device's name, the number of threads, and how MXFP4 is computed."""
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"
        return {"device_name": name, "threads": torch.get_num_threads(), "mxfp4": "emulated"}

    def groups(self, arms: Sequence[EngineArm]) -> list[list[EngineArm]]:
        """Return all arms together if their targets fit in half of the free memory, else one group per target."""
        targets = list(dict.fromkeys(arm.target for arm in arms))
        if len(targets) < 2 or self.weight_bytes(targets) <= _MEMORY_SHARE * self.free_bytes():
            return [list(arms)]
        return [[arm for arm in arms if arm.target == target] for target in targets]

    @contextlib.contextmanager
    def open(self, arms: Sequence[EngineArm]) -> Iterator[list[Decoder]]:
        """Load each target once and a drafter per target and method."""
        targets: dict[Path, decode.Target] = {}
        drafters: dict[tuple[Path, str], decode.Drafter] = {}
        decoders: list[Decoder] = []
        for arm in arms:
            if arm.target not in targets:
                targets[arm.target] = decode.load_target(arm.target, dtype=self._dtype, device=self._device)
            drafter = None
            if arm.method != "ar":
                if (arm.target, arm.method) not in drafters:
                    loaded = decode.load_drafter(arm.drafter, targets[arm.target], arm.method)
                    drafters[arm.target, arm.method] = loaded
                drafter = drafters[arm.target, arm.method]
            decoders.append(_OpenArm(self, targets[arm.target], drafter, arm.num_speculative_tokens))
        try:
            yield decoders
        finally:
            # The caller still holds the list while it opens the next group: free these models first.
            decoders.clear()

    def generate(
        self, target: decode.Target, drafter: decode.Drafter | None, k: int, ids: Sequence[int], limit: int, seed: int
    ) -> Completion:
        """Complete one prompt with at most ``limit`` tokens and ``k`` drafts a pass."""
        done = decode.generate(
            target,
            ids,
            drafter=drafter,
            num_speculative_tokens=k,
            max_new_tokens=limit,
            sampling=decode.Sampling(self._sampling.temperature, self._sampling.top_p, self._sampling.top_k),
            eos_token_ids=self._eos,
            generator=torch.Generator(self._device).manual_seed(seed),
        )
        return Completion(
            token_ids=tuple(done.token_ids),
            accepted=tuple(done.accepted),
            drafted=tuple(done.drafted),
            finish_reason=done.finish_reason,
            ttft_s=done.ttft_s,
            duration_s=done.duration_s,
            target_s=done.target_s,
            draft_s=done.draft_s,
        )

    def weight_bytes(self, targets: Sequence[Path]) -> int:
        """Return what the weights of targets take once they are loaded."""
        return sum(map(_weight_elements, targets)) * self._dtype.itemsize

    def free_bytes(self) -> int:
        """Return the memory that is free where models are loaded."""
        if self._device.type == "cuda":
            return torch.cuda.mem_get_info(self._device)[0]
        with contextlib.suppress(OSError):
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def device_named(name: str) -> torch.device:
    """Return the device that torch calls ``name``; raise UsageError if it is not here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise UsageError(f"no device {name!r} here ({reason})", "use cpu, or cuda where torch has it") from None
    return device


class _OpenArm:
    def __init__(
        self, engine: InProcessEngine, target: decode.Target, drafter: decode.Drafter | None, budget: int
    ) -> None:
        self._engine, self._target, self._drafter, self._budget = engine, target, drafter, budget

    def generate(self, prompt_ids: Sequence[int], *, max_tokens: int, seed: int) -> Completion:
        return self._engine.generate(self._target, self._drafter, self._budget, prompt_ids, max_tokens, seed)


def _weight_elements(path: Path) -> int:
    """Count the elements of a checkpoint's weights once it is loaded: two of them come out of each packed byte."""
    from mxq.checkpoint import Checkpoint

    elements = 0
    for name, tensor in Checkpoint.open(path).tensors.items():
        count = 1
        for size in tensor.shape:
            count *= size
        elements += 0 if name.endswith("_scale") else count * (2 if tensor.dtype == "U8" else 1)
    return elements
