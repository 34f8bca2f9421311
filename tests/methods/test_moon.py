"""MOON: rounds by hand in plain torch, its loss against the formula, and where it is FedAvg."""

from baselines import moon
from tests.plain_torch import body_in_evaluation, in_double
from tests.three_clients import ROUNDS, Beside, mean, shares_of

import pytest


def l_con_by_hand(z, z_glob, z_prev, tau):
    """Eq. (3) as it is written."""
    def exp_sim(other):
        return ((z * other).sum(1) / z.norm(dim=1) / other.norm(dim=1) / tau).exp()
    return -(exp_sim(z_glob) / (exp_sim(z_glob) + exp_sim(z_prev))).log().mean()


@pytest.mark.parametrize("evaluated", ["aggregated", "trained"])
def test_rounds_by_hand(evaluated):
    """Uploads, the server's model and what each client is tested with, over three rounds: each client is
    compared with its own model of the last round in which it trained, a late one with the initial w."""
    of = Beside(moon, "--momentum", 0.8, "--mu", 3, "--tau", 0.2, "--evaluated", evaluated)
    w = in_double(of.server.w)
    previous = [w, w, w]  # a late client is compared with the initial w
    for t, chosen in enumerate(ROUNDS):
        uploads, hands = {}, []
        for k in chosen:

            def more(x, y, z, leaves, k=k, t=t, w=w):
                if t == 0:
                    return {}
                z_glob, z_prev = body_in_evaluation(w, x), body_in_evaluation(previous[k], x)
                return {"contrastive": (3, l_con_by_hand(z, z_glob, z_prev, 0.2))}

            uploads[k], hand = of.train(t, k, w, more)
            hands.append(hand)
        for k, hand in zip(chosen, hands):
            previous[k] = hand
        of.server.update(uploads, t)
        w = mean(hands, shares_of(chosen))
        of.check(w, previous if evaluated == "trained" else None)
    of.some_were_clipped()
