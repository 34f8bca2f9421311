"""The layouts of the datasets: each is read end to end from small archives in its official form."""

import collections
import dataclasses
import json
from pathlib import Path

from plumbing.data.catalog import FOLDERS
from plumbing.data.decoding import open_images

from tests.conftest import stops, write_files
from tests.small_datasets import (Images, check, expect, load, names_in, picture, pictures, refused, vlcs,
                                  write_tar, write_zip)

import pytest

DOMAINNET = FOLDERS["domainnet"].classes
DOMAINNET10 = FOLDERS["domainnet10"].classes
DOMAINNET20 = FOLDERS["domainnet20"].classes
NOTHING = "no file has this in its name"


# Folders: VLCS in a tar archive


def test_vlcs(tmp_path, archive, capsys):
    assert list(vlcs()) == ["caltech101", "labelme", "sun09", "voc2007"]
    check(load(tmp_path, "vlcs"), vlcs(), ("bird", "car", "chair", "dog", "person"))
    message = "files that are no images were left out; 1 in all: VLCS/SUN09/car/._0.jpg"
    assert message in capsys.readouterr().err


def test_two_classes_that_have_changed_places_are_noticed(tmp_path, archive, monkeypatch):
    """By their numbers; and by the digest, where these are equal."""
    names = names_in(vlcs())
    changed = {name: name.replace("/car/", "/?/").replace("/dog/", "/car/").replace("/?/", "/dog/")
               for name in names}
    contents = pictures(names)
    load(tmp_path, "vlcs")
    right = open_images("vlcs", 8, str(tmp_path / "data"), str(tmp_path / "archives"), False).content
    write_tar(archive, {f"packed/anew/{name}": contents[name] for name in sorted(names)})
    known = dataclasses.replace(FOLDERS["vlcs"], content=right, counts={"sun09": [2, 2, 2, 2, 2]})
    monkeypatch.setitem(FOLDERS, "vlcs", known)
    check(load(tmp_path, "vlcs", data="other"), vlcs(), FOLDERS["vlcs"].classes)
    write_tar(archive, {changed[name]: content for name, content in contents.items()})
    stops("vlcs: its images are others than those of the official archive .* folder:PATH", load, tmp_path,
          "vlcs")
    del contents["VLCS/SUN09/dog/0.jpg"]
    contents["VLCS/SUN09/car/2.jpg"] = picture("x")
    write_tar(archive, contents)
    stops("domain sun09 has 3 images of car; expected 2: get it again", load, tmp_path, "vlcs")


def test_a_class_without_images(tmp_path, archive):
    write_tar(archive, pictures(name.replace("/dog/", "/wolf/") for name in names_in(vlcs())))
    message = "found no images in Caltech101/dog; expected folders of bird, car, chair, dog, person, "
    message += "found bird, car, chair, person, wolf$"
    refused(message, tmp_path, "vlcs")


# Lists: DomainNet

LISTED = sorted({*DOMAINNET10, *DOMAINNET20, "axe"})


def domainnet_zips() -> dict[str, dict[str, bytes]]:
    """{domain: entries of its zip}: three images of each class, of which the third is in no list."""
    zips = {}
    for domain in FOLDERS["domainnet"].domains:
        zips[domain] = {}
        for c in LISTED:
            names = [f"{domain}/{c}/{domain}_{i}.jpg" for i in range(3)]
            zips[domain] |= dict.fromkeys(names, b"never decoded")
            if c != "axe":
                zips[domain] |= pictures(names[:2])
    return zips


def domainnet_lists() -> dict[str, list[str]]:
    """{name of a list: its lines}: an image of each class in each."""
    lists = {}
    for domain in FOLDERS["domainnet"].domains:
        for i, part in enumerate(("train", "test")):
            lines = [f"{domain}/{c}/{domain}_{i}.jpg {DOMAINNET.index(c)}" for c in LISTED]
            lists[f"{domain}_{part}.txt"] = lines
    return lists


def write_lists(folder: Path, lists: dict[str, list[str]]) -> None:
    write_files(folder, {name: "".join(f"{line}\n" for line in lines) for name, lines in lists.items()})


def write_domainnet(folder: Path) -> None:
    for domain, entries in domainnet_zips().items():
        write_zip(folder / f"{domain}.zip", entries)
    write_lists(folder, domainnet_lists())


