"""How long a step takes: the bytes a pass reads and writes, the operations it makes, and what neither explains.

A step of plain decoding is one pass of the target over B tokens. With speculation it is a pass of the drafter (DFlash)
or K passes of the MTP head, and one of the target over B (K + 1). For each group of matrices the time is that of its
bytes or of its operations, whichever is longer (the roofline of Williams, Waterman and Patterson, CACM 52(4), 2009);
groups, states and overheads are added, since one waits for the other::

    matrices   max(bytes / bandwidth, 2 parameters tokens / rate); packed ones are read at a share of the bandwidth, and
               where kernels unpack them to bf16 both times are added
    experts    those that tokens are sent through, see :func:`experts_touched`
    K/V        B context bytes of a token, in layers of full attention
    state      of gated DeltaNets, read and written once by each sequence
    snapshots  a verify pass writes the state behind each of its K + 1 tokens, to go back to where drafts were accepted:
               max(scan, B bytes / (bandwidth snapshot_share)) for each token and layer. vLLM 0.32 does so
               (``third_party/flash_linear_attention/ops/fused_recurrent.py``), and SGLang
               (``intermediate_ssm_state_cache`` of ``mem_cache/memory_pool.py``).
    overhead   for each layer, more for one with experts, and for each of the drafter's passes
    host       what is left to the least that a step takes, since the engine's own process prepares it
"""

from collections import defaultdict
from dataclasses import dataclass

from mxq.hardware.machine import Machine
from mxq.hardware.shape import BF16, BF16_BYTES, MXFP4_BYTES, DrafterShape, Packed, TargetShape

PARTS = (
    *("weights", "experts", "lm_head", "K/V", "state", "snapshots", "operations", "overhead"),
    *("draft weights", "draft lm_head", "draft K/V", "draft operations", "draft overhead"),
    "host",
)
"""What a step consists of. ``operations`` is the time that matrix products take beyond reading their weights."""

Parts = dict[str, float]
"""Seconds by part."""


def _none() -> defaultdict[str, float]:
    return defaultdict(float)


def experts_touched(experts: int, per_token: int, tokens: int) -> float:
    """Return how many distinct experts of a layer ``tokens`` tokens are sent through, as expected.

    E (1 - (1 - k/E)^T): each token takes k of E experts, all equally likely, whatever the others take. Tokens of one
    text prefer the same ones, so that it is an upper bound in practice.
    """
    return experts * (1 - (1 - per_token / experts) ** tokens)


