"""FedSR: the regularizers by hand, networks, settings, and where it is FedAvg.

Whole rounds are in test_fedsr_wiring.py, the encoder and Eq. (46) are in test_gaussian_encoder.py.
"""

import math

import common
import fedcir
import fedsr
import official.fedsr
from tests.conftest import parsed

import pytest
import torch
from torch import nn, tensor
from torch.testing import assert_close


@pytest.mark.parametrize("l2r,value,gradient", [
    (fedsr.l2r, 13, [3.0, 4.0]),  # (25 + 1) / 2; 2 z / B
    (official.fedsr.plain_l2r, 3, [0.3, 0.4]),  # (5 + 1) / 2; z / ||z|| / B
])
def test_eq10_eq11_by_hand(l2r, value, gradient):
    """z of (3, 4) and (0, 1): value and gradient on paper, of the paper's norm and of the release's."""
    z = tensor([[3.0, 4.0], [0.0, 1.0]], requires_grad=True)
    length = l2r(z)
    length.backward()
    assert math.isclose(length.item(), value, rel_tol=1e-6)
    assert_close(z.grad[0], tensor(gradient))


def test_the_plain_norm_has_a_gradient_at_zero():
    """It is 0, and not NaN."""
    zero = torch.zeros(2, 3, requires_grad=True)
    official.fedsr.plain_l2r(zero).backward()
    assert (zero.grad == 0).all()


def test_sigma_is_positive_and_its_gradient_finite_in_bf16(monkeypatch):
    """At raw values from -10,000 to 30. The first sigma of r(z|y) is softplus(1) = log(1 + e)."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    monkeypatch.setattr(fedsr, "backbone", lambda args, channels, classes: common.Net(body, 3, classes))
    args = parsed("fedsr", "--precision", "bf16", "--device", "cpu")
    net = fedsr.build(args, 1, 3)
    assert_close(net.r(tensor([2]))[1], torch.full((1, 3), 1.3132617))
    net.last.bias.data[3:] = tensor([-1e4, -120.0, 30.0])
    x, y = torch.rand(8, 1, 2, 2), torch.arange(8) % 3
    of_fedcir = fedcir.GaussianNet(common.Net(nn.Flatten(), 4, 3), 0)
    of_fedcir.last = net.last
    for encoder, given in ((of_fedcir, net.body(x)), (net, x)):
        with common.autocast(args):
            mu, sigma = encoder.encode(given)
        assert mu.dtype == sigma.dtype == torch.float32
        assert (sigma > 0).all()
        assert (sigma[:, 0] < 2e-6).all()
    fedsr.cmi(mu, sigma, y, net.r).backward()
    for p in (*net.last.parameters(), net.r.mu, net.r.raw):
        assert torch.isfinite(p.grad).all()
