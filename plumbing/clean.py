"""What runs and decoded images take on the disk, and how to get it back.

    python -m plumbing.clean                            # lists both; nothing is deleted
    python -m plumbing.clean --unfinished               # what would be deleted
    python -m plumbing.clean --unfinished --delete      # deletes it

Only what a run or a decoding has written is ever deleted: a folder with any other file stays, and so does one
in which a process is running. Links are neither followed nor deleted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from plumbing.errors import Stop, ending
from plumbing.files import size_of, taken
from plumbing.runfolder import FILES, is_run, read_result
from plumbing.scalars import EVENTS
from plumbing.settings import Args, Parser, flag_of, shown_value

from tabulate import tabulate

STATES = ("checkpoint.pt", "before.pt", "best.pt")
BESIDE = (".lock", "log.txt")  # what else there may be of a run


@dataclass
class RunOnDisk:
    """A run's folder."""

    path: Path
    finished: bool
    running: bool  # a process holds its lock
    rounds: str  # 12 of 60
    flags: str  # that it was started with
    size: int  # bytes of what the run has written
    newest: float  # when a file was last written, seconds of the epoch
    others: list[str]  # what no run has written

    @property
    def state(self) -> str:
        if self.running:
            return f"running, {self.rounds} rounds"
        if self.finished:
            return f"finished, {self.rounds} rounds"
        return f"unfinished, {self.rounds} rounds"


@dataclass
class CacheOnDisk:
    """A folder of decoded images."""

    path: Path
    dataset: str
    size: int
    newest: float
    others: list[str]


# What is there


def find_runs(place: Path) -> list[RunOnDisk]:
    """The runs in a folder and below; links are not followed."""
    found = []
    for folder, inner, names in os.walk(place):
        inner.sort()
        if any(name in FILES for name in names) and is_run(Path(folder)):
            found.append(run_on_disk(Path(folder)))
    return found


def run_on_disk(path: Path) -> RunOnDisk:
    ours, others = [], []
    for entry in sorted(path.iterdir()):
        if of_a_run(entry):
            ours.append(entry)
        elif is_events(entry):
            ours += entry.iterdir()
        else:
            others.append(entry.name)
    size, newest = measured(ours)
    done, rounds, flags = progress(path)
    finished = read_result(path / "result.json") is not None
    return RunOnDisk(path, finished, is_locked(path), f"{done} of {rounds}", flags, size, newest, others)


def of_a_run(entry: Path) -> bool:
    """Whether a run has written a file, by its name; a temporary one is of a write that was killed."""
    name = re.sub(r"\.\d+\.tmp$", "", entry.name)
    return entry.is_file() and not entry.is_symlink() and name in (*FILES, *BESIDE)


def is_events(entry: Path) -> bool:
    """Whether it is the folder of --tensorboard, with nothing else in it."""
    if entry.name != "tensorboard" or entry.is_symlink() or not entry.is_dir():
        return False
    return all(inner.is_file() and inner.name.startswith(EVENTS) for inner in entry.iterdir())


def states_in(path: Path) -> list[Path]:
    """The files of a run's states."""
    return [path / name for name in STATES if of_a_run(path / name)]


def measured(files: list[Path]) -> tuple[int, float]:
    """Bytes of files, and when the newest was written."""
    newest = max((file.stat().st_mtime for file in files), default=0.0)
    return size_of(files), newest


def progress(path: Path) -> tuple[int, str, str]:
    """The rounds that a run has done, how many it has to do, and the flags that it was started with."""
    done, rounds, flags = 0, "?", ""
    with contextlib.suppress(OSError):
        done = len((path / "metrics.jsonl").read_bytes().splitlines())
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        about = json.loads((path / "settings.json").read_text())
        rounds = str(about["settings"]["rounds"]["value"])
        flags = " ".join([about["method"], *given_flags(about["settings"])])
    return done, rounds, flags


def given_flags(settings: dict[str, dict]) -> list[str]:
    """The flags of a run's command line that decide its numbers."""
    without = {f.name for f in dataclasses.fields(Args) if not f.metadata["numbers"]}
    words = []
    for name, setting in settings.items():
        if setting["origin"] == "flag" and name not in without:
            words.append(f"{flag_of(name)} {shown_value(setting['value'])}")
    return words


