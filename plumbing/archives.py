"""Where a dataset's files come from: found or downloaded, and read where they lie.

Nothing is unpacked to disk, so a path that leads outside its folder is refused on sight and never written.
What is unpacked into memory is bounded by the sizes that an archive declares, which are looked at first.
"""

from __future__ import annotations

import copy
import csv
import fnmatch
import gzip
import hashlib
import http.client
import io
import os
import re
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from plumbing.catalog import FOLDERS, Folders, own_folder
from plumbing.errors import Stop
from plumbing.files import in_units, locked

from tqdm import tqdm

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
TABLE_ENDINGS = (".csv", ".json", ".txt")
MIB = 1 << 20

# Bytes at most, unpacked. The largest official archives have some 12 GB of images of a few MB each.
ENTRY = 256 * MIB  # of an image or a table
TABLES = 1024 * MIB  # of the tables of a tar archive together, which are kept in memory
TOTAL = 65536 * MIB  # of an archive
STEP = 4096  # bytes that zipfile unpacks at a time at least, by however much they grow
NAMES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
         tarfile.GNUTYPE_LONGLINK)  # the headers of a tar archive that tarfile reads whole


# Found or downloaded


def find_archive(pattern: str, data: str, archives: str) -> Path | None:
    """The first file that matches `pattern` anywhere below --archives or in the downloads."""
    from types import SimpleNamespace
    return find_archives(SimpleNamespace(data=data, archives=archives), [pattern]).get(pattern)


def find_archives(args, patterns: Iterable[str]) -> dict[str, Path]:
    """{pattern: the first file that matches it below --archives or in the downloads}, where there is one."""
    folders = [Path(args.data) / "downloads"]
    if args.archives:
        folders.insert(0, Path(args.archives))
    archives = {}
    for folder in folders:
        if not folder.is_dir():
            continue
        for path in sorted(folder.rglob("*")):
            for pattern in patterns:
                if pattern in archives:
                    continue
                if fnmatch.fnmatch(path.name.lower(), pattern.lower()) and path.is_file():
                    archives[pattern] = path
    return archives


def download(url: str, path: Path, md5: str | None = None) -> Path:
    """Fetch `url` to `path`, with a progress bar. An interrupted download goes on where it stopped."""
    try:
        with locked(path.with_name(f".{path.name}.lock")):
            for _ in range(2):
                if path.exists() or fetch(url, path, md5):
                    return path
        raise OSError("the server refuses to go on with the part that is there")
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise Stop(f"could not download {path.name} from {url} ({e}); download it by hand, under this name, "
                   "and name its folder with --archives")


def fetch(url: str, path: Path, md5: str | None) -> bool:
    """One request for what is missing of `path`; False if the part that was there was useless; it is gone."""
    part = path.with_name(path.name + ".part")
    headers = {}
    if part.exists() and part.stat().st_size:
        headers["Range"] = f"bytes={part.stat().st_size}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        reply = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as e:
        if e.code != 416:  # 416: nothing lies behind the part, so it is whole or wrong
            raise
        part.unlink()
        return False
    with reply:
        receive(reply, part, path.name)
    if md5:
        check_md5(part, md5)
    os.replace(part, path)
    return True


def receive(reply, part: Path, name: str) -> None:
    """Write what a server answers to `part`, behind what is there if the server goes on from there."""
    if "text/html" in (reply.headers["Content-Type"] or ""):
        raise OSError("the answer is a web page instead of the file: Google Drive asks for a confirmation "
                      "in a browser")
    mode = "ab" if reply.status == 206 else "wb"
    with open(part, mode) as file:
        whole = None
        if reply.headers["Content-Length"]:
            whole = file.tell() + int(reply.headers["Content-Length"])
        bar = tqdm(total=whole, initial=file.tell(), unit="B", unit_scale=True, desc=name, disable=None)
        with bar:
            for block in iter(partial(reply.read, MIB), b""):
                bar.update(file.write(block))
        if whole is not None and file.tell() != whole:
            raise OSError(f"expected {whole} bytes, got {file.tell()}; the same command goes on from there")


def check_md5(part: Path, md5: str) -> None:
    """Delete what was downloaded and raise if its md5 is another."""
    with open(part, "rb") as file:
        actual = hashlib.file_digest(file, "md5").hexdigest()
    if actual != md5:
        part.unlink()
        raise OSError(f"expected md5 {md5}, found {actual}; what was downloaded is deleted")