def in_domainnet(classes: tuple[str, ...]) -> Images:
    images = {}
    for domain in FOLDERS["domainnet"].domains:
        images[domain] = []
        for c in classes:
            images[domain] += [(f"{domain}/{c}/{domain}_0.jpg", c), (f"{domain}/{c}/{domain}_1.jpg", c)]
    return images


def test_domainnet_and_its_subsets_share_archives(tmp_path, monkeypatch):
    write_domainnet(tmp_path / "archives" / "domainnet")  # named as an unpacked one, but it has only files
    few = tuple(c for c in DOMAINNET if c in LISTED and c != "axe")  # of the 345
    expect(monkeypatch, "domainnet10", 20)
    expect(monkeypatch, "domainnet20", 40)
    expect(monkeypatch, "domainnet", 2 * len(few), classes=few)
    check(load(tmp_path, "domainnet10"), in_domainnet(DOMAINNET10), DOMAINNET10)
    check(load(tmp_path, "domainnet20"), in_domainnet(DOMAINNET20), DOMAINNET20)
    check(load(tmp_path, "domainnet"), in_domainnet(few), few)
    assert not (tmp_path / "data" / "downloads").exists()


@pytest.mark.parametrize("old, new, message", [
    ("real_0.jpg", "lost.jpg", "real_train.txt names real/.*/lost.jpg, which is not there; get"),
    ("bird/real_0.jpg 31", "<html>", "as 'real/bird/x.jpg 31' in real_train.txt, found 'real/<html>'"),
    ("tiger", "axe", "domain real has 19 images in real; expected 20")])
def test_a_list_that_is_wrong(tmp_path, monkeypatch, old, new, message):
    expect(monkeypatch, "domainnet10", 20)
    write_domainnet(tmp_path / "archives")
    lines = domainnet_lists()["real_train.txt"]
    write_lists(tmp_path / "archives", {"real_train.txt": [line.replace(old, new) for line in lines]})
    refused(message, tmp_path, "domainnet10")


# Annotations: TerraIncognita

TERRA = FOLDERS["terrainc"].classes
NUMBERS = {c: 3 * i for i, c in enumerate((*TERRA, "car"))}  # of the categories; cars are in no class


def terra_table(*locations: int) -> dict:
    """Annotations: an image of each category in each location, its animal found twice."""
    images, animals = [], []
    for location in locations:
        for c, number in NUMBERS.items():
            name = f"{location}-{c}"
            images.append({"id": name, "file_name": f"{name}.jpg", "location": location, "width": 8})
            animals += [{"id": f"{name}{i}", "image_id": name, "category_id": number} for i in range(2)]
    categories = [{"id": number, "name": c} for c, number in NUMBERS.items()]
    return {"images": images, "categories": categories, "annotations": animals, "info": {}}


def terra_tables() -> dict[str, dict]:
    """{name: annotations}; location_38 has the image `both.jpg` with a cat and a dog, 7 is in no domain."""
    first = terra_table(38, 7)
    first["images"].append({"id": "both", "file_name": "both.jpg", "location": 38})
    for c in ("cat", "dog"):
        first["annotations"].append({"id": c, "image_id": "both", "category_id": NUMBERS[c]})
    return {
        "cis_test_annotations.json": first,
        "train_annotations.json": terra_table(43, 46),
        "trans_val_annotations.json": terra_table(100),
    }


def write_terra(tmp_path, monkeypatch, tables: dict, without: str = NOTHING) -> None:
    """Both archives, without the images of this name. The images of location 7 are not there."""
    expect(monkeypatch, "terrainc")
    names = []
    for table in terra_tables().values():
        names += [image["file_name"] for image in table["images"] if image["location"] != 7]
    entries = pictures(f"eccv_18_all_images_sm/{name}" for name in names if without not in name)
    write_tar(tmp_path / "archives" / "eccv_18_all_images_sm.tar.gz", entries)
    annotations = {"eccv_18_annotation_files/._train_annotations.json": b"what macOS adds"}
    for name, table in tables.items():
        annotations[f"eccv_18_annotation_files/{name}"] = json.dumps(table).encode()
    write_tar(tmp_path / "archives" / "eccv_18_annotations.tar.gz", annotations)


