"""What goes wrong with calibrated weights is found, each defect with the manifest made to agree with it."""

import io
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import calibrated
import numpy as np
import pytest
import torch
from checkpoints import Tensors, edit_json, read_all, reseal, rewrite

from mxq.formats import elements, mxfp4
from mxq.verify.run import verify

LAYER = "model.language_model.layers.1."
NORM = LAYER + "post_attention_layernorm.weight"
UP, GATE, DOWN = (f"{LAYER}mlp.{name}_proj" for name in ("up", "gate", "down"))
EXPERT = "model.language_model.layers.2.mlp.experts.3"
SQUARE = LAYER + "linear_attn.out_proj"


@pytest.fixture(scope="module")
def made(
    dense_source: Path, moe_source: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """Output and source by algorithm and kind. Not to be changed: copy them."""
    with pytest.MonkeyPatch.context() as patch:
        calibrated.fake(patch)
        root = tmp_path_factory.mktemp("calibrated")
        return {
            f"{algorithm} {kind}": (calibrated.convert(source, root / f"{algorithm}-{kind}", algorithm), source)
            for algorithm in ("gptq", "awq")
            for kind, source in (("dense", dense_source), ("moe", moe_source))
        }


def found(
    original: tuple[Path, Path],
    directory: Path,
    tensors: Callable[[Tensors], object] | None = None,
    scales: Callable[[dict[str, np.ndarray]], object] | None = None,
) -> list[str]:
    """The problems of a copy with a defect, whose manifest agrees with it."""
    out, source = original
    path = shutil.copytree(out, directory / "defective")
    if tensors is not None:
        rewrite(path, tensors)
    if scales is not None:
        file = path / "mxq_scales.npz"
        with np.load(file) as held:
            arrays = dict(held)
        scales(arrays)
        np.savez(file, **arrays)
    reseal(path)
    return [problem.what for problem in verify(path, source, rows=0).problems]


def swap(a: str, b: str, *suffixes: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for suffix in suffixes:
            tensors[a + suffix], tensors[b + suffix] = tensors[b + suffix], tensors[a + suffix]

    return edit


def zero(module: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[f"{module}.weight"].zero_()


@pytest.mark.parametrize("which", ["gptq dense", "gptq moe", "awq dense", "awq moe"])
def test_what_is_as_it_was_made_has_no_problem(made: dict[str, tuple[Path, Path]], tmp_path: Path, which: str) -> None:
    assert found(made[which], tmp_path) == []


def test_scales_of_gptq_are_those_of_rounding(made: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{UP}.weight_scale"][7, 2] += 1

    said = f"{UP} row 7 has other scales than the source's row gets"
    assert found(made["gptq dense"], tmp_path / "static", edit) == [said]
    free = shutil.copytree(made["gptq dense"][0], tmp_path / "free")
    edit_json(free / "mxq_manifest.json", lambda content: content["recipe"]["options"].update(static_groups=False))
    assert found((free, made["gptq dense"][1]), tmp_path / "moving", edit) == []


def test_clipping_explains_large_weights_and_nothing_else(made: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    def smaller(tensors: Tensors) -> None:  # as if clipped to a quarter
        tensors[f"{UP}.weight_scale"][7, 2] -= 2
        tensors[f"{UP}.weight"][7, 32:48] = torch.where(tensors[f"{UP}.weight"][7, 32:48] > 0, 0x77, 0)

    def one(tensors: Tensors) -> None:
        tensors[f"{UP}.weight"][9, 1] ^= 0x10

    def row(tensors: Tensors) -> None:
        tensors[f"{UP}.weight"][11] = 0

    for number, (edit, place) in enumerate(((smaller, 7), (one, 9), (row, 11))):
        problems = found(made["awq dense"], tmp_path / str(number), edit)
        assert problems == [f"{UP} row {place} is not what the source's row quantizes to"]


def test_codes_of_gptq_may_be_far_but_not_of_nothing(made: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """Where the text has few directions codes move by several steps: 11 dB are seen, none has half of the weight."""
    source = read_all(made["gptq dense"][1])[f"{DOWN}.weight"].float()
    scale = mxfp4.quantize(source)[1]
    noise = torch.randn(source.shape, generator=torch.Generator().manual_seed(2)) * source.std()

    def moved(share: float) -> Callable[[Tensors], None]:
        y = (source + share * noise).view(*scale.shape, 32) / mxfp4.scale_values(scale).unsqueeze(-1)
        pairs = elements.encode(y.clamp(-8, 8), signed_zero=False).to(torch.uint8).view(len(source), -1, 2)
        return lambda tensors: tensors.update({f"{DOWN}.weight": pairs[..., 0] | pairs[..., 1] << 4})

    assert found(made["gptq dense"], tmp_path / "far", moved(0.4)) == []
    (problem,) = found(made["gptq dense"], tmp_path / "apart", moved(0.9))
    assert problem.startswith(f"{DOWN} (")


def test_an_expert_rounded_because_no_token_reached_it_is_held_to_that(
    made: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    name = f"{calibrated.UNSEEN}.up_proj"

    def edit(tensors: Tensors) -> None:
        tensors[f"{name}.weight"][3, 9] ^= 0x10

    assert found(made["gptq moe"], tmp_path, edit) == [f"{name} row 3 is not what the source's row quantizes to"]


@pytest.mark.parametrize("which", ["gptq", "awq"])
def test_zeros_and_other_matrices_codes_are_found(
    made: dict[str, tuple[Path, Path]], tmp_path: Path, which: str
) -> None:
    (problem,) = found(made[f"{which} moe"], tmp_path / "expert", zero(f"{EXPERT}.down_proj"))
    assert problem.startswith(f"{EXPERT}.down_proj (0.0 dB) is not what the source's weight is in MXFP4")
    other = f"{EXPERT.removesuffix('3')}2"
    edit = swap(f"{EXPERT}.up_proj", f"{other}.up_proj", ".weight", ".weight_scale")
    (problem,) = found(made[f"{which} moe"], tmp_path / "other", edit)
    assert f"{other}.up_proj (-" in problem
    assert "(and 1 more)" in problem


def test_a_norm_of_the_source_that_was_left_in_is_found(made: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    source = read_all(made["awq dense"][1])[NORM]
    said = f"{NORM} is not the source's with the scales of the linears behind it taken out"
    assert found(made["awq dense"], tmp_path / "left", lambda tensors: tensors.update({NORM: source})) == [said]

    def unfolded(tensors: Tensors) -> None:
        tensors[NORM] = (tensors[NORM].float() * 1.01).to(tensors[NORM].dtype)

    assert found(made["awq dense"], tmp_path / "other", unfolded) == [said]


def test_a_norm_that_the_manifest_does_not_name_is_found(made: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    out, source = made["awq dense"]
    path = shutil.copytree(out, tmp_path / "defective")
    edit_json(path / "mxq_manifest.json", lambda content: content["calibrated"]["folded"].remove(NORM))
    problems = [problem.what for problem in verify(path, source, rows=0).problems]
    assert problems == [f"{NORM}, which is not quantized, is not the same bytes as in the source"]
    other = LAYER + "input_layernorm.weight"
    edit_json(path / "mxq_manifest.json", lambda content: content["calibrated"]["folded"].extend([NORM, other]))
    problems = [problem.what for problem in verify(path, source, rows=0).problems]
    assert problems == [f"{other} is not the source's with the scales of the linears behind it taken out"]


def test_scales_that_were_edited_swapped_or_lost_are_found(made: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    dense, moe = made["awq dense"], made["awq moe"]
    swapped = found(dense, tmp_path / "codes", swap(UP, GATE, ".weight_scale"))
    assert len(swapped) == 1
    assert GATE in swapped[0]

    def one(arrays: dict[str, np.ndarray]) -> None:
        arrays[f"{UP}.columns"][9] *= 1.5

    problems = found(dense, tmp_path / "one", scales=one)
    assert problems[0] == f"{GATE} (and 1 more) is scaled by what nothing in front of it, or behind it, undoes"
    assert any(f"{UP} row 0 is not what" in problem for problem in problems)

    def both(arrays: dict[str, np.ndarray]) -> None:
        for name in (UP, GATE):
            arrays[f"{name}.columns"][9] *= 1.5

    problems = found(dense, tmp_path / "both", scales=both)
    assert problems[0].startswith(f"{NORM} is not the source's")
    assert len(problems) == 2

    def pair(arrays: dict[str, np.ndarray]) -> None:
        for name in (f"{EXPERT}.down_proj.columns", f"{EXPERT}.up_proj.rows"):
            arrays[name][0] *= 1.5

    (problem,) = found(moe, tmp_path / "pair", scales=pair)
    assert problem == f"{EXPERT}.down_proj row 0 (and 1 more) is not what the source's row quantizes to"

    def lost(arrays: dict[str, np.ndarray]) -> None:
        del arrays[f"{EXPERT}.up_proj.rows"]

    assert f"{EXPERT}.down_proj is scaled by what nothing" in found(moe, tmp_path / "lost", scales=lost)[0]

    def unsound(arrays: dict[str, np.ndarray]) -> None:
        arrays[f"{EXPERT}.up_proj.rows"][1] = np.nan

    assert f"{EXPERT}.up_proj's rows in mxq_scales.npz" in found(moe, tmp_path / "nan", scales=unsound)[0]

    def short(arrays: dict[str, np.ndarray]) -> None:
        for name in (f"{EXPERT}.down_proj.columns", f"{EXPERT}.up_proj.rows"):
            arrays[name] = arrays[name][:7]

    problems = found(moe, tmp_path / "short", scales=short)
    assert any("mxq_scales.npz has [7] scales" in problem for problem in problems)


def zipped(name: str, content: bytes, how: int = zipfile.ZIP_STORED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", how) as archive:
        archive.writestr(name, content)
    return made.getvalue()


def header_of(count: int) -> bytes:
    made = io.BytesIO()
    np.lib.format.write_array_header_1_0(made, {"descr": "<f4", "fortran_order": False, "shape": (count,)})
    return made.getvalue()


def test_a_file_of_scales_that_is_none_is_found(made: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    out, source = made["awq dense"]
    whole = (out / "mxq_scales.npz").read_bytes()
    directory = whole.index(b"PK\x01\x02")
    hostile = {
        "cut": whole[:-30],
        "text": b"no zip",
        "encrypted": whole[: directory + 8] + b"\x01" + whole[directory + 9 :],
        "method": whole[: directory + 10] + b"\x63" + whole[directory + 11 :],
        "foreign": zipped("a.columns", b"no array"),
        "no array": zipped("a.columns.npy", b"no array"),
        "too large": zipped("a.columns.npy", header_of(10**15)),
        "larger still": zipped("a.columns.npy", header_of(10**30)),
        "packed": zipped("a.columns.npy", header_of(0), zipfile.ZIP_DEFLATED),
    }
    for name, content in hostile.items():
        path = shutil.copytree(out, tmp_path / name)
        (path / "mxq_scales.npz").write_bytes(content)
        assert "mxq_scales.npz changed after it was written" in verify(path).problems[0].what
        reseal(path)
        assert verify(path, source).problems[0].what.startswith("mxq_scales.npz cannot be read: ")
    path = shutil.copytree(out, tmp_path / "gone")
    (path / "mxq_scales.npz").unlink()
    assert verify(path).problems[0].what == "mxq_scales.npz is missing"
    assert verify(path, source).problems[-1].what.startswith("mxq_scales.npz cannot be read: ")
    path = shutil.copytree(out, tmp_path / "malformed")
    edit_json(path / "mxq_manifest.json", lambda content: content.pop("calibrated"))
    assert "mxq_manifest.json is malformed: calibrated lacks" in verify(path, source).problems[0].what
    edit_json(path / "mxq_manifest.json", lambda content: content.update(calibrated=None))
    assert (
        verify(path, source).problems[0].what == "mxq_manifest.json is malformed: calibrated, or the recipe's options"
    )
