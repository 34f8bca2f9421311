"""FedDG-GA: rounds by hand in plain torch, the change of the weights by hand, and where it is FedAvg."""

from baselines import feddg_ga
from tests.plain_torch import body_in_evaluation, in_double, linear, log_probability
from tests.three_clients import Beside, assert_near, mean

import pytest
import torch
from torch import tensor
from torch.testing import assert_close


def error_by_hand(w, data, what):
    """On the validation images of a client."""
    x, y = data.val.batch(torch.arange(len(data.val)))
    logits = linear(body_in_evaluation(w, x.double()), w, "head")
    if what == "loss":
        return float(-log_probability(logits, y).mean())
    return sum(logits[i].argmax() != y[i] for i in range(len(y))).item() / len(y)


def weights_by_hand(a, gap, d, t, rounds, rule):
    """The weights of clients {k: a_k}, changed by the gaps {k: G_k} of round t of some of them."""
    step, middle = d * (1 - t / rounds), sum(gap.values()) / len(gap)
    if rule == "code":
        step, middle = d * (1 - (t - 1) / rounds), 0
    largest = max(abs(G - middle) for G in gap.values())
    if largest < 1e-12:
        return a
    raised = {k: max(0, a[k] + step * (gap[k] - middle) / largest) for k in gap}
    before, after = sum(a[k] for k in gap), sum(raised.values())
    return a | {k: v / after * before for k, v in raised.items()}


@pytest.mark.parametrize("gap,rule,step,d", [("loss", "paper", "whole", 0.4),
                                             ("error", "code", "share", 0.5)])
def test_rounds_by_hand(gap, rule, step, d):
    """Uploads, the server's weights and model over four rounds. Client 0 misses the third one, client 1 the
    last one, so that two weights change in the third and none in the last. To validate with, each client has
    what another one trains on."""
    of = Beside(feddg_ga, "--momentum", 0.8, "--rounds", 5, "--gap", gap, "--rule", rule,
                "--step-size", d, "--step", step)
    d = d / 3 if step == "share" else d
    parts = [client.train for client in of.data]
    for k in range(3):
        of.data[k].val = parts[k - 1]
    w, a, trained, history = in_double(of.server.w), {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}, {}, []
    for t, chosen in enumerate(((0, 1, 2), (0, 1, 2), (1, 2), (0, 2))):
        uploads, hands, received = {}, [], {}
        for k in chosen:
            errors = ("received", "trained")
            uploads[k], hand = of.train(t, k, w, also=errors, logs=errors)
            received[k] = error_by_hand(w, of.data[k], gap)
            assert_near(float(uploads[k]["received"]), received[k])
            assert_near(float(uploads[k]["trained"]), error_by_hand(hand, of.data[k], gap))
            hands.append(hand)
        differences = {k: received[k] - trained[k] for k in chosen if k in trained}
        if differences:
            a = weights_by_hand(a, differences, d, t - 1, 5, rule)
        trained = {k: error_by_hand(hand, of.data[k], gap) for k, hand in zip(chosen, hands)}
        total = sum(a[k] for k in chosen)
        w = mean(hands, [a[k] / total for k in chosen])
        history.append(list(a.values()))
        of.server.update(uploads, t)
        assert_near(of.server.a.tolist(), history[-1])
        of.check(w)
    of.some_were_clipped()
    assert history[0] != history[1] != history[2] == history[3]  # a client's gap alone is its own mean
    assert history[1][0] == history[2][0]
    assert (min(history[2]) == 0) == (rule == "paper")  # one weight is clipped


def test_weights_at_the_edges():
    """Gaps that are the same but for rounding change nothing; weights that are all 0 are all the same."""
    a = tensor([0.2, 0.3, 0.5]).double()
    close = tensor([0.1, 0.1, 0.1 + 3e-17], dtype=torch.float64)
    assert torch.equal(feddg_ga.adjusted(a, close, 0.9, "paper"), a)
    falling = tensor([-1.0, -1.0]).double()
    assert_close(feddg_ga.adjusted(a[:2], falling, 9, "code"), tensor([0.25, 0.25]).double())
    assert feddg_ga.shares(tensor([0.0, 0.0])).tolist() == [0.5, 0.5]
    assert feddg_ga.gaps({1: tensor(5.0), 4: tensor(2.0)}, {4: tensor(3.0), 2: tensor(1.0)}) == {4: -1.0}
