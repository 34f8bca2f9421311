"""Running: nothing is lost or repeated, also when a run or a runner ends badly."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time

from plumbing.runfolder import folder_of
from plumbing.settings import identity
from reproduce import runner
from reproduce.cells import missing, run_with
from reproduce.methods import arguments
from reproduce.records import Place, Records
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


def test_a_run_that_cannot_start_does_not_stop_the_rest(monkeypatch, tmp_path, capfd):
    place = sleeping(monkeypatch, tmp_path, 0)
    claim = runner.claim

    def failing(run):
        if run.key == "a":
            raise MemoryError("no room")
        return claim(run)
    monkeypatch.setattr(runner, "claim", failing)
    counts = runner.Local(1).run([Sleep("a"), Sleep("b")], place, {})
    assert counts["failed"] == 1 and counts["done"] == 1 and (tmp_path / "b").exists()
    error = capfd.readouterr().err
    assert "failed: python sleep" in error and "no room" in error


def test_a_run_that_is_recorded_meanwhile_is_skipped(monkeypatch, tmp_path):
    place = sleeping(monkeypatch, tmp_path, 0)
    monkeypatch.setattr(runner.Records, "get", lambda records, run: {"id": "x"})
    assert runner.execute(Sleep("a"), place) == ("skipped", "recorded meanwhile")
    assert not (tmp_path / "a").exists()


def test_a_run_keeps_its_lock_when_its_runner_is_gone(monkeypatch, tmp_path):
    """A second runner passes it by until it has ended."""
    place = sleeping(monkeypatch, tmp_path, 30)
    left = []

    class Gone(BaseException):
        pass

    def started(process):
        left.append(process)
        raise Gone
    with pytest.raises(Gone):
        runner.execute(Sleep("a"), place, None, started)
    assert runner.execute(Sleep("a"), place) == ("skipped", "another runner is on it")
    left[0].kill()
    left[0].wait()
    with runner.claim(Sleep("a")):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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
    counts = runner.Local(1).run([Sleep("a"), Sleep("b")], place, {})
    assert counts["stopped"] and counts["interrupted"] == 1 and not counts["done"]
    assert time.monotonic() - started < 20


def test_a_run_finds_its_share_of_the_processors_and_one_gpu(monkeypatch):
    """Where the environment names GPUs, --gpus counts these."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    local = runner.Local(3, ["0", "2"])
    assert local.environment("2") == {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "2",
                                      "CLEANFDG_RUNS_ON_GPU": "2"}
    assert runner.Local(1).environment() == {"OMP_NUM_THREADS": "8"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-a1")
    assert local.environment("1")["CUDA_VISIBLE_DEVICES"] == "GPU-a1"


def test_a_run_takes_the_gpu_on_which_the_fewest_are():
    gpus = runner.Shared(["0", "2"])
    first, second, third = gpus.one(), gpus.one(), gpus.one()
    assert first.__enter__() == "0" and second.__enter__() == "2"
    second.__exit__(None, None, None)
    assert third.__enter__() == "2"
    with gpus.one() as fourth, gpus.one() as fifth, runner.Shared([]).one() as none:
        assert sorted([fourth, fifth]) == ["0", "2"] and none == ""


def test_runs_on_gpus_are_told_so(monkeypatch, tmp_path):
    """Each has one of them in its environment, and --device cuda on its command line; the test of a trained
    run has no such flag."""
    place = Place(record=str(tmp_path / "runs.jsonl"), data=str(runner.ROOT / "data"))
    monkeypatch.setattr(runner, "trained_for", lambda run, records: ["folder"])
    run = run_with("fedavg", ["--dataset", "digits"], 0)
    on_gpu = dataclasses.replace(place, device="cuda")
    retest, training = runner.commands_of(run, on_gpu, Records(tmp_path / "runs.jsonl"))
    assert "--device" not in retest and training[-5:-2] == ["--device", "cuda", "--no-figures"]
    assert "--device" not in runner.commands_of(run, place, Records(tmp_path / "runs.jsonl"))[1]
    seen = []

    def noting(run, place, env, started):
        seen.append((place.device, env["CUDA_VISIBLE_DEVICES"]))
        time.sleep(0.2)
        return "done", ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(runner, "execute", noting)
    monkeypatch.setattr(runner, "folder_of_run", lambda run: tmp_path)
    assert runner.Local(2, ["0", "1"]).run([Sleep("a"), Sleep("b")], place, {})["done"] == 2
    assert sorted(seen) == [("cuda", "0"), ("cuda", "1")]


def test_cuda_and_cuda_0_are_one_thing():
    """In what a run is known by, and so in its folder and its record."""
    args = arguments("fedavg", ("--device", "cpu"))
    on_gpus = [dataclasses.replace(args, device=name) for name in ("cuda", "cuda:0", "cuda:3")]
    known = {json.dumps(identity(one)) for one in on_gpus}
    folders = {folder_of(one) for one in on_gpus}
    assert len(known) == len(folders) == 1 and folder_of(args) not in folders
    assert identity(dataclasses.replace(args, deterministic=True)) == identity(args)


def saying(monkeypatch, tmp_path, code: str) -> Place:
    """Let runs be this Python program."""
    place = sleeping(monkeypatch, tmp_path, 0)
    monkeypatch.setattr(runner, "commands_of", lambda run, place, records: [[sys.executable, "-c", code]])
    return place


def test_what_a_run_prints_is_in_its_log(monkeypatch, tmp_path):
    """Of each start; a failure is reported with the last lines of this one, and says where the rest is."""
    place = saying(monkeypatch, tmp_path, "print('first'); print('second')")
    assert runner.execute(Sleep("a"), place) == ("done", "first\nsecond")
    place = saying(monkeypatch, tmp_path, "import sys; print('no'); print('more'); sys.exit(1)")
    outcome, said = runner.execute(Sleep("a"), place)
    log = tmp_path / "folder of a" / "log.txt"
    assert outcome == "failed" and said == f"no\nmore\nall it said: {log}"
    command = "$ python sleep"
    assert log.read_text().splitlines() == [command, "first", "second", command, "no", "more"]


def test_a_refusal_is_one_line(monkeypatch, tmp_path):
    place = saying(monkeypatch, tmp_path, "import sys; print('warning'); sys.exit('fdse: by other code')")
    assert runner.execute(Sleep("a"), place)[1].startswith("warning\nfdse: by other code")
    place = saying(monkeypatch, tmp_path, "import sys; print('warning'); print('by other code'); sys.exit(2)")
    assert runner.execute(Sleep("a"), place) == ("failed", "by other code")


def test_the_bar_follows_the_rounds_of_the_runs(monkeypatch, tmp_path):
    """What was done before a run was started here is no part of it; a damaged line counts nothing."""
    place = sleeping(monkeypatch, tmp_path, 0)
    runs = [Sleep("a", flags=("--rounds", "10")), Sleep("b", flags=("--rounds", "4"))]
    times = tmp_path / "folder of a" / "timing.jsonl"
    times.parent.mkdir()
    times.write_text('{"round": 5}\n')
    pool = runner.Pool(runs, place, {"a": 100.0, "b": 20.0}, runner.Local(1).environment, runner.Shared([]))
    pool.begin(runs[0])
    pool.begin(runs[1])
    assert pool.bar.total == 70 and pool.bar.n == 0  # 50 of a are left, and b
    times.write_text('{"round": 5}\n{"round": 8}\n')
    pool.look()
    assert pool.bar.n == pytest.approx(30) and "fedavg 8/10, fedavg 0/4" in pool.bar.postfix
    times.write_text('{"round": 8}\n{"rou')
    assert runner.rounds_done(times.parent) == 0
    pool.counts["running"] = 2
    pool.ended(runs[0], "done", "")
    assert pool.bar.n == pytest.approx(50) and "done=1" in pool.bar.postfix
    pool.bar.close()


def test_what_a_job_asks_a_cluster_for(monkeypatch):
    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: True)
    asked = runner.Slurm(2, hours=1.5, partition="gpu", account="us", memory_gb=64.0).parameters()
    assert asked == {"timeout_min": 90, "mem_gb": 64.0, "slurm_array_parallelism": 2, "gpus_per_node": 1,
                     "cpus_per_task": 4, "slurm_signal_delay_s": 180, "slurm_partition": "gpu",
                     "slurm_account": "us"}
    assert "slurm_partition" not in runner.Slurm(1).parameters()


