"""--extend: a longer run that begins with the rounds of a shorter one has the bytes of a run from the start,
or is refused."""

import contextlib
import dataclasses
import inspect
import io
import json
import shutil
from pathlib import Path

import common
from plumbing.extending import as_if_longer, extend
from plumbing.runfolder import RunFolder
from tests.conftest import METHODS, MODULES, fails, parsed, run_here
from tests.test_common import Clock, guessing
from tests.test_every_method import KEEPING, same_metrics

import pytest
import torch

GUESSES = [3, 8, 1, 0, 5]


def guessed(out: Path, *flags) -> dict:
    """A run of clients that guess another label after each round, which train nothing."""
    args = parsed("fedavg", "--out", out, "--limit", "30", "--no-figures", "--checkpoint-every", "0", *flags)
    with contextlib.redirect_stdout(io.StringIO()):
        result, = common.run(Clock, guessing(GUESSES), args)
    return result


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Path:
    """The folder of a run of two rounds."""
    out = tmp_path_factory.mktemp("short") / "run"
    guessed(out, "--rounds", "2")
    return out


# The same bytes

# Of these the numbers of each round depend on how many there are to come, but not with these flags.
FREE = {"baselines.fedproc": ["--fade", "4"], "baselines.feddg_ga": ["--step-size", "0"]}
SLOW = [pytest.param(method, marks=pytest.mark.slow) for method in METHODS if method != "fdse"]


@pytest.mark.parametrize("method", ["fdse", *SLOW])
def test_an_extended_run_has_the_bytes_of_one_from_the_start(tmp_path, method):
    """Its last round of before was evaluated; in the longer run it is not. The shorter run stays as it is."""
    flags = [*KEEPING[method], *FREE.get(method, []), "--eval-every", 2]
    run_here(method, tmp_path / "short", *flags, "--rounds", 3)
    before = content(tmp_path / "short")
    whole = run_here(method, tmp_path / "whole", *flags, "--rounds", 5)
    more = ["--rounds", 5, "--extend", tmp_path / "short"]
    extended = run_here(method, tmp_path / "longer", *flags, *more)
    assert same_metrics(tmp_path / "longer", tmp_path / "whole")
    for name in ("id", "args", "best", "last", "curve", "bytes", "logs"):
        assert extended[name] == whole[name], name
    assert content(tmp_path / "short") == before
    assert [part["from"] for part in extended["code"]] == [1, 4]


