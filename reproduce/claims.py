"""The papers' claims, and what the records say of each by the rule of papers/RULE.md.

A claim (papers/<paper>/claims.toml) is a printed gain: the accuracy of one method minus that of another. It
is measured in several settings, called specifications here. The first is the paper's own. Other data or
another scale is an illustration, which answers nothing.
"""

from __future__ import annotations

import itertools
import math
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plumbing.run.errors import UserError
from plumbing.run.several import BySeed, means_over_columns
from reproduce.cells import found_at
from reproduce.intervals import Paired, mean, paired, welch
from reproduce.records import PlannedRun, Records
from reproduce.tables import PLACE, Block, Table, papers

# Of RULE.md:
RULE = "2026-11-28"
BEHIND = 2.0  # points below its baseline on the sources: a method that is further was behind there
LAST = 5  # evaluations at the end of a run, by whose mean a draw of a search is chosen


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
    precision: str  # of the records that answer
    device: str  # cpu or gpu
    flags: str = ""
    of_module: dict[str, str] = field(default_factory=dict)  # {a method's file: more flags}
    methods: dict[str, str | dict] = field(default_factory=dict)  # {method: more flags, or another file's}
    cases: list[str] = field(default_factory=list)  # the flags of each target, instead of the claim's
    part: str = ""  # best or last: the round that counts, instead of the claim's
    after_training: list[str] = field(default_factory=list)  # methods whose trained networks are tested
    other_data: str = ""  # what it has instead of the paper's data or scale; empty: the paper's own
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
    own: str  # the specification with the paper's own setting
    others: list[str] = field(default_factory=list)
    illustrations: list[str] = field(default_factory=list)
    cases: list[str] = field(default_factory=lambda: [""])  # flags of each target: their mean is taken
    control: str = ""  # a method: a's network without what the claim is about
    setting: str = ""  # of the published rows, where they have several
    seeds: int = 5  # planned
    needs: str = ""  # what keeps it from being measured on two processor cores
    why: list[str] = field(default_factory=list)  # sentences on the page, as templates

    @property
    def names(self) -> list[str]:
        """Of its methods, the control last."""
        return [name for name in dict.fromkeys([*self.methods, self.control]) if name]


@dataclass
class Paper:
    """A paper's claims, its methods and its specifications."""

    id: str
    name: str
    cited: str
    order: int
    idea: str
    tables: list[str]  # ids of those with the numbers behind
    methods: dict[str, Method]
    specifications: dict[str, Specification]
    claims: list[Claim]
    readme: tuple[str, ...] = ()  # points of README on them all, as templates


@dataclass(frozen=True)
class Learned:
    """How far a method's training got: means over the seeds behind a gain."""

    loss: float | None  # after the last round
    sources: float | None  # accuracy on held-out images of the source domains, if a domain is left out


@dataclass
class Measured:
    """A claim under a specification. The planned seeds count, in pairs, and no others."""

    claim: Claim
    specification: Specification
    cases: dict[str, list[dict[int, dict]]]  # of each method {seed: record} of each case
    values: dict[str, BySeed]  # of each method, mean over the cases
    printed: float
    deviation: float | None  # of the printed gain
    trials: int  # behind it; 0: not said

    @property
    def gains(self) -> BySeed:
        """a minus b for each seed that both have."""
        return self.gains_over(self.claim.methods[1])

    def gains_over(self, other: str) -> BySeed:
        """a minus another method for each seed that both have."""
        a, b = self.values[self.claim.methods[0]], self.values[other]
        return {seed: a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())}

    def gain(self, over: str = "") -> Paired | None:
        """a minus b, or minus another method, with its interval; None with fewer than three seeds."""
        a, b = self.claim.methods
        return paired(self.values[a], self.values[over or b])

    @property
    def difference(self) -> float | None:
        """The mean gain over the seeds that there are, also of one; None without any."""
        return mean(self.gains)

    def level(self, name: str) -> float | None:
        """The accuracy of a method, mean over the seeds behind the gain."""
        return mean({seed: self.values[name][seed] for seed in self.gains})

    @property
    def records(self) -> list[dict]:
        """Those behind the gain."""
        return [of[seed] for name in self.claim.methods for of in self.cases[name] for seed in self.gains]

    @property
    def decided(self) -> bool:
        """Whether all planned seeds are there."""
        return len(self.gains) >= self.claim.seeds

    @property
    def verdict(self) -> str:
        """gains, loses or open; empty with fewer seeds than planned."""
        if not self.decided:
            return ""
        low, high = self.gain().interval
        return "gains" if low > 0 else "loses" if high < 0 else "open"

    @property
    def beside_print(self) -> str:
        """less than printed, as printed, or nothing where the interval does not say it.

        The printed deviation widens the interval where it is known."""
        if not self.decided:
            return ""
        published = [self.printed]
        if self.deviation is not None:
            published.append(self.deviation)
        half = welch(self.gains, published, self.trials) or self.gain().half_width
        if self.difference + half < self.printed:
            return "less than printed"
        holds_it = self.difference - half <= self.printed
        return "as printed" if holds_it and self.verdict == "gains" else ""

    def learned(self, name: str) -> Learned:
        """Of a method, over the seeds behind the gain, or over those that it has if there is no gain."""
        seeds = self.gains or self.values[name]
        records = [by_seed[seed] for by_seed in self.cases[name] for seed in seeds if seed in by_seed]
        losses = [last_loss(record) for record in records]
        sources = [found_at(record, "last/ALL") for record in records
                   if record["args"]["protocol"] == "lodo"]
        return Learned(mean_of(losses), mean_of(sources))

    @property
    def alike(self) -> bool:
        """Whether both methods are tested by the same network of a client."""
        return len({*self.claim.methods} & {*self.specification.after_training}) != 1

    @property
    def not_learned(self) -> bool:
        """Whether a is further than BEHIND below b on the sources: the mark of the rule."""
        a, b = (self.learned(name).sources for name in self.claim.methods)
        return bool(self.gains) and a is not None and b is not None and a < b - BEHIND


