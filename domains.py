"""The datasets: where their archives come from, what is in them, and how they become domains of uint8 pixels.

Each dataset is read straight from its archive (nothing is unpacked to disk), checked against its known classes and counts,
and decoded once into a memory-mapped cache. `load_domains` is what the round loop calls.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import http.client
import io
import json
import os
import re
import shutil
import sys
import urllib.error
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from basics import Stop, locked, seed_all


@dataclass
class Domain:
    """One domain: its name, images uint8 [N, C, H, W] (stored channels last) and labels int64 [N]."""

    name: str
    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Folders:
    """A dataset of image folders <domain>/<class>/: where its archive comes from and what is in it."""

    url: str
    archive: str  # pattern of the archive's file name
    domains: dict[str, tuple[str, int]]  # name of the domain: its folder, its number of images
    classes: tuple[str, ...]


FOLDERS = {
    "officecaltech": Folders(
        "https://github.com/ChristophRaab/Office_Caltech_DA_Dataset/archive/91ad5c3.zip",
        "Office_Caltech_DA_Dataset*.zip",
        {"amazon": ("amazon", 958), "caltech": ("Caltech", 1123), "dslr": ("dslr", 157), "webcam": ("webcam", 295)},
        ("backpack", "bike", "calculator", "headphones", "keyboard", "laptop_computer", "monitor", "mouse", "mug",
         "projector")),
    "pacs": Folders(
        "https://github.com/MachineLearning2020/Homework3-PACS/archive/d586a6c.zip",
        "Homework3-PACS*.zip",
        {"art_painting": ("art_painting", 2048), "cartoon": ("cartoon", 2344), "photo": ("photo", 1670),
         "sketch": ("sketch", 3929)},
        ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")),
}
ANGLES = (0, 15, 30, 45, 60, 75)  # degrees, counter-clockwise (FedSR, Sec. 4.1)
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


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
        domains, classes = load_folders(args, FOLDERS[args.dataset]), FOLDERS[args.dataset].classes
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
    for folder in ([Path(args.archives)] if args.archives else []) + [Path(args.data) / "downloads"]:
        for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
            if fnmatch.fnmatch(path.name.lower(), pattern.lower()) and path.is_file():
                return path
    return None


def download(url: str, path: Path) -> Path:
    """Fetch `url` to `path`, with a progress bar. An interrupted download goes on where it stopped."""
    try:
        with locked(path.with_name(f".{path.name}.lock")):
            for _ in range(2):
                if path.exists() or fetch(url, path):
                    return path
        raise OSError("the server refuses to go on with the part that is there")
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise Stop(f"could not download {url} ({e}); download it by hand and name its folder with --archives")


def fetch(url: str, path: Path) -> bool:
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
    with reply, open(part, "ab" if reply.status == 206 else "wb") as file:
        total = file.tell() + int(reply.headers["Content-Length"]) if reply.headers["Content-Length"] else None
        with tqdm(total=total, initial=file.tell(), unit="B", unit_scale=True, desc=path.name, disable=None) as bar:
            while block := reply.read(1 << 20):
                bar.update(file.write(block))
        if total not in (None, file.tell()):
            raise OSError(f"expected {total} bytes, got {file.tell()}; the same command goes on from there")
    os.replace(part, path)
    return True


class ImageFiles:
    """The files of an image dataset, in a folder or still in their zip archive: names, fingerprint, contents."""

    def __init__(self, path: Path):
        self.path, self.zip = path, None
        if path.is_dir():
            tops = sorted(path.iterdir())  # rglob follows links at the top only
            stats = {p.relative_to(path).as_posix(): p.stat() for top in tops for p in [top, *top.rglob("*")] if p.is_file()}
            self.keys = {n: (s.st_size, s.st_mtime_ns) for n, s in stats.items()}
        else:
            try:
                self.zip = zipfile.ZipFile(path)
            except (zipfile.BadZipFile, NotImplementedError, OSError) as e:  # the second: a zip version that Python lacks
                raise Stop(f"{path} is no whole zip archive ({e}); it may be truncated: get it again")
            self.keys = {i.filename: (i.file_size, i.CRC) for i in self.zip.infolist() if not i.is_dir()}
            for name in self.keys:  # nothing is unpacked to disk, but such an archive is not what it says it is
                if re.match(r"[/\\]|[A-Za-z]:", name) or ".." in re.split(r"[/\\]", name):
                    raise Stop(f"{path}: the entry {name} leads outside the folder; the archive is not used")

    def fingerprint(self) -> str:
        return hashlib.blake2b(repr(sorted(self.keys.items())).encode(), digest_size=6).hexdigest()

    def read(self, name: str) -> bytes:
        return self.zip.read(name) if self.zip else (self.path / name).read_bytes()


def load_folders(args, source: Folders) -> list[Domain]:
    """A dataset of image folders: decoded once into a memory-mapped uint8 cache, then opened from there."""
    size, folder = args.image_size, Path(args.data) / args.dataset
    if folder.is_dir():
        files = ImageFiles(folder)
    else:
        archive = find_archive(args, source.archive)
        files = ImageFiles(archive or download(source.url, Path(args.data) / "downloads" / f"{source.archive[:-5]}.zip"))
    cache = Path(args.data) / "cache" / f"{args.dataset}-{size}-{files.fingerprint()}"
    if not (cache / "index.json").exists():
        with locked(cache.parent / ".lock"):
            for leftover in cache.parent.glob("*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            if not (cache / "index.json").exists():
                shutil.rmtree(cache, ignore_errors=True)
                decode(files, list_images(files, source), source, size, cache)
    try:
        index = json.loads((cache / "index.json").read_text())
        domains, left_out = [], index["left_out"]
        for name in source.domains:
            labels = torch.tensor(index["domains"][name]["labels"])
            images = np.load(cache / f"{name}.npy", mmap_mode="c")  # copy on write: the file is never changed
            if images.shape != (len(labels), size, size, 3) or images.dtype != np.uint8 or \
                    labels.min() < 0 or labels.max() >= len(source.classes):
                raise ValueError(f"{name}.npy holds {images.dtype} {images.shape} for {len(labels)} labels")
            domains.append(Domain(name, torch.from_numpy(images).permute(0, 3, 1, 2), labels))
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as e:
        raise Stop(f"the cache {cache} is damaged ({type(e).__name__}: {e}); delete that folder and start again")
    if left_out:
        print(f"{args.dataset}: {len(left_out)} files are no images and were left out: "
              f"{', '.join(left_out[:3])}{', ...' if len(left_out) > 3 else ''}", file=sys.stderr)
    return domains


def list_images(files: ImageFiles, source: Folders) -> dict[str, list[tuple[str, int]]]:
    """{domain: [(file, label), ...]} in a fixed order, and under '' the files that are no images; counts are checked."""
    first = next(iter(source.domains.values()))[0]
    roots = sorted({f"/{n}".split(f"/{first}/")[0] for n in files.keys if f"/{first}/" in f"/{n}"}, key=lambda r: (len(r), r))
    if not roots:
        raise Stop(f"{files.path}: found no folder {first}; expected the folders "
                   f"{', '.join(f for f, _ in source.domains.values())}, each with one folder for each class")
    root, found = f"{roots[0]}/"[1:], {"": []}
    for name, (folder, count) in source.domains.items():
        inside = sorted(n for n in files.keys if n.startswith(f"{root}{folder}/"))
        found[name] = []
        for label, c in enumerate(source.classes):
            of_class = [n for n in inside if n.startswith(f"{root}{folder}/{c}/")]
            images = [n for n in of_class if is_image(n)]
            if not images:
                there = sorted({n.split("/")[root.count("/") + 1] for n in inside if n.count("/") > root.count("/") + 1})
                raise Stop(f"{files.path}: domain {name} has no images in {folder}/{c}; expected the class folders "
                           f"{', '.join(source.classes)}, found {', '.join(there) or 'none'}")
            found[name] += [(n, label) for n in images]
            found[""] += [(n, -1) for n in of_class if not is_image(n)]
        if len(found[name]) != count:
            raise Stop(f"{files.path}: domain {name} has {len(found[name])} images; expected {count}")
    return found


def is_image(name: str) -> bool:
    """By the ending of its name; ._x.jpg is what macOS puts beside x.jpg."""
    return name.lower().endswith(IMAGE_ENDINGS) and not Path(name).name.startswith("._")


def decode(files: ImageFiles, listed: dict, source: Folders, size: int, cache: Path) -> None:
    """Decode all images to uint8 [N, size, size, 3] files, one for each domain, in parallel; renamed at the end."""
    temporary = cache.with_name(f"{cache.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        maps = {}
        for d in source.domains:
            path = temporary / f"{d}.npy"
            maps[d] = np.lib.format.open_memmap(path, "w+", np.uint8, (len(listed[d]), size, size, 3))
            if hasattr(os, "posix_fallocate"):  # a full disk is an error here, not a crash when a page is written
                with open(path, "r+b") as f:
                    os.posix_fallocate(f.fileno(), 0, path.stat().st_size)

        def one(job):
            domain, i, name = job
            try:
                maps[domain][i] = to_rgb(files.read(name), size)
            except Exception as e:  # whatever the archive or the decoder makes of a damaged file
                raise Stop(f"{files.path}: the image {name} cannot be decoded ({e}); replace it or get the archive again")

        jobs = [(d, i, name) for d in source.domains for i, (name, _) in enumerate(listed[d])]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoding and resizing release Python's lock
            try:
                for _ in tqdm(pool.map(one, jobs), total=len(jobs), unit="image", desc=f"decoding to {size}x{size}",
                              mininterval=0.5):
                    pass
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for m in maps.values():
            m.flush()
        index = {"left_out": [n for n, _ in listed[""]],
                 "domains": {d: {"labels": [y for _, y in listed[d]], "files": [n for n, _ in listed[d]]}
                             for d in source.domains}}
        (temporary / "index.json").write_text(json.dumps(index))
        os.replace(temporary, cache)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


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
