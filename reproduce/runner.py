"""Runs what is missing: on this machine, several runs at once, or on a cluster.

Runs that differ in flags that act at test time alone are trained once (retest.py): the first of them trains,
the others test what it has trained.

Nothing is lost or repeated: a run's process holds a lock while it is going on, also when its runner is gone,
so that another runner in the same folder passes it by; a finished run is one line of the records, written
under a lock by the run itself; a run that was cut off goes on from its checkpoint. What a run prints is in
log.txt in its folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from plumbing.errors import RUNS_ON_GPU, Stop
from plumbing.files import locked
from plumbing.runfolder import folder_of
from plumbing.settings import flag_of
from plumbing.signals import handled, interrupt
from reproduce.cards import shown_as
from reproduce.measures.finished import FILES
from reproduce.measuring import folder_of_run
from reproduce.methods import ROOT, arguments, short_name
from reproduce.records import Place, Records, Run, by_training, work_of
from reproduce.retest import flags_at_test
from reproduce.throughput import arguments_of

from tqdm import tqdm

UNKNOWN = 60.0  # seconds by which a run of unknown length moves the progress bar
EVERY = 5.0, 30.0  # seconds between two looks at the runs that are going on: on a terminal, in a file
SHOWN = 4  # of them at most on the bar
WARNED = 180  # seconds before its end that a job of a cluster is told of it


# One run


def claim(run: Run):
    """The lock of a run, held by whoever is on it in this folder."""
    name = hashlib.blake2b(run.key.encode(), digest_size=8).hexdigest()
    return locked(ROOT / "runs" / ".claims" / f"{name}.lock", wait=False)


def commands_of(run: Run, place: Place, records: Records) -> list[list[str]]:
    """What does a run, with the folders of this machine: the test of what another one has trained, if there
    is one, and then, if that is refused, its own training."""
    folders, device = [], []
    if place.device:
        device = ["--device", place.device]
    if place.data != str(ROOT / "data"):
        folders += ["--data", place.data]
    if place.archives:
        folders += ["--archives", place.archives]
    commands = []
    trained = trained_for(run, records)
    if trained:
        commands.append([sys.executable, "-m", "reproduce.retest", *trained])
    commands.append([sys.executable, *run.words, *device, "--no-figures"])
    return [[*words, *folders, "--record", place.record] for words in commands]


def trained_for(run: Run, records: Records) -> list[str]:
    """The folder of a finished run by the code of now from which a run differs in flags that act at test time
    alone, and these flags; empty if there is none here."""
    if run.curve:
        return []
    args = dataclasses.replace(arguments(run.module, run.flags), seed=run.seed)
    names = [f.name for f in flags_at_test(type(args))]
    if args.protocol != "lodo" or not names:
        return []
    for record in records.by_key.values():
        theirs = record["args"]
        near = record["method"] == short_name(run.module) and theirs.get("precision") == run.precision
        if not near or "trained_by" in record or records.stale(record):
            continue
        if work_of(record["method"], type(args), theirs, at_test=False) != run.training:
            continue
        folder = ROOT / folder_of(arguments_of(record))
        if all((folder / name).is_file() for name in ("result.json", *FILES.values())):
            flags = []
            for name in names:
                flags += [flag_of(name), str(getattr(args, name))]
            return [str(folder), *flags]
    return []


def execute(run: Run, place: Place, env: dict | None = None,
            started: Callable | None = None) -> tuple[str, str]:
    """Run one run to its end: ("done" | "skipped" | "failed", its last lines). Skipped: recorded, or another
    runner has it.

    `started` is called with its process when that is there.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(claim(run))
        except Stop:
            return "skipped", "another runner is on it"
        records = Records(Path(place.record))
        if records.get(run):
            return "skipped", "recorded meanwhile"
        path = folder_of_run(run) / "log.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(open(path, "a"))
            log.write(f"$ {run.command}\n")
            log.flush()
            for words in commands_of(run, place, records):
                begun = log.tell()
                process = subprocess.Popen(
                    words, cwd=ROOT, env=os.environ | (env or {}), stdout=log, stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for us to pass on
                    pass_fds=(lock.fileno(),))  # it holds the lock too
                if started:
                    started(process)
                code = process.wait()
                log.seek(0, os.SEEK_END)
                if code not in (1, 2):  # done, or ended by a signal
                    break
        except OSError as e:
            return "failed", f"it could not be started: {e}"
    said = path.read_bytes()[begun:].decode(errors="replace")
    if code == 0:
        return "done", last_lines(said, 3)
    if code == 2:  # refused, in one line
        return "failed", last_lines(said, 1)
    return "failed", f"{last_lines(said, 3)}\nall it said: {path}"


