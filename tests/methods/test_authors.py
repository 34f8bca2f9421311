"""Baselines against numbers that their authors' own functions gave (tests/fixtures/baselines.json).

Where clients train, their code had the same start, batches and noise, all of sines, and float64.
"""

import dataclasses
import itertools

import common
from baselines import (ditto, fedbn, feddg_ga, feddyn, fedema, fedfa, fedgen, fedheal, fedproc, lgfedavg,
                       moon, scaffold)
from fedcir import ModelAndGenerator
from fedgala import Learner
from plumbing.run.runfolder import copied
from tests.conftest import ROOT, parsed, read_json
from tests.three_clients import one_round

import pytest
import torch
from torch import nn
from torch.testing import assert_close

AUTHORS = read_json(ROOT / "tests" / "fixtures" / "baselines.json")

ROUNDS = ((0, 1), (0, 2), (1, 2), (0, 1), (0, 1))  # the clients of each round: 2 comes late, all miss one
LABELS = ((0, 1, 1, 0, 1, 0), (2, 1, 2), (0, 1, 0, 0, 1, 1, 0, 1, 0))  # of each client's images
FLAGS = ("--device", "cpu", "--precision", "fp32", "--clip", 0, "--lr", 0.2, "--weight-decay", 0.02)


def sines(*shape, start: int = 0) -> torch.Tensor:
    """sin(start + 1), sin(start + 2), ... in a shape."""
    numbers = torch.arange(start + 1, start + 1 + torch.Size(shape).numel(), dtype=torch.float64)
    return numbers.sin().reshape(shape)


class Images:
    """The training images of client k: batches of three, in the same order in each epoch."""

    unseen = False

    def __init__(self, k: int, shape: tuple[int, ...]):
        self.train = self
        self.x = sines(len(LABELS[k]), *shape, start=100 * (k + 1))
        self.y = torch.tensor(LABELS[k])

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[rows], self.y[rows]

    def epochs(self, *_) -> list:
        """The batches of two epochs, instead of common.batches."""
        return 2 * list(zip(self.x.split(3), self.y.split(3)))


def filled(net: nn.Module, start: int = 0) -> nn.Module:
    """The network with sines as parameters."""
    for p in net.parameters():
        p.data = sines(*p.shape, start=start)
        start += p.numel()
    return net


def network(body: nn.Module, dim: int) -> common.Net:
    """The body and a head of three classes."""
    return filled(common.Net(body, dim, 3))


def two_layers() -> common.Net:
    return network(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), 3)


@pytest.fixture
def double(monkeypatch):
    """All in float64, where methods say `.float()` too."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def federation(module, monkeypatch, *flags, net: nn.Module | None = None, shape: tuple[int, ...] = (2,)):
    """The server and three clients with images of this shape."""
    monkeypatch.setattr(module, "batches", Images.epochs)
    args = parsed(module.__name__, *FLAGS, *flags)
    net = net or two_layers()
    clients = [module.Client(args, net, k, Images(k, shape)) for k in range(3)]
    return module.Server(args, net, 3), clients


def assert_same(tensors: dict[str, torch.Tensor], theirs: list[float], atol: float = 2e-12) -> None:
    """The entries of a state, one after the other, against numbers rounded to 1e-12."""
    numbers = common.flatten(list(tensors.values()))
    assert_close(numbers.tolist(), theirs, atol=atol, rtol=0)


def play_theirs(name: str, server, clients, atol: float = 2e-12, **parts: str) -> None:
    """The rounds of `name`, after each of which the server has their numbers: `parts` are its attributes, by
    the names that theirs have."""
    for t, theirs in enumerate(AUTHORS[name]["rounds"]):
        one_round(server, clients, t, ROUNDS[t])
        for part, numbers in theirs.items():
            held = getattr(server, parts.get(part, part))
            assert_same(held if isinstance(held, dict) else {part: held}, numbers, atol)


def test_six_adjustments_of_feddg_ga():
    """In a row, of three clients, with the code's falling step."""
    theirs = AUTHORS["feddg_ga"]
    args = parsed("baselines.feddg_ga", "--rule", "code", "--rounds", theirs["rounds"])
    assert args.step_size == theirs["step_size"]
    a = torch.full((3,), 1 / 3, dtype=torch.float64)
    for adjustment in theirs["adjustments"]:
        gap = torch.tensor(adjustment["gaps"], dtype=torch.float64)
        a = feddg_ga.adjusted(a, gap, feddg_ga.step_of_round(args, adjustment["t"], 3), args.rule)
        assert_close(a.tolist(), adjustment["weights"], atol=1e-14, rtol=0)


