"""The layouts of the datasets: each is read end to end from small archives in its official form."""

import collections
import dataclasses
import json
from pathlib import Path

from plumbing import listings
from plumbing.catalog import FOLDERS

from tests.small_datasets import (Images, check, expect, load, names_in, nothing_is_left, pictures, stops,
                                  vlcs, write_tar, write_vlcs, write_zip)

import pytest


def test_vlcs(tmp_path, monkeypatch, capsys):
    write_vlcs(tmp_path, monkeypatch)
    check(load(tmp_path, "vlcs"), vlcs(), ("bird", "car", "chair", "dog", "person"))
    message = "files that are no images were left out; 1 in all: VLCS/SUN09/car/a.db\n"
    assert message in capsys.readouterr().err


def test_images_that_changed_places_and_ones_that_lack(tmp_path, monkeypatch):
    """By the digest of the official archive; by the number of a domain's images."""
    archive, contents = write_vlcs(tmp_path, monkeypatch), pictures(names_in(vlcs()))
    known = dataclasses.replace(FOLDERS["vlcs"], content=load(tmp_path, "vlcs").content)
    monkeypatch.setitem(FOLDERS, "vlcs", known)
    one, other = "VLCS/SUN09/car/0.jpg", "VLCS/SUN09/dog/0.jpg"
    write_tar(archive, contents | {one: contents[other], other: contents[one]})
    stops("vlcs: its images are others than those of the official archive .* folder:PATH", load, tmp_path,
          "vlcs")
    del contents[one]
    write_tar(archive, contents)
    stops("domain sun09 has 9 images in SUN09; expected 10", load, tmp_path, "vlcs")


# Lists: DomainNet


def write_domainnet(folder: Path) -> Images:
    """Of each class a training and a test image, and one in no list; `axe` is not in DomainNet10."""
    images = {}
    for domain in FOLDERS["domainnet10"].domains:
        images[domain], entries = [], {}
        lines = {"train": [], "test": []}
        for number, c in enumerate((*FOLDERS["domainnet10"].classes, "axe")):
            for part in (*lines, "unlisted"):
                name = f"{domain}/{c}/{part}.jpg"
                entries[name] = b"never decoded"
                if part in lines:
                    lines[part].append(f"{name} {number}")
                if part in lines and c != "axe":
                    images[domain].append((name, c))
        write_zip(folder / f"{domain}.zip", entries | pictures(names_in({domain: images[domain]})))
        for part, of_part in lines.items():
            (folder / f"{domain}_{part}.txt").write_text("\n".join(of_part))
        images[domain] = sorted(images[domain], key=lambda image: (CLASSES.index(image[1]), image[0]))
    return images


CLASSES = FOLDERS["domainnet10"].classes


def test_domainnet(tmp_path, monkeypatch):
    images = write_domainnet(tmp_path / "archives")
    expect(monkeypatch, "domainnet10", 20)
    check(load(tmp_path, "domainnet10"), images, CLASSES)


def test_a_list_that_names_what_is_not_there(tmp_path, monkeypatch):
    expect(monkeypatch, "domainnet10", 20)
    write_domainnet(tmp_path / "archives")
    with open(tmp_path / "archives" / "real_train.txt", "a") as file:
        file.write("\nreal/bird/lost.jpg 31")
    stops("real_train.txt names real/bird/lost.jpg, which is not there; get", load, tmp_path, "domainnet10")
    assert nothing_is_left(tmp_path)


# Annotations: TerraIncognita

TERRA = FOLDERS["terrainc"].classes
NUMBERS = {c: 3 * i for i, c in enumerate((*TERRA, "car"))}  # of the categories; cars are in no class


def terra_table(*locations: int) -> dict:
    """Annotations: an image of each category in each location, its animal found twice."""
    images, animals = [], []
    for location in locations:
        for c, number in NUMBERS.items():
            name = f"{location}-{c}"
            images.append({"id": name, "file_name": f"{name}.jpg", "location": location})
            animals += 2 * [{"image_id": name, "category_id": number}]
    categories = [{"id": number, "name": c} for c, number in NUMBERS.items()]
    return {"images": images, "categories": categories, "annotations": animals}


