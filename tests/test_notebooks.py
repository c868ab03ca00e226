"""Every notebook runs from top to bottom, is committed without outputs, and draws what it says."""

import base64
import os
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
FIGURES = {
    "01_dflash_on_mxfp4.ipynb": 2,
    "02_aiter_layouts.ipynb": 5,
    "03_throughput.ipynb": 3,
    "04_is_it_preserved.ipynb": 3,
    "05_where_the_time_goes.ipynb": 7,
    "06_recipes.ipynb": 2,
}


def test_all_notebooks_are_tested_and_committed_without_outputs() -> None:
    assert {path.name for path in NOTEBOOKS.glob("*.ipynb")} == FIGURES.keys()
    for path in NOTEBOOKS.glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs"), f"{path.name}: clear the outputs before committing"


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_notebook(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient import NotebookClient

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    work = tmp_path / "work"
    work.mkdir()
    (work / "data").symlink_to(NOTEBOOKS / "data")
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(work)}}).execute(env=dict(os.environ))
    pictures = [
        output.data["image/png"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == FIGURES[name]
    for number, picture in enumerate(pictures):
        data = base64.b64decode(picture)
        assert data.startswith(b"\x89PNG")
        assert len(data) > 10_000
        (tmp_path / f"{name}-{number}.png").write_bytes(data)
