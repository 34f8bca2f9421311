"""Recorded steps, on a CPU: a tape of operators stands for the CUDA graph (tests/tape.py)."""

import dataclasses
import gc
import weakref
from unittest.mock import MagicMock

import common
import fdse
from common import UserError, captured
from plumbing import capture
from tests.conftest import interrupted, metrics, parsed, run_here
from tests.tape import taped
from tests.methods.test_every_method import same_metrics

import pytest
import torch
from torch import nn

FLAGS = ["--image-size", 8, "--limit", 31, "--rounds", 2, "--batch-size", 11, "--momentum", 0.9,
         "--clip", 0.5, "--lr-decay", 0.5, "--checkpoint-every", 0]  # batches of 11, 11 and 3 images
METHODS = ["fedavg", "fdse", "official.fdse"]


@pytest.mark.parametrize("method", METHODS)
def test_replayed_rounds_have_the_same_bytes(tmp_path, monkeypatch, method):
    """Before and after an interruption: each part has its own recordings."""
    run_here(method, tmp_path / "plain", *FLAGS)
    counts = taped(monkeypatch)
    interrupted(method, monkeypatch, tmp_path / "replayed", *FLAGS, after=1)
    run_here(method, tmp_path / "replayed", *FLAGS)
    assert same_metrics(tmp_path / "plain", tmp_path / "replayed")
    steps = 3 * len(metrics(tmp_path / "plain")[0]["clients"]) * 2
    kinds = {"fedavg": 2}.get(method, 5)  # of fdse the first batch too, before and in the rounds with L_Con
    assert len(counts) <= 2 * kinds and sum(counts) >= steps - 4 * kinds


def test_auto_records_this_repositorys_files():
    args = dataclasses.replace(parsed("fedavg"), device="cuda:0")
    assert capture.is_recorded(args, fdse.__file__)
    assert not capture.is_recorded(args, "/elsewhere/fdse.py")
    assert not capture.is_recorded(dataclasses.replace(args, deterministic=True), fdse.__file__)
    assert not capture.is_recorded(dataclasses.replace(args, capture="off"), fdse.__file__)
    assert capture.is_recorded(dataclasses.replace(args, capture="on"), "/elsewhere/fdse.py")


class Small:
    """A network and a step of it."""

    def __init__(self, monkeypatch):
        self.counts = taped(monkeypatch)
        torch.manual_seed(0)
        self.args = parsed("fedavg", "--momentum", 0.9, "--device", "cpu")
        self.net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.opt = common.sgd(self.net, self.args, 0)
        self.x = torch.randn(5, 3)

    def step(self, factor=1.0):
        net, opt = self.net, self.opt

        @captured(self.args, net, opt)
        def step(x):
            loss = factor * net(x).square().sum()
            opt.zero_grad()
            loss.backward()
            opt.step()
            return loss.detach()
        return step

    def steps(self, factor=1.0) -> list:
        """The losses of five steps."""
        return [self.step(factor)(self.x) for _ in range(5)]


def moved(small: Small) -> None:
    """The first weights lie elsewhere."""
    small.net[0].weight.data = small.net[0].weight.data.clone()


def without_momentum(small: Small) -> None:
    small.opt = common.sgd(small.net, parsed("fedavg"), 0)


@pytest.mark.parametrize("change, factor, words", [
    (lambda small: None, 3.0, "reads factor, which has changed since: .* --capture off"),
    (lambda small: small.net.eval(), 1.0, "reads net, which has changed since"),
    (moved, 1.0, "reads net, which has changed since"),
    (without_momentum, 1.0, "an optimizer of other parameters or values"),
])
def test_what_has_changed_stops_the_run(monkeypatch, change, factor, words):
    small = Small(monkeypatch)
    small.steps()
    change(small)
    with pytest.raises(UserError, match=words):
        small.step(factor)(small.x)


@pytest.mark.parametrize("read", [torch.ones(1), object(), lambda read: read])
def test_what_could_change_unseen_is_refused(monkeypatch, read):
    small = Small(monkeypatch)
    inner = read
    if callable(read):
        def inner():
            return read
    with pytest.raises(UserError, match="step reads inner, a (Tensor|object|function): .*--capture off"):
        captured(small.args, small.net, small.opt)(lambda x: inner)(small.x)
    with pytest.raises(UserError, match="takes tensors and bools; found a float: make it a tensor"):
        small.step()(0.5)


def test_the_state_of_the_optimizer_lies_where_it_was(monkeypatch):
    """What was kept is copied into the tensors of the first optimizer, which are the new one's."""
    small = Small(monkeypatch)
    small.steps()
    kept = common.optimizer_state(small.net, small.opt)
    buffers = {name: small.opt.state[p]["momentum_buffer"] for name, p in small.net.named_parameters()}
    small.steps()
    small.opt = common.sgd(small.net, small.args, 0, kept)
    small.step()
    for name, p in small.net.named_parameters():
        assert small.opt.state[p]["momentum_buffer"] is buffers[name]
        assert buffers[name].equal(kept[name]["momentum_buffer"])


def test_recordings_go_with_the_network(monkeypatch):
    small = Small(monkeypatch)
    small.steps()
    network = weakref.ref(small.net)
    assert small.net in capture.RECORDED
    del small
    gc.collect()
    assert network() is None


@pytest.fixture
def cuda(monkeypatch) -> MagicMock:
    """What is asked of a GPU."""
    asked = MagicMock()
    monkeypatch.setattr(capture, "side_stream", asked.side)
    for name in ("current_stream", "stream", "graph_pool_handle", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, getattr(asked, name))
    return asked


@pytest.mark.parametrize("where", ["CUDAGraph.return_value.capture_begin", "step",
                                   "CUDAGraph.return_value.capture_end"])
def test_a_fault_of_a_gpu_is_one_line(cuda, where):
    cuda.configure_mock(**{f"{where}.side_effect": RuntimeError("CUDA error: not permitted\nat line 7")})
    with pytest.raises(UserError, match=r"on this GPU \(CUDA error: not permitted\): add --capture off"):
        capture.Recordings("cuda:0").record(cuda.step)
