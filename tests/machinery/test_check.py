"""--check: recorded runs are begun again, and compared digit by digit."""


from reproduce import check
from reproduce.claims import read_claims
from reproduce.records import Place, Records, setting_of
from reproduce.tables import read_tables
from reproduce_tables import records_behind
from tests.conftest import ROOT, RUNS, read_json, run_here
from tests.finished_runs import once
from tests.small_table import record, recorded, small_folder, write_records

import pytest

PLACE = Place(str(ROOT / "data"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Records of a run with labels of five rounds, of one without labels, and of one with gaps."""
    def make(place) -> None:
        path = place / "runs.jsonl"
        run_here("fedavg", place / "a", "--rounds", 5, "--record", path)
        run_here("fedgala", place / "b", "--target", "d0", "--rounds", 1, "--linear-epochs", 2,
                 "--image-size", 8, "--crop", 8, "--record", path)
        run_here("fedavg", place / "c", "--rounds", 2, "--lr-decay", 0.5, "--test-rounds", "best",
                 "--record", path)
    return recorded(once(tmp_path_factory, "checked", make) / "runs.jsonl")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Runs are compared for three rounds."""
    monkeypatch.setattr(check, "ROUNDS", 3)
    monkeypatch.setattr(check, "EVALUATIONS", 2)


@pytest.fixture
def folder(tmp_path):
    """A folder with the small table."""
    return small_folder(tmp_path)


def checked(folder, records: list[dict], minutes=0) -> tuple[int, dict]:
    """The exit code, and what is in checked.json, by method."""
    path = write_records(folder / "runs.jsonl", records)
    every = Records(path)
    code = check.check(every, every.every, PLACE, jobs=1, minutes=minutes)
    found = read_json(folder / "checked.json").values()
    return code, {entry["method"]: entry for entry in found}


def test_runs_are_stopped_early_compared_and_not_made_twice(folder, made, capsys, in_this_process):
    """One is equal, of the other a recorded number is another one."""
    tampered = made[1] | {"logs": made[1]["logs"] | {"loss": [0.5]}}
    code, found = checked(folder, [made[0], tampered])
    assert code == 1 and found["fedavg"]["outcome"] == "equal" and found["fedgala"]["outcome"] == "differs"
    assert (found["fedavg"]["rounds"], found["fedgala"]["rounds"]) == (3, 1)
    assert found["fedavg"]["record"] == made[0]["id"]
    assert found["fedgala"]["difference"].startswith("round 1, loss: recorded 0.5, now ")
    said = capsys.readouterr()
    assert "1 equal" in said.out and "1 differs" in said.out and "differs: python" in said.err
    assert checked(folder, [made[0], tampered], 9)[1] == found
    assert "nothing to check" in capsys.readouterr().out
    assert checked(folder, [made[2]], 9)[0] == 0


def test_digits_of_other_machines_are_not_compared(folder, made, monkeypatch):
    run, here = made[0], made[0]["hardware"]
    code, found = checked(folder, [run | {"hardware": here | {"cpu": "Z80"}}])
    assert code == 0
    assert (found["fedavg"]["outcome"], found["fedavg"]["difference"]) == ("not comparable", "it ran on Z80")
    for change, words in (({"versions": {"torch": "1.0"}}, "torch 1.0"),
                          ({"hardware": here | {"threads": 4096}}, "4096 threads"),
                          ({"hardware": here | {"instructions": "SSE"}}, "it ran with SSE, and this"),
                          ({"args": run["args"] | {"device": "cuda"}, "hardware": here | {"gpu": "X1"}},
                           "it ran on X1")):
        assert words in check.other_machine(run | change)
    older = run | {"hardware": {name: value for name, value in here.items() if name != "instructions"}}
    unknown = f"it ran with unknown instructions, and this processor has {here['instructions']}"
    for native, precision, words in (("bf16", "bf16", ""), ("fp32", "fp32", unknown),
                                     ("bf16", "fp32", unknown), ("fp32", "bf16", unknown)):
        monkeypatch.setattr(check, "choose_precision", lambda *_, native=native: native)
        assert check.other_machine(older | {"args": run["args"] | {"precision": precision}}) == words
    for change in ({"backbone": "/x.py:build"}, {"dataset": "folder:x 0123"}):
        assert "cannot have a file run" in check.not_comparable(run | {"args": run["args"] | change}, PLACE)
    monkeypatch.setattr(check, "unavailable", lambda args, place: "no images")
    assert check.begin_again(check.beginning(run), PLACE, None) == ("not comparable", "no images")


def test_what_was_compared_once_stays_if_it_cannot_be_compared_now(folder, made):
    path = folder / "checked.json"
    begun = check.beginning(made[0] | {"setting": setting_of(made[0])})
    check.note(path, begun, "abc", "equal", "")
    check.note(path, begun, "def", "not comparable", "no images")
    (entry,) = read_json(path).values()
    assert (entry["outcome"], entry["commit"]) == ("equal", "abc")


def test_one_run_of_each_setting_and_a_sample_of_all_methods():
    def a_run(setting: str, seconds: float, method: str = "fedavg", **more) -> dict:
        return record(method, ["--rounds", "1"], setting=setting, seconds={"train": seconds}, **more)
    dear, cheap = a_run("s", 90.0), a_run("s", 2.0)
    tested = a_run("s", 0.0, trained_by="x")
    others = [a_run("t", 3.0), a_run("u", 30.0, "fdse")]
    found = check.representatives([dear, cheap, tested, *others])
    assert [begun.record for begun in found] == [cheap, *others]
    names = [begun.record["setting"] for begun in check.sampled(found, 50)]
    assert names == ["s", "u"]


def test_only_the_records_behind_a_table_or_a_claim(folder):
    tables, papers, records = read_tables(folder / "papers"), read_claims(), Records(folder / "runs.jsonl")
    found = records_behind(tables, [], {"fdse-9"}, tables, records)
    assert {(one["method"], one["args"].get("lambda_")) for one in found} == {("fedavg", None), ("fdse", 0.0)}
    every = Records(RUNS)
    found = records_behind([], papers, {"claim-fedsr-outer"}, read_tables(), every)
    assert {(one["method"], one["args"]["target"]) for one in found} >= {("fedsr", "m0"), ("fedsr", "m75")}
    assert {one["args"]["dataset"] for one in found} <= {"rotatedmnist", "digits", "pacs"}
