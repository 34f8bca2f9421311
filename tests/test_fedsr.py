"""FedSR: the regularizers, the objective and its gradient against independent calculations; what travels and what stays."""

import dataclasses
import math

import common
import fedsr
from tests.conftest import interrupted, metrics, parsed, run_here

import networks
import numpy as np
import pytest
import torch
from torch import nn, tensor
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

torch.set_default_dtype(torch.float32)
D, C = 3, 3  # of the tiny network: four pixels -> z [3] -> three classes
SHARED_R = {"r.mu", "r.raw", "r.scale"}


@pytest.fixture
def tiny(monkeypatch):
    """tiny(*flags, **values) -> arguments, and what fedsr.build makes of a linear backbone, with random parameters."""
    monkeypatch.setattr(fedsr, "backbone", lambda args, channels, classes: networks.Net(
        nn.Sequential(nn.Flatten(), nn.Linear(4, D)), D, classes))

    def make(*flags, **values):
        args = parsed("fedsr", "--scale", "smoke", "--precision", "fp32", "--device", "cpu", *flags)
        args = dataclasses.replace(args, **{"batch_size": 10, "steps": 1, "lr": 1.0} | values)
        torch.manual_seed(1)
        net = fedsr.build(args, 1, C)
        for name, p in net.named_parameters():
            if name != "r.scale":
                p.data.normal_(std=0.7)
        return args, net

    return make


