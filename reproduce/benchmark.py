"""Methods beside each other on one dataset: tuned on validation images, run over seeds, compared with a test.

    python -m reproduce.benchmark --methods mine.py,fedavg,fedprox,fdse --dataset pacs --scale laptop
    python -m reproduce.benchmark --methods mine.py,fedavg --tune lr=0.01,0.05 --tune gamma=0.1,1 --jobs 2

A method is a name (fedprox), a file, or either with flags: 'fedavg:--lr 0.1'. If its flags have
commas, put it in double quotes: '"fedgala:--sources d0,d15","fedema:--sources d0,d15"'.

Each value of --tune is tried with all seeds, by the methods that have the flag and do not set it themselves.
The value with the best validation accuracy counts. The same command resumes an interrupted comparison. A
method's file of one's own that has changed is run again. Other runs of other code or other data are refused.
The folder gets benchmark.md, benchmark.csv, table.tex, curves.png and forest.png.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import itertools
import os
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import common
from plumbing.data.catalog import named, shortlist
from plumbing.run.errors import UserError, one_line_on_failure
from plumbing.run.files import output_folder, write_json
from plumbing.run.provenance import content_of
from plumbing.run.runfolder import read_result
from plumbing.run.scores import METRICS
from plumbing.run.settings import Args, Parser, existing_folder, flag_of, method_name, seed_numbers
from plumbing.run.several import expand_targets, known_domains, targets_of
from plumbing.run.trained import method
from reproduce import benchmark_pages
from reproduce.loading import method_in
from reproduce.methods import ROOT
from reproduce.runner import Processes, environment, last_lines, side_by_side

from tqdm import tqdm

SPLITTING = ("dataset", "image_size", "limit", "protocol", "target", "target_part", "sources", "split",
             "clients_per_domain", "dirichlet", "skip_broken")
LAST = 10  # evaluations whose mean validation a value of --tune is chosen by


@dataclass(frozen=True)
class Entry:
    """A method of the comparison."""

    label: str
    name: str  # by which its runs are known
    start: tuple[str, ...]  # what Python is given: a file, or -m and a module, with -P: not from this folder
    flags: tuple[str, ...]
    module: ModuleType | SimpleNamespace


@dataclass
class Trial:
    """A method with values of --tune, and its commands: {seed: words}."""

    entry: Entry
    values: tuple[tuple[str, str], ...]
    commands: dict[int, list[str]]
    folder: Path
    args: Args

    def results(self) -> list[dict]:
        """Of each seed and target, when all its commands have ended well."""
        return [read_result(path) for path in self.paths()]

    def paths(self) -> list[Path]:
        """The folders of its runs."""
        paths = []
        for seed in self.commands:
            paths += sorted(file.parent for file in (self.folder / f"s{seed}").rglob("result.json"))
        return paths

    def validation(self) -> float:
        """The mean over seeds and targets of the last evaluations on the validation images."""
        of_runs = []
        for result in self.results():
            chosen_by = result["curve"].get("metric", result["curve"]["val"])
            of_runs.append(statistics.mean(chosen_by[-LAST:]))
        return statistics.mean(of_runs)


# The plan


def entry_of(text: str) -> Entry:
    """'mine.py', 'fedprox', 'fedprox:--mu 0.1'. Stop if there is no such method."""
    what, _, flags = text.partition(":")
    try:
        words = tuple(shlex.split(flags))
    except ValueError as e:
        raise UserError(f"--methods {text}: {e}", 2)
    if what.endswith(".py"):
        file = Path(what).resolve()
        name, start = method_name(file), (str(file),)
        module = method_in(file, name)
    else:
        name = what.removeprefix("baselines.")
        module = method(name)
        start = "-P", "-m", module.__name__
    return Entry(f"{name} {flags}".strip(), name, start, words, module)


def grid_of(texts: list[str]) -> dict[str, list[str]]:
    """['lr=0.01,0.1'] -> {'lr': ['0.01', '0.1']}. Stop if one is not so."""
    values_of = {}
    for text in texts:
        name, _, values = text.partition("=")
        if not name or name in values_of or not all(values.split(",")):
            raise UserError(f"--tune {text}: expected a flag and its values, such as lr=0.01,0.1, each flag "
                            "once", 2)
        values_of[name] = values.split(",")
    return values_of


def trials_of(entry: Entry, grid: dict[str, list[str]], shared: list[str], seeds: list[int],
              place: list[str], out: Path) -> list[Trial]:
    """A trial for each combination of the values that a method can be tuned with."""
    fields = [f for f in dataclasses.fields(entry.module.Args) if f.metadata["numbers"] and f.name != "seed"]
    given = {word.partition("=")[0] for word in (*shared, *entry.flags)}
    if taken := given & {"--seed", "--seeds", "--data", "--archives", "--out"}:
        raise UserError(f"{entry.label}: {', '.join(sorted(taken))} is a flag of the benchmark itself", 2)
    own = {flag_of(f.name).removeprefix("--") for f in fields if flag_of(f.name) not in given}
    tuned = {name: values for name, values in grid.items() if name in own}
    trials = []
    for combination in itertools.product(*tuned.values()):
        values = tuple(zip(tuned, combination))
        flags = [*shared, *entry.flags]
        for name, value in values:
            flags += [f"--{name}", value]
        # Bad ones end the program with the method's own line.
        args = entry.module.arguments([*flags, *place, "--out", str(out)])
        targets_of(args, known_domains(args.dataset))
        if args.protocol == "linear" and tuned:
            raise UserError(f"{entry.label} trains without labels and has no validation to tune with", 2)
        identity = " ".join([*entry.start, *flags]).encode()
        if entry.start[0] != "-P":  # after a change one's own file has new runs, and the others stay
            identity += content_of(Path(entry.start[0]))
        slug = hashlib.blake2b(identity, digest_size=4).hexdigest()
        folder = out / "runs" / f"{entry.name}-{slug}"
        commands = {}
        for seed in seeds:
            commands[seed] = [*entry.start, *flags, *place, "--seed", str(seed), "--no-figures",
                              "--out", str(folder / f"s{seed}")]
        trials.append(Trial(entry, values, commands, folder, args))
    return trials


def check_splits(of_methods: list[Args], seeds: list[int], measure: str) -> None:
    """Stop if the images of one's own do not suffice for a part with one of the seeds, or if those of a
    tested part have no AUC though that is the measure, before any run."""
    looked_at = set()
    for args in of_methods:
        splits = tuple(str(getattr(args, name)) for name in SPLITTING)
        if splits in looked_at or not (named(args.dataset).custom or measure == "auc"):
            continue
        looked_at.add(splits)
        for seed in seeds:
            seed_args = dataclasses.replace(args, seed=seed)
            dataset = common.open_dataset(seed_args)
            for run_args in expand_targets(seed_args, dataset.names):
                sources, targets = common.split(dataset, run_args)
                if measure == "auc":
                    check_auc(seed, targets or sources, dataset.classes)


def check_auc(seed: int, tested: list, classes: tuple[str, ...]) -> None:
    """Stop if a tested part lacks a class: then it has no AUC."""
    for client in tested:
        counts = client.test.labels.bincount(minlength=len(classes)).tolist()
        lacking = [c for c, count in zip(classes, counts) if not count]
        if lacking:
            raise UserError(f"--measure auc: with seed {seed} the test images of {client.name} lack "
                            f"{shortlist(lacking)}, so it has no AUC: give a larger share of test images, "
                            "such as --flags '--split 0.6/0.2/0.2', other parts in split.csv, or another "
                            "--measure", 2)


# The runs


def run_all(trials: list[Trial], jobs: int) -> list[str]:
    """Run all commands, `jobs` at a time; what went wrong, a line each. A run that is done checks that code
    and data are still the same, and ends."""
    items = [(trial.folder / f"s{seed}", words) for trial in trials for seed, words in trial.commands.items()]
    problems, processes = [], Processes()
    with tqdm(total=len(items), unit="run", desc="runs") as bar:

        def work(item: tuple[Path, list[str]]) -> None:
            folder, words = item
            folder.mkdir(parents=True, exist_ok=True)
            paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
            env = environment(0, jobs, []) | {"PYTHONPATH": os.pathsep.join(paths)}
            with open(folder / "log.txt", "a", encoding="utf-8") as log:
                code = processes.run([sys.executable, *words], env, Path.cwd(), stdout=log)
            if not processes.stopping and (code or not any(folder.rglob("result.json"))):
                said = last_lines((folder / "log.txt").read_text(errors="replace", encoding="utf-8"), 1)
                problems.append(f"{shlex.join(['python', *words])}\n    {said}")
            bar.update()

        if not side_by_side(jobs, work, items, processes):
            raise KeyboardInterrupt
    return problems


def main(argv: list[str] | None = None) -> None:
    flags = parsed(argv)
    with one_line_on_failure("benchmark", "finished rounds are kept; the same command resumes"):
        compare(flags)


def compare(flags: argparse.Namespace) -> None:
    """Plan, run, choose, and write the pages."""
    (methods,) = csv.reader([flags.methods.replace("\n", " ") or '""'], skipinitialspace=True)
    entries = [entry_of(text.strip()) for text in methods]
    if len(entries) < 2 or len({entry.label for entry in entries}) < len(entries):
        raise UserError(f"--methods {flags.methods}: expected two or more, each once", 2)
    seeds, grid = seed_numbers(flags.seeds), grid_of(flags.tune)
    settings = ["--dataset", flags.dataset, "--scale", flags.scale]
    if flags.targets:
        settings += ["--protocol", "lodo", "--target", flags.targets]
    settings += flags.flags
    place = ["--data", flags.data] + (["--archives", flags.archives] if flags.archives else [])
    left_out = f"-without-{flags.targets.replace(',', '-')}" if flags.targets else ""
    out = Path(flags.out or f"runs/benchmark-{named(flags.dataset).short}{left_out}").absolute()
    trials = [trials_of(entry, grid, settings, seeds, place, out) for entry in entries]
    unused = set(grid) - {name for of_entry in trials for name, _ in of_entry[0].values}
    if unused:
        raise UserError(f"--tune {', '.join(sorted(unused))}: no method has such a flag", 2)
    protocols = {of_entry[0].entry.label: of_entry[0].args.protocol for of_entry in trials}
    if len(set(protocols.values())) > 1:
        theirs = ", ".join(f"{protocol} of {label}" for label, protocol in protocols.items())
        raise UserError(f"there is nothing to compare in {theirs}: give --targets, or --flags '--protocol "
                        "...'", 2)
    check_splits([trial.args for trial in sum(trials, [])], seeds, flags.measure)
    output_folder(out, "benchmark.json", "command")
    command = ["python", "-m", "reproduce.benchmark", *(sys.argv[1:] if flags.argv is None else flags.argv)]
    write_json(out / "benchmark.json", {"command": command})
    problems = run_all(sum(trials, []), flags.jobs)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        raise UserError(f"{len(problems)} runs failed: mend what is said above, or give another "
                        "--out; the same command tries them again")
    chosen = [max(of_entry, key=Trial.validation) if len(of_entry) > 1 else of_entry[0]
              for of_entry in trials]
    print(benchmark_pages.write(out, chosen, trials, flags.which, flags.measure, shlex.join(command)))
    print(f"pages, tables and figures in {out}")


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="benchmark", allow_abbrev=False, description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(argv=argv)
    parser.add_argument("--methods", required=True, metavar="A,B,...",
                        help="methods to compare; the first one is compared with each of the others")
    parser.add_argument("--dataset", default="digits", help="data set, as for a method's file [digits]")
    parser.add_argument("--scale", default="paper", choices=("paper", "laptop", "smoke"),
                        help="scale, as for a method's file [paper]")
    parser.add_argument("--targets", default="", metavar="NAME", help="domain to leave out; all: each domain "
                                                                      "in turn [by each method's settings]")
    parser.add_argument("--seeds", default="0,1,2", help="seeds of each method [0,1,2]")
    parser.add_argument("--tune", action="append", default=[], metavar="FLAG=V,V",
                        help="values of a flag, from which validation chooses one; may be given several "
                             "times")
    parser.add_argument("--flags", default="", type=shlex.split, metavar="'--FLAG VALUE ...'",
                        help="flags for all methods; write a single word as --flags=--FLAG")
    parser.add_argument("--which", default="best", choices=("best", "last"),
                        help="round to compare: best (validation) or last [best]")
    parser.add_argument("--measure", default="accuracy", choices=METRICS,
                        help="what is compared, of each left-out domain or client [accuracy]")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time [1]")
    parser.add_argument("--out", default="", metavar="FOLDER",
                        help="folder of the comparison [runs/benchmark-DATASET, with --targets "
                             "runs/benchmark-DATASET-without-TARGETS]")
    parser.add_argument("--data", default="data", help="folder of the datasets and their cache [data]")
    parser.add_argument("--archives", type=existing_folder, default="",
                        help="folder with downloaded archives [none]")
    flags = parser.parse_args(argv)
    if flags.jobs < 1:
        parser.error(f"--jobs is {flags.jobs}; it must be at least 1")
    flags.data = str(Path(flags.data).resolve())
    flags.archives = flags.archives and str(Path(flags.archives).resolve())
    return flags


if __name__ == "__main__":
    main()
