"""Clients across domains: --clients and --domain-mix."""

import dataclasses

import common
from plumbing.mixing import client_shares, dealt
from tests.conftest import one_run, parsed, run_here
from tests.machinery.test_common import LODO, federated

import numpy as np
import pytest
import torch


def rows_of(data: common.Data) -> list[int]:
    return data.index.tolist()


def domains_of(client: common.ClientData) -> torch.Tensor:
    """Of each training image its domain's number."""
    return torch.bucketize(client.train.index, client.train.images.ends, right=True)


@pytest.mark.parametrize("clients", [4, 6, 13])
@pytest.mark.parametrize("mix", [0, 0.3, 1])
@pytest.mark.parametrize("flags", [[], LODO])
def test_every_image_is_in_one_part_of_one_client(clients, mix, flags):
    """And its pixels and label are those of its domain."""
    args = parsed("fedavg", "--clients", clients, "--domain-mix", mix, *flags)
    domains, of_sources, targets = federated(args)
    sources = [d for d in domains if not flags or d.name != "d30"]
    assert [client.name for client in of_sources] == [f"client-{k}" for k in range(clients)]
    assert len(targets) == bool(flags)
    labels, rows = torch.cat([d.labels for d in sources]), []
    images = torch.cat([d.images for d in sources])
    for client in of_sources:
        for part in (client.train, client.val, client.test):
            assert torch.equal(part.labels, labels[part.index])
            rows += rows_of(part)
        x, y = client.train.batch(torch.tensor([0, 5, 2]))
        index = client.train.index[[0, 5, 2]]
        assert torch.equal(x, images[index] / 255) and torch.equal(y, labels[index])
    assert sorted(rows) == list(range(len(labels)))


def test_the_two_ends():
    """1: one domain each; 0: all domains in equal shares, of every part."""
    _, clients, _ = federated(parsed("fedavg", "--clients", "13", "--domain-mix", "1"))
    owned = [domains_of(client).unique().tolist() for client in clients]
    assert sorted(owned) == owned and [len(of_client) for of_client in owned] == [1] * 13
    _, clients, _ = federated(parsed("fedavg", "--clients", "13", "--domain-mix", "0"))
    counts = torch.stack([domains_of(client).bincount(minlength=6) for client in clients])
    assert (counts.amax(0) - counts.amin(0)).max() <= 1
    for part in ("train", "val", "test"):
        sizes = [len(getattr(client, part)) for client in clients]
        assert max(sizes) - min(sizes) <= 1


def shares_of_the_benchmark(sizes: list[int], clients: int, iid: float) -> np.ndarray:
    """The images [C, D], before rounding, by the formula of its NonIIDSplitter for D <= C."""
    n, main = np.array(sizes, float), np.ones(len(sizes), int)
    while main.sum() < clients:
        main[np.argmax(n / main)] += 1
    of_client = np.repeat(np.eye(len(sizes)), main, axis=0)
    return n * (of_client / main * (1 - iid) + iid / clients)


@pytest.mark.parametrize("mix", [0, 0.1, 0.5, 1])
def test_the_shares_are_the_benchmarks(mix):
    """Its lambda is 1 - mix; an image more or less where a share is no whole number."""
    sizes, clients = [2048, 2344, 1670, 3929], 11
    shares = client_shares(sizes, clients, mix)
    expected = shares_of_the_benchmark(sizes, clients, 1 - mix)
    assert np.allclose(np.array(shares) * sizes, expected)
    for d, n in enumerate(sizes):
        counts = dealt(n, [of_client[d] for of_client in shares], [0] * clients)
        assert sum(counts) == n and np.abs(np.array(counts) - expected[:, d]).max() < 1


def test_fewer_clients_than_domains_have_whole_ones():
    """The largest first, each to whom has least."""
    shares = client_shares([100, 400, 250, 200], 2, 1.0)
    assert shares == [[1, 1, 0, 0], [0, 0, 1, 1]]
    half = client_shares([100, 400, 250, 200], 2, 0.5)
    assert np.allclose(half, 0.5 * np.array(shares) + 0.25)


def test_the_seed_decides():
    args = parsed("fedavg", "--clients", "5", "--domain-mix", "0.5")
    _, clients, _ = federated(args)
    _, again, _ = federated(args)
    _, other, _ = federated(dataclasses.replace(args, seed=1))
    assert [rows_of(c.train) for c in clients] == [rows_of(c.train) for c in again]
    assert rows_of(clients[0].train) != rows_of(other[0].train)


@pytest.mark.parametrize("method", ["fedgala", "baselines.centralized", "baselines.fedbn"])
def test_methods_train_such_clients(tmp_path, method):
    flags = ["--clients", "4", "--domain-mix", "0.4", *one_run(method)]
    if method == "baselines.fedbn":
        flags += ["--participation", "0.5", *LODO]
    result = run_here(method, tmp_path, *flags)
    assert result["args"]["clients"] == 4
