"""FedADG: losses against numbers by hand, networks, what travels, settings; Algorithm 1 is in
test_fedadg_wiring.py."""

import dataclasses
import sys

import common
import fedadg
import official.fedadg

import pytest
import torch
from torch import nn, tensor

C, H, P, Z = 3, 6, 4, 5  # classes, features, outputs of the projection and noise of the tiny federation

RELEASED = ("--variant", "--warmup", "--d-loss", "--g-loss", "--order", "--onehot-value")
OWN_OF_RELEASE = dict(warmup=0, d_loss="lsgan", g_loss="opposite", order="paper", onehot_value=1.0)


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


def differ(a, b):
    """The names of the tensors that are not equal."""
    return {name for name in a if not torch.equal(a[name], b[name])}


def of_d(tensors):
    """The entries of the discriminator, by their names in it."""
    return {name[2:]: v for name, v in tensors.items() if name.startswith("D.")}


def with_d(w, w_d):
    """The state of the whole network."""
    return w | {f"D.{name}": v for name, v in w_d.items()}


def train(client, server, t=0):
    """ClientUpdate as common.rounds calls it."""
    common.seed_all(0, "train", t, client.k)
    return client.train(server.download(client.k), t)


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
    server, (client, _), net = federation(small_args("--reference", reference))
    assert not hasattr(net, "G") and not [name for name in server.w if name.startswith("G.")]
    torch.manual_seed(0)
    h = fedadg.reference_features(client.args, net, torch.zeros(20000, C))
    variance, kurtosis, reach = MOMENTS[reference]
    assert h.shape == (20000, H) and h.dtype == torch.float32 and abs(h.mean()) < 0.02
    assert abs(h.var() / variance - 1) < 0.03
    assert abs((h ** 4).mean() / h.var() ** 2 / kurtosis - 1) < 0.1
    if reference == "uniform":
        assert -1 <= h.min() and 0.999 < h.max() <= 1
    else:
        assert h.abs().max() > reach
    torch.manual_seed(0)
    assert torch.equal(fedadg.reference_features(client.args, net, torch.ones(20000, C)), h)


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
    other = parsed("--dataset", "pacs", "--image-size", 64, "--backbone", "torchvision:resnet18")
    with torch.device("meta"):
        net = fedadg.build(reduced, 3, 7)
        G = fedadg.build(dataclasses.replace(other, weights="none"), 3, 7).G
    assert sizes(G) == [(256 + 7, 512), (512, 512)]  # noise of half the features
    assert sizes(net.G) == [(30, 4096), (4096, 4096)]
    assert sizes(net.D) == [(4096, 4096), (4096, 1)]


@pytest.mark.parametrize("flags,parts", [
    ((), {"net", "G"}),
    (("--reference", "uniform"), {"net"}),
    (("--no-adversarial",), {"net"}),
])
def test_what_travels_and_what_stays(flags, parts):
    """D is each client's own, and its projection the same for all; nothing is sent that is not there."""
    server, clients, net = federation(small_args("--steps", 3, "--E0", 1, *flags))
    start = of_d(common.state(net))
    for client in clients:
        for payload in (server.download(client.k), train(client, server)):
            assert payload.keys() == {"w"}
            assert {name.split(".")[0] for name in payload["w"]} == parts
        assert differ(start, client.w_d) == start.keys() - {"project.weight"}
    assert differ(clients[0].w_d, clients[1].w_d) == start.keys() - {"project.weight"}


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


@pytest.mark.parametrize("backbone", ["smallcnn", "smallcnn_bn", "resnet18"])
def test_g_ends_as_the_features_do(backbone):
    """With ReLU where the features have it: half of smallcnn's are negative, none of the others'."""
    net = fedadg.build(small_args("--backbone", backbone, "--image-size", 32), 3, C).eval()
    torch.manual_seed(0)
    h = net.features(torch.rand(8, 3, 32, 32))
    ref = net.G(net.label(torch.arange(8) % C))
    assert h.shape == ref.shape
    for values in (h, ref):
        assert (values.min() < 0) == (backbone == "smallcnn")