def unpacked(args, dataset: str) -> Path | None:
    """The folder with a dataset's unpacked images, if there is one.

    It is `dataset` in --data, or its archive's folder in --archives or --data.
    """
    own = Path(args.data) / dataset  # where it has no files that is said, see `locate`
    if own.is_dir():
        return own
    name = FOLDERS[dataset].unpacked
    for base in (args.archives, args.data):
        if base and name:
            folder = Path(base) / name
            if has_folders(folder):  # else it holds only archives
                return folder
    return None


def has_folders(folder: Path) -> bool:
    return folder.is_dir() and any(path.is_dir() for path in folder.iterdir())


def existing(folder: Path) -> Path:
    """The folder of one's own images. Stop if there is none."""
    if folder.is_dir():
        return folder
    what = "is a file" if folder.exists() else "does not exist"
    raise Stop(f"--dataset folder:{folder}: {what}; expected a folder with images in <domain>/<class>/", 2)


def has_files(folder: Path) -> bool:
    return any(True for _ in below(folder))


def lacking(args, source: Folders) -> str:
    """What a dataset would be read from and is not here; nothing if all of it is."""
    if own_folder(args.dataset):
        return ""
    folder = unpacked(args, args.dataset)
    if folder:
        return "" if has_files(folder) else f"{folder} has no files"
    archives = find_archives(args, source.files)
    missing = [pattern for pattern in source.files if pattern not in archives]
    if not missing:
        return ""
    more = f" and {len(missing) - 1} more files are" if len(missing) > 1 else " is"
    places = [str(Path(args.data) / "downloads")]
    if args.archives:
        places.insert(0, str(args.archives))
    return f"{missing[0]}{more} not in {' or '.join(places)}"


def locate(args, source: Folders) -> list[Path]:
    """What a dataset is read from: a folder with its unpacked images, its archives, or downloads. Stop if the
    folder has no files."""
    own = own_folder(args.dataset)
    if own:
        return [existing(own)]
    folder = unpacked(args, args.dataset)
    if folder and not has_files(folder):
        raise Stop(f"{folder} has no files; expected in it {expected_content(source)}: fill it, or remove it "
                   f"so that {source.archive} is looked for")
    if folder:
        return [folder]
    archives = find_archives(args, source.files)
    downloads = Path(args.data) / "downloads"
    paths = []
    for pattern, (url, md5) in source.files.items():
        if pattern in archives:
            paths.append(archives[pattern])
        else:
            paths.append(fetched(args, source, url, downloads / pattern.replace("*", ""), md5))
    return paths


def fetched(args, source: Folders, url: str, path: Path, md5: str | None) -> Path:
    """A download. Stop if it fails, with what was looked for and where."""
    try:
        return download(url, path, md5)
    except Stop as stop:
        raise Stop(f"{lacking(args, source)}; {stop}")


def expected_content(source: Folders) -> str:
    """What the folder of a dataset's unpacked images has in it, in words."""
    if source.layout != "in_folders":
        return f"what {', '.join(list(source.files)[:3])} has in it"
    folders = ", ".join(folder for folder, _ in source.domains.values())
    classes = ", ".join(source.classes[:10]) + (", ..." if len(source.classes) > 10 else "")
    return f"the folders {folders}, each with the class folders {classes}"


# Read where they lie


