"""The disk that a run's states take: known before the training, bounded while it runs, no more than is of use
afterwards."""

import collections
import os

from plumbing import disk, runfolder
from plumbing.disk import bytes_of, copies
from plumbing.errors import Stop
from reproduce.measures.finished import federation
from tests.conftest import fails, one_run, parsed, run_all, run_here

import pytest
import torch

Usage = collections.namedtuple("Usage", "total used free")
ROUNDS = ["--rounds", "4", "--checkpoint-every", "0", "--lr", "0.2"]


def free(monkeypatch, count: int) -> None:
    """Let the disk have so many bytes free."""
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: Usage(10 * count, 9 * count, count))


def run_and_measure(method: str, monkeypatch, out, *flags) -> tuple[int, int]:
    """How many files of states there were at most while one was written, and the bytes of a state."""
    most, sizes = [], []
    save, measured = runfolder.save, runfolder.bytes_of

    def saving(content, file):
        save(content, file)
        most.append(len(list(out.glob("*.pt*"))))

    def measuring(value):
        sizes.append(measured(value))
        return sizes[-1]
    with monkeypatch.context() as patch:
        patch.setattr(runfolder, "save", saving)
        patch.setattr(runfolder, "bytes_of", measuring)
        run_here(method, out, *flags)
    return max(most), max(sizes)


def test_bytes_are_those_of_storages():
    x = torch.zeros(100)
    assert bytes_of({"a": x, "b": [x[:3], {"c": x.view(10, 10)}], "d": "text", "e": 3}) == 400
    assert bytes_of([torch.zeros(2, dtype=torch.int8), torch.zeros(2, dtype=torch.int8)]) == 4


@pytest.mark.parametrize("method", ["fedavg", "baselines.moon", "fedgala"])
def test_a_run_has_as_many_states_as_it_says(tmp_path, monkeypatch, method):
    """Also those that clients have only once they have trained; each file is as large as it was thought."""
    flags = [*ROUNDS, *one_run(method)]
    most, size = run_and_measure(method, monkeypatch, tmp_path, *flags)
    assert (most, len(list(tmp_path.glob("*.pt")))) == copies(parsed(method, *one_run(method)).protocol)
    for path in tmp_path.glob("*.pt"):
        assert size <= path.stat().st_size < 1.1 * size, path


def test_a_disk_that_is_too_small_is_found_before_the_training(tmp_path, monkeypatch, capsys):
    """What is in the folder stays, whatever the flags."""
    run_here("fedavg", tmp_path)
    there = sum(path.stat().st_size for path in tmp_path.glob("*.pt"))
    capsys.readouterr()
    free(monkeypatch, 3 * 882_488 - there - 1)
    words = "^fedavg: the run needs up to 2.5 MiB of disk for its checkpoints, and 2.5 MiB are free in "
    words += rf"{tmp_path}: make room there, or give --out a folder on another disk$"
    fails(capsys, 1, words, run_here, "fedavg", tmp_path, "--no-resume")
    assert (tmp_path / "result.json").exists() and (tmp_path / "checkpoint.pt").exists()
    free(monkeypatch, 3 * 882_488 - there)
    run_here("fedavg", tmp_path, "--no-resume")


def test_two_names_of_one_state_count_once(tmp_path, monkeypatch):
    """What a new run would put in the place of a checkpoint that is the best state too."""
    (tmp_path / "checkpoint.pt").write_bytes(bytes(1000))
    (tmp_path / "best.pt").hardlink_to(tmp_path / "checkpoint.pt")
    free(monkeypatch, 1999)
    with pytest.raises(Stop):
        disk.refuse_small_disk(1000, "indomain", tmp_path)
    free(monkeypatch, 2000)
    disk.refuse_small_disk(1000, "indomain", tmp_path)


def test_states_that_grow_are_looked_at_again(tmp_path, monkeypatch, capsys):
    """MOON's clients keep their networks once they have trained; nothing was written by then."""
    free(monkeypatch, 10_000_000)
    words = r"^baselines.moon: the run needs up to 17.7 MiB of disk .* 9.5 MiB are free"
    fails(capsys, 1, words.replace("baselines.moon", r"[\w.]*moon"), run_here, "baselines.moon", tmp_path)
    assert not list(tmp_path.glob("*.pt*"))


def test_much_disk_is_announced(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(disk, "SAID_FROM", 5_000_000)
    free(monkeypatch, 100 << 30)
    args = parsed("baselines.moon", "--scale", "smoke", "--precision", "fp32", "--out", tmp_path)
    run_all("baselines.moon", args)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("disk:")]
    words = "disk: up to 17.7 MiB while it runs (3 states of 5.9 MiB), 11.8 MiB when it is finished; "
    assert lines == [words + f"100.0 GiB are free in {tmp_path}"]


def test_the_best_state_is_the_last_one_where_the_last_round_is_best(tmp_path, monkeypatch):
    """One file then; a network is rebuilt from it, and going on leaves it as it is."""
    monkeypatch.setattr("common.evaluate", lambda fed, t, best: {
        "val": {"ALL": t / 10, "AVG": 0.0, "clients": {}}, "test": {"ALL": 0.5, "AVG": 0.5, "clients": {}}})
    run_here("fedavg", tmp_path / "a", *ROUNDS)
    best, last = tmp_path / "a" / "best.pt", tmp_path / "a" / "checkpoint.pt"
    assert best.samefile(last) and len(list((tmp_path / "a").glob("*.pt*"))) == 2
    fed = federation(tmp_path / "a", "best")
    saved = torch.load(best, weights_only=True)
    assert torch.equal(fed.server.w["head.weight"], saved["server"]["w"]["head.weight"])

    def refusing(*paths):
        raise OSError("no links on this disk")
    monkeypatch.setattr(os, "link", refusing)
    run_here("fedavg", tmp_path / "b", *ROUNDS)
    assert not (tmp_path / "b" / "best.pt").samefile(tmp_path / "b" / "checkpoint.pt")
    assert torch.load(tmp_path / "b" / "best.pt", weights_only=True)["round"] == 4


def test_an_earlier_best_state_is_a_file_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("common.evaluate", lambda fed, t, best: {
        "val": {"ALL": 1 / t, "AVG": 0.0, "clients": {}}, "test": {"ALL": 0.5, "AVG": 0.5, "clients": {}}})
    run_here("fedavg", tmp_path, *ROUNDS)
    assert torch.load(tmp_path / "best.pt", weights_only=True)["round"] == 1
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["round"] == 4
