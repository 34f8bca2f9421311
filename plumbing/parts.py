"""Which rows of a domain each client has: to train, to validate and to test."""

from __future__ import annotations

from plumbing import linear
from plumbing.errors import Stop
from plumbing.mixing import client_shares, dealt, skewed
from plumbing.settings import Args, ratios, shares
from plumbing.splits import SPLIT, Rows, cut

import torch
from torch import Tensor


def shares_of(settings: Args, is_target: bool) -> tuple[float, float, float]:
    """The shares of train, validation and test. With `linear` all images of a source are for training: there
    are no labels to validate with."""
    return (1, 0, 0) if settings.protocol == "linear" and not is_target else shares(settings.split)


def parts_of(given: Tensor | None, rows: Tensor, of_split: tuple[float, float, float]) -> Rows:
    """Shuffled rows of a domain -> train, validation, test: by `cut`, or by what split.csv gives."""
    if given is None:
        return cut(rows, of_split)
    return tuple(rows[given[rows, 0] == part] for part in range(3))


def fewest(settings: Args) -> tuple[int, int, int]:
    """The images that a client needs in each part: two to train, because of BN."""
    return (2, 0, 0) if settings.protocol == "linear" else (2, 1, 1)


def target_rows(settings: Args, name: str, labels: Tensor, given: Tensor | None, order: Tensor) -> Rows:
    """The rows of a target. Its train and val are empty; with `--target-part test` or `heldout` they are what
    nobody uses."""
    train, val, test = order[:0], order[:0], order
    if settings.target_part != "all":
        train, val, test = parts_of(given, order, shares(settings.split))
    if settings.target_part == "heldout":
        val, test = val[:0], torch.cat([val, test])
    if len(test) < 2:
        raise Stop(f"the target {name} has {len(test)} images to test; it needs 2: raise --limit or the "
                   "share in --split")
    if settings.protocol == "linear":
        for ratio in ratios(settings.label_ratio):
            linear.stratified(labels[test], ratio, name)  # stops if it leaves too few
    return train, val, test


def source_rows(settings: Args, name: str, labels: Tensor, given: Tensor | None, order: Tensor, classes: int,
                seed_name: str) -> dict[str, Rows]:
    """{client: its rows} of the clients of a source domain."""
    of_split, least, M = shares_of(settings, False), fewest(settings), settings.clients_per_domain
    if M > len(order):
        raise Stop(f"--clients-per-domain is {M}, more than the {len(order)} images of domain {name}: give "
                   "fewer")

    def enough(rows: Tensor) -> bool:
        return all(len(part) >= count for part, count in zip(parts_of(given, rows, of_split), least))

    piles = [order[m::M] for m in range(M)]
    if settings.dirichlet:
        key = (settings.seed, seed_name)
        piles = skewed(order, labels, classes, M, settings.dirichlet, key, enough)
    advice = "fewer --clients-per-domain, a larger --dirichlet or --limit"
    if given is not None:
        advice += f", or another {SPLIT}"
    found = {}
    for m, rows in enumerate(piles):
        client = name if M == 1 else f"{name}-{m}"
        found[client] = parts_of(given, rows, of_split)
        refuse_few(client, found[client], least, advice)
    return found


def mixed_rows(settings: Args, domains: list[tuple[Tensor | None, Tensor]],
               starts: list[int]) -> dict[str, Rows]:
    """{client: its rows} of the clients of --clients, each with images of one source domain or of several, by
    --domain-mix. `domains` has what split.csv gives, and the shuffled rows, which go on from `starts`. The
    parts of each domain are dealt out one by one: versions of an image stay in the same part."""
    of_split, least, C = shares_of(settings, False), fewest(settings), settings.clients
    of_domains = [parts_of(given, order, of_split) for given, order in domains]
    sizes = [sum(map(len, of_part)) for of_part in zip(*of_domains)]
    if any(size < C * count for size, count in zip(sizes, least)):
        has, needs = ("/".join(map(str, counts)) for counts in (sizes, least))
        raise Stop(f"--clients is {C}, too many for {has} images to train, validate and test: each needs at "
                   f"least {needs}; give fewer")
    of_clients = client_shares([len(order) for _, order in domains], C, settings.domain_mix)
    pieces = [([], [], []) for _ in range(C)]  # of each client and part: rows of each domain
    totals = [[0] * C for _ in least]
    for j, parts in enumerate(of_domains):
        for p, of_part in enumerate(parts):
            counts = dealt(len(of_part), [of_client[j] for of_client in of_clients], totals[p])
            totals[p] = [total + count for total, count in zip(totals[p], counts)]
            for k, piece in enumerate(of_part.split(counts)):
                pieces[k][p].append(piece + starts[j])
    found = {}
    for k, of_parts in enumerate(pieces):
        client = f"client-{k}"
        found[client] = tuple(torch.cat(rows) for rows in of_parts)
        refuse_few(client, found[client], least, "fewer --clients or a larger --limit")
    return found


def refuse_few(client: str, parts: Rows, least: tuple[int, int, int], advice: str) -> None:
    """Stop if a client has too few images in a part."""
    has, needs = ("/".join(map(str, counts)) for counts in (map(len, parts), least))
    if any(len(part) < count for part, count in zip(parts, least)):
        raise Stop(f"client {client} has {has} images to train, validate and test; it needs at least "
                   f"{needs}: {advice}")
