"""What a round costs beside what its arithmetic costs, all in one run on one machine.

    python -m bench.bench --archives DIR            # Office-Caltech10 at paper scale: 224x224, batch 50
    python -m bench.bench --methods                 # the local training of every method that has labels
    python -m bench.bench --views --size 224        # two views of each image

With `--device cuda` all of it on a GPU, of which the clock waits until it has computed.

Rows of a round: `bare` is forward, backward, clipping and step of the same network on synthetic tensors of
the same batches. `ours, training` is what training takes in the round loop, with batches, loading and copying
of states. `ours, whole round` adds aggregation, evaluation of every client, logs and checkpoints. The figures
are medians over `--rounds` after a first one that does not count.

With `--methods`: the local training of one client in its second round, `--steps` steps of a ResNet18 on
64x64 images that are made up, batch 32, with each method's settings for Office-Caltech10. `arithmetic` counts
the FLOPs in matrix products and convolutions of exactly this training, beside FedAvg's. `over arithmetic` is
the ratio of the times divided by that: what a method costs beyond the passes that it adds.

With `--views`: the two 32x32 views of 64 images of `--size` pixels, by plumbing/augment.py and by
torchvision's v2 transforms image by image.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import common
import fdse
import fedavg
from plumbing.augment import AUGMENTATIONS, augment
from plumbing.errors import Stop
from plumbing.files import write_json
from plumbing.processes import prepare
from plumbing.provenance import code, cpu_name, hardware
from plumbing.results import command
from plumbing.settings import Parser, choose_device
from reproduce.commands import one_line_on_stop
from reproduce.measures.overhead import counter
from reproduce.methods import builder_of, method, modules, short_name

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_


def now(device: str) -> float:
    """The clock, in seconds, once the device has computed all that it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def medians(calls: dict[str, Callable], passes: int, device: str) -> dict[str, float]:
    """The median seconds of each call. In a pass they come one after the other; a first pass does not
    count."""
    seconds = {name: [] for name in calls}
    for _ in range(passes + 1):
        for name, call in calls.items():
            started = now(device)
            call()
            seconds[name].append(now(device) - started)
    return {name: statistics.median(of_row[1:]) for name, of_row in seconds.items()}


def bare(build: Callable, args, sizes: list[int]) -> Callable:
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


# A round of Office-Caltech10

METHODS = {"fedavg": fedavg, "fdse": fdse}


def office_words(flags, precision: str, out: Path) -> list[str]:
    """The flags of a run of `--size` with a checkpoint after each round."""
    return ["--dataset", "officecaltech", "--device", flags.device, "--no-figures", "--checkpoint-every", "0",
            "--precision", precision, "--out", str(out), "--image-size", str(flags.size),
            "--data", flags.data, "--archives", flags.archives]


def ours(module, words: list[str], rounds: int) -> tuple[float, float]:
    """The median seconds of training and of everything in a round after the first, by the run's own clock."""
    args = module.arguments([*words, "--rounds", str(rounds + 1)])
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet):
        common.run(module.Server, module.Client, args, builder_of(module))
    lines = Path(args.out, "timing.jsonl").read_text().splitlines()
    so_far = [json.loads(line)["seconds"] for line in lines]
    training = np.diff([seconds["train"] for seconds in so_far])
    whole = np.diff([sum(seconds.values()) for seconds in so_far])
    return float(np.median(training)), float(np.median(whole))


def office_clients(args) -> list[common.ClientData]:
    domains, classes = common.load_domains(args)
    clients, _ = common.split(common.Dataset(domains, classes), args)
    return clients


def rounds(flags) -> list[list]:
    """The rows of a round: seconds, of bare, images a second."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in [flags.only] if flags.only else METHODS:
            module = METHODS[name]
            for precision in ("fp32", "bf16"):
                words = office_words(flags, precision, Path(folder) / f"{name}-{precision}")
                args = module.arguments(words)
                sizes = []
                for client in office_clients(args):
                    sizes += map(len, common.cut_batches(torch.arange(len(client.train)), args))
                step = bare(builder_of(module), args, sizes)
                of_bare = medians({"bare": step}, flags.rounds, flags.device)["bare"]
                training, whole = ours(module, words, flags.rounds)
                for row, s in (("bare", of_bare), ("ours, training", training), ("ours, whole round", whole)):
                    rows.append([f"{name} {precision}: {row}", s, s / of_bare, sum(sizes) / s])
    return rows


# All methods on one backbone

SAME_FOR_ALL = """
    --dataset officecaltech --protocol indomain --image-size 64 --normalize unit --augment none
    --backbone resnet18 --weights none --batch-size 32 --clip 0 --lr 0.01 --momentum 0.9
    --weight-decay 0.0005
"""
# Flags of a method that the ones of all others do not fit, or without which its terms are 0.
EXCEPT = {
    "baselines.scaffold": ["--momentum", "0"],
    "fedsr": ["--alpha-l2r", "0.01", "--alpha-cmi", "0.001"],
    "fedadg": ["--projection-size", "128", "--E0", "6"],  # 14 of 20 steps are adversarial
}


def second_round(module, flags: list[str]) -> Callable:
    """The local training of a method's only client in its second round, in which all terms are there."""
    args = module.arguments(flags)
    images = torch.randint(0, 256, (800, 3, 64, 64), dtype=torch.uint8)
    images = images.contiguous(memory_format=torch.channels_last)
    domain = common.Domain("made", images, torch.arange(800) % 10)
    (data,), _ = common.split(common.Dataset([domain], tuple(range(10))), args)
    common.seed_all(0)
    net = builder_of(module)(args, 3, 10).to(args.device, memory_format=torch.channels_last)
    server, client = module.Server(args, net, 1), module.Client(args, net, 0, data)
    server.update({0: client.train(server.download(0), 0)}, 0)
    return partial(client.train, server.download(0), 1)


