"""Where a dataset's files come from: found or downloaded, and unpacked as far as they are needed.

What leads outside its folder, is a link or declares too many bytes is refused before an image is unpacked.
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

from plumbing.catalog import FOLDERS, own_folder
from plumbing.errors import Stop
from plumbing.files import in_units, locked

from tqdm import tqdm

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
TABLE_ENDINGS = (".csv", ".json", ".txt")
MIB = 1 << 20
DAMAGE = (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError, zlib.error, RuntimeError, ValueError)

# Bytes at most, unpacked. The largest official archives have some 12 GB of images of a few MB each.
ENTRY = 256 * MIB  # of an image or a table
TABLES = 1024 * MIB  # of the tables of an archive together
TOTAL = 65536 * MIB  # of an archive
NAMES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
         tarfile.GNUTYPE_LONGLINK)  # the headers of a tar archive that tarfile reads whole


# Found or downloaded


def find_archive(name: str, data: str, archives: str) -> Path | None:
    """The first file of this name (or pattern) anywhere below `archives` or in the downloads."""
    return find_archives([name], data, archives).get(name)


def find_archives(names: Iterable[str], data: str, archives: str) -> dict[str, Path]:
    """{name or pattern: the first file that matches it below `archives` or in the downloads}, if any."""
    folders = [Path(data) / "downloads"]
    if archives:
        folders.insert(0, Path(archives))
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            for name in names:
                matches = fnmatch.fnmatch(path.name.lower(), name.lower())
                if name not in found and matches and path.is_file():
                    found[name] = path
    return found


def download(url: str, path: Path, md5: str | None = None) -> Path:
    """Fetch `url` to `path`, with a progress bar. An interrupted download goes on where it stopped."""
    try:
        with locked(path.with_name(f".{path.name}.lock")):
            if not path.exists():
                fetch(url, path, md5)
            return path
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise Stop(f"could not download {path.name} from {url} ({e}); download it by hand, under this name, "
                   "and name its folder with --archives")


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
    """Write what a server answers to `part`, behind what is there if the server goes on from there."""
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
            raise OSError(f"expected {whole} bytes, got {file.tell()}; the same command goes on from there")


def unpacked(dataset: str, data: str, archives: str) -> Path | None:
    """The folder with the unpacked images of a dataset of the catalogue, if there is one with folders in it.

    It is `dataset` in `data`, or its archive's folder in `archives` or `data`.
    """
    folders = [Path(data) / dataset]
    if FOLDERS[dataset].unpacked:
        folders += [Path(base) / FOLDERS[dataset].unpacked for base in (archives, data) if base]
    for folder in folders:
        if folder.is_dir() and any(path.is_dir() for path in folder.iterdir()):  # else it holds only archives
            return folder
    return None


def locate(dataset: str, data: str, archives: str) -> tuple[list[Path], str]:
    """What a dataset is read from, its folder or its archives; or none, and what is missing, in words."""
    folder = own_folder(dataset)
    if folder and not folder.is_dir():
        raise Stop(f"{folder} is no folder; expected one with images in <domain>/<class>/", 2)
    folder = folder or unpacked(dataset, data, archives)
    if folder:
        return [folder], ""
    files = FOLDERS[dataset].files
    found = find_archives(files, data, archives)
    missing = [name for name in files if name not in found]
    if not missing:
        return [found[name] for name in files], ""
    more = f" and {len(missing) - 1} more files are" if len(missing) > 1 else " is"
    places = f"{archives} or {data}/downloads" if archives else f"{data}/downloads"
    return [], f"{missing[0]}{more} not in {places}"


def download_missing(dataset: str, data: str, archives: str) -> list[Path]:
    """The archives of a dataset of the catalogue, downloaded where they are missing."""
    files = FOLDERS[dataset].files
    paths = find_archives(files, data, archives)
    for name, (url, md5) in files.items():
        if name not in paths:
            paths[name] = download(url, Path(data) / "downloads" / name.replace("*", ""), md5)
    return [paths[name] for name in files]


# Read


class ImageFiles:
    """The files of a dataset: those below a folder, or single tables and what archives have in them.

    Of an archive `scan` unpacks the tables, and `unpack` the images that are asked for.
    """

    def __init__(self, paths: list[Path]):
        self.paths = paths
        self.inside: dict[str, Path] = {}  # file: where it lies, or will lie when it is unpacked
        self.unread: list[str] = []  # below folders: links that lead nowhere, folders that cannot be opened
        self.declared: dict[Path, dict[str, int]] = {}  # archive: the bytes of each file in it
        self.keys = []
        for path in paths:
            if path.is_dir():
                self.walk(path)
            else:
                self.keys.append(content_of_archive(path))

    def __str__(self) -> str:
        first = self.paths[0]
        if len(self.paths) == 1:
            return str(first)
        return f"{first.parent} ({first.name}, ...)"

    def walk(self, folder: Path) -> None:
        """Learn the names below a folder, and of each file its bytes and the time of its last change."""
        for name, path in below(folder, self.unread):
            status = path.stat()
            self.inside[name] = path
            self.keys.append((name, status.st_size, status.st_mtime_ns))

    def fingerprint(self) -> str:
        """12 hexadecimal digits that change with the content of a folder and of an archive."""
        return hashlib.blake2b(repr(sorted(self.keys)).encode(), digest_size=6).hexdigest()

    def scan(self, folder: Path) -> None:
        """Learn the names in all archives, and unpack their tables into `folder`. Stop if an archive is
        damaged, or has anything that leads outside it, is a link or is too large."""
        for path in self.paths:
            if path.name.lower().endswith(TABLE_ENDINGS):
                self.inside[path.name] = path
            elif path.is_file():
                with refusing_damage(path):
                    self.scan_archive(path, folder)

    def scan_archive(self, path: Path, folder: Path) -> None:
        sizes = self.declared[path] = {}
        total = of_tables = 0
        for name, size, extract in entries(path):
            total += size
            is_table = name.endswith(TABLE_ENDINGS)
            if is_table:
                of_tables += size
            refuse_large(path, name, size, total, of_tables)
            sizes[name] = size
            self.inside[name] = folder / name
            if is_table:
                extract(folder)

    def unpack(self, names: Iterable[str], folder: Path) -> None:
        """Unpack these files of the archives into `folder`. Stop if they do not fit on its disk."""
        wanted = set(names)
        needed = 0
        for sizes in self.declared.values():
            needed += sum(size for name, size in sizes.items() if name in wanted)
        free = shutil.disk_usage(folder.parent).free
        if needed > free:
            raise Stop(f"{self}: its images take {in_units(needed)} for a while below {folder.parent}, where "
                       f"{in_units(free)} are free: name another folder with --data, or make room")
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
            raise Stop(f"{self}: found no {ending}, which says what each image shows; get the archive again")
        name = min(names, key=shortest)
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
            raise Stop(f"{self}: {name} is no table with the columns {', '.join(columns)} ({e}); get it "
                       "again")
        return folder, values


def shortest(name: str) -> tuple[int, str]:
    """A key to sort by: of names of one length that which comes first in the alphabet."""
    return len(name), name


def content_of_archive(path: Path) -> tuple[int, str]:
    """(bytes, hash of the last MiB).

    There gzip has the checksum of everything, and zip its directory with a checksum for each file.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MIB))
        return size, hashlib.blake2b(file.read()).hexdigest()


