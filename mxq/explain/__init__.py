"""Why acceptance changed: drafter on bf16 or MXFP4 features, judged by bf16 or MXFP4 logits, on one text."""

from mxq.explain.effects import why
from mxq.explain.record import Explanation, read_explanations
from mxq.explain.results import Effects, Explained, Why

__all__ = ["Effects", "Explained", "Explanation", "Why", "read_explanations", "why"]
