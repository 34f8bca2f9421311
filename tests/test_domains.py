"""The image datasets: each is read end to end from small archives in the official layout, good and bad."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import catalog  # noqa: E402
import domains  # noqa: E402
import numpy as np
import pytest
import torch
from basics import Stop  # noqa: E402
from PIL import Image

from .conftest import ROOT  # which also puts the repository on the path

NOWHERE = "http://127.0.0.1:9/"  # nothing listens there
SIZE = 8


def picture(name: str) -> bytes:
    """A PNG of 8x8 pixels that is different for each name."""
    file = io.BytesIO()
    Image.fromarray(pixels(name)).save(file, "png")
    return file.getvalue()


def pixels(name: str) -> np.ndarray:
    return np.random.default_rng(list(name.encode())).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)


def args(tmp_path, dataset: str, **changes):
    (tmp_path / "archives").mkdir(exist_ok=True)
    return types.SimpleNamespace(**{"dataset": dataset, "image_size": SIZE, "limit": 0, "seed": 0,
                                    "data": str(tmp_path / "data"), "archives": str(tmp_path / "archives")} | changes)


def tar(path: Path, entries: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as t:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            t.addfile(info, io.BytesIO(content))
    return path


def zipped(path: Path, entries: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as z:
        for name, content in entries.items():
            z.writestr(name, content)
    return path


def pictures(names) -> dict[str, bytes]:
    return {n: picture(n) for n in names}


def expect(monkeypatch, dataset: str, counts=None, **changes) -> None:
    """Expect these numbers of images in a dataset's domains, and be unable to download it."""
    source = catalog.FOLDERS[dataset]
    if counts is not None:
        counts = counts if isinstance(counts, dict) else dict.fromkeys(source.domains, counts)
        changes["domains"] = {d: (f, counts[d]) for d, (f, _) in source.domains.items()}
    monkeypatch.setitem(domains.FOLDERS, dataset, dataclasses.replace(
        source, files={p: (NOWHERE + p, md5) for p, (_, md5) in source.files.items()}, **changes))


def check(found, names_of_domains: dict[str, list[tuple[str, str]]], classes: tuple[str, ...]) -> None:
    """Each domain has exactly the images [(name, class), ...], in this order, with their pixels."""
    loaded, found_classes = found
    assert found_classes == classes and [d.name for d in loaded] == list(names_of_domains)
    for d in loaded:
        expected = names_of_domains[d.name]
        assert d.labels.tolist() == [classes.index(c) for _, c in expected] and d.labels.dtype == torch.int64
        assert d.images.dtype == torch.uint8 and d.images.is_contiguous(memory_format=torch.channels_last)
        assert np.array_equal(d.images.permute(0, 2, 3, 1).numpy(), np.stack([pixels(n) for n, _ in expected])), d.name


def stops(message: str, run, *a) -> str:
    with pytest.raises(Stop, match=message) as e:
        run(*a)
    assert "\n" not in str(e.value) and e.value.code == 1
    return str(e.value)


def nothing_is_left(tmp_path) -> bool:
    return not list((tmp_path / "data").rglob("*.npy")) and not list((tmp_path / "data").rglob("*.tmp"))


def test_the_facts_add_up():
    total = lambda name: sum(n for _, n in catalog.FOLDERS[name].domains.values())
    assert [total(n) for n in ("vlcs", "officehome", "domainnet", "camelyon17")] == [10729, 15588, 586575, 455954]
    names = ("vlcs", "officehome", "terrainc", "domainnet", "domainnet10", "domainnet20")
    assert [len(catalog.FOLDERS[n].classes) for n in names] == [5, 65, 10, 345, 10, 20]
    for source in catalog.FOLDERS.values():
        assert len(set(source.classes)) == len(source.classes) and source.layout in domains.LAYOUTS
        assert all(re.fullmatch("[a-z0-9_]+", d) for d in source.domains)
    assert {*catalog.DOMAINNET10, *catalog.DOMAINNET20} < {*catalog.DOMAINNET}
    assert [catalog.DOMAINNET[i] for i in (0, 31, 308, 327, 344)] == ["aircraft_carrier", "bird", "The_Eiffel_Tower", "t-shirt",
                                                                      "zigzag"]


