"""Data of one's own: `--dataset data.py`, a file with `load(args) -> (list[Domain], classes)`."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

from plumbing.data.catalog import check_names, shortlist
from plumbing.data.domains import Dataset, Domain, in_memory, scaled
from plumbing.run.errors import UserError, in_one_line, out_of_memory

import torch
from torch import Tensor


@contextlib.contextmanager
def one_line_of(what: str):
    """Whatever code of one's own raises becomes one line, with its place; but not what the system has."""
    try:
        yield
    except (Exception, SystemExit) as e:
        if isinstance(e, UserError | OSError) or out_of_memory(e):
            raise
        last = traceback.extract_tb(e.__traceback__)[-1]
        raise UserError(f"{what}: {in_one_line(e)} ({Path(last.filename).name}, line {last.lineno})", 2)


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


def open_custom_data(file: Path, args) -> Dataset:
    """What `load(args)` of a file gives, with its `prepare`, which makes a batch [B, ...] of what a network
    gets. Stop if it does not fit together."""
    with one_line_of(f"load of {file} must return (a list of Domain, the classes' names); found"):
        module = module_in(file, "load")
        prepare = getattr(module, "prepare", scaled)
        domains, classes = module.load(args)
        classes = tuple(map(str, classes))
        given = [str(d.name) for d in domains if getattr(d, "given", None) is not None]
        domains = [Domain(str(d.name), d.images, d.labels, prepare) for d in domains]
    if given:
        raise UserError(f"{file}: the domain {given[0]} has `given`, which split.csv fills for folder:PATH "
                        "alone: leave it out, --split says the shares", 2)
    names = [d.name for d in domains]
    for what, given_names, least in (("domain", names, 1), ("class", classes, 2)):
        if len(given_names) < least or len(set(given_names)) < len(given_names):
            raise UserError(f"{file}: expected {least} or more names, each of one {what}; found "
                            f"{shortlist(given_names)} (regression, without classes, is not possible)", 2)
    check_names(str(file), names, classes)
    first = domains[0].images
    for d in domains:
        where = f"{file}: domain {d.name}"
        check_tensors(where, d.images, d.labels, len(classes), prepare is scaled)
        if d.images.shape[1:] != first.shape[1:] or d.images.dtype != first.dtype:
            raise UserError(f"{where} has {d.images.dtype} of the shape {tuple(d.images.shape[1:])}; that of "
                            f"{names[0]} is {first.dtype}, {tuple(first.shape[1:])}", 2)
    if (args.augment != "none" or args.crop or args.normalize != "unit") and first.dim() != 4:
        raise UserError("--augment, --crop and --normalize imagenet are for images [N, C, H, W]; those of "
                        f"{file} are {list(first.shape)}", 2)
    if prepare is not scaled:
        for d in domains:
            d.prepare = partial(prepared, prepare, file)
        domains[0].prepare(first[:2])
    return in_memory(domains, classes, file=file.read_bytes())


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
