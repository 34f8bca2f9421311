"""FedADG's wiring: whole rounds of server and clients recomputed in plain torch, with every coefficient and
switch away from its neutral value, and what the official code gave on the same small inputs: rounds, learning
rates, networks (tests/fixtures/fedadg.json)."""

import math

import common
import fedadg
import official.fedadg
from tests.conftest import ROOT, read_json
from tests.plain_torch import ClippedSGD, batch_norm, batch_norm_at_rest, in_double
from tests.three_clients import assert_near
from tests.methods.test_fedadg import C, federation, of_d, of_release, parsed, small_args, train, with_d

import pytest
import torch
from torch import nn
from torch.testing import assert_close

FLAGS = ("--steps", 6, "--E0", 3, "--lr", 0.9, "--lr-adversarial", 0.6, "--lr-decay", 0.6, "--momentum", 0.8,
         "--weight-decay", 0.02, "--clip", 0.004, "--lambda0", 1.3, "--lambda1", 0.4, "--smoothing", 0.15,
         "--slope", 0.2)


# Two rounds by hand


def noise_of(monkeypatch):
    """A list to which every draw of torch.rand is added from now on."""
    rand, noise = torch.rand, []

    def remembering(*shape, **kw):
        noise.append(rand(*shape, **kw))
        return noise[-1]
    monkeypatch.setattr(torch, "rand", remembering)
    return noise


class Hand:
    """ClientUpdate in float64: the networks written out, plain autograd, SGD by hand."""

    def __init__(self, args, start):
        self.a, self.p = args, {}
        self.opt = ClippedSGD(0, args.momentum, args.weight_decay, args.clip or math.inf)
        for name, v in start.items():
            trained = v.is_floating_point() and "running" not in name
            if name == "D.project.weight":
                trained = args.projection == "trained"
            self.p[name] = v.double().requires_grad_(trained)

    def linear(self, name, x):
        return x @ self.p[name + ".weight"].T + self.p.get(name + ".bias", 0)

    def F(self, x, training):
        a, bn = self.linear("net.body.1", x.double().flatten(1)), "net.body.2"
        h = batch_norm(a, self.p, self.p, bn) if training else batch_norm_at_rest(self.p, bn, a)
        return h.clamp(min=0)

    def two(self, module, x):
        first = self.linear(module + ".first", x)
        return self.linear(module + ".second", torch.where(first > 0, first, self.a.slope * first))

    def reference(self, z, code):
        """G, or U[-1, 1] of Table 6."""
        if self.a.reference == "uniform":
            return 2 * z.double() - 1
        return self.two("G", torch.cat([z.double(), code], 1)).clamp(min=0)

    def D(self, h, code):
        if self.a.projection == "none":
            h = torch.cat([h, code], 1)
        elif self.a.label_at == "before":
            h = torch.cat([h, code], 1) @ self.p["D.project.weight"].T
        else:
            h = torch.cat([h @ self.p["D.project.weight"].T, code], 1)
        return 1 / (1 + torch.exp(-self.two("D", h)[:, 0]))

    def err(self, h, y):
        s = self.a.smoothing
        logits = self.linear("net.head", h)
        logs = logits - logits.exp().sum(1, keepdim=True).log()
        return -((1 - s) * logs[range(len(y)), y] + s * logs.mean(1)).mean()

    def sgd(self, prefix, lr, loss):
        leaves = {name: v for name, v in self.p.items() if name.startswith(prefix) and v.requires_grad}
        self.opt.lr, after = lr, {name: v.detach() for name, v in leaves.items()}
        self.opt.step(loss, leaves, after)
        self.p |= {name: v.requires_grad_() for name, v in after.items()}

    def c3(self, lr, x, y):
        self.sgd("net.", lr, self.err(self.F(x, True), y))

    def c5(self, lr, x, y, code):
        h = self.F(x, True)
        adv = (1 - self.D(h, code)).square().mean()
        self.sgd("net.", lr, self.a.lambda0 * adv + self.a.lambda1 * self.err(h, y))

    def c7(self, lr, x, z, code):
        fake = self.D(self.F(x, False).detach(), code)
        ref = self.D(self.reference(z, code).detach(), code)
        if of_release(self.a, "d_loss") == "printed":
            terms = -((1 - fake) ** 2 + ref ** 2)
        else:
            terms = fake ** 2 + (1 - ref) ** 2
        self.sgd("D.", lr, terms.mean())

    def c8(self, lr, z, code):
        if self.a.reference == "uniform":
            return
        ref = self.D(self.reference(z, code), code)
        if of_release(self.a, "g_loss") == "printed":
            ref = 1 - ref
        self.sgd("G.", lr, (ref ** 2).mean())

    def round(self, t, batches, noise, lr_adversarial):
        a = self.a
        lr, lr_adversarial = a.lr * a.lr_decay ** t, lr_adversarial * a.lr_decay ** t
        if not a.keep_momentum:
            kept = {name: v for name, v in self.opt.velocity.items() if name.startswith("D.")}
            self.opt.velocity = kept if a.keep_momentum_d else {}
        first = a.E0
        if not a.steps:
            first = a.E0 * len(batches) // a.epochs
        for i, (x, y) in enumerate(batches):
            if i < first:
                self.c3(lr, x, y)
                continue
            code = torch.eye(C).double()[y][:, :C if a.onehot else 0]
            z = noise.pop(0)
            self.c5(lr, x, y, code)
            self.c7(lr_adversarial, x, z, code)
            self.c8(lr_adversarial, z, code)


