"""What missing runs would take: whether their datasets can be had here, downloads, memory and disk, and their
time on a device: what work.py counts by what throughput.py knows of the device."""

from __future__ import annotations

import dataclasses
import http.client
import math
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from plumbing.archives import find_archives, has_files, unpacked
from plumbing.catalog import FOLDERS
from plumbing.decoding import caches_of
from plumbing.files import in_units
from reproduce.cards import Card, sharing
from reproduce.cells import Missing
from reproduce.methods import arguments
from reproduce.records import Place, Records, Run, by_training
from reproduce.throughput import DEVICES, Device, Error, measured_here
from reproduce.work import Counted, RunWork, counts_of, retest_of, work_of

from tabulate import tabulate

UNITS = ((86400, "days"), (3600, "h"), (60, "min"))
LIBRARIES = 720 << 20  # bytes of Python and torch in a run's memory (measured on two cores)


# Datasets


def availability(dataset: str, sizes: set[int], place: Place) -> tuple[str, int]:
    """(why a dataset cannot be had here, or nothing; bytes to download, as far as the source says). It can be
    had if its images are there decoded to all these sizes, if its archives are there, or if its sources
    answer with a file and not with a page."""
    if dataset == "digits":
        return "", 0
    if dataset in FOLDERS:
        folder = unpacked(place, dataset)
        if folder and has_files(folder):
            return "", 0
        if sizes and all(caches_of(place.data, dataset, size) for size in sizes):
            return "", 0
        if folder:
            return f"{folder} has no files", 0
    sources = sources_of(dataset)
    here = find_archives(place, list(sources))
    total = 0
    for pattern, url in sources.items():
        if pattern in here:
            continue
        where = f"{pattern} is not in {place.archives or place.data}"
        try:
            kind, length = ask(url)
        except (OSError, ValueError, http.client.HTTPException) as e:
            return f"{where} and cannot be downloaded here ({str(e)[:60]})", 0
        if kind == "text/html":
            return f"{where} and must be downloaded by hand from {url}", 0
        total += length
    return "", total


def sources_of(dataset: str) -> dict[str, str]:
    """{pattern of the name of each file of a dataset: where it comes from}."""
    if dataset.startswith("rotatedmnist"):
        from torchvision.datasets import MNIST
        part = "t10k" if dataset.endswith("t10k") else "train"
        names = f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz"
        return {name: MNIST.mirrors[-1] + name for name in names}
    return {pattern: url for pattern, (url, _) in FOLDERS[dataset].files.items()}


def ask(url: str) -> tuple[str, int]:
    """The type and the length of what a source would send; 0 if it does not say."""
    request = urllib.request.Request(url, method="HEAD")
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.headers.get_content_type(), int(answer.headers.get("Content-Length") or 0)


# The plan


@dataclass(frozen=True)
class Together:
    """Runs that go on at once: how many on how many GPUs, and the line that says why."""

    cards: int
    jobs: int
    line: str


@dataclass
class Plan:
    """The missing runs, the cheapest first once they are timed, and what they need."""

    missing: list[Missing]  # those whose datasets can be had here
    elsewhere: list[Missing] = field(default_factory=list)  # and the others
    downloads: dict[str, int] = field(default_factory=dict)  # {dataset: bytes}
    left_out: dict[str, str] = field(default_factory=dict)  # {dataset: why it cannot be had}
    times: dict[str, float | None] = field(default_factory=dict)  # {key of a run: seconds; None: not known}
    works: dict[str, RunWork | None] = field(default_factory=dict)  # {key of a run: what it computes}
    device: Device = DEVICES["two-cores"]
    error: Error | None = None  # of the times, where they are of records
    uncounted: dict[str, str] = field(default_factory=dict)  # {module: why its steps cannot be counted}
    together: Together | None = None  # how the runs share GPUs, if they do

    @property
    def runs(self) -> list[Missing]:
        return [*self.missing, *self.elsewhere]

    def time_runs(self, records: Records, device: str = "here", tflops: float = 0) -> None:
        """Estimate each run on a device, and sort them."""
        counted = Counted()
        if device == "here":
            self.device, self.error = measured_here(list(records.by_key.values()), counted)
        else:
            self.device = DEVICES[device]
        if tflops:
            self.device, self.error = self.device.with_tflops(tflops), None
        for one in self.runs:
            args = arguments(one.run.module, one.run.flags)
            if not one.run.curve:
                args = dataclasses.replace(args, test_rounds="best")
            work = work_of(one.run.module, args, counted)
            self.works[one.run.key] = work
            self.times[one.run.key] = self.device.seconds(work.total) if work else None
        self.uncounted = counted.failed
        for some in (self.missing, self.elsewhere):
            some[:] = self.in_order(some)

    def in_order(self, runs: list[Missing]) -> list[Missing]:
        """The cheapest trainings first. Of the runs that one training serves, the cheapest trains, and those
        whose whole curve is needed; the others, behind it, are tests of what it has trained."""
        def seconds(one: Missing) -> float:
            return self.times[one.run.key] or math.inf
        by_key = {one.run.key: one for one in runs}
        ordered = []
        for together in by_training([one.run for one in runs]):
            group = [by_key[run.key] for run in together]
            group.sort(key=lambda one: (not one.run.curve, seconds(one)))
            for one in group[1:]:
                work = self.works[one.run.key]
                if work and not one.run.curve:
                    self.works[one.run.key] = retest_of(work)
                    self.times[one.run.key] = self.device.seconds(work.retest)
            ordered.append(group)
        ordered.sort(key=lambda group: seconds(group[0]))
        return [one for group in ordered for one in group]

    def share(self, cards: list[Card], jobs: int, cores: int) -> str:
        """Let the runs whose data are here share GPUs, `jobs` at a time, or as many as the memory and the
        machine's `cores` (0: not known) allow if that is 0; the line that says how many."""
        works = [self.works[one.run.key] for one in self.missing]
        trainings = len(by_training([one.run for one in self.missing]))
        counted = [work for work in works if work is not None]
        jobs, line = sharing(counted, cards, trainings, jobs, cores)
        self.together = Together(len(cards), jobs, line)
        return line

    def left_out_lines(self) -> list[str]:
        """Of each dataset that cannot be had: its runs, and why."""
        runs = Counter(dataset_of(one.run) for one in self.elsewhere)
        return [f"{dataset} ({runs[dataset]} runs): {why}" for dataset, why in self.left_out.items()]