def test_weights_of_fedheal_with_some_clients():
    """Over five rounds, in each of which two or all of three clients take part; client 2 comes late."""
    theirs = AUTHORS["fedheal"]
    args = parsed("baselines.fedheal", "--beta", theirs["beta"])
    server = fedheal.Server(args, nn.Linear(1, 1), 3)
    for of_round in theirs["rounds"]:
        for k in of_round["clients"]:
            updates = [torch.tensor(v, dtype=torch.float64) for v in of_round["updates"][str(k)]]
            server.d[k] = fedheal.distance(updates)
            assert abs(server.d[k] - of_round["distances"][str(k)]) < 1e-12
        weights = server.weights(of_round["clients"])
        assert_close(weights.tolist(), of_round["weights"], atol=1e-12, rtol=0)


def test_scaffold_of_flgo(double, monkeypatch):
    """With a rate that falls and the server's step 0.7."""
    server, clients = federation(scaffold, monkeypatch, "--lr-decay", 0.9, "--eta-g", 0.7)
    play_theirs("scaffold", server, clients)


def test_feddyn_of_its_authors(double, monkeypatch):
    """Their alpha falls with a client's images. Their clipping at 10 does not act here."""
    theirs = AUTHORS["feddyn"]
    server, clients = federation(feddyn, monkeypatch, "--lr-decay", 0.9, "--alpha", theirs["alpha"])
    for client in clients:
        alpha = theirs["alpha"] * 6 / len(client.data)  # 6 images are the mean of the clients'
        client.args = dataclasses.replace(client.args, alpha=alpha)
    play_theirs("feddyn", server, clients, theta="w")


def test_fedfa_of_its_authors(double, monkeypatch):
    """--variant code. Coins and noise are given; the channels differ in their first gamma."""
    coins = itertools.cycle([0.3, 0.7, 0.2, 0.6, 0.45])
    noise = itertools.count(10, 10)
    monkeypatch.setattr(torch, "rand", lambda shape: torch.tensor(next(coins)))
    monkeypatch.setattr(torch, "randn_like", lambda v: sines(*v.shape, start=next(noise)))
    layer = fedfa.FFALayer(parsed("baselines.fedfa"), 2)
    layer.spread_mu.copy_(torch.tensor([0.2, 1.5]))
    layer.spread_sigma.copy_(torch.tensor([0.7, 0.1]))
    body = nn.Sequential(nn.Conv2d(1, 2, 3), layer, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = network(body, 2)
    server, clients = federation(fedfa, monkeypatch, "--variant", "code", net=net, shape=(1, 4, 4))
    play_theirs("fedfa", server, clients)


def test_moon_of_its_authors(double, monkeypatch):
    """Their clients begin with networks of their own, from which a late one is pushed; here with the same."""
    mu = AUTHORS["moon"]["mu"]
    server, clients = federation(moon, monkeypatch, "--momentum", 0.9, "--mu", mu)
    play_theirs("moon", server, clients)


def test_fedproc_of_its_authors(double, monkeypatch):
    """Nobody has images of class 2 in the second round: its prototype stays. The average of the models is by
    n_k; theirs divides by the images of all clients, also those that miss the round."""
    net = network(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), fedproc.Unit()), 3)
    flags = ("--momentum", 0.9, "--fade", 100, "--prototypes", "pass")
    server, clients = federation(fedproc, monkeypatch, *flags, net=net)
    play_theirs("fedproc", server, clients)