@pytest.mark.parametrize("flags", [
    ("--keep-momentum",),
    ("--keep-momentum-d",),
    ("--projection", "trained", "--label-at", "before", "--d-loss", "printed", "--g-loss", "printed"),
    ("--label-at", "before", "--steps", 0, "--epochs", 3, "--E0", 1),
    ("--projection", "none", "--no-onehot", "--clip", 0, "--lr", 0.3, "--smoothing", 0),
    ("--reference", "uniform", "--label-at", "before", "--steps", 3, "--E0", 0),
    ("--lambda0", 0),  # the control: no adversary
])
def test_two_rounds_of_server_and_clients_by_hand(monkeypatch, flags):
    """Two clients, of 7 and 12 images: all parameters and statistics of w, and each client's D. An epoch is 2
    batches of the first one, 4 of the second."""
    args = small_args(*FLAGS, *flags)
    server, clients, net = federation(args)
    w = in_double(common.state(net))
    hands = [Hand(args, common.state(net)) for _ in clients]
    noise = noise_of(monkeypatch)
    for t in range(2):
        uploads = {}
        for client, hand in zip(clients, hands):
            batches = list(common.batches(client.data.train, args, t, client.k))
            uploads[client.k] = train(client, server, t)
            for name, v in w.items():
                if not name.startswith("D."):
                    hand.p[name] = v.clone().requires_grad_(hand.p[name].requires_grad)
            hand.round(t, batches, noise, 0.6)
            assert min(hand.opt.norms) > args.clip and not noise
        server.update(uploads, t)
        w = {name: (hands[0].p[name] + hands[1].p[name]).detach() / 2 for name in w}
        for client, hand in zip(clients, hands):
            got = with_d(server.w, client.w_d)
            want = w | {name: v.detach() for name, v in hand.p.items() if name.startswith("D.")}
            assert_near(in_double(got), want)


# The official code


OFFICIAL = read_json(ROOT / "tests" / "fixtures" / "fedadg.json")
CLASSES = {"vlcs": 5, "pacs": 7}
F_OF_TEST = "net.body.1.weight", "net.body.1.bias"
C_OF_TEST = "net.head.weight", "net.head.bias"
G_OF_TEST = "first.weight", "first.bias", "second.weight", "second.bias"
D_OF_TEST = (*G_OF_TEST, "project.weight")


def filled(tensors, names, seed):
    """New values of the tensors with these names, drawn one after the other."""
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tensors[name].shape, generator=rng) / 2 for name in names}


def official_args(dataset, *flags):
    """The settings of the variant, with rates that can be seen in two rounds."""
    return parsed("--dataset", dataset, "--variant", "official", "--precision", "fp32",
                  "--device", "cpu", "--noise", 5, "--projection-size", 4, "--batch-size", 4, "--lr", 0.2,
                  "--lr-adversarial", 0.1, "--weight-decay", 0.01, "--warmup", 20, *flags)


