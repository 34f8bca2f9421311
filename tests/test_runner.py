"""Running: nothing is lost or repeated, also when a run or a runner ends badly."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

from reproduce import runner
from reproduce.records import Place
from reproduce.runner import Processes, execute

import pytest


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

    def commands_of(run, place, trained):
        return [[sys.executable, "-c", code, str(tmp_path / run.key)]]
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "commands_of", commands_of)
    monkeypatch.setattr(runner, "folder_of_run", lambda run: tmp_path / f"folder of {run.key}")
    return Place(record=str(tmp_path / "none.jsonl"))


def saying(monkeypatch, tmp_path, *codes: str) -> Place:
    """Let a run be these Python programs, each after the refusal of the one before."""
    place = sleeping(monkeypatch, tmp_path, 0)
    words = [[sys.executable, "-c", code] for code in codes]
    monkeypatch.setattr(runner, "commands_of", lambda run, place, trained: words)
    return place


def test_a_run_that_cannot_start_does_not_stop_the_rest(monkeypatch, tmp_path, capfd):
    place = sleeping(monkeypatch, tmp_path, 0)
    (tmp_path / "folder of a").write_text("a file")
    counts = runner.run_all([Sleep("a"), Sleep("b")], place, 1, [])
    assert counts == {"failed": 1, "done": 1} and (tmp_path / "b").exists()
    error = capfd.readouterr().err
    assert "failed: python sleep" in error and "it could not be started" in error


def test_a_run_of_another_runner_is_skipped(monkeypatch, tmp_path):
    said = "import sys; sys.exit('fedavg: another process is running in runs/x: wait for it')"
    place = saying(monkeypatch, tmp_path, said)
    assert execute(Sleep("a"), place, Processes()) == ("skipped", "another runner is on it")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_runs_at_once(monkeypatch, tmp_path, number):
    """Also one that has just started and one that starts meanwhile."""
    place = sleeping(monkeypatch, tmp_path, 60)
    popen = subprocess.Popen

    def slowly(*args, **kw):
        time.sleep(0.2)  # all are submitted
        os.kill(os.getpid(), number)
        time.sleep(0.5)
        return popen(*args, **kw)
    monkeypatch.setattr(runner.subprocess, "Popen", slowly)
    started = time.monotonic()
    counts = runner.run_all([Sleep("a"), Sleep("b")], place, 1, [])
    assert counts["stopped"] and counts["interrupted"] == 1 and not counts["done"]
    assert time.monotonic() - started < 20


def test_runs_have_their_share_of_the_processors_and_the_gpus_in_turn(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    found = [runner.environment(number, 3, ["0", "2"]) for number in range(3)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in found] == ["0", "2", "0"]
    assert found[0]["OMP_NUM_THREADS"] == "2" and runner.environment(0, 1, []) == {"OMP_NUM_THREADS": "8"}


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
    assert runner.run_all(runs, place, 2, [])["done"] == 3
    workers = dict(began)
    assert workers["a"] == workers["c"] != workers["b"]
    assert [key for key, _ in began if key in "ac"] == ["a", "c"]
