"""--repeat: recorded runs are begun again, and compared digit by digit."""

from reproduce import repeat
from reproduce.records import Place, Records
from tests.conftest import ROOT, run_here
from tests.finished_runs import once
from tests.small_table import recorded, write_records

import pytest

PLACE = Place(str(ROOT / "data"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Records of a run with labels, of five rounds, and of one without labels."""
    def make(place) -> None:
        path = place / "runs.jsonl"
        run_here("fedavg", place / "a", "--rounds", 5, "--record", path)
        run_here("fedgala", place / "b", "--target", "d0", "--rounds", 1, "--linear-epochs", 2,
                 "--image-size", 8, "--crop", 8, "--record", path)
    return recorded(once(tmp_path_factory, "repeated", make) / "runs.jsonl")


def test_what_comes_out_is_printed_and_nothing_is_written(tmp_path, made, monkeypatch, capsys,
                                                          in_this_process):
    """One is equal after three rounds, of one a recorded number is another one, and one ran elsewhere."""
    monkeypatch.setattr(repeat, "ROUNDS", 3)
    monkeypatch.setattr(repeat, "EVALUATIONS", 2)
    tampered = made[1] | {"logs": made[1]["logs"] | {"loss": [0.5]}}
    there = made[0]["args"] | {"lr_decay": 0.9}
    elsewhere = made[0] | {"args": there, "hardware": made[0]["hardware"] | {"cpu": "another"}}
    path = write_records(tmp_path / "runs.jsonl", [made[0], tampered, elsewhere])
    before = path.read_bytes()
    assert repeat.repeat(Records(path), 9, PLACE, jobs=1) == 1
    said = capsys.readouterr().out
    for words in ("1 equal", "1 different", "1 not comparable here", "round 1, loss: recorded 0.5, now ",
                  "processor then another, here "):
        assert words in said
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def test_settings_come_before_further_runs_of_one():
    records = [{"id": str(i), "finished": "", "setting": "a" if i < 4 else "b"} for i in range(5)]
    for number in (1, 2, 5):
        chosen = repeat.sampled(records, number)
        assert len(chosen) == number and chosen == repeat.sampled(records[::-1], number)
    assert {record["setting"] for record in repeat.sampled(records, 2)} == {"a", "b"}
