"""Sizes in bytes on the command line."""

import re
from typing import Any

import click

_UNITS = {"": 1, "B": 1} | {f"{p}B": 10 ** (3 * i) for i, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}IB": 2 ** (10 * i) for i, p in enumerate("KMGT", 1)}


class Size(click.ParamType[int]):
    """``5GB``, ``500MB``, ``2GiB`` or a number of bytes -> bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse what the user wrote; a default that is a number already passes."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
        if (
            found is None
            or found[2].upper() not in _UNITS
            or not (size := int(float(found[1]) * _UNITS[found[2].upper()]))
        ):
            self.fail(f"{value!r} is not a size; write it as 5GB, 500MB or 2GiB", param, ctx)
        return size