def below(folder: Path, unread: list[str] | None = None) -> Iterator[tuple[str, Path]]:
    """(name, path) of each file below a folder; links are followed. The names of links that lead nowhere and
    of folders that cannot be opened are added to `unread`."""
    unread = [] if unread is None else unread
    waiting = [("", frozenset())]
    while waiting:
        prefix, parents = waiting.pop()
        status = os.stat(folder / prefix)
        here = (status.st_dev, status.st_ino)
        if here in parents:  # a link to a folder that it is in
            continue
        try:
            names = sorted(os.listdir(folder / prefix))
        except OSError:
            if not prefix:
                raise
            unread.append(prefix)
            continue
        for name in names:
            path = folder / prefix / name
            if path.is_file():
                yield prefix + name, path
            elif path.is_dir():
                waiting.append((f"{prefix}{name}/", parents | {here}))
            else:
                unread.append(prefix + name)


# Archives


@contextlib.contextmanager
def refusing_damage(path: Path):
    """Stop if what is read of an archive is damaged. A disk that is full is not its fault."""
    try:
        yield
    except DAMAGE as e:
        if isinstance(e, OSError) and e.errno == errno.ENOSPC:
            raise
        raise Stop(f"{path} is no whole archive ({e}); it may be truncated: get it again")


def entries(path: Path) -> Iterator[tuple[str, int, Callable[[Path], None]]]:
    """(name, declared bytes, what unpacks it into a folder until the next is asked for) of each file."""
    if path.suffix.lower() == ".zip":
        return zip_entries(path)
    return tar_entries(path)


