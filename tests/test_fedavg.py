"""FedAvg: the local step and the average by hand."""

import dataclasses

import common
import fedavg
from tests.conftest import parsed

import networks
import torch
from torch import nn


def test_average_by_hand():
    """n_k 1 and 3: (1*0 + 3*4)/4 = 3; uniform: 2. Integer buffers are rounded."""
    uploads = {k: {"w": {"a": torch.tensor([v]), "b": torch.tensor(int(v))}, "n": torch.tensor(n)}
               for k, (v, n) in enumerate([(0.0, 1), (4.0, 3)])}
    for average, want in (("samples", 3), ("uniform", 2)):
        server = fedavg.Server(fedavg.Args(average=average), nn.Linear(1, 1), 2)
        server.update(uploads, 0)
        assert server.w["a"].item() == want and server.w["b"].item() == want


def test_local_training_by_hand():
    """Softmax regression, two epochs of full batches: w - eta * mean (softmax - onehot) x', with momentum and decay."""
    args = dataclasses.replace(parsed("fedavg", "--scale", "smoke", "--precision", "fp32"), epochs=2, batch_size=10,
                               momentum=0.5, weight_decay=0.1, clip=0.2, lr_decay=0.5)
    images = torch.randint(0, 255, (4, 1, 2, 2), dtype=torch.uint8)
    labels = torch.tensor([0, 1, 2, 1])
    part = common.Data(images, torch.arange(4), labels, "cpu", "unit")
    net = networks.Net(nn.Flatten(), 4, 3)
    net.head.bias.data.zero_()
    start = common.state(net)
    client = fedavg.Client(args, net, 0, common.ClientData("c", part, part, part))
    up = client.train({"w": start}, t=1)
    x = torch.cat([images.flatten(1) / 255, torch.ones(4, 1)], 1).double()
    w = torch.cat([start["head.weight"], start["head.bias"][:, None]], 1).double()
    velocity = torch.zeros_like(w)
    for step in range(2):
        gradient = (torch.softmax(x @ w.T, 1) - nn.functional.one_hot(labels, 3)).T @ x / 4
        gradient = gradient * min(1, 0.2 / (gradient.norm() + 1e-6)) + 0.1 * w
        velocity = gradient if step == 0 else 0.5 * velocity + gradient
        w = w - args.lr * 0.5 * velocity
    got = torch.cat([up["w"]["head.weight"], up["w"]["head.bias"][:, None]], 1).double()
    torch.testing.assert_close(got, w, atol=1e-6, rtol=1e-5)
    assert up.keys() == {"w", "n"} and up["n"] == 4


def test_alexnet_size_and_traffic():
    """Table 4 of FDSE: 1.30e7 numbers, 49.52 MiB each way with the BN buffers."""
    net = networks.Net(networks.alexnet_bn(), 1024, 10)
    assert sum(p.numel() for p in net.parameters()) == 12_974_154
    server = fedavg.Server(fedavg.Args(), net, 4)
    assert round(common.nbytes(server.download(0)) / 2 ** 20, 2) == 49.52
