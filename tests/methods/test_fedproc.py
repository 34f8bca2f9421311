"""FedProc: the weight of its loss, and prototypes of the batches. Its rounds are in test_authors.py."""

import math

import common
from baselines import fedproc
from tests.conftest import parsed
from tests.three_clients import FLAGS, assert_near, federation

import pytest
import torch
from torch import tensor

NAME = "baselines.fedproc"


def test_weight_of_the_loss():
    """1 - t/T; with --fade 100 as in the authors' code, whatever T; --alpha is where it starts."""
    args = parsed(NAME, "--rounds", 300)
    assert [fedproc.alpha_of_round(args, t) for t in (0, 75, 150, 225)] == [1, 0.75, 0.5, 0.25]
    args = parsed(NAME, "--rounds", 300, "--fade", 100, "--alpha", 0.5)
    assert [fedproc.alpha_of_round(args, t) for t in (0, 50, 100, 299)] == [0.5, 0.25, 0, 0]


def test_l_gpc_by_hand():
    """Of cosines, whatever the lengths; a prototype that is 0 is none: -log of e / (e + 1)."""
    z, c = tensor([[3.0, 0.0]]), tensor([[2.0, 0.0], [0.0, 5.0], [0.0, 0.0]])
    assert float(fedproc.prototypical(z, c, tensor([0]))) == pytest.approx(math.log(1 + math.exp(-1)))


def test_prototypes_of_the_batches():
    """Of the features of all batches, as the network made them in training; here it hardly moves."""
    args = parsed(NAME, *FLAGS, "--prototypes", "batches", "--lr", 1e-9)
    server, clients, data = federation(fedproc, args)
    up = clients[0].train(server.download(0), 0)
    net, sums, counts = clients[0].net.train(), torch.zeros(10, 64), torch.zeros(10)
    for x, y in common.batches(data[0].train, args, 0, 0):
        for z, label in zip(net.features(x).detach(), y):
            sums[label] += z / z.norm()
            counts[label] += 1
    assert torch.equal(up["counts"], counts.long())
    assert_near(up["sums"], sums)
