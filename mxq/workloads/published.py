"""The prompt sets of the published measurements, as data, and how a row of each becomes what is sent.

Data sets and templates are those of z-lab/dflash's client (``dflash/benchmark.py``, the same at 44947fb and in the
wheel 0.1.0). All are zero-shot, without a system message. That client names no revisions: those here are the commits
that public pins of these data sets name.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]

AS_IT_IS = "{text}"
BOXED = "{text}\nPlease reason step by step, and put your final answer within \\boxed{}."
SOLUTION = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{text}\n```"

_NUMBER = re.compile(r"-?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?")  # "1,2" is two of them


@dataclass(frozen=True)
class Published:
    """One published prompt set.

    ``files`` are the split's files in the data set's repository, as patterns: the first that is there. ``text`` and
    ``identity`` name the fields that hold the text (a list of texts where ``turns`` is above 1) and the id: the first
    that a row has; a set without ids is numbered. ``answer`` and ``tests`` make of a row what an answer is checked by,
    None where it cannot be.
    """

    name: str
    dataset: str
    config: str | None
    split: str
    revision: str
    files: tuple[str, ...]
    text: tuple[str, ...]
    template: str
    identity: tuple[str, ...] = ()
    turns: int = 1
    answer: Callable[[Row], str | None] = field(default=lambda row: None)
    tests: Callable[[Row], str | None] = field(default=lambda row: None)

    def facts(self) -> dict[str, Any]:
        """Return what a run keeps of it."""
        named = {"dataset": self.dataset, "config": self.config, "split": self.split}
        return {**named, "template": self.template, "few_shot": 0, "turns": self.turns}


def filled(template: str, text: str) -> str:
    """Return what is sent for ``text``: the template with it in place of ``{text}``, braces of either untouched."""
    return template.replace("{text}", text)


def solution_number(row: Row) -> str | None:
    """Return GSM8K's final answer, which stands behind ``####`` without its thousands separators."""
    return _number(str(row.get("answer")).rpartition("####")[2])


def plain_number(row: Row) -> str | None:
    """Return MATH-500's final answer where it is a number: equal LaTeX can be written in many ways."""
    return _number(str(row.get("answer")))


def unit_tests(row: Row) -> str | None:
    """Return HumanEval's assertions, applied to the function asked for."""
    tests, function = row.get("test"), row.get("entry_point")
    return f"{tests}\ncheck({function})" if isinstance(tests, str) and isinstance(function, str) else None


def _number(text: str) -> str | None:
    text = text.strip()
    return text.replace(",", "") if _NUMBER.fullmatch(text) else None


PUBLISHED = {
    known.name: known
    for known in (
        Published(
            name="gsm8k",
            dataset="openai/gsm8k",
            config="main",
            split="test",
            revision="740312add88f781978c0658806c59bc2815b9866",
            files=("main/test-*.parquet",),
            text=("question",),
            template=BOXED,
            answer=solution_number,
        ),
        Published(
            name="math500",
            dataset="HuggingFaceH4/MATH-500",
            config=None,
            split="test",
            revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
            files=("test.jsonl",),
            text=("problem",),
            identity=("unique_id",),
            template=BOXED,
            answer=plain_number,
        ),
        Published(
            name="humaneval",
            dataset="openai/openai_humaneval",
            config="openai_humaneval",
            split="test",
            revision="7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
            files=("openai_humaneval/test-*.parquet",),
            text=("prompt",),
            identity=("task_id",),
            template=SOLUTION,
            tests=unit_tests,
        ),
        # Its prompts do not name the function that its tests call, and the published format adds nothing: answers
        # cannot be checked by them.
        Published(
            name="mbpp",
            dataset="google-research-datasets/mbpp",
            config="sanitized",
            split="test",
            revision="4bb6404fdc6cacfda99d4ac4205087b89d32030c",
            files=("sanitized/test-*.parquet",),
            text=("prompt",),
            identity=("task_id",),
            template=AS_IT_IS,
        ),
        Published(
            name="mt-bench",
            dataset="HuggingFaceH4/mt_bench_prompts",
            config=None,
            split="train",
            revision="e3a795c5e9a82ee40611c416b8a7786c73198991",
            files=("data/train-*.parquet", "raw/question.jsonl"),
            text=("prompt", "turns"),
            identity=("prompt_id", "question_id"),
            template=AS_IT_IS,
            turns=2,
        ),
    )
}
"""By name, as ``mxq eval --workload`` takes it."""
