"""FedFA: rounds by hand in plain torch, a layer's numbers, its places, and the setting in which it is
FedAvg."""

import common
from baselines import fedfa
from plumbing.runfolder import copied
from tests.conftest import parsed
from tests.plain_torch import batch_norm, in_double, linear
from tests.three_clients import ROUNDS, Beside, mean, shares_of

import pytest
import torch
from torch.nn.functional import adaptive_avg_pool2d, conv2d, max_pool2d
from torch.testing import assert_close

NAME = "baselines.fedfa"
LAYERS = ("body.3.1", "body.7.1")  # in the network of the digits


def augmented(h, state, name, prob, memory, acted):
    """A layer in plain sums over h [B, C, h, w]; the running statistics in `state` move. Coin and noise are
    drawn in the layer's order."""
    acts = float(torch.rand(())) < prob
    acted.append(acts)
    if not acts:
        return h
    B, C, pixels = h.shape[0], h.shape[1], h.shape[2] * h.shape[3]
    mu = h.sum((2, 3)) / pixels
    centred = h - mu[:, :, None, None]
    sigma = (centred.square().sum((2, 3)) / (pixels - 1) + 1e-6).sqrt()
    drawn = {}
    for what, v in (("mu", mu), ("sigma", sigma)):
        running = f"{name}.mean_{what}"
        state[running] = memory * state[running] + (1 - memory) * v.detach().sum(0) / B
        batch = (v - v.sum(0) / B).square().sum(0) / (B - 1) + 1e-6
        spread = state[f"{name}.spread_{what}"] + 1e-6
        share = spread / (1 + spread)
        gamma = C * share / share.sum()
        noise = torch.randn(B, C, 1, 1).double()[:, :, 0, 0]
        drawn[what] = v + ((1 + gamma) * batch).sqrt() * noise
    scale = drawn["sigma"] / sigma
    return scale[:, :, None, None] * centred + drawn["mu"][:, :, None, None]


def body_by_hand(args, acted):
    """z of the network of the digits with a layer behind each pooling."""
    def body(x, leaves, w):
        h = x
        for conv, bn, layer in (("body.0", "body.1", LAYERS[0]), ("body.4", "body.5", LAYERS[1])):
            h = conv2d(h, leaves[f"{conv}.weight"], leaves[f"{conv}.bias"], padding=1)
            h = max_pool2d(batch_norm(h, leaves, w, bn).clamp(min=0), 2)
            h = augmented(h, w, layer, args.prob, args.memory, acted)
        return linear(adaptive_avg_pool2d(h, 7).flatten(1), leaves, "body.10").clamp(min=0)
    return body


@pytest.mark.parametrize("variant,variance,average", [("paper", "channels", "samples"),
                                                      ("code", "one", "uniform")])
def test_rounds_by_hand(variant, variance, average):
    """Uploads and the server's model over three rounds, whose clients change. The paper's running statistics
    begin anew in each."""
    of = Beside(fedfa, "--prob", 0.6, "--memory", 0.8, "--momentum", 0.7, "--variant", variant)
    w, acted = in_double(of.server.w), []
    body = body_by_hand(of.args, acted)
    for t, chosen in enumerate(ROUNDS):
        start = w
        if variant == "paper":
            start = w | {n: torch.zeros_like(v) for n, v in w.items() if n.endswith(".mean_mu")}
            start |= {n: torch.ones_like(v) for n, v in w.items() if n.endswith(".mean_sigma")}
        hands = of.play(t, chosen, [start] * 3, body=body)
        w = mean(hands, shares_of(chosen, average))
        for layer in LAYERS:
            for what in ("mu", "sigma"):
                of_clients = torch.stack([hand[f"{layer}.mean_{what}"] for hand in hands])  # [K, C]
                middle = of_clients.mean() if variance == "one" else of_clients.mean(0)
                squares = (of_clients - middle).square()
                if variance == "one":
                    spread = torch.full((of_clients.shape[1],), squares.sum() / (squares.numel() - 1))
                else:
                    spread = squares.sum(0) / (len(hands) - 1)
                w[f"{layer}.spread_{what}"] = spread.double()
        of.check(w)
    of.some_were_clipped()
    assert 0 < sum(acted) < len(acted)  # some layers act on a batch, some do not


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


def test_one_client_in_a_round():
    """There is no variance of one client: the last one stays."""
    of = Beside(fedfa, "--prob", 1)
    server = of.server
    server.update({k: of.clients[k].train(server.download(k), 0) for k in (0, 1)}, 0)
    before = copied(server.w)
    server.update({2: of.clients[2].train(server.download(2), 1)}, 1)
    for layer in LAYERS:
        assert torch.equal(server.w[f"{layer}.spread_mu"], before[f"{layer}.spread_mu"])
        assert not torch.equal(server.w[f"{layer}.mean_mu"], before[f"{layer}.mean_mu"])
