"""The papers' claims, and what the records say of each by the rule of papers/RULE.md.

A claim (papers/<paper>/claims.toml) is a contrast of two rows of a published table. A paper leaves settings
open. A specification is one choice for all of them. Answer A is the paper's own setting; answer B are the
others at the paper's data and scale. Other data or another scale is an illustration, which answers nothing.
"""

from __future__ import annotations

import itertools
import math
import shlex
import statistics
import tomllib
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from plumbing.run.errors import UserError
from plumbing.run.several import BySeed, means_over_columns
from reproduce.cells import found_at
from reproduce.records import Records, Run
from reproduce.intervals import LEVEL, Paired, mean, paired, welch
from reproduce.tables import PLACE, Block, Table, papers

import numpy as np

# Of RULE.md:
COMMITTED = "2026-11-26T13:42:00Z"
CLAIMS = 18  # in the files at its commit, for which the corrected intervals hold together
MARGIN = 1.0  # points below the printed gain that still count as it
NEAR = 2.0  # points between a baseline and the printed one
LAST_FIFTH = 0.8  # of the rounds: from here on a curve is looked at


@dataclass(frozen=True)
class Method:
    """A row of a contrast: a method's file and its flags."""

    module: str
    flags: str = ""
    start: bool = False  # what its runs had before their first step


@dataclass(frozen=True)
class Specification:
    """One choice for all that a paper leaves open, as flags, and why it is one."""

    name: str
    why: str
    dataset: str
    flags: str = ""
    of_module: dict[str, str] = field(default_factory=dict)  # {a method's file: more flags}
    methods: dict[str, str | dict] = field(default_factory=dict)  # {method: more flags, or another file's}
    cases: list[str] = field(default_factory=list)  # the flags of each target, instead of the claim's
    choices: dict[str, str] = field(default_factory=dict)  # {axis: value} in which it differs from answer A
    part: str = ""  # best or last: the round that counts, instead of the claim's
    other_data: str = ""  # what it has instead of the paper's data or scale; empty: the paper's own
    precision: str = ""  # of the records that answer
    device: str = ""  # cpu or gpu: where they ran
    search: dict[str, list[str]] = field(default_factory=dict)  # {method: the flags of each draw}
    search_seed: int = 0  # of the draws' runs


@dataclass(frozen=True)
class Claim:
    """A contrast that a paper prints: method `a` minus method `b`, mean over columns of a table."""

    id: str
    says: str
    quotation: str  # empty: printed, but no sentence of the paper says it
    place: str  # section or table
    table: str  # id, of the published numbers
    dataset: str  # of the published numbers
    columns: list[str]
    rows: list[str]  # names of the published rows: a, b
    methods: list[str]  # of the file: a, b
    metric: str  # path in a record, such as last/target
    own: str  # the specification of answer A
    others: list[str] = field(default_factory=list)  # those of answer B
    illustrations: list[str] = field(default_factory=list)
    cases: list[str] = field(default_factory=lambda: [""])  # flags of each target: their mean is taken
    control: str = ""  # a method: a's network without what the claim is about
    setting: str = ""  # of the published rows, where they have several
    seeds: int = 5  # planned

    @property
    def names(self) -> list[str]:
        """Of its methods, the control last."""
        return [name for name in dict.fromkeys([*self.methods, self.control]) if name]


@dataclass
class Paper:
    """The claims of a paper, its methods, axes and specifications, and what decides them, as templates."""

    id: str
    methods: dict[str, Method]
    axes: dict[str, dict[str, str]]  # {axis: {value: who says it}}, answer A's value first
    specifications: dict[str, Specification]
    claims: list[Claim]
    idea: str
    decides: list[str]
    tables: list[str]  # ids of those with the numbers behind
    not_planned: list[str]  # specifications that are not planned, and why

    def choices(self, specification: Specification) -> dict[str, str]:
        """{axis: value} of a specification, of all axes."""
        chosen = specification.choices
        return {axis: chosen.get(axis, next(iter(values))) for axis, values in self.axes.items()}


