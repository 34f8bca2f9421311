"""Runs and the records of finished runs: results/runs.jsonl, a line for each, only ever appended to.

A run is identified by its method and the arguments that decide its numbers, so that one which serves several
tables is run once. Of several records of a run the newest counts. Precision and kind of device are no part
of the run: records of each kind are kept apart, {"fp32", "cpu"} and so on.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from plumbing.run.errors import UserError
from plumbing.run.files import check_regular
from plumbing.run.results import check_result, id_of
from plumbing.run.runfolder import folder_of
from plumbing.run.settings import Args, flag_with, identity, violation
from reproduce.methods import ROOT, arguments, method, setting, short_name

READING = ("best", "last", "curve")  # what a record has twice if its run had --after-training
NOT_OF_SETTING = ("seed", "target", "lr")  # arguments in which the records of a setting differ
# Fields that a method's file no longer has, at the value that their absence stands for.
REMOVED = {"variant": "paper", "clients": 0, "domain_mix": 1.0, "drop": 0.0,
           "G": 2, "con_loss": "eq6", "dse_relu": True, "stem_padding": 2, "pad": True, "fc_identity": True,
           "norm": "squared", "kl_scale": False, "warmup": 0, "d_loss": "lsgan", "g_loss": "opposite",
           "order": "paper", "onehot_value": 1.0, "ga_unit": "model", "ga_vectors": "updates",
           "predictor": "local", "discard": "skip"}
# {method: {a field that its file got later: what its runs did before}}.
ADDED: dict[str, dict] = {
    "fdse": {"con_from": 0, "own_bias": False},
    "fedadg": {"slope": 0.01, "keep_momentum_d": False},
    "feddyn": {"evaluated": "theta"},
    "fedfa": {"statistics": "average"},
    "feddg_ga": {"step": "whole"},
}
TESTED_TRAINED = ("fdse", "official.fdse", "fedbn", "lgfedavg", "moon", "partialfed")  # had --evaluated once


@dataclass(frozen=True)
class Place:
    """Where runs find data, and leave their results."""

    data: str = "data"
    archives: str = ""
    record: str = "results/runs.jsonl"

    @property
    def flags(self) -> list[str]:
        """The folders of the data as flags of a run."""
        return ["--data", self.data, *(["--archives", self.archives] if self.archives else [])]


@dataclass
class PlannedRun:
    """A run that tables or claims ask for: a command."""

    module: str
    flags: tuple[str, ...]  # without the seed
    seed: int
    replace: bool = False  # what an earlier run has left in its output folder
    curve: bool = True  # with the test parts in every evaluation, for a curve; else where tables need them
    device: str = ""  # cpu or gpu, if a claim asks for it

    @property
    def args(self) -> Args:
        """What it stands for on any machine, of seed 0."""
        return setting(self.module, self.flags)

    @property
    def here(self) -> Args:
        """The same with the device and the precision of this machine."""
        return arguments(self.module, self.flags)

    @property
    def precision(self) -> str:
        """What its flags say; else this machine's choice."""
        return self.args.precision if "--precision" in self.flags else self.here.precision

    @property
    def work(self) -> str:
        return works_of(self.module, self.flags, True)

    @property
    def key(self) -> tuple[str, str, str, int, bool]:
        """What makes two runs the same."""
        return self.work, self.precision, self.device, self.seed, self.args.after_training

    @property
    def training(self) -> tuple[str, str, str, int]:
        """What makes one training serve two runs."""
        return works_of(self.module, self.flags, self.args.protocol != "lodo"), *self.key[1:4]

    @property
    def words(self) -> list[str]:
        """What stands behind `python`."""
        start = ["-m", self.module] if "." in self.module else [f"{self.module}.py"]
        tested = [] if self.curve else ["--test-rounds", "best"]
        anew = ["--no-resume"] if self.replace else []
        where = {"cpu": ["--device", "cpu"], "gpu": ["--device", "cuda"]}.get(self.device, [])
        return [*start, *self.flags, *where, "--seed", str(self.seed), *tested, *anew]

    @property
    def command(self) -> str:
        return shlex.join(["python", *self.words])


def by_training(runs: list[PlannedRun]) -> list[list[PlannedRun]]:
    """The runs that one training serves, together, in their order."""
    groups = {}
    for run in runs:
        groups.setdefault(run.training, []).append(run)
    return list(groups.values())


def folder_of_run(run: PlannedRun) -> Path:
    """The output folder of a run."""
    args = dataclasses.replace(run.here, seed=run.seed)
    return ROOT / folder_of(args, identity(args))


def cut_off(run: PlannedRun) -> bool:
    """Whether a run was begun and not finished."""
    path = folder_of_run(run)
    return (path / "checkpoint.pt").exists() and not (path / "result.json").exists()


