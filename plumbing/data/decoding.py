"""Images decoded once into a memory-mapped cache of uint8 pixels, and opened from there by `open_images`.

Neither the memory nor the time to start a run grows with the pixels.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from plumbing.data.archives import ImageFiles, download_missing, locate
from plumbing.data.catalog import CUSTOM_IMAGES, Folders, named, shortlist, source_of
from plumbing.data.domains import Dataset, Domain
from plumbing.data.listings import Listing, list_images
from plumbing.data.splits import SPLIT, place_images
from plumbing.run.errors import UserError
from plumbing.run.files import check_regular, locked

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from tqdm import tqdm

AHEAD = 32 << 20  # bytes of decoded pixels that wait to be written, at most
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # no others: EPS would start Ghostscript
TOLD = {  # what a decoded dataset says of its files each time that it is opened
    "twice": "images that are in two domains, so that one domain is tested with what another trains on",
    "left_out": "files that are no images were left out",
    "lacking": "classes that are not in every domain, or have two spellings",
    "broken": "images that cannot be decoded were left out, as --skip-broken asks",
    "dark": "images of 16 bits a pixel use 14 or fewer, so that they are dark or nearly black; bring them to "
            "8 bits, or to all 16",
    "pages": "files have several pages or frames, of which the first is taken",
    "flat": "images have one colour everywhere",
    "equal": "images have the same pixels as another one of their domain; they stay in one part, unless "
             f"groups or {SPLIT} say otherwise",
    "far": "domains are much brighter or darker than the others, or have much less contrast: they may be "
           "inverted, of other bits a pixel, or windowed otherwise",
}
OWN_DECODING = ("decoding", 2)  # of one's own images: the number goes up when their pixels change
FAR = 64  # grey levels between the mean of a domain and that of the others, from which it is named


def open_images(dataset: str, size: int, data: str, archives: str, skip_broken: bool, only: str = "",
                agreed: tuple[str, ...] = ()) -> Dataset:
    """A dataset of image files at `size` x `size`: decoded once into a cache below `data`, then opened from
    there, also when its archive is gone. With `skip_broken` images that cannot be decoded are left out. Of a
    folder nothing is read but the domain `only`, if that is given, whose classes are the `agreed` ones."""
    source = source_of(dataset)
    if only:
        source = dataclasses.replace(source, domains={only: (only, None)}, classes=agreed)
    paths, missing = locate(dataset, data, archives)
    cache = cache_without_archive(dataset, size, data, missing) if missing else None
    if cache is None:
        files = ImageFiles(paths or download_missing(dataset, data, archives), only)
        files.keys += [agreed] if only else []
        files.keys += [OWN_DECODING] if named(dataset).folder else []
        cache = Path(data) / "cache" / f"{named(dataset).short}-{size}-{files.fingerprint()}"
        decode_once(files, source, size, cache, skip_broken)
    own = named(dataset).folder
    split = own / SPLIT if own and (own / SPLIT).exists() else None
    if split:
        check_regular(split)
    try:
        domains, classes, index = open_cache(cache, source, size)
        names = json.loads((cache / "files.json").read_bytes()) if own else {}
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f"the cache {cache} is damaged ({type(e).__name__}: {e}); "
                        "delete that folder and start again")
    if source.content not in ("", index["content"]):
        raise UserError(f"{dataset}: its images are others than those of the official archive (their digest "
                        f"is {index['content']}, expected {source.content}): get it again, or give them as "
                        "images of your own, folder:PATH")
    if index["broken"] and not skip_broken:
        check_broken(dataset, named(dataset).folder is not None, index["broken"])
    for kind, what in TOLD.items():
        if index.get(kind):  # an older cache, or one of a known dataset, has not all of them
            print(f"{dataset}: {what}; {len(index[kind])} in all: {shortlist(index[kind])}", file=sys.stderr)
    opened = Dataset([Domain(*of) for of in domains], classes, index["content"])
    if not own:
        return opened
    if split:
        both = index["content"].encode() + split.read_bytes()
        opened.content = hashlib.blake2b(both, digest_size=6).hexdigest()
    broken = {text.partition(": ")[0] for text in index["broken"]}
    placed = place_images(split, names, index["pixels"], broken)
    for d in opened.domains:
        d.given, d.origin = placed[d.name]
    return opened


def check_broken(where: str, is_own: bool, broken: list[str]) -> None:
    again = "" if is_own else "get the archive again, "
    raise UserError(f"{where}: images that cannot be decoded: {len(broken)} ({shortlist(broken)}); "
                    f"replace or remove them, {again}or go on without them: --skip-broken")


# The cache: all pixels, uint8 [N, S, S, 3], one domain behind the other; files.json, which file each row is,
# and, written last, index.json. Its folder is named by the dataset, the size of the images, and a hash of
# what they were decoded from.

PIXELS = "pixels.bin"
BLOCKS, BLOCK = 1024, 1 << 16  # of the pixels that the digest covers: all of 64 MiB, a sample of more


def digest_of(cache: Path, index: dict) -> str:
    """What index.json says of the others and of itself: all labels and names, and blocks of the pixels in
    equal distances. A changed pixel between the blocks of a large cache is not noticed."""
    rest = {name: value for name, value in index.items() if name != "digest"}
    digest = hashlib.blake2b(json.dumps(rest, sort_keys=True).encode(), digest_size=8)
    digest.update((cache / "files.json").read_bytes())
    with open(cache / PIXELS, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        distance = max(BLOCK, (size - BLOCK) // (BLOCKS - 1))
        for start in range(0, size, distance):
            file.seek(start)
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def is_whole(cache: Path) -> bool:
    return (cache / "index.json").is_file() and (cache / PIXELS).is_file()


def caches_of(data: str, dataset: str, size: int) -> list[Path]:
    """All caches of a dataset and size, from whatever they were decoded, by name."""
    caches = Path(data, "cache").glob(f"{dataset}-{size}-{12 * '[0-9a-f]'}")
    return sorted(filter(is_whole, caches))


def cache_without_archive(dataset: str, size: int, data: str, missing: str) -> Path | None:
    """The cache of a dataset whose folder or archives are not here; None if there is none."""
    caches = caches_of(data, dataset, size)
    if len(caches) > 1:
        raise UserError(f"{missing}, and there are several caches of it ({', '.join(map(str, caches))}): "
                        "name the folder of the archive with --archives, or delete all but one")
    for cache in caches:
        print(f"{dataset}: {missing}; using the images that were decoded before, {cache}", file=sys.stderr)
    return caches[0] if caches else None


def open_cache(cache: Path, source: Folders, size: int) -> tuple[list, tuple[str, ...], dict]:
    """Domains (name, pixels [N, 3, size, size], labels [N]), classes, index. An error if it is damaged."""
    check_regular(cache / "files.json")
    index = json.loads((cache / "index.json").read_bytes())
    domains, start, parts = [], 0, [index.get(kind, []) for kind in TOLD]
    parts += [index["left_out"], index["lacking"], index["broken"]]
    if not isinstance(index["content"], str) or not all(isinstance(part, list) for part in parts):
        raise ValueError("what it says of its files is no text")
    if "digest" in index:  # older: none
        names = json.loads((cache / "files.json").read_bytes())  # in the order of the pixels
        if index["digest"] != digest_of(cache, index) or [*names] != [*index["domains"]]:
            raise ValueError("its labels, names or pixels are not those that were written")
    classes = source.classes or tuple(index["classes"])  # iWildCam's, and its domains, are in its files
    names = list(source.domains or index["domains"])
    if list(classes) != index["classes"] or names != list(index["domains"]):
        raise ValueError(f"it has {shortlist([*index['domains']])} and the classes "
                         f"{shortlist(index['classes'])}")
    with warnings.catch_warnings():  # it is read-only: a copy-on-write map would have to fit into memory
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        mapped = np.memmap(cache / PIXELS, np.uint8, "r").reshape(-1, size, size, 3)
        pixels = torch.from_numpy(mapped).permute(0, 3, 1, 2)
    if len(pixels) != sum(map(len, index["domains"].values())):
        raise ValueError(f"{PIXELS} holds {len(pixels)} images")
    for name, labels in index["domains"].items():
        if not {*labels} <= {*range(len(classes))}:
            raise ValueError(f"{name} has labels of no class")
        domains.append((name, pixels[start:start + len(labels)], torch.tensor(labels)))
        start += len(labels)
    return domains, classes, index


# Decoding


def decode_once(files: ImageFiles, source: Folders, size: int, cache: Path, skip_broken: bool) -> None:
    """Decode a dataset into its cache, if it is not there, in a temporary folder: what the dataset names of
    its archives is unpacked beside it; the cache is renamed at the end."""
    if is_whole(cache):
        return
    with locked(cache.parent / ".lock"):
        for leftover in cache.parent.glob("*.tmp"):  # of a decoding that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        if is_whole(cache):  # another process has decoded it in the meantime
            return
        with tempfile.TemporaryDirectory(suffix=".tmp", dir=cache.parent) as place:
            unpacked, decoded = Path(place, "unpacked"), Path(place, "decoded")
            unpacked.mkdir()
            decoded.mkdir()
            files.check_md5(source)
            files.scan(unpacked)
            listing = list_images(files, source)
            files.unpack(listing.names(), unpacked)
            is_own = source.layout == CUSTOM_IMAGES.layout
            index = write_pixels(files, listing, size, decoded, is_own)
            if index["broken"] and not skip_broken:
                check_broken(str(files), is_own, index["broken"])
            (decoded / "index.json").write_text(json.dumps(index), encoding="utf-8")
            shutil.rmtree(cache, ignore_errors=True)
            os.replace(decoded, cache)


def write_pixels(files: ImageFiles, listing: Listing, size: int, folder: Path, is_own: bool) -> dict:
    """The pixels and files.json of all images that can be decoded, in parallel and in order; returns the
    index, which has more of one's own images. Few images are decoded ahead, so that the memory needed does
    not grow with the dataset."""
    threads = os.cpu_count() or 1
    ahead = max(2 * threads, AHEAD // (3 * size * size))
    bar = tqdm(total=len(listing.names()), unit="image", desc=f"decoding to {size}x{size}", mininterval=0.5)
    index = {"left_out": listing.left_out, "lacking": listing.lacking, "broken": [], "dark": []}
    index |= {"classes": listing.classes, "domains": {}}
    written, contents, looks = {}, [], {}
    if is_own:
        index |= {"pages": [], "flat": [], "equal": [], "far": [], "pixels": {}}
    root = os.path.commonpath(listing.names())  # an archive that is packed anew may have another
    with bar, ThreadPoolExecutor(threads) as pool, open(folder / PIXELS, "wb") as file:
        for domain, images in listing.images.items():  # decoding and resizing release Python's lock
            names, labels = written.setdefault(domain, []), index["domains"].setdefault(domain, [])
            for start in range(0, len(images), ahead):
                some_images = images[start:start + ahead]
                decode = partial(decode_one, files, size, is_own)
                decoded = pool.map(decode, [name for name, _ in some_images])
                for (name, label), (rgb, kinds, why, content) in zip(some_images, decoded):
                    inner = name.removeprefix(root).strip("/")
                    contents.append((domain, listing.classes[label], inner, *content))
                    for kind in kinds:
                        if kind in index:
                            index[kind].append(f"{name}{why}")
                    if rgb is not None and is_own:
                        index["pixels"].setdefault(domain, []).append(digest_of_pixels(rgb))
                        looks.setdefault(domain, []).append((float(rgb.mean()), float(rgb.std())))
                    if rgb is not None:
                        file.write(rgb.data)
                        names.append(name)
                        labels.append(label)
                    bar.update()
        file.flush()
        os.fsync(file.fileno())
    (folder / "files.json").write_text(json.dumps(written), encoding="utf-8")
    index["twice"] = in_two_domains(contents)
    if is_own:
        index["equal"] = equal_images(written, index["pixels"])
        index["far"] = far_domains(looks)
    index["content"] = hashlib.blake2b(repr(sorted(contents)).encode(), digest_size=6).hexdigest()
    index["digest"] = digest_of(folder, index)
    return index


def in_two_domains(contents: list[tuple]) -> list[str]:
    """The images, by domain, class and name, whose bytes and CRC32 an image of another domain has."""
    first, pairs = {}, []
    for domain, _, name, *content in contents:
        of_first, name_of_first = first.setdefault(tuple(content), (domain, name))
        if of_first != domain:
            pairs.append(f"{name} is {name_of_first}")
    return pairs


def digest_of_pixels(rgb: np.ndarray) -> str:
    """16 hexadecimal digits by which equal pixels are known: within a domain, and by reproduce.predict."""
    return hashlib.blake2b(rgb.tobytes(), digest_size=8).hexdigest()


def equal_images(names: dict[str, list[str]], pixels: dict[str, list[str]]) -> list[str]:
    """The images whose pixels an earlier one of their domain has."""
    pairs = []
    for domain, of_domain in pixels.items():
        first = {}
        for name, digest in zip(names[domain], of_domain):
            earlier = first.setdefault(digest, name)
            if earlier != name:
                pairs.append(f"{name} is {earlier}")
    return pairs


def far_domains(looks: dict[str, list[tuple[float, float]]]) -> list[str]:
    """The domains whose mean grey level, or whose contrast, lies far from that of the others. `looks`: mean
    and deviation of each image."""
    means = {domain: np.mean(of_images, 0) for domain, of_images in looks.items()}
    far = []
    for domain, (level, contrast) in means.items():
        others = [look for other, look in means.items() if other != domain or len(means) != 2]
        their_level, their_contrast = np.median(others, 0)  # of three the odd one is not the middle one
        if abs(level - their_level) > FAR or 4 * contrast < their_contrast:
            far.append(f"{domain} (mean {level:.0f} and deviation {contrast:.0f} of 255, usual are "
                       f"{their_level:.0f} and {their_contrast:.0f})")
    return far


def decode_one(files: ImageFiles, size: int, is_own: bool,
               name: str) -> tuple[np.ndarray | None, list[str], str, tuple]:
    """One image, uint8 [size, size, 3], or None; its kinds in TOLD, and why; bytes and CRC32."""
    content = ()
    try:
        encoded = files.inside[name].read_bytes()
        content = len(encoded), zlib.crc32(encoded)
        image, kinds = upright(encoded, is_own)
        rgb = as_rgb(image, size)
        if (rgb == rgb[0, 0]).all():
            kinds.append("flat")
        return rgb, kinds, "", content
    except MemoryError:
        raise
    except Exception as e:  # whatever the decoder makes of a damaged file
        why = "it is no image" if isinstance(e, UnidentifiedImageError) else e
        return None, ["broken"], f": {why}", content


def as_rgb(image: Image.Image, size: int) -> np.ndarray:
    """uint8 [size, size, 3], antialiased, the aspect ratio not kept."""
    return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))


def upright(content: bytes, is_own: bool = False) -> tuple[Image.Image, list[str]]:
    """An encoded image of any mode with 8 bits a pixel and channel, turned as its EXIF data say; and what is
    odd about it: "dark", if its pixels have 16 bits, of which the upper two are unused, or "pages". What is
    transparent of one's own images becomes white; known datasets stay as the records have them."""
    check_header(content)
    image = Image.open(io.BytesIO(content), formats=FORMATS)
    odd = []
    if image.format in ("TIFF", "GIF", "WEBP", "PNG") and getattr(image, "n_frames", 1) > 1:
        odd.append("pages")
    has_16_bits = bits_of(image, content) == 16
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "F" or image.mode == "I" and image.format != "PPM":  # PPM: 16 bits, unpacked into 32
        raise ValueError("pixels of 32 bits, and signed ones, have no defined range: bring them to unsigned "
                         "8 or 16 bits")
    if image.mode.startswith("I"):
        pixels = np.asarray(image)  # 16 bits a pixel (PIL's convert would clip them at 255)
        if pixels.max() < UNUSED << 8:
            odd.append("dark")
        if is_own and image.format == "TIFF" and image.tag_v2.get(PHOTOMETRIC) == 0:  # 0 is white
            pixels = 65535 - pixels  # PIL does so with 8 bits alone
        return Image.fromarray((pixels >> 8).astype(np.uint8)), odd
    if has_16_bits and np.asarray(image.convert("RGB")).max() < UNUSED:  # PIL keeps the upper 8 bits
        odd.append("dark")
    if is_own and image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image, odd


UNUSED = 64  # of 256: the first value of 8 bits that pixels with 14 of 16 bits do not reach
PHOTOMETRIC, BITS = 262, 258  # tags of TIFF
HEADER = 8192  # bytes of a PGM or PPM file in which its header must end


def bits_of(image: Image.Image, content: bytes) -> int:
    """The bits of a value in a PNG or TIFF file; of others 8."""
    if image.format == "PNG":
        return content[24]  # of its first chunk
    if image.format == "TIFF":
        return max(image.tag_v2.get(BITS, (8,)))
    return 8


def check_header(content: bytes) -> None:
    """ValueError if the header of a PGM or PPM file, which PIL reads byte by byte, has endless comments."""
    if content[:1] == b"P" and content[1:2].isdigit():
        without_comments = re.sub(rb"#[^\r\n]*", b"", content[:HEADER])
        if len(without_comments.split(maxsplit=3)) < 3:  # kind, width and height
            raise ValueError(f"its header does not end within {HEADER} bytes")
