"""Risks of the tested networks on the clients' images, and training losses over the rounds."""

from reproduce.measures.finished import rebuilt
from reproduce.measures.risks import local_risks
from tests.finished_runs import labelled_runs

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
