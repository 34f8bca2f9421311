"""The datasets: where their archives come from, what is in them, and how they become domains of uint8 pixels.

Each dataset is read straight from its archives (nothing is unpacked to disk), checked against its known classes and counts
(catalog.py), and decoded once into a memory-mapped cache. `load_domains` is what the round loop calls. Neither the memory nor
the time to start a run grows with the pixels: reading is never more than a few images ahead of decoding, and a run opens the
cache without touching them.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import errno
import fnmatch
import gzip
import hashlib
import http.client
import io
import json
import mmap
import os
import re
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from basics import Stop, locked, seed_all
from catalog import FOLDERS, Folders


@dataclass
class Domain:
    """One domain: its name, images uint8 [N, C, H, W] (stored channels last) and labels int64 [N]."""

    name: str
    images: Tensor
    labels: Tensor


ANGLES = (0, 15, 30, 45, 60, 75)  # degrees, counter-clockwise (FedSR, Sec. 4.1)
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
TABLE_ENDINGS = (".csv", ".json", ".txt")
FLUSHED = 256 << 20  # bytes of decoded pixels after which they are written to disk


def load_domains(args) -> tuple[list[Domain], tuple[str, ...]]:
    """The domains of `args.dataset` at `args.image_size`, and the class names."""
    if args.archives and not Path(args.archives).is_dir():
        raise Stop(f"--archives {args.archives} is not a folder", 2)
    if args.dataset == "digits":
        domains, classes = load_digits(args.image_size), tuple("0123456789")
    elif args.dataset in ("rotatedmnist", "rotatedmnist-t10k"):
        images, labels = read_mnist(args, train=args.dataset == "rotatedmnist")
        domains, classes = rotated_mnist(images, labels, args.image_size), tuple("0123456789")
    else:
        domains, classes = load_folders(args, FOLDERS[args.dataset])
    if args.limit:
        for d in domains:
            keep = torch.randperm(len(d.labels), generator=seed_all(args.seed, "limit", seed_name(args, d.name)))[:args.limit]
            d.images, d.labels = d.images[keep], d.labels[keep]
    for d in domains:
        if len(d.labels) < len(classes):
            raise Stop(f"domain {d.name} has {len(d.labels)} images, fewer than the {len(classes)} classes; "
                       f"{'raise --limit' if args.limit else 'look at its folder'}")
    return domains, classes


def seed_name(args, domain: str) -> str:
    """What stands for a domain in the seeds of its split. RotatedMNIST's domains are rotations of the same images: they are
    limited, dealt out and split alike, so that an image is never trained on in one domain and tested in another."""
    return "" if args.dataset.startswith("rotatedmnist") else domain


def rotate(images: Tensor, angle: float, size: int) -> Tensor:
    """uint8 [N, 1, h, w] -> [N, 1, size, size], resized and turned counter-clockwise by `angle` degrees, bilinear."""
    from torchvision.transforms.v2 import InterpolationMode, functional
    if images.shape[-1] != size:
        images = functional.resize(images, [size, size], antialias=True)
    images = functional.rotate(images, angle, interpolation=InterpolationMode.BILINEAR) if angle else images
    return images.contiguous(memory_format=torch.channels_last)


def load_digits(size: int) -> list[Domain]:
    """scikit-learn's 1,797 handwritten digits (8x8), dealt out to six rotations: no image is in two domains."""
    from sklearn.datasets import load_digits as sklearn_digits
    bunch = sklearn_digits()
    images = torch.from_numpy(bunch.images * (255 / 16)).round().to(torch.uint8)[:, None]  # [1797, 1, 8, 8]
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=seed_all("digits"))
    return [Domain(f"d{a}", rotate(images[order[i::6]], a, size), labels[order[i::6]]) for i, a in enumerate(ANGLES)]


