"""Which sources give the same numbers: what the comparison of short runs notes, and the recorded ones made
again."""

import json
import tomllib

from plumbing import sources
from reproduce import short_runs
from reproduce.methods import ROOT, file_of, modules
from reproduce.short_runs import compare, of_this_machine, read_lines, short_run

import pytest

METHODS = ["fdse", "fedadg", "fedavg", "fedcir", "fedgala", "fedsr", "baselines.fedema"]


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A repository with results/, in which `now` gives fedavg's sources and bytes; results/."""
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def at(monkeypatch, hash_: str, bytes_: str, **more) -> None:
    """As if the sources of now had this hash and a short run wrote these bytes."""
    line = {"method": "fedavg", "command": "python fedavg.py", "sources": hash_, "metrics": bytes_,
            **short_runs.machine(), **more}
    monkeypatch.setattr(short_runs, "hash_of", lambda file: hash_)
    monkeypatch.setattr(short_runs, "short_run", lambda module: line)


def test_the_same_bytes_make_two_sources_equivalent(results, monkeypatch):
    """Also those of a state before the last; other bytes are recorded beside the older ones."""
    at(monkeypatch, "a", "x")
    assert "first short run" in compare("fedavg", results)
    assert "are known" in compare("fedavg", results)
    at(monkeypatch, "b", "y")
    assert "b give other bytes than a" in compare("fedavg", results)
    at(monkeypatch, "c", "x")
    assert "c give the bytes of a" in compare("fedavg", results)
    assert [line["sources"] for line in read_lines(results)] == ["a", "b"]
    assert sources.equivalent_to("c") == {"a", "c"} and "are known" in compare("fedavg", results)
    at(monkeypatch, "d", "x")
    assert "d give the bytes of a" in compare("fedavg", results)
    path = results / "equivalent_sources.toml"
    assert tomllib.loads(path.read_text())["same"] == [{"method": "fedavg", "sources": ["a", "c", "d"]}]


def test_sets_of_sources_are_joined_and_those_of_other_methods_stay(results):
    """Two sets of a method that turn out to be one."""
    path = results / "equivalent_sources.toml"
    for method, pair in (("fdse", "ab"), ("fedavg", "ab"), ("fedavg", "cd"), ("fedavg", "db")):
        short_runs.note_same(path, method, *pair)
    assert sources.read_equivalents(path) == [("fdse", ["a", "b"]), ("fedavg", ["a", "b", "c", "d"])]


def test_damaged_lines_count_for_nothing(results, monkeypatch):
    (results / "short_runs.jsonl").write_text('{}\n3\n[\n{"method": "fedavg"}\n')
    assert read_lines(results) == []
    at(monkeypatch, "a", "x")
    assert "first short run" in compare("fedavg", results)


def test_bytes_of_another_machine_or_command_say_nothing(results, monkeypatch):
    at(monkeypatch, "a", "x", torch="0.1")
    compare("fedavg", results)
    at(monkeypatch, "b", "x")
    assert "first short run on this machine" in compare("fedavg", results)
    at(monkeypatch, "c", "x", command="python fedavg.py --rounds 9")
    assert "other bytes" in compare("fedavg", results)
    assert sources.equivalent_to("b") == {"b"}


def test_every_method_has_a_short_run():
    """Of some sources, on some machine."""
    assert set(METHODS) <= set(modules())
    assert set(METHODS) <= {line["method"] for line in read_lines(ROOT / "results")}


@pytest.mark.slow
@pytest.mark.parametrize("module", METHODS)
def test_a_recorded_short_run_is_made_again_byte_for_byte(module):
    same = sources.equivalent_to(sources.hash_of(file_of(module)))
    of_now = [line for line in read_lines(ROOT / "results")
              if line["method"] == module and line["sources"] in same]
    assert of_now, "no short run of these sources: python reproduce_tables.py --same-numbers"
    here = [line for line in of_now if of_this_machine(line)]
    if not here:
        pytest.skip(f"recorded on another machine: {json.dumps(of_now[-1])}")
    assert short_run(module)["metrics"] == here[-1]["metrics"]
