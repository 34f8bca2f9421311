"""Every claim and every table of the five papers: what is published, what was measured here, what is missing.

    python reproduce_tables.py                          # render what is recorded; nothing is trained
    python reproduce_tables.py --plan --scale laptop    # what is missing, and what it would take
    python reproduce_tables.py --run --only fdse-1 --scale laptop --seeds 0,1,2 --jobs 2
    python reproduce_tables.py --check --sample 10      # does the current code give the recorded numbers?
    python reproduce_tables.py --check --only claim-fedsr-outer         # those behind a claim

A paper's tables and claims are in papers/<paper>/. results/runs.jsonl has a line for each finished run
and is only ever appended to. What is behind this command line is in reproduce/.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import math
import sys
import time
from pathlib import Path

from plumbing.run.errors import UserError, one_line_on_failure
from plumbing.run.settings import SCALES, Parser, add_version, existing_folder, seed_numbers, shown_value
from reproduce.budget import Budget, kind_here
from reproduce.cells import Missing, cells_in, filled, missing
from reproduce.check import check
from reproduce.claims import Paper, answer_of, read_claims, runs_for
from reproduce.cluster import parameters_of, run_on_cluster
from reproduce.commands import about
from reproduce.methods import ROOT
from reproduce.plan import ANY_GPU, left_text, plan_text, planned
from reproduce.records import Place, Records
from reproduce.rendering import claim_folder, render
from reproduce.runner import run_all
from reproduce.tables import Table, read_tables
from reproduce.elsewhere import read_reported

FOLDERS = {  # of each flag the repository's own, and what it is
    "papers": ("papers", "folder of the papers: their tables, printed numbers and claims"),
    "records": ("results/runs.jsonl", "JSONL file of the finished runs"),
    "out": ("results", "folder of what is rendered"),
}


def main(argv: list[str] | None = None) -> None:
    """The command line. Exit code 2 for bad usage, 1 if a run has failed, if none could start or if a check
    finds a difference, 130 after Ctrl-C."""
    since = time.time()
    flags = parsed(argv)
    flags.since = since
    with one_line_on_failure("reproduce_tables", "every finished run is recorded"):
        sys.exit(work(flags))


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The flags, checked."""
    parser = Parser(prog="reproduce_tables", allow_abbrev=False, description=about(__doc__),
                    epilog="In brackets: the default. Without --plan, --run or --check it renders what is "
                           "recorded and trains nothing.")

    def add(name: str, default, text: str, **how) -> None:
        text = f"{text} [{shown_value(default)}]"
        parser.add_argument(name, default=default, help=text, **{"type": type(default)} | how)

    what = parser.add_mutually_exclusive_group()
    what.add_argument("--plan", action="store_true", help="show the missing runs of each table, their time, "
                                                          "and those that cannot start here")
    what.add_argument("--run", action="store_true", help="train the missing runs, cheapest first (with "
                                                         "--minutes: those of claims first), and render")
    what.add_argument("--check", action="store_true", help="repeat the beginning of a recorded run of each "
                                                           "setting, compare the numbers, and render")
    parser.add_argument("--commands", action="store_true", help="with --plan: also print the command of each "
                                                                "run, for example for jobs of a cluster")
    add("--sample", 0.0, "with --check: time in minutes, shared among the methods; 0: check every setting")
    add("--only", "", "ids of tables and claims, such as 'fdse-1,claim-fedsr-*'; with --check: only settings "
                      "of the records behind these; empty: all")
    add("--scale", "paper", "scale of --plan and --run", choices=tuple(SCALES))
    add("--seeds", "0", "seeds of each cell, such as 0,1,2; paper: as many seeds as the paper has trials, "
                        "from 0 on, or one if it does not say; a claim then has its planned seeds")
    add("--jobs", 1, "number of runs at a time")
    add("--minutes", 0.0, "time limit for the runs, in minutes; 0: no limit. Runs of claims come first, all "
                          "seed together, then the cheapest cells. A run starts only if it can end in time, "
                          "by the times of similar runs on this kind of device; if none is known, it starts "
                          "if half of the time is left. Runs that are stopped at the end save their rounds, "
                          "and the same command resumes them. Pages are rendered after the limit")
    add("--gpus", "", "GPUs that the runs take in turn, such as 0,1; empty: the methods' own choice")
    add("--executor", "local", "where the runs train: on this machine, or as jobs of a Slurm cluster through "
                               "submitit", choices=("local", "slurm"))
    add("--slurm", "", "with slurm: parameters of submitit, such as 'timeout_min=720 slurm_partition=gpu "
                       "gpus_per_node=1'")
    add("--data", "data", "folder of the datasets and of the decoded cache")
    add("--archives", "", "folder with downloaded archives; they are used before any download",
        type=existing_folder)
    for name, (own, text) in FOLDERS.items():
        parser.add_argument(f"--{name}", metavar="PATH", help=f"{text} [{own} of this repository]")
    add_version(parser)
    flags = parser.parse_args(argv)
    for is_wrong, words in mistakes(flags):
        if is_wrong:
            parser.error(words)
    for name, (own, _) in FOLDERS.items():
        given = getattr(flags, name)
        setattr(flags, name, Path(given).resolve() if given else ROOT / own)
    return flags


