"""The files that docs/own.md shows, run as it says: a method, data and a network of one's own."""

import re

from reproduce.benchmark import entry_of
from tests.conftest import fails, run_here, same_metrics, write_files
from tests.page_outputs import files_of

import pytest

FILES = files_of("own")
SMALL = ["--scale", "smoke", "--precision", "fp32", "--no-figures", "--image-size", "8"]


@pytest.fixture
def place(tmp_path):
    write_files(tmp_path, FILES)
    return tmp_path


def test_the_method_is_interrupted_and_goes_on(place, capsys):
    """It keeps its moments: a run that stops after a round has in the end the history of a whole one."""
    module = entry_of(str(place / "coral.py")).module

    def run(folder: str, *flags) -> None:
        flags = [*SMALL, "--rounds", "3", "--out", str(place / folder), *flags]
        module.run(module.Server, module.Client, module.arguments(flags))
    run("whole")
    fails(capsys, 0, "coral: stopped after round 2 of 3", run, "part", "--stop-after", "2")
    run("part")
    assert same_metrics(place / "whole", place / "part")


def test_without_its_term_it_is_fedavg(place):
    module = entry_of(str(place / "coral.py")).module
    run_here("fedavg", place / "fedavg", *SMALL)
    for gamma in ("0", "1"):
        settings = module.arguments([*SMALL, "--gamma", gamma, "--out", str(place / gamma)])
        module.run(module.Server, module.Client, settings)
    assert curve(place / "0") == curve(place / "fedavg") != curve(place / "1")


def curve(folder) -> list[str]:
    """The losses of a run, round by round."""
    return re.findall(r'"loss": [\d.e-]+', (folder / "metrics.jsonl").read_text())
