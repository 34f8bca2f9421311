"""Centralized training: rounds recomputed in plain torch, the pool, and who is tested with what."""

import common
from baselines import centralized
from tests.conftest import parsed, run_here, saved_in
from tests.plain_torch import in_double
from tests.three_clients import (FLAGS, assert_near, clipped_sgd, federation, one_round, three_clients,
                                 train_by_hand)

import torch


def made(*flags):
    """Arguments, and the server, three clients and their data, pooled."""
    args = parsed("baselines.centralized", *FLAGS, "--momentum", 0.8, *flags)
    return args, *federation(centralized, args)


def test_three_rounds_by_hand():
    """One training: the momentum goes on over the rounds, the learning rate falls with them."""
    args, server, clients, data = made()
    w, sgd = in_double(server.w), clipped_sgd(args)
    for t in range(3):
        w, means, norms = train_by_hand(w, args, data[0], t, 0, sgd=sgd)
        uploads = one_round(server, clients, t)
        assert uploads[0].keys() == {"w"} and uploads[1] == uploads[2] == {}
        assert_near(float(clients[0].log["loss"]), means["loss"])
        for client in clients:
            tested = common.state(client.model(server.download(client.k)))
            assert_near(in_double(tested), w)
    assert min(norms) < args.clip < max(norms)  # some steps are clipped, some are not
    assert not hasattr(clients[1], "log")


def test_the_pool():
    """Client 0 has the training images of all; validation and test images stay where they are."""
    args = parsed("baselines.centralized", *FLAGS)
    before, after = three_clients(args), three_clients(args)
    common.pool(after)
    parts = [c.train.batch(torch.arange(len(c.train))) for c in before]
    x, y = after[0].train.batch(torch.arange(61))
    assert torch.equal(x, torch.cat([part[0] for part in parts]))
    assert torch.equal(y, torch.cat([part[1] for part in parts]))
    assert [len(c.train) for c in after] == [61, 0, 0]
    assert all(torch.equal(old.test.index, new.test.index) for old, new in zip(before, after))


def test_a_run(tmp_path):
    """One client trains, on the 32 images of each of the six."""
    run_here("baselines.centralized", tmp_path)
    w = saved_in(tmp_path / "checkpoint.pt")["server"]["w"]
    assert w["body.1.num_batches_tracked"] == 2 * 6 * 32 / 16
