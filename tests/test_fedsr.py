"""FedSR: regularizers, objective and gradient against independent calculations; what travels and what stays.

The encoder and Eq. (46) have tests of their own in test_gaussian_encoder.py.
"""

import dataclasses
import math

import common
import fedsr
import official.fedsr
from tests.conftest import fails, interrupted, metrics, parsed, run_here

import pytest
import torch
from torch import nn, tensor
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy, linear, softmax, softplus
from torch.testing import assert_close

D, C = 3, 3  # of the tiny network: four pixels -> z [3] -> three classes
SHARED_R = {"r.mu", "r.raw", "r.scale"}
HERE = ("--scale", "smoke", "--precision", "fp32", "--device", "cpu")


def tiny_backbone(args, channels, classes):
    return common.Net(nn.Sequential(nn.Flatten(), nn.Linear(4, D)), D, classes)


@pytest.fixture
def tiny(monkeypatch):
    """tiny(*flags, **values) -> arguments, and what `build` makes of a linear backbone, with random
    parameters; of fedsr.py, or of `method`."""
    monkeypatch.setattr(fedsr, "backbone", tiny_backbone)

    def make(*flags, method=fedsr, **values):
        small = {"batch_size": 10, "steps": 1, "lr": 1.0}
        args = dataclasses.replace(method.arguments([*HERE, *flags]), **(small | values))
        torch.manual_seed(1)
        net = method.build(args, 1, C)
        for name, p in net.named_parameters():
            if name != "r.scale":
                p.data.normal_(std=0.7)
        return args, net

    return make


def four_pixels(labels, seed=0):
    """A client of one image of 2x2 pixels for each label."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 255, (len(labels), 1, 2, 2), dtype=torch.uint8, generator=generator)
    part = common.Data(images, torch.arange(len(labels)), tensor(labels), "cpu", "unit")
    return common.ClientData("c", part, part, part)


def digits(*flags):
    """Arguments, network and the first client's data of digits."""
    args = parsed("fedsr", *HERE, *flags)
    domains, classes = common.load_domains(args)
    common.seed_all(0)
    net = fedsr.build(args, 1, len(classes))
    clients, _ = common.split(common.Dataset(domains, classes), args)
    return args, net.to(memory_format=torch.channels_last), clients[0]


def play(server, clients, t):
    """Round t: what is sent in both directions."""
    downs = [server.download(k) for k in range(len(clients))]
    uploads = {k: client.train(downs[k], t) for k, client in enumerate(clients)}
    server.update(uploads, t)
    return downs, uploads


# Eqs. (5), (10)-(11), (17)-(18)


def test_eq18_takes_each_images_own_class():
    """Against torch.distributions.kl_divergence, image by image."""
    torch.manual_seed(0)
    r = fedsr.Reference(4, 6)
    _, sigma_y = r(tensor([2]))
    assert (r.mu == 0).all()
    assert torch.allclose(sigma_y, tensor(1.3132617))  # softplus(1) = log(1 + e)
    r.mu.data.normal_()
    r.raw.data.normal_()
    mu, sigma, y = torch.randn(5, 6), torch.rand(5, 6) + 0.1, tensor([3, 0, 3, 1, 0])
    total = 0
    for i, c in enumerate(y.tolist()):
        of_class = Normal(r.mu[c], (1 + r.raw[c].exp()).log())
        total += kl_divergence(Normal(mu[i], sigma[i]), of_class).sum()
    assert_close(fedsr.cmi(mu, sigma, y, r), total / 5)


@pytest.mark.parametrize("l2r,value,gradient", [
    (fedsr.l2r, 13, [3.0, 4.0]),  # (25 + 1) / 2; 2 z / B
    (official.fedsr.plain_l2r, 3, [0.3, 0.4]),  # (5 + 1) / 2; z / ||z|| / B
])
def test_eq10_eq11_by_hand(l2r, value, gradient):
    """z of (3, 4) and (0, 1): value and gradient on paper, of the paper's norm and of the release's."""
    z = tensor([[3.0, 4.0], [0.0, 1.0]], requires_grad=True)
    length = l2r(z)
    length.backward()
    assert math.isclose(length.item(), value, rel_tol=1e-6)
    assert_close(z.grad[0], tensor(gradient))