def test_a_job_whose_time_is_over_ends_its_run_and_is_queued_again(monkeypatch, tmp_path):
    submitit = pytest.importorskip("submitit")
    place = sleeping(monkeypatch, tmp_path, 60)
    job, run = runner.Job(), Sleep("a", replace=True)
    later = Sleep("b", replace=True)
    worker = threading.Thread(target=lambda: runner.execute(run, place, None, job.started))
    worker.start()
    while not (tmp_path / "a").exists():
        time.sleep(0.05)
    again = job.checkpoint([run, later], place)
    worker.join(20)
    assert not worker.is_alive() and job.process.returncode
    assert isinstance(again, submitit.helpers.DelayedSubmission)
    assert isinstance(again.function, runner.Job) and again.args == ([Sleep("a"), later], place)  # it goes on


def test_the_time_is_over_while_the_job_waits_for_its_run(monkeypatch, tmp_path):
    """The signal's handler finds the main thread where it waits for the process."""
    pytest.importorskip("submitit")
    place = sleeping(monkeypatch, tmp_path, 60)
    job, run = runner.Job(), Sleep("a", replace=True)
    queued = []
    before = signal.signal(signal.SIGALRM, lambda *_: queued.append(job.checkpoint([run], place)))
    signal.setitimer(signal.ITIMER_REAL, 2)
    began = time.monotonic()
    try:
        outcome, = job([run], place)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 30 and outcome[0] == "failed"
    assert queued[0].args == ([Sleep("a")], place)


