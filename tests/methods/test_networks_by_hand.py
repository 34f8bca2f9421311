"""Every network: its forward pass against torchvision's own, or in plain torch where it is ours, its start,
and how many parameters there are. FDSE's, FedFA's, FedSR's and FedCiR's parts in other networks too."""

import math
from functools import partial

import common
import fdse
import fedcir
import fedsr
from baselines import fedfa
from tests.conftest import parsed
from tests.plain_torch import batch_norm_at_rest as bn, body_in_evaluation, conv, dse_block, linear

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models

# Of the images: pooling leaves a rest wherever it may, and AlexNet's adaptive pooling is no copy.
SIDE = {"smallcnn": 28, "smallcnn3": 28, "smallcnn3_linear": 28, "smallcnn_bn": 23, "alexnet_bn": 187,
        "alexnet": 187, "resnet18": 64, "resnet50": 64, "resnet18_3x3": 16, "vit_b8": 16}
OF_DIRT = ("smallcnn", "smallcnn3")  # a ReLU stands before the classifier
SLOW = {name: pytest.param(name, marks=pytest.mark.slow) for name in ("alexnet", "resnet50", "vit_b8")}


# Plain torch: w has the weights by their names


def smallcnn(w, x):
    """DIRT's: convolution, BN, ReLU, pooling, twice; z without a ReLU."""
    for c in (0, 4):
        x = F.max_pool2d(bn(w, f"body.{c + 1}", conv(w, f"body.{c}", x)).relu(), 2)
    return linear(x.flatten(1), w, "body.9")


def alexnet_bn(w, x):
    """Table A5 of FDSE: each layer with its BN."""
    for c, stride, padding in ((0, 4, 2), (4, 1, 2), (8, 1, 1), (11, 1, 1), (14, 1, 1)):
        x = bn(w, f"body.{c + 1}", conv(w, f"body.{c}", x, stride, padding)).relu()
        if c not in (8, 11):
            x = F.max_pool2d(x, 3, 2)
    x = F.adaptive_avg_pool2d(x, 6).flatten(1)
    for layer in (20, 23):
        x = bn(w, f"body.{layer + 1}", linear(x, w, f"body.{layer}")).relu()
    return x


OURS = {"smallcnn": smallcnn, "smallcnn3": smallcnn, "smallcnn3_linear": smallcnn,
        "smallcnn_bn": body_in_evaluation, "alexnet_bn": alexnet_bn}


def of_torchvision(name: str) -> nn.Module:
    """Its network up to z, in evaluation mode."""
    if name == "vit_b8":
        net = models.VisionTransformer(SIDE[name], patch_size=8, num_layers=12, num_heads=12, hidden_dim=768,
                                       mlp_dim=3072)
        net.heads = nn.Identity()
    elif name == "alexnet":
        net = models.alexnet()
        net.classifier[6] = nn.Identity()
    else:
        net = getattr(models, name.removesuffix("_3x3"))()
        net.fc = nn.Identity()
    if name == "resnet18_3x3":
        net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    return net.eval()


def z_of(name: str, w: dict, x: Tensor) -> Tensor:
    """The features of a network with these weights."""
    if name in OURS:
        return OURS[name](w, x)
    with torch.device("meta"):
        net = of_torchvision(name)
    of_body = {at.removeprefix("body."): v for at, v in w.items() if at.startswith("body.")}
    net.load_state_dict(of_body, assign=True)
    return net(x)


# Networks with weights that hide nothing


