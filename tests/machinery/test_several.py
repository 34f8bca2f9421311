"""--seeds: a run of each seed, each the one that --seed gives, and the mean and deviation over them."""

from pathlib import Path

from plumbing.run import several
from tests.conftest import parsed, read_json, run_all, same_metrics


def settings_in(folder) -> dict:
    return read_json(folder / "settings.json")["settings"]


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
    assert same_metrics(same, alone)
    assert settings_in(same) == settings_in(alone)
    (theirs,), (_, ours) = results.values()
    for name in ("id", "args", "command", "best", "last"):
        assert ours[name] == theirs[name]
    assert "--seed 3" in theirs["command"]


def test_without_labels_there_is_no_best_round(capsys):
    """Two seeds, two targets with two shares of labels each."""
    runs = []
    for seed, first in ((0, 0.2), (1, 0.4)):
        runs += [{"args": {"target": name, "seed": seed}, "last": {"linear": {name: accuracies}}}
                 for name, accuracies in (("a", {"0.1": first, "0.3": 0.5}), ("b", {"0.1": 0.4, "0.3": 0.7}))]
    several.show_means("fedgala", "pacs", runs)
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["last", "round"]
    assert [row.split("  ")[0] for row in rows] == [
        f"{name}, {share}% of the labels" for name in ("a", "b", "mean") for share in (10, 30)]
    assert rows[0].endswith(" 30.00 +- 14.14") and rows[4].endswith(" 35.00 +- 7.07")
    several.show_means("fedgala", "pacs", runs[:2])
    assert capsys.readouterr().out.splitlines()[2].endswith(" 20.00")
