"""Ditto: rounds in plain torch, FedAvg and Local as its two halves, and that the personal model stays."""

import common
from baselines import ditto, local
from plumbing.runfolder import copied
from tests.conftest import parsed
from tests.plain_torch import in_double
from tests.three_clients import (CLOSE, FLAGS, ROUNDS, assert_tested, assert_trained, federation, mean, same,
                                 shares_of, train_by_hand)

import pytest
from torch.testing import assert_close

NAME = "baselines.ditto"


@pytest.mark.parametrize("average", ["samples", "uniform"])
def test_rounds_by_hand(average):
    """Both models, with a late client, two that skip a round, and a term as large as the loss."""
    args = parsed(NAME, *FLAGS, "--momentum", 0.8, "--lambda", 4, "--average", average)
    server, clients, data = federation(ditto, args)
    w = in_double(server.w)
    v, norms = [w, w, w], []  # each client's personal model begins as the initial w
    for t, chosen in enumerate(ROUNDS):
        uploads, hands = {}, []
        for k in chosen:

            def term(x, z, leaves, w=w):
                return 4 / 2 * sum((leaf - w[name]).square().sum() for name, leaf in leaves.items())

            uploads[k] = clients[k].train(copied(server.download(k)), t)
            hand, losses, of_w = train_by_hand(w, args, data[k], t, k)
            v[k], personal, of_v = train_by_hand(v[k], args, data[k], t, k, term)
            assert_trained(clients[k], uploads[k], hand, losses, "n")
            assert_close(float(clients[k].log["personal"]), sum(personal) / 3, **CLOSE)
            assert max(of_v) > args.clip  # the sum of both gradients is clipped
            hands.append(hand)
            norms += of_w
        server.update(uploads, t)
        w = mean(hands, shares_of(chosen, average))
        assert_close(in_double(server.w), w, **CLOSE)
        assert_tested(server, clients, v)
    assert min(norms) < args.clip < max(norms)  # some steps are clipped, some are not


def test_without_the_term_a_client_trains_alone():
    """With --lambda 0 v_k is Local's w_k, bit for bit, whatever the server sends; augmentation included."""
    flags = [*FLAGS, "--momentum", 0.8, "--augment", "crops"]
    args = parsed(NAME, *flags, "--lambda", 0)
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
