"""Write the testbed's calibration text: conversations of the five families, none of them a held-out prompt.

python tools/calibration_text.py        # writes mxq/testbed/calibration.jsonl, the same bytes every time
"""

import json
import random
from collections.abc import Iterator

from testbed_training import text

from mxq import testbed

PER_FAMILY = 96
HELD_OUT = 96  # as many as training held out


def lines() -> Iterator[str]:
    """Yield the lines of the file, a family after the other."""
    known = {example.prompt for examples in text.held_out(HELD_OUT).values() for example in examples}
    for family, make in text.families().items():
        rng = random.Random(f"calibration-{family}")
        left = PER_FAMILY
        while left:
            example = make(rng)
            if example.prompt not in known:
                known.add(example.prompt)
                left -= 1
                yield json.dumps({"prompt": example.prompt, "response": example.response})


if __name__ == "__main__":
    testbed.calibration_text().write_text("".join(f"{line}\n" for line in lines()))
