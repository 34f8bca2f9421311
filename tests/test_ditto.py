"""Ditto: rounds in plain torch, FedAvg and Local as its two halves, and that the personal model stays."""

import common
from baselines import ditto, local
from plumbing.runfolder import copied
from tests.conftest import metrics, parsed, run_here
from tests.plain_torch import in_double
from tests.three_clients import (
    CLOSE,
    FLAGS,
    ROUNDS,
    federation,
    mean,
    same,
    shares_of,
    train_by_hand,
)

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

NAME = "baselines.ditto"


def test_eq_2_by_hand():
    """(3^2 + 4^2) + 2^2; without the squares it would be 5 + 2."""
    v_k, w = [tensor([3.0, 4.0]), tensor([[1.0]])], [tensor([0.0, 0.0]), tensor([[3.0]])]
    assert ditto.proximal(v_k, w) == 29
    leaf = tensor([3.0, 4.0], requires_grad=True)
    gradient, = torch.autograd.grad(0.5 / 2 * ditto.proximal([leaf], [tensor([1.0, 1.0])]), leaf)
    assert_close(gradient, tensor([1.0, 1.5]))  # lambda (v_k - w)


@pytest.mark.parametrize("average", ["samples", "uniform"])
def test_rounds_by_hand(average):
    """Both models, with clients that skip a round and a term as large as the loss."""
    args = parsed(NAME, *FLAGS, "--momentum", 0.8, "--lambda", 4, "--average", average)
    server, clients, data = federation(ditto, args)
    w, v, norms = in_double(server.w), {}, []
    for t, chosen in enumerate(ROUNDS):
        uploads, hands = {}, []
        for k in chosen:

            def term(x, z, leaves, w=w):
                return 4 / 2 * sum((leaf - w[name]).square().sum() for name, leaf in leaves.items())

            uploads[k] = clients[k].train(copied(server.download(k)), t)
            hand, losses, of_w = train_by_hand(w, args, data[k], t, k)
            v[k], personal, of_v = train_by_hand(v.get(k, w), args, data[k], t, k, term)
            assert uploads[k].keys() == {"w", "n"} and uploads[k]["n"] == len(data[k].train)
            assert_close(in_double(uploads[k]["w"]), hand, **CLOSE)
            assert_close(float(clients[k].log["loss"]), sum(losses) / 3, **CLOSE)
            assert_close(float(clients[k].log["personal"]), sum(personal) / 3, **CLOSE)
            assert max(of_v) > args.clip  # the sum of both gradients is clipped
            hands.append(hand)
            norms += of_w
        server.update(uploads, t)
        w = mean(hands, shares_of(chosen, average))
        assert_close(in_double(server.w), w, **CLOSE)
        for k in range(3):
            tested = in_double(common.state(clients[k].model(server.download(k))))
            assert_close(tested, v[k], **CLOSE)
    assert min(norms) < args.clip < max(norms)  # some steps are clipped, some are not


def test_its_global_model_is_fedavg_bit_for_bit(tmp_path):
    """Also with augmentation, which draws random numbers; the bytes and losses are FedAvg's."""
    flags = ["--protocol", "lodo", "--target", "d30", "--participation", "0.5", "--augment", "crops"]
    run_here(NAME, tmp_path / "ditto", *flags)
    run_here("fedavg", tmp_path / "avg", *flags)
    w = {}
    for name in ("ditto", "avg"):
        w[name] = torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["server"]["w"]
    assert same(w["ditto"], w["avg"])
    for ours, theirs in zip(metrics(tmp_path / "ditto"), metrics(tmp_path / "avg")):
        assert ours["target"] == theirs["target"]  # an unseen client is tested with w
        for client, log in ours["clients"].items():
            assert log["personal"] > 0
            for name, value in theirs["clients"][client].items():
                assert log[name] == value


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


def test_a_large_lambda_keeps_the_personal_model_at_the_global_one():
    """In the first round, with a step of at most 1/lambda: v_k stays nearer to w than w_k does."""
    args = parsed(NAME, *FLAGS, "--lambda", 15)
    server, clients, _ = federation(ditto, args)
    w_k = clients[0].train(server.download(0), 0)["w"]
    names = [name for name, _ in clients[0].net.named_parameters()]

    def distance(a):
        return float(ditto.proximal([a[name] for name in names], [server.w[name] for name in names]))

    assert distance(clients[0].v) < distance(w_k)


def test_a_client_without_a_personal_model_is_tested_with_w():
    server, clients, _ = federation(ditto, parsed(NAME, *FLAGS))
    tested = common.state(clients[0].model(server.download(0)))
    assert same(tested, server.w)


def test_its_state_is_what_it_keeps():
    args = parsed(NAME, *FLAGS)
    server, clients, data = federation(ditto, args)
    clients[0].train(server.download(0), 0)
    other = ditto.Client(args, clients[0].net, 0, data[0])
    common.restore(other, copied(common.kept(clients[0])), "cpu")
    for client in (clients[0], other):
        client.train(server.download(0), 1)
    assert same(clients[0].v, other.v)


def test_the_settings_of_fdse():
    """lambda and lr of its code (config/*/ditto.yml); the rest is FedAvg's."""
    for dataset, expected in (("officecaltech", (0.01, 0.1)), ("pacs", (1e-4, 0.05)),
                              ("domainnet10", (0.01, 0.1))):
        args, theirs = parsed(NAME, "--dataset", dataset), parsed("fedavg", "--dataset", dataset)
        assert (args.lambda_, args.lr) == expected
        for name in ("backbone", "rounds", "epochs", "batch_size", "lr_decay", "clip", "average"):
            assert getattr(args, name) == getattr(theirs, name)
