"""Local: whose model is tested. Its training is FedAvg's of one client (test_baselines.py)."""

import dataclasses

import common
from baselines import local
from plumbing.run.runfolder import copied
from tests.conftest import parsed
from tests.three_clients import FLAGS, federation, one_round, same

import torch
from torch.testing import assert_close


def made(*flags):
    """Arguments, and the server, three clients and their data."""
    args = parsed("baselines.local", *FLAGS, "--momentum", 0.8, *flags)
    return args, *federation(local, args)


def test_a_client_is_tested_with_its_best_model(monkeypatch):
    """Of 3, 5, 4 and 5 right validation images the best is the first 5. It trains on from its last model."""
    trained = []
    for select, rounds in (("own", [1, 2, 2, 2]), ("last", [1, 2, 3, 4])):
        _, _, clients, _ = made("--select", select)
        script, after = iter([3, 5, 4, 5]), {}
        monkeypatch.setattr(local, "correct", lambda *_, script=script: next(script))
        for t, best in enumerate(rounds):
            clients[1].train({}, t)
            after[t + 1] = copied(clients[1].w)
            assert same(common.state(clients[1].model({})), after[best])
        trained.append(after)
    assert all(same(trained[0][t], trained[1][t]) for t in after)
    assert not same(after[1], after[2])


def test_a_client_without_a_best_model_is_tested_with_its_current_one(monkeypatch):
    """It trains in the first and third round; the evaluations are after the second and fourth."""
    _, _, clients, _ = made("--eval-every", 2)
    monkeypatch.setattr(local, "correct", lambda *_: 3)
    for t in (0, 2):
        clients[1].train({}, t)
        assert same(common.state(clients[1].model({})), clients[1].w)


def test_the_unseen_client_has_all_models():
    args, server, clients, data = made("--protocol", "lodo", "--target", "d75")
    unseen = local.Client(args, clients[0].net, 3, dataclasses.replace(data[0], unseen=True))
    assert unseen.model(server.download(3)).models == [unseen.w]  # no upload has arrived
    for t, chosen in enumerate(((0, 1, 2), (1,))):
        uploads = one_round(server, clients, t, chosen)
        assert all(up.keys() == {"w"} for up in uploads.values())
    model = unseen.model(server.download(3)).eval()
    x = torch.rand(5, 1, 8, 8)
    found, want = model(x), 0
    for client in clients:
        want = want + client.model({}).eval()(x).softmax(1) / 3
    assert_close(found, want)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # which keeps its casts of weights
        error = model(x) - want
    assert error.abs().max() < 0.003
    assert server.download(0) == {}
