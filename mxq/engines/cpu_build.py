"""Make vLLM's build for processors importable: ``python -m mxq.engines.cpu_build``, once, after it was installed.

It wants torchvision, torchaudio and torchcodec, and what PyPI has of them is built for CUDA. Beside a CPU torch none of
them can be imported, and then neither can the models of transformers and vLLM. Those from where the CPU torch
came from can, and with them there is nothing to do here. Otherwise:

* torchvision stays, and its operators are declared when it is imported (:mod:`mxq.engines.torchvision_operators`): two
  files in site-packages, which ``--undo`` removes.
* torchaudio and torchcodec, which nothing needs for text, are uninstalled; ``--undo`` says how to get them back.

What can be imported is left alone, so that a second time changes nothing.
"""

import argparse
import importlib.metadata
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from mxq.engines import torchvision_operators
from mxq.errors import MxqError

_MODULE = "mxq_torchvision_operators"
_TIMEOUT_S = 300.0
_UNUSED = ("torchaudio", "torchcodec")


def arrange(site: Path) -> list[str]:
    """Do what is needed in this Python's environment, whose packages are in ``site``; return what was done, in words.

    Raises:
        MxqError: torchvision fails for another reason, or a package cannot be removed.
    """
    done = []
    if installed("torchvision"):
        error = import_error("torchvision")
        if error is not None:
            if "torchvision::nms" not in error:
                raise MxqError(
                    f"torchvision cannot be imported, and not for want of its operators: {error}",
                    "install the torchvision that belongs to this torch",
                )
            _write(site)
            error = import_error("torchvision")
            if error is not None:
                _remove(site)
                raise MxqError(f"torchvision cannot be imported with its operators declared either: {error}")
            done.append(f"torchvision: its operators are declared when it is imported ({site / _MODULE}.py)")
    for name in _UNUSED:
        if installed(name) and import_error(name) is not None:
            version = importlib.metadata.version(name)
            _pip("uninstall", "--yes", name)
            done.append(f"{name} {version}: uninstalled, as it cannot be imported beside this torch")
    return done


def undo(site: Path) -> list[str]:
    """Take back what :func:`arrange` did, as far as that is in files; return what was done, in words."""
    done = ["torchvision: its operators are no longer declared"] if _remove(site) else []
    missing = [name for name in _UNUSED if not installed(name)]
    if missing:
        done.append(f"{' and '.join(missing)}: for them, pip install --no-deps {' '.join(missing)}")
    return done


def installed(name: str) -> bool:
    """Whether a distribution of this name is in this Python's environment."""
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def import_error(module: str) -> str | None:
    """Return the last line of what importing ``module`` in a fresh Python says, None if it can be imported."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"its import takes more than {_TIMEOUT_S:g} s"
    if result.returncode == 0:
        return None
    lines = result.stderr.strip().splitlines()
    return lines[-1] if lines else f"its import ends Python with code {result.returncode}"


def _files(site: Path) -> tuple[Path, Path]:
    return site / f"{_MODULE}.py", site / f"{_MODULE}.pth"


def _write(site: Path) -> None:
    module, path = _files(site)
    try:
        module.write_bytes(Path(torchvision_operators.__file__).read_bytes())
        path.write_text(f"import {_MODULE}\n")
    except OSError as error:
        raise MxqError(f"{module} cannot be written: {error.strerror}", "use a virtual environment of yours") from None


def _remove(site: Path) -> bool:
    module, path = _files(site)
    found = module.exists() or path.exists()
    # First what imports the other.
    path.unlink(missing_ok=True)
    module.unlink(missing_ok=True)
    return found


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["it says nothing"]
        raise MxqError(f"pip {' '.join(arguments)} failed: {lines[-1]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m mxq.engines.cpu_build", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--undo", action="store_true", help="take it back")
    wants = parser.parse_args(arguments)
    site = Path(sysconfig.get_path("purelib"))
    try:
        done = undo(site) if wants.undo else arrange(site)
    except MxqError as error:
        print(f"error: {error.message}" + (f"\n  -> {error.hint}" if error.hint else ""), file=sys.stderr)
        return 1
    print("\n".join(done) or ("nothing to undo" if wants.undo else "nothing to do: what is installed can be imported"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
