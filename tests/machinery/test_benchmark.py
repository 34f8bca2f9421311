"""Methods beside each other: python -m reproduce.benchmark."""

import csv

import common
import fedavg
from baselines import fedprox
from plumbing.data.catalog import DatasetName
from plumbing.run.errors import UserError
from reproduce import benchmark
from reproduce.benchmark_pages import compared, headline, settings_words
from tests.conftest import fails, read_json

import pytest

pytestmark = pytest.mark.usefixtures("in_this_process")

MINE = '''
import fedavg
from common import run
from fedavg import arguments


class Server(fedavg.Server):
    pass


class Client(fedavg.Client):
    pass


if __name__ == "__main__":
    run(Server, Client, arguments())
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A file of a method that is FedAvg by another name."""
    folder = tmp_path_factory.mktemp("benchmark")
    (folder / "mine.py").write_text(MINE)
    return folder


def words(place, *more) -> list[str]:
    return ["--methods", f"{place / 'mine.py'},fedavg:--lr 0.2", "--scale", "smoke", "--seeds", "0,1,2",
            "--flags=--image-size 8", "--out", str(place / "out"), *more]


def test_the_parts_of_all_seeds_are_looked_at_before_a_run(place, capsys, monkeypatch):
    """Of one's own data: else the last seed fails after the runs of the others."""
    split = common.split

    def fails_late(dataset, settings):
        if settings.seed == 2:
            raise UserError("seed 2 has no patient to validate with", 2)
        return split(dataset, settings)
    monkeypatch.setattr(benchmark, "named", lambda dataset: DatasetName(None, None, True, "digits"))
    monkeypatch.setattr(common, "split", fails_late)
    monkeypatch.setattr(benchmark, "run_all", pytest.fail)
    fails(capsys, 2, "seed 2 has no patient", benchmark.main, words(place, "--out", str(place / "parts")))


def test_a_file_that_has_changed_has_new_runs(tmp_path):
    """Those of the other methods stay."""
    folders = []
    for text in (MINE, MINE.replace("pass", "later = True")):
        (tmp_path / "mine.py").write_text(text)
        for what in (str(tmp_path / "mine.py"), "fedavg"):
            entry = benchmark.entry_of(what)
            folders += [trial.folder for trial in benchmark.trials_of(entry, {}, [], [0], [], tmp_path)]
    assert folders[0] != folders[2] and folders[1] == folders[3]


def planned(monkeypatch, capsys, *more) -> list:
    """The trials of a comparison, none of which is run."""
    trials = []
    monkeypatch.setattr(benchmark, "run_all", lambda of_all, jobs: trials.extend(of_all) or ["stopped"])
    with pytest.raises(SystemExit):
        benchmark.main(["--scale", "smoke", "--seeds", "0", *more])
    assert capsys.readouterr().err.startswith("stopped")
    return trials


def test_a_target_and_a_methods_own_flags(tmp_path, monkeypatch, capsys):
    """One target is one run; a method's own flags win over those of all, also in its command."""
    trials = planned(monkeypatch, capsys, "--methods", "fedavg:--lr 0.2,fedprox", "--targets", "d30",
                     "--flags=--lr 0.3", "--out", str(tmp_path / "out"))
    assert [(trial.args.protocol, trial.args.target, trial.args.lr) for trial in trials] == [
        ("lodo", "d30", 0.2), ("lodo", "d30", 0.3)]
    for trial, module in zip(trials, (fedavg, fedprox)):
        words = trial.commands[0]
        args = module.arguments(words[words.index("--dataset"):])
        assert (args.target, args.lr, args.seed) == ("d30", trial.args.lr, 0)


def test_settings_in_which_methods_differ_are_named():
    """Without what all share, and without what cannot change a number."""
    trials = []
    for label, lr in (("a", "0.1"), ("b", "0.2")):
        args = fedavg.arguments(["--scale", "smoke", "--lr", lr, "--out", label])
        entry = benchmark.Entry(label, "fedavg", (), (), fedavg)
        trials.append(benchmark.Trial(entry, (), {}, None, args))
    assert settings_words(trials) == ["Settings in which the methods differ: --lr 0.1 (a), 0.2 (b)."]
    assert settings_words(trials[:1]) == []


def test_it_runs_tunes_and_compares(place, capsys, monkeypatch):
    """The value with the better validation counts; who sets it is not tuned; nothing is trained twice."""
    benchmark.main(words(place, "--tune", "lr=0.05,0.2"))
    out = place / "out"
    page = (out / "benchmark.md").read_text()
    rows = list(csv.DictReader((out / "benchmark.csv").read_text().splitlines()))
    assert {row["method"] for row in rows} == {"mine", "fedavg --lr 0.2"}
    domains = [f"d{angle}" for angle in range(0, 90, 15)]
    assert {row["column"] for row in rows} == {"ALL", "AVG", *domains} and len(rows) == 2 * 3 * 8
    latex = (out / "table.tex").read_text()
    assert all(f" {name} " in latex for name in domains) and "minutes" not in latex
    assert latex.count(r"\textbf{") >= 8 and "**" not in latex and "**" in page
    scores = {}
    for line in page.split("## Tuning")[1].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells and cells[0] == "mine":
            scores[cells[1]] = float(cells[2]), cells[3]
    assert set(scores) == {"lr 0.05", "lr 0.2"}
    assert max(scores.values())[1] == "taken" and [mark for _, mark in scores.values()].count("taken") == 1
    for name in ("table.tex", "curves.png", "forest.png"):
        assert (out / name).stat().st_size > 100
    times = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    monkeypatch.setattr(fedavg.Client, "train", lambda *_: pytest.fail("it trained again"))
    benchmark.main(words(place, "--tune", "lr=0.05,0.2"))
    assert (out / "benchmark.md").read_text() == page
    assert len(times) == 9 and all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert "mine minus fedavg --lr 0.2" in capsys.readouterr().out
    check_other_measure(place, capsys, monkeypatch)


def check_other_measure(place, capsys, monkeypatch):
    """Each client's and their mean, with the images that it stands on; or a line before any run, where a
    client lacks a class."""
    benchmark.main(words(place, "--tune", "lr=0.05,0.2", "--measure", "balanced"))
    assert "mine minus fedavg --lr 0.2 | mean " in capsys.readouterr().out
    heads, *_ = (place / "out" / "benchmark.csv").read_text().splitlines()
    assert "balanced" in heads.split(",")
    page = (place / "out" / "benchmark.md").read_text()
    (d0,) = [line for line in page.splitlines() if line.startswith("| d0 ") and "/" in line]
    tested = [read_json(place.rglob(f"out/runs/mine-*/s{seed}/result.json").__next__()) for seed in range(3)]
    counts = [[sum(row) for row in result["measures"]["best"]["d0"]["confusion"]] for result in tested]
    assert [cell.strip() for cell in d0.split("|")[2:-1]] == ["/".join(map(str, of)) for of in zip(*counts)]
    for measure in ("accuracy", "balanced"):
        benchmark.main(words(place, "--tune", "lr=0.05,0.2", "--measure", measure, "--which", "last"))
        for row in csv.DictReader((place / "out" / "benchmark.csv").open()):
            if (row["method"], row["column"]) == ("fedavg --lr 0.2", "d15"):
                (result,) = place.rglob(f"out/runs/fedavg-*/s{row['seed']}/result.json")
                expected = read_json(result)["measures"]["last"]["d15"][measure]
                assert float(row[measure]) == pytest.approx(100 * expected, abs=1e-3)
        assert "last round" in (place / "out" / "benchmark.md").read_text()
    capsys.readouterr()
    monkeypatch.setattr(benchmark, "run_all", pytest.fail)
    fails(capsys, 2, "--measure auc: with seed 0 the test images of d0 lack .*, so it has no AUC: give a",
          benchmark.main, words(place, "--tune", "lr=0.05,0.2", "--measure", "auc"))


def test_two_seeds_compare_nothing():
    assert compared({"a": {"ALL": {0: 90, 1: 91}}, "b": {"ALL": {0: 80, 1: 83}}}, ["ALL"]) == []


def test_the_columns_that_are_compared():
    assert headline(["meander", "sketch", "mean"]) == ["mean"]
    assert headline(["photo", "ALL", "AVG"]) == ["photo"]
    assert headline(["ALL", "AVG"]) == ["ALL", "AVG"]