@pytest.mark.parametrize("first, flags", [
    (4, ["--test-rounds", "best"]),
    (3, ["--eval-every", "2", "--test-rounds", "best"]),
])
def test_evaluations_are_those_of_the_longer_run(tmp_path, flags, first):
    """Whatever the shorter run's last round was, best or not, due or not: the same lines, best round and
    best state."""
    guessed(tmp_path / "short", *flags, "--rounds", first)
    whole = guessed(tmp_path / "whole", *flags, "--rounds", "5")
    longer = guessed(tmp_path / "longer", *flags, "--rounds", "5", "--extend", tmp_path / "short")
    assert same_metrics(tmp_path / "longer", tmp_path / "whole")
    assert longer["best"] == whole["best"] and longer["curve"] == whole["curve"]
    times = (tmp_path / "longer" / "timing.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in times] == [1, 2, 3, 4, 5]


def lines(*vals, test=True) -> list[dict]:
    """Lines of metrics with these validation accuracies."""
    entries = []
    for t, val in enumerate(vals, 1):
        entry = {"round": t, "clients": {}, "val": {"ALL": val}}
        if test:
            entry |= {"test": {"ALL": val}, "target": val}
        entries.append(entry)
    return entries


def names(entries: list[dict]) -> list[str]:
    return [" ".join(name for name in entry if name not in ("round", "clients")) for entry in entries]


def test_what_is_left_of_the_evaluations():
    args = parsed("fedavg", "--eval-every", "2")
    kept, best = as_if_longer(lines(0.5, 0.2, 0.9), args, Path("x"))
    assert names(kept) == ["", "val test target", ""] and best == {"round": 2, "val": 0.2}
    args = parsed("fedavg", "--test-rounds", "best")
    kept, best = as_if_longer(lines(0.5, 0.5, 0.9), args, Path("x"))  # of one that tested everywhere
    assert names(kept) == ["val test target", "val", "val test target"] and best == {"round": 3, "val": 0.9}
    _, best = as_if_longer(lines(0.5, 0.5), parsed("fedavg"), Path("x"))
    assert best["round"] == 1  # the first of equals
    assert [list(entry) for entry in kept][0] == ["round", "clients", "val", "test", "target"]


def test_without_labels():
    entries = [{"round": t, "clients": {}, "target": 0.5, "linear": {}} for t in (1, 2, 3)]
    entries[0]["start"] = {"target": 0.1}
    args = parsed("fedgala", "--eval-every", "2")
    kept, best = as_if_longer(entries, args, Path("x"))
    assert names(kept) == ["start", "target linear", ""] and best == {"round": 0, "val": -1.0}
    kept, _ = as_if_longer(entries, dataclasses.replace(args, test_rounds="best"), Path("x"))
    assert names(kept) == ["start", "", ""]


def test_the_best_network_goes_along(tmp_path, short, capsys):
    """If the best round is still the one that the shorter run has kept; else that is said."""
    guessed(tmp_path / "longer", "--rounds", "3", "--extend", short)
    theirs = torch.load(short / "best.pt", weights_only=True)
    ours = torch.load(tmp_path / "longer" / "best.pt", weights_only=True)
    if ours["round"] < 3:
        assert ours["server"] == theirs["server"] and ours["round"] == theirs["round"]
    assert json.loads(ours["identity"])["rounds"] == 3
    assert "best.pt" not in capsys.readouterr().err


def test_a_best_network_of_a_round_that_is_not_evaluated_is_lost(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tests.test_extending.GUESSES", [3, 8, 3, 3, 3])
    first = ["--eval-every", "2", "--rounds", "3"]
    guessed(tmp_path / "short", *first)
    saved = torch.load(tmp_path / "short" / "checkpoint.pt", weights_only=True)
    if saved["best"]["round"] != 3:  # make it so: only the bookkeeping counts here
        best = torch.load(tmp_path / "short" / "best.pt", weights_only=True)
        torch.save(best | {"round": 3}, tmp_path / "short" / "best.pt")
    guessed(tmp_path / "longer", "--eval-every", "2", "--rounds", "5", "--extend", tmp_path / "short")
    assert "the network of round 2 is lost, the numbers are not" in capsys.readouterr().err


def test_it_goes_on_without_the_shorter_run(tmp_path, short, monkeypatch):
    """Once it has a checkpoint of its own, the same command goes on from that."""
    shorter = shutil.copytree(short, tmp_path / "short")
    flags = ["--rounds", "5", "--extend", shorter]
    checkpoint = RunFolder.checkpoint

    def stopping(folder, entry, federation):
        checkpoint(folder, entry, federation)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(RunFolder, "checkpoint", stopping)
        guessed(tmp_path / "longer", *flags)
    shutil.rmtree(shorter)
    longer = guessed(tmp_path / "longer", *flags)
    assert [part["from"] for part in longer["code"]] == [1, 3, 4]
    whole = guessed(tmp_path / "whole", "--rounds", "5")
    assert same_metrics(tmp_path / "longer", tmp_path / "whole") and longer["best"] == whole["best"]
    assert guessed(tmp_path / "longer", *flags) == longer  # finished: it is shown


def test_a_best_state_that_is_a_whole_checkpoint(tmp_path, short):
    """So it is where the last round is the best: the longer run has the state alone."""
    shorter = shutil.copytree(short, tmp_path / "short")
    best = torch.load(shorter / "best.pt", weights_only=True)
    torch.save(best | {"history": "[]", "code": "[]", "best": {}}, shorter / "best.pt")
    extend(parsed("fedavg", "--out", tmp_path / "longer", "--limit", "30", "--no-figures",
                  "--checkpoint-every", "0", "--rounds", "3", "--extend", shorter))
    ours = torch.load(tmp_path / "longer" / "best.pt", weights_only=True)
    assert list(ours) == ["identity", "round", "val", "server", "clients"] and ours["val"] == best["val"]


def test_a_process_that_ends_before_the_checkpoint_is_there(tmp_path, short, monkeypatch):
    """Without a best state there is nothing then, and the same command goes on."""
    shorter = shutil.copytree(short, tmp_path / "short")
    (shorter / "best.pt").unlink()
    flags = ["--rounds", "3", "--extend", shorter]

    def ending(content, file):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("plumbing.extending.save", ending)
        guessed(tmp_path / "longer", *flags)
    assert [part["from"] for part in guessed(tmp_path / "longer", *flags)["code"]] == [1, 3]


# Refused


@pytest.mark.parametrize("flags, words", [
    (["--rounds", "4", "--lr", "0.2"], r"is a run of other arguments \(lr 0.05, not 0.2\): --rounds alone"),
    (["--rounds", "2"], "has 2 rounds, and --rounds is 2: give more"),
    (["--rounds", "4", "--seeds", "0,1"], "goes on with one run: give its --seed"),
    (["--rounds", "4", "--protocol", "lodo"], "goes on with one run: give its --seed"),
    (["--rounds", "4", "--no-resume"], "--extend and --no-resume do not go together"),
])
def test_what_is_refused(tmp_path, short, capsys, flags, words):
    before = content(short)
    fails(capsys, 2, words, guessed, tmp_path / "longer", "--extend", short, *flags)
    assert content(short) == before and not (tmp_path / "longer").exists()


def test_folders_that_are_refused(tmp_path, short, capsys):
    (tmp_path / "empty").mkdir()
    more = ["--rounds", "4", "--extend"]
    fails(capsys, 2, "has no checkpoint.pt: give the output folder", guessed, tmp_path / "a", *more, tmp_path)
    fails(capsys, 2, "is the output folder too", guessed, short, *more, short)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "result.json").write_text("mine")
    fails(capsys, 2, "has files that are of no run", guessed, tmp_path / "b", *more, short)


def changed(short: Path, folder: Path, **entries) -> Path:
    """A copy of a run's checkpoint with other entries."""
    folder.mkdir()
    saved = torch.load(short / "checkpoint.pt", weights_only=True)
    code = json.loads(saved["code"])
    code[0] |= entries
    torch.save(saved | {"code": json.dumps(code)}, folder / "checkpoint.pt")
    return folder


def test_other_code_and_other_threads_are_refused(tmp_path, short, capsys):
    more = ["--rounds", "4", "--extend"]
    other = changed(short, tmp_path / "other", sources="000000000000")
    capsys.readouterr()
    words = r"by other code \(sources 000000000000; .*: run it without --extend, or --any-code to go on"
    fails(capsys, 2, words, guessed, tmp_path / "longer", *more, other)
    guessed(tmp_path / "longer", *more, other, "--any-code")
    capsys.readouterr()
    threads = changed(short, tmp_path / "threads", threads=7)
    words = "ran on 7 threads, .* here are 1: give --threads 7"
    fails(capsys, 2, words, guessed, tmp_path / "b", *more, threads)


def test_tests_that_are_missing_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tests.test_extending.GUESSES", [3, 3, 3, 3, 3])  # round 2 is not better
    guessed(tmp_path / "short", "--rounds", "3", "--test-rounds", "best")
    words = "was not tested after round 2: give the --test-rounds best"
    more = ["--rounds", "4", "--extend", tmp_path / "short"]
    fails(capsys, 2, words, guessed, tmp_path / "longer", *more)


@pytest.mark.parametrize("method", FREE)
def test_methods_that_look_at_the_number_of_rounds(tmp_path, capsys, method):
    flags = ["--rounds", 4, "--extend", tmp_path / "short"]
    words = "--extend is not exact here: .* falls to 0 over all rounds T"
    fails(capsys, 2, words, run_here, method, tmp_path / "longer", *flags)
    assert parsed(method, *FREE[method]).depends_on_rounds() == ""


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_reads_the_number_of_rounds_says_so(method):
    """That its curve does not depend on the number otherwise is seen by the slow test of the bytes."""
    module = MODULES[method]
    reads = "args.rounds" in inspect.getsource(module)
    assert reads == ("depends_on_rounds" in vars(module.Args))