def official_data(k, classes):
    """The eight images of a client, and the two batches of each of its epochs."""
    rng = torch.Generator().manual_seed(50 + k)
    images = torch.randint(0, 256, (8, 1, 2, 2), dtype=torch.uint8, generator=rng)
    labels = torch.randint(0, classes, (8,), generator=rng)
    part = common.Data(images, torch.arange(8), labels, "cpu", "unit")
    x = images.float() / 255
    return common.ClientData(f"c{k}", part, part, part), [(x[:4], labels[:4]), (x[4:], labels[4:])]


@pytest.mark.parametrize("dataset", CLASSES)
def test_two_rounds_are_those_of_the_official_code(monkeypatch, dataset):
    """Its localTrain.train and FedAvg, on two clients: E0 and E1 epochs with the warm-up, D before F and C,
    the label's value, the smoothing, what reaches G, and D with its momentum on the client."""
    args, classes = official_args(dataset), CLASSES[dataset]
    body = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU())
    net = official.fedadg.Network(args, common.Net(body, 6, classes), 6, classes)
    start = common.state(net)
    start |= filled(start, F_OF_TEST, 1) | filled(start, C_OF_TEST, 2)
    start |= filled(start, [f"G.{name}" for name in G_OF_TEST], 3)
    net.load_state_dict(start)
    server, clients, of_client = fedadg.Server(args, net, 2), [], []
    for k in range(2):
        data, epoch = official_data(k, classes)
        clients.append(official.fedadg.Client(args, net, k, data))
        clients[k].w_d = filled(of_d(start), D_OF_TEST, 10 + k)
        of_client.append(epoch * args.epochs)
    monkeypatch.setattr(official.fedadg, "batches", lambda data, args, t, k: iter(of_client[k]))
    for t in range(2):
        uploads = {}
        for k, client in enumerate(clients):
            torch.manual_seed(100 + 10 * t + k)
            uploads[k] = client.train(server.download(k), t)
        server.update(uploads, t)
    want = OFFICIAL["rounds"][dataset]
    got = {"F": [server.w[name] for name in F_OF_TEST], "C": [server.w[name] for name in C_OF_TEST],
           "G": [server.w[f"G.{name}"] for name in G_OF_TEST]}
    for part, tensors in got.items():
        values = torch.cat([v.flatten() for v in tensors])
        assert_near(values, torch.tensor(want[part]))
    for client, of_d_there in zip(clients, want["D"]):
        values = torch.cat([client.w_d[name].flatten() for name in D_OF_TEST])
        assert_near(values, torch.tensor(of_d_there))


@pytest.mark.parametrize("dataset", CLASSES)
def test_learning_rates_are_those_of_the_official_code(dataset):
    """What its optimizers had in each epoch of a round: at most 3% of the rate of its README on VLCS, 9% on
    PACS."""
    args = parsed("--dataset", dataset, "--variant", "official")
    rates = {"FC": args.lr, "D": args.lr_adversarial, "G": args.lr_adversarial}
    for name, of_epochs in OFFICIAL["rates"][dataset].items():
        begins = 0 if name == "FC" else args.E0
        got = []
        for i in range(begins, args.epochs):
            done = official.fedadg.warm_up_steps(i, args.E0, name)
            got.append(official.fedadg.warm(rates[name], done, args.warmup))
        assert got == pytest.approx(of_epochs)
        assert official.fedadg.warm(rates[name], args.warmup + 1, args.warmup) == pytest.approx(rates[name])


@pytest.mark.parametrize("dataset", CLASSES)
def test_networks_compute_what_the_official_classes_do(dataset):
    """Of D and G with the same weights; D's hidden layer has 1024 there, G's 4096."""
    classes = CLASSES[dataset]
    args = official_args(dataset, "--projection-size", 8, "--onehot-value", 0.6)
    D = fedadg.Discriminator(args, classes, 1024)
    D.load_state_dict(filled(D.state_dict(), D_OF_TEST, 4))
    code = torch.eye(classes)[:3] * 0.6
    h = torch.randn(3, 1024, generator=torch.Generator().manual_seed(5))
    assert_near(D(h, code).detach(), torch.tensor(OFFICIAL["networks"][dataset]["D"]))
    G = fedadg.Generator(args, classes, 4096)
    G.load_state_dict(filled(G.state_dict(), G_OF_TEST, 6))
    torch.manual_seed(7)
    got = G(code).detach()[:, :5].flatten()
    assert_close(got, torch.tensor(OFFICIAL["networks"][dataset]["G"]), atol=1e-4, rtol=1e-4)
