"""Every claim and every table of the five papers: what is published, what was measured here, what is missing.

    python reproduce_tables.py                          # render what is recorded; nothing is trained
    python reproduce_tables.py --plan --scale laptop    # what is missing, and what it would take
    python reproduce_tables.py --run --only fdse-1 --scale laptop --seeds 0,1,2 --jobs 2
    python reproduce_tables.py --repeat 10              # does the current code give the recorded numbers?

A paper's tables and claims are in papers/<paper>/. results/runs.jsonl has a line for each finished run
and is only ever appended to. What is behind this command line is in reproduce/.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path

from plumbing.run.errors import UserError, one_line_on_failure
from plumbing.run.settings import SCALES, Parser, add_version, existing_folder, seed_numbers, shown_value
from reproduce.cells import Missing, missing
from reproduce.claims import read_claims, runs_for
from reproduce.cluster import parameters_of, run_on_cluster
from reproduce.commands import about
from reproduce.methods import ROOT
from reproduce.plan import plan_text, planned
from reproduce.records import Place, Records
from reproduce.rendering import claim_folder, render
from reproduce.repeat import repeat
from reproduce.runner import run_all
from reproduce.tables import read_tables

FOLDERS = {  # of each flag the repository's own, and what it is
    "papers": ("papers", "folder of the papers: their tables, printed numbers and claims"),
    "records": ("results/runs.jsonl", "JSONL file of the finished runs"),
    "out": ("results", "folder of what is rendered"),
}


def main(argv: list[str] | None = None) -> None:
    """The command line. Exit code 2 for bad usage, 1 if a run has failed, if none could start or if a
    repeated one differs, 130 after Ctrl-C."""
    flags = parsed(argv)
    with one_line_on_failure("reproduce_tables", "every finished run is recorded"):
        sys.exit(work(flags))


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The flags, checked."""
    parser = Parser(prog="reproduce_tables", allow_abbrev=False, description=about(__doc__),
                    epilog="In brackets: the default. Without --plan, --run or --repeat it renders what is "
                           "recorded and trains nothing.")

    def add(name: str, default, text: str, **how) -> None:
        text = f"{text} [{shown_value(default)}]"
        parser.add_argument(name, default=default, help=text, **{"type": type(default)} | how)

    what = parser.add_mutually_exclusive_group()
    what.add_argument("--plan", action="store_true", help="show the missing runs of each table, their time, "
                                                          "and those that cannot start here")
    what.add_argument("--run", action="store_true", help="train the missing runs, cheapest first, and "
                                                         "render")
    what.add_argument("--repeat", type=int, default=0, metavar="N",
                      help="begin N recorded runs again, of different settings where there are so many, and "
                           "print for each whether it gives the recorded numbers; nothing is written")
    parser.add_argument("--commands", action="store_true", help="with --plan: also print the command of each "
                                                                "run, for example for jobs of a cluster")
    add("--only", "", "ids of tables and claims, such as 'fdse-1,claim-fedsr-*'; empty: all")
    add("--scale", "paper", "scale of --plan and --run", choices=tuple(SCALES))
    add("--seeds", "0", "seeds of each cell, such as 0,1,2; paper: as many seeds as the paper has trials, "
                        "from 0 on, or one if it does not say; a claim then has its planned seeds")
    add("--jobs", 1, "number of runs at a time")
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
        (flags.repeat < 0, f"--repeat is {flags.repeat}; it must be at least 1"),
        (flags.gpus and not numbers, f"--gpus is {flags.gpus}; expected numbers of GPUs such as 0,1"),
        (flags.commands and not flags.plan, "--commands is of --plan"),
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
    place, code = place_of(flags), 0
    if flags.repeat:
        return repeat(records, flags.repeat, place, flags.jobs)
    if flags.plan or flags.run:
        of_claims = runs_for(papers, wanted, seeds, records)
        plan = planned(missing(tables, records, flags.scale, seeds, of_claims), records, place)
    if flags.plan:
        print(plan_text(plan, [*place.flags, "--record", place.record] if flags.commands else []))
        return 0
    claim_folder(flags.out)
    if flags.run:
        code = run_missing(plan, flags, place)
        records = Records(flags.records)
        tables = every  # what was run may stand in others too, and the overviews are of all
    print(render(tables, records, flags.out, len(tables) == len(every), papers))
    return code


def chosen(ids: list[str], only: str) -> set[str]:
    """The tables and claims whose ids match one of the patterns of --only; all without one."""
    patterns = words_of(only)
    for pattern in patterns:
        if not fnmatch.filter(ids, pattern):
            raise UserError(f"--only {pattern} is no table and no claim; there are {', '.join(ids)}", 2)
    return {name for name in ids if not patterns or any(fnmatch.fnmatch(name, of) for of in patterns)}


def place_of(flags: argparse.Namespace) -> Place:
    """The folders of the runs, whole: a run starts in another folder."""
    data = ROOT / "data" if flags.data == "data" else Path(flags.data).resolve()
    archives = str(Path(flags.archives).resolve()) if flags.archives else ""
    return Place(str(data), archives, str(flags.records))


def run_missing(plan: list[Missing], flags: argparse.Namespace, place: Place) -> int:
    """Run what is missing; returns the exit code."""
    for why in sorted({entry.why for entry in plan if entry.why}):
        print(f"left out: {why}", file=sys.stderr)
    runs = [entry.run for entry in plan if not entry.why]
    if flags.executor == "slurm":
        parameters = {"slurm_array_parallelism": flags.jobs} | parameters_of(flags.slurm)
        counts = run_on_cluster(runs, place, parameters)
    else:
        counts = run_all(runs, place, flags.jobs, words_of(flags.gpus))
    ended = [f"{n} {outcome}" for outcome, n in counts.items() if outcome != "stopped"]
    print(", ".join(ended) or "nothing to run")
    if counts["stopped"]:
        return 130
    return 1 if counts["failed"] or (plan and not counts) else 0


if __name__ == "__main__":
    main()
