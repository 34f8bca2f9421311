"""Clients with label skew, by a Dirichlet distribution, and clients across domains: the heterogeneous
partition of the ICLR 2024 benchmark of federated domain generalization (Bai, Bagchi, Inouye; arXiv
2307.04942), src/splitter.py, NonIIDSplitter, of inouye-lab/FedDG_Benchmark @ da58f76.

Its lambda, `--iid` in its code, is 1 - mix. What rounding leaves of a domain goes there to the first clients;
here to those with the largest fractions, so that with a mix of 1 nobody gets an image of a foreign domain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from plumbing.run.seeding import seed_all

import numpy as np
import torch
from torch import Tensor

DRAWS = 1000  # of label skew, until every client has enough; then the run ends and says who has not


def client_shares(sizes: list[int], clients: int, mix: float) -> list[list[float]]:
    """Each client's share of each domain [C][D]: mix times what it has by domain, and 1/C of the rest."""
    return [[mix * share + (1 - mix) / clients for share in own] for own in by_domain(sizes, clients)]


def by_domain(sizes: list[int], clients: int) -> list[list[float]]:
    """The shares [C][D] with a mix of 1. Every client has one domain, of which the large ones have more
    clients; with fewer clients than domains each has whole domains."""
    D = len(sizes)
    if clients < D:
        shares, images = [[0.0] * D for _ in range(clients)], [0] * clients
        for d in sorted(range(D), key=lambda d: -sizes[d]):
            k = images.index(min(images))
            shares[k][d], images[k] = 1.0, images[k] + sizes[d]
        return shares
    of_domain = [1] * D  # how many clients have it
    while sum(of_domain) < clients:
        ratios = [size / count for size, count in zip(sizes, of_domain)]
        of_domain[ratios.index(max(ratios))] += 1
    shares = []
    for d, count in enumerate(of_domain):
        shares += [[1 / count if e == d else 0.0 for e in range(D)] for _ in range(count)]
    return shares


def dealt(n: int, shares: list[float], images: list[int]) -> list[int]:
    """How many of n images each client gets by its share; `images` is what they have, by which ties go."""
    exact = [n * share for share in shares]
    counts = [int(x + 1e-9) for x in exact]
    fractions = [round(x - count, 9) for x, count in zip(exact, counts)]
    order = sorted(range(len(shares)), key=lambda k: (-fractions[k], images[k]))
    for k in order[:n - sum(counts)]:
        counts[k] += 1
    return counts


class ConcatImages:
    """The images of several domains by rows that go through all of them. Nothing is copied: they may be
    larger than the memory."""

    def __init__(self, images: list[Tensor]):
        self.images, self.device = images, images[0].device
        sizes = torch.tensor([len(of_domain) for of_domain in images])
        self.ends = sizes.cumsum(0)
        self.starts = self.ends - sizes

    def __getitem__(self, rows: Tensor) -> Tensor:
        """[n, C, H, W], channels last as they are stored, where the first domain is."""
        rows, first = rows.cpu(), self.images[0]
        layout = torch.channels_last if first.dim() == 4 else torch.contiguous_format
        pixels = torch.empty((len(rows), *first.shape[1:]), dtype=first.dtype, device=self.device,
                             memory_format=layout)
        domains = torch.bucketize(rows, self.ends, right=True)
        for d in domains.unique().tolist():
            at = (domains == d).nonzero()[:, 0]
            there = self.images[d][(rows[at] - self.starts[d]).to(self.images[d].device)]
            pixels[at.to(self.device)] = there.to(self.device)
        return pixels


def skewed(order: Tensor, labels: Tensor, classes: int, clients: int, beta: float, key: tuple,
           enough: Callable[[Tensor], bool]) -> list[Tensor]:
    """The shuffled rows `order` of a domain with `labels` [N], of each class by shares from Dirichlet(beta).

    Shares that leave a client too little, by `enough`, are drawn again: with beta 0.1 a client of ten may
    have next to none. `key` is (seed, domain).
    """
    seed, domain = key
    rng = np.random.default_rng(seed_all(seed, "dirichlet", domain).initial_seed())
    for _ in range(DRAWS):
        piles = draw(order, labels, classes, clients, beta, rng)
        if all(enough(pile) for pile in piles):
            break
    generator = seed_all(seed, "dirichlet order", domain)
    return [pile[torch.randperm(len(pile), generator=generator)] for pile in piles]


def draw(order: Tensor, labels: Tensor, classes: int, clients: int, beta: float, rng) -> list[Tensor]:
    """One draw: of each class the clients' shares of its rows."""
    piles = [[] for _ in range(clients)]
    for c in range(classes):
        rows = order[labels[order] == c]
        up_to = np.cumsum(rng.dirichlet([beta] * clients))  # the share of the first m clients
        ends = np.floor(up_to * len(rows) + 1e-9).astype(int)[:-1]
        for pile, rows_of_client in zip(piles, np.split(rows.numpy(), ends)):
            pile.append(torch.from_numpy(rows_of_client))
    return [torch.cat(pile) for pile in piles]


def pool(clients: list) -> None:
    """Give the first client the training images of all, in the main memory; the others keep none."""
    images = torch.cat([c.train.images[c.train.index].cpu() for c in clients])
    labels = torch.cat([c.train.labels.cpu() for c in clients])
    first = clients[0].train
    for c in clients:
        c.train = dataclasses.replace(c.train, index=c.train.index[:0], labels=c.train.labels[:0])
    index = torch.arange(len(labels))
    clients[0].train = dataclasses.replace(first, images=images, index=index, labels=labels)
