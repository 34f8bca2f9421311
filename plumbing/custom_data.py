"""Data of one's own: `--dataset data.py`, a file with `load(args) -> (list[Domain], classes)`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

from plumbing.catalog import check_names, shortlist
from plumbing.errors import UserError, out_of_memory

import torch
from torch import Tensor


def scaled(values: Tensor) -> Tensor:
    """A batch as networks get it: uint8 divided by 255, floats as they are."""
    if values.dtype == torch.uint8:
        return values.float().div_(255)
    return values.float()


@contextlib.contextmanager
def one_line_of(what: str):
    """Whatever code of one's own raises becomes one line, with its place; but not what the system has."""
    try:
        yield
    except (Exception, SystemExit) as e:
        if isinstance(e, UserError | OSError) or out_of_memory(e):
            raise
        last = traceback.extract_tb(e.__traceback__)[-1]
        why = " ".join(f"{type(e).__name__}: {e}".split())[:120]
        raise UserError(f"{what}: {why} ({Path(last.filename).name}, line {last.lineno})", 2)


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
    with one_line_of(f"load of {file} must return (a list of Domain, the classes' names); found"):
        module = module_in(file, "load")
        prepare = getattr(module, "prepare", scaled)
        domains, classes = module.load(args)
        classes = tuple(map(str, classes))
        parts = [(str(d.name), d.images, d.labels) for d in domains]
        given = [str(d.name) for d in domains if getattr(d, "given", None) is not None]
    if given:
        raise UserError(f"{file}: the domain {given[0]} has `given`, which split.csv fills for folder:PATH "
                        "alone: leave it out, --split says the shares", 2)
    names = [name for name, _, _ in parts]
    for what, given_names, least in (("domain", names, 1), ("class", classes, 2)):
        if len(given_names) < least or len(set(given_names)) < len(given_names):
            raise UserError(f"{file}: expected {least} or more names, each of one {what}; found "
                            f"{shortlist(given_names)} (regression, without classes, is not possible)", 2)
    check_names(str(file), names, classes)
    for name, images, labels in parts:
        where = f"{file}: domain {name}"
        check_tensors(where, images, labels, len(classes), prepare is scaled)
        if images.shape[1:] != parts[0][1].shape[1:] or images.dtype != parts[0][1].dtype:
            raise UserError(f"{where} has {images.dtype} of the shape {tuple(images.shape[1:])}; that of "
                            f"{parts[0][0]} is {parts[0][1].dtype}, {tuple(parts[0][1].shape[1:])}", 2)
    if (args.augment != "none" or args.crop or args.normalize != "unit") and parts[0][1].dim() != 4:
        raise UserError("--augment, --crop and --normalize imagenet are for images [N, C, H, W]; those of "
                        f"{file} are {list(parts[0][1].shape)}", 2)
    if prepare is not scaled:
        prepare = partial(prepared, prepare, file)
        prepare(parts[0][1][:2])
    return parts, classes, content_of(parts, classes, file.read_bytes()), prepare


def prepared(prepare: Callable, file: Path, batch: Tensor) -> Tensor:
    """What a file's own `prepare` makes of a batch. Stop if it cannot, or gives no tensor of as many rows."""
    with one_line_of(f"prepare of {file} must return a tensor for a batch of {list(batch.shape)}; found"):
        out = prepare(batch)
        if not isinstance(out, Tensor) or out.shape[:1] != batch.shape[:1] or out.dim() < 2:
            raise TypeError(f"{type(out).__name__} {list(getattr(out, 'shape', ''))}")
    return out


def check_tensors(where: str, images: Tensor, labels: Tensor, classes: int, as_they_are: bool) -> None:
    """Stop unless these are a domain's values and labels."""
    both = [v for v in (images, labels) if isinstance(v, Tensor) and v.layout == torch.strided]
    if len(both) < 2 or {v.device.type for v in both} != {"cpu"}:
        raise UserError(f"{where}: images and labels must be plain tensors on the CPU; found "
                        f"{type(images).__name__} and {type(labels).__name__}", 2)
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1] or images.dim() < 2:
        raise UserError(f"{where}: expected images [N, ...] and labels int64 [N]; found {list(images.shape)} "
                        f"and {labels.dtype} {list(labels.shape)} (regression is not possible)", 2)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise UserError(f"{where}: labels go from {int(labels.min())} to {int(labels.max())}; expected 0 to "
                        f"{classes - 1}, as there are {classes} classes", 2)
    if as_they_are and images.dtype != torch.uint8 and not images.is_floating_point():
        raise UserError(f"{where} has {images.dtype}: expected uint8 (divided by 255) or floats (as they "
                        "are), or a function prepare(batch) in the file", 2)
    if images.is_floating_point() and not torch.isfinite(images).all():
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