def zip_entries(path: Path) -> Iterator[tuple[str, int, Callable[[Path], None]]]:
    with zipfile.ZipFile(path) as archive:  # never unpacks more than is declared, and compares checksums
        for entry in archive.infolist():
            if not entry.is_dir():
                yield inner(path, entry.filename), entry.file_size, partial(archive.extract, entry)


def tar_entries(path: Path) -> Iterator[tuple[str, int, Callable[[Path], None]]]:
    with open_tar(path) as stream:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=MIB, tarinfo=BoundedEntry) as tar:
            for entry in iter(tar.next, None):
                tar.members.clear()  # it would keep them all: 1 KiB for each image
                if entry.issym() or entry.islnk():
                    raise Stop(f"{path}: the entry {entry.name} is a link; the archive is not used")
                name = inner(path, entry.name).removeprefix("./")
                if not entry.isdir():
                    yield name, entry.size, partial(tar.extract, entry, set_attrs=False, filter="data")
        behind = 0
        for block in iter(partial(stream.read, MIB), b""):  # to the end, where gzip has its checksum
            behind += len(block)
            if behind > ENTRY:
                raise Stop(f"{path}: more than {in_units(ENTRY)} are behind its end; the archive is not "
                           "used: get it again")


def open_tar(path: Path):
    """The bytes of a tar archive, without the compression by gzip, which shows in the first two."""
    with open(path, "rb") as file:
        start = file.read(2)
    if start == b"\x1f\x8b":
        return gzip.open(path, "rb")
    return open(path, "rb")


class BoundedEntry(tarfile.TarInfo):
    """An entry of a tar archive; ReadError if it is a header, for a long name say, of more than a MiB."""

    @classmethod
    def frombuf(cls, buf, encoding, errors):
        entry = super().frombuf(buf, encoding, errors)
        if entry.type in NAMES and entry.size > MIB:
            raise tarfile.ReadError(f"a header of {in_units(entry.size)}")
        return entry


def inner(archive: Path, name: str) -> str:
    """The name of an entry. Stop if it leads outside: such an archive is not what it says."""
    absolute = re.match(r"[/\\]|[A-Za-z]:", name)
    if absolute or ".." in re.split(r"[/\\]", name):
        raise Stop(f"{archive}: the entry {name} leads outside the folder; the archive is not used")
    return name


def refuse_large(archive: Path, name: str, size: int, total: int, of_tables: int) -> None:
    """Stop if an image or a table, all entries up to it, or all tables among them declare too many bytes."""
    what = ""
    if size > ENTRY and name.lower().endswith(IMAGE_ENDINGS + TABLE_ENDINGS):
        what = f"the entry {name} declares {in_units(size)}; expected at most {in_units(ENTRY)}"
    elif total > TOTAL:
        what = f"its entries declare more than {in_units(TOTAL)}"
    elif of_tables > TABLES:
        what = f"its tables declare more than {in_units(TABLES)}"
    if what:
        raise Stop(f"{archive}: {what}; the archive is not used: get it again")
