"""What the two-round tests of several baselines share: three clients of different sizes on small digits, and
local training in float64 with plain_torch.py."""

import dataclasses

import common
from plumbing.runfolder import copied
from tests.plain_torch import ClippedSGD, body_of_smallcnn_bn, in_double, leaves_of, linear, log_probability

import torch
from torch.testing import assert_close

FLAGS = ("--scale", "smoke", "--precision", "fp32", "--device", "cpu", "--image-size", 8, "--limit", 30,
         "--steps", 3, "--batch-size", 10, "--lr", 0.05, "--lr-decay", 0.6,
         "--weight-decay", 0.03, "--clip", 6)
ROUNDS = ((0, 2), (2, 1), (0, 1))  # the clients of each round: 1 comes late, 0 and 2 miss one
CLOSE = dict(atol=1e-5, rtol=1e-4)


def three_clients(args) -> list[common.ClientData]:
    """Clients of 24, 13 and 24 training images. With three steps of ten the second one is in its second
    epoch."""
    data, _ = common.split(common.open_dataset(args), args)
    train = data[1].train
    data[1].train = dataclasses.replace(train, index=train.index[:13], labels=train.labels[:13])
    return data[:3]


def federation(module, args, build=common.backbone) -> tuple:
    """The server and the three clients of a method, and their data."""
    data = three_clients(args)
    common.seed_all(0)
    net = build(args, 1, 10)
    server = module.Server(args, net, 3)
    return server, [module.Client(args, net, k, data[k]) for k in range(3)], data


def shares_of(chosen: tuple[int, ...], average: str = "samples") -> list[float]:
    """The weights of these clients in the average."""
    sizes = [(24, 13, 24)[k] for k in chosen]
    if average == "uniform":
        return [1 / len(sizes)] * len(sizes)
    return [n / sum(sizes) for n in sizes]


def mean(states: list[dict], shares: list[float]) -> dict:
    """The weighted mean of states in float64; BN's counters are rounded."""
    total = {}
    for name in states[0]:
        total[name] = sum(p * w[name] for p, w in zip(shares, states))
        if "num_batches" in name:
            total[name] = total[name].round()
    return total


def train_by_hand(w, args, data, t, k, more=None, body=body_of_smallcnn_bn):
    """Three steps from the model w on the cross-entropy plus `more(x, z, leaves)`: the model, its
    cross-entropies, the gradients' norms."""
    w = in_double(w)
    sgd = ClippedSGD(args.lr * args.lr_decay ** t, args.momentum, args.weight_decay, args.clip)
    losses = []
    for x, y in common.batches(data.train, args, t, k):
        leaves = leaves_of(w)
        z = body(x.double(), leaves, w)
        loss = -log_probability(linear(z, leaves, "head"), y).mean()
        losses.append(float(loss.detach()))
        if more is not None:
            loss = loss + more(x.double(), z, leaves)
        sgd.step(loss, leaves, w)
    return w, losses, sgd.norms


def assert_trained(client, up: dict, hand: dict, losses: list[float], *also: str) -> None:
    """What a client sends, w and `also`, and logs is what three steps by hand give."""
    assert up.keys() == {"w", *also}
    assert "n" not in also or up["n"] == len(client.data.train)
    assert_close(in_double(up["w"]), hand, **CLOSE)
    assert_close(float(client.log["loss"]), sum(losses) / 3, **CLOSE)


def assert_tested(server, clients: list, models: list[dict]) -> None:
    """The clients are tested with these models."""
    for k, model in enumerate(models):
        tested = clients[k].model(copied(server.download(k)))
        assert_close(in_double(common.state(tested)), model, **CLOSE)


def same(a: dict, b: dict) -> bool:
    """Whether two states are the same to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
