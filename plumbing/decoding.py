"""Images decoded once into a memory-mapped cache of uint8 pixels, and opened from there by `open_images`.

Neither the memory nor the time to start a run grows with the pixels.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from plumbing.archives import ImageFiles, download_missing, locate
from plumbing.catalog import Folders, own_folder, short_name, some, source_of
from plumbing.errors import Stop
from plumbing.files import locked
from plumbing.listings import Listing, list_images

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from tqdm import tqdm

AHEAD = 32 << 20  # bytes of decoded pixels that wait to be written, at most


@dataclass
class Images:
    """A decoded dataset."""

    domains: list[tuple[str, Tensor, Tensor]]  # each: name, images uint8 [N, 3, S, S], labels int64 [N]
    classes: tuple[str, ...]
    fingerprint: str  # 12 hexadecimal digits that change with one's own images; "" for the catalogue's


def open_images(dataset: str, size: int, data: str, archives: str = "") -> Images:
    """A dataset of image files at `size` x `size`: decoded once into a cache below `data`, then opened from
    there, also when its archive is gone."""
    source = source_of(dataset)
    paths, missing = locate(dataset, data, archives)
    cache, fingerprint = None, ""
    if missing:
        cache = cache_without_archive(dataset, size, data, missing)
    if cache is None:
        files = ImageFiles(paths or download_missing(dataset, data, archives))
        cache = Path(data) / "cache" / cache_name(dataset, size, files)
        if own_folder(dataset):
            fingerprint = files.fingerprint()
        decode_once(files, source, size, cache)
    domains, classes, left_out = open_cache(cache, source, size)
    if left_out:
        print(f"{dataset}: {len(left_out)} files are no images and were left out: {some(left_out)}",
              file=sys.stderr)
    if own_folder(dataset):
        tell_missing(dataset, domains, classes)
    return Images(domains, classes, fingerprint)


def tell_missing(dataset: str, domains: list, classes: tuple[str, ...]) -> None:
    """Say which classes some domains of one's own images lack: it may be meant, or two spellings of one."""
    for name, _, labels in domains:
        missing = [c for label, c in enumerate(classes) if label not in labels]
        if missing:
            print(f"{dataset}: {name} has no images of {', '.join(missing)}", file=sys.stderr)


# The cache: <domain>.npy, files.json and, written last, index.json; its folder is named by the dataset, the
# size of the images, and a hash of what they were decoded from.


def cache_name(dataset: str, size: int, files: ImageFiles) -> str:
    """What a cache is known by: dataset, size and content; of one's own images the folder's path too, as
    times and sizes may be equal in two folders."""
    name = f"{short_name(dataset)}-{size}-{files.fingerprint()}"
    if own_folder(dataset):
        path = os.fsencode(dataset)
        name += hashlib.blake2b(path, digest_size=4).hexdigest()
    return name


def is_whole(cache: Path) -> bool:
    return (cache / "index.json").exists()


def caches_of(data: str, dataset: str, size: int) -> list[Path]:
    """All caches of a dataset and size, from whatever they were decoded, by name."""
    name = re.compile(rf"{re.escape(dataset)}-{size}-[0-9a-f]{{12}}")
    caches = sorted(Path(data, "cache").glob("*"))
    return [path for path in caches if name.fullmatch(path.name) and is_whole(path)]


def cache_without_archive(dataset: str, size: int, data: str, missing: str) -> Path | None:
    """The cache of a dataset whose folder or archives are not here; None if there is none."""
    caches = caches_of(data, dataset, size)
    if not caches:
        return None
    if len(caches) > 1:
        raise Stop(f"{missing}, and there are several caches of it ({', '.join(map(str, caches))}): name the "
                   "folder of the archive with --archives, or delete all but one")
    print(f"{dataset}: {missing}; using the images that were decoded before, {caches[0]}", file=sys.stderr)
    return caches[0]


