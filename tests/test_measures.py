"""python -m reproduce.measures: what it shows and writes, and how it ends."""

import json
import os
import re

import common
from plumbing.files import load_file
from reproduce.measures import tsne
from reproduce.measures.command import COMMANDS, main
from reproduce.measures.finished import rebuilt
from tests.conftest import fails, start
from tests.finished_runs import changed_copy, labelled_runs, unlabelled_runs

import numpy as np
import pytest
import torch
from sklearn.metrics import silhouette_samples


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


def test_it_starts_as_a_module(runs):
    process = start("-m", "reproduce.measures", "risk", runs / "fedavg-lodo")
    said, error = process.communicate()
    assert process.returncode == 0 and "train risk" in said, error


def test_the_help_explains_commands_and_flags(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and all(name in text for name in COMMANDS)
    with pytest.raises(SystemExit):
        main(["tsne", "--help"])
    text = capsys.readouterr().out
    names = "which out json data archives source target images part".split()
    assert all(f"--{name} " in text for name in names)


def test_a_state_of_another_run_is_one_line(runs, tmp_path, stops):
    another = (runs / "fedavg-lodo" / "best.pt").read_bytes()
    folder = changed_copy(runs / "fedavg-indomain", tmp_path / "d", "best.pt", another)
    stops("different runs or rounds", "pad", folder)


def test_a_state_that_does_not_fit_is_one_line(runs, tmp_path, stops):
    folder = changed_copy(runs / "fedavg-indomain", tmp_path / "a", "best.pt", None)
    half = load_file(runs / "fedavg-indomain" / "best.pt", "checkpoint")
    half["server"]["w"].popitem()
    torch.save(half, folder / "best.pt")
    stops("does not fit fedavg.py", "pad", folder)


def test_tsne_draws_and_writes_its_numbers(runs, tmp_path):
    out, numbers = tmp_path / "sub" / "t.png", tmp_path / "t.json"
    folders = runs / "fedavg-lodo", runs / "fdse-lodo"
    shown("tsne", *folders, "--out", out, "--json", numbers, "--images", "12")
    assert out.read_bytes().startswith(b"\x89PNG") and [*out.parent.iterdir()] == [out]
    of_fedavg, of_fdse = json.loads(numbers.read_text())["runs"]
    assert (of_fedavg["method"], of_fedavg["source"], of_fedavg["target"]) == ("FedAvg", "d15", "d0")
    assert (of_fdse["method"], of_fdse["source"], of_fdse["target"]) == ("FDSE", "d15", "d0")
    assert np.shape(of_fedavg["points"]["d0"]["place"]) == (12, 2)


def test_tsne_of_all_domains_together(runs, tmp_path, monkeypatch, capsys):
    """One t-SNE for each run; a shape for each domain; silhouettes as scikit-learn's own."""
    drawn = []
    monkeypatch.setattr(tsne, "write_figure", lambda path, figure: drawn.append(figure))
    numbers = tmp_path / "t.json"
    folders = runs / "fedavg-indomain", runs / "fdse-lodo"
    shown("tsne", *folders, "--source", "all", "--images", "9", "--json", numbers)
    names = [f"d{angle}" for angle in (0, 15, 30, 45, 60, 75)]
    first, second = drawn[0].axes
    assert first.get_title() == "FedAvg: digits, smoke scale, seed 0"
    assert second.get_title() == "FDSE: digits, smoke scale, seed 0"
    texts = [text.get_text() for text in first.get_legend().get_texts()]
    assert texts == names and len(second.get_legend().get_texts()) == 6
    shapes = {marks.get_paths()[0].vertices.tobytes() for marks in first.collections[::2]}
    assert len(shapes) == 6
    of_fedavg = json.loads(numbers.read_text())["runs"][0]
    assert list(of_fedavg["points"]) == names
    assert np.shape(of_fedavg["points"]["d30"]["place"]) == (9, 2)
    space = tsne.space_of(rebuilt(folders[0], "best"), "all", 9)
    z = np.concatenate([points.z for points in space.domains])
    by_domain = silhouette_samples(z, np.repeat(np.arange(6), 9)).mean()
    assert of_fedavg["silhouette_of_domains"] == pytest.approx(by_domain, abs=1e-5)
    assert f"{of_fedavg['silhouette_of_classes']:.3f}" in capsys.readouterr().out


def test_pad_and_risk_draw_and_show_a_table(runs, tmp_path, capsys):
    folders = runs / "fedavg-lodo", runs / "fdse-lodo"
    shown("pad", *folders, "--part", "all", "--out", tmp_path / "p.svg")
    shown("risk", *folders, "--out", tmp_path / "r.pdf")
    assert b"</svg>" in (tmp_path / "p.svg").read_bytes()
    assert (tmp_path / "r.pdf").read_bytes().startswith(b"%PDF")
    said = capsys.readouterr().out
    assert "mean of mixture and client" in said and "d0 (left out)" in said


def test_a_figure_is_written_whole_or_not_at_all(runs, tmp_path, monkeypatch, capsys):
    out = tmp_path / "sub" / "r.png"
    shown("risk", runs / "fedavg-lodo", "--out", out)
    before = out.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "replace", full)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        shown("risk", runs / "fedavg-lodo", runs / "fdse-lodo", "--out", out)
    assert out.read_bytes() == before and [*out.parent.iterdir()] == [out]
    advice = "make room or give another folder; the runs are as they were"
    assert capsys.readouterr().err == f"measures: No space left on device: {out}; {advice}\n"


def test_cost_and_labels(runs, tmp_path, capsys):
    numbers = tmp_path / "c.json"
    shown("cost", runs / "fedavg-lodo", runs / "fedavg-indomain", "--accuracy", "0.01", "--json", numbers)
    first, second = json.loads(numbers.read_text())["runs"]
    assert first["method"]== "FedAvg, protocol lodo, target d0" and second["cost"]["round"] == 1
    flops_of_a_round = 32 * second["flops_per_image"]  # 32 of 40 images train
    assert second["cost"]["tflops"] == pytest.approx(flops_of_a_round / 1e12)
    assert "FedAvg, protocol indomain, target all" in capsys.readouterr().out


# Runs without labels


def test_the_network_of_a_run_without_labels_is_the_last_rounds(unlabelled):
    run = rebuilt(unlabelled / "paper")
    fed, args = run.federation, run.args
    target = fed.clients[5]
    z, y = common.representations(target.model(fed.server.download(5)), target.data.test, args)
    result = json.loads((unlabelled / "paper" / "result.json").read_text())
    for ratio, accuracy in result["last"]["linear"]["d0"].items():
        seed = common.seed_all(args.seed, "linear", common.seed_name(args, "d0")).initial_seed()
        again = common.linear_accuracy(z, y, 10, float(ratio), seed, lr=3e-3, epochs=100, batch=512)
        assert again == accuracy


def test_measures_of_a_run_without_labels(unlabelled, tmp_path, stops):
    """What needs a classifier or test images says so."""
    folder = unlabelled / "paper"
    shown("tsne", folder, "--out", tmp_path / "t.png", "--images", "30")
    shown("pad", folder, "--part", "all")
    shown("cost", folder, "--accuracy", "0.01", "--by", "target")
    stops("--part all", "pad", folder)
    stops("without labels", "risk", folder)
    stops("has no accuracy AVG", "cost", folder)
