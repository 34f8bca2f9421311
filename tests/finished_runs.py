"""Finished runs for the tests of reproduce/measures: real ones at smoke scale, and records written by
hand."""

import json
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


def written_run(folder: Path, accuracies: list, **args) -> Path:
    """A hand-written record of a FedAvg run of clients a and b, of which b misses round 2.

    `accuracies` has AVG of each round, None where nothing was evaluated; ALL is half of it. Bytes are 3 up
    and 7 down.
    """
    folder.mkdir()
    lines = []
    for t, avg in enumerate(accuracies):
        clients = {"a": {"bytes_up": 3, "bytes_down": 7, "loss": t}}
        if t != 1:
            clients["b"] = {"bytes_up": 3, "bytes_down": 7, "loss": t + 1}
        entry = {"round": t + 1, "clients": clients}
        if avg is not None:
            entry |= {"val": {}, "test": {"AVG": avg, "ALL": avg / 2}}
        lines.append(json.dumps(entry) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    key = {"method": "fedavg", "dataset": "digits", "batch_size": 4, "device": "cpu", "precision": "fp32"}
    result = {"method": "fedavg", "args": key | args, "best": {"round": 1},
              "last": {"round": len(accuracies)}, "peak_memory_mib": 12,
              "hardware": {"gpu_peak_memory_mib": None}}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def changed_copy(run: Path, folder: Path, file: str, content: bytes | None) -> Path:
    """A copy of a run's folder in which one file has another content, or (None) is gone."""
    shutil.copytree(run, folder)
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    return folder
