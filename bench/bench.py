"""What a round costs beside what its arithmetic costs, on one machine.

    python -m bench.bench --archives DIR            # Office-Caltech10 at paper scale: 224x224, batch 50
    python -m bench.bench --archives DIR --size 64 --clients 20    # many clients
    python -m bench.bench --archives DIR --packed 6,1    # several runs at the same time

With `--device cuda` all of it on a GPU, of which the clock waits until it has computed. `ours, training` is
what training takes in the round loop, with batches, loading and copying of states. `ours, whole round` adds
aggregation, evaluation of every client, logs and checkpoints.

`bare` is forward, backward, clipping and step of the same network on synthetic tensors of the same batches.
The figures are medians over `--rounds` after a first one that does not count.

`--packed` is of runs at the same time, as many as it says: half of them FedAvg, half FDSE, each a process of
its own; with 1 each of the two alone. After all first rounds they go on for `--seconds` and are ended:
seconds of the first round, the median of the later ones, and of these the shares of training, server and
evaluation; rounds a minute of all; the memory used on the GPU. No row begins that cannot end in `--limit`
seconds.
"""

import argparse
import contextlib
import io
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import common
import fdse
import fedavg
from plumbing.run.devices import choose_device, prepare
from plumbing.run.errors import handled, interrupt, one_line_on_failure
from plumbing.run.files import output_file, write_json
from plumbing.run.provenance import ROOT, code, cpu_name, hardware
from plumbing.run.settings import Parser
from reproduce.methods import builder_of
from reproduce.runner import environment

import numpy as np
import torch
from tabulate import tabulate
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_


def now(device: str) -> float:
    """The clock, in seconds, once the device has computed all that it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def median_seconds(call: Callable, passes: int, device: str) -> float:
    """The median seconds of a call; a first pass does not count."""
    seconds = []
    for _ in range(passes + 1):
        started = now(device)
        call()
        seconds.append(now(device) - started)
    return statistics.median(seconds[1:])


def bare(build: Callable, args, sizes: list[int]) -> Callable[[], None]:
    """What takes one step for each batch of `sizes` on synthetic tensors."""
    net = build(args, 3, 10).to(args.device, memory_format=torch.channels_last).train()
    batches = {}
    for n in set(sizes):
        x = torch.rand(n, 3, args.image_size, args.image_size, device=args.device)
        y = torch.arange(n, device=args.device) % 10
        batches[n] = x.contiguous(memory_format=torch.channels_last), y
    opt = common.sgd(net, args, 0)

    def train() -> None:
        for n in sizes:
            x, y = batches[n]
            with common.autocast(args):
                loss = cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(net.parameters(), args.clip)
            opt.step()
    return train


def words_of(flags, precision: str, dataset: str = "officecaltech") -> list[str]:
    """The flags of a run of `--size` with a checkpoint after each round."""
    return ["--dataset", dataset, "--image-size", str(flags.size), "--clip", str(flags.clip),
            "--precision", precision, "--device", flags.device, "--no-figures", "--checkpoint-every", "0",
            "--data", flags.data, "--archives", flags.archives, "--clients", str(flags.clients)]


def ours(module, words: list[str], rounds: int) -> tuple[float, float]:
    """The median seconds of training and of everything in a round after the first, by the run's own clock."""
    with tempfile.TemporaryDirectory() as out:
        words = [*words, "--rounds", str(rounds + 1), "--out", out]
        with contextlib.redirect_stdout(io.StringIO()):
            common.run(module.Server, module.Client, module.arguments(words), builder_of(module))
        lines = Path(out, "timing.jsonl").read_text(encoding="utf-8").splitlines()
    so_far = [json.loads(line)["seconds"] for line in lines]
    training = np.diff([seconds["train"] for seconds in so_far])
    whole = np.diff([sum(seconds.values()) for seconds in so_far])
    return float(np.median(training)), float(np.median(whole))


def beside_bare(flags) -> list[list]:
    """Our rows beside bare arithmetic: seconds, of bare."""
    rows = []
    for name, module in {"fedavg": fedavg, "fdse": fdse}.items():
        for precision in ("fp32", "bf16"):
            words = words_of(flags, precision)
            args = module.arguments(words)
            sizes = []
            for client in common.split(common.open_dataset(args), args)[0]:
                sizes += map(len, common.cut_batches(torch.arange(len(client.train)), args))
            step = bare(builder_of(module), args, sizes)
            of_bare = median_seconds(step, flags.rounds, flags.device)
            training, whole = ours(module, words, flags.rounds)
            for row, s in (("bare", of_bare), ("ours, training", training), ("ours, whole round", whole)):
                rows.append([f"{name} {precision}: {row}", s, s / of_bare])
    return rows


# Several runs at the same time

PACKED = ["row", "first round", "later round", "train %", "server %", "evaluate %", "rounds/min of all",
          "MiB of the GPU"]


def packed(flags) -> Iterator[list]:
    """The rows of `--packed`, each when it is measured."""
    end = time.monotonic() + (flags.limit or math.inf)
    common.open_dataset(fedavg.arguments(words_of(flags, "auto", flags.dataset)))  # decoded before
    for count in flags.packed.split(","):
        for modules in [[fedavg], [fdse]] if count == "1" else [[fedavg, fdse]]:
            names = " and ".join(module.__name__ for module in modules)
            row = f"{names}, {count} at a time"
            if time.monotonic() + flags.seconds > end:
                print(f"{row}: not begun, the time is over", file=sys.stderr, flush=True)
                continue
            with tempfile.TemporaryDirectory() as out, handled(interrupt):
                runs = {Path(out, str(n)): modules[n % len(modules)] for n in range(int(count))}
                memory = at_once(flags, runs, end)
                yield from rows_of(row, runs, memory)


