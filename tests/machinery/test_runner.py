"""Running: nothing is lost or repeated, also when a run or a runner ends badly."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time

import fedavg
from reproduce import budget, runner
from reproduce.budget import ENDS, Budget
from reproduce.plan import ANY_GPU, kind_of
from reproduce.records import Place, Records, Run
from reproduce.runner import Processes, execute
from tests.small_table import record, records_in

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


def test_a_run_of_another_runner_is_skipped(monkeypatch, tmp_path):
    """Though the other's lines follow in the same log."""
    refused = "print('fedavg: another process is running in runs/x', *range(9), sep='\\n'); exit(1)"
    place = saying(monkeypatch, tmp_path, refused)
    assert execute(Sleep("a"), place, Processes()) == ("skipped", "another runner is on it")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_runs_at_once(monkeypatch, tmp_path, number):
    """Also one that has just started and one that starts meanwhile."""
    place = saying(monkeypatch, tmp_path, "import time; time.sleep(60)")
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
    return Run(module, ("--dataset", "digits", *flags), seed)


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Makes a budget by records of FedAvg on a CPU (2 s a round) and three GPUs (1 s on an H100, 3 s on an
    H200, 5 s on another). Runs have their folders in tmp_path."""
    def folder(run):
        return tmp_path / f"{run.module}-{'-'.join(run.flags)}-{run.seed}"
    monkeypatch.setattr(budget, "folder_of_run", folder)
    made = []
    for seconds, hardware in ((2, {}), (1, {"gpu": "NVIDIA H100 80GB HBM3"}), (5, {"gpu": "NVIDIA A100"}),
                              (3, {"gpu": "NVIDIA H200"})):
        one = record("fedavg", ["--dataset", "digits"], hardware=hardware)
        made.append(one | {"seconds": {"train": seconds * one["args"]["rounds"]}})
    records = records_in(tmp_path, made)
    return lambda minutes, jobs=1, kind="CPU": Budget(minutes, records, jobs, kind)


def test_the_time_of_a_run_is_that_on_its_kind_of_device(given):
    """Of several records the slowest."""
    run = digits("--rounds", "10")
    for kind, of_round in (("CPU", 2), ("H100 or H200", 3), ("NVIDIA A100", 5), (ANY_GPU, 5)):
        assert given(1, 1, kind).need(run) == 10 * of_round + 2 * ENDS
    assert given(3, 1, "another").need(run) == given(3).need(digits(module="fdse")) == 90
    assert kind_of(None) == "CPU" and kind_of("NVIDIA H200 NVL") == "H100 or H200" != kind_of("NVIDIA H20")


def test_nothing_begins_that_cannot_end(given):
    """Of a list in its order; on a cluster each where one before has ended."""
    long, short, unknown = ([digits("--rounds", "50")], [digits("--rounds", "5")], [digits(module="fdse")])
    limit = given(1)
    waiting = [long, short, unknown]
    assert limit.next(waiting, lambda: False) == short and limit.next(waiting, lambda: False) == unknown
    limit.end -= 31  # less than half is left
    limit.ended(), limit.ended()
    assert limit.next([long, unknown], lambda: False) is None
    assert given(1).submitted([short, long, unknown, short, unknown], 1) == [short, unknown]
    assert given(1).submitted([short, unknown, unknown, short], 2) == [short, unknown, unknown, short]


def test_the_rounds_of_this_call_tell_and_those_done_do_not_count(given):
    limit, run = given(10), digits("--rounds", "100", module="fdse")
    assert limit.next([[run]], lambda: False) == [run] and limit.need(run) == 300
    path = budget.folder_of_run(run)
    path.mkdir()
    lines = [json.dumps({"round": t, "seconds": {"train": 20 + t}}) + "\n" for t in (1, 2, 3)]
    (path / "timing.jsonl").write_text("".join(lines) + '{"round"')
    other = digits("--rounds", "100", module="fdse", seed=1)
    assert limit.need(other) == pytest.approx(100 + ENDS, abs=1)
    (path / "checkpoint.pt").touch()
    assert limit.need(run) == pytest.approx(97 + ENDS, abs=1)
    run.replace = True
    assert limit.need(run) == pytest.approx(100 + ENDS, abs=1)


def test_what_does_not_end_when_it_is_told_to_is_killed(monkeypatch, tmp_path):
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    place = saying(monkeypatch, tmp_path, deaf)
    for name, value in (("folder_of_run", runner.folder_of_run), ("GRACE", 0.5), ("EARLY", 0),
                        ("rounds_done", lambda run: 0)):
        monkeypatch.setattr(budget, name, value)
    monkeypatch.setattr(Budget, "need", lambda limit, run: 0.5)
    started = time.monotonic()
    limit = Budget(1 / 60, Records(tmp_path / "none.jsonl"), 2, "CPU")
    counts = runner.run_all([Sleep("a"), Sleep("b"), Sleep("c")], place, 2, [], limit)
    assert counts == {"interrupted": 2} and 1 < time.monotonic() - started < 5
