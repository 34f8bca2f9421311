"""What a round costs beside what its arithmetic costs, on one machine.

    python -m bench.bench --archives DIR            # Office-Caltech10 at paper scale: 224x224, batch 50
    python -m bench.bench --archives DIR --size 64 --clients-per-domain 5    # many clients

With `--device cuda` all of it on a GPU, of which the clock waits until it has computed. `ours, training` is
what training takes in the round loop, with batches, loading and copying of states. `ours, whole round` adds
aggregation, evaluation of every client, logs and checkpoints.

`bare` is forward, backward, clipping and step of the same network on synthetic tensors of the same batches.
The figures are medians over `--rounds` after a first one that does not count.
"""

import argparse
import contextlib
import io
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common
import fdse
import fedavg
from plumbing.run.devices import choose_device, prepare
from plumbing.run.errors import one_line_on_failure
from plumbing.run.files import output_file, write_json
from plumbing.run.provenance import code, cpu_name, hardware
from plumbing.run.settings import Parser
from reproduce.methods import builder_of

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


def words_of(flags, precision: str) -> list[str]:
    """The flags of a run of `--size` with a checkpoint after each round."""
    return ["--dataset", "officecaltech", "--image-size", str(flags.size), "--clip", str(flags.clip),
            "--precision", precision, "--device", flags.device, "--no-figures", "--checkpoint-every", "0",
            "--data", flags.data, "--archives", flags.archives, "--clients-per-domain",
            str(flags.clients_per_domain)]


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
    add("--clients-per-domain", type=int, default=1, help="clients of each domain (default: 1)")
    add("--clip", type=float, default=10.0, help="gradient clipping of ours, 0 is none (default: 10)")
    flags = parser.parse_args(argv)
    for name, least in (("size", 64), ("rounds", 1)):
        if getattr(flags, name) < least:
            parser.error(f"--{name} is {getattr(flags, name)}; it must be at least {least}")
    return flags


def main(argv: list[str] | None = None) -> None:
    """The command line. Exit code 2 with one line on stderr for bad usage."""
    flags = parsed(argv)
    with one_line_on_failure("bench"):
        flags.device = choose_device(flags.device)
        if flags.out:
            output_file(Path(flags.out), lambda start: start.startswith(b'{\n "device"'))
        args = fedavg.arguments(["--device", flags.device])
        prepare(args)
        name = torch.cuda.get_device_name(flags.device) if flags.device.startswith("cuda") else cpu_name()
        print(f"{flags.device} ({name}), {torch.get_num_threads()} threads")
        rows, heads = [], ["row", "seconds", "of bare"]
        typed = shlex.join(["python", "-m", "bench.bench", *sys.argv[1:]])
        figures = {"device": args.device, "heads": heads, "rows": rows, "command": typed}
        figures |= hardware(args) | code(Path(__file__))
        rows += beside_bare(flags)
        if flags.out:
            write_json(Path(flags.out), figures)
        print(tabulate(rows, heads, floatfmt=".3f"))


if __name__ == "__main__":
    main()
