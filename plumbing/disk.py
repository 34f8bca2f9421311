"""How much disk the states of a run take: known from those in memory, so that a disk which cannot hold them
is found before the training and not at a checkpoint."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from plumbing.errors import Stop
from plumbing.files import in_units, size_of

from torch import Tensor

STATES = ("checkpoint.pt", "before.pt", "best.pt")
SAID_FROM = 1 << 30  # bytes of a run's states from which on they are announced


def bytes_of(value, counted: set[int] | None = None) -> int:
    """Bytes that torch.save writes of the tensors in nested dicts and lists: of each storage once, and whole,
    whatever part of it a tensor shows."""
    counted = set() if counted is None else counted
    if isinstance(value, dict):
        return sum(bytes_of(inner, counted) for inner in value.values())
    if isinstance(value, list | tuple):
        return sum(bytes_of(inner, counted) for inner in value)
    if not isinstance(value, Tensor):
        return 0
    storage = value.untyped_storage()
    if storage._cdata in counted:
        return 0
    counted.add(storage._cdata)
    return storage.nbytes()


def copies(protocol: str) -> tuple[int, int]:
    """How many states a run has on disk: at most, while one is replaced, and when it is finished. Without
    labels it has no best state."""
    if protocol == "linear":
        return 2, 1
    return 3, 2


def described(size: int, protocol: str, folder: Path) -> str:
    """The disk that a run takes, in words; nothing if that is little."""
    most, finished = copies(protocol)
    if most * size < SAID_FROM:
        return ""
    free = shutil.disk_usage(folder).free
    return (f"disk: up to {in_units(most * size)} while it runs ({most} states of {in_units(size)}), "
            f"{in_units(finished * size)} when it is finished; {in_units(free)} are free in {folder}")


def refuse_small_disk(size: int, protocol: str, folder: Path) -> None:
    """Stop if the disk of a run's folder cannot hold its states of `size` bytes each."""
    needed = copies(protocol)[0] * size
    there = size_of(folder / name for name in STATES if (folder / name).exists())
    free = shutil.disk_usage(folder).free
    if needed > there + free:
        raise Stop(f"the run needs up to {in_units(needed)} of disk for its checkpoints, and "
                   f"{in_units(there + free)} are free in {folder}: make room there, or give --out a folder "
                   "on another disk")


def in_place_of(path: Path, other: Path) -> None:
    """Let `path` be another name of the file `other`, whose content serves for both; where the disk has no
    such names it stays as it is."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        os.link(other, temporary)
        os.replace(temporary, path)
