"""The papers' claims: what each says, under which readings it is measured here, and what the runs say.

A claim (claims/<paper>.toml) is a contrast of two rows of a published table. A paper leaves settings open, so
a contrast is measured under several readings, each a set of flags with its reason. They stand in the order of
their nearness to the text, whatever they give; some were added when results of others were known.
"""

from __future__ import annotations

import itertools
import math
import shlex
import statistics
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path

from plumbing.errors import Stop
from plumbing.files import refuse_special
from reproduce.cells import found_at, run_with
from reproduce.methods import ROOT, arguments
from reproduce.records import Records, Run
from reproduce.statistics import LEVEL, BySeed, Paired, mean, means_over_columns, paired
from reproduce.tables import PAPERS, Block, Table

import numpy as np

LAST_FIFTH = 0.8  # of the rounds: from here on a curve is looked at
STILL_RISING = 1.0  # points over the last fifth


@dataclass(frozen=True)
class Method:
    """A row of a contrast: a method's file and its flags."""

    module: str
    flags: str = ""
    start: bool = False  # what its runs had before their first step


@dataclass(frozen=True)
class Reading:
    """Settings under which a contrast is measured, all as flags, and why they are a reading of the paper."""

    name: str
    why: str
    dataset: str
    flags: str = ""
    methods: dict[str, str] = field(default_factory=dict)  # {method: more flags}
    cases: list[str] = field(default_factory=list)  # the flags of each target, in the place of the claim's
    metric: str = ""  # in the place of the claim's
    other_data: str = ""  # what stands in the place of the paper's data or scale; empty: the paper's own


@dataclass(frozen=True)
class Claim:
    """A contrast that a paper prints: method `a` minus method `b`, mean over columns of a table."""

    id: str
    says: str
    quotation: str
    place: str  # section or table
    table: str  # id, of the published numbers
    dataset: str  # of the published numbers
    columns: list[str]
    rows: list[str]  # names of the published rows: a, b
    methods: list[str]  # of the file: a, b
    metric: str  # path in a record, such as last/target
    cases: list[str] = field(default_factory=lambda: [""])  # flags of each target: their mean is taken
    control: str = ""  # a method: a's network without what the claim is about
    readings: list[str] = field(default_factory=list)  # names, nearest to the text first; empty: all
    setting: str = ""  # of the published rows, where they have several

    @property
    def names(self) -> list[str]:
        """Of its methods, the control last."""
        return [name for name in dict.fromkeys([*self.methods, self.control]) if name]


@dataclass
class Paper:
    """The claims of a paper, its methods and readings, and what decides them, as templates."""

    id: str
    methods: dict[str, Method]
    readings: dict[str, Reading]
    claims: list[Claim]
    idea: str
    decides: list[str]
    tables: list[str]  # ids of those with the numbers behind


@dataclass
class Measured:
    """A claim under a reading: the gain by seed, and what it says."""

    claim: Claim
    reading: Reading
    runs: dict[str, list[Run]]  # of each method, of seed 0: one for each case
    cases: dict[str, list[dict[int, dict]]]  # of each method {seed: record} of each case
    values: dict[str, BySeed]  # of each method, mean over the cases
    records: list[dict]
    rises: dict[str, float | None]  # of a and b over the last fifth of the rounds; None: no curve
    differs_now: bool

    @property
    def metric(self) -> str:
        return self.reading.metric or self.claim.metric

    def gain(self, level: float = LEVEL, over: str = "") -> Paired | None:
        """a minus b, or minus another method, with an interval at 1 - level; None with fewer than three
        seeds."""
        a, b = self.claim.methods
        return paired(self.values[a], self.values[over or b], level)

    @property
    def gains(self) -> BySeed:
        """a minus b for each seed that both have."""
        a, b = (self.values[name] for name in self.claim.methods)
        return {seed: a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())}

    @property
    def difference(self) -> float | None:
        """The mean gain over the seeds that there are, also of one; None without any."""
        return mean(self.gains)

    @property
    def seeds(self) -> int:
        return len(self.gains)

    @property
    def rise(self) -> float | None:
        """The larger of the two."""
        return None if None in self.rises.values() else max(self.rises.values(), default=None)

    @property
    def still_rising(self) -> bool:
        return self.rise is not None and self.rise > STILL_RISING


@dataclass
class Judged:
    """A claim with all its readings, and the verdict of the one that counts."""

    claim: Claim
    paper: str
    printed: float
    deviation: float | None  # of the printed gain
    measured: list[Measured]
    level: float = LEVEL  # of an interval, so that those of all tested claims hold together

    @property
    def counting(self) -> Measured | None:
        """Of the readings with three seeds and curves at their end the nearest to the text; None without
        one."""
        for one in self.measured:
            if one.seeds > 2 and one.rise is not None and not one.still_rising:
                return one
        return None

    @property
    def shown(self) -> Measured:
        """The reading that counts; without one the nearest to the text that has runs, else the text's."""
        with_runs = [one for one in self.measured if one.seeds]
        return self.counting or next(iter(sorted(with_runs, key=lambda one: one.seeds < 3)), self.measured[0])

    @property
    def verdict(self) -> str:
        return verdict_of(self, self.shown)


