"""How many runs pay on one device: images a second of 1, 2, 4 and 8 of them at a time.

    python -m bench.together --device cuda
    python -m bench.together --device cuda --method fdse --jobs 1,2,4,8,16 --out together.json

Each run is a process of its own with its share of the processor's threads. It trains four clients of made-up
images with the network and batches of Office-Caltech10 at paper scale: a round that does not count, then,
when all of them are ready, `--rounds` rounds of training and averaging. The images of all runs are divided by
the seconds until the last one is done. Evaluation, logs and checkpoints are left out. Memory is what PyTorch
has reserved on a GPU for a run at most.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import common
import fdse
import fedavg
from bench.bench import described, now, random_images, refuse_another_device
from plumbing.errors import Stop, ending
from plumbing.files import write_json
from plumbing.processes import prepare
from plumbing.provenance import provenance
from plumbing.results import command
from plumbing.settings import choose_device

import torch
from tabulate import tabulate

METHODS = {"fedavg": (fedavg, common.backbone), "fdse": (fdse, fdse.build)}
CLIENTS = 4


# One run


def one_run(flags) -> None:
    """What a process does: it says "ready", waits for a line, trains, and says how many images that were."""
    module, build = METHODS[flags.method]
    words = ["--dataset", "officecaltech", "--device", flags.device, "--image-size", str(flags.size)]
    args = module.arguments(words)
    prepare(args)
    domains = []
    for k in range(CLIENTS):
        labels = torch.arange(flags.images) % 10
        domains.append(common.Domain(f"made-{k}", random_images(flags.images, flags.size), labels))
    sources, _ = common.make_clients(args, domains, 10)
    common.seed_all(0)
    net = build(args, 3, 10).to(args.device, memory_format=torch.channels_last)
    server = module.Server(args, net, CLIENTS)
    clients = [module.Client(args, net, k, data) for k, data in enumerate(sources)]
    train_round(server, clients, 0)
    now(args.device)
    print("ready", flush=True)
    sys.stdin.readline()
    for t in range(1, flags.rounds + 1):
        train_round(server, clients, t)
    now(args.device)
    reserved = None
    if args.device.startswith("cuda"):
        reserved = torch.cuda.max_memory_reserved(args.device) >> 20
    images = flags.rounds * sum(common.images_in_round(len(data.train), args) for data in sources)
    print(json.dumps({"images": images, "reserved_mib": reserved}), flush=True)


def train_round(server, clients: list, t: int) -> None:
    uploads = {}
    for k, client in enumerate(clients):
        uploads[k] = client.train(server.download(k), t)
    server.update(uploads, t)


# Several at a time


def together(flags, jobs: int) -> dict:
    """The figures of `jobs` runs at a time. Stop if one of them cannot run."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    words = [sys.executable, "-m", "bench.together", "--one", "--method", flags.method]
    words += ["--device", flags.device, "--rounds", str(flags.rounds), "--images", str(flags.images)]
    words += ["--size", str(flags.size)]
    processes = []
    try:
        for _ in range(jobs):
            processes.append(subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for process in processes:
            heard(process, jobs)
        started = time.perf_counter()
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        said = [json.loads(heard(process, jobs)) for process in processes]
        seconds = time.perf_counter() - started
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    images = sum(run["images"] for run in said)
    return {"jobs": jobs, "seconds": seconds, "images_per_second": images / seconds,
            "reserved_mib": said[0]["reserved_mib"]}


def heard(process: subprocess.Popen, jobs: int) -> str:
    """The next line of a run; Stop if it has ended."""
    line = process.stdout.readline()
    if not line:
        raise Stop(f"with {jobs} at a time a run ended before its time")
    return line


# The command


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.together",
                                     description=__doc__.split("\n\nEach")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="auto, cpu, cuda, cuda:1, ... (default: cpu)")
    parser.add_argument("--jobs", default="1,2,4,8", help="runs at a time (default: 1,2,4,8)")
    parser.add_argument("--method", default="fedavg", choices=tuple(METHODS), help="default: fedavg")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--images", type=int, default=500, help="images of each client (default: 500)")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images (default: 224)")
    parser.add_argument("--out", default="", help="JSON file for the figures")
    parser.add_argument("--one", action="store_true", help="be one of the runs; for the program itself")
    flags = parser.parse_args(argv)
    flags.device = choose_device(flags.device)
    numbers = flags.jobs.split(",")
    if not all(number.isascii() and number.isdigit() and int(number) for number in numbers):
        raise Stop(f"--jobs is {flags.jobs}; expected numbers from 1 on, such as 1,2,4,8", 2)
    flags.jobs = [int(number) for number in numbers]
    return flags


def measure(argv: list[str] | None) -> None:
    flags = parsed(argv)
    if flags.one:
        one_run(flags)
        return
    refuse_another_device(flags.out, flags.device)
    print(described(flags.device))
    rows = []
    for jobs in flags.jobs:
        try:
            rows.append(together(flags, jobs))
        except Stop as stop:
            print(f"together: {stop}; more at a time were not tried", file=sys.stderr)
            break
    shown = []
    for row in rows:
        speedup = row["images_per_second"] / rows[0]["images_per_second"]
        memory = "-" if row["reserved_mib"] is None else row["reserved_mib"]
        shown.append([row["jobs"], f"{row['seconds']:.2f}", f"{row['images_per_second']:.0f}",
                      f"{speedup:.2f}", memory])
    heads = ["runs at a time", "seconds", "images/s of all", "of the first row", "MiB reserved by a run"]
    print(tabulate(shown, heads, disable_numparse=True))
    if flags.out:
        figures = {"device": flags.device, "rows": rows, "command": command()}
        write_json(Path(flags.out), figures | provenance(fedavg.arguments(["--device", flags.device])))


def main(argv: list[str] | None = None) -> None:
    """The command line. Exit code 2 with one line on stderr for bad usage."""
    try:
        measure(argv)
        return
    except (Stop, OSError, KeyboardInterrupt, MemoryError, RuntimeError) as e:
        message, code = ending(e, "no figure is kept")
    print(f"together: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
