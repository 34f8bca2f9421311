"""What holds for every method alike: it runs, repeats, resumes, and learns. That it may be
killed at any moment is in test_killed.py."""

import json
from copy import deepcopy
from pathlib import Path

import common
from reproduce import loading
from plumbing import linear
from plumbing.files import tensors_of
from tests.conftest import (METHODS, LINEAR, OFFICIAL, TESTED, interrupted, metrics, one_run,
                            parsed, run_all, run_here)

import pytest
import torch
from PIL import Image

# Each method has a test of two rounds by hand; that it learns takes seconds for each.
LEARNING = [name if name == "fdse" else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]


ALL = [*METHODS, *OFFICIAL]


def small_run(method: str) -> list[str]:
    """A short run on small images: with BN and pooling the networks take them."""
    return [*one_run(method), *small_images(method)]


def small_images(method: str) -> list[str]:
    if one_run(method):
        return ["--image-size", "8", "--crop", "8"]
    return ["--image-size", "8"]


def keeping(method: str) -> list[str]:
    """Flags with which a method keeps all that it can; a program of official/ has its method's, and the Adam
    of SimCLR."""
    if method == "official.fedgala":
        return LINEAR.split()
    return TESTED[method.removeprefix("official.")].keeping.split()


def same_metrics(out: Path, other: Path) -> bool:
    """Whether two runs have the same metrics to the byte."""
    return (out / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()


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


@pytest.mark.parametrize("method", ALL)
def test_it_runs_and_writes_all_files(tmp_path, monkeypatch, method):
    """Bytes, rounds and accuracies of the files against each other, against the networks loaded again, and
    against a second run."""
    flags = ["--precision", "auto", *small_run(method)]
    with monkeypatch.context() as patch:
        for name in ("train_client", "test_client", "validate_client", "fit_client", "start_client"):
            patch.setattr(common, name, only_reading(getattr(common, name)))
        run_here(method, tmp_path / "again", *flags)
    tmp_path /= "run"
    result = run_here(method, tmp_path, *flags, figures=method == "fdse")
    assert same_metrics(tmp_path, tmp_path.parent / "again")
    assert json.loads((tmp_path / "result.json").read_text()) == result
    rounds = metrics(tmp_path)
    assert [entry["round"] for entry in rounds] == [1, 2]
    sent = 0
    for entry in rounds:
        for name, log in entry["clients"].items():
            takes_part = log["bytes_up"] > 0 and log["bytes_down"] > 0 and log["loss"] > 0
            assert takes_part or method in NO_FEDERATION, name
            sent += log["bytes_up"]
    assert result["bytes"]["up"] == sent
    for file in ("settings.json", "timing.jsonl", "checkpoint.pt"):
        assert (tmp_path / file).exists(), file
    chosen_by_validation = "val" in rounds[-1]
    assert (tmp_path / "best.pt").exists() == chosen_by_validation
    assert method != "fdse" or Image.open(tmp_path / "curves.png").size[0] > 500
    assert loaded_accuracies(tmp_path, "best") == recorded_accuracies(result["best"])


def recorded_accuracies(outcome: dict) -> dict:
    """Of each client, and of the left-out domain, the accuracy in result.json."""
    if "linear" in outcome:
        return outcome["linear"]
    target = {"d30": outcome["target"]} if "target" in outcome else {}
    return outcome["clients"] | target


def loaded_accuracies(out: Path, which: str) -> dict:
    """The same by the networks of `loading.load_run`."""
    args = loading.load_run(out, which=which).run.args
    sources, targets = common.split(common.open_dataset(args), args)
    accuracies = {}
    for data in sources + targets:
        if args.protocol == "linear" and not data.unseen:
            continue
        net = loading.load_run(out, data.name, which)
        assert net.run.client == data.name and not net.training
        if args.protocol == "linear":
            accuracies[data.name] = linear_accuracies(net, data)
        else:
            if not data.unseen:
                common.correct(net, data.val, args)  # what draws z has drawn for these before
            accuracies[data.name] = common.correct(net, data.test, args) / len(data.test)
    return accuracies


def linear_accuracies(net: torch.nn.Module, data: common.ClientData) -> dict:
    """Of each share of labels the accuracy of a linear classifier on a domain's representations."""
    args = net.run.args
    z, y = common.representations(net, data.test, args)
    seed = common.seed_all(args.seed, "linear", data.name).initial_seed()
    return linear.accuracies(z, y, len(net.run.classes), args, seed)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_loaded_network_has_the_recorded_accuracies(tmp_path, method):
    """With all that a method keeps, and in the machine's precision."""
    result = run_here(method, tmp_path, *keeping(method), "--precision", "auto", "--rounds", 3)
    for which in ("best", "last"):
        assert loaded_accuracies(tmp_path, which) == recorded_accuracies(result[which])


@pytest.mark.parametrize("method", ALL)
def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path, method, monkeypatch):
    """What a method keeps between rounds decides it, so each keeps all that it can."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = [*keeping(method), *small_images(method), "--rounds", 3, "--checkpoint-every", 0]
    result = run_here(method, whole, *flags)
    interrupted(method, monkeypatch, parts, *flags, after=2)
    assert len(metrics(parts)) == 2 and not (parts / "result.json").exists()
    resumed = run_here(method, parts, *flags)
    assert same_metrics(parts, whole)
    assert resumed["best"] == result["best"] and resumed["bytes"] == result["bytes"]


# Learning

@pytest.mark.parametrize("method", LEARNING)
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