VERDICTS = {  # what each says, and its colour
    "holds": ("the gain is above 0 and reaches the printed one", "#1b7837"),
    "holds, smaller": ("the gain is above 0 and below the printed one", "#7fbf7b"),
    "not found": ("0 is in the interval, the printed gain is above it", "#d6604d"),
    "cannot tell": ("0 and the printed gain are both in the interval", "#f0c75e"),
    "reverse": ("the gain is below 0", "#8e0152"),
    "not converged": (f"a curve still rises by over {STILL_RISING:g} point in its last fifth", "#a0a0a0"),
    "no curve": ("too few evaluations to see whether a curve still rises", "#74add1"),
    "too few seeds": ("fewer than three", "#c8c8c8"),
    "not measured": ("no run", "#ffffff"),
}


def verdict(low: float, high: float, printed: float) -> str:
    """What an interval of a gain says of the printed one, which is above 0."""
    if high < 0:
        return "reverse"
    if low > 0:
        return "holds" if high >= printed else "holds, smaller"
    return "cannot tell" if high >= printed else "not found"


def verdict_of(judged: Judged, one: Measured, level: float | None = None) -> str:
    """Of a claim under a reading, at the claim's level or another one."""
    if not one.seeds:
        return "not measured"
    if one.seeds < 3:
        return "too few seeds"
    if one.rise is None:
        return "no curve"
    if one.still_rising:
        return "not converged"
    return verdict(*one.gain(level or judged.level).interval, judged.printed)


# Reading


def read_claims(folder: Path = ROOT / "claims") -> list[Paper]:
    """All papers' claims, in the papers' order. Stop, with the file's name, if one has none."""
    papers = []
    for name in PAPERS:
        path = folder / f"{name}.toml"
        try:
            if path.exists():
                papers.append(read_paper(name, tomllib.loads(refuse_special(path).read_text())))
        except (KeyError, TypeError, ValueError) as e:
            raise Stop(f"{path} has no claims ({type(e).__name__}: {e})", 2)
    return papers


def read_paper(name: str, content: dict) -> Paper:
    """The claims of a file's content; KeyError, TypeError or ValueError say what is wrong with it."""
    methods = {key: Method(**of) for key, of in content["methods"].items()}
    readings = {of["name"]: Reading(**of) for of in content["readings"]}
    claims = []
    for of in content["claims"]:
        claim = Claim(**of)
        if set(claim.names) - methods.keys() or set(claim.readings) - readings.keys():
            raise ValueError(f"{claim.id} names a method or a reading that the file does not have")
        claims.append(replace(claim, readings=claim.readings or list(readings)))
    return Paper(name, methods, readings, claims, content["idea"], content["decides"],
                 content["tables"])


def printed_gain(claim: Claim, tables: dict[str, Table]) -> tuple[float, float | None]:
    """The published gain, and its deviation where every number has one; the numbers count as independent."""
    gains, variances = [], []
    blocks = tables[claim.table].blocks
    blocks = [block for block in blocks if block.dataset == claim.dataset and not block.ours]
    for name in claim.columns:
        one, other = (published(blocks, row, claim.setting, name) for row in claim.rows)
        gains.append(one[0] - other[0])
        if len(one) == len(other) == 2:
            variances.append(one[1] ** 2 + other[1] ** 2)
    deviation = math.sqrt(sum(variances)) / len(gains) if len(variances) == len(gains) else None
    return statistics.mean(gains), deviation


def published(blocks: list[Block], method: str, setting: str, column: str) -> list[float]:
    """[mean, deviation] or [mean] of a row in one of these blocks; ValueError unless there is one."""
    found = []
    for block in blocks:
        names = [of.name for of in block.columns]
        for row in block.rows:
            if row.method == method and column in names and setting in ("", row.published_setting):
                found.append([float(number) for number in row.published[names.index(column)]])
    if len(found) != 1 or not found[0]:
        raise ValueError(f"{method}, {column}: {len(found)} published numbers, where a claim needs one")
    return found[0]


# Measuring


def measure(paper: Paper, claim: Claim, reading: Reading, records: Records) -> Measured:
    """What the records have of a claim under a reading, at the precision with the most seeds, or newest."""
    every = [measure_at(paper, claim, reading, records, of) for of in ("fp32", "tf32", "bf16")]
    return max(every, key=lambda one: (one.seeds, max((of["finished"] for of in one.records), default="")))


def measure_at(paper: Paper, claim: Claim, reading: Reading, records: Records, precision: str) -> Measured:
    """The same of the records of one precision."""
    metric = reading.metric or claim.metric
    runs, cases, values, found, rises = {}, {}, {}, [], {}
    for name in claim.names:
        start = paper.methods[name].start
        runs[name] = runs_of(paper, claim, reading, name, 0)
        cases[name] = [recorded(run, records, precision) for run in runs[name]]
        values[name] = means_over_columns([accuracies(of, metric, start) for of in cases[name]])
        used = [record for of in cases[name] for seed, record in of.items() if seed in values[name]]
        found += used
        if name in claim.methods and not start:
            rises[name] = rise_of(used, metric)
    return Measured(claim, reading, runs, cases, values, found, rises, any(map(records.differs, found)))