# VLCS and tar archives


def vlcs(tmp_path, monkeypatch) -> dict[str, list[tuple[str, str]]]:
    """A small VLCS.tar.gz as DomainBed packs it; returns what is in it."""
    classes = catalog.FOLDERS["vlcs"].classes
    there = {d: [(f"VLCS/{f}/{c}/{i}.jpg", c) for c in classes for i in range(2)]
             for d, (f, _) in catalog.FOLDERS["vlcs"].domains.items()}
    names = sorted((n for images in there.values() for n, _ in images), reverse=True)  # not in our order
    tar(tmp_path / "archives" / "VLCS.tar.gz", pictures(names) | {"VLCS/SUN09/car/._0.jpg": b"what macOS adds"})
    expect(monkeypatch, "vlcs", 10)
    return there


def test_vlcs(tmp_path, monkeypatch, capsys):
    there = vlcs(tmp_path, monkeypatch)
    found = domains.load_domains(args(tmp_path, "vlcs"))
    check(found, there, ("bird", "car", "chair", "dog", "person"))
    assert list(there) == ["caltech101", "labelme", "sun09", "voc2007"]
    assert "1 files are no images and were left out: VLCS/SUN09/car/._0.jpg" in capsys.readouterr().err
    decoded = {p: p.stat().st_mtime_ns for p in (tmp_path / "data").rglob("*.npy")}
    archive = tmp_path / "archives" / "VLCS.tar.gz"
    os.utime(archive.rename(tmp_path / "archives" / "vlcs.tar.gz"), (1, 1))  # copied: the content is what counts
    check(domains.load_domains(args(tmp_path, "vlcs")), there, found[1])
    assert decoded == {p: p.stat().st_mtime_ns for p in (tmp_path / "data").rglob("*.npy")}


def test_limit_keeps_a_part(tmp_path, monkeypatch):
    vlcs(tmp_path, monkeypatch)
    all_of_it, _ = domains.load_domains(args(tmp_path, "vlcs"))
    some, _ = domains.load_domains(args(tmp_path, "vlcs", limit=6))
    assert [len(d.labels) for d in some] == [6] * 4
    assert some[0].images.untyped_storage().nbytes() == 6 * SIZE * SIZE * 3  # a copy of what is kept, the map is let go
    known = {d.images[i].numpy().tobytes(): int(d.labels[i]) for d in all_of_it for i in range(10)}
    assert all(known[d.images[i].numpy().tobytes()] == d.labels[i] for d in some for i in range(6))


