"""What the command lines have in common: the flags of whatever reads a run."""

from __future__ import annotations

import argparse

from plumbing.run.settings import existing_folder


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
