"""FedCiR: every equation against an independent calculation, Algorithm 1 by what changes when and what travels."""

import dataclasses
import math

import common
import fedavg
import fedcir
from tests.conftest import interrupted, metrics, parsed, run_here

import basics
import networks
import numpy as np
import pytest
import torch
from torch import tensor
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

C, D, NOISE, WIDTH = 10, 64, 5, 12  # classes and z of the digits, and a small generator
SMALL = ("--scale", "smoke", "--precision", "fp32", "--device", "cpu", "--steps", 2, "--batch-size", 8, "--limit", 20,
         "--image-size", 8, "--noise", NOISE, "--width", WIDTH, "--mle-samples", 30)


def small_args(*flags):
    return parsed("fedcir", *SMALL, *flags)


def federation(args, K=3):
    """A server and K clients of the smallest network on digits."""
    domains, classes = common.load_domains(args)
    clients, _ = common.make_clients(args, domains, len(classes))
    common.seed_all(0)
    net = fedcir.build(args, 1, len(classes))
    server = fedcir.Server(args, net, K)
    return server, [fedcir.Client(args, net, k, c) for k, c in enumerate(clients[:K])], net


def play(server, clients, t):
    """Round t as common.Loop plays it; returns the downloads and a copy of the uploads."""
    downs = [common.copied(server.download(k)) for k in range(len(clients))]
    uploads = {}
    for k, client in enumerate(clients):
        common.seed_all(0, "train", t, k)
        uploads[k] = client.train(downs[k], t)
    common.seed_all(0, "server", t)
    kept = common.copied(uploads)
    server.update(uploads, t)
    same(uploads, kept)  # the server leaves what it was given as it is
    return downs, kept


def same(a, b):
    """Nested dicts of tensors and numbers, equal bit for bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def generated(w_g, y, training=False):
    """G(y, epsilon) from its tensors alone, the noise drawn here; in training with the batch's statistics."""
    epsilon = torch.randn(len(y), w_g["first.weight"].shape[1] - C)
    h = torch.cat([epsilon, torch.eye(C)[y]], 1) @ w_g["first.weight"].T + w_g["first.bias"]
    mean, var = (h.mean(0), h.var(0, correction=0)) if training else (w_g["bn.running_mean"], w_g["bn.running_var"])
    if training:
        w_g["bn.running_mean"] = (0.9 * w_g["bn.running_mean"] + 0.1 * mean).detach()
        w_g["bn.running_var"] = (0.9 * w_g["bn.running_var"] + 0.1 * h.var(0, correction=1)).detach()
        w_g["bn.num_batches_tracked"] = w_g["bn.num_batches_tracked"] + 1
    h = (h - mean) / (var + 1e-5).sqrt() * w_g["bn.weight"] + w_g["bn.bias"]
    return h.clamp(min=0) @ w_g["second.weight"].T + w_g["second.bias"]


def some_classifiers(K, C, D):
    g = torch.Generator().manual_seed(0)
    return torch.randn(K, C, D, generator=g, dtype=torch.float64), torch.randn(K, C, generator=g, dtype=torch.float64)


# Eqs. (8), (15), (17)


def eq15_by_loops(z, y, weight, bias):
    total = 0.0
    for b in range(len(z)):
        p = 0.0
        for k in range(len(weight)):
            e = [math.exp(float(weight[k, c] @ z[b] + bias[k, c])) for c in range(weight.shape[1])]
            p += e[y[b]] / sum(e) / len(weight)
        total -= math.log(p)
    return total / len(z)


def test_eq15_and_its_gradient_against_loops_over_clients_and_samples():
    """Probabilities are averaged before the logarithm; the gradient in z is that of finite differences."""
    weight, bias = some_classifiers(3, 4, 6)
    z, y = torch.randn(5, 6, dtype=torch.float64, requires_grad=True), tensor([0, 3, 1, 1, 2])
    loss = fedcir.ensemble_loss(z, y, weight, bias)
    loss.backward()
    assert math.isclose(loss.item(), eq15_by_loops(z.detach(), y, weight, bias), rel_tol=1e-12)
    for b in range(5):
        for d in range(6):
            step = torch.zeros_like(z)
            step[b, d] = 1e-5
            slope = eq15_by_loops(z.detach() + step, y, weight, bias) - eq15_by_loops(z.detach() - step, y, weight, bias)
            assert math.isclose(z.grad[b, d].item(), slope / 2e-5, rel_tol=1e-5, abs_tol=1e-8)


