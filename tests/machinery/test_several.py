"""--seeds: a run of each seed, each the one that --seed gives, and the mean and deviation over them."""

import json
import statistics
from pathlib import Path

import common
from plumbing import several
from tests.conftest import fails, parsed, run_all
from tests.recording import recording, write_data

import pytest


@pytest.fixture
def run_recorded(tmp_path):
    """Runs of a method that trains nothing, of two rounds: the accuracy of the first is the better one."""
    data = write_data(tmp_path / "data.py", {"north": 60, "south": 40})

    def run(*flags) -> list[dict]:
        settings = parsed("fedavg", "--dataset", data, "--no-figures", "--rounds", 2, *flags)
        return common.run(*recorded, settings, build)
    *recorded, build = recording({}, lambda image, t: image % 7 < 6 - 2 * t)
    return run


def settings_in(folder) -> dict:
    return json.loads((folder / "settings.json").read_text())["settings"]


def test_each_run_is_that_of_its_seed(tmp_path, monkeypatch):
    """The folder's name, every setting, the bytes of the metrics, and the command that the result names."""
    monkeypatch.chdir(tmp_path)
    usual = ["--scale", "smoke", "--precision", "fp32", "--no-figures", "--image-size", "8"]
    results = {}
    for flag in (["--seed", "3"], ["--seeds=0,3"]):
        monkeypatch.setattr("sys.argv", ["fedavg.py", *flag, *usual])
        results[flag[0]] = run_all("fedavg", parsed("fedavg", *flag, *usual))
        Path("runs").rename(flag[0])
    alone, = Path("--seed").iterdir()
    same = Path("--seeds=0,3") / alone.name
    assert (same / "metrics.jsonl").read_bytes() == (alone / "metrics.jsonl").read_bytes()
    assert settings_in(same) == settings_in(alone)
    (theirs,), (_, ours) = results.values()
    for name in ("id", "args", "command", "best", "last"):
        assert ours[name] == theirs[name]
    assert "--seed 3" in theirs["command"]


def test_mean_and_deviation_at_the_end(tmp_path, capsys, run_recorded):
    """Of the images that are classified correctly; the deviation is the sample's, n - 1."""
    results = run_recorded("--out", tmp_path, "--seeds", "0,1,2")
    *_, heading, heads, of_all, of_mean = capsys.readouterr().out.splitlines()
    file = tmp_path / "seeds.json"
    assert heading == (f"recording on {tmp_path / 'data.py'}, seeds 0, 1, 2: accuracy (%), mean +- sample "
                       f"deviation over the seeds; in {file}")
    assert heads.split() == ["best", "validation", "round", "last", "round"]
    written = json.loads(file.read_text())
    assert written["seeds"] == [0, 1, 2]
    assert written["folders"] == [str(tmp_path / f"s{seed}") for seed in range(3)]
    for name, line in (("ALL", of_all), ("AVG", of_mean)):
        shown = name
        for which in ("best", "last"):
            values = [result[which][name] for result in results]
            mean, deviation = statistics.mean(values), statistics.stdev(values)
            expected = {"values": values, "mean": mean, "deviation": deviation}
            assert written["accuracies"][name][which] == expected
            shown += f" {100 * mean:.2f} +- {100 * deviation:.2f}"
        assert " ".join(line.split()) == shown


def test_without_labels_there_is_no_best_round():
    """Two seeds, two targets with two shares of labels each."""
    runs = {}
    for seed, first in ((0, 0.2), (1, 0.4)):
        runs[seed] = [{"args": {"target": name}, "last": {"linear": {name: accuracies}}} for name, accuracies
                      in (("a", {"0.1": first, "0.3": 0.5}), ("b", {"0.1": 0.4, "0.3": 0.7}))]
    found = several.over_seeds(runs)
    assert list(found) == [f"{name}, {share}% of the labels" for name in ("a", "b", "mean")
                           for share in (10, 30)]
    assert list(found["a, 10% of the labels"]) == ["last"]
    assert found["mean, 10% of the labels"]["last"]["mean"] == pytest.approx(0.35)
    assert several.percent(found["a, 10% of the labels"]["last"]) == "30.00 +- 14.14"
    alone = several.over_seeds({0: runs[0]})
    assert several.percent(alone["b, 30% of the labels"]["last"]) == "70.00"


def test_another_file_in_the_place_of_the_means_is_kept(tmp_path, monkeypatch, capsys, run_recorded):
    """Without --out the file lies beside the runs' folders; with it: tests/bad_inputs.csv."""
    monkeypatch.chdir(tmp_path)
    run_recorded("--seeds", "0,1")
    beside, = Path("runs").glob("*-seeds-*.json")
    beside.write_text('{"seeds": "of trees"}')
    fails(capsys, 2, "json holds something else, which would be lost", run_recorded, "--seeds", "0,1")
    assert beside.read_text() == '{"seeds": "of trees"}'
