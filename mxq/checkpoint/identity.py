"""What identifies a checkpoint as the source of a conversion, without reading its weights."""

import hashlib
import json

from mxq.checkpoint.fp8 import stored
from mxq.checkpoint.reader import Checkpoint


def fingerprint(source: Checkpoint) -> str:
    """Return a checksum of what identifies a source without reading its weights: config, headers and file sizes."""
    source = stored(source)
    digest = hashlib.sha256(json.dumps(source.config, sort_keys=True).encode())
    for tensor in sorted(source.tensors.values(), key=lambda tensor: tensor.name):
        entry = [tensor.name, tensor.dtype, tensor.shape, tensor.file.name, tensor.start, tensor.end]
        digest.update(json.dumps(entry).encode())
    return digest.hexdigest()
