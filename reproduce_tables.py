"""Every results table of the five papers: the published numbers, what was measured here, and what is missing.

    python reproduce_tables.py                          # render what is recorded; nothing is trained
    python reproduce_tables.py --plan --scale laptop    # what is missing, its commands, what it would take
    python reproduce_tables.py --run --only fdse-1 --scale laptop --seeds 3 --jobs 2

The tables are files in tables/; results/runs.jsonl has a line for each finished run and is only ever appended
to. What is behind this command line is in reproduce/.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import sys
from pathlib import Path

from plumbing.errors import Stop, ending
from plumbing.settings import SCALES, Parser, add_version, with_default
from reproduce.cards import Card, cards_here
from reproduce.cells import missing
from reproduce.cost import plan_data, plan_text, planned
from reproduce.measuring import measure_folders
from reproduce.methods import ROOT
from reproduce.origins import reruns, runs_text, stale_text
from reproduce.records import Place, Records
from reproduce.rendering import refuse_other_readme, render
from reproduce.runner import Local, Slurm
from reproduce.short_runs import compare_all
from reproduce.tables import Table, read_tables
from reproduce.throughput import DEVICES

FOLDERS = {  # of each flag the repository's own, and what it is
    "tables": ("tables", "folder of the tables"),
    "records": ("results/runs.jsonl", "JSONL file of the finished runs"),
    "out": ("results", "folder of what is rendered"),
}
MOST_JOBS = 10_000


def main(argv: list[str] | None = None) -> None:
    """The command line. Exit code 2 for bad usage, 1 if a run has failed, 130 after Ctrl-C."""
    flags = parsed(argv)
    try:
        sys.exit(work(flags))
    except (Stop, OSError, KeyboardInterrupt, MemoryError, RuntimeError) as e:
        message, code = ending(e, "every finished run is recorded")
    print(f"reproduce_tables: {message}", file=sys.stderr)
    sys.exit(code)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The flags, checked; `gpus` becomes a list."""
    parser = Parser(prog="reproduce_tables", allow_abbrev=False, description=__doc__.split("\n\n")[0],
                    epilog="In brackets: the default. Without --plan, --run or --rerun it renders what is "
                           "recorded and trains nothing.")

    def add(name: str, default, text: str, **how) -> None:
        text = with_default(text, default)
        parser.add_argument(name, default=default, type=type(default), help=text, **how)

    parser.add_argument("--plan", action="store_true",
                        help="show the runs that are missing, their commands, and the time, memory and disk "
                             "that they would take")
    parser.add_argument("--json", action="store_true", help="with --plan: for a program")
    add("--device", "here", "device of --plan: this machine, by the recorded runs, or a guess of another",
        choices=("here", *DEVICES))
    add("--device-tflops", 0.0, "TFLOPS that the device reaches, in place of what is known of it; 0: that")
    parser.add_argument("--run", action="store_true", help="run them, cheapest first, and render")
    parser.add_argument("--stale", action="store_true",
                        help="list the runs whose records are of other code than the method's file of now, "
                             "with their commands")
    parser.add_argument("--rerun", action="store_true", help="make these again, and render")
    parser.add_argument("--same-numbers", action="store_true",
                        help="after a change that should move no number: run each method shortly, and if it "
                             "writes the bytes of before, count older records as of the code of now")
    parser.add_argument("--runs", action="store_true",
                        help="list the runs behind each cell of the tables of --only")
    add("--only", "", "ids of tables, such as 'fdse-1,fedsr-*'; empty: all")
    add("--scale", "paper", "scale of --plan, --run, --stale, --rerun and --runs", choices=tuple(SCALES))
    add("--seeds", "1", "seeds of each cell, 0 to SEEDS - 1; paper: as many as the paper's trials, one where "
        "they are not stated")
    add("--jobs", 0, "runs at a time, on all GPUs of --gpus together; 0: with --gpus as many as their memory "
        "and the cores allow, else one")
    add("--gpus", "", "GPUs that the runs share, such as 0,1; with slurm the number that a job asks for; "
        "empty: the methods' own choice, with slurm 1")
    add("--executor", "local", "this machine, or jobs of a Slurm cluster through submitit",
        choices=("local", "slurm"))
    add("--partition", "", "slurm: partition of the jobs; empty: the cluster's own")
    add("--account", "", "slurm: account of the jobs; empty: the cluster's own")
    add("--hours", 24.0, "slurm: time of a job; one that is not done then is queued again and goes on")
    add("--memory-gb", 0.0, "slurm: memory of a job; 0: the cluster's own")
    add("--data", "data", "folder of the datasets and of the decoded cache")
    add("--archives", "", "folder with archives downloaded before; looked at before the network")
    for name, (own, text) in FOLDERS.items():
        parser.add_argument(f"--{name}", metavar="PATH", help=f"{text} [{own} of this repository]")
    add_version(parser)
    flags = parser.parse_args(argv)
    wrong = wrong_number(flags) or wrong_gpus(flags) or contradiction(flags)
    if wrong:
        parser.error(wrong)
    shown = flags.plan or flags.stale or flags.runs
    if (other(flags, "tables") or other(flags, "records")) and not other(flags, "out") and not shown:
        parser.error("with other --tables or --records give another --out too: results/ is of "
                     "results/runs.jsonl")
    begins = flags.plan or flags.run or flags.rerun  # of them the file need not be there yet
    if flags.records and not begins and not Path(flags.records).exists():
        parser.error(f"--records {flags.records}: no such file of finished runs")
    flags.gpus = gpu_numbers(flags.gpus)
    for name, (own, _) in FOLDERS.items():
        given = getattr(flags, name)
        setattr(flags, name, Path(given).resolve() if given else ROOT / own)
    return flags


