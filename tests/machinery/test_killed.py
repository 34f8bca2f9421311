"""Processes that are killed or told to end at any moment: the same command resumes to the same bytes.

    KILLS=5 python -m pytest -m slow tests/machinery/test_killed.py  # of each method; KILL_SEED draws

A method is run straight through, and then again with SIGKILL at moments that a seed draws: in the seconds
before the first round, between rounds, while a checkpoint is written, and behind the last round.
"""

import dataclasses
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.conftest import METHODS, TESTED, one_run, script, start

import pytest

KILLS = int(os.environ.get("KILLS", "10"))  # of each method in the long test
KILL_SEED = int(os.environ.get("KILL_SEED", "0"))
AFTER_A_ROUND = 0.3  # seconds, the most between a round and a kill
# What of a result is of the moment in which it was made.
OF_THE_MOMENT = ("seconds", "images_per_second", "peak_memory_mib", "finished", "code", "hardware", "commit",
                 "uncommitted_changes")

@dataclasses.dataclass
class Straight:
    """A run that nobody disturbed: its command, its folder, and how long its beginning and its end took."""

    words: list
    folder: Path
    rounds: int
    beginning: float  # seconds to the first round
    ending: float  # seconds from the last round to the end of the process


def run_straight(words: list, folder: Path, rounds: int) -> Straight:
    began = time.monotonic()
    process = start(*words, folder)
    wait_until(process, lambda: rounds_in(folder) > 0)
    first = time.monotonic()
    wait_until(process, lambda: rounds_in(folder) == rounds)
    last = time.monotonic()
    said, error = process.communicate()
    assert process.returncode == 0, error
    return Straight(words, folder, rounds, first - began, time.monotonic() - last)


def wait_until(process: subprocess.Popen, happens: Callable[[], bool], look_every: float = 0.01) -> None:
    """Wait until something happens, or the process has ended."""
    while process.poll() is None and not happens():
        time.sleep(look_every)


def rounds_in(folder: Path) -> int:
    """How many rounds are done."""
    return len(lines_in(folder))


def lines_in(folder: Path) -> list[bytes]:
    """The whole lines of metrics.jsonl: a process that is killed may leave a part of one."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def is_writing(folder: Path) -> bool:
    """Whether a checkpoint is being written."""
    return folder.exists() and any(".pt." in name and name.endswith(".tmp") for name in os.listdir(folder))


def kill(straight: Straight, folder: Path, moment: str, rng: random.Random) -> bool:
    """Start the command and kill it at a moment; False if it had ended by then."""
    before = rounds_in(folder)
    process = start(*straight.words, folder)
    if moment == "beginning":
        time.sleep(rng.random() * straight.beginning)
    elif moment == "round":
        wait_until(process, lambda: rounds_in(folder) > before)
        time.sleep(rng.random() * AFTER_A_ROUND)
    elif moment == "write":
        wait_until(process, lambda: rounds_in(folder) > before)
        wait_until(process, lambda: is_writing(folder), look_every=0)
    else:
        wait_until(process, lambda: rounds_in(folder) == straight.rounds)
        time.sleep(rng.random() * straight.ending)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def moments_of(kills: int, rng: random.Random) -> list[str]:
    """So many moments, of all kinds in turn, in an order of the seed's; the end comes last."""
    kinds = ["beginning", "write", "round"]
    moments = [kinds[i % 3] for i in range(kills - 1)]
    rng.shuffle(moments)
    return [*moments, "end"]


def kill_and_resume(place: Path, method: str, kills: int) -> list[str]:
    """Of a run that is killed so often: a line for everything in which it differs from the straight run."""
    rounds = 4 + 3 * kills
    keeping = TESTED[method].keeping.split()  # moments, own layers: all that it can keep between rounds
    flags = ["--scale", "smoke", *one_run(method), *keeping, "--rounds", rounds, "--checkpoint-every", 0]
    straight = run_straight([*script(method), *flags, "--out"], place / "straight", rounds)
    folder, rng = place / "killed", random.Random(f"{KILL_SEED} {method}")
    expected, differences, ends = lines_in(straight.folder), [], []
    for moment in moments_of(kills, rng):
        was_killed = kill(straight, folder, moment, rng)
        done = lines_in(folder)
        ends.append(f"{moment} {len(done)}" if was_killed else f"{moment} too late")
        if done != expected[:len(done)]:
            differences.append(f"rounds after {ends}")
    print(f"{method}: {', '.join(ends)} of {rounds} rounds")
    last = start(*straight.words, folder)
    error = last.communicate()[1]
    if last.returncode:
        differences.append(f"it ended with {last.returncode}: {error}")
    return differences + differences_of(folder, straight.folder)


def differences_of(folder: Path, straight: Path) -> list[str]:
    """What differs between two finished runs but for their times."""
    differences = []
    if sorted(os.listdir(folder)) != sorted(os.listdir(straight)):
        differences.append(f"there are {sorted(os.listdir(folder))}, not {sorted(os.listdir(straight))}")
    if (folder / "metrics.jsonl").read_bytes() != (straight / "metrics.jsonl").read_bytes():
        differences.append("metrics.jsonl")
    if without_times(folder) != without_times(straight):
        differences.append("result.json")
    return differences


def without_times(folder: Path) -> dict:
    """A run's result without what is of the moment in which it was made."""
    result = json.loads((folder / "result.json").read_text())
    return {name: value for name, value in result.items() if name not in OF_THE_MOMENT}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_killed_many_times(tmp_path, method):
    assert kill_and_resume(tmp_path, method, KILLS) == []