def four_pixels(labels, seed=0):
    """A client of one image of 2x2 pixels for each label."""
    images = torch.randint(0, 255, (len(labels), 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    part = common.Data(images, torch.arange(len(labels)), tensor(labels), "cpu", "unit")
    return common.ClientData("c", part, part, part)


def digits(*flags):
    """Arguments, network and the clients' data of digits."""
    args = parsed("fedsr", "--scale", "smoke", "--precision", "fp32", "--device", "cpu", *flags)
    domains, classes = common.load_domains(args)
    common.seed_all(0)
    net = fedsr.build(args, 1, len(classes))
    return args, net.to(memory_format=torch.channels_last), common.make_clients(args, domains, len(classes))[0]


def objective(w, x, y, eps, args):
    """Eq. (9) of one batch in float64, image by image and dimension by dimension; w: the tiny network's parameters."""
    total = 0.0
    sp = lambda v: torch.log1p(torch.exp(v))
    for i in range(len(y)):
        out = w["last.weight"] @ x[i].flatten() + w["last.bias"]
        mu, probabilistic = out[:D], len(out) == 2 * D
        sigma = sp(out[D:]) + 1e-6 if probabilistic else None
        z = mu + sigma * eps[i] if probabilistic else mu
        logits = w["head.weight"] @ z + w["head.bias"]
        total = total - torch.log(torch.exp(logits[y[i]]) / torch.exp(logits).sum())
        length = sum(z[d] ** 2 for d in range(D))
        total = total + args.alpha_l2r * (length if args.norm == "squared" else torch.sqrt(length))
        if probabilistic:
            s = w["r.scale"] if args.kl_scale else 1.0
            r = Normal(w["r.mu"][y[i]], sp(w["r.raw"][y[i]]))
            total = total + args.alpha_cmi * kl_divergence(Normal(s * mu, s * sigma), r).sum()
    return total / len(y)


# Eqs. (10)-(11), (17)-(18), (46), (5)


def test_eq46_against_torch_and_monte_carlo():
    torch.manual_seed(0)
    mu, mu_r = torch.randn(2, 5, 4, dtype=torch.float64)
    sigma, sigma_r = torch.rand(2, 5, 4, dtype=torch.float64) + 0.3
    p, r = Normal(mu, sigma), Normal(mu_r, sigma_r)
    got = networks.gaussian_kl(mu, sigma, mu_r, sigma_r)
    torch.testing.assert_close(got, kl_divergence(p, r).sum(1))
    z = p.sample((40_000,))
    ratio = (p.log_prob(z) - r.log_prob(z)).sum(2)  # [S, B]
    assert ((ratio.mean(0) - got).abs() < 5 * ratio.std(0) / 200).all()
    assert (networks.gaussian_kl(mu, sigma, mu, sigma).abs() < 1e-12).all()


def test_eq18_takes_each_images_own_class():
    torch.manual_seed(0)
    r = fedsr.Reference(4, 6)
    assert (r.mu == 0).all() and torch.allclose(r(tensor([2]))[1], tensor(1.3132617))  # softplus(1) = log(1 + e)
    r.mu.data.normal_(), r.raw.data.normal_()
    mu, sigma, y = torch.randn(5, 6), torch.rand(5, 6) + 0.1, tensor([3, 0, 3, 1, 0])
    want = sum(kl_divergence(Normal(mu[i], sigma[i]), Normal(r.mu[c], (1 + r.raw[c].exp()).log())).sum()
               for i, c in enumerate(y.tolist())) / 5
    torch.testing.assert_close(fedsr.cmi(mu, sigma, y, r), want)


def test_eq10_eq11_by_hand():
    z = tensor([[3.0, 4.0], [0.0, 1.0]])
    assert fedsr.l2r(z, "squared") == 13 and math.isclose(fedsr.l2r(z, "plain"), 3, rel_tol=1e-6)
    for norm, want in (("squared", [3.0, 4.0]), ("plain", [0.3, 0.4])):  # 2 z / B and z / ||z|| / B
        leaf = z.clone().requires_grad_()
        fedsr.l2r(leaf, norm).backward()
        torch.testing.assert_close(leaf.grad[0], tensor(want))
    zero = torch.zeros(2, 3, requires_grad=True)
    fedsr.l2r(zero, "plain").backward()
    assert (zero.grad == 0).all()


def test_eq5_is_the_mean_of_the_softmaxes_over_the_drawn_samples(tiny):
    x = torch.rand(6, 1, 2, 2)
    for samples in (1, 7):
        _, net = tiny(samples=samples)
        net.eval()
        mu, sigma = net.encode(x)
        torch.manual_seed(5)
        got = net(x)
        torch.manual_seed(5)
        z = mu + sigma * torch.randn(samples, 6, D)
        torch.testing.assert_close(got.exp(), torch.stack([F.softmax(net.head(s), 1) for s in z]).mean(0))
    _, net = tiny(samples=0)
    torch.testing.assert_close(net(x), net.head(net.encode(x)[0]))
    torch.testing.assert_close(net.features(x), mu)
    _, net = tiny("--variant", "fedl2r")
    torch.testing.assert_close(net(x), F.linear(F.linear(x.flatten(1), net.last.weight, net.last.bias), net.head.weight,
                                                net.head.bias))


def test_eq5_against_quadrature():
    """z of one dimension: the integral of N(z; mu, sigma^2) softmax(w z + b) by Gauss and Hermite."""
    torch.manual_seed(0)
    net = networks.GaussianNet(networks.Net(nn.Sequential(nn.Flatten(), nn.Linear(4, 1)), 1, 2), True, 100_000)
    net.head.weight.data = tensor([[3.0], [-2.0]])
    x = torch.rand(3, 1, 2, 2)
    mu, sigma = (v.double() for v in net.encode(x))
    nodes, weights = (torch.from_numpy(v) for v in np.polynomial.hermite.hermgauss(60))
    z = mu + math.sqrt(2) * sigma * nodes  # [3, 60]
    p = F.softmax(z[:, :, None] @ net.head.weight.double().T + net.head.bias.double(), 2)
    want = (weights[:, None] / math.sqrt(math.pi) * p).sum(1)
    torch.testing.assert_close(net(x).exp().double(), want, atol=0.006, rtol=0)
    net.samples = 0
    assert (F.softmax(net(x), 1) - want).abs().max() > 0.006  # the mean of z alone is another prediction


def test_sigma_is_positive_and_its_gradient_finite_in_bf16(tiny):
    args, net = tiny(precision="bf16")
    net.last.bias.data[D:] = tensor([-1e4, -120.0, 30.0])
    x, y = torch.rand(8, 1, 2, 2), torch.arange(8) % C
    with common.autocast(args):
        mu, sigma = net.encode(x)
    assert mu.dtype == sigma.dtype == torch.float32 and (sigma > 0).all() and (sigma[:, 0] < 2e-6).all()
    fedsr.cmi(mu, sigma, y, net.r).backward()
    assert all(torch.isfinite(p.grad).all() for p in (*net.last.parameters(), net.r.mu, net.r.raw))


# Eq. (9) and its gradient


@pytest.mark.parametrize("flags,values", [
    ((), dict(alpha_l2r=0.2, alpha_cmi=0.3)),
    ((), dict(alpha_l2r=0.2, alpha_cmi=0.3, norm="plain", kl_scale=True, reference="local")),
    ((), dict(alpha_l2r=0.2, alpha_cmi=0.3, clip=0.1, weight_decay=0.05)),
    (("--variant", "fedcmi"), dict(alpha_cmi=0.3)),
    (("--variant", "fedl2r"), dict(alpha_l2r=0.2)),
    (("--variant", "fedavg"), {})])
def test_one_step_is_the_gradient_of_eq9(tiny, flags, values):
    """A step of lr 1 against central differences of `objective` in float64; the noise is the one behind the batch's seed."""
    args, net = tiny(*flags, **values)
    if args.kl_scale:
        net.r.scale.data.fill_(0.8)
    start, data = common.state(net), four_pixels([0, 1, 1, 0, 2])
    server, client = fedsr.Server(args, net, 1), fedsr.Client(args, net, 0, data)
    up = client.train(server.download(0), 0)["w"] | client.r
    (x, y), = common.batches(data.train, args, 0, 0)
    eps = torch.randn(5, D).double()
    w = {n: v.double() for n, v in start.items()}
    gradient = {n: torch.zeros_like(v) for n, v in w.items()}
    for name, v in w.items():
        if name != "r.scale" or args.kl_scale:
            for i in range(v.numel()):
                both = []
                for h in (1e-5, -1e-5):
                    moved = v.clone()
                    moved.view(-1)[i] += h
                    both.append(objective(w | {name: moved}, x.double(), y, eps, args))
                gradient[name].view(-1)[i] = (both[0] - both[1]) / 2e-5
    norm = torch.cat([g.flatten() for g in gradient.values()]).norm()
    for name, g in gradient.items():
        g = g * (min(1, args.clip / norm) if args.clip else 1)
        if name != "r.scale":
            g = g + args.weight_decay * w[name]
        torch.testing.assert_close(start[name].double() - up[name].double(), g, atol=2e-5, rtol=1e-4)
    assert ("cmi" in client.log) == (args.variant in ("fedsr", "fedcmi"))
    assert ("l2r" in client.log) == (args.alpha_l2r > 0)
    terms = client.log["loss"] + args.alpha_l2r * client.log.get("l2r", 0) + args.alpha_cmi * client.log.get("cmi", 0)
    assert math.isclose(terms, objective(w, x.double(), y, eps, args), rel_tol=1e-5)


def test_cmi_trains_r_of_the_classes_in_the_batch_and_the_scale_only_when_asked(tiny):
    for reference in ("shared", "local"):
        args, net = tiny(reference=reference, weight_decay=0.1)
        start = common.state(net)
        server, client = fedsr.Server(args, net, 1), fedsr.Client(args, net, 0, four_pixels([0, 1, 1, 0]))
        up = client.train(server.download(0), 0)
        r = client.r if reference == "local" else up["w"]
        for name in ("r.mu", "r.raw"):
            assert (r[name][:2] != start[name][:2]).all()
            torch.testing.assert_close(r[name][2], 0.9 * start[name][2])  # class 2: decay alone
        assert r["r.scale"] == 1


# Who keeps and sends what; Eq. (1)


@pytest.mark.parametrize("variant,reference,sent", [("fedsr", "shared", 30 + 12 + 18 + 1), ("fedsr", "local", 30 + 12),
                                                    ("fedcmi", "shared", 30 + 12 + 18 + 1), ("fedl2r", "shared", 15 + 12),
                                                    ("fedavg", "local", 15 + 12)])
def test_a_round_by_hand(tiny, variant, reference, sent):
    """Plain means of clients of 2, 5 and 9 images; r(z|y) is in them if it is shared and never on the wire if not."""
    args, net = tiny("--variant", variant, reference=reference, lr=0.1)
    probabilistic = variant in ("fedsr", "fedcmi")
    server = fedsr.Server(args, net, 3)
    clients = [fedsr.Client(args, net, k, four_pixels([i % C for i in range(n)], k)) for k, n in enumerate((2, 5, 9))]
    for t in range(2):
        downs = [server.download(k) for k in range(3)]
        uploads = {k: c.train(downs[k], t) for k, c in enumerate(clients)}
        names = {"last.weight", "last.bias", "head.weight", "head.bias"}
        names |= SHARED_R if probabilistic and reference == "shared" else set()
        for payload in (*downs, *uploads.values()):
            assert payload.keys() == {"w"} and payload["w"].keys() == names and common.nbytes(payload) == 4 * sent
        server.update(uploads, t)
        for name in names:
            torch.testing.assert_close(server.download(7)["w"][name],
                                       (uploads[0]["w"][name] + uploads[1]["w"][name] + uploads[2]["w"][name]) / 3)
    own = [c.model(server.download(k)).state_dict()["r.mu"].clone() for k, c in enumerate(clients)] if probabilistic else []
    if own and reference == "local":
        assert all(torch.equal(own[k], c.r["r.mu"]) for k, c in enumerate(clients))
        assert not torch.equal(own[0], own[1]) and not torch.equal(own[1], own[2])
    elif own:
        assert torch.equal(own[0], own[1]) and not any(c.r for c in clients)


def test_local_r_goes_on_from_the_own_one(tiny):
    """Two rounds of one client with r(z|y) local are those with it shared: the mean over one client changes nothing."""
    ends = []
    for reference in ("shared", "local"):
        args, net = tiny(reference=reference, momentum=0.9, lr=0.1)
        server, client = fedsr.Server(args, net, 1), fedsr.Client(args, net, 0, four_pixels([0, 1, 2, 1]))
        for t in range(2):
            server.update({0: client.train(server.download(0), t)}, t)
        ends.append(server.w | client.r)
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])


