"""The output folder: what is written, what is refused, what is kept when something fails."""

import json
import os
import stat

from plumbing.files import locked
from plumbing.results import command, record
from plumbing.settings import identity
from tests.conftest import fails, parsed, run_here, start

import pytest
import torch
from PIL import Image


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize("what", ["weights", "checkpoint"])
def test_loading_never_runs_code(tmp_path, monkeypatch, capsys, what):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run" / "checkpoint.pt"
    path.parent.mkdir()
    torch.save({"body.x": Attack()}, path)
    flags = ("--weights", path) if what == "weights" else ()
    fails(capsys, 1, "cannot be read as a file of", run_here, "fedavg",
          tmp_path / ("run" if what == "checkpoint" else "other"), *flags)
    assert not (tmp_path / "attacked").exists()


def test_output_folder(tmp_path):
    result = run_here("fedavg", tmp_path / "run", "--record", tmp_path / "results" / "runs.jsonl")
    saved = json.loads((tmp_path / "run" / "result.json").read_text())
    assert saved == result
    assert {"args", "command", "best", "last", "curve", "bytes", "seconds", "images_per_second", "peak_memory_mib", "commit",
            "versions", "hardware"} <= saved.keys() and saved["args"]["seed"] == 0
    assert Image.open(tmp_path / "run" / "curves.png").size[0] > 500
    assert run_here("fedavg", tmp_path / "run", "--record", tmp_path / "results" / "runs.jsonl") == result  # not run again
    lines = (tmp_path / "results" / "runs.jsonl").read_text().splitlines()
    assert len(lines) == 1 and json.loads(lines[0]) == result


def test_the_recorded_command_can_be_typed_elsewhere(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/fdse.py", "--no-resume", "--archives", "/a", "--weights", "my weights.pt",
                                     "--no-consensus", "--out=/o", "--checkpoint-every", "0", "--seed", "1"])
    monkeypatch.setattr("__main__.__spec__", None)
    assert command() == "python fdse.py --weights 'my weights.pt' --no-consensus --seed 1"
    monkeypatch.setattr("__main__.__spec__", type("Spec", (), {"name": "baselines.fedema"}))
    assert command() == "python -m baselines.fedema --weights 'my weights.pt' --no-consensus --seed 1"


def test_another_run_in_the_folder_is_refused(tmp_path, capsys):
    run_here("fedavg", tmp_path / "run")
    before = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    fails(capsys, 2, "holds a run of other arguments.*lr 0.05, not 0.2", run_here, "fedavg", tmp_path / "run", "--lr", "0.2")
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before
    assert run_here("fedavg", tmp_path / "run", "--lr", "0.2", "--no-resume")["args"]["lr"] == 0.2


def test_results_and_checkpoints_that_are_not_this_runs(tmp_path, capsys):
    """A foreign or damaged result is never taken for ours, a damaged checkpoint is named, and nothing is deleted before the
    new run stands."""
    out = tmp_path / "run"
    mine = run_here("fedavg", out)
    result, checkpoint = (out / "result.json"), (out / "checkpoint.pt")
    result.write_text("[")
    again = run_here("fedavg", out)
    assert again["best"] == mine["best"] and json.loads(result.read_text()) == again
    fails(capsys, 2, "takes colour images", run_here, "fedavg", out, "--no-resume", "--backbone", "resnet18")
    assert checkpoint.exists() and result.exists()
    content = torch.load(checkpoint, weights_only=True) | {"round": 1}
    for damage in ({"history": 3}, {"round": 99}, {"round": "2"}, {"identity": "["}, {"best": {"round": 1}}, {"server": {}},
                   {"server": {"w": {"x": torch.zeros(1)}}}):
        torch.save(content | damage, checkpoint)
        result.unlink(missing_ok=True)
        with pytest.raises(SystemExit) as end:
            run_here("fedavg", out)
        assert end.value.code in (1, 2) and "--no-resume" in capsys.readouterr().err
    result.write_text(json.dumps(mine))
    checkpoint.unlink()
    fails(capsys, 2, "holds a run of other arguments.*seed 0, not 5", run_here, "fedavg", out, "--seed", "5")


def test_weights_are_known_by_their_content(tmp_path):
    keys = []
    for value in (0.0, 1.0):
        torch.save({"x": torch.tensor(value)}, tmp_path / "w.pt")
        keys.append(identity(parsed("fedavg", "--weights", tmp_path / "w.pt")))
    assert keys[0] != keys[1]


def test_record_survives_damaged_lines(tmp_path):
    path = tmp_path / "runs.jsonl"
    result = run_here("fedavg", tmp_path / "run")
    cut = json.dumps(result)[:200]
    path.write_bytes(b"\xff\n" + cut.encode())
    for _ in range(2):
        record(parsed("fedavg", "--record", path), result)
    lines = path.read_bytes().splitlines()
    assert lines[1] == cut.encode() and json.loads(lines[2]) == result and len(lines) == 3


def test_two_processes_in_one_folder(tmp_path, capsys):
    with locked(tmp_path / "run" / ".lock"):
        fails(capsys, 1, "another process is running", run_here, "fedavg", tmp_path / "run")


def test_nan_stops_and_keeps_the_last_good_checkpoint(tmp_path, capsys):
    fails(capsys, 1, r"round \d+, client d\d+: the loss or the weights are no longer finite.*lower --lr", run_here, "fedavg",
          tmp_path / "run", "--lr", "1e6", "--rounds", "50", "--momentum", "1", "--checkpoint-every", "0", "--weight-decay",
          "1")
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert saved["round"] >= 1 and all(torch.isfinite(v).all() for v in saved["server"]["w"].values())


def test_an_output_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    fails(capsys, 1, "file", run_here, "fedavg", tmp_path / "file" / "run")
    read_only = tmp_path / "read-only"
    read_only.mkdir()
    read_only.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.getuid():  # root may write everywhere
        fails(capsys, 1, "Permission denied", run_here, "fedavg", read_only / "run")


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path):
    """The file size limit stops the write in the middle, as a full disk does."""
    run_here("fedavg", tmp_path / "run", "--rounds", "1")
    good = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    code = ("import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); import common, fedavg; "
            f"write_whole(__import__('pathlib').Path({str(tmp_path / 'run' / 'checkpoint.pt')!r}), "
            "lambda f: save({'x': __import__('torch').zeros(10**6)}, f))")
    done = start("-c", code)
    assert "OSError" in done.communicate()[1]
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == good and not list((tmp_path / "run").glob("*.tmp"))
    code = ("import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
            "import fedavg, common; args = fedavg.arguments(['--scale', 'smoke', '--out', "
            f"{str(tmp_path / 'full')!r}]); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
            "common.run(fedavg.Server, fedavg.Client, args)")
    done = start("-c", code)
    error = done.communicate()[1].strip().splitlines()[-1]
    assert done.returncode == 1 and error.startswith("fedavg: ") and "too large" in error
