"""The network of a run by `loading.load_run`: whose it is, without images, of unfinished runs, what is
refused. That it has the recorded accuracies: test_every_method.py."""

import re
import shutil

import common
from reproduce import compare, loading
from reproduce.benchmark import entry_of
from plumbing.run.errors import UserError
from plumbing.run.files import load_file
from tests.conftest import ROOT, interrupted, one_run, read_json, run_here, saved_in, stops
from tests.three_clients import same

import pytest
import torch
from torch.testing import assert_close


@pytest.fixture
def no_images(monkeypatch):
    """Whoever asks for images gets an error."""
    def asked(args):
        raise UserError("asked for images")

    monkeypatch.setattr(common, "open_dataset", asked)


def test_a_client_by_name_or_number_and_the_one_that_is_meant_without(runs):
    folder = runs / "fdse-lodo"
    assert loading.load_run(folder).run.client == "d0"  # the left-out domain
    assert loading.load_run(folder, 5).run.client == "d0"
    assert loading.load_run(folder, "2").run.client == "d45"
    assert loading.load_run(folder, "d75").run.client == "d75"
    assert loading.load_run(runs / "fdse-indomain").run.client == "d0"  # the first
    by_name, other = (common.state(loading.load_run(folder, name)) for name in ("d45", "d75"))
    assert same(common.state(loading.load_run(folder, 2)), by_name)
    assert not same(by_name, other)


def test_what_is_known_of_it(runs):
    run = loading.load_run(runs / "fedavg-indomain", "d30", "last").run
    assert (run.client, run.round, run.channels, run.classes) == ("d30", 2, 1, tuple("0123456789"))
    assert (run.args.image_size, run.args.normalize, run.args.device) == (28, "unit", "cpu")
    pixels = torch.randint(0, 256, (3, 1, 28, 28), dtype=torch.uint8)
    assert torch.equal(run.inputs(pixels), pixels.float() / 255)
    best = read_json(runs / "fedavg-indomain" / "result.json")["best"]["round"]
    assert loading.load_run(runs / "fedavg-indomain").run.round == best


@pytest.mark.slow  # torch.export takes seconds
def test_the_exported_network_gives_the_same_of_any_batch(runs, tmp_path, monkeypatch):
    """The lines of docs/runs.md, but for the run's folder."""
    page = (ROOT / "docs" / "runs.md").read_text()
    (lines,) = [lines for lines in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "export" in lines]
    monkeypatch.chdir(tmp_path)
    given = {}
    exec(lines.replace("runs/fdse-...", str(runs / "fdse-indomain")), given)
    x = torch.rand(5, 1, 28, 28)
    exported = torch.export.load("fdse.pt2").module()
    assert_close(exported(x), given["net"](x))


@pytest.mark.parametrize("pixels", [torch.zeros(1, 3, 28, 28), torch.zeros(1, 1, 28, 28).byte()])
def test_other_pixels_are_refused(pixels):
    run = loading.Trained(common.Args(device="cpu"), "a", 1, ("x", "y"), 3)
    stops("uint8 of the shape .N, 3, 28, 28., as this run's images are", run.inputs, pixels, code=2)


def test_without_labels_it_gives_representations(tmp_path):
    run_here("fedgala", tmp_path, *one_run("fedgala"))
    net = loading.load_run(tmp_path)  # has no best.pt
    x = net.run.inputs(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    assert net.run.client == "d0" and net.run.round == 2
    assert net(x).shape == net.features(x).shape


SCRIPTS = {  # what a file of one's own gives to `run`
    "its client": """import fedavg
from common import run
from fedavg import Server, arguments
class Client(fedavg.Client): pass
if __name__ == "__main__": run(Server, Client, arguments())""",
    "its server": """import common, fedavg
from fedavg import Client, arguments
class Server(fedavg.Server): pass
if __name__ == "__main__": common.run(Server=Server, Client=Client, settings=arguments())""",
    "its server, by name": """import fdse, fedavg
from common import run
from fedavg import Client, arguments
class Server:
    keeps, update = ("w",), fedavg.Server.update
    __init__, download = fedavg.Server.__init__, fedavg.Server.download
if __name__ == "__main__": run(Server, Client, arguments())""",
}


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_of_a_method_in_a_file_of_ones_own(tmp_path, text):
    """The file is given: nothing in the folder of a run can have code run."""
    script = tmp_path / "mine.py"
    script.write_text(text)
    mine = loading.method_in(script, "mine")
    assert "own_mine" in (mine.Server.__module__, mine.Client.__module__)
    flags = ["--scale", "smoke", "--image-size", "8", "--no-figures", "--out", str(tmp_path / "run")]
    common.run(mine.Server, mine.Client, mine.arguments(flags))
    assert loading.load_run(tmp_path / "run", script=script).run.round > 0
    assert compare.runs_in([tmp_path / "run"])[0].key["method"] == entry_of(str(script)).name == "mine"
    stops("'mine' is no method of this repo.* take a file elsewhere as script", loading.load_run,
          tmp_path / "run", code=2)


def test_images_are_read_only_by_a_network_that_adapts_to_them(runs, no_images):
    for name, client in (("fedavg-indomain", 3), ("fedavg-lodo", "d0"), ("fdse-lodo", "d15")):
        loading.load_run(runs / name, client)
    stops("asked for images", loading.load_run, runs / "fdse-lodo", "d0")


def test_weights_that_a_run_started_from_need_not_be_there(tmp_path):
    donor = common.state(common.backbone(common.Args(), 1, 10))
    torch.save(donor, tmp_path / "weights.pt")
    run_here("fedavg", tmp_path / "run", "--weights", tmp_path / "weights.pt")
    (tmp_path / "weights.pt").unlink()
    assert loading.load_run(tmp_path / "run").run.round > 0


def test_of_an_unfinished_run(tmp_path, monkeypatch):
    interrupted("fdse", monkeypatch, tmp_path, "--rounds", 4, "--checkpoint-every", 0, after=2)
    last = loading.load_run(tmp_path, "d15", "last")
    saved = load_file(tmp_path / "checkpoint.pt", "checkpoint")
    assert last.run.round == saved["round"] == 2
    best = saved_in(tmp_path / "best.pt")
    assert loading.load_run(tmp_path).run.round == best["round"]


def test_a_run_by_other_code(runs, tmp_path):
    shutil.copytree(runs / "fedavg-indomain", tmp_path / "a")
    for name in ("best.pt", "checkpoint.pt"):
        saved = load_file(tmp_path / "a" / name, "checkpoint")
        saved["code"][0]["sha256"] = "0123"
        torch.save(saved, tmp_path / "a" / name)
    stops("a run by other code .commit .*: .*--any-code takes it", loading.load_run, tmp_path / "a", code=2)
    expected = common.state(loading.load_run(runs / "fedavg-indomain"))
    assert same(common.state(loading.load_run(tmp_path / "a", any_code=True)), expected)