@dataclass
class Answer:
    """A claim with what is measured of it."""

    paper: Paper
    claim: Claim
    printed: float
    levels: list[float]  # printed: of a and b
    own: Measured
    others: list[Measured]
    illustrations: list[Measured]

    @property
    def measured(self) -> list[Measured]:
        return [self.own, *self.others, *self.illustrations]

    @property
    def has_runs(self) -> bool:
        """Whether any setting at the paper's data and scale has a gain."""
        return any(measured.gains for measured in [self.own, *self.others])


def mean_of(numbers: list[float | None]) -> float | None:
    """Their mean; None if one is missing, or all."""
    if not numbers or None in numbers:
        return None
    return statistics.mean(numbers)


def last_loss(record: dict) -> float | None:
    """The clients' mean training loss in the last round that a record has it of."""
    losses = [loss for loss in record.get("logs", {}).get("loss", []) if loss is not None]
    return losses[-1] if losses else None


# Reading


def read_claims(folder: Path = PLACE) -> list[Paper]:
    """All papers' claims, in the papers' order. UserError, with the file's name, if one has none."""
    read = []
    for name in papers():
        path = folder / name / "claims.toml"
        try:
            if path.exists():
                read.append(read_paper(name, tomllib.loads(path.read_text(encoding="utf-8"))))
        except (KeyError, TypeError, ValueError) as e:
            raise UserError(f"{path} has no claims ({type(e).__name__}: {e})", 2)
    return read


def read_paper(name: str, content: dict) -> Paper:
    """The claims of a file's content; KeyError, TypeError or ValueError say what is wrong with it."""
    methods = {key: Method(**of) for key, of in content["methods"].items()}
    specifications = {of["name"]: Specification(**of) for of in content["specifications"]}
    claims = [Claim(**of) for of in content["claims"]]
    for claim in claims:
        named = {claim.own, *claim.others, *claim.illustrations}
        if set(claim.names) - methods.keys() or named - specifications.keys():
            raise ValueError(f"{claim.id} names a method or a specification that the file does not have")
    for of in specifications.values():
        if of.device not in ("cpu", "gpu") or of.precision not in ("fp32", "tf32", "bf16"):
            raise ValueError(f"{of.name}: {of.precision} on {of.device}; expected fp32, tf32 or bf16 on cpu "
                             "or gpu")
    return Paper(name, content["name"], content["cited"], content["order"], content["idea"],
                 content["tables"], methods, specifications, claims, tuple(content.get("readme", ())))


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


def answers(papers: Sequence[Paper], tables: list[Table], records: Records) -> list[Answer]:
    """Every claim with all its specifications."""
    by_id = {table.id: table for table in tables}
    return [answer_of(paper, claim, by_id, records) for paper in papers for claim in paper.claims]


def answer_of(paper: Paper, claim: Claim, tables: dict[str, Table], records: Records) -> Answer:
    """A claim with all its specifications."""
    gain, deviation, levels = printed_gain(claim, tables)
    printed = gain, deviation, tables[claim.table].trials

    def measured(names: list[str]) -> list[Measured]:
        return [measure(paper, claim, paper.specifications[name], records, *printed) for name in names]

    return Answer(paper, claim, gain, levels, *measured([claim.own]), measured(claim.others),
                  measured(claim.illustrations))


def measure(paper: Paper, claim: Claim, specification: Specification, records: Records, *printed) -> Measured:
    """What the records have of a claim under a specification: its planned seeds, at its precision and on its
    kind of device."""
    cases, values = {}, {}
    for name in claim.names:
        metric = metric_of(claim, specification, name)
        runs = runs_of(paper, claim, specification, name, 0, records)
        cases[name] = [planned(run, claim, specification, records) for run in runs]
        of_cases = [accuracies(of_case, metric, paper.methods[name].start) for of_case in cases[name]]
        values[name] = means_over_columns(of_cases) if of_cases else {}
    return Measured(claim, specification, cases, values, *printed)