def planned(missing: list[Missing], place: Place) -> Plan:
    """What can be done here of the missing runs; they are not timed yet."""
    plan = Plan([])
    sizes = {}  # {dataset: the sizes of its images}
    for one in missing:
        args = arguments(one.run.module, one.run.flags)
        sizes.setdefault(args.dataset, set()).add(args.image_size)
    with ThreadPoolExecutor(max_workers=16) as pool:  # a source may take seconds to answer
        answers = list(pool.map(lambda dataset: availability(dataset, sizes[dataset], place), sizes))
    for dataset, (why, bytes_to_download) in zip(sizes, answers):
        if why:
            plan.left_out[dataset] = why
        elif bytes_to_download:
            plan.downloads[dataset] = bytes_to_download
    for one in missing:
        if dataset_of(one.run) in plan.left_out:
            plan.elsewhere.append(one)
        else:
            plan.missing.append(one)
    return plan


def dataset_of(run: Run) -> str:
    return arguments(run.module, run.flags).dataset


def of_tables(plan: Plan) -> dict[str, list[Missing]]:
    """The runs that each table needs; one that several need is in each of them."""
    runs = {}
    for one in plan.runs:
        for table in one.tables:
            runs.setdefault(table, []).append(one)
    return dict(sorted(runs.items()))


def total(plan: Plan, runs: list[Missing]) -> float:
    """Seconds of some runs one after the other; those of unknown length count nothing."""
    return sum(plan.times[one.run.key] or 0 for one in runs)


# What sharing a GPU gives, in words for the plan.
ONE_EACH = "one run at a time on a GPU"
AS_MEASURED = "as measured with as many runs at a time on a GPU"
LIKE_THOSE = ("an assumption until it is measured: a GPU does as much in a second as with the number of runs "
              "at a time of the records")
WITHOUT_LOSS = ("an assumption until it is measured: the runs on a GPU share its arithmetic and its "
                "memory's rate without loss, and launch their operators beside each other")


def elapsed(plan: Plan, runs: list[Missing]) -> tuple[float, str]:
    """Seconds of some runs that share GPUs as planned, and what that stands on. Never less than the longest
    of them, nor than the GPUs compute."""
    cards, jobs = plan.together.cards, plan.together.jobs
    each = math.ceil(jobs / cards)
    whole = total(plan, runs)
    longest = max([plan.times[one.run.key] or 0 for one in runs], default=0)
    if plan.device.together == each:
        return max(whole / jobs, longest), AS_MEASURED if each > 1 else ONE_EACH
    if plan.device.together > 1:
        return max(whole / (cards * plan.device.together), longest), LIKE_THOSE
    computing = 0.0
    for one in runs:
        work = plan.works[one.run.key]
        if work:
            computing += plan.device.seconds_of_card(work.total)
    return max(whole / jobs, computing / cards, longest), WITHOUT_LOSS