def test_kept_momentum_is_one_uninterrupted_sgd():
    """Two rounds of one client against torch's SGD over the same batches and noise, the optimizer never made anew."""
    args, net, data = digits("--momentum", "0.9", "--weight-decay", "0.01", "--steps", "3", "--backbone", "smallcnn",
                             "--alpha-cmi", "0.01", "--lr", "0.01")
    start = common.state(net)
    ends = {}
    for keep in (True, False):
        a = dataclasses.replace(args, keep_momentum=keep)
        net.load_state_dict(start)
        server, client = fedsr.Server(a, net, 1), fedsr.Client(a, net, 0, data[0])
        for t in range(2):
            server.update({0: client.train(server.download(0), t)}, t)
        ends[keep] = server.w
    net.load_state_dict(start)
    net.train()
    opt = torch.optim.SGD([p for n, p in net.named_parameters() if n != "r.scale"], lr=0.01, momentum=0.9, weight_decay=0.01,
                          fused=False)
    for t in range(2):
        for x, y in common.batches(data[0].train, args, t, 0):
            mu, raw = net.last(net.body(x)).chunk(2, 1)
            p = Normal(mu, F.softplus(raw) + 1e-6)
            z = p.loc + p.scale * torch.randn_like(mu)
            kl = kl_divergence(p, Normal(net.r.mu[y], F.softplus(net.r.raw[y]))).sum(1).mean()
            opt.zero_grad()
            (F.cross_entropy(net.head(z), y) + 0.01 * z.norm(dim=1).square().mean() + 0.01 * kl).backward()
            opt.step()
    for name, v in net.state_dict().items():
        torch.testing.assert_close(ends[True][name], v, atol=1e-5, rtol=1e-4)
    assert (ends[False]["last.weight"] - net.last.weight).abs().max() > 1e-3


