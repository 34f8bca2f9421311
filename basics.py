"""Errors, seeds and files: what a run needs so that it ends clearly, repeats exactly and loses nothing."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from pathlib import Path

import torch


class Stop(Exception):
    """A run cannot go on: one line that says what was expected, what was found and what to do."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


def ending(e: BaseException, kept: str) -> tuple[str, int]:
    """The line and the exit code with which a program ends on an error: 2 for bad usage, 1 for failures, 130 for Ctrl-C. `kept` says what
    is not lost. An error that is a fault of the program itself is raised again."""
    if isinstance(e, Stop):
        return str(e), e.code
    if isinstance(e, KeyboardInterrupt):
        return f"interrupted; {kept}", 130
    if out_of_memory(e):
        return f"out of memory ({str(e)[:100].splitlines()[0] if str(e) else type(e).__name__}): give smaller batches or images", 1
    if isinstance(e, OSError):
        return f"{e.strerror or e}{f': {e.filename}' if e.filename else ''}; make room or give another file or folder; {kept}", 1
    raise e


def out_of_memory(e: BaseException) -> bool:
    """torch says so with an error of its own on a GPU and in the words of a RuntimeError on a CPU."""
    return isinstance(e, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(e)


def seed_all(*key) -> torch.Generator:
    """Seed torch from a key such as (seed, "train", t, k) and return a CPU generator of the same seed.

    Randomness is counter-based: no generator state is carried from one client or round to the next, so a result
    depends neither on the order in which clients are trained nor on an interruption.
    """
    number = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1
    torch.manual_seed(number)
    return torch.Generator().manual_seed(number)


def write_whole(path: Path, write) -> None:
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
    write_whole(path, lambda f: f.write((json.dumps(value, indent=1) + "\n").encode()))


@contextlib.contextmanager
def locked(path: Path, wait: bool = True):
    """Hold an exclusive lock on a file; without `wait`, Stop if another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise Stop(f"another process is running in {path.parent}: wait for it, or give another --out")
        yield file


def load_file(path: Path, what: str):
    """torch.load of plain tensors and numbers; a file that holds anything else is refused, its code never runs."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise Stop(f"{path}: no such file of {what}", 2)
    except Exception as e:
        raise Stop(f"{path} cannot be read as a file of {what}: it is damaged or holds more than tensors "
                   f"({type(e).__name__}); give another file or folder")
