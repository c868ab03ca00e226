"""Checkpoints on disk: headers, reading one tensor at a time, writing shards, and how the weights are quantized.

Every checkpoint is taken to be hostile: nothing is unpickled, no header is believed before it is checked against the
file, and no index leads out of its directory.
"""

from mxq.checkpoint.headers import TensorInfo
from mxq.checkpoint.quantization import QuantizationConfig
from mxq.checkpoint.reader import Checkpoint
from mxq.checkpoint.resolve import open_headers, resolve

__all__ = ["Checkpoint", "QuantizationConfig", "TensorInfo", "open_headers", "resolve"]
