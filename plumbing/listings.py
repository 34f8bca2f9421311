"""Which files of a dataset are its images: domain, class and order, checked against the catalogue."""

from __future__ import annotations

import collections
import csv
import json
from dataclasses import dataclass, field
from pathlib import Path

from plumbing.archives import is_image
from plumbing.catalog import SPLIT, Folders, check_names, shortlist
from plumbing.errors import UserError

LARGEST = 10  # cameras, and classes, of iWildCam
NO_DOMAINS = ("train", "training", "test", "testing", "val", "valid", "validation")


@dataclass
class Files:
    """The files of a dataset: their paths `names` from the folder `top`."""

    top: Path
    names: set[str]
    origin: str  # the dataset's folder or archives, in words

    def table(self, ending: str) -> tuple[str, Path]:
        """The table whose path ends so: the folder it is in ("" or "x/y/"), and its file."""
        names = [name for name in self.names if f"/{name}".endswith(f"/{ending}")]
        if not names:
            raise UserError(f"{self.origin}: found no {ending}, which says what each image shows; get the "
                            "archive again")
        name = min(names, key=len)
        return name.removesuffix(ending), self.top / name

    def rows(self, ending: str) -> tuple[str, list[dict[str, str]]]:
        """The folder that a csv table is in, and its rows."""
        folder, path = self.table(ending)
        with open(path, newline="", encoding="utf-8-sig") as file:
            return folder, list(csv.DictReader(file))

    def checked(self, table: str, *names: str) -> str:
        """The first of these names that is there. Stop if none is, although a table names it."""
        for name in names:
            if name in self.names:
                return name
        raise UserError(f"{self.origin}: {table} names {names[0]}, which is not there; get the archive again")


@dataclass
class Listing:
    """Which files are the images of a dataset, in a fixed order."""

    classes: tuple[str, ...]
    images: dict[str, list[tuple[str, int]]]  # domain: (file, label) of each image
    left_out: list[str] = field(default_factory=list)  # files among them that are no images


def list_images(files: Files, source: Folders) -> Listing:
    """The images of a dataset. Stop if they are not as many as expected."""
    listing = LAYOUTS[source.layout](files, source)
    for domain, images in listing.images.items():
        images.sort(key=lambda image: (image[1], image[0]))  # by label, then by name
        folder, expected = source.domains.get(domain, (domain, None))
        if not images or expected not in (None, len(images)):
            raise UserError(f"{files.origin}: domain {domain} has {len(images)} images in {folder}; expected "
                            f"{expected or 'some'}; get what is missing again")
    return listing


# Folders for classes


def in_folders(files: Files, source: Folders) -> Listing:
    """Images in folders <domain>/<class>/ (or deeper), somewhere below folders that all have in common."""
    first, _ = next(iter(source.domains.values()))
    roots = {f"/{name}".partition(f"/{first}/")[0] for name in files.names if f"/{first}/" in f"/{name}"}
    root = min(roots, key=lambda root: (len(root), root), default="")
    labels = {c: label for label, c in enumerate(source.classes)}
    domain_of = {folder: domain for domain, (folder, _) in source.domains.items()}
    listing = Listing(source.classes, {domain: [] for domain in source.domains})
    for name in sorted(files.names):
        folder, c, *rest = f"/{name}".removeprefix(f"{root}/").split("/") + [""]
        if not f"/{name}".startswith(f"{root}/") or folder not in domain_of or c not in labels:
            continue
        if is_image(name):
            listing.images[domain_of[folder]].append((name, labels[c]))
        else:
            listing.left_out.append(name)
    return listing


def in_own_folders(files: Files, source: Folders) -> Listing:
    """One's own images in folders <domain>/<class>/ (or deeper): the domains and the classes that have
    images, by name. A class that a domain lacks has no images there."""
    listing, of_domain = Listing((), {}), {}  # of_domain: {domain: (file, class) of each image}
    for name in sorted(files.names):
        domain, *inner = name.split("/")
        if is_image(name) and len(inner) < 2:
            raise UserError(f"{files.origin}: the image {name} is in no folder of a class; expected "
                            "<domain>/<class>/<image>", 2)
        elif is_image(name):
            of_domain.setdefault(domain, []).append((name, inner[0]))
        elif len(inner) > 1:
            listing.left_out.append(name)
    parts = [domain for domain in of_domain if domain.lower() in NO_DOMAINS]
    if parts:
        raise UserError(f"{files.origin}: the folders {shortlist(parts)} are where those of domains are "
                        f"expected: bring their images into <domain>/<class>/; a table {SPLIT} says what is "
                        "for training and test", 2)
    classes = sorted({c for images in of_domain.values() for _, c in images})
    if source.domains and set(classes) <= set(source.classes):  # one domain, whose classes are agreed
        classes = source.classes
    elif len(of_domain) < 2 or len(classes) < 2:
        raise UserError(f"{files.origin}: expected images (PNG, JPEG, ...) in <domain>/<class>/ of at least "
                        f"two domains and two classes; found the domains {shortlist([*of_domain])} and the "
                        f"classes {shortlist(classes)}", 2)
    check_names(files.origin, of_domain)
    listing.classes = tuple(classes)
    for domain, images in sorted(of_domain.items()):
        listing.images[domain] = [(name, classes.index(c)) for name, c in images]
    return listing


