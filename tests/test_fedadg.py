"""FedADG: the losses and Algorithm 1 against an independent calculation, its steps by what changes when and what travels."""

import dataclasses
import itertools

import common
import fedadg
from tests.conftest import interrupted, metrics, parsed, run_here

import basics
import networks
import pytest
import torch
from torch import nn, tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

C, H, P, Z = 3, 6, 4, 5  # classes, features, outputs of the projection and noise of the tiny federation
SMALL = ("--limit", 20, "--batch-size", 8, "--steps", 3, "--E0", 1)  # whole runs on the digits


def small_args(*flags):
    return parsed("fedadg", "--scale", "smoke", "--precision", "fp32", "--device", "cpu", "--projection-size", P,
                  "--noise", Z, "--batch-size", 3, *flags)


def data(n, seed):
    """n images of 2x2 pixels in three classes."""
    rng = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, 1, 2, 2), dtype=torch.uint8, generator=rng)
    part = common.Data(images, torch.arange(n), torch.arange(n) % C, "cpu", "unit")
    return common.ClientData(f"c{seed}", part, part, part)


def federation(args, sizes=(7, 12)):
    """A server and clients of 7 and of 12 images. F is a linear layer with BN and ReLU, C a linear layer."""
    common.seed_all(0)
    body = nn.Sequential(nn.Flatten(), nn.Linear(4, H), nn.BatchNorm1d(H), nn.ReLU())
    net = fedadg.FedADG(args, networks.Net(body, H, C), H, C)
    return fedadg.Server(args, net, len(sizes)), [fedadg.Client(args, net, k, data(n, k)) for k, n in enumerate(sizes)], net


