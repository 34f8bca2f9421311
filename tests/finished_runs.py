"""What several tests look at, made once for all of them: finished runs at smoke scale, the pages of docs/."""

import os
from collections.abc import Callable
from pathlib import Path

from plumbing.run.files import locked

AS_BY_DEFAULT = ("--image-size", "28")


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
            run_here(method, place / f"{method}-indomain", *AS_BY_DEFAULT)
            run_here(method, place / f"{method}-lodo", *AS_BY_DEFAULT, "--protocol", "lodo", "--target", "d0")
    return once(tmp_path_factory, "labelled_runs", make)


def unlabelled_runs(tmp_path_factory) -> Path:
    """A run of FedGaLA: paper."""
    from tests.conftest import run_here
    flags = [*AS_BY_DEFAULT, "--crop", "28", "--target", "d0", "--rounds", "3"]
    return once(tmp_path_factory, "unlabelled_runs",
                lambda place: run_here("fedgala", place / "paper", *flags))
