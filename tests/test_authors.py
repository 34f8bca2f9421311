"""Baselines against numbers that their authors' own functions gave (tests/fixtures/baselines.json)."""

import json

from baselines import feddg_ga, fedheal
from tests.conftest import ROOT, parsed

import torch
from torch import nn
from torch.testing import assert_close

AUTHORS = json.loads((ROOT / "tests" / "fixtures" / "baselines.json").read_text())


def test_six_adjustments_of_feddg_ga():
    """In a row, of three clients, with the code's falling step."""
    theirs = AUTHORS["feddg_ga"]
    args = parsed("baselines.feddg_ga", "--rule", "code", "--rounds", theirs["rounds"])
    assert args.step_size == theirs["step_size"]
    a = torch.full((3,), 1 / 3, dtype=torch.float64)
    for adjustment in theirs["adjustments"]:
        gap = torch.tensor(adjustment["gaps"], dtype=torch.float64)
        a = feddg_ga.adjusted(a, gap, feddg_ga.step_of_round(args, adjustment["t"], 3), args.rule)
        assert_close(a.tolist(), adjustment["weights"], atol=1e-14, rtol=0)


def test_weights_of_fedheal_with_some_clients():
    """Over five rounds, in each of which two or all of three clients take part; client 2 comes late."""
    theirs = AUTHORS["fedheal"]
    args = parsed("baselines.fedheal", "--beta", theirs["beta"])
    server = fedheal.Server(args, nn.Linear(1, 1), 3)
    for of_round in theirs["rounds"]:
        for k in of_round["clients"]:
            updates = [torch.tensor(v, dtype=torch.float64) for v in of_round["updates"][str(k)]]
            server.d[k] = fedheal.distance(updates)
            assert abs(server.d[k] - of_round["distances"][str(k)]) < 1e-12
        weights = server.weights(of_round["clients"])
        assert_close(weights.tolist(), of_round["weights"], atol=1e-12, rtol=0)
