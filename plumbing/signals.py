"""Signals that end a program: Ctrl-C, SIGTERM (Slurm, systemd, kill) and SIGHUP (a terminal that closes)."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TOGETHER = 1.0  # seconds within which several signals are one: a terminal and a cluster may send two


class Interrupted(KeyboardInterrupt):
    """A program ends because of a signal; a shell knows it by its exit code, 128 + number."""

    def __init__(self, number: int, kept: str = ""):
        super().__init__()
        self.number = number
        self.kept = kept  # what is not lost; empty: the program's own words

    @property
    def code(self) -> int:
        return 128 + self.number


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


def leave_to_the_system() -> None:
    """From now on a signal ends the program at once, wherever it is, without a line."""
    for number in ENDING:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, signal.SIG_DFL)


class AfterTheRound:
    """Answers the first signal with a line and a note, which the round loop reads when it has a state to
    keep; the second one ends the program where it is. One of several processes may wait for the others in
    code that is not Python's: there the second one is left to the system."""

    def __init__(self, says: str, several: bool):
        self.says = says  # the line; empty: none
        self.several = several  # whether there are other processes
        self.number = 0  # of the first signal; 0: none has come
        self.came = 0.0  # when

    def __call__(self, number: int, _frame=None) -> None:
        if self.number and time.monotonic() - self.came < TOGETHER:
            return
        if self.number:
            raise Interrupted(number)
        self.number, self.came = number, time.monotonic()
        if self.several:
            leave_to_the_system()
        if self.says:
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # closed, or in the midst of a write
                print(f"\n{self.says}", file=sys.stderr, flush=True)
