"""From what a user types to a directory: a path, ``testbed:NAME``, or the id of a model on the Hugging Face hub."""

import re
from pathlib import Path

from mxq.checkpoint.reader import read_config
from mxq.errors import MxqError, UsageError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Weights as safetensors and the small files beside them; never pickles or code.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*", "README.md"]


def is_hub_id(spec: str) -> bool:
    """Tell whether ``spec`` names a model on the hub rather than a directory here or a testbed."""
    return not Path(spec).exists() and _HUB_ID.fullmatch(spec) is not None


def resolve(spec: str) -> Path:
    """Return the directory that ``spec`` names, downloading it from the hub if need be.

    Raises:
        UsageError: there is no such directory, testbed or model, or it holds no config.json.
        MxqError: the hub could not be reached.
    """
    if spec.startswith("testbed:"):
        from mxq import testbed

        path = testbed.path(spec)
    elif is_hub_id(spec):
        path = _download(spec)
    else:
        path = Path(spec)
    read_config(path)
    return path


def _download(spec: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    hint = "give a local directory, testbed:dense, or a model's id on the hub"
    try:
        return Path(snapshot_download(spec, allow_patterns=_HUB_FILES))
    except errors.GatedRepoError:
        raise UsageError(f"the hub wants you to accept the terms of {spec}", "do so, then `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise UsageError(f"{spec} is neither a directory here nor a model on the Hugging Face hub", hint) from None
    except OSError as error:  # of the hub's own errors too: no network, nothing cached, a server that fails
        raise MxqError(
            f"{spec} is no directory here and could not be downloaded from the hub ({type(error).__name__})",
            "check the name and the network; `hf download` shows more",
        ) from None
