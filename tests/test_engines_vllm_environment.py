"""The environment that tools/test.sh makes for the real vLLM: what is documented makes it work."""

import importlib.metadata
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


def test_vllm_and_its_models_can_be_imported_and_nothing_is_left_to_do() -> None:
    code = "import vllm, torchvision; from transformers import Qwen3_5ForCausalLM"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    said = subprocess.run([sys.executable, "-m", "mxq.engines.cpu_build"], check=True, capture_output=True, text=True)
    assert said.stdout == "nothing to do: what is installed can be imported\n"


def test_vllm_finds_the_plugin_once() -> None:
    found = [entry for entry in importlib.metadata.entry_points(group="vllm.general_plugins") if entry.name == "mxq"]
    assert [entry.value for entry in found] == ["mxq.engines.plugin:register"]
