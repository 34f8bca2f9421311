"""Where a dataset's files come from: found or downloaded, and unpacked as far as they are needed.

What leads outside its folder, or is a link, is refused before an image is unpacked.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import fnmatch
import gzip
import hashlib
import http.client
import io
import os
import re
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from plumbing.data.catalog import Folders, named, source_of
from plumbing.data.splits import SPLIT
from plumbing.run.errors import UserError
from plumbing.run.files import in_units, lock_of, locked

from tqdm import tqdm

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
TABLE_ENDINGS = (".csv", ".json", ".txt")
MIB = 1 << 20
DAMAGE = (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError, zlib.error, RuntimeError, ValueError)


# Found or downloaded


def find_archives(names: Iterable[str], data: str, archives: str) -> dict[str, Path]:
    """{name or pattern: the first file that matches it below `archives` or in the downloads}, if any."""
    paths = {}
    for folder in ([Path(archives)] if archives else []) + [Path(data) / "downloads"]:
        for path in sorted(folder.rglob("*")):
            for name in names:
                if fnmatch.fnmatch(path.name.lower(), name.lower()) and path.is_file():
                    paths.setdefault(name, path)
    return paths


def download(url: str, path: Path, md5: str | None = None) -> Path:
    """Fetch `url` to `path`, with a progress bar. An interrupted download resumes where it stopped."""
    try:
        with locked(lock_of(path)):
            if not path.exists():
                fetch(url, path, md5)
            return path
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise UserError(f"could not download {path.name} from {url} ({e}); download it by hand, under this "
                        "name, and name its folder with --archives")


def fetch(url: str, path: Path, md5: str | None) -> None:
    """Request what is missing of `path`. A part to which the server has nothing to add is whole, or deleted
    if its md5 is another."""
    part = path.with_name(path.name + ".part")
    headers = {"Range": f"bytes={part.stat().st_size}-"} if part.exists() else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as reply:
            receive(reply, part, path.name)
    except urllib.error.HTTPError as e:
        if e.code != 416:  # 416: nothing lies behind the part
            raise
    with open(part, "rb") as file:
        actual = hashlib.file_digest(file, "md5").hexdigest()
    if md5 and actual != md5:
        part.unlink()
        raise OSError(f"expected md5 {md5}, found {actual}; what was downloaded is deleted")
    os.replace(part, path)


def receive(reply, part: Path, name: str) -> None:
    """Write what a server answers to `part`, behind what is there if the server resumes from there."""
    if "text/html" in (reply.headers["Content-Type"] or ""):
        raise OSError("the answer is a web page instead of the file: Google Drive asks for a confirmation "
                      "in a browser")
    with open(part, "ab" if reply.status == 206 else "wb") as file:
        whole = file.tell() + int(reply.headers["Content-Length"] or 0)
        bar = tqdm(total=whole, initial=file.tell(), unit="B", unit_scale=True, desc=name, disable=None)
        with bar:
            for block in iter(partial(reply.read, MIB), b""):
                bar.update(file.write(block))
        if file.tell() < whole:
            raise OSError(f"expected {whole} bytes, got {file.tell()}; the same command resumes from there")


def locate(dataset: str, data: str, archives: str) -> tuple[list[Path], str]:
    """What a dataset is read from: its folder (`dataset` in `data`, or the archive's own in `archives` or
    `data`), or its archives; or none, and what is missing, in words."""
    own, known = named(dataset).folder, source_of(dataset)
    if own:
        if not own.is_dir():
            raise UserError(f"{own} is no folder; expected one with images in <domain>/<class>/", 2)
        return [own], ""
    folders = [Path(data) / dataset]
    folders += [Path(base) / known.unpacked for base in (archives, data) if base and known.unpacked]
    for folder in folders:
        if folder.is_dir() and any(path.is_dir() for path in folder.iterdir()):  # else it holds only archives
            return [folder], ""
    paths = find_archives(known.files, data, archives)
    missing = [name for name in known.files if name not in paths]
    if not missing:
        return [paths[name] for name in known.files], ""
    more = f" and {len(missing) - 1} more files are" if len(missing) > 1 else " is"
    places = f"{archives} or {data}/downloads" if archives else f"{data}/downloads"
    return [], f"{missing[0]}{more} not in {places}"


def download_missing(dataset: str, data: str, archives: str) -> list[Path]:
    """The archives of a dataset of the catalogue, downloaded where they are missing."""
    files = source_of(dataset).files
    paths = find_archives(files, data, archives)
    for name, (url, md5) in files.items():
        if name not in paths:
            paths[name] = download(url, Path(data) / "downloads" / name.replace("*", ""), md5)
    return [paths[name] for name in files]


# Read


class ImageFiles:
    """The files of a dataset: those below a folder (of its folder `only`), or tables and what archives have.

    Of an archive `scan` unpacks the tables, and `unpack` the images that are asked for.
    """

    def __init__(self, paths: list[Path], only: str = ""):
        self.paths, self.only = paths, only
        self.inside: dict[str, Path] = {}  # file: where it lies, or will lie when it is unpacked
        self.unread: list[str] = []  # below folders: what cannot be read
        self.declared: dict[Path, dict[str, int]] = {}  # archive: the bytes of each file in it
        self.keys = []
        for path in paths:
            if path.is_dir():
                self.walk(path)
            else:
                self.keys.append(key_of(path))

    def __str__(self) -> str:
        first = self.paths[0]
        return str(first) if len(self.paths) == 1 else f"{first.parent} ({first.name}, ...)"

    def walk(self, top: Path) -> None:
        """Learn the names below a folder, and of each file its bytes and the time of its last change, which a
        move counts as too. Links are followed. Into `unread` goes what is neither file nor folder (links that
        lead nowhere, pipes, devices), closed, or a folder for the second time: links may go in circles."""
        seen, waiting = set(), [(f"{self.only}/", top / self.only) if self.only else ("", top)]
        while waiting:
            prefix, folder = waiting.pop()
            entries = None
            with contextlib.suppress(OSError):
                here = folder.stat().st_dev, folder.stat().st_ino
                entries = list(os.scandir(folder)) if here not in seen else None
                seen.add(here)
            if entries is None:
                self.unread.append(prefix.rstrip("/") or folder.name)
            for entry in entries or ():
                name, is_there = prefix + entry.name, not entry.is_symlink() or os.path.exists(entry.path)
                if is_there and entry.is_dir():
                    waiting.append((f"{name}/", Path(entry.path)))
                elif is_there and entry.is_file():
                    self.inside[name] = Path(entry.path)
                    if name != SPLIT:  # it says nothing of pixels
                        self.keys.append((name, entry.stat().st_size, entry.stat().st_ctime_ns))
                else:
                    self.unread.append(name)

    def fingerprint(self) -> str:
        """12 hexadecimal digits that change when a file of a folder does, or the content of an archive."""
        state = f"{sorted(self.keys, key=repr)} {sorted(self.unread)}"
        return hashlib.blake2b(state.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()

    def check_md5(self, source: Folders) -> None:
        """Stop if an archive, also one given by hand, has not the md5 that the catalogue knows."""
        for path, (_, md5) in zip(self.paths, source.files.values()):
            if not md5 or path.is_dir():
                continue
            with open(path, "rb") as file:
                actual = hashlib.file_digest(file, "md5").hexdigest()
            if actual != md5:
                raise UserError(f"{path}: expected md5 {md5}, found {actual}; it is another archive, or "
                                "damaged: get it again, or give its images as your own, folder:PATH")

    def scan(self, folder: Path) -> None:
        """Learn the names in all archives, and unpack their tables into `folder`. Stop if an archive is
        damaged, or has anything that leads outside it or is a link."""
        for path in self.paths:
            if path.name.lower().endswith(TABLE_ENDINGS):
                self.inside[path.name] = path
            elif path.is_file():
                sizes = self.declared.setdefault(path, {})
                with refusing_damage(path):
                    for name, size, extract in entries(path):
                        sizes[name] = size
                        self.inside[name] = folder / name
                        if name.endswith(TABLE_ENDINGS):
                            extract(folder)

    def unpack(self, names: Iterable[str], folder: Path) -> None:
        """Unpack these files of the archives into `folder`. Stop if they do not fit on its disk."""
        wanted = set(names)
        needed = sum(sizes[name] for sizes in self.declared.values() for name in wanted & sizes.keys())
        free = shutil.disk_usage(folder.parent).free
        if needed > free:
            raise UserError(f"{self}: its images take {in_units(needed)} for a while below {folder.parent}, "
                            f"where {in_units(free)} are free: name another folder with --data, or make room")
        with tqdm(total=needed, unit="B", unit_scale=True, desc="unpacking", disable=None) as bar:
            for path, sizes in self.declared.items():
                if wanted.isdisjoint(sizes):
                    continue
                with refusing_damage(path):
                    for name, size, extract in entries(path):
                        if name in wanted:
                            extract(folder)
                            bar.update(size)

    def table(self, ending: str) -> tuple[str, str]:
        """The text file whose path ends so: the folder it is in ("" or "x/y/") and its content."""
        names = [name for name in self.inside if f"/{name}".endswith(f"/{ending}")]
        if not names:
            raise UserError(f"{self}: found no {ending}, which says what each image shows; get the archive "
                            "again")
        name = min(names, key=lambda name: (len(name), name))
        folder = name.removesuffix(ending)
        return folder, self.inside[name].read_text("utf-8-sig", "replace")

    def rows(self, name: str, *columns: str) -> tuple[str, list[list[str]]]:
        """A csv table: the folder it is in, and of each row the values in `columns`."""
        folder, text = self.table(name)
        values = []
        try:
            for row in csv.DictReader(io.StringIO(text)):
                if None in row or None in row.values():
                    raise ValueError(f"row {len(values) + 1} has more or fewer values than the header")
                values.append([row[column] for column in columns])
        except (csv.Error, ValueError, KeyError) as e:
            raise UserError(f"{self}: {name} is no table with the columns {', '.join(columns)} ({e}); get it "
                            "again")
        return folder, values


# Archives


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


@contextlib.contextmanager
def refusing_damage(path: Path):
    """Stop if what is read of an archive is damaged. A disk that is full is not its fault."""
    try:
        yield
    except DAMAGE as e:
        if isinstance(e, OSError) and e.errno == errno.ENOSPC:
            raise
        raise UserError(f"{path} is no whole archive ({e}); it may be truncated: get it again")


def entries(path: Path) -> Iterator[tuple[str, int, Callable[[Path], None]]]:
    """(name, declared bytes, what unpacks it into a folder until the next is asked for) of each file."""
    if path.suffix.lower() != ".zip":
        yield from tar_entries(path)
        return
    with zipfile.ZipFile(path) as archive:  # compares checksums
        for entry in archive.infolist():
            if not entry.is_dir():
                yield inner(path, entry.filename), entry.file_size, partial(archive.extract, entry)


def tar_entries(path: Path) -> Iterator[tuple[str, int, Callable[[Path], None]]]:
    with open(path, "rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"  # by gzip
    with (gzip.open if is_packed else open)(path, "rb") as stream:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=MIB) as tar:
            for entry in iter(tar.next, None):
                tar.members.clear()  # it would keep them all: 1 KiB for each image
                if entry.issym() or entry.islnk():
                    raise UserError(f"{path}: the entry {entry.name} is a link; the archive is not used")
                name = inner(path, entry.name).removeprefix("./")
                if not entry.isdir():
                    yield name, entry.size, partial(tar.extract, entry, set_attrs=False, filter="data")
        while stream.read(MIB):  # to the end, where gzip has its checksum
            pass


def inner(archive: Path, name: str) -> str:
    """The name of an entry. Stop if it leads outside: such an archive is not what it says."""
    absolute = re.match(r"[/\\]|[A-Za-z]:", name)
    if absolute or ".." in re.split(r"[/\\]", name):
        raise UserError(f"{archive}: the entry {name} leads outside the folder; the archive is not used")
    return name
