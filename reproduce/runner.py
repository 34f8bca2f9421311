"""Runs what is missing: on this machine, several runs at once, or on a cluster.

Runs that differ in flags that act at test time alone are trained once: the first of them trains, the others
test what it has trained (measures/adaptation.py).

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
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from plumbing.errors import Stop
from plumbing.files import locked
from plumbing.runfolder import folder_of
from plumbing.settings import flag_of
from plumbing.signals import handled, interrupt
from reproduce.measures.adaptation import flags_at_test
from reproduce.measures.finished import FILES
from reproduce.measuring import folder_of_run
from reproduce.methods import ROOT, arguments, short_name
from reproduce.records import Place, Records, Run, by_training, known_arguments, work_of

from tqdm import tqdm

WARNED = 180  # seconds before its end that a job of a cluster is told of it


# Processes


class Processes:
    """The processes that several threads have started: all of them can be told to end."""

    def __init__(self):
        self.lock = threading.Lock()
        self.running: set[subprocess.Popen] = set()
        self.stopping = False

    def run(self, words: list[str], env: dict[str, str], enough: Callable[[], bool] | None = None,
            **how) -> int:
        """Run a command to its end, or until `enough` says so; returns its exit code."""
        process = subprocess.Popen(words, cwd=ROOT, env=os.environ | env, stderr=subprocess.STDOUT,
                                   start_new_session=True, **how)  # Ctrl-C is for us to pass on
        with self.lock:
            self.running.add(process)
            if self.stopping:
                tell_to_end(process)
        try:
            while enough and process.poll() is None:
                if enough():
                    tell_to_end(process)
                    break
                time.sleep(0.2)
            return process.wait()
        finally:
            with self.lock:
                self.running.discard(process)

    def end(self) -> None:
        """Tell all that they are to end; what starts later ends at once."""
        with self.lock:
            self.stopping = True
            for process in self.running:
                tell_to_end(process)


def tell_to_end(process: subprocess.Popen) -> None:
    """SIGTERM: a run that was started in the background of a script ignores SIGINT."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)


def side_by_side(jobs: int, work: Callable, items: list, processes: Processes) -> bool:
    """Do `work(number, item)` for all items, in `jobs` threads. Whether all was done: Ctrl-C ends the
    processes of the items that are going on, and no other begins."""
    with handled(interrupt), ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(work, number, item) for number, item in enumerate(items)]
        try:
            wait_for(futures)
            return True
        except KeyboardInterrupt:
            tqdm.write("stopping after the rounds that are going on; once more: at once", file=sys.stderr)
        for future in futures:
            future.cancel()
        while True:
            processes.end()
            with contextlib.suppress(KeyboardInterrupt):
                wait_for([future for future in futures if not future.cancelled()])
                return False


def wait_for(futures: list[Future]) -> None:
    for future in as_completed(futures):
        future.result()


# One run


def claim(run: Run):
    """The lock of a run, held by whoever is on it in this folder."""
    name = hashlib.blake2b(run.key.encode(), digest_size=8).hexdigest()
    return locked(ROOT / "runs" / ".claims" / f"{name}.lock", wait=False)


def commands_of(run: Run, place: Place, records: Records) -> list[list[str]]:
    """What does a run: the test of what another one has trained, if there is one, and then, if that is
    refused, its own training."""
    commands = []
    trained = trained_for(run, records)
    if trained:
        commands.append([sys.executable, "-m", "reproduce.measures", "adaptation", *trained])
    commands.append([sys.executable, *run.words, "--no-figures"])
    return [[*words, *place.flags, "--record", place.record] for words in commands]


