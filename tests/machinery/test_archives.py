"""Where files come from: archives found, downloaded and read; damaged and dangerous ones refused."""

import gzip
import io
import os
import re
import tarfile
import types
import zipfile

from plumbing.data import archives
from plumbing.data.archives import MIB, ImageFiles, download, find_archives
from plumbing.data.catalog import FOLDERS

import pytest

from tests.conftest import stops, write_files
from tests.small_datasets import (NOWHERE, check, expect, load, names_in, pictures, refused, vlcs, write_tar,
                                  write_zip)

DAMAGES = {
    "half of it": lambda whole: whole[:len(whole) // 2],
    "something else": lambda whole: b"no tar at all" * 99,
}


@pytest.mark.parametrize("name, named, found", [
    ("a*.zip", "archives", "archives/b/A2.ZIP"),
    ("a1.zip", "archives", "data/downloads/a1.zip"),
    ("a*.zip", "", "data/downloads/a1.zip"),
    ("x.zip", "archives", None),  # a folder
])
def test_archives_come_before_downloads_and_by_name(tmp_path, name, named, found):
    files = ("data/downloads/a1.zip", "archives/b/A2.ZIP", "archives/c/a3.zip", "archives/x.zip/x")
    write_files(tmp_path, dict.fromkeys(files, ""))
    folder = str(tmp_path / named) if named else ""
    paths = find_archives([name], str(tmp_path / "data"), folder)
    assert paths == ({name: tmp_path / found} if found else {})


def test_fingerprint_of_an_archive_is_of_its_content(tmp_path):
    """Of zip archives of the same length by a first file that differs; of others by their end, or length."""
    def of(name: str, content: bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content)
        return ImageFiles([path]).fingerprint()

    def zipped(first: bytes) -> bytes:
        written = io.BytesIO()
        with zipfile.ZipFile(written, "w") as archive:
            archive.writestr("first.png", first)
            archive.writestr("last.png", bytes(2 * MIB))
        return written.getvalue()

    contents = (zipped(b"0"), zipped(b"1"), bytes(MIB) + b"1", bytes(MIB) + b"01", b"1" + bytes(MIB))
    assert len({of("a", content) for content in contents}) == 5
    assert of("a", zipped(b"0")) == of("a copy", zipped(b"0"))


@pytest.fixture
def unpacked_office(tmp_path, monkeypatch):
    """The folder of an unpacked Office-Caltech10 with one image of each class."""
    with zipfile.ZipFile(write_office(tmp_path, monkeypatch, {})) as archive:
        archive.extractall(tmp_path / "data" / "officecaltech")
    expect(monkeypatch, "officecaltech", 10)
    return tmp_path / "data" / "officecaltech"


def test_links_to_folders_are_followed(tmp_path, unpacked_office):
    """Those of classes and of domains, out of the dataset's folder too, but not round in circles."""
    files = list(unpacked_office.rglob("*.png"))
    for moved in ("amazon/bike", "webcam"):
        (tmp_path / "elsewhere" / moved).parent.mkdir(parents=True, exist_ok=True)
        (unpacked_office / moved).rename(tmp_path / "elsewhere" / moved)
        (unpacked_office / moved).symlink_to(tmp_path / "elsewhere" / moved)
    found = ImageFiles([unpacked_office])
    assert sorted(found.inside) == sorted(path.relative_to(unpacked_office).as_posix() for path in files)
    loaded, _ = load(tmp_path, "officecaltech")
    assert [len(domain.labels) for domain in loaded] == [10, 10, 10, 10]
    (unpacked_office / "amazon" / "mug" / "round").symlink_to(unpacked_office / "amazon")
    (unpacked_office / "amazon" / "mug" / "itself").symlink_to("itself")
    os.mkfifo(unpacked_office / "amazon" / "bike" / "pipe.png")
    (unpacked_office / "elsewhere").symlink_to("nowhere")
    stops("3 entries are no files .*: amazon/bike/pipe.png, amazon/mug/itself, amazon/mug/round; replace",
          load, tmp_path, "officecaltech")


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_tar_is_refused(tmp_path, archive, damage):
    archive.write_bytes(damage(archive.read_bytes()))
    refused("VLCS.tar.gz is no whole archive.*get it again", tmp_path, "vlcs")


def test_the_checksum_of_a_tar_is_compared_behind_its_end(tmp_path, archive):
    content = gzip.decompress(archive.read_bytes())
    padded = gzip.compress(content + bytes(2 * MIB))
    archive.write_bytes(padded[:-8] + bytes(4) + padded[-4:])
    stops("VLCS.tar.gz is no whole archive .CRC check failed", load, tmp_path, "vlcs")
    archive.write_bytes(padded)
    check(load(tmp_path, "vlcs"), vlcs(), FOLDERS["vlcs"].classes)


OUTSIDE = ["/evil.jpg", "VLCS/../../evil.jpg", "C:/evil.jpg", "..\\evil.jpg"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_tar_that_leads_outside_is_refused(tmp_path, archive, name):
    write_tar(archive, pictures(names_in(vlcs())) | {name: b"x"})
    message = f"the entry {re.escape(name)} leads outside the folder; the archive is not used"
    refused(message, tmp_path, "vlcs")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE], ids=["symbolic", "hard"])
