"""Does the current code still give the recorded numbers? Runs are begun again and compared digit by digit.

A setting is all arguments but seed, target and rate. Of each one recorded run is begun again in a temporary
folder, until five recorded evaluations or 20 rounds, whichever is later: at round 1 momentum and what else is
carried over is still zero. checked.json beside the records has what came out, by setting.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from plumbing.catalog import named
from plumbing.files import lock_of, locked, write_json
from plumbing.devices import choose_precision
from plumbing.networks import network_file
from plumbing.provenance import cpu_name, git
from reproduce.measures.finished import numbers_of
from reproduce.methods import method
from reproduce.plan import unavailable
from reproduce.records import (Place, Records, flags_of, has_gaps, known_arguments, only_reading_of,
                               read_checked)
from reproduce.runner import Processes, last_lines, side_by_side

import torch
from tqdm import tqdm

EVALUATIONS, ROUNDS = 5, 20  # recorded ones that are compared, whichever are more rounds
STARTUP = 8.0  # seconds until a run trains
COMPARED = ("equal", "differs")  # outcomes that say something of the code


@dataclass
class Begun:
    """A recorded run that stands for its setting, how many of its rounds are made again, and the seconds that
    these took."""

    record: dict
    rounds: int
    seconds: float


def beginning(record: dict) -> Begun:
    """How far a recorded run is made again."""
    evaluated, args = only_reading_of(record)["curve"]["round"], record["args"]
    fifth = evaluated[:EVALUATIONS][-1] if evaluated else args["rounds"]
    rounds = min(args["rounds"], max(fifth, ROUNDS))
    return Begun(record, rounds, STARTUP + sum(record["seconds"].values()) * rounds / args["rounds"])


def representatives(records: list[dict]) -> list[Begun]:
    """Of each setting the run that is best begun again: comparable here, trained and not only tested, and
    cheap. The cheapest settings come first."""
    best = {}

    def rank(begun: Begun) -> tuple:
        return bool(other_machine(begun.record)), "trained_by" in begun.record, begun.seconds
    for begun in sorted(map(beginning, records), key=rank):
        best.setdefault(begun.record["setting"], begun)
    return sorted(best.values(), key=lambda begun: begun.seconds)


def sampled(settings: list[Begun], seconds: float) -> list[Begun]:
    """The settings that fit into some seconds: the cheapest of each method, then the second ones, ..."""
    earlier, turn, chosen = Counter(), {}, []
    for begun in settings:
        turn[begun.record["setting"]] = earlier[begun.record["method"]], begun.seconds
        earlier[begun.record["method"]] += 1
    for begun in sorted(settings, key=lambda begun: turn[begun.record["setting"]]):
        if begun.seconds <= seconds:
            chosen.append(begun)
            seconds -= begun.seconds
    return chosen


def other_machine(record: dict) -> str:
    """Why a record's digits cannot be expected on this machine, or nothing."""
    hardware, args, torch_then = record["hardware"], record["args"], record["versions"].get("torch")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    on_cpu = args.get("device", "cpu") == "cpu"
    if not on_cpu and hardware.get("gpu") != gpu:
        return f"it ran on {hardware.get('gpu')}"
    if hardware.get("cpu") != cpu_name():
        return f"it ran on {hardware.get('cpu')}"
    then, now = hardware.get("instructions"), torch.backends.cpu.get_cpu_capability()
    if then is None and args.get("precision") == choose_precision("auto", "cpu") == "bf16":
        then = now  # older records do not say it; those in bf16 ran on processors that have it
    if on_cpu and then != now:
        return f"it ran with {then or 'unknown instructions'}, and this processor has {now}"
    if torch_then != torch.__version__:
        return f"it ran with torch {torch_then}"
    return f"it had {hardware['threads']} threads" if hardware["threads"] > (os.cpu_count() or 1) else ""


def not_comparable(record: dict, place: Place) -> str:
    """Why a record cannot be made again here with the same digits, or nothing."""
    args = known_arguments(record)
    if network_file(args.backbone) or named(args.dataset.rpartition(" ")[0]).custom:
        return "its network or data are of one's own: a record cannot have a file run"
    return other_machine(record) or unavailable(args, place)


# One run


