"""Which rows of a domain each client has to train, to validate and to test: by shares, or by split.csv beside
the domains' folders of one's own images."""

from __future__ import annotations

import csv
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from plumbing.data.catalog import composed, shortlist
from plumbing.data.domains import Dataset, Origin
from plumbing.data.mixing import skewed
from plumbing.run import linear
from plumbing.run.errors import UserError
from plumbing.run.seeding import seed_all
from plumbing.run.settings import Args, ratios, shares

import torch
from tabulate import tabulate
from torch import Tensor

SPLIT = "split.csv"
PARTS = ("train", "val", "test")
VERBS = {"train": "train", "val": "validate", "test": "test"}
SHOWN = 12  # classes, and clients, that a table of images has at most
Rows = tuple[Tensor, Tensor, Tensor]  # of one client: train, val, test
Parting = Callable[[Tensor], Rows]  # shuffled rows -> train, validation, test: `parts_of` of a domain


# Fewer images: --limit


def limited(dataset: Dataset, settings: Args) -> Dataset:
    """The dataset with at most --limit images of each domain, drawn by the seed. Stop if a domain has too
    few."""
    for d in dataset.domains:
        if settings.limit:
            generator = seed_all(settings.seed, "limit", dataset.seed_name(d.name))
            rows = torch.randperm(len(d.labels), generator=generator)[:settings.limit]
            d.images, d.labels = d.images[rows], d.labels[rows]
            d.given = None if d.given is None else d.given[rows]
            d.origin = [d.origin[row] for row in rows.tolist()] if d.origin else []
        if len(d.labels) < len(dataset.classes):
            advice = "raise --limit" if settings.limit else "look at its folder"
            raise UserError(f"domain {d.name} has {len(d.labels)} images, fewer than the "
                            f"{len(dataset.classes)} classes; {advice}")
    return dataset


# The parts of a domain


def cut(rows: Tensor, of_split: tuple[float, float, float]) -> Rows:
    """Shuffled rows -> train, validation, test. Test and then train are rounded down, validation gets the
    rest: 0.8/0.1/0.1 of 157 images gives 126/16/15, as in FDSE's official code."""
    train, _, test = of_split
    n = len(rows)
    n_test = int(n * test + 1e-9)
    n_train = int((n - n_test) * train / (1 - test) + 1e-9)
    return rows[:n_train], rows[n_train:n - n_test], rows[n - n_test:]


def complete_split(given: Tensor, order: Tensor, labels: Tensor,
                   of_split: tuple[float, float, float]) -> Tensor:
    """What split.csv gives, [N, 2], with parts for the images that it gives none, of a domain's shuffled rows
    `order` [N], by `parts_by_class`."""
    given, rows = given.clone(), order[given[order, 0] < 0]
    given[rows, 0] = parts_by_class(rows, labels, given[:, 1], of_split)
    return given


def parts_by_class(rows: Tensor, labels: Tensor, groups: Tensor,
                   of_split: tuple[float, float, float]) -> Tensor:
    """The part of each of a domain's shuffled rows [n]: whole groups, of each class (the rarest that a group
    shows) by the shares. `labels` and `groups` [N] are of the domain."""
    members, of_class, parts, filled = {}, {}, {}, set()
    of_labels, images = labels.tolist(), Counter(labels[rows].tolist())
    for row, group in zip(rows.tolist(), groups[rows].tolist()):
        members.setdefault(group, []).append(row)
    for group, of_group in members.items():
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
        part_of = parts_by_class(rows, labels, torch.arange(len(labels)), of_split)
    else:
        return cut(rows, of_split)
    return tuple(rows[part_of == part] for part in range(3))


def fewest(settings: Args) -> tuple[int, int, int]:
    """The images that a client needs in each part: two to train, because of BN."""
    return (2, 0, 0) if settings.protocol == "linear" else (2, 1, 1)


# split.csv


