"""FedCiR: Eq. (15) against loops and finite differences, its settings, and where it is FedAvg.

Algorithm 1 is in test_fedcir_wiring.py, the encoder and Eq. (17) are in test_gaussian_encoder.py.
"""

import dataclasses
import math

import common
import fedavg
import fedcir
from tests.conftest import metrics, parsed, run_here
from tests.three_clients import FLAGS, ROUNDS, federation, same

import numpy as np
import pytest
import torch
from torch import tensor

def eq15_by_loops(z, y, weight, bias):
    K, classes, _ = weight.shape
    total = 0.0
    for b in range(len(z)):
        p = 0.0
        for k in range(K):
            logits = weight[k] @ z[b] + bias[k]
            e = [math.exp(logits[c]) for c in range(classes)]
            p += e[y[b]] / sum(e) / K
        total -= math.log(p)
    return total / len(z)


def test_eq15_and_its_gradient_against_loops_over_clients_and_samples():
    """Probabilities are averaged before the logarithm; the gradient in z is that of finite differences."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 4, 6, generator=g, dtype=torch.float64)
    bias = torch.randn(3, 4, generator=g, dtype=torch.float64)
    y = tensor([0, 3, 1, 1, 2])
    z = torch.randn(5, 6, generator=g, dtype=torch.float64)
    leaf = z.clone().requires_grad_()
    loss = fedcir.ensemble_loss(leaf, y, weight, bias)
    loss.backward()
    assert math.isclose(loss.item(), eq15_by_loops(z, y, weight, bias), rel_tol=1e-12)
    for b in range(5):
        for d in range(6):
            step = torch.zeros_like(z)
            step[b, d] = 1e-5
            above = eq15_by_loops(z + step, y, weight, bias)
            below = eq15_by_loops(z - step, y, weight, bias)
            slope = (above - below) / 2e-5
            assert math.isclose(leaf.grad[b, d].item(), slope, rel_tol=1e-5, abs_tol=1e-8)


def test_eq15_does_not_overflow():
    """Logits of 1000: the loss is 1000."""
    weight = tensor([[[-1000.0], [0.0]], [[0.0], [1000.0]]])
    loss = fedcir.ensemble_loss(torch.ones(1, 1), tensor([0]), weight, torch.zeros(2, 2))
    assert loss.item() == 1000

class Sampled(fedcir.GaussianNet):
    """A network whose features are a sample of z, for fedavg.py."""

    def features(self, x):
        mu, sigma = self.encode(x)
        return mu + sigma * torch.randn_like(mu)


def three_rounds(module, args, build):
    """The model after three rounds and its prediction; only w is sent."""
    server, clients, data = federation(module, args, build)
    for t, chosen in enumerate(ROUNDS):
        uploads = {}
        for k in chosen:
            down = server.download(k)
            assert down.keys() == {"w"}
            common.seed_all(0, "train", t, k)
            uploads[k] = clients[k].train(down, t)
        server.update(uploads, t)
    model = clients[2].model(server.download(2)).eval()
    x, _ = data[2].train.batch(torch.arange(8))
    torch.manual_seed(0)
    return server.w | {"prediction": model(x).detach()}


@pytest.mark.parametrize("flags", [("fedreg", "--lambda-reg", 0), ("fedalign", "--lambda-align", 0),
                                   ("control",)])
def test_without_both_terms_it_is_fedavg_on_the_gaussian_network(flags):
    """Bit for bit, also the predictions: fedavg.py with a network whose features are a sample of z."""
    args = parsed("fedcir", *FLAGS, "--variant", *flags)
    inherited = {field.name: getattr(args, field.name) for field in dataclasses.fields(common.Args)}
    ours = three_rounds(fedcir, args, fedcir.build)
    theirs = three_rounds(fedavg, fedavg.Args(**inherited, average="uniform"),
                          lambda *of: Sampled(common.backbone(*of), True, 20))
    assert same(ours, theirs)


def test_the_log_of_a_run_has_the_regularizers_from_their_round_on(tmp_path):
    result = run_here("fedcir", tmp_path / "run", "--limit", 20, "--image-size", 8, "--steps", 2,
                      "--precision", "bf16", "--lambda-align", 0.01, "--generator-optimizer", "sgd")
    first, second = metrics(tmp_path / "run")
    for line, terms in ((first, set()), (second, {"reg", "align"})):
        for log in line["clients"].values():
            assert log.keys() == {"bytes_down", "bytes_up", "loss"} | terms
    aligns = [log["align"] for log in second["clients"].values()]
    assert result["logs"].keys() == {"loss", "reg", "align"}  # also in the record
    assert result["logs"]["align"] == [None, pytest.approx(np.mean(aligns), abs=1e-5)]
