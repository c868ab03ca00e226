"""The options of ``mxq eval`` that are about lm-eval's tasks."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mxq.errors import UsageError

if TYPE_CHECKING:
    from mxq.evaluate.tasks import Asked

F = TypeVar("F", bound=Callable[..., object])


def task_options(command: F) -> F:
    """Add the options."""
    options = [
        click.option(
            "--lm-eval",
            "tasks",
            metavar="TASK[,TASK...]",
            multiple=True,
            help="vLLM: then ask each target's plain server these tasks of lm-eval, repeatable. (pip install "
            "'mxq[lm-eval]')",
        ),
        click.option(
            "--lm-eval-include",
            "tasks_include",
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="Further tasks of lm-eval: a directory of their YAML files.",
        ),
        click.option(
            "--lm-eval-limit",
            "tasks_limit",
            type=click.IntRange(min=1),
            metavar="N",
            help="Only the first so many samples of each task.",
        ),
        click.option(
            "--lm-eval-chat",
            "tasks_chat",
            is_flag=True,
            help="Send tasks' prompts through the chat template, examples as earlier turns.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def tasks_of(options: dict[str, Any], given: Mapping[str, bool]) -> "Asked | None":
    """Return what lm-eval is to ask; None for nothing.

    Args:
        options: all of the verb's; those of tasks are taken out.
        given: which options the user wrote.
    """
    mine = {name: options.pop(name) for name in ("tasks", "tasks_include", "tasks_limit", "tasks_chat")}
    names = tuple(dict.fromkeys(name.strip() for text in mine["tasks"] for name in text.split(",")))
    if not names:
        wrong = next((name for name in mine if given.get(name)), None)
        if wrong:
            raise UsageError(f"--lm-eval-{wrong.removeprefix('tasks_')} without --lm-eval", "give --lm-eval TASK")
        return None
    if not all(names):
        raise UsageError(f"--lm-eval {mine['tasks'][0]!r} has an empty name", "write --lm-eval TASK,TASK")
    if options["engine"] != "vllm":
        raise UsageError("--lm-eval without --engine vllm", "lm-eval asks servers: give --engine vllm")
    from mxq.evaluate.tasks import Asked

    return Asked(names, mine["tasks_include"], mine["tasks_limit"], mine["tasks_chat"])
