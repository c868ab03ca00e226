"""Prompt sets: where they come from, what identifies them, and how they become tokens."""

from mxq.workloads.chat import ChatTemplate
from mxq.workloads.prompts import Prompt, Workload, load
from mxq.workloads.published import PUBLISHED

__all__ = ["PUBLISHED", "ChatTemplate", "Prompt", "Workload", "load"]
