"""--tensorboard: what a run logs as scalars for TensorBoard, in the folder `tensorboard` of the run's own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from pathlib import Path

from plumbing.errors import Stop

EVENTS = "events.out.tfevents."  # how the names of its files begin


def refuse_without_tensorboard() -> None:
    """Stop if the package is not installed; without the flag nobody needs it."""
    if importlib.util.find_spec("tensorboard") is None:
        raise Stop("--tensorboard needs a package that is not installed: pip install tensorboard", 2)


def events_in(folder: Path) -> list[Path]:
    """The files of scalars in a run's folder."""
    return sorted((folder / "tensorboard").glob(f"{EVENTS}*"))


class Scalars:
    """Writes the scalars of a run, round by round; `history` has the lines of metrics of the rounds that are
    done. A run that goes on adds to what there is: rounds that an earlier process had written beyond these
    are marked as void; if there is nothing yet, the rounds that are done are written first."""

    def __init__(self, folder: Path, history: list[dict]):
        from torch.utils.tensorboard import SummaryWriter
        some = events_in(folder)
        self.writer = SummaryWriter(folder / "tensorboard", purge_step=len(history) + 1 if some else None)
        if not some:
            seconds = seconds_of(folder / "timing.jsonl")
            for entry in history:
                self.add(entry, seconds.get(entry["round"], {}))

    def add(self, entry: dict, seconds: dict[str, float]) -> None:
        """The scalars of a round, from its line of metrics and the seconds so far; they reach the disk at
        once."""
        for tag, value in scalars_of(entry).items():
            self.writer.add_scalar(tag, value, entry["round"])
        for part, value in seconds.items():
            self.writer.add_scalar(f"seconds/{part}", value, entry["round"])
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def scalars_of(entry: dict) -> dict[str, float]:
    """{tag: value} of a round: accuracies in [0, 1], what each client logs, bytes over all clients."""
    found = {"lr": entry["lr"]} if "lr" in entry else {}
    sums = {"bytes_up": 0, "bytes_down": 0}
    for client, log in entry["clients"].items():
        for name, value in log.items():
            if name in sums:
                sums[name] += value
            else:
                found[f"{name}/{client}"] = value
    for name, value in sums.items():
        found[name.replace("_", "/")] = value
    for part, label in (("val", "validation"), ("test", "test")):
        if part in entry:
            found[f"{label}/ALL"], found[f"{label}/AVG"] = entry[part]["ALL"], entry[part]["AVG"]
            for client, value in entry[part]["clients"].items():
                found[f"{label} of clients/{client}"] = value
    if "target" in entry:
        found["test/target"] = entry["target"]
    for target, accuracies in entry.get("linear", {}).items():
        for ratio, value in accuracies.items():
            found[f"linear/{target}, {100 * float(ratio):g}% of the labels"] = value
    return found


def seconds_of(path: Path) -> dict[int, dict[str, float]]:
    """Of each round in timing.jsonl the seconds so far."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a write that was killed
                times = json.loads(line)
                found[times["round"]] = times["seconds"]
    return found
