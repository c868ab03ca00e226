"""From a bf16 checkpoint to an MXFP4 one: recipe, plan, conversion, verification."""