@pytest.mark.parametrize("momentum", ["0", "0.9"])
def test_fedavg_variant_is_fedavg_bit_for_bit(tmp_path, momentum):
    flags = ("--backbone", "smallcnn", "--momentum", momentum)
    run_here("fedavg", tmp_path / "a", "--average", "uniform", *flags)
    run_here("fedsr", tmp_path / "b", "--variant", "fedavg", "--no-keep-momentum", *flags)
    a, b = (torch.load(tmp_path / n / "checkpoint.pt", weights_only=True)["server"]["w"] for n in "ab")
    b = {n.replace("last.", "body.9."): v for n, v in b.items()}  # smallcnn's layer to z
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    both = [metrics(tmp_path / n) for n in "ab"]
    for line in both[0]:
        for entry in line["clients"].values():
            entry["bytes_up"] -= 8  # n_k, which only fedavg.py sends
    assert both[0] == both[1] and len(both[0]) == 2


# Networks, settings, runs


@pytest.mark.parametrize("name,into,dim", [("smallcnn", 1600, 64), ("smallcnn_bn", 64, 64), ("resnet18", 512, 512),
                                           ("resnet50", 2048, 2048)])
def test_z_has_the_papers_dimensions(name, into, dim):
    """Sec. 4.2: z of 64, 512 and 2048; mean and deviation from one layer, a linear classifier; deterministic without CMI."""
    for variant, outputs in (("fedsr", 2 * dim), ("fedcmi", 2 * dim), ("fedl2r", dim), ("fedavg", dim)):
        with torch.device("meta"):
            net = fedsr.build(fedsr.Args(backbone=name, variant=variant, alpha_cmi=0.0), 3, 7)
        assert (net.last.in_features, net.last.out_features) == (into, outputs)
        assert (net.head.in_features, net.head.out_features) == (dim, 7)
        assert hasattr(net, "r") == net.probabilistic == (outputs == 2 * dim)
        if net.probabilistic:
            assert net.r.mu.shape == net.r.raw.shape == (7, dim)


