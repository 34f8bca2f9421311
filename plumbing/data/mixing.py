"""Clients with label skew, by a Dirichlet distribution; and all clients' training images in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from plumbing.run.seeding import seed_all

import numpy as np
import torch
from torch import Tensor

DRAWS = 1000  # of label skew, until every client has enough; then the run ends and says who has not


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
