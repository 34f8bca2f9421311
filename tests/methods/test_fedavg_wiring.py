"""FedAvg's wiring: two rounds recomputed in plain torch, with every switch away from its neutral value."""

import common
import fedavg
from plumbing.run.payloads import nbytes
from tests.plain_torch import in_double
from tests.three_clients import Beside, mean, shares_of

import pytest

ROUNDS = ((0, 1, 2), (2, 1))  # the clients of the first and of the second round


@pytest.mark.parametrize("average", ["samples", "uniform"])
def test_two_rounds_by_hand(average):
    """Every parameter and every statistic of the uploads and of the server, after each round."""
    of = Beside(fedavg, "--momentum", 0.8, "--average", average)
    w = in_double(of.server.w)
    for t, chosen in enumerate(ROUNDS):
        hands = of.play(t, chosen, [w] * 3)
        w = mean(hands, shares_of(chosen, average))
        of.check(w)
    of.some_were_clipped()


def test_alexnets_traffic():
    """Table 4 of FDSE: 49.52 MiB each way with the BN buffers."""
    net = common.Net(common.alexnet_bn(3, 224), 1024, 10)
    mib = nbytes(fedavg.Server(fedavg.Args(), net, 4).download(0)) / 2 ** 20
    assert round(mib, 2) == 49.52
