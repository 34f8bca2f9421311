"""Runs what is missing as jobs of a Slurm cluster, through submitit."""

from __future__ import annotations

import os
import sys
from collections import Counter

from plumbing.run.errors import UserError, handled, interrupt
from reproduce.methods import ROOT
from reproduce.records import Place, PlannedRun, cut_off
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


def run_on_cluster(runs: list[PlannedRun], place: Place, parameters: dict) -> Counter:
    """Submit all as an array of jobs with these parameters of submitit and wait for them; counts as
    `run_all`."""
    counts, submitted, groups = Counter(), [], by_training(runs)
    try:
        import submitit
        executor = submitit.AutoExecutor(folder=str(ROOT / "runs" / "slurm"), cluster="slurm")
        executor.update_parameters(**parameters)
    except ImportError:
        raise UserError("--executor slurm needs submitit: pip install submitit", 2)
    except (RuntimeError, NameError, TypeError) as e:
        raise UserError(f"--executor slurm: {e}", 2)
    with handled(interrupt), tqdm(total=len(runs), unit="run", desc="jobs", disable=not runs) as bar:
        try:
            submitted = executor.map_array(Job(), groups, [place] * len(groups)) if groups else []
            for group, job in zip(groups, submitted):
                try:
                    outcomes = job.result()
                except Exception as e:  # whatever a job dies of is reported, the others go on
                    outcomes = [("failed", str(e).strip() or type(e).__name__)] * len(group)
                count(counts, bar, group, outcomes)
        except KeyboardInterrupt:
            for job in submitted:
                job.cancel()
            counts["stopped"] = 1
    return counts


class Job:
    """What a job on a cluster does: the runs that one training serves, unless they are recorded meanwhile."""

    def __call__(self, group: list[PlannedRun], place: Place) -> list[tuple[str, str]]:
        os.chdir(ROOT)
        sys.path.insert(0, str(ROOT))
        return execute_group(group, place, Processes())

    def checkpoint(self, group: list[PlannedRun], place: Place):
        """submitit calls it when the job's time is over: it is queued again, and its run resumes from its
        last checkpoint."""
        import submitit
        for run in group:
            run.replace = run.replace and not cut_off(run)
        return submitit.helpers.DelayedSubmission(Job(), group, place)
