"""Running: nothing is lost or repeated, also when a run or a runner ends badly."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

from reproduce import runner
from reproduce.cells import missing
from reproduce.records import Place, Records
from reproduce.tables import read_tables
from tests.small_table import recorded, two_tables

import pytest


@dataclasses.dataclass(frozen=True)
class Sleep:
    """A stand-in for a run: a Python process that writes down that it is there and waits."""

    key: str
    module: str = "fedavg"
    command: str = "python sleep"


def sleeping(monkeypatch, tmp_path, seconds: float) -> Place:
    """Let runs sleep; the place where they have no records."""
    code = f"import sys, time; open(sys.argv[1], 'w'); time.sleep({seconds})"

    def command_of(run, place):
        return [sys.executable, "-c", code, str(tmp_path / run.key)]
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "command_of", command_of)
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


def test_workers_share_the_processors_and_take_the_gpus_in_turn(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    local = runner.Local(3, ["0", "2"])
    seen = [local.environment(n)["CUDA_VISIBLE_DEVICES"] for n in range(3)]
    assert seen == ["0", "2", "0"] and local.environment(0)["OMP_NUM_THREADS"] == "2"
    assert "CUDA_VISIBLE_DEVICES" not in runner.Local(1).environment(0)


@pytest.mark.slow
def test_slurm_through_submitits_local_executor(tmp_path):
    pytest.importorskip("submitit")
    two_tables(tmp_path, with_failing=False)
    path = tmp_path / "runs.jsonl"
    todo = [one.run for one in missing(read_tables(tmp_path / "tables"), Records(path), "smoke", [0])]
    executor = runner.Slurm(jobs=2, cluster="local", folder=str(tmp_path / "slurm"))
    assert executor.run(todo, Place(record=str(path)), {}) == {"done": 2} and len(recorded(path)) == 2
    assert executor.run(todo, Place(record=str(path)), {}) == {"skipped": 2}
