"""python -m reproduce.measures: what it shows and writes, and how it ends."""

import json
import re

from reproduce.measures.command import main
from tests.conftest import fails
from tests.finished_runs import labelled_runs, unlabelled_runs

import pytest


@pytest.fixture
def runs(tmp_path_factory):
    return labelled_runs(tmp_path_factory)


@pytest.fixture
def unlabelled(tmp_path_factory):
    return unlabelled_runs(tmp_path_factory)


@pytest.fixture
def stops(capsys):
    """stops(words, *flags): the command ends with one line that has these words."""
    def ends(words, *flags, code=2):
        fails(capsys, code, re.escape(words), main, [str(flag) for flag in flags])
    return ends


def shown(*flags) -> None:
    """Run the command."""
    main([str(flag) for flag in flags])


def test_tsne_of_some_domains_or_of_all(runs, tmp_path, stops):
    out, numbers = tmp_path / "sub" / "t.png", tmp_path / "t.json"
    folders = runs / "fedavg-lodo", runs / "fdse-lodo"
    flags = ["--out", out, "--json", numbers, "--images", "12"]
    for domains in (["d15", "d0"], [f"d{angle}" for angle in (15, 30, 45, 60, 75, 0)]):
        named = ["--domains", ",".join(domains)] if len(domains) == 2 else []
        shown("tsne", *folders, *flags, *named)
        assert out.read_bytes().startswith(b"\x89PNG") and [*out.parent.iterdir()] == [out]
        of_fedavg, of_fdse = json.loads(numbers.read_text())["runs"]
        assert (of_fedavg["method"], of_fdse["method"]) == ("FedAvg", "FDSE")
        assert of_fedavg["domains"] == of_fdse["domains"] == domains
    stops("--domains names 'd7'", "tsne", *folders, "--domains", "d7")


def test_pad_and_risk_draw_and_show_a_table(runs, tmp_path, capsys):
    folders = runs / "fedavg-lodo", runs / "fdse-lodo"
    shown("pad", *folders, "--part", "all", "--out", tmp_path / "p.svg")
    shown("risk", *folders, "--out", tmp_path / "r.pdf")
    assert b"</svg>" in (tmp_path / "p.svg").read_bytes()
    assert (tmp_path / "r.pdf").read_bytes().startswith(b"%PDF")
    said = capsys.readouterr().out
    assert "mean of mixture and client" in said and "d0 (left out)" in said


def test_cost_and_labels(runs, tmp_path, capsys):
    numbers = tmp_path / "c.json"
    shown("cost", runs / "fedavg-lodo", runs / "fedavg-indomain", "--accuracy", "0.01", "--json", numbers)
    first, second = json.loads(numbers.read_text())["runs"]
    assert first["method"] == "FedAvg, protocol lodo, target d0" and second["cost"]["round"] == 1
    flops_of_a_round = 32 * second["cost"]["flops_per_image"]  # 32 of 40 images train
    assert second["cost"]["tflops"] == pytest.approx(flops_of_a_round / 1e12)
    assert "FedAvg, protocol indomain, target all" in capsys.readouterr().out


def test_measures_of_a_run_without_labels(unlabelled, tmp_path, stops):
    """What needs a classifier or test images says so."""
    folder = unlabelled / "paper"
    shown("tsne", folder, "--out", tmp_path / "t.png", "--images", "30")
    shown("pad", folder, "--part", "all")
    stops("--part all", "pad", folder)
    stops("without labels", "risk", folder)
    stops("has no accuracy AVG", "cost", folder)