def in_terra() -> Images:
    images = {}
    for location in (38, 43, 46, 100):
        images[f"location_{location}"] = [(f"eccv_18_all_images_sm/{location}-{c}.jpg", c) for c in TERRA]
    of_38 = images["location_38"]
    for c in ("cat", "dog"):  # "both" comes after "38-.."
        own = (f"eccv_18_all_images_sm/38-{c}.jpg", c)
        of_38.insert(of_38.index(own) + 1, ("eccv_18_all_images_sm/both.jpg", c))
    return images


def test_terrainc(tmp_path, monkeypatch):
    write_terra(tmp_path, monkeypatch, terra_tables())
    check(load(tmp_path, "terrainc"), in_terra(), TERRA)


def test_terrainc_as_domainbeds_script_deals_it_out(tmp_path, monkeypatch):
    expect(monkeypatch, "terrainc")
    for location, images in in_terra().items():
        for name, c in images:
            write_files(tmp_path / "archives" / "terra_incognita",
                        {f"{location}/{c}/{Path(name).name}": picture(name)})
    check(load(tmp_path, "terrainc"), in_terra(), TERRA)


# Tables: Camelyon17 and iWildCam of WILDS

COLUMNS = "patient,node,x_coord,y_coord,tumor,slide,center,split"


def patches() -> dict[str, tuple[str, str, str]]:
    """{file: (hospital, class, row of metadata.csv)}: four patches of each hospital, two of each class."""
    rows = {}
    for center in range(5):
        for tumor, c in enumerate(("normal", "tumor")):
            slide = f"patient_{20 * center:03}_node_{tumor}"
            for x in (10, 9):
                name = f"patches/{slide}/patch_{slide}_x_{x}_y_7.png"
                row = f"{20 * center:03},{tumor},{x},7,{tumor},{center},{center},0"
                rows[name] = (f"hospital_{center}", c, row)
    return rows


def in_camelyon() -> Images:
    images = collections.defaultdict(list)
    for name, (hospital, c, _) in patches().items():
        images[hospital].append((name, c))
    return dict(images)


def write_camelyon(tmp_path, monkeypatch, columns=COLUMNS) -> Path:
    """As WILDS packs it, with this header."""
    expect(monkeypatch, "camelyon17", 4)
    entries = {"./RELEASE_v1.0.txt": b""}
    lines = [f",{columns}"]
    for i, (name, (_, _, row)) in enumerate(patches().items()):
        lines.append(f"{i},{row}")
        entries[f"./{name}"] = picture(name)
    entries["./metadata.csv"] = "\n".join(lines).encode()  # after the images that it names
    return write_tar(tmp_path / "archives" / "camelyon17_v1.0.tar.gz", entries)


def test_camelyon17(tmp_path, monkeypatch):
    write_camelyon(tmp_path, monkeypatch)
    check(load(tmp_path, "camelyon17"), in_camelyon(), ("normal", "tumor"))


SPECIES = {number: f"species {number:02}" for number in range(1, 13)}


def camera(k: int) -> list[tuple[str, int]]:
    """(file, species or 0) of each image of camera k.

    30 - k are of animals (21 at 9 and 10, 3 beyond), many of species k % 3 + 1, and 50 are empty (200 at 0).
    """
    animals = 3
    if k < 11:
        animals = 30 - min(k, 9)
    images = []
    for i in range(animals):
        species = k % 3 + 1
        if i < 24 - k:
            species = i % 12 + 1
        images.append((f"{k}-{i}.jpg", species))
    empty = 50 if k else 200
    return images + [(f"{k}-empty-{i}.jpg", 0) for i in range(empty)]


def write_wildcam(tmp_path, monkeypatch, cameras=12, without=NOTHING, named="name") -> None:
    """As WILDS packs it; two cameras and two species are too small to be kept."""
    expect(monkeypatch, "iwildcam")
    columns = ",split,location_remapped,location,sequence_remapped,seq_id,y,category_id,datetime,filename,"
    entries, lines = {}, [f"{columns}image_id"]
    for k in range(cameras):
        for name, y in camera(k):
            lines.append(f"{len(lines)},train,{k},{k + 100},0,s,{y},{y + 2},2013-01-01,{name},i")
            if name != without:
                entries[f"train/{name}"] = b"never decoded"
            if name != without and 0 < y <= 10:
                entries[f"train/{name}"] = picture(f"train/{name}")
    entries["metadata.csv"] = "\n".join(lines).encode()
    categories = [f"y,category_id,{named}", "0,0,empty"]
    categories += [f"{number},{number + 2},{name}" for number, name in SPECIES.items()]
    categories.append("99999,7,none of it")
    entries["categories.csv"] = "\n".join(categories).encode()
    write_tar(tmp_path / "archives" / "iwildcam_v2.0.tar.gz", entries)


