"""Runs the missing runs of reproduce_tables.py: on this machine, several at once, or on a cluster; estimates their time.

Nothing is lost or repeated: a run's process holds a lock while it is going on, also when its runner is gone, so that another runner in
the same folder passes it by; a finished run is one line of the records, written under a lock by the run itself; a run that was cut off
goes on from its checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

import common
import domains
from basics import Stop, locked
from networks import backbone

ROOT = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Place:
    """Where the runs find data and leave their results."""

    data: str = "data"
    archives: str = ""
    record: str = "results/runs.jsonl"


# Datasets


def availability(dataset: str, place: Place) -> tuple[str, int]:
    """(why a dataset cannot be had here, or nothing; bytes to download, as far as the source says). It can be had if its archives are
    there, or if its sources answer with a file and not with a page."""
    if dataset == "digits":
        return "", 0
    if dataset.startswith("rotatedmnist"):
        kind = "t10k" if dataset.endswith("t10k") else "train"
        names = [f"{kind}-{part}-ubyte.gz" for part in ("images-idx3", "labels-idx1")]
        needed = {name: domains.torchvision.datasets.MNIST.mirrors[-1] + name for name in names}
    else:
        if domains.unpacked(place, dataset):
            return "", 0
        needed = {pattern: url for pattern, (url, _) in domains.FOLDERS[dataset].files.items()}
    total, there = 0, domains.find_archives(place, list(needed))
    for pattern in (p for p in needed if p not in there):
        where = f"{pattern} is not in {place.archives or place.data}"
        try:
            with urllib.request.urlopen(urllib.request.Request(needed[pattern], method="HEAD"), timeout=5) as answer:
                if answer.headers.get_content_type() == "text/html":
                    return f"{where} and must be downloaded by hand from {needed[pattern]}", 0
                total += int(answer.headers.get("Content-Length") or 0)
        except (OSError, ValueError) as e:
            return f"{where} and cannot be downloaded here ({str(e)[:60]})", 0
    return "", total


def size(n: float) -> str:
    """12.3 MiB, 1.5 GiB."""
    return f"{n / 2 ** 30:.1f} GiB" if n >= 2 ** 30 else f"{n / 2 ** 20:.1f} MiB"


# Time


STARTUP = 8.0  # seconds until a run trains: Python, torch, the data (measured on two cores)


FEW = 8  # images with which a step is timed first


def calibrated(args: common.Args, build, channels: int, classes: int) -> float:
    """Seconds of a training step of the network on synthetic images: timed with the whole batch if that is quick, else with a few images and
    in proportion to them."""
    common.seed_all(0)
    common.keep_freed_memory()
    net = build(args, channels, classes).to(args.device, memory_format=torch.channels_last).train()
    parameters = [p for p in net.parameters() if p.requires_grad]
    size, batch = args.crop or args.image_size, args.batch_size * args.views

    def step(images: int) -> float:
        x = torch.rand(images, channels, size, size, device=args.device).contiguous(memory_format=torch.channels_last)
        started = time.perf_counter()
        with common.autocast(args):
            loss = net.loss(*x.chunk(2)) if hasattr(net, "loss") else net(x).float().square().mean()
        torch.autograd.grad(loss, parameters, allow_unused=True)
        if x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    step(FEW)  # the first one makes kernels and buffers
    few = step(FEW)
    return few * batch / FEW if few * batch / FEW > 1 else min(step(batch) for _ in range(3))


def images_of(args: common.Args) -> tuple[list[int], int] | None:
    """Training images of each client and images that an evaluation sees, by the catalogue; None where it has no counts."""
    if args.dataset == "digits":
        counts = {f"d{i}": n for i, n in zip(range(0, 90, 15), (300, 300, 300, 299, 299, 299))}
    elif args.dataset.startswith("rotatedmnist"):
        counts = {f"m{i}": 1000 for i in range(0, 90, 15)}
    else:
        counts = {d: n for d, (_, n) in domains.FOLDERS[args.dataset].domains.items()}
    if not counts or None in counts.values():
        return None
    counts = {d: min(n, args.limit or n) for d, n in counts.items()}
    targets = common.targets_of(args, list(counts))
    sources = [n for d, n in counts.items() if d not in targets and (not args.sources or d in args.sources.split(","))]
    sources = [n // args.clients_per_domain for n in sources for _ in range(args.clients_per_domain)]
    train, val, test = common.shares(args.split)
    if args.protocol == "linear":
        return sources, sum(counts[t] for t in targets)
    return [int(train * n) for n in sources], int(sum(sources) * (val + test)) + sum(counts[t] for t in targets)


def estimate(args: common.Args, seconds_of_step: float) -> float | None:
    """Seconds of a run: its start, its steps, and a third of a step's time for each batch that is evaluated; None without counts."""
    known = images_of(args)
    if known is None:
        return None
    train, evaluated = known
    each = [args.steps or args.epochs * len(common.cut_batches(torch.arange(n), args)) for n in train]
    steps = args.rounds * sum(each) * args.participation
    evaluations = -(-args.rounds // args.eval_every) * evaluated / args.batch_size / args.views
    return STARTUP + seconds_of_step * (steps + evaluations / 3)


class Times:
    """Estimates of runs; a network, its images and batch are timed once."""

    def __init__(self):
        self.step = {}

    def of(self, run, arguments) -> float | None:
        args = arguments(run.module, run.flags)
        if images_of(args) is None:
            return None
        what = (run.module, args.backbone, args.crop or args.image_size, args.batch_size, getattr(args, "ssl", ""), args.precision)
        if what not in self.step:
            module = sys.modules[run.module]
            channels = 1 if args.dataset.startswith(("digits", "rotatedmnist")) else 3
            classes = 10 if channels == 1 else len(domains.FOLDERS[args.dataset].classes or range(10))
            if args.weights == "imagenet":
                args = dataclasses.replace(args, weights="none")
            self.step[what] = calibrated(args, getattr(module, "build", backbone), channels, classes)
        return estimate(args, self.step[what])


def clock(seconds: float | None) -> str:
    """12 s, 7 min, 3.4 h, 5.0 days."""
    if seconds is None:
        return "?"
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


# Execution


def claim(run):
    """The lock of a run, held by whoever is on it in this folder."""
    name = hashlib.blake2b(run.key.encode(), digest_size=8).hexdigest()
    return locked(ROOT / "runs" / ".claims" / f"{name}.lock", wait=False)


def command_of(run, place: Place) -> list[str]:
    places = ["--data", place.data] * (place.data != str(ROOT / "data")) + ["--archives", place.archives] * bool(place.archives)
    return [sys.executable, *run.words, *places, "--record", place.record]


def execute(run, place: Place, recorded, env: dict | None = None, started=lambda process: None) -> tuple[str, str]:
    """Run one run to its end: ("done" | "skipped" | "failed", its last lines). Skipped: recorded, or another runner has it."""
    try:
        with claim(run) as lock:
            if recorded(run):
                return "skipped", "recorded meanwhile"
            process = subprocess.Popen(command_of(run, place), cwd=ROOT, env=os.environ | (env or {}), text=True, errors="replace",
                                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=(lock.fileno(),))
            started(process)
            said = process.communicate()[0]
            lines = [line for line in said.replace("\r", "\n").splitlines() if line.strip()][-3:]
            return ("done" if process.returncode == 0 else "failed"), "\n".join(lines)
    except Stop:
        return "skipped", "another runner is on it"
    except OSError as e:
        return "failed", f"it could not be started: {e}"


@contextlib.contextmanager
def interruptible():
    """SIGTERM and SIGHUP end the runner as Ctrl-C does."""
    def interrupt(*_):
        raise KeyboardInterrupt
    before = {s: signal.signal(s, interrupt) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


@dataclass
class Local:
    """Runs on this machine, `jobs` at a time, on the given GPUs in turn; Ctrl-C stops them: each goes on from its last checkpoint."""

    jobs: int
    gpus: list[str] = field(default_factory=list)

    def run(self, runs: list, place: Place, recorded, estimates: dict) -> Counter:
        todo, counts, lock = queue.SimpleQueue(), Counter(), threading.Lock()
        processes, stopping = set(), threading.Event()
        for r in runs:
            todo.put(r)
        time_of = lambda run: estimates.get(run.key) or 60.0
        wide = bool(sys.stderr and sys.stderr.isatty())
        bar = tqdm(total=sum(map(time_of, runs)), unit="s", desc=f"{len(runs)} runs", mininterval=0.5 if wide else 30, dynamic_ncols=wide,
                   bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}")

        def on(process) -> None:
            """A run has started; if Ctrl-C came meanwhile, it stops at once."""
            with lock:
                processes.add(process)
                if stopping.is_set():
                    interrupt(process)

        def work(n: int) -> None:
            threads = max(1, (os.cpu_count() or 1) // self.jobs)
            env = {"OMP_NUM_THREADS": str(threads)} | ({"CUDA_VISIBLE_DEVICES": self.gpus[n % len(self.gpus)]} if self.gpus else {})
            while not stopping.is_set():
                try:
                    run = todo.get_nowait()
                except queue.Empty:
                    return
                with lock:
                    counts["running"] += 1
                    bar.set_postfix({k: v for k, v in counts.items() if v})
                try:
                    outcome, said = execute(run, place, recorded, env, on)
                except Exception as e:  # whatever a run dies of is reported, the others go on
                    outcome, said = "failed", f"{type(e).__name__}: {e}"
                with lock:
                    processes.difference_update([p for p in processes if p.poll() is not None])
                    counts["running"] -= 1
                    outcome = "interrupted" if stopping.is_set() and outcome == "failed" else outcome
                    counts[outcome] += 1
                    bar.update(time_of(run))
                    bar.set_postfix({k: v for k, v in counts.items() if v})
                    if outcome == "failed":
                        tqdm.write(f"failed: {run.command}\n    {said.replace(chr(10), chr(10) + '    ')}", file=sys.stderr)

        workers = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(self.jobs)]
        with interruptible():
            try:
                for w in workers:
                    w.start()
                while any(w.is_alive() for w in workers):
                    time.sleep(0.1)
            except KeyboardInterrupt:
                with lock:
                    stopping.set()
                    for p in processes:
                        interrupt(p)
                for w in workers:
                    if w.ident:
                        w.join()
                counts["stopped"] = 1
        bar.close()
        return counts


def interrupt(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)


@dataclass
class Slurm:
    """Runs as jobs of a Slurm cluster, through submitit; `cluster` is "slurm", or "local" for a test on this machine."""

    jobs: int
    cluster: str = "slurm"
    folder: str = "runs/slurm"
    timeout_min: int = 24 * 60
    gpus: int = 1

    def __post_init__(self):
        if importlib.util.find_spec("submitit") is None:
            raise Stop("--executor slurm needs submitit: pip install submitit", 2)

    def run(self, runs: list, place: Place, recorded, estimates: dict) -> Counter:
        if not runs:
            return Counter()
        import submitit
        try:
            executor = submitit.AutoExecutor(folder=str(ROOT / self.folder), cluster=self.cluster)
        except RuntimeError as e:
            raise Stop(f"--executor slurm: {e}", 2)
        executor.update_parameters(timeout_min=self.timeout_min, **({"slurm_array_parallelism": self.jobs, "gpus_per_node": self.gpus,
                                                                     "cpus_per_task": 4} if self.cluster == "slurm" else {}))
        submitted = executor.map_array(_job, runs, [place] * len(runs))
        counts = Counter()
        with interruptible(), tqdm(total=len(runs), unit="run", desc="jobs", disable=None) as bar:
            try:
                for run, job in zip(runs, submitted):
                    try:
                        outcome, said = job.result()
                    except Exception as e:  # whatever a job dies of is reported, the others go on
                        outcome, said = "failed", (str(e).strip() or type(e).__name__).splitlines()[-1]
                    counts[outcome] += 1
                    bar.update()
                    if outcome == "failed":
                        tqdm.write(f"failed: {run.command}\n    {said}", file=sys.stderr)
            except KeyboardInterrupt:
                for job in submitted:
                    job.cancel()
                counts["stopped"] = 1
        return counts


def _job(run, place: Place) -> tuple[str, str]:
    """What a job on a cluster does: the run, unless its record has appeared meanwhile."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    import reproduce_tables
    return execute(run, place, lambda r: reproduce_tables.Records(Path(place.record)).get(r) is not None)
