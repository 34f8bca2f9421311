"""Train, validation and test: by shares, or by split.csv beside the domains' folders of one's own images."""

from __future__ import annotations

import csv
import operator
from collections import Counter
from pathlib import Path

from plumbing.catalog import shortlist
from plumbing.errors import UserError

import torch
from torch import Tensor

SPLIT = "split.csv"
PARTS = ("train", "val", "test")
Rows = tuple[Tensor, Tensor, Tensor]  # of one client: train, val, test


def cut(rows: Tensor, of_split: tuple[float, float, float]) -> Rows:
    """Shuffled rows -> train, validation, test. Test and then train are rounded down, validation gets the
    rest: 0.8/0.1/0.1 of 157 images gives 126/16/15, as in FDSE's official code."""
    train, _, test = of_split
    n = len(rows)
    n_test = int(n * test + 1e-9)
    n_train = int((n - n_test) * train / (1 - test) + 1e-9)
    return rows[:n_train], rows[n_train:n - n_test], rows[n - n_test:]


def read_split(file: Path, names: dict[str, list[str]], left_out: set[str]) -> dict[str, Tensor]:
    """{domain: int64 [N, 2], of each of its images `names` the part (its number in PARTS, -1: not given) and
    the group}. A group that has a part has it in all domains; an image that names none is one by itself. The
    table may name images that are `left_out`."""
    rows = read_rows(file)
    unknown = rows.keys() - left_out.union(*names.values())
    if unknown or not rows:
        raise UserError(f"{file} names {len(rows)} files; no images of this folder are "
                        f"{shortlist(sorted(unknown))}; expected <domain>/<class>/<image>", 2)
    of_group, numbers, found = {}, {}, {}
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
        found[domain] = torch.tensor(given)
    return found


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
                if name in rows or None in row or part not in ("", *PARTS):
                    raise ValueError(f"{name} is there twice, has a value too many, or its part {part!r} is "
                                     f"none of {', '.join(PARTS)}")
                rows[name] = part, group
    except (csv.Error, ValueError) as e:
        raise UserError(f"{file} is no table with the columns file, part and, if you like, group ({e})", 2)
    return rows


def completed(given: Tensor, order: Tensor, labels: Tensor, of_split: tuple[float, float, float],
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
        found = dealt_to_parts(sizes, of_split, filled)
        parts.update(zip(pile, found))
        if few:
            filled.update(found)
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
    total, start, found = sum(sizes), 0, []
    for size in sizes:
        middle = start + size / 2 - 1e-9
        found.append(int(middle > train * total) + int(middle > (train + val) * total))
        start += size
    for part in (2, 1):
        spare = [(size, -i) for i, size in enumerate(sizes) if found.count(found[i]) > 1]
        if of_split[part] and part not in (*found, *filled) and spare:
            found[-min(spare)[1]] = part
    return found