def place_images(file: Path | None, names: dict[str, list[str]], pixels: dict[str, list[str]],
                 left_out: set[str]) -> dict[str, tuple[Tensor | None, list[Origin]]]:
    """{domain: (int64 [N, 2] or None, the origins)} of the images `names` of each domain, whose pixels have
    these digests. The numbers are the part (its place in PARTS, -1: none is given) and the group, by
    split.csv, `file`; it may name images that are `left_out`. None: there is neither a part nor a group.

    A group is of its domain: patient 1 of two hospitals is two patients. Where the table has no groups, the
    images of a folder below a class are one, since it is a patient's. Equal images without a group are one.
    """
    table, has_groups = read_rows(file) if file else ({}, False)
    known = {composed(name) for name in left_out.union(*names.values())}
    unknown = table.keys() - known
    if file and (unknown or not table):
        raise UserError(f"{file} names {len(table)} files; no images of this folder are "
                        f"{shortlist(sorted(unknown))}; expected <domain>/<class>/<image>", 2)
    placed = {}
    for domain, images in names.items():
        folders = {} if has_groups else patients_by_folder(images)
        rows = [table.get(composed(name), ("", "")) for name in images]
        groups = [group or folders.get(name, "") for name, (_, group) in zip(images, rows)]
        of_group = {}
        for name, (part, _), group in zip(images, rows, groups):
            if part and group and of_group.setdefault(group, part) != part:
                raise UserError(f"{file}: the group {group} is in {of_group[group]} and, with {name}, in "
                                f"{part}: give it one part", 2)
        numbers, given = {}, []
        for (part, _), group, of_pixels in zip(rows, groups, pixels[domain]):
            part = part or of_group.get(group, "")
            number = numbers.setdefault((bool(group), group or of_pixels), len(numbers))
            given.append((PARTS.index(part) if part else -1, number))
        is_plain = not file and not any(groups) and len(numbers) == len(images)
        origins = [Origin(*of_image) for of_image in zip(images, groups, pixels[domain])]
        placed[domain] = None if is_plain else torch.tensor(given), origins
    return placed


def patients_by_folder(images: list[str]) -> dict[str, str]:
    """{image: its folder below <domain>/<class>/} of a domain's images that lie deeper. Without a folder for
    each part they are no patients."""
    folder_of = {}
    for name in images:
        _, _, *deeper, _ = name.split("/")
        if deeper:
            folder_of[name] = deeper[0]
    return folder_of if len(set(folder_of.values())) >= len(PARTS) else {}


def read_rows(file: Path) -> tuple[dict[str, tuple[str, str]], bool]:
    """{file: (part or "", group or "")}, and whether there are groups. Stop if a row has another part, or
    comes twice."""
    rows = {}
    try:
        with open(file, newline="", encoding="utf-8-sig") as opened:
            table = csv.DictReader(opened)
            heads = table.fieldnames or ()
            if "file" not in heads or not {"part", "group"} & {*heads} or len({*heads}) < len(heads):
                raise ValueError(f"its first line is {','.join(heads)}")
            for row in table:
                name, part, group = composed(row["file"] or ""), row.get("part") or "", row.get("group") or ""
                if not name:
                    raise ValueError(f"row {len(rows) + 1} names no file")
                if name in rows or None in row or part not in ("", *PARTS):
                    raise ValueError(f"{name} is there twice, has a value too many, or its part {part!r} is "
                                     f"none of {', '.join(PARTS)}")
                rows[name] = part, group
    except (csv.Error, ValueError) as e:
        raise UserError(f"{file} is no table with the columns file and part, group or both ({e})", 2)
    return rows, "group" in heads


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


# What each part has


class Placed(NamedTuple):
    """An image of one's own in a run."""

    file: str
    client: str
    part: str
    label: int
    group: str  # the patient, say, with its domain
    pixels: str  # their digest