def test_bad_tars(tmp_path, monkeypatch):
    there = vlcs(tmp_path, monkeypatch)
    archive = tmp_path / "archives" / "VLCS.tar.gz"
    whole, load = archive.read_bytes(), lambda: domains.load_domains(args(tmp_path, "vlcs"))
    for damaged in (whole[:len(whole) // 2], whole[:-4], whole[:-8] + bytes(4) + whole[-4:], b"no tar at all" * 99, b""):
        archive.write_bytes(damaged)
        stops("VLCS.tar.gz is no whole tar archive.*get it again", load)
    entries = pictures(n for images in there.values() for n, _ in images)
    for name in ("../evil.jpg", "/evil.jpg", "VLCS/../../evil.jpg"):
        tar(archive, entries | {name: b"x"})
        stops(f"the entry {re.escape(name)} leads outside the folder; the archive is not used", load)
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        with tarfile.open(archive, "w:gz") as t:
            link = tarfile.TarInfo("VLCS/SUN09/bird/0.jpg")
            link.type, link.linkname = kind, "/etc/passwd"
            t.addfile(link)
        stops("the entry VLCS/SUN09/bird/0.jpg is a link; the archive is not used", load)
    tar(archive, {n: c for n, c in entries.items() if n != "VLCS/LabelMe/dog/1.jpg"})
    stops("domain labelme has 9 images; expected 10", load)
    tar(archive, {n.replace("/dog/", "/wolf/"): c for n, c in entries.items()})
    stops("domain caltech101 has no images in Caltech101/dog; expected the class folders.*found.*wolf", load)
    tar(archive, {n.removeprefix("VLCS/Caltech101/"): c for n, c in entries.items()})
    stops("found no folder Caltech101; expected the folders Caltech101, LabelMe", load)
    tar(archive, entries | {"VLCS/VOC2007/car/1.jpg": b"no image"})
    stops("VLCS/VOC2007/car/1.jpg cannot be decoded", load)
    assert nothing_is_left(tmp_path)


# Office-Home


def test_officehome(tmp_path, monkeypatch):
    source = catalog.FOLDERS["officehome"]
    there = {d: [(f"OfficeHomeDataset_10072016/{f}/{c}/00001.jpg", c) for c in source.classes]
             for d, (f, _) in source.domains.items()}
    entries = pictures(n for images in there.values() for n, _ in images)
    entries |= {"OfficeHomeDataset_10072016/ImageInfo.csv": b"x", "OfficeHomeDataset_10072016/Art/note.txt": b"x"}
    archive = zipped(tmp_path / "archives" / "OfficeHomeDataset_10072016.zip", entries)
    expect(monkeypatch, "officehome", 65)
    check(domains.load_domains(args(tmp_path, "officehome")), there, source.classes)
    assert list(there) == ["art", "clipart", "product", "real_world"] and source.classes[:2] == ("Alarm_Clock", "Backpack")
    zipped(archive, {n: c for n, c in entries.items() if "Real World/TV/" not in n})
    stops("domain real_world has no images in Real World/TV", domains.load_domains, args(tmp_path, "officehome"))
    with zipfile.ZipFile(archive) as z:  # as unzip leaves it
        z.extractall(tmp_path / "archives")
    stops("domain real_world has no images", domains.load_domains, args(tmp_path, "officehome"))
    other = tmp_path / "archives" / "OfficeHomeDataset_10072016" / "Real World" / "TV"
    other.mkdir()
    (other / "00001.jpg").write_bytes(picture("OfficeHomeDataset_10072016/Real World/TV/00001.jpg"))
    check(domains.load_domains(args(tmp_path, "officehome")), there, source.classes)


# DomainNet


def domainnet(folder: Path) -> tuple[dict[str, dict[str, bytes]], dict[str, list[str]]]:
    """({domain: entries of its zip}, {name of a list: its lines}): two images of each class in the lists, one that is not."""
    classes = sorted({*catalog.DOMAINNET10, *catalog.DOMAINNET20, "axe"})
    zips, lists = {}, {}
    for d in catalog.DOMAINNET_MD5:
        zips[d] = pictures(f"{d}/{c}/{d}_{i}.jpg" for c in classes for i in range(3))
        zips[d] |= {n: b"never decoded" for n in zips[d] if "/axe/" in n or n.endswith("_2.jpg")}
        for i, part in enumerate(("train", "test")):
            lists[f"{d}_{part}.txt"] = [f"{d}/{c}/{d}_{i}.jpg {catalog.DOMAINNET.index(c)}" for c in classes]
    write_domainnet(folder, zips, lists)
    return zips, lists


def write_domainnet(folder: Path, zips, lists) -> None:
    for d, entries in zips.items():
        zipped(folder / f"{d}.zip", entries)
    for name, lines in lists.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))


def in_domainnet(classes) -> dict[str, list[tuple[str, str]]]:
    return {d: [(f"{d}/{c}/{d}_{i}.jpg", c) for c in classes for i in range(2)] for d in catalog.DOMAINNET_MD5}