def filled(build, args, channels: int, classes: int) -> nn.Module:
    """A network in evaluation mode, with weights and statistics that make every step count: the variance in
    front of each BN is about as large as the 1e-5 that is added to it."""
    with torch.device("meta"):
        net = build(args, channels, classes)
    net = net.to_empty(device="cpu")
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
    generator = torch.Generator().manual_seed(1)
    for name, v in net.state_dict().items():
        if not v.is_floating_point():
            v.zero_()
        elif v.dim() > 1:
            v.uniform_(-1, 1, generator=generator).mul_(math.sqrt(3 / v[0].numel()))
            if norms and v.dim() == 4:
                v.mul_(0.004)
        else:
            v.uniform_(-0.3, 0.3, generator=generator).add_(name.endswith(("weight", "running_var")))
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        net.train()(batch(args.backbone, channels))
    for norm in norms:
        norm.running_mean.mul_(0.8)
        norm.running_var.mul_(1.2)
    return net.eval()


def args_of(name: str, method: str = "fedavg", *flags) -> common.Args:
    return parsed(method, "--backbone", name, "--image-size", SIDE[name], *flags)


def batch(name: str, channels: int = 3) -> Tensor:
    return torch.rand(3, channels, SIDE[name], SIDE[name], generator=torch.Generator().manual_seed(2))


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape and expected.std() > 1e-6
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", SIDE)
@torch.no_grad()
def test_forward_pass(name):
    """z and logits; the classifier of DIRT's network takes the ReLU of z."""
    channels = 1 if name == "smallcnn" else 3
    net = filled(common.backbone, args_of(name), channels, 5)
    x, w = batch(name, channels), net.state_dict()
    z = z_of(name, w, x)
    close(net.features(x), z)
    assert z.shape == (3, common.BACKBONES[name].dim) and common.BACKBONES[name].relu == bool(z.min() >= 0)
    close(net(x), linear(z.relu() if name in OF_DIRT else z, w, "head"))


def test_there_is_no_other_network():
    assert set(SIDE) == set(common.BACKBONES)


# FDSE's blocks


class BlockByHand(nn.Module):
    """A block in evaluation, with the weights of `name`."""

    def __init__(self, w: dict, name: str, padding: int = 0):
        super().__init__()
        self.w, self.name, self.padding = w, name, padding

    def forward(self, x: Tensor) -> Tensor:
        return dse_block(self.w, self.name, x, partial(bn, self.w), self.padding)


def fdses_alexnet(w, x):
    """Table A6: a block is a layer with its BN and ReLU."""
    at_rest = partial(bn, w)
    for layer, stride, padding in ((0, 4, 2), (2, 1, 2), (4, 1, 1), (5, 1, 1), (6, 1, 1)):
        x = dse_block(w, f"body.{layer}", x, at_rest, padding, stride).relu()
        if layer not in (4, 5):
            x = F.max_pool2d(x, 3, 2)
    x = F.adaptive_avg_pool2d(x, 6).flatten(1)
    for layer in (10, 11):
        x = dse_block(w, f"body.{layer}", x, at_rest).relu()
    return x


def with_blocks(name: str, w: dict) -> nn.Module:
    """torchvision's network with a block instead of the last convolution and BN of each residual block, or of
    the last linear layer of each feed-forward layer."""
    last = "3" if name == "resnet50" else "2"
    with torch.device("meta"):
        net = of_torchvision(name)
    for at, module in list(net.named_modules()):
        if isinstance(module, models.resnet.BasicBlock | models.resnet.Bottleneck):
            block = BlockByHand(w, f"body.{at}.conv{last}", padding=0 if name == "resnet50" else 1)
            setattr(module, f"conv{last}", block)
            setattr(module, f"bn{last}", nn.Identity())
        elif isinstance(module, models.vision_transformer.EncoderBlock):
            module.mlp[3] = BlockByHand(w, f"body.{at}.mlp.3")
    ours = {at.removeprefix("body."): v for at, v in w.items()}
    assert not net.load_state_dict(ours, strict=False, assign=True).missing_keys
    return net


