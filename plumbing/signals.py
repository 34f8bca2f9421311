"""Signals that end a program: Ctrl-C, SIGTERM (Slurm, systemd, kill) and SIGHUP (a terminal that closes)."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    """Let `handler(number, frame)` answer the signals that end a program. Without effect outside the main
    thread, where Python has no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in ENDING}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


class AfterTheRound:
    """Answers the first signal with a line and a note, which the round loop reads when it has a state to
    keep; the second one ends the program where it is."""

    def __init__(self, says: str):
        self.says = says  # the line; empty: none
        self.number = 0  # of the first signal; 0: none has come

    def __call__(self, number: int, _frame=None) -> None:
        if self.number:
            raise Interrupted(number)
        self.number = number
        if self.says:
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # closed, or in the midst of a write
                print(f"\n{self.says}", file=sys.stderr, flush=True)