class ImageFiles:
    """The files of a dataset where they lie: below a folder, in zip and tar archives, or single (lists).

    A zip archive is read at random. A tar archive is compressed as a whole: it is read from its beginning to
    its end, once to learn what is in it and once to decode that.
    """

    def __init__(self, paths: list[Path]):
        self.paths = paths
        self.tars: list[Path] = []
        self.inside: dict[str, Path | zipfile.ZipFile] = {}  # file: what it is read from; filled by `scan`
        self.tables: dict[str, bytes] = {}  # the small tables in tar archives
        self.unread: list[str] = []  # below folders: links that lead nowhere, folders that cannot be opened

    def __str__(self) -> str:
        first = self.paths[0]
        if len(self.paths) == 1:
            return str(first)
        return f"{first.parent} ({first.name}, ...)"

    def fingerprint(self) -> str:
        """12 hexadecimal digits that change with the content of a folder and of an archive, see below."""
        keys = []
        for path in self.paths:
            if path.is_dir():
                keys += content_of_folder(path)
            else:
                keys.append(content_of_archive(path))
        return hashlib.blake2b(repr(sorted(keys)).encode(), digest_size=6).hexdigest()

    def scan(self) -> None:
        """Learn the names of all files. Stop if an archive is damaged or has a name that leads outside it."""
        for path in self.paths:
            if path.is_dir():
                self.inside.update(below(path, self.unread))
            elif path.name.lower().endswith(TABLE_ENDINGS):
                self.inside[path.name] = path
            elif path.suffix.lower() == ".zip":
                self.scan_zip(path)
            else:
                self.scan_tar(path)

    def scan_zip(self, path: Path) -> None:
        try:
            archive = zipfile.ZipFile(path)  # NotImplementedError: a zip version that Python lacks
        except (zipfile.BadZipFile, NotImplementedError, OSError) as e:
            raise Stop(f"{path} is no whole zip archive ({e}); it may be truncated: get it again")
        total = 0
        for entry in archive.infolist():
            if not entry.is_dir():
                self.inside[inner(path, entry.filename)] = archive
                total += entry.file_size
                refuse_large(path, entry.filename, entry.file_size, total)

    def scan_tar(self, path: Path) -> None:
        self.tars.append(path)
        for name, read in walk_tar(path):
            self.inside[name] = path
            if name.endswith(TABLE_ENDINGS):
                self.tables[name] = read()
                if sum(map(len, self.tables.values())) > TABLES:
                    raise Stop(f"{path}: its tables have more than {in_units(TABLES)}; the archive is not "
                               "used: get it again")

    def read(self, name: str) -> bytes:
        """The content of one file, which is not an image in a tar archive."""
        if name in self.tables:
            return self.tables[name]
        origin = self.inside[name]
        if isinstance(origin, zipfile.ZipFile):
            return read_entry(origin, name)
        return origin.read_bytes()

    def read_all(self, names: list[str]) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """(name, what reads it) of each file, in the order in which a tar archive has them, else as given.

        The content of a file in a tar archive is there already, as it can only be read in passing.
        """
        wanted = set(names)
        for path in self.tars:
            for name, read in walk_tar(path):
                if name in wanted:
                    wanted.discard(name)
                    yield name, partial(bytes, read())
        for name in names:
            if name in wanted:
                yield name, partial(self.read, name)

    def table(self, ending: str) -> tuple[str, str]:
        """The text file whose path ends so: the folder it is in ("" or "x/y/") and its content."""
        names = [name for name in self.inside if f"/{name}".endswith(f"/{ending}")]
        if not names:
            raise Stop(f"{self}: found no {ending}, which says what each image shows; get the archive again")
        name = min(names, key=shortest)
        folder = name.removesuffix(ending)
        return folder, self.read_table(name).decode("utf-8-sig", "replace")

    def read_table(self, name: str) -> bytes:
        """The content of a text file. Stop if it is damaged."""
        try:
            return self.read(name)
        except (zipfile.BadZipFile, EOFError, zlib.error, RuntimeError, NotImplementedError) as e:
            raise Stop(f"{self}: {name} cannot be read ({e}); get the archive again")

    def rows(self, name: str, *columns: str) -> tuple[str, Iterator[list[str]]]:
        """A csv table: the folder it is in, and of each row the values in `columns`."""
        folder, text = self.table(name)
        reader = csv.reader(io.StringIO(text))
        header = next(reader, [])
        missing = [column for column in columns if column not in header]
        if missing:
            raise Stop(f"{self}: {name} has no column {missing[0]}; expected {', '.join(columns)}, "
                       f"found {', '.join(header)}")
        positions = [header.index(column) for column in columns]
        return folder, self.values(name, reader, len(header), positions)

    def values(self, name: str, reader, width: int, positions: list[int]) -> Iterator[list[str]]:
        """Of each row of a csv table, which must have `width` values, those at `positions`."""
        try:
            for row in reader:
                if len(row) != width:
                    line = reader.line_num
                    raise Stop(f"{self}: line {line} of {name} has {len(row)} values; expected {width}")
                yield [row[i] for i in positions]
        except csv.Error as e:
            raise Stop(f"{self}: {name} is no csv table ({e}, after line {reader.line_num}); get it again")


