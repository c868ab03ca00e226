"""Tasks of lm-eval with data of their own, so that they need no network: one by likelihoods, one by generated text."""

import json
from pathlib import Path

SAMPLES = 16

_TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{{{{question}}}} The answer is"
num_fewshot: 0
metadata:
  version: 1.0
"""
_CHOICE = """\
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: brier_score
    higher_is_better: false
"""
_TEXT = """\
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_punctuation: true
"""
_GROUP = """\
group: toy
task: [toy_choice, toy_half]
aggregate_metric_list:
  - metric: acc
"""


def write_tasks(directory: Path, samples: int = SAMPLES) -> Path:
    """Write tasks into a directory of their own.

    They are ``toy_choice``, ``toy_half`` (of the first half of its samples), a group ``toy`` of both, and ``toy_text``.
    """
    directory.mkdir()
    for name, more in (("toy_choice", _CHOICE), ("toy_half", _CHOICE), ("toy_text", _TEXT)):
        lines = [
            {
                "question": f"Ann has {number} apples and buys {number % 5} more. How many has she?",
                "choices": [str(number + number % 5), str(number + 7), "a pear"],
                "answer": 0,
            }
            for number in range(samples // 2 if name == "toy_half" else samples)
        ]
        data = directory / f"{name}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (directory / f"{name}.yaml").write_text(_TASK.format(name=name, data=data) + more)
    (directory / "toy.yaml").write_text(_GROUP)
    return directory
