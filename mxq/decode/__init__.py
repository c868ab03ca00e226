"""The verify loop in this process: a Qwen3.5 target, its drafters, and what the target accepts of their drafts."""

from mxq.decode.drafting import Drafter, load_drafter
from mxq.decode.loop import Generation, generate
from mxq.decode.sampling import GREEDY, Sampling
from mxq.decode.target import Target, load_target

__all__ = ["GREEDY", "Drafter", "Generation", "Sampling", "Target", "generate", "load_drafter", "load_target"]