@pytest.mark.parametrize("name", ["alexnet_bn", "resnet18", SLOW["resnet50"], "resnet18_3x3", "vit_b8"])
@torch.no_grad()
def test_fdses_blocks_in_other_networks(name):
    """Sec. A8.1: before the addition, where torchvision has its last layer."""
    net = filled(fdse.build, args_of(name, "fdse"), 3, 5)
    x, w = batch(name), net.state_dict()
    z = fdses_alexnet(w, x) if name == "alexnet_bn" else with_blocks(name, w)(x)
    close(net.features(x), z)
    close(net(x), linear(z, w, "head"))


# FedFA's layers

OF_RESNET = ["maxpool", "layer1", "layer2", "layer3", "layer4"]
PLACES = {"alexnet_bn": ["3", "7", "10", "13", "17"],
          "alexnet": ["features.2", "features.5", "features.7", "features.9", "features.12"],
          "vit_b8": [f"encoder.layers.encoder_layer_{i}" for i in (2, 5, 8, 11)]}


@pytest.mark.parametrize("name", ["smallcnn", "alexnet_bn", SLOW["alexnet"], "resnet18", "resnet18_3x3",
                                  "vit_b8"])
@torch.no_grad()
def test_places_of_fedfas_layers(name, monkeypatch):
    """Behind the pooling of the first, second and last block of an AlexNet and behind the other two (both
    codes), behind each block of a small network, the stem and each stage of a ResNet, every third layer of a
    ViT: there a layer that scales and shifts is seen."""
    monkeypatch.setattr(fedfa.FFALayer, "forward", lambda layer, x: 1.5 * x + layer.channels / 256)
    plain = filled(common.backbone, args_of(name), 3, 5)
    net = filled(fedfa.build, args_of(name, "baselines.fedfa"), 3, 5)
    layers = ("mean_mu", "mean_sigma", "spread_mu", "spread_sigma")
    own = [v for at, v in net.state_dict().items() if not at.endswith(layers)]
    for v, of_plain in zip(own, plain.state_dict().values(), strict=True):
        v.copy_(of_plain)
    places = PLACES.get(name) or (OF_RESNET if name.startswith("resnet") else ["3", "7"])
    for place in places:
        plain.body.get_submodule(place).register_forward_hook(
            lambda module, given, x: 1.5 * x + x.shape[2 if x.dim() == 3 else 1] / 256)
    close(net.features(batch(name)), plain.features(batch(name)))
    assert len(places) == sum(isinstance(module, fedfa.FFALayer) for module in net.modules())


# The Gaussian encoders


@pytest.mark.parametrize("method, variant, name, dim", [
    ("fedsr", "fedsr", "smallcnn3", 64),
    pytest.param("fedsr", "fedsr", "resnet50", 2048, marks=pytest.mark.slow),
    ("fedsr", "fedsr", "smallcnn3_linear", 64),
    ("fedsr", "fedl2r", "resnet18", 512),
    ("fedsr", "fedavg", "smallcnn3", 64),
    ("fedcir", "fedcir", "resnet18", 512),
])
@torch.no_grad()
def test_gaussian_encoders(method, variant, name, dim):
    """FedSR, Sec. 4.2: z of 64, 512 and 2048, mean and deviation from one linear layer; without CMI the mean
    alone. The prediction from the mean of z."""
    module = {"fedsr": fedsr, "fedcir": fedcir}[method]
    args = args_of(name, method, "--variant", variant, "--samples", 0)
    net = filled(module.build, args, 3, 7)
    net = net.model if method == "fedcir" else net
    x, w = batch(name), net.state_dict()
    if name.startswith("smallcnn3"):  # whose own layer to z is not there, or is `last`
        w |= {"body.9.weight": torch.eye(1600), "body.9.bias": torch.zeros(1600)}
    out = linear(z_of(name, w, x), w, "last")
    mu, sigma = net.encode(x)
    close(mu, out[:, :dim])
    if variant in ("fedl2r", "fedavg"):
        assert sigma is None and out.shape[1] == dim and not hasattr(net, "r")
    else:
        close(sigma, (1 + out[:, dim:].exp()).log() + 1e-6)
        assert out.shape[1] == 2 * dim
    z = mu.relu() if name in OF_DIRT else mu
    close(net(x), linear(z, w, "head"))


