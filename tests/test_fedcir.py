"""FedCiR: every equation against an independent calculation, Algorithm 1 by what changes and what travels.

The encoder and Eq. (17) have tests of their own in test_gaussian_encoder.py.
"""

import dataclasses
import math

import common
import fedavg
import fedcir
from plumbing.files import load_file
from plumbing.runfolder import copied
from tests.conftest import interrupted, metrics, parsed, run_here

import numpy as np
import pytest
import torch
from torch import tensor
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy, softmax, softplus
from torch.testing import assert_close

C, D, NOISE, WIDTH = 10, 64, 5, 12  # classes and z of the digits, and a small generator
HERE = ("--scale", "smoke", "--precision", "fp32", "--device", "cpu")
SMALL = ("--steps", 2, "--batch-size", 8, "--limit", 20, "--image-size", 8, "--noise", NOISE, "--width",
         WIDTH, "--mle-samples", 30)


def small_args(*flags):
    return parsed("fedcir", *HERE, *SMALL, *flags)


def federation(args, K=3):
    """A server and K clients of the smallest network on digits, and the networks."""
    domains, classes = common.load_domains(args)
    data, _ = common.split(common.Dataset(domains, classes), args)
    common.seed_all(0)
    net = fedcir.build(args, 1, len(classes))
    server = fedcir.Server(args, net, K)
    clients = [fedcir.Client(args, net, k, data[k]) for k in range(K)]
    return server, clients, net


def play(server, clients, t):
    """Round t as common.rounds plays it; returns the downloads and a copy of the uploads."""
    downs, uploads = [], {}
    for k, client in enumerate(clients):
        downs.append(copied(server.download(k)))
        common.seed_all(0, "train", t, k)
        uploads[k] = client.train(downs[k], t)
    common.seed_all(0, "server", t)
    kept = copied(uploads)
    server.update(uploads, t)
    same(uploads, kept)  # the server leaves what it was given as it is
    return downs, kept


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


def mean_of(uploads, name):
    """The plain mean of an entry of the uploaded models."""
    return sum(up["w"][name] for up in uploads.values()) / len(uploads)


def normalized(h, w_g, training):
    """The generator's BN from its tensors alone; in training with the batch's statistics, which move the
    running ones in `w_g`."""
    mean, var = w_g["bn.running_mean"], w_g["bn.running_var"]
    if training:
        batch = h.detach()
        w_g["bn.running_mean"] = 0.9 * mean + 0.1 * batch.mean(0)
        w_g["bn.running_var"] = 0.9 * var + 0.1 * batch.var(0, correction=1)
        w_g["bn.num_batches_tracked"] = w_g["bn.num_batches_tracked"] + 1
        mean, var = h.mean(0), h.var(0, correction=0)
    normal = (h - mean) / (var + 1e-5).sqrt()
    return normal * w_g["bn.weight"] + w_g["bn.bias"]


def generated(w_g, y, training=False):
    """G(y, epsilon) from its tensors alone, the noise drawn here."""
    inputs = w_g["first.weight"].shape[1]
    epsilon = torch.randn(len(y), inputs - C)
    label = torch.eye(C)[y]
    h = torch.cat([epsilon, label], 1) @ w_g["first.weight"].T  # no bias in front of BN
    h = normalized(h, w_g, training).clamp(min=0)
    return h @ w_g["second.weight"].T + w_g["second.bias"]


def probabilities(z, w):
    """The softmax of the linear classifier in a state of the model."""
    return softmax(z @ w["head.weight"].T + w["head.bias"], 1)


