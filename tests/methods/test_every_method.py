"""What holds for every method alike: it runs, repeats, resumes, and learns. That it may be
killed at any moment is in test_killed.py."""

import shutil
from copy import deepcopy
from pathlib import Path

import common
from reproduce import loading
from plumbing.run.files import tensors_of
from plumbing.run.runfolder import Run
from tests.conftest import (LINEAR, METHODS, OFFICIAL, TESTED, members_of, metrics, parsed, read_json,
                            run_all, run_here, same_metrics)
from tests.finished_runs import once

import pytest
import torch
from PIL import Image

ALL = [*METHODS, *OFFICIAL]


def keeping(method: str) -> list[str]:
    """Flags with which a method keeps all that it can; a program of official/ has its method's, and the Adam
    of SimCLR."""
    if method == "official.fedgala":
        return LINEAR.split()
    return TESTED[method.removeprefix("official.")].keeping.split()


# Here clients send nothing, or have no images to train on.
NO_FEDERATION = ("baselines.local", "baselines.centralized")


def only_reading(of_client):
    """What a client does, after which the tensors that it got from the server must be as they were."""
    def done(fed, k, t, down, *parts):
        before = deepcopy(down)
        answer = of_client(fed, k, t, down, *parts)
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(before), tensors_of(down), strict=True))
        return answer
    return done


def flags_of(method: str) -> list:
    """Three rounds in the machine's precision."""
    return [*keeping(method), "--precision", "auto", "--rounds", 3, "--checkpoint-every", 0]


@pytest.fixture
def whole(tmp_path_factory, method, four_domains) -> Path:
    """A method's run to its end; beside it what its folder held after two rounds."""
    save = Run.save

    def saving(progress, federation) -> None:
        save(progress, federation)
        if progress.t == 2:
            shutil.copytree(progress.path, after_two_rounds(progress.path))

    def make(out: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Run, "save", saving)
            for name in ("train_client", "test_client", "validate_client", "fit_client", "start_client"):
                patch.setattr(common, name, only_reading(getattr(common, name)))
            run_here(method, out, *flags_of(method), figures=method == "fdse")
    return once(tmp_path_factory, f"whole-{method}", make)


def after_two_rounds(out: Path) -> Path:
    return out.with_name(f"{out.name}-begun")


@pytest.mark.parametrize("method", ALL)
def test_it_runs_and_writes_all_files(whole, method):
    """Rounds and accuracies of the files against each other, and against the networks loaded again."""
    result = read_json(whole / "result.json")
    rounds = metrics(whole)
    assert [entry["round"] for entry in rounds] == [1, 2, 3]
    for entry in rounds:
        for name, log in entry["clients"].items():
            takes_part = log["bytes_up"] > 0 and log["bytes_down"] > 0 and log["loss"] > 0
            assert takes_part or method in NO_FEDERATION, name
    chosen_by_validation = "val" in rounds[-1]
    assert (whole / "best.pt").exists() == chosen_by_validation
    assert method != "fdse" or Image.open(whole / "curves.png").size[0] > 500
    if chosen_by_validation:
        recorded = result["best"]["clients"] | {"d30": result["best"].get("target")}
        loaded = loaded_accuracies(whole)
        assert loaded and loaded.items() <= recorded.items()


def loaded_accuracies(out: Path) -> dict:
    """The best round's of the first client and the last, or the left-out domain, by `loading.load_run`."""
    args = loading.load_run(out).run.args
    sources, targets = members_of(args)
    accuracies = {}
    for data in (sources + targets)[::3]:
        net = loading.load_run(out, data.name)
        assert net.run.client == data.name and not net.training
        if not data.unseen:
            common.correct(net, data.val, args)  # what draws z has drawn for these before
        accuracies[data.name] = common.correct(net, data.test, args) / len(data.test)
    return accuracies


@pytest.mark.parametrize("method", ALL)
def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path, whole, method):
    """What a method keeps between rounds decides it, so each keeps all that it can."""
    out = shutil.copytree(after_two_rounds(whole), tmp_path / "run")
    assert len(metrics(out)) == 2 and not (out / "result.json").exists()
    resumed = run_here(method, out, *flags_of(method))
    result = read_json(whole / "result.json")
    assert same_metrics(out, whole)
    assert resumed["best"] == result["best"] and resumed["bytes"] == result["bytes"]


# Learning


@pytest.mark.slow  # seconds for each; all have a test of two rounds by hand
@pytest.mark.parametrize("method", METHODS)
def test_it_learns(tmp_path, method):
    """On the digits, in a few rounds, far more than chance."""
    tested = TESTED[method]
    quick = ["--precision", "fp32", "--eval-every", 100, "--no-figures"]
    args = parsed(method, *quick, "--out", tmp_path, *tested.learns.split())
    result, = run_all(method, args)
    losses = []
    for entry in metrics(tmp_path):
        losses.append(sum(log.get("loss", 0) for log in entry["clients"].values()))
    assert losses[-1] < tested.left * losses[0]
    key = "ALL"
    if args.protocol == "linear":
        key = "target"
    assert 100 * result["last"][key] > tested.floor