def test_eq10_is_13_exactly():
    """(25 + 1) / 2."""
    assert fedsr.l2r(tensor([[3.0, 4.0], [0.0, 1.0]])) == 13


def test_the_plain_norm_has_a_gradient_at_zero():
    """It is 0, and not NaN."""
    zero = torch.zeros(2, 3, requires_grad=True)
    official.fedsr.plain_l2r(zero).backward()
    assert (zero.grad == 0).all()


@pytest.mark.parametrize("samples", [1, 7])
def test_eq5_is_the_mean_of_the_softmaxes_over_the_drawn_samples(tiny, samples):
    """Against a loop over the samples, of the same noise."""
    x = torch.rand(6, 1, 2, 2)
    _, net = tiny(samples=samples)
    net.eval()
    mu, sigma = net.encode(x)
    torch.manual_seed(5)
    prediction = net(x)
    torch.manual_seed(5)
    z = mu + sigma * torch.randn(samples, 6, D)
    probabilities = [softmax(net.head(of_sample), 1) for of_sample in z]
    assert_close(prediction.exp(), torch.stack(probabilities).mean(0))


def test_without_samples_the_prediction_is_of_the_mean(tiny):
    """Against the classifier on the mean, and on plain linear layers."""
    x = torch.rand(6, 1, 2, 2)
    _, net = tiny(samples=0)
    mu, _ = net.encode(x)
    assert_close(net(x), net.head(mu))
    assert_close(net.features(x), mu)
    _, net = tiny("--variant", "fedl2r")
    z = linear(x.flatten(1), net.last.weight, net.last.bias)
    assert_close(net(x), linear(z, net.head.weight, net.head.bias))


def test_sigma_is_positive_and_its_gradient_finite_in_bf16(tiny):
    """At raw values from -10,000 to 30."""
    args, net = tiny(precision="bf16")
    net.last.bias.data[D:] = tensor([-1e4, -120.0, 30.0])
    x, y = torch.rand(8, 1, 2, 2), torch.arange(8) % C
    with common.autocast(args):
        mu, sigma = net.encode(x)
    assert mu.dtype == sigma.dtype == torch.float32
    assert (sigma > 0).all()
    assert (sigma[:, 0] < 2e-6).all()
    fedsr.cmi(mu, sigma, y, net.r).backward()
    for p in (*net.last.parameters(), net.r.mu, net.r.raw):
        assert torch.isfinite(p.grad).all()


# Eq. (9) and its gradient


def log1p_exp(v):
    return torch.log1p(torch.exp(v))


def objective(w, x, y, eps, args):
    """Eq. (9) of one batch in float64, image by image and dimension by dimension; w: the tiny network's
    parameters. With the norm and the scale of official.fedsr, if the arguments have them."""
    total = 0.0
    plain, scaled = getattr(args, "norm", "") == "plain", getattr(args, "kl_scale", False)
    for i, c in enumerate(y.tolist()):
        out = w["last.weight"] @ x[i].flatten() + w["last.bias"]
        z = mu = out[:D]
        probabilistic = len(out) == 2 * D
        if probabilistic:
            sigma = log1p_exp(out[D:]) + 1e-6
            z = mu + sigma * eps[i]
        logits = w["head.weight"] @ z + w["head.bias"]
        total = total - torch.log(torch.exp(logits[c]) / torch.exp(logits).sum())
        length = sum(z[d] ** 2 for d in range(D))
        if plain:
            length = torch.sqrt(length)
        total = total + args.alpha_l2r * length
        if probabilistic:
            s = w["r.scale"] if scaled else 1.0
            r = Normal(w["r.mu"][c], log1p_exp(w["r.raw"][c]))
            total = total + args.alpha_cmi * kl_divergence(Normal(s * mu, s * sigma), r).sum()
    return total / len(y)


def central_differences(w, trained, *batch):
    """The gradient of `objective` in each of the parameters `trained`; 0 for the others."""
    gradient = {name: torch.zeros_like(v) for name, v in w.items()}
    for name in trained:
        for i in range(w[name].numel()):
            step = torch.zeros_like(w[name])
            step.view(-1)[i] = 1e-5
            above = objective(w | {name: w[name] + step}, *batch)
            below = objective(w | {name: w[name] - step}, *batch)
            gradient[name].view(-1)[i] = (above - below) / 2e-5
    return gradient


