"""Every network by hand: its forward pass in plain torch from the same weights, how these are distributed at
the start, and how many there are. FDSE's, FedFA's, FedSR's and FedCiR's parts in other networks too."""

import math
from functools import partial

import common
import fdse
import fedcir
import fedsr
from baselines import fedfa
from tests.conftest import parsed
from tests.plain_torch import as_it_is, batch_norm_at_rest as bn, body_in_evaluation, conv

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models

# Of the images: pooling leaves a rest wherever it may, and AlexNet's adaptive pooling is no copy.
SIDE = {"smallcnn": 28, "smallcnn3": 28, "smallcnn_bn": 23, "alexnet_bn": 187, "alexnet": 187, "resnet18": 64,
        "resnet50": 64, "resnet18_3x3": 16, "vit_b8": 16}


# Plain torch: w has the weights by their names


def linear(w: dict, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def smallcnn(w, x, after=as_it_is):
    """DIRT's: convolution, BN, ReLU, pooling, twice; z without a ReLU."""
    for c, place in ((0, "3"), (4, "7")):
        x = after(place, F.max_pool2d(bn(w, f"body.{c + 1}", conv(w, f"body.{c}", x)).relu(), 2))
    return linear(w, "body.9", x.flatten(1))


def alexnet_bn(w, x, after=as_it_is):
    """Table A5 of FDSE: each layer with its BN."""
    layers = ((0, 4, 2, "3"), (4, 1, 2, "7"), (8, 1, 1, "10"), (11, 1, 1, "13"), (14, 1, 1, "17"))
    for c, stride, padding, place in layers:
        x = bn(w, f"body.{c + 1}", conv(w, f"body.{c}", x, stride, padding)).relu()
        if place in ("3", "7", "17"):
            x = F.max_pool2d(x, 3, 2)
        x = after(place, x)
    x = F.adaptive_avg_pool2d(x, 6).flatten(1)
    for layer in (20, 23):
        x = bn(w, f"body.{layer + 1}", linear(w, f"body.{layer}", x)).relu()
    return x


def alexnet(w, x, after=as_it_is):
    layers = ((0, 4, 2, "2"), (3, 1, 2, "5"), (6, 1, 1, "7"), (8, 1, 1, "9"), (10, 1, 1, "12"))
    for c, stride, padding, place in layers:
        x = conv(w, f"body.features.{c}", x, stride, padding).relu()
        if place in ("2", "5", "12"):
            x = F.max_pool2d(x, 3, 2)
        x = after(f"features.{place}", x)
    x = F.adaptive_avg_pool2d(x, 6).flatten(1)
    for layer in (1, 4):
        x = linear(w, f"body.classifier.{layer}", x).relu()
    return x


def last_convolution(w, name, number, x, padding):
    return bn(w, f"{name}.bn{number}", conv(w, f"{name}.conv{number}", x, 1, padding))


def resnet(w, x, counts, deep=False, small=False, after=as_it_is, last=last_convolution):
    """Of basic blocks, or of bottlenecks if it is deep; for small images with a 3x3 stem."""
    if small:
        x = bn(w, "body.bn1", conv(w, "body.conv1", x, 1, 1)).relu()
    else:
        x = F.max_pool2d(bn(w, "body.bn1", conv(w, "body.conv1", x, 2, 3)).relu(), 3, 2, 1)
    x = after("maxpool", x)
    for stage, count in enumerate(counts, 1):
        for b in range(count):
            name, stride = f"body.layer{stage}.{b}", 2 if stage > 1 and b == 0 else 1
            if deep:
                h = bn(w, f"{name}.bn1", conv(w, f"{name}.conv1", x)).relu()
                h = bn(w, f"{name}.bn2", conv(w, f"{name}.conv2", h, stride, 1)).relu()
                h = last(w, name, 3, h, 0)
            else:
                h = bn(w, f"{name}.bn1", conv(w, f"{name}.conv1", x, stride, 1)).relu()
                h = last(w, name, 2, h, 1)
            if f"{name}.downsample.0.weight" in w:
                x = bn(w, f"{name}.downsample.1", conv(w, f"{name}.downsample.0", x, stride))
            x = (x + h).relu()
        x = after(f"layer{stage}", x)
    return x.mean((2, 3))


def layer_norm(w, name, x):
    centred = x - x.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return normal * w[f"{name}.weight"] + w[f"{name}.bias"]


def attention(w, name, x, heads=12):
    """Self-attention of the tokens x [B, N, D]."""
    B, N, D = x.shape
    qkv = x @ w[f"{name}.in_proj_weight"].T + w[f"{name}.in_proj_bias"]
    q, k, v = (part.view(B, N, heads, D // heads).transpose(1, 2) for part in qkv.chunk(3, 2))
    shares = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(D // heads), 3)
    return linear(w, f"{name}.out_proj", (shares @ v).transpose(1, 2).reshape(B, N, D))


def vit_b8(w, x, after=as_it_is, last=linear):
    x = conv(w, "body.conv_proj", x, 8).flatten(2).transpose(1, 2)  # [B, N, D]
    x = torch.cat([w["body.class_token"].expand(len(x), -1, -1), x], 1) + w["body.encoder.pos_embedding"]
    for i in range(12):
        name = f"encoder.layers.encoder_layer_{i}"
        x = x + attention(w, f"body.{name}.self_attention", layer_norm(w, f"body.{name}.ln_1", x))
        h = F.gelu(linear(w, f"body.{name}.mlp.0", layer_norm(w, f"body.{name}.ln_2", x)))
        x = after(name, x + last(w, f"body.{name}.mlp.3", h))
    return layer_norm(w, "body.encoder.ln", x)[:, 0]


BY_HAND = {"smallcnn": smallcnn, "smallcnn3": smallcnn, "smallcnn_bn": body_in_evaluation,
           "alexnet_bn": alexnet_bn, "alexnet": alexnet, "resnet18": partial(resnet, counts=(2, 2, 2, 2)),
           "resnet50": partial(resnet, counts=(3, 4, 6, 3), deep=True),
           "resnet18_3x3": partial(resnet, counts=(2, 2, 2, 2), small=True), "vit_b8": vit_b8}


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


@pytest.mark.parametrize("name", BY_HAND)
@torch.no_grad()
def test_forward_pass(name):
    """z and logits; the classifier of DIRT's network takes the ReLU of z."""
    channels = 1 if name == "smallcnn" else 3
    net = filled(common.backbone, args_of(name), channels, 5)
    x, w = batch(name, channels), net.state_dict()
    z = BY_HAND[name](w, x)
    close(net.features(x), z)
    assert z.shape == (3, common.BACKBONES[name].dim) and common.BACKBONES[name].relu == bool(z.min() >= 0)
    close(net(x), linear(w, "head", z.relu() if name.startswith("smallcnn") else z))


def test_there_is_no_other_network():
    assert set(BY_HAND) == set(common.BACKBONES)


# FDSE's blocks


def dse_block(w, name, x, padding=0, stride=1) -> Tensor:
    """Eqs. (2)-(3) in evaluation, without the last ReLU: channel by channel."""
    tokens = x.dim() == 3
    h = conv(w, f"{name}.dfe", x, stride, padding) if x.dim() == 4 else linear(w, f"{name}.dfe", x)
    h = bn(w, f"{name}.bn_dse", h.mT if tokens else h).relu()
    maps = []
    for c in range(h.shape[1]):
        kernel = w[f"{name}.dse.weight"][c:c + 1]
        maps.append(F.conv2d(h[:, c:c + 1], kernel, padding=1) if x.dim() == 4 else h[:, c:c + 1] * kernel[0])
    out = torch.cat([h, *maps], 1) + w[f"{name}.bias"].view(-1, *[1] * (h.dim() - 2))
    out = bn(w, f"{name}.bn_dfe", out)
    return out.mT if tokens else out


def fdses_alexnet(w, x):
    """Table A6: a block is a layer with its BN and ReLU."""
    for layer, stride, padding in ((0, 4, 2), (2, 1, 2), (4, 1, 1), (5, 1, 1), (6, 1, 1)):
        x = dse_block(w, f"body.{layer}", x, padding, stride).relu()
        if layer not in (4, 5):
            x = F.max_pool2d(x, 3, 2)
    x = F.adaptive_avg_pool2d(x, 6).flatten(1)
    for layer in (10, 11):
        x = dse_block(w, f"body.{layer}", x).relu()
    return x


@pytest.mark.parametrize("name", ["alexnet_bn", "resnet18", "resnet50", "resnet18_3x3", "vit_b8"])
@torch.no_grad()
def test_fdses_blocks_in_other_networks(name):
    """Sec. A8.1: instead of the last convolution of a residual block, or of the last linear layer of a
    feed-forward layer, before the addition."""
    net = filled(fdse.build, args_of(name, "fdse"), 3, 5)
    if name == "vit_b8":
        how = dict(last=dse_block)
    else:
        how = dict(last=lambda w, at, number, x, padding: dse_block(w, f"{at}.conv{number}", x, padding))
    x, w = batch(name), net.state_dict()
    z = fdses_alexnet(w, x) if name == "alexnet_bn" else BY_HAND[name](w, x, **how)
    close(net.features(x), z)
    close(net(x), linear(w, "head", z))


# FedFA's layers


@pytest.mark.parametrize("name", BY_HAND)
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
    seen = []

    def after(place: str, x: Tensor) -> Tensor:
        if name == "vit_b8" and int(place.rpartition("_")[2]) % 3 != 2:
            return x
        seen.append(place)
        return 1.5 * x + x.shape[2 if x.dim() == 3 else 1] / 256
    close(net.features(batch(name)), BY_HAND[name](plain.state_dict(), batch(name), after=after))
    assert len(seen) == sum(isinstance(module, fedfa.FFALayer) for module in net.modules())


# The Gaussian encoders


@pytest.mark.parametrize("method, variant, name, dim", [
    ("fedsr", "fedsr", "smallcnn3", 64),
    ("fedsr", "fedsr", "resnet50", 2048),
    ("fedsr", "fedcmi", "resnet18", 512),
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
    if name == "smallcnn3":  # whose own layer to z is not there, or is `last`
        w |= {"body.9.weight": torch.eye(1600), "body.9.bias": torch.zeros(1600)}
    out = linear(w, "last", BY_HAND[name](w, x))
    mu, sigma = net.encode(x)
    close(mu, out[:, :dim])
    if variant in ("fedl2r", "fedavg"):
        assert sigma is None and out.shape[1] == dim and not hasattr(net, "r")
    else:
        close(sigma, (1 + out[:, dim:].exp()).log() + 1e-6)
        assert out.shape[1] == 2 * dim
    z = mu.relu() if name == "smallcnn3" else mu
    close(net(x), linear(w, "head", z))
    close(net.features(x), mu)


# The start


def fans(v: Tensor) -> tuple[int, int]:
    return v[0].numel(), v.shape[0] * v[0, 0].numel()


def xavier(v: Tensor) -> float:
    return math.sqrt(6 / sum(fans(v)))


def of_pytorch(v: Tensor) -> float:
    return 1 / math.sqrt(fans(v)[0])


def start_in(v: Tensor, end: float) -> None:
    """The moments of the uniform distribution from -end to end, to six standard errors, and its ends."""
    unit = v.double().flatten() / end
    mean, square = unit.mean(), unit.square().mean() - 1 / 3
    assert abs(mean) < 6 * math.sqrt(1 / 3 / len(unit))
    assert abs(square) < 6 * math.sqrt((1 / 5 - 1 / 9) / len(unit))
    assert unit.abs().max() <= 1 + 1e-6


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
    ("smallcnn", xavier), ("smallcnn3", xavier), ("smallcnn_bn", of_pytorch), ("alexnet_bn", of_pytorch),
    ("resnet18_3x3", of_pytorch),
])
def test_distribution_at_the_start(name, rule):
    """DIRT's by Xavier's uniform distribution, biases 0; others, and the ResNet for small images, as
    PyTorch's layers start."""
    torch.manual_seed(0)
    for module in common.backbone(args_of(name), 3, 5).modules():
        start_of(module, rule)


@pytest.mark.parametrize("name, build, shape", [
    ("alexnet", models.alexnet, {}), ("resnet18", models.resnet18, {}), ("resnet50", models.resnet50, {}),
    ("vit_b8", models.VisionTransformer, dict(image_size=SIDE["vit_b8"], patch_size=8, num_layers=12,
                                              num_heads=12, hidden_dim=768, mlp_dim=3072)),
])
def test_networks_of_torchvision_start_as_it_says(name, build, shape):
    """Bit for bit; the classifier, which is another one, as PyTorch's linear layer."""
    torch.manual_seed(0)
    net = common.backbone(args_of(name), 3, 5)
    torch.manual_seed(0)
    theirs = build(**shape).state_dict()
    assert all(torch.equal(v, theirs[at]) for at, v in net.body.state_dict().items())
    start_of(net.head, of_pytorch)


def test_the_start_of_the_methods_own_layers():
    """FDSE's convolutions as PyTorch's, the bias of a block 0; FedSR's layer to mu and sigma as smallcnn's
    own layer to z, its r(z|y) as in the official code; FedCiR's generator as PyTorch's."""
    torch.manual_seed(0)
    blocks = [module for module in fdse.build(args_of("resnet18", "fdse"), 3, 5).modules()
              if isinstance(module, fdse.DSEBlock)]
    assert len(blocks) == 8
    for block in blocks:
        for module in block.modules():
            start_of(module, of_pytorch)
        assert not block.bias.any()
    for name, rule in (("smallcnn3", xavier), ("resnet18", of_pytorch)):
        net = fedsr.build(args_of(name, "fedsr"), 3, 7)
        start_of(net.last, rule)
        assert not net.r.mu.any() and (net.r.raw == 1).all() and net.r.mu.shape == (7, net.head.in_features)
    for module in fedcir.build(args_of("resnet18", "fedcir"), 3, 7).G.modules():
        start_of(module, of_pytorch)


# How many


@pytest.mark.parametrize("name, classes, numbers, printed", [
    ("alexnet_bn", 10, 12_974_154, "1.30e+07"),  # FDSE, Table 4
    ("alexnet", 1000, 61_100_840, "6.11e+07"),  # 60 million, Krizhevsky et al.
    ("resnet18", 1000, 11_689_512, "1.17e+07"),
    ("resnet50", 1000, 25_557_032, "2.56e+07"),
    ("resnet18_3x3", 10, 11_173_962, "1.12e+07"),
    ("vit_b8", 1000, 85_977_832, "8.60e+07"),  # 86 million, Dosovitskiy et al.
    ("smallcnn", 10, 32 * 75 + 64 + 32 * 64 * 25 + 128 + 1024 * 64 + 64 + 650, "1.20e+05"),
])
def test_parameters_are_as_many_as_papers_print(name, classes, numbers, printed):
    with torch.device("meta"):
        net = common.backbone(args_of(name), 3, classes)
    assert sum(p.numel() for p in net.parameters()) == numbers
    assert f"{numbers:.2e}" == printed
