"""What stands in a table: tables/*.toml as data, the runs behind their cells, the records of finished runs, and the numbers found there.

A table is a file tables/<paper>-<number>.toml: blocks (one for each dataset) of rows (a method file and its flags) and columns (more
flags, and where in the run's record the number is). A cell has one run for each seed; a run is known by its arguments, so one that
serves several tables is run once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import math
import shlex
import statistics
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from scipy import stats

import common
import figures
import measures
from basics import Stop
from networks import backbone

ROOT = Path(__file__).resolve().parent
PAPERS = {"fedsr": "FedSR (Nguyen et al., NeurIPS 2022)", "fedadg": "FedADG (Zhang et al., arXiv 2111.10487)",
          "fedgala": "FedGaLA (Pourpanah et al., AAAI 2025)", "fedcir": "FedCiR (Li et al., IEEE TMC)",
          "fdse": "FDSE (Wang et al., CVPR 2025)"}
SCHEMA = {"id": str, "method": str, "args": dict, "command": str, "best": dict, "last": dict, "curve": dict, "seconds": dict,
          "bytes": dict, "finished": str, "versions": dict, "hardware": dict}
HARDWARE = ("device", "precision")  # arguments that choose how, not what, is computed
BUDGET = ("--rounds", "--epochs", "--steps", "--image-size")  # what a smaller scale sets itself
KINDS = ("best", "last", "curve", "logs", "mean", "cost", "reach", "seconds")  # of a column's value
COSTS = ("parameters", "flops", "mib")


# Tables


@dataclass
class Column:
    """`value`: a path in the record such as best/ALL; `mean` of the other columns; `cost/...` of the network; `seconds` of a client's
    training in a round; or `reach/...`, what is measured of the run's folder."""

    name: str
    value: str
    flags: str = ""


@dataclass
class Row:
    method: str
    published: list[list[float]] = field(default_factory=list)  # of each column [mean, deviation], [mean] or []
    module: str = ""  # fedavg, baselines.fedbn; empty: a row that the paper quotes from elsewhere
    flags: str = ""
    laptop: str = ""  # flags that give the row the laptop budget of its block
    quoted: bool = False
    note: str = ""

    @property
    def implemented(self) -> bool:
        return bool(self.module) and (ROOT / (self.module.replace(".", "/") + ".py")).is_file()


@dataclass
class Block:
    title: str
    dataset: str
    columns: list[Column]
    row: list[Row]
    flags: str = ""
    laptop: str = ""


@dataclass
class Table:
    id: str
    title: str
    paper: str
    protocol: str
    block: list[Block]
    trials: int = 0  # behind a published mean; 0: not said
    notes: list[str] = field(default_factory=list)
    figure: str = ""  # of a figure: how it is drawn, a key of figures.DRAW
    axis: str = ""  # of a figure: its x axis (parameter) or y axis (curves)
    measure: str = ""  # of a figure that measures.py makes of the runs' folders: its command


def read_tables(folder: Path = ROOT / "tables") -> list[Table]:
    """All tables of a folder, in the papers' order. Stop, with the file's name, if one is not as it should be."""
    place = lambda path: (list(PAPERS).index(path.stem.partition("-")[0]) if path.stem.partition("-")[0] in PAPERS else 99, path.stem)
    found = []
    for path in sorted(folder.glob("*.toml"), key=place):
        try:
            found.append(read_table(path))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, AttributeError, TypeError, KeyError, ValueError) as e:
            raise Stop(f"{path} is no table ({type(e).__name__}: {e})", 2)
    if not found:
        raise Stop(f"{folder} has no tables", 2)
    return found


