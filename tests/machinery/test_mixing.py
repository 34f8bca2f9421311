"""Clients across domains: --clients and --domain-mix."""


import common
from plumbing.data.mixing import client_shares, dealt
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
@pytest.mark.parametrize("mix, flags", [(0, []), (0.3, []), (0.3, LODO), (1, LODO)])
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
            x, y = part.batch(torch.arange(len(part)))
            assert torch.equal(x, images[part.index] / 255) and torch.equal(y, labels[part.index])
            rows += rows_of(part)
    assert sorted(rows) == list(range(len(labels)))


@pytest.mark.parametrize("mix", [0, 1])
def test_the_two_ends(mix):
    """1: one domain each; 0: all domains in equal shares, of every part."""
    _, clients, _ = federated(parsed("fedavg", "--clients", "13", "--domain-mix", mix))
    counts = torch.stack([domains_of(client).bincount(minlength=6) for client in clients])
    if mix:
        assert ((counts > 0).sum(1) == 1).all() and counts.argmax(1).diff().min() >= 0
        return
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
    shares = np.array(client_shares(sizes, clients, mix))
    expected = shares_of_the_benchmark(sizes, clients, 1 - mix)
    assert np.allclose(shares * sizes, expected)
    for n, of_domain, share in zip(sizes, shares.T.tolist(), expected.T):
        counts = dealt(n, of_domain, [0] * clients)
        assert sum(counts) == n and np.abs(counts - share).max() < 1


def test_fewer_clients_than_domains_have_whole_ones():
    """The largest first, each to whom has least."""
    shares = client_shares([100, 400, 250, 200], 2, 1.0)
    assert shares == [[1, 1, 0, 0], [0, 0, 1, 1]]
    half = client_shares([100, 400, 250, 200], 2, 0.5)
    assert np.allclose(half, 0.5 * np.array(shares) + 0.25)


@pytest.mark.parametrize("method", ["fedgala", "baselines.centralized", "baselines.fedbn"])
def test_methods_train_such_clients(tmp_path, method):
    flags = ["--clients", "4", "--domain-mix", "0.4", *one_run(method)]
    if method == "baselines.fedbn":
        flags += ["--participation", "0.5", *LODO]
    result = run_here(method, tmp_path, *flags)
    assert result["args"]["clients"] == 4