def lacks_reading(run: PlannedRun) -> bool:
    """Whether a run asks for --after-training and its folder has one without, finished or cut off."""
    file = folder_of_run(run) / "settings.json"
    if not run.args.after_training or not file.exists():
        return False
    return not json.loads(file.read_bytes())["settings"].get("after_training", {}).get("value")


def known_arguments(record: dict) -> Args:
    """Recorded arguments as the method has them now. Missing fields get defaults; unknown fields are
    ignored."""
    cls, args = method(record["method"]).Args, record["args"]
    known = [f.name for f in dataclasses.fields(cls) if f.metadata["numbers"] and f.name in args]
    return cls(**{name: args[name] for name in known})


def work_of(name: str, args: Args, at_test: bool = True) -> str:
    """What runs compute, whatever the seed: the method and all arguments that decide numbers, except the
    device and the precision; without `at_test` except those too that act on a trained run's target alone."""
    values = {}
    for f in dataclasses.fields(args):
        left_out = f.name in ("seed", "device", "precision") or (f.metadata["at_test"] and not at_test)
        if f.metadata["numbers"] and not left_out:
            values[f.name] = getattr(args, f.name)
    return json.dumps([name, values], sort_keys=True)


@functools.cache
def works_of(module: str, flags: tuple[str, ...], at_test: bool) -> str:
    """What a command computes, whatever the seed."""
    return work_of(short_name(module), setting(module, flags), at_test)


def moved(record: dict) -> dict:
    """A record whose method's file has other fields since. New ones have what its run did. Removed ones are
    dropped at the value that the file still has; at another one the record is of official/."""
    if record["method"] in TESTED_TRAINED and "evaluated" in record["args"]:
        record = with_readings(record)
    name = record["method"]
    args = ADDED.get(name, {}) | record["args"]
    changed = {field for field in args.keys() & REMOVED.keys() if args[field] != REMOVED[field]}
    if changed - fields_of(name):
        name = f"official.{name}"
        args = REMOVED | args | {"method": name}
        if changed - fields_of(name):
            raise ValueError(f"{sorted(changed)} of an older version")
    known = fields_of(name)
    return record | {"method": name, "args": {field: args[field] for field in args if field in known}}


def fields_of(name: str) -> set[str]:
    """What a record of a method may have as arguments."""
    return {"method", *(f.name for f in dataclasses.fields(method(name).Args))}


def with_readings(record: dict) -> dict:
    """A record from before --after-training. `--evaluated trained` then tested the clients' own networks
    instead of what the server sends: such a record has the second reading, and of the first one nothing."""
    args = {name: value for name, value in record["args"].items() if name != "evaluated"}
    command = re.sub(" --evaluated (aggregated|trained)", "", record["command"])
    if record["args"]["evaluated"] == "aggregated":
        return record | {"args": args, "command": command}
    trained = {part: record[part] for part in READING}
    return record | {"args": args, "command": f"{command} --after-training", "after_training": trained,
                     **{part: {} for part in READING}}


def reading_of(record: dict, after_training: bool) -> dict:
    """A record whose best, last and curve are those of the networks right after local training, if these are
    asked for; else it as it is."""
    return record | record["after_training"] if after_training else record


def setting_of(name: str, args: Args, main_reading: bool = True) -> str:
    """What the runs of one setting share: a hash of method and arguments but seed, target and rate. Records
    without a reading of what the server sends are by themselves."""
    names = [f.name for f in dataclasses.fields(args) if f.metadata["numbers"]]
    values = {field: getattr(args, field) for field in names if field not in NOT_OF_SETTING}
    if not main_reading:
        values["reading"] = "after_training"
    return id_of(values | {"method": name})


