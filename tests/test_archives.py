"""Where files come from: archives found, downloaded and read; damaged and dangerous ones refused."""

import gzip
import os
import re
import tarfile
import types

from plumbing.archives import MIB, ImageFiles, download, find_archive, find_archives
from plumbing.catalog import FOLDERS

import pytest

from .small_datasets import (
    NOWHERE,
    check,
    expect,
    load,
    names_in,
    nothing_is_left,
    pictures,
    stops,
    vlcs,
    write_tar,
    write_vlcs,
    write_zip,
)

DAMAGES = {
    "half of it": lambda whole: whole[:len(whole) // 2],
    "without its end": lambda whole: whole[:-4],
    "another checksum": lambda whole: whole[:-8] + bytes(4) + whole[-4:],
    "something else": lambda whole: b"no tar at all" * 99,
    "empty": lambda whole: b"",
}


# Found


def places(tmp_path, *files: str):
    """Arguments with --archives "archives" and --data "data" below tmp_path, where these files are."""
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return types.SimpleNamespace(archives=str(tmp_path / "archives"), data=str(tmp_path / "data"))


def test_archives_come_before_downloads_and_by_name(tmp_path):
    args = places(tmp_path, "data/downloads/a1.zip", "archives/b/A2.ZIP", "archives/c/a3.zip")
    assert find_archive(args, "a*.zip") == tmp_path / "archives/b/A2.ZIP"
    assert find_archive(args, "a1.zip") == tmp_path / "data/downloads/a1.zip"


def test_only_files_that_are_there_are_found(tmp_path):
    args = places(tmp_path, "archives/x.zip/note.txt", "archives/y.zip")
    assert find_archives(args, ["x.zip", "y.zip", "z.zip"]) == {"y.zip": tmp_path / "archives/y.zip"}


def test_no_archives_are_named(tmp_path):
    args = places(tmp_path, "data/downloads/a.zip")
    args.archives = None
    assert find_archive(args, "a.zip") == tmp_path / "data/downloads/a.zip"


# The fingerprint


def test_fingerprint_of_an_archive_is_of_its_content(tmp_path):
    contents = (b"0" + bytes(MIB), b"1" + bytes(MIB), bytes(MIB) + b"1", bytes(MIB) + b"01")
    fingerprints = []
    for i, content in enumerate(contents):
        path = tmp_path / f"{i}.zip"
        path.write_bytes(content)
        os.utime(path, (i, i))
        fingerprints.append(ImageFiles([path]).fingerprint())
    assert fingerprints[0] == fingerprints[1]  # they differ before the last MiB, which is not looked at
    assert len(set(fingerprints)) == 3


def test_fingerprint_of_a_folder_is_of_names_sizes_and_times(tmp_path):
    path = tmp_path / "art" / "dog" / "0.png"
    path.parent.mkdir(parents=True)
    fingerprints = []
    for content, seconds in ((b"0", 1), (b"0", 2), (b"00", 2)):
        path.write_bytes(content)
        os.utime(path, (seconds, seconds))
        fingerprints.append(ImageFiles([tmp_path]).fingerprint())
    path.rename(path.with_name("1.png"))
    fingerprints.append(ImageFiles([tmp_path]).fingerprint())
    assert len(set(fingerprints)) == 4
    path.with_name("1.png").rename(path)
    assert ImageFiles([tmp_path]).fingerprint() == fingerprints[2]


# Tar archives


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_tar_is_refused(tmp_path, monkeypatch, damage):
    archive = write_vlcs(tmp_path, monkeypatch)
    archive.write_bytes(damage(archive.read_bytes()))
    stops("VLCS.tar.gz is no whole tar archive.*get it again", load, tmp_path, "vlcs")
    assert nothing_is_left(tmp_path)


def test_the_checksum_of_a_tar_is_compared_behind_its_end(tmp_path, monkeypatch):
    archive = write_vlcs(tmp_path, monkeypatch)
    content = gzip.decompress(archive.read_bytes())
    padded = gzip.compress(content + bytes(2 * MIB))
    archive.write_bytes(padded[:-8] + bytes(4) + padded[-4:])
    stops("VLCS.tar.gz is no whole tar archive .CRC check failed", load, tmp_path, "vlcs")
    archive.write_bytes(padded)
    check(load(tmp_path, "vlcs"), vlcs(), FOLDERS["vlcs"].classes)


OUTSIDE = ["../evil.jpg", "/evil.jpg", "VLCS/../../evil.jpg", "C:/evil.jpg", "..\\evil.jpg"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_tar_that_leads_outside_is_refused(tmp_path, monkeypatch, name):
    archive = write_vlcs(tmp_path, monkeypatch)
    write_tar(archive, pictures(names_in(vlcs())) | {name: b"x"})
    message = f"the entry {re.escape(name)} leads outside the folder; the archive is not used"
    stops(message, load, tmp_path, "vlcs")
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE], ids=["symbolic", "hard"])
def test_a_tar_with_a_link_is_refused(tmp_path, monkeypatch, kind):
    archive = write_vlcs(tmp_path, monkeypatch)
    link = tarfile.TarInfo("VLCS/SUN09/bird/0.jpg")
    link.type, link.linkname = kind, "/etc/passwd"
    with tarfile.open(archive, "w:gz") as t:
        t.addfile(link)
    message = "the entry VLCS/SUN09/bird/0.jpg is a link; the archive is not used"
    stops(message, load, tmp_path, "vlcs")
    assert nothing_is_left(tmp_path)


