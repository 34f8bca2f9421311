"""PartialFed: rounds by hand in plain torch, with fixed and learned strategies, and where it is FedAvg."""

import common
from baselines import partialfed
from plumbing.run.runfolder import copied
from tests.conftest import parsed
from tests.plain_torch import adam_step, body_of_smallcnn_bn, in_double, leaves_of, linear, log_probability
from tests.three_clients import (FLAGS, ROUNDS, Beside, assert_near, federation, mean, shares_of,
                                 train_by_hand)

import pytest
import torch
from torch.testing import assert_close

NAME = "baselines.partialfed"
BN = ("body.1.", "body.5.")
KEPT = {"bn+head": (*BN, "head."), "bn": BN, "head": ("head.",)}
LAYERS = ("body.0.", "body.1.", "body.4.", "body.5.", "body.10.", "head.")


@pytest.mark.parametrize("strategy", ["bn+head", "bn", "head"])
def test_rounds_by_hand(strategy):
    """Uploads, the server's model and what each client is tested with, over three rounds with clients that
    miss one: they begin with the kept layers of their last one. A late one loads all."""
    of = Beside(partialfed, "--momentum", 0.8, "--strategy", strategy)
    w, own = in_double(of.server.w), {}
    for t, chosen in enumerate(ROUNDS):
        hands = of.play(t, chosen, [partly(w, own.get(k), strategy) for k in range(3)])
        own |= dict(zip(chosen, hands))
        w = mean(hands, shares_of(chosen))
        of.check(w, [partly(w, own.get(k), strategy) for k in range(3)])
    of.some_were_clipped()


def partly(w, own, strategy):
    """The global model with a client's own values of the layers that this strategy keeps."""
    if own is None:
        return w
    return w | {name: v for name, v in own.items() if name.startswith(KEPT[strategy])}


def scores_by_hand(scores, adam, w, own, args, data, t, k):
    """Four steps on the scores [L, 2]: Gumbel noise, the layers that win, and the gradient by the softmax."""
    temperature = max(2 * 0.5 ** t, 0.8)
    for done, (x, y) in enumerate(common.batches(data.val, args, t, k)):
        if done == 4:
            break
        noise = -torch.empty(6, 2).exponential_().log().double()
        soft = ((scores + noise) / temperature).softmax(1)
        u = (soft == soft.amax(1, keepdim=True)).double().requires_grad_()
        mixed = {}
        for name in leaves_of(w):
            l = next(i for i, layer in enumerate(LAYERS) if name.startswith(layer))
            mixed[name] = u[l, 0] * w[name] + u[l, 1] * own[name]
        z = body_of_smallcnn_bn(x.double(), mixed, dict(w))
        loss = -log_probability(linear(z, mixed, "head"), y).mean()
        g, = torch.autograd.grad(loss, u)
        gradient = soft * (g - (g * soft).sum(1, keepdim=True)) / temperature
        scores = scores - 0.3 * adam_step(adam, "scores", gradient)
    return scores


def test_adaptive_by_hand():
    """Scores, strategies and uploads of one client over three rounds; it then keeps some layers and loads
    others."""
    flags = ["--strategy", "adaptive", "--strategy-lr", 0.3, "--strategy-steps", 4, "--temperature", 2,
             "--temperature-decay", 0.5, "--temperature-floor", 0.8, "--clip", 4]
    args = parsed(NAME, *FLAGS, *flags)
    longer = parsed(NAME, *FLAGS, *flags, "--steps", 4)
    server, clients, data = federation(partialfed, args)
    for k in range(3):
        data[k].val = data[k - 1].train
    w, scores, own, strategies = in_double(server.w), torch.zeros(6, 2).double(), None, set()
    adam = {}  # one for all rounds
    for t in range(3):
        uploads = {k: clients[k].train(copied(server.download(k)), t) for k in (0, 1)}
        if own is not None:
            scores = scores_by_hand(scores, adam, w, own, longer, data[0], t, 0)
        assert_close(clients[0].scores.double(), scores, atol=1e-3, rtol=1e-3)
        keeps = [layer for layer, (loaded, kept) in zip(LAYERS, scores.tolist()) if kept > loaded]
        strategies.add(tuple(keeps))
        start = w | {name: own[name] for name in w if name.startswith(tuple(keeps))}
        own, _, _ = train_by_hand(start, args, data[0], t, 0)
        assert_near(in_double(uploads[0]["w"]), own)
        server.update(uploads, t)
        w = in_double(server.w)
        model = clients[0].model(server.download(0))
        tested = w | {name: own[name] for name in w if name.startswith(tuple(keeps))}
        assert_near(in_double(common.state(model)), tested)
    assert any(0 < len(keeps) < 6 for keeps in strategies)
