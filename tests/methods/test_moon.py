"""MOON: rounds by hand in plain torch, its loss against the formula, and where it is FedAvg."""

from baselines import moon
from plumbing.runfolder import copied
from tests.conftest import parsed
from tests.plain_torch import body_in_evaluation, in_double
from tests.three_clients import (CLOSE, FLAGS, ROUNDS, assert_tested, assert_trained, federation, mean,
                                 shares_of, train_by_hand)

import pytest
from torch.testing import assert_close

NAME = "baselines.moon"


def l_con_by_hand(z, z_glob, z_prev, tau):
    """Eq. (3) as it is written."""
    def exp_sim(other):
        return ((z * other).sum(1) / z.norm(dim=1) / other.norm(dim=1) / tau).exp()
    return -(exp_sim(z_glob) / (exp_sim(z_glob) + exp_sim(z_prev))).log().mean()


@pytest.mark.parametrize("evaluated", ["aggregated", "trained"])
def test_rounds_by_hand(evaluated):
    """Uploads, the server's model and what each client is tested with, over three rounds: each client is
    compared with its own model of the last round in which it trained, a late one with the initial w."""
    args = parsed(NAME, *FLAGS, "--momentum", 0.8, "--mu", 3, "--tau", 0.2, "--evaluated", evaluated)
    server, clients, data = federation(moon, args, moon.build)
    w = in_double(server.w)
    previous, norms = [w, w, w], []  # a late client is compared with the initial w
    for t, chosen in enumerate(ROUNDS):
        uploads, hands = {}, []
        for k in chosen:
            cons = []

            def more(x, z, leaves, k=k, t=t, w=w, cons=cons):
                if t == 0:
                    return 0
                l_con = l_con_by_hand(z, body_in_evaluation(x, w), body_in_evaluation(x, previous[k]), 0.2)
                cons.append(float(l_con.detach()))
                return 3 * l_con

            uploads[k] = clients[k].train(copied(server.download(k)), t)
            hand, losses, of_client = train_by_hand(w, args, data[k], t, k, more)
            assert_trained(clients[k], uploads[k], hand, losses, "n")
            assert ("contrastive" in clients[k].log) == (t > 0)
            if cons:
                assert_close(float(clients[k].log["contrastive"]), sum(cons) / 3, **CLOSE)
            hands.append(hand)
            norms += of_client
        for k, hand in zip(chosen, hands):
            previous[k] = hand
        server.update(uploads, t)
        w = mean(hands, shares_of(chosen))
        assert_close(in_double(server.w), w, **CLOSE)
        assert_tested(server, clients, previous if evaluated == "trained" else [w] * 3)
    assert min(norms) < args.clip < max(norms)  # some steps are clipped, some are not