def in_terra() -> Images:
    """`both.jpg` in location 38 has a cat and a dog."""
    images = {}
    for location in (38, 43, 46, 100):
        images[f"location_{location}"] = [(f"all/{location}-{c}.jpg", c) for c in TERRA]
    for c in ("cat", "dog"):  # "both" comes after "38-.."
        of_38 = images["location_38"]
        of_38.insert(of_38.index((f"all/38-{c}.jpg", c)) + 1, ("all/both.jpg", c))
    return images


def test_terrainc(tmp_path, monkeypatch):
    """By two tables; the images of location 7, which is in no domain, are not there."""
    expect(monkeypatch, "terrainc")
    first, second = terra_table(38, 7), terra_table(43, 46, 100)
    first["images"].append({"id": "both", "file_name": "both.jpg", "location": 38})
    first["annotations"] += [{"image_id": "both", "category_id": NUMBERS[c]} for c in ("cat", "dog")]
    write_tar(tmp_path / "archives" / "eccv_18_all_images_sm.tar.gz", pictures({*names_in(in_terra())}))
    write_tar(tmp_path / "archives" / "eccv_18_annotations.tar.gz", {
        "x/._train_annotations.json": b"what macOS adds",
        "x/train_annotations.json": json.dumps(first).encode(),
        "x/cis_test_annotations.json": json.dumps(second).encode()})
    check(load(tmp_path, "terrainc"), in_terra(), TERRA)


# Tables: Camelyon17 and iWildCam of WILDS


def test_camelyon17(tmp_path, monkeypatch):
    """Two patches of each class in each hospital; the table comes after the images that it names."""
    expect(monkeypatch, "camelyon17", 4)
    images, lines = collections.defaultdict(list), [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for center in range(5):
        for tumor, c in enumerate(("normal", "tumor")):
            slide = f"patient_{20 * center:03}_node_{tumor}"
            for x in (10, 9):
                name = f"patches/{slide}/patch_{slide}_x_{x}_y_7.png"
                images[f"hospital_{center}"].append((name, c))
                lines.append(f"0,{20 * center:03},{tumor},{x},7,{tumor},{center},{center},0")
    entries = {f"./{name}": content for name, content in pictures(names_in(images)).items()}
    entries["./metadata.csv"] = "\n".join(lines).encode()
    write_tar(tmp_path / "archives" / "camelyon17_v1.0.tar.gz", entries)
    check(load(tmp_path, "camelyon17"), images, ("normal", "tumor"))


def test_iwildcam(tmp_path, monkeypatch):
    """Of three cameras the largest two, and of their three species the most frequent two. Empty images do not
    count; the cameras 10 and 9 have as many images: first comes the name that sorts first."""
    monkeypatch.setattr(listings, "LARGEST", 2)
    expect(monkeypatch, "iwildcam")
    animals = {7: "ooo", 9: "xxxxoy", 10: "yyyxo-x--"}  # of each image of a camera; - is empty
    species = {"-": "empty", "o": "owl", "x": "fox", "y": "yak"}
    lines, entries, images = ["location_remapped,y,filename"], {}, {"camera_10": [], "camera_9": []}
    for k, shown in animals.items():
        for i, y in enumerate(shown):
            lines.append(f"{k},{y},{k}-{i}.jpg")
            entries[f"train/{k}-{i}.jpg"] = b"never decoded"
            if k != 7 and y in "xy":
                images[f"camera_{k}"].append((f"train/{k}-{i}.jpg", species[y]))
    for of_camera in images.values():
        of_camera.sort(key=lambda image: (["fox", "yak"].index(image[1]), image[0]))
    entries["metadata.csv"] = "\n".join(lines).encode()
    entries["categories.csv"] = "\n".join(["y,name", *map(",".join, species.items())]).encode()
    archive = tmp_path / "archives" / "iwildcam_v2.0.tar.gz"
    write_tar(archive, entries | pictures(names_in(images)))
    for _ in range(2):  # also from the cache, which knows the classes
        check(load(tmp_path, "iwildcam"), images, ("fox", "yak"))


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
