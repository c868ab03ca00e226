"""Where config.json and tensors contradict each other, by the name of the defect and with its cause where it is known.

What is packed is held against what an engine will take for packed, in both directions, and what engines merge must be
one thing or the other as a whole.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable

from mxq.checkpoint.quantization import Claims
from mxq.checkpoint.quark import Quark
from mxq.models import qwen35
from mxq.models.qwen35 import Role
from mxq.verify.claims import AutoRound
from mxq.verify.findings import Problem, about
from mxq.verify.opening import Opened

_NEVER_PACKED = frozenset({Role.ROUTER, Role.NORM, Role.EMBEDDING, Role.GDN_STATE, Role.VISION, Role.OTHER})
_SCALE = "_scale"


def loads_packed(tensor: str) -> bool:
    """Tell whether engines can load a weight of this name packed at all."""
    return qwen35.role(tensor) not in _NEVER_PACKED


def of(opened: Opened, claims: Claims, packed: Collection[str], modules: Collection[str]) -> list[Problem]:
    """Return the contradictions between what a config claims and what is there.

    Args:
        opened: the checkpoint.
        claims: what its config says.
        packed: the modules that are packed.
        modules: all modules that are matrices.
    """
    problems = [*_form(opened, claims), *_never_packed(opened, claims)]
    if not packed:
        problems.append(Problem("quantization_config claims MXFP4, but no weight is quantized"))
    asked = sorted((module for module in modules if _asked(module)), key=_by_number)
    claimed = {module for module in asked if claims.is_quantized(module)}
    problems += _not_packed([module for module in asked if module in claimed and module not in packed], claims)
    said, remedy = f"{claims.listing} tells", f"take it out of quantization_config.{claims.listing}"
    if isinstance(claims, AutoRound):  # where all that is in no block of block_name_to_quantize is not quantized
        said, remedy = "the config tells", "give it 4 bits in quantization_config.extra_config"
    problems += about(
        [module for module in asked if module in packed and module not in claimed],
        f"{{}} is quantized, but {said} vLLM that it is not",
        remedy,
        rewritable=_can_list(claims),
        many=f"{{}} are quantized, but {said} vLLM that they are not",
    )
    stored = _split(asked, packed)
    problems += about(stored, "{} is quantized in part; vLLM merges it and refuses", "quantize all of it or nothing")
    problems += about(
        [whole for whole in _split(asked, claimed) if whole not in stored],
        f"{claims.listing} names only a part of {{}}; vLLM merges it and refuses",
        f"name all of it in quantization_config.{claims.listing}, or nothing",
        rewritable=_can_list(claims),
    )
    return problems


def _can_list(claims: Claims) -> bool:
    """Tell whether :mod:`mxq.verify.fix` can write what is not quantized in this form."""
    return not isinstance(claims, AutoRound)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a key by which layer 2 comes before layer 10."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in name.split(".")]


def _asked(module: str) -> bool:
    return qwen35.role(f"{module}.weight") in qwen35.LINEAR


def _split(modules: Iterable[str], chosen: Collection[str]) -> list[str]:
    """Return what engines merge of which only a part is ``chosen``."""
    seen: dict[str, set[bool]] = defaultdict(set)
    for module in modules:
        whole = qwen35.experts_module(module) or qwen35.fused_module(module)
        if whole is not None:
            seen[whole].add(module in chosen)
    return [whole for whole, states in seen.items() if len(states) > 1]


def _form(opened: Opened, claims: Claims) -> Iterable[Problem]:
    """Yield what is wrong with the config by itself, and with the names of the packed weights."""
    raw = opened.checkpoint.config["quantization_config"]
    if isinstance(claims, Quark):
        yield from about(
            [key for key in ("export", "layer_type_quant_config") if not isinstance(raw.get(key), dict)],
            "quantization_config has no {}, without which vLLM does not load",
            "add it as Quark writes it",
            rewritable=True,
        )
    if not claims.globs:
        yield from about(
            [repr(entry) for entry in claims.entries if "*" in entry and not entry.startswith("re:")],
            f"the {claims.listing} entry {{}} is a glob, and matches nothing: vLLM takes exact names and re: patterns",
            "name the modules",
            rewritable=True,
            many=f"the {claims.listing} entries {{}} are globs, and match nothing: vLLM takes exact names and re: "
            "patterns",
        )
    wanted = claims.suffix
    stored = opened.checkpoint.stored
    weights = [name.removesuffix(_SCALE) for name in opened.checkpoint.tensors if _is_scale(name)]
    plain = [name for name in weights if name not in stored]
    wrong = plain if wanted == ".weight_packed" else [stored[name] for name in weights if name in stored]
    yield from about(
        wrong,
        f"{{}} is packed, and by a config of {claims.method} vLLM looks for a name that ends with {wanted}",
        "export it again, config and weights with the same tool",
    )


def _is_scale(name: str) -> bool:
    return name.endswith(_SCALE)


def _never_packed(opened: Opened, claims: Claims) -> Iterable[Problem]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in opened.checkpoint.tensors:
        weight = name.removesuffix(_SCALE)
        role = qwen35.role(weight)
        if _is_scale(name) and (not loads_packed(weight) or (role == Role.LM_HEAD and isinstance(claims, Quark))):
            found["conv1d" if ".conv1d." in weight else role].append(weight.removesuffix(".weight"))
    for kind, places in found.items():
        cause = ": Quark's file-to-file mode does so unless told" if kind == "conv1d" else ""
        yield from about(
            places,
            f"{{}} ({kind}) is quantized, and engines load that kind only unquantized{cause}",
            "convert it again with *conv1d* excluded" if kind == "conv1d" else "convert it again and leave it out",
        )


def _not_packed(places: list[str], claims: Claims) -> Iterable[Problem]:
    """Yield what the config claims and the file has not: four defects, of which three are the config's."""
    experts = [name for name in places if qwen35.experts_module(name) is not None]
    routed = [name for name in experts if qwen35.part(name) == "text"]
    heads = [name for name in experts if qwen35.part(name) == "mtp"]
    rest = [name for name in places if name not in set(experts)]
    listing = claims.listing
    yield from about(
        routed,
        "the routed experts {} are not quantized, though the config claims it: the tool passed them over in silence",
        "convert it again; Quark finds fused experts only with weight_converters=template.f2f_weight_converters",
    )
    yield from about(
        heads,
        f"the MTP experts {{}} are not quantized, but no {listing} entry says so: vLLM builds them as MXFP4, and "
        "speculative decoding fails or accepts nothing",
        rf"add re:.*mtp\..* to quantization_config.{listing}, and their names",
        rewritable=_can_list(claims),
    )
    for part in ("text", "mtp", "vision"):
        yield from about(
            [name for name in rest if qwen35.part(name) == part],
            f"{{}} is not quantized, but no {listing} entry says so: vLLM builds it as MXFP4",
            f"add it to quantization_config.{listing}",
            rewritable=_can_list(claims),
            many=f"{{}} are not quantized, but no {listing} entry says so: vLLM builds them as MXFP4",
        )
