"""FedProx: the term by hand, two rounds in plain torch, and FedAvg as its limit."""

from baselines import fedprox
from tests.plain_torch import in_double
from tests.three_clients import ROUNDS, Beside, mean, shares_of

import pytest
from torch import tensor


def test_eq_2_by_hand():
    """(3^2 + 4^2) + 2^2; without the squares it would be 5 + 2, with the norm of both 5.39."""
    w_k, w = [tensor([3.0, 4.0]), tensor([[1.0]])], [tensor([0.0, 0.0]), tensor([[3.0]])]
    assert fedprox.proximal(w_k, w) == 29


@pytest.mark.parametrize("average", ["samples", "uniform"])
def test_rounds_by_hand(average):
    """Every parameter and statistic of uploads and server, with a term as large as the loss."""
    of = Beside(fedprox, "--momentum", 0.8, "--mu", 4, "--average", average)
    w = in_double(of.server.w)
    for t, chosen in enumerate(ROUNDS):

        def term(x, y, z, leaves, w=w):
            distance = sum((leaf - w[name]).square().sum() for name, leaf in leaves.items())
            return {"proximal": (1, 4 / 2 * distance)}

        hands = of.play(t, chosen, [w] * 3, more=term)
        w = mean(hands, shares_of(chosen, average))
        of.check(w)
    of.some_were_clipped()
