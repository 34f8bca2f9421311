"""FedSR's wiring: two rounds recomputed in plain torch, with every coefficient and every switch away from its
neutral value; and the numbers of the official classes. The batches and the order in which random numbers are
drawn are the file's."""

import json

import common
import fedsr
import official.fedsr
from plumbing.runfolder import copied
from tests.conftest import ROOT, parsed
from tests.plain_torch import (ClippedSGD, adam_step, body_of_smallcnn_bn, in_double, leaves_of, linear,
                               log_probability)
from tests.three_clients import federation, mean

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus
from torch.testing import assert_close

D = 64
FLAGS = ("--scale", "smoke", "--precision", "fp32", "--device", "cpu", "--image-size", 8, "--limit", 20,
         "--steps", 3, "--batch-size", 8, "--lr-decay", 0.6, "--momentum", 0.8, "--weight-decay", 0.03,
         "--samples", 3)
LR = {"sgd": 0.05, "adam": 0.002}
ROUNDS = ((0, 1, 2), (2, 0))  # the clients of the first and of the second round
# A step of Adam where decay and gradient all but cancel is that of the rounding: 4 of 200,704 entries.
CLOSE = {"sgd": dict(atol=5e-5, rtol=2e-4), "adam": dict(atol=1e-3, rtol=2e-4)}


class Adam(ClippedSGD):
    """The same with Adam's steps."""

    def direction(self, name, g):
        return adam_step(self.velocity, name, g)


def objective_by_hand(x, y, leaves, w, args):
    """Eq. (9) of a batch, and the values of its three terms."""
    out = linear(body_of_smallcnn_bn(x.double(), leaves, w), leaves, "last")
    terms = {}
    if args.variant in ("fedl2r", "fedavg"):
        z = out
    else:
        mu, sigma = out[:, :D], softplus(out[:, D:]) + 1e-6
        z = mu + sigma * torch.randn(len(y), D).double()
        mu_y, sigma_y = leaves["r.mu"][y], softplus(leaves["r.raw"])[y]
        kl = torch.log(sigma_y / sigma) - 0.5
        kl = kl + (sigma ** 2 + (mu - mu_y) ** 2) / (2 * sigma_y ** 2)  # Eq. (46)
        terms["cmi"] = kl.sum(1).mean()
    terms["l2r"] = (z ** 2).sum(1).mean()
    terms["loss"] = -log_probability(linear(z, leaves, "head"), y).mean()
    objective = terms["loss"] + args.alpha_l2r * terms["l2r"]
    if "cmi" in terms:
        objective = objective + args.alpha_cmi * terms["cmi"]
    return objective, terms


def client_by_hand(w, opt, args, data, t, k):
    """The local iterations from the model w: the model and the mean of each term."""
    w = in_double(w)
    opt.lr = args.lr * args.lr_decay ** t
    means = {}
    for x, y in common.batches(data.train, args, t, k):
        leaves = leaves_of(w)
        objective, terms = objective_by_hand(x, y, leaves, w, args)
        opt.step(objective, leaves, w)
        for name, term in terms.items():
            means[name] = means.get(name, 0) + float(term.detach()) / args.steps
    return w, means


VARIANTS = {
    "fedsr": ("--alpha-l2r", 0.02, "--alpha-cmi", 0.03, "--clip", 8),
    "fedcmi": ("--alpha-l2r", 0, "--alpha-cmi", 0.05, "--reference", "local", "--clip", 8),
    "fedl2r": ("--alpha-l2r", 0.3, "--clip", 8),
    "fedavg": ("--clip", 6),
}


@pytest.mark.parametrize("optimizer,keep", [("sgd", True), ("adam", False)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_rounds_by_hand(variant, optimizer, keep):
    """Every parameter and every statistic of uploads, clients and server, after each round."""
    momentum = "--keep-momentum" if keep else "--no-keep-momentum"
    flags = (*FLAGS, "--variant", variant, *VARIANTS[variant], "--optimizer", optimizer, momentum,
             "--lr", LR[optimizer])
    args, close = parsed("fedsr", *flags), CLOSE[optimizer]
    server, clients, _ = federation(fedsr, args, fedsr.build)
    local = args.reference == "local"
    w, norms = copied(server.w), []
    of_r = {}
    if local:
        of_r = {name: v for name, v in common.state(clients[0].net).items() if name.startswith("r.")}
    own = [of_r] * 3
    optimizers = {}
    for t, chosen in enumerate(ROUNDS):
        uploads, hands = {}, []
        for k in chosen:
            if k not in optimizers or not keep:
                kind = {"sgd": ClippedSGD, "adam": Adam}[optimizer]
                optimizers[k] = kind(0, args.momentum, args.weight_decay, args.clip)
            torch.manual_seed(100 * t + k)
            uploads[k] = clients[k].train(copied(server.download(k)), t)
            torch.manual_seed(100 * t + k)
            hand, terms = client_by_hand(w | own[k], optimizers[k], args, clients[k].data, t, k)
            norms += optimizers[k].norms
            own[k] = {name: hand.pop(name) for name in own[k]}
            assert uploads[k].keys() == {"w"}
            assert_close(in_double(uploads[k]["w"]), hand, **close)
            assert_close(in_double(clients[k].r), own[k], **close)
            assert {"loss"} <= clients[k].log.keys() <= terms.keys()
            for name, value in clients[k].log.items():
                assert_close(float(value), terms[name], **close)
            hands.append(hand)
        server.update(uploads, t)
        w = mean(hands, [1 / len(hands)] * len(hands))  # Eq. (1)
        assert_close(in_double(server.w), w, **close)
        for k in range(3):
            tested = in_double(common.state(clients[k].model(server.download(k))))
            assert_close(tested, in_double(w | own[k]), **close)
    assert max(norms) > args.clip
    assert local == (variant == "fedcmi")

OFFICIAL = json.loads((ROOT / "tests" / "fixtures" / "fedsr.json").read_text())


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
