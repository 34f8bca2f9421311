"""A trained run tested again with other flags that act at test time alone."""

import json

from reproduce import retest, runner
from reproduce.cells import run_with
from reproduce.cost import Missing, Plan
from reproduce.measures.finished import FILES
from reproduce.records import Place, Records, has_gaps
from reproduce.retest import command_with, main, retested
from tests.conftest import fails, run_here

import pytest

LODO = ("--protocol", "lodo", "--target", "d75", "--test-rounds", "best")
OWN = {"fdse": ("--adapt-lr", 30), "baselines.fedbn": ()}
OTHER = {"fdse": {"adapt_epochs": 0}, "baselines.fedbn": {"adapt_epochs": 2, "adapt_momentum": 0.5}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of a run of each method that has such flags."""
    place = tmp_path_factory.mktemp("trained")
    for method in OTHER:
        run_here(method, place / method, *LODO, *OWN[method], "--rounds", 3, "--adapt-epochs", 3)
    return place


@pytest.mark.parametrize("method", OTHER)
def test_it_is_what_a_training_of_its_own_gives(trained, tmp_path, method):
    changed = OTHER[method]
    flags = []
    for name, value in changed.items():
        flags += ["--" + name.replace("_", "-"), value]
    own = run_here(method, tmp_path / "own", *LODO, *OWN[method], "--rounds", 3, *flags)
    first = json.loads((trained / method / "result.json").read_text())
    again = retested(trained / method, **changed)
    for part in ("id", "args", "best", "last", "bytes", "sources"):
        assert again[part] == own[part]
    assert first["best"]["target"] != again["best"]["target"] or first["last"] != again["last"]
    assert again["trained_by"] == first["id"] and has_gaps(again)
    rounds = sorted({again["best"]["round"], again["last"]["round"]})
    assert again["curve"]["round"] == rounds
    assert again["curve"]["target"][-1] == round(own["last"]["target"], 5)
    assert again["curve"]["val"] == [own["curve"]["val"][t - 1] for t in rounds]
    assert again["seconds"]["train"] == 0 and [part["from"] for part in again["code"]] == [1, 4]


def test_the_command(trained, tmp_path, capsys):
    folder, path = trained / "fdse", tmp_path / "runs.jsonl"
    before = sorted(path.name for path in folder.iterdir())
    main([str(folder), "--adapt-lr", "0", "--record", str(path)])
    said = capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["args"]["adapt_lr"] == 0 and record["args"]["adapt_epochs"] == 3
    assert "with --adapt-lr 0.0: target " in said and f"{100 * record['best']['target']:.2f}%" in said
    assert record == retested(folder, adapt_lr=0.0) | {name: record[name] for name in
                                                       ("seconds", "finished", "code")}
    main(["--adapt-lr", "0", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["id"] == record["id"]
    assert sorted(path.name for path in folder.iterdir()) == before  # the run is as it was


def test_a_run_of_other_code_is_refused(trained, capsys, monkeypatch):
    monkeypatch.setattr(retest, "hash_of", lambda file: "other")
    fails(capsys, 2, "was computed by other code", main, [str(trained / "fdse"), "--adapt-lr", "0"])


def test_other_values_in_a_command():
    command = "python fdse.py --adapt-lr 0 --seed 1 --adapt-epochs 5 --clip 3"
    assert (command_with(command, {"adapt_lr": 0.5, "adapt_epochs": 2})
            == "python fdse.py --seed 1 --clip 3 --adapt-lr 0.5 --adapt-epochs 2")


def runs_of(*flags):
    """Runs of one training, with their whole curves or not."""
    found = []
    for words, curve in flags:
        run = run_with("fdse", ["--dataset", "digits", "--scale", "smoke", *LODO[:4], *words], 0)
        found.append(Missing(runner.dataclasses.replace(run, curve=curve), ["t"]))
    return found


def test_the_plan_counts_one_training(monkeypatch):
    """The cheapest trains, and a run whose whole curve is needed; the others are tests."""
    whole, none, statistics = runs_of((("--adapt-epochs", "5"), False), (("--adapt-epochs", "0"), False),
                                      (("--adapt-lr", "0"), False))
    other = runs_of((("--lambda", "0"), False))[0]
    plan = Plan([whole, none, statistics, other])
    plan.time_runs(Records(runner.Path("nowhere.jsonl")), "two-cores")
    assert plan.missing[0] is none and {id(one) for one in plan.missing[1:3]} == {id(whole), id(statistics)}
    assert plan.works[whole.run.key].train.flops == 0 < plan.works[whole.run.key].evaluate.flops
    assert plan.works[none.run.key].train.flops > 0 and plan.works[other.run.key].train.flops > 0
    curves = runs_of((("--adapt-epochs", "5"), True), (("--adapt-epochs", "0"), False))
    plan = Plan(list(curves))
    plan.time_runs(Records(runner.Path("nowhere.jsonl")), "two-cores")
    assert plan.missing == curves and plan.works[curves[0].run.key].train.flops > 0
    assert plan.works[curves[1].run.key].train.flops == 0


def test_the_runner_tests_what_is_trained(tmp_path, monkeypatch):
    """The second run of a training takes its folder; without the folder it trains."""
    none, statistics = runs_of((("--adapt-epochs", "0"), False), (("--adapt-lr", "0"), False))
    place = Place(str(runner.ROOT / "data"), record=str(tmp_path / "runs.jsonl"))
    monkeypatch.setattr(runner, "folder_of", lambda args: tmp_path / "run")
    assert runner.trained_for(none.run, Records(tmp_path / "runs.jsonl")) == []
    run_here("fdse", tmp_path / "run", *none.run.flags[4:], "--adapt-epochs", 0, "--test-rounds", "best",
             "--record", place.record)
    records = Records(tmp_path / "runs.jsonl")
    run = runner.dataclasses.replace(statistics.run, precision="fp32")
    words, training = runner.commands_of(run, place, records)
    assert training[1] == "fdse.py"
    assert words[1:] == ["-m", "reproduce.retest", str(tmp_path / "run"), "--adapt-epochs", "5",
                         "--adapt-lr", "0.0", "--record", place.record]
    assert runner.trained_for(runner.dataclasses.replace(run, curve=True), records) == []
    assert runner.trained_for(runner.dataclasses.replace(run, precision="bf16"), records) == []
    outcome, said = runner.execute(run, place)
    assert outcome == "done" and len(Records(tmp_path / "runs.jsonl").by_key) == 2, said
    assert Records(tmp_path / "runs.jsonl").get(run)["trained_by"]
    (tmp_path / "run" / FILES["last"]).unlink()
    assert len(runner.commands_of(run, place, records)) == 1


def test_a_record_without_a_training_does_not_keep_the_trained_one_out(trained, tmp_path):
    """Nor one with gaps in its curve the whole one; the other way round nothing is added."""
    path = tmp_path / "runs.jsonl"
    main([str(trained / "fdse"), "--adapt-epochs", "0", "--record", str(path)])
    flags = (*LODO, *OWN["fdse"], "--rounds", 3, "--adapt-epochs", 0, "--record", path)
    run_here("fdse", tmp_path / "own", *flags)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["id"] == second["id"] and "trained_by" in first and "trained_by" not in second
    main([str(trained / "fdse"), "--adapt-epochs", "0", "--record", str(path)])
    run_here("fdse", tmp_path / "own", *flags)
    assert len(path.read_text().splitlines()) == 2
