"""Running: nothing is lost or repeated, also when a run or a runner ends badly."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

from reproduce import runner
from reproduce.cells import missing
from reproduce.records import Place, Records
from reproduce.runner import Processes, execute
from reproduce.tables import read_tables
from tests.small_table import recorded, two_tables

import pytest

pytestmark = pytest.mark.xdist_group("runs")  # they leave folders in runs/


@dataclasses.dataclass(frozen=True)
class Sleep:
    """A stand-in for a run: a Python process that writes down that it is there and waits."""

    key: str
    module: str = "fedavg"
    flags: tuple = ()
    command: str = "python sleep"
    replace: bool = False
    training: str = ""
    precision: str = "fp32"


def sleeping(monkeypatch, tmp_path, seconds: float) -> Place:
    """Let runs sleep; the place where they have no records."""
    code = f"import sys, time; open(sys.argv[1], 'w'); time.sleep({seconds})"

    def commands_of(run, place, records):
        return [[sys.executable, "-c", code, str(tmp_path / run.key)]]
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "commands_of", commands_of)
    monkeypatch.setattr(runner, "folder_of_run", lambda run: tmp_path / f"folder of {run.key}")
    return Place(record=str(tmp_path / "none.jsonl"))


def saying(monkeypatch, tmp_path, *codes: str) -> Place:
    """Let a run be these Python programs, each after the refusal of the one before."""
    place = sleeping(monkeypatch, tmp_path, 0)
    words = [[sys.executable, "-c", code] for code in codes]
    monkeypatch.setattr(runner, "commands_of", lambda run, place, records: words)
    return place


def test_a_run_that_cannot_start_does_not_stop_the_rest(monkeypatch, tmp_path, capfd):
    place = sleeping(monkeypatch, tmp_path, 0)
    (tmp_path / "folder of a").write_text("a file")
    counts = runner.Local(1).run([Sleep("a"), Sleep("b")], place)
    assert counts == {"failed": 1, "done": 1} and (tmp_path / "b").exists()
    error = capfd.readouterr().err
    assert "failed: python sleep" in error and "it could not be started" in error


def test_a_run_that_is_recorded_meanwhile_is_skipped(monkeypatch, tmp_path):
    place = sleeping(monkeypatch, tmp_path, 0)
    monkeypatch.setattr(runner.Records, "get", lambda records, run: {"id": "x"})
    assert execute(Sleep("a"), place, Processes()) == ("skipped", "recorded meanwhile")
    assert not (tmp_path / "a").exists()


def test_a_run_keeps_its_lock_when_its_runner_is_gone(monkeypatch, tmp_path):
    """A second runner passes it by until it has ended."""
    place = sleeping(monkeypatch, tmp_path, 30)
    left = []

    class Gone(BaseException):
        pass

    def waiting(process):
        left.append(process)
        raise Gone
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", waiting)
        with pytest.raises(Gone):
            execute(Sleep("a"), place, Processes())
    assert execute(Sleep("a"), place, Processes()) == ("skipped", "another runner is on it")
    left[0].kill()
    left[0].wait()
    with runner.claim(Sleep("a")):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_runs_at_once(monkeypatch, tmp_path, number):
    """Also one that has just started and one that starts meanwhile."""
    place = sleeping(monkeypatch, tmp_path, 60)
    popen = subprocess.Popen

    def slowly(*args, **kw):
        os.kill(os.getpid(), number)
        time.sleep(0.5)
        return popen(*args, **kw)
    monkeypatch.setattr(runner.subprocess, "Popen", slowly)
    started = time.monotonic()
    counts = runner.Local(1).run([Sleep("a"), Sleep("b")], place)
    assert counts["stopped"] and counts["interrupted"] == 1 and not counts["done"]
    assert time.monotonic() - started < 20


def test_runs_have_their_share_of_the_processors_and_the_gpus_in_turn(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    local = runner.Local(3, ["0", "2"])
    found = [local.environment(number)["CUDA_VISIBLE_DEVICES"] for number in range(3)]
    assert found == ["0", "2", "0"] and local.environment(0)["OMP_NUM_THREADS"] == "2"
    assert runner.Local(1).environment(0) == {"OMP_NUM_THREADS": "8"}


def test_what_a_run_prints_is_in_its_log(monkeypatch, tmp_path):
    """Of each start; a failure is reported with the last lines of this one, and says where the rest is."""
    place = saying(monkeypatch, tmp_path, "print('first'); print('second')")
    assert execute(Sleep("a"), place, Processes()) == ("done", "first\nsecond")
    place = saying(monkeypatch, tmp_path, "import sys; print('no'); print('more'); sys.exit(1)")
    outcome, said = execute(Sleep("a"), place, Processes())
    log = tmp_path / "folder of a" / "log.txt"
    assert outcome == "failed" and said == f"no\nmore\nall it said: {log}"
    command = "$ python sleep"
    assert log.read_text().splitlines() == [command, "first", "second", command, "no", "more"]


def test_a_refused_test_of_a_trained_run_is_followed_by_a_training(monkeypatch, tmp_path):
    place = saying(monkeypatch, tmp_path, "import sys; sys.exit('measures: damaged')", "print('trained')")
    assert execute(Sleep("a"), place, Processes()) == ("done", "trained")


def test_runs_that_one_training_serves_wait_for_it(monkeypatch, tmp_path):
    """One worker has them all, in their order, while another does the rest."""
    place = sleeping(monkeypatch, tmp_path, 0.3)
    began = []
    original = runner.execute

    def noting(run, *rest):
        began.append((run.key, threading.current_thread().name))
        return original(run, *rest)
    monkeypatch.setattr(runner, "execute", noting)
    runs = [Sleep("a", training="t"), Sleep("b"), Sleep("c", training="t")]
    assert runner.Local(2).run(runs, place)["done"] == 3
    workers = dict(began)
    assert workers["a"] == workers["c"] != workers["b"]
    assert [key for key, _ in began if key in "ac"] == ["a", "c"]


def test_what_a_job_asks_a_cluster_for(monkeypatch):
    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: True)
    asked = runner.Slurm(2, hours=1.5, partition="gpu", account="us", memory_gb=64.0).parameters()
    assert asked == {"timeout_min": 90, "mem_gb": 64.0, "slurm_array_parallelism": 2, "gpus_per_node": 1,
                     "cpus_per_task": 4, "slurm_signal_delay_s": 180, "slurm_partition": "gpu",
                     "slurm_account": "us"}
    assert "slurm_partition" not in runner.Slurm(1).parameters()


def test_a_job_whose_time_is_over_ends_its_run_and_is_queued_again(monkeypatch, tmp_path):
    """The signal's handler finds the main thread where it waits for the process."""
    submitit = pytest.importorskip("submitit")
    place = sleeping(monkeypatch, tmp_path, 60)
    job, group = runner.Job(), [Sleep("a", replace=True), Sleep("b", replace=True)]
    queued = []

    def over(*_):
        queued.append(job.checkpoint(group, place))
        monkeypatch.setattr(runner.Records, "get", lambda records, run: {"id": "x"})
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, 2)
    began = time.monotonic()
    try:
        first, second = job(group, place)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 30 and first[0] == "failed" and second[0] == "skipped"
    assert isinstance(queued[0], submitit.helpers.DelayedSubmission)
    assert queued[0].args == ([Sleep("a"), Sleep("b", replace=True)], place)  # a goes on


@pytest.mark.slow
def test_slurm_through_submitits_local_executor(tmp_path):
    pytest.importorskip("submitit")
    two_tables(tmp_path, with_failing=False)
    path = tmp_path / "runs.jsonl"
    todo = [entry.run for entry in missing(read_tables(tmp_path / "tables"), Records(path), "smoke", [0])]
    executor = runner.Slurm(jobs=2, cluster="local", folder=str(tmp_path / "slurm"))
    assert executor.run(todo, Place(record=str(path))) == {"done": 2} and len(recorded(path)) == 2
    assert executor.run(todo, Place(record=str(path))) == {"skipped": 2}