# App. C.1: FedL2R's alpha_l2r, FedCMI's alpha_cmi, FedSR's two
TABLE = {"rotatedmnist": (0.1, 0.3, 0.1, 0.3), "rotatedmnist-t10k": (0.1, 0.3, 0.1, 0.3), "pacs": (0.01, 0.01, 0.01, 0.001),
         "officehome": (0.05, 0.0005, 0.05, 0.0005), "domainnet": (0.01, 0.005, 0.01, 0.0005)}


@pytest.mark.parametrize("dataset", TABLE)
def test_coefficients_of_app_c1(dataset):
    l2r, cmi, *both = TABLE[dataset]
    for variant, want in (("fedavg", (0, 0)), ("fedl2r", (l2r, 0)), ("fedcmi", (0, cmi)), ("fedsr", tuple(both))):
        args = parsed("fedsr", "--dataset", dataset, "--variant", variant)
        assert (args.alpha_l2r, args.alpha_cmi) == want
        assert (args.protocol, args.steps, args.batch_size, args.momentum) == ("lodo", 5, 64, 0.9)
    assert parsed("fedsr", "--dataset", dataset, "--variant", "fedcmi", "--alpha-cmi", "7").alpha_cmi == 7


def test_schedule_of_sec_4_2():
    args = parsed("fedsr", "--dataset", "rotatedmnist")
    batches_of_an_epoch = len(common.cut_batches(torch.arange(900), args))
    assert args.lr == 0.001 and args.rounds * args.steps == 500 * batches_of_an_epoch
    for dataset, backbone in (("pacs", "resnet18"), ("officehome", "resnet50"), ("domainnet", "resnet50")):
        args = parsed("fedsr", "--dataset", dataset)
        assert (args.lr, args.weight_decay, args.rounds * args.steps, args.backbone) == (0.01, 5e-4, 5000, backbone)
        assert (args.image_size, args.normalize, args.weights, args.augment) == (224, "imagenet", "imagenet", "fedsr")


@pytest.mark.parametrize("dataset,cmi", [("domainnet10", 5e-7), ("pacs", 1e-6), ("officecaltech", 1e-6),
                                         ("camelyon17", 5e-7), ("iwildcam", 5e-7)])
