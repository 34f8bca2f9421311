"""Which rows of a domain each client has to train, to validate and to test: by shares, or by split.csv beside
the domains' folders of one's own images."""

from __future__ import annotations

import csv
import operator
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from plumbing.data.catalog import shortlist
from plumbing.data.mixing import skewed
from plumbing.run import linear
from plumbing.run.errors import UserError
from plumbing.run.settings import Args, ratios, shares

import torch
from tabulate import tabulate
from torch import Tensor

SPLIT = "split.csv"
PARTS = ("train", "val", "test")
SHOWN = 12  # classes, and clients, that a table of images has at most
Rows = tuple[Tensor, Tensor, Tensor]  # of one client: train, val, test
Parting = Callable[[Tensor], Rows]  # shuffled rows -> train, validation, test: `parts_of` of a domain


# The parts of a domain


def cut(rows: Tensor, of_split: tuple[float, float, float]) -> Rows:
    """Shuffled rows -> train, validation, test. Test and then train are rounded down, validation gets the
    rest: 0.8/0.1/0.1 of 157 images gives 126/16/15, as in FDSE's official code."""
    train, _, test = of_split
    n = len(rows)
    n_test = int(n * test + 1e-9)
    n_train = int((n - n_test) * train / (1 - test) + 1e-9)
    return rows[:n_train], rows[n_train:n - n_test], rows[n - n_test:]


def complete_split(given: Tensor, order: Tensor, labels: Tensor, of_split: tuple[float, float, float],
                   parts: dict[int, int]) -> Tensor:
    """What split.csv gives, [N, 2], with parts for the images that it gives none, of a domain's shuffled rows
    `order` [N], by `parts_by_class`."""
    given, rows = given.clone(), order[given[order, 0] < 0]
    given[rows, 0] = parts_by_class(rows, labels, given[:, 1], of_split, parts)
    return given


def parts_by_class(rows: Tensor, labels: Tensor, groups: Tensor, of_split: tuple[float, float, float],
                   parts: dict[int, int]) -> Tensor:
    """The part of each of a domain's shuffled rows [n]: whole groups, of each class (the rarest that a group
    shows) by the shares. `labels` and `groups` [N] are of the domain. `parts` has the groups of the domains
    before, and gets those of this one."""
    members, of_class, filled = {}, {}, set()
    of_labels, images = labels.tolist(), Counter(labels[rows].tolist())
    for row, group in zip(rows.tolist(), groups[rows].tolist()):
        members.setdefault(group, []).append(row)
    for group, of_group in members.items():
        if group not in parts:
            c = min((of_labels[row] for row in of_group), key=images.get)
            of_class.setdefault(c, []).append(group)
    piles, count = list(of_class.values()), sum(map(len, of_class.values()))
    few = count * min(share for share in of_split if share) < len(piles)
    if few:  # the smallest part has no room for a group of each class
        rarest = min(of_class, key=images.get)
        is_rare = 2 * images[rarest] * len(images) < len(rows)  # less than half of an equal share
        if is_rare and len(of_class[rarest]) >= len(of_split):  # each part gets a group of it
            others = [pile for c, pile in of_class.items() if c != rarest]
            piles = [of_class[rarest], interleaved(others)]
        else:
            piles = [interleaved(piles)]
    for pile in piles:
        sizes = [len(members[group]) for group in pile]
        of_pile = dealt_to_parts(sizes, of_split, filled)
        parts.update(zip(pile, of_pile))
        if few:
            filled.update(of_pile)
    return torch.tensor([parts[group] for group in groups[rows].tolist()], dtype=torch.long)


def interleaved(piles: list[list[int]]) -> list[int]:
    """One pile, in which those of each pile are spread evenly."""
    places = []
    for pile in piles:
        places += [((i + 0.5) / len(pile), group) for i, group in enumerate(pile)]
    return [group for _, group in sorted(places, key=operator.itemgetter(0))]


