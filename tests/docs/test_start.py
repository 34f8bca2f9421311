"""docs/start.md: its commands are command lines; its FedProx is baselines/fedprox.py, as the README shows it;
its picture of a domain is of the digits."""

import base64
import importlib.util
import io
import re
import sys
from pathlib import Path

import fedavg
from baselines import fedprox
from plumbing.mnist import ANGLES, rotate
from plumbing.runfolder import copied
from tests.conftest import ROOT
from tests.page_outputs import accuracies_of_one, applied, blocks, redrawn
from tests.three_clients import CLOSE, FLAGS, ROUNDS, federation

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.testing import assert_close

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
            server.update({k: clients[k].train(copied(server.download(k)), t) for k in chosen}, t)
        models.append(server.w)
    assert_close(models[0], models[1], **CLOSE)
    assert not torch.allclose(models[0]["head.weight"], models[2]["head.weight"], rtol=0.01)


def test_the_changed_line_is_fedavgs():
    """The diff fits, and then the server keeps what client 0 has sent."""
    changed = applied(blocks(PAGE, "diff")[0], (ROOT / "fedavg.py").read_text())
    assert '        self.w = uploads[0]["w"]\n' in changed.split("def update")[1]


def test_the_picture_of_the_domains_is_one_digit_with_the_accuracies_of_the_table():
    """docs/domains.svg: a digit of scikit-learn's as the data set turns it, and what `one` reaches."""
    picture = (ROOT / "docs/domains.svg").read_text()
    raw = torch.from_numpy(load_digits().images[[3]] * (255 / 16)).round().to(torch.uint8)
    for angle, png in zip(ANGLES, re.findall(r"base64,([^\"]*)", picture), strict=True):
        shown = Image.open(io.BytesIO(base64.b64decode(png)))
        assert shown.tobytes() == rotate(raw[None], angle, 28).numpy().tobytes()
    accuracies = accuracies_of_one(PAGE)
    assert len(accuracies) == 6 and redrawn(picture, accuracies) == picture