def metric_of(claim: Claim, specification: Specification, name: str) -> str:
    """The path of the claim's number in a method's records: at the round that counts, of the network that is
    tested."""
    part, _, rest = claim.metric.partition("/")
    path = f"{specification.part or part}/{rest}"
    return f"after_training/{path}" if name in specification.after_training else path


def planned(run: PlannedRun, claim: Claim, specification: Specification, records: Records) -> dict[int, dict]:
    """{seed: record} of the planned seeds."""
    by_seed = records.of(run, specification.precision, specification.device)
    return {seed: record for seed, record in by_seed.items() if seed < claim.seeds}


def accuracies(by_seed: dict[int, dict], metric: str, start: bool = False) -> BySeed:
    """{seed: percent} at a path in the records."""
    values = {}
    for seed, record in by_seed.items():
        path = metric.replace("TARGET", record["args"]["target"])
        value = found_at(record, f"start/{path.partition('/')[2]}" if start else path)
        if value is not None:
            values[seed] = value
    return values


# Runs


def runs_of(paper: Paper, claim: Claim, specification: Specification, name: str, seed: int,
            records: Records) -> list[PlannedRun]:
    """The runs of a method under a specification, one for each case; none while a search is not finished."""
    cases = specification.cases or claim.cases
    if name in specification.search:
        draws = chosen_draws(paper, claim, specification, name, records)
        cases = [f"{draw} {case}" for draw, case in zip(draws, cases)]
    return [run_with(paper, specification, name, case, seed) for case in cases]


def run_with(paper: Paper, specification: Specification, name: str, case: str, seed: int) -> PlannedRun:
    """A method's run under a specification, with the flags of a case."""
    method, more = paper.methods[name], specification.methods.get(name, "")
    if isinstance(more, dict):
        method, more = Method(**more), ""
    of_module = specification.of_module.get(method.module, "")
    words = (f"--dataset {specification.dataset} {specification.flags} {of_module} {method.flags} {more} "
             f"{case} --precision {specification.precision}")
    if name in specification.after_training and "--after-training" not in words:
        words += " --after-training"
    return PlannedRun(method.module, tuple(words.split()), seed, device=specification.device)


def draws_of(paper: Paper, claim: Claim, specification: Specification,
             name: str) -> Iterator[list[PlannedRun]]:
    """The runs of a search: for each case those of all draws, in their order."""
    for case in specification.cases or claim.cases:
        yield [run_with(paper, specification, name, f"{draw} {case}", specification.search_seed)
               for draw in specification.search[name]]


def chosen_draws(paper: Paper, claim: Claim, specification: Specification, name: str,
                 records: Records) -> list[str]:
    """The flags of the best draw of each case; none while a draw of one has no record. Of equals the earlier
    one."""
    chosen = []
    for runs in draws_of(paper, claim, specification, name):
        scores = []
        for run in runs:
            by_seed = records.of(run, specification.precision, specification.device)
            if run.seed not in by_seed:
                return []
            scores.append(on_the_sources(by_seed[run.seed]))
        chosen.append(specification.search[name][scores.index(max(scores))])
    return chosen


def on_the_sources(record: dict) -> float:
    """The accuracy on the sources' validation and test images together, which are as many, mean of the last
    evaluations."""
    curve = record["curve"]
    return statistics.mean([*curve["val"][-LAST:], *curve["ALL"][-LAST:]])


def runs_for(papers: list[Paper], wanted: set[str], seeds: list[int] | None,
             records: Records) -> list[tuple[str, PlannedRun]]:
    """(`claim-<id>, <specification>`, run) of all runs of the claims that are wanted; as many seeds as are
    planned without `seeds`. The papers' own settings come first, the methods before the control, and of these
    what lacks the fewest runs. Within it the methods of a seed are beside each other. While a search is not
    finished its draws stand for it."""
    parts = []
    for paper in papers:
        for claim in paper.claims:
            if f"claim-{claim.id}" not in wanted:
                continue
            of_claim = range(claim.seeds) if seeds is None else seeds
            for nearness, name in enumerate([claim.own, *claim.others]):
                of = paper.specifications[name]
                controls = [] if of.search else claim.names[2:]
                for names, words in ((claim.methods, ""), (controls, ", control")):
                    runs = runs_under(paper, claim, of, names, of_claim, records)
                    order = nearness, bool(words), sum(not records.get(run) for run in runs)
                    parts.append((order, f"claim-{claim.id}, {name}{words}", runs))
    parts.sort(key=lambda part: part[0])
    return [(part, run) for _, part, runs in parts for run in runs]


def runs_under(paper: Paper, claim: Claim, specification: Specification, names: list[str], seeds,
               records: Records) -> list[PlannedRun]:
    """All runs of some methods under a specification, or the draws of a search that is not finished."""
    runs = []
    for name in names:
        if name in specification.search:
            draws = list(draws_of(paper, claim, specification, name))
            if not chosen_draws(paper, claim, specification, name, records):
                runs += itertools.chain(*draws)
    if runs:
        return runs
    for seed, name in itertools.product(seeds, names):
        runs += runs_of(paper, claim, specification, name, seed, records)
    return runs
