"""What is known of each image dataset, from catalog.toml: its sources, files, domains, classes and counts."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

OWN = "folder:"  # --dataset folder:PATH, images of one's own


@dataclass(frozen=True)
class Folders:
    """A dataset of image files."""

    files: dict[str, tuple[str, str | None]]  # name or pattern of each file: its source, its md5 or None
    domains: dict[str, tuple[str, int | None]]  # domain: its folder (or its number in a table), its images
    classes: tuple[str, ...]  # in the order of their labels
    layout: str = "in_folders"  # the function in listings.py that knows domain and class of each image
    unpacked: str | None = None  # the folder that the official scripts unpack it to, in --archives or --data

    @property
    def archive(self) -> str:
        """The pattern of its first file's name."""
        return next(iter(self.files))


FOLDERS = {}  # {dataset: what is known of it}, in the order of the file
TABLES = tomllib.loads(Path(__file__).with_name("catalog.toml").read_text())
for name, table in TABLES.items():
    if "like" in table:
        table = TABLES[table["like"]] | table
    FOLDERS[name] = Folders(
        files={pattern: tuple([*value, None][:2]) for pattern, value in table["files"].items()},
        domains={domain: tuple([*value, None][:2]) for domain, value in table.get("domains", {}).items()},
        classes=tuple(table.get("classes", "").split()),
        layout=table.get("layout", "in_folders"),
        unpacked=table.get("unpacked"),
    )

# Images of one's own: PATH/<domain>/<class>/, whose names are those of the domains and classes.
OWN_IMAGES = Folders(files={}, domains={}, classes=(), layout="in_own_folders")


def own_folder(dataset: str) -> Path | None:
    """PATH of `folder:PATH`; None for the datasets above."""
    if dataset.startswith(OWN):
        return Path(dataset.removeprefix(OWN))
    return None


def source_of(dataset: str) -> Folders:
    """What is known of a dataset of image files; KeyError if it is none."""
    if own_folder(dataset):
        return OWN_IMAGES
    return FOLDERS[dataset]


def short_name(dataset: str) -> str:
    """The name of a dataset in the names of files: of `folder:PATH` that of the folder, without signs that a
    shell or a file system may take for others."""
    folder = own_folder(dataset)
    if folder is None:
        return dataset
    return re.sub(r"[^A-Za-z0-9._-]+", "_", folder.name)[:40] or "folder"


def some(names: list[str]) -> str:
    """The first names of a list."""
    return (", ".join(names[:8]) or "none") + (", ..." if len(names) > 8 else "")
