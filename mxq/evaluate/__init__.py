"""Evaluation: a matrix of arms and workloads, measured into a run directory that can be continued and read back."""

from mxq.evaluate.inprocess import measure
from mxq.evaluate.matrix import Arm, Cell, Plan, Settings
from mxq.evaluate.prepare import Request, prepare
from mxq.evaluate.reading import RecordedCell, Run, read_run
from mxq.evaluate.records import Record
from mxq.evaluate.runner import run

__all__ = [
    "Arm",
    "Cell",
    "Plan",
    "Record",
    "RecordedCell",
    "Request",
    "Run",
    "Settings",
    "measure",
    "prepare",
    "read_run",
    "run",
]
