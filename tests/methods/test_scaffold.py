"""SCAFFOLD: rounds by hand in plain torch, what c_k and c are, and the settings in which it is FedAvg."""

from baselines import scaffold
from tests.plain_torch import ClippedSGD, in_double, is_trained
from tests.three_clients import ROUNDS, Beside, clipped_sgd, mean, shares_of

import torch
from torch.testing import assert_close


class Corrected(ClippedSGD):
    """Steps along g - c_k + c, of gradients that are clipped and have their weight decay; `total` is the sum
    of these gradients."""

    def direction(self, name, g):
        self.total[name] = self.total.get(name, 0) + g
        return g - self.c_k[name] + self.c[name]


def test_rounds_by_hand():
    """Uploads, c_k, c and the model over three rounds. Client 1 misses the last one and client 0 the second:
    their c_k stay as they were, and c is the mean over all clients nevertheless."""
    of = Beside(scaffold, "--eta-g", 0.7)
    w = in_double(of.server.w)
    c = {name: torch.zeros_like(v) for name, v in w.items() if is_trained(name)}
    of_clients = [c, c, c]
    for t, chosen in enumerate(ROUNDS):
        uploads, hands = {}, []
        for k in chosen:
            sgd = clipped_sgd(of.args, Corrected)
            sgd.c_k, sgd.c, sgd.total = of_clients[k], c, {}
            uploads[k], hand = of.train(t, k, w, also=("change",), sgd=sgd)
            c_k = {name: g / 3 for name, g in sgd.total.items()}  # the mean over the steps
            change = {name: c_k[name] - of_clients[k][name] for name in c}
            assert_close(in_double(uploads[k]["change"]), change, atol=1e-4, rtol=1e-3)
            assert_close(in_double(of.clients[k].c_k), c_k, atol=1e-4, rtol=1e-3)
            of_clients[k] = c_k
            hands.append(hand)
        of.server.update(uploads, t)
        averaged = mean(hands, shares_of(chosen, "uniform"))
        for name in c:
            averaged[name] = w[name] + 0.7 * (averaged[name] - w[name])
        w = averaged
        c = mean(of_clients, [1 / 3] * 3)
        assert_close(in_double(of.server.c), c, atol=1e-4, rtol=1e-3)
        of.check(w)
    of.some_were_clipped()
