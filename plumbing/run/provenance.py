"""Where a number comes from: code, versions, hardware, memory."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
import platform
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
# The folders of this package: where pip has installed it, other libraries lie beside it.
FOLDERS = ("plumbing", "reproduce", "baselines", "official", "deploy")


def code(method_file: Path) -> dict:
    """The code of this process: commit, whether one of the files that make the numbers differs from it (None
    without git), and one sha256 over these files."""
    files, digest = files_of(method_file), hashlib.sha256()
    for file in files:
        digest.update(content_of(file))
    changes = git("status", "--porcelain", "--", *map(str, files))
    dirty = None if changes is None else bool(changes)
    return {"commit": git("rev-parse", "HEAD") or "unknown", "dirty": dirty, "sha256": digest.hexdigest()}


def files_of(method_file: Path) -> list[Path]:
    """The files that make a run's numbers: common.py, plumbing/, the method's file, and what that, or what it
    imports, imports of this package or of its own folder."""
    plumbing = ROOT / "plumbing"
    files = {ROOT / "common.py", method_file, *plumbing.rglob("*.py"), *plumbing.rglob("*.csv")}
    at_root = method_file.parent == ROOT
    installed = not (ROOT / "pyproject.toml").exists()  # then other libraries lie beside it
    to_read = [method_file]
    while to_read:
        file = to_read.pop()
        for module in imported_by(file):
            path = Path(module.replace(".", "/") + ".py")
            ours = "." not in module or module.split(".")[0] in FOLDERS
            for folder in (ROOT, method_file.parent, file.parent):
                counts = ours or (not installed if at_root else folder != ROOT)
                if counts and (folder / path).is_file() and folder / path not in files:
                    files.add(folder / path)
                    to_read.append(folder / path)
    return sorted(files)


def imported_by(file: Path) -> list[str]:
    """The modules that a file imports, by their dotted names."""
    modules = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = node.module or ""
            modules += [package, *(f"{package}.{alias.name}" for alias in node.names)]
    return modules


def content_of(file: Path) -> bytes:
    """What counts of a file: its code without comments, docstrings and formatting; of a table its bytes."""
    content = file.read_bytes()
    return without_words(content) if file.suffix == ".py" else content


@functools.cache
def without_words(source: bytes) -> bytes:
    """Python's syntax tree without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.unparse(tree).encode()


def hardware(args) -> dict:
    """Versions and hardware of this process, as result.json has them."""
    gpu = args.device.startswith("cuda")
    machine = {"cpu": cpu_name(), "instructions": torch.backends.cpu.get_cpu_capability(),
               "threads": torch.get_num_threads(), "gpu": None,
               "gpu_peak_memory_mib": None}
    if gpu:
        machine["gpu"] = torch.cuda.get_device_name(args.device)
        machine["gpu_peak_memory_mib"] = torch.cuda.max_memory_allocated(args.device) >> 20
        machine["deterministic"] = args.deterministic
    versions = {"python": platform.python_version(), "torch": torch.__version__,
                "torchvision": metadata.version("torchvision"), "numpy": np.__version__}
    return {"versions": versions, "hardware": machine}


def git(*words: str) -> str | None:
    """What git says of this repository; None without git or repository, as where pip has installed it. It
    takes no lock: a commit that is made meanwhile would fail. GIT_DIR would name another repository."""
    if not (ROOT / ".git").exists():  # a repository around this folder is another one
        return None
    with contextlib.suppress(OSError):  # no git on this machine
        command = ["git", "--no-optional-locks", "-C", str(ROOT), *words]
        elsewhere = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        done = subprocess.run(command, capture_output=True, encoding="utf-8", env=elsewhere)
        return done.stdout.strip() if done.returncode == 0 else None


def version_line() -> str:
    """CleanFDG 0.2.0 (commit 1a2b3c4d5e6f, with changes), torch 2.6.0, Python 3.11.2. The version is that of
    pyproject.toml, or the installed one; the commit that of a git checkout."""
    if (ROOT / "pyproject.toml").exists():
        version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    else:
        version = metadata.version("cleanfdg")
    commit = ""
    if git("rev-parse", "HEAD"):
        changed = ", with changes" if git("status", "--porcelain") else ""
        commit = f" (commit {git('rev-parse', '--short=12', 'HEAD')}{changed})"
    return f"CleanFDG {version}{commit}, torch {torch.__version__}, Python {platform.python_version()}"


def cpu_name() -> str:
    """The processor's name, by Linux if it says it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor()