def test_coefficients_of_fedcir_app_e(dataset, cmi):
    """On PACS by --variant fedcir alone; on the others they are the defaults too."""
    others = (("fedsr", cmi), ("fedcmi", cmi), ("fedl2r", 0), ("fedavg", 0)) if dataset != "pacs" else ()
    for variant, want in (("fedcir", cmi), *others):
        args = parsed("fedsr", "--dataset", dataset, "--variant", variant)
        assert args.alpha_cmi == want and (args.alpha_l2r == 0 or variant == "fedl2r")
        assert (args.steps, args.rounds, args.batch_size, args.lr, args.momentum) == (20, 300, 32, 0.01, 0.9)
        assert (args.weight_decay, args.image_size, args.backbone) == (5e-4, 128, "resnet18")
        assert (args.protocol, args.weights, args.augment) == ("indomain", "none", "none")
    assert fedsr.build(dataclasses.replace(args, variant="fedcir", backbone="smallcnn"), 3, 10).probabilistic


@pytest.mark.parametrize("variant", ["fedl2r", "fedavg"])
def test_cmi_of_a_deterministic_network_is_refused(tmp_path, capsys, variant):
    with pytest.raises(SystemExit) as end:
        run_here("fedsr", tmp_path / "run", "--variant", variant, "--alpha-cmi", "1")
    error = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2 and len(error) == 1 and error[0].startswith(f"fedsr: --variant {variant} ")


def test_stopped_and_resumed_with_local_r_and_kept_momentum(tmp_path, monkeypatch):
    """Interrupted after a round and started again: the same metrics, weights, r(z|y) and momentum to the bit."""
    flags = ("--reference", "local", "--keep-momentum", "--momentum", "0.9", "--kl-scale", "--weight-decay", "0.01",
             "--checkpoint-every", "0", "--rounds", "3", "--participation", "0.5", "--protocol", "lodo", "--target", "d30")
    run_here("fedsr", tmp_path / "whole", *flags)
    interrupted("fedsr", monkeypatch, tmp_path / "stopped", *flags, after=1)
    assert len(metrics(tmp_path / "stopped")) == 1
    run_here("fedsr", tmp_path / "stopped", *flags)
    assert (tmp_path / "stopped/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    for file in ("checkpoint.pt", "best.pt"):
        a, b = (torch.load(tmp_path / n / file, weights_only=True) for n in ("whole", "stopped"))
        for part in ("server", "clients"):
            found = common.tensors_of(a[part]), common.tensors_of(b[part])
            assert len(found[0]) == len(found[1]) > 0 and all(torch.equal(x, y) for x, y in zip(*found))
    trained = [c for c in a["clients"].values() if c["momentum"]]
    assert trained and all(c["r"].keys() == SHARED_R and c["momentum"].keys() >= SHARED_R for c in trained)
    assert not a["clients"][5]["momentum"] and (a["clients"][5]["r"]["r.mu"] == 0).all()  # the target's, never trained


@pytest.mark.parametrize("flags", [
    ("--protocol", "lodo", "--target", "d30", "--backbone", "smallcnn"), ("--variant", "fedl2r", "--norm", "plain"),
    ("--variant", "fedcmi", "--samples", "0", "--clients-per-domain", "2", "--dirichlet", "5"),
    ("--precision", "bf16", "--momentum", "0.9", "--kl-scale", "--clip", "1")])
def test_runs_at_smoke_scale(tmp_path, flags):
    result = run_here("fedsr", tmp_path / "run", *flags)
    assert result["last"]["round"] == 2 and 0 <= result["best"]["ALL"] <= 1
    assert ("target" in result["best"]) == ("lodo" in flags)
    logged = {n for h in metrics(tmp_path / "run") for c in h["clients"].values() for n in c}
    assert ("cmi" in logged) == ("fedl2r" not in flags) and ("l2r" in logged) == ("fedcmi" not in flags)


def test_a_tsne_needs_a_domain_that_is_left_out(tmp_path):
    """Said before the training, not after it."""
    with pytest.raises(common.Stop, match="--tsne draws a source and the left-out domain"):
        fedsr.build(parsed("fedsr", "--tsne", tmp_path), 1, 10)
