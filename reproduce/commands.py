"""What the command lines have in common: the flags of whatever reads a run, and how they end."""

from __future__ import annotations

import argparse
import contextlib
import sys

from plumbing.errors import ending, patient_output, tell
from plumbing.settings import existing_folder


@contextlib.contextmanager
def one_line_on_stop(program: str, kept: str):
    """An error that is no fault of the program ends it with one line on stderr and an exit code: 2 for bad
    usage, 1 for failures, 130 for Ctrl-C. `kept`: what is not lost."""
    with patient_output():
        try:
            yield
        except (Exception, KeyboardInterrupt) as e:
            message, code = ending(e, kept)
            tell(program, message)
            sys.exit(code)


def about(doc: str | None) -> str:
    """What a module's docstring begins with; `python -OO` has none."""
    return (doc or "").split("\n\n")[0]


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a command that puts a run together again."""
    parser.add_argument("--which", default="best", choices=("best", "last"),
                        help="state of the run to use: best (validation round) or last [best]")
    parser.add_argument("--data", default="data", help="folder of the datasets and their cache [data]")
    parser.add_argument("--archives", type=existing_folder, default="",
                        help="folder with downloaded archives [none]")
    parser.add_argument("--any-code", action="store_true", help="also accept a run that other code has "
                                                                "trained")
