"""What the tests of rounds by hand share: three clients of different sizes on small digits, and beside a
method's server and clients the same local training in float64 with plain_torch.py."""

import dataclasses
from functools import partial

import common
from plumbing.run.runfolder import copied
from tests.conftest import members_of, parsed
from tests.plain_torch import (ClippedSGD, State, body_of_smallcnn_bn, in_double, leaves_of, linear,
                               log_probability)

import torch
from torch.testing import assert_close

FLAGS = ("--scale", "smoke", "--precision", "fp32", "--device", "cpu", "--image-size", 8, "--limit", 30,
         "--steps", 3, "--batch-size", 10, "--lr", 0.05, "--lr-decay", 0.6,
         "--weight-decay", 0.03, "--clip", 6)
ROUNDS = ((0, 2), (2, 1), (0, 1))  # the clients of each round: 1 comes late, 0 and 2 miss one
CLOSE = dict(atol=1e-5, rtol=1e-4)
assert_near = partial(assert_close, **CLOSE)


def three_clients(args) -> list[common.ClientData]:
    """Clients of 24, 13 and 24 training images. With three steps of ten the second one is in its second
    epoch."""
    data, _ = members_of(args)
    train = data[1].train
    data[1].train = dataclasses.replace(train, index=train.index[:13], labels=train.labels[:13])
    return data[:3]


def federation(module, args, build=None) -> tuple:
    """The server and the three clients of a method, and their data, which may be pooled."""
    data = three_clients(args)
    if getattr(module.Client, "pooled", False):
        common.pool(data)
    common.seed_all(0)
    build = build or getattr(module, "build", common.backbone)
    net = build(args, 1, 10)
    server = module.Server(args, net, 3)
    return server, [module.Client(args, net, k, data[k]) for k in range(3)], data


def one_round(server, clients, t: int = 0, chosen: tuple[int, ...] = (0, 1, 2)) -> dict:
    """The uploads of a round, which the server has taken in."""
    uploads = {}
    for k in chosen:
        down = copied(server.download(k))
        common.seed_all(0, "train", t, k)
        uploads[k] = clients[k].train(down, t)
    server.update(uploads, t)
    return uploads


def shares_of(chosen: tuple[int, ...], average: str = "samples") -> list[float]:
    """The weights of these clients in the average."""
    sizes = [(24, 13, 24)[k] for k in chosen]
    if average == "uniform":
        return [1 / len(sizes)] * len(sizes)
    return [n / sum(sizes) for n in sizes]


def mean(states: list[State], shares: list[float]) -> State:
    """The weighted mean of states in float64; BN's counters are rounded."""
    total = {}
    for name in states[0]:
        total[name] = sum(p * w[name] for p, w in zip(shares, states))
        if "num_batches" in name:
            total[name] = total[name].round()
    return total


def clipped_sgd(args, kind=ClippedSGD) -> ClippedSGD:
    return kind(args.lr, args.momentum, args.weight_decay, args.clip)


def train_by_hand(w, args, data, t, k, more=None, body=body_of_smallcnn_bn, sgd=None):
    """Three steps from the model w on the cross-entropy and the terms that `more(x, y, z, leaves)` adds,
    {name in the log, if it is logged: (weight, term)}: the model, the mean of each term, the norms."""
    w, means = in_double(w), {}
    sgd = sgd or clipped_sgd(args)
    sgd.lr = args.lr * args.lr_decay ** t
    for x, y in common.batches(data.train, args, t, k):
        leaves = leaves_of(w)
        z = body(x.double(), leaves, w)
        terms = {"loss": (1, -log_probability(linear(z, leaves, "head"), y).mean())}
        if more is not None:
            terms |= more(x.double(), y, z, leaves)
        sgd.step(sum(weight * term for weight, term in terms.values()), leaves, w)
        for name, (_, term) in terms.items():
            means[name] = means.get(name, 0) + float(term.detach()) / 3
    return w, means, sgd.norms


class Beside:
    """A method's server and clients, and what they do by hand beside them."""

    def __init__(self, module, *flags, close=CLOSE):
        self.close = close
        self.args = parsed(module.__name__, *FLAGS, *flags)
        self.server, self.clients, self.data = federation(module, self.args)
        self.norms = []

    def train(self, t, k, start, more=None, sent=None, also=("n",), logs=(), **how) -> tuple:
        """A client's round from the model `start`: its upload, of w and `also`, and its model by hand. What
        it sends in w is `sent(model)`; it logs the terms, and `logs`."""
        common.seed_all("train", t, k)
        up = self.clients[k].train(copied(self.server.download(k)), t)
        common.seed_all("train", t, k)
        hand, means, norms = train_by_hand(start, self.args, self.data[k], t, k, more, **how)
        assert up.keys() == {"w", *also}
        assert "n" not in also or up["n"] == len(self.data[k].train)
        assert_close(in_double(up["w"]), sent(hand) if sent else hand, **self.close)
        means.pop("", None)
        log = {name: float(v) for name, v in self.clients[k].log.items() if name not in logs}
        assert_close(log, means, **self.close)
        self.norms += norms
        return up, hand

    def play(self, t: int, chosen: tuple[int, ...], starts: list[State], **how) -> list[State]:
        """A round of these clients: their models by hand."""
        uploads, hands = {}, []
        for k in chosen:
            uploads[k], hand = self.train(t, k, starts[k], **how)
            hands.append(hand)
        common.seed_all(0, "server", t)
        self.server.update(uploads, t)
        return hands

    def check(self, w: State, tested: list[State] | None = None) -> None:
        """The server has the model w; clients are tested with it, or with these."""
        assert_close(in_double(self.server.w), w, **self.close)
        for k, model in enumerate(tested or [w] * 3):
            found = self.clients[k].model(copied(self.server.download(k)))
            assert_close(in_double(common.state(found)), model, **self.close)

    def some_were_clipped(self) -> None:
        """And some steps were not."""
        assert min(self.norms) < self.args.clip < max(self.norms)


def same(a: State, b: State) -> bool:
    """Whether two states are the same to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