def rotated_mnist(images: Tensor, labels: Tensor, size: int) -> list[Domain]:
    """FedSR's protocol: the same 1,000 images, 100 of each class, are turned by each of six angles.

    Which images is not published: ours are drawn with a fixed seed. One image is in all domains, once in each.
    """
    order = torch.randperm(len(labels), generator=seed_all("rotatedmnist"))
    picked = torch.cat([order[labels[order] == c][:100] for c in range(10)])
    if len(picked) < 1000:
        raise Stop(f"MNIST: expected at least 100 images of each of 10 classes, found {labels.bincount().tolist()}")
    return [Domain(f"m{a}", rotate(images[picked], a, size), labels[picked]) for a in ANGLES]


def read_mnist(args, train: bool) -> tuple[Tensor, Tensor]:
    """MNIST from its gzip files (in --archives, else downloaded): images uint8 [N, 1, 28, 28], labels int64 [N]."""
    kind, count = ("train", 60000) if train else ("t10k", 10000)
    md5s, mirrors, arrays = dict(torchvision.datasets.MNIST.resources), torchvision.datasets.MNIST.mirrors, []
    for part, magic in (("images-idx3", 2051), ("labels-idx1", 2049)):
        name = f"{kind}-{part}-ubyte.gz"
        path = find_archive(args, name) or download(mirrors[-1] + name, Path(args.data) / "downloads" / name)
        found = hashlib.md5(path.read_bytes()).hexdigest()
        if found != md5s[name]:
            raise Stop(f"{path}: expected md5 {md5s[name]}, found {found}; the file is damaged, get it again")
        with gzip.open(path) as f:
            raw = f.read()
        if int.from_bytes(raw[:4], "big") != magic or int.from_bytes(raw[4:8], "big") != count:
            raise Stop(f"{path}: not the MNIST file of {count} {part.split('-')[0]}")
        arrays.append(torch.frombuffer(bytearray(raw[16 if magic == 2051 else 8:]), dtype=torch.uint8))
    return arrays[0].view(count, 1, 28, 28), arrays[1].long()


def find_archive(args, pattern: str) -> Path | None:
    """The first file that matches `pattern` anywhere below --archives or in the downloads."""
    return find_archives(args, [pattern]).get(pattern)


def find_archives(args, patterns) -> dict[str, Path]:
    """{pattern: the first file that matches it anywhere below --archives or in the downloads}; without those not found."""
    found = {}
    for folder in ([Path(args.archives)] if args.archives else []) + [Path(args.data) / "downloads"]:
        for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
            for pattern in patterns:
                if pattern not in found and fnmatch.fnmatch(path.name.lower(), pattern.lower()) and path.is_file():
                    found[pattern] = path
    return found


def download(url: str, path: Path, md5: str | None = None) -> Path:
    """Fetch `url` to `path`, with a progress bar. An interrupted download goes on where it stopped."""
    try:
        with locked(path.with_name(f".{path.name}.lock")):
            for _ in range(2):
                if path.exists() or fetch(url, path, md5):
                    return path
        raise OSError("the server refuses to go on with the part that is there")
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise Stop(f"could not download {path.name} from {url} ({e}); download it by hand, under this name, and name its folder with --archives")


