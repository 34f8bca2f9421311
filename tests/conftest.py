"""Helpers of the tests: runs in this process or in one of their own."""

import contextlib
import functools
import gc
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import common
import fdse
import fedadg
import fedavg
import fedcir
import fedgala
import fedsr
import official.fdse
import official.fedadg
import official.fedgala
import official.fedsr
from baselines import (centralized, ditto, fedbn, feddg_ga, feddyn, fedema, fedfa, fedgen, fedheal, fedopt,
                       fedproc, fedprox, lgfedavg, local, moon, partialfed, scaffold)
from plumbing.data.decoding import as_rgb, upright
from plumbing.run import provenance, runfolder, trained
from plumbing.run.runfolder import Run
from reproduce import runner
from tests.finished_runs import once
from tests.small_table import recorded

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "results" / "runs.jsonl"  # the records of all runs

# A shell's background jobs ignore it, and so would what the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Networks this small gain nothing from a second thread, and lose much where another process has the core.
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """A run starts with a collection of garbage, which need not go through all modules each time."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries report what is left as leaks


# What a new method adds here: all tests of all methods read this list.

LINEAR = "--target d0 --linear-epochs 20"  # without labels: one run, and a short one
LODO = "--protocol lodo --target d30"
USUAL = "--rounds 6 --lr 0.03"
# Weak crops of small images: SimCLR's own crops leave too little of a digit to learn from in a few rounds.
VIEWS = "--target d0 --image-size 16 --crop 16 --augment jigen --label-ratio 0.1 --linear-epochs 1000"


@dataclass(frozen=True)
class Tested:
    """A method, and what the tests must know of it.

    Over seeds 0 to 2 the accuracy was at least 9 points higher than `floor`, where chance is 10%. The loss
    was at least 8% lower than `left`. Without labels the loss is what shows learning, because a
    linear classifier on an untrained network reaches 70 to 77%. The accuracy shows that z is no single point.
    """

    module: ModuleType
    keeping: str  # flags with which it keeps all that it can between rounds
    learns: str  # flags with which it learns the digits in a few rounds
    floor: int  # the accuracy (%) that its last round must reach
    left: float  # how much of the first round's loss may be left
    recurring: float  # share of fedavg.py's lines that recur, from `class Client` on


LISTED = [
    Tested(fedavg, "", USUAL, 65, 0.5, 1.0),
    Tested(fdse, LODO, "--rounds 7 --image-size 8", 75, 0.35, 0.55),
    Tested(fedsr, "--reference local --momentum 0.9", "--rounds 7 --lr 0.03", 50, 0.75, 0.55),
    Tested(fedcir, "--generator-optimizer adam", "--rounds 6 --lr-decay 0.85", 60, 0.55, 0.6),
    Tested(fedadg, f"--keep-momentum --momentum 0.9 {LODO}", "--rounds 4 --lr 0.03", 60, 0.75, 0.48),
    Tested(fedgala, f"{LINEAR} --ssl moco --linear-views augmented",
           f"--rounds 5 --temperature 0.2 {VIEWS}", 50, 0.72, 0.65),
    Tested(local, LODO, USUAL, 70, 0.3, 0.6),
    Tested(centralized, "--momentum 0.9", "--rounds 3", 60, 0.3, 0.6),
    Tested(fedprox, f"--mu 0.5 --momentum 0.9 {LODO}", USUAL, 65, 0.5, 0.9),
    Tested(fedbn, LODO, USUAL, 60, 0.5, 0.75),
    Tested(ditto, "--lambda 0.5 --momentum 0.9", USUAL, 60, 0.5, 0.75),
    Tested(fedfa, f"--prob 0.7 --participation 0.5 {LODO}", USUAL, 60, 0.5, 0.9),
    Tested(fedheal, f"--participation 0.5 {LODO}", USUAL, 65, 0.5, 0.75),
    Tested(fedema, f"{LINEAR} --optimizer adam", f"--rounds 4 {VIEWS}", 55, 0.55, 0.7),
    Tested(partialfed, "--strategy adaptive", USUAL, 60, 0.5, 0.7),
    Tested(fedgen, "--participation 0.5 --lambda-decay 0.9", USUAL, 40, 0.75, 0.7),
    Tested(feddyn, "--participation 0.5", USUAL, 60, 0.6, 0.7),
    Tested(scaffold, "--participation 0.5", USUAL, 65, 0.5, 0.65),
    Tested(moon, "", USUAL, 65, 0.5, 0.75),
    Tested(lgfedavg, LODO, USUAL, 60, 0.5, 0.75),
    Tested(fedproc, f"--participation 0.5 {LODO}", USUAL, 60, 0.6, 0.75),
    Tested(fedopt, f"--participation 0.5 {LODO}", "--rounds 8 --lr 0.03", 65, 0.33, 0.8),
    Tested(feddg_ga, f"--participation 0.8 {LODO}", USUAL, 65, 0.5, 0.7),
]
TESTED = {method.module.__name__: method for method in LISTED}
MODULES = {name: method.module for name, method in TESTED.items()}
OFFICIAL = {
    "official.fdse": official.fdse,
    "official.fedsr": official.fedsr,
    "official.fedadg": official.fedadg,
    "official.fedgala": official.fedgala,
}
PROGRAMS = MODULES | OFFICIAL
METHODS = {name: (module, getattr(module, "build", common.backbone)) for name, module in MODULES.items()}


def quick_for(some, every) -> list:
    """All methods to go through; the quick suite has some of them alone."""
    return [name if name in some else pytest.param(name, marks=pytest.mark.slow) for name in every]


def one_run(method: str) -> list[str]:
    """The flags that make a method's default command one run, and a short one: without labels it would be
    one for each target, and half of it the linear classifier's."""
    if issubclass(PROGRAMS[method].Args, common.LinearArgs):
        return ["--target", "d0", "--linear-epochs", "20"]
    return []


