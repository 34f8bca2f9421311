"""Where a dataset's files come from: a folder, or archives that are found, or downloaded, and unpacked."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import http.client
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from plumbing.catalog import SPLIT, Folders, custom_folder, source_of
from plumbing.errors import UserError

import torch

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
MIB = 1 << 20
DAMAGE = (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error)


def is_image(name: str) -> bool:
    """By the ending of its name."""
    return name.lower().endswith(IMAGE_ENDINGS)


# Found or downloaded


def find_archives(names: Iterable[str], data: str, archives: str) -> dict[str, Path]:
    """{name or pattern: the first file that matches it below `archives` or in the downloads}, if any."""
    found = {}
    for folder in ([Path(archives)] if archives else []) + [Path(data) / "downloads"]:
        for path in sorted(folder.rglob("*")):
            for name in names:
                if fnmatch.fnmatch(path.name.lower(), name.lower()) and path.is_file():
                    found.setdefault(name, path)
    return found


def download(url: str, path: Path) -> Path:
    """Fetch `url` to `path`, with a progress bar; a download that is killed leaves nothing there."""
    print(f"downloading {url}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.hub.download_url_to_file(url, str(path))
    except (OSError, http.client.HTTPException) as e:
        raise UserError(f"could not download {path.name} from {url} ({e}); download it by hand, under this "
                        "name, and name its folder with --archives")
    return path


def check_md5(path: Path, md5: str | None) -> None:
    """Stop if a file, also one given by hand, has not this md5. None: it is not known."""
    with open(path, "rb") as file:
        if md5 and hashlib.file_digest(file, "md5").hexdigest() != md5:
            raise UserError(f"{path} has not the md5 {md5}: it is another file, damaged, or a web page that "
                            "asks for a confirmation; delete it and get it again by hand")


def locate(dataset: str, data: str, archives: str) -> list[Path]:
    """What a dataset is read from: its folder, for those of the catalogue `dataset` in `data`, or all of its
    archives; nothing if they are not here."""
    folder = custom_folder(dataset) or Path(data) / dataset
    if custom_folder(dataset) and not folder.is_dir():
        raise UserError(f"{folder} is no folder; expected one with images in <domain>/<class>/", 2)
    if custom_folder(dataset) or folder.is_dir():
        return [folder]
    files = source_of(dataset).files
    found = find_archives(files, data, archives)
    return [found[name] for name in files] if found.keys() == files.keys() else []


def download_missing(dataset: str, data: str, archives: str) -> list[Path]:
    """The archives of a dataset of the catalogue, downloaded where they are missing."""
    files = source_of(dataset).files
    paths = find_archives(files, data, archives)
    for name, (url, _) in files.items():
        if name not in paths:
            paths[name] = download(url, Path(data) / "downloads" / name.replace("*", ""))
    return [paths[name] for name in files]


# Unpacked


def unpack(paths: list[Path], source: Folders, folder: Path) -> None:
    """Unpack the archives of a dataset into a folder; of the images only those below a folder with the name
    of one of its classes, if its layout has such. Other files (tables) are copied. The libraries let no entry
    lead outside the folder."""
    by_class = {*source.classes} if source.layout in ("in_folders", "in_lists") else set()

    def is_wanted(name: str) -> bool:
        return not by_class or not is_image(name) or not by_class.isdisjoint(name.split("/"))

    for path, (_, md5) in zip(paths, source.files.values()):
        check_md5(path, md5)
        print(f"unpacking {path}", flush=True)
        with refusing_damage(path):
            if path.suffix.lower() == ".txt":
                shutil.copy(path, folder)
            elif path.suffix.lower() == ".zip":
                with zipfile.ZipFile(path) as archive:  # compares checksums
                    archive.extractall(folder, filter(is_wanted, archive.namelist()))
            else:
                with tarfile.open(path) as archive:
                    archive.extractall(folder, (m for m in archive if is_wanted(m.name)), filter="data")


@contextlib.contextmanager
def refusing_damage(path: Path):
    """Stop if what is read of an archive is damaged."""
    try:
        yield
    except DAMAGE as e:
        why = " ".join(str(e).split())[:120]
        raise UserError(f"{path} is no whole archive ({why}); it may be truncated: delete it and get it "
                        "again")


# Files in folders


def files_in(folder: Path, below: str = "") -> list[str]:
    """The files in a folder, or in the folder `below` in it, by their paths from there. Links are followed.
    What is hidden, or what macOS adds to archives, is left out."""
    def stop(error: OSError) -> None:
        raise error  # a folder that is closed, or in itself by a link

    names = []
    for here, folders, files in os.walk(folder / below, onerror=stop, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith((".", "__MACOSX"))]
        inner = Path(here).relative_to(folder)
        names += [(inner / name).as_posix() for name in files if not name.startswith(".")]
    return names


def fingerprint(keys: list) -> str:
    """12 hexadecimal digits of what `key_of` and `keys_in` say of a dataset's files."""
    state = f"{sorted(keys, key=repr)} []"
    return hashlib.blake2b(state.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


def keys_in(folder: Path, names: list[str]) -> list[tuple]:
    """Of each file its bytes and the time of its last change, which a move counts as too. split.csv says
    nothing of pixels."""
    states = [(name, (folder / name).stat()) for name in names if name != SPLIT]
    return [(name, state.st_size, state.st_ctime_ns) for name, state in states]


def key_of(path: Path) -> tuple:
    """Of an archive what changes with each file in it: of zip the checksums in its directory, else its size
    and its end, where gzip has the checksum of all. A copy of it has the same."""
    if zipfile.is_zipfile(path):
        with refusing_damage(path), zipfile.ZipFile(path) as archive:
            return tuple((entry.filename, entry.CRC) for entry in archive.infolist())
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MIB))
        return size, hashlib.blake2b(file.read()).hexdigest()