def mistakes(flags: argparse.Namespace) -> list[tuple[bool, str]]:
    """(whether it is made, what is wrong) of each mistake in the flags."""
    gpus = words_of(flags.gpus)
    numbers = all(number.isdecimal() for number in gpus) and len(set(gpus)) == len(gpus) > 0
    elsewhere = (flags.papers or flags.records) and not flags.out
    lacking = flags.records and not Path(flags.records).exists()
    return [
        (not 1 <= flags.jobs <= 10_000, f"--jobs is {flags.jobs}; it must be at least 1 and at most 10000"),
        (not 0 <= flags.sample < math.inf,
         f"--sample is {flags.sample:g}; it must be a finite number at least 0"),
        (not 0 <= flags.minutes < 1e6, f"--minutes is {flags.minutes:g}; it must be at least 0, below 1e6"),
        (flags.minutes and not flags.plan and not flags.run, "--minutes is of --run and --plan"),
        (flags.gpus and not numbers, f"--gpus is {flags.gpus}; expected numbers of GPUs such as 0,1"),
        (flags.commands and not flags.plan or flags.sample and not flags.check,
         "--commands is of --plan, --sample of --check"),
        (elsewhere and not flags.plan,
         "with other --papers or --records give another --out too: results/ is of results/runs.jsonl"),
        (flags.only and not words_of(flags.only), f"--only {flags.only} names no table and no claim"),
        (Path(flags.data).exists() and not Path(flags.data).is_dir(), f"--data {flags.data} is not a folder"),
        (lacking and not flags.plan and not flags.run,
         f"--records {flags.records}: no such file of finished runs"),
    ]


def words_of(text: str) -> list[str]:
    """'0, 1' -> ["0", "1"]."""
    return [word.strip() for word in text.split(",") if word.strip()]