@pytest.mark.parametrize("method,flags,values", [
    (fedsr, (), dict(alpha_l2r=0.2, alpha_cmi=0.3)),
    (fedsr, (), dict(alpha_l2r=0.2, alpha_cmi=0.3, reference="local", clip=0.1, weight_decay=0.05)),
    (fedsr, ("--variant", "fedcmi"), dict(alpha_cmi=0.3)),
    (fedsr, ("--variant", "fedl2r"), dict(alpha_l2r=0.2)),
    (fedsr, ("--variant", "fedavg"), {}),
    (official.fedsr, (), dict(alpha_l2r=0.2, alpha_cmi=0.3)),
    (official.fedsr, ("--variant", "fedsr", "--kl-scale"), dict(alpha_l2r=0.2, alpha_cmi=0.3)),
    (official.fedsr, ("--variant", "fedl2r", "--norm", "plain"), dict(alpha_l2r=0.2)),
], ids=str)
def test_one_step_is_the_gradient_of_eq9(tiny, method, flags, values):
    """A step of lr 1 against central differences of `objective` in float64; the noise is the one behind the
    batch's seed."""
    args, net = tiny(*flags, method=method, **values)
    scaled = getattr(args, "kl_scale", False)
    if scaled:
        net.r.scale.data.fill_(0.8)
    start, data = common.state(net), four_pixels([0, 1, 1, 0, 2])
    server, client = method.Server(args, net, 1), method.Client(args, net, 0, data)
    up = client.train(server.download(0), 0)["w"] | client.r

    (x, y), = common.batches(data.train, args, 0, 0)
    batch = x.double(), y, torch.randn(5, D).double(), args
    w = {name: v.double() for name, v in start.items()}
    trained = [name for name in w if name != "r.scale" or scaled]
    gradient = central_differences(w, trained, *batch)
    norm = common.flatten(list(gradient.values())).norm()
    shrunk = min(1, args.clip / norm) if args.clip else 1
    fixed = set() if scaled else {"r.scale"}
    for name, g in gradient.items():
        moved = start[name].double() - up[name].double()
        decay = 0 if name in fixed else args.weight_decay * w[name]
        assert_close(moved, shrunk * g + decay, atol=2e-5, rtol=1e-4)

    log = client.log
    assert ("cmi" in log) == (args.variant not in ("fedl2r", "fedavg"))
    assert ("l2r" in log) == (args.alpha_l2r > 0)
    terms = log["loss"] + args.alpha_l2r * log.get("l2r", 0) + args.alpha_cmi * log.get("cmi", 0)
    assert math.isclose(terms, objective(w, *batch), rel_tol=1e-5)


@pytest.mark.parametrize("reference", ["shared", "local"])
def test_cmi_trains_r_of_the_classes_in_the_batch_and_not_the_scale(tiny, reference):
    """r of a class that is not in the batch moves by weight decay alone."""
    args, net = tiny(reference=reference, weight_decay=0.1)
    start = common.state(net)
    server, client = fedsr.Server(args, net, 1), fedsr.Client(args, net, 0, four_pixels([0, 1, 1, 0]))
    up = client.train(server.download(0), 0)
    r = client.r if reference == "local" else up["w"]
    for name in ("r.mu", "r.raw"):
        assert (r[name][:2] != start[name][:2]).all()
        assert_close(r[name][2], 0.9 * start[name][2])  # class 2: decay alone
    assert r["r.scale"] == 1


# Who keeps and sends what; Eq. (1)


