"""--tensorboard: which scalars are written, also by a run that goes on; by a writer in the place of
TensorBoard's, and where that is installed by its own."""

import importlib.util
import json
import sys
import types

from plumbing import scalars, settings
from plumbing.scalars import Scalars, scalars_of
from tests.conftest import fails, metrics, parsed
from tests.test_extending import guessed

import pytest

ENTRY = {"round": 3, "lr": 0.1, "clients": {"a": {"bytes_up": 3, "bytes_down": 7, "loss": 0.5},
                                            "b": {"bytes_up": 4, "bytes_down": 7, "loss": 0.25}},
         "val": {"ALL": 0.5, "AVG": 0.6, "clients": {"a": 0.2}}, "target": 0.9,
         "test": {"ALL": 0.7, "AVG": 0.8, "clients": {"a": 0.3}}}
EXPECTED = {"lr": 0.1, "loss/a": 0.5, "loss/b": 0.25, "bytes/up": 7, "bytes/down": 14, "validation/ALL": 0.5,
            "validation/AVG": 0.6, "validation of clients/a": 0.2, "test/ALL": 0.7, "test/AVG": 0.8,
            "test of clients/a": 0.3, "test/target": 0.9}


def test_scalars_of_a_round():
    assert scalars_of(ENTRY) == EXPECTED
    linear = {"round": 1, "clients": {}, "target": 0.5, "linear": {"photo": {"0.1": 0.5, "0.3": 0.6}}}
    assert scalars_of(linear) == {"bytes/up": 0, "bytes/down": 0, "test/target": 0.5,
                                  "linear/photo, 10% of the labels": 0.5,
                                  "linear/photo, 30% of the labels": 0.6}


class Writer:
    """In the place of TensorBoard's: it writes lines, the round from which on older ones are void first."""

    made = []

    def __init__(self, folder, purge_step=None):
        folder.mkdir(exist_ok=True)
        self.file = open(folder / f"{scalars.EVENTS}{len(self.made)}", "w")
        self.made.append(self)
        self.file.write(json.dumps(purge_step) + "\n")

    def add_scalar(self, tag, value, step):
        self.file.write(json.dumps([tag, value, step]) + "\n")

    def flush(self):
        self.file.flush()

    def close(self):
        self.file.close()


@pytest.fixture
def stub(monkeypatch):
    """As if the package were installed."""
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(settings, "refuse_without_tensorboard", lambda: None)
    monkeypatch.setattr(Writer, "made", [])


def written(folder) -> list[tuple[str, float, int]]:
    """What TensorBoard shows: of files in the order of their making the scalars that none of the later ones
    has made void."""
    shown = []
    for file in sorted((folder / "tensorboard").iterdir()):
        purge, *lines = map(json.loads, file.read_text().splitlines())
        if purge is not None:
            shown = [line for line in shown if line[2] < purge]
        shown += map(tuple, lines)
    return shown


def test_a_run_that_goes_on_has_each_scalar_once(tmp_path, stub, monkeypatch):
    """Also of a round whose scalars were written, and whose state was not."""
    flags = ["--tensorboard", "--rounds", "4"]
    guessed(tmp_path / "whole", *flags)
    add = Scalars.add

    def killed(self, entry, seconds):
        add(self, entry, seconds)
        if entry["round"] == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Scalars, "add", killed)
        guessed(tmp_path / "parts", *flags)
    guessed(tmp_path / "parts", *flags)
    names = [[(tag, step) for tag, _, step in written(tmp_path / out)] for out in ("whole", "parts")]
    assert names[0] == names[1] and len(set(names[1])) == len(names[1])
    values = [[line for line in written(tmp_path / out) if not line[0].startswith("seconds/")]
              for out in ("whole", "parts")]
    assert values[0] == values[1]
    expected = scalars_of(metrics(tmp_path / "whole")[3])
    assert {tag: value for tag, value, step in values[0] if step == 4} == expected
    assert ("seconds/train", 1) in names[0]
    guessed(tmp_path / "parts", *flags, "--no-resume")
    assert [step for tag, _, step in written(tmp_path / "parts") if tag == "lr"] == [1, 2, 3, 4]


def test_rounds_before_the_flag_was_given_are_written_too(tmp_path, stub):
    """By a run that is extended, or that is finished."""
    guessed(tmp_path / "run", "--rounds", "2")
    assert not (tmp_path / "run" / "tensorboard").exists()
    for _ in range(2):
        guessed(tmp_path / "run", "--rounds", "2", "--tensorboard")
    assert [step for tag, _, step in written(tmp_path / "run") if tag == "test/ALL"] == [1, 2]
    assert ("seconds/server", 2) in [(tag, step) for tag, _, step in written(tmp_path / "run")]


def test_without_the_package_it_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(scalars.importlib.util, "find_spec", lambda name: None)
    fails(capsys, 2, "--tensorboard needs a package .*: pip install tensorboard", parsed, "fedavg",
          "--tensorboard")


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs `pip install tensorboard`")
def test_by_the_package_itself(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    for rounds in (3, 2):  # the second process goes on after round 2: what was written of the third is void
        history = [ENTRY | {"round": t} for t in range(1, rounds + 1)]
        board = Scalars(tmp_path, history)
        board.add(ENTRY | {"round": rounds + 1}, {"train": 1.5})
        board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {*events.Tags()["scalars"]} == {*EXPECTED, "seconds/train"}
    assert [event.step for event in events.Scalars("loss/b")] == [1, 2, 3]