def trained_for(run: Run, records: Records) -> list[str]:
    """The folder of a finished run from which a run differs in flags that act at test time alone, and these
    flags; empty if there is none here."""
    args = dataclasses.replace(arguments(run.module, run.flags), seed=run.seed)
    flags = flags_at_test(args)
    if run.curve or args.protocol != "lodo" or not flags:
        return []
    for record in records.by_key.values():
        theirs = record["args"]
        near = record["method"] == short_name(run.module) and theirs.get("precision") == run.precision
        if not near or "trained_by" in record or records.differs(record):
            continue
        if work_of(record["method"], type(args), theirs, at_test=False) != run.training:
            continue
        folder = ROOT / folder_of(known_arguments(type(args), theirs))
        if all((folder / name).is_file() for name in ("result.json", *FILES.values())):
            values = " ".join(f"{flag_of(name)} {value}" for name, value in flags.items())
            return [str(folder), "--flags", values]
    return []


def execute(run: Run, place: Place, processes: Processes,
            env: dict[str, str] | None = None) -> tuple[str, str]:
    """Run one run to its end: ("done" | "skipped" | "failed", its last lines). Skipped: recorded, or another
    runner has it."""
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
                code = processes.run(words, env or {}, stdout=log, pass_fds=(lock.fileno(),))
                log.seek(0, os.SEEK_END)
                if code not in (1, 2):  # done, or ended by a signal
                    break
        except OSError as e:
            return "failed", f"it could not be started: {e}"
    said = last_lines(path.read_bytes()[begun:].decode(errors="replace"))
    if code == 0:
        return "done", said
    return "failed", f"{said}\nall it said: {path}"


def last_lines(said: str, count: int = 3) -> str:
    """The last lines that are not empty."""
    lines = [line for line in said.replace("\r", "\n").splitlines() if line.strip()]
    return "\n".join(lines[-count:])


def report_failure(run: Run, said: str) -> None:
    """Say above the progress bar that a run has failed, and its last lines."""
    indented = said.replace("\n", "\n    ")
    tqdm.write(f"failed: {run.command}\n    {indented}", file=sys.stderr)


# On this machine


@dataclass
class Local:
    """Runs on this machine, `jobs` at a time, one after the other on each of the given GPUs."""

    jobs: int
    gpus: list[str] = field(default_factory=list)

    def run(self, runs: list[Run], place: Place) -> Counter:
        """Run all; returns how many are done, skipped, failed or interrupted, and "stopped" after Ctrl-C."""
        counts, processes = Counter(), Processes()
        with tqdm(total=len(runs), unit="run", desc="runs", disable=not runs) as bar:

            def work(number: int, group: list[Run]) -> None:
                for run in group:
                    if processes.stopping:
                        return
                    outcome, said = execute(run, place, processes, self.environment(number))
                    if outcome == "failed" and processes.stopping:
                        outcome = "interrupted"
                    counts[outcome] += 1
                    bar.update()
                    if outcome == "failed":
                        report_failure(run, said)

            if not side_by_side(self.jobs, work, by_training(runs), processes):
                counts["stopped"] = 1
        return counts

    def environment(self, number: int) -> dict[str, str]:
        """What a run finds: its share of the processors, and one GPU."""
        env = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.jobs))}
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = self.gpus[number % len(self.gpus)]
        return env


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

    def run(self, runs: list[Run], place: Place) -> Counter:
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
        self.processes, self.at = None, 0

    def __call__(self, group: list[Run], place: Place) -> list[tuple[str, str]]:
        os.chdir(ROOT)
        sys.path.insert(0, str(ROOT))
        self.processes = Processes()
        outcomes = []
        for self.at, run in enumerate(group):
            outcomes.append(execute(run, place, self.processes))
        return outcomes

    def checkpoint(self, group: list[Run], place: Place):
        """submitit calls it when the job's time is over or another job takes its place: the run ends, its
        checkpoint is kept, and the job is queued again."""
        import submitit
        for process in list(self.processes.running) if self.processes else []:
            tell_to_end(process)
            if not has_ended(process, WARNED - 30):
                tell_to_end(process)  # its round is longer than the warning: at once
                has_ended(process, 20)
        group = [*group]
        if self.processes:
            group[self.at] = dataclasses.replace(group[self.at], replace=False)  # it goes on
        return submitit.helpers.DelayedSubmission(Job(), group, place)


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
