"""Finished runs put together again: they have the accuracies that the runs recorded."""

import json

import common
from plumbing.errors import Stop
from plumbing.files import load_file
from reproduce.measures import federation
from reproduce.measures.finished import labels, numbers_of, rebuilt
from tests.finished_runs import changed_copy, labelled_runs, written_run

import pytest
import torch


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
            accuracies[client.data.name] = common.correct(model, [test], run.args)[0] / len(test)
        target = {}
        if "lodo" in name:
            target = {"d0": result[which]["target"]}
        assert accuracies == result[which]["clients"] | target


def test_a_federation_knows_its_clients_targets_and_classes(runs):
    lodo, indomain = federation(runs / "fdse-lodo"), federation(runs / "fdse-indomain", "last")
    assert (lodo.K, lodo.names[5:], lodo.has_target, len(lodo.classes)) == (5, ["d0"], True, 10)
    assert (indomain.K, len(indomain.names), indomain.has_target) == (6, 6, False)
    assert [client.data.unseen for client in lodo.clients.values()] == [False] * 5 + [True]
    with pytest.raises(Stop, match="which is 'first'; expected best or last"):
        federation(runs / "fdse-lodo", "first")


def copy_with(run, folder, change: dict):
    """A copy of a run whose identity is changed, in its result and in its state; None leaves a field out."""
    result = json.loads((run / "result.json").read_text())
    changed = result["args"] | change
    result["args"] = {name: value for name, value in changed.items() if value is not None}
    changed_copy(run, folder, "result.json", json.dumps(result).encode())
    saved = load_file(folder / "best.pt", "checkpoint")
    torch.save(saved | {"identity": json.dumps(result["args"])}, folder / "best.pt")
    return folder


def test_older_and_newer_records(runs, tmp_path):
    """A field that the record lacks takes its default, one that Args lacks is left out."""
    folder = copy_with(runs / "fedavg-indomain", tmp_path / "a", {"momentum": None, "future": 3})
    assert federation(folder).args.momentum == 0


def test_a_record_with_an_argument_of_another_type_is_refused(runs, tmp_path):
    folder = copy_with(runs / "fedavg-indomain", tmp_path / "a", {"lr": "fast"})
    with pytest.raises(Stop, match="lr is 'fast'"):
        federation(folder)


@pytest.mark.parametrize("name", ["os", "common", "reproduce_tables", "reproduce", "tests", "../fedavg",
                                  "nowhere", "", None, ["fedavg"]])
def test_a_foreign_module_is_refused(tmp_path, name):
    run = written_run(tmp_path / "a", [0.5], method=name)
    result = json.loads((run / "result.json").read_text()) | {"method": name}
    (run / "result.json").write_text(json.dumps(result))
    with pytest.raises(Stop, match="is no method of this repository"):
        federation(run)


def test_labels_of_equal_runs_tell_them_apart(runs, tmp_path):
    """By the arguments in which they differ, else by their folders."""
    same = changed_copy(runs / "fdse-lodo", tmp_path / "copy", "checkpoint.pt", None)
    assert labels([runs / "fdse-lodo", runs / "fedavg-lodo"]) == ["FDSE", "FedAvg"]
    assert labels([runs / "fdse-lodo", same]) == ["FDSE [fdse-lodo]", "FDSE [copy]"]
    of_protocols = labels([runs / "fdse-lodo", runs / "fdse-indomain"])
    assert of_protocols == ["FDSE, protocol lodo, target d0", "FDSE, protocol indomain, target all"]


def test_the_numbers_of_a_round():
    """Accuracies and the means of what the clients that trained have logged."""
    entry = {"round": 2, "val": {"ALL": 0.5}, "test": {"ALL": 0.25, "AVG": 0.75, "clients": {"a": 1.0}},
             "target": 0.1, "clients": {"a": {"loss": 1.0, "bytes_up": 3}, "b": {"loss": 2.0}}}
    assert numbers_of(entry) == {"val": 0.5, "ALL": 0.25, "AVG": 0.75, "target": 0.1, "loss": 1.5,
                                 "bytes_up": 3.0}
    linear = {"round": 1, "target": 0.5, "linear": {"d0": {"0.1": 0.25}}, "clients": {}}
    assert numbers_of(linear) == {"target": 0.5, "d0 0.1": 0.25}