@dataclass
class Measured:
    """A claim under a specification: the gain by seed. All records are of one precision and one kind of
    machine, and none of them was seen to differ from what the current code gives."""

    claim: Claim
    specification: Specification
    runs: dict[str, list[Run]]  # of each method, of seed 0: one for each case
    cases: dict[str, list[dict[int, dict]]]  # of each method {seed: record} of each case
    values: dict[str, BySeed]  # of each method, mean over the cases
    slopes: dict[str, BySeed]  # of a's and b's curves: points in the last fifth of the rounds
    printed: float
    deviation: float | None  # of the printed gain
    trials: int  # behind it; 0: not said
    unchecked: int = 0  # records of which it was not looked whether the current code gives them

    def gain(self, level: float = LEVEL, over: str = "") -> Paired | None:
        """a minus b, or minus another method, with an interval at 1 - level; None with fewer than three
        seeds."""
        a, b = self.claim.methods
        return paired(self.values[a], self.values[over or b], level)

    @property
    def gains(self) -> BySeed:
        """a minus b for each seed that both have."""
        return self.gains_over(self.claim.methods[1])

    def gains_over(self, other: str) -> BySeed:
        """a minus another method for each seed that both have."""
        a, b = self.values[self.claim.methods[0]], self.values[other]
        return {seed: a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())}

    @property
    def difference(self) -> float | None:
        """The mean gain over the seeds that there are, also of one; None without any."""
        return mean(self.gains)

    @property
    def slope(self) -> Paired | None:
        """By how many points the gain rises over the last fifth of the rounds."""
        a, b = self.claim.methods
        return paired(self.slopes[a], self.slopes[b])

    @property
    def records(self) -> list[dict]:
        """Those behind the gain."""
        return [of[seed] for name in self.claim.methods for of in self.cases[name] for seed in self.gains]

    @property
    def older(self) -> int:
        """How many seeds have a record that is older than the rule."""
        return len({record["args"]["seed"] for record in self.records if record["finished"] < COMMITTED})

    @property
    def decided(self) -> bool:
        """Whether all planned seeds are there."""
        return len(self.gains) >= self.claim.seeds

    @property
    def above_zero(self) -> str:
        """yes, no or open: whether the gain is above 0."""
        low, high = self.gain().interval
        return "yes" if low > 0 else "no" if high < 0 else "open"

    @property
    def as_printed(self) -> str:
        """yes, smaller or open: whether the gain is as large as printed, but for MARGIN. The printed
        deviation widens the interval where it is known."""
        gain, published = self.gain(), [self.printed]
        if self.deviation is not None:
            published.append(self.deviation)
        half = welch(self.gains, published, self.trials) or gain.half_width
        if gain.difference - half > self.printed - MARGIN:
            return "yes"
        return "smaller" if gain.difference + half < self.printed - MARGIN else "open"


@dataclass
class Answer:
    """A claim with what is measured of it."""

    paper: Paper
    claim: Claim
    printed: float
    levels: list[float]  # printed: of a and b
    own: Measured  # answer A
    others: list[Measured]  # answer B
    illustrations: list[Measured]
    elsewhere: list = field(default_factory=list)  # what others print of its rows in nearly its setting

    @property
    def measured(self) -> list[Measured]:
        return [self.own, *self.others, *self.illustrations]

    @property
    def with_runs(self) -> list[Measured]:
        """Of answer B."""
        return [measured for measured in self.others if measured.gains]

    @property
    def older_alone(self) -> bool:
        """Whether all runs of answer B are older than the rule."""
        return all(measured.older == len(measured.gains) for measured in self.with_runs)

    def below_print(self) -> list[tuple[str, float]]:
        """(method, points) by which answer A's two accuracies are above the printed ones, or below."""
        names = self.claim.methods
        return [(name, mean(self.own.values[name]) - level) for name, level in zip(names, self.levels)]

    def is_near(self, measured: Measured) -> bool:
        """Whether the baseline is at the printed level."""
        level = mean(measured.values[self.claim.methods[1]])
        return level is not None and abs(level - self.levels[1]) <= NEAR

    def moves_most(self) -> tuple[str, Measured, Measured] | None:
        """The axis in which two specifications with runs differ alone, and these two, the farthest apart."""
        pairs = []
        for measured, other in itertools.combinations([self.own, *self.others], 2):
            mine, theirs = self.paper.choices(measured.specification), self.paper.choices(other.specification)
            axes = [axis for axis in mine if mine[axis] != theirs[axis]]
            if len(axes) == 1 and measured.gains and other.gains:
                pairs.append((axes[0], measured, other))
        return max(pairs, key=lambda of: abs(of[1].difference - of[2].difference), default=None)


# Reading


def read_claims(folder: Path = PLACE) -> list[Paper]:
    """All papers' claims, in the papers' order. UserError, with the file's name, if one has none."""
    read = []
    for name in papers():
        path = folder / name / "claims.toml"
        try:
            if path.exists():
                read.append(read_paper(name, tomllib.loads(path.read_text())))
        except (KeyError, TypeError, ValueError) as e:
            raise UserError(f"{path} has no claims ({type(e).__name__}: {e})", 2)
    return read


