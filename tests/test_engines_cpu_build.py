"""What makes vLLM's build for processors importable, in an environment with packages that behave as PyPI's do."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import mxq

pytestmark = pytest.mark.slow

# As torchvision does: load what it was built for if that works, then say how its operators behave, which must exist.
TORCHVISION = """
import torch
try:
    torch.ops.load_library({library!r})
except OSError:
    pass
torch.library.register_fake("torchvision::nms")(lambda dets, scores, iou_threshold: None)
"""
TORCHAUDIO = "raise OSError('Could not load this library: _torchaudio.so')"


class Environment:
    """A virtual environment with torch and what a test puts there."""

    def __init__(self, root: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
        self.python = root / "bin" / "python"
        self.site = Path(sysconfig.get_path("purelib", vars={"base": str(root)}))
        below = [path for path in sys.path if path.endswith("site-packages")]
        (self.site / "zz_below.pth").write_text("\n".join(below))

    def put(self, name: str, code: str) -> Path:
        package, facts = self.site / name, self.site / f"{name}-1.0.dist-info"
        package.mkdir()
        facts.mkdir()
        (package / "__init__.py").write_text(code)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (facts / "INSTALLER").write_text("pip\n")
        records = [f"{name}/__init__.py,,", *(f"{facts.name}/{part},," for part in ("METADATA", "INSTALLER", "RECORD"))]
        (facts / "RECORD").write_text("\n".join(records))
        return package

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": str(Path(mxq.__file__).parent.parent)}
        return subprocess.run([self.python, *arguments], capture_output=True, text=True, env=env)

    def arrange(self, *arguments: str) -> str:
        result = self.run("-m", "mxq.engines.cpu_build", *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def imports(self, name: str) -> bool:
        return self.run("-c", f"import {name}").returncode == 0


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "venv")


def test_operators_are_declared_once_and_taken_back(environment: Environment) -> None:
    environment.put("torchvision", TORCHVISION.format(library="/of/another/torch/_C.so"))
    (environment.site / "torchvision" / "_C.so").write_bytes(b"built for CUDA")
    before = set(environment.site.iterdir())
    assert not environment.imports("torchvision")

    assert "torchvision: its operators are declared" in environment.arrange()
    assert environment.imports("torchvision")
    assert {path.name for path in set(environment.site.iterdir()) - before} <= {
        "mxq_torchvision_operators.py",
        "mxq_torchvision_operators.pth",
        "__pycache__",
    }
    assert "nothing to do" in environment.arrange()

    assert "no longer declared" in environment.arrange("--undo")
    assert not environment.imports("torchvision")
    assert not any(path.suffix == ".pth" for path in set(environment.site.iterdir()) - before)


def test_other_processes_do_not_import_torch_for_it(environment: Environment) -> None:
    environment.put("torchvision", TORCHVISION.format(library="/of/another/torch/_C.so"))
    environment.arrange()
    said = environment.run("-c", "import sys; print({'torch', 'pathlib', 'typing'} & set(sys.modules))").stdout
    assert said == "set()\n"


def test_what_cannot_be_imported_and_is_not_needed_is_uninstalled(environment: Environment) -> None:
    package = environment.put("torchaudio", TORCHAUDIO)
    environment.put("torchcodec", "")
    done = environment.arrange()
    assert "torchaudio 1.0: uninstalled" in done
    assert "torchcodec" not in done
    assert not package.exists()
    assert "pip install --no-deps torchaudio" in environment.arrange("--undo")


def test_another_error_is_said_and_nothing_done(environment: Environment) -> None:
    environment.put("torchvision", "import no_such_module")
    result = environment.run("-m", "mxq.engines.cpu_build")
    assert result.returncode == 1
    assert "No module named 'no_such_module'" in result.stderr
    assert not list(environment.site.glob("mxq_*"))