def small_images(method: str) -> list[str]:
    """The size of the digits as they are; with BN and pooling the networks take them."""
    return ["--image-size", "8", *(["--crop", "8"] if one_run(method) else [])]


def script(method: str) -> list[str]:
    """What stands behind `python` to start a method."""
    if "." in method:
        return ["-m", method]
    return [f"{method}.py"]


def parsed(method: str, *flags) -> common.Args:
    """A method's arguments from a command line."""
    return PROGRAMS[method].arguments([str(flag) for flag in flags])


def run_all(method: str, args: common.Args) -> list[dict]:
    """The results of a method, one for each target."""
    module = PROGRAMS[method]
    build = getattr(module, "build", common.backbone)
    return common.run(module.Server, module.Client, args, build)


def run_here(method: str, out: Path, *flags, figures: bool = False) -> dict:
    """Run a method at smoke scale in this process, digits at 8x8; returns its result. Figures take as long as
    the rest."""
    drawn = [] if figures else ["--no-figures"]
    size = [] if "--dataset" in flags else small_images(method)
    args = parsed(method, "--scale", "smoke", "--precision", "fp32", "--out", out, *drawn, *size, *flags)
    with contextlib.redirect_stdout(io.StringIO()):
        return run_all(method, args)[-1]


def interrupted(method: str, monkeypatch, out: Path, *flags, after: int) -> None:
    """A run that is interrupted once the checkpoint of round `after` is written."""
    save = Run.save

    def stopping(progress, federation):
        save(progress, federation)
        if progress.t == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(Run, "save", stopping)
        run_here(method, out, *flags)
    assert stopped.value.code == 130


def start_here(monkeypatch, words: list[str]) -> None:
    """Run what stands behind `python` in this process."""
    named = words[0] == "-m"
    monkeypatch.setattr(sys, "argv", words[named:])
    if named:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


@pytest.fixture
def in_this_process(monkeypatch):
    """What reproduce/ starts is a program; here it is run in this process, which has loaded torch."""
    def run(_processes, words, *_, stdout=None, **__) -> int:
        try:
            with contextlib.redirect_stdout(stdout or io.StringIO()):
                start_here(monkeypatch, [word for word in words[1:] if word != "-P"])
        except SystemExit as end:
            return end.code or 0
        return 0
    monkeypatch.setattr(runner.Processes, "run", run)