@pytest.mark.parametrize("variant,reference,sent", [
    ("fedsr", "shared", 30 + 12 + 18 + 1),
    ("fedsr", "local", 30 + 12),
    ("fedcmi", "shared", 30 + 12 + 18 + 1),
    ("fedl2r", "shared", 15 + 12),
    ("fedavg", "local", 15 + 12),
])
def test_a_round_by_hand(tiny, variant, reference, sent):
    """Plain means of clients of 2, 5 and 9 images; r(z|y) is in them if it is shared and never on the wire if
    not."""
    args, net = tiny("--variant", variant, reference=reference, lr=0.1)
    probabilistic = variant in ("fedsr", "fedcmi")
    names = {"last.weight", "last.bias", "head.weight", "head.bias"}
    if probabilistic and reference == "shared":
        names |= SHARED_R
    server, clients = fedsr.Server(args, net, 3), []
    for k, n in enumerate((2, 5, 9)):
        data = four_pixels([i % C for i in range(n)], k)
        clients.append(fedsr.Client(args, net, k, data))
    for t in range(2):
        downs, uploads = play(server, clients, t)
        for payload in (*downs, *uploads.values()):
            assert payload.keys() == {"w"}
            assert payload["w"].keys() == names
            assert common.nbytes(payload) == 4 * sent
        for name in names:
            mean = sum(up["w"][name] for up in uploads.values()) / 3
            assert_close(server.download(7)["w"][name], mean)
    if not probabilistic:
        return
    own = []
    for k, client in enumerate(clients):
        model = client.model(server.download(k))
        own.append(model.r.mu.detach().clone())
    if reference == "local":
        for mu, client in zip(own, clients, strict=True):
            assert torch.equal(mu, client.r["r.mu"])
        assert not torch.equal(own[0], own[1])
        assert not torch.equal(own[1], own[2])
    else:
        assert torch.equal(own[0], own[1])
        assert not any(client.r for client in clients)


def test_local_r_goes_on_from_the_own_one(tiny):
    """Two rounds of one client with r(z|y) local are those with it shared: the mean over one client changes
    nothing."""
    ends = []
    for reference in ("shared", "local"):
        args, net = tiny(reference=reference, momentum=0.9, lr=0.1)
        server, client = fedsr.Server(args, net, 1), fedsr.Client(args, net, 0, four_pixels([0, 1, 2, 1]))
        for t in range(2):
            play(server, [client], t)
        ends.append(server.w | client.r)
    shared, local = ends
    assert shared.keys() == local.keys()
    for name in shared:
        assert torch.equal(shared[name], local[name])


def test_kept_momentum_is_one_uninterrupted_sgd():
    """Two rounds of one client against torch's SGD over the same batches and noise, the optimizer never made
    anew."""
    args, net, data = digits("--momentum", "0.9", "--weight-decay", "0.01", "--steps", "3", "--lr", "0.01",
                             "--backbone", "smallcnn", "--alpha-cmi", "0.01")
    start = common.state(net)
    ends = {}
    for keep in (True, False):
        args = dataclasses.replace(args, keep_momentum=keep)
        common.load(net, start)
        server, client = fedsr.Server(args, net, 1), fedsr.Client(args, net, 0, data)
        for t in range(2):
            play(server, [client], t)
        ends[keep] = server.w

    common.load(net, start).train()
    trained = [p for name, p in net.named_parameters() if name != "r.scale"]
    opt = torch.optim.SGD(trained, lr=0.01, momentum=0.9, weight_decay=0.01, fused=False)
    for t in range(2):
        for x, y in common.batches(data.train, args, t, 0):
            mu, raw = net.last(net.body(x)).chunk(2, 1)
            p = Normal(mu, softplus(raw) + 1e-6)
            r = Normal(net.r.mu[y], softplus(net.r.raw[y]))
            z = p.loc + p.scale * torch.randn_like(mu)
            length = z.norm(dim=1).square().mean()
            kl = kl_divergence(p, r).sum(1).mean()
            loss = cross_entropy(net.head(z), y) + 0.01 * length + 0.01 * kl
            opt.zero_grad()
            loss.backward()
            opt.step()
    for name, v in net.state_dict().items():
        assert_close(ends[True][name], v, atol=1e-5, rtol=1e-4)
    assert (ends[False]["last.weight"] - net.last.weight).abs().max() > 1e-3


@pytest.mark.parametrize("momentum", ["0", "0.9"])
def test_fedavg_variant_is_fedavg_bit_for_bit(tmp_path, momentum):
    """Weights and logs of two rounds, against fedavg.py."""
    flags = ("--backbone", "smallcnn", "--momentum", momentum)
    run_here("fedavg", tmp_path / "a", "--average", "uniform", *flags)
    run_here("fedsr", tmp_path / "b", "--variant", "fedavg", "--no-keep-momentum", *flags)
    theirs = torch.load(tmp_path / "a/checkpoint.pt", weights_only=True)["server"]["w"]
    ours = torch.load(tmp_path / "b/checkpoint.pt", weights_only=True)["server"]["w"]
    ours = {name.replace("last.", "body.9."): v for name, v in ours.items()}  # smallcnn's layer to z
    assert theirs.keys() == ours.keys()
    for name in theirs:
        assert torch.equal(theirs[name], ours[name])
    their_rounds = metrics(tmp_path / "a")
    for line in their_rounds:
        for log in line["clients"].values():
            log["bytes_up"] -= 8  # n_k, which only fedavg.py sends
    assert their_rounds == metrics(tmp_path / "b")
    assert len(their_rounds) == 2


