"""Which files of a dataset are its images: domain, class and order, checked against the catalogue."""

from __future__ import annotations

import collections
import json
from dataclasses import dataclass, field
from pathlib import Path

from plumbing.archives import IMAGE_ENDINGS, ImageFiles, shortest
from plumbing.catalog import Folders
from plumbing.errors import Stop

KEPT = 10  # cameras, and classes, of iWildCam
NAMED = 10  # classes that a message names at most


@dataclass
class Listing:
    """Which files are the images of a dataset, in a fixed order."""

    classes: tuple[str, ...]
    images: dict[str, list[tuple[str, int]]]  # domain: (file, label) of each image
    left_out: list[str] = field(default_factory=list)  # files among them that are no images

    def names(self) -> list[str]:
        """The files of all domains, of each as often as it has them."""
        names = []
        for images in self.images.values():
            names += [name for name, _ in images]
        return names


def list_images(files: ImageFiles, source: Folders) -> Listing:
    """The images of a dataset, whose files are scanned; Stop if they are not as many as expected."""
    listing = LAYOUTS[source.layout](files, source)
    for domain, images in listing.images.items():
        folder, expected = source.domains.get(domain, (domain, None))
        if images and expected in (None, len(images)):
            continue
        counts = collections.Counter(listing.classes[label] for _, label in images)
        fewest = [f"{c} {counts[c]}" for c in sorted(listing.classes, key=counts.__getitem__)]
        odd = [name for name in listing.left_out + files.unread if f"/{folder}/" in f"/{name}"]
        no_image = f"; no images: {some(odd, 3)} ({len(odd)} files)" if odd else ""
        raise Stop(f"{files}: domain {domain} has {len(images)} images; expected {expected or 'some'}; "
                   f"by class, in {folder}: {some(fewest, NAMED)}{no_image}")
    return listing


def some(names: list[str], count: int) -> str:
    """The first names of a list."""
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def is_image(name: str) -> bool:
    """By the ending of its name; ._x.jpg is what macOS puts beside x.jpg."""
    return name.lower().endswith(IMAGE_ENDINGS) and not Path(name).name.startswith("._")


def label_first(image: tuple[str, int]) -> tuple[int, str]:
    """A key to sort by: the order of the images in a domain."""
    name, label = image
    return label, name


# Folders for classes


def in_folders(files: ImageFiles, source: Folders) -> Listing:
    """Images in folders <domain>/<class>/ (or deeper)."""
    root = root_of_domains(files, source)
    listing = Listing(source.classes, {})
    for domain, (folder, _) in source.domains.items():
        of_class = files_by_class(files, f"{root}{folder}/")
        if not of_class:
            raise Stop(no_folder(files, source, folder, root))
        images = []
        for label, c in enumerate(source.classes):
            there = of_class.get(c, [])
            names = [name for name in there if is_image(name)]
            if not names:
                raise Stop(f"{files}: domain {domain} has no images in {folder}/{c}; expected the class "
                           f"folders {', '.join(source.classes)}, found {', '.join(sorted(of_class))}"
                           + not_read(files, f"{root}{folder}/{c}"))
            images += [(name, label) for name in names]
            listing.left_out += [name for name in there if not is_image(name)]
        listing.images[domain] = images
    return listing


def not_read(files: ImageFiles, folder: str) -> str:
    """That something in a folder could not be read; nothing if all could."""
    names = [name for name in files.unread if f"{name}/".startswith(f"{folder}/")]
    if not names:
        return ""
    return f"; {some(names, 3)} cannot be read: it is a link that leads nowhere, or may not be opened"


def no_folder(files: ImageFiles, source: Folders, folder: str, root: str) -> str:
    """That the folder of a domain is not there, and which ones are."""
    present = set()
    for name in files.inside:
        if name.startswith(root):
            present |= set(name.removeprefix(root).split("/")[:-1])
    present -= set(source.classes)
    folders = ", ".join(folder for folder, _ in source.domains.values())
    return (f"{files}: found no folder {folder}; expected the folders {folders}, each with class folders; "
            f"found {some(sorted(present), NAMED) or 'none'}" + not_read(files, f"{root}{folder}"))


def root_of_domains(files: ImageFiles, source: Folders) -> str:
    """The folder ("" or "x/y/") in which the folder of the first domain is."""
    folders = [folder for folder, _ in source.domains.values()]
    inside_first = f"/{folders[0]}/"
    roots = set()
    for name in files.inside:
        root, first, _ = f"/{name}".partition(inside_first)
        if first:
            roots.add(root)
    if not roots:
        raise Stop(no_folder(files, source, folders[0], ""))
    root = min(roots, key=shortest)
    return f"{root}/".removeprefix("/")


def files_by_class(files: ImageFiles, folder: str) -> dict[str, list[str]]:
    """{class: files in its folder below `folder`, by name}."""
    of_class = collections.defaultdict(list)
    for name in sorted(files.inside):
        if name.startswith(folder):
            c, slash, _ = name.removeprefix(folder).partition("/")
            if slash:
                of_class[c].append(name)
    return dict(of_class)


