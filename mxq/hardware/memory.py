"""Whether a model fits a machine, and on how many GPUs it does."""

from dataclasses import dataclass

from mxq.errors import MxqError
from mxq.files import size
from mxq.hardware.cost import Setup

UTILIZATION = 0.9
"""Of a GPU's memory that the engine takes: vLLM's default ``--gpu-memory-utilization``, that of the published runs."""
_MOST_TP = 64


@dataclass(frozen=True)
class Need:
    """Bytes on each GPU."""

    target: float
    drafter: float
    kv: float
    state: float

    @property
    def total(self) -> float:
        """All together."""
        return self.target + self.drafter + self.kv + self.state


def need(setup: Setup, method: str, k: int, concurrency: int, tokens: float, tp: int = 1) -> Need:
    """Return what each of ``tp`` GPUs holds.

    Args:
        setup: what is served, and on what.
        method, k, concurrency: as in :meth:`Setup.step`.
        tokens: of the longest text, prompt and answer.
        tp: GPUs that share the target. Heads of keys and values are at most shared one by one; a DFlash drafter is on
            one GPU whole, as in the published runs.
    """
    target, drafts = setup.target, 0 if method == "ar" else k
    drafter = setup.drafter if method == "dflash" else None
    layers = target.attention_layers + (drafts > 0 and method == "mtp")
    kv = concurrency * tokens * layers * target.kv_bytes / min(tp, target.kv_heads)
    kv += concurrency * tokens * drafter.kv_bytes if drafter else 0
    return Need(
        target=target.weight_bytes(setup.packed) / tp,
        drafter=drafter.weight_bytes if drafter else 0,
        kv=kv,
        state=concurrency * (drafts + 1) * target.gdn_layers * target.state_bytes / tp,
    )


def fits(setup: Setup, method: str, k: int, concurrency: int, tokens: float, tp: int = 1) -> bool:
    """Tell whether each of ``tp`` GPUs has room for what :func:`need` says."""
    return need(setup, method, k, concurrency, tokens, tp).total <= UTILIZATION * setup.machine.memory


def check(setup: Setup, method: str, k: int, concurrency: int, tokens: float) -> Need:
    """Return what one GPU holds.

    Raises:
        MxqError: that is more than it has; says by how much, and with which TP it would fit.
    """
    room = UTILIZATION * setup.machine.memory
    needed = need(setup, method, k, concurrency, tokens)
    if fits(setup, method, k, concurrency, tokens):
        return needed
    over = size(round(needed.total - room))
    tp = 2
    while tp <= _MOST_TP and not fits(setup, method, k, concurrency, tokens, tp):
        tp *= 2
    gpus = f"it fits with TP {tp}" if tp <= _MOST_TP else f"it does not with TP {_MOST_TP} either"
    raise MxqError(
        f"{setup.machine.gpu} is {over} too small: {size(round(needed.target))} of weights, "
        f"{size(round(needed.drafter))} of drafter, {size(round(needed.kv + needed.state))} of K/V and states, and "
        f"{size(round(room))} of room ({UTILIZATION:.0%} of its memory)",
        f"{gpus}, which is not predicted; or give mxfp4, fewer requests, or a shorter context",
    )
