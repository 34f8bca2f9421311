"""Parts and groups of one's own images, which split.csv beside the domains' folders gives."""

from __future__ import annotations

import csv
from pathlib import Path

from plumbing.catalog import some
from plumbing.errors import Stop

import torch
from torch import Tensor

SPLIT = "split.csv"
PARTS = ("train", "val", "test")


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
            for row in csv.DictReader(opened):
                name, part, group = row["file"], row["part"] or "", row.get("group") or ""
                if name in rows or None in row or part not in ("", *PARTS):
                    raise ValueError(f"{name} is there twice, has a value too many, or its part {part!r} is "
                                     f"none of {', '.join(PARTS)}")
                rows[name] = part, group
    except (csv.Error, KeyError, ValueError) as e:
        raise Stop(f"{file} is no table with the columns file, part and, if you like, group ({e})", 2)
    return rows


def completed(given: Tensor, rows: Tensor, sizes: list[int], parts: dict[int, int]) -> Tensor:
    """What split.csv gives, [N, 2], with parts for the shuffled rows [n] of images that it gives none: by
    whole groups, to train until that has sizes[0] images, then to validation until sizes[1], then to test.
    `parts` has the groups of the domains before, and gets those of this one."""
    given, members, start = given.clone(), {}, 0
    for row in rows.tolist():
        members.setdefault(int(given[row, 1]), []).append(row)
    for group, of_group in members.items():
        middle = start + len(of_group) / 2
        by_share = int(middle > sizes[0]) + int(middle > sizes[0] + sizes[1])
        given[of_group, 0] = parts.setdefault(group, by_share)
        start += len(of_group)
    return given
