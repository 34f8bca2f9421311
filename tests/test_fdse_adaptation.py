"""What each part of FDSE's adaptation gains, from a finished run."""

import json

from reproduce.measures.adaptation import adaptation
from reproduce.measures.command import main
from reproduce.measures.finished import rebuilt
from tests.conftest import fails, run_here

import pytest


@pytest.fixture(scope="module")
def lodo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "lodo"
    run_here("fdse", folder, "--protocol", "lodo", "--target", "d75", "--adapt-lr", 30)
    return folder


def test_the_run_s_own_adaptation_is_among_them(lodo, tmp_path):
    """With the run's own rate it is the accuracy that the run recorded."""
    recorded = json.loads((lodo / "result.json").read_text())["last"]["target"]
    run = rebuilt(lodo, "last")
    found = adaptation(run, [0, 30, 1e30])
    assert list(found) == ["none", "statistics", "lr 30", "lr 1e+30"]
    assert found["lr 30"] == recorded
    assert found["lr 1e+30"] is None
    assert len({found["none"], found["statistics"], recorded}) > 1
    main(["adaptation", str(lodo), "--which", "last", "--rates", "30", "--json", str(tmp_path / "n.json")])
    numbers = json.loads((tmp_path / "n.json").read_text())["runs"][0]
    assert numbers["target"] == "d75"
    assert numbers["accuracy"] == {"none": found["none"], "lr 30": recorded}


def test_what_it_cannot_measure(lodo, tmp_path, capsys):
    fails(capsys, 2, "--rates is 'fast'; expected learning rates", main,
          ["adaptation", str(lodo), "--rates", "fast"])
    run_here("fedavg", tmp_path / "fedavg")
    fails(capsys, 2, "is a run of fedavg with --protocol indomain; adaptation needs one of fdse", main,
          ["adaptation", str(tmp_path / "fedavg")])
