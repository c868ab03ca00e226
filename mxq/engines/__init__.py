"""What decodes: the interface that evaluation drives, and the engine that runs inside this process."""

from mxq.engines.base import Completion, Decoder, Engine, EngineArm, Method, Sampling

__all__ = ["Completion", "Decoder", "Engine", "EngineArm", "Method", "Sampling"]
