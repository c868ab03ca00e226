"""A model on the hub gives what the same files in a directory give, at the cost of what is needed of it."""

import json
import re
import shutil
from pathlib import Path

import pytest
import tiny
from checkpoints import edit_json, rewrite, wide_copy
from click.testing import CliRunner
from hub import TOKEN, Hub, no_ranges, read
from hub_runner import Runner, share_blobs
from safetensors.torch import load_file, save_file

from mxq.cli import main

OFFLINE = {"HF_HUB_OFFLINE": "1"}
CHATTER = ("downloading", "converting", "checksums", "comparing copies", "quantizing again")

ANYWHERE = {"model": "", "expected": {}}  # what of a plan depends on where and when it is made


@pytest.fixture(scope="module")
def full(dense_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in two shards, with all that people upload besides."""
    path = shutil.copytree(dense_source, tmp_path_factory.mktemp("full") / "model")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {f"model-{i + 1:05}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, path / file, {"format": "pt"})
    weight_map = {name: file for file, held in shards.items() for name in held}
    size = sum(tensor.nbytes for tensor in tensors.values())
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map})
    )
    (path / "original").mkdir()
    for name in (
        *("pytorch_model.bin", "model.gguf", "consolidated.pth", "consolidated.safetensors", "training_args.bin"),
        *(
            "modeling_mine.py",
            "README.md",
            ".gitattributes",
            "original/consolidated.safetensors",
            "original/params.json",
        ),
        *("LICENSE", "NOTICE.md", "vocab.txt", "merges.tiktoken", "tokenizer.model", "pytorch_model.bin.index.json"),
    ):
        (path / name).write_text(f"this is {name}")
    return path


def test_converted_and_verified_as_from_a_directory(full: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    repository = hub.add("org/full", full)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    said = mxq("quantize", "org/full", ours)
    assert [line for line in said.stderr.splitlines() if not line.startswith(CHATTER)] == []
    assert said.stderr.count("downloading org/full: 100%") == 1
    mxq("quantize", full, theirs)
    made = {"mxq_manifest.json", "README.md"}  # which name the source
    assert read(ours).keys() == read(theirs).keys() > {"LICENSE", "NOTICE.md", "merges.tiktoken", "tokenizer.model"}
    assert {name: data for name, data in read(ours).items() if name not in made} == {
        name: data for name, data in read(theirs).items() if name not in made
    }
    source = json.loads((ours / "mxq_manifest.json").read_text())["source"]
    assert (source["name"], source["hub"], source["commit"]) == ("org/full", True, repository.refs["main"])
    other = json.loads((theirs / "mxq_manifest.json").read_text())["source"]
    assert (other["name"], other["hub"], other["commit"]) == ("model", False, None)
    assert other["fingerprint"] == source["fingerprint"]
    assert "base_model: org/full\n" in (ours / "README.md").read_text()
    assert repository.refs["main"] in (ours / "README.md").read_text()

    fetched = {asked.path.rpartition("/")[2] for asked in hub.asked if "/resolve/" in asked.path}
    assert fetched == {
        *("config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "LICENSE"),
        *("generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "NOTICE.md"),
        *("chat_template.jinja", "vocab.txt", "merges.tiktoken", "tokenizer.model"),
        *(f"model-{i}-of-00002.safetensors" for i in ("00001", "00002")),
    }
    before = hub.sent("resolve") + hub.sent("Signature")
    assert json.loads(mxq("verify", ours, "--against", "org/full", "--json").stdout)["ok"] is True
    assert hub.sent("resolve") + hub.sent("Signature") == before  # the cache has it all


def test_a_plan_costs_headers(dense_source: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    source = wide_copy(dense_source, tmp_path / "wide", 1 << 19, 1 << 19)  # 4.5 GB
    hub.add("org/wide", source)
    planned = mxq("plan", "org/wide", "--json")
    assert planned.stderr == ""
    assert sum(asked.sent for asked in hub.asked) < 50_000
    assert list((tmp_path / "home").rglob("*.safetensors*")) == []
    local = json.loads(mxq("plan", source, "--json").stdout)
    assert json.loads(planned.stdout) | ANYWHERE == local | ANYWHERE
    assert "GB" in mxq("inspect", "org/wide").stdout


def test_headers_longer_than_the_first_piece_and_servers_without_ranges(
    full: Path, hub: Hub, mxq: Runner, tmp_path: Path
) -> None:
    path = shutil.copytree(full, tmp_path / "padded")
    file = path / "model-00001-of-00002.safetensors"
    save_file(load_file(file), file, {"format": "pt", "padding": "x" * 100_000})
    hub.add("org/padded", path)
    local = json.loads(mxq("plan", path, "--json").stdout)
    assert json.loads(mxq("plan", "org/padded", "--json").stdout) | ANYWHERE == local | ANYWHERE
    ranges = [asked.range for asked in hub.asked if asked.host == "cdn"]
    assert len(ranges) == 3
    assert "bytes=0-16383" in ranges
    hub.fail("GET .*Signature", no_ranges)
    assert json.loads(mxq("plan", "org/padded", "--json").stdout) | ANYWHERE == local | ANYWHERE


@pytest.mark.parametrize("same", [True, False])
def test_a_plan_that_must_read_weights_reads_ranges(
    dense_source: Path, hub: Hub, mxq: Runner, tmp_path: Path, same: bool
) -> None:
    path = shutil.copytree(dense_source, tmp_path / "tied")
    edit_json(path / "config.json", lambda config: config["text_config"].update(tie_word_embeddings=True))
    edit_json(path / "config.json", lambda config: config.update(tie_word_embeddings=True))
    embedding = "model.language_model.embed_tokens.weight"
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding] * (1 if same else 2)}))
    hub.add("org/tied", path)
    said = mxq("plan", "org/tied", code=0 if same else 2)
    assert ("differs from" in said.stderr) is not same
    assert hub.sent("Signature") < 600_000  # two tensors of a quarter megabyte


def test_revisions(dense_source: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    repository = hub.add("org/two", dense_source, ref="v1.0")
    hub.add("org/two", tiny.write_target(tmp_path / "second", seed=1))
    hub.add("org/two", tiny.write_target(tmp_path / "third", seed=2), ref="refs/pr/4")
    made = {}
    for revision, ref in (
        ("v1.0", "v1.0"),
        ("main", "main"),
        ("refs/pr/4", "refs/pr/4"),
        (repository.refs["v1.0"], "v1.0"),
    ):
        out = tmp_path / revision.replace("/", "-")
        mxq("quantize", f"org/two@{revision}", out)
        source = json.loads((out / "mxq_manifest.json").read_text())["source"]
        assert (source["name"], source["commit"]) == ("org/two", repository.refs[ref])
        made[revision] = (out / "model.safetensors").read_bytes()
    assert made["v1.0"] == made[repository.refs["v1.0"]]
    assert len(set(made.values())) == 3
    mxq("quantize", "org/two", tmp_path / "default")
    assert (tmp_path / "default/model.safetensors").read_bytes() == made["main"]
    mxq("verify", tmp_path / "default", "--against", "org/two@v1.0", code=3)


def test_only_the_hub_sees_the_token(dense_source: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    repository = hub.add("org/closed", dense_source)
    repository.gated = repository.private = True
    mxq("plan", "org/closed", environment={"HF_TOKEN": TOKEN})
    mxq("quantize", "org/closed", tmp_path / "out", environment={"HF_TOKEN": TOKEN})
    assert {asked.token for asked in hub.asked if "org/closed" in asked.path} == {True}
    assert [asked.token for asked in hub.asked if asked.host == "cdn"] == [False, False, False]


def test_offline_with_all_of_it_in_the_cache(full: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    repository = hub.add("org/full", full)
    mxq("quantize", "org/full", tmp_path / "online")
    asked = len(hub.asked)
    for i, spec in enumerate(("org/full", "org/full@" + repository.refs["main"])):
        said = mxq("quantize", spec, tmp_path / f"offline{i}", environment=OFFLINE)
        assert "downloading" not in said.stderr
        assert read(tmp_path / f"offline{i}") == read(tmp_path / "online")
        mxq("plan", spec, environment=OFFLINE)
    assert len(hub.asked) == asked
    trees = next((tmp_path / "home").rglob("trees"))
    trees.rename(trees.with_name("aside"))  # as older versions of the library leave a cache
    mxq("plan", "org/full", environment=OFFLINE)
    mxq("verify", tmp_path / "online", "--against", "org/full", environment=OFFLINE)
    trees.with_name("aside").rename(trees)
    hub.close()
    said = mxq("plan", "org/full")
    assert said.stderr == "the hub cannot be reached; using what the cache knows of it\n"
    assert mxq("plan", "org/full", "-q").stderr == ""


def test_a_cache_that_models_share(full: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    """As the hub's library arranges what it gets from Xet storage: a link to a link."""
    hub.add("org/full", full)
    mxq("quantize", "org/full", tmp_path / "first")
    mxq("quantize", "org/full", tmp_path / "second", first=share_blobs)
    (snapshot,) = (mxq.home / "hub/models--org--full/snapshots").iterdir()
    shard = (snapshot / "model-00001-of-00002.safetensors").resolve()
    assert shard.is_relative_to(mxq.home / "hub/blobs")
    assert read(tmp_path / "first") == read(tmp_path / "second")
    mxq("plan", snapshot)


def test_inspecting_a_conversion_on_the_hub(dense_source: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    mxq("quantize", dense_source, tmp_path / "out")
    hub.add("org/converted", tmp_path / "out")
    shown = mxq("inspect", "org/converted", "--worst", 3).stdout
    assert len(re.findall(r"^layers\.\d\.", shown, re.M)) == 3
    assert mxq("inspect", tmp_path / "out", "--worst", 3).stdout == shown
    assert hub.sent("Signature") < 20_000


def test_evaluated_as_from_a_directory(dense_source: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    drafter = tiny.write_drafter(tmp_path / "drafter", dense_source)
    hub.add("org/target", dense_source)
    hub.add("org/drafter", drafter)
    mxq("quantize", "org/target", tmp_path / "mxfp4")
    hub.add("org/mxfp4", tmp_path / "mxfp4")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Ann has 3 apples."}\n{"prompt": "Write a function."}\n')
    options = ("--workload", tmp_path / "prompts.jsonl", "-k", 3, "--max-tokens", 8)

    def words(target: object, mxfp4: object, drafter: object, out: str) -> list[str]:
        models = ("--bf16", target, "--mxfp4", mxfp4, "--drafter", drafter)
        return [str(word) for word in ("eval", *models, *options, "--out", tmp_path / out)]

    def answers(out: str) -> list[list[tuple[object, ...]]]:
        files = sorted((tmp_path / out).rglob("records.jsonl"))
        records = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        return sorted([(record["prompt_id"], record["token_ids"], record["accepted"]) for record in r] for r in records)

    said = mxq(*words("org/target", "org/mxfp4", "org/drafter", "hub"))
    assert "warning" not in said.stderr
    local = CliRunner().invoke(main, words(dense_source, tmp_path / "mxfp4", drafter, "local"))
    assert local.exit_code == 0, local.output
    assert len(answers("hub")) == 4
    assert answers("hub") == answers("local")
    paths = {asked.path for asked in hub.asked if asked.host == "hub" and not asked.path.startswith("/api/models/org/")}
    assert all("/resolve/" in path or path == "/api/agent-harnesses" for path in paths), paths


def test_targets_that_cannot_be_compared_are_not_downloaded(
    dense_source: Path, hub: Hub, mxq: Runner, tmp_path: Path
) -> None:
    hub.add("org/target", dense_source)
    models = ("--bf16", "org/target", "--mxfp4", "org/target", "--workload", "arithmetic", "-k", 3)
    said = mxq("eval", *models, "--out", tmp_path / "run", code=2)
    assert "is not quantized, so it is not the MXFP4 target" in said.stderr
    assert list((tmp_path / "home").rglob("*.safetensors*")) == []


def test_what_cannot_be_calibrated_is_not_downloaded(dense_source: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    hub.add("org/target", dense_source)
    said = mxq("quantize", "org/target", tmp_path / "out", "--recipe", "mxfp4-gptq", code=2)
    assert "no calibration text for org/target" in said.stderr
    said = mxq("quantize", "org/target", tmp_path / "out", "--recipe", "mxfp4-gptq", "--stream", code=2)
    assert "--stream is for recipes that read no text" in said.stderr
    assert list((tmp_path / "home").rglob("*.safetensors*")) == []


def test_serve_looks_at_headers_and_where_it_cannot_takes_your_word(hub: Hub, mxq: Runner, converted_moe: Path) -> None:
    hub.add("org/moe", converted_moe)
    command = ("--hardware", "mi355x", "--print")
    line = mxq("serve", "org/moe@main", *command).stdout
    assert line.startswith("VLLM_ROCM_USE_AITER=1 vllm serve org/moe ")
    assert line.endswith(" --revision main\n")
    assert not list(mxq.home.rglob("*.safetensors"))
    said = mxq("serve", "org/other", *command, code=1, environment=OFFLINE).stderr
    assert len(said.splitlines()) == 2
    assert said.endswith("; --assume looks at no model\n")
    line = mxq("serve", "org/other@v1", *command, "--assume", "moe-mxfp4", environment=OFFLINE).stdout
    assert line.startswith("VLLM_ROCM_USE_AITER=1 vllm serve org/other ")
    assert line.endswith(" --revision v1\n")
