"""Ditto: rounds in plain torch, FedAvg and Local as its two halves, and that the personal model stays."""

import common
from baselines import ditto, local
from tests.conftest import parsed
from tests.plain_torch import in_double
from tests.three_clients import (CLOSE, FLAGS, ROUNDS, Beside, federation, mean, same, shares_of,
                                 train_by_hand)

import pytest
from torch.testing import assert_close

@pytest.mark.parametrize("average", ["samples", "uniform"])
def test_rounds_by_hand(average):
    """Both models, with a late client, two that skip a round, and a term as large as the loss."""
    of = Beside(ditto, "--momentum", 0.8, "--lambda", 4, "--average", average)
    w = in_double(of.server.w)
    v = [w, w, w]  # each client's personal model begins as the initial w
    for t, chosen in enumerate(ROUNDS):

        def term(x, y, z, leaves, w=w):
            return {"": (4 / 2, sum((leaf - w[name]).square().sum() for name, leaf in leaves.items()))}

        hands = of.play(t, chosen, [w] * 3, logs=("personal",))
        for k in chosen:
            v[k], means, norms = train_by_hand(v[k], of.args, of.data[k], t, k, term)
            assert_close(float(of.clients[k].log["personal"]), means["loss"], **CLOSE)
            assert max(norms) > of.args.clip  # the sum of both gradients is clipped
        w = mean(hands, shares_of(chosen, average))
        of.check(w, v)
    of.some_were_clipped()


def test_without_the_term_a_client_trains_alone():
    """With --lambda 0 v_k is Local's w_k, bit for bit, whatever the server sends; augmentation included."""
    flags = [*FLAGS, "--momentum", 0.8, "--augment", "crops"]
    args = parsed("baselines.ditto", *flags, "--lambda", 0)
    server, clients, _ = federation(ditto, args)
    _, alone, _ = federation(local, parsed("baselines.local", *flags, "--select", "last"))
    for t, chosen in enumerate(ROUNDS):
        uploads = {}
        for k in chosen:
            for client in (clients[k], alone[k]):
                common.seed_all(args.seed, "train", t, k)
                up = client.train(server.download(k), t)
                uploads[k] = up or uploads[k]
        server.update(uploads, t)
    for k in range(3):
        assert same(clients[k].v, alone[k].w)
        assert not same(clients[k].v, server.w)
