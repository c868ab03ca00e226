"""Rows of AITER's tuned MoE configurations for MI355X (gfx950, 256 compute units) whose key a Qwen3.5 model can have.

AITER looks a layer up by (H, I, E, k) of the operands it is given and by the number of tokens, rounded up to a power of
two: I is padded, E counts the experts of the GPU, and under expert parallelism k is one less. The key has no model's
name, so rows tuned for another model serve as well. Without a row it decides by a heuristic, and warns.

Source: ``aiter/configs/model_configs/*_fp4_tuned_fmoe.csv`` of ROCm/aiter after v0.1.20, rows of SiLU with a4w4 and
per_1x32; every file of that directory is read unless ``AITER_CONFIG_FMOE`` is set (``aiter/jit/core.py``). Lookup:
``aiter/fused_moe.py``.
"""

from dataclasses import dataclass

_QWEN = "qwen3_5_397b_fp4_tuned_fmoe.csv"
_MINIMAX = "minimax_m25_fp4_tuned_fmoe.csv"


@dataclass(frozen=True)
class Tuned:
    """Rows for 1 to 32768 tokens.

    Attributes:
        hidden: H.
        intermediate: I, of a GPU, padded.
        experts: E, of a GPU.
        top_k: k.
        kernels: which they name, with the numbers of tokens.
        file: that has them.
        since: the first release that does, where known.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    kernels: str
    file: str
    since: str | None = None

    @property
    def mxmoe(self) -> bool:
        """Some rows name ``flydsl_mxmoe_*``, which raises NotImplementedError under EP (``aiter/fused_moe.py``)."""
        return "mxmoe" in self.kernels


TUNED = (
    Tuned(4096, 256, 512, 10, "assembly to 16 tokens, then FlyDSL", _QWEN, "0.1.13"),
    Tuned(4096, 512, 512, 10, "assembly to 8, mxmoe to 128, FlyDSL, CK stage 1 at 32768", _QWEN, "0.1.19"),
    Tuned(4096, 512, 513, 11, "assembly to 16, FlyDSL, CK stage 1 at 32768", _QWEN, "0.1.19"),
    Tuned(3072, 256, 256, 8, "FlyDSL, CK stage 2 to 8 tokens", _MINIMAX),
    Tuned(3072, 384, 256, 8, "FlyDSL", _MINIMAX),
    Tuned(3072, 768, 256, 8, "FlyDSL, CK in places", _MINIMAX),
    Tuned(3072, 1536, 256, 8, "FlyDSL, CK in places", _MINIMAX),
)


def tuned(hidden: int, intermediate: int, experts: int, top_k: int) -> Tuned | None:
    """Return the rows of a key, or None: there are none, as far as is known."""
    key = (hidden, intermediate, experts, top_k)
    return next((row for row in TUNED if (row.hidden, row.intermediate, row.experts, row.top_k) == key), None)
