"""Images decoded once into a memory-mapped cache of uint8 pixels, and opened from there.

Neither the memory nor the time to start a run grows with the pixels: reading is never more than a few images
ahead of decoding, and a run opens the cache without touching them.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import filecmp
import hashlib
import io
import json
import mmap
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from plumbing.archives import ImageFiles, lacking, locate
from plumbing.catalog import Folders, own_folder, short_name
from plumbing.errors import Stop
from plumbing.files import locked
from plumbing.listings import Listing, list_images

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from tqdm import tqdm

FLUSHED = 256 << 20  # bytes of decoded pixels after which they are written to disk
AHEAD = 4  # images that are read ahead for each thread


def load_folders(args, source: Folders) -> tuple[list[tuple[str, Tensor, Tensor]], tuple[str, ...]]:
    """A dataset of image files: decoded once into a memory-mapped uint8 cache, then opened from there, also
    when its archive is gone.

    Returns its domains, each (name, images uint8 [N, 3, size, size], labels int64 [N]), and the class names.
    """
    cache = None
    missing = lacking(args, source)
    if missing:
        cache = cache_without_archive(args, source, missing)
    if cache is None:
        cache = cache_of_archive(args, source)
    domains, classes, left_out = opened(cache, source, args.image_size)
    limit_reading_ahead([pixels for _, pixels, _ in domains])
    if left_out:
        tell_left_out(args.dataset, left_out)
    if own_folder(args.dataset):
        tell_missing(args.dataset, domains, classes)
    return [(name, as_tensor(pixels), labels) for name, pixels, labels in domains], classes


def tell_left_out(dataset: str, files: list[str]) -> None:
    names = ", ".join(files[:3])
    if len(files) > 3:
        names += ", ..."
    print(f"{dataset}: {len(files)} files are no images and were left out: {names}", file=sys.stderr)


def tell_missing(dataset: str, domains: list[tuple[str, np.memmap, Tensor]],
                 classes: tuple[str, ...]) -> None:
    """Say which classes some domains of one's own images lack: it may be meant, or two spellings of one."""
    found = []
    for name, _, labels in domains:
        present = set(labels.tolist())
        missing = [c for label, c in enumerate(classes) if label not in present]
        if missing:
            found.append(f"{name} has none of {', '.join(missing)}")
    if found:
        print(f"{dataset}: not every class is in every domain: {'; '.join(found)}", file=sys.stderr)


# The cache: <domain>.npy, files.json and, written last, index.json; its folder is named by the dataset, the
# size of the images, and a hash of what they were decoded from.


def cache_of_archive(args, source: Folders) -> Path:
    """The cache of what is in a dataset's folder or archives; decoded if it is not there."""
    files = ImageFiles(locate(args, source))
    cache = Path(args.data) / "cache" / cache_name(args, files)
    if not is_whole(cache):
        with locked(cache.parent / ".lock"):
            remove_leftovers(cache.parent)
            if not is_whole(cache):  # another process may have decoded it in the meantime
                shutil.rmtree(cache, ignore_errors=True)
                decode(files, list_images(files, source), args.image_size, cache)
    return cache


def caches_of(data: str, dataset: str, size: int) -> list[Path]:
    """All caches of a dataset and size, from whatever they were decoded, by name."""
    folder = Path(data) / "cache"
    name = re.compile(rf"{re.escape(dataset)}-{size}-[0-9a-f]{{12}}")
    found = []
    if folder.is_dir():
        found = [path for path in sorted(folder.iterdir()) if name.fullmatch(path.name) and is_whole(path)]
    return found


def cache_without_archive(args, source: Folders, missing: str) -> Path | None:
    """The cache of a dataset whose folder or archives are not here; None if there is none. Stop if it is
    damaged, or if there are several whose images differ."""
    whole, damage = [], None
    for cache in caches_of(args.data, args.dataset, args.image_size):
        try:
            refuse_other_counts(cache, opened(cache, source, args.image_size), source)
            whole.append(cache)
        except Stop as stop:
            damage = stop
    if not whole and damage:
        raise Stop(f"{missing}, and {damage}")
    if not whole:
        return None
    for other in whole[1:]:
        if not same_images(whole[0], other):
            raise Stop(f"{missing}, and the images in the caches {whole[0]} and {other} differ: name the "
                       "folder of the archive with --archives, or move one of them away")
    if damage:
        print(f"{args.dataset}: not used: {damage}", file=sys.stderr)
    print(f"{args.dataset}: {missing}; using the images that were decoded before, {whole[0]}",
          file=sys.stderr)
    return whole[0]