# Zip archives


def write_office(tmp_path, monkeypatch, entries: dict[str, bytes]):
    """Office-Caltech10 with one image of each class, and these entries."""
    source = FOLDERS["officecaltech"]
    expect(monkeypatch, "officecaltech", 1)
    folders = [folder for folder, _ in source.domains.values()]
    names = [f"{folder}/{c}/0.png" for folder in folders for c in source.classes]
    return write_zip(tmp_path / "archives" / "Office_Caltech_DA_Dataset-main.zip", pictures(names) | entries)


def test_a_damaged_zip_is_refused(tmp_path, monkeypatch):
    archive = write_office(tmp_path, monkeypatch, {})
    archive.write_bytes(archive.read_bytes()[:999])
    stops("Dataset-main.zip is no whole zip archive.*get it again", load, tmp_path, "officecaltech")
    assert nothing_is_left(tmp_path)


def test_a_zip_that_leads_outside_is_refused(tmp_path, monkeypatch):
    write_office(tmp_path, monkeypatch, {"../evil.jpg": b"x"})
    message = "the entry ../evil.jpg leads outside the folder; the archive is not used"
    stops(message, load, tmp_path, "officecaltech")
    assert nothing_is_left(tmp_path)


# Downloads


@pytest.mark.parametrize("dataset", FOLDERS)
def test_nothing_is_there_and_no_download(tmp_path, monkeypatch, dataset):
    expect(monkeypatch, dataset)
    first = FOLDERS[dataset].archive
    name = first.replace("*", "")
    message = re.escape(f"could not download {name} from {NOWHERE}{first} (<urlopen error")
    message += ".*download it by hand, under this name, and name its folder with --archives"
    stops(message, load, tmp_path, dataset)
    assert nothing_is_left(tmp_path)


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


def test_a_download_that_is_there_is_not_repeated(tmp_path):
    path = tmp_path / "clipart.zip"
    path.write_bytes(b"content")
    assert download(NOWHERE, path) == path


def test_a_download_with_its_md5_is_kept(tmp_path):
    source, path = tmp_path / "clipart.zip", tmp_path / "downloads" / "clipart.zip"
    source.write_bytes(b"content")
    assert download(source.as_uri(), path, "9a0364b9e99bb480dd25e1f0284c8555") == path
    assert path.read_bytes() == b"content"