def start(*words, path: Path | str = "", **how) -> subprocess.Popen:
    """Start `python <words>` in the repository's folder, one thread each, output captured; modules are also
    looked for in `path`."""
    command = [sys.executable, *map(str, words)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(path)}
    captured = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(command, cwd=ROOT, env=env, **captured, **how)


PROGRESS_BAR = r"(round|image)/s|s/(round|image)"


def fails(capsys, code: int, words: str, call: Callable, *args) -> None:
    """`call` ends the program with this exit code and one line on stderr that matches `words`."""
    with pytest.raises(SystemExit) as end:
        call(*args)
    lines = []
    for line in capsys.readouterr().err.strip().splitlines():
        if line and not re.search(PROGRESS_BAR, line):
            lines.append(line)
    assert end.value.code == code, lines
    assert len(lines) == 1 and re.search(words, lines[0]), lines


def stops(message: str, call: Callable, *args, code: int = 1, **how) -> None:
    """`call` ends with an error for the user: one line that matches `message`, and this exit code."""
    with pytest.raises(common.UserError, match=message) as stop:
        call(*args, **how)
    assert "\n" not in str(stop.value) and stop.value.code == code


def members_of(args) -> tuple[list, list]:
    """The data of the clients and of the targets."""
    return common.split(common.open_dataset(args), args)


def read_json(path: Path):
    return json.loads(path.read_text())


def saved_in(path: Path) -> dict:
    """What a file of torch holds."""
    return torch.load(path, weights_only=True)


def metrics(out: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return recorded(out / "metrics.jsonl")


def same_metrics(out: Path, other: Path) -> bool:
    """Whether two runs have the same metrics to the byte."""
    return (out / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()


def write_files(folder: Path, contents: dict[str, str | bytes]) -> None:
    """Put files of these names and contents into a folder; a name may have folders in it."""
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            content = content.encode()
        path.write_bytes(content)


def to_rgb(content: bytes, size: int) -> np.ndarray:
    """An encoded image of any mode as the cache has it, uint8 [size, size, 3]."""
    return as_rgb(upright(content)[0], size)


@pytest.fixture(scope="session", autouse=True)
def made_once():
    """What each run of a process makes again is made once: the turned digits, and of each script which files
    make its numbers."""
    of_size = functools.cache(common.load_digits)

    def digits(size: int) -> common.Dataset:
        return replace(of_size(size), domains=[replace(d) for d in of_size(size).domains])
    of_file = functools.cache(lambda file, changed: provenance.code(file))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "load_digits", digits)
        for module in (runfolder, trained):
            patch.setattr(module, "code", lambda file: deepcopy(of_file(file, file.stat().st_mtime_ns)))
        yield


@pytest.fixture
def four_domains(monkeypatch):
    """The digits without d60 and d75: a run takes less time."""
    whole = common.load_digits

    def digits(size: int) -> common.Dataset:
        return replace(whole(size), domains=whole(size).domains[:4])
    monkeypatch.setattr(common, "load_digits", digits)


def pytest_addoption(parser) -> None:
    parser.addoption("--bf16", action="store_true", help="runs without --precision train in bf16, as on a "
                                                         "processor with its instructions; else in fp32")


@pytest.fixture(scope="session", autouse=True)
def precision(pytestconfig):
    """The precision of runs without --precision: whatever the machine has."""
    has_bf16 = pytestconfig.getoption("--bf16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
        yield


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("markdown_it", reason="needs `pip install -r requirements-docs.txt`")
    from docs import methods_pages
    return once(tmp_path_factory, "site", methods_pages.build)


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = shutil.which("chromium") or shutil.which("google-chrome")  # None: playwright's own
    with playwright.sync_playwright() as runner:
        try:
            started = runner.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        except playwright.Error:
            pytest.skip("there is no Chromium or Chrome on this machine")
        yield started
        started.close()
