"""Prompt sets from the testbed or from a JSON lines file, checked line by line before anything runs.

A line is ``{"prompt": "..."}`` or ``{"messages": [{"role": "user", "content": "..."}, ...]}``, with an optional ``id``
(string or integer; lines without one are numbered), ``answer`` (the reference final answer) and ``tests`` (Python
assertions). Other keys are kept out: they would change nothing that is sent.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxq import files, progress, testbed
from mxq.errors import UsageError

_ONE_OBJECT = "every line must be one JSON object"
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Prompt:
    """One conversation to be continued by the model. ``messages`` are (role, content) pairs; the last is the user's."""

    id: str
    messages: tuple[tuple[str, str], ...]
    answer: str | None = None
    tests: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the line that :func:`load` reads back as this prompt."""
        line: dict[str, Any] = {
            "id": self.id,
            "messages": [{"role": role, "content": content} for role, content in self.messages],
        }
        if self.answer is not None:
            line["answer"] = self.answer
        if self.tests is not None:
            line["tests"] = self.tests
        return line


@dataclass(frozen=True)
class Workload:
    """A named, ordered set of prompts. ``sha256`` covers ids and messages in order: what every arm is sent."""

    name: str
    prompts: tuple[Prompt, ...]
    sha256: str


def load(spec: str, limit: int | None = None) -> Workload:
    """Return the first ``limit`` prompts (all when None) of a testbed workload or of a JSON lines file.

    Raises UsageError for an unknown name, a file that cannot be read, holds nothing, or has a line that is not a
    prompt (named by number), and for an id that occurs twice.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit of {limit} prompts", "it must be at least 1")
    name, path = _locate(spec)
    prompts = _read(path, name)
    if limit is not None and limit > len(prompts):
        progress.note(f"note: workload {name} has {len(prompts)} prompts, fewer than the limit of {limit}; taking all")
    taken = tuple(prompts[:limit])
    repeated = len(taken) - len({prompt.messages for prompt in taken})
    if repeated:
        progress.note(f"note: workload {name} says the same thing more than once ({repeated} of {len(taken)} prompts)")
    return Workload(name, taken, _fingerprint(taken))


def _locate(spec: str) -> tuple[str, Path]:
    if spec in testbed.WORKLOADS:
        return spec, testbed.prompts_dir() / f"{spec}.jsonl"
    path = Path(spec)
    if path.is_file():
        return path.stem, path
    raise UsageError(
        f"workload {spec!r} is neither one of mxq's own nor a file",
        f"use one of {', '.join(testbed.WORKLOADS)}, or the path of a JSON lines file",
    )


def _read(path: Path, name: str) -> list[Prompt]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read prompts from {path}: {error}", "it must be JSON lines in UTF-8") from None
    prompts: list[Prompt] = []
    lines_by_id: dict[str, int] = {}
    # Not splitlines(): JSON strings may hold U+2028 and the like unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        prompt = _parse(line, f"{path}, line {number}", default_id=f"{name}-{number:04d}")
        if prompt.id in lines_by_id:
            raise UsageError(
                f"{path}: id {prompt.id!r} is on line {lines_by_id[prompt.id]} and again on line {number}",
                "ids pair the answers of different arms: make them unique, or leave them out",
            )
        lines_by_id[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise UsageError(f"{path} holds no prompts", 'write one JSON object per line, such as {"prompt": "Hello"}')
    return prompts


def _parse(line: str, where: str, default_id: str) -> Prompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON ({error.msg} at column {error.colno})", _ONE_OBJECT) from None
    except (ValueError, RecursionError) as error:  # ValueError: Python reads no integers of thousands of digits
        reason = "too deep" if isinstance(error, RecursionError) else "a number has too many digits"
        raise UsageError(f"{where}: not JSON ({reason})", _ONE_OBJECT) from None
    if not isinstance(value, dict):
        raise UsageError(f"{where}: {type(value).__name__} instead of an object", 'write {"prompt": "..."}')
    if ("prompt" in value) == ("messages" in value):
        found = "both 'prompt' and 'messages'" if "prompt" in value else "neither 'prompt' nor 'messages'"
        raise UsageError(f"{where}: {found}", "give exactly one of them")
    if "prompt" in value:
        messages: Sequence[tuple[str, str]] = [("user", _text(value["prompt"], where, "prompt"))]
    else:
        messages = _messages(value["messages"], where)
    identity = value.get("id", default_id)
    if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        raise UsageError(f"{where}: id is {json.dumps(identity)}", "an id is a string or an integer")
    _check_encodable(str(identity), where, "id")
    return Prompt(
        id=str(identity),
        messages=tuple(messages),
        answer=_optional_text(value.get("answer"), where, "answer"),
        tests=_optional_text(value.get("tests"), where, "tests"),
    )


def _messages(value: Any, where: str) -> list[tuple[str, str]]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{where}: 'messages' is not a list of messages", 'write [{"role": "user", "content": "..."}]')
    messages = []
    for message in value:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise UsageError(f"{where}: a message has role {role!r}", f"roles are {', '.join(_ROLES)}")
        messages.append((role, _text(message.get("content"), where, f"the {role} message's content")))
    if messages[-1][0] != "user":
        raise UsageError(f"{where}: the last message is the {messages[-1][0]}'s", "end with the user's message")
    return messages


def _text(value: Any, where: str, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{where}: {what} is {json.dumps(value)[:40]}", "it must be text that is not empty")
    _check_encodable(value, where, what)
    return value


def _check_encodable(value: str, where: str, what: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        found = json.dumps(value[error.start])
        raise UsageError(
            f"{where}: {what} has half a character, {found}", "write both surrogates, or neither"
        ) from None


def _optional_text(value: Any, where: str, what: str) -> str | None:
    return None if value is None else _text(value, where, what)


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    sent = [[prompt.id, prompt.messages] for prompt in prompts]
    return files.sha256_text(json.dumps(sent, ensure_ascii=False, separators=(",", ":")))
