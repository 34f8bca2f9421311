"""Covariances of known gradients and mutual information of known images."""

import common
import fedgala
from reproduce.measures.finished import rebuilt
from reproduce.measures.gradients import gradient_pairs, mutual_information
from tests.finished_runs import unlabelled_runs

import numpy as np
import pytest
import torch


@pytest.fixture
def run(tmp_path_factory):
    return unlabelled_runs(tmp_path_factory) / "paper"


def noise(values: np.ndarray) -> common.Data:
    """A `Data` of 1x8x8 images, each of a class of its own, from values [n, 64] of about unit variance."""
    images = torch.tensor((128 + 30 * values).clip(0, 255).round()).to(torch.uint8).view(-1, 1, 8, 8)
    rows = torch.arange(len(values))
    return common.Data(images, rows, rows, "cpu", "unit")


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_mutual_information(rho):
    """Pixels rho-correlated over pairs of the same class: -F/2 log(1 - rho^2), Eq. (3); none: what chance
    gives, F / 2n."""
    n, F = 3000, 64
    shared, own = np.random.default_rng(0).standard_normal((2, n, F))
    other = rho * shared + np.sqrt(1 - rho ** 2) * own
    information, chance = mutual_information(noise(shared), noise(other), size=8)
    assert information == pytest.approx(-F / 2 * np.log(1 - rho ** 2) + F / 2 / n, rel=0.02, abs=0.005)
    assert chance == pytest.approx(F / 2 / n, rel=0.5)


def test_covariance_and_cosine_of_known_gradients(run, monkeypatch):
    """A loss whose gradient is a constant vector of each domain, in one tensor of all those that travel."""
    constants = iter(range(1, 7))

    def loss(model, x1, x2):
        value, total = next(constants), 0
        for name, p in model.named_parameters():
            weight = torch.zeros_like(p)
            if name == "g.3.bias":
                weight = torch.linspace(value, -1, p.numel()).view(p.shape)
            total = total + (p * weight).sum()
        return total

    monkeypatch.setattr(fedgala.Learner, "loss", loss)
    pair = gradient_pairs(rebuilt(run), 1)["pairs"]["d15 / d30"]
    fed = rebuilt(run).federation
    size = 0
    for name, value in fed.server.w.items():
        if "running" not in name and "num_batches" not in name:
            size += value.numel()
    u, v = np.zeros(size), np.zeros(size)
    u[:fed.settings.dim] = np.linspace(1, -1, fed.settings.dim)
    v[:fed.settings.dim] = np.linspace(2, -1, fed.settings.dim)
    assert pair["covariance"] == pytest.approx(np.cov(u, v, bias=True)[0, 1], rel=1e-4)
    assert pair["cosine"] == pytest.approx(u @ v / np.linalg.norm(u) / np.linalg.norm(v), rel=1e-4)
