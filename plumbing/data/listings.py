"""Which files of a dataset are its images: domain, class and order, checked against the catalogue."""

from __future__ import annotations

import collections
import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path

from plumbing.data.archives import IMAGE_ENDINGS, ImageFiles
from plumbing.data.catalog import Folders, check_names, composed, shortlist
from plumbing.data.splits import SPLIT
from plumbing.run.errors import UserError

RARE_ENDINGS = (".jfif", ".jpe", ".pnm")  # of one's own images; the counts of the catalogue have none
LARGEST = 10  # cameras, and classes, of iWildCam
NO_DOMAINS = ("train", "training", "test", "testing", "val", "valid", "validation")


@dataclass
class Listing:
    """Which files are the images of a dataset, in a fixed order."""

    classes: tuple[str, ...]
    images: dict[str, list[tuple[str, int]]]  # domain: (file, label) of each image
    left_out: list[str] = field(default_factory=list)  # files among them that are no images
    lacking: list[str] = field(default_factory=list)  # what domains have no images of, in words

    def names(self) -> list[str]:
        """The files of all domains, of each as often as it has them."""
        return [name for images in self.images.values() for name, _ in images]


def list_images(files: ImageFiles, source: Folders) -> Listing:
    """The images of a dataset, whose files are scanned; Stop if some cannot be read, or if they are not as
    many as expected."""
    folders = [folder for folder, _ in source.domains.values()]
    unread = [name for name in files.unread if not is_hidden(name)
              and (not folders or any(f"/{folder}/" in f"/{name}/" for folder in folders))]
    if unread:
        raise UserError(f"{files}: {len(unread)} entries are no files and no folders, closed, or folders "
                        f"that are there twice by links: {shortlist(sorted(unread))}; replace or remove them")
    listing = LAYOUTS[source.layout](files, source)
    for domain, images in listing.images.items():
        images.sort(key=lambda image: (image[1], image[0]))  # by label, then by name
        folder, expected = source.domains.get(domain, (domain, None))
        if not images or expected not in (None, len(images)):
            odd = [name for name in listing.left_out if f"/{folder}/" in f"/{name}"]
            raise UserError(f"{files}: domain {domain} has {len(images)} images in {folder}; expected "
                            f"{expected or 'some'}; no images: {shortlist(odd)}; get what is missing again")
        count_of = collections.Counter(label for _, label in images)
        for c, (name, of_class) in enumerate(zip(listing.classes, source.counts.get(domain, ()))):
            if count_of[c] != of_class:
                raise UserError(f"{files}: domain {domain} has {count_of[c]} images of {name}; expected "
                                f"{of_class}: get it again; folder:PATH takes images of your own")
    return listing


def is_hidden(name: str) -> bool:
    """Whether a file, or a folder that it is in, is hidden, or what macOS adds to archives."""
    parts = name.split("/")
    return parts[0] == "__MACOSX" or any(part.startswith(".") for part in parts)


def is_image(name: str, endings: tuple[str, ...] = (*IMAGE_ENDINGS, *RARE_ENDINGS)) -> bool:
    """By the ending of its name; ._x.jpg is what macOS puts beside x.jpg."""
    return name.lower().endswith(endings) and not Path(name).name.startswith("._")


def the_file(files: ImageFiles, table: str, *names: str) -> str:
    """The first of these names that is there. Stop if none is, although a table names it."""
    for name in names:
        if name in files.inside:
            return name
    raise UserError(f"{files}: {table} names {names[0]}, which is not there; get the archive again")


# Folders for classes


def in_folders(files: ImageFiles, source: Folders) -> Listing:
    """Images in folders <domain>/<class>/ (or deeper), somewhere below folders that all have in common."""
    first, _ = next(iter(source.domains.values()))
    roots = {f"/{name}".partition(f"/{first}/")[0] for name in files.inside if f"/{first}/" in f"/{name}"}
    root = f"{min(roots, key=lambda root: (len(root), root), default='')}/".removeprefix("/")
    of_class = collections.defaultdict(lambda: collections.defaultdict(list))  # {folder: {class: its files}}
    for name in sorted(files.inside):
        parts = name.removeprefix(root).split("/")
        if name.startswith(root) and len(parts) > 2:
            of_class[parts[0]][parts[1]].append(name)
    listing = Listing(source.classes, {})
    for domain, (folder, _) in source.domains.items():
        listing.images[domain] = []
        for label, c in enumerate(source.classes):
            there = of_class[folder].get(c, [])
            names = [name for name in there if is_image(name, IMAGE_ENDINGS)]
            if not names:
                others = ", ".join(sorted(of_class[folder])) or "none"
                raise UserError(f"{files}: found no images in {folder}/{c}; expected folders of "
                                f"{', '.join(source.classes)}, found {others}")
            listing.images[domain] += [(name, label) for name in names]
            listing.left_out += [name for name in there if not is_image(name, IMAGE_ENDINGS)]
    return listing


