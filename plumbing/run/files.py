"""Files that are written whole or not at all, locks, and files of tensors that can hold nothing else."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

from plumbing.run.errors import UserError

import torch
from torch.utils._pytree import tree_leaves

READ_LIMIT = 16 << 20  # bytes of a file that are looked at


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
    except OSError as e:  # torch and a full disk name no file
        raise OSError(e.errno, e.strerror, str(path)) from e
    finally:
        temporary.unlink(missing_ok=True)


def output_file(path: Path, is_ours: Callable[[bytes], bool]) -> None:
    """Stop unless nothing is at `path`, an empty file, or one that is ours by how it begins, in a folder that
    can be written to. Every flag that names a file to be written asks here, before anything is computed."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; expected a file, or the name of a new one", 2)
    check_regular(path)
    folder = next(above for above in Path(os.path.realpath(path)).parents if above.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{path} cannot be written: {folder} is no folder to which you may write", 2)
    if path.exists():
        with open(path, "rb") as file:
            start = file.read(READ_LIMIT)
        if start and not is_ours(start):
            raise UserError(f"{path} holds something else, which would be lost or spoiled: give another "
                            "file; nothing was changed", 2)


def output_folder(folder: Path, mark: str, words: str) -> None:
    """Stop unless a folder is not there, empty, or ours: its file `mark` has these words in it."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        file = folder / mark
        if not file.is_file() or words not in file.read_text(errors="replace", encoding="utf-8"):
            raise UserError(f"{folder} has files of something else, which might be lost: give another --out; "
                            "nothing was changed", 2)


def check_regular(path: Path) -> None:
    """Stop if a pipe or a device is there: to read it may take for ever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is a pipe or a device: expected a file", 2)


def tensors_of(value) -> list[torch.Tensor]:
    """All tensors in nested dicts and lists."""
    return [v for v in tree_leaves(value) if isinstance(v, torch.Tensor)]


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
    write_whole(path, lambda file: file.write(json.dumps(value, indent=1).encode() + b"\n"))


def write_text(path: Path, text: str) -> None:
    """A text, whole or not at all; bytes of a file's name that are no UTF-8 come back as they were."""
    write_whole(path, lambda file: file.write(text.encode("utf-8", "surrogateescape")))


def write_csv(path: Path, lines: list[list]) -> None:
    """A table, the heads in its first line, whole or not at all."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    write_text(path, text.getvalue())


def lock_of(path: Path) -> Path:
    """The file beside another one by which it is locked."""
    return path.with_name(f".{path.name}.lock")


@contextlib.contextmanager
def locked(path: Path, wait: bool = True):
    """Hold an exclusive lock on a file; if another process holds it, wait and say so. Without `wait` Stop."""
    path.parent.mkdir(parents=True, exist_ok=True)
    others = path.exists() and not os.access(path, os.W_OK)  # a lock needs no more than to read it
    with open(path, "rb" if others else "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise UserError(f"another process is running in {path.parent}: wait for it, or give another "
                                "--out")
            print(f"waiting for another process, which holds {path}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def load_file(path: Path, what: str, advice: str = "give another file or folder"):
    """torch.load of plain tensors and numbers; a file that holds anything else is refused, never run. The
    checksums of its zip archive are compared here: torch.load does not look at them."""
    check_regular(path)
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                changed = archive.testzip()
            if changed:
                raise zipfile.BadZipFile(changed)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        is_finite = all(v.isfinite().all() for v in tensors_of(loaded))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such file of {what}: {advice}", 2)
    except Exception as e:
        raise UserError(f"{path} cannot be read as a file of {what}: it is damaged or holds more than "
                        f"tensors ({type(e).__name__}): {advice}")
    if not is_finite:
        raise UserError(f"{path} has numbers that are not finite: {advice}")
    return loaded