def methods(flags) -> list[list]:
    """The rows of `--methods`; a method that cannot be trained so is named on stderr and has none."""
    words = [*SAME_FOR_ALL.split(), "--device", flags.device, "--steps", str(flags.steps)]
    args = fedavg.arguments(words)
    calls = {"bare": bare(common.backbone, args, [args.batch_size] * flags.steps)}
    for name in modules():
        module = method(short_name(name))
        if issubclass(module.Args, common.LinearArgs):
            continue  # without labels
        try:
            calls[name] = second_round(module, words + EXCEPT.get(name, []))
        except (Stop, SystemExit, RuntimeError) as e:
            print(f"{name}: not measured ({str(e)[:80]})", file=sys.stderr)
    flops = {}
    for name, call in calls.items():
        with counter() as counted:
            call()
        flops[name] = counted.get_total_flops()
    seconds = medians(calls, flags.rounds, flags.device)
    rows = []
    for name, spent in seconds.items():
        of_time, of_flops = spent / seconds["fedavg"], flops[name] / flops["fedavg"]
        rows.append([name, spent, of_time, of_flops, of_time / of_flops])
    return rows


# Views

VIEW = 32  # pixels
IMAGES = 64  # of which two views are made


def whole_batch(images: Tensor) -> Tensor:
    """SimCLR's views of uint8 images [B, 3, H, W]: float [B, 3, 32, 32]."""
    return augment(images.float().div_(255), dataclasses.replace(AUGMENTATIONS["simclr"], size=VIEW))


def image_by_image(images: Tensor) -> Tensor:
    from torchvision.transforms import v2
    each = v2.Compose([
        v2.RandomResizedCrop(VIEW, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
        v2.RandomGrayscale(0.2),
    ])
    return torch.stack([each(image) for image in images])


def views(flags) -> list[list]:
    """The rows of `--views`: seconds, of the first row, images a second."""
    images = torch.randint(0, 256, (2 * IMAGES, 3, flags.size, flags.size), dtype=torch.uint8)
    images = images.contiguous(memory_format=torch.channels_last).to(flags.device)
    makers = {"augment.py, the whole batch": partial(whole_batch, images),
              "torchvision v2, image by image": partial(image_by_image, images)}
    seconds = medians(makers, flags.rounds, flags.device)
    first = next(iter(seconds.values()))
    return [[name, spent, spent / first, IMAGES / spent] for name, spent in seconds.items()]


# The command


def described(device: str) -> str:
    """The device in words: cuda:0 (NVIDIA H200), cpu (its name), 2 threads."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name()
    return f"{device} ({name}), {torch.get_num_threads()} threads"


def write(path: str, args, figures: dict) -> None:
    """The figures, with the code and the machine that they are of."""
    where = hardware(args, 1) | code(Path(__file__))
    write_json(Path(path), {"device": args.device} | figures | where)


def add_office_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that bench/peers.py has too."""
    add = parser.add_argument
    add("--archives", default="", help="folder with the Office-Caltech10 archive")
    add("--data", default="data", help="folder of the decoded cache (default: data)")
    add("--size", type=int, default=224, help="height and width of the images (default: 224)")
    add("--device", default="cpu", help="auto, cpu, cuda, cuda:1, ... (default: cpu)")
    add("--out", default="", help="JSON file for the figures")


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The flags, checked."""
    parser = Parser(prog="bench", allow_abbrev=False, description=__doc__.split("\n\nRows of")[0],
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_office_flags(parser)
    add("--rounds", type=int, default=3, help="rounds, of which the median is shown (default: 3)")
    add("--only", choices=tuple(METHODS), help="only this method's rows (default: fedavg and fdse)")
    add("--methods", action="store_true", help="every method's local training, on one backbone")
    add("--views", action="store_true", help="two ways to make two views")
    add("--steps", type=int, default=20, help="steps of --methods (default: 20)")
    flags = parser.parse_args(argv)
    for name, least in (("size", 32), ("rounds", 1), ("steps", 1)):
        if getattr(flags, name) < least:
            parser.error(f"--{name} is {getattr(flags, name)}; it must be at least {least}")
    if flags.methods and flags.views:
        parser.error("--methods and --views are benchmarks of their own; give one of them")
    if flags.only and (flags.methods or flags.views):
        parser.error("--only goes with the rounds of Office-Caltech10")
    return flags


def main(argv: list[str] | None = None) -> None:
    """The command line. Exit code 2 with one line on stderr for bad usage."""
    flags = parsed(argv)
    measure, heads = rounds, ["row", "seconds", "of bare", "images/s"]
    if flags.methods:
        measure, heads = methods, ["row", "seconds", "of FedAvg's", "arithmetic", "over arithmetic"]
    elif flags.views:
        measure, heads = views, ["row", "seconds", "of the first", "images/s"]
    with one_line_on_stop("bench", "nothing was written"):
        flags.device = choose_device(flags.device)
        args = fedavg.arguments(["--device", flags.device])
        prepare(args)
        print(described(flags.device))
        rows = measure(flags)
        print(tabulate(rows, heads, floatfmt=".3f"))
        if flags.out:
            write(flags.out, args, {"heads": heads, "rows": rows, "command": command()})


if __name__ == "__main__":
    main()
