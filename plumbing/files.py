"""Files that are written whole or not at all, locks, and files of tensors that can hold nothing else."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

from plumbing.errors import Stop

import torch


def write_whole(path: Path, write: Callable) -> None:
    """Call `write(file)` on a temporary file beside `path` and rename it at the end: whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as e:
        temporary.unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise OSError(e.errno, e.strerror, str(path)) from e
        raise


def save(content, file) -> None:
    """torch.save to an open file; a write that fails is an OSError, whatever torch makes of it."""
    try:
        torch.save(content, file)
    except RuntimeError:
        file.write(bytes(1 << 20))
        file.flush()  # raises the OSError behind it: no space left, say
        raise


def write_json(path: Path, value) -> None:
    """One value, whole or not at all."""
    content = (json.dumps(value, indent=1) + "\n").encode()
    write_whole(path, lambda file: file.write(content))


@contextlib.contextmanager
def locked(path: Path, wait: bool = True):
    """Hold an exclusive lock on a file; without `wait`, Stop if another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    how = fcntl.LOCK_EX
    if not wait:
        how |= fcntl.LOCK_NB
    with open(path, "a") as file:
        try:
            fcntl.flock(file, how)
        except BlockingIOError:
            raise Stop(f"another process is running in {path.parent}: wait for it, or give another --out")
        yield file


def load_file(path: Path, what: str):
    """torch.load of plain tensors and numbers; a file that holds anything else is refused, never run."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise Stop(f"{path}: no such file of {what}", 2)
    except Exception as e:
        raise Stop(f"{path} cannot be read as a file of {what}: it is damaged or holds more than tensors "
                   f"({type(e).__name__}); give another file or folder")
