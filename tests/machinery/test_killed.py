"""Processes that are killed at any moment: the same command resumes to the same bytes.

    KILLS=5 python -m pytest -m slow tests/machinery/test_killed.py  # of each method; KILL_SEED draws

A method is run straight through, and then again with SIGKILL at moments that a seed draws, each second time
while the next checkpoint is written.
"""

import os
import random
import subprocess
import time
from pathlib import Path

from tests.conftest import METHODS, TESTED, one_run, read_json, same_metrics, script, start

import pytest

KILLS = int(os.environ.get("KILLS", "10"))  # of each method in the long test
KILL_SEED = int(os.environ.get("KILL_SEED", "0"))
OF_A_RUN = ("id", "args", "best", "last", "curve", "logs", "bytes")  # of a result, without its times


def lines_in(folder: Path) -> list[bytes]:
    """The whole lines of metrics.jsonl: a process that is killed may leave a part of one."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def is_writing(folder: Path) -> bool:
    """Whether a checkpoint is being written."""
    return folder.exists() and any(".pt." in name and name.endswith(".tmp") for name in os.listdir(folder))


def finish(process: subprocess.Popen) -> None:
    """Wait for a process, which has no error."""
    error = process.communicate()[1]
    assert process.returncode == 0, error


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_killed_many_times(tmp_path, method):
    keeping = TESTED[method].keeping.split()  # moments, own layers: all that it can keep between rounds
    words = [*script(method), "--scale", "smoke", *one_run(method), *keeping, "--rounds", 4 + 3 * KILLS,
             "--checkpoint-every", 0, "--out"]
    straight, folder, rng = tmp_path / "straight", tmp_path / "killed", random.Random(f"{KILL_SEED} {method}")
    began = time.monotonic()
    finish(start(*words, straight))
    seconds = time.monotonic() - began
    expected = lines_in(straight)
    for i in range(KILLS):
        process = start(*words, folder)
        time.sleep(rng.random() * seconds)
        while i % 2 and process.poll() is None and not is_writing(folder):
            pass
        process.kill()
        process.communicate()
        done = lines_in(folder)
        assert done == expected[:len(done)]
    finish(start(*words, folder))
    assert sorted(os.listdir(folder)) == sorted(os.listdir(straight))
    assert same_metrics(folder, straight)
    ours, theirs = (read_json(of / "result.json") for of in (folder, straight))
    for part in OF_A_RUN:
        assert ours[part] == theirs[part], part
