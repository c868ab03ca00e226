"""Margins from a small YAML file, so that a team's changes that do not matter are written down once."""

import difflib
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from mxq.errors import UsageError
from mxq.stats import Margins

_KEYS = tuple(field.name for field in fields(Margins))


def read_margins(file: Path) -> dict[str, float]:
    """Return the margins that a file holds, of ``acceptance``, ``survival`` and ``throughput``.

    Raises UsageError naming file and key where it cannot be read, or holds something else.
    """
    try:
        content: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"margins {file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"margins {file} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UsageError(f"margins {file} is not a table of keys", f"the keys are {', '.join(_KEYS)}")
    for key, value in content.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(_KEYS)}"
            raise UsageError(f"margins {file}: unknown key {key!r}", hint)
        if type(value) not in (int, float) or not 0 < value < 1:
            raise UsageError(f"margins {file}: {key} is {value!r}", "a margin is a share, such as 0.03 for 3 %")
    return {key: float(value) for key, value in content.items()}