def in_custom_folders(files: ImageFiles, source: Folders) -> Listing:
    """One's own images in folders <domain>/<class>/ (or deeper): the domains and the classes that have
    images, by name. A class that a domain lacks has no images there. Hidden files and folders are passed
    over, and files outside the folders of classes that are no images, a table say."""
    listing, of_domain = Listing((), {}), {}  # of_domain: {domain: (file, class) of each image}
    for name in sorted(files.inside):
        parts = name.split("/")
        if is_hidden(name):
            continue
        elif len(parts) > 2 and is_image(name):
            domain = parts[0] if source.domains else composed(parts[0])
            of_domain.setdefault(domain, []).append((name, composed(parts[1])))
        elif len(parts) > 2:
            listing.left_out.append(name)
        elif is_image(name):
            raise UserError(f"{files}: the image {name} is in no folder of a class; expected "
                            "<domain>/<class>/<image>", 2)
    parts = [name for name in sorted(of_domain) if name.lower() in NO_DOMAINS]
    if parts:
        raise UserError(f"{files}: the folders {shortlist(parts)} are where those of domains are expected: "
                        f"bring their images into <domain>/<class>/; a table {SPLIT} says what is for "
                        "training and test", 2)
    if not of_domain and listing.left_out:
        ending, count = collections.Counter(Path(name).suffix for name in listing.left_out).most_common(1)[0]
        raise UserError(f"{files}: no images; there are {count} {ending or 'other'} files: convert them to "
                        "PNG or JPEG (DICOM: dcmj2pnm --write-png --min-max-window IN.dcm OUT.png, of "
                        "DCMTK)", 2)
    classes = sorted({c for images in of_domain.values() for _, c in images})
    if source.domains and set(classes) <= set(source.classes):  # one domain, whose classes are agreed
        classes = source.classes
    elif len(of_domain) < 2 or len(classes) < 2:
        raise UserError(f"{files}: expected images in <domain>/<class>/ of at least two domains and two "
                        f"classes; found the domains {shortlist([*of_domain])} and the classes "
                        f"{shortlist(classes)}", 2)
    check_names(str(files), of_domain, classes)
    for name in listing.left_out:
        domain, c = map(composed, name.split("/")[:2])
        if c in classes and domain not in of_domain:
            raise UserError(f"{files}: {domain} has no images, only files such as {name}: convert them to "
                            "PNG or JPEG, or take the folder away", 2)
    listing.classes, labels = tuple(classes), {c: label for label, c in enumerate(classes)}
    for domain, images in sorted(of_domain.items()):
        listing.images[domain] = [(name, labels[c]) for name, c in images]
        lacking = set(classes) - {c for _, c in images}
        listing.lacking += [f"{domain} has no images of {c}" for c in sorted(lacking)]
    listing.lacking = [*misspelled(of_domain, classes), *listing.lacking]
    return listing


def misspelled(of_domain: dict[str, list[tuple[str, str]]], classes: list[str]) -> list[str]:
    """Classes of one domain alone whose names are almost those of others: nodul, Nodule."""
    domains_of, said = collections.defaultdict(set), []
    for domain, images in of_domain.items():
        for _, c in images:
            domains_of[c].add(domain)
    usual = {c.lower(): c for c in classes if len(domains_of[c]) > 1}
    for c in classes:
        if len(domains_of[c]) == 1:
            (domain,) = domains_of[c]
            for name in difflib.get_close_matches(c.lower(), usual, 1):
                said.append(f"{domain} alone has {c}: is {usual[name]} meant?")
    return said


# DomainNet


def in_lists(files: ImageFiles, source: Folders) -> Listing:
    """DomainNet: the images that <domain>_train.txt and <domain>_test.txt name, of our classes.

    A line of them is "<domain>/<class>/<file> <number of the class>", as in the zip archive <domain>.zip.
    """
    labels = {c: label for label, c in enumerate(source.classes)}
    listing = Listing(source.classes, {})
    for domain, (folder, _) in source.domains.items():
        images = set()
        for table in (f"{folder}_train.txt", f"{folder}_test.txt"):
            root, text = files.table(table)
            for line in text.splitlines():
                image = line.rpartition(" ")[0]
                _, _, c = image.rpartition("/")[0].rpartition("/")
                if not c:
                    raise UserError(f"{files}: expected lines such as 'real/bird/x.jpg 31' in {table}, found "
                                    f"'{line}'")
                if c in labels:
                    images.add((the_file(files, table, image, root + image), labels[c]))
        listing.images[domain] = list(images)
    return listing


# TerraIncognita


