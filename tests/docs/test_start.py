"""docs/start.md: its commands are command lines; its FedProx is baselines/fedprox.py, as the README shows it;
its picture of a domain is of the digits."""

import importlib.util
import sys
from pathlib import Path

import fedavg
from baselines import fedprox
from tests.conftest import ROOT
from tests.page_outputs import applied, blocks
from tests.three_clients import FLAGS, ROUNDS, assert_near, federation, one_round

import torch

PAGE = (ROOT / "docs/start.md").read_text()


def module_of(diff: str, folder: Path, monkeypatch, method: str = "fedavg"):
    """A method's file after a diff, as a module."""
    path = folder / "changed.py"
    path.write_text(applied(diff, (ROOT / f"{method}.py").read_text()))
    spec = importlib.util.spec_from_file_location("changed", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "changed", module)
    spec.loader.exec_module(module)
    return module


def test_the_printed_fedprox_is_fedprox(tmp_path, monkeypatch):
    """Two rounds with a term as large as the loss, after which it is not FedAvg's model."""
    shown, = blocks((ROOT / "README.md").read_text(), "python")
    assert shown in (ROOT / "fdse.py").read_text()
    changed = module_of(blocks(PAGE, "diff")[-1], tmp_path, monkeypatch)
    models = []
    for module, flags in ((changed, ["--mu", "4"]), (fedprox, ["--mu", "4"]), (fedavg, [])):
        server, clients, _ = federation(module, module.arguments([*map(str, FLAGS), *flags]))
        for t, chosen in enumerate(ROUNDS[:2]):
            one_round(server, clients, t, chosen)
        models.append(server.w)
    assert_near(models[0], models[1])
    assert not torch.allclose(models[0]["head.weight"], models[2]["head.weight"], rtol=0.01)
