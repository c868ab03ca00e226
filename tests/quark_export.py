"""What the real amd-quark makes of models, in a process of its own: its import takes seconds, and it logs and warns.

``python quark_export.py MODEL OUT [PATTERN ...]``, any number of times with ``--`` between: what Quark's public API
exports of MODEL with its scheme mxfp4 goes to OUT; modules that a pattern matches are left out, or if there is none
those of Quark's own template for the architecture.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

Job = tuple[Path, Path, tuple[str, ...]]


def export(jobs: Iterable[Job]) -> None:
    """Run jobs (model, output, patterns) in one process."""
    words = [word for model, out, patterns in jobs for word in ("--", str(model), str(out), *patterns)]
    # Else torch.compile makes kernels for what takes a tenth of a second here.
    env = os.environ | {"QUARK_DISABLE_COMPILE": "1"}
    done = subprocess.run([sys.executable, __file__, *words[1:]], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def main(words: list[str]) -> None:
    import torch
    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.export.api import export_safetensors
    from quark.torch.utils.llm.model_preparation import preprocess_for_quantization
    from transformers import AutoModelForImageTextToText

    for between, group in itertools.groupby(words, "--".__eq__):
        if between:
            continue
        path, out, *patterns = group
        model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16)
        preprocess_for_quantization(model)  # without which experts stored fused stay bf16, and nothing says so
        template = LLMTemplate.get(model.config.model_type)
        quantizer = ModelQuantizer(
            template.get_config(scheme="mxfp4", **({"exclude_layers": patterns} if patterns else {}))
        )
        export_safetensors(quantizer.freeze(quantizer.quantize_model(model, None)), out)


if __name__ == "__main__":
    main(sys.argv[1:])