# Networks and settings


@pytest.mark.parametrize("name,into,dim", [
    ("smallcnn", 1024, 64),
    ("smallcnn_bn", 64, 64),
    ("resnet18", 512, 512),
    ("resnet50", 2048, 2048),
])
@pytest.mark.parametrize("variant", ["fedsr", "fedcmi", "fedl2r", "fedavg"])
def test_z_has_the_papers_dimensions(name, into, dim, variant):
    """Sec. 4.2: z of 64, 512 and 2048; mean and deviation from one layer, a linear classifier; deterministic
    without CMI."""
    with torch.device("meta"):
        net = fedsr.build(fedsr.Args(backbone=name, variant=variant, alpha_cmi=0.0), 3, 7)
    probabilistic = variant in ("fedsr", "fedcmi")
    assert hasattr(net, "r") == net.probabilistic == probabilistic
    assert net.last.in_features == into
    assert net.last.out_features == (2 * dim if probabilistic else dim)
    assert (net.head.in_features, net.head.out_features) == (dim, 7)
    if probabilistic:
        assert net.r.mu.shape == net.r.raw.shape == (7, dim)


# App. C.1: FedL2R's alpha_l2r, FedCMI's alpha_cmi, FedSR's two
TABLE = {
    "rotatedmnist": (0.1, 0.3, 0.1, 0.3),
    "rotatedmnist-t10k": (0.1, 0.3, 0.1, 0.3),
    "pacs": (0.01, 0.01, 0.01, 0.001),
    "officehome": (0.05, 0.0005, 0.05, 0.0005),
    "domainnet": (0.01, 0.005, 0.01, 0.0005),
}


@pytest.mark.parametrize("dataset", TABLE)
def test_coefficients_of_app_c1(dataset):
    """Against the numbers of App. C.1, for each dataset and variant."""
    l2r, cmi, *both = TABLE[dataset]
    expected = {"fedavg": (0, 0), "fedl2r": (l2r, 0), "fedcmi": (0, cmi), "fedsr": tuple(both)}
    for variant, coefficients in expected.items():
        args = parsed("fedsr", "--dataset", dataset, "--variant", variant)
        assert (args.alpha_l2r, args.alpha_cmi) == coefficients
        assert (args.protocol, args.steps, args.batch_size, args.momentum) == ("lodo", 5, 64, 0.9)
    assert parsed("fedsr", "--dataset", dataset, "--variant", "fedcmi", "--alpha-cmi", "7").alpha_cmi == 7


def test_schedule_of_sec_4_2_on_rotatedmnist():
    """Against 500 epochs of 900 images, counted in steps."""
    args = parsed("fedsr", "--dataset", "rotatedmnist")
    assert (args.optimizer, args.lr, args.momentum, args.clip) == ("sgd", 0.01, 0.9, 5)
    assert args.rounds * args.steps == 500 * common.steps_in_epoch(900, args)


@pytest.mark.parametrize("dataset,backbone", [
    ("pacs", "resnet18"),
    ("officehome", "resnet50"),
    ("domainnet", "resnet50"),
])
def test_schedule_of_sec_4_2(dataset, backbone):
    """Against the numbers of Sec. 4.2."""
    args = parsed("fedsr", "--dataset", dataset)
    assert (args.lr, args.weight_decay, args.rounds * args.steps) == (0.01, 5e-4, 5000)
    assert (args.backbone, args.image_size) == (backbone, 224)
    assert (args.normalize, args.weights, args.augment) == ("imagenet", "imagenet", "fedsr")