def test_eq15_of_one_classifier_or_of_equal_ones_is_cross_entropy():
    weight, bias = some_classifiers(1, 4, 6)
    z, y = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 4
    want = F.cross_entropy(z @ weight[0].T + bias[0], y)
    for K in (1, 5):
        torch.testing.assert_close(fedcir.ensemble_loss(z, y, weight.expand(K, -1, -1), bias.expand(K, -1)), want)


def test_eq15_two_clients_by_hand():
    """Probabilities 0.9 and 0.1 of the label: -log 0.5, not the mean of the two losses; logits of 1000 do not overflow."""
    bias = tensor([[math.log(9), 0.0], [0.0, math.log(9)]])
    loss = fedcir.ensemble_loss(torch.zeros(1, 1), tensor([0]), torch.zeros(2, 2, 1), bias)
    assert math.isclose(loss.item(), math.log(2), rel_tol=1e-6)
    weight = tensor([[[-1000.0], [0.0]], [[0.0], [1000.0]]])
    far = fedcir.ensemble_loss(torch.ones(1, 1), tensor([0]), weight, torch.zeros(2, 2))
    assert far.item() == 1000


def test_eq17_against_torch_distributions():
    torch.manual_seed(0)
    mu, mu_g, sigma, sigma_g = torch.randn(4, 7), torch.randn(4, 7), torch.rand(4, 7) + 0.1, torch.rand(4, 7) + 0.1
    want = kl_divergence(Normal(mu, sigma), Normal(mu_g, sigma_g)).sum(1)
    torch.testing.assert_close(networks.gaussian_kl(mu, sigma, mu_g, sigma_g), want)
    assert (networks.gaussian_kl(mu, sigma, mu, sigma) == 0).all()


def test_eq8_prediction_is_the_log_of_the_mean_probability():
    args = small_args("--samples", 7)
    server, clients, net = federation(args, 1)
    model, x = clients[0].model(server.download(0)).eval(), clients[0].data.test.batch(tensor([0, 1]))[0]
    torch.manual_seed(1)
    log_p = model(x)
    mu, sigma = model.last(model.body(x)).chunk(2, 1)
    torch.manual_seed(1)
    draws = [mu + F.softplus(sigma) * e for e in torch.randn(7, 2, D)]
    want = sum(F.softmax(z @ server.w["head.weight"].T + server.w["head.bias"], 1) for z in draws) / 7
    torch.testing.assert_close(log_p.exp(), want, rtol=1e-4, atol=1e-6)
    still = fedcir.build(small_args("--samples", 0), 1, C).eval()
    assert torch.equal(still(x), still.head(still.features(x)))


# The generator and its moments