def opened(cache: Path, source: Folders, size: int):
    """What `open_cache` returns. Stop if the cache is damaged."""
    try:
        return open_cache(cache, source, size)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as e:
        raise Stop(f"the cache {cache} is damaged ({type(e).__name__}: {e}); "
                   "delete that folder and start again")


def refuse_other_counts(cache: Path, content: tuple, source: Folders) -> None:
    """Stop if a cache has not as many images as the catalogue says."""
    for name, pixels, _ in content[0]:
        _, count = source.domains.get(name, ("", None))
        if count not in (None, len(pixels)):
            raise Stop(f"the cache {cache} has {len(pixels)} images of domain {name}, expected {count}; "
                       "delete that folder and start again")


def same_images(cache: Path, other: Path) -> bool:
    """Whether two caches have the same images and labels, as those of an archive and of its unpacked folder
    have; the names of the files may differ."""
    labels = [json.loads((folder / "index.json").read_text())["domains"] for folder in (cache, other)]
    if labels[0] != labels[1]:
        return False
    names = [f"{domain}.npy" for domain in labels[0]]
    return all(filecmp.cmp(cache / name, other / name, shallow=False) for name in names)


def cache_name(args, files: ImageFiles) -> str:
    """What a cache is known by: dataset, size and content; of one's own images the folder's path too, as
    times and sizes may be equal in two folders."""
    name = f"{short_name(args.dataset)}-{args.image_size}-{files.fingerprint()}"
    if own_folder(args.dataset):
        path = os.fsencode(args.dataset)
        name += hashlib.blake2b(path, digest_size=4).hexdigest()
    return name


def is_whole(cache: Path) -> bool:
    return (cache / "index.json").exists()


