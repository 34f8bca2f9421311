"""Runs and the records of finished runs: results/runs.jsonl, a line for each, only ever appended to.

A run is known by its method and the arguments that decide its numbers, so that one which serves several
tables is run once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plumbing.errors import Stop
from plumbing.settings import SCALES, Args
from reproduce.methods import method, short_name

SCHEMA = {"id": str, "method": str, "args": dict, "command": str, "best": dict, "last": dict, "curve": dict,
          "seconds": dict, "bytes": dict, "finished": str, "versions": dict, "hardware": dict}
NUMBERS = ("best", "last", "curve", "logs", "seconds", "bytes")  # the parts that are numbers throughout
SHARES = ("best", "last")  # those of them whose numbers are accuracies
GAPS = ("curve", "logs")  # those of them that may have gaps
NEEDED = ("dataset", "scale", "seed", "rounds")  # arguments that every record has; others may be younger
HARDWARE = ("device", "precision")  # arguments that choose how, not what, is computed


@dataclass(frozen=True)
class Place:
    """Where runs find data and leave their results."""

    data: str = "data"
    archives: str = ""
    record: str = "results/runs.jsonl"


@dataclass(frozen=True)
class Run:
    """A command and the arguments that it stands for."""

    module: str
    flags: tuple[str, ...]  # without the seed
    seed: int
    key: str  # see key_of

    @property
    def words(self) -> list[str]:
        """What stands behind `python`."""
        start = ["-m", self.module] if "." in self.module else [f"{self.module}.py"]
        return [*start, *self.flags, "--seed", str(self.seed)]

    @property
    def command(self) -> str:
        return shlex.join(["python", *self.words])


def key_of(name: str, cls: type[Args], args: dict) -> str:
    """What makes two runs the same: the method and all arguments that decide numbers, except the hardware's.

    `args` is a run's identity. A field that an older record lacks has its default, one that `cls` lacks does
    not count, and a value that `cls` derives from others is the derived one, also where an older record has
    what stood for it.
    """
    known = {}
    for f in dataclasses.fields(cls):
        if f.metadata["numbers"] and f.name in args:
            known[f.name] = args[f.name]
    whole = cls(**known)
    values = {}
    for f in dataclasses.fields(cls):
        if f.metadata["numbers"] and f.name not in HARDWARE:
            values[f.name] = getattr(whole, f.name)
    return json.dumps([name, values], sort_keys=True)


class Records:
    """The finished runs of a JSONL file by their key; lines that are none are named in `damaged` and count
    for nothing.

    Beside it, reach.jsonl has what was measured of the runs' folders for FedCiR's Table 3.
    """

    def __init__(self, path: Path):
        self.path = path
        self.by_key: dict[str, dict] = {}
        self.seeds: dict[tuple[str, str, str], set[int]] = {}  # of (method, dataset, scale)
        self.count = 0
        self.damaged: list[str] = []
        for number, line in lines_of(path):
            try:
                self.add(line)
            except (Stop, ValueError, AttributeError, TypeError, KeyError, RecursionError) as e:
                self.damaged.append(f"{path}, line {number} is skipped: {str(e)[:80]}")
        self.reach = read_reach(path.with_name("reach.jsonl"))

    def add(self, line: bytes) -> None:
        """Take up a line; an error if it is no record."""
        record = json.loads(line)
        check_record(record)
        name, args = record["method"], record["args"]
        key = key_of(name, method(name).Args, args)
        self.by_key.setdefault(key, record)
        self.seeds.setdefault((name, args["dataset"], args["scale"]), set()).add(args["seed"])
        self.count += 1

    def get(self, run: Run) -> dict | None:
        return self.by_key.get(run.key)

    def seeds_of(self, module: str, dataset: str, scale: str) -> set[int]:
        """The seeds of which a method has records, so that nothing else is looked for."""
        return self.seeds.get((short_name(module), dataset, scale), set())


def read_reach(path: Path) -> dict[str, dict[str, float]]:
    """{id of a run: what a client spends until the accuracy is reached}; damaged lines are left out."""
    reach = {}
    for _, line in lines_of(path):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            measured = json.loads(line)
            reach[measured["id"]] = {name: float(value) for name, value in measured["reach"].items()}
    return reach


def lines_of(path: Path) -> list[tuple[int, bytes]]:
    """(number, line) of what is not empty; nothing if there is no file."""
    if not path.exists():
        return []
    lines = enumerate(path.read_bytes().split(b"\n"), 1)
    return [(number, line) for number, line in lines if line.strip()]


def check_record(record: dict) -> None:
    """ValueError unless it has what a run records: fields and arguments of their types, and finite
    numbers."""
    for name, kind in SCHEMA.items():
        if not isinstance(record.get(name), kind):
            raise ValueError(f"{name} is missing or of another type")
    check_arguments(method(record["method"]).Args, record["args"])
    for part in NUMBERS:
        for path, value in leaves(record.get(part, {})):
            check_number(part, path, value)


def check_arguments(cls: type[Args], args: dict) -> None:
    """ValueError if a recorded argument is of another type or one that every record has is missing."""
    for f in dataclasses.fields(cls):
        if f.name not in args:
            if f.name in NEEDED:
                raise ValueError(f"the argument {f.name} is missing")
            continue
        value, kind = args[f.name], type(f.default)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"the argument {f.name} is {value!r}")
    if args["scale"] not in SCALES:
        raise ValueError(f"the scale is {args['scale']!r}")


def check_number(part: str, path: str, value) -> None:
    """ValueError if a value in this part of a record is not finite, or no share where it is an accuracy."""
    if value is None and part in GAPS:
        return
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{part}/{path} is {value!r}")
    if part in SHARES and path != "round" and not 0 <= value <= 1:
        raise ValueError(f"{part}/{path} is {value!r}, no share")


def leaves(value, path: str = "") -> Iterator[tuple[str, object]]:
    """(path, value) of everything in dictionaries and lists that is neither."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        yield path, value
        return
    for name, inner in items:
        yield from leaves(inner, f"{path}/{name}".lstrip("/"))