def open_cache(cache: Path, source: Folders, size: int) -> tuple[list, tuple[str, ...], list[str]]:
    """The domains, each (name, pixels [N, 3, size, size], labels [N]), the classes, and the files left out.
    Stop if the cache is damaged."""
    domains = []
    try:
        index = json.loads((cache / "index.json").read_text())
        classes = source.classes or tuple(index["classes"])  # iWildCam's, and its domains, are in its files
        if list(classes) != index["classes"]:
            raise ValueError(f"it has the classes {', '.join(index['classes'])}")
        for name in source.domains or index["domains"]:
            labels = torch.tensor(index["domains"][name]["labels"])
            pixels = np.load(cache / f"{name}.npy", mmap_mode="r")
            if pixels.shape != (len(labels), size, size, 3):
                raise ValueError(f"{name}.npy holds {pixels.shape} for {len(labels)} labels")
            domains.append((name, as_tensor(pixels), labels))
        return domains, classes, index["left_out"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as e:
        raise Stop(f"the cache {cache} is damaged ({type(e).__name__}: {e}); "
                   "delete that folder and start again")


def as_tensor(pixels: np.memmap) -> Tensor:
    """[N, S, S, 3] in a file -> [N, 3, S, S], without reading it. It must not be written to: it is mapped
    read-only, as a copy-on-write map would have to fit into memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(pixels).permute(0, 3, 1, 2)


# Decoding


def decode_once(files: ImageFiles, source: Folders, size: int, cache: Path) -> None:
    """Decode a dataset into its cache, if it is not there."""
    if is_whole(cache):
        return
    with locked(cache.parent / ".lock"):
        for leftover in cache.parent.glob("*.tmp"):  # of a decoding that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        if not is_whole(cache):  # another process may have decoded it in the meantime
            shutil.rmtree(cache, ignore_errors=True)
            decode(files, source, size, cache)


def decode(files: ImageFiles, source: Folders, size: int, cache: Path) -> None:
    """Unpack what the dataset names of its archives, and decode that; the cache is renamed at the end."""
    temporary = cache.with_name(f"{cache.name}.{os.getpid()}.tmp")
    unpacked = temporary.with_suffix(".unpacked.tmp")
    try:
        unpacked.mkdir()
        temporary.mkdir()
        files.scan(unpacked)
        listing = list_images(files, source)
        files.unpack(listing.names(), unpacked)
        write_pixels(files, listing, size, temporary)
        write_index(temporary, listing)
        os.replace(temporary, cache)
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)


def write_pixels(files: ImageFiles, listing: Listing, size: int, folder: Path) -> None:
    """<domain>.npy for each domain, uint8 [N, size, size, 3], decoded in parallel and written in order. Few
    images are decoded ahead, so that the memory needed does not grow with the dataset."""
    threads = os.cpu_count() or 1
    ahead = max(2 * threads, AHEAD // (3 * size * size))
    count = len(listing.names())
    bar = tqdm(total=count, unit="image", desc=f"decoding to {size}x{size}", mininterval=0.5)
    with bar, ThreadPoolExecutor(threads) as pool:  # decoding and resizing release Python's lock
        for domain, images in listing.images.items():
            names = [name for name, _ in images]
            header = {"descr": "|u1", "fortran_order": False, "shape": (len(names), size, size, 3)}
            with open(folder / f"{domain}.npy", "wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for start in range(0, len(names), ahead):
                    for rgb in pool.map(partial(decode_one, files, size), names[start:start + ahead]):
                        file.write(rgb.data)
                        bar.update()
                file.flush()
                os.fsync(file.fileno())


def write_index(cache: Path, listing: Listing) -> None:
    """Which image each row of pixels is, for people, and the labels."""
    names, labels = {}, {}
    for domain, images in listing.images.items():
        names[domain] = [name for name, _ in images]
        labels[domain] = {"labels": [label for _, label in images]}
    index = {"left_out": listing.left_out, "classes": listing.classes, "domains": labels}
    (cache / "files.json").write_text(json.dumps(names))
    (cache / "index.json").write_text(json.dumps(index))


def decode_one(files: ImageFiles, size: int, name: str) -> np.ndarray:
    """One image, uint8 [size, size, 3]. Stop if it cannot be decoded."""
    try:
        return to_rgb(files.inside[name].read_bytes(), size)
    except Exception as e:  # whatever the decoder makes of a damaged file
        advice = "replace it or get the archive again"
        if files.paths[0].is_dir():
            advice = "replace or remove it"
        why = "it is no image" if isinstance(e, UnidentifiedImageError) else e
        raise Stop(f"{files}: the image {name} cannot be decoded ({why}); {advice}")


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