def test_domainnet_and_its_subsets_share_archives(tmp_path, monkeypatch):
    domainnet(tmp_path / "archives" / "domainnet")  # with the name of an unpacked one, but there are only files in it
    expect(monkeypatch, "domainnet10", 20)
    expect(monkeypatch, "domainnet20", 40)
    check(domains.load_domains(args(tmp_path, "domainnet10")), in_domainnet(catalog.DOMAINNET10), catalog.DOMAINNET10)
    check(domains.load_domains(args(tmp_path, "domainnet20")), in_domainnet(catalog.DOMAINNET20), catalog.DOMAINNET20)
    few = tuple(c for c in catalog.DOMAINNET if c in {*catalog.DOMAINNET10, *catalog.DOMAINNET20})  # of the 345
    expect(monkeypatch, "domainnet", 2 * len(few), classes=few)
    check(domains.load_domains(args(tmp_path, "domainnet")), in_domainnet(few), few)
    assert not (tmp_path / "data" / "downloads").exists()
    expect(monkeypatch, "domainnet", 2 * len(few), classes=few[::-1])  # what is in the cache has other labels
    stops("the cache .* is damaged .*it has the classes bee, bird.*delete that folder", domains.load_domains,
          args(tmp_path, "domainnet"))


def test_domainnet_unpacked(tmp_path, monkeypatch):
    zips, lists = domainnet(tmp_path / "else")
    expect(monkeypatch, "domainnet10", 20)
    folder = tmp_path / "data" / "domainnet"
    for d in zips:
        with zipfile.ZipFile(tmp_path / "else" / f"{d}.zip") as z:
            z.extractall(folder)
    write_domainnet(folder, {}, lists)
    check(domains.load_domains(args(tmp_path, "domainnet10")), in_domainnet(catalog.DOMAINNET10), catalog.DOMAINNET10)


def test_bad_domainnet(tmp_path, monkeypatch):
    folder = tmp_path / "archives"
    zips, lists = domainnet(folder)
    expect(monkeypatch, "domainnet10", 20)
    load = lambda: domains.load_domains(args(tmp_path, "domainnet10"))
    train = lists["real_train.txt"]

    def listed(lines):
        write_domainnet(folder, {}, lists | {"real_train.txt": lines})

    listed(train + ["real/bird/lost.jpg 31"])
    stops("real_train.txt names real/bird/lost.jpg, which is not there; get real.zip again", load)
    listed(train[1:] + ["<html>"])
    stops("expected lines such as 'real/bird/x.jpg 31' in real_train.txt, found '<html>'", load)
    listed([line for line in train if "/tiger/" not in line])
    stops("domain real has 19 images; expected 20", load)
    write_domainnet(folder, {}, {n: [w for w in lines if "/tiger/" not in w] for n, lines in lists.items()})
    stops("the lists of domain clipart name no image of tiger", load)
    write_domainnet(folder, {}, lists)
    (folder / "sketch.zip").write_bytes((folder / "sketch.zip").read_bytes()[:999])
    stops("sketch.zip is no whole zip archive", load)
    zipped(folder / "sketch.zip", zips["sketch"] | {"../evil.jpg": b"x"})
    stops("the entry ../evil.jpg leads outside the folder", load)
    (folder / "sketch_test.txt").unlink()
    stops(f"could not download sketch_test.txt from {NOWHERE}sketch_test.txt .*--archives", load)
    assert nothing_is_left(tmp_path)


# TerraIncognita


def terra(folder: Path) -> tuple[dict, dict]:
    """({entry: content} of the images, {name: annotations}); location_38 has the image `both.jpg` with a cat and a dog."""
    classes = catalog.FOLDERS["terrainc"].classes
    categories = [{"id": 3 * i, "name": c} for i, c in enumerate((*classes, "car"))]
    number, tables = {c["name"]: c["id"] for c in categories}, {}
    for split, locations in (("cis_test", (38, 7)), ("train", (43, 46)), ("trans_val", (100,))):
        shown = [(f"{l}-{c}", l, c) for l in locations for c in (*classes, "car")]
        images = [{"id": i, "file_name": f"{i}.jpg", "location": l, "width": 8} for i, l, _ in shown]
        boxes = [{"id": f"{i}{n}", "image_id": i, "category_id": number[c]} for i, _, c in shown for n in range(2)]
        if 38 in locations:
            images.append({"id": "both", "file_name": "both.jpg", "location": 38})
            boxes += [{"id": c, "image_id": "both", "category_id": number[c]} for c in ("cat", "dog")]
        tables[f"{split}_annotations.json"] = {"images": images, "categories": categories, "annotations": boxes, "info": {}}
    names = [i["file_name"] for t in tables.values() for i in t["images"] if i["location"] != 7]
    entries = pictures(f"eccv_18_all_images_sm/{n}" for n in names)
    write_terra(folder, entries, tables)
    return entries, tables


