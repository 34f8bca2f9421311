"""The output folder: what is written, what is refused, what is kept when something fails; --tensorboard."""

import errno
import os
import pathlib
import runpy
import shlex
import shutil
import signal
import sys
import types
from unittest import mock

import common
import fedavg
from plumbing.run import errors, results, runfolder, settings
from plumbing.run.files import locked, write_json
from plumbing.run.provenance import code
from plumbing.run.results import command
from plumbing.run.runfolder import Run, numbers_in
from plumbing.run.settings import identity
from tests.conftest import (fails, interrupted, metrics, parsed, read_json, run_all, run_here, same_metrics,
                            saved_in, stops)
from tests.small_table import recorded

import matplotlib
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
    return read_json(path / "result.json")


# What is written


def test_output_folder(tmp_path):
    """Of a run that is given twice there is one record."""
    records = tmp_path / "results" / "runs.jsonl"
    result = run_here("fedavg", tmp_path / "run", "--record", records, figures=True)
    assert result_in(tmp_path / "run") == result
    assert {"id", "command", "curve", "logs", "seconds", "code", "commit", "versions", "hardware",
            "measures", "content"} <= result.keys()
    assert Image.open(tmp_path / "run" / "curves.png").size[0] > 500
    again = run_here("fedavg", tmp_path / "run", "--record", records)
    assert again == result  # with its time: it is not run again
    del result["measures"]
    assert recorded(records) == [result]


def test_a_figure_has_nobodys_taste_and_a_notebook_keeps_its_own(tmp_path):
    with matplotlib.rc_context({"axes.facecolor": "yellow"}):
        run_here("fedavg", tmp_path / "run", figures=True)
        assert matplotlib.rcParams["axes.facecolor"] == "yellow"
    image = Image.open(tmp_path / "run" / "curves.png").convert("RGB")
    assert (255, 255, 0) not in {colour for _, colour in image.getcolors(1 << 20)}


def curves_of(history, path, monkeypatch, *flags) -> list[dict]:
    """The lines of both panels of curves.png by their labels in the legend, and the legend's words."""
    drawn, empty = [], results.empty_figure
    monkeypatch.setattr(results, "empty_figure", lambda size: drawn.append(empty(size)) or drawn[-1])
    results.draw_curves(path / "curves.png", history, "fedavg", parsed("fedavg", *flags))
    panels = [{line.get_label(): line for line in panel.lines} for panel in drawn[0].axes]
    return [*panels, [text.get_text() for text in drawn[0].legends[0].get_texts()]]


def rounds_with(clients: list[str], **others) -> list[dict]:
    """Two rounds: each client's loss falls from 3 to 1.5, the accuracies are there in the second."""
    history = [{"round": t, "val": {"ALL": 0.5}, "clients": {name: {"loss": 6.0 / t} for name in clients}}
               for t in (2, 4)]
    history[1] |= {"test": {"ALL": 0.75, "AVG": 0.25, "clients": dict.fromkeys(clients, 0.5)}, **others}
    return history


def test_curves(tmp_path, monkeypatch):
    """Accuracies in percent, and each client's loss, over their rounds; a client has one colour in both."""
    left, right, legend = curves_of(rounds_with(["a", "b"], target=0.1), tmp_path, monkeypatch,
                                    "--protocol", "lodo", "--target", "d75")
    points = {name: line.get_xydata().tolist() for name, line in left.items()}
    assert points == {"a": [[4, 50]], "b": [[4, 50]], "validation ALL": [[2, 50], [4, 50]],
                      "test AVG": [[4, 25]], "test ALL": [[4, 75]], "target d75": [[4, 10]]}
    assert list(left) == legend
    assert [line.get_xydata().tolist() for line in right.values()] == [[[2, 3], [4, 1.5]]] * 2
    assert [left[name].get_color() for name in "ab"] == [right[name].get_color() for name in "ab"]


def test_the_curves_of_many_clients(tmp_path, monkeypatch):
    """Ten differ in colour; of more the legend has the number alone. A measure is named."""
    names = [f"client-{k}" for k in range(11)]
    left, right, _ = curves_of(rounds_with(names[:10]), tmp_path, monkeypatch)
    assert len({left[name].get_color() for name in names[:10]}) == len(right) == 10
    history = rounds_with(names, val={"ALL": 0.5, "metric": 0.9})
    _, _, legend = curves_of(history, tmp_path, monkeypatch, "--metric", "auc")
    assert legend == ["11 clients", "validation ALL", "validation auc", "test AVG", "test ALL"]


