"""Devices: which one a run takes, and how a GPU is prepared. There need not be one: others stand for it."""

import dataclasses
import os

from plumbing.run import devices
from plumbing.run.settings import identity
from tests.conftest import parsed, start, stops

import pytest
import torch


@pytest.fixture
def two_gpus(monkeypatch) -> list[str]:
    """As if there were two GPUs, which nothing may touch; what is set current."""
    current = []
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize("asked, found", [
    ("auto", "cuda:0"),
    ("cuda", "cuda:0"),
    ("cuda:1", "cuda:1"),
    ("cuda:01", "cuda:1"),
    ("cpu", "cpu"),
])
def test_the_device_of_a_run(two_gpus, asked, found):
    """It is chosen without opening a GPU: here each allocation on one would fail."""
    assert devices.choose_device(asked) == found and two_gpus == []
    of_run = dataclasses.replace(parsed("fedavg", "--device", "cpu"), device=found)
    assert identity(of_run)["device"] == found.split(":")[0]  # the number of a GPU makes no other run


def test_a_gpu_that_is_not_there(two_gpus):
    stops("--device cuda:2 .*PyTorch finds 2 GPUs", devices.choose_device, "cuda:2", code=2)


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.choose_device("auto") == "cpu"
    stops("--device cuda cannot be used here: PyTorch finds 0 GPUs", devices.choose_device, "cuda", code=2)


@pytest.fixture
def backends(monkeypatch):
    """Settings of torch that a test changes, put back behind it."""
    for name in ("benchmark", "deterministic"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    fill = torch.utils.deterministic.fill_uninitialized_memory
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.set_deterministic_debug_mode("default")
    torch.utils.deterministic.fill_uninitialized_memory = fill
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.parametrize("deterministic", [False, True])
def test_how_a_gpu_is_opened(two_gpus, backends, monkeypatch, deterministic):
    """cuDNN does not time its algorithms; a run may be deterministic."""
    on_cpu = parsed("fedavg", "--device", "cpu")
    monkeypatch.setattr(devices.torch, "empty", lambda count, device: two_gpus.append(f"opened {device}"))
    args = dataclasses.replace(on_cpu, device="cuda:1", deterministic=deterministic)
    devices.prepare(args)
    assert two_gpus == ["cuda:1", "opened cuda:1"]
    assert not torch.backends.cudnn.benchmark
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert torch.is_deterministic_algorithms_warn_only_enabled() is deterministic
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)


def test_a_gpu_that_cannot_be_opened_is_one_line(two_gpus, backends, monkeypatch):
    def busy(count, device):
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nat line 7")
    args = dataclasses.replace(parsed("fedavg", "--device", "cpu"), device="cuda:0")
    monkeypatch.setattr(devices.torch, "empty", busy)
    words = "^--device cuda:0 cannot be used here: CUDA error: all .* are busy$"
    stops(words, devices.prepare, args, code=2)


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}])
def test_threads_do_not_wait_by_spinning(monkeypatch, given):
    """It is set before torch, and so OpenMP, is loaded; a value of the user's stays."""
    program = ("import os, sys; before = 'torch' in sys.modules; import plumbing; "
               "print(before or 'torch' in sys.modules, os.environ['GOMP_SPINCOUNT'])")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    said, _ = start("-c", program).communicate()
    assert said.split() == ["False", given.get("GOMP_SPINCOUNT", "10000")]
