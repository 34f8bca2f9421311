"""Small datasets in the official layouts: an image for each name, their archives, what loading must give."""

import dataclasses
import io
import tarfile
import types
import zipfile
from collections.abc import Iterable
from pathlib import Path

import common
from plumbing.data.catalog import FOLDERS
from tests.conftest import stops

import numpy as np
import torch
from PIL import Image

NOWHERE = "http://127.0.0.1:9/"  # nothing listens there
SIZE = 8

Images = dict[str, list[tuple[str, str]]]  # domain: (file, class) of each image


def pixels(name: str) -> np.ndarray:
    """uint8 [8, 8, 3], different for each name."""
    return np.random.default_rng(list(name.encode())).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)


def picture(name: str) -> bytes:
    """A PNG of these pixels."""
    file = io.BytesIO()
    Image.fromarray(pixels(name)).save(file, "png")
    return file.getvalue()


def pictures(names: Iterable[str]) -> dict[str, bytes]:
    return {name: picture(name) for name in names}


def names_in(images: Images) -> list[str]:
    return [name for of_domain in images.values() for name, _ in of_domain]


def write_tar(path: Path, entries: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_zip(path: Path, entries: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def expect(monkeypatch, dataset: str, counts: int | None = None, **changes) -> None:
    """Expect so many images in each of a dataset's domains, and be unable to download it."""
    source = FOLDERS[dataset]
    changes = {"counts": {}, "content": ""} | changes
    changes["files"] = {pattern: (NOWHERE + pattern, None) for pattern in source.files}
    if counts is not None:
        changes["domains"] = {domain: (folder, counts) for domain, (folder, _) in source.domains.items()}
    monkeypatch.setitem(FOLDERS, dataset, dataclasses.replace(source, **changes))


def load(tmp_path: Path, dataset: str, data: str = "data", size: int = SIZE):
    """What common.open_dataset makes of the archives below tmp_path."""
    (tmp_path / "archives").mkdir(exist_ok=True)
    args = types.SimpleNamespace(dataset=dataset, image_size=size, limit=0, seed=0, skip_broken=False)
    args.archives = str(tmp_path / "archives")
    args.data = str(tmp_path / data)
    dataset = common.open_dataset(args)
    return dataset.domains, dataset.classes


def check(loaded, images: Images, classes: tuple[str, ...]) -> None:
    """Each domain has exactly these images, in this order, with their pixels."""
    domains, loaded_classes = loaded
    assert loaded_classes == classes
    assert [d.name for d in domains] == list(images)
    for d in domains:
        labels = [classes.index(c) for _, c in images[d.name]]
        expected = np.stack([pixels(name) for name, _ in images[d.name]])
        assert d.labels.tolist() == labels and d.labels.dtype == torch.int64
        assert d.images.dtype == torch.uint8
        assert d.images.is_contiguous(memory_format=torch.channels_last)
        assert np.array_equal(d.images.permute(0, 2, 3, 1).numpy(), expected), d.name


def refused(message: str, tmp_path: Path, dataset: str) -> None:
    """Loading ends with one line that matches `message`, and leaves no decoded pixels, whole or in part."""
    stops(message, load, tmp_path, dataset)
    data = tmp_path / "data"
    assert not list(data.rglob("pixels.bin")) and not list(data.rglob("*.tmp"))


def vlcs() -> Images:
    """What the small VLCS has: two images of each class in each domain."""
    images = {}
    for domain, (folder, _) in FOLDERS["vlcs"].domains.items():
        images[domain] = []
        for c in FOLDERS["vlcs"].classes:
            images[domain] += [(f"VLCS/{folder}/{c}/0.jpg", c), (f"VLCS/{folder}/{c}/1.jpg", c)]
    return images


def write_vlcs(tmp_path: Path, monkeypatch) -> Path:
    """It as DomainBed packs it, and the catalogue expects it."""
    expect(monkeypatch, "vlcs", 10)
    names = sorted(names_in(vlcs()), reverse=True)  # not in our order
    entries = pictures(names) | {"VLCS/SUN09/car/._0.jpg": b"what macOS adds"}
    return write_tar(tmp_path / "archives" / "VLCS.tar.gz", entries)
