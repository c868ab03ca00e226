#!/usr/bin/env python3
"""Record the runs that come with mxq, example:dense and example:moe: every arm of the testbed, in process.

    python tools/record_examples.py --work /tmp/examples    # an hour of two cores; stopped, the same command goes on

Both models are measured side by side, each in a process of its own: plain, MTP and DFlash at K=3, 7 and 15, bf16 and
MXFP4, and what `--explain` adds. The run directories are packed into mxq/evaluate/examples. The same files give the
same archive.
"""

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

from mxq import testbed
from mxq.evaluate import read_run, recorded

PROMPTS, MAX_TOKENS = 32, 128
_LEFT_OUT = {".lock"}


def main() -> None:
    """Measure both models and pack them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    codes = [process.wait() for process in [_measure(args.work, name) for name in testbed.NAMES]]
    if any(codes):
        sys.exit(f"a run ended early: see {args.work}/*.log")
    for name in testbed.NAMES:
        pack(args.work / name, recorded.archive(recorded.PREFIX + name))


def _measure(work: Path, name: str) -> "subprocess.Popen[bytes]":
    """Start measuring; paths are relative, so that nothing of the machine is in the run."""
    mxq = [sys.executable, "-c", "import sys; sys.argv[0] = 'mxq'; from mxq.cli import main; sys.exit(main())"]
    converted = f"{name}-mxfp4"
    with (work / f"{name}.log").open("ab") as log:
        if not (work / converted).exists():
            subprocess.run([*mxq, "quantize", f"testbed:{name}", converted], cwd=work, check=True, stderr=log)
        return subprocess.Popen(
            [
                *(*mxq, "eval", "--bf16", f"testbed:{name}", "--mxfp4", converted, "--spec", "mtp", "--spec", "dflash"),
                *("-k", "3", "-k", "7", "-k", "15", "--limit", str(PROMPTS), "--max-tokens", str(MAX_TOKENS)),
                *("--explain", "--out", name),
            ],
            cwd=work,
            stdout=log,
            stderr=log,
        )


def pack(run: Path, archive: Path) -> None:
    """Pack a finished run."""
    if not read_run(run).finished:
        sys.exit(f"{run} is not finished")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive, "w") as out:
        for file in sorted(path for path in run.rglob("*") if path.is_file() and path.name not in _LEFT_OUT):
            out.writestr(zipfile.ZipInfo(str(file.relative_to(run))), file.read_bytes(), zipfile.ZIP_DEFLATED, 9)
    print(f"{archive.name}: {archive.stat().st_size / 1e6:.2f} MB", file=sys.stderr)


if __name__ == "__main__":
    main()
