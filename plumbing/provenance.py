"""Where a number comes from: code, versions, hardware, memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import resource
import subprocess
from importlib import metadata
from pathlib import Path

from plumbing.errors import RUNS_ON_GPU
from plumbing.processes import process
from plumbing.sources import ROOT, data_files, files_of, hash_of, method_file

import numpy as np
import torch


def code(args) -> dict:
    """The code of this process: the hash of the sources that decide the method's numbers, the commit, and
    whether one of these sources differs from it (None if that cannot be known)."""
    file = method_file(args)
    changes = git("status", "--porcelain", "--", *map(str, files_of(file) + data_files()))
    uncommitted = None if changes is None else bool(changes)
    return {"sources": hash_of(file), "commit": git("rev-parse", "HEAD"), "uncommitted_changes": uncommitted}


def start(args) -> dict:
    """What a run notes each time that it is started: its code, what else its bytes depend on, and how busy
    the machine is."""
    return {**code(args), "threads": torch.get_num_threads(), "precision": args.precision, "load": load(),
            **on_gpu(args)}


def on_gpu(args) -> dict:
    """What the numbers and times of a run on a GPU depend on beside the GPU; nothing on a CPU."""
    if not args.device.startswith("cuda"):
        return {}
    shared = os.environ.get(RUNS_ON_GPU, "")
    runs = int(shared) if shared.isascii() and shared.isdigit() else 1
    return {"runs_on_gpu": runs, "deterministic": args.deterministic}


def provenance(args) -> dict:
    """Code, versions and hardware of this process, as result.json has them."""
    gpu = args.device.startswith("cuda")
    hardware = {"cpu": cpu_name(), "threads": torch.get_num_threads(), "processes": process()[1],
                "load": load(), "gpu": None, "gpu_peak_memory_mib": None}
    if gpu:
        hardware["gpu"] = torch.cuda.get_device_name(args.device)
        hardware["gpu_peak_memory_mib"] = torch.cuda.max_memory_allocated(args.device) >> 20
        hardware |= on_gpu(args)
    versions = {"python": platform.python_version(), "torch": torch.__version__,
                "torchvision": metadata.version("torchvision"), "numpy": np.__version__}
    return {**code(args), "versions": versions, "hardware": hardware}


def git(*words: str) -> str | None:
    """What git says of this repository; None without git or repository. It takes no lock: a commit that is
    made meanwhile would fail."""
    with contextlib.suppress(OSError):  # no git on this machine
        command = ["git", "--no-optional-locks", "-C", str(ROOT), *words]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None


def version_line() -> str:
    """CleanFDG 0.1.0 (commit 1a2b3c4d5e6f, with changes), torch 2.6.0, Python 3.11.2. The version is that of
    CITATION.cff, the commit that of a git checkout."""
    ours = "CleanFDG"
    for line in (ROOT / "CITATION.cff").read_text().splitlines():
        if line.startswith("version: "):
            ours += " " + line.partition(": ")[2].strip("\"'")
    commit = git("rev-parse", "--short=12", "HEAD")
    if commit and Path(git("rev-parse", "--show-toplevel")) == ROOT:  # not of a repository around this folder
        changed = ", with changes" if git("status", "--porcelain") else ""
        ours += f" (commit {commit}{changed})"
    return f"{ours}, torch {torch.__version__}, Python {platform.python_version()}"


def cpu_name() -> str:
    """The processor's name, by Linux if it says it."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    for line in info.read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return ""


def load() -> float | None:
    """How many processes wanted a core in the last minute, on average; None where the system does not say."""
    with contextlib.suppress(OSError, AttributeError):
        return round(os.getloadavg()[0], 2)


def forget_peak_memory(args) -> None:
    """Let the peaks of memory count from here on: each run of a process has its own. What earlier runs have
    left is given back. Where the system is not Linux the peak stays that of the process."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    if args.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(args.device)


def peak_memory() -> int:
    """MiB of the largest resident size of this process since forget_peak_memory (the mapped pixels that were
    read count), GPU memory apart."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) // 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
