"""What is known of each image dataset, from catalog.toml: its sources, files, domains, classes and counts."""

from __future__ import annotations

import functools
import re
import tomllib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from plumbing.run.errors import UserError, printable

OWN = "folder:"  # --dataset folder:PATH, images of one's own


@dataclass(frozen=True)
class Folders:
    """A dataset of image files."""

    files: dict[str, tuple[str, str | None]]  # name or pattern of each file: its source, its md5 or None
    domains: dict[str, tuple[str, int | None]]  # domain: its folder (or its number in a table), its images
    classes: tuple[str, ...]  # in the order of their labels
    layout: str = "in_folders"  # the function in listings.py that knows domain and class of each image
    unpacked: str | None = None  # the folder that the official scripts unpack it to, in --archives or --data
    counts: dict[str, list[int]] = field(default_factory=dict)  # domain: its images of each class
    content: str = ""  # the digest of all images, see decoding.py


FOLDERS = {}  # {dataset: what is known of it}, in the order of the file
TABLES = tomllib.loads(Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8"))
for name, table in TABLES.items():
    if "like" in table:
        table = TABLES[table["like"]] | table
    known = {part: value for part, value in table.items() if part != "like"}
    known["classes"] = tuple(table.get("classes", "").split())
    for part in ("files", "domains"):
        known[part] = {key: tuple([*value, None][:2]) for key, value in table.get(part, {}).items()}
    FOLDERS[name] = Folders(**known)

# Images of one's own: PATH/<domain>/<class>/, whose names are those of the domains and classes.
CUSTOM_IMAGES = Folders(files={}, domains={}, classes=(), layout="in_custom_folders")


@dataclass(frozen=True)
class DatasetName:
    """What the name of a dataset says."""

    folder: Path | None  # PATH of `folder:PATH`, images of one's own
    file: Path | None  # `data.py`, data of one's own
    custom: bool  # one of these: the data may change, so their content follows their name in an identity
    short: str  # in names of files: of one's own that of the folder or file, with `_` for odd signs


@functools.cache
def named(dataset: str) -> DatasetName:
    """The name of a dataset, parsed."""
    folder = Path(dataset.removeprefix(OWN)) if dataset.startswith(OWN) else None
    file = Path(dataset) if dataset.endswith(".py") and not folder else None
    own, short = folder or file, dataset
    if own:
        short = re.sub(r"[^A-Za-z0-9._-]+", "_", own.name.removesuffix(".py"))[:40] or "folder"
    return DatasetName(folder, file, own is not None, short)


def source_of(dataset: str) -> Folders:
    """What is known of a dataset of image files; KeyError if it is none."""
    if named(dataset).folder:
        return CUSTOM_IMAGES
    return FOLDERS[dataset]


def composed(name: str) -> str:
    """A name with composed letters: macOS writes an umlaut as two signs, tables as one."""
    return unicodedata.normalize("NFC", name)


def shortlist(names: list[str]) -> str:
    """The first names of a list."""
    return (", ".join(map(printable, names[:8])) or "none") + (", ..." if len(names) > 8 else "")


# What stands beside the names of domains in flags and results.
WORDS = ("all", "ALL", "AVG", "mean", "val", "target", "round", "metric")


def check_names(where: str, domains: Iterable[str], classes: Iterable[str]) -> None:
    """Stop if one's own domains or classes have names that flags or results could not tell from other words,
    or that a terminal cannot show."""
    for name in domains:
        if name in (*WORDS, ".", "..") or {",", "/"} & {*name}:
            raise UserError(f"{where}: a domain cannot have the name {name!r} here; rename it", 2)
    for name in (*domains, *classes):
        if not name or not name.isprintable():  # as in no UTF-8
            raise UserError(f"{where}: a domain or class cannot have the name {name!r} here; rename it", 2)
