"""GPUs that runs share: which there are, and how many runs go on one. There is none here: others stand for
them."""

import subprocess
from types import SimpleNamespace

import reproduce_tables
from plumbing.errors import Stop
from reproduce import cards
from reproduce.cards import Card, cards_here, sharing

import pytest
import torch


def answered(monkeypatch, said: str, code: int = 0, error: str = "") -> None:
    """Let the process that is asked for the GPUs answer so."""
    done = subprocess.CompletedProcess([], code, said, error)
    monkeypatch.setattr(cards.subprocess, "run", lambda *words, **how: done)


def test_the_gpus_of_this_machine(monkeypatch):
    answered(monkeypatch, 'a warning\n[["NVIDIA A", 100], ["NVIDIA B", 200]]\n')
    assert cards_here(["1", "0"]) == [Card("1", "NVIDIA B", 200), Card("0", "NVIDIA A", 100)]
    with pytest.raises(Stop, match="--gpus 0,2: there is no GPU 2 here; there is 0, 1") as stop:
        cards_here(["0", "2"])
    assert stop.value.code == 2


@pytest.mark.parametrize("said, code, error, words", [
    ("[]", 0, "", "there is no GPU here that PyTorch can use; leave --gpus out"),
    ("", 1, "Traceback\nRuntimeError: driver too old", "cannot be used here: RuntimeError: driver too old"),
])
def test_no_gpu_is_one_line(monkeypatch, capsys, said, code, error, words):
    """Of a plan and of runs, before anything else is looked at; a plan of another device needs none here."""
    answered(monkeypatch, said, code, error)
    for what in ("--plan", "--run", "--rerun"):
        with pytest.raises(SystemExit) as end:
            reproduce_tables.main([what, "--gpus", "0", "--only", "fdse-1"])
        lines = capsys.readouterr().err.strip().splitlines()
        assert end.value.code == 2 and len(lines) == 1 and words in lines[0], lines
    flags = reproduce_tables.parsed(["--plan", "--device", "a100", "--gpus", "0,1"])
    assert [card.free for card in reproduce_tables.cards_of(flags)] == [40 << 30] * 2
    for others in (["--gpus", "0"], ["--run"], ["--run", "--gpus", "2", "--executor", "slurm"]):
        assert reproduce_tables.cards_of(reproduce_tables.parsed(others)) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_another_process_finds_none_here():
    with pytest.raises(Stop, match="there is no GPU here"):
        cards_here(["0"])


def runs_of(gib: float) -> list:
    """Two runs, of which the larger takes these GiB on a GPU."""
    counted = (gib * 2 ** 30 - cards.CONTEXT) / cards.SPARE
    return [SimpleNamespace(memory=counted / 100), SimpleNamespace(memory=counted)]


@pytest.mark.parametrize("gib, free, cores, trainings, each", [
    (2, 139, 64, 100, 8),  # the bound on runs
    (2, 10, 64, 100, 4),  # memory: nine tenths of 10 GiB
    (2, 139, 6, 100, 3),  # a core each on two cards
    (2, 139, 64, 5, 3),  # no more than there are trainings
    (20, 10, 64, 100, 1),  # it may not fit
    (2, 139, 0, 100, 8),  # cores that are not known
])
def test_how_many_runs_share_a_gpu(gib, free, cores, trainings, each):
    """As many as the fuller of two cards allows; the line says what was chosen and why."""
    two = [Card("0", "NVIDIA A", free << 30), Card("1", "NVIDIA A", 500 << 30)]
    jobs, line = sharing(runs_of(gib), two, trainings, 0, cores)
    assert jobs == min(2 * each, trainings)
    assert line.startswith(f"{each} runs at a time on each of GPU 0, 1 (NVIDIA A)")
    assert f"{gib:.1f} GiB for the largest run" in line and "\n" not in line
    assert ("may not fit" in line) == (gib > free) and ("not known of that machine" in line) == (cores == 0)
    jobs, line = sharing(runs_of(gib), two, trainings, 5, cores)
    assert jobs == 5 and "at most 3 on each, as --jobs says" in line
    assert sharing([], two, trainings, 0, cores)[0] == 2
