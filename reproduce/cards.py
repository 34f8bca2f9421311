"""The GPUs of this machine that runs share: which there are, and how many runs go on one at a time."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass

from plumbing.errors import Stop
from reproduce.work import RunWork

# Bounds of what was never measured on a GPU; with --jobs they do not count.
CONTEXT = 1 << 30  # bytes that CUDA, cuDNN and cuBLAS take for a process
SPARE = 1.5  # bytes that PyTorch reserves for each byte that the plan counts
FILLED = 0.9  # of the memory that is free
MOST = 8  # runs on a GPU: each needs a processor core that launches its operators

ASK = """
import json, torch
cards = []
for n in range(torch.cuda.device_count()):
    free, _ = torch.cuda.mem_get_info(n)
    cards.append([torch.cuda.get_device_name(n), free])
print(json.dumps(cards))
"""


@dataclass(frozen=True)
class Card:
    """A GPU: its number in --gpus, and the bytes that are free on it."""

    number: str
    name: str
    free: int


def shown_as(number: str) -> str:
    """What stands for a GPU in CUDA_VISIBLE_DEVICES: where that is set, --gpus counts what it names."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if int(number) < len(names):
        return names[int(number)].strip()
    return number


def cards_here(numbers: list[str]) -> list[Card]:
    """The GPUs with these numbers; Stop if one of them is not here. Another process asks, so that this one
    never opens a GPU."""
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True)
    wanted = f"--gpus {','.join(numbers)}"
    if asked.returncode:
        why = (asked.stderr.strip().splitlines() or ["no words"])[-1]
        raise Stop(f"{wanted} cannot be used here: {why[:120]}", 2)
    found = json.loads(asked.stdout.strip().splitlines()[-1])
    if not found:
        raise Stop(f"{wanted}: there is no GPU here that PyTorch can use; leave --gpus out", 2)
    cards = []
    for number in numbers:
        if int(number) >= len(found):
            there = ", ".join(str(n) for n in range(len(found)))
            raise Stop(f"{wanted}: there is no GPU {number} here; there is {there}", 2)
        name, free = found[int(number)]
        cards.append(Card(number, name, free))
    return cards


def bytes_on_card(work: RunWork) -> float:
    """What a run takes of a GPU's memory, by bounds."""
    return CONTEXT + SPARE * work.memory


def sharing(works: list[RunWork], cards: list[Card], trainings: int, jobs: int,
            cores: int) -> tuple[int, str]:
    """How many of some runs go on at a time on all cards, and why, in a line. `trainings`: how many of them
    can go on at once; `jobs`: what the command line says, 0 if nothing; `cores` of the machine, 0 if they are
    not known."""
    if jobs:
        each = math.ceil(jobs / len(cards))
        return jobs, f"{jobs} runs at a time on {named(cards)}, at most {each} on each, as --jobs says"
    if not works:
        return len(cards), f"one run at a time on each of {named(cards)}: what a run takes is not known"
    need = max(bytes_on_card(work) for work in works)
    free = min(card.free for card in cards)
    fit = int(FILLED * free / need)
    most, of_cores = MOST, "than cores (not known of that machine)"
    if cores:
        for_each = max(1, cores // len(cards))
        most, of_cores = min(MOST, for_each), f"than cores ({for_each} for each)"
    each = max(1, min(fit, most, math.ceil(trainings / len(cards))))
    line = (f"{each} runs at a time on each of {named(cards)}: at most {MOST}, no more {of_cores} "
            f"nor than fit ({gib(need)} for the largest run, by a bound that was never measured, "
            f"of {gib(free)} that are free); --jobs says otherwise")
    if not fit:
        line += "; the largest run may not fit"
    return min(each * len(cards), max(1, trainings)), line


def named(cards: list[Card]) -> str:
    """GPU 0, 1 (NVIDIA H200)."""
    numbers = ", ".join(card.number for card in cards)
    names = ", ".join(sorted({card.name for card in cards}))
    return f"GPU {numbers} ({names})"


def gib(count: float) -> str:
    return f"{count / 2 ** 30:.1f} GiB"
