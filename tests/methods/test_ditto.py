"""Ditto without its term. Its rounds are in test_authors.py."""

import common
from baselines import ditto, local
from tests.conftest import parsed
from tests.three_clients import (FLAGS, ROUNDS, federation, same)


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
