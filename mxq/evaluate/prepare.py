"""From what the user asked for to a plan: everything is looked up, fingerprinted and checked before anything runs."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxq import progress
from mxq.checkpoint import Checkpoint, open_headers, resolve
from mxq.checkpoint.beside import DEQUANTIZED
from mxq.checkpoint.fitting import check_dflash
from mxq.checkpoint.fp8 import decodable
from mxq.engines import Sampling
from mxq.errors import UsageError
from mxq.evaluate import caveats
from mxq.evaluate.fingerprint import fingerprint
from mxq.evaluate.matrix import METHODS, Arm, Model, Plan, Settings, TokenizedWorkload, arms
from mxq.testbed import PREFIX
from mxq.workloads import PUBLISHED, ChatTemplate, Workload, load

_ANSWER = "."
"""Stands for the answers before a later turn where templates are compared and lengths are estimated."""

_WARM_UP = "Please get ready: this message only warms up the machine."

_SAME_IN_BOTH = (
    *("hidden_size", "num_hidden_layers", "vocab_size", "layer_types", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
)
_ARCHITECTURE = ("model_type", *(name for name in _SAME_IN_BOTH if name != "layer_types"))


@dataclass(frozen=True)
class Request:
    """What the user asked for. Models and workloads are specs; ``targets`` maps "bf16" and "mxfp4" to a model.

    ``limit``, ``turns`` and ``data_dir`` are those of :func:`mxq.workloads.load`. ``concurrencies`` are numbers of
    requests in flight, and everything is measured ``repeats`` times. ``arms``, if given, are all that is measured;
    ``methods`` and ``budgets`` are then theirs.
    """

    targets: Mapping[str, str]
    methods: Sequence[str]
    budgets: Sequence[int]
    workloads: Sequence[str]
    drafter: str | None = None
    limit: int | None = None
    turns: int | None = None
    data_dir: Path | None = None
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 512
    thinking: bool = False
    dtype: str = "bfloat16"
    device: str = "cpu"
    concurrencies: Sequence[int] = (1,)
    repeats: int = 1
    engine_args: Sequence[str] = ()
    engine_env: Sequence[str] = ()
    arms: Sequence[Arm] | None = None


def prepare(request: Request, *, engine: str, semantics: int) -> tuple[Plan, ChatTemplate]:
    """Return the plan and the chat template that turns its answers into text.

    Raises UsageError for a request that cannot be right: no target, a target in the wrong role, two targets that are
    not one model or do not see the same tokens, a drafter that is missing or another target's, a bad prompt set, a
    prompt that is too long; MxqError for a drafter that is broken. No weights are loaded.
    """
    _check_numbers(request)
    for arm in request.arms or ():
        if arm.target not in request.targets:
            raise UsageError(f"{arm.label} is to be measured, and there is no --{arm.target}", "say which model it is")
    workloads = _load_workloads(request)
    headers = {role: decodable(open_headers(spec, DEQUANTIZED)) for role, spec in request.targets.items()}
    _check_roles(headers)
    _check_same_model(headers)  # before hundreds of gigabytes are downloaded for nothing
    checkpoints = {role: decodable(Checkpoint.open(resolve(spec))) for role, spec in request.targets.items()}
    drafter, warnings = _drafter(request, checkpoints)
    foreign = [*caveats.of_conversion(checkpoints), *caveats.of_simulation(checkpoints), *caveats.of_fp8(checkpoints)]
    foreign += caveats.of_few({w.name: w.conversations for w in workloads}, request.concurrencies)
    for warning in foreign:
        progress.note(f"warning: {warning}")
    templates = {role: ChatTemplate(c.path, thinking=request.thinking) for role, c in checkpoints.items()}
    template = next(iter(templates.values()))
    tokenized = [_tokenize(workload, templates) for workload in workloads]
    text_config = _text_config(next(iter(checkpoints.values())).config)
    _check_lengths(tokenized, template, request.max_tokens, text_config.get("max_position_embeddings"))
    if request.thinking and not template.knows_thinking:
        progress.note("note: the chat template has no thinking mode; --thinking changes nothing")
    concurrencies = tuple(sorted(set(request.concurrencies)))
    plan = Plan(
        targets={
            role: Model(request.targets[role], checkpoint.path, fingerprint(checkpoint.path))
            for role, checkpoint in checkpoints.items()
        },
        drafter=drafter,
        arms=tuple(request.arms or arms(list(checkpoints), request.methods, request.budgets)),
        workloads=tuple(tokenized),
        warm_ups=tuple(itertools.islice(_warm_ups(template, tokenized), concurrencies[-1])),
        concurrencies=concurrencies,
        repeats=request.repeats,
        settings=Settings(
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            thinking=request.thinking,
            template_sha256=template.sha256,
            eos_token_ids=_eos_token_ids(next(iter(checkpoints.values())).path, text_config),
            dtype=request.dtype,
            device=request.device,
            engine=engine,
            semantics=semantics,
            engine_args=tuple(request.engine_args),
            engine_env=tuple(request.engine_env),
        ),
        warnings=(*foreign, *warnings),
        architecture={name: text_config[name] for name in _ARCHITECTURE if name in text_config},
    )
    return plan, template


def _check_numbers(request: Request) -> None:
    if not request.targets:
        raise UsageError("no target", "give --bf16 MODEL, --mxfp4 MODEL, or both")
    for method in request.methods:
        if method not in METHODS:
            raise UsageError(f"unknown method {method!r}", f"use one of {', '.join(METHODS)}")
    if any(budget < 1 for budget in request.budgets):
        raise UsageError("a budget of less than one draft token", "K is at least 1; plain decoding always runs too")
    if any(method != "ar" for method in request.methods) and not request.budgets:
        raise UsageError("no budget for speculative decoding", "give -k, such as -k 15")
    if not request.concurrencies or min(*request.concurrencies, request.repeats) < 1:
        raise UsageError("less than one request in flight, or less than one repeat", "both are at least 1")
    if request.max_tokens < 1:
        raise UsageError(f"at most {request.max_tokens} tokens per answer", "it must be at least 1")
    sampling = request.sampling
    if not 0 <= sampling.temperature < math.inf or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise UsageError(
            f"sampling with temperature {sampling.temperature}, top-p {sampling.top_p}, top-k {sampling.top_k}",
            "temperature and top-k are at least 0 and finite, top-p is above 0 and at most 1",
        )


def _load_workloads(request: Request) -> list[Workload]:
    if request.data_dir is not None and not PUBLISHED.keys() & set(request.workloads):
        raise UsageError(
            f"--data-dir {request.data_dir} and no published workload", f"give --workload {', '.join(PUBLISHED)}"
        )
    workloads = [
        load(spec, request.limit, data_dir=request.data_dir, turns=request.turns) for spec in request.workloads
    ]
    names = [workload.name for workload in workloads]
    if not names:
        raise UsageError("no workload", "give --workload NAME or FILE")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two workloads are called {name!r}", "give each once, and files different names")
    return workloads


def _check_roles(checkpoints: Mapping[str, Checkpoint]) -> None:
    for role, checkpoint in checkpoints.items():
        quantized = checkpoint.quantization is not None
        if quantized and role == "bf16":
            raise UsageError(f"{checkpoint.path} is quantized, so it is not the bf16 target", "pass it as --mxfp4")
        if not quantized and role == "mxfp4" and not caveats.is_simulation(checkpoint):
            raise UsageError(
                f"{checkpoint.path} is not quantized, so it is not the MXFP4 target",
                "convert it: `mxq quantize`; or give what `mxq dequantize` made",
            )


def _check_same_model(checkpoints: Mapping[str, Checkpoint]) -> None:
    configs = [_text_config(checkpoint.config) for checkpoint in checkpoints.values()]
    for name in _SAME_IN_BOTH:
        values = [config.get(name) for config in configs]
        if any(value != values[0] for value in values):
            raise UsageError(
                f"the two targets are different models: {name} is {values[0]} and {values[1]}",
                "compare a model with its own conversion",
            )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text: Mapping[str, Any] = config.get("text_config", config)
    return text


def _tokenize(workload: Workload, templates: Mapping[str, ChatTemplate]) -> TokenizedWorkload:
    token_ids: list[tuple[int, ...] | None] = []
    for prompt in workload.prompts:
        messages = prompt.conversation([_ANSWER] * (prompt.turn - 1))
        try:
            encoded = {role: template.encode(messages) for role, template in templates.items()}
        except UsageError as error:
            raise UsageError(f"{workload.name}, prompt {prompt.id}: {error.message}", error.hint) from None
        first = next(iter(encoded.values()))
        if any(ids != first for ids in encoded.values()):
            raise UsageError(
                f"{workload.name}, prompt {prompt.id}: the two targets do not see the same tokens",
                "their tokenizers or chat templates differ: copy them from one model to the other",
            )
        token_ids.append(tuple(first) if prompt.turn == 1 else None)
    return TokenizedWorkload(workload, tuple(token_ids))


def _check_lengths(
    workloads: Sequence[TokenizedWorkload], template: ChatTemplate, max_tokens: int, longest: int | None
) -> None:
    if longest is None:
        return
    for workload in workloads:
        for prompt, sent in zip(workload.workload.prompts, workload.token_ids, strict=True):
            ids = template.encode(prompt.conversation([_ANSWER] * (prompt.turn - 1))) if sent is None else sent
            if len(ids) + prompt.turn * max_tokens > longest:
                answers = "an answer" if prompt.turn == 1 else f"{prompt.turn} answers"
                raise UsageError(
                    f"{workload.workload.name}, prompt {prompt.id}: {len(ids)} tokens and {answers} of up to "
                    f"{max_tokens} exceed the model's {longest} positions",
                    "shorten the prompt or lower --max-tokens",
                )


def _drafter(request: Request, checkpoints: Mapping[str, Checkpoint]) -> tuple[Model | None, list[str]]:
    if "dflash" not in request.methods:
        return None, []
    spec = request.drafter
    if spec is None:
        named = [target for target in request.targets.values() if target.startswith(PREFIX)]
        if not named:
            raise UsageError("DFlash needs a drafter", "give --drafter MODEL: a DFlash drafter made for this target")
        spec = f"{named[0]}-dflash"
    path = resolve(spec)
    opened = Checkpoint.open(path)
    configs = [check_dflash(opened, c.path, _text_config(c.config)) for c in checkpoints.values()]
    return Model(spec, path, fingerprint(path)), caveats.of_budgets(spec, configs[0].block_size, request.budgets)


def _eos_token_ids(path: Path, text_config: Mapping[str, Any]) -> tuple[int, ...]:
    found = text_config.get("eos_token_id")
    generation = path / "generation_config.json"
    if generation.exists():
        try:
            found = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id", found)
        except (ValueError, AttributeError) as error:
            raise UsageError(f"cannot read {generation}: {error}", "copy it from the original model") from None
    ids = found if isinstance(found, list) else [found]
    return tuple(sorted(token for token in ids if isinstance(token, int)))


def _warm_ups(template: ChatTemplate, workloads: Sequence[TokenizedWorkload]) -> Iterator[tuple[int, ...]]:
    """Yield prompts, no two alike, that no workload has; they differ from the start, so that no cache has them."""
    measured = {ids for workload in workloads for ids in workload.token_ids}  # a later turn is no warm-up's equal
    for number in itertools.count(1):
        text = _WARM_UP if number == 1 else f"{number}. {_WARM_UP}"
        if (ids := tuple(template.encode([("user", text)]))) not in measured:
            yield ids