def plan_text(plan: Plan) -> str:
    """The missing runs with times, memory and disk, subtotals of the tables, bytes to download and on disk,
    and what cannot be had here."""
    if not plan.runs:
        return "Nothing is missing."
    here = {one.run.key for one in plan.missing}
    rows = []
    for one in plan.runs:
        work = plan.works[one.run.key]
        memory, disk = "?", "?"
        if work:
            memory, disk = in_units(work.memory + LIBRARIES), in_units(work.disk)
        data = "yes" if one.run.key in here else "no"
        rows.append([clock(plan.times[one.run.key]), memory, disk, data, ", ".join(one.tables),
                     one.run.command])
    head = ["time", "memory", "disk", "data here", "tables", "command"]
    lines = [tabulate(rows, head, disable_numparse=True), ""]
    rows = []
    for table, runs in of_tables(plan).items():
        rows.append([table, len(runs), clock(total(plan, runs))])
    lines += [tabulate(rows, ["table", "runs", "time, one after the other"], disable_numparse=True), ""]
    lines.append(f"{len(plan.runs)} runs, {clock(total(plan, plan.runs))} one after the other (a run of "
                 "several tables counts once here, and in each of them above), of which with their data here "
                 f"{len(plan.missing)} runs, {clock(total(plan, plan.missing))}")
    if plan.together:
        seconds, why = elapsed(plan, plan.missing)
        lines.append(plan.together.line)
        lines.append(f"Those with their data here so: {clock(seconds)} ({why})")
    lines.append(f"Times on {plan.device.described}")
    lines.append("Memory: of the process, with the decoded images, which are mapped from disk and may be "
                 "dropped from it; disk: at most while it runs, the checkpoint, the one before or the one "
                 "that replaces it, and the best state, without the decoded images")
    kept = [work.kept for work in plan.works.values() if work]
    more = [work.disk - work.kept for work in plan.works.values() if work]
    if kept:
        lines.append(f"Disk of all runs when they are finished: {in_units(sum(kept))}; up to "
                     f"{in_units(max(more))} more for each that is running")
    if plan.error:
        lines.append(f"Error: {plan.error.described}")
    for module, why in plan.uncounted.items():
        lines.append(f"Not counted: {module} ({why})")
    guessed = sorted({dataset_of(one.run) for one in plan.runs if counts_of(dataset_of(one.run))[1]})
    if guessed:
        lines.append(f"Numbers of images are a guess for {', '.join(guessed)}")
    if plan.downloads:
        each = [f"{dataset} {in_units(count)}" for dataset, count in plan.downloads.items()]
        lines.append("To download: " + ", ".join(each))
    each = []
    for (dataset, side), count in sorted(decoded_bytes(plan).items()):
        each.append(f"{dataset} at {side}x{side} {in_units(count)}")
    if each:
        lines.append("Decoded images on disk: " + ", ".join(each))
    lines += [f"Not here, {line}" for line in plan.left_out_lines()]
    return "\n".join(lines)


def plan_data(plan: Plan) -> dict:
    """The plan for a program: seconds, FLOPs and bytes."""
    here = {one.run.key for one in plan.missing}
    runs = []
    for one in plan.runs:
        work = plan.works[one.run.key]
        run = {"command": one.run.command, "tables": one.tables, "seconds": plan.times[one.run.key],
               "data_here": one.run.key in here, "flops": None, "memory": None, "disk": None,
               "disk_finished": None}
        if work:
            run |= {"flops": work.total.flops, "memory": work.memory + LIBRARIES, "disk": work.disk,
                    "disk_finished": work.kept}
        runs.append(run)
    tables = {}
    for table, of_table in of_tables(plan).items():
        tables[table] = {"runs": len(of_table), "seconds": total(plan, of_table)}
    error = None
    if plan.error:
        error = {"runs": plan.error.runs, "median_factor": plan.error.median,
                 "factor_of_nine_in_ten": plan.error.of_nine_in_ten}
    gpus = None
    if plan.together:
        seconds, why = elapsed(plan, plan.missing)
        gpus = {"gpus": plan.together.cards, "jobs": plan.together.jobs, "seconds": seconds, "stands_on": why}
    return {"device": plan.device.described, "error": error, "seconds": total(plan, plan.runs), "gpus": gpus,
            "tables": tables, "runs": runs, "downloads": plan.downloads, "not_here": plan.left_out,
            "not_counted": plan.uncounted}


def decoded_bytes(plan: Plan) -> dict[tuple[str, int], int]:
    """{(dataset, image size): bytes of the decoded images}."""
    sizes = {}
    for one in plan.runs:
        args = arguments(one.run.module, one.run.flags)
        if args.dataset in FOLDERS:
            images = sum(counts_of(args.dataset)[0].values())
            sizes[args.dataset, args.image_size] = images * 3 * args.image_size ** 2
    return sizes


def clock(seconds: float | None) -> str:
    """12 s, 7 min, 3.4 h, 5.0 days."""
    if seconds is None:
        return "?"
    for length, unit in UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
