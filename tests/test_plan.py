"""What missing runs would take, by the seconds of like ones, and which cannot start here."""

from reproduce import plan
from reproduce.cells import Missing, run_with
from reproduce.methods import arguments
from reproduce.records import Place, Records
from tests.small_table import record, write_records

import pytest


def entry(*flags: str, module: str = "fedavg", tables: tuple = ("t",), curve: bool = True) -> Missing:
    run = run_with(module, ["--dataset", "digits", *flags], 0)
    return Missing(type(run)(**vars(run) | {"curve": curve}), list(tables))


@pytest.fixture
def records(tmp_path):
    """FedAvg's rounds take 2 s with batches of 50 and 3 s with those of 20."""
    made = []
    for flags, seconds in (([], 2.0), (["--batch-size", "20"], 3.0)):
        one = record("fedavg", ["--dataset", "digits", *flags])
        made.append(one | {"seconds": {"train": seconds * one["args"]["rounds"]}})
    tested = made[0] | {"trained_by": "x", "seconds": {"train": 0.0}, "finished": "2000"}
    return Records(write_records(tmp_path / "r.jsonl", [*made, tested]))


def test_seconds_are_those_of_the_run_most_like_it(records):
    """None where there is none of the method, dataset, image size and backbone."""
    for flags, seconds in ((["--rounds", "10"], 20), (["--rounds", "10", "--batch-size", "25"], 30),
                           (["--image-size", "32"], None)):
        assert plan.seconds_of(entry(*flags).run, records) == seconds
    assert plan.seconds_of(entry(module="fdse").run, records) is None


def test_the_cheapest_come_first_and_the_tests_of_a_training_behind_it(records, monkeypatch):
    monkeypatch.setattr(plan, "unavailable", lambda args, place: "no" if args.lr == 7 else "")
    lodo = ("--protocol", "lodo", "--target", "d0")
    long, short, gone = entry("--rounds", "50"), entry("--rounds", "5"), entry("--lr", "7", tables=("t", "u"))
    tested = entry(*lodo, "--adapt-epochs", "0", module="fdse", curve=False)
    trained = entry(*lodo, module="fdse")
    found = plan.planned([long, tested, gone, short, trained], records, Place())
    assert found == [short, long, trained, tested, gone] or found == [short, long, gone, trained, tested]
    assert [entry.why for entry in found if entry is gone] == ["no"]
    lines = plan.plan_text(found, commands=False).splitlines()
    rows = [line.split("  ") for line in lines]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    seconds = 2 * (55 + arguments("fedavg", ("--dataset", "digits")).rounds)
    assert rows[2] == ["t", "5", f"{plan.clock(seconds)} and 2 runs of unknown time", "1"]
    assert rows[3][:2] == ["u", "1"] and rows[4][:2] == ["all, each run once", "5"]
    assert lines[-1] == "Not here (1 runs): no"
    said = plan.plan_text(found, commands=True)
    assert said.count("python fedavg.py") == 3 and said.count("python fdse.py") == 2
    assert plan.plan_text([], commands=True) == "Nothing is missing."


def test_data_and_weights_that_are_not_here(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "answers", lambda url: False)
    monkeypatch.setattr(plan.torch.hub, "get_dir", lambda: str(tmp_path))
    place = Place(str(tmp_path))
    plan.weights_lacking.cache_clear()
    assert plan.unavailable(arguments("fedavg", ("--dataset", "digits")), place) == ""
    office = arguments("fedavg", ("--dataset", "officecaltech", "--weights", "none"))
    assert "is not here and cannot be downloaded from" in plan.unavailable(office, place)
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / "Office_Caltech_DA_Dataset-1.zip").write_bytes(b"")
    plan.data_lacking.cache_clear()
    assert plan.unavailable(office, place) == ""
    flags = ("--dataset", "digits", "--backbone", "resnet18", "--weights", "imagenet")
    pretrained = arguments("fedavg", flags)
    assert "ImageNet's weights" in plan.unavailable(pretrained, place)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "resnet18-f37072fd.pth").write_bytes(b"")
    plan.weights_lacking.cache_clear()
    assert plan.unavailable(pretrained, place) == ""
