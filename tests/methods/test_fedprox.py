"""FedProx: the term by hand, two rounds in plain torch, and FedAvg as its limit."""

import common
from baselines import fedprox
from plumbing.runfolder import copied
from tests.conftest import parsed
from tests.plain_torch import in_double
from tests.three_clients import (CLOSE, FLAGS, ROUNDS, assert_trained, federation, mean, shares_of,
                                 train_by_hand)

import pytest
from torch import tensor
from torch.testing import assert_close

NAME = "baselines.fedprox"


def test_eq_2_by_hand():
    """(3^2 + 4^2) + 2^2; without the squares it would be 5 + 2, with the norm of both 5.39."""
    w_k, w = [tensor([3.0, 4.0]), tensor([[1.0]])], [tensor([0.0, 0.0]), tensor([[3.0]])]
    assert fedprox.proximal(w_k, w) == 29


@pytest.mark.parametrize("average", ["samples", "uniform"])
def test_rounds_by_hand(average):
    """Every parameter and statistic of uploads and server, with a term as large as the loss."""
    flags = ["--momentum", 0.8, "--mu", 4, "--average", average]
    args = parsed(NAME, *FLAGS, *flags)
    server, clients, data = federation(fedprox, args)
    w, norms = in_double(server.w), []
    for t, chosen in enumerate(ROUNDS):
        uploads, hands = {}, []
        for k in chosen:
            terms = []

            def term(x, z, leaves, w=w, terms=terms):
                distance = sum((leaf - w[name]).square().sum() for name, leaf in leaves.items())
                terms.append(4 / 2 * float(distance.detach()))
                return 4 / 2 * distance

            uploads[k] = clients[k].train(copied(server.download(k)), t)
            hand, losses, of_client = train_by_hand(w, args, data[k], t, k, term)
            assert_trained(clients[k], uploads[k], hand, losses, "n")
            assert_close(float(clients[k].log["proximal"]), sum(terms) / 3, **CLOSE)
            hands.append(hand)
            norms += of_client
        server.update(uploads, t)
        w = mean(hands, shares_of(chosen, average))
        assert_close(in_double(server.w), w, **CLOSE)
        assert_close(in_double(common.state(clients[0].model(server.download(0)))), w, **CLOSE)
    assert min(norms) < args.clip < max(norms)  # some steps are clipped, some are not
