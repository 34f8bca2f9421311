"""FedBN: which layers are BN, and the adaptation to an unseen domain. Its rounds are in test_authors.py."""

import dataclasses

import common
from baselines import fedbn
from tests.conftest import parsed
from tests.plain_torch import in_double
from tests.three_clients import FLAGS, assert_near, federation, mean, one_round

import pytest
import torch
from torch import nn
from torch.testing import assert_close

NAME = "baselines.fedbn"


def test_bn_layers_of_the_backbones():
    """ResNet18 has 20 BN layers, of which 3 have no bn in their names; a ViT has none."""
    with torch.device("meta"):
        resnet18 = common.resnet18(3, 32)
        alexnet = common.alexnet_bn(3, 64)
        block = nn.TransformerEncoderLayer(8, 2)
    layers = fedbn.bn_layers(resnet18)
    assert len(layers) == 20
    assert sum("bn" not in name for name in layers) == 3
    assert len(fedbn.bn_entries(resnet18)) == 20 * 5
    assert len(fedbn.bn_layers(alexnet)) == 7
    assert fedbn.bn_entries(block) == []


def unseen_client(*flags):
    """After a round of clients 1 and 2: the server, their BN's mean by hand, and an unseen client."""
    args = parsed(NAME, *FLAGS, "--protocol", "lodo", "--target", "d75", *flags)
    server, clients, data = federation(fedbn, args)
    uploads = one_round(server, clients, 0, (1, 2))
    assert all(up.keys() == {"w", "n", "bn"} for up in uploads.values())
    assert server.download(0).keys() == {"w"}
    bn = mean([in_double(clients[k].bn) for k in (1, 2)], [0.5, 0.5])
    data = dataclasses.replace(data[0], test=data[0].train, unseen=True)
    clients[0].net.body.append(nn.Dropout())
    return args, server, bn, fedbn.Client(args, clients[0].net, 3, data)


def test_the_unseen_client_begins_with_the_mean():
    args, server, bn, client = unseen_client("--adapt-epochs", 0)
    tested = in_double(common.state(client.model(server.download(3))))
    assert_near(tested, in_double(server.w) | bn)


@pytest.mark.parametrize("momentum", [0, 0.3])
def test_algorithm_2_by_hand(momentum):
    """Statistics of the first BN layer over two passes: the mean over the batches, or moving averages."""
    args, server, bn, client = unseen_client("--adapt-epochs", 2, "--adapt-momentum", momentum, "--augment",
                                             "crops")
    model = client.model(server.download(3))
    assert not model.body[-1].training
    found = in_double(common.state(model))
    once = dataclasses.replace(args, epochs=2, steps=0, augment="none")
    convolution = model.body[0]
    means, variances = [], []
    running = bn["body.1.running_mean"]
    for x, _ in common.batches(client.data.test, once, 0, 3):
        h = convolution(x).detach().double()
        means.append(h.mean((0, 2, 3)))
        variances.append(h.var((0, 2, 3)))
        running = (1 - momentum) * running + momentum * means[-1]
    assert len(means) == 6  # twice 24 images in batches of 10
    if momentum == 0:
        running = torch.stack(means).mean(0)
        assert_near(found["body.1.running_var"], torch.stack(variances).mean(0))
    assert_near(found["body.1.running_mean"], running)
    for name in ("body.1.weight", "body.5.bias"):
        assert_near(found[name], bn[name])
    assert_close({name: found[name] for name in server.w}, in_double(server.w))
    assert {layer.momentum for layer in fedbn.bn_layers(model).values()} == {0.1}


def test_without_bn_it_says_that_it_is_fedavg(capsys):
    net = common.Net(nn.Flatten(), 4, 2)
    fedbn.Server(parsed("baselines.fedbn"), net, 2)
    assert "no batch normalization, so this is FedAvg" in capsys.readouterr().out