def read_table(path: Path) -> Table:
    """One table; ValueError, TypeError or KeyError say what is wrong with it."""
    content = tomllib.loads(path.read_text())
    blocks = [Block(**b | {"columns": [Column(**c) for c in b["columns"]], "row": [Row(**r) for r in b["row"]]})
              for b in content.pop("block")]
    table = Table(id=path.stem, block=blocks, **content)
    of_type(table, title=str, paper=str, protocol=str, trials=int, notes=list, figure=str, axis=str, measure=str)
    if table.paper not in PAPERS:
        raise ValueError(f"the paper is {table.paper}; expected one of {', '.join(PAPERS)}")
    if table.figure and table.figure not in figures.DRAW or not table.figure and "trials" not in content:
        raise ValueError(f"it needs trials, or figure, one of {', '.join(figures.DRAW)}")
    for block in blocks:
        of_type(block, title=str, dataset=str, flags=str, laptop=str)
        for column in block.columns:
            of_type(column, name=str, value=str, flags=str)
            kind, _, what = column.value.partition("/")
            if kind not in KINDS or bool(what) != (kind not in ("mean", "seconds")) or kind == "cost" and what not in COSTS:
                raise ValueError(f"{block.title}, {column.name}: {column.value!r} is no value of a column")
        if all(c.value == "mean" for c in block.columns):
            raise ValueError(f"{block.title} has no column of its own")
        for row in block.row:
            of_type(row, method=str, module=str, flags=str, laptop=str, quoted=bool, note=str)
            if bool(row.module) == row.quoted:
                raise ValueError(f"{block.title}, {row.method}: it needs a module, or quoted = true")
            row.published = row.published or [[] for _ in block.columns] if table.figure else row.published
            if len(row.published) != len(block.columns):
                raise ValueError(f"{block.title}, {row.method} has {len(row.published)} published cells for {len(block.columns)} columns")
            if not all(isinstance(c, list) and len(c) < 3 and all(type(v) in (int, float) for v in c) for c in row.published):
                raise ValueError(f"{block.title}, {row.method}: a published cell is [mean, deviation], [mean] or []")
            for text in (block.flags, block.laptop, row.flags, row.laptop, *(c.flags for c in block.columns)):
                shlex.split(text)
    return table


def of_type(thing, **kinds: type) -> None:
    for name, kind in kinds.items():
        if type(getattr(thing, name)) is not kind:
            raise TypeError(f"{name} is {getattr(thing, name)!r}; expected {kind.__name__}")


# Runs and records


@dataclass(frozen=True)
class Run:
    """A command and the arguments that it stands for."""

    module: str
    flags: tuple[str, ...]  # without the seed
    seed: int
    key: str

    @property
    def words(self) -> list[str]:
        """What stands behind `python`."""
        return [*(["-m", self.module] if "." in self.module else [f"{self.module}.py"]), *self.flags, "--seed", str(self.seed)]

    @property
    def command(self) -> str:
        return shlex.join(["python", *self.words])


@functools.cache
def arguments(module: str, flags: tuple[str, ...]) -> common.Args:
    """The arguments of a method's command; Stop with its line if it is none."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return importlib.import_module(module).arguments(list(flags))
    except SystemExit:
        raise Stop(f"{module} {' '.join(flags)}: {said.getvalue().strip()}", 2)


def key_of(method: str, cls: type[common.Args], args: dict) -> str:
    """What makes two runs the same: the method and all arguments that decide numbers, except the hardware's. A field that an
    older record lacks has its default."""
    values = {f.name: args.get(f.name, f.default) for f in dataclasses.fields(cls) if f.metadata["numbers"] and f.name not in HARDWARE}
    return json.dumps([method, values], sort_keys=True)


def run_of(block: Block, row: Row, column: Column, scale: str, seed: int) -> Run | None:
    """The run behind a cell. None where a smaller scale has none: its budget (rounds, epochs, steps, image size) is the scale's own,
    so that of the tables is left out, and there is no cell if the budget is the column's subject or if nothing is smaller."""
    own, of_column = shlex.split(f"{block.flags} {row.flags}"), shlex.split(column.flags)
    flags = ["--dataset", block.dataset, *own, *of_column]
    if scale != "paper":
        if set(BUDGET) & set(of_column):
            return None
        laptop = shlex.split(f"{block.laptop} {row.laptop}") if scale == "laptop" else []
        flags = ["--dataset", block.dataset, *without_budget(own), "--scale", scale, *laptop, *of_column]
    args = dataclasses.replace(arguments(row.module, tuple(flags)), seed=seed)
    if scale != "paper" and dataclasses.replace(args, scale="paper", seed=0) == arguments(
            row.module, ("--dataset", block.dataset, *without_budget(own), *of_column)):
        return None
    return Run(row.module, tuple(flags), seed, key_of(row.module.rpartition(".")[2], type(args), common.identity(args)))


def without_budget(flags: list[str]) -> list[str]:
    return [f for i, f in enumerate(flags) if f not in BUDGET and (not i or flags[i - 1] not in BUDGET)]


