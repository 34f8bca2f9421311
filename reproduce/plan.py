"""What missing runs would take, by the seconds of recorded ones, and which of them cannot start here."""

from __future__ import annotations

import functools
import http.client
import math
import re
import shlex
import statistics
import urllib.request
from collections import Counter
from pathlib import Path

from plumbing.data.archives import find_archives, locate
from plumbing.data.catalog import FOLDERS
from plumbing.data.decoding import caches_of
from plumbing.run.settings import Args
from reproduce.cells import Missing
from reproduce.methods import short_name
from reproduce.records import Place, Records, Run, by_training

import torch
from tabulate import tabulate
from tqdm import tqdm

ANY_GPU = "any GPU"  # the kind of device of a cluster's jobs
LIKE = ("dataset", "image_size", "backbone")  # arguments of runs whose rounds can be compared


def planned(missing: list[Missing], records: Records, place: Place, claims: bool = False) -> list[Missing]:
    """The missing runs, the cheapest first, with their seconds and why some cannot start. Of those that one
    training serves, one that needs the whole curve comes first: it trains, the others test. With `claims` the
    runs of claims come before all, in their own order."""
    by_key, plan = {entry.run.key: entry for entry in missing}, []
    for group in by_training([entry.run for entry in missing]):
        group.sort(key=lambda run: not run.curve)
        seconds = seconds_of(group[0], records)
        for run in group:
            plan.append(by_key[run.key])
            plan[-1].seconds, plan[-1].why = seconds, unavailable(run.args, place)

    def rank(entry: Missing) -> tuple[bool, float]:
        if claims and any(name.startswith("claim-") for name in entry.tables):
            return False, 0.0
        return True, math.inf if entry.seconds is None else entry.seconds
    return sorted(plan, key=rank)


def kind_of(gpu: str | None) -> str:
    """The kind of a device by its GPU's name: what a run took on one it takes on another of them."""
    if not gpu:
        return "CPU"
    return "H100 or H200" if re.search(r"\bH[12]00\b", gpu) else gpu


def known_of(run: Run, records: Records, kind: str, threads: int = 0) -> list[tuple[float, float]]:
    """(how unlike it is, its seconds a round) of all records on this kind of device, but those that were only
    tested; with `threads` of a CPU those with others are less like it."""
    times = []
    for record in records.every:
        distance = unlike(run, record["method"], record["args"])
        there = kind_of(record["hardware"].get("gpu"))
        if there == kind == "CPU" and threads:
            distance += abs(math.log((record["hardware"].get("threads") or 1) / threads))
        on_it = there == kind or (kind == ANY_GPU and there != "CPU")
        if on_it and distance < math.inf and "trained_by" not in record:
            times.append((distance, sum(record["seconds"].values()) / record["args"]["rounds"]))
    return times


def seconds_of(run: Run, records: Records, kind: str = "CPU") -> float | None:
    """Seconds of a run on a kind of device: its rounds, each as long as in the recorded run there that is
    most like it, of several the median. None if there is none of its method, dataset, size and backbone."""
    known = known_of(run, records, kind)
    if not known:
        return None
    nearest = min(distance for distance, _ in known)
    of_round = statistics.median(seconds for distance, seconds in known if distance == nearest)
    return of_round * run.args.rounds


def unlike(run: Run, name: str, theirs: dict) -> float:
    """How unlike a run's rounds are to those of a method with other arguments: 0 with the same batches and
    epochs, infinite with another method, dataset, image size or backbone."""
    args = run.args
    if name != short_name(run.module) or any(theirs.get(field) != getattr(args, field) for field in LIKE):
        return math.inf
    distance = abs(math.log(theirs["batch_size"] / args.batch_size))
    return distance + abs((theirs["steps"] or theirs["epochs"]) - (args.steps or args.epochs))


# Data and weights


def unavailable(args: Args, place: Place) -> str:
    """Why a run cannot start here for want of data or weights, or nothing."""
    return weights_lacking(args.weights, args.backbone) or data_lacking(args.dataset, args.image_size, place)


@functools.cache
def weights_lacking(weights: str, backbone: str) -> str:
    """Why initial weights cannot be had here, or nothing."""
    if weights == "imagenet":
        files = Path(torch.hub.get_dir(), "checkpoints").glob(f"{backbone.partition('_')[0]}-*")
        if not any(files) and not answers("https://download.pytorch.org/models/resnet18-f37072fd.pth"):
            return "ImageNet's weights are not here and cannot be downloaded"
    elif weights != "none" and not Path(weights).is_file():
        return f"the weights {weights} are not here"
    return ""


@functools.cache
def data_lacking(dataset: str, size: int, place: Place) -> str:
    """Why a dataset of the catalogue cannot be had here, or nothing. (MNIST is looked for by its runs.)"""
    if dataset not in FOLDERS or caches_of(place.data, dataset, size):
        return ""
    if locate(dataset, place.data, place.archives)[0]:
        return ""
    sources = FOLDERS[dataset].files  # {pattern of a file's name: (where it comes from, ...)}
    here = find_archives(list(sources), place.data, place.archives)
    for pattern, (url, _) in sources.items():
        if pattern not in here and not answers(url):
            return f"{dataset}: {pattern} is not here and cannot be downloaded from {url}"
    return ""


@functools.cache
def answers(url: str) -> bool:
    """Whether a source answers with a file and not with a page."""
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.headers.get_content_type() != "text/html"
    except (OSError, ValueError, http.client.HTTPException):
        return False


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


def left_text(plan: list[Missing], records: Records, seeds: list[int] | None) -> str:
    """A line for each table, and each claim under each specification: the seeds that are done of those asked
    for, and the runs that are left. Without `seeds` those count of which runs were missing."""
    lines, still = [], {entry.run.key for entry in plan if not records.get(entry.run)}
    for part in dict.fromkeys(name for entry in plan for name in entry.parts):
        runs = [entry.run for entry in plan if part in entry.parts]
        asked = {run.seed for run in runs} if seeds is None else set(seeds)
        left = [run for run in runs if run.key in still]
        done = asked - {run.seed for run in left}
        lines.append(f"{part}: {len(done)} of {len(asked)} seeds done, {len(left)} runs left")
    first = f"{len(plan) - len(still)} of {len(plan)} missing runs recorded, {len(still)} left"
    return "\n".join([first, *lines])


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