def other(flags: argparse.Namespace, name: str) -> bool:
    """Whether a folder or file is given that is not the repository's own."""
    given = getattr(flags, name)
    return bool(given) and Path(given).resolve() != ROOT / FOLDERS[name][0]


def contradiction(flags: argparse.Namespace) -> str:
    """What is wrong with flags that each are right, or nothing."""
    shown = [name for name in ("plan", "stale", "runs") if getattr(flags, name)]
    made = [name for name in ("run", "rerun", "same_numbers") if getattr(flags, name)]
    if len(shown) > 1 or (shown and made):
        first, second = (f"--{name.replace('_', '-')}" for name in (shown + made)[:2])
        return f"{first} only shows something; give it without {second}"
    if flags.json and not flags.plan:
        return "--json is of --plan; give both"
    if flags.only and not patterns_of(flags.only):
        return f"--only is {flags.only!r}; expected ids of tables, such as 'fdse-1,fedsr-*'"
    return ""


def wrong_number(flags: argparse.Namespace) -> str:
    """What is wrong with a number, or nothing."""
    seeds = flags.seeds
    whole = seeds.isascii() and seeds.isdigit() and len(seeds) < 5 and int(seeds) > 0
    if seeds != "paper" and not whole:
        return f"--seeds is {seeds}; it must be at least 1 and at most 9999, or paper"
    if not 0 <= flags.jobs <= MOST_JOBS:
        return f"--jobs is {flags.jobs}; it must be at least 0 and at most {MOST_JOBS}"
    if not 0 <= flags.device_tflops < math.inf:
        return f"--device-tflops is {flags.device_tflops:g}; it must be a finite number at least 0"
    if not 0 < flags.hours < math.inf:
        return f"--hours is {flags.hours:g}; it must be a finite number above 0"
    if not 0 <= flags.memory_gb < math.inf:
        return f"--memory-gb is {flags.memory_gb:g}; it must be a finite number at least 0"
    return ""


def gpu_numbers(text: str) -> list[str]:
    """'0,1' -> ["0", "1"]."""
    return [number.strip() for number in text.split(",")] if text else []


def wrong_gpus(flags: argparse.Namespace) -> str:
    """What is wrong with --gpus, or nothing."""
    numbers = gpu_numbers(flags.gpus)
    valid = all(number.isascii() and number.isdigit() for number in numbers)
    valid = valid and len(set(numbers)) == len(numbers)
    expected = f"--gpus is {flags.gpus}; expected numbers of GPUs such as 0,1"
    if flags.executor == "slurm":
        if not valid or len(numbers) > 1:
            return f"{expected}, with slurm one number, how many a job asks for"
    elif not valid:
        return expected
    return ""


