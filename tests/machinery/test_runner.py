"""Running: nothing is lost or repeated, also when a run or a runner ends badly."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import fedavg
from reproduce import runner
from reproduce.records import Place, PlannedRun
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
    serves: str = ""
    work: str = ""
    seed: int = 0
    args = fedavg.Args()

    @property
    def training(self) -> str:
        return self.serves or self.key


def saying(monkeypatch, tmp_path, *codes: str) -> Place:
    """Let a run be these Python programs, each after the refusal of the one before; the place where they have
    no records."""
    words = [[sys.executable, "-c", code, str(tmp_path)] for code in codes]
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "commands_of", lambda run, place, trained: words)
    monkeypatch.setattr(runner, "folder_of_run", lambda run: tmp_path / f"folder of {run.key}")
    return Place(record=str(tmp_path / "none.jsonl"))


def test_a_run_that_cannot_start_does_not_stop_the_rest(monkeypatch, tmp_path, capfd):
    place = saying(monkeypatch, tmp_path, "")
    (tmp_path / "folder of a").write_text("a file")
    assert runner.run_all([Sleep("a"), Sleep("b")], place, 1, []) == {"failed": 1, "done": 1}
    error = capfd.readouterr().err
    assert "failed: python sleep" in error and "it could not be started" in error


def test_an_error_ends_what_has_not_begun():
    work = mock.Mock(side_effect=OSError("no room"))
    with pytest.raises(OSError, match="no room"):
        runner.side_by_side(1, work, range(50), Processes())
    assert work.call_count < 50


def test_a_run_of_another_runner_is_skipped(monkeypatch, tmp_path):
    """Though the other's lines follow in the same log."""
    refused = "print('fedavg: another process is running in runs/x', *range(9), sep='\\n'); exit(1)"
    place = saying(monkeypatch, tmp_path, refused)
    assert execute(Sleep("a"), place, Processes()) == ("skipped", "another runner is on it")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_runs_at_once(monkeypatch, tmp_path, number):
    """Also one that has just started and one that starts meanwhile. `timeout` sends two of them."""
    place = saying(monkeypatch, tmp_path, "import time; time.sleep(60)")
    popen = subprocess.Popen

    def slowly(*args, **kw):
        time.sleep(0.2)  # all are submitted
        for _ in range(2):
            os.kill(os.getpid(), number)
            time.sleep(0.25)
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


def test_a_gpu_goes_to_the_next_run_when_it_is_free(monkeypatch, tmp_path):
    """Not to the run of its number: two runs would have one GPU while the other is idle."""
    gpu_of = {}

    def lasting(group, place, processes, env):
        gpu_of[group[0].key] = env["CUDA_VISIBLE_DEVICES"]
        time.sleep(0.5 if group[0].key == "a" else 0.1)
        return [("done", "")]
    monkeypatch.setattr(runner, "execute_group", lasting)
    runner.run_all([Sleep("a"), Sleep("b"), Sleep("c")], Place(), 2, ["0", "1"])
    assert gpu_of["b"] == gpu_of["c"] != gpu_of["a"]


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
    place, began = saying(monkeypatch, tmp_path, "import time; time.sleep(0.3)"), []
    original = runner.execute

    def noting(run, *rest):
        began.append((run.key, threading.current_thread().name))
        return original(run, *rest)
    monkeypatch.setattr(runner, "execute", noting)
    runs = [Sleep("a", serves="t"), Sleep("b"), Sleep("c", serves="t")]
    assert runner.run_all(runs, place, 2, [])["done"] == 3
    workers = dict(began)
    assert workers["a"] == workers["c"] != workers["b"]
    assert [key for key in workers if key in "ac"] == ["a", "c"]


# With a given time


def digits(*flags: str, module: str = "fedavg", seed: int = 0):
    return PlannedRun(module, ("--dataset", "digits", *flags), seed)
