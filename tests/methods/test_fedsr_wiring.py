"""FedSR's wiring: two rounds recomputed in plain torch, with every coefficient and every switch away from its
neutral value; and the numbers of the official classes. The batches and the order in which random numbers are
drawn are the file's."""


import common
import fedsr
import official.fedsr
from tests.conftest import ROOT, parsed, read_json
from tests.plain_torch import ClippedSGD, adam_step, body_of_smallcnn_bn, in_double, linear
from tests.three_clients import ROUNDS, Beside, clipped_sgd, mean, shares_of

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus
from torch.testing import assert_close

D = 64
LR = {"sgd": 0.05, "adam": 0.002}
# A step of Adam where decay and gradient all but cancel is that of the rounding: 4 of 200,704 entries.
CLOSE = {"sgd": dict(atol=5e-5, rtol=2e-4), "adam": dict(atol=1e-3, rtol=2e-4)}


class Adam(ClippedSGD):
    """The same with Adam's steps."""

    def direction(self, name, g):
        return adam_step(self.velocity, name, g)


class ByHand:
    """Eq. (9): `encode` makes z of a batch, `terms` the two regularizers of it, {name: (weight, term)}."""

    def __init__(self, args):
        self.args = args

    def encode(self, x, leaves, w):
        out = linear(body_of_smallcnn_bn(x, leaves, w), leaves, "last")
        if self.args.variant in ("fedl2r", "fedavg"):
            return out
        self.mu, self.sigma = out[:, :D], softplus(out[:, D:]) + 1e-6
        return self.mu + self.sigma * torch.randn(len(x), D).double()

    def terms(self, x, y, z, leaves):
        terms = {}
        if self.args.alpha_l2r:
            terms["l2r"] = (self.args.alpha_l2r, (z ** 2).sum(1).mean())
        if self.args.alpha_cmi:
            mu_y, sigma_y = leaves["r.mu"][y], softplus(leaves["r.raw"])[y]
            kl = torch.log(sigma_y / self.sigma) - 0.5
            kl = kl + (self.sigma ** 2 + (self.mu - mu_y) ** 2) / (2 * sigma_y ** 2)  # Eq. (46)
            terms["cmi"] = (self.args.alpha_cmi, kl.sum(1).mean())
        return terms


VARIANTS = {
    "fedsr": ("--alpha-l2r", 0.02, "--alpha-cmi", 0.03, "--clip", 8),
    "fedcmi": ("--alpha-l2r", 0, "--alpha-cmi", 0.05, "--reference", "local", "--clip", 8),
    "fedl2r": ("--alpha-l2r", 0.3, "--clip", 8),
    "fedavg": ("--clip", 6),
}


@pytest.mark.parametrize("module, variant, optimizer, keep", [
    *((fedsr, variant, "sgd", True) for variant in VARIANTS),
    (fedsr, "fedsr", "adam", False), (fedsr, "fedcmi", "adam", True),
    (official.fedsr, "fedcmi", "sgd", True), (official.fedsr, "fedl2r", "sgd", True),
    (official.fedsr, "fedsr", "adam", True), (official.fedsr, "fedavg", "adam", True),
])
def test_two_rounds_by_hand(module, variant, optimizer, keep):
    """Every parameter and every statistic of uploads, clients and server, after each round. What the release
    does otherwise is off."""
    momentum = "--keep-momentum" if keep else "--no-keep-momentum"
    of = Beside(module, "--variant", variant, *VARIANTS[variant], "--optimizer", optimizer, momentum,
                "--lr", LR[optimizer], "--momentum", 0.8, "--samples", 3, close=CLOSE[optimizer])
    local = of.args.reference == "local"
    w, start = in_double(of.server.w), in_double(common.state(of.clients[0].net))
    own = [{name: v for name, v in start.items() if local and name.startswith("r.")}] * 3
    optimizers, hand_of = {}, ByHand(of.args)
    for t, chosen in enumerate(ROUNDS):
        uploads, hands = {}, []
        for k in chosen:
            if k not in optimizers or not keep:
                optimizers[k] = clipped_sgd(of.args, {"sgd": ClippedSGD, "adam": Adam}[optimizer])

            def sent(hand, own=own[k]):
                return {name: v for name, v in hand.items() if name not in own}

            uploads[k], hand = of.train(t, k, w | own[k], hand_of.terms, sent, also=(),
                                        body=hand_of.encode, sgd=optimizers[k])
            own[k] = {name: hand[name] for name in own[k]}
            assert_close(in_double(of.clients[k].r), own[k], **of.close)
            hands.append(sent(hand))
        of.server.update(uploads, t)
        w = mean(hands, shares_of(chosen, "uniform"))  # Eq. (1)
        of.check(w, [w | of_client for of_client in own])
    assert max(of.norms) > of.args.clip


OFFICIAL = read_json(ROOT / "tests" / "fixtures" / "fedsr.json")


def numbers(*shape, shift=0.0):
    """The values that the fixture starts from."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count) * 1.7 + shift).reshape(shape)


def official_batches(data, args, t, k):
    """Three batches of six images of 2x2 pixels."""
    for i in range(1, 4):
        yield numbers(6, 1, 2, 2, shift=10 * i).abs(), torch.tensor([0, 1, 2, 2, 1, 0])


@pytest.mark.parametrize("name,flags", [
    ("FedSR", ("--variant", "official", "--alpha-l2r", 0.3, "--alpha-cmi", 0.2)),
    ("FedL2R", ("--variant", "fedl2r", "--norm", "plain", "--alpha-l2r", 0.3, "--momentum", 0.9,
                "--weight-decay", 5e-4)),
])
def test_three_steps_of_the_official_classes(monkeypatch, name, flags):
    """The parameters after three local steps, r(z|y) and the scalar too, and a prediction of 20 samples."""
    monkeypatch.setattr(official.fedsr, "batches", official_batches)
    monkeypatch.setattr(fedsr, "backbone", lambda args, channels, classes: common.Net(
        nn.Sequential(nn.Flatten(), nn.Linear(4, 4)), 4, 3))
    args = parsed("official.fedsr", *flags, "--lr", 0.05, "--precision", "fp32", "--device", "cpu")
    net = official.fedsr.build(args, 1, 3)
    outputs = 8 if name == "FedSR" else 4
    with torch.no_grad():
        net.last.weight.copy_(numbers(outputs, 4))
        net.last.bias.copy_(numbers(outputs, shift=1))
        net.head.weight.copy_(numbers(3, 4, shift=2))
        net.head.bias.copy_(numbers(3, shift=3))
    server = fedsr.Server(args, net, 1)
    part = common.Data(torch.zeros(6, 1, 2, 2), torch.arange(6), torch.zeros(6), "cpu", "unit")
    client = official.fedsr.Client(args, net, 0, common.ClientData("c", part, part, part))
    torch.manual_seed(7)
    up = client.train(server.download(0), 0)
    end = up["w"] | client.r
    for entry, values in OFFICIAL[name]["end"].items():
        assert_close(end[entry], torch.tensor(values), atol=2e-5, rtol=2e-5)
    torch.manual_seed(8)
    model = client.model(up).eval()
    with torch.no_grad():
        log_p = model(numbers(5, 1, 2, 2, shift=99).abs()).log_softmax(1)
    assert_close(log_p, torch.tensor(OFFICIAL[name]["log_p"]), atol=2e-5, rtol=2e-5)