def command_again(begun: Begun, folder: str) -> list[str]:
    """The command that begins a recorded run again, by its recorded arguments."""
    record = begun.record
    module = method(record["method"])
    words = [sys.executable, "-m", module.__name__, "--out", folder, "--no-figures",
             "--checkpoint-every", "86400", "--threads", str(record["hardware"]["threads"])]
    if begun.rounds < record["args"]["rounds"]:
        words += ["--stop-after", str(begun.rounds)]
    if has_gaps(only_reading_of(record)):
        words += ["--test-rounds", "best"]
    if not record["curve"]:
        words.append("--after-training")
    return words + flags_of(record)


def begin_again(begun: Begun, place: Place, processes: Processes) -> tuple[str, str]:
    """Make the first rounds of a recorded run again: (equal, differs, failed, interrupted or not comparable;
    where it differs or why it could not be made)."""
    why = not_comparable(begun.record, place)
    if why:
        return "not comparable", why
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.txt")
        with open(log, "w") as file:
            code = processes.run([*command_again(begun, folder), *place.flags], stdout=file)
        if code:
            return "interrupted" if processes.stopping else "failed", last_lines(log.read_text(), 1)
        metrics = Path(folder, "metrics.jsonl").read_text()
    difference = first_difference(begun.record, [json.loads(line) for line in metrics.splitlines()])
    return "differs" if difference else "equal", difference


def first_difference(record: dict, entries: list[dict]) -> str:
    """Where the rounds of now first differ from the recorded curves and mean logs; nothing if nowhere."""
    curve = only_reading_of(record)["curve"]
    rounds = curve["round"]
    for entry in entries:
        now = numbers_of(entry if record["curve"] else entry | entry.get("after_training", {}))
        for name, values in (curve | record.get("logs", {})).items():
            of_each = rounds if len(values) == len(rounds) else range(1, len(values) + 1)
            value = dict(zip(of_each, values)).get(entry["round"])
            if name != "round" and value is not None and now.get(name) != value:
                return f"round {entry['round']}, {name}: recorded {value}, now {now.get(name)}"
    return ""


# All of them


def check(records: Records, every: list[dict], place: Place, jobs: int, minutes: float) -> int:
    """Begin one run of each setting of `every` record again, and write what came out; returns the exit code.
    Settings that were compared by this commit are not compared again; with `minutes` only a sample is."""
    path, settings = records.path.with_name("checked.json"), []
    commit = git("rev-parse", "HEAD") or "unknown"
    commit += "+" if git("status", "--porcelain", "--", "*.py") else ""  # changes that are not committed
    for begun in representatives(every):
        answer = records.check_of(begun.record)
        done = answer.get("outcome") in COMPARED and answer.get("commit") == commit
        if not (done or minutes and not_comparable(begun.record, place)):
            settings.append(begun)
    if minutes:
        settings = sampled(settings, 60 * minutes * jobs)
    counts, processes = Counter(), Processes()
    with tqdm(total=len(settings), unit="run", desc="settings", disable=not settings) as bar:

        def work(begun: Begun) -> None:
            if processes.stopping:
                return
            outcome, why = begin_again(begun, place, processes)
            counts[outcome] += 1
            bar.update()
            bar.set_postfix(counts)
            if outcome != "interrupted":
                note(path, begun, commit, outcome, why)
            if outcome in ("differs", "failed"):
                tqdm.write(f"{outcome}: {begun.record['command']}\n    {why}", file=sys.stderr)

        whole = side_by_side(jobs, work, settings, processes)
    print(", ".join(f"{n} {outcome}" for outcome, n in counts.items()) or "nothing to check")
    if not whole:
        return 130
    return 1 if counts["differs"] or counts["failed"] else 0


def note(path: Path, begun: Begun, commit: str, outcome: str, why: str) -> None:
    """Put what came out into checked.json. What cannot be compared here leaves an earlier comparison."""
    with locked(lock_of(path)):
        checked, record = read_checked(path), begun.record
        earlier = checked.get(record["setting"], {})
        if outcome in COMPARED or earlier.get("outcome") not in COMPARED:
            checked[record["setting"]] = {
                "outcome": outcome, "method": record["method"], "record": record["id"], "commit": commit,
                "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "rounds": begun.rounds, "difference": why}
            write_json(path, dict(sorted(checked.items())))
