"""How a program of this repository ends: on an error with one line and an exit code, on a signal (Ctrl-C,
SIGTERM of Slurm, systemd or kill, SIGHUP of a terminal that closes) after the round that it is in."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

NOTHING_LOST = ("nothing that was written is lost: the same command without --no-resume resumes from the "
                "last checkpoint, if there is one")


def in_one_line(e: Exception) -> str:
    """Its kind and its words; torch names tensors on many lines."""
    return " ".join(f"{type(e).__name__}: {e}".split())[:120]


class UserError(Exception):
    """A run cannot go on: one line that says what was expected, what was found and what to do."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


def printable(text: str) -> str:
    """A text for a line of a terminal: line ends and escape codes are written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def ending(e: BaseException, kept: str) -> tuple[str, int]:
    """The line and the exit code with which a program ends on an error.

    The code is 2 for bad usage, 1 for failures, 130 for Ctrl-C, 128 + its number for another signal. `kept`
    says what is not lost. A fault of the program itself, or of code of one's own, is raised again.
    """
    if isinstance(e, UserError):
        return str(e), e.code
    if isinstance(e, KeyboardInterrupt):
        code = getattr(e, "code", 130)
        words = getattr(e, "kept", "") or kept
        return f"interrupted; {words}" if code else words, code
    if out_of_memory(e):
        what = str(e)[:100].replace("\n", " ") or type(e).__name__
        return f"out of memory ({what}): give smaller batches or images", 1
    if isinstance(e, BrokenPipeError):
        return f"the reader of the output has left; {kept}", 1
    if isinstance(e, OSError):
        what, remedy = str(e.strerror or e), "give another file or folder"
        if e.filename:
            what += f": {e.filename}"
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = f"make room or {remedy}"
        return f"{what}; {remedy}; {kept}", 1
    raise e


def out_of_memory(e: BaseException) -> bool:
    """On a GPU or on a CPU; torch has a RuntimeError for both."""
    return isinstance(e, MemoryError) or "out of memory" in str(e) or "can't allocate memory" in str(e)


def tell(program: str, message: str) -> None:
    """A line on stderr, which may be closed."""
    with contextlib.suppress(OSError, ValueError):
        print(f"{program}: {printable(message)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def no_exit():
    """Code of one's own that calls sys.exit within a run has not finished it: that is a failure."""
    try:
        yield
    except SystemExit as e:
        place = traceback.extract_tb(e.__traceback__)[-1]
        raise UserError(f"sys.exit({e.code!r}) was called within the run ({Path(place.filename).name}, line "
                        f"{place.lineno}): return instead, or raise an error")


# Signals

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TOGETHER = 1.0  # seconds within which several signals are one: a terminal and a cluster may send two


class Interrupted(KeyboardInterrupt):
    """A program ends because of a signal; a shell knows it by its exit code, 128 + number. Number 0 is
    --stop-after, which is no failure."""

    def __init__(self, number: int, kept: str = ""):
        super().__init__()
        self.kept = kept  # what is not lost; empty: the program's own words
        self.code = 128 + number if number else 0


def interrupt(number: int, _frame=None) -> None:
    """The handler that ends a program where it is."""
    raise Interrupted(number)


@contextlib.contextmanager
def handled(handler: Callable):
    """Let `handler(number, frame)` answer the signals that end a program; one that is ignored stays so, as
    nohup wants it. Without effect outside the main thread, where Python has no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in ENDING:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


class AfterTheRound:
    """Answers the first signal with a line and a note, which the round loop reads when it has a state to
    keep. The second one ends the program where it is."""

    number = 0  # of the first signal; 0: none has come
    came = 0.0  # when

    def __call__(self, number: int, _frame=None) -> None:
        if self.number and time.monotonic() - self.came < TOGETHER:
            return
        if self.number:
            raise Interrupted(number)
        self.number, self.came = number, time.monotonic()
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # closed, or in mid-write
            print("\nstopping after this round, to keep it; once more: at once, and what was kept before is "
                  "kept", file=sys.stderr, flush=True)


@contextlib.contextmanager
def one_line_on_failure(program: str, kept: str = NOTHING_LOST):
    """Errors that are no fault of the program end it with one line on stderr and an exit code: 2 for bad
    usage, 1 for failures, 130 for Ctrl-C. `kept`: what is not lost."""
    try:
        with handled(interrupt):
            yield
    except (Exception, KeyboardInterrupt) as e:
        message, code = ending(e, kept)
        tell(program, message)
        sys.exit(code)


# Set when a program begins, before its libraries load


def show_uncaught(kind: type[BaseException], error: BaseException, trace) -> None:
    """Ctrl-C before a program has begun, and a library that is missing: one line, no traceback."""
    name = Path(sys.argv[0]).stem
    if issubclass(kind, KeyboardInterrupt):
        tell(name, "interrupted")
    elif issubclass(kind, ModuleNotFoundError):
        advice = "pip install it, or -r requirements.txt, in the environment of this Python"
        if error.name in ("fcntl", "resource"):  # parts of Python that Windows lacks
            advice = "this program runs on Linux and macOS; on Windows in WSL"
        elif error.name in ("flwr", "ray", "cryptography"):
            advice = "pip install -r requirements-deploy.txt, in the environment of this Python"
        tell(name, f"the library {error.name} is missing: {advice}")
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = show_uncaught
for name in ("stdout", "stderr"):
    if getattr(sys, name) is None:  # closed by the shell, as by `2>&-`
        setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
if isinstance(sys.stdout, io.TextIOWrapper):
    # A terminal may have no sign for what is printed, such as ± in ASCII.
    sys.stdout.reconfigure(errors="backslashreplace")
