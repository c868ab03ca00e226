"""The files of a source beside its config and weights: what goes along unchanged, and what stays behind."""

from pathlib import Path

from mxq.checkpoint.reader import INDEX, inside
from mxq.errors import MxqError

MANIFEST = "mxq_manifest.json"
DEQUANTIZED = "mxq_dequantized.json"  # takes the manifest's place where MXFP4 was made into bf16 again
LAYERS = "layers.jsonl"
SCALES = "mxq_scales.npz"  # of calibrated weights; by its name and form no engine takes it for weights
CARD = "README.md"

_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_COPIED_PREFIXES = ("LICENSE", "NOTICE")
_NOT_COPIED = ("config.json", INDEX, "pytorch_model.bin.index.json", MANIFEST, DEQUANTIZED)
# Without one of these a model works differently or not at all, so a link in place of it is no trifle.
_NEEDED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def copied_files(path: Path) -> list[str]:
    """Return the names of the files of a source that go along unchanged: tokenizer, templates, generation, licence.

    Raises:
        MxqError: one that the model needs is a link out of the directory, or to nothing.
    """
    return sorted(
        file.name
        for file in path.iterdir()
        if file.name not in _NOT_COPIED
        and (file.suffix in _COPIED_SUFFIXES or file.name.startswith(_COPIED_PREFIXES))
        and _is_ours(path, file)
    )


def _is_ours(path: Path, file: Path) -> bool:
    if file.is_symlink():
        try:
            inside(path, file.name)
            if not file.exists():
                raise MxqError(f"{file} is a link to nothing", "put the file itself there")
        except MxqError:
            if file.name in _NEEDED:
                raise
            return False
    return file.is_file()


def left_files(path: Path) -> list[str]:
    """Return what else a source's directory holds, hidden files apart, and no output will."""
    known = {"config.json", INDEX, MANIFEST, DEQUANTIZED, LAYERS, SCALES, CARD, *copied_files(path)}
    return sorted(
        entry.name
        for entry in path.iterdir()
        if entry.name not in known and not entry.name.startswith(".") and entry.suffix != ".safetensors"
    )
