"""FedOpt: the moments by hand, rounds of each variant in float64, and torch's own SGD as FedAvgM."""

import fedavg
from baselines import fedopt
from tests.plain_torch import in_double, is_trained
from tests.three_clients import ROUNDS, Beside, assert_near, mean, shares_of

import pytest
import torch
from torch import tensor
from torch.testing import assert_close


def test_alg2_moments_by_hand():
    """Delta = (2, -1, 0.5) after m = (1, 1, 1) and v = (1, 4, 0.25), with beta1 0.9 and beta2 0.75. Yogi's v
    grows by a quarter of Delta^2 where that is larger than v, falls where it is smaller, and stays where both
    are equal."""
    delta, v = tensor([2.0, -1.0, 0.5]), tensor([1.0, 4.0, 0.25])
    assert_close(fedopt.first_moment(torch.ones(3), delta, 0.9), tensor([1.1, 0.8, 0.95]))
    expected = {"fedadagrad": [5.0, 5.0, 0.5], "fedyogi": [2.0, 3.75, 0.25], "fedadam": [1.75, 3.25, 0.25]}
    for variant, values in expected.items():
        assert_close(fedopt.second_moment(v, delta, variant, 0.75), tensor(values))


def step_by_hand(variant, x, m, v, delta):
    """A tensor's x, m, v after a round, in float64: eta 0.2, beta1 0.6, beta2 0.8, tau 0.05."""
    if variant == "fedavgm":
        m = 0.6 * m + delta
        return x + 0.2 * m, m, v
    m = 0.6 * m + 0.4 * delta
    if variant == "fedadagrad":
        v = v + delta ** 2
    elif variant == "fedadam":
        v = 0.8 * v + 0.2 * delta ** 2
    else:
        v = v - 0.2 * delta ** 2 * torch.sign(v - delta ** 2)
    return x + 0.2 * m / (v.sqrt() + 0.05), m, v


@pytest.mark.parametrize("average", ["samples", "uniform"])
@pytest.mark.parametrize("variant", ["fedavgm", "fedadagrad", "fedyogi", "fedadam"])
def test_rounds_by_hand(variant, average):
    """Every parameter of the server over three rounds; BN's statistics are averaged."""
    flags = ["--variant", variant, "--average", average, "--server-lr", 0.2, "--beta1", 0.6, "--beta2", 0.8,
             "--tau", 0.05]
    of = Beside(fedopt, *flags)
    w = in_double(of.server.w)
    m = {name: torch.zeros_like(x) for name, x in w.items() if is_trained(name)}
    v = {name: zeros + 0.05 ** 2 for name, zeros in m.items()}
    for t, chosen in enumerate(ROUNDS):
        averaged = mean(of.play(t, chosen, [w] * 3), shares_of(chosen, average))
        for name in m:
            of_name = w[name], m[name], v[name], averaged[name] - w[name]
            averaged[name], m[name], v[name] = step_by_hand(variant, *of_name)
        w = in_double(of.server.w)
        # A change of 1e-6 in Delta is 1e-5 in x where v is tau^2.
        assert_close(w, averaged, atol=5e-5, rtol=1e-3)
        of.check(w)


def test_fedavgm_is_torchs_sgd_on_the_changes():
    """Of three rounds of given uploads: torch.optim.SGD with momentum, whose gradient is minus Delta."""
    server = Beside(fedopt, "--variant", "fedavgm", "--server-lr", 0.7).server
    names = list(server.m)
    x = [server.w[name].clone().requires_grad_() for name in names]
    opt = torch.optim.SGD(x, lr=0.7, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for t in range(3):
        up = {name: w + torch.randn(w.shape, generator=generator) if name in names else w
              for name, w in server.w.items()}
        for p, name in zip(x, names):
            p.grad = server.w[name] - up[name]
        opt.step()
        server.update({1: {"w": up, "n": tensor(7)}}, t)
        assert_near([server.w[name] for name in names], [p.detach() for p in x])


def test_fedavgm_without_momentum_is_fedavg():
    """But for rounding; its own step of length 1 is the default."""
    both = Beside(fedopt, "--variant", "fedavgm", "--beta1", 0), Beside(fedavg)
    for t, chosen in enumerate(ROUNDS):
        for of in both:
            start = in_double(of.server.w)
            of.play(t, chosen, [start] * 3)
        assert_near(both[0].server.w, both[1].server.w)