def work(flags: argparse.Namespace) -> int:
    """What the command line asks for; returns the exit code."""
    every = read_tables(flags.tables)
    tables = chosen(every, flags.only)
    path = flags.records
    if path.is_dir():
        raise Stop(f"--records {flags.records} is a folder; expected a JSONL file", 2)
    cards = cards_of(flags)
    records = Records(path)
    for line in records.damaged:
        print(f"reproduce_tables: {line}", file=sys.stderr)
    code = 0
    if flags.plan:
        plan = planned(missing(tables, records, flags.scale, seeds_of(flags)), place_of(flags, path))
        plan.time_runs(records, flags.device, flags.device_tflops)
        if cards:
            of_this_machine = flags.device == "here"
            plan.share(cards, flags.jobs, (os.cpu_count() or 1) if of_this_machine else 0)
        print(json.dumps(plan_data(plan), indent=1) if flags.json else plan_text(plan))
        return 0
    if flags.stale:
        print(stale_text(tables, records, flags.scale))
        return 0
    if flags.runs:
        print("\n\n".join(runs_text(table, records, flags.scale) for table in tables))
        return 0
    if tables is every or flags.run or flags.rerun:  # the overview is written
        refuse_other_readme(flags.out)
    if flags.same_numbers:
        print("\n".join(compare_all(ROOT / "results")))
        records = Records(path)
    if flags.run or flags.rerun:
        code = run_missing(tables, records, flags, cards)
        records = Records(path)
        tables = every  # what was run may stand in others too, and the overviews are of all
    print(render(tables, records, flags.out, whole=tables is every))
    return code


def patterns_of(only: str) -> list[str]:
    """'fdse-1, fedsr-*' -> ["fdse-1", "fedsr-*"]."""
    return [pattern.strip() for pattern in only.split(",") if pattern.strip()]


def chosen(every: list[Table], only: str) -> list[Table]:
    """The tables whose ids match one of the patterns of --only; all without one."""
    patterns = patterns_of(only)
    if not patterns:
        return every
    ids = [table.id for table in every]
    for pattern in patterns:
        if not fnmatch.filter(ids, pattern):
            raise Stop(f"--only {pattern} is no table; there are {', '.join(ids)}", 2)
    return [table for table in every if any(fnmatch.fnmatch(table.id, pattern) for pattern in patterns)]


def seeds_of(flags: argparse.Namespace) -> list[int] | None:
    """The seeds of --seeds; None where each paper's number of trials says it."""
    return None if flags.seeds == "paper" else list(range(int(flags.seeds)))


def place_of(flags: argparse.Namespace, records: Path) -> Place:
    """The folders of the runs, whole: a run starts in another folder."""
    data = ROOT / "data" if flags.data == "data" else Path(flags.data).resolve()
    archives = str(Path(flags.archives).resolve()) if flags.archives else ""
    return Place(str(data), archives, str(records))


def run_missing(tables: list[Table], records: Records, flags: argparse.Namespace, cards: list[Card]) -> int:
    """Run what is missing, or of other code, and measure the runs' folders; returns the exit code."""
    seeds = seeds_of(flags)
    place = place_of(flags, records.path)
    needed = reruns(tables, records, flags.scale) if flags.rerun else []
    if flags.run:
        needed += missing(tables, records, flags.scale, seeds)
    plan = planned(needed, place)
    for line in plan.left_out_lines():
        print(f"left out, {line}", file=sys.stderr)
    executor = executor_of(flags)
    plan.time_runs(records)
    if cards and plan.missing:
        print(plan.share(cards, flags.jobs, os.cpu_count() or 1), file=sys.stderr)
        executor.jobs = plan.together.jobs
    counts = executor.run([one.run for one in plan.missing], place, plan.times)
    ended = [f"{n} {outcome}" for outcome, n in counts.items() if n and outcome not in ("running", "stopped")]
    print(", ".join(ended) or "nothing to run")
    if counts["stopped"]:
        return 130
    if seeds is None:
        seeds = list(range(max(table.trials for table in tables)))
    for line in measure_folders(tables, Records(records.path), flags.out, flags.scale, seeds, place):
        print(f"reproduce_tables: not made: {line}", file=sys.stderr)
    return 1 if counts["failed"] else 0


def cards_of(flags: argparse.Namespace) -> list[Card]:
    """The GPUs of --gpus, with what is free on them; of another device's plan with its whole memory. None
    where there is nothing to run or to plan, and on a cluster."""
    if not flags.gpus or flags.executor == "slurm" or not (flags.plan or flags.run or flags.rerun):
        return []
    if not flags.plan or flags.device == "here":
        return cards_here(flags.gpus)
    device = DEVICES[flags.device]
    if not device.memory:
        raise Stop(f"--gpus {','.join(flags.gpus)}: --device {flags.device} has no GPU; leave one of the two "
                   "out", 2)
    return [Card(number, device.name, device.memory) for number in flags.gpus]


def executor_of(flags: argparse.Namespace) -> Local | Slurm:
    """Who runs the runs."""
    if flags.executor == "slurm":
        gpus = int(flags.gpus[0]) if flags.gpus else 1
        return Slurm(flags.jobs or 1, gpus=gpus, partition=flags.partition, account=flags.account,
                     hours=flags.hours, memory_gb=flags.memory_gb)
    return Local(flags.jobs or 1, flags.gpus)


if __name__ == "__main__":
    main()