def placed_images(client) -> Iterator[Placed]:
    """All images of a client (a ClientData), whose rows go through all of its domains."""
    origins, is_of = [], []
    for d in client.domains:
        origins += d.origin or [Origin(f"{d.name}/{row}") for row in range(len(d.labels))]
        is_of += [d.name] * len(d.labels)
    for part in PARTS:
        data = getattr(client, part)
        for row, label in zip(data.index.tolist(), data.labels.tolist()):
            file, group, pixels = origins[row]
            yield Placed(file, client.name, part, label, f"{is_of[row]}: {group}" if group else "", pixels)


def table_of_parts(images: list[Placed], classes: tuple[str, ...]) -> str:
    """The groups, and the images of each class, that each client has to train, validate and test."""
    of_client, total = {}, "all" if len(classes) <= SHOWN else "..., all"
    for image in images:
        of_client.setdefault(image.client, []).append(image)
    with_groups, rows = any(image.group for image in images), []
    for client, own in list(of_client.items())[:SHOWN]:
        counts = Counter((image.part, image.label) for image in own)
        cells = [tuple(counts[part, c] for part in PARTS) for c in range(len(classes))]
        groups = Counter(part for part, _ in {(image.part, image.group) for image in own if image.group})
        shown = [tuple(groups[part] for part in PARTS)] if with_groups else []
        shown += [*cells[:SHOWN], tuple(map(sum, zip(*cells)))]
        rows.append([client, *("/".join(map(str, cell)) for cell in shown)])
    heads = ["images to train/validate/test", *(["groups"] if with_groups else []), *classes[:SHOWN], total]
    if len(of_client) > SHOWN:
        rows.append([f"... {len(of_client) - SHOWN} more"])
    return tabulate(rows, heads, "plain", disable_numparse=True)


def faults_of_parts(images: list[Placed], classes: tuple[str, ...]) -> list[str]:
    """A line on the parts that lack a class, one on images that are tested and trained on, and one on groups
    whose name several domains have."""
    shown, trained, tested, lines = {}, {}, {}, []
    for image in images:
        shown.setdefault((image.client, image.part), set()).add(image.label)
        if image.pixels and image.part == "train":
            trained.setdefault(image.client, set()).add(image.pixels)
        elif image.part == "test":
            tested.setdefault(image.client, []).append(image.pixels)
    lacking = []
    for (client, part), there in shown.items():
        names = [c for label, c in enumerate(classes) if label not in there]
        if names:
            lacking.append(f"{client} has no {shortlist(names)} to {VERBS[part]}")
    if lacking:
        first = "; ".join(lacking[:SHOWN])
        more = f"; {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
        lines.append(f"parts without images of a class, of which their numbers say nothing: {first}{more}: "
                     f"give other parts in {SPLIT}, a larger share in --split, or another --seed")
    leaks = []
    for client, of_images in tested.items():
        count = sum(pixels in trained.get(client, ()) for pixels in of_images)
        if count:
            leaks.append(f"{count} of the {len(of_images)} test images of {client}")
    if leaks:
        lines.append(f"the same pixels are trained on and tested: {'; '.join(leaks[:SHOWN])}: remove the "
                     f"copies, or give them one part in {SPLIT}")
    deeper = {}
    for image in images:
        if not image.group and image.file.count("/") > 2:
            deeper.setdefault(image.client, set()).add(image.file.split("/")[2])
    few = [client for client, folders in deeper.items() if len(folders) == len(PARTS) - 1]
    if few:
        lines.append(f"{shortlist(few)}: two folders are too few to be taken for patients, so images of both "
                     f"may be in each part: if they are patients, write a group for each image in {SPLIT}")
    places = {}
    for image in images:
        domain, _, group = image.group.partition(": ")
        if group:
            places.setdefault(group, set()).add(domain)
    shared = sorted(group for group, domains in places.items() if len(domains) > 1)
    if shared:
        lines.append(f"groups of one name in several domains count as different ones: {shortlist(shared)}: "
                     f"if one is the same patient, give all its images one part in {SPLIT}")
    return lines
