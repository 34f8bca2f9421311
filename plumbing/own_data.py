"""Data of one's own: `--dataset data.py`, a file with `load(args) -> (list[Domain], classes)`."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from plumbing.catalog import check_names, shortlist
from plumbing.errors import UserError

import torch
from torch import Tensor


def scaled(values: Tensor) -> Tensor:
    """A batch as networks get it: uint8 divided by 255, floats as they are."""
    if values.dtype == torch.uint8:
        return values.float().div_(255)
    return values.float()


def module_in(file: Path, needs: str = "") -> ModuleType:
    """The module of a file of one's own. Stop if there is none, or if it has not the function `needs`."""
    if not file.is_file():
        raise UserError(f"there is no file {file}", 2)
    spec = importlib.util.spec_from_file_location(f"own_{file.stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if needs and not callable(getattr(module, needs, None)):
        raise UserError(f"{file} has no function {needs}", 2)
    return module


def open_custom_data(file: Path, args) -> tuple[list, tuple[str, ...], str, Callable[[Tensor], Tensor]]:
    """What `load(args)` of a file gives: its domains, classes, the content of both, and its `prepare`,
    which makes a batch [B, ...] of what a network gets. Stop if it does not fit together."""
    module = module_in(file, "load")
    prepare = getattr(module, "prepare", scaled)
    domains, classes = module.load(args)
    classes = tuple(map(str, classes))
    parts = [(str(d.name), d.images, d.labels) for d in domains]
    if any(getattr(d, "given", None) is not None for d in domains):
        raise UserError(f"{file}: a domain has `given`, which split.csv fills for folder:PATH alone: leave "
                        "it out, --split says the shares", 2)
    names = [name for name, _, _ in parts]
    for what, found, least in (("domain", names, 1), ("class", classes, 2)):
        if len(found) < least or len(set(found)) < len(found):
            raise UserError(f"{file}: expected {least} or more names, each of one {what}; found "
                            f"{shortlist(found)} (regression, without classes, is not possible)", 2)
    check_names(str(file), names)
    for name, images, labels in parts:
        where = f"{file}: domain {name}"
        check_tensors(where, images, labels, len(classes))
        if prepare is scaled and images.dtype != torch.uint8 and not images.is_floating_point():
            raise UserError(f"{where} has {images.dtype}: expected uint8 (divided by 255) or floats (as they "
                            "are), or a function prepare(batch) in the file", 2)
        if images.shape[1:] != parts[0][1].shape[1:]:
            raise UserError(f"{where} has the shape {tuple(images.shape[1:])}; that of {names[0]} is "
                            f"{tuple(parts[0][1].shape[1:])}", 2)
    if (args.augment != "none" or args.crop or args.normalize != "unit") and parts[0][1].dim() != 4:
        raise UserError("--augment, --crop and --normalize imagenet are for images [N, C, H, W]; those of "
                        f"{file} are {list(parts[0][1].shape)}", 2)
    return parts, classes, content_of(parts, classes, file.read_bytes()), prepare


def check_tensors(where: str, images: Tensor, labels: Tensor, classes: int) -> None:
    """Stop unless these are a domain's values and labels."""
    both = [f"{type(v).__name__} {getattr(v, 'dtype', '')} {list(getattr(v, 'shape', ''))}"
            for v in (images, labels)]
    are_tensors = isinstance(images, Tensor) and isinstance(labels, Tensor)
    if not are_tensors or labels.dtype != torch.int64 or labels.shape != images.shape[:1] or images.dim() < 2:
        raise UserError(f"{where}: expected tensors, images [N, ...] and labels int64 [N]; found "
                        f"{' and '.join(both)} (regression is not possible)", 2)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise UserError(f"{where}: labels go from {int(labels.min())} to {int(labels.max())}; expected 0 to "
                        f"{classes - 1}, as there are {classes} classes", 2)
    if not torch.isfinite(images).all():
        raise UserError(f"{where} has values that are not finite", 2)


def content_of(parts: list, classes: tuple[str, ...], file: bytes = b"") -> str:
    """12 hexadecimal digits that change with what is loaded, or with the file that loads it."""
    digest = hashlib.blake2b(file, digest_size=6)
    digest.update(repr(classes).encode())
    for name, images, labels in parts:
        digest.update(f"{name} {images.dtype} {tuple(images.shape)}".encode())
        for tensor in (images, labels):
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
