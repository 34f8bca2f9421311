"""reproduce.compare: which runs are one curve, what the legend says of them, the table, and the figure."""

import statistics
from pathlib import Path

from plumbing.run.files import write_json
from reproduce import compare
from reproduce.drawing import new_panel
from tests.small_table import recorded, write_records

import pytest
from PIL import Image

SETTINGS = {"dataset": "digits", "protocol": "indomain", "target": "all", "scale": "smoke", "seed": 0,
            "rounds": 3, "eval_every": 1, "lr": 0.05, "device": "cuda"}
BYTES = {"bytes_up": 8, "bytes_down": 8}


def a_run(folder: Path, vals: list, method: str = "fedavg", **args) -> Path:
    """A run whose validation accuracies are these; ALL is a tenth lower, AVG half, round 2 has no test."""
    folder.mkdir(parents=True)
    lines = []
    for t, val in enumerate(vals, 1):
        clients = {"a": BYTES | {"loss": 1.0 / t}, "b": BYTES | {"loss": 3.0 / t}}
        entry = {"round": t, "clients": clients, "val": {"ALL": val, "AVG": val, "clients": {}}}
        if t != 2:
            entry["test"] = {"ALL": val - 0.1, "AVG": val / 2, "clients": {"a": val, "b": 0.0}}
        lines.append(entry)
    write_records(folder / "metrics.jsonl", lines)
    key = SETTINGS | args | {"method": method}
    write_json(folder / "settings.json", {"identity": key})
    return folder


@pytest.fixture
def runs(tmp_path) -> Path:
    place = tmp_path / "runs"
    a_run(place / "seeds" / "s0", [0.5, 0.6, 0.8], lr=0.1)
    a_run(place / "seeds" / "s1", [0.5, 0.6, 0.4], lr=0.1, seed=1)
    a_run(place / "unfinished", [0.9])
    a_run(place / "other", [0.3, 0.2, 0.1], method="fdse")
    return place


def said(capsys, *words) -> list[list[str]]:
    """The cells of the table."""
    compare.main([str(word) for word in words])
    return [[cell.strip() for cell in line.split("  ") if cell.strip()]
            for line in capsys.readouterr().out.splitlines()]


def test_the_table(runs, capsys):
    """Best is after the round of the best validation accuracy; a run without a test there has none."""
    heads, seeds, unfinished, other = said(capsys, runs / "seeds", runs / "unfinished", runs / "other")
    assert heads == ["ALL (%)", "best validation round", "last round"]
    assert seeds == ["FedAvg, lr 0.1, 2 seeds", "-", f"50.00 +- {100 * statistics.stdev([.7, .3]):.2f}"]
    assert unfinished == ["FedAvg, lr 0.05, 1 of 3 rounds", "80.00", "80.00"]
    assert other == ["FDSE", "20.00", "0.00"]


def test_of_equal_rounds_that_of_the_result(tmp_path, capsys):
    """With --metric the lower validation loss decides."""
    file = a_run(tmp_path / "auc", [0.2, 0.4, 0.6]) / "metrics.jsonl"
    lines = recorded(file)
    for line in lines:
        line["val"] |= {"metric": 1.0, "loss": 1 / line["round"]}
    file.unlink()
    write_records(file, lines)
    assert said(capsys, tmp_path / "auc")[1][1] == "50.00"


def test_the_figure(runs, tmp_path, capsys, monkeypatch):
    """A line for each curve with its mean, a band from three seeds on, axes and title named."""
    panels = []

    def kept(*size):
        panels.append(new_panel(*size))
        return panels[-1]

    monkeypatch.setattr(compare, "new_panel", kept)
    a_run(runs / "seeds" / "s2", [0.5, 0.6, 0.6], lr=0.1, seed=2)
    said(capsys, runs / "seeds", runs / "unfinished", runs / "other", "--out", tmp_path / "x.png")
    assert Image.open(tmp_path / "x.png").size[0] > 500
    panel, = panels
    seeds, unfinished, other = panel.lines
    assert list(seeds.get_xdata()) == [1, 3] and list(seeds.get_ydata()) == pytest.approx([40, 50])
    assert len(unfinished.get_xdata()) == 1 and len(panel.collections) == 1
    names = [text.get_text() for text in panel.figure.legends[0].get_texts()]
    assert names == ["FedAvg, lr 0.1, 3 seeds", "FedAvg, lr 0.05, 1 of 3 rounds", "FDSE"]
    assert panel.get_xlabel() == "round" and panel.get_ylabel() == "test accuracy over all images (%)"
    assert panel.get_title() == "digits"
