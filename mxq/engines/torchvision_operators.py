"""Lets torchvision's Python be imported where its operators cannot be loaded: a CUDA build beside a CPU torch.

torchvision refuses to be imported unless its operators are known to torch, and transformers and vLLM import it to look
at pictures that a text model never gets. So, when it is first imported and its library does not load, the two
operators that it asks for are declared: they exist, and cannot be called.

:mod:`mxq.engines.cpu_build` copies this file into site-packages, where every Python of the environment reads it as it
starts. It must therefore be small, need nothing, and do nothing where torchvision works.
"""

import sys

_KEPT: list[object] = []  # a declaration lasts as long as its library object


class _Finder:
    """Declares the operators when torchvision is looked for, and is gone."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            declare()


def declare() -> None:
    """Declare torchvision's operators unless its library, which has them, can be loaded."""
    import importlib.machinery  # all of these are in any process that imports torch, and slow to import in others
    from pathlib import Path

    spec = importlib.machinery.PathFinder.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    import torch

    for file in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(file))
        except OSError:
            continue
        return
    operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(operators)


def install() -> None:
    """Wait for torchvision to be imported."""
    sys.meta_path.insert(0, _Finder())


if __name__ == "mxq_torchvision_operators":  # the copy
    install()