def same(a, b):
    """Nested dicts of tensors and numbers, equal bit for bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def differ(a, b):
    """The names of the tensors that are not equal."""
    return {n for n in a if not torch.equal(a[n], b[n])}


def train(client, server, t=0):
    """ClientUpdate as common.Loop calls it."""
    common.seed_all(0, "train", t, client.k)
    return client.train(server.download(client.k), t)


# Eqs. (1)-(3)


def test_eq1_eq2_eq3_by_hand():
    h, ref = tensor([0.2, 0.6], requires_grad=True), tensor([0.5, 0.9], requires_grad=True)

    def gradients(loss, value):
        assert abs(loss.item() - value) < 1e-6
        return torch.autograd.grad(loss, [h, ref], allow_unused=True)

    # (1 - D(h))^2: 0.64, 0.16; D(h')^2: 0.25, 0.81; D(h)^2: 0.04, 0.36; (1 - D(h'))^2: 0.25, 0.01
    for loss, value, of_h, of_ref in (
            (fedadg.loss_d(h, ref, "printed"), -0.93, [0.8, 0.4], [-0.5, -0.9]),
            (fedadg.loss_d(h, ref, "lsgan"), 0.33, [0.2, 0.6], [-0.5, -0.1]),
            (fedadg.loss_f(h), 0.4, [-0.8, -0.4], None),
            (fedadg.loss_g(ref, "printed"), 0.13, None, [-0.5, -0.1]),
            (fedadg.loss_g(ref, "opposite"), 0.53, None, [0.5, 0.9])):
        for got, want in zip(gradients(loss, value), (of_h, of_ref), strict=True):
            assert got is None if want is None else torch.allclose(got, tensor(want))


@pytest.mark.parametrize("form", ["printed", "lsgan"])
def test_eq1_minimized_tells_the_features_from_the_reference(form):
    """Through the sigmoid D(h) falls to 0 and D(h') rises to 1, and the loss keeps its bound of -2 (printed) or 0."""
    torch.manual_seed(0)
    D = fedadg.Discriminator(small_args(), C, H)
    code = torch.eye(C)[torch.arange(30) % C]
    h, ref = torch.randn(30, H) / 2 + 1, torch.randn(30, H) / 2 - 1
    opt = torch.optim.SGD([p for p in D.parameters() if p.requires_grad], 1.0)
    for _ in range(150):
        loss = fedadg.loss_d(D(h, code), D(ref, code), form)
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert D(h, code).mean() < 0.05 and D(ref, code).mean() > 0.95
    assert 0 <= loss - (-2 if form == "printed" else 0) < 0.2


# Algorithm 1, recomputed


class Hand:
    """ClientUpdate in float64: the networks written out, plain autograd, SGD by hand."""

    def __init__(self, args, start):
        self.a, self.v = args, {}
        self.p = {n: v.double().requires_grad_(v.is_floating_point() and "running" not in n and n != "D.project.weight"
                                               or n == "D.project.weight" and args.projection == "trained")
                  for n, v in start.items()}

    def linear(self, name, x):
        return x @ self.p[name + ".weight"].T + self.p.get(name + ".bias", 0)

    def F(self, x, training):
        a, bn = self.linear("net.body.1", x.double().flatten(1)), "net.body.2."
        mean, var = self.p[bn + "running_mean"], self.p[bn + "running_var"]
        if training:
            mean, var = a.mean(0), (a - a.mean(0)).square().mean(0)
            n = len(a)
            for name, new in (("running_mean", mean), ("running_var", var * n / (n - 1))):
                self.p[bn + name] = 0.9 * self.p[bn + name] + 0.1 * new.detach()
        return ((a - mean) / (var + 1e-5).sqrt() * self.p[bn + "weight"] + self.p[bn + "bias"]).clamp(min=0)

    def two(self, module, x):
        first = self.linear(module + ".first", x)
        return self.linear(module + ".second", torch.where(first > 0, first, 0.01 * first))

    def G(self, z, code):
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
        logs = self.linear("net.head", h)
        logs = logs - logs.exp().sum(1, keepdim=True).log()
        return -((1 - s) * logs[range(len(y)), y] + s * logs.mean(1)).mean()

    def sgd(self, prefix, lr, loss):
        a, names = self.a, [n for n, v in self.p.items() if n.startswith(prefix) and v.requires_grad]
        g = torch.autograd.grad(loss, [self.p[n] for n in names])
        scale = min(1, a.clip / (float(torch.cat([v.flatten() for v in g]).norm()) + 1e-6)) if a.clip else 1
        for n, d in zip(names, g):
            d = scale * d + a.weight_decay * self.p[n].detach()
            self.v[n] = d if n not in self.v else a.momentum * self.v[n] + d
            self.p[n] = (self.p[n].detach() - lr * self.v[n]).requires_grad_()

    def round(self, t, batches, noise):
        a = self.a
        lr, lr_adversarial = (x * a.lr_decay ** t for x in (a.lr, a.lr_adversarial or 0.7 * a.lr))
        if not a.keep_momentum:
            self.v = {}
        for i, (x, y) in enumerate(batches):
            if i < a.E0:
                self.sgd("net.", lr, self.err(self.F(x, True), y))
                continue
            code = torch.zeros(len(y), C, dtype=torch.float64)
            code[range(len(y)), y] = a.onehot_value
            z = noise.pop(0)

            def c5():
                h = self.F(x, True)
                self.sgd("net.", lr, a.lambda0 * (1 - self.D(h, code)).square().mean() + a.lambda1 * self.err(h, y))

            def c7():
                fake, ref = self.D(self.F(x, False).detach(), code), self.D(self.G(z, code).detach(), code)
                sums = {"printed": -((1 - fake) ** 2 + ref ** 2), "lsgan": fake ** 2 + (1 - ref) ** 2}
                self.sgd("D.", lr_adversarial, sums[a.d_loss].mean())

            def c8():
                ref = self.D(self.G(z, code), code)
                if a.g_loss != "detached":
                    self.sgd("G.", lr_adversarial, {"printed": (1 - ref) ** 2, "opposite": ref ** 2}[a.g_loss].mean())

            for step in (c5, c7, c8) if a.order == "paper" else (c7, c5, c8):
                step()


@pytest.mark.parametrize("flags", [
    ("--clip", 0.3, "--weight-decay", 0.01),
    ("--g-loss", "printed", "--momentum", 0.9, "--lr-adversarial", 0.2, "--smoothing", 0),
    ("--momentum", 0.9, "--keep-momentum", "--lr-decay", 0.5, "--projection", "none", "--lambda0", 2, "--lambda1", 0.4),
    ("--d-loss", "printed", "--g-loss", "printed"),
    ("--variant", "official", "--d-loss", "lsgan", "--onehot-value", 0.7, "--keep-momentum", "--label-at", "after"),
    ("--variant", "official", "--g-loss", "detached", "--onehot-value", 0.6, "--label-at", "before", "--smoothing", 0.2)])
def test_algorithm1_by_hand(monkeypatch, flags):
    """Two rounds of a client, each with a step c3 and two iterations c5, c7, c8, of the same noise, batches and start."""
    args = small_args("--steps", 3, "--E0", 1, "--lr", 0.3, *flags)
    server, (client, _), net = federation(args)
    hand = Hand(args, common.state(net))
    rand, noise = torch.rand, []
    monkeypatch.setattr(torch, "rand", lambda *shape, **kw: noise.append(rand(*shape, **kw)) or noise[-1])
    for t in range(2):
        batches = list(common.batches(client.data.train, args, t, 0))
        up = train(client, server, t)
        assert [z.shape for z in noise] == [(len(y), Z) for _, y in batches[1:]] and all((z >= 0).all() for z in noise)
        hand.round(t, batches, noise)
        server.update({0: up}, t)
        got = up["w"] | {f"D.{n}": v for n, v in client.w_d.items()}
        assert got.keys() == hand.p.keys() and got["net.body.2.num_batches_tracked"] == 3 * (t + 1)
        for name in got.keys() - {"net.body.2.num_batches_tracked"}:
            torch.testing.assert_close(got[name].double(), hand.p[name].detach(), atol=2e-5, rtol=2e-4,
                                       msg=lambda text: f"{name}: {text}")


# Algorithm 1, observed: which step comes when, and what it changes


PARTS = {"F": "net.body.", "C": "net.head.", "RP": "D.project.", "D": "D.", "G": "G."}


def watched(monkeypatch, client, server, t=0):
    """Train a client: for each step of an optimizer, the losses computed since the last one and the parts it changed."""
    net, steps, losses, seen = client.net, [], [], {}
    values = lambda: {n: p.detach().clone() for n, p in net.named_parameters()}

    def spy(name):
        plain = getattr(fedadg, name)
        monkeypatch.setattr(fedadg, name, lambda *a, **kw: losses.append(name.removeprefix("loss_")) or plain(*a, **kw))

    def before(opt, *_):
        assert not seen or not differ(seen, values())  # no parameter changes but in the step of an optimizer
        seen.update(values())

    def after(opt, *_):
        names = differ(seen, values())
        steps.append((tuple(losses), {next(part for part, start in PARTS.items() if n.startswith(start)) for n in names}))
        losses.clear()
        seen.update(values())

    with monkeypatch.context() as m:
        monkeypatch = m
        for name in ("cross_entropy", "loss_f", "loss_d", "loss_g"):
            spy(name)
        hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        try:
            up = train(client, server, t)
        finally:
            for hook in hooks:
                hook.remove()
    assert not differ(seen, values())
    return steps, up


C3, C5 = (("cross_entropy",), {"F", "C"}), (("cross_entropy", "f"), {"F", "C"})
C7, C8 = (("d",), {"D"}), (("g",), {"G"})


@pytest.mark.parametrize("flags,warm,rest", [
    (("--steps", 5, "--E0", 2), 2, 3), (("--steps", 4, "--E0", 0), 0, 4), (("--steps", 3, "--E0", 3), 3, 0),
    (("--epochs", 3, "--E0", 1), 2, 4),  # 7 images in batches of 3 are two batches, of 3 and 4
    (("--epochs", 2, "--E0", 0), 0, 4)])
def test_the_steps_of_a_round_what_they_change_and_their_number(monkeypatch, flags, warm, rest):
    """c3 and c5 change F and C, c7 D without its projection, c8 G; E0 and E1 in mini-batches or in epochs."""
    for order, cycle in (("paper", [C5, C7, C8]), ("official", [C7, C5, C8])):
        server, (client, _), _ = federation(small_args(*flags, "--order", order, "--smoothing", 0.1))
        steps, _ = watched(monkeypatch, client, server)
        assert steps == [C3] * warm + cycle * rest


def test_the_steps_of_the_reduced_versions(monkeypatch):
    def steps(*flags):
        server, (client, _), _ = federation(small_args("--steps", 2, "--E0", 1, *flags))
        return watched(monkeypatch, client, server)[0]

    assert steps("--projection", "trained") == [C3, C5, (("d",), {"D", "RP"}), C8]
    assert steps("--projection", "none") == [C3, C5, C7, C8]
    assert steps("--reference", "laplace") == [C3, C5, C7]  # there is no G
    assert steps("--g-loss", "detached") == [C3, C5, C7]
    assert steps("--no-adversarial") == [C3, C3]
    assert steps("--lambda1", 0) == [C3, (C5[0], {"F"}), C7, C8]  # L_adv_f has no gradient in w_c
    assert steps("--lambda0", 0, "--lambda1", 0) == [C3, (C5[0], set()), C7, C8]


def test_modes_of_f_in_the_steps():
    """F is in evaluation mode for D's step alone, which leaves BN's statistics; D gets what F gives after step c5."""
    server, (client, _), net = federation(small_args("--steps", 3, "--E0", 1))
    modes = []
    net.net.body.register_forward_hook(lambda m, x, h: modes.append(m.training))
    up = train(client, server)
    assert modes == [True] + [True, False] * 2
    assert up["w"]["net.body.2.num_batches_tracked"] == 3


@pytest.mark.parametrize("form,sign", [("opposite", -1), ("printed", 1), ("detached", 0)])
def test_eq3_the_generator_moves(monkeypatch, form, sign):
    """After c7, D does not change: D(h') of the round's noise falls, or rises as printed, or stays, whatever SGD is told."""
    args = small_args("--steps", 1, "--E0", 0, "--lr", 0.3, "--g-loss", form, "--momentum", 0.9, "--weight-decay",
                      0 if sign else 0.1, "--keep-momentum")
    server, (client, _), net = federation(args)
    rand, noise = torch.rand, []
    monkeypatch.setattr(torch, "rand", lambda *shape, **kw: noise.append(rand(*shape, **kw)) or noise[-1])
    w = common.copied(server.w)
    up = train(client, server)
    y = next(common.batches(client.data.train, args, 0, 0))[1]
    hand = Hand(args, up["w"] | {f"D.{n}": v for n, v in client.w_d.items()})
    code = torch.eye(C, dtype=torch.float64)[y]
    now = hand.D(hand.G(noise[0], code), code).mean()
    hand.p |= {n: v.double() for n, v in w.items() if n.startswith("G.")}
    change = now - hand.D(hand.G(noise[0], code), code).mean()
    moved = {n for n in differ(w, up["w"]) if n.startswith("G.")}
    assert sign * change > 0 if sign else change == 0 and not moved


# Labels, projection, references, networks


def test_without_one_hot_labels_reach_neither_g_nor_d():
    """With lambda_1 0 a round does not depend on the labels; with one-hot labels it does."""
    for flag, equal in (("--no-onehot", True), ("--onehot", False)):
        ends = []
        for shift in (0, 1):
            server, (client, _), net = federation(small_args("--steps", 3, "--E0", 0, "--lambda1", 0, flag))
            client.data.train.labels = (client.data.train.labels + shift) % C
            ends.append(train(client, server)["w"] | client.w_d)
        changed = differ(*ends)
        assert not changed if equal else {"first.weight", "second.weight", "G.first.weight", "net.body.1.weight"} <= changed
        assert net.G.first.in_features == Z + C * (not equal) and net.D.first.in_features == P + C * (not equal)


def test_d_and_g_depend_on_the_label():
    torch.manual_seed(0)
    h, codes = torch.randn(4, H), [torch.eye(C)[[i] * 4] for i in range(C)]
    for label_at in ("after", "before"):
        D, G = fedadg.Discriminator(small_args("--label-at", label_at), C, H), fedadg.Generator(Z, C, H, relu=True)
        for a, b in itertools.combinations(codes, 2):
            assert not torch.allclose(D(h, a), D(h, b))
            outs = [(torch.manual_seed(1), G(code))[1] for code in (a, b)]
            assert outs[0].shape == (4, H) and not torch.allclose(*outs)
        assert D(h, codes[0]).shape == (4,) and ((D(100 * h, codes[0]) >= 0) & (D(100 * h, codes[0]) <= 1)).all()


def test_the_projection_is_of_the_seed_alone_and_keeps_lengths():
    torch.manual_seed(3)
    make = lambda *flags: fedadg.Discriminator(small_args("--projection-size", 400, *flags), C, 50).project
    one, again, other = make(), make("--projection", "trained"), make("--seed", 1)
    assert torch.equal(one.weight, again.weight) and not torch.equal(one.weight, other.weight) and one.bias is None
    assert not one.weight.requires_grad and again.weight.requires_grad
    x = torch.randn(50)
    assert abs(one(x).norm() / x.norm() - 1) < 0.1 and one(x).shape == (400,)
    assert make("--label-at", "before").in_features == 50 + C and isinstance(make("--projection", "none"), nn.Identity)


MOMENTS = {"gaussian": (1, 3, 3.5), "uniform": (1 / 3, 1.8, 1), "laplace": (1, 6, 5)}  # variance 2 b^2 = 1 with b = 1/sqrt 2


@pytest.mark.parametrize("reference", MOMENTS)
def test_table6_references(reference):
    """Variance, kurtosis and, for U, bounds of h'; it has the shape of the features and no label; G is not there."""
    server, (client, _), net = federation(small_args("--reference", reference))
    assert not hasattr(net, "G") and not [n for n in server.w if n.startswith("G.")]
    torch.manual_seed(0)
    h = client.reference(torch.zeros(20000, C))
    variance, kurtosis, reach = MOMENTS[reference]
    assert h.shape == (20000, H) and h.dtype == torch.float32 and abs(h.mean()) < 0.02
    assert abs(h.var() / variance - 1) < 0.03 and abs((h ** 4).mean() / h.var() ** 2 / kurtosis - 1) < 0.1
    assert h.max() <= 1 and h.min() >= -1 and h.max() > 0.999 if reference == "uniform" else h.abs().max() > reach
    torch.manual_seed(0)
    assert torch.equal(client.reference(torch.ones(20000, C)), h)


def test_section_5_1_alexnet():
    """F is AlexNet without its last layer, C 4096-1000-classes; G has two layers of 4096, D one and one of one output."""
    args = parsed("fedadg", "--dataset", "pacs", "--image-size", 64, "--weights", "none")
    with torch.device("meta"):
        net = fedadg.build(args, 3, 7)
        assert net.features(torch.zeros(2, 3, 64, 64)).shape == (2, 4096) and net(torch.zeros(2, 3, 64, 64)).shape == (2, 7)
    sizes = lambda m: [(x.in_features, x.out_features) for x in m.modules() if isinstance(x, nn.Linear)]
    assert sizes(net.net.body) == [(9216, 4096), (4096, 4096)] and sizes(net.net.head) == [(4096, 1000), (1000, 7)]
    assert len(net.net.head) == 2
    assert sizes(net.G) == [(2048 + 7, 4096), (4096, 4096)]
    assert sizes(net.D) == [(4096, 1000), (1000 + 7, 4096), (4096, 1)]
    with torch.device("meta"):
        net = fedadg.build(dataclasses.replace(args, label_at="before", onehot=False, noise=30, projection="none"), 3, 7)
    assert sizes(net.G) == [(30, 4096), (4096, 4096)] and sizes(net.D) == [(4096, 4096), (4096, 1)]


@pytest.mark.parametrize("backbone", ["smallcnn", "smallcnn_bn", "resnet18"])
def test_g_ends_as_the_features_do(backbone):
    """With ReLU where the features have it: half of smallcnn's are negative, none of the others'."""
    net = fedadg.build(small_args("--backbone", backbone, "--image-size", 32), 3, C).eval()
    torch.manual_seed(0)
    h, ref = net.features(torch.rand(8, 3, 32, 32)), net.G(torch.eye(C)[torch.arange(8) % C])
    assert h.shape == ref.shape and bool((h < 0).any()) == bool((ref < 0).any()) == (backbone == "smallcnn")


# Who keeps and sends what


def number(F=4 * H + H + 2 * H, head=H * C + C, G=(Z + C) * H + H + H * H + H, adversarial=True):
    """Bytes of F and C (BN's mean, variance and counter too) and of G."""
    return 4 * (F + head + G * adversarial) + 4 * 2 * H + 8


@pytest.mark.parametrize("flags,with_g", [((), True), (("--projection", "trained"), True),
                                          (("--reference", "uniform"), False), (("--no-adversarial",), False)])
def test_what_travels_and_what_stays(flags, with_g):
    server, clients, net = federation(small_args("--steps", 3, "--E0", 1, *flags))
    start = common.state(net)
    uploads = {}
    for k, client in enumerate(clients):
        down = server.download(k)
        uploads[k] = train(client, server)
        for payload in (down, uploads[k]):
            assert payload.keys() == {"w"} and common.nbytes(payload) == number(adversarial=with_g)
            assert {n.split(".")[0] for n in payload["w"]} == {"net", "G"} - ({"G"} if not with_g else set())
        same(down["w"], {n: v for n, v in start.items() if not n.startswith("D.")})  # c1 and s1: the same for all
        moved = differ(start, uploads[k]["w"] | {n: v for n, v in start.items() if n.startswith("D.")})
        assert moved == {n for n in start if not n.startswith("D.")}
    kept = common.copied(uploads)
    server.update(uploads, 0)
    same(uploads, kept)
    for n, v in server.w.items():  # 1/K, whatever the 7 and 12 images
        mean = (uploads[0]["w"][n].double() + uploads[1]["w"][n].double()) / 2
        torch.testing.assert_close(v.double(), mean if v.is_floating_point() else mean.round(), atol=1e-6, rtol=1e-6)
    same(server.state_dict(), {"w": server.w})
    if "--no-adversarial" in flags:
        assert all(c.state_dict() == {"w_d": {}, "momentum": {}} for c in clients)
        return
    trained = {"first.weight", "first.bias", "second.weight", "second.bias"} | (
        {"project.weight"} if "trained" in flags else set())
    initial = {n[2:]: v for n, v in start.items() if n.startswith("D.")}
    assert all(differ(initial, c.w_d) == trained for c in clients) and differ(clients[0].w_d, clients[1].w_d) == trained


def test_each_client_goes_on_with_its_own_discriminator():
    """The scratch network has another client's D in between; a client that is not sampled keeps its D."""
    server, clients, net = federation(small_args("--steps", 2, "--E0", 1), (7, 12, 9))
    initial = common.copied(clients[0].w_d)
    for k in (0, 1):
        train(clients[k], server)
    own = [common.copied(c.w_d) for c in clients]
    same(own[2], initial)
    for client, w_d in zip(clients, own):
        held = common.state(client.model(server.download(client.k)))
        same({n[2:]: v for n, v in held.items() if n.startswith("D.")}, w_d)
        same({n: v for n, v in held.items() if not n.startswith("D.")}, server.w)
    for k in (1, 0):  # in the other order: nothing but the state dicts is carried on
        train(clients[k], server, 1)
    ends = [common.copied(c.state_dict()) for c in clients]
    server2, again, _ = federation(small_args("--steps", 2, "--E0", 1), (7, 12, 9))
    for k in (1, 0):
        again[k].load_state_dict({"w_d": own[k], "momentum": {}})
        train(again[k], server2, 1)
        same(again[k].state_dict(), ends[k])


def test_momentum_is_kept_for_each_module_or_not_at_all():
    args = small_args("--steps", 3, "--E0", 1, "--momentum", 0.9, "--keep-momentum")
    server, (client, _), net = federation(args)
    train(client, server)
    shapes = {name: {n: p.shape for n, p in module.named_parameters() if p.requires_grad}
              for name, module in (("FC", net.net), ("D", net.D), ("G", net.G))}
    assert {name: {n: v["momentum_buffer"].shape for n, v in kept.items()} for name, kept in client.momentum.items()} == shapes
    assert "project.weight" not in shapes["D"]
    server, (client, _), _ = federation(dataclasses.replace(args, keep_momentum=False))
    train(client, server)
    assert client.momentum == {}


def test_the_log_has_every_loss():
    server, (client, _), _ = federation(small_args("--steps", 3, "--E0", 1))
    train(client, server)
    log = {n: float(v) for n, v in client.log.items()}
    assert log.keys() == {"loss", "adv_f", "adv_d", "adv_g"} and 0 <= log["adv_d"] <= 2
    assert log["loss"] > 0 and 0 <= log["adv_f"] <= 1 and 0 <= log["adv_g"] <= 1


# Settings


def test_learning_rates_and_weights_of_section_5_1(monkeypatch):
    def rates(*flags):
        args = parsed("fedadg", *flags)
        small = dataclasses.replace(args, steps=2, E0=1, device="cpu", precision="fp32", noise=Z)
        server, (client, _), _ = federation(small)
        seen = []
        hook = register_optimizer_step_pre_hook(lambda opt, *_: seen.append(round(opt.param_groups[0]["lr"], 9)))
        try:
            train(client, server, t=2)
        finally:
            hook.remove()
        return args, seen

    for dataset, lr in (("vlcs", 0.01), ("pacs", 0.001)):
        args, seen = rates("--dataset", dataset)
        assert seen == [lr, lr, round(0.7 * lr, 9), round(0.7 * lr, 9)]  # c3, c5, c7, c8
        assert (args.lambda0, args.lambda1, args.momentum, args.weight_decay, args.clip) == (0.85, 0.15, 0, 0, 0)
        assert (args.backbone, args.weights, args.protocol, args.projection_size) == ("alexnet", "imagenet", "lodo", 1000)
        assert (args.d_loss, args.g_loss, args.order, args.projection) == ("lsgan", "opposite", "paper", "fixed")
        assert rates("--dataset", dataset, "--lr", 0.1, "--lr-decay", 0.5)[1] == [0.025, 0.025, 0.0175, 0.0175]
        assert rates("--dataset", dataset, "--lr-adversarial", 0.4, "--lr-decay", 0.5)[1] == [lr / 4, lr / 4, 0.1, 0.1]
    # the official code: D, (F, C), G; there VLCS and PACS have each other's learning rates
    args, seen = rates("--dataset", "pacs", "--variant", "official")
    assert seen == [0.01, 0.007, 0.01, 0.007]
    assert (args.d_loss, args.g_loss, args.label_at, args.onehot_value) == ("lsgan", "opposite", "after", 0.7)
    assert (args.E0, args.epochs, args.rounds, args.batch_size) == (3, 10, 30, 10)
    vlcs, seen = rates("--dataset", "vlcs", "--variant", "official")
    assert seen == [0.001, 0.0007, 0.001]  # G never learns
    assert (vlcs.d_loss, vlcs.g_loss, vlcs.label_at, vlcs.onehot_value, vlcs.smoothing) == (
        "printed", "detached", "before", 0.6, 0.2)
    assert (vlcs.E0, vlcs.epochs, vlcs.rounds, vlcs.batch_size) == (5, 15, 20, 16)
    for a in (args, vlcs):
        assert (a.lambda0, a.lambda1, a.momentum, a.weight_decay) == (0.15, 0.85, 0.9, 1e-5)
        assert (a.order, a.projection, a.projection_size) == ("official", "trained", 1024)
    assert parsed("fedadg", "--dataset", "vlcs", "--variant", "official", "--g-loss", "printed").g_loss == "printed"


@pytest.mark.parametrize("dataset", fedadg.PAPER)
@pytest.mark.parametrize("scale", ["paper", "laptop", "smoke"])
def test_every_setting_has_both_phases(dataset, scale):
    for variant in ("paper", "official"):
        args = parsed("fedadg", "--dataset", dataset, "--scale", scale, "--variant", variant)
        assert 0 < args.E0 < (args.steps or args.epochs)


@pytest.mark.parametrize("flags,unit", [(("--epochs", 2, "--E0", 3), "2 --epochs"),
                                        (("--steps", 4, "--E0", 5), "4 --steps")])
def test_more_warm_up_than_the_round_has(tmp_path, capsys, flags, unit):
    with pytest.raises(SystemExit) as stopped:
        run_here("fedadg", tmp_path / "run", *flags)
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and err.count("\n") == 1 and unit in err and "--E0 is" in err


# Whole runs


def test_without_g_and_d_it_is_fedavg_bit_for_bit(tmp_path):
    """Table 5: --no-adversarial; with no smoothing the metrics and weights are those of fedavg.py with uniform weights."""
    flags = ("--epochs", 2, "--lr", 0.05, "--batch-size", 8, "--momentum", 0.9, "--clip", 1, "--lr-decay", 0.5,
             "--clients-per-domain", 2, "--dirichlet", 20, "--limit", 50, "--target", "d30", "--protocol", "lodo")
    run_here("fedadg", tmp_path / "adg", *flags, "--no-adversarial", "--smoothing", 0)
    run_here("fedavg", tmp_path / "avg", *flags, "--average", "uniform")
    adg, avg = (basics.load_file(tmp_path / n / "checkpoint.pt", "checkpoint")["server"]["w"] for n in ("adg", "avg"))
    same({n.removeprefix("net."): v for n, v in adg.items()}, avg)
    lines = [metrics(tmp_path / n) for n in ("adg", "avg")]
    for line in lines[0] + lines[1]:
        for client in line["clients"].values():
            del client["bytes_up"]  # FedAvg's client also sends its number of images
    assert lines[0] == lines[1] and len(lines[0]) == 2


def test_resume_gives_the_bytes_of_an_uninterrupted_run(tmp_path, monkeypatch, capsys):
    """With the discriminators and the momentum of every module; half of the clients train in a round."""
    flags = (*SMALL, "--rounds", 4, "--checkpoint-every", 0, "--momentum", 0.9, "--keep-momentum", "--participation", 0.5)
    run_here("fedadg", tmp_path / "whole", *flags)
    interrupted("fedadg", monkeypatch, tmp_path / "parts", *flags, after=2)
    run_here("fedadg", tmp_path / "parts", *flags)
    whole, parts = (basics.load_file(tmp_path / n / "checkpoint.pt", "checkpoint") for n in ("whole", "parts"))
    for key in ("server", "clients", "history", "best"):
        same(whole[key], parts[key])
    for name in ("metrics.jsonl", "best.pt"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    ends = [c["w_d"] for c in whole["clients"].values()]
    assert len(ends) == 6 and all(torch.equal(e["project.weight"], ends[0]["project.weight"]) for e in ends)
    assert any(differ(ends[0], e) for e in ends[1:]) and any(c["momentum"] for c in whole["clients"].values())


@pytest.mark.parametrize("flags", [("--variant", "official", "--g-loss", "detached", "--label-at", "before"),
                                   ("--protocol", "lodo", "--target", "d75", "--reference", "gaussian", "--keep-momentum"),
                                   ("--precision", "bf16", "--projection", "none", "--no-onehot")])
def test_runs_at_smoke_scale(tmp_path, flags):
    result = run_here("fedadg", tmp_path / "run", *SMALL, *flags)
    assert result["last"]["round"] == 2 and 0 <= result["best"]["ALL"] <= 1
    assert ("target" in result["best"]) == ("lodo" in flags)
    clients = [c for h in metrics(tmp_path / "run") for c in h["clients"].values()]
    assert all(c["bytes_up"] == c["bytes_down"] for c in clients) and {"adv_f", "adv_d", "loss"} <= clients[0].keys()
    assert ("adv_g" in clients[0]) == ("gaussian" not in flags)


def test_alexnets_last_imagenet_layer_is_the_first_of_its_classifier(tmp_path):
    """Sec. 5.1: the pretrained AlexNet is feature extractor and classifier."""
    import torchvision
    torch.manual_seed(0)
    whole = torchvision.models.alexnet()
    torch.save(whole.state_dict(), tmp_path / "alexnet.pt")
    args = parsed("fedadg", "--dataset", "pacs", "--weights", tmp_path / "alexnet.pt", "--image-size", 64)
    net = fedadg.build(args, 3, 7).net
    assert [m.out_features for m in net.head] == [1000, 7] and torch.equal(net.head[0].weight, whole.classifier[6].weight)
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(net.eval().head[0](net.features(x)), whole.eval()(x))
