"""Does the current code still give the recorded numbers? Recorded runs are begun again and compared.

A run is begun again in a temporary folder until five recorded evaluations or 20 rounds, whichever is later:
at round 1 momentum and what else is carried over is still zero. Nothing is written.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from plumbing.data.catalog import named
from plumbing.run.networks import network_file
from plumbing.run.provenance import cpu_name
from reproduce.measures.finished import numbers_of
from reproduce.methods import method
from reproduce.plan import data_lacking
from reproduce.records import Place, Records, flags_of, has_gaps, known_arguments
from reproduce.runner import Processes, last_lines, side_by_side

import torch
from tqdm import tqdm

EVALUATIONS, ROUNDS = 5, 20  # recorded ones that are compared, whichever are more rounds


def repeat(records: Records, number: int, place: Place, jobs: int) -> int:
    """Begin some recorded runs again, another one of each setting as long as there are settings, and print
    what came out; returns the exit code: 1 if one differs."""
    counts, processes = Counter(), Processes()
    chosen = sampled(records.newest, number)
    with tqdm(total=len(chosen), unit="run", desc="runs", disable=not chosen) as bar:

        def work(record: dict) -> None:
            if processes.stopping:
                return
            outcome, why = begin_again(record, place, processes)
            counts[outcome] += 1
            bar.update()
            tqdm.write(f"{outcome}: {record['command']}" + (f"\n    {why}" if why else ""))

        whole = side_by_side(jobs, work, chosen, processes)
    print(", ".join(f"{n} {outcome}" for outcome, n in counts.items()) or "nothing to repeat")
    if not whole:
        return 130
    return 1 if counts["different"] or counts["failed"] else 0


def sampled(records: list[dict], number: int) -> list[dict]:
    """Some records in an order that is always the same: one of each setting, then further ones."""
    order = sorted(records, key=lambda record: (record["id"], record["finished"]))
    random.Random(0).shuffle(order)
    firsts, others, seen = [], [], set()
    for record in order:
        (others if record["setting"] in seen else firsts).append(record)
        seen.add(record["setting"])
    return (firsts + others)[:number]


def rounds_of(record: dict) -> int:
    """How many rounds of a recorded run are made again."""
    evaluated, rounds = record["curve"]["round"], record["args"]["rounds"]
    return min(rounds, max(evaluated[:EVALUATIONS][-1], ROUNDS))


def not_comparable(record: dict, place: Place) -> str:
    """Why a record cannot be made again here with the same digits, or nothing."""
    args, hardware = known_arguments(record), record["hardware"]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if network_file(args.backbone) or named(args.dataset.rpartition(" ")[0]).custom:
        return "its network or data are of one's own: a record cannot have a file run"
    if "trained_by" in record:
        return "it was only tested, not trained"
    if hardware.get("gpu") != gpu:
        return f"it ran on {hardware.get('gpu') or 'a processor'}"
    then = hardware.get("cpu"), hardware.get("instructions"), record["versions"].get("torch")
    now = cpu_name(), torch.backends.cpu.get_cpu_capability(), torch.__version__
    for what, before, here in zip(("processor", "instructions", "torch"), then, now):
        if before != here:
            return f"{what} then {before}, here {here}"
    if hardware["threads"] > (os.cpu_count() or 1):
        return f"it had {hardware['threads']} threads"
    return data_lacking(args.dataset, args.image_size, place)


def command_again(record: dict, rounds: int, folder: str) -> list[str]:
    """The command that begins a recorded run again, by its recorded arguments."""
    words = [sys.executable, "-m", method(record["method"]).__name__, "--out", folder, "--no-figures",
             "--threads", str(record["hardware"]["threads"])]
    if rounds < record["args"]["rounds"]:
        words += ["--stop-after", str(rounds)]
    if has_gaps(record):
        words += ["--test-rounds", "best"]
    return words + flags_of(record)


def begin_again(record: dict, place: Place, processes: Processes) -> tuple[str, str]:
    """Make the first rounds of a recorded run again: (equal, different, failed, interrupted or not comparable
    here; where it differs, or why it could not be made)."""
    why = not_comparable(record, place)
    if why:
        return "not comparable here", why
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.txt")
        with open(log, "w", encoding="utf-8") as file:
            command = command_again(record, rounds_of(record), folder)
            code = processes.run([*command, *place.flags], stdout=file)
        if code:
            outcome = "interrupted" if processes.stopping else "failed"
            return outcome, last_lines(log.read_text(encoding="utf-8"), 1)
        metrics = Path(folder, "metrics.jsonl").read_text(encoding="utf-8")
    difference = first_difference(record, [json.loads(line) for line in metrics.splitlines()])
    return "different" if difference else "equal", difference


def first_difference(record: dict, entries: list[dict]) -> str:
    """Where the rounds of now first differ from the recorded curves and mean logs; nothing if nowhere."""
    rounds = record["curve"]["round"]
    for entry in entries:
        now = numbers_of(entry)
        for name, values in (record["curve"] | record.get("logs", {})).items():
            of_each = rounds if len(values) == len(rounds) else range(1, len(values) + 1)
            value = dict(zip(of_each, values)).get(entry["round"])
            if name != "round" and value is not None and now.get(name) != value:
                return f"round {entry['round']}, {name}: recorded {value}, now {now.get(name)}"
    return ""
