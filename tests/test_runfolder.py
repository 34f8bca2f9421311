"""The output folder: what is written, what is refused, what is kept when something fails."""

import json
import os
import shutil
import stat
from pathlib import Path

from plumbing.files import locked
from plumbing.results import command, record
from plumbing.settings import identity
from tests.conftest import fails, interrupted, metrics, parsed, run_all, run_here, start

import numpy as np
import pytest
import torch
from PIL import Image


@pytest.fixture(scope="module")
def one_finished(tmp_path_factory):
    """The folder of a finished run."""
    path = tmp_path_factory.mktemp("finished") / "run"
    run_here("fedavg", path)
    return path


@pytest.fixture
def finished(tmp_path, one_finished):
    """A copy of it, with which a test may do what it likes."""
    return shutil.copytree(one_finished, tmp_path / "run")


def result_in(path) -> dict:
    return json.loads((path / "result.json").read_text())


# What is written

RESULT = {"id", "method", "args", "command", "best", "last", "curve", "logs", "bytes", "finished",
          "seconds", "images_per_second", "peak_memory_mib", "code", "sources", "commit",
          "uncommitted_changes", "versions", "hardware"}


def test_output_folder(tmp_path):
    result = run_here("fedavg", tmp_path / "run")
    assert result_in(tmp_path / "run") == result
    assert result.keys() == RESULT
    assert result["args"]["seed"] == 0
    assert Image.open(tmp_path / "run" / "curves.png").size[0] > 500
    assert run_here("fedavg", tmp_path / "run") == result  # with its time: it is not run again


def test_a_run_is_recorded_once(tmp_path):
    records = tmp_path / "results" / "runs.jsonl"
    result = run_here("fedavg", tmp_path / "run", "--record", records)
    run_here("fedavg", tmp_path / "run", "--record", records)
    assert [json.loads(line) for line in records.read_text().splitlines()] == [result]


def test_a_record_survives_damaged_lines(tmp_path, finished):
    path = tmp_path / "runs.jsonl"
    result = result_in(finished)
    cut = json.dumps(result)[:200]
    path.write_bytes(b"\xff\n" + cut.encode())
    for _ in range(2):
        record(parsed("fedavg", "--record", path), result)
    lines = path.read_bytes().splitlines()
    assert len(lines) == 3
    assert lines[1] == cut.encode() and json.loads(lines[2]) == result


FLAGS = ["--no-resume", "--archives", "/a", "--weights", "my weights.pt", "--no-consensus", "--out=/o",
         "--checkpoint-every", "0", "--seed", "1"]


@pytest.mark.parametrize("module,start", [
    (None, "python fdse.py"),
    ("baselines.fedema", "python -m baselines.fedema"),
])
def test_the_recorded_command_can_be_typed_elsewhere(monkeypatch, module, start):
    spec = None
    if module:
        spec = type("Spec", (), {"name": module})
    monkeypatch.setattr("sys.argv", ["/somewhere/fdse.py", *FLAGS])
    monkeypatch.setattr("__main__.__spec__", spec)
    assert command() == f"{start} --weights 'my weights.pt' --no-consensus --seed 1"
    args = parsed("fedavg", "--precision", "fp32", "--threads", "7")
    assert command(args) == command() + " --precision fp32 --threads 1"  # the threads that there are
    monkeypatch.setattr("sys.argv", ["fdse.py", "--precision=fp32", "--threads", "2"])
    assert command(args) == f"{start} --precision=fp32 --threads 1"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is the process's")
def test_the_peak_of_memory_is_the_runs_own(tmp_path):
    """What the process held before the run does not count."""
    first = run_here("fedavg", tmp_path / "a")["peak_memory_mib"]
    ballast = np.ones(1 << 26)  # 512 MiB
    del ballast
    assert run_here("fedavg", tmp_path / "b")["peak_memory_mib"] < first + 256