@dataclass(frozen=True)
class Setup:
    """A target on a machine, with a DFlash drafter or none."""

    machine: Machine
    target: TargetShape
    packed: Packed
    drafter: DrafterShape | None = None

    def step(self, method: str, k: int, concurrency: int, context: float) -> Parts:
        """Return the time of one step by part, in seconds.

        Args:
            method: ``ar``, ``mtp`` or ``dflash``.
            k: drafts in a pass; with 0 nothing is drafted, as with ``ar``.
            concurrency: sequences in flight, B.
            context: tokens before the step, mean over the sequences.
        """
        drafts = 0 if method == "ar" else k
        parts = self._target_pass(concurrency, drafts + 1, context)
        if drafts and method == "mtp":
            for part, seconds in self._mtp_pass(concurrency, context).items():
                parts[part] = drafts * seconds
        elif drafts:
            parts |= self._dflash_pass(concurrency, drafts + 1, context)
        passes = drafts if method == "mtp" else min(drafts, 1)
        parts["host"] = max(0.0, self.machine.host(passes) - sum(parts.values()))
        return {part: parts.get(part, 0.0) for part in PARTS}

    def prompts(self, requests: int, tokens: int) -> float:
        """Return the seconds until ``requests`` requests that come at once have their first tokens.

        An engine that plans ahead takes the first of them, then those that came meanwhile, then the rest: passes that
        the host prepares one after the other, while the GPU works.

        Args:
            requests: how many.
            tokens: of each one's prompt, which lm_head sees the last one of only.
        """
        parts = _none()
        self._layers(parts, requests * tokens)
        machine = self.machine
        return max(machine.prompt_s + sum(parts.values()), min(requests, machine.prompt_passes) * machine.prompt_s)

    @property
    def _layer_s(self) -> float:
        """Seconds of one of the target's layers beyond bytes and operations; its MTP head has such a layer, too."""
        return self.machine.layer_s + (self.machine.experts_s if self.target.experts else 0.0)

    def _target_pass(self, sequences: int, queries: int, context: float) -> Parts:
        target, machine, tokens = self.target, self.machine, sequences * queries
        parts = _none()
        self._layers(parts, tokens)
        self._product(parts, "lm_head", target.lm_head, tokens)
        parts["K/V"] = sequences * (context + queries) * target.kv_bytes * target.attention_layers / machine.bandwidth
        state = sequences * target.state_bytes
        parts["state"] = target.gdn_layers * 2 * state / machine.bandwidth
        if queries > 1:
            one = max(machine.scan_s, state / (machine.bandwidth * machine.snapshot_share))
            parts["snapshots"] = target.gdn_layers * queries * one
        parts["overhead"] = target.layers * self._layer_s
        return dict(parts)

    def _layers(self, parts: Parts, tokens: int) -> None:
        target = self.target
        linears = target.gdn_layers * target.gdn + target.attention_layers * target.attention
        linears += target.layers * target.mlp
        self._product(parts, "weights", linears, tokens, packed=self.packed.linears)
        self._product(parts, "weights", target.gdn_layers * target.gates, tokens)
        self._experts(parts, "experts", target.layers, tokens, self.packed)

    def _experts(self, parts: Parts, name: str, layers: int, tokens: int, packed: Packed) -> None:
        target = self.target
        if not target.experts or not tokens:
            return
        touched = experts_touched(target.experts, target.experts_per_token, tokens)
        worked = target.experts_per_token * tokens / touched
        self._product(parts, name, layers * touched * target.expert, worked, packed=packed.experts)
        self._product(parts, name, layers * target.shared, tokens, packed=packed.shared)
        self._product(parts, name, layers * target.router, tokens)

    def _product(self, parts: Parts, name: str, parameters: float, tokens: float, *, packed: bool = False) -> None:
        machine = self.machine
        reading = parameters * BF16_BYTES / machine.bandwidth
        rate, overlap = machine.bf16, 1.0
        if packed:
            assert machine.mxfp4 is not None, "checked before"
            reading = parameters * MXFP4_BYTES / (machine.bandwidth * machine.packed_share)
            rate, overlap = machine.mxfp4, machine.packed_overlap
        multiplying = 2 * parameters * tokens / rate
        parts[name] += reading
        draft = "draft " if name.startswith("draft ") else ""
        parts[f"{draft}operations"] += multiplying - overlap * min(reading, multiplying)

    def _mtp_pass(self, sequences: int, context: float) -> Parts:
        """Return one pass of the MTP head: its fc is bf16, and it has an lm_head to itself each time."""
        target, parts = self.target, _none()
        packed = self.packed if self.packed.mtp else BF16
        self._product(parts, "draft weights", 2 * target.hidden**2, sequences)
        self._product(parts, "draft weights", target.attention + target.mlp, sequences, packed=packed.linears)
        self._experts(parts, "draft weights", 1, sequences, packed)
        self._product(parts, "draft lm_head", target.lm_head, sequences)
        parts["draft K/V"] = sequences * context * target.kv_bytes / self.machine.bandwidth
        parts["draft overhead"] = self._layer_s + self.machine.draft_s
        return dict(parts)

    def _dflash_pass(self, sequences: int, queries: int, context: float) -> Parts:
        drafter, parts, tokens = self.drafter, _none(), sequences * queries
        assert drafter is not None, "checked before"
        self._product(parts, "draft weights", drafter.linears + drafter.fc, tokens)
        self._product(parts, "draft lm_head", self.target.lm_head, tokens - sequences)
        parts["draft K/V"] = sequences * (context + queries) * drafter.kv_bytes / self.machine.bandwidth
        parts["draft overhead"] = drafter.layers * self.machine.layer_s + self.machine.draft_s
        return dict(parts)
