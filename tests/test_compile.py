"""--compile: kernels made of the backbone compute what it does, in other last digits."""

import dataclasses

from plumbing.runfolder import folder_of
from plumbing.settings import identity
from tests.conftest import metrics, parsed, run_here, start

import pytest


def test_a_run_from_before_the_flag_is_the_same_run():
    args = parsed("fedavg")
    compiled = dataclasses.replace(args, compile="default")
    assert "compile" not in identity(args)
    assert identity(compiled) == identity(args) | {"compile": "default"}
    assert folder_of(compiled) != folder_of(args)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fdse", "fedsr", "baselines.moon"])
def test_the_same_losses(tmp_path, method):
    """In float32, of the first round: a last digit grows from step to step, as with other threads."""
    run_here(method, tmp_path / "eager", "--rounds", 1)
    run_here(method, tmp_path / "compiled", "--rounds", 1, "--compile", "default")
    (eager,), (compiled,) = metrics(tmp_path / "eager"), metrics(tmp_path / "compiled")
    for name, client in eager["clients"].items():
        assert compiled["clients"][name]["loss"] == pytest.approx(client["loss"], rel=1e-3)


@pytest.mark.slow
def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    run = start("fedavg.py", "--scale", "smoke", "--compile", "default", "--out", tmp_path / "run")
    _, err = run.communicate()
    assert run.returncode == 1 and "Traceback" not in err
    assert "torch.compile cannot compile the network" in err and "run it without --compile" in err
