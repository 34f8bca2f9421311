"""A trained run tested again with other flags that act at test time alone."""

import dataclasses

from reproduce import runner
from reproduce.measures.command import main
from reproduce.records import Place, PlannedRun, Records, by_training, has_gaps
from tests.conftest import read_json, run_here
from tests.small_table import recorded

import pytest

LODO = ("--protocol", "lodo", "--target", "d75", "--image-size", "28", "--test-rounds", "best")
OWN = {"fdse": ("--adapt-lr", 30), "baselines.fedbn": ()}
OTHER = {"fdse": "--adapt-epochs 0", "baselines.fedbn": "--adapt-epochs 2 --adapt-momentum 0.5"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of a run of each method that has such flags."""
    place = tmp_path_factory.mktemp("trained")
    for method in OTHER:
        run_here(method, place / method, *LODO, *OWN[method], "--rounds", 3, "--adapt-epochs", 3,
                 "--record", place / "runs.jsonl")
    return place


@pytest.mark.parametrize("method", OTHER)
def test_its_record_is_what_a_training_of_its_own_gives(trained, tmp_path, method):
    path = tmp_path / "runs.jsonl"
    main(["adaptation", str(trained / method), "--flags", OTHER[method], "--record", str(path)])
    (again,) = recorded(path)
    own = run_here(method, tmp_path / "own", *LODO, *OWN[method], "--rounds", 3, *OTHER[method].split())
    first = read_json(trained / method / "result.json")
    for part in ("id", "args", "best", "last", "bytes"):
        assert again[part] == own[part]
    assert first["best"]["target"] != again["best"]["target"] or first["last"] != again["last"]
    assert again["trained_by"] == first["id"] and has_gaps(again)
    rounds = sorted({again["best"]["round"], again["last"]["round"]})
    assert again["curve"]["round"] == rounds and again["seconds"]["train"] == 0
    assert again["curve"]["target"][-1] == round(own["last"]["target"], 5)
    assert again["curve"]["val"] == [own["curve"]["val"][t - 1] for t in rounds]


def test_the_ways_of_fdses_table(trained, tmp_path, capsys):
    """Without flags its own, with the accuracy that the run recorded; an adaptation that diverges is said."""
    folder, numbers = trained / "fdse", tmp_path / "n.json"
    before = sorted(path.name for path in folder.iterdir())
    ways = []
    for words in ("--adapt-epochs 0", "--adapt-lr 0", "", "--adapt-lr 1e30"):
        ways += ["--flags", words]
    main(["adaptation", str(folder), "--which", "last", "--json", str(numbers), *ways])
    none, statistics, own, diverging = read_json(numbers)["runs"]
    assert own["accuracy"] == read_json(folder / "result.json")["last"]["target"]
    assert len({none["accuracy"], statistics["accuracy"], own["accuracy"]}) > 1
    assert diverging["accuracy"] is None and "diverges" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == before  # the run is as it was


def test_the_runner_tests_what_is_trained(trained, monkeypatch, in_this_process):
    """The second run of a training takes its folder; without a folder it trains."""
    flags = ["--dataset", "digits", "--scale", "smoke", "--precision", "fp32", *LODO[:6], "--rounds", "3",
             "--adapt-epochs", "3", "--adapt-lr"]
    own, statistics = (dataclasses.replace(PlannedRun("fdse", (*flags, rate), 0), curve=False)
                       for rate in ("30", "0"))
    assert len(by_training([own, statistics])) == 1
    place = Place(str(runner.ROOT / "data"), record=str(trained / "runs.jsonl"))
    monkeypatch.setattr(runner, "folder_of_run", lambda run: trained / "fdse")
    outcomes = runner.execute_group([own, statistics], place, runner.Processes())
    assert [outcome for outcome, _ in outcomes] == ["skipped", "done"], outcomes
    assert Records(trained / "runs.jsonl").get(statistics)["trained_by"]
    assert len(runner.commands_of(statistics, place, trained / "none")) == 1
