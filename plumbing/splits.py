"""Train, validation and test: by shares, or by split.csv beside the domains' folders of one's own images."""

from __future__ import annotations

import csv
from pathlib import Path

from plumbing.catalog import some
from plumbing.errors import Stop

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


def read_split(file: Path, names: dict[str, list[str]]) -> dict[str, Tensor]:
    """{domain: int64 [N, 2], of each of its images `names` the part (its number in PARTS, -1: not given) and
    the group}. A group that has a part has it in all domains; an image that names none is one by itself."""
    rows = read_rows(file)
    unknown = rows.keys() - set().union(*names.values())
    if unknown or not rows:
        raise Stop(f"{file} names {len(rows)} files; no images of this folder are "
                   f"{some(sorted(unknown))}; expected <domain>/<class>/<image>", 2)
    of_group, numbers, found = {}, {}, {}
    for name, (part, group) in rows.items():
        if part and group and of_group.setdefault(group, part) != part:
            raise Stop(f"{file}: the group {group} is in {of_group[group]} and, with {name}, in {part}: "
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
            if not {"file", "part"} <= {*(table.fieldnames or ())}:
                raise ValueError(f"its first line is {','.join(table.fieldnames or ())}")
            for row in table:
                name, part, group = row["file"], row["part"] or "", row.get("group") or ""
                if name in rows or None in row or part not in ("", *PARTS):
                    raise ValueError(f"{name} is there twice, has a value too many, or its part {part!r} is "
                                     f"none of {', '.join(PARTS)}")
                rows[name] = part, group
    except (csv.Error, ValueError) as e:
        raise Stop(f"{file} is no table with the columns file, part and, if you like, group ({e})", 2)
    return rows


def completed(given: Tensor, order: Tensor, of_split: tuple[float, float, float],
              parts: dict[int, int]) -> Tensor:
    """What split.csv gives, [N, 2], with parts for the images that it gives none, of a domain's shuffled rows
    `order` [N]: by whole groups, to train until that has its share, then to validation, then to test.
    `parts` has the groups of the domains before, and gets those of this one."""
    rows = order[given[order, 0] < 0]
    train, val, _ = map(len, cut(rows, of_split))
    given, members, start = given.clone(), {}, 0
    for row in rows.tolist():
        members.setdefault(int(given[row, 1]), []).append(row)
    for group, of_group in members.items():
        middle = start + len(of_group) / 2
        by_share = int(middle > train) + int(middle > train + val)
        given[of_group, 0] = parts.setdefault(group, by_share)
        start += len(of_group)
    return given