def test_threads_are_a_setting(tmp_path):
    """Which other settings do not know: a run goes on with another number."""
    before = torch.get_num_threads()
    try:
        result = run_here("fedavg", tmp_path, "--threads", "2")
    finally:
        torch.set_num_threads(before)
    assert result["hardware"]["threads"] == result["code"][0]["threads"] == 2
    assert "threads" not in result["args"] and result["command"].endswith("--threads 2")


# Another run's folder


def test_weights_are_known_by_their_content(tmp_path):
    keys = []
    for value in (0.0, 1.0):
        torch.save({"x": torch.tensor(value)}, tmp_path / "w.pt")
        keys.append(identity(parsed("fedavg", "--weights", tmp_path / "w.pt")))
    assert keys[0] != keys[1]


def test_another_run_in_the_folder_is_refused(finished, capsys):
    before = (finished / "checkpoint.pt").read_bytes()
    words = "holds a run of other arguments.*lr 0.05, not 0.2"
    fails(capsys, 2, words, run_here, "fedavg", finished, "--lr", "0.2")
    assert (finished / "checkpoint.pt").read_bytes() == before
    assert run_here("fedavg", finished, "--lr", "0.2", "--no-resume")["args"]["lr"] == 0.2


def test_another_result_without_a_checkpoint_is_refused(finished, capsys):
    (finished / "checkpoint.pt").unlink()
    words = "holds a run of other arguments.*seed 0, not 5"
    fails(capsys, 2, words, run_here, "fedavg", finished, "--seed", "5")


def test_a_run_that_cannot_start_deletes_nothing(finished, capsys):
    flags = ["--no-resume", "--backbone", "resnet18"]
    fails(capsys, 2, "takes colour images", run_here, "fedavg", finished, *flags)
    assert (finished / "checkpoint.pt").exists() and (finished / "result.json").exists()


def test_two_processes_in_one_folder(tmp_path, capsys):
    with locked(tmp_path / "run" / ".lock"):
        fails(capsys, 1, "another process is running", run_here, "fedavg", tmp_path / "run")


# Damaged files


def test_a_damaged_result_is_made_again(finished):
    before = result_in(finished)
    (finished / "result.json").write_text("[")
    again = run_here("fedavg", finished)
    assert again["best"] == before["best"] and result_in(finished) == again


@pytest.mark.parametrize("damage,words", [
    ({"history": 3}, "is no whole checkpoint"),
    ({"round": 99}, "is no whole checkpoint"),
    ({"round": "2"}, "is no whole checkpoint"),
    ({"identity": "["}, "is no whole checkpoint"),
    ({"best": {"round": 1}}, "does not fit this method"),
    ({"server": {}}, "does not fit this method"),
    ({"server": {"w": {"x": torch.zeros(1)}}}, "does not fit this method"),
])
def test_a_damaged_checkpoint_is_named(finished, capsys, damage, words):
    path = finished / "checkpoint.pt"
    torch.save(torch.load(path, weights_only=True) | {"round": 1} | damage, path)
    (finished / "result.json").unlink()
    fails(capsys, 1, f"checkpoint.pt {words}.*--no-resume to replace it", run_here, "fedavg", finished)