def in_own_folders(files: ImageFiles, source: Folders) -> Listing:
    """One's own images in folders <domain>/<class>/ (or deeper): the domains and the classes that have
    images, by name. A class that a domain lacks has no images there. Hidden files and folders are passed
    over, and files outside the folders of classes that are no images, a table say."""
    of_domain, left_out = {}, []  # of_domain: {domain: {class: its files}}
    for name in sorted(files.inside):
        parts = name.split("/")
        if any(part.startswith(".") for part in parts) or parts[0] == "__MACOSX":
            continue
        if len(parts) > 2 and is_image(name):
            of_class = of_domain.setdefault(parts[0], {})
            of_class.setdefault(parts[1], []).append(name)
        elif len(parts) > 2:
            left_out.append(name)
        elif is_image(name):
            raise Stop(f"{files}: the image {name} is in no folder of a class; expected "
                       "<domain>/<class>/<image>", 2)
    classes = sorted(set().union(*of_domain.values()))
    if len(of_domain) < 2 or len(classes) < 2:
        raise Stop(f"{files}: expected images in <domain>/<class>/ of at least two domains and two classes; "
                   f"found the domains {', '.join(of_domain) or 'none'} and the classes "
                   f"{', '.join(classes) or 'none'}", 2)
    for name in (*of_domain, *classes):
        if not name.isprintable():  # as in no UTF-8
            raise Stop(f"{files}: the name of the folder {name!r} cannot be shown; rename it", 2)
    listing = Listing(tuple(classes), {}, left_out)
    for domain in sorted(of_domain):
        if domain == "all" or "," in domain:
            raise Stop(f"{files}: the domain {domain!r} cannot be named in --target and --sources, where all "
                       "and commas mean something else: give its folder another name", 2)
        images = []
        for label, c in enumerate(classes):
            images += [(name, label) for name in of_domain[domain].get(c, [])]
        listing.images[domain] = images
    return listing


# DomainNet


def in_lists(files: ImageFiles, source: Folders) -> Listing:
    """DomainNet: the images that <domain>_train.txt and <domain>_test.txt name, of our classes."""
    labels = {c: label for label, c in enumerate(source.classes)}
    listing = Listing(source.classes, {})
    for domain, (folder, _) in source.domains.items():
        images = set()
        for table in (f"{folder}_train.txt", f"{folder}_test.txt"):
            images |= images_in_list(files, folder, table, labels)
        present = {label for _, label in images}
        missing = [c for c, label in labels.items() if label not in present]
        if missing:
            raise Stop(f"{files}: the lists of domain {domain} name no image of {', '.join(missing)}; "
                       "get them again")
        listing.images[domain] = sorted(images, key=label_first)
    return listing


def images_in_list(files: ImageFiles, folder: str, table: str, labels: dict[str, int]) -> set:
    """(file, label) of each image of the classes in `labels` that a list names.

    A line of it is "<domain>/<class>/<file> <number of the class>", as in the zip archive <domain>.zip.
    """
    root, text = files.table(table)
    images = set()
    for line in text.splitlines():
        image = line.rpartition(" ")[0]
        if image.count("/") != 2:
            raise Stop(f"{files}: expected lines such as '{folder}/bird/x.jpg 31' in {table}, found '{line}'")
        c = image.split("/")[1]
        if c not in labels:
            continue
        if image in files.inside:
            name = image
        elif root + image in files.inside:
            name = root + image
        else:
            raise Stop(f"{files}: {table} names {image}, which is not there; get {folder}.zip again")
        images.add((name, labels[c]))
    return images


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
        if location not in listing.images or c not in source.classes:
            continue
        if image not in paths:
            raise Stop(f"{files}: the annotations name {image}, which is in no archive; "
                       f"get {source.archive} again")
        listing.images[location].append((paths[image], source.classes.index(c)))
    for location, images in listing.images.items():
        if not images:
            raise Stop(f"{files}: the annotations name no image of {location}; "
                       "expected *_annotations.json of ECCV 2018")
        images.sort(key=label_first)
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
            raise Stop(f"{files}: {name} is no list of images, categories and annotations "
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
        if center not in hospitals or tumor not in ("0", "1") or name not in files.inside:
            raise Stop(f"{files}: metadata.csv names {name} of center {center} with tumor {tumor}; "
                       f"expected a patch that is there, a center of {', '.join(hospitals)}, and 0 or 1; "
                       "get the archive again")
        listing.images[hospitals[center]].append((name, int(tumor)))
    for images in listing.images.values():
        images.sort(key=label_first)
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
    if len(cameras) < KEPT or len(classes) < KEPT:
        raise Stop(f"{files}: expected at least {KEPT} cameras and {KEPT} classes with images in "
                   f"metadata.csv, found {len(cameras)} and {len(classes)}; get the archive again")
    listing = Listing(tuple(classes), {})
    for camera in cameras:
        images = [(name, classes.index(c)) for name, c in of_camera[camera] if c in classes]
        images.sort(key=label_first)
        for name, _ in images:
            if name not in files.inside:
                raise Stop(f"{files}: metadata.csv names {name}, which is not there; get the archive again")
        listing.images[camera] = images
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
    """The `KEPT` names with the largest counts, largest first."""
    names = sorted(counts)
    names.sort(key=counts.get, reverse=True)  # stable: equal counts stay in the order of their names
    return names[:KEPT]


LAYOUTS = {
    "in_folders": in_folders,
    "in_own_folders": in_own_folders,
    "in_lists": in_lists,
    "in_camera_traps": in_camera_traps,
    "in_camelyon17": in_camelyon17,
    "in_iwildcam": in_iwildcam,
}