def write_terra(folder: Path, entries, tables) -> None:
    tar(folder / "eccv_18_all_images_sm.tar.gz", entries)
    tar(folder / "eccv_18_annotations.tar.gz",
        {f"eccv_18_annotation_files/{n}": json.dumps(t).encode() for n, t in tables.items()} |
        {"eccv_18_annotation_files/._train_annotations.json": b"what macOS adds"})


def test_terrainc(tmp_path, monkeypatch):
    entries, tables = terra(tmp_path / "archives")
    classes = catalog.FOLDERS["terrainc"].classes
    expect(monkeypatch, "terrainc")
    there = {f"location_{l}": [(f"eccv_18_all_images_sm/{l}-{c}.jpg", c) for c in classes] for l in (38, 43, 46, 100)}
    there["location_38"] += [("eccv_18_all_images_sm/both.jpg", c) for c in ("cat", "dog")]
    there["location_38"].sort(key=lambda i: (classes.index(i[1]), i[0]))
    check(domains.load_domains(args(tmp_path, "terrainc")), there, classes)
    for name, images in there.items():  # as DomainBed's script deals them out
        for image, c in images:
            path = tmp_path / "other" / "terra_incognita" / name / c / Path(image).name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(image))
    check(domains.load_domains(args(tmp_path, "terrainc", archives=str(tmp_path / "other"), data=str(tmp_path / "new"))),
          {n: sorted(images, key=lambda i: (classes.index(i[1]), Path(i[0]).name)) for n, images in there.items()}, classes)


def test_bad_terrainc(tmp_path, monkeypatch):
    entries, tables = terra(tmp_path / "archives")
    expect(monkeypatch, "terrainc")
    load = lambda: domains.load_domains(args(tmp_path, "terrainc"))
    write_terra(tmp_path / "archives", {n: c for n, c in entries.items() if "43-dog" not in n}, tables)
    stops("the annotations name 43-dog.jpg, which is in no archive; get eccv_18_all_images_sm.tar.gz again", load)
    write_terra(tmp_path / "archives", entries, tables | {"train_annotations.json": {"images": []}})
    stops("train_annotations.json is no list of images, categories and annotations", load)
    write_terra(tmp_path / "archives", entries, {n: t for n, t in tables.items() if n.startswith("cis")})
    stops("the annotations name no image of location_43", load)
    assert nothing_is_left(tmp_path)


# Camelyon17 and iWildCam of WILDS


def camelyon(tmp_path, columns="patient,node,x_coord,y_coord,tumor,slide,center,split", lost=None) -> dict:
    there, lines, entries = {}, [f",{columns}"], {"./RELEASE_v1.0.txt": b""}
    for center in range(5):
        there[f"hospital_{center}"] = []
        for tumor in (0, 1):
            for x in (10, 9):
                slide = f"patient_{20 * center:03}_node_{tumor}"
                name = f"patches/{slide}/patch_{slide}_x_{x}_y_7.png"
                there[f"hospital_{center}"].append((name, ("normal", "tumor")[tumor]))
                lines.append(f"{len(lines)},{20 * center:03},{tumor},{x},7,{tumor},{center},{center},0")
                if name != lost:
                    entries[f"./{name}"] = picture(name)
    entries["./metadata.csv"] = "\n".join(lines).encode()  # after the images that it names
    tar(tmp_path / "archives" / "camelyon17_v1.0.tar.gz", entries)
    return there


