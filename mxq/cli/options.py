"""Options that several verbs take."""

import os
import re
from collections.abc import Callable
from typing import TypeVar

import click

from mxq.cli.sizes import Size
from mxq.errors import UsageError

F = TypeVar("F", bound=Callable[..., object])

_MOST_JOBS = 16  # which read and write faster than disks do


def conversion_options(command: F) -> F:
    """Add ``--recipe``, ``--format`` and ``--experts``: what decides how a checkpoint is converted."""
    form = click.option(
        "--format",
        "form",
        type=click.Choice(["quark", "compressed-tensors"]),
        default="quark",
        show_default=True,
        help="The form of the result: names and config of AMD Quark or of compressed-tensors, the same bytes.",
    )
    experts = click.option(
        "--experts",
        type=click.Choice(["per-expert", "fused"]),
        default="per-expert",
        show_default=True,
        help="How routed experts are written: a tensor for each, or one for all of a layer.",
    )
    recipe = click.option(
        "--recipe",
        default="mxfp4",
        show_default=True,
        help="A recipe of mxq's, of which recipes/README.md is the catalogue, or a YAML file of yours.",
    )
    return recipe(form(experts(command)))


def shard_size_option(command: F) -> F:
    """Add ``--max-shard-size``: how large the files that are written become."""
    return click.option(
        "--max-shard-size",
        type=Size(),
        default="5GB",
        show_default=True,
        help="Largest file, unless one tensor is larger.",
    )(command)


def jobs_option(command: F) -> F:
    """Add ``--jobs``: how many threads convert."""
    return click.option(
        "--jobs",
        type=click.IntRange(min=1),
        default=lambda: min(_processors(), _MOST_JOBS),
        show_default=f"the processors, at most {_MOST_JOBS}",
        help="Threads that work.",
    )(command)


def variable(text: str) -> tuple[str, str]:
    """Return the name and the value of an ``--env``; raise UsageError if it is none."""
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(f"--env {text!r} sets no variable", "write NAME=VALUE")
    return name, value


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
