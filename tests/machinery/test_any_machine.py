"""What is rendered is a function of records, tables and claims: another machine writes the same bytes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from reproduce import figures
from reproduce.cells import filled
from reproduce.rendering import BLOCKS, MADE_BY, marks
from tests.committed import RECORDS, TABLES
from tests.conftest import ROOT

import pytest

# Another terminal, place and taste than anybody's.
ANOTHER = {"LC_ALL": "C", "PYTHONUTF8": "0", "TZ": "Asia/Kathmandu", "COLUMNS": "40", "PYTHONHASHSEED": "1"}
MATPLOTLIBRC = "figure.facecolor: yellow\nfont.family: serif\nfont.size: 17\naxes.grid: True\n"
DRAWN = "results/figures/fedgala-fig2b.png"  # of few records


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """What another machine writes; see tests/any_machine.py."""
    def make(out: Path) -> None:
        shutil.copytree(ROOT / "results" / "figures", out / "results" / "figures")
        readme = (ROOT / "README.md").read_bytes()
        for first, last in map(marks, BLOCKS):
            readme = re.sub(first + b".*" + last, first + b"\n" + last, readme, flags=re.DOTALL)
        (out / "README.md").write_bytes(readme)
        (out / "results" / "README.md").write_text(MADE_BY)
        settings = out.with_name("matplotlibrc")
        settings.write_text(MATPLOTLIBRC)
        env = os.environ | ANOTHER | {"MATPLOTLIBRC": str(settings), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-m", "tests.any_machine", str(out)], cwd=ROOT, env=env,
                              capture_output=True, text=True)
        assert not done.returncode, done.stderr
    make(tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


def test_the_results_are_those_of_the_records(elsewhere, tmp_path, request):
    """What is in results/, in the notes, and between the README's marks is what rendering gives; the site is
    what it is here."""
    written = [path.relative_to(elsewhere) for path in elsewhere.rglob("*.*") if path.suffix != ".png"]
    written = [path for path in written if path.parts[0] != "site"]
    assert len(written) > 30
    for path in written:
        assert (elsewhere / path).read_bytes() == (ROOT / path).read_bytes(), path
    for folder in ("tables", "figures", "claims"):  # what has no records any more is taken away
        names = [{path.name for path in (at / "results" / folder).iterdir()} for at in (elsewhere, ROOT)]
        assert names[0] == names[1]
    check_figures(elsewhere, tmp_path)  # here, as each rendering takes long
    if (elsewhere / "site").exists():  # there are the libraries that make pages
        same_files(elsewhere / "site", request.getfixturevalue("site"))


def check_figures(elsewhere: Path, tmp_path: Path) -> None:
    """They follow no matplotlibrc: all are as they were committed, if this environment's matplotlib draws one
    so."""
    (table,) = [table for table in TABLES if table.id == "fedgala-fig2b"]
    figures.draw(table, filled(table, RECORDS, "paper"), tmp_path / "here.png", "paper")
    drawn = (tmp_path / "here.png").read_bytes()
    assert (elsewhere / DRAWN).read_bytes() == drawn
    if (ROOT / DRAWN).read_bytes() != drawn:
        return  # the committed figures are of another matplotlib
    for path in (elsewhere / "results").rglob("*.png"):
        assert path.read_bytes() == (ROOT / path.relative_to(elsewhere)).read_bytes(), path.name


def same_files(there: Path, here: Path) -> None:
    names = [{path.relative_to(at) for path in at.rglob("*.*")} for at in (there, here)]
    assert names[0] == names[1]
    for name in names[0]:
        assert (there / name).read_bytes() == (here / name).read_bytes(), name
