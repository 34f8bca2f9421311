"""Networks from elsewhere: those of torchvision and timm, and of a file of one's own, in every method."""

import sys
from unittest import mock

import common
import fdse
from plumbing.run import networks
from plumbing.run.settings import identity
from reproduce import loading
from reproduce.tables import papers
from tests.conftest import MODULES, fails, one_run, parsed, quick_for, run_here, stops
from tests.own_images import write_images
from tests.three_clients import same

import pytest
import torch
from torch import nn

MINE = """
from common import Net
from torch import nn

def build(args, channels, classes):
    body = nn.Sequential(nn.Conv2d(channels, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 16))
    body[0].requires_grad_(False)
    return Net(body, {dim}, {classes})
"""
USUAL = MINE.replace("{dim}", "16").replace("{classes}", "classes")


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "my_net.py"
    path.write_text(USUAL)
    return path


# In the quick suite the papers' methods, and those that treat some layers apart.
APART = (*papers(), "baselines.fedbn", "baselines.fedfa", "baselines.lgfedavg", "baselines.partialfed")


@pytest.mark.parametrize("method", quick_for(APART, MODULES))
def test_every_method_trains_a_network_of_ones_own(tmp_path, method, mine, four_domains):
    """On digits, which have one channel. A frozen layer has no gradient. The network is loaded again, by the
    file that the caller names."""
    backbone = f"{mine}:build"
    out = tmp_path / "run"
    run_here(method, out, "--backbone", backbone, "--rounds", 2, *one_run(method))
    net = loading.load_run(out, 0, "last", backbone=backbone)
    assert net.run.args.backbone == backbone


# In FDSE's place a line says what it needs.
@pytest.mark.parametrize("method", quick_for(("fedavg", "fdse", "baselines.fedfa"), MODULES))
def test_every_method_trains_a_network_of_torchvision(tmp_path, method, capsys):
    images = write_images(tmp_path / "images", count=6)
    flags = ["--dataset", f"folder:{images}", "--backbone", "torchvision:mobilenet_v3_small", "--image-size",
             32, "--batch-size", 4, "--epochs", 2, "--rounds", 1, "--target-part", "all"]
    if one_run(method):
        flags += ["--target", "north", "--crop", 32, "--linear-epochs", 2]
    else:
        flags += ["--split", "0.6/0.2/0.2"]
    if method == "fdse":
        fails(capsys, 2, "fdse builds .*torchvision's ResNets", run_here, method, tmp_path / "run", *flags)
    else:
        run_here(method, tmp_path / "run", *flags)


def test_fdse_makes_blocks_of_a_sequential_of_ones_own(tmp_path):
    """smallcnn_bn given as a file has fdse's own convolutions; its linear layer, without BN, stays."""
    (tmp_path / "same.py").write_text("import common\ndef build(args, channels, classes):\n    return "
                                      "common.Net(common.smallcnn_bn(channels, 28), 64, classes)\n")
    args = parsed("fdse", "--backbone", f"{tmp_path / 'same.py'}:build")
    net = fdse.build(args, 1, 10)
    own = fdse.build(parsed("fdse"), 1, 10)
    assert type(net.body[6]) is nn.Linear
    assert str(net.body[:6]) == str(own.body[:6])


@pytest.mark.parametrize("values", [{"kernel_size": (3, 1)}, {"dilation": 2}, {"padding_mode": "reflect"}])
def test_fdse_leaves_a_convolution_that_no_block_can_be(values):
    conv = nn.Conv2d(2, 8, **{"kernel_size": 3, "padding": 1} | values)
    layers = [conv, nn.BatchNorm2d(8), nn.ReLU()]
    assert fdse.replaced_layers(parsed("fdse"), layers) == layers


def test_fdse_takes_every_resnet_of_torchvision():
    net = fdse.build(parsed("fdse", "--backbone", "torchvision:resnet34", "--image-size", "32"), 3, 10)
    assert sum(isinstance(module, fdse.DSEBlock) for module in net.modules()) == 16


