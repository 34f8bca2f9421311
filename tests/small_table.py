"""A small table and records of its runs, for the tests of reproduce/."""

import json
from pathlib import Path

from plumbing.run.settings import identity
from reproduce.methods import arguments
from reproduce.published import HEAD
from reproduce.records import Records

GOLDEN = Path(__file__).parent / "golden"
TABLE = (GOLDEN / "fdse-9.toml").read_text()
PUBLISHED = (GOLDEN / "fdse-9.csv").read_text()

# Two tables that share a run; one of their three runs fails.
FDSE = (GOLDEN / "fdse-91.toml").read_text()
FDSE_PUBLISHED = (GOLDEN / "fdse-91.csv").read_text()
FEDSR = (GOLDEN / "fedsr-91.toml").read_text()
FEDSR_PUBLISHED = (GOLDEN / "fedsr-91.csv").read_text()


def write_table(folder: Path, name: str, text: str, published: str) -> Path:
    """Put a table and its published numbers into a folder of papers; the path of the table."""
    place = folder / name.partition("-")[0]
    (place / "tables").mkdir(parents=True, exist_ok=True)
    printed = place / "printed.csv"
    before = printed.read_text().rstrip("\n") if printed.exists() else ",".join(HEAD)
    printed.write_text(before + published)
    table = place / "tables" / f"{name}.toml"
    table.write_text(text)
    return table


def record(method: str, flags: list[str], **outcome) -> dict:
    """What a run with these flags would record."""
    args = identity(arguments(method, tuple(flags)))
    evaluated = list(range(args["eval_every"], args["rounds"] + args["eval_every"], args["eval_every"]))
    made = {"id": "x", "method": method, "args": args, "command": f"python {method}.py", "best": {},
            "last": {}, "curve": {"round": evaluated}, "seconds": {}, "bytes": {}, "finished": "",
            "versions": {}, "hardware": {}, "commit": "0123456789abcdef", "dirty": False}
    return made | outcome


def write_records(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def records_in(folder: Path, made: list[dict]) -> Records:
    """These records, from a file in the folder."""
    return Records(write_records(folder / "r.jsonl", made))


def recorded(path: Path) -> list[dict]:
    """The records of a file; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def small_folder(folder: Path) -> Path:
    """Put the small table and five records into a folder: papers/fdse/, runs.jsonl."""
    write_table(folder / "papers", "fdse-9", TABLE, PUBLISHED)
    records = []
    for seed, all_, avg in ((0, 0.95, 0.94), (1, 0.97, 0.95), (2, 0.96, 0.93)):
        flags = ["--dataset", "digits", "--precision", "fp32", "--seed", str(seed)]
        records.append(record("fedavg", flags, best={"ALL": all_, "AVG": avg}))
    flags = ["--dataset", "digits", "--precision", "fp32", "--lambda", "0"]
    of_no_commit = {"commit": "a1b2c3", "dirty": True}
    records.append(record("fdse", flags, best={"ALL": 0.951, "AVG": 0.9}, **of_no_commit))
    of_no_cell = record("fdse", ["--dataset", "digits", "--lambda", "0.5"], best={"ALL": 0.1, "AVG": 0.1})
    write_records(folder / "runs.jsonl", [*records, of_no_cell])
    return folder


def two_tables(folder: Path, with_failing: bool = True) -> list:
    """Put tables into a folder; the command line that runs them at smoke scale."""
    write_table(folder / "papers", "fdse-91", FDSE, FDSE_PUBLISHED)
    if with_failing:
        write_table(folder / "papers", "fedsr-91", FEDSR, FEDSR_PUBLISHED)
    return ["reproduce_tables.py", "--run", "--scale", "smoke", "--papers", folder / "papers", "--records",
            folder / "runs.jsonl", "--out", folder / "out"]
