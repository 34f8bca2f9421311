"""Runs and the records of finished runs: results/runs.jsonl, a line for each, only ever appended to.

A run is known by its method and the arguments that decide its numbers, so that one which serves several
tables is run once. Of several records of a run the newest counts. One that was computed by other sources than
the method's file and its imports of now is stale; one that does not say by which is by unknown code and as
stale, and its commit is that of the end of its run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plumbing.errors import Stop
from plumbing.runfolder import code_of
from plumbing.settings import SCALES, Args
from plumbing.sources import equivalent_to, hash_of
from reproduce.methods import method, short_name

SCHEMA = {"id": str, "method": str, "args": dict, "command": str, "best": dict, "last": dict, "curve": dict,
          "seconds": dict, "bytes": dict, "finished": str, "versions": dict, "hardware": dict}
NUMBERS = ("best", "last", "curve", "logs", "seconds", "bytes")  # the parts that are numbers throughout
SHARES = ("best", "last")  # those of them whose numbers are accuracies
GAPS = ("curve", "logs")  # those of them that may have gaps
NEEDED = ("dataset", "scale", "seed", "rounds")  # arguments that every record has; others may be younger
UNKNOWN = "unknown"  # in the place of sources
BUSY = 0.5  # processes beside a run with which it is no longer alone on its machine


@dataclass(frozen=True)
class Place:
    """Where runs find data, compute, and leave their results."""

    data: str = "data"
    archives: str = ""
    record: str = "results/runs.jsonl"
    device: str = ""  # of their --device; empty: their own choice


@dataclass(frozen=True)
class Run:
    """A command and the arguments that it stands for."""

    module: str
    flags: tuple[str, ...]  # without the seed
    seed: int
    work: str  # see work_of
    precision: str
    anew: bool = False  # again, though there is a stale record of it
    replace: bool = False  # and its output folder, which other code has filled
    curve: bool = True  # with the test parts in every evaluation, for a curve; else where tables need them
    training: str = ""  # as work, without the flags that act at test time alone

    @property
    def key(self) -> str:
        """What makes two runs the same."""
        return f"{self.work} {self.precision}"

    @property
    def words(self) -> list[str]:
        """What stands behind `python`."""
        start = ["-m", self.module] if "." in self.module else [f"{self.module}.py"]
        again = ["--no-resume"] if self.replace else []
        tested = [] if self.curve else ["--test-rounds", "best"]
        return [*start, *self.flags, "--seed", str(self.seed), *tested, *again]

    @property
    def command(self) -> str:
        return shlex.join(["python", *self.words])


def by_training(runs: list[Run]) -> list[list[Run]]:
    """The runs that one training serves, together, in their order."""
    groups = {}
    for run in runs:
        groups.setdefault((run.training or run.key, run.precision), []).append(run)
    return list(groups.values())


def work_of(name: str, cls: type[Args], args: dict, at_test: bool = True) -> str:
    """What a run computes: the method and all arguments that decide numbers, except the device and the
    precision; without `at_test` except those too that act on a trained run's target alone.

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
        left_out = f.name in ("device", "precision") or (f.metadata["at_test"] and not at_test)
        if f.metadata["numbers"] and not left_out:
            values[f.name] = getattr(whole, f.name)
    return json.dumps([name, values], sort_keys=True)


