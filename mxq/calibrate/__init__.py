"""Weights that were calibrated: AMD Quark's algorithms on one decoder block after the other.

Below ``convert``, which writes what comes out into a checkpoint. Nothing here is imported with torch or Quark in it
unless it is used; recipes may read :mod:`mxq.calibrate.algorithms` at no cost.
"""

from mxq.calibrate.algorithms import ALGORITHMS, OPTIONS, Calibration, check_options

__all__ = ["ALGORITHMS", "OPTIONS", "Calibration", "check_options"]
