"""FedADG: losses and Algorithm 1 against an independent calculation, its steps by what changes when and what
travels."""

import copy
import dataclasses
import itertools
import json
import sys

import common
import fedadg
import official.fedadg
from plumbing.files import load_file
from plumbing.settings import identity
from tests.conftest import fails, interrupted, metrics, run_here

import pytest
import torch
from torch import nn, tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

C, H, P, Z = 3, 6, 4, 5  # classes, features, outputs of the projection and noise of the tiny federation
SMALL = ("--limit", 20, "--batch-size", 8, "--steps", 3, "--E0", 1)  # whole runs on the digits
COUNTER = "net.body.2.num_batches_tracked"


RELEASED = ("--variant", "--warmup", "--d-loss", "--g-loss", "--order", "--onehot-value", "--keep-momentum-d")
OWN_OF_RELEASE = dict(warmup=0, d_loss="lsgan", g_loss="opposite", order="paper", onehot_value=1.0,
                      keep_momentum_d=False)


def released(flags):
    """Whether these are flags of official.fedadg alone."""
    return "trained" in flags or not {*flags}.isdisjoint(RELEASED)


def parsed(*flags):
    """The arguments of fedadg, or, if only it has the flags, of official.fedadg."""
    words = [str(flag) for flag in flags]
    if not released(flags):
        return fedadg.arguments(words)
    if "--variant" not in flags:
        words += ["--variant", "paper"]
    return official.fedadg.arguments(words)


def of_release(args, name):
    """A setting of official.fedadg, which has a default in fedadg."""
    return getattr(args, name, OWN_OF_RELEASE.get(name))


def small_args(*flags):
    return parsed("--scale", "smoke", "--precision", "fp32", "--device", "cpu", "--batch-size", 3,
                  "--projection-size", P, "--noise", Z, *flags)


def data(n, seed):
    """n images of 2x2 pixels in three classes."""
    rng = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, 1, 2, 2), dtype=torch.uint8, generator=rng)
    labels = torch.arange(n) % C
    part = common.Data(images, torch.arange(n), labels, "cpu", "unit")
    return common.ClientData(f"c{seed}", part, part, part)


def federation(args, sizes=(7, 12)):
    """A server and clients of 7 and of 12 images. F is a linear layer with BN and ReLU, C a linear layer."""
    common.seed_all(0)
    body = nn.Sequential(nn.Flatten(), nn.Linear(4, H), nn.BatchNorm1d(H), nn.ReLU())
    method = sys.modules[type(args).__module__]
    Network = getattr(method, "Network", fedadg.FedADG)
    net = Network(args, common.Net(body, H, C), H, C)
    server = method.Server(args, net, len(sizes))
    clients = [method.Client(args, net, k, data(n, k)) for k, n in enumerate(sizes)]
    return server, clients, net


def one_client(*flags):
    """Server, first client and network of the tiny federation with these flags."""
    server, clients, net = federation(small_args(*flags))
    return server, clients[0], net


