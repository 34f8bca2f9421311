"""What holds for every method alike: it runs, repeats, resumes, survives being killed, works with torchrun, and learns."""

import json
import random
import signal
import time

import common
from tests.conftest import METHODS, fails, interrupted, metrics, one_run, run_here, script, start

import pytest
import torch
from PIL import Image

# Tests that start many processes are quick for the method with the most state; for the others they run with -m slow.
SEVERAL = [m if m == "fdse" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS]


@pytest.mark.parametrize("method", METHODS)
def test_it_runs_and_writes_all_files(tmp_path, method):
    result = run_here(method, tmp_path, *one_run(method))
    assert json.loads((tmp_path / "result.json").read_text()) == result
    rounds = metrics(tmp_path)
    assert [entry["round"] for entry in rounds] == [1, 2]
    for entry in rounds:
        for name, log in entry["clients"].items():
            assert log["bytes_up"] > 0 and log["bytes_down"] > 0 and log["loss"] > 0, name
    assert result["bytes"]["up"] == sum(log["bytes_up"] for entry in rounds for log in entry["clients"].values())
    assert (tmp_path / "settings.json").exists() and (tmp_path / "checkpoint.pt").exists()
    assert Image.open(tmp_path / "curves.png").size[0] > 500


@pytest.mark.parametrize("method", METHODS)
def test_the_same_command_gives_the_same_bytes(tmp_path, method):
    for out in ("a", "b"):
        run_here(method, tmp_path / out, "--precision", "auto", *one_run(method))
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == (tmp_path / "b" / "metrics.jsonl").read_bytes()


# What a method keeps between rounds decides whether a resumed run is the same, so each runs with all that it can keep.
KEEPING = {
    "fedavg": [],
    "fdse": ["--protocol", "lodo", "--target", "d30"],
    "fedsr": ["--reference", "local", "--momentum", "0.9"],
    "fedcir": [],
    "fedadg": ["--keep-momentum", "--momentum", "0.9", "--protocol", "lodo", "--target", "d30"],
    "fedgala": ["--target", "d0", "--ssl", "moco"],
    "baselines.fedema": ["--target", "d0"],
}


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path, method, monkeypatch):
    flags = [*KEEPING[method], "--rounds", 4, "--limit", 40, "--checkpoint-every", 0]
    whole = run_here(method, tmp_path / "whole", *flags)
    interrupted(method, monkeypatch, tmp_path / "parts", *flags, after=2)
    assert len(metrics(tmp_path / "parts")) == 2 and not (tmp_path / "parts" / "result.json").exists()
    parts = run_here(method, tmp_path / "parts", *flags)
    assert (tmp_path / "parts" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert parts["best"] == whole["best"] and parts["bytes"] == whole["bytes"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("flags,words", [
    (["--rounds", "0"], "--rounds is 0.*at least 1"),
    (["--not-a-flag"], "--not-a-flag is not a flag of"),
    (["--backbone", "lenet"], "--backbone.*lenet.*smallcnn"),
])
def test_flags_that_no_method_takes(capsys, method, flags, words):
    fails(capsys, 2, words, METHODS[method][0].arguments, flags)


# Flags, and the accuracy (%) that the last round must reach; chance is 10%. Each was measured over seeds 0 to 2, and
# the floor lies several points below the smallest.
LEARNS = {
    "fedavg": ([], 70),
}


@pytest.mark.parametrize("method", METHODS)
def test_it_learns(tmp_path, method):
    """On the digits, after a few rounds, far above chance."""
    flags, floor = LEARNS[method]
    module, build = METHODS[method]
    args = module.arguments(["--precision", "fp32", "--out", str(tmp_path), *flags])
    result = common.run(module.Server, module.Client, args, build)[-1]
    losses = [sum(log["loss"] for log in entry["clients"].values()) for entry in metrics(tmp_path)]
    assert losses[-1] < 0.8 * losses[0]
    accuracy = result["last"]["target"] if "linear" in result["last"] else result["last"]["ALL"]
    assert 100 * accuracy > floor


@pytest.mark.parametrize("method", SEVERAL)
def test_killed_at_random_moments(tmp_path, method):
    """SIGKILL at random moments and start again until the run is through: the same metrics to the byte. The long test of
    this name kills more often."""
    kill_and_resume(tmp_path, method, kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_killed_ten_times(tmp_path, method):
    kill_and_resume(tmp_path, method, kills=10)


def kill_and_resume(tmp_path, method, kills):
    rounds = 4 + 2 * kills
    flags = [*script(method), "--scale", "smoke", *one_run(method), "--rounds", rounds, "--checkpoint-every", 0, "--out"]
    assert start(*flags, tmp_path / "whole").wait() == 0
    rng, out, killed = random.Random(0), tmp_path / "killed", 0
    for _ in range(kills):
        process = start(*flags, out)
        before = rounds_in(out)
        while process.poll() is None and rounds_in(out) <= before:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL and not (out / "result.json").exists()
    assert killed
    assert start(*flags, out).wait() == 0
    assert (out / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "killed")]
    assert results[0]["best"] == results[1]["best"] and results[0]["bytes"] == results[1]["bytes"]


def rounds_in(out) -> int:
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("counts", [(2,), pytest.param((1, 3), marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", SEVERAL)
def test_several_processes_give_the_single_process_result(tmp_path, method, counts):
    """After 3 rounds every parameter is within 1e-5, for 1, 2 and 3 processes; fp32."""
    flags = [*script(method), "--scale", "smoke", *one_run(method), "--rounds", 3, "--precision", "fp32", "--out"]
    assert start(*flags, tmp_path / "single").wait() == 0
    single = torch.load(tmp_path / "single" / "checkpoint.pt", weights_only=True)
    for n in counts:
        out = tmp_path / f"p{n}"
        process = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n, *flags, out)
        assert process.wait() == 0, process.stderr.read()
        several = torch.load(out / "checkpoint.pt", weights_only=True)
        for part in ("server", "clients"):
            tensors = common.tensors_of(without_numbers(single[part]))
            others = common.tensors_of(without_numbers(several[part]))
            assert len(tensors) == len(others) > 0 or part == "clients"
            for a, b in zip(tensors, others):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        assert accuracies(out) == accuracies(tmp_path / "single")


def accuracies(out) -> list:
    return [entry.get("test", entry.get("linear")) for entry in metrics(out)]


def without_numbers(value):
    if not isinstance(value, dict):
        return value
    return {k: without_numbers(v) for k, v in value.items() if not isinstance(v, (int, float))}


def test_one_of_two_processes_fails(tmp_path):
    """One line says what happened, also when the other process only notices that its peer has gone."""
    process = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "fedavg.py", "--scale",
                    "smoke", "--lr", 1e6, "--momentum", 1, "--weight-decay", 1, "--rounds", 50, "--out", tmp_path / "run")
    error = process.communicate()[1]
    assert process.returncode and "common.py" not in error  # torchrun's own report has a traceback, ours has none
    assert sum("no longer finite" in line for line in error.splitlines()) >= 1
