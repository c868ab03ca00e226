"""``--device``: which GPUs, and that what they quantize is what the CPU does (without a GPU, torch's is the CPU)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mxq.checkpoint import Checkpoint
from mxq.convert import recipe
from mxq.convert.devices import named
from mxq.convert.plan import plan
from mxq.convert.run import run
from mxq.errors import MxqError, UsageError

DEVICES = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count())) or ("cpu", "cpu:0")


@pytest.mark.parametrize("rule", ["even", "mse"])
def test_a_device_writes_the_cpus_bytes(rule: str, moe_source: Path, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(f"extends: mxfp4\nscale_rule: {rule}\n")
    made = plan(Checkpoint.open(moe_source), recipe.load(str(tmp_path / "own.yaml")), max_shard_size=1_000_000)
    written: dict[str, Any] = {}
    for name, devices in (("cpu", ()), ("device", DEVICES)):
        out = tmp_path / name
        run(made, out, str(moe_source), jobs=3, devices=devices)
        written[name] = {file.name: file.read_bytes() for file in out.glob("*.safetensors")}
        written[name + " errors"] = [json.loads(line) for line in (out / "layers.jsonl").read_text().splitlines()]
    assert written["cpu"] == written["device"]
    for a, b in zip(written["cpu errors"], written["device errors"], strict=True):
        assert a == b | {key: pytest.approx(b[key]) for key in ("sqnr_db", "relative_error")}


def test_nan_is_refused_there_too(dense_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Checkpoint, name: str, start: int, view: memoryview) -> None:
        view[:] = b"\xff" * len(view)

    monkeypatch.setattr(Checkpoint, "read_into", none)
    with pytest.raises(MxqError, match="values that are NaN or infinite"):
        run(plan(Checkpoint.open(dense_source), recipe.load("mxfp4")), tmp_path / "out", "x", devices=DEVICES)


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert named("cpu") == ()
    assert named("cuda") == ("cuda:0", "cuda:1", "cuda:2")
    assert named("cuda:2,0,2") == ("cuda:2", "cuda:0")
    for spec, said in (("cuda:3", "torch sees 3 GPU"), ("gpu", "is no device"), ("cuda:", "is no device")):
        with pytest.raises(UsageError, match=said):
            named(spec)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="torch sees no GPU"):
        named("cuda")