def in_camera_traps(files: ImageFiles, source: Folders) -> Listing:
    """TerraIncognita: dealt out to folders location_38/<class>/ by DomainBed's script, or here as it does it.

    An image with animals of two of the classes is in both of them, there as here.
    """
    if any("/location_38/" in f"/{name}" for name in files.inside):
        return in_folders(files, source)
    paths = {Path(name).name: name for name in files.inside if is_image(name)}
    listing = Listing(source.classes, {domain: [] for domain in source.domains})
    for location, image, c in read_annotations(files):
        if location in listing.images and c in source.classes:
            name = paths.get(image) or the_file(files, "*_annotations.json", image)
            listing.images[location].append((name, source.classes.index(c)))
    return listing


def read_annotations(files: ImageFiles) -> list[tuple[str, str, str]]:
    """(location, file without folder, class) of all animals, from all tables *_annotations.json together."""
    categories, images, shown = {}, {}, set()
    for name in sorted(files.inside):
        if not name.endswith("_annotations.json") or Path(name).name.startswith("."):
            continue
        try:
            table = json.loads(files.inside[name].read_bytes())
            for category in table["categories"]:
                categories[category["id"]] = category["name"]
            for image in table["images"]:
                images[image["id"]] = (f"location_{image['location']}", str(image["file_name"]))
            for animal in table["annotations"]:
                shown.add((animal["image_id"], animal["category_id"]))
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise UserError(f"{files}: {name} is no list of images, categories and annotations "
                            f"({type(e).__name__}: {e})")
    return [(*images.get(image, ("", "")), categories.get(c, "")) for image, c in shown]


# Camelyon17 and iWildCam of WILDS


def in_camelyon17(files: ImageFiles, source: Folders) -> Listing:
    """A patch for each row of metadata.csv; the hospital is its center, the label whether it has tumor."""
    root, rows = files.rows("metadata.csv", "patient", "node", "x_coord", "y_coord", "tumor", "center")
    hospitals = {center: domain for domain, (center, _) in source.domains.items()}
    listing = Listing(source.classes, {domain: [] for domain in source.domains})
    for patient, node, x, y, tumor, center in rows:
        slide = f"patient_{patient}_node_{node}"
        name = f"{root}patches/{slide}/patch_{slide}_x_{x}_y_{y}.png"
        if center not in hospitals or tumor not in ("0", "1"):
            raise UserError(f"{files}: metadata.csv names {name} of center {center} with tumor {tumor}; "
                            f"expected a center of {', '.join(hospitals)}, and 0 or 1; get the archive again")
        name = the_file(files, "metadata.csv", name)
        listing.images[hospitals[center]].append((name, int(tumor)))
    return listing


def in_iwildcam(files: ImageFiles, source: Folders) -> Listing:
    """iWildCam as FedCiR has it: the ten cameras with most images and the ten classes with most images there.

    Images that show no animal are dropped first. Ties go to the name that sorts first; labels and cameras are
    in this order.
    """
    of_camera = animals_by_camera(files)
    sizes = {camera: len(images) for camera, images in of_camera.items()}
    cameras = most_frequent(sizes)
    counts = collections.Counter()
    for camera in cameras:
        counts.update(c for _, c in of_camera[camera])
    classes = most_frequent(counts)
    if len(cameras) < LARGEST or len(classes) < LARGEST:
        raise UserError(f"{files}: expected at least {LARGEST} cameras and {LARGEST} classes with images in "
                        f"metadata.csv, found {len(cameras)} and {len(classes)}; get the archive again")
    listing = Listing(tuple(classes), {})
    for camera in cameras:
        listing.images[camera] = [(the_file(files, "metadata.csv", name), classes.index(c))
                                  for name, c in of_camera[camera] if c in classes]
    return listing


def animals_by_camera(files: ImageFiles) -> dict[str, list[tuple[str, str]]]:
    """{camera: (file, class) of each image that shows an animal}, in the order of metadata.csv."""
    _, categories = files.rows("categories.csv", "y", "name")
    root, rows = files.rows("metadata.csv", "y", "location_remapped", "filename")
    names = dict(categories)
    of_camera = collections.defaultdict(list)
    for y, location, image in rows:
        c = names.get(y, f"class_{y}")
        if c != "empty":
            of_camera[f"camera_{location}"].append((f"{root}train/{image}", c))
    return of_camera


def most_frequent(counts: dict[str, int]) -> list[str]:
    """The `LARGEST` names with the largest counts, largest first."""
    return sorted(sorted(counts), key=counts.get, reverse=True)[:LARGEST]  # ties in the order of names


LAYOUTS = {
    "in_folders": in_folders,
    "in_custom_folders": in_custom_folders,
    "in_lists": in_lists,
    "in_camera_traps": in_camera_traps,
    "in_camelyon17": in_camelyon17,
    "in_iwildcam": in_iwildcam,
}
