"""FedEMA's wiring: three rounds recomputed in plain torch and float64, with every coefficient away from its
neutral value and clipping active."""

import math
from types import SimpleNamespace

import common
from baselines import fedema
from fedgala import Learner
from tests.conftest import parsed
from tests.plain_torch import State, in_double, is_trained
from tests.three_clients import mean
from tests.methods import test_fedgala_wiring as fedgala
from tests.methods.test_fedgala_wiring import ROUNDS, SIZES, three_clients

import pytest
import torch
from torch import nn
from torch.testing import assert_close

FLAGS = ("--target", "d75", "--precision", "fp32", "--device", "cpu", "--image-size", 8, "--crop", 8,
         "--batch-size", 6, "--epochs", 1, "--hidden", 7, "--dim", 5, "--lr", 0.004, "--lr-decay", 0.7,
         "--momentum", 0.6, "--weight-decay", 0.03, "--ema", 0.8, "--autoscale", 0.4)


def tiny(args) -> Learner:
    """A learner whose encoder has two convolutions, with and without BN's ReLU behind."""
    common.seed_all(args.seed)
    body = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(),
                         nn.Conv2d(3, 2, 3, padding=1), nn.Flatten(), nn.Linear(2 * 8 * 8, 6))
    return Learner(common.Net(body, 6, 10), args)


class ClientByHand(fedgala.ClientByHand):
    """FedGaLA's BYOL without its other terms, from the mixture."""

    def __init__(self, args, data, k: int):
        without = dict(ssl="byol", views=2, l2=0, prox=0, temperature=1, local_alignment="off")
        super().__init__(SimpleNamespace(**vars(args), **without), data, k, {})
        self.sent, self.start, self.scale, self.mu = None, None, None, None

    def train(self, w: State, t: int) -> tuple[State, float]:
        """What is uploaded, and the mean loss."""
        online = dict(w)
        if self.sent is not None:
            self.mix(online, w)
        self.start = dict(online)
        self.sent, loss = super().train(online, t)
        return self.sent, loss

    def mix(self, online: State, w: State) -> None:
        """Eqs. (1)-(3)."""
        args = self.args
        squares, norms = [], []
        for name in w:
            if name.startswith("f.") and is_trained(name):
                squares.append(float((w[name] - self.sent[name]).square().sum()))
            if name in ("f.0.weight", "f.3.weight"):
                norms.append(float((self.start[name] - self.sent[name]).norm()))
        d = math.sqrt(sum(squares)) if args.divergence == "full" else sum(norms) / 2
        if self.scale is None:
            self.scale = args.autoscale / d
        self.mu = min(self.scale * d, 1)
        for name in online:
            if is_trained(name):
                online[name] = (1 - self.mu) * w[name] + self.mu * self.sent[name]


@pytest.mark.parametrize("flags", [
    ("--divergence", "conv-mean"),
    ("--divergence", "full", "--no-keep-optimizer", "--autoscale", 0.95),
])
def test_rounds_by_hand(flags):
    """Uploads, target networks, mu and losses after each round, and the server's model; some gradients are
    clipped, and mu is neither always tau nor always 1."""
    args = parsed("baselines.fedema", *FLAGS, "--clip", 15, *flags)
    net, data = tiny(args), three_clients(args)
    server, clients = fedgala.started(fedema, args, net, data)
    hands = [ClientByHand(args, data[k], k) for k in range(3)]
    w, shares = in_double(server.w), []
    for t, chosen in enumerate(ROUNDS):
        models = fedgala.play(server, clients, hands, t, w, 1e-4)
        for k in chosen:
            assert_close(in_double(clients[k].target), hands[k].own, atol=1e-4, rtol=1e-3)
            assert ("mu" in clients[k].log) == (hands[k].mu is not None)
            if hands[k].mu is not None:
                assert float(clients[k].log["mu"]) == pytest.approx(hands[k].mu, rel=1e-3)
                shares.append(round(hands[k].mu, 4))
        images = [SIZES[k] for k in chosen]
        w = mean(models, [n / sum(images) for n in images])
        assert_close(in_double(server.w), w, atol=1e-4, rtol=1e-3)
    norms = sum((hand.norms for hand in hands), [])
    assert min(norms) < args.clip < max(norms)
    assert len(set(shares)) > 1
    if args.divergence == "full":
        assert max(shares) == 1


def test_adam():
    """Its first step has the length of the learning rate wherever there is a gradient."""
    args = parsed("baselines.fedema", *FLAGS, "--optimizer", "adam", "--steps", 1, "--lr", 0.01)
    net = tiny(args)
    server = fedema.Server(args, net, 3)
    up = fedema.Client(args, net, 0, three_clients(args)[0]).train(server.download(0), 0)
    moved = (up["w"]["q.3.weight"] - server.w["q.3.weight"]).abs()
    assert_close(moved, torch.full_like(moved, 0.01), atol=1e-4, rtol=0)
