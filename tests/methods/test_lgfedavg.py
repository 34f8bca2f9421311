"""LG-FedAvg: which layers travel, and the unseen client. Its rounds are in test_authors.py."""

import dataclasses

import common
from baselines import lgfedavg
from tests.conftest import parsed
from tests.plain_torch import in_double
from tests.three_clients import FLAGS, federation, mean, one_round

import torch
from torch import nn
from torch.testing import assert_close

NAME = "baselines.lgfedavg"


def test_the_unseen_client_has_the_mean_of_whole_networks():
    """With `lodo` theta_k travels up and goes down to the unseen client alone."""
    args = parsed(NAME, *FLAGS, "--protocol", "lodo", "--target", "d75")
    server, clients, data = federation(lgfedavg, args)
    uploads = one_round(server, clients, 0, (0, 1))
    whole = [in_double(up["w"] | up["local"]) for up in uploads.values()]
    assert server.download(0).keys() == {"w"}
    unseen = lgfedavg.Client(args, clients[0].net, 3, dataclasses.replace(data[2], unseen=True))
    tested = in_double(common.state(unseen.model(server.download(3))))
    assert_close(tested, mean(whole, [24 / 37, 13 / 37]))


def test_layers_of_every_backbone():
    """A layer is a convolution or linear layer with its normalization; the classifier is the last one."""
    expected = {"alexnet_bn": (8, 7), "resnet18": (21, 6), "vit_b8": (None, 2)}  # layers; in the first
    for name, (count, first) in expected.items():
        args = parsed(NAME, "--dataset", "pacs", "--backbone", name, "--image-size", 64)
        with torch.device("meta"):
            w = common.backbone(args, 3, 7).state_dict()
        layers = lgfedavg.layers_of(w)
        assert sorted(name for layer in layers for name in layer) == sorted(w)
        assert layers[-1] == ["head.weight", "head.bias"]
        if count:
            assert len(layers) == count and len(layers[0]) == first, name


def test_top_and_bottom_layers():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    args = lgfedavg.Args(layers=2)
    assert lgfedavg.shared_entries(net.state_dict(), args) == list(net.state_dict())
    bottom = lgfedavg.Args(layers=1, shared="bottom")
    assert lgfedavg.shared_entries(net.state_dict(), bottom) == ["0.weight", "0.bias"]