def classifiers(K, C, D):
    """The weight [K, C, D] and bias [K, C] of K classifiers, float64."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(K, C, D, generator=g, dtype=torch.float64)
    bias = torch.randn(K, C, generator=g, dtype=torch.float64)
    return weight, bias


# Eqs. (8), (15)


def eq15_by_loops(z, y, weight, bias):
    K, classes, _ = weight.shape
    total = 0.0
    for b in range(len(z)):
        p = 0.0
        for k in range(K):
            logits = weight[k] @ z[b] + bias[k]
            e = [math.exp(logits[c]) for c in range(classes)]
            p += e[y[b]] / sum(e) / K
        total -= math.log(p)
    return total / len(z)


def test_eq15_and_its_gradient_against_loops_over_clients_and_samples():
    """Probabilities are averaged before the logarithm; the gradient in z is that of finite differences."""
    weight, bias = classifiers(3, 4, 6)
    y = tensor([0, 3, 1, 1, 2])
    z = torch.randn(5, 6, dtype=torch.float64)
    leaf = z.clone().requires_grad_()
    loss = fedcir.ensemble_loss(leaf, y, weight, bias)
    loss.backward()
    assert math.isclose(loss.item(), eq15_by_loops(z, y, weight, bias), rel_tol=1e-12)
    for b in range(5):
        for d in range(6):
            step = torch.zeros_like(z)
            step[b, d] = 1e-5
            above = eq15_by_loops(z + step, y, weight, bias)
            below = eq15_by_loops(z - step, y, weight, bias)
            slope = (above - below) / 2e-5
            assert math.isclose(leaf.grad[b, d].item(), slope, rel_tol=1e-5, abs_tol=1e-8)


@pytest.mark.parametrize("K", [1, 5])
def test_eq15_of_one_classifier_or_of_equal_ones_is_cross_entropy(K):
    """Against torch's cross_entropy, in float64."""
    weight, bias = classifiers(1, 4, 6)
    z = torch.randn(8, 6, dtype=torch.float64)
    y = torch.arange(8) % 4
    want = cross_entropy(z @ weight[0].T + bias[0], y)
    loss = fedcir.ensemble_loss(z, y, weight.expand(K, -1, -1), bias.expand(K, -1))
    assert_close(loss, want)


def test_eq15_two_clients_by_hand():
    """Probabilities 0.9 and 0.1 of the label: -log 0.5, not the mean of the two losses."""
    bias = tensor([[math.log(9), 0.0], [0.0, math.log(9)]])
    loss = fedcir.ensemble_loss(torch.zeros(1, 1), tensor([0]), torch.zeros(2, 2, 1), bias)
    assert math.isclose(loss.item(), math.log(2), rel_tol=1e-6)


def test_eq15_does_not_overflow():
    """Logits of 1000: the loss is 1000."""
    weight = tensor([[[-1000.0], [0.0]], [[0.0], [1000.0]]])
    loss = fedcir.ensemble_loss(torch.ones(1, 1), tensor([0]), weight, torch.zeros(2, 2))
    assert loss.item() == 1000


def test_eq8_prediction_is_the_log_of_the_mean_probability():
    """Against a loop over the seven samples, of the same noise."""
    server, clients, _ = federation(small_args("--samples", 7), 1)
    model = clients[0].model(server.download(0)).eval()
    x, _ = clients[0].data.test.batch(tensor([0, 1]))
    torch.manual_seed(1)
    log_p = model(x)
    mu, raw = model.last(model.body(x)).chunk(2, 1)
    torch.manual_seed(1)
    total = 0
    for epsilon in torch.randn(7, 2, D):
        total = total + probabilities(mu + softplus(raw) * epsilon, server.w)
    assert_close(log_p.exp(), total / 7, rtol=1e-4, atol=1e-6)


def test_without_samples_the_prediction_is_of_the_mean():
    """Bit for bit: the classifier on the mean of z."""
    model = fedcir.build(small_args("--samples", 0), 1, C).model.eval()
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(model(x), model.head(model.features(x)))


# The generator and its moments


