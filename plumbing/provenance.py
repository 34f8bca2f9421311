"""Where a number comes from: code, versions, hardware, memory."""

from __future__ import annotations

import contextlib
import platform
import resource
import subprocess
from importlib import metadata
from pathlib import Path

from plumbing.processes import process
from plumbing.sources import ROOT, files_of, hash_of, method_file

import numpy as np
import torch


def code(args) -> dict:
    """The code of this process: the hash of the sources that decide the method's numbers, the commit, and
    whether one of these sources differs from it (None if that cannot be known)."""
    file = method_file(args)
    changes = git("status", "--porcelain", "--", *map(str, files_of(file)))
    uncommitted = None if changes is None else bool(changes)
    return {"sources": hash_of(file), "commit": git("rev-parse", "HEAD"), "uncommitted_changes": uncommitted}


def provenance(args) -> dict:
    """Code, versions and hardware of this process, as result.json has them."""
    gpu = args.device.startswith("cuda")
    hardware = {"cpu": cpu_name(), "threads": torch.get_num_threads(), "processes": process()[1],
                "gpu": None, "gpu_peak_memory_mib": None}
    if gpu:
        hardware["gpu"] = torch.cuda.get_device_name(args.device)
        hardware["gpu_peak_memory_mib"] = torch.cuda.max_memory_allocated(args.device) >> 20
    versions = {"python": platform.python_version(), "torch": torch.__version__,
                "torchvision": metadata.version("torchvision"), "numpy": np.__version__}
    return {**code(args), "versions": versions, "hardware": hardware}


def git(*words: str) -> str | None:
    """What git says of this repository; None without git or repository."""
    with contextlib.suppress(OSError):  # no git on this machine
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None


def cpu_name() -> str:
    """The processor's name, by Linux if it says it."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    for line in info.read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return ""


def peak_memory() -> int:
    """MiB of the largest resident size of this process (the mapped pixels that were read count), GPU memory
    apart."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