def fetch(url: str, path: Path, md5: str | None) -> bool:
    """One request for what is missing of `path`; False if the part that was there was of no use and is gone now."""
    part = path.with_name(path.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        reply = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as e:
        if e.code != 416:  # 416: nothing lies behind the part, so it is whole or wrong
            raise
        part.unlink()
        return False
    with reply:
        if "text/html" in (reply.headers["Content-Type"] or ""):
            raise OSError("the answer is a web page instead of the file: Google Drive asks for a confirmation in a browser")
        with open(part, "ab" if reply.status == 206 else "wb") as file:
            total = file.tell() + int(reply.headers["Content-Length"]) if reply.headers["Content-Length"] else None
            with tqdm(total=total, initial=file.tell(), unit="B", unit_scale=True, desc=path.name, disable=None) as bar:
                while block := reply.read(1 << 20):
                    bar.update(file.write(block))
            if total not in (None, file.tell()):
                raise OSError(f"expected {total} bytes, got {file.tell()}; the same command goes on from there")
    if md5:
        with open(part, "rb") as file:
            found = hashlib.file_digest(file, "md5").hexdigest()
        if found != md5:
            part.unlink()
            raise OSError(f"expected md5 {md5}, found {found}; what was downloaded is deleted")
    os.replace(part, path)
    return True


def unpacked(args, dataset: str) -> Path | None:
    """The folder with a dataset's unpacked images, if there is one: `dataset` in --data, or its archive's folder in --archives or --data."""
    own, name = Path(args.data) / dataset, FOLDERS[dataset].unpacked
    if own.is_dir():
        return own
    folders = [Path(b) / name for b in (args.archives, args.data) if b and name]
    return next((f for f in folders if f.is_dir() and any(p.is_dir() for p in f.iterdir())), None)  # else it only has archives


def locate(args, source: Folders) -> list[Path]:
    """What a dataset is read from: a folder with its unpacked images, else its archives, downloaded if they are missing."""
    if folder := unpacked(args, args.dataset):
        return [folder]
    found, downloads = find_archives(args, source.files), Path(args.data) / "downloads"
    return [found.get(pattern) or download(url, downloads / pattern.replace("*", ""), md5)
            for pattern, (url, md5) in source.files.items()]


class ImageFiles:
    """The files of a dataset where they lie: below a folder, in zip and tar archives, or by themselves (a list of images).

    A zip archive is read at random. A tar archive is compressed as a whole: it is read from its beginning to its end, once
    to learn what is in it and once to decode that.
    """

    def __init__(self, paths: list[Path]):
        self.paths, self.tars = paths, []
        self.inside: dict[str, Path | zipfile.ZipFile] = {}  # name of a file: what it is read from; filled by `scan`
        self.tables: dict[str, bytes] = {}  # the small tables in tar archives

    def __str__(self) -> str:
        return str(self.paths[0]) if len(self.paths) == 1 else f"{self.paths[0].parent} ({self.paths[0].name}, ...)"

    def fingerprint(self) -> str:
        """Changes with the content: of a folder the names, sizes and times; of an archive the size and the last MiB, where
        gzip has the checksum of everything and zip its directory with a checksum for each file."""
        keys = []
        for path in self.paths:
            if path.is_dir():
                keys += [(n, s.st_size, s.st_mtime_ns) for n, s in ((n, p.stat()) for n, p in below(path))]
            else:
                with open(path, "rb") as f:
                    size = f.seek(0, os.SEEK_END)
                    f.seek(max(0, size - (1 << 20)))
                    keys.append((size, hashlib.blake2b(f.read()).hexdigest()))
        return hashlib.blake2b(repr(sorted(keys)).encode(), digest_size=6).hexdigest()

    def scan(self) -> None:
        """Learn the names of all files. Stop if an archive is damaged or has a name that leads outside it."""
        for path in self.paths:
            if path.is_dir():
                self.inside.update(below(path))
            elif path.name.lower().endswith(TABLE_ENDINGS):
                self.inside[path.name] = path
            elif path.suffix.lower() == ".zip":
                try:
                    archive = zipfile.ZipFile(path)
                except (zipfile.BadZipFile, NotImplementedError, OSError) as e:  # the second: a zip version that Python lacks
                    raise Stop(f"{path} is no whole zip archive ({e}); it may be truncated: get it again")
                self.inside.update((inner(path, i.filename), archive) for i in archive.infolist() if not i.is_dir())
            else:
                self.tars.append(path)
                for name, read in walk_tar(path):
                    self.inside[name] = path
                    if name.endswith(TABLE_ENDINGS):
                        self.tables[name] = read()

    def read(self, name: str) -> bytes:
        """The content of one file, which is not an image in a tar archive."""
        if name in self.tables:
            return self.tables[name]
        origin = self.inside[name]
        return origin.read(name) if isinstance(origin, zipfile.ZipFile) else origin.read_bytes()

    def read_all(self, names: list[str]) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """(name, what reads it) of each file, in the order in which a tar archive has them, else as given. The content of a
        file in a tar archive is there already, as it can only be read in passing."""
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
        names = sorted((n for n in self.inside if f"/{n}".endswith(f"/{ending}")), key=lambda n: (len(n), n))
        if not names:
            raise Stop(f"{self}: found no {ending}, which says what each image shows; get the archive again")
        return names[0].removesuffix(ending), self.read(names[0]).decode("utf-8-sig", "replace")

    def rows(self, name: str, *columns: str) -> tuple[str, Iterator[list[str]]]:
        """A csv table: the folder it is in, and of each row the values in `columns`."""
        folder, text = self.table(name)
        rows = csv.reader(io.StringIO(text))
        header = next(rows, [])
        if missing := [c for c in columns if c not in header]:
            raise Stop(f"{self}: {name} has no column {missing[0]}; expected {', '.join(columns)}, found {', '.join(header)}")
        at = [header.index(c) for c in columns]

        def values():
            for row in rows:
                if len(row) != len(header):
                    raise Stop(f"{self}: line {rows.line_num} of {name} has {len(row)} values; expected {len(header)}")
                yield [row[i] for i in at]
        return folder, values()


def below(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name, path) of each file below a folder; links are followed at its top only."""
    for top in sorted(folder.iterdir()):
        yield from ((p.relative_to(folder).as_posix(), p) for p in [top, *top.rglob("*")] if p.is_file())


def inner(archive: Path, name: str) -> str:
    """The name of an entry. Stop if it leads outside: nothing is unpacked to disk, but such an archive is not what it says."""
    if re.match(r"[/\\]|[A-Za-z]:", name) or ".." in re.split(r"[/\\]", name):
        raise Stop(f"{archive}: the entry {name} leads outside the folder; the archive is not used")
    return name


def walk_tar(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """(name, what reads it until the next one is asked for) of each file of a tar archive, which may be compressed by gzip."""
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        with (gzip.open if zipped else open)(path, "rb") as stream:
            with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 20) as tar:
                while entry := tar.next():
                    tar.members.clear()  # it would keep them all: 1 KiB for each image
                    if entry.issym() or entry.islnk():
                        raise Stop(f"{path}: the entry {entry.name} is a link; the archive is not used")
                    name = inner(path, entry.name).removeprefix("./")
                    if entry.isfile():
                        yield name, tar.extractfile(entry).read
            while stream.read(1 << 20):  # to the end, where gzip compares its checksum
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error) as e:
        raise Stop(f"{path} is no whole tar archive ({e}); it may be truncated: get it again")


@dataclass
class Listing:
    """Which files are the images of a dataset, in a fixed order."""

    classes: tuple[str, ...]
    images: dict[str, list[tuple[str, int]]]  # domain: (file, label) of each image
    left_out: list[str] = field(default_factory=list)  # files among them that are no images


def in_folders(files: ImageFiles, source: Folders) -> Listing:
    """Images in folders <domain>/<class>/ (or deeper)."""
    first = next(iter(source.domains.values()))[0]
    roots = {f"/{n}".split(f"/{first}/")[0] for n in files.inside if f"/{first}/" in f"/{n}"}
    if not roots:
        raise Stop(f"{files}: found no folder {first}; expected the folders "
                   f"{', '.join(f for f, _ in source.domains.values())}, each with one folder for each class")
    root, found = f"{min(roots, key=lambda r: (len(r), r))}/"[1:], Listing(source.classes, {})
    for name, (folder, _) in source.domains.items():
        of_class = collections.defaultdict(list)
        for n in sorted(n for n in files.inside if n.startswith(f"{root}{folder}/")):
            c, slash, _ = n.removeprefix(f"{root}{folder}/").partition("/")
            if slash:
                of_class[c].append(n)
        for c in source.classes:
            if not any(map(is_image, of_class[c])):
                there = sorted(c for c in of_class if of_class[c])
                raise Stop(f"{files}: domain {name} has no images in {folder}/{c}; expected the class folders "
                           f"{', '.join(source.classes)}, found {', '.join(there) or 'none'}")
            found.left_out += [n for n in of_class[c] if not is_image(n)]
        found.images[name] = [(n, y) for y, c in enumerate(source.classes) for n in of_class[c] if is_image(n)]
    return found


def in_lists(files: ImageFiles, source: Folders) -> Listing:
    """DomainNet: the images <domain>/<class>/<file> that <domain>_train.txt and <domain>_test.txt name, of our classes."""
    labels, found = {c: y for y, c in enumerate(source.classes)}, Listing(source.classes, {})
    for name, (folder, _) in source.domains.items():
        images = set()
        for table in (f"{folder}_train.txt", f"{folder}_test.txt"):
            root, text = files.table(table)
            for line in text.splitlines():
                image = line.rpartition(" ")[0]
                if image.count("/") != 2:
                    raise Stop(f"{files}: expected lines such as '{folder}/bird/x.jpg 31' in {table}, found '{line}'")
                if (c := image.split("/")[1]) in labels:
                    there = next((n for n in (image, root + image) if n in files.inside), None)
                    if there is None:
                        raise Stop(f"{files}: {table} names {image}, which is not there; get {folder}.zip again")
                    images.add((there, labels[c]))
        found.images[name] = sorted(images, key=lambda i: (i[1], i[0]))
        present = {y for _, y in images}
        if missing := [c for c, y in labels.items() if y not in present]:
            raise Stop(f"{files}: the lists of domain {name} name no image of {', '.join(missing)}; get them again")
    return found


def in_camera_traps(files: ImageFiles, source: Folders) -> Listing:
    """TerraIncognita: already dealt out to folders location_38/<class>/, or from the annotations, as DomainBed's script does.

    An image with animals of two of the classes is in both of them, there as here.
    """
    if any("/location_38/" in f"/{n}" for n in files.inside):
        return in_folders(files, source)
    at = {Path(n).name: n for n in files.inside if is_image(n)}
    categories, images, shown = {}, {}, set()
    for name in sorted(n for n in files.inside if n.endswith("_annotations.json") and not Path(n).name.startswith(".")):
        try:
            table = json.loads(files.read(name))
            categories |= {c["id"]: c["name"] for c in table["categories"]}
            images |= {i["id"]: (f"location_{i['location']}", i["file_name"]) for i in table["images"]}
            shown |= {(a["image_id"], a["category_id"]) for a in table["annotations"]}
        except (ValueError, KeyError, TypeError) as e:
            raise Stop(f"{files}: {name} is no list of images, categories and annotations ({type(e).__name__}: {e})")
    found = Listing(source.classes, {d: [] for d in source.domains})
    for i, c in shown:
        location, image = images.get(i, ("", ""))
        if location in found.images and categories.get(c) in source.classes:
            if image not in at:
                raise Stop(f"{files}: the annotations name {image}, which is in no archive; get {source.archive} again")
            found.images[location].append((at[image], source.classes.index(categories[c])))
    for location, of_location in found.images.items():
        of_location.sort(key=lambda i: (i[1], i[0]))
        if not of_location:
            raise Stop(f"{files}: the annotations name no image of {location}; expected *_annotations.json of ECCV 2018")
    return found


def in_camelyon17(files: ImageFiles, source: Folders) -> Listing:
    """WILDS' Camelyon17: a patch for each row of metadata.csv; the hospital is its center, the label whether it has tumor."""
    root, rows = files.rows("metadata.csv", "patient", "node", "x_coord", "y_coord", "tumor", "center")
    hospitals = {folder: name for name, (folder, _) in source.domains.items()}
    found = Listing(source.classes, {d: [] for d in source.domains})
    for patient, node, x, y, tumor, center in rows:
        slide = f"patient_{patient}_node_{node}"
        name = f"{root}patches/{slide}/patch_{slide}_x_{x}_y_{y}.png"
        if center not in hospitals or tumor not in ("0", "1") or name not in files.inside:
            raise Stop(f"{files}: metadata.csv names {name} of center {center} with tumor {tumor}; expected a patch that is "
                       f"there, a center of {', '.join(hospitals)}, and 0 or 1; get the archive again")
        found.images[hospitals[center]].append((name, int(tumor)))
    for of_hospital in found.images.values():
        of_hospital.sort(key=lambda i: (i[1], i[0]))
    return found


def in_iwildcam(files: ImageFiles, source: Folders) -> Listing:
    """WILDS' iWildCam as FedCiR has it: the ten cameras with most images and the ten classes with most images in them.

    Images that show no animal are dropped first. Ties go to the name that sorts first; labels and cameras are in this order.
    """
    _, named = files.rows("categories.csv", "y", "name")
    root, rows = files.rows("metadata.csv", "y", "location_remapped", "filename")
    names, cameras = dict(named), collections.defaultdict(list)
    for y, location, image in rows:
        if (c := names.get(y, f"class_{y}")) != "empty":
            cameras[f"camera_{location}"].append((f"{root}train/{image}", c))
    kept = sorted(cameras, key=lambda k: (-len(cameras[k]), k))[:10]
    counts = collections.Counter(c for k in kept for _, c in cameras[k])
    labels = {c: y for y, c in enumerate(sorted(counts, key=lambda c: (-counts[c], c))[:10])}
    if len(kept) < 10 or len(labels) < 10:
        raise Stop(f"{files}: expected at least 10 cameras and 10 classes with images in metadata.csv, found {len(kept)} and "
                   f"{len(labels)}; get the archive again")
    found = Listing(tuple(labels), {})
    for k in kept:
        found.images[k] = sorted(((n, labels[c]) for n, c in cameras[k] if c in labels), key=lambda i: (i[1], i[0]))
        if missing := [n for n, _ in found.images[k] if n not in files.inside]:
            raise Stop(f"{files}: metadata.csv names {missing[0]}, which is not there; get the archive again")
    return found


LAYOUTS = {f.__name__: f for f in (in_folders, in_lists, in_camera_traps, in_camelyon17, in_iwildcam)}


def is_image(name: str) -> bool:
    """By the ending of its name; ._x.jpg is what macOS puts beside x.jpg."""
    return name.lower().endswith(IMAGE_ENDINGS) and not Path(name).name.startswith("._")


def list_images(files: ImageFiles, source: Folders) -> Listing:
    """The images of a dataset; Stop if they are not as many as expected."""
    files.scan()
    listing = LAYOUTS[source.layout](files, source)
    for name, images in listing.images.items():
        count = source.domains[name][1] if source.domains else None
        if not images or count not in (None, len(images)):
            raise Stop(f"{files}: domain {name} has {len(images)} images; expected {count or 'some'}")
    return listing


def load_folders(args, source: Folders) -> tuple[list[Domain], tuple[str, ...]]:
    """A dataset of image files: decoded once into a memory-mapped uint8 cache, then opened from there."""
    size, files = args.image_size, ImageFiles(locate(args, source))
    cache = Path(args.data) / "cache" / f"{args.dataset}-{size}-{files.fingerprint()}"
    if not (cache / "index.json").exists():
        with locked(cache.parent / ".lock"):
            for leftover in cache.parent.glob("*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            if not (cache / "index.json").exists():
                shutil.rmtree(cache, ignore_errors=True)
                decode(files, list_images(files, source), size, cache)
    try:
        index = json.loads((cache / "index.json").read_text())
        domains, maps, left_out = [], [], index["left_out"]
        classes = source.classes or tuple(index["classes"])
        if list(classes) != index["classes"]:
            raise ValueError(f"it has the classes {', '.join(index['classes'])}")
        for name in source.domains or index["domains"]:
            labels = torch.tensor(index["domains"][name]["labels"])
            images = np.load(cache / f"{name}.npy", mmap_mode="r")
            if images.shape != (len(labels), size, size, 3) or images.dtype != np.uint8 or \
                    labels.min() < 0 or labels.max() >= len(classes):
                raise ValueError(f"{name}.npy holds {images.dtype} {images.shape} for {len(labels)} labels")
            maps.append(images)
            domains.append(Domain(name, as_tensor(images), labels))
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as e:
        raise Stop(f"the cache {cache} is damaged ({type(e).__name__}: {e}); delete that folder and start again")
    if sum(m.nbytes for m in maps) > memory() / 2:  # what is read ahead of a random image would only push others out
        for m in maps:
            m.base.madvise(mmap.MADV_RANDOM)
    if left_out:
        print(f"{args.dataset}: {len(left_out)} files are no images and were left out: "
              f"{', '.join(left_out[:3])}{', ...' if len(left_out) > 3 else ''}", file=sys.stderr)
    return domains, classes


def as_tensor(pixels: np.memmap) -> Tensor:
    """[N, S, S, 3] in a file -> [N, 3, S, S], without reading it. It must not be written to: it is mapped read-only, because
    a copy-on-write map would have to fit into memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(pixels).permute(0, 3, 1, 2)


def memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def decode(files: ImageFiles, listing: Listing, size: int, cache: Path) -> None:
    """Decode all images to uint8 [N, size, size, 3] files, one for each domain, in parallel; renamed at the end.

    A few images for each thread are read ahead; what is decoded is written at its place in the file and reaches the disk
    as it goes, so that the memory needed does not grow with the dataset.
    """
    temporary, total, pixels = cache.with_name(f"{cache.name}.{os.getpid()}.tmp"), 0, size * size * 3
    try:
        temporary.mkdir()
        with contextlib.ExitStack() as stack:
            places, opened = collections.defaultdict(list), []  # image: where its pixels go, which may be more than one place
            for d, images in listing.images.items():
                path = temporary / f"{d}.npy"
                begin = np.lib.format.open_memmap(path, "w+", np.uint8, (len(images), size, size, 3)).offset
                opened.append(stack.enter_context(open(path, "r+b")))
                if hasattr(os, "posix_fallocate"):  # a full disk is an error here, not halfway
                    os.posix_fallocate(opened[-1].fileno(), 0, path.stat().st_size)
                for i, (name, _) in enumerate(images):
                    places[name].append((opened[-1].fileno(), begin + i * pixels))
                total += len(images)

            def one(name: str, read: Callable[[], bytes]) -> int:
                try:
                    rgb = to_rgb(read(), size)
                except Exception as e:  # whatever the archive or the decoder makes of a damaged file
                    raise Stop(f"{files}: the image {name} cannot be decoded ({e}); replace it or get the archive again")
                for place in places[name]:
                    if os.pwrite(place[0], rgb, place[1]) != pixels:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(temporary))
                return len(places[name])

            pool = stack.enter_context(ThreadPoolExecutor(os.cpu_count()))  # decoding and resizing release Python's lock
            bar = stack.enter_context(tqdm(total=total, unit="image", desc=f"decoding to {size}x{size}", mininterval=0.5))
            unflushed = 0
            for done in bounded(pool, one, files.read_all(list(places)), 4 * os.cpu_count()):
                bar.update(done)
                unflushed += done * pixels
                if unflushed > FLUSHED:
                    unflushed = 0
                    for file in opened:
                        os.fdatasync(file.fileno())
            for file in opened:
                os.fsync(file.fileno())
        (temporary / "files.json").write_text(json.dumps({d: [n for n, _ in images] for d, images in listing.images.items()}))
        (temporary / "index.json").write_text(json.dumps({
            "left_out": listing.left_out, "classes": listing.classes,
            "domains": {d: {"labels": [y for _, y in images]} for d, images in listing.images.items()}}))
        os.replace(temporary, cache)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def bounded(pool: ThreadPoolExecutor, function, jobs: Iterator[tuple], ahead: int) -> Iterator:
    """The results of function(*job), in order; a job is only asked for when fewer than `ahead` are under way."""
    waiting = collections.deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(function, *job))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def to_rgb(content: bytes, size: int) -> np.ndarray:
    """An encoded image of any mode -> uint8 [size, size, 3], resized with antialiasing, aspect ratio not kept."""
    image = Image.open(io.BytesIO(content))
    if image.mode.startswith("I"):  # 16 bits a pixel (PIL's convert would clip them at 255)
        pixels = np.asarray(image)
        if pixels.min() < 0 or pixels.max() > 65535:
            raise ValueError("32-bit pixels have no defined range")
        image = Image.fromarray((pixels >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels have no defined range")
    return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