def same(a, b):
    """Nested dicts of tensors and numbers, equal bit for bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


def differ(a, b):
    """The names of the tensors that are not equal."""
    return {name for name in a if not torch.equal(a[name], b[name])}


def of_d(tensors):
    """The entries of the discriminator, by their names in it."""
    return {name[2:]: v for name, v in tensors.items() if name.startswith("D.")}


def without_d(tensors):
    return {name: v for name, v in tensors.items() if not name.startswith("D.")}


def with_d(w, w_d):
    """The state of the whole network."""
    return w | {f"D.{name}": v for name, v in w_d.items()}


def train(client, server, t=0):
    """ClientUpdate as common.rounds calls it."""
    common.seed_all(0, "train", t, client.k)
    return client.train(server.download(client.k), t)


def noise_of(monkeypatch):
    """A list to which every draw of torch.rand is added from now on."""
    rand, noise = torch.rand, []

    def remembering(*shape, **kw):
        noise.append(rand(*shape, **kw))
        return noise[-1]
    monkeypatch.setattr(torch, "rand", remembering)
    return noise


# Eqs. (1)-(3)


# D(h) = 0.2, 0.6 and D(h') = 0.5, 0.9. (1 - D(h))^2: 0.64, 0.16; D(h')^2: 0.25, 0.81; D(h)^2: 0.04, 0.36;
# (1 - D(h'))^2: 0.25, 0.01. Of each loss: its value and its gradients in D(h) and in D(h').
BY_HAND = {
    "d printed": (-0.93, [0.8, 0.4], [-0.5, -0.9]),
    "d lsgan": (0.33, [0.2, 0.6], [-0.5, -0.1]),
    "f": (0.4, [-0.8, -0.4], None),
    "g printed": (0.13, None, [-0.5, -0.1]),
    "g opposite": (0.53, None, [0.5, 0.9]),
}


@pytest.mark.parametrize("which", BY_HAND)
def test_eq1_eq2_eq3_by_hand(which):
    """Values and gradients against those worked out on paper, of each form."""
    h = tensor([0.2, 0.6], requires_grad=True)
    ref = tensor([0.5, 0.9], requires_grad=True)
    losses = {
        "d printed": official.fedadg.printed_loss_d(h, ref),
        "d lsgan": fedadg.loss_d(h, ref),
        "f": fedadg.loss_f(h),
        "g printed": official.fedadg.printed_loss_g(ref),
        "g opposite": fedadg.loss_g(ref),
    }
    value, of_h, of_ref = BY_HAND[which]
    assert abs(losses[which].item() - value) < 1e-6
    gradients = torch.autograd.grad(losses[which], [h, ref], allow_unused=True)
    for got, want in zip(gradients, (of_h, of_ref), strict=True):
        if want is None:
            assert got is None
        else:
            assert torch.allclose(got, tensor(want))


@pytest.mark.parametrize("loss_d,bound", [(official.fedadg.printed_loss_d, -2), (fedadg.loss_d, 0)])
def test_eq1_minimized_tells_the_features_from_the_reference(loss_d, bound):
    """Through the sigmoid D(h) falls to 0 and D(h') rises to 1, and the loss keeps its bound, -2 (printed)
    or 0."""
    torch.manual_seed(0)
    D = fedadg.Discriminator(small_args(), C, H)
    code = torch.eye(C)[torch.arange(30) % C]
    h, ref = torch.randn(30, H) / 2 + 1, torch.randn(30, H) / 2 - 1
    opt = torch.optim.SGD([p for p in D.parameters() if p.requires_grad], 1.0)
    for _ in range(150):
        loss = loss_d(D(h, code), D(ref, code))
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert D(h, code).mean() < 0.05 and D(ref, code).mean() > 0.95
    assert bound <= loss < bound + 0.2


# Algorithm 1, recomputed


# Steps of the official warm-up with E0 3, for F and C, and for D and G, which begin after E0.
WARM_UP = {"FC": [1, 1, 1, 2, 4, 5], "DG": [0, 0, 0, 1, 1, 2]}


class Hand:
    """ClientUpdate in float64: the networks written out, plain autograd, SGD by hand."""

    def __init__(self, args, start):
        self.a, self.v, self.p = args, {}, {}
        self.norms = {}  # of the last gradient of each module
        for name, v in start.items():
            trained = v.is_floating_point() and "running" not in name
            if name == "D.project.weight":
                trained = args.projection == "trained"
            self.p[name] = v.double().requires_grad_(trained)

    def linear(self, name, x):
        return x @ self.p[name + ".weight"].T + self.p.get(name + ".bias", 0)

    def F(self, x, training):
        a, bn = self.linear("net.body.1", x.double().flatten(1)), "net.body.2."
        mean = self.p[bn + "running_mean"]
        var = self.p[bn + "running_var"]
        if training:
            n = len(a)
            mean = a.mean(0)
            var = (a - mean).square().mean(0)
            self.follow(bn + "running_mean", mean)
            self.follow(bn + "running_var", var * n / (n - 1))
        normalized = (a - mean) / (var + 1e-5).sqrt()
        return (normalized * self.p[bn + "weight"] + self.p[bn + "bias"]).clamp(min=0)

    def follow(self, name, new):
        """BN's running statistics."""
        self.p[name] = 0.9 * self.p[name] + 0.1 * new.detach()

    def two(self, module, x):
        first = self.linear(module + ".first", x)
        return self.linear(module + ".second", torch.where(first > 0, first, self.a.slope * first))

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
        logits = self.linear("net.head", h)
        logs = logits - logits.exp().sum(1, keepdim=True).log()
        return -((1 - s) * logs[range(len(y)), y] + s * logs.mean(1)).mean()

    def sgd(self, prefix, lr, loss):
        a = self.a
        names = [name for name, v in self.p.items() if name.startswith(prefix) and v.requires_grad]
        gradients = torch.autograd.grad(loss, [self.p[name] for name in names])
        scale = 1
        if a.clip:
            norm = float(torch.cat([g.flatten() for g in gradients]).norm())
            self.norms[prefix] = norm
            scale = min(1, a.clip / (norm + 1e-6))
        for name, g in zip(names, gradients):
            g = scale * g + a.weight_decay * self.p[name].detach()
            if name in self.v:
                g = a.momentum * self.v[name] + g
            self.v[name] = g
            self.p[name] = (self.p[name].detach() - lr * g).requires_grad_()

    def c3(self, lr, x, y):
        self.sgd("net.", lr, self.err(self.F(x, True), y))

    def c5(self, lr, x, y, code):
        h = self.F(x, True)
        adv = (1 - self.D(h, code)).square().mean()
        self.sgd("net.", lr, self.a.lambda0 * adv + self.a.lambda1 * self.err(h, y))

    def c7(self, lr, x, z, code):
        fake = self.D(self.F(x, False).detach(), code)
        ref = self.D(self.G(z, code).detach(), code)
        if of_release(self.a, "d_loss") == "printed":
            terms = -((1 - fake) ** 2 + ref ** 2)
        else:
            terms = fake ** 2 + (1 - ref) ** 2
        self.sgd("D.", lr, terms.mean())

    def c8(self, lr, z, code):
        ref = self.D(self.G(z, code), code)
        form = of_release(self.a, "g_loss")
        if form == "printed":
            self.sgd("G.", lr, ((1 - ref) ** 2).mean())
        elif form == "opposite":
            self.sgd("G.", lr, (ref ** 2).mean())

    def round(self, t, batches, noise, lr_adversarial):
        a = self.a
        full, full_adversarial = a.lr * a.lr_decay ** t, lr_adversarial * a.lr_decay ** t
        lr, lr_adversarial = full, full_adversarial
        if not a.keep_momentum:
            of_d = {name: v for name, v in self.v.items() if name.startswith("D.")}
            self.v = of_d if of_release(a, "keep_momentum_d") else {}
        warmup = of_release(a, "warmup")
        for i, (x, y) in enumerate(batches):
            if warmup:
                lr = 1e-7 + (full - 1e-7) * WARM_UP["FC"][i] / warmup
                lr_adversarial = 1e-7 + (full_adversarial - 1e-7) * WARM_UP["DG"][i] / warmup
            if i < a.E0:
                self.c3(lr, x, y)
                continue
            code = torch.zeros(len(y), C, dtype=torch.float64)
            code[range(len(y)), y] = of_release(a, "onehot_value")
            z = noise.pop(0)
            if of_release(a, "order") == "paper":
                self.c5(lr, x, y, code)
                self.c7(lr_adversarial, x, z, code)
            else:
                self.c7(lr_adversarial, x, z, code)
                self.c5(lr, x, y, code)
            self.c8(lr_adversarial, z, code)


@pytest.mark.parametrize("flags,lr_adversarial", [
    (("--clip", 0.3, "--weight-decay", 0.01), 0.21),
    (("--g-loss", "printed", "--momentum", 0.9, "--lr-adversarial", 0.2, "--smoothing", 0), 0.2),
    (("--momentum", 0.9, "--keep-momentum", "--lr-decay", 0.5, "--projection", "none", "--lambda0", 2,
      "--lambda1", 0.4), 0.21),
    (("--d-loss", "printed", "--g-loss", "printed"), 0.21),
    (("--variant", "official", "--d-loss", "lsgan", "--onehot-value", 0.7, "--keep-momentum",
      "--label-at", "after"), 0.21),
    (("--variant", "official", "--g-loss", "detached", "--onehot-value", 0.6, "--label-at", "before",
      "--smoothing", 0.2), 0.21)])
def test_algorithm1_by_hand(monkeypatch, flags, lr_adversarial):
    """Two rounds of a client, each with a step c3 and two iterations c5, c7, c8, of the same noise, batches
    and start."""
    args = small_args("--steps", 3, "--E0", 1, "--lr", 0.3, *flags)
    server, (client, _), net = federation(args)
    hand = Hand(args, common.state(net))
    noise = noise_of(monkeypatch)
    for t in range(2):
        batches = list(common.batches(client.data.train, args, t, 0))
        up = train(client, server, t)
        assert len(noise) == 2
        for z, (_, y) in zip(noise, batches[1:]):
            assert z.shape == (len(y), Z) and z.min() >= 0
        hand.round(t, batches, noise, lr_adversarial)
        server.update({0: up}, t)
        got = with_d(up["w"], client.w_d)
        assert got.keys() == hand.p.keys() and got[COUNTER] == 3 * (t + 1)
        for name in got.keys() - {COUNTER}:
            torch.testing.assert_close(got[name].double(), hand.p[name].detach(), atol=2e-5, rtol=2e-4)


# Algorithm 1, observed: which step comes when, and what it changes


PARTS = {"F": "net.body.", "C": "net.head.", "RP": "D.project.", "D": "D.", "G": "G."}


def part_of(name):
    """F, C, RP, D or G of a parameter's name."""
    return next(part for part, start in PARTS.items() if name.startswith(start))


class Watch:
    """For each step of an optimizer: the losses computed since the last one, and the parts it changed."""

    def __init__(self, net):
        self.net, self.steps, self.losses, self.seen = net, [], [], {}

    def spied(self, name):
        """A loss that also notes that it was computed."""
        plain = getattr(fedadg, name, None) or getattr(official.fedadg, name)

        def noting(*args, **kw):
            self.losses.append(name.split("loss_")[-1])
            return plain(*args, **kw)
        return noting

    def values(self):
        return {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def before(self, opt, *_):
        if self.seen:
            assert not differ(self.seen, self.values())  # parameters change in an optimizer's step alone
        self.seen = self.values()

    def after(self, opt, *_):
        changed = differ(self.seen, self.values())
        self.steps.append((tuple(self.losses), {part_of(name) for name in changed}))
        self.losses.clear()
        self.seen = self.values()


def watched(monkeypatch, client, server, t=0):
    """Train a client; returns the steps as `Watch` has seen them."""
    watch = Watch(client.net)
    with monkeypatch.context() as patch:
        for name in ("cross_entropy", "loss_f", "loss_d", "loss_g"):
            patch.setattr(fedadg, name, watch.spied(name))
        for name in ("printed_loss_d", "printed_loss_g"):
            patch.setattr(official.fedadg, name, watch.spied(name))
        before = register_optimizer_step_pre_hook(watch.before)
        after = register_optimizer_step_post_hook(watch.after)
        try:
            train(client, server, t)
        finally:
            before.remove()
            after.remove()
    assert not differ(watch.seen, watch.values())
    return watch.steps


C3 = ("cross_entropy",), {"F", "C"}
C5 = ("cross_entropy", "f"), {"F", "C"}
C7 = ("d",), {"D"}
C8 = ("g",), {"G"}


@pytest.mark.parametrize("flags,warm,rest", [
    (("--steps", 5, "--E0", 2), 2, 3),
    (("--steps", 4, "--E0", 0), 0, 4),
    (("--steps", 3, "--E0", 3), 3, 0),
    (("--epochs", 3, "--E0", 1), 2, 4),  # 7 images in batches of 3 are two batches, of 3 and 4
    (("--epochs", 2, "--E0", 0), 0, 4),
])
def test_the_steps_of_a_round_what_they_change_and_their_number(monkeypatch, flags, warm, rest):
    """c3 and c5 change F and C, c7 D without its projection, c8 G; E0 and E1 in mini-batches or in epochs."""
    for order, cycle in (("paper", [C5, C7, C8]), ("official", [C7, C5, C8])):
        server, client, _ = one_client(*flags, "--order", order, "--smoothing", 0.1)
        assert watched(monkeypatch, client, server) == [C3] * warm + cycle * rest


@pytest.mark.parametrize("flags,steps", [
    (("--projection", "trained"), [C3, C5, (("d",), {"D", "RP"}), C8]),
    (("--projection", "none"), [C3, C5, C7, C8]),
    (("--reference", "laplace"), [C3, C5, C7]),  # there is no G
    (("--g-loss", "detached"), [C3, C5, C7]),
    (("--no-adversarial",), [C3, C3]),
    (("--lambda1", 0), [C3, (C5[0], {"F"}), C7, C8]),  # L_adv_f has no gradient in w_c
    (("--lambda0", 0, "--lambda1", 0), [C3, (C5[0], set()), C7, C8]),
])
def test_the_steps_of_the_reduced_versions(monkeypatch, flags, steps):
    server, client, _ = one_client("--steps", 2, "--E0", 1, *flags)
    assert watched(monkeypatch, client, server) == steps


def test_modes_of_f_in_the_steps():
    """F is in evaluation mode for D's step alone, which leaves BN's statistics; D gets what F gives after
    step c5."""
    server, client, net = one_client("--steps", 3, "--E0", 1)
    modes = []
    net.net.body.register_forward_hook(lambda m, x, h: modes.append(m.training))
    up = train(client, server)
    assert modes == [True] + [True, False] * 2
    assert up["w"][COUNTER] == 3


@pytest.mark.parametrize("form,sign", [("opposite", -1), ("printed", 1), ("detached", 0)])
def test_eq3_the_generator_moves(monkeypatch, form, sign):
    """After c7, D does not change: D(h') of the round's noise falls, or rises as printed, or stays, whatever
    SGD is told."""
    decay = 0 if sign else 0.1
    args = small_args("--steps", 1, "--E0", 0, "--lr", 0.3, "--g-loss", form, "--momentum", 0.9,
                      "--weight-decay", decay, "--keep-momentum")
    server, (client, _), net = federation(args)
    noise = noise_of(monkeypatch)
    w = copy.deepcopy(server.w)
    up = train(client, server)
    y = next(common.batches(client.data.train, args, 0, 0))[1]
    code = torch.eye(C, dtype=torch.float64)[y]
    hand = Hand(args, with_d(up["w"], client.w_d))
    now = hand.D(hand.G(noise[0], code), code).mean()
    hand.p |= {name: v.double() for name, v in w.items() if name.startswith("G.")}
    change = now - hand.D(hand.G(noise[0], code), code).mean()
    if sign:
        assert sign * change > 0
    else:
        assert change == 0 and not [name for name in differ(w, up["w"]) if name.startswith("G.")]


# Labels, projection, references, networks


@pytest.mark.parametrize("flag,labels", [("--no-onehot", 0), ("--onehot", C)])
def test_without_one_hot_labels_reach_neither_g_nor_d(flag, labels):
    """With lambda_1 0 a round does not depend on the labels; with one-hot labels it does."""
    ends = []
    for shift in (0, 1):
        server, client, net = one_client("--steps", 3, "--E0", 0, "--lambda1", 0, flag)
        client.data.train.labels = (client.data.train.labels + shift) % C
        ends.append(train(client, server)["w"] | client.w_d)
    changed = differ(*ends)
    if labels:
        assert {"first.weight", "second.weight", "G.first.weight", "net.body.1.weight"} <= changed
    else:
        assert not changed
    assert net.G.first.in_features == Z + labels and net.D.first.in_features == P + labels


def test_the_code_of_a_label():
    """What stands for 1 is --onehot-value."""
    _, _, net = one_client("--onehot-value", 0.7)
    assert torch.equal(net.code(tensor([2, 0])), tensor([[0, 0, 0.7], [0.7, 0, 0]]))


@pytest.mark.parametrize("label_at", ["after", "before"])
def test_d_and_g_depend_on_the_label(label_at):
    """D and G on the same input with other labels: other outputs; D's are in [0, 1]."""
    torch.manual_seed(0)
    h = torch.randn(4, H)
    codes = [torch.eye(C)[[i] * 4] for i in range(C)]
    D = fedadg.Discriminator(small_args("--label-at", label_at), C, H)
    G = fedadg.Generator(small_args(), C, H)
    for pair in itertools.combinations(codes, 2):
        assert not torch.allclose(D(h, pair[0]), D(h, pair[1]))
        references = []
        for code in pair:
            torch.manual_seed(1)  # the same noise
            references.append(G(code))
        assert references[0].shape == (4, H) and not torch.allclose(*references)
    far = D(100 * h, codes[0])
    assert far.shape == (4,)
    assert far.min() >= 0 and far.max() <= 1


def test_the_projection_is_of_the_seed_alone_and_keeps_lengths():
    """Bit for bit between two networks of a seed; lengths to 10%."""
    torch.manual_seed(3)

    def projection(*flags):
        return fedadg.Discriminator(small_args("--projection-size", 400, *flags), C, 50).project

    one, again, other = projection(), projection(), projection("--seed", 1)
    assert torch.equal(one.weight, again.weight) and not torch.equal(one.weight, other.weight)
    assert one.bias is None and not one.weight.requires_grad
    x = torch.randn(50)
    assert abs(one(x).norm() / x.norm() - 1) < 0.1 and one(x).shape == (400,)
    assert projection("--label-at", "before").in_features == 50 + C
    assert isinstance(projection("--projection", "none"), nn.Identity)


# Variance, kurtosis, and what is reached: the bound of U, else a value that is exceeded.
MOMENTS = {
    "gaussian": (1, 3, 3.5),
    "uniform": (1 / 3, 1.8, 1),
    "laplace": (1, 6, 5),  # variance 2 b^2 with b = 1/sqrt 2
}


@pytest.mark.parametrize("reference", MOMENTS)
def test_table6_references(reference):
    """Variance, kurtosis and, for U, bounds of h'; it has the shape of the features and no label; G is not
    there."""
    server, client, net = one_client("--reference", reference)
    assert not hasattr(net, "G") and not [name for name in server.w if name.startswith("G.")]
    torch.manual_seed(0)
    h = client.reference(torch.zeros(20000, C))
    variance, kurtosis, reach = MOMENTS[reference]
    assert h.shape == (20000, H) and h.dtype == torch.float32 and abs(h.mean()) < 0.02
    assert abs(h.var() / variance - 1) < 0.03
    assert abs((h ** 4).mean() / h.var() ** 2 / kurtosis - 1) < 0.1
    if reference == "uniform":
        assert -1 <= h.min() and 0.999 < h.max() <= 1
    else:
        assert h.abs().max() > reach
    torch.manual_seed(0)
    assert torch.equal(client.reference(torch.ones(20000, C)), h)


def sizes(module):
    """Inputs and outputs of the linear layers."""
    return [(m.in_features, m.out_features) for m in module.modules() if isinstance(m, nn.Linear)]


def test_section_5_1_alexnet():
    """F is AlexNet without its last layer, C 4096-1000-classes; G has two layers of 4096, D one and one of
    one output."""
    args = parsed("--dataset", "pacs", "--image-size", 64, "--weights", "none")
    with torch.device("meta"):
        net = fedadg.build(args, 3, 7)
        x = torch.zeros(2, 3, 64, 64)
        assert net.features(x).shape == (2, 4096)
        assert net(x).shape == (2, 7)
    assert sizes(net.net.body) == [(9216, 4096), (4096, 4096)]
    assert len(net.net.head) == 2
    assert sizes(net.net.head) == [(4096, 1000), (1000, 7)]
    assert sizes(net.G) == [(2048 + 7, 4096), (4096, 4096)]
    assert sizes(net.D) == [(4096, 1000), (1000 + 7, 4096), (4096, 1)]
    reduced = dataclasses.replace(args, label_at="before", onehot=False, noise=30, projection="none")
    with torch.device("meta"):
        net = fedadg.build(reduced, 3, 7)
    assert sizes(net.G) == [(30, 4096), (4096, 4096)]
    assert sizes(net.D) == [(4096, 4096), (4096, 1)]


@pytest.mark.parametrize("backbone", ["smallcnn", "smallcnn_bn", "resnet18"])
def test_g_ends_as_the_features_do(backbone):
    """With ReLU where the features have it: half of smallcnn's are negative, none of the others'."""
    net = fedadg.build(small_args("--backbone", backbone, "--image-size", 32), 3, C).eval()
    torch.manual_seed(0)
    h = net.features(torch.rand(8, 3, 32, 32))
    ref = net.G(net.code(torch.arange(8) % C))
    assert h.shape == ref.shape
    for values in (h, ref):
        assert (values.min() < 0) == (backbone == "smallcnn")


def test_alexnets_last_imagenet_layer_is_the_first_of_its_classifier(tmp_path):
    """Sec. 5.1: the pretrained AlexNet is feature extractor and classifier."""
    import torchvision
    torch.manual_seed(0)
    whole = torchvision.models.alexnet()
    torch.save(whole.state_dict(), tmp_path / "alexnet.pt")
    args = parsed("--dataset", "pacs", "--weights", tmp_path / "alexnet.pt", "--image-size", 64)
    net = fedadg.build(args, 3, 7).net.eval()
    assert [m.out_features for m in net.head] == [1000, 7]
    assert torch.equal(net.head[0].weight, whole.classifier[6].weight)
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(net.head[0](net.features(x)), whole.eval()(x))


# Who keeps and sends what


def bytes_of_w(adversarial):
    """Bytes of F and C (BN's mean, variance and counter too) and of G."""
    F = 4 * H + H + 2 * H
    classifier = H * C + C
    G = (Z + C) * H + H + H * H + H
    statistics = 4 * 2 * H + 8
    return 4 * (F + classifier + G * adversarial) + statistics


OF_D = {"first.weight", "first.bias", "second.weight", "second.bias"}


@pytest.mark.parametrize("flags,parts,trained", [
    ((), {"net", "G"}, OF_D),
    (("--projection", "trained"), {"net", "G"}, OF_D | {"project.weight"}),
    (("--reference", "uniform"), {"net"}, OF_D),
    (("--no-adversarial",), {"net"}, None)])
def test_what_travels_and_what_stays(flags, parts, trained):
    """Names and bytes of what travels; the mean against (w_1 + w_2) / 2 in float64."""
    server, clients, net = federation(small_args("--steps", 3, "--E0", 1, *flags))
    start = common.state(net)
    uploads = {}
    for k, client in enumerate(clients):
        down = server.download(k)
        uploads[k] = train(client, server)
        for payload in (down, uploads[k]):
            assert payload.keys() == {"w"}
            assert common.nbytes(payload) == bytes_of_w("G" in parts)
            assert {name.split(".")[0] for name in payload["w"]} == parts
        same(down["w"], without_d(start))  # c1 and s1: the same for all
        assert differ(uploads[k]["w"], start) == without_d(start).keys()
    kept = copy.deepcopy(uploads)
    server.update(uploads, 0)
    same(uploads, kept)
    first, second = uploads[0]["w"], uploads[1]["w"]
    for name, v in server.w.items():  # 1/K, whatever the 7 and 12 images
        mean = (first[name].double() + second[name].double()) / 2
        if not v.is_floating_point():
            mean = mean.round()
        torch.testing.assert_close(v.double(), mean, atol=1e-6, rtol=1e-6)
    same(common.kept(server), {"w": server.w})
    for client in clients:
        if trained is None:
            assert common.kept(client) == {"w_d": {}, "momentum": {}}
        else:
            assert differ(of_d(start), client.w_d) == trained
    if trained is not None:
        assert differ(clients[0].w_d, clients[1].w_d) == trained


def test_each_client_goes_on_with_its_own_discriminator():
    """The scratch network has another client's D in between; a client that is not sampled keeps its D."""
    args = small_args("--steps", 2, "--E0", 1)
    server, clients, net = federation(args, (7, 12, 9))
    initial = copy.deepcopy(clients[0].w_d)
    for k in (0, 1):
        train(clients[k], server)
    own = [copy.deepcopy(client.w_d) for client in clients]
    same(own[2], initial)
    for client, w_d in zip(clients, own):
        held = common.state(client.model(server.download(client.k)))
        same(of_d(held), w_d)
        same(without_d(held), server.w)
    for k in (1, 0):  # in the other order: nothing but the state dicts is carried on
        train(clients[k], server, 1)
    ends = [copy.deepcopy(common.kept(client)) for client in clients]
    server2, again, _ = federation(args, (7, 12, 9))
    for k in (1, 0):
        common.restore(again[k], {"w_d": own[k], "momentum": {}}, "cpu")
        train(again[k], server2, 1)
        same(common.kept(again[k]), ends[k])


def test_the_control_has_no_adversary():
    """With lambda_0 0 F and C learn by 0.15 L_err alone: they end as with another D and other losses of D and
    G."""
    ends = []
    for flags in ((), ("--seed", 1, "--d-loss", "printed", "--g-loss", "detached", "--lr-adversarial", 5)):
        server, client, net = one_client("--steps", 4, "--E0", 1, "--lambda0", 0, *flags)
        client.args = dataclasses.replace(client.args, seed=0)
        ends.append(train(client, server)["w"])
    for name in ends[0]:
        assert torch.equal(ends[0][name], ends[1][name]) == name.startswith("net."), name


def test_momentum_is_kept_for_each_module_or_not_at_all():
    flags = ("--steps", 3, "--E0", 1, "--momentum", 0.9)
    server, client, net = one_client(*flags, "--keep-momentum")
    train(client, server)
    for name, module in (("FC", net.net), ("D", net.D), ("G", net.G)):
        kept = client.momentum[name]
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        assert kept.keys() == trained.keys() and "project.weight" not in kept
        for n, p in trained.items():
            assert kept[n]["momentum_buffer"].shape == p.shape
    assert client.momentum.keys() == {"FC", "D", "G"}
    server, client, _ = one_client(*flags)
    train(client, server)
    assert client.momentum == {}
    server, client, _ = one_client(*flags, "--keep-momentum-d")
    train(client, server)
    assert client.momentum.keys() == {"D"}


def test_the_log_has_every_loss():
    server, client, _ = one_client("--steps", 3, "--E0", 1)
    train(client, server)
    log = {name: float(v) for name, v in client.log.items()}
    assert list(log) == ["loss", "adv_f", "adv_d", "adv_g"]
    assert log["loss"] > 0
    assert 0 < log["adv_f"] < 1
    assert 0 < log["adv_d"] < 2
    assert 0 < log["adv_g"] < 1


# Settings


def rates(*flags):
    """The arguments of a command line, and the learning rates of the steps of its third round."""
    args = parsed(*flags)
    small = dataclasses.replace(args, steps=2, E0=1, device="cpu", precision="fp32", noise=Z)
    server, (client, _), _ = federation(small)
    seen = []
    hook = register_optimizer_step_pre_hook(lambda opt, *_: seen.append(round(opt.param_groups[0]["lr"], 9)))
    try:
        train(client, server, t=2)
    finally:
        hook.remove()
    return args, seen


def has(args, **values):
    for name, value in values.items():
        assert getattr(args, name) == value, name


@pytest.mark.parametrize("dataset,lr", [("vlcs", 0.01), ("pacs", 0.001)])
def test_learning_rates_and_weights_of_section_5_1(dataset, lr):
    args, seen = rates("--dataset", dataset)
    lr_adversarial = round(0.7 * lr, 9)
    assert seen == [lr, lr, lr_adversarial, lr_adversarial]  # c3, c5, c7, c8
    has(args, lambda0=0.85, lambda1=0.15, momentum=0, weight_decay=0, clip=0)
    has(args, backbone="alexnet", weights="imagenet", protocol="lodo", projection_size=1000)
    has(args, projection="fixed")
    _, seen = rates("--dataset", dataset, "--lr", 0.1, "--lr-decay", 0.5)
    assert seen == [0.025, 0.025, 0.0175, 0.0175]
    _, seen = rates("--dataset", dataset, "--lr-adversarial", 0.4, "--lr-decay", 0.5)
    assert seen == [lr / 4, lr / 4, 0.1, 0.1]


def test_settings_of_the_official_code():
    """D, (F, C), G; there VLCS and PACS have each other's learning rates, of which the warm-up begins with a
    500th and a 100th, and 1e-7."""
    flags = ("--variant", "official", "--warmup", 0)
    pacs, seen = rates("--dataset", "pacs", *flags)
    assert seen == [0.01, 0.007, 0.01, 0.007]
    vlcs, seen = rates("--dataset", "vlcs", *flags)
    assert seen == [0.001, 0.0007, 0.001]  # G never learns
    pacs, seen = rates("--dataset", "pacs", "--variant", "official")
    assert seen == [0.000100099, 0.000070099, 0.000100099, 0.000070099]
    has(pacs, d_loss="lsgan", g_loss="opposite", label_at="after", onehot_value=0.7)
    has(pacs, E0=3, epochs=10, rounds=30, batch_size=10, warmup=100)
    vlcs, seen = rates("--dataset", "vlcs", "--variant", "official")
    assert seen == [0.0000021, 0.0000015, 0.0000021]
    has(vlcs, d_loss="printed", g_loss="detached", label_at="before", onehot_value=0.6)
    has(vlcs, E0=5, epochs=15, rounds=20, batch_size=16, warmup=500)
    for args in (pacs, vlcs):
        has(args, lambda0=0.15, lambda1=0.85, momentum=0.9, weight_decay=1e-5, keep_momentum_d=True)
        has(args, order="official", projection="trained", projection_size=1024, keep_momentum=False)
    args = parsed("--dataset", "vlcs", "--variant", "official", "--g-loss", "printed")
    assert args.g_loss == "printed"


@pytest.mark.parametrize("flags,lr_adversarial,origin", [
    ((), 0.7 * 0.05, "derived"),
    (("--lr", 0.1), 0.7 * 0.1, "derived"),
    (("--lr-adversarial", 0.02), 0.02, "flag"),
    (("--dataset", "pacs"), 0.7 * 0.001, "derived"),
    (("--dataset", "pacs", "--variant", "official"), 0.7 * 0.01, "derived"),
    (("--dataset", "vlcs", "--variant", "official"), 0.7 * 0.001, "derived"),
])
def test_the_rate_of_d_and_g_is_recorded_as_a_number(flags, lr_adversarial, origin):
    args = parsed(*flags)
    assert args.lr_adversarial == identity(args)["lr_adversarial"] == lr_adversarial
    assert args.origins["lr_adversarial"] == origin


@pytest.mark.parametrize("flags", [(), ("--scale", "laptop"), ("--lr", 0.3)])
@pytest.mark.parametrize("dataset", fedadg.PAPER)
def test_d_and_g_learn_at_seven_tenths_of_the_rate_of_f_and_c(dataset, flags):
    for variant in ("paper", "official"):
        args = parsed("--dataset", dataset, "--variant", variant, *flags)
        assert args.lr_adversarial == 0.7 * args.lr


@pytest.mark.parametrize("smoothing,of_code,classes", [(0.25, 0.2, 5), (0.07 / 6, 0.01, 7)])
def test_smoothing_of_the_official_code(smoothing, of_code, classes):
    """It spreads its value over the other classes, PyTorch over all: the same targets, by losses of logits
    that are certain."""
    dataset = {5: "vlcs", 7: "pacs"}[classes]
    assert parsed("--dataset", dataset, "--variant", "official").smoothing == smoothing
    logits = -20.0 * (1 - torch.eye(classes))  # row c is certain of class c
    label = torch.zeros(classes, dtype=torch.long)
    losses = nn.functional.cross_entropy(logits, label, label_smoothing=smoothing, reduction="none")
    share = of_code / (classes - 1)  # of each class but the label's
    torch.testing.assert_close(losses[0], tensor(20.0 * of_code))
    torch.testing.assert_close(losses[1:], torch.full((classes - 1,), 20.0 * (1 - share)))


def test_the_target_of_vlcs_is_its_30_percent():
    """Sources train on 70%, and the target is tested on the rest, not on the 15% of a source's test part."""
    args = parsed("--dataset", "vlcs", "--target", "sun09")
    images = torch.zeros(200, 1, 1, 3, dtype=torch.uint8)
    order = torch.randperm(200)
    domain = common.Domain("sun09", images, torch.arange(200) % 5)
    target = common.target_client(args, domain, order)
    assert (len(target.train), len(target.val), len(target.test)) == (140, 0, 60)
    assert sorted(target.train.index.tolist() + target.test.index.tolist()) == list(range(200))
    source = common.source_clients(args, domain, order, 5)[0]
    assert (len(source.train), len(source.val), len(source.test)) == (140, 30, 30)
    assert set(target.test.index.tolist()) == set(source.val.index.tolist() + source.test.index.tolist())


HALF_OF_FEATURES = {
    "smallcnn": 32,
    "smallcnn_bn": 32,
    "alexnet_bn": 512,
    "alexnet": 2048,
    "resnet18": 256,
    "resnet50": 1024,
    "resnet18_3x3": 256,
    "vit_b8": 384,
}


@pytest.mark.parametrize("backbone", common.BACKBONES)
def test_the_noise_of_g_is_recorded_as_a_number(backbone):
    flags = ("--dataset", "pacs", "--backbone", backbone)
    args = parsed(*flags)
    assert args.noise == identity(args)["noise"] == HALF_OF_FEATURES[backbone]
    assert args.origins["noise"] == "derived"
    args = parsed(*flags, "--noise", 10)
    assert args.noise == identity(args)["noise"] == 10
    assert args.origins["noise"] == "flag"


def test_settings_json_has_the_derived_numbers(tmp_path):
    run_here("fedadg", tmp_path / "run", *SMALL, "--lr", 0.1, "--rounds", 1)
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())["settings"]
    assert settings["lr_adversarial"] == {"value": 0.7 * 0.1, "origin": "derived"}
    assert settings["noise"] == {"value": 32, "origin": "derived"}


def test_what_is_shown_has_the_derived_numbers(capsys):
    with pytest.raises(SystemExit) as stopped:
        parsed("--dataset", "vlcs", "--lr", 0.1, "--show-settings")
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"--lr-adversarial {0.7 * 0.1:.6g} derived" in text
    assert "--noise 2048 derived" in text


@pytest.mark.parametrize("dataset", fedadg.PAPER)
@pytest.mark.parametrize("scale", ["paper", "laptop", "smoke"])
def test_every_setting_has_both_phases(dataset, scale):
    for variant in ("paper", "official"):
        args = parsed("--dataset", dataset, "--scale", scale, "--variant", variant)
        assert 0 < args.E0
        if args.steps:
            assert args.E0 < args.steps
        else:
            assert args.E0 < args.epochs


@pytest.mark.parametrize("variant", ["paper", "official"])
@pytest.mark.parametrize("dataset", ["pacs", "vlcs", "officecaltech"])
def test_settings_of_the_laptop(dataset, variant):
    """Ours."""
    args = parsed("--dataset", dataset, "--scale", "laptop", "--variant", variant)
    assert (args.backbone, args.weights, args.image_size) == ("resnet18", "none", 32)
    assert (args.rounds, args.steps, args.E0, args.batch_size) == (24, 20, 6, 32)
    assert (args.lr, args.momentum, args.projection_size) == (0.1, 0, 128)
    assert of_release(args, "warmup") == 0


@pytest.mark.parametrize("flags,unit", [
    (("--epochs", 2, "--E0", 3), "2 --epochs"),
    (("--steps", 4, "--E0", 5), "4 --steps"),
])
def test_more_warm_up_than_the_round_has(tmp_path, capsys, flags, unit):
    fails(capsys, 2, f"--E0 is .*{unit}", run_here, "fedadg", tmp_path / "run", *flags)


# Whole runs


def test_without_g_and_d_it_is_fedavg_bit_for_bit(tmp_path):
    """Table 5: --no-adversarial; with no smoothing the metrics and weights are those of fedavg.py with
    uniform weights."""
    flags = ("--epochs", 2, "--lr", 0.05, "--batch-size", 8, "--momentum", 0.9, "--clip", 1, "--lr-decay",
             0.5, "--clients-per-domain", 2, "--dirichlet", 20, "--limit", 50, "--target", "d30",
             "--protocol", "lodo")
    run_here("fedadg", tmp_path / "adg", *flags, "--no-adversarial", "--smoothing", 0)
    run_here("fedavg", tmp_path / "avg", *flags, "--average", "uniform")
    adg = load_file(tmp_path / "adg" / "checkpoint.pt", "checkpoint")["server"]["w"]
    avg = load_file(tmp_path / "avg" / "checkpoint.pt", "checkpoint")["server"]["w"]
    same({name.removeprefix("net."): v for name, v in adg.items()}, avg)
    lines_adg, lines_avg = metrics(tmp_path / "adg"), metrics(tmp_path / "avg")
    for line in lines_adg + lines_avg:
        for client in line["clients"].values():
            del client["bytes_up"]  # FedAvg's client also sends its number of images
    assert lines_adg == lines_avg and len(lines_adg) == 2


def test_resume_with_discriminators_and_momentum(tmp_path, monkeypatch):
    """The discriminators and the momentum of every module are in the checkpoint; half of the clients train in
    a round."""
    flags = (*SMALL, "--rounds", 4, "--checkpoint-every", 0, "--momentum", 0.9, "--keep-momentum",
             "--participation", 0.5)
    run_here("fedadg", tmp_path / "whole", *flags)
    interrupted("fedadg", monkeypatch, tmp_path / "parts", *flags, after=2)
    run_here("fedadg", tmp_path / "parts", *flags)
    whole = load_file(tmp_path / "whole" / "checkpoint.pt", "checkpoint")
    parts = load_file(tmp_path / "parts" / "checkpoint.pt", "checkpoint")
    for key in ("server", "clients", "history", "best"):
        same(whole[key], parts[key])
    for name in ("metrics.jsonl", "best.pt"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    ends = [client["w_d"] for client in whole["clients"].values()]
    assert len(ends) == 6 and any(differ(ends[0], end) for end in ends[1:])
    for end in ends:
        assert torch.equal(end["project.weight"], ends[0]["project.weight"])
    assert any(client["momentum"] for client in whole["clients"].values())


@pytest.mark.parametrize("flags", [
    ("--slope", "0", "--label-at", "before"),
    ("--protocol", "lodo", "--target", "d75", "--reference", "gaussian", "--keep-momentum"),
    ("--precision", "bf16", "--projection", "none", "--no-onehot")])
def test_the_switches_at_smoke_scale(tmp_path, flags):
    """A reference distribution that is not generated has no L_adv_g."""
    result = run_here("fedadg", tmp_path / "run", *SMALL, *flags)
    assert result["last"]["round"] == 2
    assert ("target" in result["best"]) == ("lodo" in flags)
    logged = ["bytes_down", "bytes_up", "loss", "adv_f", "adv_d", "adv_g"]
    if "gaussian" in flags:
        logged.remove("adv_g")
    for line in metrics(tmp_path / "run"):
        for client in line["clients"].values():
            assert list(client) == logged
            assert client["bytes_up"] == client["bytes_down"]
