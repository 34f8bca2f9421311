"""FedDyn: rounds by hand in plain torch, objectives with a known optimum, and where it is FedAvg."""

import common
from baselines import feddyn
from plumbing.run.payloads import nbytes
from tests.conftest import parsed
from tests.plain_torch import in_double, is_trained
from tests.three_clients import FLAGS, ROUNDS, Beside, assert_near, mean, same, shares_of

import pytest
import torch
from torch import nn, tensor

ALPHA = 0.4


def test_rounds_by_hand():
    """Uploads, g_k, h and the model over three rounds. Client 1 misses the last one and client 0 the second:
    h is the mean of the g_k of all clients nevertheless, and is what the mean of the models is shifted by."""
    of = Beside(feddyn, "--momentum", 0.8, "--alpha", ALPHA)
    w = in_double(of.server.w)
    trained = [name for name in w if is_trained(name)]
    zero = {name: torch.zeros_like(w[name]) for name in trained}
    g = [zero, zero, zero]
    for t, chosen in enumerate(ROUNDS):
        uploads, hands = {}, []
        for k in chosen:

            def more(x, y, z, leaves, w=w, g_k=g[k]):
                terms = 0
                for name in trained:
                    terms = terms - (g_k[name] * leaves[name]).sum()
                    terms = terms + ALPHA / 2 * ((leaves[name] - w[name]) ** 2).sum()
                return {"": (1, terms)}

            uploads[k], hand = of.train(t, k, w, more, also=())
            g[k] = {name: g[k][name] - ALPHA * (hand[name] - w[name]) for name in trained}
            assert_near(in_double(of.clients[k].g_k), g[k])
            hands.append(hand)
        of.server.update(uploads, t)
        h = mean(g, [1 / 3] * 3)
        of_round = mean(hands, shares_of(chosen, "uniform"))
        w = dict(of_round)
        for name in trained:
            w[name] = w[name] - h[name] / ALPHA
        assert_near(in_double(of.server.h), h)
        of.check(w)
        assert not same(of.server.w, of.server.tested(0)["w"])
        for client in of.clients:
            tested = client.model(of.server.tested(client.k))
            assert_near(in_double(common.state(tested)), of_round)
    download = of.server.download(0)
    assert nbytes(download) == nbytes(uploads[chosen[0]])  # the mean does not travel
    of.server.args = parsed("baselines.feddyn", *FLAGS, "--evaluated", "theta")
    assert same(of.server.tested(0)["w"], of.server.w)
    of.some_were_clipped()


@pytest.mark.parametrize("rounds", [[(0, 1, 2)], [(0, 1), (1, 2), (0, 2)]])
def test_it_finds_the_common_optimum(rounds):
    """Losses a/2 (theta - b)^2, each minimum taken exactly: theta goes to the minimum of their sum, g_k to
    the gradients there, which FedAvg does not reach; also if a client misses each round."""
    a, b = [1.0, 2.0, 5.0], [0.0, 3.0, -1.0]
    optimum = sum(u * v for u, v in zip(a, b)) / sum(a)
    net = nn.Linear(1, 1, bias=False).double()
    server = feddyn.Server(feddyn.Args(alpha=0.5), net, 3)
    g = [0.0, 0.0, 0.0]
    for t in range(1500):
        theta_t, uploads = server.w["weight"].item(), {}
        for k in rounds[t % len(rounds)]:
            theta_k = (a[k] * b[k] + g[k] + 0.5 * theta_t) / (a[k] + 0.5)  # the gradient there is 0
            g[k] -= 0.5 * (theta_k - theta_t)
            assert g[k] == pytest.approx(a[k] * (theta_k - b[k]), abs=1e-9)
            uploads[k] = {"w": {"weight": tensor([[theta_k]], dtype=torch.float64)}}
        server.update(uploads, t)
    assert server.w["weight"].item() == pytest.approx(optimum, abs=1e-3)
    assert sum(g) == pytest.approx(0, abs=1e-2)
