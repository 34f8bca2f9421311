"""The Gaussian encoder and its KL divergence, which stand in fedsr.py and again in fedcir.py."""

import math

import common
import fedcir
import fedsr

import numpy as np
import pytest
import torch
from torch import nn, tensor
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import softmax

BOTH = pytest.mark.parametrize("module", [fedsr, fedcir], ids=["fedsr", "fedcir"])


@BOTH
def test_the_divergence_against_torch_and_monte_carlo(module):
    """Against torch.distributions.kl_divergence, and the mean log ratio of 40,000 samples."""
    torch.manual_seed(0)
    mu, mu_r = torch.randn(2, 5, 4, dtype=torch.float64)
    sigma, sigma_r = torch.rand(2, 5, 4, dtype=torch.float64) + 0.3
    p, r = Normal(mu, sigma), Normal(mu_r, sigma_r)
    kl = module.gaussian_kl(mu, sigma, mu_r, sigma_r)
    torch.testing.assert_close(kl, kl_divergence(p, r).sum(1))
    z = p.sample((40_000,))
    ratio = (p.log_prob(z) - r.log_prob(z)).sum(2)  # [S, B]
    error = ratio.std(0) / 200  # of the mean of 40,000
    assert ((ratio.mean(0) - kl).abs() < 5 * error).all()


@BOTH
def test_the_prediction_against_quadrature(module):
    """z of one dimension: the integral of N(z; mu, sigma^2) softmax(w z + b) by Gauss and Hermite."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
    probabilistic = [True] if module is fedsr else []
    net = module.GaussianNet(common.Net(body, 1, 2), *probabilistic, 100_000)
    net.head.weight.data = tensor([[3.0], [-2.0]])
    x = torch.rand(3, 1, 2, 2)
    mu, sigma = net.encode(x)
    nodes, weights = np.polynomial.hermite.hermgauss(60)
    z = mu.double() + math.sqrt(2) * sigma.double() * torch.from_numpy(nodes)  # [3, 60]
    logits = z[:, :, None] @ net.head.weight.double().T + net.head.bias.double()
    shares = torch.from_numpy(weights)[:, None] / math.sqrt(math.pi)
    p = (shares * softmax(logits, 2)).sum(1)
    torch.testing.assert_close(net(x).exp().double(), p, atol=0.006, rtol=0)
    net.samples = 0
    of_the_mean = softmax(net(x), 1)
    assert (of_the_mean - p).abs().max() > 0.006  # the mean of z alone is another prediction
