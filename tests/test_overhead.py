"""FLOPs against hand counts, and what a client has spent until an accuracy."""

import common
from plumbing.errors import Stop
from reproduce.measures.finished import rebuilt
from reproduce.measures.overhead import cost_to_reach, flops, network_cost, training_flops
from tests.finished_runs import labelled_runs, written_run

import pytest
import torch
from torch import nn

SIZES = {"a": 10, "b": 20}


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


def test_the_cost_of_fdses_network_is_the_papers():
    """FDSE, Table 4: parameters, FLOPs and communication as printed."""
    cost = network_cost("fdse", ("--dataset", "officecaltech"))
    assert cost["parameters"] == pytest.approx(0.65, abs=0.005)
    assert cost["flops"] == pytest.approx(2.24, rel=0.1)
    assert cost["mib"] == pytest.approx(24.87, rel=0.01)


def test_cost_by_hand(tmp_path):
    run = written_run(tmp_path / "a", [0.5, None, 0.6, 0.9], epochs=2)
    cost = cost_to_reach(run, 0.6, 1e12, SIZES)
    # a trains three rounds of 2 x 10 images, b two of 2 x 20: 140 images and 5 exchanges of 10 bytes for two
    assert cost == {"round": 3, "tflops": pytest.approx(70), "gb": pytest.approx(25e-9), "memory_mib": 12,
                    "gpu_memory_mib": None}
    assert cost_to_reach(run, 0.5, 1e12, SIZES)["round"] == 1
    assert cost_to_reach(run, 0.4, 1e12, SIZES, by="ALL")["round"] == 4
    assert cost_to_reach(run, 0.95, 1e12, SIZES) is None


def test_cost_of_steps_by_hand(tmp_path):
    run = written_run(tmp_path / "b", [0.5], steps=3)  # of 4 + 4 + 2 and of 4 + 4 + 4 images
    assert cost_to_reach(run, 0.5, 1e12, SIZES)["tflops"] == pytest.approx(11)


@pytest.mark.parametrize("wrong", [dict(accuracy=60), dict(accuracy=0), dict(by="target"), dict(by="x")])
def test_a_cost_that_cannot_be_told(tmp_path, wrong):
    run = written_run(tmp_path / "a", [0.5, None, 0.6, 0.9])
    right = dict(folder=run, accuracy=0.5, flops_per_image=1, sizes=SIZES)
    with pytest.raises(Stop):
        cost_to_reach(**right | wrong)