def test_a_refused_test_of_a_trained_run_is_followed_by_a_training(monkeypatch, tmp_path):
    place = sleeping(monkeypatch, tmp_path, 0)
    words = [[sys.executable, "-c", "import sys; sys.exit('retest: damaged')"],
             [sys.executable, "-c", "print('trained')"]]
    monkeypatch.setattr(runner, "commands_of", lambda run, place, records: words)
    assert runner.execute(Sleep("a"), place) == ("done", "trained")


def test_runs_that_one_training_serves_wait_for_it(monkeypatch, tmp_path):
    """One worker has them all, in their order, while another does the rest."""
    place = sleeping(monkeypatch, tmp_path, 0.3)
    began = []
    execute = runner.execute

    def noting(run, *rest):
        began.append((run.key, threading.current_thread().name))
        return execute(run, *rest)
    monkeypatch.setattr(runner, "execute", noting)
    runs = [Sleep("a", training="t"), Sleep("b"), Sleep("c", training="t")]
    assert runner.Local(2).run(runs, place, {})["done"] == 3
    workers = dict(began)
    assert workers["a"] == workers["c"] != workers["b"]
    assert [key for key, _ in began if key in "ac"] == ["a", "c"]


@pytest.mark.slow
def test_slurm_through_submitits_local_executor(tmp_path):
    pytest.importorskip("submitit")
    two_tables(tmp_path, with_failing=False)
    path = tmp_path / "runs.jsonl"
    todo = [one.run for one in missing(read_tables(tmp_path / "tables"), Records(path), "smoke", [0])]
    executor = runner.Slurm(jobs=2, cluster="local", folder=str(tmp_path / "slurm"))
    assert executor.run(todo, Place(record=str(path)), {}) == {"done": 2} and len(recorded(path)) == 2
    assert executor.run(todo, Place(record=str(path)), {}) == {"skipped": 2}
