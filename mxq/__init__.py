"""Convert Qwen3.5 models to OCP MXFP4 and measure whether speculative decoding survives.

The package is imported by area (``mxq.convert``, ``mxq.evaluate``, ``mxq.decode``, ...); importing ``mxq`` itself
loads nothing heavy, so that ``mxq --help`` stays instant.
"""

__version__ = "0.1.0"
