"""--tensorboard: which scalars are written, also by a run that goes on."""

import json
import sys
import types

from plumbing import settings
from plumbing.runfolder import numbers_in
from tests.conftest import fails, interrupted, metrics, parsed, run_here

import pytest


class Writer:
    """It writes lines: the round from which on older ones are void first."""

    def __init__(self, folder, purge_step=None):
        folder.mkdir(exist_ok=True)
        self.file = open(folder / f"events-{purge_step}", "w")

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
    find_spec = settings.importlib.util.find_spec
    monkeypatch.setattr(settings.importlib.util, "find_spec",
                        lambda name, *more: name == "tensorboard" or find_spec(name, *more))


def test_scalars_of_a_run_that_goes_on(tmp_path, stub, monkeypatch):
    """The second process marks what the first wrote beyond round 2 as void, and adds rounds 3 and 4."""
    flags = ["--tensorboard", "--rounds", "4", "--checkpoint-every", "0"]
    interrupted("fedavg", monkeypatch, tmp_path, *flags, after=2)
    run_here("fedavg", tmp_path, *flags)
    written = {}
    for file in (tmp_path / "tensorboard").iterdir():
        written[file.name] = [json.loads(line) for line in file.read_text().splitlines()]
    assert {name: sorted({step for _, _, step in lines}) for name, lines in written.items()} == {
        "events-1": [1, 2], "events-3": [3, 4]}
    last = {tag: value for tag, value, step in written["events-3"] if step == 4}
    assert last == dict(numbers_in(metrics(tmp_path)[3]))
    assert last["test/ALL"] == metrics(tmp_path)[3]["test"]["ALL"] and "clients/d0/loss" in last


def test_without_the_package_it_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None)
    fails(capsys, 2, "--tensorboard needs a package .*: pip install tensorboard", parsed, "fedavg",
          "--tensorboard")
