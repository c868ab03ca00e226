"""Hardware files: what comes with mxq can be read and says where it is from; what cannot be is refused by its name."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mxq.errors import UsageError
from mxq.hardware import machine

SHEETS = {  # data sheets: memory GiB, bandwidth TB/s, dense bf16 and MXFP4 TFLOP/s
    "b200": (178.4, 8.0, 2250, 9000),
    "h200": (139.8, 4.8, 989, None),
    "mi300x": (192, 5.3, 1307.4, None),
    "mi355x": (288, 8.0, 2516.6, 10066.3),
}


def test_names() -> None:
    assert machine.names() == sorted(SHEETS)


@pytest.mark.parametrize("name", SHEETS)
def test_files_that_come_with_mxq(name: str) -> None:
    found = machine.load(name)
    gpu, constants, sources = machine.read(machine.directory() / f"{name}.yaml")
    memory, bandwidth, bf16, mxfp4 = SHEETS[name]
    assert (constants["memory_gib"], constants["bandwidth_tb_s"], constants["matrix_bf16_tflops"]) == (
        *(memory, bandwidth, bf16),
    )
    assert found.gpu == gpu
    assert found.bandwidth == pytest.approx(bandwidth * 1e12 * constants["bandwidth_share"])
    assert found.layer_s == pytest.approx(constants["layer_us"] * 1e-6)
    assert (found.mxfp4 is None) == (name == "mi300x")
    if mxfp4 is not None:
        mxfp4 = constants["matrix_mxfp4_tflops"] if name == "h200" else mxfp4  # fitted, of kernels that unpack
        assert found.mxfp4 == pytest.approx(mxfp4 * 1e12 * constants["matrix_share"])
    assert sources.keys() == constants.keys()
    assert all(len(source) > 10 for source in sources.values())


def content(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((machine.directory() / "h200.yaml").read_text())
    for key, value in changes.items():
        found["constants"][key] = value
    return found


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(content(bandwidth_tb_s={"value": 3.35, "source": "data sheet"})))
    found = machine.load(str(file))
    assert found.name == "mine"
    assert found.bandwidth < machine.load("h200").bandwidth


def test_unknown_hardware_is_told_what_is_known() -> None:
    with pytest.raises(UsageError) as caught:
        machine.load("mi999")
    assert str(caught.value) == (
        "there is no hardware 'mi999'; use one of b200, h200, mi300x, mi355x, or the path of a YAML file"
    )


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (content() | {"format": 2}, "has format 2; this mxq reads format 1"),
        ([], "has format None"),
        (content() | {"constants": None}, "has no gpu or no constants"),
        (content(layer_ms={"value": 1}), "the constant layer_ms does not exist"),
        (content(layer_us={"value": "fast"}), "layer_us is 'fast', not a number that can be"),
        (content(layer_us=3.0), "layer_us is None, not a number that can be"),
        (content(layer_us={"value": True}), "layer_us is True"),
        (content(bandwidth_share={"value": 1.2}), "bandwidth_share is 1.2, not a share above 0, of at most 1"),
        (content(bandwidth_tb_s={"value": 0}), "bandwidth_tb_s is 0"),
        (content(packed_overlap={"value": -0.1}), "packed_overlap is -0.1, not a share from 0 to 1"),
        (content(bandwidth_tb_s={"value": "1e9"}), "bandwidth_tb_s is '1e9', not a number that can be"),
        (content() | {"format": True}, "has format True"),
        (content() | {"gpu": "a\nb"}, "has no gpu or no constants"),
        (content(bandwidth_tb_s={"value": float("nan")}), "bandwidth_tb_s is nan"),
    ],
)
def test_a_file_that_cannot_be_is_named(made: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(made))
    with pytest.raises(UsageError, match=f"hardware {re.escape(str(file))}:? .*{re.escape(message)}"):
        machine.load(str(file))


def test_a_constant_that_is_missing_is_named(tmp_path: Path) -> None:
    made = content()
    del made["constants"]["scan_us"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(made))
    with pytest.raises(UsageError, match="the constant scan_us is missing"):
        machine.load(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "line 1 is not YAML"),
        ("gpu: 2020-99-99", "is not YAML"),
        ("a: " + "9" * 5000, "is not YAML"),
        ("[" * 3000, "is not YAML"),
        (None, "cannot be read.*; use one of b200, h200, mi300x, mi355x, or the path of a YAML file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=message):
        machine.load(str(file))
