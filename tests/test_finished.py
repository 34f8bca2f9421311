"""Finished runs put together again: they have the accuracies that the runs recorded."""

import json

import common
from reproduce.measures.finished import labels_of, numbers_of, rebuilt
from tests.finished_runs import labelled_runs

import pytest


@pytest.fixture
def runs(tmp_path_factory):
    return labelled_runs(tmp_path_factory)


@pytest.mark.parametrize("name", ["fedavg-indomain", "fdse-indomain", "fedavg-lodo", "fdse-lodo"])
def test_federation_has_the_recorded_accuracies(runs, name):
    result = json.loads((runs / name / "result.json").read_text())
    for which in ("best", "last"):
        run = rebuilt(runs / name, which)
        accuracies = {}
        for client, model in run.tested():
            test = client.data.test
            accuracies[client.data.name] = common.correct(model, test, run.args) / len(test)
        target = {}
        if "lodo" in name:
            target = {"d0": result[which]["target"]}
        assert accuracies == result[which]["clients"] | target


def test_the_numbers_of_a_round():
    """Accuracies and the means of what the clients that trained have logged."""
    entry = {"round": 2, "val": {"ALL": 0.5}, "test": {"ALL": 0.25, "AVG": 0.75, "clients": {"a": 1.0}},
             "target": 0.1, "clients": {"a": {"loss": 1.0, "bytes_up": 3}, "b": {"loss": 2.0}}}
    assert numbers_of(entry) == {"val": 0.5, "ALL": 0.25, "AVG": 0.75, "target": 0.1, "loss": 1.5,
                                 "bytes_up": 3.0}
    linear = {"round": 1, "target": 0.5, "linear": {"d0": {"0.1": 0.25}}, "clients": {}}
    assert numbers_of(linear) == {"target": 0.5, "d0 0.1": 0.25}


def test_labels_say_in_what_runs_differ():
    keys = [{"method": "fdse", "target": "d0", "seed": 0}, {"method": "fdse", "target": "all", "seed": 1},
            {"method": "fedsr", "variant": "fedl2r", "lr": 0.2}]
    assert labels_of(keys, ("seed",)) == ["FDSE, target d0", "FDSE, target all", "FedSR (fedl2r)"]
    assert labels_of(keys[:2])[0] == "FDSE, seed 0, target d0"