def is_locked(path: Path) -> bool:
    """Whether a process is running in a folder."""
    lock = path / ".lock"
    if not lock.exists():
        return False
    with open(lock) as file:
        return not taken(file)


def find_caches(data: Path) -> list[CacheOnDisk]:
    """The decoded images below --data, by their index; links to folders are not followed."""
    found = []
    for index in sorted((data / "cache").glob("*/index.json")):
        domains = domains_in(index)
        if domains is None or index.parent.is_symlink():
            continue
        ours, others = content_of(index.parent, domains)
        size, newest = measured(ours)
        dataset = index.parent.name.rsplit("-", 2)[0]
        found.append(CacheOnDisk(index.parent, dataset, size, newest, [entry.name for entry in others]))
    return found


def content_of(folder: Path, domains: list[str]) -> tuple[list[Path], list[Path]]:
    """What a decoding of these domains has written into its folder, and what else is there."""
    expected = {"index.json", "files.json", *(f"{name}.npy" for name in domains)}
    ours, others = [], []
    for entry in sorted(folder.iterdir()):
        known = entry.name in expected and entry.is_file() and not entry.is_symlink()
        (ours if known else others).append(entry)
    return ours, others


def domains_in(index: Path) -> list[str] | None:
    """The domains that an index of a decoding names; None if it is another file."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        content = json.loads(index.read_text())
        if isinstance(content["left_out"], list) and isinstance(content["classes"], list):
            return list(content["domains"].keys())
    return None


# What goes


def delete_run(run: RunOnDisk) -> bool:
    """Delete an unfinished run with its folder; whether it was still one that may go."""
    with held(run.path) as free:
        now = run_on_disk(run.path)
        if not free or now.finished or now.others:
            return False
        for entry in run.path.iterdir():
            if is_events(entry):
                for file in entry.iterdir():
                    file.unlink()
                entry.rmdir()
            elif of_a_run(entry):
                entry.unlink()
        run.path.rmdir()
    return True


def delete_states(run: RunOnDisk) -> bool:
    """Delete the states of a finished run; its result and metrics stay."""
    with held(run.path) as free:
        if not free or read_result(run.path / "result.json") is None:
            return False
        for file in states_in(run.path):
            file.unlink()
    return True


def delete_cache(cache: CacheOnDisk) -> bool:
    """Delete a folder of decoded images, the index first: what is left of it is decoded anew."""
    with held(cache.path.parent) as free:
        index = cache.path / "index.json"
        domains = domains_in(index)
        if not free or domains is None:
            return False
        ours, others = content_of(cache.path, domains)
        if others:
            return False
        index.unlink()
        for file in ours:
            file.unlink(missing_ok=True)  # the index has gone
        cache.path.rmdir()
    return True


@contextlib.contextmanager
def held(folder: Path):
    """Hold the lock of a folder; gives whether it could be had: not while a process works there."""
    with open(folder / ".lock", "a") as file:
        yield taken(file)


# What is shown


LEFT_AND_NUMBER = ("left", "left", "right")


def table_of_runs(runs: list[RunOnDisk]) -> str:
    rows = []
    for run in runs:
        size = mebibytes(run.size)
        rows.append([run.path, run.state, size, age(run.newest), run.flags, noted(run.others)])
    heads = ["run", "state", "MiB", "age", "method and flags", "other files"]
    return tabulate(rows, heads, tablefmt="plain", disable_numparse=True, colalign=LEFT_AND_NUMBER)


def table_of_caches(caches: list[CacheOnDisk]) -> str:
    rows = []
    for cache in caches:
        size = mebibytes(cache.size)
        rows.append([cache.path, cache.dataset, size, age(cache.newest), noted(cache.others)])
    heads = ["decoded images", "dataset", "MiB", "age", "other files"]
    return tabulate(rows, heads, tablefmt="plain", disable_numparse=True, colalign=LEFT_AND_NUMBER)


def mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def age(newest: float) -> str:
    """5 minutes, 7 hours, 3 days."""
    minutes = (time.time() - newest) / 60
    if minutes < 120:
        return f"{minutes:.0f} minutes"
    if minutes < 48 * 60:
        return f"{minutes / 60:.0f} hours"
    return f"{minutes / 60 / 24:.0f} days"


def noted(others: list[str]) -> str:
    """Up to three names."""
    return ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")


# The command line


def main(argv: list[str] | None = None) -> None:
    """The command line. Exit code 2 with one line on stderr for bad usage."""
    flags = parsed(argv)
    try:
        runs, caches = find_runs(Path(flags.runs)), find_caches(Path(flags.data))
        if flags.unfinished or flags.checkpoints or flags.caches:
            clean(flags, runs, caches)
        else:
            print(table_of_runs(runs) if runs else f"no runs in {flags.runs}")
            print()
            print(table_of_caches(caches) if caches else f"no decoded images in {flags.data}/cache")
        return
    except (Stop, OSError, KeyboardInterrupt) as e:
        message, code = ending(e, "what was not named as deleted is as it was")
    print(f"clean: {message}", file=sys.stderr)
    sys.exit(code)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="clean", allow_abbrev=False, description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="runs", metavar="DIR", help="folder of the runs [runs]")
    parser.add_argument("--data", default="data", metavar="DIR", help="folder of the decoded cache [data]")
    parser.add_argument("--unfinished", action="store_true", help="runs that are not finished, whole")
    parser.add_argument("--checkpoints", action="store_true",
                        help="of finished runs the states: results, metrics and curves stay, but no network "
                             "can be measured and no run extended any more")
    parser.add_argument("--caches", default="", metavar="NAME",
                        help="decoded images of this dataset, or all; the next run decodes them again, from "
                             "the archive, which is not looked for here")
    parser.add_argument("--delete", action="store_true", help="delete them; without it they are named only")
    flags = parser.parse_args(argv)
    if flags.delete and not (flags.unfinished or flags.checkpoints or flags.caches):
        parser.error("--delete needs to know what: --unfinished, --checkpoints or --caches NAME")
    return flags


def clean(flags: argparse.Namespace, runs: list[RunOnDisk], caches: list[CacheOnDisk]) -> None:
    """Delete what the flags select, or name it."""
    total = 0
    if flags.unfinished:
        for run in runs:
            if not run.finished:
                total += one(flags, run, f"unfinished run {run.path}", run.size, delete_run)
    if flags.checkpoints:
        for run in runs:
            size = size_of(states_in(run.path))
            if run.finished and size:
                run = dataclasses.replace(run, others=[])  # they stay, and so does the folder
                total += one(flags, run, f"states of {run.path}", size, delete_states)
    if flags.caches:
        datasets = {cache.dataset for cache in caches}
        if flags.caches != "all" and flags.caches not in datasets:
            there = ", ".join(sorted(datasets)) or "none"
            raise Stop(f"--caches {flags.caches}: there are decoded images of {there} in {flags.data}", 2)
        for cache in caches:
            if flags.caches in ("all", cache.dataset):
                total += one(flags, cache, f"decoded images {cache.path}", cache.size, delete_cache)
    if flags.delete:
        print(f"{mebibytes(total)} MiB are free again")
    else:
        print(f"{mebibytes(total)} MiB would be free; nothing was deleted: --delete does it")


def one(flags: argparse.Namespace, thing: RunOnDisk | CacheOnDisk, words: str, size: int, delete) -> int:
    """Delete one folder's part, or name it; returns the bytes that are free then."""
    if getattr(thing, "running", False):
        print(f"kept, a process is running in it: {words}")
        return 0
    if thing.others:
        print(f"kept, it has other files ({noted(thing.others)}): {words}")
        return 0
    if not flags.delete:
        print(f"{mebibytes(size):>10} MiB  {words}")
        return size
    if not delete(thing):
        print(f"kept, a process has just begun or ended in it: {words}")
        return 0
    print(f"{mebibytes(size):>10} MiB  deleted: {words}")
    return size


if __name__ == "__main__":
    main()
