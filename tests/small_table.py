"""A small table and records of its runs, for the tests of reproduce/."""

import json
from pathlib import Path

from plumbing.settings import identity
from reproduce.methods import arguments

TABLE = """
title = "A small table"
paper = "fdse"
protocol = "in-domain, best validation round"
trials = 4
notes = ["A note."]

[[block]]
title = "Digits"
dataset = "digits"
columns = [
    {name = "ALL", value = "best/ALL"},
    {name = "AVG", value = "best/AVG"},
    {name = "Mean", value = "mean"},
]

[[block.row]]
method = "FedAvg"
module = "fedavg"
published = [[90.0, 2.0], [88.5], [89.25]]

[[block.row]]
method = "FDSE without C"
module = "fdse"
flags = "--lambda 0"
published = [[95.0, 1.0], [], []]

[[block.row]]
method = "Quoted"
quoted = true
published = [[50.0], [51.0], [50.5]]

[[block.row]]
method = "FedX"
module = "baselines.fedx"
published = [[60.0, 1.0], [61.0, 1.0], [60.5]]
"""

# Two tables that share a run; one of their three runs fails.
FDSE = """
title = "One"
paper = "fdse"
protocol = "p"
trials = 1

[[block]]
title = "Digits"
dataset = "digits"
columns = [{name = "ALL", value = "best/ALL"}]

[[block.row]]
method = "FedAvg"
module = "fedavg"
published = [[90.0]]

[[block.row]]
method = "FDSE"
module = "fdse"
published = [[95.0]]
"""
FEDSR = """
title = "Two"
paper = "fedsr"
protocol = "p"
trials = 1

[[block]]
title = "Digits"
dataset = "digits"
columns = [{name = "AVG", value = "best/AVG"}]

[[block.row]]
method = "FedAvg"
module = "fedavg"
published = [[90.0]]

[[block.row]]
method = "Bad"
module = "fedavg"
flags = "--lr 1e30 --momentum 1"
published = [[95.0]]
"""


def record(method: str, flags: list[str], **outcome) -> dict:
    """What a run with these flags would record."""
    made = {"id": "x", "method": method, "args": identity(arguments(method, tuple(flags))),
            "command": f"python {method}.py", "best": {}, "last": {}, "curve": {}, "seconds": {}, "bytes": {},
            "finished": "", "versions": {}, "hardware": {}, "commit": "0123456789abcdef",
            "uncommitted_changes": False}
    return made | outcome


def write_records(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def recorded(path: Path) -> list[dict]:
    """The records of a file; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def small_folder(folder: Path) -> Path:
    """Put the small table and five records into a folder: tables/fdse-9.toml, runs.jsonl."""
    (folder / "tables").mkdir()
    (folder / "tables" / "fdse-9.toml").write_text(TABLE)
    records = []
    for seed, all_, avg in ((0, 0.95, 0.94), (1, 0.97, 0.95), (2, 0.96, 0.93)):
        flags = ["--dataset", "digits", "--precision", "fp32", "--seed", str(seed)]
        records.append(record("fedavg", flags, best={"ALL": all_, "AVG": avg}))
    flags = ["--dataset", "digits", "--precision", "fp32", "--lambda", "0"]
    of_no_commit = {"commit": "a1b2c3", "uncommitted_changes": True}
    records.append(record("fdse", flags, best={"ALL": 0.951, "AVG": 0.9}, **of_no_commit))
    of_no_cell = record("fdse", ["--dataset", "digits", "--lambda", "0.5"], best={"ALL": 0.1, "AVG": 0.1})
    write_records(folder / "runs.jsonl", [*records, of_no_cell])
    return folder


def two_tables(folder: Path, with_failing: bool = True) -> list:
    """Put tables into a folder; the command line that runs them at smoke scale."""
    (folder / "tables").mkdir(exist_ok=True)
    (folder / "tables" / "fdse-91.toml").write_text(FDSE)
    if with_failing:
        (folder / "tables" / "fedsr-91.toml").write_text(FEDSR)
    return ["reproduce_tables.py", "--run", "--scale", "smoke", "--tables", folder / "tables", "--records",
            folder / "runs.jsonl", "--out", folder / "out"]