def at_once(flags, runs: dict, end: float) -> int:
    """Let the runs go on together until `--seconds` after their first rounds; the most memory in use on the
    GPU."""
    processes, most, env = [], 0, os.environ | environment(0, len(runs), [])
    try:
        for n, (path, module) in enumerate(runs.items()):
            words = [*words_of(flags, "auto", flags.dataset), "--checkpoint-every", "30", "--rounds", "10000",
                     "--seed", str(n // 2), "--out", str(path)]
            with open(f"{path}.log", "w", encoding="utf-8") as log:
                processes.append(subprocess.Popen([sys.executable, "-m", module.__name__, *words], cwd=ROOT,
                                                  env=env, stdout=log, stderr=log))
        while time.monotonic() < end and any(process.poll() is None for process in processes):
            if all(map(lines_of, runs)):
                end = min(end, time.monotonic() + flags.seconds)
                while time.monotonic() < end:
                    time.sleep(0.2)
                    most = max(most, memory_used(flags.device))
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()  # nothing of them is kept
    for path, process in zip(runs, processes):
        if process.wait() in (1, 2):
            said = Path(f"{path}.log").read_text(encoding="utf-8").strip().splitlines() or ["no words"]
            print(f"a run failed: {said[-1][:200]}", file=sys.stderr, flush=True)
    return most


def rows_of(row: str, runs: dict, memory: int) -> Iterator[list]:
    """A row for each method of runs that were made at the same time."""
    of_all, by_method = 0.0, {}
    for path, module in runs.items():
        seconds = np.array([list(line["seconds"].values())[:3] for line in lines_of(path)])
        rounds = np.diff(seconds, axis=0, prepend=0) if len(seconds) else np.empty((0, 3))
        if len(rounds) > 1:
            of_all += 60 / np.median(rounds[1:].sum(1))
        by_method.setdefault(module.__name__, []).append(rounds)
    for name, of_method in by_method.items():
        first = [rounds[0].sum() for rounds in of_method if len(rounds)]
        later = np.concatenate([rounds[1:] for rounds in of_method])
        figures = [float(np.median(first))] if first else [None]
        if len(later):
            figures += [float(np.median(later.sum(1))), *map(float, 100 * later.sum(0) / later.sum())]
        figures += [None] * (5 - len(figures))
        yield [f"{row}: {name}", *figures, float(of_all) or None, memory]


def lines_of(path: Path) -> list[dict]:
    """The whole lines of a run's timing so far."""
    file = path / "timing.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def memory_used(device: str) -> int:
    """The MiB that all programs use on the GPU."""
    if not device.startswith("cuda"):
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) >> 20


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The flags, checked."""
    parser = Parser(prog="bench", allow_abbrev=False, description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--archives", default="", help="folder with the archive of Office-Caltech10")
    add("--data", default="data", help="folder of the decoded cache (default: data)")
    add("--size", type=int, default=224, help="height and width of the images (default: 224)")
    add("--device", default="cpu", help="auto, cpu, cuda, cuda:1, ... (default: cpu)")
    add("--out", default="", help="JSON file for the figures")
    add("--rounds", type=int, default=3, help="rounds, of which the median is shown (default: 3)")
    add("--clients", type=int, default=0, help="clients; 0 is one for each domain (default: 0)")
    add("--clip", type=float, default=10.0, help="gradient clipping of ours, 0 is none (default: 10)")
    add("--packed", default="", help="numbers of runs at the same time instead, such as 6,1")
    add("--dataset", default="officecaltech", help="of --packed (default: officecaltech)")
    add("--seconds", type=float, default=10.0, help="of a row of --packed after first rounds (default: 10)")
    add("--limit", type=float, default=0.0, help="seconds of all rows of --packed; 0: no limit (default)")
    flags = parser.parse_args(argv)
    if flags.packed and not all(count.isdecimal() and int(count) for count in flags.packed.split(",")):
        parser.error(f"--packed is {flags.packed}; expected numbers with commas between them")
    for name, least in (("size", 64), ("rounds", 1)):
        if getattr(flags, name) < least:
            parser.error(f"--{name} is {getattr(flags, name)}; it must be at least {least}")
    return flags


def main(argv: list[str] | None = None) -> None:
    """The command line. Exit code 2 with one line on stderr for bad usage."""
    flags = parsed(argv)
    with one_line_on_failure("bench", "--out, if it is given, has the rows so far"):
        flags.device = choose_device(flags.device)
        if flags.out:
            output_file(Path(flags.out), lambda start: start.startswith(b'{\n "device"'))
        args = fedavg.arguments(["--device", flags.device])
        prepare(args)
        name = torch.cuda.get_device_name(flags.device) if flags.device.startswith("cuda") else cpu_name()
        print(f"{flags.device} ({name}), {torch.get_num_threads()} threads")
        kind, heads = beside_bare, ["row", "seconds", "of bare"]
        if flags.packed:
            kind, heads = packed, PACKED
        rows = []
        typed = shlex.join(["python", "-m", "bench.bench", *sys.argv[1:]])
        figures = {"device": args.device, "heads": heads, "rows": rows, "command": typed}
        figures |= hardware(args) | code(Path(__file__))
        for row in kind(flags):
            rows.append(row)
            if flags.out:  # after each row: what ends it then loses none
                write_json(Path(flags.out), figures)
        print(tabulate(rows, heads, floatfmt=".3f"))


if __name__ == "__main__":
    main()