def test_camelyon17(tmp_path, monkeypatch):
    there = camelyon(tmp_path)
    expect(monkeypatch, "camelyon17", 4)
    check(domains.load_domains(args(tmp_path, "camelyon17")), there, ("normal", "tumor"))
    with tarfile.open(tmp_path / "archives" / "camelyon17_v1.0.tar.gz") as t:  # as WILDS leaves it
        t.extractall(tmp_path / "wilds" / "camelyon17_v1.0")
    check(domains.load_domains(args(tmp_path, "camelyon17", archives=str(tmp_path / "wilds"), data=str(tmp_path / "new"))),
          there, ("normal", "tumor"))


def test_bad_camelyon17(tmp_path, monkeypatch):
    expect(monkeypatch, "camelyon17", 4)
    load = lambda: domains.load_domains(args(tmp_path, "camelyon17"))
    camelyon(tmp_path, columns="patient,node,x_coord,y_coord,tumour,slide,center,split")
    stops("metadata.csv has no column tumor; expected patient, node, .*found , patient, node", load)
    camelyon(tmp_path, columns="patient,node,x_coord,y_coord,tumor,slide,center")
    stops("line 2 of metadata.csv has 9 values; expected 8", load)
    camelyon(tmp_path, columns="patient,node,x_coord,y_coord,slide,tumor,center,split")  # 4 is no label
    stops("metadata.csv names .* of center 2 with tumor 2; expected", load)
    camelyon(tmp_path, lost="patches/patient_020_node_1/patch_patient_020_node_1_x_9_y_7.png")
    stops("names patches/patient_020_node_1/patch_patient_020_node_1_x_9_y_7.png of center 1 .*expected a patch that is there",
          load)
    camelyon(tmp_path)
    expect(monkeypatch, "camelyon17", 5)
    stops("domain hospital_0 has 4 images; expected 5", load)
    tar(tmp_path / "archives" / "camelyon17_v1.0.tar.gz", {"patches/x.png": b""})
    stops("found no metadata.csv", load)
    assert nothing_is_left(tmp_path)


def wildcam(tmp_path, cameras=12, lost=None, named="y,category_id,name") -> dict[str, list[tuple[str, str]]]:
    """Camera k has 30 - k images (9 and 10 as many), mostly of class k % 3, and 50 empty ones; two cameras are too small."""
    lines = [",split,location_remapped,location,sequence_remapped,seq_id,y,category_id,datetime,filename,image_id"]
    entries, there = {}, {}
    species = {y: f"species {y:02}" for y in range(1, 13)}
    for k in range(cameras):
        images = [(f"{k}-{i}.jpg", i % 12 + 1 if i < 24 - k else k % 3 + 1) for i in range(30 - min(k, 9) if k < 11 else 3)]
        images += [(f"{k}-empty-{i}.jpg", 0) for i in range(50 if k else 200)]
        lines += [f"{len(lines) + i},train,{k},{k + 100},0,s,{y},{y + 2},2013-01-01,{n},i" for i, (n, y) in enumerate(images)]
        entries |= {f"train/{n}": picture(f"train/{n}") if 0 < y <= 10 else b"never decoded" for n, y in images if n != lost}
        there[f"camera_{k}"] = [(f"train/{n}", species[y]) for n, y in images if 0 < y <= 10]
    entries["metadata.csv"] = "\n".join(lines).encode()
    entries["categories.csv"] = "\n".join([named, "0,0,empty", *(f"{y},{y + 2},{n}" for y, n in species.items()),
                                           "99999,7,none of it"]).encode()
    tar(tmp_path / "archives" / "iwildcam_v2.0.tar.gz", entries)
    return there