@pytest.mark.parametrize("name, layer, dim", [
    ("resnet34", "fc", 512),
    ("mobilenet_v3_small", "classifier.3", 1024),
    ("convnext_tiny", "classifier.2", 768),
    ("densenet121", "classifier", 1024),
    ("vit_b_16", "heads.head", 768),
    ("swin_t", "head", 768),
    ("inception_v3", "fc", 2048),
])
def test_the_last_linear_layer_is_found(name, layer, dim):
    assert networks.last_linear(name) == (layer, dim)


def test_torchvisions_resnet18_is_ours(monkeypatch):
    """By its long name it has the same entries, and the newest ImageNet weights go into it."""
    whole, asked, states = common.resnet18(3, 32).state_dict(), [], []
    monkeypatch.setattr(common, "read_weights", lambda origin, imagenet: asked.append(imagenet) or whole)
    for name in ("torchvision:resnet18", "resnet18"):
        args = parsed("fedavg", "--backbone", name, "--weights", "imagenet", "--image-size", 32)
        states.append(common.backbone(args, 3, 10).body.state_dict())
    assert asked == ["ResNet18_Weights.IMAGENET1K_V1"] * 2 and same(*states)
    assert networks.imagenet_weights("resnet50") == "ResNet50_Weights.IMAGENET1K_V2"


def test_a_network_of_timm(tmp_path, monkeypatch, capsys):
    """By a stand-in for the package, with one network."""
    def create_model(name, pretrained, num_classes, in_chans):
        if pretrained:
            raise RuntimeError("no pretrained weights exist")
        assert num_classes == 0
        return nn.Sequential(nn.Conv2d(in_chans, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    stub = mock.Mock(create_model=create_model, list_models=lambda: ["tiny"], is_model="tiny".__eq__)
    monkeypatch.setitem(sys.modules, "timm", stub)
    result = run_here("fedavg", tmp_path / "run", "--backbone", "timm:tiny")
    assert result["args"]["backbone"] == "timm:tiny"
    for flags, words in ((["timm:tiny", "--weights", "imagenet"], "cannot be made .no pretrained weights"),
                         (["timm:tinny"], "timm has no such network; did you mean tiny")):
        fails(capsys, 2, words, run_here, "fedavg", tmp_path / "no", "--backbone", *flags)


def test_without_timm(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "timm", None)
    fails(capsys, 2, "is not installed: pip install timm", run_here, "fedavg", tmp_path / "run", "--backbone",
          "timm:tiny")


def test_the_content_of_the_file_belongs_to_the_run(tmp_path, mine, capsys, monkeypatch):
    """From wherever it is named. A folder cannot have a file run: who loads the network names it again."""
    monkeypatch.chdir(tmp_path)
    named = ["--backbone", "my_net.py:build"]
    before = identity(parsed("fedavg", *named))
    assert parsed("fedavg", *named).backbone == f"{mine}:build"
    run_here("fedavg", tmp_path / "run", *named)
    stops("my_net.py:build: backbone= .* names it again", loading.load_run, tmp_path / "run", code=2)
    mine.write_text(USUAL + "# changed\n")
    assert identity(parsed("fedavg", *named)) != before
    fails(capsys, 2, "holds a run of other arguments .backbone .*my_net.py:build", run_here, "fedavg",
          tmp_path / "run", *named)
    stops("has another content than when the run was made", loading.load_run, tmp_path / "run",
          backbone="my_net.py:build", code=2)


def test_a_network_of_ones_own_has_no_weights_of_imagenet(tmp_path, mine):
    """Also where they are the method's default on images of one's own."""
    images = write_images(tmp_path / "images", count=3)
    flags = ["--dataset", f"folder:{images}", "--backbone"]
    assert parsed("fedsr", *flags, "resnet18").weights == "imagenet"
    assert parsed("fedsr", *flags, f"{mine}:build").weights == "none"


def test_weights_of_a_network_of_ones_own(tmp_path, mine):
    """A state of it, whose head stays where the classes are as many."""
    flags = ["--backbone", f"{mine}:build", "--weights"]
    saved = common.backbone(parsed("fedavg", *flags, "none"), 1, 10).state_dict()
    torch.save(saved, tmp_path / "weights.pt")
    net = common.backbone(parsed("fedavg", *flags, tmp_path / "weights.pt"), 1, 10)
    assert same(net.state_dict(), saved)
