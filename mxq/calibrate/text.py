"""Calibration text: documents of workloads or of a file, packed into samples of one length.

Documents are shuffled, each is followed by the tokenizer's end of text, and what they make together is cut into
samples: Quark replays the arguments of a block's first call with all others, so none may be shorter, or hold padding.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxq import testbed, workloads
from mxq.calibrate.algorithms import Calibration
from mxq.errors import UsageError
from mxq.workloads.rows import SUFFIXES, read_rows, read_text

_PIECE = 8192
"""A plain text is cut at the first line end behind so many characters, to be shuffled as other documents are."""

_AS_LINES = 'a line is {"text": "..."}, {"prompt": "...", "response": "..."} or {"messages": [...]}'

Document = str | tuple[tuple[tuple[str, str], ...], str | None]
"""Plain text, or (role, content) pairs up to the user's, and what the assistant answers, if it is known."""


@dataclass(frozen=True)
class Samples:
    """Text as tokens.

    Attributes:
        ids: int64 [samples, length]; every place is a token of the text, none is padding.
        facts: what a manifest keeps: ``set``, ``samples``, ``length``, ``seed``, ``documents`` that were drawn, and
            ``sha256`` of the samples' token ids (int64, little endian, in order).
    """

    ids: Tensor
    facts: dict[str, Any]


def tokens(
    calibration: Calibration, model: str, tokenizer: Path, vocabulary: int, *, data_dir: Path | None = None
) -> Samples:
    """Return the samples that ``calibration`` asks for, the same ones every time.

    Conversations pass through the model's chat template with thinking off, answers follow where the text has them. The
    documents are drawn until there are tokens enough; those of a set without answers are prompts alone.

    Args:
        calibration: which text and how much of it: ``set`` is a workload's name, several with commas between them, or
            the path of a file: plain text, or rows (JSON lines, Parquet) with ``text``, with ``prompt`` and perhaps
            ``response``, or with ``messages``.
        model: the source as the user named it; ``testbed:...`` has a text of its own.
        tokenizer: the directory with the model's tokenizer and chat template.
        vocabulary: how many token ids the model's embedding has.
        data_dir: where published workloads are read from.

    Raises:
        UsageError: no text is named; it cannot be read, is empty or too short; the tokenizer does not fit.
    """
    name, documents = _documents(calibration.set, model, data_dir)
    random.Random(calibration.seed).shuffle(documents)
    encode = _encoder(tokenizer, vocabulary)
    wanted = calibration.samples * calibration.length
    ids: list[int] = []
    drawn = 0
    for document in documents:
        if len(ids) >= wanted:
            break
        ids += encode(document)
        drawn += 1
    if len(ids) < wanted:
        enough = len(ids) // calibration.length
        raise UsageError(
            f"calibration text {name} has {len(ids):,} tokens; {calibration.samples} samples of {calibration.length} "
            f"are {wanted:,}",
            f"give more text, or fewer samples: it is enough for {enough}" if enough else "give more text",
        )
    made = torch.tensor(ids[:wanted], dtype=torch.int64).view(calibration.samples, calibration.length)
    return Samples(
        made,
        {
            "set": name,
            "samples": calibration.samples,
            "length": calibration.length,
            "seed": calibration.seed,
            "documents": drawn,
            "sha256": hashlib.sha256(made.numpy().tobytes()).hexdigest(),
        },
    )


def _documents(spec: str | None, model: str, data_dir: Path | None) -> tuple[str, list[Document]]:
    """Return what a manifest calls the text, and its documents."""
    if spec is None:
        if not model.startswith(testbed.PREFIX):
            raise UsageError(
                f"no calibration text for {model}: only testbed models have one of their own",
                "give --calib with text like what the model is used for: a workload's name, or a file",
            )
        return "testbed", list(_rows(testbed.calibration_text()))
    if Path(spec).is_file():
        found = [(spec, _file(Path(spec)))]
    else:
        found = [(part, _workload(part.strip(), data_dir)) for part in spec.split(",")]
    documents = [document for _, part in found for document in part]
    if not documents:
        raise UsageError(f"calibration text {spec} is empty", _AS_LINES)
    return spec, documents


def _workload(spec: str, data_dir: Path | None) -> list[Document]:
    if Path(spec).is_file():
        return _file(Path(spec))
    # Later turns stand behind answers of the model's own, which nobody has yet.
    return [(prompt.messages, None) for prompt in workloads.load(spec, data_dir=data_dir).prompts if prompt.turn == 1]


def _file(path: Path) -> list[Document]:
    return list(_rows(path) if path.name.endswith(SUFFIXES) else _pieces(read_text(path)))


def _pieces(text: str) -> Iterator[str]:
    piece: list[str] = []
    held = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        held += len(line)
        if held >= _PIECE:
            yield "".join(piece)
            piece, held = [], 0
    if "".join(piece).strip():
        yield "".join(piece)


def _rows(path: Path) -> Iterator[Document]:
    for where, row in read_rows(path):
        if row.get("messages") is not None:
            messages = _messages(row["messages"], where)
            answered = messages[-1][0] == "assistant"
            yield (messages[:-1], messages[-1][1]) if answered else (messages, None)
        elif row.get("prompt") is not None:
            response = row.get("response")
            answer = None if response is None else _text(response, where, "response")
            yield (("user", _text(row["prompt"], where, "prompt")),), answer
        else:
            yield _text(row.get("text"), where, "text")


def _messages(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UsageError(f"{where}: 'messages' is not a list of messages", _AS_LINES)
    messages = tuple((str(message.get("role")), _text(message.get("content"), where, "content")) for message in value)
    if not any(role == "user" for role, _ in messages):
        raise UsageError(f"{where}: no message is the user's", _AS_LINES)
    return messages


def _text(value: Any, where: str, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{where}: no {what}", _AS_LINES)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{where}: {what} has half a character", "write both surrogates, or neither") from None
    return value


def _encoder(path: Path, vocabulary: int) -> Callable[[Document], Sequence[int]]:
    """Return what makes a document's tokens, its end included."""
    from transformers import AutoTokenizer

    if not any((path / name).is_file() for name in ("tokenizer.json", "vocab.json")):  # transformers makes one up
        raise UsageError(f"{path} has no tokenizer", "put the model's tokenizer.json and tokenizer_config.json there")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers' own, of files that are not what it takes them for
        reason = str(error).strip().split("\n")[0]
        raise UsageError(
            f"{path}: cannot load the tokenizer ({reason})",
            "tokenizer.json must be there",
        ) from error
    end, most = tokenizer.eos_token_id, max(tokenizer.get_vocab().values(), default=-1)
    # Embeddings are padded, by a few hundred rows; a tokenizer with half as many tokens is another model's.
    if most >= vocabulary or most < vocabulary // 2:
        raise UsageError(
            f"{path}: the tokenizer does not fit: its ids go to {most:,}, the embedding has {vocabulary:,} rows",
            "put the tokenizer there that belongs to the model",
        )
    if end is None:
        raise UsageError(f"{path}: the tokenizer has no eos_token", "name it in tokenizer_config.json")
    template: list[workloads.ChatTemplate] = []

    def encode(document: Document) -> Sequence[int]:
        if isinstance(document, str):
            text, answer = document, None
        else:
            if not template:  # plain text does without
                template.append(workloads.ChatTemplate(path, thinking=False))
            text, answer = template[0].text(document[0]), document[1]
        ids: list[int] = tokenizer(text + (answer or ""), add_special_tokens=False, verbose=False)["input_ids"]
        return [*ids, end]

    return encode
