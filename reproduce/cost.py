"""What missing runs would take: whether their datasets can be had here, downloads and disk, and their time.

A time is an estimate: a training step of each network is timed on this machine, on synthetic images, and
multiplied by the steps of the run.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field

import common
from plumbing.archives import find_archives, unpacked
from plumbing.catalog import FOLDERS
from plumbing.processes import keep_freed_memory
from plumbing.settings import Args, shares
from reproduce.cells import Missing
from reproduce.methods import arguments, builder_of
from reproduce.records import Place, Run

import torch
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

STARTUP = 8.0  # seconds until a run trains: Python, torch, the data (measured on two cores)
FEW = 8  # images with which a step is timed first
QUICK = 1.0  # seconds of a step that is timed with its whole batch
DIGITS = {"d0": 300, "d15": 300, "d30": 300, "d45": 299, "d60": 299, "d75": 299}  # images of each domain
MNIST = {"m0": 1000, "m15": 1000, "m30": 1000, "m45": 1000, "m60": 1000, "m75": 1000}
UNITS = ((86400, "days"), (3600, "h"), (60, "min"))


# Datasets


def is_mnist(dataset: str) -> bool:
    return dataset.startswith("rotatedmnist")


def is_grey(dataset: str) -> bool:
    return dataset == "digits" or is_mnist(dataset)


def availability(dataset: str, place: Place) -> tuple[str, int]:
    """(why a dataset cannot be had here, or nothing; bytes to download, as far as the source says). It can be
    had if its archives are there, or if its sources answer with a file and not with a page."""
    if dataset == "digits":
        return "", 0
    if dataset in FOLDERS and unpacked(place, dataset):
        return "", 0
    sources = sources_of(dataset)
    here = find_archives(place, list(sources))
    total = 0
    for pattern, url in sources.items():
        if pattern in here:
            continue
        where = f"{pattern} is not in {place.archives or place.data}"
        try:
            kind, length = ask(url)
        except (OSError, ValueError) as e:
            return f"{where} and cannot be downloaded here ({str(e)[:60]})", 0
        if kind == "text/html":
            return f"{where} and must be downloaded by hand from {url}", 0
        total += length
    return "", total


def sources_of(dataset: str) -> dict[str, str]:
    """{pattern of the name of each file of a dataset: where it comes from}."""
    if is_mnist(dataset):
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


def counts_of(dataset: str) -> dict[str, int] | None:
    """The images of each domain; None where the catalogue has no counts."""
    if dataset == "digits":
        return DIGITS
    if is_mnist(dataset):
        return MNIST
    counts = {domain: count for domain, (_, count) in FOLDERS[dataset].domains.items()}
    if not counts or None in counts.values():
        return None
    return counts


def images_of(args: Args) -> tuple[list[int], int] | None:
    """Training images of each client and images that an evaluation sees; None where the catalogue has no
    counts."""
    counts = counts_of(args.dataset)
    if counts is None:
        return None
    targets = common.targets_of(args, list(counts))
    sources = args.sources.split(",") if args.sources else list(counts)
    of_targets, of_clients = 0, []
    for domain, count in counts.items():
        count = min(count, args.limit or count)
        if domain in targets:
            of_targets += count
        elif domain in sources:
            of_clients += [count // args.clients_per_domain] * args.clients_per_domain
    if args.protocol == "linear":
        return of_clients, of_targets
    train, val, test = shares(args.split)
    return [int(train * count) for count in of_clients], int(sum(of_clients) * (val + test)) + of_targets


# Time


def calibrated(args: Args, build, channels: int, classes: int) -> float:
    """Seconds of a training step of the network on synthetic images: timed with the whole batch if that is
    quick, else with a few images and in proportion to them."""
    common.seed_all(0)
    keep_freed_memory()
    net = build(args, channels, classes).to(args.device, memory_format=torch.channels_last).train()
    batch = args.batch_size * args.views
    time_step(net, args, channels, FEW)  # the first one makes kernels and buffers
    in_proportion = time_step(net, args, channels, FEW) * batch / FEW
    if in_proportion > QUICK:
        return in_proportion
    return min(time_step(net, args, channels, batch) for _ in range(3))


def time_step(net: nn.Module, args: Args, channels: int, images: int) -> float:
    """Seconds of a forward and backward pass."""
    size = args.crop or args.image_size
    parameters = [p for p in net.parameters() if p.requires_grad]
    x = torch.rand(images, channels, size, size, device=args.device)
    x = x.contiguous(memory_format=torch.channels_last)
    started = time.perf_counter()
    with common.autocast(args):
        if hasattr(net, "loss"):
            loss = net.loss(*x.chunk(2))
        else:
            loss = net(x).float().square().mean()
    torch.autograd.grad(loss, parameters, allow_unused=True)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def estimate(args: Args, seconds_of_step: float) -> float | None:
    """Seconds of a run: its start, its steps, and a third of a step's time for each batch that is evaluated;
    None without counts."""
    images = images_of(args)
    if images is None:
        return None
    train, evaluated = images
    steps = 0
    for count in train:
        steps += args.steps or args.epochs * common.steps_in_epoch(count, args)
    steps *= args.rounds * args.participation
    evaluations = math.ceil(args.rounds / args.eval_every)
    batches = evaluations * evaluated / args.batch_size / args.views
    return STARTUP + seconds_of_step * (steps + batches / 3)


class Times:
    """Estimates of runs; a network, its images and batch are timed once."""

    def __init__(self):
        self.step = {}

    def of(self, run: Run) -> float | None:
        """Seconds of a run; None without counts."""
        args = arguments(run.module, run.flags)
        if counts_of(args.dataset) is None:
            return None
        work = (run.module, args.backbone, args.crop or args.image_size, args.batch_size,
                getattr(args, "ssl", ""), args.precision)
        if work not in self.step:
            channels, classes = 3, 10
            if is_grey(args.dataset):
                channels = 1
            elif FOLDERS[args.dataset].classes:
                classes = len(FOLDERS[args.dataset].classes)
            if args.weights == "imagenet":  # which weights takes no time
                args = dataclasses.replace(args, weights="none")
            self.step[work] = calibrated(args, builder_of(sys.modules[run.module]), channels, classes)
        return estimate(args, self.step[work])


# The plan


@dataclass
class Plan:
    """The missing runs whose datasets can be had, the cheapest first once they are timed, and what they
    need."""

    missing: list[Missing]
    downloads: dict[str, int] = field(default_factory=dict)  # {dataset: bytes}
    left_out: dict[str, str] = field(default_factory=dict)  # {dataset: why it cannot be had}
    runs_left_out: Counter = field(default_factory=Counter)  # {dataset: runs}
    times: dict[str, float | None] = field(default_factory=dict)  # {key of a run: seconds; None: not known}

    def time_runs(self) -> None:
        """Estimate each run, and sort them."""
        times = Times()
        for one in tqdm(self.missing, "calibration", disable=None, leave=False):
            self.times[one.run.key] = times.of(one.run)
        self.missing.sort(key=lambda one: self.times[one.run.key] or math.inf)

    def left_out_lines(self) -> list[str]:
        """Of each dataset that cannot be had: its runs, and why."""
        lines = []
        for dataset, why in self.left_out.items():
            lines.append(f"{dataset} ({self.runs_left_out[dataset]} runs): {why}")
        return lines


def planned(missing: list[Missing], place: Place) -> Plan:
    """What can be done of the missing runs; they are not timed yet."""
    plan = Plan([])
    asked = set()
    for one in missing:
        dataset = dataset_of(one.run)
        if dataset not in asked:
            asked.add(dataset)
            why, bytes_to_download = availability(dataset, place)
            if why:
                plan.left_out[dataset] = why
            elif bytes_to_download:
                plan.downloads[dataset] = bytes_to_download
        if dataset in plan.left_out:
            plan.runs_left_out[dataset] += 1
        else:
            plan.missing.append(one)
    return plan


def dataset_of(run: Run) -> str:
    return arguments(run.module, run.flags).dataset


def plan_text(plan: Plan) -> str:
    """The missing runs and their times, bytes to download and on disk, and the datasets that are left out."""
    rows = []
    for one in plan.missing:
        rows.append([clock(plan.times[one.run.key]), ", ".join(one.tables), one.run.command])
    lines = []
    if rows:
        lines.append(tabulate(rows, ["time here", "tables", "command"], disable_numparse=True))
        lines.append(total_time(plan))
    elif not plan.left_out:
        lines.append("Nothing is missing.")
    if plan.downloads:
        each = [f"{dataset} {size(count)}" for dataset, count in plan.downloads.items()]
        lines.append("To download: " + ", ".join(each))
    each = []
    for (dataset, side), count in sorted(decoded_bytes(plan).items()):
        each.append(f"{dataset} at {side}x{side} {size(count)}")
    if each:
        lines.append("Decoded images on disk: " + ", ".join(each))
    lines += [f"Left out, {line}" for line in plan.left_out_lines()]
    return "\n".join(lines)


def total_time(plan: Plan) -> str:
    known = [seconds for seconds in plan.times.values() if seconds]
    line = (f"{len(plan.missing)} runs, {clock(sum(known))} one after the other, by a calibration of single "
            f"steps on this machine")
    unknown = len(plan.missing) - len(known)
    if unknown:
        line += f"; {unknown} of unknown size"
    return line


def decoded_bytes(plan: Plan) -> dict[tuple[str, int], int]:
    """{(dataset, image size): bytes of the decoded images}, where the catalogue has counts."""
    sizes = {}
    for one in plan.missing:
        args = arguments(one.run.module, one.run.flags)
        counts = counts_of(args.dataset) if args.dataset in FOLDERS else None
        if counts:
            sizes[args.dataset, args.image_size] = sum(counts.values()) * 3 * args.image_size ** 2
    return sizes


def size(count: float) -> str:
    """12.3 MiB, 1.5 GiB."""
    if count >= 2 ** 30:
        return f"{count / 2 ** 30:.1f} GiB"
    return f"{count / 2 ** 20:.1f} MiB"


def clock(seconds: float | None) -> str:
    """12 s, 7 min, 3.4 h, 5.0 days."""
    if seconds is None:
        return "?"
    for length, unit in UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