def last_lines(said: str, count: int) -> str:
    """The last lines that are not empty."""
    lines = [line for line in said.replace("\r", "\n").splitlines() if line.strip()]
    return "\n".join(lines[-count:])


def rounds_done(folder: Path) -> int:
    """The rounds that a run has in its folder; 0 if there is none."""
    try:
        lines = (folder / "timing.jsonl").read_text().splitlines()
        return json.loads(lines[-1])["round"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        # Not there, or its last line is being written.
        return 0


def report_failure(run: Run, said: str) -> None:
    """Say above the progress bar that a run has failed, and its last lines."""
    indented = said.replace("\n", "\n    ")
    tqdm.write(f"failed: {run.command}\n    {indented}", file=sys.stderr)


# On this machine


@dataclass
class Local:
    """Runs on this machine, `jobs` at a time, each on that of the given GPUs on which the fewest are; Ctrl-C
    stops them: each goes on from its last checkpoint."""

    jobs: int
    gpus: list[str] = field(default_factory=list)

    def run(self, runs: list[Run], place: Place, estimates: dict[str, float | None]) -> Counter:
        """Run all; returns how many are done, skipped, failed or interrupted, and "stopped" after Ctrl-C."""
        if self.gpus:
            place = dataclasses.replace(place, device="cuda")
        pool = Pool(runs, place, estimates, self.environment, Shared(self.gpus))
        workers = []
        for _ in range(self.jobs):
            workers.append(threading.Thread(target=pool.work, daemon=True))
        with handled(interrupt):
            try:
                for worker in workers:
                    worker.start()
                while any(worker.is_alive() for worker in workers):
                    time.sleep(0.1)
                    pool.look()
            except KeyboardInterrupt:
                tqdm.write("stopping after the rounds that are going on; once more: at once", file=sys.stderr)
                pool.stop()
                wait_for(workers, pool)
                pool.counts["stopped"] = 1
        pool.bar.close()
        return pool.counts

    def environment(self, gpu: str = "") -> dict[str, str]:
        """What a run finds: its share of the processors, and one GPU."""
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        env = {"OMP_NUM_THREADS": str(threads)}
        if gpu:
            env["CUDA_VISIBLE_DEVICES"] = shown_as(gpu)
            env[RUNS_ON_GPU] = str(math.ceil(self.jobs / len(self.gpus)))
        return env


class Shared:
    """GPUs that runs share: who asks has the one on which the fewest runs are."""

    def __init__(self, gpus: list[str]):
        self.runs = dict.fromkeys(gpus, 0)
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def one(self):
        """The name of a GPU as long as a run is on it; empty if there are none to share."""
        if not self.runs:
            yield ""
            return
        with self.lock:
            gpu = min(self.runs, key=self.runs.get)
            self.runs[gpu] += 1
        try:
            yield gpu
        finally:
            with self.lock:
                self.runs[gpu] -= 1


def wait_for(workers: list[threading.Thread], pool: Pool) -> None:
    """Wait until the interrupted runs have ended; a further signal is passed on to them."""
    while any(worker.is_alive() for worker in workers):
        try:
            time.sleep(0.1)
        except KeyboardInterrupt:
            pool.stop()


@dataclass
class Progress:
    """A run that is going on: rounds done before it was started here, all of them, and the seconds of the
    rest by the estimate."""

    run: Run
    folder: Path
    before: int
    rounds: int
    seconds: float


class Pool:
    """The runs that several workers share, those that are going on, and how many have ended how."""

    def __init__(self, runs: list[Run], place: Place, estimates: dict[str, float | None],
                 environment: Callable, gpus: Shared):
        self.place, self.estimates = place, estimates
        self.environment, self.gpus = environment, gpus
        self.todo = queue.SimpleQueue()
        for group in by_training(runs):
            self.todo.put(group)
        self.lock = threading.Lock()  # of what follows
        self.processes: set[subprocess.Popen] = set()
        self.stopping = False
        self.counts = Counter()
        self.progress: dict[str, Progress] = {}  # of the runs that are going on, by their keys
        self.ended_seconds = 0.0
        self.looked = 0.0
        seconds = sum(self.time_of(run) for run in runs)
        wide = bool(sys.stderr and sys.stderr.isatty())
        self.every = EVERY[0] if wide else EVERY[1]
        self.bar = tqdm(total=seconds, unit="s", desc=f"{len(runs)} runs", dynamic_ncols=wide,
                        mininterval=0.5 if wide else 30,
                        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}")

    def time_of(self, run: Run) -> float:
        return self.estimates.get(run.key) or UNKNOWN

    def work(self) -> None:
        """What a worker does: one run after the other, until none is left."""
        while not self.stopping:
            try:
                group = self.todo.get_nowait()
            except queue.Empty:
                return
            with self.gpus.one() as gpu:
                for run in group:
                    if not self.stopping:
                        self.work_on(run, self.environment(gpu))

    def work_on(self, run: Run, env: dict[str, str]) -> None:
        with self.lock:
            self.counts["running"] += 1
            self.begin(run)
        try:
            outcome, said = execute(run, self.place, env, self.started)
        except Exception as e:  # whatever a run dies of is reported, the others go on
            outcome, said = "failed", f"{type(e).__name__}: {e}"
        self.ended(run, outcome, said)

    def started(self, process: subprocess.Popen) -> None:
        """A run has started; if Ctrl-C came meanwhile, it stops at once."""
        with self.lock:
            self.processes.add(process)
            if self.stopping:
                tell_to_end(process)

    def ended(self, run: Run, outcome: str, said: str) -> None:
        with self.lock:
            self.processes = {process for process in self.processes if process.poll() is None}
            if self.stopping and outcome == "failed":
                outcome = "interrupted"
            self.counts["running"] -= 1
            self.counts[outcome] += 1
            progress = self.progress.pop(run.key)
            self.ended_seconds += progress.seconds
            self.show()
            if outcome == "failed":
                report_failure(run, said)

    def begin(self, run: Run) -> None:
        """A run starts, or goes on: what it has done before takes no time now."""
        rounds = arguments(run.module, run.flags).rounds
        folder = folder_of_run(run)
        before = min(rounds_done(folder), rounds)
        progress = Progress(run, folder, before, rounds, self.time_of(run) * (1 - before / rounds))
        self.bar.total -= self.time_of(run) - progress.seconds
        self.progress[run.key] = progress
        self.show()

    def look(self) -> None:
        """Every few seconds: how far the runs are that are going on."""
        if time.monotonic() - self.looked < self.every:
            return
        self.looked = time.monotonic()
        with self.lock:
            self.show()

    def show(self) -> None:
        """The bar: seconds by the estimates, in proportion to the rounds that are done; the time that is left
        is by the pace of this machine."""
        done = self.ended_seconds
        going_on = []
        for progress in self.progress.values():
            now = max(progress.before, min(rounds_done(progress.folder), progress.rounds))
            if progress.rounds > progress.before:
                done += progress.seconds * (now - progress.before) / (progress.rounds - progress.before)
            going_on.append(f"{progress.run.module} {now}/{progress.rounds}")
        self.bar.n = min(done, self.bar.total)
        counted = [f"{what}={n}" for what, n in self.counts.items() if n]
        self.bar.set_postfix_str(", ".join([*counted, *going_on[:SHOWN]]))

    def stop(self) -> None:
        """Interrupt what is going on; nothing else starts."""
        with self.lock:
            self.stopping = True
            for process in self.processes:
                tell_to_end(process)


def tell_to_end(process: subprocess.Popen) -> None:
    """SIGTERM: a run that was started in the background of a script ignores SIGINT."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)


def has_ended(process: subprocess.Popen, within: float) -> bool:
    """Whether a process ends within some seconds; without the lock of its `wait`, in which a signal's handler
    may find the program."""
    began = time.monotonic()
    while time.monotonic() - began < within:
        try:
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                return True
        except ChildProcessError:  # it was waited for meanwhile
            return True
        time.sleep(0.1)
    return False


# On a cluster


@dataclass
class Slurm:
    """Runs as jobs of a Slurm cluster, through submitit; `cluster` is "slurm", or "local" for a test on this
    machine. A job whose time is over is queued again and goes on from the run's checkpoint."""

    jobs: int
    cluster: str = "slurm"
    folder: str = "runs/slurm"
    hours: float = 24.0
    gpus: int = 1
    partition: str = ""  # empty, as the two below: the cluster's own
    account: str = ""
    memory_gb: float = 0.0

    def __post_init__(self):
        if importlib.util.find_spec("submitit") is None:
            raise Stop("--executor slurm needs submitit: pip install submitit", 2)

    def run(self, runs: list[Run], place: Place, estimates: dict[str, float | None]) -> Counter:
        """Submit all as an array of jobs and wait for them; returns what Local.run does. The runs that one
        training serves are one job."""
        counts = Counter()
        if not runs:
            return counts
        groups = by_training(runs)
        submitted = self.executor().map_array(Job(), groups, [place] * len(groups))
        with handled(interrupt), tqdm(total=len(runs), unit="run", desc="jobs", disable=None) as bar:
            try:
                for group, submission in zip(groups, submitted):
                    for run, (outcome, said) in zip(group, results_of(submission, group)):
                        counts[outcome] += 1
                        bar.update()
                        if outcome == "failed":
                            report_failure(run, said)
            except KeyboardInterrupt:
                for submission in submitted:
                    submission.cancel()
                counts["stopped"] = 1
        return counts

    def executor(self):
        """submitit's, with what a job asks for."""
        import submitit
        try:
            executor = submitit.AutoExecutor(folder=str(ROOT / self.folder), cluster=self.cluster)
        except RuntimeError as e:
            raise Stop(f"--executor slurm: {e}", 2)
        executor.update_parameters(**self.parameters())
        return executor

    def parameters(self) -> dict:
        """What a job asks for, in submitit's words."""
        asked = {"timeout_min": max(1, round(60 * self.hours))}
        if self.memory_gb:
            asked["mem_gb"] = self.memory_gb
        if self.cluster == "slurm":
            asked |= {"slurm_array_parallelism": self.jobs, "gpus_per_node": self.gpus, "cpus_per_task": 4,
                      "slurm_signal_delay_s": WARNED}
            if self.partition:
                asked["slurm_partition"] = self.partition
            if self.account:
                asked["slurm_account"] = self.account
        return asked


def results_of(submission, group: list[Run]) -> list[tuple[str, str]]:
    """Wait for a job: what `execute` has returned there for each of its runs, or what the job died of."""
    try:
        return submission.result()
    except Exception as e:  # whatever a job dies of is reported, the others go on
        why = (str(e).strip() or type(e).__name__).splitlines()[-1]
        return [("failed", why)] * len(group)


class Job:
    """What a job on a cluster does: the runs that one training serves, unless their records have appeared
    meanwhile."""

    def __init__(self):
        self.process, self.at = None, 0

    def __call__(self, group: list[Run], place: Place) -> list[tuple[str, str]]:
        os.chdir(ROOT)
        sys.path.insert(0, str(ROOT))
        outcomes = []
        for self.at, run in enumerate(group):
            self.process = None
            outcomes.append(execute(run, place, None, self.started))
        return outcomes

    def started(self, process: subprocess.Popen) -> None:
        self.process = process

    def checkpoint(self, group: list[Run], place: Place):
        """submitit calls it when the job's time is over or another job takes its place: the run ends, its
        checkpoint is kept, and the job is queued again."""
        import submitit
        if self.process:
            tell_to_end(self.process)
            if not has_ended(self.process, WARNED - 30):
                tell_to_end(self.process)  # its round is longer than the warning: at once
                has_ended(self.process, 20)
            group = [*group]
            group[self.at] = dataclasses.replace(group[self.at], replace=False)  # its folder is of this code
        return submitit.helpers.DelayedSubmission(Job(), group, place)
