"""FedAvg's wiring: two rounds recomputed in plain torch, with every switch away from its neutral value."""

import common
import fedavg
from plumbing.runfolder import copied
from tests.conftest import parsed
from tests.plain_torch import ClippedSGD, body_of_smallcnn_bn, in_double, leaves_of, linear, log_probability
from tests.three_clients import three_clients

import pytest
import torch
from torch.testing import assert_close

FLAGS = ("--scale", "smoke", "--precision", "fp32", "--device", "cpu", "--image-size", 8, "--limit", 30,
         "--steps", 3, "--batch-size", 10, "--lr", 0.05, "--lr-decay", 0.6, "--momentum", 0.8,
         "--weight-decay", 0.03, "--clip", 6)
ROUNDS = ((0, 1, 2), (2, 1))  # the clients of the first and of the second round


def by_hand(w, args, data, t, k):
    """Three steps on the cross-entropy from the model w: the model, its losses, the gradients' norms."""
    w = in_double(w)
    sgd = ClippedSGD(args.lr * args.lr_decay ** t, args.momentum, args.weight_decay, args.clip)
    losses = []
    for x, y in common.batches(data.train, args, t, k):
        leaves = leaves_of(w)
        z = body_of_smallcnn_bn(x.double(), leaves, w)
        loss = -log_probability(linear(z, leaves, "head"), y).mean()
        losses.append(float(loss.detach()))
        sgd.step(loss, leaves, w)
    return w, losses, sgd.norms


@pytest.mark.parametrize("average,shares", [
    ("samples", [[24 / 61, 13 / 61, 24 / 61], [24 / 37, 13 / 37]]),
    ("uniform", [[1 / 3, 1 / 3, 1 / 3], [1 / 2, 1 / 2]]),
])
def test_two_rounds_by_hand(average, shares):
    """Every parameter and every statistic of the uploads and of the server, after each round."""
    args = parsed("fedavg", *FLAGS, "--average", average)
    data = three_clients(args)
    common.seed_all(0)
    net = common.backbone(args, 1, 10)
    server = fedavg.Server(args, net, 3)
    clients = [fedavg.Client(args, net, k, data[k]) for k in range(3)]
    w, norms = copied(server.w), []
    for t, chosen in enumerate(ROUNDS):
        uploads, hands = {}, []
        for k in chosen:
            uploads[k] = clients[k].train(copied(server.download(k)), t)
            hand, losses, of_client = by_hand(w, args, data[k], t, k)
            assert uploads[k]["n"] == len(data[k].train)
            assert_close(in_double(uploads[k]["w"]), hand, atol=1e-5, rtol=1e-4)
            assert_close(float(clients[k].log["loss"]), sum(losses) / 3, atol=1e-5, rtol=1e-4)
            hands.append(hand)
            norms += of_client
        server.update(uploads, t)
        w = {}
        for name in hands[0]:
            w[name] = sum(p * hand[name] for p, hand in zip(shares[t], hands))
            if "num_batches" in name:
                w[name] = w[name].round()
        assert_close(in_double(server.w), w, atol=1e-5, rtol=1e-4)
        for k in range(3):
            assert_close(in_double(common.state(clients[k].model(server.download(k)))), in_double(server.w))
    assert min(norms) < args.clip < max(norms)  # some steps are clipped, some are not


def test_what_is_uploaded_is_a_copy():
    """A later training of the shared network does not change it."""
    args = parsed("fedavg", *FLAGS)
    data = three_clients(args)
    net = common.backbone(args, 1, 10)
    server = fedavg.Server(args, net, 3)
    client = fedavg.Client(args, net, 0, data[0])
    up = client.train(server.download(0), 0)
    kept = copied(up)
    client.train(server.download(0), 1)
    for name, value in kept["w"].items():
        assert torch.equal(up["w"][name], value)
