"""FedAvg: the local step and the average by hand, and what travels."""

import common
import fedavg

import pytest
from torch import nn, tensor


@pytest.mark.parametrize("average,want", [("samples", 3), ("uniform", 2)])
def test_average_by_hand(average, want):
    """n_k 1 and 3: (1*0 + 3*4)/4 = 3; uniform: 2. Integer buffers are rounded."""
    zero = {"w": {"a": tensor([0.0]), "b": tensor(0)}, "n": tensor(1)}
    four = {"w": {"a": tensor([4.0]), "b": tensor(4)}, "n": tensor(3)}
    args = fedavg.Args(average=average)
    server = fedavg.Server(args, nn.Linear(1, 1), 2)
    server.update({0: zero, 1: four}, 0)
    assert server.w["a"].item() == want
    assert server.w["b"].item() == want


def test_alexnet_size_and_traffic():
    """Table 4 of FDSE: 1.30e7 numbers, 49.52 MiB each way with the BN buffers."""
    net = common.Net(common.alexnet_bn(3, 224), 1024, 10)
    numbers = sum(p.numel() for p in net.parameters())
    assert numbers == 12_974_154
    server = fedavg.Server(fedavg.Args(), net, 4)
    mib = common.nbytes(server.download(0)) / 2 ** 20
    assert round(mib, 2) == 49.52
