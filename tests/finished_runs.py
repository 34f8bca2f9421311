"""Finished runs for the tests of reproduce/measures, at smoke scale."""

import shutil
from pathlib import Path

from tests.conftest import run_here


def labelled_runs(tmp_path_factory) -> Path:
    """Runs of FedAvg and FDSE, a folder for each method and protocol: fedavg-indomain, fdse-lodo, ... They
    are made once for all tests."""
    place = tmp_path_factory.getbasetemp() / "labelled_runs"
    if place.exists():
        return place
    for method in ("fedavg", "fdse"):
        run_here(method, place / f"{method}-indomain")
        run_here(method, place / f"{method}-lodo", "--protocol", "lodo", "--target", "d0")
    return place


def unlabelled_runs(tmp_path_factory) -> Path:
    """Runs of FedGaLA: paper, and descent, where its alignments have the other sign. They are made once for
    all tests."""
    place = tmp_path_factory.getbasetemp() / "unlabelled_runs"
    if place.exists():
        return place
    for name, flags in (("paper", ()), ("descent", ("--alignment-sign", "descent"))):
        run_here("fedgala", place / name, "--target", "d0", "--rounds", "3", *flags)
    return place


def changed_copy(run: Path, folder: Path, file: str, content: bytes | None) -> Path:
    """A copy of a run's folder in which one file has another content, or (None) is gone."""
    shutil.copytree(run, folder)
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    return folder
