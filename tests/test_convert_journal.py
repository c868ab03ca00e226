"""A journal is believed as it was written, and not otherwise."""

import json
from pathlib import Path

import pytest
from mutation import mutate, seeds, telling

from mxq.convert.journal import Journal, published, refuse_unlike
from mxq.errors import MxqError

CONVERSION = {"source": {"fingerprint": "ab", "bytes": 7}, "recipe": {"name": "é"}, "options": {"experts": "fused"}}
LAYER = {"module": "lm_head", "sqnr_db": 18.9312, "saturated": 1e-05, "blocks": 64, "scale_exponents": [-7, -5]}
SHARD = {"shard": "model.safetensors", "bytes": 7, "sha256": "cd", "layers": [LAYER]}


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    file = tmp_path / "journal.jsonl"
    written = Journal(file, CONVERSION)
    written.record(SHARD)
    written.record({"manifest": "ef"})
    written.close()
    return file


def test_what_was_recorded_is_read_again(journal: Path) -> None:
    again = Journal(journal, CONVERSION)
    again.close()
    assert again.shards == {"model.safetensors": {key: SHARD[key] for key in ("bytes", "sha256", "layers")}}
    assert again.manifest == published(journal) == "ef"


@pytest.mark.parametrize(
    ("first", "count"), [(0, 1500), pytest.param(100_000, 15_000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_changed_line_is_noticed_whatever_changed(journal: Path, first: int, count: int) -> None:
    """Also in the measures, which end in layers.jsonl, and which nothing else could tell from the right ones."""
    lines = journal.read_bytes().splitlines()
    sound = [json.loads(line) for line in lines]
    for seed, rng in seeds(first, count):
        with telling(seed):
            changed = list(lines)
            at = rng.randrange(len(lines))
            changed[at] = mutate(rng, lines[at])
            journal.unlink()
            journal.write_bytes(b"\n".join(changed) + b"\n")
            try:
                refuse_unlike(journal, CONVERSION)
            except MxqError:
                continue
            assert [json.loads(line) for line in journal.read_bytes().splitlines()] == sound


def test_a_line_of_any_depth_is_refused(journal: Path) -> None:
    """What can just be read may be too deep to be written again for its checksum."""
    for depth in range(100, 1100, 10):
        journal.write_bytes(b'{"format": 1, "conversion": {"a": ' + b"[" * depth + b"]" * depth + b"}}\n")
        with pytest.raises(MxqError, match="is damaged"):
            refuse_unlike(journal, CONVERSION)
