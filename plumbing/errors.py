"""How a program of this repository ends on an error: with one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from pathlib import Path

SAID_AFTER = 1.0  # seconds of waiting until that is said


# What to do about an error of the system.
REMEDIES = {
    errno.ENOSPC: "make room or give another folder",
    errno.EDQUOT: "make room or give another folder",
    errno.EACCES: "give a file or folder that may be written and read",
    errno.EPERM: "give a file or folder that may be written and read",
    errno.EROFS: "give a file or folder that may be written and read",
    errno.ENOTDIR: "a file is where a folder is expected: give another folder",
    errno.EEXIST: "a file is where a folder is expected: give another folder",
    errno.EISDIR: "a folder is where a file is expected: give a file",
}


RUNS_ON_GPU = "CLEANFDG_RUNS_ON_GPU"  # in the environment of a run: how many share its GPU, at most


class Stop(Exception):
    """A run cannot go on: one line that says what was expected, what was found and what to do."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


def ending(e: BaseException, kept: str) -> tuple[str, int]:
    """The line and the exit code with which a program ends on an error.

    The code is 2 for bad usage, 1 for failures, 130 for Ctrl-C, 128 + its number for another signal. `kept`
    says what is not lost. An error that is a fault of the program itself is raised again.
    """
    if isinstance(e, Stop):
        return str(e), e.code
    if isinstance(e, KeyboardInterrupt):
        return f"interrupted; {getattr(e, 'kept', '') or kept}", getattr(e, "code", 130)
    if out_of_memory(e):
        what = type(e).__name__
        if str(e):
            what = str(e)[:100].splitlines()[0]
        remedy = "give smaller batches or images"
        if os.environ.get(RUNS_ON_GPU, "1") != "1":
            remedy = f"fewer runs at a time on the GPU (--jobs), or {remedy}"
        return f"out of memory ({what}): {remedy}", 1
    if isinstance(e, OSError):
        what = str(e.strerror or e)
        if e.filename:
            what += f": {e.filename}"
        return f"{what}; {REMEDIES.get(e.errno, 'give another file or folder')}; {kept}", 1
    if type(e).__module__.startswith(("torch._inductor", "torch._dynamo")):
        why = str(e)[:120].splitlines()[0]
        return f"torch.compile cannot compile the network ({why}): run it without --compile; {kept}", 1
    raise e


def speaks() -> bool:
    """Whether this process tells of bad usage, which all of them find: with torchrun the first alone."""
    alone = os.environ.get("WORLD_SIZE", "1") in ("", "1")
    return alone or os.environ.get("LOCAL_RANK", "0") == "0"


def out_of_memory(e: BaseException) -> bool:
    """torch says so with an error of its own on a GPU and in the words of a RuntimeError on a CPU.

    torch is not imported for this: there is no error of its own before it is, and bad usage is told at once.
    """
    torch = sys.modules.get("torch")
    on_gpu = getattr(torch, "OutOfMemoryError", MemoryError)
    return isinstance(e, (MemoryError, on_gpu)) or "can't allocate memory" in str(e)


@contextlib.contextmanager
def said_if_long(words: str, shown: bool = True):
    """Say what is waited for, once the block has taken a second; never if not `shown`."""
    waiting = threading.Timer(SAID_AFTER, say, [words, sys.stdout])
    waiting.daemon = True
    if shown:
        waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


def say(words: str, stream) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal has gone
        print(words, file=stream, flush=True)


# Set when a program begins, before its libraries load


def show_uncaught(kind: type[BaseException], error: BaseException, trace) -> None:
    """Ctrl-C before a program has begun, and a library that is missing: one line in the place of a
    traceback."""
    name = Path(sys.argv[0]).stem
    if issubclass(kind, KeyboardInterrupt):
        print(f"{name}: interrupted", file=sys.stderr)
    elif issubclass(kind, ModuleNotFoundError):
        print(f"{name}: the library {error.name} is missing: pip install -r requirements.txt, in the "
              "environment of this Python", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def take_any_words() -> None:
    """A stream that is closed swallows what is printed; one that has no sign for a letter writes its
    number."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", errors="backslashreplace"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def tell_of_loading() -> threading.Timer:
    """The libraries of a method load for seconds, on a busy machine for many: at a terminal that is said
    after the first, until `Parser` cancels it. Elsewhere it is not: there a line of bad usage stands
    alone."""
    program = Path(sys.argv[0])
    words = f"{program.stem}: loading torch and the other libraries"
    loading = threading.Timer(SAID_AFTER, say, [words, sys.stderr])
    loading.daemon = True
    ours = Path(__file__).resolve().parent.parent
    if program.resolve().parent in (ours, ours / "baselines") and sys.stderr.isatty() and speaks():
        loading.start()
    return loading


sys.excepthook = show_uncaught
take_any_words()
LOADING = tell_of_loading()
