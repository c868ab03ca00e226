"""Prompt sets: the testbed's, the published ones, or a JSON lines file, checked line by line before anything runs.

A line is ``{"prompt": "..."}`` or ``{"messages": [{"role": "user", "content": "..."}, ...]}``, with an optional ``id``
(string or integer; lines without one are numbered), ``answer`` (the reference final answer) and ``tests`` (Python
assertions). Other keys are kept out: they would change nothing that is sent.

``{"turns": ["...", "..."]}`` is a conversation that the model takes part in: each turn is a prompt of its own, sent
behind the earlier turns and the answers that the same arm gave to them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxq import files, progress, testbed
from mxq.errors import UsageError
from mxq.workloads.fetching import fetch
from mxq.workloads.published import PUBLISHED, Published, Row, filled
from mxq.workloads.rows import numbered, parse_line, read_text

_MOST_CHARACTERS = 1 << 22
"""Of one text: more than fills a context of 262,144 tokens, and than a tokenizer should be asked to take."""

_MOST_TURNS = 100
"""Of one conversation: what a turn is sent behind grows with each, and is kept for each."""

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Prompt:
    """One conversation to be continued by the model. ``messages`` are (role, content) pairs; the last is the user's.

    ``turn`` is above 1 where the model's own answers belong before it: ``messages`` then are the user's alone, one per
    turn.
    """

    id: str
    messages: tuple[tuple[str, str], ...]
    answer: str | None = None
    tests: str | None = None
    turn: int = 1

    def conversation(self, answers: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Return the messages to send: the user's, with the ``turn`` - 1 answers to the earlier ones between them."""
        if self.turn == 1:
            return self.messages
        earlier = zip(self.messages[:-1], answers, strict=True)
        return (*(m for asked, text in earlier for m in (asked, ("assistant", text))), self.messages[-1])

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
    """A named, ordered set of prompts. ``sha256`` covers ids and messages in order: what every arm is sent.

    A later turn stands right behind the one before it. ``source`` says where the set came from, and is no part of it.
    """

    name: str
    prompts: tuple[Prompt, ...]
    sha256: str
    source: Mapping[str, Any] = field(default_factory=dict)

    @property
    def conversations(self) -> int:
        """Return how many prompts begin a conversation; the others are later turns."""
        return sum(prompt.turn == 1 for prompt in self.prompts)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that :func:`load` reads back as this set."""
        for place, prompt in enumerate(self.prompts):
            last = place + 1 == len(self.prompts) or self.prompts[place + 1].turn == 1
            if last and prompt.turn == 1:
                yield prompt.as_json()
            elif last:
                first = self.prompts[place - prompt.turn + 1]
                yield {"id": first.id, "turns": [content for _, content in prompt.messages]}


Conversation = tuple[Prompt, ...]


def load(spec: str, limit: int | None = None, *, data_dir: Path | None = None, turns: int | None = None) -> Workload:
    """Return the first ``limit`` conversations (all when None) of a prompt set: the testbed's, a published one, a file.

    ``data_dir`` is where published sets are read from, see :func:`mxq.workloads.fetching.fetch`; of each conversation
    the first ``turns`` are taken. Nothing is repeated to reach a limit. Raises UsageError for an unknown name, a file
    that cannot be read, holds nothing, or has a line that is not a prompt (named by number), and for an id that occurs
    twice.
    """
    for number, what in ((limit, "prompts"), (turns, "turns")):
        if number is not None and number < 1:
            raise UsageError(f"limit of {number} {what}", "it must be at least 1")
    name, conversations, source = _conversations(spec, data_dir)
    if limit is not None and limit > len(conversations):
        progress.note(
            f"note: workload {name} has {len(conversations)} prompts, fewer than the limit of {limit}; taking all"
        )
    taken = tuple(prompt for conversation in conversations[:limit] for prompt in conversation[:turns])
    repeated = len(taken) - len({prompt.messages for prompt in taken})
    if repeated:
        progress.note(f"note: workload {name} says the same thing more than once ({repeated} of {len(taken)} prompts)")
    return Workload(name, taken, _fingerprint(taken), source)


def _conversations(spec: str, data_dir: Path | None) -> tuple[str, list[Conversation], dict[str, Any]]:
    if spec in PUBLISHED:
        known = PUBLISHED[spec]
        rows, source = fetch(known, data_dir)
        origin = next(iter(source["files"]), f"{known.dataset}@{known.revision}")
        progress.note(f"workload {spec}: {len(rows)} rows of {origin}")
        read = [(where, _from_row(known, row, where, number)) for number, (where, row) in enumerate(rows, start=1)]
        return spec, _distinct(read, origin), source
    name, path = _locate(spec)
    source = {"testbed": name} if spec in testbed.WORKLOADS else {"file": str(path)}
    read = []
    for number, line in numbered(read_text(path)):
        where = f"{path}, line {number}"
        read.append((where, _parse(line, where, f"{name}-{number:04d}")))
    return name, _distinct(read, str(path)), source


def _locate(spec: str) -> tuple[str, Path]:
    if spec in testbed.WORKLOADS:
        return spec, testbed.prompts_dir() / f"{spec}.jsonl"
    path = Path(spec)
    if path.is_file():
        return path.stem, path
    if path.is_dir():
        raise UsageError(f"workload {spec!r} is a directory", "give the path of a JSON lines file")
    raise UsageError(
        f"workload {spec!r} is neither one of mxq's own nor a file",
        f"use one of {', '.join((*testbed.WORKLOADS, *PUBLISHED))}, or the path of a JSON lines file",
    )


def _distinct(read: Sequence[tuple[str, Conversation]], origin: str) -> list[Conversation]:
    """Return the conversations; raises UsageError if there are none, or two prompts have one id."""
    places: dict[str, str] = {}
    for where, conversation in read:
        place = where.rpartition(", ")[2]
        for prompt in conversation:
            if prompt.id in places:
                raise UsageError(
                    f"{origin}: id {prompt.id!r} is on {places[prompt.id]} and again on {place}",
                    "ids pair the answers of different arms: make them unique, or leave them out",
                )
            places[prompt.id] = place
    if not read:
        raise UsageError(f"{origin} holds no prompts", 'write one JSON object per line, such as {"prompt": "Hello"}')
    return [conversation for _, conversation in read]


def _from_row(known: Published, row: Row, where: str, number: int) -> Conversation:
    """Return a row of a published set as what is sent for it."""
    name, value = _field(row, known.text, where)
    if known.turns == 1:
        value = [value]
    elif not isinstance(value, list) or len(value) != known.turns:
        raise UsageError(f"{where}: '{name}' is not a list of {known.turns} turns", f"see {known.dataset} on the hub")
    texts = [filled(known.template, _text(text, where, name)) for text in value]
    identity: Any = f"{known.name}-{number:04d}"
    if known.identity:
        _, identity = _field(row, known.identity, where)
    base = _identity(identity, where)
    if known.turns > 1:
        return _turns(base, texts)
    return (Prompt(base, (("user", texts[0]),), known.answer(row), _optional_text(known.tests(row), where, "test")),)


def _field(row: Row, names: Sequence[str], where: str) -> tuple[str, Any]:
    for name in names:
        if row.get(name) is not None:
            return name, row[name]
    found = ", ".join(sorted(name for name in row if isinstance(name, str))) or "nothing"
    raise UsageError(f"{where}: no {' or '.join(map(repr, names))}, only {found[:200]}", "give the data set's own file")


def _turns(base: str, texts: Sequence[str]) -> Conversation:
    messages = tuple(("user", text) for text in texts)
    return tuple(
        Prompt(base if turn == 1 else f"{base}, turn {turn}", messages[:turn], turn=turn)
        for turn in range(1, len(messages) + 1)
    )


def _parse(line: str, where: str, default_id: str) -> Conversation:
    value = parse_line(line, where)
    given = [kind for kind in ("prompt", "messages", "turns") if kind in value]
    if not given:
        raise UsageError(f"{where}: neither 'prompt' nor 'messages'", "give exactly one of them")
    if len(given) > 1:
        raise UsageError(f"{where}: both {given[0]!r} and {given[1]!r}", "give exactly one of them")
    identity = _identity(value.get("id", default_id), where)
    answer, tests = (_optional_text(value.get(name), where, name) for name in ("answer", "tests"))
    if given == ["turns"]:
        texts = value["turns"]
        if not isinstance(texts, list) or not texts:
            raise UsageError(f"{where}: 'turns' is not a list of texts", 'write {"turns": ["...", "..."]}')
        if len(texts) > _MOST_TURNS:
            raise UsageError(f"{where}: {len(texts):,} turns", f"at most {_MOST_TURNS} are taken")
        if answer or tests:
            raise UsageError(f"{where}: 'turns' with a reference answer", "leave out 'answer' and 'tests'")
        return _turns(identity, [_text(text, where, f"turn {turn}") for turn, text in enumerate(texts, start=1)])
    messages = [("user", _text(value["prompt"], where, "prompt"))] if given == ["prompt"] else None
    return (Prompt(identity, tuple(messages or _messages(value["messages"], where)), answer, tests),)


def _identity(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise UsageError(f"{where}: id is {_shown(value)}", "an id is a string or an integer")
    _check_encodable(str(value), where, "id")
    return str(value)


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
        raise UsageError(f"{where}: {what} is {_shown(value)}", "it must be text that is not empty")
    if len(value) > _MOST_CHARACTERS:
        raise UsageError(f"{where}: {what} has {len(value):,} characters", f"at most {_MOST_CHARACTERS:,} are taken")
    _check_encodable(value, where, what)
    return value


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)[:40]
    except (TypeError, ValueError):  # of Parquet: bytes, dates and the like
        return type(value).__name__


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
    sent = [[prompt.id, prompt.messages, *([prompt.turn] if prompt.turn > 1 else [])] for prompt in prompts]
    return files.sha256_text(json.dumps(sent, ensure_ascii=False, separators=(",", ":")))
