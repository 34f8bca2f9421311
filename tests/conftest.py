"""Helpers of the tests: small data that the tests make, and runs in this process or in one of their own."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402
import domains  # noqa: E402
import fdse  # noqa: E402
import fedadg  # noqa: E402
import fedavg  # noqa: E402
import fedcir  # noqa: E402
import fedgala  # noqa: E402
import fedsr  # noqa: E402
from baselines import fedema  # noqa: E402

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would what the tests start

METHODS = {name: (module, getattr(module, "build", common.backbone)) for name, module in (
    ("fedavg", fedavg), ("fdse", fdse), ("fedsr", fedsr), ("fedcir", fedcir), ("fedadg", fedadg), ("fedgala", fedgala),
    ("baselines.fedema", fedema))}


def one_run(method: str) -> list[str]:
    """The flags with which a method's default command is one run: without labels it would be one for each target."""
    return ["--target", "d0"] if issubclass(METHODS[method][0].Args, common.LinearArgs) else []


def script(method: str) -> list[str]:
    """What stands behind `python` to start a method."""
    return ["-m", method] if "." in method else [f"{method}.py"]


def parsed(method: str, *flags: str):
    return METHODS[method][0].arguments([str(f) for f in flags])


def run_here(method: str, out: Path, *flags) -> dict:
    """Run a method at smoke scale in this process; returns its result."""
    module, build = METHODS[method]
    args = parsed(method, "--scale", "smoke", "--precision", "fp32", "--out", out, *flags)
    with contextlib.redirect_stdout(io.StringIO()):
        return common.run(module.Server, module.Client, args, build)[-1]


def interrupted(method: str, monkeypatch, out: Path, *flags, after: int) -> None:
    """A run that is interrupted once the checkpoint of round `after` is written."""
    checkpoint = common.Loop.checkpoint

    def stopping(loop, entry):
        checkpoint(loop, entry)
        if loop.t == after:
            raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(common.Loop, "checkpoint", stopping)
        run_here(method, out, *flags)
    assert stopped.value.code == 130


def start(*words, **kw) -> subprocess.Popen:
    """Start `python <words>` in the repository's folder, one thread each, output captured."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **kw)


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def office(tmp_path, monkeypatch):
    """A tiny Office-Caltech10 in the official layout: (folder, its expected counts in place of the real ones)."""
    source = domains.FOLDERS["officecaltech"]
    rng, folder = np.random.default_rng(0), tmp_path / "office"
    for domain, (name, _) in source.domains.items():
        for label, c in enumerate(source.classes):
            (folder / name / c).mkdir(parents=True)
            for i in range(2):
                pixels = rng.integers(0, 60, (20, 24, 3), dtype=np.uint8)
                pixels[2 * label:2 * label + 2] = 255
                Image.fromarray(pixels).save(folder / name / c / f"{i}.png")
    tiny = dataclasses.replace(source, domains={d: (f, 20) for d, (f, _) in source.domains.items()})
    monkeypatch.setitem(domains.FOLDERS, "officecaltech", tiny)
    return folder


def zipped(folder: Path, archive: Path, root: str = "Office_Caltech_DA_Dataset-main") -> Path:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive, "w") as z:
        for p in sorted(folder.rglob("*")):
            z.write(p, f"{root}/{p.relative_to(folder)}")
    return archive