def remove_leftovers(caches: Path) -> None:
    """What interrupted decodings left behind."""
    for leftover in caches.glob("*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def write_index(cache: Path, listing: Listing) -> None:
    """Which image each row of pixels is, for people, and the labels."""
    names, labels = {}, {}
    for domain, images in listing.images.items():
        names[domain] = [name for name, _ in images]
        labels[domain] = {"labels": [label for _, label in images]}
    index = {"left_out": listing.left_out, "classes": listing.classes, "domains": labels}
    (cache / "files.json").write_text(json.dumps(names))
    (cache / "index.json").write_text(json.dumps(index))


def open_cache(
    cache: Path, source: Folders, size: int
) -> tuple[list[tuple[str, np.memmap, Tensor]], tuple[str, ...], list[str]]:
    """The domains, each (name, pixels [N, size, size, 3], labels [N]), the classes, and the files left out.

    Whatever error it raises, the cache is damaged.
    """
    index = json.loads((cache / "index.json").read_text())
    left_out = list(index["left_out"])
    classes = source.classes or tuple(index["classes"])  # iWildCam's, and its domains, are found in its files
    if list(classes) != index["classes"]:
        raise ValueError(f"it has the classes {', '.join(index['classes'])}")
    domains = []
    for name in source.domains or index["domains"]:
        labels = torch.tensor(index["domains"][name]["labels"])
        pixels = np.load(cache / f"{name}.npy", mmap_mode="r")
        right_form = pixels.shape == (len(labels), size, size, 3) and pixels.dtype == np.uint8
        if not right_form or labels.min() < 0 or labels.max() >= len(classes):
            raise ValueError(f"{name}.npy holds {pixels.dtype} {pixels.shape} for {len(labels)} labels")
        domains.append((name, pixels, labels))
    return domains, classes, left_out


def limit_reading_ahead(maps: list[np.memmap]) -> None:
    """Of maps that are large for this machine: what is read ahead of an image would only push others out."""
    if sum(pixels.nbytes for pixels in maps) > memory() / 2:
        for pixels in maps:
            pixels.base.madvise(mmap.MADV_RANDOM)


def memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def as_tensor(pixels: np.memmap) -> Tensor:
    """[N, S, S, 3] in a file -> [N, 3, S, S], without reading it.

    It must not be written to: it is mapped read-only, as a copy-on-write map would have to fit into memory.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(pixels).permute(0, 3, 1, 2)


# Decoding


def decode(files: ImageFiles, listing: Listing, size: int, cache: Path) -> None:
    """Decode all images to uint8 [N, size, size, 3] files, one for each domain; renamed at the end."""
    temporary = cache.with_name(f"{cache.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        write_pixels(files, listing, size, temporary)
        write_index(temporary, listing)
        os.replace(temporary, cache)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_pixels(files: ImageFiles, listing: Listing, size: int, folder: Path) -> None:
    """Decode in parallel.

    A few images for each thread are read ahead; what is decoded is written at its place in the file and
    reaches the disk as it goes, so that the memory needed does not grow with the dataset.
    """
    threads = os.cpu_count()
    count = sum(map(len, listing.images.values()))
    with contextlib.ExitStack() as stack:
        canvas = Canvas(folder, size)
        stack.callback(canvas.close)
        for domain, images in listing.images.items():
            canvas.add(domain, [name for name, _ in images])
        pool = stack.enter_context(ThreadPoolExecutor(threads))  # decoding and resizing release Python's lock
        bar = tqdm(total=count, unit="image", desc=f"decoding to {size}x{size}", mininterval=0.5)
        stack.enter_context(bar)
        unflushed = 0
        jobs = files.read_all(list(canvas.places))
        for written in bounded(pool, partial(decode_one, files, canvas), jobs, AHEAD * threads):
            bar.update(written)
            unflushed += written * canvas.image_bytes
            if unflushed > FLUSHED:
                unflushed = 0
                canvas.flush(os.fdatasync)
        canvas.flush(os.fsync)


def decode_one(files: ImageFiles, canvas: Canvas, name: str, read: Callable[[], bytes]) -> int:
    """Decode one image and write it; returns to how many places."""
    try:
        rgb = to_rgb(read(), canvas.size)
    except Stop:
        raise
    except Exception as e:  # whatever the archive or the decoder makes of a damaged file
        advice = "replace it or get the archive again"
        if files.paths[0].is_dir():
            advice = "replace or remove it"
        why = "it is no image" if isinstance(e, UnidentifiedImageError) else e
        raise Stop(f"{files}: the image {name} cannot be decoded ({why}); {advice}")
    return canvas.write(name, rgb)


class Canvas:
    """<domain>.npy for each domain, uint8 [N, size, size, 3], filled image by image by many threads."""

    def __init__(self, folder: Path, size: int):
        self.folder, self.size = folder, size
        self.image_bytes = size * size * 3
        self.opened = []
        self.places: dict[str, list[tuple[int, int]]] = {}  # image: (file descriptor, offset), maybe several

    def add(self, domain: str, names: list[str]) -> None:
        """Make a domain's file, at its full size, with a place for each image."""
        path = self.folder / f"{domain}.npy"
        shape = (len(names), self.size, self.size, 3)
        begin = np.lib.format.open_memmap(path, "w+", np.uint8, shape).offset
        file = open(path, "r+b")
        self.opened.append(file)
        if hasattr(os, "posix_fallocate"):  # a full disk is an error here, not halfway
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        for i, name in enumerate(names):
            place = (file.fileno(), begin + i * self.image_bytes)
            self.places.setdefault(name, []).append(place)

    def write(self, name: str, rgb: np.ndarray) -> int:
        """Write an image, uint8 [size, size, 3], wherever it belongs; returns to how many places."""
        for descriptor, offset in self.places[name]:
            if os.pwrite(descriptor, rgb, offset) != self.image_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        return len(self.places[name])

    def flush(self, sync: Callable[[int], None]) -> None:
        """What was written reaches the disk: `sync` is os.fdatasync or os.fsync."""
        for file in self.opened:
            sync(file.fileno())

    def close(self) -> None:
        for file in self.opened:
            file.close()


def bounded(pool: ThreadPoolExecutor, function: Callable, jobs: Iterator[tuple], ahead: int) -> Iterator:
    """The results of function(*job), in order; a job is asked for when fewer than `ahead` are under way."""
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
    """An encoded image of any mode -> uint8 [size, size, 3], antialiased, the aspect ratio not kept."""
    image = in_eight_bits(content).convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image)


def to_gray(content: bytes) -> np.ndarray:
    """An encoded image of any mode -> uint8 [h, w], as large as it is."""
    return np.asarray(in_eight_bits(content).convert("L"))


def in_eight_bits(content: bytes) -> Image.Image:
    """An encoded image of any mode with 8 bits a pixel and channel."""
    image = Image.open(io.BytesIO(content))
    if image.mode.startswith("I"):  # 16 bits a pixel (PIL's convert would clip them at 255)
        pixels = np.asarray(image)
        if pixels.min() < 0 or pixels.max() > 65535:
            raise ValueError("32-bit pixels have no defined range")
        image = Image.fromarray((pixels >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels have no defined range")
    return image


def open_images(dataset, size, data, archives):
    from types import SimpleNamespace
    from plumbing.catalog import source_of
    args = SimpleNamespace(dataset=dataset, image_size=size, data=data, archives=archives)
    domains, classes = load_folders(args, source_of(dataset))
    fingerprint = ImageFiles(locate(args, source_of(dataset))).fingerprint() if own_folder(dataset) else ""
    return SimpleNamespace(domains=domains, classes=classes, fingerprint=fingerprint)