def test_fedgen_of_its_authors(double, monkeypatch):
    """Their counters begin at one. Each batch of the generator has one label: only there does their mean over
    the batch of losses times that of shares agree with each label's share. Their rates, which fall, are
    constant here. Adam steps along gradients that are rounding alone, hence the wider tolerance."""
    flags = ("--batch-size", 5, "--weight-decay", 0, "--epsilon", "uniform", "--noise", 2, "--width", 4,
             "--lambda-reg", 4, "--lambda-kd", 3, "--lambda-decay", 0.98, "--generator-lr", 0.005)
    steps = {3: itertools.count(1), 5: itertools.count(1)}

    def labels(p, B, replacement):
        step = torch.tensor(next(steps[B]))
        if B == 5:  # of the server
            return (step % 3).repeat(5)
        return (step + torch.arange(3)) % 3

    monkeypatch.setattr(torch, "multinomial", labels)
    monkeypatch.setattr(torch, "rand", lambda *shape, device: sines(*shape))
    args = parsed("baselines.fedgen", *FLAGS, *flags)
    net = ModelAndGenerator(two_layers(), filled(fedgen.Generator(args, 3, 3), start=200))
    server, clients = federation(fedgen, monkeypatch, *flags, net=net)
    for t, theirs in enumerate(AUTHORS["fedgen"]["rounds"]):
        uploads = {k: clients[k].train(copied(server.download(k)), t) for k in ROUNDS[t]}
        for up in uploads.values():
            up["c"] += 1
        server.update(uploads, t)
        assert_same(server.w, theirs["w"], atol=1e-9)
    generator = {name: server.w_g[name] for name, _ in net.G.named_parameters()}
    assert_same(generator, AUTHORS["fedgen"]["generator"], atol=1e-9)


def test_fedema_of_easyfl(double, monkeypatch):
    """With its divergence; who missed a round begins anew. In a client's first round its target network is
    the online one itself, as with --ema 0."""
    flags = ("--divergence", "conv-mean", "--stale", "restart", "--hidden", 3, "--dim", 2, "--lr-decay", 0.9,
             "--momentum", 0.5, "--weight-decay", 0, "--no-keep-optimizer")
    args = parsed("baselines.fedema", *FLAGS, *flags)
    convolutions = (nn.Conv2d(1, 2, 3, bias=False), nn.Tanh(), nn.Conv2d(2, 2, 1, bias=False), nn.ReLU())
    body = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = filled(Learner(common.Net(body, 2, 3), args))
    server, clients = federation(fedema, monkeypatch, *flags, net=net, shape=(1, 4, 4))

    def views(data, *_):
        for x, y in data.epochs():
            yield torch.cat([x, x.flip(3)]), y

    monkeypatch.setattr(fedema, "batches", views)
    for t, theirs in enumerate(AUTHORS["fedema"]["rounds"]):
        uploads = {}
        for k in ROUNDS[t]:
            net.args = dataclasses.replace(args, ema=0.9 if clients[k].own else 0)
            uploads[k] = clients[k].train(copied(server.download(k)), t)
        server.update(uploads, t)
        online = [name for name, _ in net.named_parameters() if fedema.travels(name)]
        assert_same(common.pick(server.w, online), theirs["w"], atol=1e-10)


def test_ditto_of_its_authors(double, monkeypatch):
    """Six steps of each client, in theirs one on v_k and one on w_k in turn."""
    theirs = AUTHORS["ditto"]
    flags = ("--lambda", theirs["lambda"], "--average", "uniform", "--weight-decay", 0)
    server, clients = federation(ditto, monkeypatch, *flags)
    monkeypatch.setattr(ditto, "batches", lambda data, *_: (6 * data.epochs())[:6])
    play_theirs("ditto", server, clients)
    for client, v in zip(clients, theirs["v"], strict=True):
        assert_same(client.v, v)


def test_lgfedavg_of_its_authors(double, monkeypatch):
    flags = ("--average", "uniform", "--momentum", 0.5, "--weight-decay", 0)
    theirs = AUTHORS["lgfedavg"]
    server, clients = federation(lgfedavg, monkeypatch, *flags)
    play_theirs("lgfedavg", server, clients)
    for client, own in zip(clients, theirs["own"], strict=True):
        assert_same(client.own, own)


def test_fedbn_of_its_authors(double, monkeypatch):
    """Scale, shift and statistics of BN are the clients' own. Who missed rounds receives all else."""
    theirs = AUTHORS["fedbn"]
    net = network(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh()), 3)
    flags = ("--average", "uniform", "--weight-decay", 0)
    server, clients = federation(fedbn, monkeypatch, *flags, net=net)
    play_theirs("fedbn", server, clients)
    for client, bn in zip(clients, theirs["bn"], strict=True):
        own = {name: v for name, v in client.bn.items() if v.is_floating_point()}  # without the counter
        assert_same(own, bn)
