"""Sources that give the same numbers: a short run of each method, and the hash of what it writes.

results/short_runs.jsonl has a line for each method and each of its sources that gave other bytes than those
before. A refactoring changes the sources; if a short run still writes the bytes of an older line, their hash
goes beside the older one into results/equivalent_sources.toml, and records and output folders of the older
sources count as those of now. What a short run does not reach it cannot vouch for: digits, two rounds, one
thread, fp32.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from importlib import metadata
from pathlib import Path

from plumbing.errors import Stop
from plumbing.files import write_whole
from plumbing.provenance import cpu_name, git
from plumbing.settings import LinearArgs
from plumbing.sources import equivalent_to, hash_of, read_equivalents
from reproduce.methods import ROOT, file_of, method, modules, short_name
from reproduce.records import Run, lines_of

FLAGS = ("--dataset", "digits", "--scale", "smoke", "--precision", "fp32", "--threads", "1")
SHORT_RUNS, EQUIVALENT = "short_runs.jsonl", "equivalent_sources.toml"  # files of results/
NOTED = {"method", "command", "sources", "metrics", "cpu", "torch", "numpy"}  # in each line
HEAD = """\
# Sets of hashes of sources (plumbing/sources.py) that give the same numbers: a short run of the method
# wrote the same bytes with all of a set. Written by `python reproduce_tables.py --same-numbers`; records,
# output folders and checkpoints of one count as those of the others.
"""


def flags_of(module: str) -> tuple[str, ...]:
    """The flags of a method's short run; without labels it would be one for each target."""
    if issubclass(method(short_name(module)).Args, LinearArgs):
        return (*FLAGS, "--target", "d0")
    return FLAGS


def short_run(module: str) -> dict:
    """Run a method shortly, in a process and a folder of its own; returns its line."""
    run = Run(module, flags_of(module), 0, "", "fp32")
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *run.words, "--device", "cpu", "--out", folder]
        done = subprocess.run(words, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True,
                              capture_output=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no words"])[-1]
            raise Stop(f"{run.command} ends with {last}")
        written = (Path(folder) / "metrics.jsonl").read_bytes()
    return {"method": module, "command": run.command, "sources": hash_of(file_of(module)),
            "metrics": hashlib.sha256(written).hexdigest(), "threads": 1, **machine(),
            "commit": git("rev-parse", "HEAD"),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def machine() -> dict[str, str]:
    """What the bytes depend on beside the sources."""
    return {"cpu": cpu_name(), "torch": metadata.version("torch"), "numpy": metadata.version("numpy")}


def of_this_machine(line: dict) -> bool:
    return all(line[name] == value for name, value in machine().items())


def read_lines(results: Path) -> list[dict]:
    """The lines of short_runs.jsonl; damaged ones are left out."""
    lines = []
    for _, text in lines_of(results / SHORT_RUNS):
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            line = json.loads(text)
            if NOTED <= line.keys():
                lines.append(line)
    return lines


def compare_all(results: Path) -> list[str]:
    """Run each method shortly whose sources of now have no line, and note what that shows; returns a sentence
    for each method."""
    return [f"{module}: {compare(module, results)}" for module in modules()]


def compare(module: str, results: Path) -> str:
    """Whether a method's sources of now give the bytes of older ones, noted in the files of `results`."""
    now = hash_of(file_of(module))
    before = []
    for line in read_lines(results):
        if line["method"] == module and of_this_machine(line):
            before.append(line)
    same = equivalent_to(now)
    if any(line["sources"] in same for line in before):
        return f"nothing to compare: sources {now} are known"
    line = short_run(module)
    for older in reversed(before):
        if older["metrics"] == line["metrics"] and older["command"] == line["command"]:
            note_same(results / EQUIVALENT, module, older["sources"], now)
            return f"sources {now} give the bytes of {older['sources']}: noted as equivalent"
    with open(results / SHORT_RUNS, "a") as file:
        file.write(json.dumps(line) + "\n")
    if before:
        return f"sources {now} give other bytes than {before[-1]['sources']}: its older records stay marked"
    return f"the first short run on this machine, recorded for sources {now}"


def note_same(path: Path, module: str, older: str, now: str) -> None:
    """Put the hash of now into the set of an older one of its method, in the file of equivalent sources."""
    joined, others = [], []
    for method_of_set, same in read_equivalents(path):
        if method_of_set == module and {older, now} & set(same):
            joined += same
        else:
            others.append((method_of_set, same))
    joined = list(dict.fromkeys([*joined, older, now]))
    text = HEAD
    for method_of_set, same in sorted([*others, (module, joined)]):
        hashes = textwrap.fill(" ".join(f'"{one}",' for one in same), 100)
        text += f'\n[[same]]\nmethod = "{method_of_set}"\nsources = [\n{textwrap.indent(hashes, "    ")}\n]\n'
    write_whole(path, lambda file: file.write(text.encode()))