class Records:
    """The newest record of each run of a JSONL file; lines that are none are named in `damaged` and count for
    nothing.

    Beside it, reach.jsonl has what was measured of the runs' folders for FedCiR's Table 3.
    """

    def __init__(self, path: Path):
        self.path = path
        self.by_key: dict[str, dict] = {}
        self.by_work: dict[str, dict[str, dict]] = {}  # {work: {precision: record}}
        self.same: dict[str, set[str]] = {}  # of each method the sources that give the numbers of now
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
        work, precision = work_of(name, method(name).Args, args), args.get("precision", UNKNOWN)
        key = f"{work} {precision}"
        if key not in self.by_key or self.by_key[key]["finished"] <= record["finished"]:
            self.by_key[key] = record
            self.by_work.setdefault(work, {})[precision] = record
        self.seeds.setdefault((name, args["dataset"], args["scale"]), set()).add(args["seed"])
        self.count += 1

    def get(self, run: Run) -> dict | None:
        """The newest record of a run, with its whole curve if that is needed; of one that is to be made anew
        only if it is not stale."""
        record = self.by_key.get(run.key)
        if record and run.curve and has_gaps(record):
            return None
        if record and run.anew and self.stale(record):
            return None
        return record

    def by_precision(self, run: Run) -> dict[str, dict]:
        """{precision: record} of what a run computes: all, or that of its --precision."""
        found = self.by_work.get(run.work, {})
        if run.curve:
            found = {name: record for name, record in found.items() if not has_gaps(record)}
        if "--precision" in run.flags:
            return {name: record for name, record in found.items() if name == run.precision}
        return found

    def stale(self, record: dict) -> bool:
        """Whether other code computed it, or a part of it, than that of now."""
        name = record["method"]
        if name not in self.same:
            self.same[name] = equivalent_to(hash_of(Path(method(name).__file__).resolve()))
        return not set(sources_of(record)) <= self.same[name]

    def reach_of(self, record: dict) -> dict[str, float] | None:
        """What reach.jsonl has of a record; None if it was not measured."""
        return self.reach.get((record["id"], " ".join(sources_of(record))))

    def seeds_of(self, module: str, dataset: str, scale: str) -> set[int]:
        """The seeds of which a method has records, so that nothing else is looked for."""
        return self.seeds.get((short_name(module), dataset, scale), set())


def sources_of(record: dict) -> list[str]:
    """The sources that computed a record, one for each start of its run."""
    found = [part["sources"] for part in record.get("code", [])]
    return found or [record.get("sources", UNKNOWN)]


def committed(record: dict) -> bool:
    """Whether its commit is known and was without changes."""
    return bool(record.get("commit")) and record.get("uncommitted_changes") is False


def alone(record: dict) -> bool:
    """Whether its run had the machine to itself, so that its times are worth a comparison: at each start and
    at the end no more processes wanted a core than it has threads, and no other run shared its GPU. One
    without a training of its own has no times."""
    if "trained_by" in record:
        return False
    threads = record["hardware"].get("threads", 0)
    parts = [record["hardware"], *record.get("code", [])]
    if any(part.get("runs_on_gpu", 1) != 1 for part in parts):
        return False
    loads = [part.get("load") for part in parts]
    return all(type(load) in (int, float) and load <= threads + BUSY for load in loads)


def command_of(record: dict) -> str:
    """The command that gives a record's bytes: with its precision and its threads, without the file of its
    records."""
    words = re.sub(r" --record[ =]\S+", "", record["command"])
    args, hardware = record["args"], record["hardware"]
    if "--precision" not in words and "precision" in args:
        words += f" --precision {args['precision']}"
    if "--threads" not in words and "threads" in hardware:
        words += f" --threads {hardware['threads']}"
    return words


def read_reach(path: Path) -> dict[tuple[str, str], dict[str, float]]:
    """{(id of a run, its sources): what a client spends until the accuracy is reached}; damaged lines are
    left out."""
    reach = {}
    for _, line in lines_of(path):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            measured = json.loads(line)
            spent = {name: float(value) for name, value in measured["reach"].items()}
            reach[measured["id"], measured["sources"]] = spent
    return reach


def lines_of(path: Path) -> list[tuple[int, bytes]]:
    """(number, line) of what is not empty; nothing if there is no file."""
    if not path.exists():
        return []
    lines = enumerate(path.read_bytes().split(b"\n"), 1)
    return [(number, line) for number, line in lines if line.strip()]


def has_gaps(record: dict) -> bool:
    """Whether the curve of a record lacks rounds, as with --test-rounds best."""
    args, curve = record["args"], record["curve"]
    evaluated = math.ceil(args["rounds"] / args.get("eval_every", 1))
    return 0 < len(curve.get("round", [])) < evaluated or None in curve.get("ALL", [])


def check_record(record: dict) -> None:
    """ValueError unless it has what a run records: fields and arguments of their types, and finite
    numbers."""
    for name, kind in SCHEMA.items():
        if not isinstance(record.get(name), kind):
            raise ValueError(f"{name} is missing or of another type")
    check_arguments(method(record["method"]).Args, record["args"])
    code_of(record.get("code", []))
    for name in ("sources", "commit"):
        if not isinstance(record.get(name), str | None):
            raise ValueError(f"{name} is {record[name]!r}")
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
