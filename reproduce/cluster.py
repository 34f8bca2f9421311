"""Runs what is missing as jobs of a Slurm cluster, through submitit."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import Counter

from plumbing.run.errors import UserError, handled, interrupt
from reproduce.budget import GRACE, Budget
from reproduce.methods import ROOT
from reproduce.records import Place, Run
from reproduce.runner import Processes, by_training, count, execute_group

from tqdm import tqdm


def parameters_of(text: str) -> dict[str, int | str]:
    """'timeout_min=720 slurm_partition=gpu' -> {"timeout_min": 720, "slurm_partition": "gpu"}."""
    parameters = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"--slurm is {text!r}; expected parameters such as 'timeout_min=720 "
                            "mem_gb=32'", 2)
        parameters[name] = int(value) if value.isdecimal() else value
    return parameters


def run_on_cluster(runs: list[Run], place: Place, parameters: dict, budget: Budget | None) -> Counter:
    """Submit all as an array of jobs with these parameters of submitit and wait for them; counts as
    `run_all`. With a budget: what can end in it, and its end is passed on."""
    counts, submitted, groups = Counter(), [], by_training(runs)
    if budget:
        groups = budget.submitted(groups, parameters["slurm_array_parallelism"])
    try:
        if budget:
            minutes = math.ceil(budget.given / 60) + 1
            parameters = parameters | {"timeout_min": min(minutes, parameters.get("timeout_min", minutes))}
        import submitit
        executor = submitit.AutoExecutor(folder=str(ROOT / "runs" / "slurm"), cluster="slurm")
        executor.update_parameters(**parameters)
    except ImportError:
        raise UserError("--executor slurm needs submitit: pip install submitit", 2)
    except (RuntimeError, NameError, TypeError) as e:
        raise UserError(f"--executor slurm: {e}", 2)
    with handled(interrupt), tqdm(total=len(runs), unit="run", desc="jobs", disable=not runs) as bar:
        try:
            job = Job(budget.end if budget else math.inf)
            submitted = executor.map_array(job, groups, [place] * len(groups)) if groups else []
            if budget:  # jobs end themselves; those that did not begin are taken back
                timer = threading.Timer(budget.left + 5 * GRACE, lambda: [job.cancel() for job in submitted])
                timer.daemon = True
                timer.start()
            for group, job in zip(groups, submitted):
                try:
                    outcomes = job.result()
                except Exception as e:  # whatever a job dies of is reported, the others go on
                    why = "interrupted" if budget and budget.left == 0 else "failed"
                    outcomes = [(why, str(e).strip() or type(e).__name__)] * len(group)
                count(counts, bar, group, outcomes)
        except KeyboardInterrupt:
            for job in submitted:
                job.cancel()
            counts["stopped"] = 1
    return counts


class Job:
    """What a job on a cluster does: the runs that one training serves, unless they are recorded meanwhile.
    `end`: the time at which it is told to end."""

    def __init__(self, end: float):
        self.end = end

    def __call__(self, group: list[Run], place: Place) -> list[tuple[str, str]]:
        os.chdir(ROOT)
        sys.path.insert(0, str(ROOT))
        if self.end <= time.time():
            return []
        processes = Processes()
        timer = threading.Timer(min(self.end - time.time(), threading.TIMEOUT_MAX), processes.end)
        timer.daemon = True
        timer.start()
        return execute_group(group, place, processes)

    def checkpoint(self, group: list[Run], place: Place):
        """submitit calls it when the job's time is over: it is queued again, and its run resumes from its
        last checkpoint."""
        import submitit
        for run in group:
            run.replace = False
        return submitit.helpers.DelayedSubmission(Job(self.end), group, place)
