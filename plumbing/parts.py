"""Which rows of a domain each client has: to train, to validate and to test."""

from __future__ import annotations

from collections.abc import Callable

from plumbing import linear
from plumbing.catalog import is_custom
from plumbing.errors import UserError
from plumbing.mixing import client_shares, dealt, skewed
from plumbing.settings import Args, flag_of, ratios, shares
from plumbing.splits import SPLIT, Rows, cut, parts_by_class

import torch
from tabulate import tabulate
from torch import Tensor

Parting = Callable[[Tensor], Rows]  # shuffled rows -> train, validation, test: `parts_of` of a domain
SHOWN = 12  # classes, and clients, that a table of images has at most


def shares_of(settings: Args, is_target: bool) -> tuple[float, float, float]:
    """The shares of train, validation and test. With `linear` all images of a source are for training: there
    are no labels to validate with."""
    return (1, 0, 0) if settings.protocol == "linear" and not is_target else shares(settings.split)


def parts_of(given: Tensor | None, labels: Tensor | None, of_split: tuple[float, float, float],
             rows: Tensor) -> Rows:
    """Shuffled rows of a domain -> train, validation, test: by what split.csv gives; by class, where `labels`
    are those of one's own data; the papers' data sets by `cut`."""
    if given is not None:
        part_of = given[rows, 0]
    elif labels is not None:
        part_of = parts_by_class(rows, labels, torch.arange(len(labels)), of_split, {})
    else:
        return cut(rows, of_split)
    return tuple(rows[part_of == part] for part in range(3))


def fewest(settings: Args) -> tuple[int, int, int]:
    """The images that a client needs in each part: two to train, because of BN."""
    return (2, 0, 0) if settings.protocol == "linear" else (2, 1, 1)


def target_rows(settings: Args, name: str, labels: Tensor, in_parts: Parting, order: Tensor) -> Rows:
    """The rows of a target. Its train and val are empty; with `--target-part test` or `heldout` they are what
    nobody uses."""
    train, val, test = order[:0], order[:0], order
    if settings.target_part != "all":
        train, val, test = in_parts(order)
    if settings.target_part == "heldout":
        val, test = val[:0], torch.cat([val, test])
    if len(test) < 2:
        raise UserError(f"the target {name} has {len(test)} images to test; it needs 2: raise --limit or the "
                        "share in --split")
    if settings.protocol == "linear":
        for ratio in ratios(settings.label_ratio):
            linear.stratified(labels[test], ratio, name)  # stops if it leaves too few
    return train, val, test


def source_rows(settings: Args, name: str, labels: Tensor, in_parts: Parting, order: Tensor, classes: int,
                seed_name: str) -> dict[str, Rows]:
    """{client: its rows} of the clients of a source domain."""
    least, M = fewest(settings), settings.clients_per_domain
    if M > len(order):
        raise UserError(f"--clients-per-domain is {M}, more than the {len(order)} images of domain {name}: "
                        "give fewer")

    def enough(rows: Tensor) -> bool:
        return all(len(part) >= count for part, count in zip(in_parts(rows), least))

    piles = [order[m::M] for m in range(M)]
    if settings.dirichlet:
        key = (settings.seed, seed_name)
        piles = skewed(order, labels, classes, M, settings.dirichlet, key, enough)
    advice = []
    for flag, better in (("clients_per_domain", "fewer"), ("dirichlet", "a larger"), ("limit", "a larger")):
        if getattr(settings, flag) != getattr(Args, flag):
            advice.append(f"{better} {flag_of(flag)}")
    advice.append("other shares in --split")
    if is_custom(settings.dataset):
        advice.append(f"another {SPLIT}")
    found = {}
    for m, rows in enumerate(piles):
        client = name if M == 1 else f"{name}-{m}"
        found[client] = in_parts(rows)
        check_part_sizes(client, found[client], least, f"give {', or '.join(advice)}")
    return found


def mixed_rows(settings: Args, domains: list[tuple[Parting, Tensor]],
               starts: list[int]) -> dict[str, Rows]:
    """{client: its rows} of the clients of --clients, each with images of one source domain or of several, by
    --domain-mix. `domains` has what parts rows, and the shuffled rows, which go on from `starts`. The parts
    of each domain are dealt out one by one: versions of an image stay in the same part."""
    least, C = fewest(settings), settings.clients
    of_domains = [in_parts(order) for in_parts, order in domains]
    sizes = [sum(map(len, of_part)) for of_part in zip(*of_domains)]
    if any(size < C * count for size, count in zip(sizes, least)):
        has, needs = ("/".join(map(str, counts)) for counts in (sizes, least))
        raise UserError(f"--clients is {C}, too many for {has} images to train, validate and test: each "
                        f"needs at least {needs}; give fewer")
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
        check_part_sizes(client, found[client], least, "fewer --clients or a larger --limit")
    return found


def check_part_sizes(client: str, parts: Rows, least: tuple[int, int, int], advice: str) -> None:
    """Stop if a client has too few images in a part."""
    has, needs = ("/".join(map(str, counts)) for counts in (map(len, parts), least))
    if any(len(part) < count for part, count in zip(parts, least)):
        raise UserError(f"client {client} has {has} images to train, validate and test; it needs at least "
                        f"{needs}: {advice}")


def table_of_images(of_clients: list, classes: tuple[str, ...]) -> str:
    """The images of each client (a ClientData) and class to train, validate and test, as a table."""
    rows, total = [], "all" if len(classes) <= SHOWN else "..., all"
    for client in of_clients[:SHOWN]:
        counts = []
        for part in (client.train, client.val, client.test):
            counts.append(part.labels.bincount(minlength=len(classes)).tolist())
        cells = ["/".join(map(str, of_class)) for of_class in zip(*counts)]
        rows.append([client.name, *cells[:SHOWN], "/".join(map(str, map(sum, counts)))])
    heads = ["images to train/validate/test", *classes[:SHOWN], total]
    if len(of_clients) > SHOWN:
        rows.append([f"... {len(of_clients) - SHOWN} more"])
    return tabulate(rows, heads, "plain", disable_numparse=True)
