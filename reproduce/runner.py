"""Runs what is missing on this machine, several runs at once. (On a cluster: cluster.py.)

Runs that differ in flags that act at test time alone are trained once: the first of them trains, the others
test what it has trained (measures/adaptation.py).

Nothing is lost or repeated. A run's process holds the lock of its folder, also when its runner is gone, so
that another runner passes it by. A run that was cut off resumes from its checkpoint. A finished one writes
its own record. What it prints is in log.txt in its folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

from plumbing.run.errors import TOGETHER, handled
from reproduce.measures.adaptation import flags_at_test, in_words
from reproduce.methods import ROOT
from reproduce.records import Place, PlannedRun, Records, by_training, folder_of_run

from tqdm import tqdm


class Processes:
    """The processes that several threads have started: all of them can be told to end."""

    def __init__(self):
        self.lock = threading.Lock()
        self.running: set[subprocess.Popen] = set()
        self.stopping = False

    def run(self, words: list[str], env: dict[str, str] | None = None, cwd: Path = ROOT, **how) -> int:
        """Run a command to its end; returns its exit code."""
        with self.lock:
            process = subprocess.Popen(words, cwd=cwd, env=os.environ | (env or {}),
                                       stderr=subprocess.STDOUT, start_new_session=True, **how)
            self.running.add(process)
        if self.stopping:
            self.end()
        try:
            return process.wait()
        finally:
            with self.lock:
                self.running.discard(process)

    def end(self) -> None:
        """Tell all to end; what starts later ends at once. SIGTERM: runs in the background ignore SIGINT."""
        self.stopping = True
        with self.lock:
            for process in self.running:
                process.send_signal(signal.SIGTERM)


def side_by_side(jobs: int, work: Callable, items: list, processes: Processes) -> bool:
    """Do `work(item)` for all items, in `jobs` threads. Whether all was done: a signal ends the processes of
    the items that are going on, and no other begins. So does an error, which comes out of here."""
    futures, came = [], []

    def end() -> None:
        for future in futures:
            future.cancel()
        processes.end()

    def stop(_number, _frame=None) -> None:
        if came and time.monotonic() - came[-1] < TOGETHER:
            return
        came.append(time.monotonic())
        if len(came) == 1:
            tqdm.write("stopping after the rounds that are going on; once more: at once", file=sys.stderr)
        end()

    with ThreadPoolExecutor(jobs) as pool, handled(stop):
        for item in items:
            if not came:
                futures.append(pool.submit(work, item))
        for future in as_completed(futures):
            if not future.cancelled() and future.exception():  # such as a full disk
                end()
                raise future.exception()
    return not processes.stopping


# One run


def commands_of(run: PlannedRun, place: Place, trained: Path | None) -> list[list[str]]:
    """What does a run: the test of what was `trained` with other flags at test time, and then, if there is
    nothing or the test is refused, its own training."""
    commands = [[*run.words, "--no-figures"]]
    if trained and (trained / "result.json").exists() and not run.curve:
        values = in_words(flags_at_test(run.args))
        commands.insert(0, ["-m", "reproduce.measures", "adaptation", str(trained), "--flags", values])
    return [[sys.executable, *words, *place.flags, "--record", place.record] for words in commands]


def execute(run: PlannedRun, place: Place, processes: Processes, env: dict[str, str] | None = None,
            trained: Path | None = None) -> tuple[str, str]:
    """Run one run to its end: ("done" | "skipped" | "failed", its last lines). Skipped: recorded, or another
    runner has it."""
    if Records(Path(place.record)).get(run):
        return "skipped", "recorded meanwhile"
    path = folder_of_run(run) / "log.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as log:
            log.write(f"$ {run.command}\n")
            log.flush()
            for words in commands_of(run, place, trained):
                begun = log.tell()
                code = processes.run(words, env, stdout=log)
                log.seek(0, os.SEEK_END)
                if code not in (1, 2):  # done, or ended by a signal
                    break
    except OSError as e:
        return "failed", f"it could not be started: {e}"
    said = path.read_bytes()[begun:].decode(errors="replace")
    if code == 0:
        return "done", last_lines(said)
    if "another process is running in" in said:  # whose own lines may follow
        return "skipped", "another runner is on it"
    return "failed", f"{last_lines(said)}\nall it said: {path}"


def execute_group(group: list[PlannedRun], place: Place, processes: Processes,
                  env: dict[str, str] | None = None) -> list[tuple[str, str]]:
    """The outcomes of runs that one training serves, one after the other."""
    outcomes, trained = [], None
    for run in group:
        if processes.stopping:
            break
        outcome, said = execute(run, place, processes, env, trained)
        trained = trained or folder_of_run(run)
        if outcome == "failed" and processes.stopping:
            outcome = "interrupted"
        outcomes.append((outcome, said))
    return outcomes


def last_lines(said: str, count: int = 3) -> str:
    """The last lines that are not empty."""
    lines = [line for line in said.replace("\r", "\n").splitlines() if line.strip()]
    return "\n".join(lines[-count:])


# All of them


def run_all(runs: list[PlannedRun], place: Place, jobs: int, gpus: list[str]) -> Counter:
    """Run all, `jobs` at a time, each on a GPU that is free. How many are done, skipped, failed or
    interrupted, and "stopped" after Ctrl-C."""
    counts, processes = Counter(), Processes()
    places = SimpleQueue()  # of `jobs` runs at the same time: who ends leaves its GPU to the next
    for number in range(jobs):
        places.put(environment(number, jobs, gpus))
    with tqdm(total=len(runs), unit="run", desc="runs", disable=not runs) as bar:

        def work(group: list[PlannedRun]) -> None:
            env = places.get()
            try:
                count(counts, bar, group, execute_group(group, place, processes, env))
            finally:
                places.put(env)

        if not side_by_side(jobs, work, by_training(runs), processes):
            counts["stopped"] = 1
    return counts


def count(counts: Counter, bar: tqdm, group: list[PlannedRun], outcomes: list[tuple[str, str]]) -> None:
    """Count outcomes, and say above the bar which runs have failed."""
    for run, (outcome, said) in zip(group, outcomes):
        counts[outcome] += 1
        bar.update()
        if outcome == "failed":
            indented = said.replace("\n", "\n    ")
            tqdm.write(f"failed: {run.command}\n    {indented}", file=sys.stderr)


def environment(number: int, jobs: int, gpus: list[str]) -> dict[str, str]:
    """What a run finds: its share of the processors, and one GPU."""
    env = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    return env