def runs_of(paper: Paper, claim: Claim, reading: Reading, name: str, seed: int) -> list[Run]:
    """The runs of a method under a reading, one for each case."""
    method = paper.methods[name]
    words = f"--dataset {reading.dataset} {method.flags} {reading.flags} {reading.methods.get(name, '')}"
    cases = reading.cases or claim.cases
    return [run_with(method.module, shlex.split(f"{words} {case}"), seed) for case in cases]


def recorded(run: Run, records: Records, precision: str) -> dict[int, dict]:
    """{seed: record} of a run at a precision, with all seeds that there are."""
    args = arguments(run.module, run.flags)
    seeds = sorted(records.seeds_of(run.module, args.dataset, args.scale))
    runs = [replace(run_with(run.module, list(run.flags), seed), curve=False) for seed in seeds]
    found = [(run.seed, records.by_precision(run)) for run in runs]
    return {seed: at[precision] for seed, at in found if precision in at}


def accuracies(of_seed: dict[int, dict], metric: str, start: bool) -> BySeed:
    """{seed: percent} at a path in the records."""
    values = {}
    for seed, record in of_seed.items():
        path = metric.replace("TARGET", record["args"]["target"])
        value = found_at(record, f"start/{path.partition('/')[2]}" if start else path)
        if value is not None:
            values[seed] = value
    return values


def rise_of(records: list[dict], metric: str) -> float | None:
    """By how many points the curve rises over the last fifth of the rounds, mean over runs: the slope of a
    straight line through the evaluations there. None with fewer than three evaluations in one."""
    rises = []
    for record in records:
        points = last_fifth(record, metric)
        if len(points) < 3:
            return None
        rounds, values = zip(*points)
        slope = np.polyfit(rounds, values, 1)[0]
        rises.append(slope * (1 - LAST_FIFTH) * record["args"]["rounds"])
    return statistics.mean(rises) if rises else None


def last_fifth(record: dict, metric: str) -> list[tuple[int, float]]:
    """[(round, percent)] of a record's evaluations in the last fifth of its rounds; the last three of all
    where these are fewer."""
    of, first = record["curve"], LAST_FIFTH * record["args"]["rounds"]
    values = of.get(curve_name(record, metric), [])
    points = [(t, 100 * value) for t, value in zip(of["round"], values) if value is not None]
    inside = [point for point in points if point[0] >= first]
    return inside if len(inside) > 2 else points[-3:]


def curve_name(record: dict, metric: str) -> str:
    """The name of a metric's curve: target of last/target, "m0 0.1" of last/linear/m0/0.1."""
    parts = metric.replace("TARGET", record["args"]["target"]).split("/")
    return " ".join(parts[2:]) if parts[1] == "linear" else parts[1]


def judge_all(papers: list[Paper], tables: list[Table], records: Records) -> list[Judged]:
    """Every claim with its readings. The intervals are so wide that all that can be tested hold together."""
    by_id, every = {table.id: table for table in tables}, []
    for paper in papers:
        for claim in paper.claims:
            measured = [measure(paper, claim, paper.readings[name], records) for name in claim.readings]
            every.append(Judged(claim, paper.id, *printed_gain(claim, by_id), measured))
    tested = sum(one.counting is not None for one in every)
    for one in every:
        one.level = LEVEL / max(tested, 1)
    return every


def runs_for(papers: list[Paper], wanted: set[str], seeds: list[int] | None,
             records: Records) -> list[tuple[str, str, Run]]:
    """(`claim-<id>`, the same with the reading, run) of all runs under the readings in which a claim that is
    wanted lacks a seed at the precision of its records; three seeds without `seeds`. The first reading of
    each claim comes first, the methods before the control, and of these what lacks the fewest runs. Within it
    the methods of a seed are beside each other."""
    seeds = range(3) if seeds is None else seeds
    parts = []
    for paper in papers:
        for claim in paper.claims:
            if f"claim-{claim.id}" not in wanted:
                continue
            for nearness, reading in enumerate(map(paper.readings.get, claim.readings)):
                measured = measure(paper, claim, reading, records)
                lacks = any(set(seeds) - of.keys() for of in measured.values.values()) or measured.differs_now
                control = [name for name in claim.names if name not in claim.methods]
                for names, words in ((claim.methods, ""), (control, ", control")):
                    runs = []
                    for seed, name in itertools.product(seeds if lacks else (), names):
                        runs += runs_of(paper, claim, reading, name, seed)
                    order = nearness, bool(words), sum(not records.get(run) for run in runs)
                    parts.append((order, f"claim-{claim.id}", reading.name + words, runs))
    parts.sort(key=lambda part: part[0])
    return [(name, f"{name}, {of}", run) for _, name, of, runs in parts for run in runs]
