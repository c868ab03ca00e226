"""mxq's plugin for vLLM, as far as it can be tested without vLLM: it stays out of what it does not know."""

import importlib
import logging
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mxq import decode
from mxq.engines import plugin
from mxq.engines.plugin import experts, norms
from mxq.formats.mxfp4 import fake_quantize

LOGGER = logging.getLogger("plugin under test")


def fake_vllm(monkeypatch: pytest.MonkeyPatch, *, cpu: bool) -> None:
    """A vLLM that has a platform and a logger, and nothing else that the plugin knows."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.logger", "vllm.platforms")}
    modules["vllm"].__path__ = []
    modules["vllm.logger"].init_logger = lambda name: LOGGER  # type: ignore[attr-defined]
    modules["vllm.platforms"].current_platform = SimpleNamespace(is_cpu=lambda: cpu)  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, f"{plugin.__name__}.mxfp4", raising=False)


def test_vllm_finds_it_by_its_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["mxq"].partition(":")
    assert getattr(importlib.import_module(module), function) is plugin.register


def test_on_gpus_it_does_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake_vllm(monkeypatch, cpu=False)
    plugin.register()
    assert caplog.text == ""


def test_a_vllm_of_another_shape_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_vllm(monkeypatch, cpu=True)
    plugin.register()
    assert [record.getMessage().partition(" does not fit")[0] for record in caplog.records] == [
        "mxq's plugin 'mxfp4'",
        "mxq's plugin 'norms'",
    ]
    assert all("\n" not in record.getMessage() for record in caplog.records)
    sys.modules["vllm.platforms"].current_platform = None  # type: ignore[attr-defined]
    plugin.register()
    assert len(caplog.records) == 2


def test_its_import_costs_nothing() -> None:
    code = "import sys, mxq.engines.plugin; print({'torch', 'numpy', 'vllm'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_experts_round_as_the_in_process_engine_does(converted_moe: Path) -> None:
    module = decode.load_target(converted_moe, dtype=torch.float32).model.layers[0].mlp.experts
    count, hidden = module.gate_up_proj.shape[0], module.gate_up_proj.shape[2]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, hidden, generator=generator)
    chosen = torch.rand(9, count, generator=generator).topk(2)
    arguments = (x, module.gate_up_proj, module.down_proj, chosen.values, chosen.indices)

    expected = module(x, chosen.indices, chosen.values)
    torch.testing.assert_close(experts.routed(*arguments), expected)
    for other in (unrounded(*arguments), unrounded(fake_quantize(x), *arguments[1:])):  # both inputs are rounded
        assert (other - expected).norm() > 0.03 * expected.norm()


def unrounded(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    rows = []
    for token, scales, ids in zip(x, weights, chosen, strict=True):
        halves = [F.linear(token, w13[expert]).chunk(2) for expert in ids]
        outs = [F.linear(F.silu(gate) * up, w2[expert]) for expert, (gate, up) in zip(ids, halves, strict=True)]
        rows.append(sum((scale * out for scale, out in zip(scales, outs, strict=True)), torch.zeros_like(token)))
    return torch.stack(rows)


def test_experts_of_another_process_are_left_to_it(converted_moe: Path) -> None:
    module = decode.load_target(converted_moe, dtype=torch.float32).model.layers[0].mlp.experts
    x = torch.randn(3, module.gate_up_proj.shape[2], generator=torch.Generator().manual_seed(0))
    ids, weights = torch.tensor([[0, 1], [1, -1], [-1, -1]]), torch.full((3, 2), 0.5)
    out = experts.routed(x, module.gate_up_proj, module.down_proj, weights, ids)
    (alone,) = experts.routed(x[1:2], module.gate_up_proj, module.down_proj, weights[1:2, :1], ids[1:2, :1])
    torch.testing.assert_close(out[1], alone)
    assert not out[2].any()


def first_row(out: Tensor, x: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """vLLM's operator for processors: it reads as many weights as the last axis is long."""
    variance = x.float().pow(2).mean(-1, keepdim=True)
    row = 1.0 if weight is None else weight.reshape(-1)[: x.shape[-1]]
    out.copy_(x.float() * torch.rsqrt(variance + epsilon) * row)


def test_norms_take_each_layers_weights(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert not norms.picks_rows(first_row)
    mended = norms.row_by_row(first_row, LOGGER)
    assert norms.picks_rows(mended)
    assert norms.picks_rows(norms.row_by_row(mended, LOGGER))
    assert "of the drafter's 2 layers one by one" in caplog.text
    x, weight = torch.randn(2, 4, 8), torch.rand(8)
    for one in (weight, None):
        plain, same = torch.empty_like(x), torch.empty_like(x)
        first_row(plain, x, one, 1e-6)
        mended(same, x, one, 1e-6)
        assert torch.equal(plain, same)