def read_paper(name: str, content: dict) -> Paper:
    """The claims of a file's content; KeyError, TypeError or ValueError say what is wrong with it."""
    methods = {key: Method(**of) for key, of in content["methods"].items()}
    axes = content["axes"]
    specifications = {of["name"]: Specification(**of) for of in content["specifications"]}
    for of in specifications.values():
        for axis, value in of.choices.items():
            if value not in axes.get(axis, {}):
                raise ValueError(f"{of.name}: {axis} = {value} is on no axis")
    claims = [Claim(**of) for of in content["claims"]]
    for claim in claims:
        named = {claim.own, *claim.others, *claim.illustrations}
        if set(claim.names) - methods.keys() or named - specifications.keys():
            raise ValueError(f"{claim.id} names a method or a specification that the file does not have")
    return Paper(name, methods, axes, specifications, claims, content["idea"], content["decides"],
                 content["tables"], content["not_planned"])


def printed_gain(claim: Claim, tables: dict[str, Table]) -> tuple[float, float | None, list[float]]:
    """The published gain; its deviation where every number has one, as if they were independent; the levels
    of a and b."""
    numbers, variances = [], []
    blocks = tables[claim.table].blocks
    blocks = [block for block in blocks if block.dataset == claim.dataset and not block.ours]
    for name in claim.columns:
        pair = [published(blocks, row, claim.setting, name) for row in claim.rows]
        numbers.append([of[0] for of in pair])
        if min(map(len, pair)) == 2:
            variances.append(sum(of[1] ** 2 for of in pair))
    levels = [statistics.mean(of) for of in zip(*numbers)]
    whole = len(variances) == len(numbers)
    deviation = math.sqrt(sum(variances)) / len(numbers) if whole else None
    return levels[0] - levels[1], deviation, levels


def published(blocks: list[Block], method: str, setting: str, column: str) -> list[float]:
    """[mean, deviation] or [mean] of a row in one of these blocks. Stop unless there is one."""
    printed = []
    for block in blocks:
        names = [of.name for of in block.columns]
        for row in block.rows:
            if row.method == method and column in names and setting in ("", row.published_setting):
                printed.append([float(number) for number in row.published[names.index(column)]])
    if len(printed) != 1 or not printed[0]:
        raise UserError(f"{method}, {column}: {len(printed)} published numbers, where a claim needs one", 2)
    return printed[0]


# Measuring


def answers(papers: list[Paper], tables: list[Table], records: Records) -> list[Answer]:
    """Every claim with all its specifications."""
    by_id = {table.id: table for table in tables}
    return [answer_of(paper, claim, by_id, records) for paper in papers for claim in paper.claims]


def answer_of(paper: Paper, claim: Claim, tables: dict[str, Table], records: Records) -> Answer:
    """A claim with all its specifications."""
    printed, deviation, levels = printed_gain(claim, tables)
    measured = {}
    for name in (claim.own, *claim.others, *claim.illustrations):
        specification = paper.specifications[name]
        measured[name] = measure(paper, claim, specification, records, printed, deviation,
                                 tables[claim.table].trials)
    others = [measured[name] for name in claim.others]
    illustrations = [measured[name] for name in claim.illustrations]
    elsewhere = []
    for reported in tables[claim.table].elsewhere:
        of_claim = reported.dataset == claim.dataset and reported.method in claim.rows
        if of_claim and reported.column in claim.columns and reported.near == "yes":
            elsewhere.append(reported)
    elsewhere.sort(key=lambda reported: claim.rows.index(reported.method))
    return Answer(paper, claim, printed, levels, measured[claim.own], others, illustrations, elsewhere)


def measure(paper: Paper, claim: Claim, specification: Specification, records: Records, *printed) -> Measured:
    """What the records have of a claim under a specification: of one precision and one kind of machine, those
    with the most seeds, or the newest."""
    metric = metric_of(claim, specification)
    runs = {name: runs_of(paper, claim, specification, name, 0) for name in claim.names}
    known = {name: [recorded(run, records) for run in runs[name]] for name in claim.names}
    of_specifications = []
    for kind in itertools.product(("fp32", "tf32", "bf16"), (False, True)):
        cases, values, slopes = {}, {}, {}
        for name in claim.names:
            start = paper.methods[name].start
            cases[name] = [of_case.get(kind, {}) for of_case in known[name]]
            values[name] = means_over_columns([accuracies(by_seed, metric, start) for by_seed in cases[name]])
            slopes[name] = means_over_columns([slopes_of(by_seed, metric) for by_seed in cases[name]])
        of_specifications.append(Measured(claim, specification, runs, cases, values, slopes, *printed))

    def rank(measured: Measured) -> tuple[int, str]:
        return len(measured.gains), max((record["finished"] for record in measured.records), default="")
    chosen = max(of_specifications, key=rank)
    chosen.unchecked = sum(records.check_of(r).get("outcome") != "equal" for r in chosen.records)
    return chosen