class Records:
    """The finished runs of a JSONL file by their key; lines that are none are counted and said. Beside it, reach.jsonl has what
    was measured of the runs' folders for FedCiR's Table 3."""

    def __init__(self, path: Path):
        self.path, self.by_key, self.damaged, self.count = path, {}, [], 0
        self.seeds = {}  # of (method, dataset, scale), so that nothing else is looked for
        for number, line in lines_of(path):
            try:
                record = json.loads(line)
                check_record(record)
                key = key_of(record["method"], measures.method(record["method"]).Args, record["args"])
            except (Stop, ValueError, AttributeError, TypeError, KeyError, RecursionError) as e:
                self.damaged.append(f"{path}, line {number} is skipped: {str(e)[:80]}")
                continue
            self.by_key.setdefault(key, record)
            self.seeds.setdefault((record["method"], record["args"]["dataset"], record["args"]["scale"]), set()).add(record["args"]["seed"])
            self.count += 1
        self.reach = {}
        for _, line in lines_of(path.with_name("reach.jsonl")):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                found = json.loads(line)
                self.reach[found["id"]] = {k: float(v) for k, v in found["reach"].items()}

    def get(self, run: Run) -> dict | None:
        return self.by_key.get(run.key)


def lines_of(path: Path):
    """(number, line) of what is not empty; nothing if there is no file."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def check_record(record: dict) -> None:
    """ValueError unless it has what a run records: fields and arguments of their types, and finite numbers."""
    wrong = [k for k, kind in SCHEMA.items() if not isinstance(record.get(k), kind)]
    if wrong:
        raise ValueError(f"{wrong[0]} is missing or of another type")
    args = record["args"]
    for f in dataclasses.fields(measures.method(record["method"]).Args):
        kinds = (int, float) if isinstance(f.default, float) else (type(f.default),)
        if f.name in args and type(args[f.name]) not in kinds or f.name not in args and f.name in ("dataset", "scale", "seed", "rounds"):
            raise ValueError(f"the argument {f.name} is {args.get(f.name, 'missing')!r}")
    if args["scale"] not in common.SCALES:
        raise ValueError(f"the scale is {args['scale']!r}")
    for field_ in ("best", "last", "curve", "logs", "seconds", "bytes"):
        for path, value in leaves(record.get(field_, {})):
            gap = value is None and field_ in ("curve", "logs")
            if not gap and (type(value) not in (int, float) or not math.isfinite(value)):
                raise ValueError(f"{field_}/{path} is {value!r}")
            if field_ in ("best", "last") and path != "round" and not 0 <= value <= 1:
                raise ValueError(f"{field_}/{path} is {value!r}, no share")


def leaves(value, path: str = ""):
    """(path, value) of everything in dictionaries and lists that is neither."""
    if isinstance(value, (dict, list)):
        for k, v in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(v, f"{path}/{k}".lstrip("/"))
    else:
        yield path, value


# Cells


@dataclass
class Cell:
    """`values` by seed, in the published unit; `missing`: the runs that are not recorded."""

    published: list[float]
    values: dict[int, float] = field(default_factory=dict)
    missing: list[Run] = field(default_factory=list)
    trials: int = 0
    records: dict[int, dict] = field(default_factory=dict)  # of a figure
    computed: bool = False  # from the network alone, without a run
    elsewhere: bool = False  # a time or cost, which depends on the machine or on what is counted: no difference is shown

    @property
    def mean(self) -> float | None:
        return statistics.mean(self.values.values()) if self.values else None

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        return self.mean - self.published[0] if self.values and self.published else None

    @property
    def far(self) -> bool | None:
        """Whether the difference exceeds two combined standard errors; None if that cannot be told: one seed, or no printed deviation
        or number of trials."""
        if self.difference is None or self.deviation is None or len(self.published) < 2 or not self.trials:
            return None
        error = math.hypot(self.deviation / math.sqrt(len(self.values)), self.published[1] / math.sqrt(self.trials))
        return abs(self.difference) > 2 * error

    def text(self, decimals: int, other_scale: bool = False) -> str:
        """Published mean and deviation, then ours with the number of seeds, then the difference (not at another scale)."""
        shown = " ± ".join(f"{v:.{decimals}f}" for v in self.published) or "-"
        if not self.values:
            return f"{shown} / -"
        ours = number(self.mean) + (f" ± {number(self.deviation)}" if self.deviation is not None else "")
        ours += "" if self.computed else f" ({len(self.values)})"
        if other_scale or self.difference is None or self.elsewhere:
            return f"{shown} / {ours}"
        mark = "" if self.computed else {True: " *", False: "", None: " ?"}[self.far]
        return f"{shown} / {ours}, {self.difference:+.2f}{mark}"


def paired(a: dict[int, float], b: dict[int, float]) -> tuple[float, float, int] | None:
    """The mean difference a - b over the seeds that both have, half the width of its 95% confidence interval (Student's t), and
    the number of these seeds; None with fewer than two."""
    shared = sorted(a.keys() & b.keys())
    if len(shared) < 2:
        return None
    differences = [a[s] - b[s] for s in shared]
    half = stats.t.ppf(0.975, len(shared) - 1) * statistics.stdev(differences) / math.sqrt(len(shared))
    return statistics.mean(differences), float(half), len(shared)


def number(v: float) -> str:
    return f"{v:.2f}" if abs(v) < 1000 else f"{v:.0f}"


def percent(path: str) -> bool:
    return path.split("/")[0] in ("best", "last")


def found_at(record: dict, path: str) -> float | None:
    """The number at a path such as last/linear/photo/0.1, accuracies in percent."""
    value = record
    for part in path.split("/"):
        value = value.get(part) if isinstance(value, dict) else None
    return None if not isinstance(value, (int, float)) else 100 * value if percent(path) else float(value)


@functools.cache
def cost(module: str, flags: tuple[str, ...]) -> dict[str, float]:
    """FDSE's Table 4 of a network: parameters in 1e7, MiB of its float32 state, multiply-adds of 50 images of 256x256 in 1e10."""
    args = dataclasses.replace(arguments(module, flags), image_size=256)
    with torch.device("meta"):
        net = getattr(sys.modules[module], "build", backbone)(args, 3, 10)
        flops = measures.flops(net, (50, 3, 256, 256))[0]
    return {"parameters": sum(p.numel() for p in net.parameters()) / 1e7, "flops": flops / 2 / 1e10,
            "mib": sum(v.numel() for v in net.state_dict().values() if v.is_floating_point()) * 4 / 2 ** 20}


def seconds_of_round(run: Run, records: Records) -> float | None:
    """Seconds of training of a client in a round: the mean of the longest recorded run of the same network, images and batch."""
    args = dataclasses.asdict(arguments(run.module, run.flags))
    same = [r for r in records.by_key.values() if r["method"] == run.module.rpartition(".")[2] and all(
        r["args"].get(k) == args[k] for k in ("dataset", "backbone", "image_size", "batch_size", "epochs", "scale"))]
    if not same:
        return None
    longest = max(same, key=lambda r: r["args"]["rounds"])
    clients = longest["last"].get("clients")
    return longest["seconds"]["train"] / longest["args"]["rounds"] / len(clients) if clients and "train" in longest["seconds"] else None


def cells_of(table: Table, block: Block, row: Row, records: Records, scale: str, seeds: list[int]) -> list[Cell]:
    """The cells of a row. `seeds` are those that are asked for; recorded ones beyond them count too."""
    cells = [Cell(p, trials=table.trials) for p in row.published]
    if not row.implemented:
        return cells
    for cell, column in zip(cells, block.columns):
        kind, _, what = column.value.partition("/")
        cell.computed, cell.elsewhere = kind == "cost", kind in ("seconds", "reach")
        recorded = records.seeds.get((row.module.rpartition(".")[2], block.dataset, scale), set())
        if kind == "mean" or not (recorded or seeds or kind == "cost"):
            continue
        first = run_of(block, row, column, scale, 0)
        if first is None:
            continue
        if kind in ("cost", "seconds"):
            if scale == "paper":
                value = cost(row.module, first.flags)[what] if kind == "cost" else seconds_of_round(first, records)
                cell.values = {} if value is None else {0: value}
            continue
        for seed in sorted(recorded | set(seeds)):
            run = run_of(block, row, column, scale, seed)
            record = records.get(run)
            if record:
                if table.figure:
                    cell.records[seed] = record
                value = records.reach.get(record["id"], {}).get(what) if kind == "reach" else found_at(record, column.value)
                if value is not None:
                    cell.values[seed] = value
            elif seed in seeds:
                cell.missing.append(run)
    for cell, column in zip(cells, block.columns):
        if column.value == "mean":
            others = [c for c, o in zip(cells, block.columns) if o.value != "mean"]
            shared = set.intersection(*(set(c.values) for c in others))
            cell.values = {s: statistics.mean(c.values[s] for c in others) for s in sorted(shared)}
    return cells


def every_cell(tables: list[Table], records: Records, scale: str, seeds: list[int]):
    """(table, block, row, its cells) of all rows."""
    for table in tables:
        for block in table.block:
            for row in block.row:
                yield table, block, row, cells_of(table, block, row, records, scale, seeds)
