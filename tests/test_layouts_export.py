"""``mxq layout``: bytes are where AITER's kernels look, come back as they were, and are known again by a comparison.

Expected bytes come from the closed-form addresses and from plain slices, not from the functions that move bytes.
"""

import enum
import hashlib
import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import numpy as np
import pytest
import torch
from checkpoints import Tensors, edit_json, read_all, rewrite
from click.testing import CliRunner, Result
from conversion import convert
from safetensors.torch import load_file, save_file

from mxq import testbed
from mxq.cli import main
from mxq.layouts.aiter import gu16_row, pairs_row, swz_address, tile16_address
from mxq.layouts.operands import Experts, Linear, dense_asm
from mxq.layouts.reader import PLAIN, SEPARATED, fused_moe

BLOCK = "model.language_model.layers.2.mlp.experts"
DESCRIPTION = "mxq_layout.json"


def mxq(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["layout", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def refused(*arguments: object, code: int, reason: str) -> None:
    lines = [line for line in mxq(*arguments, code=code).stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert reason in lines[0]


@pytest.fixture(scope="module")
def exported(converted_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 1 of TP 4 for moe-a4w4: I is 64, and padded to 128. Not to be changed: copy it."""
    out = tmp_path_factory.mktemp("exported") / "out"
    mxq("export", converted_moe, out, "--kernel", "moe-a4w4", "--tp", 4, "--rank", 1)
    return out


def reseal(directory: Path, edit: Callable[[Any], object] = lambda content: None) -> None:
    """Change a description, and bring its checksums in line with the files."""

    def update(content: Any) -> None:
        for name in content["files"]:
            data = (directory / name).read_bytes()
            content["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        edit(content)

    edit_json(directory / DESCRIPTION, update)


def part(tensors: Tensors, block: str, tp: int, rank: int, experts: range) -> dict[str, np.ndarray[Any, Any]]:
    """Plain operands of a GPU, sliced from a checkpoint with experts one by one."""
    found: dict[str, list[torch.Tensor]] = {"w13": [], "w13_scale": [], "w2": [], "w2_scale": []}
    for e in experts:
        for suffix, unit in (("", 2), ("_scale", 32)):
            gate, up, down = (
                tensors[f"{block}.{e}.{name}.weight{suffix}"] for name in ("gate_proj", "up_proj", "down_proj")
            )
            n = len(gate) // tp
            own = slice(n * rank, n * (rank + 1))
            found[f"w13{suffix}"].append(torch.cat([gate[own], up[own]]))
            found[f"w2{suffix}"].append(down[:, n // unit * rank : n // unit * (rank + 1)])
    return {name: torch.stack(matrices).numpy() for name, matrices in found.items()}


@pytest.mark.parametrize(
    ("kernel", "tp", "ep", "rank"),
    [
        ("moe-a4w4", 4, 1, 1),
        ("moe-a4w4", 1, 2, 1),
        ("moe-a4w4", 2, 2, 2),
        ("moe-interleaved", 2, 1, 1),
        ("moe-triton", 8, 1, 7),
    ],
)
def test_every_byte_of_experts_is_where_the_kernel_looks_and_comes_back(
    converted_moe: Path, tmp_path: Path, kernel: str, tp: int, ep: int, rank: int
) -> None:
    out = tmp_path / "out"
    mxq("export", converted_moe, out, "--kernel", kernel, "--tp", tp, "--ep", ep, "--rank", rank)
    source, stored = read_all(converted_moe), read_all(out)
    assert len(stored) == 4 * 4
    experts = range(4 // ep * (rank // tp), 4 // ep * (rank // tp + 1))
    plain = part(source, BLOCK, tp, rank % tp, experts)
    i = plain["w13"].shape[1] // 2
    padded = -(-i // (128 if kernel == "moe-a4w4" else 256)) * (128 if kernel == "moe-a4w4" else 256)
    place = {"moe-interleaved": gu16_row, "moe-triton": pairs_row}.get(kernel, lambda row, rows: row)
    for name, matrices in plain.items():
        held = stored[f"{BLOCK}.{name}"].numpy().reshape(len(experts), -1)
        rows, columns = np.indices(matrices.shape[1:])
        if name.startswith("w13"):
            rows = place(rows % i + rows // i * padded, 2 * padded)
        width = (256 if name.startswith("w13") else padded) // (32 if name.endswith("_scale") else 2)
        if name.endswith("_scale"):
            at = swz_address(rows, columns, -(-width // 8) * 8)
        elif kernel == "moe-triton":
            at = rows * width + columns
        else:
            at = tile16_address(rows, columns, width)
        assert np.array_equal(held[:, at], matrices), name
        rest = np.delete(held, at.reshape(-1), axis=1)
        assert set(np.unique(rest)) <= ({0, 1, 0x7F} if name.endswith("_scale") else {0}), name

    mxq("undo", out, tmp_path / "plain")
    back = read_all(tmp_path / "plain")
    assert len(back) == 4 * len(experts) * 6
    again = part(back, BLOCK, 1, 0, experts)
    assert all(np.array_equal(again[name], plain[name]) for name in plain)
    assert mxq("check", out, "--against", converted_moe).stdout.count("ok ") == 16


def test_what_is_exported_has_the_bytes_that_were_planned(moe_source: Path, exported: Path) -> None:
    planned = CliRunner().invoke(main, ["plan", str(moe_source), "--tp", "4", "--json"])
    (placed,) = json.loads(planned.stdout)["placement"]["combinations"]
    (experts,) = (kind for kind in placed["experts"] if kind["packed"])
    assert sum(tensor.nbytes for tensor in read_all(exported).values()) == experts["bytes"]["after"]


def test_dense_layers_are_split_as_engines_split_them(dense_source: Path, tmp_path: Path) -> None:
    """Sections of in_proj_qkv each, whole heads of k_proj, columns of down_proj."""
    converted = convert(dense_source, tmp_path / "converted")
    source = read_all(converted)
    for kernel, tp, rank, name, rows, first in (
        (
            "dense-triton",
            2,
            1,
            "layers.0.linear_attn.in_proj_qkv",
            [*range(64, 128), *range(192, 256), *range(384, 512)],
            0,
        ),
        ("dense-asm", 4, 1, "layers.3.self_attn.k_proj", [*range(64)], 0),
        ("dense-asm", 2, 0, "layers.1.mlp.down_proj", [*range(256)], 0),
        ("dense-asm", 2, 1, "layers.0.mlp.down_proj", [*range(256)], 256),
        ("dense-asm", 1, 0, "layers.3.self_attn.o_proj", [*range(256)], 0),
    ):
        module, out = f"model.language_model.{name}", tmp_path / name / str(tp)
        out.parent.mkdir()
        mxq("export", converted, out, "--kernel", kernel, "--tp", tp, "--rank", rank, "--only", module)
        stored = read_all(out)
        assert stored.keys() == {f"{module}.weight", f"{module}.weight_scale"}
        for suffix, unit in (("weight", 2), ("weight_scale", 32)):
            whole = source[f"{module}.{suffix}"].numpy()
            plain = whole[rows][:, first // unit : (first + 256) // unit]
            row, byte = np.indices(plain.shape)
            address = swz_address if unit == 32 else tile16_address
            at: Any = address(torch.from_numpy(row), torch.from_numpy(byte), plain.shape[1]).numpy()
            assert np.array_equal(stored[f"{module}.{suffix}"].numpy().reshape(-1)[at], plain), module
            if unit == 2:
                mxq("undo", out, out.parent / "plain")
            assert np.array_equal(read_all(out.parent / "plain")[f"{module}.{suffix}"].numpy(), plain)
    mxq("export", converted, tmp_path / "all", "--kernel", "dense-asm")
    assert mxq("check", out, "--against", converted).stdout.count("ok ") == 2
    described = tmp_path / "layers.0.mlp.down_proj" / "2" / DESCRIPTION
    (entry,) = json.loads(described.read_text())["operands"].values()
    assert (entry["rows"], entry["columns"]) == ([[0, 256]], [256, 512])
    edit_json(described, lambda c: next(iter(c["operands"].values())).update(columns=[0, 256]))
    reason = "by mxq_layout.json {'rows': [[0, 256]], 'columns': [0, 256]}"
    refused("check", described.parent, "--against", converted, code=3, reason=reason)
    packed = {name for name in source if f"{name}_scale" in source}
    assert {name for name in read_all(tmp_path / "all") if not name.endswith("_scale")} == packed


def test_ranks_of_the_trained_model_add_up_to_its_layer(tmp_path: Path) -> None:
    converted = convert(testbed.path("testbed:moe"), tmp_path / "converted")
    block = "model.language_model.layers.1.mlp.experts"
    plain = part(read_all(converted), block, 1, 0, range(4))
    torch.manual_seed(0)
    x, ids = torch.randn(6, 256).bfloat16(), torch.randint(4, (6, 2))
    weights = torch.rand(6, 2)
    whole = fused_moe(x, Experts(**{k: torch.from_numpy(v) for k, v in plain.items()}), weights, ids, reader=PLAIN)
    parts = []
    for rank in range(2):
        mxq(
            "export",
            converted,
            tmp_path / f"{rank}",
            "--kernel",
            "moe-a4w4",
            "--tp",
            2,
            "--rank",
            rank,
            "--only",
            block,
        )
        held = read_all(tmp_path / f"{rank}")
        experts = Experts(**{name: held[f"{block}.{name}"] for name in plain})
        parts.append(fused_moe(x, experts, weights, ids, reader=SEPARATED))
    assert torch.equal(parts[0] + parts[1], whole)


def test_the_readmes_loader_gives_fused_moe_what_it_asks_for(
    converted_moe: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run with a stand-in of AITER's: its names and argument order, after v0.1.20, on the addresses of the layout."""
    activations: Any = enum.Enum("activations", "Silu Swiglu")
    quants: Any = enum.Enum("quants", "No per_1x32")
    dtypes = types.SimpleNamespace(fp4x2=torch.float4_e2m1fn_x2, fp8_e8m0=torch.float8_e8m0fnu)

    def stand_in(
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weight: Any,
        topk_ids: Any,
        expert_mask: Any = None,
        activation: Any = activations.Silu,
        quant_type: Any = quants.No,
        doweight_stage1: bool = False,
        w1_scale: Any = None,
        w2_scale: Any = None,
        gate_mode: str = "separated",
    ) -> Any:
        e, h, half = w2.shape  # by which it knows the sizes
        assert w1.shape == (e, 4 * half, h // 2)
        assert w1.is_shuffled
        assert w2.is_shuffled
        assert (activation.name, quant_type.name, gate_mode) == ("Silu", "per_1x32", "separated")
        assert {w1.dtype, w2.dtype} == {dtypes.fp4x2}
        assert {w1_scale.dtype, w2_scale.dtype} == {dtypes.fp8_e8m0}
        operands = Experts(*(x.view(torch.uint8) for x in (w1, w1_scale, w2, w2_scale)))
        return fused_moe(hidden_states, operands, topk_weight, topk_ids, reader=SEPARATED)

    package = types.SimpleNamespace(ActivationType=activations, QuantType=quants, dtypes=dtypes)
    monkeypatch.setitem(sys.modules, "aiter", package)
    monkeypatch.setitem(sys.modules, "aiter.fused_moe", types.SimpleNamespace(fused_moe=stand_in))
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    code = readme.partition("### A loader for AITER")[2].partition("```python\n")[2].partition("```")[0]
    assert len(code.splitlines()) <= 15
    (tmp_path / "rank1").symlink_to(exported)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    given = {"x": torch.randn(6, 256).bfloat16(), "weights": torch.rand(6, 2), "ids": torch.randint(4, (6, 2)).int()}
    exec(code.replace('device="cuda"', 'device="cpu"'), names := dict(given))
    plain = part(read_all(converted_moe), BLOCK.replace("2", "0"), 4, 1, range(4))
    experts = Experts(**{name: torch.from_numpy(x) for name, x in plain.items()})
    assert torch.equal(names["out"], fused_moe(given["x"], experts, given["weights"], given["ids"], reader=PLAIN))


@pytest.mark.parametrize("form", [foreign.compressed_tensors, foreign.autoround])
def test_other_tools_checkpoints_give_the_same_numbers(
    converted_moe: Path, exported: Path, tmp_path: Path, form: Callable[..., Path]
) -> None:
    options = {"sign_of_zero": False} if form is foreign.compressed_tensors else {}
    path = form(converted_moe, tmp_path / "path", **options)
    out = tmp_path / "out"
    mxq("export", path, out, "--kernel", "moe-a4w4", "--tp", 4, "--rank", 1)
    found, wanted = read_all(out), read_all(exported)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if name.endswith("_scale"):
            assert torch.equal(found[name], tensor)
        else:
            assert torch.equal(unsigned_zeros(found[name]), unsigned_zeros(tensor))
    mxq("check", out, "--against", path)


def unsigned_zeros(codes: torch.Tensor) -> torch.Tensor:
    """Codes of which no zero is negative, as the tools differ in that."""
    low, high = codes & 15, codes >> 4
    return low.masked_fill(low == 8, 0) | high.masked_fill(high == 8, 0) << 4


def test_the_description_says_what_it_is(converted_moe: Path, exported: Path) -> None:
    said = json.loads((exported / DESCRIPTION).read_text())
    assert (said["kernel"], said["tp"], said["ep"], said["rank"]) == ("moe-a4w4", 4, 1, 1)
    assert said["layouts"] == {"w13": "TILE16", "w13_scale": "SWZ", "w2": "TILE16", "w2_scale": "SWZ"}
    assert said["scales"]["rule"] == "even"
    entry = said["operands"][BLOCK]
    assert entry["source"] == {"E": 4, "H": 256, "I": 256}
    assert entry["part"]["I"] == 64
    assert entry["padded"]["I"] == 128
    assert entry["tensors"] == {n: [*read_all(exported)[f"{BLOCK}.{n}"].shape] for n in entry["tensors"]}
    for name, file in said["files"].items():
        assert file["sha256"] == hashlib.sha256((exported / name).read_bytes()).hexdigest()


def test_what_vllm_has_is_known_by_its_names(
    converted_moe: Path, exported: Path, converted_dense: Path, tmp_path: Path
) -> None:
    """The names are those of tests/data/vllm_split.json, behind what the multimodal class puts in front."""
    file = tmp_path / "dumped.safetensors"

    def orders(source: Path, tensors: Tensors, *more: object, code: int = 0) -> list[tuple[str, list[str]]]:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        rows = json.loads(mxq("check", file, "--against", source, "--json", *more, code=code).stdout)
        return sorted((row["tensor"], row["orders"]) for row in rows)

    experts = f"language_model.{BLOCK.replace('language_model.', '')}.routed_experts"
    dumped = {
        f"{experts}.{theirs}": read_all(exported)[f"{BLOCK}.{ours}"]
        for theirs, ours in (("w13_weight", "w13"), ("w2_weight", "w2"), ("w2_weight_scale", "w2_scale"))
    }
    assert orders(converted_moe, dumped, "--tp", 4, "--rank", 1) == [
        (f"{experts}.w13_weight", ["TILE16"]),
        (f"{experts}.w2_weight", ["TILE16"]),
        (f"{experts}.w2_weight_scale", ["SWZ"]),
    ]
    codes = {f"{experts}.w13_weight": dumped[f"{experts}.w13_weight"].view(torch.float4_e2m1fn_x2)}
    save_file(codes, file)
    reason = f"{experts}.w13_weight is F4, elements smaller than a byte"
    refused("check", file, "--against", converted_moe, "--tp", 4, "--rank", 1, code=1, reason=reason)
    source, attention = read_all(converted_dense), "layers.3.self_attn"
    merged = {}
    for suffix in ("weight", "weight_scale"):
        halves = [source[f"model.language_model.{attention}.{letter}_proj.{suffix}"].chunk(2)[1] for letter in "qkv"]
        merged[suffix] = torch.cat(halves)
    shuffled = dense_asm(Linear(merged["weight"], merged["weight_scale"]))
    name = f"language_model.model.{attention}.qkv_proj"
    of = ("--tp", 2, "--rank", 1)
    for weight, scale, order in (
        (shuffled.weight, shuffled.scale, ["TILE16", "SWZ"]),
        (merged["weight"], merged["weight_scale"].T, ["plain", "transposed"]),  # vLLM's default
    ):
        found = orders(converted_dense, {f"{name}.weight": weight, f"{name}.weight_scale": scale}, *of)
        assert found == [(f"{name}.weight", order[:1]), (f"{name}.weight_scale", order[1:])]
    swapped = torch.cat([*merged["weight"].split(len(merged["weight"]) // 2)][::-1])
    assert orders(converted_dense, {f"{name}.weight": swapped}, *of, code=3) == [(f"{name}.weight", [])]


def klane_inner(codes: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> dict[str, torch.Tensor]:
    """What no release of AITER has: ``shuffle_weight_a16w4_sep_fp4`` and its scales' (ROCm/aiter 0122c48).

    Of 16 rows of 64 bytes a row's words go from [4, 4] to their transpose; of 32 rows of 8 scales rows come before
    columns.
    """
    e, n, width = codes.shape
    words = torch.from_numpy(codes).reshape(e, n // 16, 16, width // 64, 4, 4, 4).permute(0, 1, 3, 2, 5, 4, 6)
    tiles = torch.from_numpy(scales).reshape(e, n // 32, 2, 16, scales.shape[2] // 8, 2, 4).permute(0, 1, 4, 3, 6, 5, 2)
    return {"w13": words.reshape(codes.shape), "w13_scale": tiles.reshape(scales.shape)}


def test_orders_are_told_apart(converted_moe: Path, exported: Path, tmp_path: Path) -> None:
    plain = part(read_all(converted_moe), BLOCK, 4, 1, range(4))
    tiles = {name: tensor for name, tensor in load_file(exported / "model.safetensors").items() if BLOCK in name}
    file = tmp_path / "dumped.safetensors"
    arguments = ("check", file, "--against", converted_moe, "--tp", 4, "--rank", 1)

    def orders(tensors: Tensors, *more: object, code: int = 0) -> dict[str, list[str]]:
        save_file(tensors, file)
        rows = json.loads(mxq(*arguments, "--json", *more, code=code).stdout)
        return {row["tensor"].rpartition(".")[2]: row["orders"] for row in rows}

    known = {"w13": ["TILE16"], "w13_scale": ["SWZ"], "w2": ["TILE16"], "w2_scale": ["SWZ"]}
    assert orders(tiles) == known
    assert orders({f"{BLOCK}.{name}": torch.from_numpy(x) for name, x in plain.items()}) == {
        name: ["plain"] for name in plain
    }
    norm = {"model.norm.weight": torch.ones(4)}
    for kernel in ([], ["--kernel", "moe-a4w4"]):
        assert orders(norm | {f"{BLOCK}.w2": tiles[f"{BLOCK}.w2"]}, *kernel) == {"w2": ["TILE16"]}
    refused(*arguments, "--kernel", "dense-asm", code=2, reason="w2 is no operand of dense-asm")
    renamed = {name.replace("w13", "w13_weight"): x for name, x in tiles.items() if name.endswith("w13")}
    assert orders(renamed) == {"w13_weight": ["TILE16"]}

    # Permutations that are none of these; bytes of another rank; a layout not asked for.
    w13 = f"{BLOCK}.w13"
    assert orders(tiles | {w13: tiles[w13].roll(16, -1)}, code=3) == known | {"w13": []}
    inner = {f"{BLOCK}.{name}": x for name, x in klane_inner(plain["w13"], plain["w13_scale"]).items()}
    assert orders(inner, code=3) == {"w13": [], "w13_scale": []}
    assert (
        mxq(*arguments, code=3).stdout.count("the source's bytes in an order that is none of these (AITER's unrel") == 2
    )
    other = part(read_all(converted_moe), BLOCK, 4, 2, range(4))
    assert orders({w13: torch.from_numpy(other["w13"])}, code=3) == {"w13": []}
    assert "not the bytes of this part of the source" in mxq(*arguments, code=3).stdout
    assert orders(tiles, "--kernel", "moe-interleaved", code=3) == known
    assert "TILE16, expected TILE16 of GU16" in mxq(*arguments, "--kernel", "moe-interleaved", code=3).stdout


@pytest.mark.parametrize(
    ("tensor", "place", "byte", "options", "said"),
    [
        ("w2", tile16_address(5, 40, 64), 0x30, None, "wrong: TILE16, padding 0 and 48: mxq writes 0 there"),
        ("w2", tile16_address(5, 40, 64), 0x30, [], "wrong: TILE16, padding 0 and 48: codes there are to be 0"),
        ("w13", tile16_address(192, 0, 128), 1, [], "wrong: TILE16, padding 0 and 1: codes there are to be 0"),
        ("w2_scale", swz_address(5, 3, 8), 2, None, "wrong: SWZ, padding 1 and 2, behind what is read 0: mxq writes 1"),
        ("w2_scale", swz_address(5, 3, 8), 2, ["--kernel", "moe-a4w4"], "ok: SWZ, padding 1 and 2, behind"),
        ("w2_scale", swz_address(5, 3, 8), 255, ["--kernel", "moe-a4w4"], "wrong: SWZ, padding 1 and 255, "),
        ("w2_scale", swz_address(5, 6, 8), 9, None, "wrong: SWZ, padding 1, behind what is read 0 and 9: mxq writes 0"),
        ("w2_scale", swz_address(5, 6, 8), 255, ["--kernel", "moe-a4w4"], "ok: SWZ, padding 1, behind what is read 0"),
        ("w2_scale", swz_address(5, 6, 8), 255, [], "ok: SWZ, padding 0 and 1 and 255"),
    ],
)
def test_what_padding_holds_is_said_and_judged(
    converted_moe: Path, exported: Path, tmp_path: Path, tensor: str, place: int, byte: int, options: Any, said: str
) -> None:
    """I is 64, padded to 128: half of w2 [256, 64] is padding, and half of the 4 of 8 columns of its scales."""
    path, name = Path(shutil.copytree(exported, tmp_path / "path")), f"{BLOCK}.{tensor}"
    rewrite(path, lambda tensors: tensors[name][3].view(-1)[place].fill_(byte))
    reseal(path)
    given = [path] if options is None else [path / "model.safetensors", "--tp", 4, "--rank", 1, *options]
    found = mxq("check", *given, "--against", converted_moe, code=3 if said.startswith("wrong") else 0)
    lines = [" ".join(line.split()).replace(f" {name}", "") for line in found.stdout.splitlines()]
    assert [line for line in lines if line.startswith(said)]
    assert sum(line.startswith("wrong") for line in lines) == said.startswith("wrong")


def test_where_orders_do_not_differ_it_says_so(converted_moe: Path, tmp_path: Path) -> None:
    path = foreign.quark(converted_moe, tmp_path / "path")
    name = f"{BLOCK}.0.down_proj.weight_scale"

    def same(tensors: Tensors) -> None:
        for e in range(4):
            tensors[name.replace(".0.", f".{e}.")].fill_(120)

    rewrite(path, same)
    mxq("export", path, tmp_path / "out", "--kernel", "moe-a4w4")
    said = mxq("check", tmp_path / "out", "--against", path).stdout
    assert f"ok     {BLOCK}.w2_scale: cannot tell: its bytes are the same in SWZ, plain" in said


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--kernel", "moe-a4w4", "--tp", 2, "--rank", 2], "there is no rank 2 of TP 2 x EP 1"),
        (["--kernel", "moe-a4w4", "--rank", -1], "there is no rank -1"),
        (["--kernel", "moe-a4w4", "--tp", 0], "there is no rank 0 of TP 0"),
        (
            ["--kernel", "moe-a4w4", "--tp", 16],
            f"{BLOCK.replace('2', '0')} [E 4, H 256, I 256] under TP 16, EP 1: I = 256",
        ),
        (["--kernel", "moe-a4w4", "--ep", 3], "E = 4 is not a multiple of 3"),
        (["--kernel", "dense-asm"], "has no MXFP4 dense modules"),
        (["--kernel", "moe-a4w4", "--only", "nothing"], "has no MXFP4 routed experts named nothing"),
    ],
)
def test_what_cannot_be_shared_is_a_line(converted_moe: Path, tmp_path: Path, options: list[Any], reason: str) -> None:
    refused("export", converted_moe, tmp_path / "out", *options, code=2, reason=reason)
    assert not [*tmp_path.iterdir()]


def test_what_a_dense_kernel_does_not_take_is_a_line(converted_dense: Path, tmp_path: Path) -> None:
    for options, reason in (
        (
            ["--tp", 2],
            "linear_attn.out_proj [N 256, K 256] under TP 2: K = 128 of a GPU's part is not a multiple of 256",
        ),
        (["--tp", 3], "under TP 3: linear_num_key_heads = 2 is not a multiple of 3"),
        (
            ["--tp", 3, "--only", "*.gate_proj"],
            "mlp.gate_proj [N 512, K 256] under TP 3: N = 512 is not a multiple of 3",
        ),
        (["--ep", 2], "dense-asm is for dense layers"),
    ):
        refused("export", converted_dense, tmp_path / "out", "--kernel", "dense-asm", *options, code=2, reason=reason)


def test_a_checkpoint_that_is_wrong_is_not_exported(converted_moe: Path, moe_source: Path, tmp_path: Path) -> None:
    path = foreign.quark(converted_moe, tmp_path / "path")
    lost = f"{BLOCK}.0.down_proj.weight_scale"
    rewrite(path, lambda tensors: tensors.pop(lost))
    refused("export", path, tmp_path / "out", "--kernel", "moe-a4w4", code=1, reason="its scales are missing")
    refused("export", moe_source, tmp_path / "out", "--kernel", "moe-a4w4", code=2, reason="is not quantized")
    nan = foreign.quark(converted_moe, tmp_path / "nan")
    rewrite(nan, lambda tensors: tensors[lost][3, :1].fill_(255))
    refused(
        "export", nan, tmp_path / "out", "--kernel", "moe-a4w4", code=1, reason=f"{BLOCK} holds scales that mean NaN"
    )
    changed = Path(shutil.copytree(converted_moe, tmp_path / "changed"))
    rewrite(changed, lambda tensors: tensors[lost][3, :1].add_(1))
    refused("export", changed, tmp_path / "out", "--kernel", "moe-a4w4", code=1, reason="changed after it was written")
    assert not [*tmp_path.glob("out*")]
    refused("check", converted_moe, "--against", converted_moe, code=2, reason=f"holds no {DESCRIPTION}")
    refused("check", tmp_path / "no", "--against", converted_moe, code=2, reason="no is missing")


DAMAGE: dict[str, tuple[Callable[[Any], object], int, str]] = {
    "another kernel": (lambda c: c.update(kernel="moe-interleaved"), 1, "layouts is not that of moe-interleaved"),
    "padding": (lambda c: c["padding"].update(scales=127), 1, "padding is not that of moe-a4w4"),
    "less of I": (lambda c: c["operands"][BLOCK]["part"].update(I=32), 1, "is not what rank 1 has"),
    "experts": (lambda c: c["operands"][BLOCK].update(experts=[4, 8]), 1, "is not what rank 1 has"),
    "no kernel": (lambda c: c.update(kernel="moe"), 1, "does not describe a layout: KeyError"),
    "rank": (lambda c: c.update(rank=4), 1, "there is no rank 4 of TP 4"),
    "size": (lambda c: c["operands"][BLOCK]["part"].update(I=33), 1, "I = 33, not a multiple of 32"),
    "larger": (lambda c: c["operands"][BLOCK]["part"].update(H=1 << 30), 1, "is not what rank 1 has"),
    "text": (lambda c: c["operands"][BLOCK]["part"].update(E="4"), 1, "does not describe a layout"),
    "lost": (lambda c: c["operands"].pop(BLOCK), 3, "by mxq_layout.json missing"),
    "format": (lambda c: c.update(format=2), 1, "is of format 2"),
    "list": (lambda c: c.update(operands=[1]), 1, "does not describe a layout"),
    "files": (lambda c: c["files"].update({"../x": {"bytes": 1, "sha256": ""}}), 3, "../x is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_description_that_does_not_fit_is_a_line(
    converted_moe: Path, exported: Path, tmp_path: Path, damage: str
) -> None:
    edit, code, reason = DAMAGE[damage]
    path = Path(shutil.copytree(exported, tmp_path / "path"))
    reseal(path, edit)
    refused("undo", path, tmp_path / "out", code=code, reason=reason)
    refused("check", path, "--against", converted_moe, code=code, reason=reason)
    assert not (tmp_path / "out").exists()


def test_files_that_are_not_the_exports_are_found(
    converted_moe: Path, converted_dense: Path, exported: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(exported, tmp_path / "path"))
    rewrite(path, lambda tensors: tensors[f"{BLOCK}.w2"][1, 0, :1].bitwise_xor_(1))
    for verb in (["undo", path, tmp_path / "out"], ["check", path, "--against", converted_moe]):
        refused(*verb, code=3, reason="does not have the sha256")
    reseal(path)
    refused("check", path, "--against", converted_moe, code=3, reason="1 of 16 tensors are wrong")
    refused("check", exported, "--against", converted_dense, code=3, reason="was made from another checkpoint")
    reseal(path, lambda c: c.update(rank=0))  # a true checksum, and a lie
    refused("check", path, "--against", converted_moe, code=3, reason="16 of 16 tensors are wrong")
    (path / "model.safetensors").unlink()
    refused("undo", path, tmp_path / "out", code=3, reason="model.safetensors is missing")
