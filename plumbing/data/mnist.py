"""The digits, which need no download, and RotatedMNIST: the same six rotations, each a domain."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

from plumbing.data.archives import download, find_archives
from plumbing.data.domains import Dataset, Domain, in_memory
from plumbing.run.errors import UserError
from plumbing.run.seeding import seed_all

import numpy as np
import torch
from torch import Tensor

ANGLES = (0, 15, 30, 45, 60, 75)  # degrees, counter-clockwise (FedSR, Sec. 4.1)
PUBLISHED_ROWS = Path(__file__).parent / "rotated_mnist_indices.csv"

CLASSES = tuple("0123456789")


def rotate(images: Tensor, angle: float, size: int, interpolation: str = "bilinear") -> Tensor:
    """uint8 [N, 1, h, w] -> [N, 1, size, size], resized and turned counter-clockwise by `angle` degrees."""
    from torchvision.transforms.v2 import InterpolationMode, functional
    if images.shape[-2:] != (size, size):
        images = functional.resize(images, [size, size], antialias=True)
    if angle:
        images = functional.rotate(images, angle, interpolation=InterpolationMode(interpolation))
    return images.contiguous(memory_format=torch.channels_last)


def load_digits(size: int) -> Dataset:
    """scikit-learn's 1,797 handwritten digits (8x8), dealt out to the rotations: none is in two domains.

    Of 1.4 million pixels ten differ by one grey value between two models of processors: the turned
    coordinates are float32, and some processors round a product before they add it.
    """
    from sklearn.datasets import load_digits as sklearn_digits
    bunch = sklearn_digits()
    images = torch.from_numpy(bunch.images * (255 / 16)).round().to(torch.uint8)[:, None]  # [1797, 1, 8, 8]
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=seed_all("digits"))
    return in_memory([Domain(f"d{angle}", rotate(images[order[i::6]], angle, size), labels[order[i::6]])
                      for i, angle in enumerate(ANGLES)], CLASSES)


def rotated_mnist(name: str, seed: int, size: int, data: str, archives: str) -> Dataset:
    """FedSR's protocol: the same 1,000 images of `rotatedmnist` (of the training set) or `rotatedmnist-t10k`
    (of the test set) in every domain, turned by the nearest pixel as in DIRT and DIVA."""
    kind = "train" if name == "rotatedmnist" else "t10k"
    images = read_idx(f"{kind}-images-idx3-ubyte.gz", data, archives, header=16)
    labels = read_idx(f"{kind}-labels-idx1-ubyte.gz", data, archives, header=8).long()
    rows = rows_of(name, seed, labels)
    images, labels = images.view(-1, 1, 28, 28)[rows], labels[rows]
    return in_memory([Domain(f"m{angle}", rotate(images, angle, size, "nearest"), labels)
                      for angle in ANGLES], CLASSES, same_images=True)


def rows_of(name: str, seed: int, labels: Tensor) -> Tensor:
    """Which 1,000 images, 100 of each class, make RotatedMNIST: rows [1000] of MNIST's images.

    FedSR takes "the same version of the dataset" as DIRT and DIVA: ten lists of rows of the training set,
    which both repositories hold (atuannguyen/DIRT @ 2635178, data/roatedmnist_sup_inds). The seed picks the
    list, as in DIRT: seed 0 the first. Of the test set ours are drawn with a fixed seed.
    """
    if name == "rotatedmnist":
        lists = np.loadtxt(PUBLISHED_ROWS, delimiter=",", skiprows=1, dtype=np.int64)  # [1000, 10]
        return torch.from_numpy(lists[:, seed % 10].copy())
    order = torch.randperm(len(labels), generator=seed_all("rotatedmnist"))
    of_classes = [order[labels[order] == c][:100] for c in range(10)]
    return torch.cat(of_classes)


def read_idx(name: str, data: str, archives: str, *, header: int) -> Tensor:
    """The bytes, uint8, behind the header of one of MNIST's files. Stop if it is damaged or another one."""
    from torchvision.datasets import MNIST
    path = find_archives([name], data, archives).get(name)
    if path is None:
        path = download(MNIST.mirrors[-1] + name, Path(data) / "downloads" / name)
    expected = dict(MNIST.resources)[name]
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    if md5 != expected:
        raise UserError(f"{path}: expected md5 {expected}, found {md5}; the file is damaged, get it again")
    with gzip.open(path) as file:
        raw = file.read()
    return torch.frombuffer(bytearray(raw[header:]), dtype=torch.uint8)
