"""FedAvg: the local step and the average by hand, and what travels."""

import common
import fedavg
from tests.conftest import parsed

import pytest
import torch
from torch import nn, tensor
from torch.nn.functional import one_hot


@pytest.mark.parametrize("average,want", [("samples", 3), ("uniform", 2)])
def test_average_by_hand(average, want):
    """n_k 1 and 3: (1*0 + 3*4)/4 = 3; uniform: 2. Integer buffers are rounded."""
    zero = {"w": {"a": tensor([0.0]), "b": tensor(0)}, "n": tensor(1)}
    four = {"w": {"a": tensor([4.0]), "b": tensor(4)}, "n": tensor(3)}
    args = fedavg.Args(average=average)
    server = fedavg.Server(args, nn.Linear(1, 1), 2)
    server.update({0: zero, 1: four}, 0)
    assert server.w["a"].item() == want
    assert server.w["b"].item() == want


def weight_and_bias(tensors):
    """The classifier's [classes, D + 1], its bias in the last column, in float64."""
    bias = tensors["head.bias"][:, None]
    return torch.cat([tensors["head.weight"], bias], 1).double()


def test_local_training_by_hand():
    """Softmax regression, two epochs of full batches: w - eta * mean (softmax - onehot) x', with momentum and
    decay."""
    args = parsed("fedavg", "--scale", "smoke", "--precision", "fp32", "--epochs", 2, "--batch-size", 10,
                  "--momentum", 0.5, "--weight-decay", 0.1, "--clip", 0.2, "--lr-decay", 0.5)
    images = torch.randint(0, 255, (4, 1, 2, 2), dtype=torch.uint8)
    labels = tensor([0, 1, 2, 1])
    part = common.Data(images, torch.arange(4), labels, "cpu", "unit")
    net = common.Net(nn.Flatten(), 4, 3)
    net.head.bias.data.zero_()
    start = common.state(net)
    client = fedavg.Client(args, net, 0, common.ClientData("c", part, part, part))
    up = client.train({"w": start}, t=1)

    pixels = images.flatten(1) / 255
    x = torch.cat([pixels, torch.ones(4, 1)], 1).double()
    w = weight_and_bias(start)
    velocity = 0
    for _ in range(2):
        p = torch.softmax(x @ w.T, 1)
        gradient = (p - one_hot(labels, 3)).T @ x / 4
        shrunk = min(1, 0.2 / (gradient.norm() + 1e-6))
        velocity = 0.5 * velocity + shrunk * gradient + 0.1 * w
        w = w - args.lr * 0.5 * velocity
    torch.testing.assert_close(weight_and_bias(up["w"]), w, atol=1e-6, rtol=1e-5)
    assert up.keys() == {"w", "n"}
    assert up["n"] == 4


def test_alexnet_size_and_traffic():
    """Table 4 of FDSE: 1.30e7 numbers, 49.52 MiB each way with the BN buffers."""
    net = common.Net(common.alexnet_bn(3, 224), 1024, 10)
    numbers = sum(p.numel() for p in net.parameters())
    assert numbers == 12_974_154
    server = fedavg.Server(fedavg.Args(), net, 4)
    mib = common.nbytes(server.download(0)) / 2 ** 20
    assert round(mib, 2) == 49.52
