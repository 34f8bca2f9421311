"""Every setting as data: tests/settings.csv, of method, data set, variant and scale what a command resolves
to, and who says it. `python -m tests.settings_table` writes the table again; its diff is what a change moves.

A row holds for the methods and the data sets that it names. Only what differs stands there: at a smaller
scale from the paper's, of a variant from what is used without it, of that from the flag's default, whose row
has an asterisk instead of data sets.
"""

import argparse
import contextlib
import csv
import dataclasses
import io
import sys
from collections.abc import Iterator
from pathlib import Path

from plumbing.run.settings import Args
from tests.conftest import PROGRAMS, parsed

FILE = Path(__file__).parent / "settings.csv"
HEADS = ["methods", "flags", "scale", "setting", "value", "origin", "data sets"]
MACHINE = ("device", "precision", "dataset", "scale", "variant")
USUAL = ""  # no flags

Setting = tuple[str, str]  # value and origin, as text
Command = tuple[str, str, str, str]  # method, data set, flags, scale


def flags_of(method: str) -> list[str]:
    """The flags that choose whole tables of values: none, each variant, each learner."""
    choices = [USUAL]
    for f in dataclasses.fields(PROGRAMS[method].Args):
        if f.name in ("variant", "ssl"):
            choices += [f"--{f.name} {choice}" for choice in f.metadata["choices"] if choice != f.default]
    return choices


def commands(method: str) -> Iterator[Command]:
    for dataset in PROGRAMS[method].PAPER:
        for flags in flags_of(method):
            for scale in ("paper", "laptop", "smoke"):
                yield method, dataset, flags, scale


def resolved(command: Command) -> dict[str, Setting]:
    """What parsing this command line gives; nothing if it is refused."""
    method, dataset, flags, scale = command
    words = [*flags.split(), "--dataset", dataset, "--scale", scale, "--device", "cpu", "--precision", "fp32"]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            args = parsed(method, *words)
    except SystemExit:
        return {}
    return {name: (str(getattr(args, name)), origin.replace(f"{dataset}: ", "", 1))
            for name, origin in args.origins.items() if name not in MACHINE}


def default_of(f: dataclasses.Field) -> Setting:
    source = f.metadata["source"]
    return str(f.default), f"default: {source}" if source else "default"


def defaults(cls: type[Args]) -> dict[str, Setting]:
    return {f.name: default_of(f) for f in dataclasses.fields(cls) if f.name not in MACHINE}


def above(command: Command) -> Command | None:
    """The command from which this one's differences are told."""
    method, dataset, flags, scale = command
    if scale != "paper":
        return method, dataset, flags, "paper"
    if flags != USUAL:
        return method, dataset, USUAL, scale
    return None


def rows() -> list[list[str]]:
    """The table."""
    of_methods = {}  # row without methods and data sets: {method: data sets}
    for method in PROGRAMS:
        base = defaults(PROGRAMS[method].Args)
        for name, setting in base.items():
            of_methods.setdefault(("", "", name, *setting), {})[method] = ["*"]
        known = {command: resolved(command) for command in commands(method)}
        for command, values in known.items():
            _, dataset, flags, scale = command
            below = known.get(above(command)) or base
            differences = [(name, *setting) for name, setting in values.items() if setting != below[name]]
            if not values:
                differences = [("", "refused", "")]
            for difference in differences:
                of_method = of_methods.setdefault((flags, scale, *difference), {})
                of_method.setdefault(method, []).append(dataset)
    table = []
    for key, found in of_methods.items():
        of_datasets = {}
        for method, datasets in found.items():
            of_datasets.setdefault(" ".join(datasets), []).append(method.removeprefix("baselines."))
        table += [[" ".join(methods), *key, datasets] for datasets, methods in of_datasets.items()]
    return sorted(table, key=lambda row: (row[6] != "*", *row))


def main(argv: list[str] | None = None) -> None:
    argparse.ArgumentParser(prog="python -m tests.settings_table", description=__doc__).parse_args(argv)
    with open(FILE, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADS, *rows()])
    print(f"{FILE}: {len(FILE.read_text().splitlines())} lines", file=sys.stderr)


if __name__ == "__main__":
    main()
