"""--seeds: a run of each seed, each the one that --seed gives, and the mean and deviation over them."""

import json
import statistics
from pathlib import Path

import common
from plumbing import several
from tests.conftest import parsed, run_all
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
    flag, together = ["--seeds=0,3"], ["--scale", "smoke", "--precision", "fp32", "--no-figures"]
    for flags in (["--seed", "3"], flag):
        monkeypatch.setattr("sys.argv", ["fedavg.py", *flags, *together])
        if flags == flag:
            (tmp_path / "runs").rename(tmp_path / "alone")
        results = run_all("fedavg", parsed("fedavg", *flags, *together))
    alone, = (tmp_path / "alone").iterdir()
    same = tmp_path / "runs" / alone.name
    assert (same / "metrics.jsonl").read_bytes() == (alone / "metrics.jsonl").read_bytes()
    assert settings_in(same) == settings_in(alone)
    theirs = json.loads((alone / "result.json").read_text())
    for name in ("id", "args", "command", "best", "last"):
        assert results[1][name] == theirs[name]
    assert "--seed 3" in theirs["command"] and len(results) == 2


def test_mean_and_deviation_at_the_end(tmp_path, capsys, run_recorded):
    """Of the images that are classified correctly; the deviation is the sample's, n - 1."""
    results = run_recorded("--out", tmp_path, "--seeds", "0,1,2")
    *_, heading, heads, of_all, of_mean = capsys.readouterr().out.splitlines()
    file = tmp_path / "seeds.json"
    assert heading == (f"recording on {tmp_path / 'data.py'}, seeds 0, 1, 2: accuracy (%), mean +- sample "
                       f"deviation over the seeds; in {file}")
    assert heads.split() == ["best", "validation", "round", "last", "round"]
    shown = []
    for which in ("best", "last"):
        values = [100 * result[which]["ALL"] for result in results]
        shown.append(f"{statistics.mean(values):.2f} +- {statistics.stdev(values):.2f}")
    assert of_all.split(None, 1)[0] == "ALL" and " ".join(of_all.split()) == f"ALL {shown[0]} {shown[1]}"
    assert of_mean.startswith("AVG")
    written = json.loads(file.read_text())
    assert written["seeds"] == [0, 1, 2]
    assert written["folders"] == [str(tmp_path / f"s{seed}") for seed in range(3)]
    avg = written["accuracies"]["AVG"]["last"]
    assert avg["values"] == [result["last"]["AVG"] for result in results]
    assert avg["mean"] == statistics.mean(avg["values"])
    assert avg["deviation"] == statistics.stdev(avg["values"])


def of_target(name: str, accuracies: dict) -> dict:
    return {"args": {"target": name}, "last": {"linear": {name: accuracies}}}


def test_without_labels_there_is_no_best_round(capsys):
    """Two seeds, two targets with two shares of labels each."""
    runs = {}
    for seed, more in ((0, 0.0), (1, 0.2)):
        first = of_target("a", {"0.1": 0.2 + more, "0.3": 0.5})
        runs[seed] = [first, of_target("b", {"0.1": 0.4, "0.3": 0.7})]
    found = several.over_seeds(runs)
    assert list(found) == ["a, 10% of the labels", "a, 30% of the labels", "b, 10% of the labels",
                           "b, 30% of the labels", "mean, 10% of the labels", "mean, 30% of the labels"]
    assert list(found["a, 10% of the labels"]) == ["last"]
    assert found["mean, 10% of the labels"]["last"]["mean"] == pytest.approx(0.35)
    assert several.percent(found["a, 10% of the labels"]["last"]) == "30.00 +- 14.14"
    alone = several.over_seeds({0: runs[0]})
    assert several.percent(alone["b, 30% of the labels"]["last"]) == "70.00"


def test_another_file_in_the_place_of_the_means_is_kept(tmp_path, monkeypatch, capsys, run_recorded):
    """With --out and without it, where the file lies beside the runs' folders."""
    monkeypatch.chdir(tmp_path)
    Path("seeds.json").write_text('{"seeds": "of flowers"}')
    run_recorded("--seeds", "0,1")
    beside, = Path("runs").glob("*-seeds-*.json")
    beside.write_text('{"seeds": "of trees"}')
    for flags, of in (([], "trees"), (["--out", tmp_path], "flowers")):
        with pytest.raises(SystemExit, match="2"):
            run_recorded("--seeds", "0,1", *flags)
        assert ".json holds something else, which would be lost or spoiled" in capsys.readouterr().err
        assert (beside if of == "trees" else Path("seeds.json")).read_text() == f'{{"seeds": "of {of}"}}'
