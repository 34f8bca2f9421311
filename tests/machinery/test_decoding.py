"""The cache of decoded pixels: what it holds, when it is used again, and what it costs."""

import dataclasses
import io
import json
import os
import re
import resource
import shutil
import sys
import types
from pathlib import Path

import common
from plumbing import decoding
from plumbing.catalog import FOLDERS

import pytest
from PIL import Image

from tests.own_images import write_images
from tests.small_datasets import (check, expect, load, names_in, pictures, stops, vlcs, write_tar,
                             write_vlcs, write_zip)

CLASSES = FOLDERS["vlcs"].classes


def times(tmp_path) -> dict[Path, int]:
    """{file with pixels: its last change in ns}."""
    return {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("pixels.bin")}


def test_a_copied_archive_is_not_decoded_again(tmp_path, monkeypatch):
    archive = write_vlcs(tmp_path, monkeypatch)
    load(tmp_path, "vlcs")
    before = times(tmp_path)
    assert len(before) == 1
    copy = archive.rename(tmp_path / "archives" / "vlcs.tar.gz")
    os.utime(copy, (1, 1))  # the content is what counts
    check(load(tmp_path, "vlcs"), vlcs(), CLASSES)
    assert times(tmp_path) == before


def test_another_archive_is_decoded_again(tmp_path, monkeypatch):
    """And what a decoding has left that was killed goes."""
    archive = write_vlcs(tmp_path, monkeypatch)
    load(tmp_path, "vlcs")
    write_tar(archive, pictures(names_in(vlcs())))
    leftover = tmp_path / "data" / "cache" / "vlcs-killed.tmp"
    leftover.mkdir()
    (leftover / "pixels.bin").write_bytes(bytes(9))
    check(load(tmp_path, "vlcs"), vlcs(), CLASSES)
    assert len(times(tmp_path)) == 2 and not leftover.exists()


