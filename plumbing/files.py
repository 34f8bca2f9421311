"""Files that are written whole or not at all, locks, and files of tensors that can hold nothing else."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import zipfile
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
    """torch.save to an open file. Of a write that fails the error is the one behind torch's own."""
    try:
        torch.save(content, file)
    except RuntimeError as e:
        if isinstance(e.__context__, OSError | KeyboardInterrupt):
            raise e.__context__
        raise


def in_units(count: float) -> str:
    """Bytes in words: 12.3 MiB, 1.5 GiB."""
    if count >= 1 << 30:
        return f"{count / (1 << 30):.1f} GiB"
    return f"{count / (1 << 20):.1f} MiB"


def write_json(path: Path, value) -> None:
    """One value, whole or not at all."""
    content = (json.dumps(value, indent=1) + "\n").encode()
    write_whole(path, lambda file: file.write(content))


@contextlib.contextmanager
def locked(path: Path, wait: bool = True):
    """Hold an exclusive lock on a file; if another process holds it, wait and say so. Without `wait` Stop."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise Stop(f"another process is running in {path.parent}: wait for it, or give another --out")
            print(f"waiting for another process, which holds {path}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def load_file(path: Path, what: str, advice: str = "give another file or folder"):
    """torch.load of plain tensors and numbers; a file that holds anything else is refused, never run. The
    checksums of its zip archive are compared here: torch.load does not look at them."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                changed = archive.testzip()
            if changed:
                raise zipfile.BadZipFile(changed)
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise Stop(f"{path}: no such file of {what}", 2)
    except Exception as e:
        raise Stop(f"{path} cannot be read as a file of {what}: it is damaged or holds more than tensors "
                   f"({type(e).__name__}): {advice}")
