"""Where a number comes from: commit, versions, hardware, memory."""

from __future__ import annotations

import contextlib
import platform
import resource
import subprocess
from importlib import metadata
from pathlib import Path

from plumbing.processes import process

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent


def provenance(args) -> dict:
    """Commit, versions and hardware of this process, as result.json has them."""
    changes = git("status", "--porcelain", "--", "*.py")
    gpu = args.device.startswith("cuda")
    hardware = {"cpu": cpu_name(), "threads": torch.get_num_threads(), "processes": process()[1],
                "gpu": None, "gpu_peak_memory_mib": None}
    if gpu:
        hardware["gpu"] = torch.cuda.get_device_name(args.device)
        hardware["gpu_peak_memory_mib"] = torch.cuda.max_memory_allocated(args.device) >> 20
    versions = {"python": platform.python_version(), "torch": torch.__version__,
                "torchvision": metadata.version("torchvision"), "numpy": np.__version__}
    uncommitted = None if changes is None else bool(changes)
    return {"commit": git("rev-parse", "HEAD"), "uncommitted_changes": uncommitted, "versions": versions,
            "hardware": hardware}


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