class Attack:
    """Loaded without care, it makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize("file", ["weights", "checkpoint"])
def test_loading_never_runs_code(tmp_path, monkeypatch, capsys, file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    flags, path = [], tmp_path / "run" / "checkpoint.pt"
    if file == "weights":
        path = tmp_path / "weights.pt"
        flags = ["--weights", path]
    torch.save({"body.x": Attack()}, path)
    words = f"{path.name} cannot be read as a file of {file}"
    fails(capsys, 1, words, run_here, "fedavg", tmp_path / "run", *flags)
    assert not (tmp_path / "attacked").exists()


# Interrupted runs


def test_a_resumed_run_says_so_and_writes_its_settings_anew(tmp_path, monkeypatch, capsys):
    """settings.json is that of the command which finished the run: it may have other folders and times."""
    flags = ["--rounds", "3", "--out", tmp_path, "--scale", "smoke", "--precision", "fp32"]
    interrupted("fedavg", monkeypatch, tmp_path, "--rounds", "3", "--checkpoint-every", "0", after=1)
    before = json.loads((tmp_path / "settings.json").read_text())
    (tmp_path / "settings.json").unlink()
    run_all("fedavg", parsed("fedavg", *flags, "--checkpoint-every", "7"))
    assert "going on after round 1 of 3" in capsys.readouterr().out
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["settings"].pop("checkpoint_every") == {"value": 7.0, "origin": "flag"}
    assert before["settings"].pop("checkpoint_every") == {"value": 0.0, "origin": "flag"}
    assert [part["from"] for part in settings.pop("code")] == [1, 2] and len(before.pop("code")) == 1
    assert settings == before and settings["settings"]["rounds"] == {"value": 3, "origin": "flag"}


def test_what_a_killed_process_left_is_removed(tmp_path, monkeypatch):
    """A half-written file, and lines of rounds that were done after the last checkpoint."""
    flags = ["--rounds", "3", "--checkpoint-every", "0"]
    interrupted("fedavg", monkeypatch, tmp_path, *flags, after=2)
    (tmp_path / "checkpoint.pt.123.tmp").write_bytes(b"half of it")
    for name in ("metrics.jsonl", "timing.jsonl"):
        with open(tmp_path / name, "a") as file:
            file.write('{"round": 3, "clients": {}, "seconds": {}}\n')
    run_here("fedavg", tmp_path, *flags)
    assert not list(tmp_path.glob("*.tmp"))
    times = [json.loads(line)["round"] for line in (tmp_path / "timing.jsonl").read_text().splitlines()]
    assert [entry["round"] for entry in metrics(tmp_path)] == times == [1, 2, 3]
    assert len(metrics(tmp_path)[2]["clients"]) == 6


def test_nan_stops_and_keeps_the_last_good_checkpoint(tmp_path, capsys):
    growing = ["--lr", "1e6", "--momentum", "1", "--weight-decay", "1"]
    flags = [*growing, "--rounds", "50", "--checkpoint-every", "0"]
    words = r"round \d+, client d\d+: the loss or the weights are no longer finite.*lower --lr"
    fails(capsys, 1, words, run_here, "fedavg", tmp_path / "run", *flags)
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert saved["round"] >= 1
    for name, v in saved["server"]["w"].items():
        assert torch.isfinite(v).all(), name


# Folders and disks that take nothing


def test_a_file_in_the_place_of_the_output_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    words = f"Not a directory: {tmp_path / 'file' / 'run'}"
    fails(capsys, 1, words, run_here, "fedavg", tmp_path / "file" / "run")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_an_output_folder_that_cannot_be_written(tmp_path, capsys):
    read_only = tmp_path / "read-only"
    read_only.mkdir()
    read_only.chmod(stat.S_IRUSR | stat.S_IXUSR)
    fails(capsys, 1, "Permission denied", run_here, "fedavg", read_only / "run")


# The limit on a file's size stops a write in the middle, as a full disk does.
FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import common, fedavg, torch
from plumbing.files import save, write_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
"""
WRITE = 'write_whole(Path(sys.argv[1]), lambda file: save({"x": torch.zeros(10**6)}, file))'
RUN = "common.run(fedavg.Server, fedavg.Client, fedavg.arguments(sys.argv[1:]))"


def test_a_full_disk_keeps_the_last_checkpoint(finished):
    good = (finished / "checkpoint.pt").read_bytes()
    process = start("-c", FULL_DISK + WRITE, finished / "checkpoint.pt")
    assert "OSError" in process.communicate()[1]
    assert (finished / "checkpoint.pt").read_bytes() == good
    assert not list(finished.glob("*.tmp"))


def test_a_run_on_a_full_disk_ends_with_one_line(tmp_path):
    process = start("-c", FULL_DISK + RUN, "--scale", "smoke", "--out", tmp_path / "run")
    error = process.communicate()[1].strip().splitlines()[-1]
    assert process.returncode == 1
    assert error.startswith("fedavg: ") and "too large" in error