class Records:
    """The newest record of each run of a JSONL file; lines that are none are named in `damaged` and count for
    nothing."""

    def __init__(self, path: Path):
        self.path = path
        self.every: list[dict] = []
        self.worked_on: set[tuple[str, str, str]] = set()  # method, dataset and scale of each record
        # {work: {(precision, cpu or gpu): {seed: the newest}}}; and those for a run with --after-training
        self.by_work: dict[str, dict[tuple[str, str], dict[int, dict]]] = {}
        self.trained: dict[str, dict[tuple[str, str], dict[int, dict]]] = {}
        self.damaged: list[str] = []
        check_regular(path)
        content = path.read_bytes() if path.exists() else b""
        for number, line in enumerate(content.splitlines(), 1):
            try:
                if line.strip():
                    self.add(line)
            except (UserError, ValueError, AttributeError, TypeError, KeyError, RecursionError) as e:
                self.damaged.append(f"{path}, line {number} is skipped: {str(e)[:80]}")

    def add(self, line: bytes) -> None:
        """Take up a line; an error if it is no record."""
        record = json.loads(line, parse_constant=check_number)
        check_result(record)
        record = moved(record)
        record.setdefault("content", "")  # the digest of its images, which the oldest records lack
        record["commit"] = record["commit"] or "unknown"  # of a copy without git
        name, known = record["method"], known_arguments(record)
        record["setting"] = setting_of(name, known, bool(record["curve"]))
        for f in dataclasses.fields(known):
            limits = violation(getattr(known, f.name), f.metadata)
            if limits:
                raise ValueError(f"{f.name} is {getattr(known, f.name)}, expected {limits}")
        work, kind, seed = work_of(name, known), kind_of(record), record["args"]["seed"]
        for by_work, part in ((self.by_work, "curve"), (self.trained, "after_training")):
            if record.get(part):  # a record answers for the readings that it has
                by_seed = by_work.setdefault(work, {}).setdefault(kind, {})
                if seed not in by_seed or by_seed[seed]["finished"] <= record["finished"]:
                    by_seed[seed] = record
        self.every.append(record)
        self.worked_on.add((name, known.dataset, known.scale))

    @property
    def newest(self) -> list[dict]:
        """That of each run, with a reading of what the server sends."""
        of_kinds = [by_seed for of_work in self.by_work.values() for by_seed in of_work.values()]
        return [record for by_seed in of_kinds for record in by_seed.values()]

    def of_work(self, run: PlannedRun) -> dict[tuple[str, str], dict[int, dict]]:
        """{(precision, cpu or gpu): {seed: record}} of what a run computes, with the reading that it asks
        for."""
        by_work = self.trained if run.args.after_training else self.by_work
        return by_work.get(run.work, {})

    def has(self, run: PlannedRun) -> bool:
        """Whether a run has a record, be it without the whole curve."""
        return any(run.seed in by_seed for by_seed in self.kinds(run, with_gaps=True).values())

    def get(self, run: PlannedRun) -> dict | None:
        """The newest record of a run, with its whole curve if that is needed."""
        records = [by_seed[run.seed] for by_seed in self.kinds(run).values() if run.seed in by_seed]
        return max(records, key=lambda record: record["finished"], default=None)

    def of(self, run: PlannedRun, precision: str, device: str) -> dict[int, dict]:
        """{seed: record} of what a run computes, of one precision and one kind of device."""
        return dict(sorted(self.of_work(run).get((precision, device), {}).items()))

    def kinds(self, run: PlannedRun, with_gaps: bool = False) -> dict[tuple[str, str], dict[int, dict]]:
        """{(precision, cpu or gpu): {seed: record}} of what a run computes: of its precision and its device
        where it states them, else of all."""
        chosen, trained = {}, run.args.after_training
        for (precision, device), by_seed in sorted(self.of_work(run).items()):
            states_another = "--precision" in run.flags and precision != run.args.precision
            if states_another or run.device not in ("", device):
                continue
            whole = {}
            for seed, record in sorted(by_seed.items()):
                if with_gaps or not (run.curve and has_gaps(reading_of(record, trained))):
                    whole[seed] = record
            chosen[precision, device] = whole
        return chosen


def kind_of(record: dict) -> tuple[str, str]:
    """Precision and kind of device of a record: records of two kinds are never pooled."""
    return record["args"]["precision"], "gpu" if record["hardware"].get("gpu") else "cpu"


def check_number(text: str) -> None:
    raise ValueError(f"{text} is no finite number")


def command_of(record: dict) -> str:
    """The command that gives a record's bytes: the recorded one without the file of its records, with its
    precision and threads, and with the values that were defaults then and are not now."""
    module = method(record["method"]).__name__
    start = ["python", "-m", module] if "." in module else ["python", f"{module}.py"]
    flags = shlex.split(re.sub(r" --record[ =]\S+", "", record["command"]))[len(start):]
    try:
        now = setting(module, tuple(flags))
    except UserError:  # a flag that its file no longer has
        flags, now = [], None
    words = shlex.join([*start, *flags, *flags_of(record, now)])
    for flag, part in (("precision", "args"), ("threads", "hardware")):
        if f"--{flag}" not in words and flag in record[part]:
            words += f" --{flag} {record[part][flag]}"
    return words


def flags_of(record: dict, known: Args | None = None) -> list[str]:
    """A record's arguments as flags; with `known` those alone that differ there, without the machine's.
    A file of one's own is without its digest."""
    args, every = record["args"], dataclasses.fields(method(record["method"]).Args)
    names = [f.name for f in every if f.metadata["numbers"] and f.name in args]
    if known:
        names = [n for n in names if n not in ("device", "precision") and getattr(known, n) != args[n]]
    return [re.sub(" [0-9a-f]{12,16}$", "", word) for name in names for word in flag_with(name, args[name])]


def has_gaps(record: dict) -> bool:
    """Whether the curve of a record lacks rounds, as with --test-rounds best."""
    curve, evaluated = record["curve"], math.ceil(record["args"]["rounds"] / record["args"]["eval_every"])
    return len(curve["round"]) < evaluated or None in curve.get("ALL", [])