def shortest(name: str) -> tuple[int, str]:
    """A key to sort by: of names of one length that which comes first in the alphabet."""
    return len(name), name


def content_of_folder(folder: Path) -> list[tuple[str, int, int]]:
    """(name, bytes, time of the last change in ns) of each file below a folder."""
    keys = []
    for name, path in below(folder):
        status = path.stat()
        keys.append((name, status.st_size, status.st_mtime_ns))
    return keys


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


def inner(archive: Path, name: str) -> str:
    """The name of an entry. Stop if it leads outside.

    Nothing is unpacked, but such an archive is not what it says.
    """
    absolute = re.match(r"[/\\]|[A-Za-z]:", name)
    if absolute or ".." in re.split(r"[/\\]", name):
        raise Stop(f"{archive}: the entry {name} leads outside the folder; the archive is not used")
    return name


def refuse_large(archive: Path, name: str, size: int, total: int) -> None:
    """Stop if an entry that is read, or all entries up to it together, declare too many bytes."""
    what = ""
    if size > ENTRY and name.lower().endswith(IMAGE_ENDINGS + TABLE_ENDINGS):
        what = f"the entry {name} declares {in_units(size)}; expected at most {in_units(ENTRY)}"
    elif total > TOTAL:
        what = f"its entries declare more than {in_units(TOTAL)}"
    if what:
        raise Stop(f"{archive}: {what}; the archive is not used: get it again")


def read_entry(archive: zipfile.ZipFile, name: str) -> bytes:
    """The content of an entry of a zip archive, of which never more than it declares is unpacked. Stop if
    there is more."""
    entry = copy.copy(archive.getinfo(name))
    declared = entry.file_size
    entry.file_size += ENTRY  # zipfile would cut what it unpacks there, and see a wrong checksum alone
    content = bytearray()
    with archive.open(entry) as stream:
        for block in iter(partial(stream.read, STEP), b""):
            content += block
            if len(content) > declared:
                raise Stop(f"{archive.filename}: the entry {name} has more than the {declared} bytes that it "
                           "declares; the archive is not used: get it again")
    return bytes(content)


class BoundedEntry(tarfile.TarInfo):
    """An entry of a tar archive; ReadError if it is a header, for a long name say, of more than a MiB."""

    @classmethod
    def frombuf(cls, buf, encoding, errors):
        entry = super().frombuf(buf, encoding, errors)
        if entry.type in NAMES and entry.size > MIB:
            raise tarfile.ReadError(f"a header of {in_units(entry.size)}")
        return entry


def walk_tar(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """(name, what reads it until the next one is asked for) of each file of a tar archive, gzipped or not."""
    try:
        with open_tar(path) as stream:
            with tarfile.open(fileobj=stream, mode="r|", bufsize=MIB, tarinfo=BoundedEntry) as tar:
                total = 0
                for entry in iter(tar.next, None):
                    tar.members.clear()  # it would keep them all: 1 KiB for each image
                    if entry.issym() or entry.islnk():
                        raise Stop(f"{path}: the entry {entry.name} is a link; the archive is not used")
                    name = inner(path, entry.name).removeprefix("./")
                    total += entry.size
                    refuse_large(path, name, entry.size, total)
                    if entry.isfile():
                        yield name, partial(read_whole, path, tar.extractfile(entry))
            behind = 0
            for block in iter(partial(stream.read, MIB), b""):  # to the end, where gzip has its checksum
                behind += len(block)
                if behind > ENTRY:
                    raise Stop(f"{path}: more than {in_units(ENTRY)} are behind its end; the archive is not "
                               "used: get it again")
    except (tarfile.TarError, EOFError, OSError, zlib.error, RecursionError) as e:
        raise Stop(f"{path} is no whole tar archive ({e}); it may be truncated: get it again")


def read_whole(path: Path, entry: IO[bytes]) -> bytes:
    """The content of an entry of a tar archive. Stop if the archive ends or is damaged in it."""
    try:
        return entry.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as e:
        raise Stop(f"{path} is no whole tar archive ({e}); it may be truncated: get it again")


def open_tar(path: Path):
    """The bytes of a tar archive, without the compression by gzip, which shows in the first two."""
    with open(path, "rb") as file:
        start = file.read(2)
    if start == b"\x1f\x8b":
        return gzip.open(path, "rb")
    return open(path, "rb")
