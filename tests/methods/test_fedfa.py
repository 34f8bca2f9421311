"""FedFA: a layer, and the server's statistics. Rounds are in test_authors.py, the places of the layers in
test_networks_by_hand.py."""

import common
from baselines import fedfa
from tests.conftest import parsed
from tests.three_clients import FLAGS, federation, one_round

import torch
from torch import nn, tensor
from torch.testing import assert_close

NAME = "baselines.fedfa"


def layer_of(prob: float, channels: int) -> fedfa.FFALayer:
    return fedfa.FFALayer(parsed(NAME, "--prob", prob), channels).train()


def test_tokens_are_pixels():
    """What a layer makes of tokens [B, N, C] is what it makes of maps [B, C, N, 1]."""
    x = torch.randn(6, 9, 4)
    outputs, layers = [], []
    for shaped in (x, x.mT[..., None]):
        layers.append(layer_of(1, 4))
        common.seed_all("tokens")
        outputs.append(layers[-1](shaped))
    assert_close(outputs[0], outputs[1][..., 0].mT)
    assert_close(layers[0].mean_mu, layers[1].mean_mu)


def test_a_layer_at_rest():
    """In evaluation, with a batch of one image and with maps of one pixel. With a probability of 0 there is
    no coin either, which would change what dropout draws."""
    random_numbers = torch.get_rng_state()
    layer_of(0, 4)(torch.randn(5, 4, 3, 3, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), random_numbers)
    layer = layer_of(1, 4)
    for x in (torch.randn(1, 4, 3, 3), torch.randn(5, 4, 1, 1)):
        assert layer(x) is x
    assert layer.eval()(torch.randn(5, 4, 3, 3)).shape == (5, 4, 3, 3)
    assert layer.mean_mu.abs().max() == 0
    assert all((v == 1).all() for v in (layer.mean_sigma, layer.spread_mu, layer.spread_sigma))


def test_the_papers_statistics():
    """The variance across the clients is of each channel; of one client there is none, and the last one
    stays. A client's own statistics begin anew in each round."""
    net = nn.Sequential(layer_of(1, 2))
    server = fedfa.Server(parsed(NAME), net, 3)
    for means in ([[1.0, 5.0], [3.0, 5.0]], [[9.0, 9.0]]):
        uploads = {}
        for k, mean in enumerate(means):
            uploads[k] = {"w": server.w | {"0.mean_mu": tensor(mean)}, "n": tensor(3)}
        server.update(uploads, 0)
        assert server.w["0.spread_mu"].tolist() == [2, 0]
    assert server.w["0.mean_mu"].tolist() == [9, 9]
    net.load_state_dict(server.w)
    fedfa.forget_statistics(net)
    assert net[0].mean_mu.tolist() == [0, 0] and net[0].mean_sigma.tolist() == [1, 1]
    server, clients, _ = federation(fedfa, parsed(NAME, *FLAGS))
    means = [name for name in server.w if name.endswith(("mean_mu", "mean_sigma"))]
    server.w |= {name: server.w[name] + 9 for name in means}
    one_round(server, clients)
    assert max(server.w[name].max() for name in means) < 2
