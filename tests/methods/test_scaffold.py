"""SCAFFOLD: rounds by hand in plain torch, what c_k and c are, and the settings in which it is FedAvg."""

import common
from baselines import scaffold
from plumbing.runfolder import copied
from tests.conftest import parsed
from tests.plain_torch import body_of_smallcnn_bn, in_double, leaves_of, linear, log_probability
from tests.three_clients import (CLOSE, FLAGS, ROUNDS, assert_tested, assert_trained, federation, mean,
                                 shares_of)

import torch
from torch.testing import assert_close

NAME = "baselines.scaffold"


def train_by_hand(w, c_k, c, args, data, t, k):
    """Three corrected steps: the model, the mean over the steps of the clipped gradient with its weight
    decay, which is what c_k becomes, the losses and the gradients' norms."""
    w = in_double(w)
    lr = args.lr * args.lr_decay ** t
    total, losses, norms = {}, [], []
    for x, y in common.batches(data.train, args, t, k):
        leaves = leaves_of(w)
        z = body_of_smallcnn_bn(x.double(), leaves, w)
        loss = -log_probability(linear(z, leaves, "head"), y).mean()
        losses.append(float(loss.detach()))
        gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
        norms.append(float(sum(g.square().sum() for g in gradients.values()).sqrt()))
        for name, g in gradients.items():
            g = g * min(1, args.clip / norms[-1]) + args.weight_decay * w[name]
            total[name] = total.get(name, 0) + g
            w[name] = w[name] - lr * (g - c_k[name] + c[name])
    return w, {name: g / len(losses) for name, g in total.items()}, losses, norms


def test_rounds_by_hand():
    """Uploads, c_k, c and the model over three rounds. Client 1 misses the last one and client 0 the second:
    their c_k stay as they were, and c is the mean over all clients nevertheless."""
    args = parsed(NAME, *FLAGS, "--eta-g", 0.7)
    server, clients, data = federation(scaffold, args)
    w = in_double(server.w)
    trained = [name for name, _ in clients[0].net.named_parameters()]
    c = {name: torch.zeros_like(w[name]) for name in trained}
    of_clients, all_norms = [c, c, c], []
    for t, chosen in enumerate(ROUNDS):
        uploads, hands = {}, []
        for k in chosen:
            uploads[k] = clients[k].train(copied(server.download(k)), t)
            hand, c_k, losses, norms = train_by_hand(w, of_clients[k], c, args, data[k], t, k)
            change = {name: c_k[name] - of_clients[k][name] for name in trained}
            assert_close(in_double(uploads[k]["change"]), change, atol=1e-4, rtol=1e-3)
            assert_close(in_double(clients[k].c_k), c_k, atol=1e-4, rtol=1e-3)
            assert_trained(clients[k], uploads[k], hand, losses, "change")
            of_clients[k] = c_k
            hands.append(hand)
            all_norms += norms
        server.update(uploads, t)
        averaged = mean(hands, shares_of(chosen, "uniform"))
        for name in trained:
            averaged[name] = w[name] + 0.7 * (averaged[name] - w[name])
        w = averaged
        c = mean(of_clients, [1 / 3] * 3)
        assert_close(in_double(server.w), w, **CLOSE)
        assert_close(in_double(server.c), c, atol=1e-4, rtol=1e-3)
        assert_tested(server, clients, [w] * 3)
    assert min(all_norms) < args.clip < max(all_norms)  # some steps are clipped, some are not
