"""docs/exercises.md: each change of a line, made in a copy of its method, comes out as the page says. Fewer
rounds, smaller images, one seed."""

import contextlib
import io
import re

import common
from tests.conftest import MODULES, metrics
from tests.docs.test_start import ROOT, module_of
from tests.page_outputs import blocks

import pytest

PAGE = ROOT / "docs" / "exercises.md"
DIFFS = dict(zip(re.findall(r"`cp \w+\.py (\w+)\.py`", PAGE.read_text()), blocks(PAGE.read_text(), "diff")))
SMALL = "--image-size 16 --limit 100 --precision fp32 --device cpu --no-figures"
VIEWS = "--target d0 --crop 16 --linear-epochs 1 --eval-every 9"


def loss(line: dict) -> float:
    """The clients' mean loss in a round."""
    losses = [log["loss"] for log in line["clients"].values()]
    return sum(losses) / len(losses)


def same_loss_another_model(plain, changed) -> bool:
    return loss(changed[-1]) == pytest.approx(loss(plain[-1]), rel=0.1) and plain[-1] != changed[-1]


def useless_though_the_loss_falls(plain, changed) -> bool:
    falls = loss(changed[-1]) < 0.8 * loss(changed[0])
    return falls and changed[-1]["test"]["ALL"] < 0.6 * plain[-1]["test"]["ALL"]


def the_domain_that_has_left_loses_most(plain, changed) -> bool:
    left, stayed = (lines[-1]["test"]["clients"] for lines in (changed, plain))
    lost = {name: stayed[name] - left[name] for name in stayed}
    return lost["d0"] > 0.1 and lost["d0"] == max(lost.values())


def low_from_the_start(plain, changed) -> bool:
    return loss(changed[0]) < 0.5 * loss(plain[0])


def falls_faster(plain, changed) -> bool:
    return loss(plain[0]) == loss(changed[0]) and loss(changed[-1]) < loss(plain[-1]) - 0.1


EXERCISES = [("no_consensus", "fdse", "--rounds 2", same_loss_another_model),
             ("no_crops", "fedgala", f"{VIEWS} --rounds 1", low_from_the_start),
             ("no_statistics", "fedavg", "--rounds 8", useless_though_the_loss_falls),
             ("one_leaves", "fedavg", "--rounds 10", the_domain_that_has_left_loses_most),
             ("all_gradients", "fedgala", f"{VIEWS} --rounds 4", falls_faster)]


@pytest.mark.parametrize("exercise, method", [row[:2] for row in EXERCISES])
def test_a_change_fits(tmp_path, monkeypatch, exercise, method):
    module_of(DIFFS[exercise], tmp_path, monkeypatch, method)


@pytest.mark.slow
@pytest.mark.parametrize("exercise, method, flags, outcome", EXERCISES)
def test_an_exercise(tmp_path, monkeypatch, exercise, method, flags, outcome):
    changed, lines = module_of(DIFFS[exercise], tmp_path, monkeypatch, method), []
    for name, module in (("as-it-is", MODULES[method]), ("changed", changed)):
        args = module.arguments([*SMALL.split(), *flags.split(), "--out", str(tmp_path / name)])
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            common.run(module.Server, module.Client, args, getattr(module, "build", common.backbone))
        lines.append(metrics(tmp_path / name))
    assert outcome(*lines)