def test_a_figure_that_fails_costs_a_line_and_no_result(finished, monkeypatch, capsys):
    """As with LaTeX asked for and not there. The next start draws it."""
    def no_latex(*_) -> None:
        raise RuntimeError("latex\ncould not be found")
    with monkeypatch.context() as patch:
        patch.setattr(runfolder, "draw_curves", no_latex)
        assert run_here("fedavg", finished, figures=True) == result_in(finished)
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"fedavg: {finished}/curves.png is not drawn (RuntimeError: latex could not be found)")
    (finished / "curves.png.1.tmp").touch()  # of a process that was killed
    run_here("fedavg", finished, figures=True)
    assert [*finished.glob("curves.png*")] == [finished / "curves.png"]


def test_a_finished_run_on_a_disk_that_is_only_read_is_shown(finished, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(runfolder, "locked", None)
    assert run_here("fedavg", finished) == result_in(finished)


FLAGS = ["--no-resume", "--archives", "/", "--weights", "my weights.pt", "--no-consensus", "--out=/o",
         "--seed", "1"]


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
    args = parsed("fdse", *FLAGS, "--precision", "fp32", "--threads", "7")
    flags = "--weights 'my weights.pt' --seed 1 --no-consensus --precision fp32 --threads 1"
    assert sorted(shlex.split(command(args))) == sorted(shlex.split(f"{start} {flags}"))


def test_weights_are_known_by_their_content(tmp_path):
    keys = []
    for value in (0.0, 1.0):
        torch.save({"x": torch.tensor(value)}, tmp_path / "w.pt")
        keys.append(identity(parsed("fedavg", "--weights", tmp_path / "w.pt")))
    assert keys[0] != keys[1]


def test_two_processes_in_one_folder(tmp_path, capsys):
    with locked(tmp_path / "run" / ".lock"):
        fails(capsys, 1, "another process is running", run_here, "fedavg", tmp_path / "run")


def test_a_checkpoint_of_other_tensors_is_named(finished, capsys):
    path = finished / "checkpoint.pt"
    torch.save(saved_in(path) | {"server": {"w": {"x": torch.zeros(1)}}}, path)
    (finished / "result.json").unlink()
    words = "checkpoint.pt does not fit this method.*--no-resume to replace it"
    fails(capsys, 1, words, run_here, "fedavg", finished)


def test_an_edited_result_is_neither_shown_nor_recorded(finished, tmp_path, capsys):
    """What the history says is."""
    right = result_in(finished)
    edited = right | {"best": right["best"] | {"ALL": 2.0}, "curve": {}}
    write_json(finished / "result.json", edited)
    result = run_here("fedavg", finished, "--record", tmp_path / "r.jsonl")
    assert result == right
    assert read_json(tmp_path / "r.jsonl")["best"] == right["best"]


def test_a_changed_byte_is_noticed(finished, capsys):
    """torch reads a checkpoint with another number in it and says nothing; its checksum does."""
    path = finished / "checkpoint.pt"
    weights = next(iter(saved_in(path)["server"]["w"].values()))
    numbers, content = weights.numpy().tobytes(), path.read_bytes()
    assert content.count(numbers) == 1
    path.write_bytes(content.replace(numbers, (weights + 1).numpy().tobytes()))
    assert saved_in(path)
    (finished / "result.json").unlink()
    fails(capsys, 1, "it is damaged or holds more than tensors .BadZipFile.", run_here, "fedavg", finished)


class Attack:
    """Loaded without care, it makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize("file", ["weights", "checkpoint"])
def test_loading_never_runs_code(finished, monkeypatch, capsys, file):
    monkeypatch.chdir(finished)
    path = finished / f"{file}.pt"
    torch.save({"body.x": Attack()}, path)
    flags = ["--weights", path, "--out", "new"] if file == "weights" else []
    words = f"{path.name} cannot be read as a file of {file}"
    fails(capsys, 1, words, run_here, "fedavg", finished, *flags)
    assert not (finished / "attacked").exists()


@pytest.mark.parametrize("content", ["", '{"args": 3}', "null"])
def test_an_odd_result_is_made_again(finished, content):
    before = result_in(finished)
    (finished / "result.json").write_text(content)
    assert run_here("fedavg", finished)["best"] == before["best"] == result_in(finished)["best"]


def test_other_code_is_refused(finished, capsys):
    """Two ways on: anew, or all the same; then the result knows of both."""
    path = finished / "checkpoint.pt"
    saved = saved_in(path)
    part = saved["code"][0]
    older = part | {"sha256": "1", "commit": "2", "dirty": True}
    torch.save(saved | {"code": [older], "seconds": saved["seconds"] | {"train": 3000.0}}, path)
    words = r"run by other code \(commit 2, with changes\): a training with --no-resume .* --any-code"
    fails(capsys, 2, words, run_here, "fedavg", finished)
    (finished / "result.json").unlink()
    result = run_here("fedavg", finished, "--any-code")
    assert [part["sha256"] == "1" for part in result["code"]] == [True, False]
    assert (result["sha256"], result["commit"], result["seconds"]["train"]) == ("1", "2", 3000)
    assert result["dirty"] is not False  # None in a copy without git: nobody knows
    torch.save(saved | {"code": [part | {"dirty": None}]}, path)
    (finished / "result.json").unlink()
    assert run_here("fedavg", finished)["dirty"] is None
    assert run_here("fedavg", finished, "--no-resume")["sha256"] == part["sha256"]


def test_a_finished_run_goes_on_to_more_rounds(tmp_path, finished):
    run_here("fedavg", tmp_path / "whole", "--rounds", "4")
    result = run_here("fedavg", finished, "--rounds", "4")
    assert metrics(finished) == metrics(tmp_path / "whole")
    assert result["last"]["round"] == 4 and [part["from"] for part in result["code"]] == [1, 3]


@pytest.mark.parametrize("method,flags,why", [
    ("baselines.fedproc", [], "it cannot be resumed with more rounds, because"),
    ("fedavg", ["--eval-every", "3"], "its last round was evaluated, and that of a longer run would not be"),
])
def test_where_more_rounds_would_not_be_exact_they_are_refused(tmp_path, capsys, method, flags, why):
    run_here(method, tmp_path, *flags, "--rounds", "1")
    fails(capsys, 2, why, run_here, method, tmp_path, *flags, "--rounds", "4")


def test_a_run_stops_after_a_round(tmp_path, capsys):
    run_here("fedavg", tmp_path / "whole", "--rounds", "4")
    words = "fedavg: stopped after round 2 of 4, as --stop-after asks.*same command without --stop-after"
    fails(capsys, 0, words, run_here, "fedavg", tmp_path / "run", "--rounds", "4",
          "--stop-after", "2")
    (tmp_path / "run" / "timing.jsonl").unlink()  # nothing needs it
    run_here("fedavg", tmp_path / "run", "--rounds", "4")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    trained = [saved_in(tmp_path / name / "checkpoint.pt")["images"]
               for name in ("run", "whole")]
    assert trained[0] == trained[1]


def test_too_little_room_is_said_before_the_first_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runfolder.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1 << 20))
    words = "checkpoints need up to .* MiB of disk, 1.0 MiB are free in"
    fails(capsys, 1, words, run_here, "fedavg", tmp_path)
    assert not (tmp_path / "checkpoint.pt").exists()
    monkeypatch.undo()
    run_all("fedavg", parsed("fedavg", "--scale", "smoke", "--no-figures", "--out", tmp_path))
    assert "rounds that are run again: 2, as there was no checkpoint yet" in capsys.readouterr().out


def test_a_full_disk_is_one_line_and_keeps_what_was_whole(tmp_path, monkeypatch, capsys):
    def full(content, file) -> None:
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")
    run_here("fedavg", tmp_path, "--rounds", 1)
    monkeypatch.setattr(runfolder, "save", full)
    words = "No space left on device: .*.pt; make room or give another file or folder"
    fails(capsys, 1, words, run_here, "fedavg", tmp_path, "--rounds", 3)
    assert not list(tmp_path.glob("*.tmp")) and runfolder.read_state(tmp_path / "checkpoint.pt", "")



@pytest.mark.parametrize("part, value", [
    ("code", "new"), ("code", []), ("code", [{"sha256": 1}]), ("seconds", 3), ("seconds", {"train": "x"}),
    ("seconds", {"more": "x"}), ("identity", {"rounds": "2"}), ("identity", {3: 1}), ("identity", []),
    ("round", "1"), ("images", None), ("clients", [])])
def test_a_checkpoint_with_other_types_is_none(tmp_path, finished, part, value):
    state = torch.load(finished / "checkpoint.pt", weights_only=True)
    torch.save(state | {part: state[part] | value if isinstance(value, dict) else value}, tmp_path / "c.pt")
    file = tmp_path / "c.pt"
    stops("c.pt is no whole checkpoint: give another", runfolder.read_state, file, "give another")


@pytest.mark.parametrize("value", [3e38, torch.nan])
def test_an_upload_that_spoils_the_state_costs_its_round_alone(tmp_path, monkeypatch, capsys, value):
    """The checkpoint of the round before stays, and the run resumes from there to the same bytes."""
    update = fedavg.Server.update

    def spoiled(server, uploads, t: int) -> None:
        if t == 1:
            uploads[0]["w"]["head.bias"] = torch.full_like(uploads[0]["w"]["head.bias"], value)
        update(server, uploads, t)
    flags = ["--rounds", "3", "--checkpoint-every", "0", "--eval-every", "3"]
    run_here("fedavg", tmp_path / "whole", *flags)
    with monkeypatch.context() as patch:
        patch.setattr(fedavg.Server, "update", spoiled)
        words = "round 2: the server's update gives numbers that are not finite or above 1e.18: this round"
        fails(capsys, 1, words, run_here, "fedavg", tmp_path / "run", *flags)
    assert saved_in(tmp_path / "run" / "checkpoint.pt")["round"] == 1
    run_here("fedavg", tmp_path / "run", *flags)
    assert same_metrics(tmp_path / "run", tmp_path / "whole")


# Signals


def signalled(monkeypatch, *numbers: int, after: int) -> None:
    """Let signals come once round `after` is logged."""
    log = Run.log

    def logging(folder, entry, images):
        log(folder, entry, images)
        if folder.t == after:
            for number in numbers:
                signal.raise_signal(number)
    monkeypatch.setattr(Run, "log", logging)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_its_round(tmp_path, finished, monkeypatch, capsys, number):
    """It is kept, however long the next checkpoint is away, and the run goes on to the same numbers."""
    flags = ["--checkpoint-every", "10000"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        signalled(patch, number, after=1)
        run_here("fedavg", tmp_path / "part", *flags)
    assert stopped.value.code == 128 + number
    said = capsys.readouterr().err
    assert "stopping after this round, to keep it; once more: at once" in said
    assert f"interrupted; round 1 of 2 is kept in {tmp_path / 'part'}" in said
    run_here("fedavg", tmp_path / "part", *flags)
    assert metrics(tmp_path / "part") == metrics(finished)
    assert [part["from"] for part in result_in(tmp_path / "part")["code"]] == [1, 2]


def test_a_second_signal_ends_it_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(errors, "TOGETHER", 0.0)
    signalled(monkeypatch, signal.SIGTERM, signal.SIGTERM, after=1)
    with pytest.raises(SystemExit, match="143"):
        run_here("fedavg", tmp_path, "--checkpoint-every", "10000")
    assert "interrupted; nothing that was written is lost" in capsys.readouterr().err
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_signal_in_the_last_round(tmp_path, monkeypatch, capsys):
    """The run is finished; other targets are not begun."""
    signalled(monkeypatch, signal.SIGTERM, after=1)
    with pytest.raises(SystemExit, match="143"):
        run_here("fedavg", tmp_path, "--rounds", "1", "--protocol", "lodo")
    assert f"interrupted; the run in {tmp_path / 'd0'} is finished" in capsys.readouterr().err
    assert result_in(tmp_path / "d0")["last"]["round"] == 1 and not (tmp_path / "d15").exists()


def test_a_signal_while_the_data_are_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "open_dataset", lambda args: signal.raise_signal(signal.SIGTERM))
    fails(capsys, 143, "interrupted; nothing that was written is lost", run_here, "fedavg", tmp_path)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_a_killed_process_left_is_removed(tmp_path, monkeypatch):
    """A half-written file, and lines of rounds that were done after the last checkpoint."""
    flags = ["--rounds", "3", "--checkpoint-every", "0"]
    interrupted("fedavg", monkeypatch, tmp_path, *flags, after=2)
    (tmp_path / "checkpoint.pt.123.tmp").write_bytes(b"half of it")
    for name in ("metrics.jsonl", "timing.jsonl"):
        with open(tmp_path / name, "a") as file:
            file.write("[" * 100_000 + '\n{"round": 3, "clients": {}, "seconds": {}}\n{"rou')
    run_here("fedavg", tmp_path, *flags)
    assert not list(tmp_path.glob("*.tmp"))
    times = [line["round"] for line in recorded(tmp_path / "timing.jsonl")]
    assert [entry["round"] for entry in metrics(tmp_path)] == times == [1, 2, 3]
    assert len(metrics(tmp_path)[2]["clients"]) == 6


MINE = """
import fedavg
from common import run


class Client(fedavg.Client):
    def train(self, down, t):
        up = super().train(down, t)
        up["n"] = up["n"] * 0 + 1
        return up

if __name__ == "__main__":
    run(fedavg.Server, Client, fedavg.arguments())
"""


WITH_ITS_NETWORK = """
from fedavg import Client, Server, arguments
from common import backbone, run


def build(args, channels, classes):
    return backbone(args, channels, classes)

if __name__ == "__main__":
    run(Server, Client, arguments(), build)
"""


@pytest.mark.parametrize("text", [MINE, WITH_ITS_NETWORK])
def test_a_script_of_ones_own_is_a_method_of_its_own(tmp_path, monkeypatch, capsys, text):
    """A subclass never counts as its parent: name, folder and record are those of the script."""
    script = started_script(tmp_path, monkeypatch, text, "--scale", "smoke", "--no-figures", "--record",
                            tmp_path / "runs.jsonl", "--out", tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    result = read_json(tmp_path / "runs.jsonl")
    assert result["method"] == result["args"]["method"] == "mine"
    assert capsys.readouterr().out.startswith("mine on digits")
    assert result["sha256"] == code(script)["sha256"] != code(pathlib.Path(fedavg.__file__))["sha256"]


def test_comments_of_a_script_do_not_count(tmp_path):
    """Nor do docstrings and formatting; code does."""
    script, found = tmp_path / "mine.py", []
    formatted = '"""Mine."""\n# ours\n' + MINE.replace(" * 0 + 1", "*0   +1")
    for text in (MINE, formatted, MINE.replace("+ 1", "+ 2")):
        script.write_text(text)
        found.append(code(script)["sha256"])
    assert found[0] == found[1] != found[2]


OURS = """
import fedavg
from common import run


class Server(fedavg.Server):
    pass

run(Server, fedavg.Client, fedavg.arguments())
"""


@pytest.mark.parametrize("flags, exit_code, line", [(["--lr", -1], 2, "^mine: --lr is -1.0"),
                                                    (["--out", __file__], 2, "^mine: --out .* is a file")])
def test_lines_begin_with_the_name_of_the_script(tmp_path, monkeypatch, capsys, flags, exit_code, line):
    """Also where flags and client are of another method."""
    script = started_script(tmp_path, monkeypatch, OURS, *flags)
    fails(capsys, exit_code, line, runpy.run_path, str(script), None, "__main__")


def started_script(folder, monkeypatch, text: str, *flags):
    """A script of this text, as if Python were started with it and these flags."""
    script = folder / "mine.py"
    script.write_text(text)
    monkeypatch.setattr("sys.argv", [str(script), *map(str, flags)])
    monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace(__file__=str(script), fedavg=fedavg))
    return script


@pytest.fixture
def stub(monkeypatch) -> list:
    """As if the package were installed: of each writer its folder, the round from which on older lines are
    void, and its scalars."""
    writers = []

    def writer(folder, purge_step=None):
        writers.append((folder, purge_step, []))
        return mock.Mock(add_scalar=lambda *scalar: writers[-1][2].append(scalar))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", mock.Mock(SummaryWriter=writer))
    find_spec = settings.importlib.util.find_spec
    monkeypatch.setattr(settings.importlib.util, "find_spec",
                        lambda name, *more: name == "tensorboard" or find_spec(name, *more))
    return writers


def test_scalars_of_a_run_that_goes_on(tmp_path, stub, monkeypatch):
    """The second process marks what the first wrote beyond round 2 as void, and adds rounds 3 and 4."""
    flags = ["--tensorboard", "--rounds", "4", "--checkpoint-every", "0"]
    interrupted("fedavg", monkeypatch, tmp_path, *flags, after=2)
    run_here("fedavg", tmp_path, *flags)
    (folder, first, of_first), (_, second, of_second) = stub
    assert folder == tmp_path / "tensorboard" and (first, second) == (1, 3)
    assert {step for _, _, step in of_first} == {1, 2} and {step for _, _, step in of_second} == {3, 4}
    last = {tag: value for tag, value, step in of_second if step == 4}
    assert last == dict(numbers_in(metrics(tmp_path)[3]))
    assert last["test/ALL"] == metrics(tmp_path)[3]["test"]["ALL"] and "clients/d0/loss" in last


def test_without_the_package_it_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None)
    fails(capsys, 2, "--tensorboard needs a package .*: pip install tensorboard", parsed, "fedavg",
          "--tensorboard")