# The start


def fans(v: Tensor) -> tuple[int, int]:
    return v[0].numel(), v.shape[0] * v[0, 0].numel()


def xavier(v: Tensor) -> float:
    return math.sqrt(6 / sum(fans(v)))


def of_pytorch(v: Tensor) -> float:
    return 1 / math.sqrt(fans(v)[0])


def start_in(v: Tensor, end: float) -> None:
    """All entries are between -end and end, and some come near."""
    assert 0.5 * end < v.abs().max() <= end * (1 + 1e-6)


def start_of(module: nn.Module, weights) -> None:
    """The start of a layer: of its weights by this rule, of all others as PyTorch's."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Linear):
        start_in(module.weight, weights(module.weight))
        if module.bias is not None:
            if weights is xavier:
                assert not module.bias.any()
            else:
                start_in(module.bias, of_pytorch(module.weight))
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
        assert (module.weight == 1).all() and not module.bias.any()
        assert not module.running_mean.any() and (module.running_var == 1).all()


@pytest.mark.parametrize("name, rule", [
    ("smallcnn", xavier), ("smallcnn3", xavier), ("smallcnn3_linear", xavier), ("smallcnn_bn", of_pytorch),
    ("alexnet_bn", of_pytorch),
    ("resnet18_3x3", of_pytorch),
])
def test_distribution_at_the_start(name, rule):
    """DIRT's by Xavier's uniform distribution, biases 0; others, and the ResNet for small images, as
    PyTorch's layers start."""
    torch.manual_seed(0)
    for module in common.backbone(args_of(name), 3, 5).modules():
        start_of(module, rule)


@pytest.mark.parametrize("name", [SLOW["alexnet"], "resnet18", SLOW["vit_b8"]])
def test_networks_of_torchvision_start_as_it_says(name):
    """Bit for bit; the classifier, which is another one, as PyTorch's linear layer."""
    torch.manual_seed(0)
    net = common.backbone(args_of(name), 3, 5)
    torch.manual_seed(0)
    theirs = of_torchvision(name).state_dict()
    assert all(torch.equal(v, theirs[at]) for at, v in net.body.state_dict().items())
    start_of(net.head, of_pytorch)


def test_the_start_of_the_methods_own_layers():
    """The bias of FDSE's blocks is 0; FedSR's layer to mu and sigma starts as smallcnn's own layer to z, its
    r(z|y) as in the official code."""
    blocks = [module for module in fdse.build(args_of("resnet18", "fdse"), 3, 5).modules()
              if isinstance(module, fdse.DSEBlock)]
    assert len(blocks) == 8 and not any(block.bias.any() for block in blocks)
    torch.manual_seed(0)
    for name, rule in (("smallcnn3", xavier), ("smallcnn3_linear", xavier), ("resnet18", of_pytorch)):
        net = fedsr.build(args_of(name, "fedsr"), 3, 7)
        start_of(net.last, rule)
        assert not net.r.mu.any() and (net.r.raw == 1).all() and net.r.mu.shape == (7, net.head.in_features)


# How many


@pytest.mark.parametrize("name, classes, numbers", [
    ("alexnet_bn", 10, 12_974_154),  # 1.30e7 in FDSE's Table 4
    ("resnet18_3x3", 10, 11_173_962),
    ("vit_b8", 1000, 85_977_832),  # 86 million, Dosovitskiy et al.
    ("smallcnn", 10, 32 * 75 + 64 + 32 * 64 * 25 + 128 + 1024 * 64 + 64 + 650),
])
def test_parameters_are_as_many_as_papers_print(name, classes, numbers):
    with torch.device("meta"):
        net = common.backbone(args_of(name), 3, classes)
    assert sum(p.numel() for p in net.parameters()) == numbers