def test_iwildcam(tmp_path, monkeypatch):
    there = wildcam(tmp_path)
    expect(monkeypatch, "iwildcam")
    loaded, classes = domains.load_domains(args(tmp_path, "iwildcam"))
    kept = [f"camera_{k}" for k in (0, 1, 2, 3, 4, 5, 6, 7, 8)] + ["camera_10"]  # of 9 and 10 the name that sorts first
    totals = {c: sum(c == other for k in kept for _, other in there[k]) for c in {c for k in kept for _, c in there[k]}}
    assert classes == tuple(sorted(totals, key=lambda c: (-totals[c], c))) and len(classes) == 10
    there = {k: sorted(there[k], key=lambda i: (classes.index(i[1]), i[0])) for k in kept}
    check((loaded, classes), there, classes)
    check(domains.load_domains(args(tmp_path, "iwildcam")), there, classes)  # from the cache


def test_bad_iwildcam(tmp_path, monkeypatch):
    expect(monkeypatch, "iwildcam")
    load = lambda: domains.load_domains(args(tmp_path, "iwildcam"))
    wildcam(tmp_path, cameras=7)
    stops("expected at least 10 cameras and 10 classes with images in metadata.csv, found 7 and 10", load)
    wildcam(tmp_path, named="y,category_id,species")
    stops("categories.csv has no column name", load)
    wildcam(tmp_path, lost="3-2.jpg")
    stops("metadata.csv names train/3-2.jpg, which is not there", load)
    assert nothing_is_left(tmp_path)


# Downloads


@pytest.mark.parametrize("dataset", [*catalog.FOLDERS])
def test_nothing_is_there_and_no_download(tmp_path, monkeypatch, dataset):
    expect(monkeypatch, dataset)
    first = catalog.FOLDERS[dataset].archive
    stops(re.escape(f"could not download {first.replace('*', '')} from {NOWHERE}{first} (<urlopen error") +
          ".*download it by hand, under this name, and name its folder with --archives", domains.load_domains, args(tmp_path, dataset))
    assert nothing_is_left(tmp_path)


def test_a_web_page_is_no_archive(tmp_path):
    page = tmp_path / "uc.html"  # what Google Drive answers
    page.write_text("<html>Google Drive can't scan this file for viruses</html>")
    stops("could not download VLCS.tar.gz from .*uc.html .*web page instead of the file: Google Drive asks.*--archives",
          domains.download, page.as_uri(), tmp_path / "downloads" / "VLCS.tar.gz")
    assert not list((tmp_path / "downloads").glob("*VLCS.tar.gz"))


def test_md5_of_a_download(tmp_path):
    source, path = tmp_path / "clipart.zip", tmp_path / "downloads" / "clipart.zip"
    source.write_bytes(b"content")
    md5 = "9a0364b9e99bb480dd25e1f0284c8555"
    stops(f"could not download clipart.zip.*expected md5 0123, found {md5}; what was downloaded is deleted",
          domains.download, source.as_uri(), path, "0123")
    assert not path.exists() and not path.with_name("clipart.zip.part").exists()
    assert domains.download(source.as_uri(), path, md5).read_bytes() == b"content"


# Cost


def test_reading_is_never_far_ahead_of_decoding():
    asked, done, ahead = [], [], []

    def jobs():
        for i in range(200):
            asked.append(i)
            ahead.append(len(asked) - len(done))
            yield (i,)

    with ThreadPoolExecutor(2) as pool:
        for result in domains.bounded(pool, lambda i: i, jobs(), 5):
            done.append(result)
    assert done == list(range(200)) and max(ahead) <= 6


def test_a_failure_ends_the_other_jobs(tmp_path):
    started, go = [], threading.Event()

    def job(i):
        started.append(i)
        if i == 0:
            raise Stop("broken")
        go.wait(1)

    with ThreadPoolExecutor(1) as pool:
        stops("broken", lambda: list(domains.bounded(pool, job, ((i,) for i in range(100)), 8)))
        go.set()
    assert len(started) <= 3