def work(flags: argparse.Namespace) -> int:
    """What the command line asks for; returns the exit code."""
    seeds = None if flags.seeds == "paper" else seed_numbers(flags.seeds)
    every = read_tables(flags.papers)
    there = {table.id for table in every}  # other --papers may lack those that a paper's claims are of
    papers = []
    for paper in read_claims(flags.papers):
        lacking = {claim.table for claim in paper.claims} - there
        if lacking:
            print(f"reproduce_tables: without the claims of {paper.id}: {flags.papers} has no "
                  f"{', '.join(sorted(lacking))}", file=sys.stderr)
        else:
            papers.append(paper)
    ids = [table.id for table in every] + [f"claim-{claim.id}" for paper in papers for claim in paper.claims]
    wanted = chosen(ids, flags.only)
    tables = [table for table in every if table.id in wanted]
    if flags.records.is_dir():
        raise UserError(f"--records {flags.records} is a folder; expected a JSONL file", 2)
    records = Records(flags.records)
    for line in records.damaged:
        print(f"reproduce_tables: {line}", file=sys.stderr)
    read_reported(flags.papers, every)
    place, code, plan = place_of(flags), 0, []
    if flags.plan or flags.run:
        of_claims = runs_for(papers, wanted, seeds, records)
        lacking = missing(tables, records, flags.scale, seeds, of_claims)
        plan = planned(lacking, records, place, claims=flags.minutes > 0)
    if flags.plan:
        print(plan_text(plan, [*place.flags, "--record", place.record] if flags.commands else []))
        return 0
    claim_folder(flags.out)
    if flags.run:
        code = run_missing(plan, flags, place, records)
    if flags.check:
        behind = records_behind(tables, papers, wanted, every, records) if flags.only else records.every
        code = check(records, behind, place, flags.jobs, flags.sample)
    if flags.run or flags.check:
        records = Records(flags.records)
        tables = every  # what was run may stand in others too, and the overviews are of all
    print(render(tables, records, flags.out, len(tables) == len(every), papers))
    if flags.minutes:
        print(left_text(plan, records, seeds))
    return code


def chosen(ids: list[str], only: str) -> set[str]:
    """The tables and claims whose ids match one of the patterns of --only; all without one."""
    patterns = words_of(only)
    for pattern in patterns:
        if not fnmatch.filter(ids, pattern):
            raise UserError(f"--only {pattern} is no table and no claim; there are {', '.join(ids)}", 2)
    return {name for name in ids if not patterns or any(fnmatch.fnmatch(name, of) for of in patterns)}


def records_behind(tables: list[Table], papers: list[Paper], wanted: set[str], every: list[Table],
                   records: Records) -> list[dict]:
    """The records behind the cells of some tables, at all scales, and behind the claims that are wanted, with
    their controls."""
    behind, by_id = [], {table.id: table for table in every}
    for table, scale in itertools.product(tables, SCALES):
        for cell in cells_in(filled(table, records, scale)):
            behind += cell.records.values()
    for paper in papers:
        for claim in paper.claims:
            if f"claim-{claim.id}" in wanted:
                for measured in answer_of(paper, claim, by_id, records).measured:
                    for by_seed in itertools.chain(*measured.cases.values()):
                        behind += by_seed.values()
    return behind


def place_of(flags: argparse.Namespace) -> Place:
    """The folders of the runs, whole: a run starts in another folder."""
    data = ROOT / "data" if flags.data == "data" else Path(flags.data).resolve()
    archives = str(Path(flags.archives).resolve()) if flags.archives else ""
    return Place(str(data), archives, str(flags.records))


def run_missing(plan: list[Missing], flags: argparse.Namespace, place: Place, records: Records) -> int:
    """Run what is missing; returns the exit code."""
    for why in sorted({entry.why for entry in plan if entry.why}):
        print(f"left out: {why}", file=sys.stderr)
    runs, gpus, budget = [entry.run for entry in plan if not entry.why], words_of(flags.gpus), None
    if flags.minutes:
        on_gpu = flags.executor == "slurm" and "gpu" in flags.slurm
        kind = ANY_GPU if on_gpu else kind_here()
        budget = Budget(flags.minutes, records, flags.jobs, kind, flags.since)
    if flags.executor == "slurm":
        parameters = {"slurm_array_parallelism": flags.jobs} | parameters_of(flags.slurm)
        counts = run_on_cluster(runs, place, parameters, budget)
    else:
        counts = run_all(runs, place, flags.jobs, gpus, budget)
    ended = [f"{n} {outcome}" for outcome, n in counts.items() if outcome != "stopped"]
    print(", ".join(ended) or "nothing to run")
    if counts["stopped"]:
        return 130
    return 1 if counts["failed"] or (plan and not counts) else 0


if __name__ == "__main__":
    main()