def test_moments_of_the_same_samples_with_running_statistics():
    """Two linear layers with BN and ReLU between them; numpy's mean and deviation, divided by S and not S - 1."""
    G = fedcir.Generator(NOISE, C, WIDTH, 7)
    G.bn.running_mean.normal_(), G.bn.running_var.uniform_(0.5, 2), G.bn.weight.data.normal_(), G.bn.bias.data.normal_()
    before = common.state(G)
    torch.manual_seed(3)
    mu, sigma = fedcir.moments(G.train(), 40, 1e-3, "cpu")
    torch.manual_seed(3)
    for c in range(C):
        z = generated(before, torch.full((40,), c)).numpy().astype(np.float64)
        np.testing.assert_allclose(mu[c], z.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(sigma[c], z.std(0, ddof=0), rtol=1e-4)
    same(common.state(G), before)  # running statistics did not move
    assert not mu.requires_grad and not sigma.requires_grad


def test_sigma_has_its_lower_limit():
    G = fedcir.Generator(NOISE, C, WIDTH, 3)
    with torch.no_grad():
        G.second.weight[1:] = 0
    mu, sigma = fedcir.moments(G, 20, 0.01, "cpu")
    assert (sigma[:, 1:] == 0.01).all() and (sigma[:, 0] > 0.01).all()
    torch.testing.assert_close(mu[:, 1:], G.second.bias[1:].expand(C, 2))


# ClientUpdate


def test_eq18_one_step_by_hand():
    """Upload = w - lr * (gradient of the three terms + decay * w), with the same draws of z, labels and noise."""
    args = small_args("--reg-from", 0, "--steps", 1, "--lambda-reg", 0.7, "--lambda-align", 0.01, "--weight-decay", 0.1)
    server, clients, net = federation(args)
    down = common.copied(server.download(1))
    up = clients[1].train(down, t=0)
    x, y = next(common.batches(clients[1].data.train, args, 0, 1))  # seeds the draws below as well
    net.load_state_dict(down["w"] | {f"G.{n}": v for n, v in down["w_g"].items()})
    net.train()
    w = {n: p for n, p in net.named_parameters() if not n.startswith("G.")}
    mu, raw = net.last(net.body(x)).chunk(2, 1)
    sigma = F.softplus(raw) + 1e-6
    p = F.softmax((mu + sigma * torch.randn(8, D)) @ w["head.weight"].T + w["head.bias"], 1)
    y_g = torch.randint(C, (8,))
    p_g = F.softmax(generated(down["w_g"], y_g) @ w["head.weight"].T + w["head.bias"], 1)
    kl = kl_divergence(Normal(mu, sigma), Normal(down["mu_g"][y], down["sigma_g"][y])).sum(1)
    terms = -p[range(8), y].log().mean(), -p_g[range(8), y_g].log().mean(), kl.mean()
    gradient = torch.autograd.grad(terms[0] + 0.7 * terms[1] + 0.01 * terms[2], list(w.values()))
    for (name, value), g in zip(w.items(), gradient):
        torch.testing.assert_close(up["w"][name], value - args.lr * (g + 0.1 * value), atol=1e-5, rtol=1e-4)
    for name, term in zip(("loss", "reg", "align"), terms):
        torch.testing.assert_close(clients[1].log[name], term.detach(), rtol=1e-4, atol=1e-5)


def test_l_reg_moves_only_the_classifier_and_l_align_only_the_encoder():
    """One step with a term and without it, all draws the same: what differs is what the term's gradient reaches."""
    ups = {}
    for name, weights in (("none", (0, 0)), ("reg", (0.5, 0)), ("align", (0, 0.1))):
        args = small_args("--reg-from", 0, "--steps", 1, "--lambda-reg", weights[0], "--lambda-align", weights[1])
        server, clients, net = federation(args)
        ups[name] = clients[0].train(server.download(0), 0)["w"]
    assert {n for n in ups["none"] if not torch.equal(ups["reg"][n], ups["none"][n])} == {"head.weight", "head.bias"}
    moved = {n for n in ups["none"] if not torch.equal(ups["align"][n], ups["none"][n])}
    assert {"last.weight", "last.bias", "body.0.weight"} <= moved and not any(n.startswith("head") for n in moved)


def test_the_generator_is_fixed_at_the_clients():
    args = small_args("--reg-from", 0, "--lambda-align", 0.1, "--momentum", 0.9, "--weight-decay", 0.1)
    server, clients, net = federation(args)
    down = server.download(0)
    up = clients[0].train(down, 0)
    same(common.state(net.G), down["w_g"])  # neither parameters nor running statistics
    assert up.keys() == {"w"} and up["w"].keys() == down["w"].keys() and not any(n.startswith("G.") for n in up["w"])
    same(down, server.download(0))
    assert not net.G.training and net.training


# The server, Algorithm 1


def test_lines_8_to_12_by_hand():
    """E_g plain steps of w_g on the mixture of the uploads' softmaxes, the moments of the new w_g, the uniform mean."""
    args = small_args("--generator-optimizer", "sgd", "--generator-lr", 0.5, "--generator-steps", 3)
    server, clients, net = federation(args)
    w_g = common.copied(server.w_g)
    _, uploads = play(server, clients, 0)
    common.seed_all(0, "server", 0)
    for _ in range(3):
        y = torch.randint(C, (8,))
        leaves = {n: v.requires_grad_() for n, v in w_g.items() if n.split(".")[1] in ("weight", "bias")}
        z = generated(w_g, y, training=True)
        p = sum(F.softmax(z @ u["w"]["head.weight"].T + u["w"]["head.bias"], 1) for u in uploads.values()) / 3
        slopes = torch.autograd.grad(-p[range(8), y].log().mean(), list(leaves.values()))
        w_g |= {n: (v - 0.5 * g).detach() for (n, v), g in zip(leaves.items(), slopes)}
    assert w_g.keys() == server.w_g.keys() and server.w_g["bn.num_batches_tracked"] == 3
    for name, value in w_g.items():
        torch.testing.assert_close(server.w_g[name], value, atol=1e-5, rtol=1e-4)
    for c in range(C):
        z = generated(w_g, torch.full((30,), c))
        torch.testing.assert_close(server.mu_g[c], z.mean(0), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(server.sigma_g[c], z.std(0, correction=0), atol=1e-4, rtol=1e-4)
    for name, value in server.w.items():
        mean = torch.stack([u["w"][name].double() for u in uploads.values()]).mean(0)
        torch.testing.assert_close(value.double(), mean.round() if "num_batches" in name else mean, atol=1e-6, rtol=1e-5)


def test_the_mean_is_uniform_whatever_the_clients_sizes():
    server, clients, _ = federation(small_args())
    clients[0].data.train = dataclasses.replace(clients[0].data.train, index=clients[0].data.train.index[:4],
                                                labels=clients[0].data.train.labels[:4])
    _, uploads = play(server, clients, 0)
    mean = sum(u["w"]["last.weight"] for u in uploads.values()) / 3
    torch.testing.assert_close(server.w["last.weight"], mean)


def test_order_of_the_servers_steps(monkeypatch):
    """Generator, then moments, then average: each step sees the new values of those before it and the old of the others."""
    server, clients, net = federation(small_args())
    old, seen = common.copied(server.state_dict()), []
    flat = lambda value: common.flatten([v.double() for v in common.tensors_of({"": value})])
    changed = lambda: {n for n in ("w", "w_g", "mu_g", "sigma_g") if not torch.equal(flat(getattr(server, n)), flat(old[n]))}
    for name in ("ensemble_loss", "moments", "average"):
        def spy(*given, name=name, true=getattr(fedcir, name)):
            seen.append((name, changed()))
            return true(*given)
        monkeypatch.setattr(fedcir, name, spy)
    play(server, clients, 0)
    assert seen == [("ensemble_loss", set())] * 5 + [("moments", {"w_g"}), ("average", {"w_g", "mu_g", "sigma_g"})]
    assert changed() == {"w", "w_g", "mu_g", "sigma_g"}
    assert all(not torch.equal(server.w_g[n], old["w_g"][n]) for n in old["w_g"] if n != "first.bias")


def test_adam_goes_on_across_rounds_and_across_a_checkpoint():
    """5 + 5 steps are 10 uninterrupted steps, if the labels and the noise are the same."""
    heads = [{"head.weight": torch.randn(C, D), "head.bias": torch.randn(C)} for _ in range(3)]
    ends = {}
    for name, steps in (("whole", 10), ("halves", 5), ("resumed", 5), ("forgetful", 5)):
        args = small_args("--generator-steps", steps)
        server, _, net = federation(args, 0)
        torch.manual_seed(5)
        server.train_generator(heads)
        if name == "resumed":
            saved, server = common.copied(server.state_dict()), fedcir.Server(args, net, 0)
            server.load_state_dict(saved)
            torch.manual_seed(5)
            [(torch.randint(C, (8,)), torch.randn(8, NOISE)) for _ in range(5)]  # what the first five steps drew
        elif name == "forgetful":
            server.adam = {}
        if name != "whole":
            server.train_generator(heads)
        ends[name] = server.w_g
    same(ends["whole"], ends["halves"])
    same(ends["whole"], ends["resumed"])
    assert not torch.equal(ends["whole"]["second.weight"], ends["forgetful"]["second.weight"])
    server, _, _ = federation(small_args("--generator-optimizer", "sgd"), 0)
    server.train_generator(heads)
    assert server.adam == {}


def test_the_generator_learns_what_all_classifiers_agree_on():
    """After 200 steps the ensemble gives new samples their labels."""
    server, _, _ = federation(small_args("--generator-steps", 200, "--generator-lr", 0.01), 0)
    torch.manual_seed(0)
    heads = [{"head.weight": 0.5 * torch.randn(C, D) + torch.eye(C, D), "head.bias": torch.randn(C)} for _ in range(3)]
    G, y = server.train_generator(heads).eval(), torch.arange(C).repeat(20)
    p = sum(F.softmax(G(y) @ h["head.weight"].T + h["head.bias"], 1) for h in heads) / 3
    assert (p.argmax(1) == y).float().mean() > 0.95


# What travels


SENT = {"fedcir": {"w", "w_g", "mu_g", "sigma_g"}, "fedreg": {"w", "w_g"}, "fedalign": {"w", "mu_g", "sigma_g"}}


def model_bytes():
    """Of the Gaussian network on smallcnn_bn: weights and biases, BN's four vectors and its counter (int64)."""
    conv = lambda s, t: 9 * s * t + t
    linear = lambda s, t: s * t + t
    return 4 * (conv(1, 32) + 4 * 32 + conv(32, 64) + 4 * 64 + linear(64 * 49, D)
                + linear(D, 2 * D) + linear(D, C)) + 8 * 2


@pytest.mark.parametrize("variant", SENT)
@pytest.mark.parametrize("reg_from", [0, 1, 2])
def test_names_and_bytes_of_what_travels(variant, reg_from):
    server, clients, _ = federation(small_args("--variant", variant, "--reg-from", reg_from), 2)
    extra = {"w_g": 4 * ((NOISE + C + 1) * WIDTH + 4 * WIDTH + (WIDTH + 1) * D) + 8, "mu_g": 4 * C * D, "sigma_g": 4 * C * D}
    for t in range(3):
        downs, uploads = play(server, clients, t)
        names = SENT[variant] if t >= reg_from else {"w"}
        assert all(d.keys() == names for d in downs) and all(u.keys() == {"w"} for u in uploads.values())
        assert common.nbytes(downs[0]) == model_bytes() + sum(extra[n] for n in names - {"w"})
        assert common.nbytes(uploads[0]) == model_bytes()
        terms = {"loss"} | {{"w_g": "reg", "mu_g": "align"}[n] for n in names & {"w_g", "mu_g"}}
        assert clients[0].log.keys() == terms
    assert variant != "fedalign" or common.nbytes(server.download(0)) == model_bytes() + 2 * C * D * 4


def test_what_is_sent_is_what_the_server_has_learnt():
    server, clients, _ = federation(small_args(), 2)
    play(server, clients, 0)
    down = server.download(7)  # the same for everyone, also for a client that was never trained
    same(down, {n: getattr(server, n) for n in ("w", "w_g", "mu_g", "sigma_g")})
    other, _, _ = federation(small_args(), 2)  # as in the other processes, which get the server's state after each round
    other.load_state_dict(common.copied(server.state_dict()))
    same(other.download(0), down)


def test_every_client_is_tested_with_the_mean_model():
    server, clients, net = federation(small_args("--variant", "fedalign"))
    play(server, clients, 0)
    for k, client in enumerate(clients):
        assert client.state_dict() == {}
        held = client.model(server.download(k)).state_dict()
        same({n: v for n, v in held.items() if not n.startswith("G.")}, server.w)


def test_participation_the_ensemble_is_of_the_uploaded_classifiers(tmp_path, monkeypatch):
    rounds, train_generator, update = [], fedcir.Server.train_generator, fedcir.Server.update

    def spy(self, uploaded):
        rounds[-1]["heads"] = [w["head.weight"].clone() for w in uploaded]
        return train_generator(self, uploaded)

    def spy_update(self, uploads, t):
        rounds.append({"uploads": common.copied(uploads)})
        update(self, uploads, t)
        rounds[-1]["w"] = self.w

    monkeypatch.setattr(fedcir.Server, "train_generator", spy)
    monkeypatch.setattr(fedcir.Server, "update", spy_update)
    run_here("fedcir", tmp_path / "run", "--participation", 0.5, *SMALL[4:])
    assert [len(r["uploads"]) for r in rounds] == [3, 3] and [len(h["clients"]) for h in metrics(tmp_path / "run")] == [3, 3]
    assert rounds[0]["uploads"].keys() != rounds[1]["uploads"].keys()
    for r in rounds:
        assert all(torch.equal(a, u["w"]["head.weight"]) for a, u in zip(r["heads"], r["uploads"].values(), strict=True))
        torch.testing.assert_close(r["w"]["last.bias"], sum(u["w"]["last.bias"] for u in r["uploads"].values()) / 3)


# The ablations and the settings


def test_without_both_terms_it_is_fedavg_on_the_gaussian_network():
    """Bit for bit, also the predictions: fedavg.py with a network whose features are a sample of z."""
    class Sampled(networks.GaussianNet):
        def features(self, x):
            mu, sigma = self.encode(x)
            return mu + sigma * torch.randn_like(mu)

    ends = []
    for variant, flag in (("fedreg", "--lambda-reg"), ("fedalign", "--lambda-align"), ("fedavg", None)):
        args = small_args(*([] if flag is None else ["--variant", variant, flag, 0]))
        server, clients, net = federation(args)
        if flag is None:
            args = fedavg.Args(**{f.name: getattr(args, f.name) for f in dataclasses.fields(common.Args)}, average="uniform")
            common.seed_all(0)
            net = Sampled(common.backbone(args, 1, C), True, 20)
            server, clients = fedavg.Server(args, net, 3), [fedavg.Client(args, net, c.k, c.data) for c in clients]
        for t in range(2):
            downs, _ = play(server, clients, t)
            assert all(d.keys() == {"w"} for d in downs)
        model, x = clients[2].model(server.download(2)).eval(), clients[2].data.train.batch(torch.arange(8))[0]
        torch.manual_seed(0)
        ends.append({"w": server.w, "prediction": model(x).detach()})
    same(ends[0], ends[1])
    same(ends[0], ends[2])


ALIGN = {"domainnet10": 1e-6, "domainnet": 1e-6, "iwildcam": 1e-6, "pacs": 5e-7, "officecaltech": 5e-7, "camelyon17": 5e-7}


@pytest.mark.parametrize("dataset", ALIGN)
def test_appendix_e_and_section_6_1(dataset):
    for variant, want in (("fedcir", (0.5, ALIGN[dataset])), ("fedreg", (0.5, 0)), ("fedalign", (0, ALIGN[dataset]))):
        for scale in ("paper", "laptop", "smoke"):
            args = parsed("fedcir", "--dataset", dataset, "--variant", variant, "--scale", scale)
            assert (args.lambda_reg, args.lambda_align, args.generator_steps) == (*want, 5)
        assert parsed("fedcir", "--dataset", dataset, "--variant", variant, "--lambda-align", 0.25).lambda_align == 0.25
    args = parsed("fedcir", "--dataset", dataset)
    assert (args.rounds, args.batch_size, args.lr, args.momentum, args.weight_decay) == (300, 32, 0.01, 0.9, 5e-4)
    assert (args.backbone, args.image_size, args.steps, args.lr_decay, args.participation) == ("resnet18", 128, 20, 1, 1)


def test_resnet18_has_a_z_of_512():
    args = parsed("fedcir", "--dataset", "officecaltech", "--scale", "laptop")
    net = fedcir.build(args, 3, 10).eval()
    assert net(torch.zeros(1, 3, 64, 64)).shape == (1, 10) and net.G.second.out_features == net.head.in_features == 512
    mu, sigma = net.encode(torch.zeros(1, 3, 64, 64))
    assert mu.shape == sigma.shape == (1, 512) and (sigma > 0).all()


# Whole runs


@pytest.mark.parametrize("flags", [(), ("--clip", 1, "--participation", 0.5)])
def test_resume_gives_the_bytes_of_an_uninterrupted_run(tmp_path, monkeypatch, capsys, flags):
    flags = (*SMALL[4:], "--rounds", 3, "--steps", 1, "--checkpoint-every", 0, *flags)
    run_here("fedcir", tmp_path / "whole", *flags)
    interrupted("fedcir", monkeypatch, tmp_path / "parts", *flags, after=2)
    run_here("fedcir", tmp_path / "parts", *flags)
    whole, parts = (basics.load_file(tmp_path / n / "checkpoint.pt", "checkpoint") for n in ("whole", "parts"))
    assert whole["server"]["t"] == 3 and whole["server"]["adam"]["bn.weight"]["step"] == 3 * 5
    for key in ("server", "clients", "history", "best"):
        same(whole[key], parts[key])
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "parts/metrics.jsonl").read_bytes()


@pytest.mark.parametrize("flags", [("--protocol", "lodo", "--target", "d75", "--variant", "fedalign"),
                                   ("--clients-per-domain", 2, "--dirichlet", 5, "--limit", 40, "--reg-from", 0),
                                   ("--precision", "bf16", "--lambda-align", 0.01, "--generator-optimizer", "sgd")])
def test_runs_at_smoke_scale(tmp_path, flags):
    result = run_here("fedcir", tmp_path / "run", *SMALL[4:], *flags)
    assert result["last"]["round"] == 2 and 0 <= result["best"]["ALL"] <= 1
    assert ("target" in result["best"]) == ("lodo" in flags)
    first, second = (next(iter(h["clients"].values())) for h in metrics(tmp_path / "run"))
    assert "align" in second and ("align" in first) == ("--reg-from" in flags) and second["bytes_up"] == model_bytes()
