"""The images of a run, before they are split: domains, and the dataset that has them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


def scaled(values: Tensor) -> Tensor:
    """A batch as networks get it: uint8 divided by 255, floats as they are."""
    if values.dtype == torch.uint8:
        return values.float().div_(255)
    return values.float()


class Origin(NamedTuple):
    """Where an image of one's own comes from."""

    file: str
    group: str = ""  # the patient, say, whose images stay in one part
    pixels: str = ""  # their digest, see decoding.py


@dataclass
class Domain:
    """One domain: its name, images uint8 [N, C, H, W] (stored channels last) and labels int64 [N]. Data of
    one's own may have another shape and dtype."""

    name: str
    images: Tensor
    labels: Tensor
    prepare: Callable[[Tensor], Tensor] = scaled  # a batch of images -> what a network gets
    given: Tensor | None = None  # int64 [N, 2], part and group of each image, if some are known
    origin: list[Origin] = field(default_factory=list)  # of each image of one's own


@dataclass
class Dataset:
    """The images of a run, before they are split: download -> decode -> this, never back."""

    domains: list[Domain]
    classes: tuple[str, ...]  # in the order of the labels
    content: str = ""  # 12 hexadecimal digits that change with the images
    same_images: bool = False  # the domains are versions of the same images, row by row

    @property
    def names(self) -> list[str]:
        return [d.name for d in self.domains]

    def seed_name(self, domain: str) -> str:
        """What stands for a domain in the seeds of its split. Versions of the same images are split alike:
        none of a source's test images is trained on in another source."""
        return "" if self.same_images else domain


def in_memory(domains: list[Domain], classes: tuple[str, ...], same_images: bool = False,
              file: bytes = b"") -> Dataset:
    """The dataset of these tensors; its content changes with them, or with the `file` that loads them."""
    digest = hashlib.blake2b(file, digest_size=6)
    digest.update(repr(classes).encode())
    for d in domains:
        digest.update(f"{d.name} {d.images.dtype} {tuple(d.images.shape)}".encode())
        for tensor in (d.images, d.labels):
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return Dataset(domains, classes, digest.hexdigest(), same_images)
