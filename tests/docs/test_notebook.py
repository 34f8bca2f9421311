"""docs/notebook.ipynb, cell by cell in one process, with runs of smoke scale."""

import shlex
import subprocess
import sys

from tests.conftest import ROOT, read_json

import pytest

EVERY = read_json(ROOT / "docs" / "notebook.ipynb")["cells"]
CELLS = ["".join(cell["source"]) for cell in EVERY if cell["cell_type"] == "code"]


def in_a_shell(line: str, place) -> str:
    """What a line behind ! prints; a run has a few rounds and no figure."""
    words = shlex.split(line.removeprefix("!").partition(" | ")[0])
    assert words[0] == "python"
    if words[1].endswith(".py"):
        words += ["--rounds", "2", "--limit", "40", "--no-figures"]
        words[1] = str(ROOT / words[1])
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""}
    return subprocess.run([sys.executable, *words[1:]], cwd=place, env=env, capture_output=True, text=True,
                          check=True).stdout


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """Its runs end, its figure is there, and it shows ten true labels and a table of predictions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names, said = {}, []
    for cell in CELLS:
        if cell.startswith("!"):
            said.append(in_a_shell(cell, tmp_path))
        elif not cell.startswith("%"):
            exec(cell, names)
    assert "best validation round" in said[0] and "best validation round" in said[1]
    assert (tmp_path / "runs" / "notebook" / "compare.png").stat().st_size > 10_000
    assert len(names["predicted"]) == 10
    assert "healthy" in said[-1] and "north" in said[-2]


def test_its_links_lead_somewhere():
    for cell in EVERY:
        for link in "".join(cell["source"]).split("](")[1:]:
            assert (ROOT / "docs" / link.partition(")")[0]).exists()
