"""How vLLM 0.32 shares the linear layers of a Qwen3.5 model among the GPUs of a tensor parallel group.

Held to what vLLM's own model classes load (``tools/vllm_split_case.py``). ``o_proj``, ``out_proj`` and ``down_proj``
are ``RowParallelLinear``: a GPU has some of their columns, and all rows. The routers are whole everywhere. Everything
else is ``ColumnParallelLinear`` or merged of such: a GPU has some rows of each module, whole heads of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mxq.errors import UsageError

_VOCABULARY = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE
_BY_COLUMNS = {"o_proj", "out_proj", "down_proj"}
_WHOLE = {"gate", "shared_expert_gate"}
_HEADS = {
    "q_proj": ("num_attention_heads",),  # with an output gate a head has its gate's rows behind its own
    "k_proj": ("num_key_value_heads",),
    "v_proj": ("num_key_value_heads",),
    "o_proj": ("num_attention_heads",),
    "in_proj_qkv": ("linear_num_key_heads", "linear_num_key_heads", "linear_num_value_heads"),
    "in_proj_z": ("linear_num_value_heads",),
    "in_proj_a": ("linear_num_value_heads",),
    "in_proj_b": ("linear_num_value_heads",),
    "out_proj": ("linear_num_value_heads",),
}
_HEAD_SIZES = {"linear_num_key_heads": "linear_key_head_dim", "linear_num_value_heads": "linear_value_head_dim"}


class IndivisibleError(UsageError):
    """A matrix cannot be shared by that many GPUs."""


@dataclass(frozen=True)
class Part:
    """What one GPU has of a matrix [N, K]: runs of rows, each [first, one behind the last), and one of columns."""

    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int]

    @property
    def sizes(self) -> tuple[int, int]:
        """N and K of it."""
        return sum(stop - start for start, stop in self.rows), self.columns[1] - self.columns[0]


def part(module: str, n: int, k: int, text: Mapping[str, Any], tp: int, rank: int = 0) -> Part:
    """Return the part of a module [n, k] that GPU ``rank`` of ``tp`` has.

    Where there are fewer key and value heads than GPUs, several have the same. ``in_proj_qkv`` is three matrices:
    query, key and value. (vLLM keeps ``in_proj_ba`` whole for AWQ and GPTQ on Nvidia GPUs alone.)

    Source: ``QKVParallelLinear``, ``MergedColumnParallelLinear`` and ``RowParallelLinear`` of
    ``vllm/model_executor/layers/linear.py``; ``models/qwen3_next.py``; ``layers/mamba/gdn/qwen_gdn_linear_attn.py``.

    Args:
        module: its name; the last part counts.
        n: rows of the whole.
        k: columns of the whole.
        text: the language model's config, which is asked for numbers of heads if ``tp`` is more than one.
        tp: GPUs that share it.
        rank: which of them.

    Raises:
        IndivisibleError: it cannot be shared like that.
        UsageError: the config lacks what decides, or contradicts ``n``.
    """
    last = module.rpartition(".")[2]
    if tp == 1 or last in _WHOLE:
        return Part(((0, n),), (0, k))
    where = f"{module} [N {n}, K {k}] under TP {tp}"
    if last in _BY_COLUMNS:
        _whole_heads(where, text, last, tp)
        size = _quotient(where, "K", k, tp)
        return Part(((0, n),), (size * rank, size * (rank + 1)))
    sections = _sections(where, text, last, n)
    if last in ("k_proj", "v_proj"):
        heads = _number(where, text, "num_key_value_heads")
        if heads < tp and tp % heads == 0:  # then several GPUs have the same head
            tp, rank = heads, rank * heads // tp
    _whole_heads(where, text, last, tp)
    found, start = [], 0
    for section in sections:
        size = _quotient(where, "N", section, tp)
        found.append((start + size * rank, start + size * (rank + 1)))
        start += section
    return Part(tuple(found), (0, k))


def _sections(where: str, text: Mapping[str, Any], last: str, n: int) -> list[int]:
    keys = _HEADS.get(last, ())
    if len(keys) < 2:
        return [n]
    sections = [_number(where, text, key) * _number(where, text, _HEAD_SIZES[key]) for key in keys]
    if sum(sections) != n:
        raise UsageError(f"{where}: config.json asks for {sum(sections)} rows", "put the model's own config there")
    return sections


def _whole_heads(where: str, text: Mapping[str, Any], last: str, tp: int) -> None:
    for key in _HEADS.get(last, ()):
        _quotient(where, key, _number(where, text, key), tp)


def _number(where: str, text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if type(value) is not int or value < 1:
        raise UsageError(f"{where}: config.json has no number {key}", "put the model's own config there")
    return value


def _quotient(where: str, name: str, value: int, tp: int) -> int:
    if value % tp:
        raise IndivisibleError(f"{where}: {name} = {value} is not a multiple of {tp}", "choose another --tp")
    return value // tp


@dataclass(frozen=True)
class Divided:
    """A number of config.json that TP must divide.

    Attributes:
        key: in the language model's config, or behind ``vision.`` in that of the vision tower.
        what: it counts.
        source: where vLLM divides.
        verdict: of :data:`mxq.layouts.paths.VERDICTS`, where it does not divide.
    """

    key: str
    what: str
    source: str
    verdict: str = "refused"


_GDN = "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"
DIVIDED = (
    Divided("num_attention_heads", "attention heads", "vllm/model_executor/models/qwen3_next.py, Qwen3NextAttention"),
    Divided("linear_num_value_heads", "value heads of gated DeltaNet", f"{_GDN}, A_log"),
    # vLLM rounds down, as long as the heads' rows divide; half a head is nothing that works.
    Divided("linear_num_key_heads", "key heads of gated DeltaNet", f"{_GDN}, num_k_heads // tp_size", "wrong"),
    Divided("intermediate_size", "rows of gate_proj", "vllm/model_executor/models/qwen2_moe.py, Qwen2MoeMLP"),
    # Not with --mm-encoder-tp-mode data or --language-model-only, and then it does not matter.
    Divided("vision.num_heads", "heads of the vision tower", "vllm/model_executor/models/qwen2_5_vl.py", "note"),
    Divided("vision.intermediate_size", "rows of its linear_fc1", "vllm/model_executor/models/qwen3_vl.py", "note"),
)
"""Numbers that TP must divide, apart from key and value heads, the vocabulary and experts; absent keys do not count."""


def indivisible(text: Mapping[str, Any], vision: Mapping[str, Any], tp: int) -> list[tuple[Divided, int]]:
    """Return what of :data:`DIVIDED`, key and value heads and the vocabulary ``tp`` does not divide, and the number.

    Key and value heads may also be fewer than GPUs, each on equally many: ``QKVParallelLinear`` of
    ``vllm/model_executor/layers/linear.py``. The vocabulary is padded to a multiple of 64 first:
    ``VocabParallelEmbedding`` of ``layers/vocab_parallel_embedding.py``.
    """
    found = []
    for one in DIVIDED:
        key = one.key.removeprefix("vision.")
        value = (vision if key != one.key else text).get(key)
        if one.key == "intermediate_size" and "num_experts" in text:
            continue  # no layer of a MoE model has it
        if type(value) is int and value % tp:
            size = text.get(_HEAD_SIZES.get(key, ""))
            rows_too = type(size) is int and value * size % tp > 0
            found.append((replace(one, verdict="refused") if rows_too else one, value))
    heads = text.get("num_key_value_heads")
    if type(heads) is int and heads > 0 and heads % tp and tp % heads:
        source = "vllm/model_executor/layers/linear.py, QKVParallelLinear"
        found.append((Divided("num_key_value_heads", "key and value heads", source), heads))
    vocabulary = text.get("vocab_size")
    if type(vocabulary) is int and (padded := -(-vocabulary // _VOCABULARY) * _VOCABULARY) % tp:
        source = "vllm/model_executor/layers/vocab_parallel_embedding.py"
        found.append((Divided("vocab_size", "rows of the padded vocabulary", source), padded))
    return found
