"""Prompt sets: where they come from, what identifies them, and how they become tokens."""

from mxq.workloads.chat import ChatTemplate
from mxq.workloads.prompts import Prompt, Workload, load

__all__ = ["ChatTemplate", "Prompt", "Workload", "load"]
