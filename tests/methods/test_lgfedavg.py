"""LG-FedAvg: rounds by hand in plain torch, which layers travel, and the setting in which it is FedAvg."""

import common
from baselines import lgfedavg
from tests.conftest import parsed
from tests.plain_torch import in_double
from tests.three_clients import FLAGS, ROUNDS, Beside, mean, shares_of, three_clients

import pytest
import torch
from torch import nn
from torch.testing import assert_close

NAME = "baselines.lgfedavg"
LAYERS = (("body.0", "body.1"), ("body.4", "body.5"), ("body.10",), ("head",))  # of the digits' network


def travels(name: str, shared: str, layers: int) -> bool:
    """Whether an entry of the digits' network is of theta_g."""
    module = name.rpartition(".")[0]
    number = next(i for i, modules in enumerate(LAYERS) if module in modules)
    at_top = number >= len(LAYERS) - layers
    return {"top": at_top, "bottom": not at_top, "all": True}[shared]


@pytest.mark.parametrize("shared,layers,average,evaluated", [
    ("top", 3, "samples", "aggregated"),
    ("bottom", 1, "uniform", "trained"),
])
def test_rounds_by_hand(shared, layers, average, evaluated):
    """Uploads, what the server keeps and what each client is tested with, over three rounds. Client 1 is
    late: it begins with the initial theta_k. The others miss one."""
    of = Beside(lgfedavg, "--momentum", 0.5, "--shared", shared, "--layers", layers,
                "--average", average, "--evaluated", evaluated)
    w = in_double(common.state(of.clients[0].net))
    own = [dict(w) for _ in range(3)]

    def sent(hand):
        return {name: v for name, v in hand.items() if travels(name, shared, layers)}

    for t, chosen in enumerate(ROUNDS):
        hands = of.play(t, chosen, [of_client | sent(w) for of_client in own], sent=sent)
        for k, hand in zip(chosen, hands):
            own[k] = hand
        w = mean([sent(hand) for hand in hands], shares_of(chosen, average))
        tested = [of_client | w for of_client in own]
        for k in range(3):
            if evaluated == "trained" and (k in chosen or t):  # all but client 1 trained in the first round
                tested[k] = own[k]
        of.check(w, tested)
    of.some_were_clipped()


def test_the_unseen_client_has_the_mean_of_whole_networks():
    """With `lodo` theta_k travels up and goes down to the unseen client alone."""
    args = parsed(NAME, *FLAGS, "--protocol", "lodo", "--target", "d75")
    data = three_clients(args)
    net = common.backbone(args, 1, 10)
    server = lgfedavg.Server(args, net, 2)
    clients = [lgfedavg.Client(args, net, k, data[k]) for k in range(2)]
    data[2].unseen = True
    unseen = lgfedavg.Client(args, net, 2, data[2])
    uploads = {k: clients[k].train(server.download(k), 0) for k in range(2)}
    server.update(uploads, 0)
    whole = [in_double(up["w"] | up["local"]) for up in uploads.values()]
    assert whole[0].keys() == net.state_dict().keys()
    assert server.download(0).keys() == {"w"}
    assert_close(in_double(common.state(unseen.model(server.download(2)))), mean(whole, [24 / 37, 13 / 37]))


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


def test_the_top_may_be_the_whole_network():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    args = lgfedavg.Args(layers=2)
    assert lgfedavg.shared_entries(net.state_dict(), args) == list(net.state_dict())
    with pytest.raises(common.UserError, match="--layers is 3; --backbone smallcnn_bn has 2 layers"):
        lgfedavg.shared_entries(net.state_dict(), lgfedavg.Args(layers=3))