def in_wildcam() -> tuple[Images, tuple[str, ...]]:
    """Camera 9 and 10 have as many images: the tenth is that whose name sorts first."""
    images = {}
    for k in (0, 1, 2, 3, 4, 5, 6, 7, 8, 10):
        images[f"camera_{k}"] = [(f"train/{name}", SPECIES[y]) for name, y in camera(k) if 0 < y <= 10]
    counts = collections.Counter(c for of_camera in images.values() for _, c in of_camera)
    classes = tuple(sorted(counts, key=lambda c: (-counts[c], c)))
    for of_camera in images.values():
        of_camera.sort(key=lambda image: (classes.index(image[1]), image[0]))
    return images, classes


def test_iwildcam(tmp_path, monkeypatch):
    images, classes = in_wildcam()
    assert len(classes) == 10
    write_wildcam(tmp_path, monkeypatch)
    check(load(tmp_path, "iwildcam"), images, classes)
    check(load(tmp_path, "iwildcam"), images, classes)  # from the cache, which knows the classes


NO_IMAGES = {"trans_val_annotations.json": {"images": []}}
# 2 is no label
EXCHANGED = "patient,node,x_coord,y_coord,slide,tumor,center,split"


@pytest.mark.parametrize("dataset, write, changes, message", [
    ("terrainc", write_terra, dict(tables=terra_tables() | NO_IMAGES),
     "is no list of images, categories .*KeyError: 'categor"),
    ("terrainc", write_terra, dict(tables=terra_tables(), without="100-bird"),
     "names 100-bird.jpg, which is not there; get the archive again"),
    ("camelyon17", write_camelyon, dict(columns=COLUMNS.replace("tumor", "tumour")),
     "metadata.csv is no table with the columns patient, .* .'tumor'.; get it again"),
    ("camelyon17", write_camelyon, dict(columns=COLUMNS.replace(",split", "")),
     "row 1 has more or fewer values than the header"),
    ("camelyon17", write_camelyon, dict(columns=EXCHANGED),
     "of center 2 with tumor 2; expected a center of 0, 1, 2, 3, 4, and 0 or 1; get"),
    ("iwildcam", write_wildcam, dict(cameras=7),
     "expected at least 10 cameras and 10 classes .* in metadata.csv, found 7 and 10; get"),
    ("iwildcam", write_wildcam, dict(named="species"), "categories.csv is no table with the columns y, name"),
    ("iwildcam", write_wildcam, dict(without="3-2.jpg"),
     "metadata.csv names train/3-2.jpg, which is not there"),
])
def test_a_table_that_is_wrong(tmp_path, monkeypatch, dataset, write, changes, message):
    write(tmp_path, monkeypatch, **changes)
    refused(message, tmp_path, dataset)


@pytest.mark.parametrize("dataset, classes, images", [
    ("officecaltech", 10, 2533), ("pacs", 7, 9991), ("vlcs", 5, 10729), ("officehome", 65, 15588),
    ("terrainc", 10, None), ("domainnet", 345, 586575), ("domainnet10", 10, None), ("domainnet20", 20, None),
    ("camelyon17", 2, 455954),
])
def test_counts_add_up_and_classes_are_distinct(dataset, classes, images):
    names = FOLDERS[dataset].classes
    assert len(names) == len(set(names)) == classes
    counts = [count for _, count in FOLDERS[dataset].domains.values()]
    assert (None if None in counts else sum(counts)) == images


def test_domainnets_classes_have_the_numbers_of_its_lists():
    classes = FOLDERS["domainnet"].classes
    numbers = {"aircraft_carrier": 0, "bird": 31, "The_Eiffel_Tower": 308, "t-shirt": 327, "zigzag": 344}
    assert {c: classes.index(c) for c in numbers} == numbers
    for part in ("domainnet10", "domainnet20"):
        assert set(FOLDERS[part].classes) < set(classes) and FOLDERS[part].files == FOLDERS["domainnet"].files
