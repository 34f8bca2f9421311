"""FLOPs against hand counts, and what a client has spent until an accuracy."""

import common
from reproduce.measures.finished import history, rebuilt
from reproduce.measures.overhead import cost_to_reach, flops, training_flops
from tests.finished_runs import labelled_runs

import pytest
import torch
from torch import nn


@pytest.fixture
def runs(tmp_path_factory):
    return labelled_runs(tmp_path_factory)


def test_flops_by_hand():
    """Two FLOPs for a multiply-add; the first layer's input has no gradient. Groups divide a convolution's
    products."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, groups=8), nn.Flatten(),
        nn.Linear(16 * 36, 5))
    B = 4
    first = 2 * B * 36 * 8 * 3 * 9
    grouped = 2 * B * 36 * 16 * 1 * 9
    linear = 2 * B * 16 * 36 * 5
    before = common.state(net)
    assert flops(net, (B, 3, 6, 6)) == (first + grouped + linear, 2 * first + 3 * (grouped + linear))
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    assert net[0].weight.grad is None


@pytest.mark.parametrize("method", ["fedavg", "fdse"])
def test_training_flops_are_those_of_a_step(runs, method):
    """FedAvg trains by one forward and backward pass; FDSE's L_Con adds no products, so its step is that of
    its network."""
    run = rebuilt(runs / f"{method}-indomain")
    server, client = run.federation.server, run.federation.clients[0]
    _, step = flops(client.model(server.download(0)), (16, 1, 28, 28))
    assert training_flops(rebuilt(runs / f"{method}-indomain", "last")) == pytest.approx(step / 16)


def test_cost_by_hand(runs):
    """Of both rounds: 32 images of six clients in each, and the bytes that the rounds have logged."""
    run = rebuilt(runs / "fedavg-indomain", "last")
    entries = history(runs / "fedavg-indomain")
    cost = cost_to_reach(run, entries[-1]["test"]["AVG"])
    done = entries[:cost["round"]]
    exchanged = sum(log["bytes_up"] + log["bytes_down"] for one in done for log in one["clients"].values())
    assert cost["tflops"] == pytest.approx(32 * len(done) * training_flops(run) / 1e12)
    assert cost["gb"] == pytest.approx(exchanged / 6 / 1e9) and cost["gpu_memory_mib"] is None
    assert cost_to_reach(run, 1.1) is None
