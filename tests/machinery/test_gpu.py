"""Every method on a GPU against the CPU: its rounds, its resume, its predictions. Only with -m gpu.

No tolerance here was found on a GPU. In fp32 without TF32 one step differs in the last digits, and training
makes more of it; where a method draws numbers on the device (noise, views), they are others than the CPU's,
and its losses are only to be near. GPU_TESTS_ON=cpu runs the tests without a GPU.
"""

import os

import torch
from common import LinearArgs
from plumbing.run.devices import choose_device
from reproduce.measures.finished import rebuilt
from tests.conftest import METHODS, MODULES, TESTED, interrupted, metrics, one_run, run_here

import pytest

DEVICE = os.environ.get("GPU_TESTS_ON", "cuda")
MISSING = DEVICE.startswith("cuda") and not torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING, reason="there is no GPU here")]

# These draw noise, generated representations or views on the device.
DRAWING = {"fedsr", "fedcir", "fedadg", "fedgala", "baselines.fedema", "baselines.fedfa", "baselines.fedgen"}
FIRST, SECOND = 1e-2, 1e-1  # of a client's mean loss in round 1 and 2, relative
OTHER_NUMBERS = 0.5  # the same where a method draws on the device
RESUMED = 2e-2  # between a run and one that was interrupted, both on the device
LOGITS = 1e-3  # of a network's outputs, absolute
EQUAL = ("round", "lr")  # of a line of metrics


def losses(entry: dict) -> dict[str, float]:
    """Each client's mean loss in a round."""
    return {name: log["loss"] for name, log in entry["clients"].items() if "loss" in log}


def sent(entry: dict) -> dict[str, tuple[int, int]]:
    """Each client's bytes up and down in a round."""
    return {name: (log["bytes_up"], log["bytes_down"]) for name, log in entry["clients"].items()}


@pytest.mark.parametrize("method", METHODS)
def test_two_rounds_are_those_of_the_cpu(tmp_path, method):
    for out, device in (("cpu", "cpu"), ("device", DEVICE)):
        run_here(method, tmp_path / out, *one_run(method), "--device", device)
    pairs = zip(metrics(tmp_path / "cpu"), metrics(tmp_path / "device"), strict=True)
    for (ours, theirs), tolerance in zip(pairs, (FIRST, SECOND)):
        if method in DRAWING:
            tolerance = OTHER_NUMBERS
        assert sent(ours) == sent(theirs)
        assert [ours[name] for name in EQUAL] == [theirs[name] for name in EQUAL]
        assert losses(theirs) == pytest.approx(losses(ours), rel=tolerance)


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_run_goes_on(tmp_path, method, monkeypatch):
    """As a run in one piece would, up to the order of sums: the seeds are those of round and client."""
    flags = [*TESTED[method].keeping.split(), "--rounds", 3, "--checkpoint-every", 0, "--device", DEVICE]
    run_here(method, tmp_path / "whole", *flags)
    interrupted(method, monkeypatch, tmp_path / "parts", *flags, after=2)
    result = run_here(method, tmp_path / "parts", *flags)
    last, resumed = metrics(tmp_path / "whole")[-1], metrics(tmp_path / "parts")[-1]
    assert [part["from"] for part in result["code"]] == [1, 3]
    assert losses(resumed) == pytest.approx(losses(last), rel=RESUMED)
    assert sent(resumed) == sent(last)


@pytest.mark.parametrize("method", METHODS)
def test_predictions_are_those_of_the_cpu(tmp_path, method, monkeypatch):
    """Of the network of a finished run that was trained on the device, there and on the CPU."""
    result = run_here(method, tmp_path, *one_run(method), "--device", DEVICE)
    assert result["args"]["device"] == DEVICE.partition(":")[0]
    logits = {}
    for device in (DEVICE, "cpu"):
        chosen = choose_device(device)
        monkeypatch.setattr("plumbing.run.trained.choose_device", lambda _, chosen=chosen: chosen)
        fed = rebuilt(tmp_path, "last").federation
        network = fed.clients[0].model(fed.server.download(0)).eval()
        network.samples = 0  # of FedSR and FedCiR: z's mean, as a GPU draws other numbers
        x, _ = fed.clients[0].data.train.batch(torch.arange(16))
        torch.manual_seed(0)
        with torch.no_grad():
            outputs = network.features(x) if issubclass(MODULES[method].Args, LinearArgs) else network(x)
        logits[device] = outputs.float().cpu()
    assert torch.allclose(logits[DEVICE], logits["cpu"], rtol=LOGITS, atol=LOGITS)
