"""docs/exercises.md: each change of a line, made in a copy of its method, comes out as the page says. Fewer
rounds, smaller images, one seed."""

import contextlib
import io
import json
import re
from pathlib import Path

import common
from tests.conftest import MODULES
from tests.docs.test_start import ROOT, module_of
from tests.page_outputs import blocks

import pytest

PAGE = ROOT / "docs" / "exercises.md"
DIFFS = dict(zip(re.findall(r"`cp \w+\.py (\w+)\.py`", PAGE.read_text()), blocks(PAGE.read_text(), "diff")))
SMALL = ["--image-size", "16", "--limit", "100", "--precision", "fp32", "--device", "cpu", "--no-figures"]
VIEWS = ["--target", "d0", "--crop", "16", "--linear-epochs", "1", "--eval-every", "9"]


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Makes the lines of metrics of a method and of its copy after an exercise's diff."""
    def made(method: str, exercise: str, *flags: str) -> list[list[dict]]:
        changed = module_of(DIFFS[exercise], tmp_path, monkeypatch, method)
        results = []
        for name, module in (("as-it-is", MODULES[method]), ("changed", changed)):
            args = module.arguments([*SMALL, *flags, "--out", str(tmp_path / name)])
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                common.run(module.Server, module.Client, args, getattr(module, "build", common.backbone))
            results.append(lines_of(tmp_path / name))
        return results
    return made


def lines_of(folder: Path) -> list[dict]:
    """What a run has logged of each round: its clients' means, and the accuracies."""
    found = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        clients = list(entry["clients"].values())
        means = {name: sum(log[name] for log in clients) / len(clients) for name in clients[0]}
        found.append(means | entry.get("test", {}))
    return found


def test_without_the_consensus_the_loss_is_the_same_and_the_model_is_not(both):
    plain, changed = both("fdse", "no_consensus", "--rounds", "2")
    assert plain[-1]["loss"] != changed[-1]["loss"]
    for before, after in zip(plain, changed):
        assert after["loss"] == pytest.approx(before["loss"], rel=0.1)


@pytest.mark.slow
def test_without_the_statistics_of_bn_the_model_is_useless_though_the_loss_falls(both):
    plain, changed = both("fedavg", "no_statistics", "--rounds", "8")
    assert changed[-1]["loss"] < 0.6 * changed[0]["loss"]
    assert changed[-1]["ALL"] < 0.6 * plain[-1]["ALL"]


@pytest.mark.slow
def test_the_domain_of_a_client_that_has_left_loses_most(both):
    plain, changed = both("fedavg", "one_leaves", "--rounds", "10")
    lost = {name: plain[-1]["clients"][name] - changed[-1]["clients"][name] for name in plain[-1]["clients"]}
    assert lost["d0"] > 0.1 and lost["d0"] == max(lost.values())
    assert plain[-1]["ALL"] - changed[-1]["ALL"] < lost["d0"]


def test_without_crops_the_loss_is_low_from_the_start(both):
    plain, changed = both("fedgala", "no_crops", *VIEWS, "--rounds", "1")
    assert changed[0]["loss"] < 0.5 * plain[0]["loss"]


@pytest.mark.slow
def test_with_every_gradient_the_loss_falls_faster(both):
    """And most layers' gradients would be thrown away, from the second round on."""
    plain, changed = both("fedgala", "all_gradients", *VIEWS, "--rounds", "4")
    assert plain[0]["loss"] == changed[0]["loss"]
    assert changed[-1]["loss"] < plain[-1]["loss"] - 0.1
    assert plain[-1]["discarded"] > 0.5