def test_few_images_are_decoded_ahead(tmp_path, monkeypatch):
    """In several pieces, each in its place."""
    monkeypatch.setattr(decoding, "AHEAD", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    write_vlcs(tmp_path, monkeypatch)
    check(load(tmp_path, "vlcs"), vlcs(), CLASSES)


def test_limit_keeps_a_part(tmp_path, monkeypatch):
    write_vlcs(tmp_path, monkeypatch)
    whole, _ = load(tmp_path, "vlcs")
    part, _ = load(tmp_path, "vlcs", limit=6)
    for d, kept in zip(whole, part):
        labels = {}
        for image, label in zip(d.images, d.labels):
            labels[image.numpy().tobytes()] = int(label)
        assert len(kept.labels) == len(kept.images) == 6
        for image, label in zip(kept.images, kept.labels):
            assert labels[image.numpy().tobytes()] == label


def without_archive(tmp_path, monkeypatch) -> Path:
    """The cache of the small VLCS, whose archive is gone."""
    archive = write_vlcs(tmp_path, monkeypatch)
    load(tmp_path, "vlcs")
    archive.unlink()
    return next((tmp_path / "data" / "cache").glob("vlcs-*"))


def test_a_cache_is_enough(tmp_path, monkeypatch, capsys):
    cache = without_archive(tmp_path, monkeypatch)
    capsys.readouterr()
    check(load(tmp_path, "vlcs"), vlcs(), CLASSES)
    note = f"vlcs: VLCS.tar.gz is not in {tmp_path}/archives or {tmp_path}/data/downloads; using the images "
    note += f"that were decoded before, {cache}\n"
    assert note in capsys.readouterr().err


def test_only_a_whole_cache_of_the_dataset_and_size_counts(tmp_path, monkeypatch):
    cache = without_archive(tmp_path, monkeypatch)
    for other in ("vlcs-16-0123456789ab", "vlcs2-8-0123456789ab", f"{cache.name}.17.tmp", "vlcs-8-draft"):
        cache.rename(cache.with_name(other))
        stops("could not download VLCS.tar.gz", load, tmp_path, "vlcs")
        cache.with_name(other).rename(cache)
    (cache / "index.json").unlink()
    stops("could not download VLCS.tar.gz", load, tmp_path, "vlcs")


def test_several_caches_are_told_apart_by_their_archive(tmp_path, monkeypatch):
    cache = without_archive(tmp_path, monkeypatch)
    copy = shutil.copytree(cache, cache.with_name("vlcs-8-ffffffffffff"))
    message = f"VLCS.tar.gz is not in .*, and there are several caches of it .{cache}, {copy}.: name"
    stops(message, load, tmp_path, "vlcs")
    shutil.rmtree(copy)
    whole_image = 8 * 8 * 3  # without it the rest still has the form of images
    (cache / "pixels.bin").write_bytes((cache / "pixels.bin").read_bytes()[:-whole_image])
    stops(f"the cache {cache} is damaged", load, tmp_path, "vlcs")


@pytest.mark.parametrize("file, old, new", [
    ("index.json", '"content"', '"contents"'), ("index.json", '"dark": .]', '"dark": 5'),
    ("index.json", '"bird", ', ""), ("index.json", ": .0, ", ": [99, "), ("files.json", "{", ""),
])
def test_a_cache_with_anything_else_is_damaged(tmp_path, file, old, new):
    folder = write_images(tmp_path / "images", classes=("bird", "car"))
    load(tmp_path, f"folder:{folder}")
    (cache,) = (tmp_path / "data" / "cache").glob("images-*")
    (folder / "split.csv").write_text("file,part\nnorth/bird/0.png,train\n")
    text = (cache / file).read_text()
    changed = re.sub(old, new, text, count=1)
    assert changed != text
    (cache / file).write_text(changed)
    stops(f"the cache {cache} is damaged", load, tmp_path, f"folder:{folder}")


def test_what_changed_in_a_cache_is_noticed(tmp_path, monkeypatch):
    """Pixels that are zero, labels that are swapped, a name. An older cache without a digest is opened."""
    monkeypatch.setattr(decoding, "BLOCK", 99)
    folder = write_images(tmp_path / "images", classes=("bird", "car"))
    load(tmp_path, f"folder:{folder}")
    (cache,) = (tmp_path / "data" / "cache").glob("images-*")

    def changed(file: str, new: bytes) -> None:
        before = (cache / file).read_bytes()
        assert new != before and len(new) == len(before)
        (cache / file).write_bytes(new)
        stops("those that were written", load, tmp_path, f"folder:{folder}")
        (cache / file).write_bytes(before)
    pixels, index = (cache / "pixels.bin").read_bytes(), (cache / "index.json").read_text()
    changed("pixels.bin", bytes(len(pixels)))
    changed("pixels.bin", pixels[:-1] + bytes([pixels[-1] ^ 1]))
    swapped = re.sub(r"\[0, (.*?)1\]", r"[1, \g<1>0]", index)
    changed("index.json", swapped.encode())
    changed("files.json", (cache / "files.json").read_bytes().replace(b"1.png", b"2.png", 1))
    (cache / "index.json").write_text(re.sub(', "digest": "[0-9a-f]+"', "", index))
    load(tmp_path, f"folder:{folder}")


def test_another_archive_given_by_hand_is_refused_by_its_md5(tmp_path, monkeypatch):
    archive = write_vlcs(tmp_path, monkeypatch)
    (pattern, (url, _)), = FOLDERS["vlcs"].files.items()
    known = dataclasses.replace(FOLDERS["vlcs"], files={pattern: (url, 32 * "0")})
    monkeypatch.setitem(FOLDERS, "vlcs", known)
    stops(f"{archive}: expected md5 0000.*; it is another archive, or damaged", load, tmp_path, "vlcs")


def status(key: str) -> int:
    """Bytes of this process, by a line of /proc."""
    line = re.search(key + r":\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line[1]) << 10


@pytest.fixture
def little_memory():
    """200 MB more than the process has."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + (200 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_pixels(tmp_path, monkeypatch, little_memory):
    """Decoding 154 MB and opening a cache of 944 GB, which is a hole almost everywhere."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (9, 99, 199)).save(file, "png")
    entries = {}
    for folder, _ in FOLDERS["pacs"].domains.values():
        for c in FOLDERS["pacs"].classes:
            entries |= {f"PACS/{folder}/{c}/{i}.png": file.getvalue() for i in range(7)}
    write_zip(tmp_path / "Homework3-PACS.zip", entries)
    expect(monkeypatch, "pacs", 49)
    args = types.SimpleNamespace(dataset="pacs", image_size=512, limit=0, seed=0, skip_broken=False,
                                 data=str(tmp_path), archives=str(tmp_path))

    def opened() -> tuple[int, int]:
        before = status("RssAnon")
        domains = common.open_dataset(args).domains
        return status("RssAnon") - before, sum(d.images.nbytes for d in domains)
    grown, pixels = opened()
    assert grown < 70e6 and pixels > 150e6
    (cache,) = (tmp_path / "cache").glob("pacs-*")
    index = json.loads((cache / "index.json").read_text())
    index["domains"] = {domain: [0] * 300_000 for domain in index["domains"]}
    del index["digest"]  # as of an older cache: these are not the pixels that were written
    os.truncate(cache / "pixels.bin", 4 * 300_000 * 512 * 512 * 3)
    (cache / "index.json").write_text(json.dumps(index))
    args.limit = 20
    grown, pixels = opened()
    assert grown < 150e6 and pixels < 70e6
