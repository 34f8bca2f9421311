"""FedAvg's wiring: two rounds recomputed in plain torch, with every switch away from its neutral value."""

import common
import fedavg
from plumbing.runfolder import copied
from tests.conftest import parsed
from tests.plain_torch import in_double
from tests.three_clients import (CLOSE, FLAGS, assert_tested, assert_trained, federation, mean, shares_of,
                                 train_by_hand)

import pytest
from torch.testing import assert_close

ROUNDS = ((0, 1, 2), (2, 1))  # the clients of the first and of the second round


@pytest.mark.parametrize("average", ["samples", "uniform"])
def test_two_rounds_by_hand(average):
    """Every parameter and every statistic of the uploads and of the server, after each round."""
    args = parsed("fedavg", *FLAGS, "--momentum", 0.8, "--average", average)
    server, clients, data = federation(fedavg, args)
    w, norms = copied(server.w), []
    for t, chosen in enumerate(ROUNDS):
        uploads, hands = {}, []
        for k in chosen:
            uploads[k] = clients[k].train(copied(server.download(k)), t)
            hand, losses, of_client = train_by_hand(w, args, data[k], t, k)
            assert_trained(clients[k], uploads[k], hand, losses, "n")
            hands.append(hand)
            norms += of_client
        server.update(uploads, t)
        w = mean(hands, shares_of(chosen, average))
        assert_close(in_double(server.w), w, **CLOSE)
        assert_tested(server, clients, [w] * 3)
    assert min(norms) < args.clip < max(norms)  # some steps are clipped, some are not


def test_alexnets_traffic():
    """Table 4 of FDSE: 49.52 MiB each way with the BN buffers."""
    net = common.Net(common.alexnet_bn(3, 224), 1024, 10)
    mib = common.nbytes(fedavg.Server(fedavg.Args(), net, 4).download(0)) / 2 ** 20
    assert round(mib, 2) == 49.52