def test_moments_of_the_same_samples_with_running_statistics():
    """Two linear layers with BN and ReLU between them; numpy's mean and deviation, divided by S and not by
    S - 1."""
    G = fedcir.Generator(NOISE, C, WIDTH, 7)
    G.bn.running_mean.normal_()
    G.bn.running_var.uniform_(0.5, 2)
    G.bn.weight.data.normal_()
    G.bn.bias.data.normal_()
    before = common.state(G)
    torch.manual_seed(3)
    mu, sigma = fedcir.moments(G.train(), 40, 1e-3, "cpu")
    torch.manual_seed(3)
    for c in range(C):
        z = generated(before, torch.full((40,), c)).numpy().astype(np.float64)
        np.testing.assert_allclose(mu[c], z.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(sigma[c], z.std(0, ddof=0), rtol=1e-4)
    same(common.state(G), before)  # running statistics did not move
    assert not mu.requires_grad
    assert not sigma.requires_grad


def test_sigma_has_its_lower_limit():
    """A generator whose output does not vary: the limit, and its bias as the mean."""
    G = fedcir.Generator(NOISE, C, WIDTH, 3)
    G.second.weight.data[1:] = 0
    mu, sigma = fedcir.moments(G, 20, 0.01, "cpu")
    assert (sigma[:, 1:] == 0.01).all()
    assert (sigma[:, 0] > 0.01).all()
    assert_close(mu[:, 1:], G.second.bias.detach()[1:].expand(C, 2))


# ClientUpdate


def test_eq18_one_step_by_hand():
    """Upload = w - lr * (gradient of the three terms + decay * w), with the same draws of z, labels and
    noise."""
    args = small_args("--reg-from", 0, "--steps", 1, "--lambda-reg", 0.7, "--lambda-align", 0.01,
                      "--weight-decay", 0.1)
    server, clients, net = federation(args)
    down = copied(server.download(1))
    up = clients[1].train(down, t=0)

    x, y = next(common.batches(clients[1].data.train, args, 0, 1))  # seeds the draws below as well
    model = common.load(net.model, down["w"]).train()
    w = dict(model.named_parameters())
    mu, raw = model.last(model.body(x)).chunk(2, 1)
    sigma = softplus(raw) + 1e-6
    p = probabilities(mu + sigma * torch.randn(8, D), w)
    y_g = torch.randint(C, (8,))
    p_g = probabilities(generated(down["w_g"], y_g), w)
    q = Normal(down["mu_g"][y], down["sigma_g"][y])
    loss = -p[range(8), y].log().mean()
    reg = -p_g[range(8), y_g].log().mean()
    align = kl_divergence(Normal(mu, sigma), q).sum(1).mean()
    objective = loss + 0.7 * reg + 0.01 * align
    gradient = torch.autograd.grad(objective, list(w.values()))
    for (name, value), g in zip(w.items(), gradient):
        moved = value - args.lr * (g + 0.1 * value)
        assert_close(up["w"][name], moved, atol=1e-5, rtol=1e-4)
    log = clients[1].log
    for name, term in {"loss": loss, "reg": reg, "align": align}.items():
        assert_close(log[name], term.detach(), rtol=1e-4, atol=1e-5)


def upload_after_a_step(lambda_reg, lambda_align):
    args = small_args("--reg-from", 0, "--steps", 1, "--lambda-reg", lambda_reg,
                      "--lambda-align", lambda_align)
    server, clients, _ = federation(args)
    down = server.download(0)
    return clients[0].train(down, 0)["w"]


def changed(a, b):
    """The names of the entries that differ."""
    return {name for name in a if not torch.equal(a[name], b[name])}


def test_l_reg_moves_only_the_classifier_and_l_align_only_the_encoder():
    """One step with a term and without it, all draws the same: what differs is what the term's gradient
    reaches."""
    neither = upload_after_a_step(0, 0)
    by_reg = changed(neither, upload_after_a_step(0.5, 0))
    by_align = changed(neither, upload_after_a_step(0, 0.1))
    assert by_reg == {"head.weight", "head.bias"}
    assert by_align >= {"last.weight", "last.bias", "body.0.weight"}
    assert not by_align & by_reg


def test_the_generator_is_fixed_at_the_clients():
    """Bit for bit: its state after a client's training is what was sent."""
    args = small_args("--reg-from", 0, "--lambda-align", 0.1, "--momentum", 0.9, "--weight-decay", 0.1)
    server, clients, net = federation(args)
    down = server.download(0)
    net.G.train()  # as the server may leave it
    up = clients[0].train(down, 0)
    same(common.state(net.G), down["w_g"])  # neither parameters nor running statistics
    assert up.keys() == {"w"}
    assert up["w"].keys() == down["w"].keys() == net.model.state_dict().keys()
    same(down, server.download(0))
    assert net.model.training
    assert not net.G.training
    assert all(p.grad is None for p in net.G.parameters())


# The server, Algorithm 1


def line_9_by_hand(w_g, uploads, lr):
    """A plain step of the generator on the mixture of the uploads' softmaxes, all draws made here; changes
    `w_g`."""
    y = torch.randint(C, (8,))
    trained = [name for name in w_g if name.endswith(("weight", "bias"))]
    leaves = [w_g[name].requires_grad_() for name in trained]
    z = generated(w_g, y, training=True)
    p = sum(probabilities(z, up["w"]) for up in uploads.values()) / len(uploads)
    loss = -p[range(8), y].log().mean()
    for name, leaf, g in zip(trained, leaves, torch.autograd.grad(loss, leaves)):
        w_g[name] = (leaf - lr * g).detach()


def test_lines_8_to_12_by_hand():
    """E_g plain steps of w_g, the moments of the new w_g, the uniform mean."""
    args = small_args("--generator-optimizer", "sgd", "--generator-lr", 0.5, "--generator-steps", 3)
    server, clients, _ = federation(args)
    w_g = copied(server.w_g)
    _, uploads = play(server, clients, 0)
    common.seed_all(0, "server", 0)
    for _ in range(3):
        line_9_by_hand(w_g, uploads, 0.5)
    assert server.w_g["bn.num_batches_tracked"] == 3
    assert w_g.keys() == server.w_g.keys()
    for name, value in w_g.items():
        assert_close(server.w_g[name], value, atol=1e-5, rtol=1e-4)
    for c in range(C):
        z = generated(w_g, torch.full((30,), c))
        assert_close(server.mu_g[c], z.mean(0), atol=1e-4, rtol=1e-4)
        assert_close(server.sigma_g[c], z.std(0, correction=0), atol=1e-4, rtol=1e-4)
    for name, value in server.w.items():
        mean = torch.stack([up["w"][name].double() for up in uploads.values()]).mean(0)
        if "num_batches" in name:
            mean = mean.round()
        assert_close(value.double(), mean, atol=1e-6, rtol=1e-5)


def test_the_mean_is_uniform_whatever_the_clients_sizes():
    """Against the plain mean of the uploads of clients of different sizes."""
    server, clients, _ = federation(small_args())
    train = clients[0].data.train
    clients[0].data.train = dataclasses.replace(train, index=train.index[:4], labels=train.labels[:4])
    _, uploads = play(server, clients, 0)
    assert_close(server.w["last.weight"], mean_of(uploads, "last.weight"))


def flat(value):
    """All numbers of a tensor or of a dict of tensors, as one vector."""
    tensors = common.tensors_of({"": value})
    return common.flatten([v.double() for v in tensors])


def test_order_of_the_servers_steps(monkeypatch):
    """Generator, then moments, then average: each step sees the new values of those before it and the old of
    the others."""
    server, clients, _ = federation(small_args())
    seen = []

    def numbers():
        saved = common.kept(server)
        return {name: flat(saved[name]) for name in ("w", "w_g", "mu_g", "sigma_g")}

    old, w_g = numbers(), server.w_g

    def changed_by_now():
        return changed(old, numbers())

    def spy_on(name):
        true = getattr(fedcir, name)

        def spy(*given):
            seen.append((name, changed_by_now()))
            return true(*given)
        monkeypatch.setattr(fedcir, name, spy)

    for name in ("ensemble_loss", "moments", "average"):
        spy_on(name)
    play(server, clients, 0)
    assert seen == [
        *[("ensemble_loss", set())] * 5,
        ("moments", {"w_g"}),
        ("average", {"w_g", "mu_g", "sigma_g"}),
    ]
    assert changed_by_now() == {"w", "w_g", "mu_g", "sigma_g"}
    assert changed(server.w_g, w_g) == w_g.keys()


def three_heads():
    """The classifiers of three uploads."""
    weight, bias = classifiers(3, C, D)
    weight, bias = weight.float(), bias.float()
    return [{"head.weight": weight[k], "head.bias": bias[k]} for k in range(3)]


def trained_generator(*steps, optimizer="adam", between=None):
    """The server after these numbers of steps of its generator, the labels and the noise always the same;
    after the first `between(server)` gives the server that goes on."""
    args = small_args("--generator-steps", steps[0], "--generator-optimizer", optimizer)
    server, _, _ = federation(args, 0)
    torch.manual_seed(5)
    server.train_generator(three_heads())
    if between:
        server = between(server)
    for _ in steps[1:]:
        server.train_generator(three_heads())
    return server


def from_a_checkpoint(server):
    """A new server with the state of another one; the random numbers go on as they would have."""
    saved, drawn = copied(common.kept(server)), torch.get_rng_state()
    other, _, _ = federation(server.args, 0)
    common.restore(other, saved, "cpu")
    torch.set_rng_state(drawn)
    return other


def without_adam(server):
    server.adam = {}
    return server


def test_adam_goes_on_across_rounds_and_across_a_checkpoint():
    """5 + 5 steps are 10 uninterrupted steps, if the labels and the noise are the same."""
    whole = trained_generator(10).w_g
    same(whole, trained_generator(5, 5).w_g)
    same(whole, trained_generator(5, 5, between=from_a_checkpoint).w_g)
    forgetful = trained_generator(5, 5, between=without_adam).w_g
    assert not torch.equal(whole["second.weight"], forgetful["second.weight"])


def test_plain_sgd_of_the_generator_has_nothing_to_keep():
    assert trained_generator(5).adam["second.weight"]["step"] == 5
    assert trained_generator(5, optimizer="sgd").adam == {}


def test_the_generator_learns_what_all_classifiers_agree_on():
    """After 200 steps the ensemble gives new samples their labels."""
    server, _, _ = federation(small_args("--generator-steps", 200, "--generator-lr", 0.01), 0)
    torch.manual_seed(0)
    heads = []
    for _ in range(3):
        weight = 0.5 * torch.randn(C, D) + torch.eye(C, D)
        heads.append({"head.weight": weight, "head.bias": torch.randn(C)})
    G = server.train_generator(heads).eval()
    y = torch.arange(C).repeat(20)
    p = sum(probabilities(G(y), w) for w in heads)
    assert (p.argmax(1) == y).float().mean() > 0.95


# What travels


def conv_numbers(s, t):
    return 9 * s * t + t


def linear_numbers(s, t):
    return s * t + t


def model_bytes():
    """Of the Gaussian network on smallcnn_bn: weights and biases, BN's four vectors and its counter
    (int64)."""
    first = conv_numbers(1, 32) + 4 * 32
    second = conv_numbers(32, 64) + 4 * 64
    linears = linear_numbers(64 * 49, D) + linear_numbers(D, 2 * D) + linear_numbers(D, C)
    return 4 * (first + second + linears) + 8 * 2


EXTRA = {  # bytes
    "w_g": 4 * ((NOISE + C) * WIDTH + 4 * WIDTH + linear_numbers(WIDTH, D)) + 8,
    "mu_g": 4 * C * D,
    "sigma_g": 4 * C * D,
}


@pytest.mark.parametrize("variant,sent,terms", [
    ("fedcir", {"w_g", "mu_g", "sigma_g"}, {"reg", "align"}),
    ("fedreg", {"w_g"}, {"reg"}),
    ("fedalign", {"mu_g", "sigma_g"}, {"align"}),
])
@pytest.mark.parametrize("reg_from", [0, 1, 2])
def test_names_and_bytes_of_what_travels(variant, sent, terms, reg_from):
    """Names, and bytes counted from the shapes, down and up, over three rounds."""
    server, clients, _ = federation(small_args("--variant", variant, "--reg-from", reg_from), 2)
    for t in range(3):
        downs, uploads = play(server, clients, t)
        beside_w = sent if t >= reg_from else set()
        for down in downs:
            assert down.keys() == {"w"} | beside_w
            assert common.nbytes(down) == model_bytes() + sum(EXTRA[name] for name in beside_w)
        for up in uploads.values():
            assert up.keys() == {"w"}
            assert common.nbytes(up) == model_bytes()
        logged = terms if t >= reg_from else set()
        assert clients[0].log.keys() == {"loss"} | logged


def test_what_is_sent_is_what_the_server_has_learnt():
    """Bit for bit, also after the server's state was loaded elsewhere."""
    server, clients, _ = federation(small_args(), 2)
    play(server, clients, 0)
    down = server.download(7)  # the same for everyone, also for a client that was never trained
    same(down, {"w": server.w, "w_g": server.w_g, "mu_g": server.mu_g, "sigma_g": server.sigma_g})
    # as in the other processes, which get the server's state after each round
    other, _, _ = federation(small_args(), 2)
    common.restore(other, copied(common.kept(server)), "cpu")
    same(other.download(0), down)


def test_every_client_is_tested_with_the_mean_model():
    server, clients, _ = federation(small_args("--variant", "fedalign"))
    play(server, clients, 0)
    for k, client in enumerate(clients):
        assert common.kept(client) == {}
        same(common.state(client.model(server.download(k))), server.w)


def test_participation_the_ensemble_is_of_the_uploaded_classifiers(tmp_path, monkeypatch):
    """Bit for bit: the classifiers that the generator sees are those of the round's uploads."""
    ensembles, rounds = [], []
    train_generator, update = fedcir.Server.train_generator, fedcir.Server.update

    def spy(self, uploaded):
        ensembles.append([w["head.weight"].clone() for w in uploaded])
        return train_generator(self, uploaded)

    def spy_update(self, uploads, t):
        given = copied(uploads)
        update(self, uploads, t)
        rounds.append((given, self.w))

    monkeypatch.setattr(fedcir.Server, "train_generator", spy)
    monkeypatch.setattr(fedcir.Server, "update", spy_update)
    run_here("fedcir", tmp_path / "run", "--participation", 0.5, *SMALL)
    assert [len(line["clients"]) for line in metrics(tmp_path / "run")] == [3, 3]
    (first, _), (second, _) = rounds
    assert len(first) == len(second) == 3
    assert first.keys() != second.keys()
    for ensemble, (uploads, w) in zip(ensembles, rounds, strict=True):
        for head, up in zip(ensemble, uploads.values(), strict=True):
            assert torch.equal(head, up["w"]["head.weight"])
        assert_close(w["last.bias"], mean_of(uploads, "last.bias"))


# The ablations and the settings


class Sampled(fedcir.GaussianNet):
    """A network whose features are a sample of z, for fedavg.py."""

    def features(self, x):
        mu, sigma = self.encode(x)
        return mu + sigma * torch.randn_like(mu)


def fedavg_on_the_gaussian_network():
    args = small_args()
    inherited = {field.name: getattr(args, field.name) for field in dataclasses.fields(common.Args)}
    args = fedavg.Args(**inherited, average="uniform")
    domains, classes = common.load_domains(args)
    data, _ = common.split(common.Dataset(domains, classes), args)
    common.seed_all(0)
    net = Sampled(common.backbone(args, 1, C), True, 20)
    clients = [fedavg.Client(args, net, k, data[k]) for k in range(3)]
    return fedavg.Server(args, net, 3), clients


def two_rounds(server, clients):
    """The model after two rounds and its prediction; only w is sent."""
    for t in range(2):
        downs, _ = play(server, clients, t)
        assert all(down.keys() == {"w"} for down in downs)
    model = clients[2].model(server.download(2)).eval()
    x, _ = clients[2].data.train.batch(torch.arange(8))
    torch.manual_seed(0)
    return {"w": server.w, "prediction": model(x).detach()}


@pytest.mark.parametrize("flags", [("fedreg", "--lambda-reg", 0), ("fedalign", "--lambda-align", 0),
                                   ("control",)])
def test_without_both_terms_it_is_fedavg_on_the_gaussian_network(flags):
    """Bit for bit, also the predictions: fedavg.py with a network whose features are a sample of z."""
    server, clients, _ = federation(small_args("--variant", *flags))
    same(two_rounds(server, clients), two_rounds(*fedavg_on_the_gaussian_network()))


ALIGN = {"domainnet10": 1e-6, "domainnet": 1e-6, "iwildcam": 1e-6, "pacs": 5e-7, "officecaltech": 5e-7,
         "camelyon17": 5e-7}


@pytest.mark.parametrize("scale", ["paper", "laptop", "smoke"])
@pytest.mark.parametrize("dataset", ALIGN)
def test_coefficients_of_appendix_e(dataset, scale):
    """Against the numbers of App. E, for each dataset and variant."""
    weights = {"fedcir": (0.5, ALIGN[dataset]), "fedreg": (0.5, 0), "fedalign": (0, ALIGN[dataset]),
               "control": (0, 0)}
    for variant, want in weights.items():
        flags = ("--dataset", dataset, "--variant", variant, "--scale", scale)
        args = parsed("fedcir", *flags)
        assert (args.lambda_reg, args.lambda_align) == want
        assert args.generator_steps == 5
        assert parsed("fedcir", *flags, "--lambda-align", 0.25).lambda_align == 0.25


def test_laptop_scale():
    """Ours."""
    for dataset in ("pacs", "officecaltech"):
        args = parsed("fedcir", "--dataset", dataset, "--scale", "laptop")
        assert (args.image_size, args.rounds, args.steps, args.generator_lr) == (32, 24, 20, 0.01)


@pytest.mark.parametrize("dataset", ALIGN)
def test_schedule_of_section_6_1(dataset):
    """Against the numbers of Sec. 6.1."""
    args = parsed("fedcir", "--dataset", dataset)
    assert (args.rounds, args.steps, args.batch_size, args.participation) == (300, 20, 32, 1)
    assert (args.lr, args.lr_decay, args.momentum, args.weight_decay) == (0.01, 1, 0.9, 5e-4)
    assert (args.backbone, args.image_size) == ("resnet18", 128)
    assert args.eval_every == (10 if dataset == "camelyon17" else 1)


def test_resnet18_has_a_z_of_512():
    """Shapes, and sigma above 0."""
    args = parsed("fedcir", "--dataset", "officecaltech", "--scale", "laptop")
    net = fedcir.build(args, 3, 10).eval()
    assert net(torch.zeros(1, 3, 64, 64)).shape == (1, 10)
    assert net.G.second.out_features == net.model.head.in_features == 512
    mu, sigma = net.model.encode(torch.zeros(1, 3, 64, 64))
    assert mu.shape == sigma.shape == (1, 512)
    assert (sigma > 0).all()


# Whole runs


@pytest.mark.parametrize("flags", [(), ("--clip", 1, "--participation", 0.5)])
def test_an_interrupted_run_goes_on_with_the_generators_adam(tmp_path, monkeypatch, flags):
    flags = (*SMALL, "--rounds", 3, "--steps", 1, "--checkpoint-every", 0, *flags)
    run_here("fedcir", tmp_path / "whole", *flags)
    interrupted("fedcir", monkeypatch, tmp_path / "parts", *flags, after=2)
    run_here("fedcir", tmp_path / "parts", *flags)
    whole = load_file(tmp_path / "whole/checkpoint.pt", "checkpoint")
    parts = load_file(tmp_path / "parts/checkpoint.pt", "checkpoint")
    assert whole["server"]["t"] == 3
    assert whole["server"]["adam"]["bn.weight"]["step"] == 3 * 5
    for key in ("server", "clients"):
        same(whole[key], parts[key])
    rounds = (tmp_path / "parts/metrics.jsonl").read_bytes()
    assert rounds == (tmp_path / "whole/metrics.jsonl").read_bytes()


@pytest.mark.parametrize("first,flags", [
    (set(), ("--protocol", "lodo", "--target", "d75", "--variant", "fedalign")),
    ({"reg", "align"}, ("--clients-per-domain", 2, "--dirichlet", 5, "--limit", 40, "--reg-from", 0)),
    (set(), ("--precision", "bf16", "--lambda-align", 0.01, "--generator-optimizer", "sgd")),
])
def test_the_log_of_a_run_has_the_regularizers_from_their_round_on(tmp_path, first, flags):
    result = run_here("fedcir", tmp_path / "run", *SMALL, *flags)
    assert result["last"]["round"] == 2
    assert ("target" in result["best"]) == ("lodo" in flags)
    second = {"align"} if "fedalign" in flags else {"reg", "align"}
    for line, terms in zip(metrics(tmp_path / "run"), (first, second), strict=True):
        for log in line["clients"].values():
            assert log.keys() == {"bytes_down", "bytes_up", "loss"} | terms
            assert log["bytes_up"] == model_bytes()
    assert result["logs"].keys() == {"loss"} | second  # also in the record
    aligns = [log["align"] for log in metrics(tmp_path / "run")[1]["clients"].values()]
    assert result["logs"]["align"][1] == pytest.approx(np.mean(aligns), abs=1e-5)
    assert (result["logs"]["align"][0] is None) == (not first)
