"""Whether a model fits a machine, for how many requests at once, and on how many GPUs if it does not.

With speculation a request has K + 1 states of each gated DeltaNet, as in vLLM 0.32 (``num_speculative_blocks`` of its
``MambaSpec``). What an engine takes for activations and graphs is not counted.
"""

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


def running(setup: Setup, method: str, k: int, concurrency: int, tokens: float) -> int:
    """Return how many of ``concurrency`` requests one GPU has room for at once; the others wait.

    Raises:
        MxqError: not even one; says by how much, and with which TP it would fit.
    """
    if not fits(setup, method, k, 1, tokens):
        raise _too_small(setup, method, k, tokens)
    none, one = (need(setup, method, k, requests, tokens).total for requests in (0, 1))
    return min(concurrency, int((UTILIZATION * setup.machine.memory - none) / (one - none)))


def _too_small(setup: Setup, method: str, k: int, tokens: float) -> MxqError:
    room, needed = UTILIZATION * setup.machine.memory, need(setup, method, k, 1, tokens)
    tp = 2
    while tp <= _MOST_TP and not fits(setup, method, k, 1, tokens, tp):
        tp *= 2
    gpus = f"it fits with TP {tp}" if tp <= _MOST_TP else f"it does not with TP {_MOST_TP} either"
    return MxqError(
        f"{setup.machine.gpu} is {size(round(needed.total - room))} too small for one request: "
        f"{size(round(needed.target + needed.drafter))} of weights{', the drafter among them' * bool(needed.drafter)}, "
        f"{size(round(needed.kv + needed.state))} of K/V and states, and {size(round(room))} of room "
        f"({UTILIZATION:.0%} of its memory)",
        f"{gpus}, which is not predicted; or give mxfp4, a shorter context or a smaller K",
    )
