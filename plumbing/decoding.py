"""Images decoded once into a memory-mapped cache of uint8 pixels, and opened from there by `open_images`.

Neither the memory nor the time to start a run grows with the pixels.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from plumbing.archives import download_missing, files_in, fingerprint, key_of, keys_in, locate, unpack
from plumbing.catalog import SPLIT, Folders, custom_folder, short_name, shortlist, source_of
from plumbing.errors import UserError
from plumbing.files import locked
from plumbing.listings import Files, Listing, list_images
from plumbing.splits import read_split

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from tqdm import tqdm

AHEAD = 32 << 20  # bytes of decoded pixels that wait to be written, at most
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # no others: EPS would start Ghostscript
TOLD = {  # what a decoded dataset says of its files each time that it is opened
    "twice": "images that are in two domains, so that one domain is tested with what another trains on",
    "left_out": "files that are no images were left out",
    "broken": "images that cannot be decoded were left out, as --skip-broken asks",
    "dark": "images of 16 bits a pixel use 12 or fewer, so that they are nearly black; bring them to 8 bits, "
            "or to all 16",
}


@dataclass
class Images:
    """A decoded dataset."""

    domains: list[tuple[str, Tensor, Tensor]]  # each: name, images uint8 [N, 3, S, S], labels int64 [N]
    classes: tuple[str, ...]
    content: str  # a digest of all images: domain, class, name, bytes and CRC32 of each, in any order
    given: dict[str, Tensor] | None = None  # of each domain what split.csv says, see read_split


def open_images(dataset: str, size: int, data: str, archives: str, skip_broken: bool, only: str = "",
                agreed: tuple[str, ...] = ()) -> Images:
    """A dataset of image files at `size` x `size`: decoded once into a cache below `data`, then opened from
    there, also when its archive is gone. With `skip_broken` images that cannot be decoded are left out. Of a
    folder nothing is read but the domain `only`, if that is given, whose classes are the `agreed` ones."""
    source = source_of(dataset)
    if only:
        source = dataclasses.replace(source, domains={only: (only, None)}, classes=agreed)
    paths = locate(dataset, data, archives)
    caches = caches_of(data, dataset, size)
    if not paths and len(caches) == 1:  # of several nobody knows which one it is
        cache = caches[0]
        print(f"{dataset}: its archives are not here; using the images that were decoded before, {cache}",
              file=sys.stderr)
    else:
        paths = paths or download_missing(dataset, data, archives)
        names = files_in(paths[0], only) if paths[0].is_dir() else []
        keys = keys_in(paths[0], names) if paths[0].is_dir() else [key_of(path) for path in paths]
        keys += [agreed] if only else []
        cache = Path(data) / "cache" / f"{short_name(dataset)}-{size}-{fingerprint(keys)}"
        decode_once(paths, names, source, size, cache)
    try:
        domains, classes, index = open_cache(cache, size)
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"the cache {cache} is damaged ({type(e).__name__}: {e}); "
                        "delete that folder and start again")
    if source.content not in ("", index["content"]):
        raise UserError(f"{dataset}: its images are others than those of the official archive (their digest "
                        f"is {index['content']}, expected {source.content}): get it again, or give them as "
                        "images of your own, folder:PATH")
    if index["broken"] and not skip_broken:
        raise UserError(f"{dataset}: images that cannot be decoded: {len(index['broken'])} "
                        f"({shortlist(index['broken'])}); replace or remove them, or go on without them: "
                        "--skip-broken")
    for kind, what in TOLD.items():
        if index[kind]:
            print(f"{dataset}: {what}; {len(index[kind])} in all: {shortlist(index[kind])}", file=sys.stderr)
    own = custom_folder(dataset)
    if not own or not (own / SPLIT).exists():
        return Images(domains, classes, index["content"])
    content = index["content"].encode() + (own / SPLIT).read_bytes()
    broken = {text.partition(": ")[0] for text in index["broken"]}
    given = read_split(own / SPLIT, json.loads((cache / "files.json").read_text()), broken)
    return Images(domains, classes, hashlib.blake2b(content, digest_size=6).hexdigest(), given)


# The cache: all pixels, uint8 [N, S, S, 3], one domain behind the other; files.json, which file each row is,
# and index.json. Its folder is named by the dataset, the size of the images, and a hash of what they were
# decoded from.

PIXELS = "pixels.bin"
BLOCKS, BLOCK = 1024, 1 << 16  # of the pixels that the digest covers: all of 64 MiB, a sample of more


def digest_of(cache: Path, index: dict) -> str:
    """Of what index.json says, of the names, and of blocks of the pixels in equal distances. A changed pixel
    between the blocks of a large cache is not noticed."""
    digest = hashlib.blake2b(json.dumps(index, sort_keys=True).encode(), digest_size=8)
    digest.update((cache / "files.json").read_bytes())
    with open(cache / PIXELS, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        distance = max(BLOCK, (size - BLOCK) // (BLOCKS - 1))
        for start in range(0, size, distance):
            file.seek(start)
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def caches_of(data: str, dataset: str, size: int) -> list[Path]:
    """All caches of a dataset and size, from whatever they were decoded, by name."""
    return sorted(Path(data, "cache").glob(f"{dataset}-{size}-{12 * '[0-9a-f]'}"))


def open_cache(cache: Path, size: int) -> tuple[list, tuple[str, ...], dict]:
    """Domains (name, pixels [N, 3, size, size], labels [N]), classes, index. An error if it is damaged."""
    index = json.loads((cache / "index.json").read_text())
    if index.pop("digest") != digest_of(cache, index):
        raise ValueError("its labels or pixels are not those that were written")
    with warnings.catch_warnings():  # it is read-only: a copy-on-write map would have to fit into memory
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        mapped = np.memmap(cache / PIXELS, np.uint8, "r").reshape(-1, size, size, 3)
        pixels = torch.from_numpy(mapped).permute(0, 3, 1, 2)
    sizes = [len(labels) for labels in index["domains"].values()]
    domains = []
    for (name, labels), of_domain in zip(index["domains"].items(), pixels.split(sizes)):
        domains.append((name, of_domain, torch.tensor(labels)))
    return domains, tuple(index["classes"]), index


# Decoding


def decode_once(paths: list[Path], names: list[str], source: Folders, size: int, cache: Path) -> None:
    """Decode a dataset into its cache, if it is not there: a folder with these files, or archives, which are
    unpacked into a temporary folder beside it. The cache is renamed at the end."""
    if cache.exists():
        return
    with locked(cache.parent / ".lock"):
        for leftover in cache.parent.glob("*.tmp"):  # of a decoding that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        if cache.exists():  # another process has decoded it in the meantime
            return
        with tempfile.TemporaryDirectory(suffix=".tmp", dir=cache.parent) as place:
            top, decoded = paths[0], Path(place, "decoded")
            decoded.mkdir()
            if not top.is_dir():
                top = Path(place, "unpacked")
                top.mkdir()
                unpack(paths, source, top)
                names = files_in(top)
            files = Files(top, {*names}, ", ".join(map(str, paths[:2])))
            listing = list_images(files, source)
            write_pixels(files.top, listing, size, decoded)
            os.replace(decoded, cache)


def write_pixels(top: Path, listing: Listing, size: int, folder: Path) -> None:
    """The pixels of all images that can be decoded, in parallel and in order, files.json and index.json. Few
    images are decoded ahead, so that the memory needed does not grow with the dataset."""
    every = [(domain, *image) for domain, images in listing.images.items() for image in images]
    root = os.path.commonpath([name for _, name, _ in every])  # an archive that is packed anew has another
    written = {domain: [] for domain in listing.images}
    domains = {domain: [] for domain in listing.images}
    index = {"left_out": listing.left_out, "broken": [], "dark": []}
    index |= {"classes": listing.classes, "domains": domains}
    contents = []
    ahead = 8 + AHEAD // (3 * size * size)
    bar = tqdm(total=len(every), unit="image", desc=f"decoding to {size}x{size}", mininterval=0.5)
    with bar, ThreadPoolExecutor() as pool, open(folder / PIXELS, "wb") as file:
        for start in range(0, len(every), ahead):  # decoding and resizing release Python's lock
            some = every[start:start + ahead]
            decoded = pool.map(lambda image: decode_one(top / image[1], size), some)
            for (domain, name, label), (rgb, kind, why, content) in zip(some, decoded):
                contents.append((domain, listing.classes[label], name.removeprefix(root).strip("/"),
                                 *content))
                if kind:
                    index[kind].append(f"{name}{why}")
                if rgb is not None:
                    file.write(rgb.data)
                    written[domain].append(name)
                    domains[domain].append(label)
                bar.update()
    (folder / "files.json").write_text(json.dumps(written))
    index["twice"] = in_two_domains(contents)
    index["content"] = hashlib.blake2b(repr(sorted(contents)).encode(), digest_size=6).hexdigest()
    index["digest"] = digest_of(folder, index)
    (folder / "index.json").write_text(json.dumps(index))


def in_two_domains(contents: list[tuple]) -> list[str]:
    """The images, by domain, class and name, whose bytes and CRC32 an image of another domain has."""
    first, found = {}, []
    for domain, _, name, *content in contents:
        of_first, name_of_first = first.setdefault(tuple(content), (domain, name))
        if of_first != domain:
            found.append(f"{name} is {name_of_first}")
    return found


def decode_one(path: Path, size: int) -> tuple[np.ndarray | None, str, str, tuple]:
    """One image, uint8 [size, size, 3], or None; broken or dark, if it is so, and why; bytes and CRC32."""
    encoded = path.read_bytes()
    content = len(encoded), zlib.crc32(encoded)
    try:
        image, is_dark = upright(encoded)
        return as_rgb(image, size), "dark" if is_dark else "", "", content
    except Exception as e:  # whatever the decoder makes of a damaged file
        why = "it is no image" if isinstance(e, UnidentifiedImageError) else e
        return None, "broken", f": {why}", content


def as_rgb(image: Image.Image, size: int) -> np.ndarray:
    """uint8 [size, size, 3], antialiased, the aspect ratio not kept."""
    return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))


def upright(encoded: bytes) -> tuple[Image.Image, bool]:
    """An encoded image of any mode with 8 bits a pixel and channel, turned as its EXIF data say; and whether
    its pixels have 16 bits, the upper four of them unused."""
    image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "F" or image.mode == "I" and image.format != "PPM":  # PPM: 16 bits, unpacked into 32
        raise ValueError("pixels of 32 bits, and signed ones, have no defined range: bring them to unsigned "
                         "8 or 16 bits")
    if not image.mode.startswith("I"):
        return image, False
    pixels = np.asarray(image)  # 16 bits a pixel (PIL's convert would clip them at 255)
    return Image.fromarray((pixels >> 8).astype(np.uint8)), pixels.max() < 4096
