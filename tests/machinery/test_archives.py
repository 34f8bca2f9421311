"""Where files come from: archives found, downloaded and unpacked; damaged and dangerous ones refused."""

import dataclasses
import io
import re
import shutil
import tarfile
import zipfile

from plumbing.archives import MIB, download, files_in, find_archives, key_of, unpack
from plumbing.catalog import FOLDERS

import pytest

from tests.small_datasets import (NOWHERE, check, expect, load, nothing_is_left, pictures, stops,
                                  vlcs, write_vlcs, write_zip)

OFFICE = "Office_Caltech_DA_Dataset-main.zip"


@pytest.mark.parametrize("name, named, found", [
    ("a*.zip", "archives", "archives/b/A2.ZIP"),
    ("a1.zip", "archives", "data/downloads/a1.zip"),
    ("a*.zip", "", "data/downloads/a1.zip"),
    ("x.zip", "archives", None),  # a folder
])
def test_archives_come_before_downloads_and_by_name(tmp_path, name, named, found):
    for file in ("data/downloads/a1.zip", "archives/b/A2.ZIP", "archives/c/a3.zip", "archives/x.zip/x"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
    folder = str(tmp_path / named) if named else ""
    paths = find_archives([name], str(tmp_path / "data"), folder)
    assert paths == ({name: tmp_path / found} if found else {})


def write_office(tmp_path, monkeypatch, entries: dict[str, bytes]):
    """Office-Caltech10 with one image of each class, and these entries."""
    source = FOLDERS["officecaltech"]
    expect(monkeypatch, "officecaltech", 10)
    folders = [folder for folder, _ in source.domains.values()]
    names = [f"{folder}/{c}/0.png" for folder in folders for c in source.classes]
    return write_zip(tmp_path / "archives" / OFFICE, pictures(names) | entries)


def test_links_to_folders_are_followed(tmp_path, monkeypatch):
    """Out of the dataset's folder too; a circle ends the run."""
    folder = tmp_path / "data" / "officecaltech"
    shutil.unpack_archive(write_office(tmp_path, monkeypatch, {}), folder)
    (folder / "webcam").rename(tmp_path / "webcam")
    (folder / "webcam").symlink_to(tmp_path / "webcam")
    assert [len(d.labels) for d in load(tmp_path, "officecaltech").domains] == [10, 10, 10, 10]
    (folder / "webcam" / "bike" / "again").symlink_to(folder / "webcam")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        load(tmp_path, "officecaltech")


def test_a_damaged_tar_is_refused(tmp_path, monkeypatch):
    archive = write_vlcs(tmp_path, monkeypatch)
    for damaged in (archive.read_bytes()[:-900], b"no tar at all" * 99):
        archive.write_bytes(damaged)
        stops("VLCS.tar.gz is no whole archive.*get it again", load, tmp_path, "vlcs")
    assert nothing_is_left(tmp_path)


def test_a_damaged_image_in_a_zip_is_noticed(tmp_path, monkeypatch):
    archive = write_office(tmp_path, monkeypatch, {})
    damaged = bytearray(archive.read_bytes())
    pixels = damaged.index(b"IDAT", len(damaged) // 4) + 8
    damaged[pixels:pixels + 22] = bytes(22)
    archive.write_bytes(damaged)
    stops("is no whole archive .Bad CRC-32", load, tmp_path, "officecaltech")
    assert nothing_is_left(tmp_path)


def link(name: str, target: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    return entry


@pytest.mark.parametrize("entry", [tarfile.TarInfo("VLCS/../../evil.csv"), link("VLCS/x", "/etc"),
                                   link("VLCS/y", "../../..")])
def test_a_tar_that_leads_outside_is_refused(tmp_path, monkeypatch, entry):
    archive = write_vlcs(tmp_path, monkeypatch)
    with tarfile.open(archive, "w:gz") as file:
        file.addfile(entry)
    stops("VLCS.tar.gz is no whole archive .*(outside|absolute)", load, tmp_path, "vlcs")
    assert nothing_is_left(tmp_path)


def test_a_zip_is_unpacked_into_its_folder_alone(tmp_path, monkeypatch):
    """And of the images only those of the dataset's classes."""
    entries = dict.fromkeys(["/abs.csv", "../up.csv", "film.mp4", "dslr/other/0.png"], b"x")
    archive = write_office(tmp_path, monkeypatch, entries)
    before = {*tmp_path.rglob("*")}
    (tmp_path / "a" / "b").mkdir(parents=True)
    unpack([archive], FOLDERS["officecaltech"], tmp_path / "a" / "b")
    assert {*tmp_path.rglob("*")} - before - {*(tmp_path / "a" / "b").rglob("*")} == {
        tmp_path / "a", tmp_path / "a" / "b"}
    images = [name for name in files_in(tmp_path / "a" / "b") if name.endswith("png")]
    assert sorted(images) == sorted(zipfile.ZipFile(archive).namelist()[:40])


def test_nothing_is_there_and_no_download(tmp_path, monkeypatch):
    expect(monkeypatch, "vlcs")
    message = re.escape(f"could not download VLCS.tar.gz from {NOWHERE}VLCS.tar.gz (<urlopen error")
    message += ".*download it by hand, under this name, and name its folder with --archives"
    stops(message, load, tmp_path, "vlcs")
    assert nothing_is_left(tmp_path)


def test_a_download_is_read_from_then_on(tmp_path, monkeypatch):
    archive = write_vlcs(tmp_path, monkeypatch)
    path = tmp_path / "data" / "downloads" / "VLCS.tar.gz"
    assert download(archive.as_uri(), path) == path
    archive.unlink()
    check(load(tmp_path, "vlcs"), vlcs(), FOLDERS["vlcs"].classes)


def test_another_archive_is_refused_by_its_md5(tmp_path, monkeypatch):
    """As the page that Google Drive answers with."""
    archive = write_vlcs(tmp_path, monkeypatch)
    (pattern, (url, _)), = FOLDERS["vlcs"].files.items()
    known = dataclasses.replace(FOLDERS["vlcs"], files={pattern: (url, 32 * "0")})
    monkeypatch.setitem(FOLDERS, "vlcs", known)
    stops(f"{archive} has not the md5 0000.*delete it and get it again", load, tmp_path, "vlcs")


def test_the_key_of_an_archive_is_of_its_content(tmp_path):
    """Of zip archives of the same length by a first file that differs; of others by their end, or length."""
    def of(name: str, content: bytes) -> tuple:
        (tmp_path / name).write_bytes(content)
        return key_of(tmp_path / name)

    def zipped(first: bytes) -> bytes:
        written = io.BytesIO()
        with zipfile.ZipFile(written, "w") as archive:
            archive.writestr("first.png", first)
            archive.writestr("last.png", bytes(2 * MIB))
        return written.getvalue()

    contents = (zipped(b"0"), zipped(b"1"), bytes(MIB) + b"1", bytes(MIB) + b"01", b"1" + bytes(MIB))
    assert len({of("a", content) for content in contents}) == 5
    assert of("a", zipped(b"0")) == of("a copy", zipped(b"0"))