def metric_of(claim: Claim, specification: Specification) -> str:
    """The path of the claim's number in a record, at the round that counts."""
    part, _, rest = claim.metric.partition("/")
    return f"{specification.part or part}/{rest}"


def runs_of(paper: Paper, claim: Claim, specification: Specification, name: str, seed: int,
            precision: str = "") -> list[Run]:
    """The runs of a method under a specification, one for each case; `precision`: flags of it."""
    method, more = paper.methods[name], specification.methods.get(name, "")
    if isinstance(more, dict):
        method, more = Method(**more), ""
    of_module = specification.of_module.get(method.module, "")
    words = (f"--dataset {specification.dataset} {specification.flags} {of_module} {method.flags} {more} "
             f"{precision}")
    cases = specification.cases or claim.cases
    return [Run(method.module, tuple(shlex.split(f"{words} {case}")), seed) for case in cases]


def precision_of(paper: Paper, claim: Claim, specification: Specification, records: Records) -> str:
    """The flags of the precision that most records of the two methods have on a CPU: precisions are never
    pooled, so that what lacks is run in the same. Nothing without a record."""
    counts = Counter()
    for run in itertools.chain(*(runs_of(paper, claim, specification, name, 0) for name in claim.methods)):
        for (precision, on_gpu), by_seed in recorded(run, records).items():
            if not on_gpu:
                counts[precision] += len(by_seed)
    return f"--precision {max(counts, key=counts.get)}" if counts else ""


def recorded(run: Run, records: Records) -> dict[tuple[str, bool], dict[int, dict]]:
    """{(precision, whether on a GPU): {seed: record}} of a run with all seeds that there are. A record that
    the current code was seen to differ from answers nothing."""
    by_kind = {}
    for precision, by_seed in records.by_precision(replace(run, curve=False)).items():
        for seed, record in by_seed.items():
            if not records.differs(record):
                kind = precision, bool(record["hardware"].get("gpu"))
                by_kind.setdefault(kind, {})[seed] = record
    return by_kind


def accuracies(by_seed: dict[int, dict], metric: str, start: bool = False) -> BySeed:
    """{seed: percent} at a path in the records."""
    values = {}
    for seed, record in by_seed.items():
        path = metric.replace("TARGET", record["args"]["target"])
        value = found_at(record, f"start/{path.partition('/')[2]}" if start else path)
        if value is not None:
            values[seed] = value
    return values


def slopes_of(by_seed: dict[int, dict], metric: str) -> BySeed:
    """{seed: points} by which a curve rises over the last fifth of the rounds: the slope of a straight line
    through the evaluations there, at least three. A curve with fewer has none."""
    slopes = {}
    for seed, record in by_seed.items():
        curve, rounds = record["curve"], record["args"]["rounds"]
        values = curve.get(curve_name(record, metric), [])
        points = [(t, 100 * v) for t, v in zip(curve["round"], values) if v is not None]
        points = [point for point in points if point[0] >= LAST_FIFTH * rounds]
        if len(points) > 2:
            slopes[seed] = float(np.polyfit(*zip(*points), 1)[0]) * (1 - LAST_FIFTH) * rounds
    return slopes


def curve_name(record: dict, metric: str) -> str:
    """The name of a metric's curve: target of last/target, "m0 0.1" of last/linear/m0/0.1."""
    parts = metric.replace("TARGET", record["args"]["target"]).split("/")
    return " ".join(parts[2:]) if parts[1] == "linear" else parts[1]


def runs_for(papers: list[Paper], wanted: set[str], seeds: list[int] | None,
             records: Records) -> list[tuple[str, Run]]:
    """(`claim-<id>, <specification>`, run) of all runs of the claims that are wanted; as many seeds as are
    planned without `seeds`. Answers A come first, the methods before the control, and of these
    what lacks the fewest runs. Within it the methods of a seed are beside each other."""
    parts = []
    for paper in papers:
        for claim in paper.claims:
            if f"claim-{claim.id}" not in wanted:
                continue
            of_claim = range(claim.seeds) if seeds is None else seeds
            for nearness, name in enumerate([claim.own, *claim.others]):
                of = paper.specifications[name]
                precision = precision_of(paper, claim, of, records)
                for names, words in ((claim.methods, ""), (claim.names[2:], ", control")):
                    runs = []
                    for seed, method in itertools.product(of_claim, names):
                        runs += runs_of(paper, claim, of, method, seed, precision)
                    order = nearness, bool(words), sum(not records.get(run) for run in runs)
                    parts.append((order, f"claim-{claim.id}, {name}{words}", runs))
    parts.sort(key=lambda part: part[0])
    return [(part, run) for _, part, runs in parts for run in runs]
