"""Risks of the tested networks on the clients' images, and training losses over the rounds."""

from plumbing.errors import Stop
from reproduce.measures.finished import rebuilt
from reproduce.measures.risks import local_risks
from tests.finished_runs import labelled_runs, unlabelled_runs

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy


@pytest.fixture
def runs(tmp_path_factory):
    return labelled_runs(tmp_path_factory)


def test_risks_are_the_cross_entropies_of_the_tested_networks(runs):
    run = rebuilt(runs / "fdse-lodo")
    risks = local_risks(run)
    for client, model in run.tested():
        data = client.data
        if data.unseen:
            continue
        for part in (data.train, data.test):
            x, y = part.batch(torch.arange(len(part)))
            loss = cross_entropy(model.eval()(x), y).item()
            name = "train" if part is data.train else "test"
            assert risks["clients"][data.name][name] == pytest.approx(loss, rel=1e-5)


def test_local_risks_have_the_target_apart(runs):
    risks = local_risks(rebuilt(runs / "fdse-lodo"))
    assert risks["target"]["name"] == "d0" and "d0" not in risks["clients"]
    mean = np.mean([of_client["test"] for of_client in risks["clients"].values()])
    assert risks["mean"]["test"] == pytest.approx(mean)


def test_a_run_without_labels_has_no_risk(tmp_path_factory):
    with pytest.raises(Stop, match="was trained without labels"):
        local_risks(rebuilt(unlabelled_runs(tmp_path_factory) / "paper"))
