"""The files that docs/own.md shows, run as it says: a method, data and a network of one's own."""

import re
import subprocess
import sys

from reproduce.benchmark import entry_of
from reproduce.tables import read_tables
from tests.conftest import ROOT, run_here
from tests.page_outputs import files_of

import pytest

PAGE = (ROOT / "docs/own.md").read_text()
FILES = files_of("own")


@pytest.fixture
def place(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def started(place, *flags) -> str:
    """What coral.py prints, as a program of its own in an empty folder."""
    words = [sys.executable, "coral.py", "--scale", "smoke", "--rounds", "3", "--out", "run", *flags]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""}
    return subprocess.run(words, cwd=place, env=env, capture_output=True, text=True, check=True).stdout


def test_the_method_is_interrupted_and_goes_on(place):
    """It keeps its moments: the run that a program began has in the end the history of the other."""
    module = entry_of(str(place / "coral.py")).module
    flags = ["--scale", "smoke", "--rounds", "3", "--out", str(place / "run")]
    module.run(module.Server, module.Client, module.arguments(flags))
    whole = (place / "run/metrics.jsonl").read_bytes()
    assert "coral" in started(place, "--no-resume", "--stop-after", "2")
    module.run(module.Server, module.Client, module.arguments(flags))
    assert (place / "run/metrics.jsonl").read_bytes() == whole


def test_without_its_term_it_is_fedavg(place):
    module = entry_of(str(place / "coral.py")).module
    flags = ["--scale", "smoke", "--precision", "fp32", "--rounds", "2", "--image-size", "8"]
    run_here("fedavg", place / "fedavg", *flags)
    for gamma in ("0", "1"):
        settings = module.arguments([*flags, "--gamma", gamma, "--out", str(place / gamma)])
        module.run(module.Server, module.Client, settings)
    assert curve(place / "0") == curve(place / "fedavg") != curve(place / "1")


def curve(folder) -> list[str]:
    """The losses of a run, round by round."""
    return re.findall(r'"loss": [\d.e-]+', (folder / "metrics.jsonl").read_text())


def test_one_call_has_the_methods_of_table_1():
    """Those of the benchmark's command are the rows of the table that the paper prints."""
    methods = re.search(r"--methods '(.*?)'", PAGE.split("one call:")[1])[1].split(",")
    named = {(entry.module.__name__, " ".join(entry.flags)) for entry in map(entry_of, methods)}
    table = next(table for table in read_tables() if table.id == "fdse-1")
    printed = {(row.module, row.flags) for block in table.blocks for row in block.rows if not row.ours}
    assert named == printed and len(printed) == 13