def test_decoded_pixels_reach_the_disk_as_it_goes(tmp_path, monkeypatch):
    vlcs(tmp_path, monkeypatch)
    synced, fdatasync = [], os.fdatasync
    monkeypatch.setattr(domains, "FLUSHED", 9 * SIZE * SIZE * 3)
    monkeypatch.setattr(os, "fdatasync", lambda f: synced.append(f) or fdatasync(f))
    domains.load_domains(args(tmp_path, "vlcs"))
    assert len(synced) == 4 * 4  # 4 files, after each 10 of 40 images


def test_a_disk_that_fills_up(tmp_path, monkeypatch):
    vlcs(tmp_path, monkeypatch)
    monkeypatch.setattr(os, "pwrite", lambda fd, content, at: len(content) if at < 999 else 5)
    with pytest.raises(OSError, match="No space left on device"):
        domains.load_domains(args(tmp_path, "vlcs"))
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize("memory, read_ahead", [(4 * 10 * SIZE * SIZE * 3 * 2 + 9999, True), (99, False)])
def test_only_large_maps_are_read_without_reading_ahead(tmp_path, monkeypatch, memory, read_ahead):
    vlcs(tmp_path, monkeypatch)
    monkeypatch.setattr(domains, "memory", lambda: memory)
    loaded, _ = domains.load_domains(args(tmp_path, "vlcs"))
    maps = re.findall(r"/cache/vlcs-8-\w+/\w+\.npy\n(?:\w+:.*\n)*?VmFlags:(.*)", Path("/proc/self/smaps").read_text())
    assert len(maps) == len(loaded) == 4 and all((" rr" in flags) != read_ahead for flags in maps)


MEMORY = """
import dataclasses, json, re, resource, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
import numpy as np, torch
from types import SimpleNamespace
import domains
status = lambda key: int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
args = SimpleNamespace(dataset="pacs", image_size=512, data=sys.argv[2], archives=sys.argv[2], limit=0, seed=0)
source = domains.FOLDERS["pacs"]
domains.FOLDERS["pacs"] = dataclasses.replace(source, domains={d: (f, 49) for d, (f, _) in source.domains.items()})
torch.zeros(9)[torch.randperm(9)]
resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + (200 << 20),) * 2)
before = status("RssAnon")
loaded, _ = domains.load_domains(args)  # decodes 196 images: 154 MB
print("decoded", status("RssAnon") - before, sum(d.images.nbytes for d in loaded))
del loaded
many, cache = 300_000, next(Path(args.data, "cache").glob("pacs-*"))
index = json.loads((cache / "index.json").read_text())
for d in source.domains:  # a file of 236 GB, almost all of it a hole
    index["domains"][d]["labels"] = [0] * many
    with open(cache / f"{d}.npy", "wb") as f:
        np.lib.format.write_array_header_1_0(f, {"descr": "|u1", "fortran_order": False, "shape": (many, 512, 512, 3)})
        f.truncate(f.tell() + many * 512 * 512 * 3)
(cache / "index.json").write_text(json.dumps(index))
del index
before = status("RssAnon")
args.limit = 20
loaded, _ = domains.load_domains(args)
print("opened", status("RssAnon") - before, sum(d.images.nbytes for d in loaded))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_pixels(tmp_path):
    """Decoding 154 MB and opening a cache of 944 GB stay within 200 MB of memory of their own."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (9, 99, 199)).save(file, "png")
    source = catalog.FOLDERS["pacs"]
    zipped(tmp_path / "Homework3-PACS.zip", {f"PACS/{f}/{c}/{i}.png": file.getvalue() for f, _ in source.domains.values()
                                             for c in source.classes for i in range(7)})
    run = subprocess.run([sys.executable, "-c", MEMORY, str(ROOT), str(tmp_path)], text=True, capture_output=True,
                         env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    grown = {words[0]: (int(words[1]), int(words[2])) for words in map(str.split, run.stdout.splitlines())}
    assert grown["decoded"][0] < 70e6 < 150e6 < grown["decoded"][1], grown
    assert grown["opened"][0] < 150e6 and grown["opened"][1] < 70e6, grown