def dealt_to_parts(sizes: list[int], of_split: tuple[float, float, float], filled: set[int]) -> list[int]:
    """The parts of groups with so many images, in this order: training until it has its share, then
    validation, then test. A part that is left empty, and is not `filled` before, gets the smallest group that
    another can spare."""
    train, val, _ = of_split
    total, start, part_of = sum(sizes), 0, []
    for size in sizes:
        middle = start + size / 2 - 1e-9
        part_of.append(int(middle > train * total) + int(middle > (train + val) * total))
        start += size
    for part in (2, 1):
        spare = [(size, -i) for i, size in enumerate(sizes) if part_of.count(part_of[i]) > 1]
        if of_split[part] and part not in (*part_of, *filled) and spare:
            part_of[-min(spare)[1]] = part
    return part_of


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


# split.csv


def read_split(file: Path, names: dict[str, list[str]], left_out: set[str]) -> dict[str, Tensor]:
    """{domain: int64 [N, 2], of each of its images `names` the part (its number in PARTS, -1: not given) and
    the group}. A group that has a part has it in all domains; an image that names none is one by itself. The
    table may name images that are `left_out`."""
    rows = read_rows(file)
    unknown = rows.keys() - left_out.union(*names.values())
    if unknown or not rows:
        raise UserError(f"{file} names {len(rows)} files; no images of this folder are "
                        f"{shortlist(sorted(unknown))}; expected <domain>/<class>/<image>", 2)
    of_group, numbers, of_domain = {}, {}, {}
    for name, (part, group) in rows.items():
        if part and group and of_group.setdefault(group, part) != part:
            raise UserError(f"{file}: the group {group} is in {of_group[group]} and, with {name}, in {part}: "
                            "give it one part", 2)
    for domain, images in names.items():
        given = []
        for name in images:
            part, group = rows.get(name, ("", ""))
            part = of_group.get(group, part)
            number = numbers.setdefault((bool(group), group or name), len(numbers))
            given.append((PARTS.index(part) if part else -1, number))
        of_domain[domain] = torch.tensor(given)
    return of_domain


def read_rows(file: Path) -> dict[str, tuple[str, str]]:
    """{file: (part or "", group or "")}. Stop if a row has another part, or comes twice."""
    rows = {}
    try:
        with open(file, newline="", encoding="utf-8-sig") as opened:
            table = csv.DictReader(opened)
            heads = table.fieldnames or ()
            if not {"file", "part"} <= {*heads} or len({*heads}) < len(heads):
                raise ValueError(f"its first line is {','.join(heads)}")
            for row in table:
                name, part, group = row["file"], row["part"] or "", row.get("group") or ""
                if not name:
                    raise ValueError(f"row {len(rows) + 1} names no file")
                if name in rows or None in row or part not in ("", *PARTS):
                    raise ValueError(f"{name} is there twice, has a value too many, or its part {part!r} is "
                                     f"none of {', '.join(PARTS)}")
                rows[name] = part, group
    except (csv.Error, ValueError) as e:
        raise UserError(f"{file} is no table with the columns file, part and, if you like, group ({e})", 2)
    return rows


# The rows of clients


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

    def enough(rows: Tensor) -> bool:
        return all(len(part) >= count for part, count in zip(in_parts(rows), least))

    piles = [order[m::M] for m in range(M)]
    if settings.dirichlet:
        key = (settings.seed, seed_name)
        piles = skewed(order, labels, classes, M, settings.dirichlet, key, enough)
    rows_of = {}
    for m, rows in enumerate(piles):
        client = name if M == 1 else f"{name}-{m}"
        rows_of[client] = in_parts(rows)
        check_part_sizes(client, rows_of[client], least)
    return rows_of


def check_part_sizes(client: str, parts: Rows, least: tuple[int, int, int]) -> None:
    """Stop if a client has too few images in a part."""
    has, needs = ("/".join(map(str, counts)) for counts in (map(len, parts), least))
    if any(len(part) < count for part, count in zip(parts, least)):
        raise UserError(f"client {client} has {has} images to train, validate and test; it needs at least "
                        f"{needs}: give fewer clients, a larger --limit or --dirichlet, other shares in "
                        f"--split, or another {SPLIT}")


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
