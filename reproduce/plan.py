"""What missing runs would take, by the recorded seconds of their setting, and which of them cannot start
here."""

from __future__ import annotations

import dataclasses
import functools
import math
import shlex
import statistics
from collections import Counter

from plumbing.data.archives import find_archives, locate
from plumbing.data.catalog import FOLDERS
from plumbing.data.decoding import caches_of
from reproduce.cells import Missing
from reproduce.methods import short_name
from reproduce.records import Place, PlannedRun, Records, by_training, kind_of, setting_of

import torch
from tabulate import tabulate
from tqdm import tqdm


def planned(missing: list[Missing], records: Records, place: Place) -> list[Missing]:
    """The missing runs, the cheapest first, with their seconds and why some cannot start. Of those that one
    training serves, one that needs both readings, or the whole curve, comes first: it trains, the
    others test."""
    by_key, plan = {entry.run.key: entry for entry in missing}, []
    for group in by_training([entry.run for entry in missing]):
        group.sort(key=lambda run: (not run.args.after_training, not run.curve))
        seconds = seconds_of(group[0], records)
        for run in group:
            plan.append(by_key[run.key])
            plan[-1].seconds, plan[-1].why = seconds, unavailable(run, place)
    return sorted(plan, key=lambda entry: math.inf if entry.seconds is None else entry.seconds)


def seconds_of(run: PlannedRun, records: Records) -> float | None:
    """The median seconds of the recorded trainings of its setting, whatever seed, target and rate, at its
    precision and on its kind of device; None if there is none. A run that states no device is taken for one
    on a processor."""
    args = dataclasses.replace(run.args, device="cuda" if run.device == "gpu" else "cpu",
                               precision=run.precision)
    name, device = short_name(run.module), run.device or "cpu"
    settings = {setting_of(name, args), setting_of(name, args, main_reading=False)}
    of_setting = [record for record in records.every
                  if record["setting"] in settings and kind_of(record)[1] == device]
    seconds = [sum(record["seconds"].values()) for record in of_setting if "trained_by" not in record]
    return statistics.median(seconds) if seconds else None


def hours_of(runs: list[PlannedRun], records: Records) -> tuple[float, int]:
    """The hours of all these runs, one after the other, and how many are not in it: those of a setting that
    has not been recorded."""
    seconds = [seconds_of(run, records) for run in runs]
    known = [of_run for of_run in seconds if of_run is not None]
    return sum(known) / 3600, len(seconds) - len(known)


# Data, weights and devices


def unavailable(run: PlannedRun, place: Place) -> str:
    """Why a run cannot start here, or nothing."""
    if run.device == "gpu" and not torch.cuda.is_available():
        return "its claim asks for a GPU, and there is none here"
    return data_lacking(run.args.dataset, run.args.image_size, place)


@functools.cache
def data_lacking(dataset: str, size: int, place: Place) -> str:
    """Why a dataset that is fetched by hand is not here, or nothing. What can be downloaded is downloaded by
    its run."""
    if dataset not in FOLDERS or caches_of(place.data, dataset, size):
        return ""
    if locate(dataset, place.data, place.archives)[0]:
        return ""
    sources = FOLDERS[dataset].files  # {pattern of a file's name: (where it comes from, ...)}
    here = find_archives(list(sources), place.data, place.archives)
    for pattern, (url, _) in sources.items():
        if pattern not in here and "drive.google.com" in url:  # which hands a page to a program
            return f"{dataset}: {pattern} is not here; fetch it by hand from {url}"
    return ""


# In words


def plan_text(plan: list[Missing], place: list[str]) -> str:
    """A line for each table: missing runs, time, what cannot start; with flags of a `place` all commands."""
    if not plan:
        return "Nothing is missing."
    rows = []
    for table in sorted(set().union(*(entry.tables for entry in plan))):
        rows.append(line_of(table, [entry for entry in plan if table in entry.tables]))
    rows.append(line_of("all, each run once", plan))
    lines = [tabulate(rows, ["table", "runs missing", "time, one after the other", "cannot start here"],
                      disable_numparse=True)]
    for entry in plan if place else []:
        lines.append(f"{clock(entry.seconds):>10}  {entry.run.command} {shlex.join(place)}")
    for why, runs in Counter(entry.why for entry in plan if entry.why).items():
        lines.append(f"Not here ({runs} runs): {why}")
    return "\n".join(lines)


def line_of(name: str, entries: list[Missing]) -> list:
    """Of the table for the terminal: runs, time, those of unknown time, and those that cannot start."""
    known = [entry.seconds for entry in entries if entry.seconds is not None]
    words = clock(sum(known) if known else None)
    if known and len(known) < len(entries):
        words += f" and {len(entries) - len(known)} runs of unknown time"
    return [name, len(entries), words, sum(bool(entry.why) for entry in entries) or ""]


def clock(seconds: float | None) -> str:
    """Hours, minutes and seconds: 3:25:09."""
    return "?" if seconds is None else tqdm.format_interval(seconds)
