"""What several tests look at, made once for all of them: finished runs at smoke scale, the pages of docs/."""

import os
from collections.abc import Callable
from pathlib import Path

from plumbing.run.files import locked


def once(tmp_path_factory, name: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` fills, for the tests of all processes. (The groups of pytest-xdist 3.8 do not
    keep tests in one process with pytest 9.)"""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    with locked(base / f"{name}.lock"):
        if not (base / f"{name}.made").exists():
            make(base / name)
            (base / f"{name}.made").touch()
    return base / name


def labelled_runs(tmp_path_factory) -> Path:
    """Runs of FedAvg and FDSE, a folder for each method and protocol: fedavg-indomain, fdse-lodo, ..."""
    from tests.conftest import run_here

    def make(place: Path) -> None:
        for method in ("fedavg", "fdse"):
            for name, *flags in (("indomain",), ("lodo", "--protocol", "lodo", "--target", "d0")):
                run_here(method, place / f"{method}-{name}", "--image-size", 28, *flags)
    return once(tmp_path_factory, "labelled_runs", make)
