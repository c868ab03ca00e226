"""Write tests/data/llm_compressor_mxfp4.json: what llm-compressor makes of the tests' random targets.

    python tools/llm_compressor_case.py

Needs llm-compressor beside mxq's own requirements (made with llmcompressor 0.14.0.1, compressed-tensors 0.19.0).
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

OUT = ROOT / "tests" / "data" / "llm_compressor_mxfp4.json"
# What llm-compressor would quantize, or refuses to, and mxq's recipe leaves as it is.
IGNORE = ["re:.*mtp.*", "re:.*visual.*", "re:.*embed_tokens", "lm_head", "re:.*norm.*", "re:.*conv1d"]
IGNORE_DENSE = [*IGNORE, "re:.*in_proj_[ab]$"]
IGNORE_MOE = [*IGNORE, "re:.*linear_attn.*", "re:.*self_attn.*", "re:.*shared_expert.*", "re:.*mlp.gate$"]


def main() -> None:
    """Convert both targets by both schemes; keep the configs, and names, types and shapes of what is packed."""
    import tiny
    from llmcompressor.entrypoints.model_free import model_free_ptq
    from safetensors import safe_open

    content: dict[str, Any] = {
        "versions": {name: version(name) for name in ("llmcompressor", "compressed-tensors")},
        "configs": {},
        "packed": {},
    }
    with tempfile.TemporaryDirectory() as work:
        for kind, ignore in (("dense", IGNORE_DENSE), ("moe", IGNORE_MOE)):
            source = tiny.write_target(Path(work) / kind, moe=kind == "moe")
            for scheme in ("MXFP4", "MXFP4A16"):
                out = Path(work) / f"{kind}-{scheme}"
                model_free_ptq(str(source), str(out), scheme=scheme, ignore=ignore, device="cpu")
                content["configs"][scheme] = json.loads((out / "config.json").read_text())["quantization_config"]
            with safe_open(out / "model.safetensors", "pt") as file:
                found = {name: file.get_slice(name) for name in sorted(file.keys())}
                content["packed"][kind] = {
                    name: f"{found[name].get_dtype()} {found[name].get_shape()}"
                    for name in found
                    if name.endswith(("_packed", "_scale"))
                }
    OUT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
