"""Files that are written whole or not at all, locks, and files of tensors that can hold nothing else."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from plumbing.errors import Stop

import torch


WAIT = 3.0, 3600.0  # seconds of waiting for a lock until that is said, and until it is given up


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
    except RuntimeError as e:
        if isinstance(e.__context__, KeyboardInterrupt):  # its words for whatever ends a write
            raise e.__context__
        file.write(bytes(1 << 20))
        file.flush()  # raises the OSError behind it: no space left, say
        if "inline_container" in str(e):  # there is room again meanwhile
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name) from e
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
    """Hold an exclusive lock on a file; Stop if another process holds it, without `wait` at once, else after
    an hour. That it waits is said."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        began, said = time.monotonic(), False
        while not taken(file):
            waited = time.monotonic() - began
            if not wait:
                raise Stop(f"another process is running in {path.parent}: wait for it, or give another --out")
            if waited > WAIT[1]:
                raise Stop(f"another process has held {path} for {waited / 60:.0f} minutes: end it, or wait")
            if waited > WAIT[0] and not said:
                print(f"waiting for another process, which holds {path}", file=sys.stderr, flush=True)
                said = True
            time.sleep(0.05)
        yield file


def taken(file) -> bool:
    """Whether the lock on a file could be had at once."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def load_file(path: Path, what: str):
    """torch.load of plain tensors and numbers; a file that holds anything else is refused, never run.

    torch.save writes a zip archive, whose checksums torch.load does not look at: here they are compared, so
    that no changed byte becomes another number.
    """
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
                   f"({type(e).__name__}); give another file or folder")
