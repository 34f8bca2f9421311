"""A given time: which runs can end in it, by what runs like them took on this kind of device.

What is known of a run is from records of the same kind of device, and from the runs of this call: their first
round apart, each line of timing.jsonl tells. A run that was cut off has only the rest of its rounds to do.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from pathlib import Path

from reproduce.methods import short_name
from reproduce.plan import kind_of, known_of, unlike
from reproduce.records import Records, Run, folder_of_run

import torch

UNKNOWN = 0.5  # of the given time: what a run is taken to need while nothing is known
EARLY = 4.0  # seconds before the end at which runs are told to end, after their round
GRACE = 8.0  # seconds between that and their being killed
CLOCK = 1.0  # seconds by which the times of files may lie behind
RECENT = 20  # rounds by which a run's speed is judged: it changes with what else is going on
ENDS = 3.0  # seconds of a process before its first round, and after its last


class Budget:
    """The time that is left, and the runs that were begun in it."""

    def __init__(self, minutes: float, records: Records, jobs: int, kind: str,
                 since: float | None = None):
        self.given, self.records, self.kind = 60 * minutes, records, kind
        self.end = (since or time.time()) + self.given - EARLY
        self.threads = max(1, (os.cpu_count() or 1) // jobs)  # of a run on a CPU
        self.begun: dict[Path, tuple[Run, float, int]] = {}  # when, and with how many rounds done
        self.recorded: dict[str, list[tuple[float, float, float]]] = {}
        self.lock, self.going = threading.Lock(), 0

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.time())

    def need(self, run: Run) -> float:
        """The seconds that a run still takes, by the run most like it; of several the slowest. At the same
        distance one of this call counts, not a record."""
        if run.key not in self.recorded:
            known = known_of(run, self.records, self.kind, self.threads)
            self.recorded[run.key] = [(distance + 0.02, -of_round, 2 * ENDS) for distance, of_round in known]
        times = self.known_by_now(run) + self.recorded[run.key]
        if not times:
            return UNKNOWN * self.given
        _, slowest, beside = min(times)
        return beside - slowest * (run.args.rounds - rounds_done(run))

    def known_by_now(self, run: Run) -> list[tuple[float, float, float]]:
        """(how unlike it is, minus the seconds a round, the seconds beside the rounds) of each of the runs of
        this call that have done two rounds in it."""
        times = []
        for path, (other, since, before) in self.begun.items():
            distance = unlike(run, short_name(other.module), vars(other.args))
            seconds, written = so_far(path)
            rounds = len(seconds) - before
            if distance == math.inf or written + CLOCK < since or rounds < 2:
                continue
            recent = min(RECENT, rounds - 1)
            of_round = (seconds[-1] - seconds[-1 - recent]) / recent
            beside = max(0.0, written - since - rounds * of_round) + ENDS
            times.append((distance + 0.01 * (other.flags != run.flags), -of_round, beside))
        return times

    def next(self, waiting: list[list[Run]], stopping) -> list[Run] | None:
        """The first group that can end in the time left, taken out of `waiting`; waits for it as long as runs
        are going on, whose rounds may show that one can. None if none is to begin."""
        while not stopping():
            with self.lock:
                for group in waiting:
                    if self.need(group[0]) <= self.left:
                        waiting.remove(group)
                        self.begun[folder_of_run(group[0])] = group[0], time.time(), rounds_done(group[0])
                        self.going += 1
                        return group
                if not self.going or not waiting:
                    return None
            time.sleep(min(1.0, self.left))
        return None

    def ended(self) -> None:
        with self.lock:
            self.going -= 1

    @contextlib.contextmanager
    def keeps(self, processes):
        """The processes are told to end a little before the end of the time, and killed a little after it."""
        timers = [threading.Timer(self.left, processes.end),
                  threading.Timer(self.left + GRACE, processes.kill)]
        for timer in timers:
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()

    def submitted(self, groups: list[list[Run]], jobs: int) -> list[list[Run]]:
        """The groups that can end if `jobs` of them go on at a time, each where one has ended."""
        free, fitting = [0.0] * jobs, []
        for group in groups:
            end = min(free) + self.need(group[0])
            if end <= self.left:
                free[free.index(min(free))] = end
                fitting.append(group)
        return fitting


def kind_here() -> str:
    """The kind of device that a run without --device takes here."""
    return kind_of(torch.cuda.get_device_name(0) if torch.cuda.is_available() else None)


def so_far(path: Path) -> tuple[list[float], float]:
    """A run's seconds after each of its rounds, and when the last was written."""
    try:
        written = (path / "timing.jsonl").stat().st_mtime
        lines = (path / "timing.jsonl").read_text().splitlines(keepends=True)
        return [sum(json.loads(line)["seconds"].values()) for line in lines if line.endswith("\n")], written
    except OSError:
        return [], 0.0


def rounds_done(run: Run) -> int:
    """The rounds of a run that was cut off; those of its last seconds may not be in its checkpoint."""
    path = folder_of_run(run)
    return 0 if run.replace or not (path / "checkpoint.pt").exists() else len(so_far(path)[0])
