"""Which GPUs quantize."""

import re

from mxq.errors import UsageError


def named(spec: str) -> tuple[str, ...]:
    """Return the devices, as torch calls them, that ``cpu`` (none), ``cuda`` (all) or ``cuda:0,2`` stands for.

    Raises:
        UsageError: it is none of these, or torch does not see such a GPU.
    """
    if spec == "cpu":
        return ()
    if not re.fullmatch(r"cuda(:\d{1,4}(,\d{1,4})*)?", spec):
        raise UsageError(f"--device {spec} is no device", "use cpu, cuda, cuda:0, or cuda:0,1")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise UsageError(f"--device {spec}: torch sees no GPU", "install torch for this GPU, or use --device cpu")
    wanted = [int(number) for number in spec[5:].split(",")] if ":" in spec else list(range(count))
    for number in wanted:
        if number >= count:
            raise UsageError(f"--device {spec}: torch sees {count} GPU(s), numbered from 0", "name one of those")
    return tuple(f"cuda:{number}" for number in dict.fromkeys(wanted))