# DomainNet


def in_lists(files: Files, source: Folders) -> Listing:
    """DomainNet: the images that <domain>_train.txt and <domain>_test.txt name, of our classes.

    A line of them is "<domain>/<class>/<file> <number of the class>", as in the zip archive <domain>.zip.
    """
    labels = {c: label for label, c in enumerate(source.classes)}
    listing = Listing(source.classes, {})
    for domain, (folder, _) in source.domains.items():
        images = set()
        for table in (f"{folder}_train.txt", f"{folder}_test.txt"):
            root, path = files.table(table)
            for line in path.read_text().splitlines():
                image = line.rpartition(" ")[0]
                c = Path(image).parent.name
                if c in labels:
                    images.add((files.checked(table, image, root + image), labels[c]))
        listing.images[domain] = list(images)
    return listing


# TerraIncognita


def in_camera_traps(files: Files, source: Folders) -> Listing:
    """TerraIncognita, dealt out as by DomainBed's script: an image with animals of two of the classes is in
    both of them."""
    paths = {Path(name).name: name for name in files.names if is_image(name)}
    listing = Listing(source.classes, {domain: [] for domain in source.domains})
    for location, image, c in read_annotations(files):
        if location in listing.images and c in source.classes:
            name = files.checked("*_annotations.json", paths.get(image, image))
            listing.images[location].append((name, source.classes.index(c)))
    return listing


def read_annotations(files: Files) -> list[tuple[str, str, str]]:
    """(location, file without folder, class) of all animals, from all tables *_annotations.json together."""
    categories, images, shown = {}, {}, set()
    for name in files.names:
        if name.endswith("_annotations.json"):
            table = json.loads((files.top / name).read_bytes())
            categories |= {category["id"]: category["name"] for category in table["categories"]}
            for image in table["images"]:
                images[image["id"]] = (f"location_{image['location']}", str(image["file_name"]))
            shown |= {(animal["image_id"], animal["category_id"]) for animal in table["annotations"]}
    return [(*images.get(image, ("", "")), categories.get(c, "")) for image, c in shown]


# Camelyon17 and iWildCam of WILDS


def in_camelyon17(files: Files, source: Folders) -> Listing:
    """A patch for each row of metadata.csv; the hospital is its center, the label whether it has tumor."""
    root, rows = files.rows("metadata.csv")
    hospitals = {center: domain for domain, (center, _) in source.domains.items()}
    listing = Listing(source.classes, {domain: [] for domain in source.domains})
    for row in rows:
        slide = f"patient_{row['patient']}_node_{row['node']}"
        name = f"{root}patches/{slide}/patch_{slide}_x_{row['x_coord']}_y_{row['y_coord']}.png"
        image = files.checked("metadata.csv", name), int(row["tumor"])
        listing.images[hospitals[row["center"]]].append(image)
    return listing


def in_iwildcam(files: Files, source: Folders) -> Listing:
    """iWildCam as FedCiR has it: the ten cameras with most images and the ten classes with most images there.

    Images that show no animal are dropped first. Ties go to the name that sorts first; labels and cameras are
    in this order.
    """
    _, categories = files.rows("categories.csv")
    root, rows = files.rows("metadata.csv")
    names = {row["y"]: row["name"] for row in categories}
    of_camera = collections.defaultdict(list)  # (file, class) of each image that shows an animal
    for row in rows:
        c = names.get(row["y"], f"class_{row['y']}")
        if c != "empty":
            of_camera[f"camera_{row['location_remapped']}"].append((f"{root}train/{row['filename']}", c))
    cameras = most_frequent({camera: len(images) for camera, images in of_camera.items()})
    counts = collections.Counter(c for camera in cameras for _, c in of_camera[camera])
    classes = most_frequent(counts)
    listing = Listing(tuple(classes), {})
    for camera in cameras:
        listing.images[camera] = [(files.checked("metadata.csv", name), classes.index(c))
                                  for name, c in of_camera[camera] if c in classes]
    return listing


def most_frequent(counts: dict[str, int]) -> list[str]:
    """The `LARGEST` names with the largest counts, largest first."""
    return sorted(sorted(counts), key=counts.get, reverse=True)[:LARGEST]  # ties in the order of names


LAYOUTS = {
    "in_folders": in_folders,
    "in_own_folders": in_own_folders,
    "in_lists": in_lists,
    "in_camera_traps": in_camera_traps,
    "in_camelyon17": in_camelyon17,
    "in_iwildcam": in_iwildcam,
}
