"""The cache of decoded pixels: what it holds, when it is used again, and what it costs."""

import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path

from plumbing.data import decoding
from plumbing.data.catalog import FOLDERS

from tests.conftest import stops
from tests.own_images import write_images
from tests.small_datasets import check, load, names_in, pictures, vlcs, write_tar

import pytest

CLASSES = FOLDERS["vlcs"].classes


def times(tmp_path) -> dict[Path, int]:
    """{file with pixels: its last change in ns}."""
    return {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("pixels.bin")}


def test_a_copied_archive_is_not_decoded_again(tmp_path, archive):
    load(tmp_path, "vlcs")
    before = times(tmp_path)
    assert len(before) == 1
    copy = archive.rename(tmp_path / "archives" / "vlcs.tar.gz")
    os.utime(copy, (1, 1))  # the content is what counts
    check(load(tmp_path, "vlcs"), vlcs(), CLASSES)
    assert times(tmp_path) == before


def test_another_archive_is_decoded_again(tmp_path, archive):
    """And what a decoding has left that was killed goes."""
    load(tmp_path, "vlcs")
    write_tar(archive, pictures(names_in(vlcs())))
    leftover = tmp_path / "data" / "cache" / "vlcs-killed.tmp"
    leftover.mkdir()
    (leftover / "pixels.bin").write_bytes(bytes(9))
    check(load(tmp_path, "vlcs"), vlcs(), CLASSES)
    assert len(times(tmp_path)) == 2 and not leftover.exists()


def test_few_images_are_decoded_ahead(tmp_path, archive, monkeypatch):
    """In several pieces, each in its place: memory does not grow with the dataset."""
    pieces = []

    def two_at_once(_, decode, names):
        pieces.append(len(names))
        return map(decode, names)
    monkeypatch.setattr(decoding, "AHEAD", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(decoding.ThreadPoolExecutor, "map", two_at_once)
    check(load(tmp_path, "vlcs"), vlcs(), CLASSES)
    assert {*pieces} == {2}


@pytest.fixture
def cache(tmp_path, archive) -> Path:
    """The cache of the small VLCS, whose archive is gone."""
    load(tmp_path, "vlcs")
    archive.unlink()
    return next((tmp_path / "data" / "cache").glob("vlcs-*"))


def test_a_cache_is_enough(tmp_path, cache, capsys):
    """And its pixels are mapped: a run needs no memory for all of them."""
    capsys.readouterr()
    opened = load(tmp_path, "vlcs")
    check(opened, vlcs(), CLASSES)
    if sys.platform == "linux":
        assert str(cache / "pixels.bin") in Path("/proc/self/maps").read_text()
    note = f"vlcs: VLCS.tar.gz is not in {tmp_path}/archives or {tmp_path}/data/downloads; using the images "
    note += f"that were decoded before, {cache}\n"
    assert note in capsys.readouterr().err


def test_only_a_whole_cache_of_the_dataset_and_size_counts(tmp_path, cache):
    for other in ("vlcs-16-0123456789ab", "vlcs2-8-0123456789ab", f"{cache.name}.17.tmp", "vlcs-8-draft"):
        cache.rename(cache.with_name(other))
        stops("could not download VLCS.tar.gz", load, tmp_path, "vlcs")
        cache.with_name(other).rename(cache)
    (cache / "index.json").unlink()
    stops("could not download VLCS.tar.gz", load, tmp_path, "vlcs")


def test_several_caches_are_told_apart_by_their_archive(tmp_path, cache):
    copy = shutil.copytree(cache, cache.with_name("vlcs-8-ffffffffffff"))
    message = f"VLCS.tar.gz is not in .*, and there are several caches of it .{cache}, {copy}.: name"
    stops(message, load, tmp_path, "vlcs")


def swapped_domains(index: bytes) -> bytes:
    """With the same text, if its names are sorted."""
    whole = json.loads(index)
    whole["domains"] = dict(reversed(whole["domains"].items()))
    return json.dumps(whole).encode()


def test_what_changed_in_a_cache_is_noticed(tmp_path, monkeypatch):
    """Pixels that are zero, labels that are swapped, a name. An older cache without a digest is opened, if it
    has all pixels."""
    monkeypatch.setattr(decoding, "BLOCK", 99)
    folder = write_images(tmp_path / "images", classes=("bird", "car"))
    load(tmp_path, f"folder:{folder}")
    (cache,) = (tmp_path / "data" / "cache").glob("images-*")
    pixels, index = (cache / "pixels.bin").read_bytes(), (cache / "index.json").read_bytes()
    files = (cache / "files.json").read_bytes()
    for file, before, after in (
        ("pixels.bin", pixels, bytes(len(pixels))),
        ("pixels.bin", pixels, pixels[:-1] + bytes([pixels[-1] ^ 1])),
        ("index.json", index, re.sub(rb"\[0, (.*?)1\]", rb"[1, \g<1>0]", index)),
        ("index.json", index, index.replace(b'"content"', b'"contents"')),
        ("index.json", index, re.sub(rb'"dark": .\]', b'"dark": 5', index)),
        ("index.json", index, b"[" * 100_000),
        ("index.json", index, swapped_domains(index)),
        ("files.json", files, files.replace(b"1.png", b"2.png", 1)),
    ):
        assert after != before
        (cache / file).write_bytes(after)
        stops(f"the cache {cache} is damaged", load, tmp_path, f"folder:{folder}")
        (cache / file).write_bytes(before)
    (cache / "index.json").write_bytes(re.sub(b', "digest": "[0-9a-f]+"', b"", index))
    load(tmp_path, f"folder:{folder}")
    (cache / "pixels.bin").write_bytes(pixels[:-8 * 8 * 3])
    stops("pixels.bin holds [0-9]+ images", load, tmp_path, f"folder:{folder}")


def test_another_archive_given_by_hand_is_refused_by_its_md5(tmp_path, archive, monkeypatch):
    (pattern, (url, _)), = FOLDERS["vlcs"].files.items()
    known = dataclasses.replace(FOLDERS["vlcs"], files={pattern: (url, 32 * "0")})
    monkeypatch.setitem(FOLDERS, "vlcs", known)
    stops(f"{archive}: expected md5 0000.*; it is another archive, or damaged", load, tmp_path, "vlcs")