def test_a_tar_with_a_link_is_refused(tmp_path, archive, kind):
    link = tarfile.TarInfo("VLCS/SUN09/bird/0.jpg")
    link.type, link.linkname = kind, "/etc/passwd"
    with tarfile.open(archive, "w:gz") as t:
        t.addfile(link)
    message = "the entry VLCS/SUN09/bird/0.jpg is a link; the archive is not used"
    refused(message, tmp_path, "vlcs")


def write_office(tmp_path, monkeypatch, entries: dict[str, bytes]):
    """Office-Caltech10 with one image of each class, and these entries."""
    source = FOLDERS["officecaltech"]
    expect(monkeypatch, "officecaltech", 10)
    folders = [folder for folder, _ in source.domains.values()]
    names = [f"{folder}/{c}/0.png" for folder in folders for c in source.classes]
    return write_zip(tmp_path / "archives" / "Office_Caltech_DA_Dataset-main.zip", pictures(names) | entries)


def test_a_damaged_image_in_a_zip_is_noticed(tmp_path, monkeypatch):
    archive = write_office(tmp_path, monkeypatch, {})
    damaged = bytearray(archive.read_bytes())
    pixels = damaged.index(b"IDAT", len(damaged) // 4) + 8
    damaged[pixels:pixels + 22] = bytes(22)
    archive.write_bytes(damaged)
    refused("is no whole archive .Bad CRC-32", tmp_path, "officecaltech")


def test_only_the_images_of_the_dataset_are_unpacked(tmp_path, monkeypatch):
    write_office(tmp_path, monkeypatch, {"film.mp4": b"x", "dslr/other/0.png": b"x"})
    unpack, unpacked = ImageFiles.unpack, []

    def recorded(self, names, folder):
        unpack(self, names, folder)
        unpacked.extend(path.name for path in folder.rglob("*.*"))
    monkeypatch.setattr(ImageFiles, "unpack", recorded)
    load(tmp_path, "officecaltech")
    assert unpacked == ["0.png"] * 40
    assert not list((tmp_path / "data" / "cache").glob("*.tmp"))


def test_a_disk_with_too_little_room_is_told_before(tmp_path, monkeypatch):
    write_office(tmp_path, monkeypatch, {})
    monkeypatch.setattr(archives.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=9))
    monkeypatch.setattr(zipfile.ZipFile, "extract", pytest.fail)
    message = "its images take .* for a while below .*cache.*, where 0.0 MiB are free"
    refused(message, tmp_path, "officecaltech")


@pytest.mark.parametrize("dataset", ["vlcs", "domainnet10"])
def test_nothing_is_there_and_no_download(tmp_path, monkeypatch, dataset):
    expect(monkeypatch, dataset)
    first = next(iter(FOLDERS[dataset].files))
    name = first.replace("*", "")
    message = re.escape(f"could not download {name} from {NOWHERE}{first} (<urlopen error")
    message += ".*download it by hand, under this name, and name its folder with --archives"
    refused(message, tmp_path, dataset)


def test_a_web_page_is_no_archive(tmp_path):
    page = tmp_path / "uc.html"  # what Google Drive answers
    page.write_text("<html>Google Drive can't scan this file for viruses</html>")
    message = "could not download VLCS.tar.gz from .*uc.html "
    message += ".*web page instead of the file: Google Drive asks.*--archives"
    stops(message, download, page.as_uri(), tmp_path / "downloads" / "VLCS.tar.gz")
    assert not list((tmp_path / "downloads").glob("*VLCS.tar.gz"))


def test_a_download_with_another_md5_is_deleted(tmp_path):
    source, path = tmp_path / "clipart.zip", tmp_path / "downloads" / "clipart.zip"
    source.write_bytes(b"content")
    message = "could not download clipart.zip.*expected md5 0123, found 9a0364b9e99bb480dd25e1f0284c8555; "
    message += "what was downloaded is deleted"
    stops(message, download, source.as_uri(), path, "0123")
    assert not path.exists() and not path.with_name("clipart.zip.part").exists()