def check_fedcir(args, cmi):
    """FedCiR's Sec. 6.1 and the coefficient of its App. E."""
    assert args.alpha_cmi == cmi
    assert (args.steps, args.rounds, args.batch_size, args.lr, args.momentum) == (20, 300, 32, 0.01, 0.9)
    assert (args.weight_decay, args.image_size, args.backbone) == (5e-4, 128, "resnet18")
    assert (args.protocol, args.weights, args.augment) == ("indomain", "none", "none")


@pytest.mark.parametrize("dataset,cmi", [
    ("domainnet10", 5e-7),
    ("pacs", 1e-6),
    ("officecaltech", 1e-6),
    ("camelyon17", 5e-7),
    ("iwildcam", 5e-7),
])
def test_coefficients_of_fedcir_app_e(dataset, cmi):
    """On PACS by --variant fedcir alone; on the others they are the defaults too."""
    args = parsed("fedsr", "--dataset", dataset, "--variant", "fedcir")
    check_fedcir(args, cmi)
    assert args.alpha_l2r == 0
    assert fedsr.build(dataclasses.replace(args, backbone="smallcnn"), 3, 10).probabilistic
    if dataset == "pacs":
        return
    for variant, want in (("fedsr", cmi), ("fedcmi", cmi), ("fedl2r", 0), ("fedavg", 0)):
        args = parsed("fedsr", "--dataset", dataset, "--variant", variant)
        check_fedcir(args, want)
        assert args.alpha_l2r == (0.01 if variant == "fedl2r" else 0)


@pytest.mark.parametrize("variant", ["fedl2r", "fedavg"])
def test_cmi_of_a_deterministic_network_is_refused(tmp_path, capsys, variant):
    """It ends with code 2 and a line that names the variant."""
    flags = ("--variant", variant, "--alpha-cmi", "1")
    fails(capsys, 2, f"^fedsr: --variant {variant} ", run_here, "fedsr", tmp_path / "run", *flags)


# Runs


def test_an_interrupted_run_goes_on_with_local_r_and_kept_momentum(tmp_path, monkeypatch):
    """Interrupted after a round and started again: the same metrics, weights, r(z|y), momentum to the bit."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    flags = ("--reference", "local", "--keep-momentum", "--momentum", "0.9", "--weight-decay",
             "0.01", "--checkpoint-every", "0", "--rounds", "3", "--participation", "0.5",
             "--protocol", "lodo", "--target", "d30")
    run_here("fedsr", whole, *flags)
    interrupted("fedsr", monkeypatch, stopped, *flags, after=1)
    assert len(metrics(stopped)) == 1
    run_here("fedsr", stopped, *flags)
    assert (stopped / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    for file in ("checkpoint.pt", "best.pt"):
        a = torch.load(whole / file, weights_only=True)
        b = torch.load(stopped / file, weights_only=True)
        for part in ("server", "clients"):
            ours, theirs = common.tensors_of(a[part]), common.tensors_of(b[part])
            assert len(ours) == len(theirs) > 0
            assert all(torch.equal(x, y) for x, y in zip(ours, theirs))
    trained = [client for client in a["clients"].values() if client["momentum"]]
    assert trained
    for client in trained:
        assert client["r"].keys() == SHARED_R
        assert client["momentum"].keys() >= {"r.mu", "r.raw"}
    target = a["clients"][5]  # never trained
    assert not target["momentum"]
    assert (target["r"]["r.mu"] == 0).all()


@pytest.mark.parametrize("logged,flags", [
    ({"l2r", "cmi"}, ("--protocol", "lodo", "--target", "d30", "--backbone", "smallcnn")),
    ({"l2r"}, ("--variant", "fedl2r")),
    ({"cmi"}, ("--variant", "fedcmi", "--samples", "0", "--clients-per-domain", "2", "--dirichlet", "5")),
    ({"l2r", "cmi"}, ("--precision", "bf16", "--momentum", "0.9", "--clip", "1")),
])
def test_the_log_of_a_run_has_the_terms_of_its_variant(tmp_path, logged, flags):
    result = run_here("fedsr", tmp_path / "run", *flags)
    assert result["last"]["round"] == 2
    assert ("target" in result["best"]) == ("lodo" in flags)
    for line in metrics(tmp_path / "run"):
        for log in line["clients"].values():
            assert log.keys() == {"bytes_down", "bytes_up", "loss"} | logged
