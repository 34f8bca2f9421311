"""What a round costs beside what its arithmetic costs, all in one run on one machine.

    python -m tests.bench --archives DIR            # Office-Caltech10 at paper scale: 224x224, batch 50, four clients
    python -m tests.bench --archives DIR --size 96 --rounds 1 --only fedavg

Rows: `bare` is forward, backward, clipping and step of the same model on synthetic tensors of the same batches (for FDSE
with its loss), nothing else; `ours, training` is what `Client.train` takes, with batches, loading and copying of states;
`ours, whole round` adds aggregation, evaluation of every client, logs and checkpoints; `usual pipeline` is ImageFolder,
Resize, ToTensor and a DataLoader with two workers around a plain fp32 loop. Rows alternate, the fastest of `--rounds`
passes counts, and ratios are to the bare row of the same precision.
"""

import argparse
import dataclasses
import json
import os
import resource
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch
from tabulate import tabulate
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import common
import fdse
import fedavg

METHODS = {"fedavg": (fedavg, common.backbone), "fdse": (fdse, fdse.build)}


def bare(method: str, args, sizes: list[int]) -> float:
    """Seconds of one step for each batch of `sizes` on synthetic tensors."""
    net = METHODS[method][1](args, 3, 10).to(memory_format=torch.channels_last).train()
    blocks = [m for m in net.modules() if isinstance(m, fdse.DSEBlock)]
    glob, hat = [(b.bn_dfe.running_mean.clone(), b.bn_dfe.running_var.clone()) for b in blocks], None
    data = {n: (torch.rand(n, 3, args.image_size, args.image_size).contiguous(memory_format=torch.channels_last),
                torch.randint(0, 10, (n,))) for n in set(sizes)}
    opt = common.sgd(net, args, 0)
    started = time.perf_counter()
    for n in sizes:
        x, y = data[n]
        with common.autocast(args):
            loss = cross_entropy(net(x), y)
        if blocks:
            l_con, hat = fdse.consistency([b.statistics for b in blocks], glob, hat, args.beta)
            loss = loss + args.lambda_ * l_con
        opt.zero_grad()
        loss.backward()
        clip_grad_norm_(net.parameters(), args.clip)
        opt.step()
    return time.perf_counter() - started


def ours(method: str, args, domains, classes) -> tuple[float, float]:
    """Seconds of training and of everything in the second of two rounds (the first one warms up)."""
    module, build = METHODS[method]
    with tempfile.TemporaryDirectory() as out:
        args = dataclasses.replace(args, rounds=2, out=out, checkpoint_every=0.0)
        module.Args.__module__ = module.__name__
        common.run_one(module.Server, module.Client, args, build, domains, classes)
        first, second = (json.loads(line)["seconds"] for line in (Path(out) / "timing.jsonl").read_text().splitlines())
        result = json.loads((Path(out) / "result.json").read_text())
    written = result["seconds"]["write"] / 2
    train, server, evaluate = (second[k] - first[k] for k in ("train", "server", "evaluate"))
    return train, train + server + evaluate + written


def usual(args, clients, folder: Path) -> float:
    """Seconds of a round of the usual pipeline: four ImageFolders, DataLoaders with two workers, fp32."""
    from torchvision import datasets, transforms
    transform = transforms.Compose([transforms.Resize((args.image_size,) * 2), transforms.ToTensor()])
    folders = {d: datasets.ImageFolder(next(folder.rglob(f)), transform)
               for d, (f, _) in common.FOLDERS["officecaltech"].domains.items()}
    net = common.backbone(args, 3, 10).train()
    started = time.perf_counter()
    for c in clients:
        subset = torch.utils.data.Subset(folders[c.name], c.train.index.tolist())
        opt = torch.optim.SGD(net.parameters(), lr=args.lr)
        for x, y in torch.utils.data.DataLoader(subset, args.batch_size, shuffle=True, num_workers=2):
            loss = cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            clip_grad_norm_(net.parameters(), args.clip)
            opt.step()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--archives", default="", help="folder with the Office-Caltech10 archive")
    parser.add_argument("--data", default="data", help="folder of the decoded cache")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images, in pixels")
    parser.add_argument("--rounds", type=int, default=2, help="passes over all rows; the fastest counts")
    parser.add_argument("--only", choices=tuple(METHODS), help="one method instead of both")
    parser.add_argument("--out", default="", help="JSON file for the figures")
    flags = parser.parse_args()
    common.keep_freed_memory()
    made = {}
    for method in [flags.only] if flags.only else METHODS:
        module, _ = METHODS[method]
        for precision in ("fp32", "bf16"):
            made[method, precision] = common.parse(module.Args, module.PAPER, [
                "--dataset", "officecaltech", "--precision", precision, "--image-size", str(flags.size), "--device", "cpu",
                "--data", flags.data, "--archives", flags.archives])
    args = next(iter(made.values()))
    domains, classes = common.load_domains(args)
    clients, _ = common.make_clients(args, domains, len(classes))
    sizes = [len(b) for c in clients for b in torch.arange(len(c.train)).split(args.batch_size)]
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        archive = common.find_archive(args, common.FOLDERS["officecaltech"].archive)
        if archive:
            zipfile.ZipFile(archive).extractall(folder)
        for _ in range(flags.rounds):
            for (method, precision), a in made.items():
                bare(method, a, sizes[:4])
                train, whole = ours(method, a, domains, classes)
                for row, seconds in (("bare", bare(method, a, sizes)), ("ours, training", train), ("ours, whole round", whole)):
                    times.setdefault(f"{method} {precision}: {row}", []).append(seconds)
                    print(f"{method} {precision}: {row}: {seconds:.2f} s", file=sys.stderr)
            if archive and "fedavg fp32: bare" in times:
                times.setdefault("fedavg fp32: usual pipeline", []).append(usual(args, clients, Path(folder)))
    best = {row: min(seconds) for row, seconds in times.items()}
    table = [(row, f"{s:.2f}", f"{s / best[row.split(':')[0] + ': bare']:.3f}", f"{sum(sizes) / s:.0f}") for row, s in best.items()]
    print(tabulate(table, ["row", "seconds", "of bare", "images/s"], disable_numparse=True))
    if "fedavg fp32: usual pipeline" in best:
        print(f"fedavg at the default precision ({common.choose_precision('auto', 'cpu')}) is "
              f"{best['fedavg fp32: usual pipeline'] / best['fedavg bf16: ours, training']:.2f} times as fast as the usual pipeline")
    print(f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")
    if flags.out:
        figures = {"seconds": times, "images": sum(sizes), "command": common.command()} | common.provenance(args)
        common.write_json(Path(flags.out), figures)


if __name__ == "__main__":
    main()
