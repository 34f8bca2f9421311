"""What a round costs beside what its arithmetic costs, all in one run on one machine.

    python -m tests.bench --archives DIR            # Office-Caltech10 at paper scale: 224x224, batch 50, four clients
    python -m tests.bench --archives DIR --size 96 --rounds 1 --only fedavg
    python -m tests.bench --methods                 # all methods on one backbone: time and arithmetic against FedAvg's
    python -m tests.bench --views --size 224        # FedGaLA's steps and two views of each image, against other libraries

Rows: `bare` is forward, backward, clipping and step of the same model on synthetic tensors of the same batches (for FDSE
with its loss), nothing else; `ours, training` is what `Client.train` takes, with batches, loading and copying of states;
`ours, whole round` adds aggregation, evaluation of every client, logs and checkpoints; `usual pipeline` is ImageFolder,
Resize, ToTensor and a DataLoader with two workers around a plain fp32 loop. Rows alternate; figures are
medians over `--rounds` passes after a first one that does not count; ratios are to the bare row of the same precision.

With `--methods`: the local training of one client and round, 20 steps of a ResNet18 on 64x64 images that are made up, batch 32.
`arithmetic` is the number of FLOPs in matrix products and convolutions of exactly this training, `over arithmetic` the time
ratio divided by the FLOP ratio, both against FedAvg: what a method costs beyond the passes that it adds.

With `--views`: seconds for the two 32x32 views of 64 images of `--size` pixels, by augment.py, by torchvision's v2 transforms image
by image, and by kornia if it is installed; then a training step of FedGaLA with SimCLR on them (batches, views, alignment)
against forward, backward and step of the same network on synthetic tensors.
"""

import argparse
import contextlib
import dataclasses
import statistics
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch
from tabulate import tabulate
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

import common
import domains
import fdse
import fedadg
import fedavg
import fedcir
import fedgala
import fedsr
import measures
from augment import AUGMENTATIONS, augment

METHODS = {"fedavg": (fedavg, common.backbone), "fdse": (fdse, fdse.build)}
# What each method's local training adds to FedAvg's, and the flags of its row.
COMPARED = {
    "FedAvg": (fedavg, common.backbone, [], "one forward and backward pass"),
    "FedL2R": (fedsr, fedsr.build, ["--variant", "fedl2r", "--alpha-l2r", "0.01"], "a linear layer to z"),
    "FedSR": (fedsr, fedsr.build, ["--alpha-l2r", "0.01", "--alpha-cmi", "0.001"], "a linear layer to mu and sigma"),
    "FedCiR": (fedcir, fedcir.build, [], "the same, and the generator's forward pass"),
    "FedADG": (fedadg, fedadg.build, ["--projection-size", "128", "--E0", "6"],
               "in 14 of 20 steps: a second forward pass of F, four of D, one of G, and their backward passes"),
    "FDSE": (fdse, fdse.build, [], "blocks with half of the channels, L_Con"),
}


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


class Ours:
    """A federation whose rounds are run one at a time by the round loop itself, with a checkpoint after each."""

    def __init__(self, method: str, args, data, classes, out: Path):
        module, build = METHODS[method]
        clients, _ = common.make_clients(args, data, len(classes))
        common.seed_all(0)
        net = build(args, 3, len(classes)).to(memory_format=torch.channels_last)
        members = {k: module.Client(args, net, k, c) for k, c in enumerate(clients)}
        out.mkdir()
        self.loop = common.Loop(module.Server(args, net, len(clients)), members, clients, [], args, {"method": method}, out, None, len(classes))

    def round(self) -> tuple[float, float]:
        """Seconds of training and of everything in the next round."""
        loop, before = self.loop, dict(self.loop.seconds)
        entry = loop.round(loop.t)
        loop.t += 1
        entry |= loop.evaluate(loop.t)
        loop.log(entry, tqdm(disable=True))
        loop.checkpoint(entry)
        spent = {k: v - before[k] for k, v in loop.seconds.items()}
        return spent["train"], sum(spent.values())


def usual(args, clients, folder: Path) -> float:
    """Seconds of a round of the usual pipeline: four ImageFolders, DataLoaders with two workers, fp32."""
    from torchvision import datasets, transforms
    transform = transforms.Compose([transforms.Resize((args.image_size,) * 2), transforms.ToTensor()])
    folders = {d: datasets.ImageFolder(next(folder.rglob(f)), transform)
               for d, (f, _) in domains.FOLDERS["officecaltech"].domains.items()}
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


def compare(passes: int) -> list[list]:
    """The rows of `--methods`."""
    images = torch.randint(0, 256, (800, 3, 64, 64), dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    made = {}
    for row, (module, build, flags, _) in COMPARED.items():
        args = module.arguments([
            "--dataset", "officecaltech", "--backbone", "resnet18", "--weights", "none", "--normalize", "unit", "--augment", "none",
            "--device", "cpu", "--protocol", "indomain", "--image-size", "64", "--steps", "20", "--batch-size", "32", "--clip", "0", "--lr", "0.01",
            "--momentum", "0.9", "--weight-decay", "0.0005", *flags])
        clients, _ = common.make_clients(args, [common.Domain("made", images, torch.arange(800) % 10)], 10)
        common.seed_all(0)
        net = build(args, 3, 10).to(memory_format=torch.channels_last)
        server, client = module.Server(args, net, 1), module.Client(args, net, 0, clients[0])
        server.update({0: client.train(server.download(0), 0)}, 0)  # from the second round on all terms are there
        with measures.counter() as flops:
            client.train(server.download(0), 1)
        made[row] = server, client, flops.get_total_flops(), []
    for _ in range(passes):
        for server, client, _, seconds in made.values():
            down = server.download(0)
            started = time.perf_counter()
            client.train(down, 1)
            seconds.append(time.perf_counter() - started)
    base, base_flops = statistics.median(made["FedAvg"][3]), made["FedAvg"][2]
    rows = []
    for row, (_, _, flops, seconds) in made.items():
        s = statistics.median(seconds)
        rows.append([row, s, s / base, flops / base_flops, s / base / (flops / base_flops), COMPARED[row][3]])
    return rows


def candidates() -> dict:
    """What makes SimCLR's views of uint8 images [64, 3, H, W]: {name: images -> float [64, 3, 32, 32]}."""
    from torchvision.transforms import v2
    each = v2.Compose([v2.RandomResizedCrop(32, antialias=True), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True),
                       v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8), v2.RandomGrayscale(0.2)])
    how = dataclasses.replace(AUGMENTATIONS["simclr"], size=32)
    found = {"augment.py, the whole batch": lambda x: augment(x.float().div_(255), how),
             "torchvision v2, image by image": lambda x: torch.stack([each(image) for image in x])}
    with contextlib.suppress(ImportError):
        import kornia.augmentation as K
        batch = K.AugmentationSequential(K.RandomResizedCrop((32, 32)), K.RandomHorizontalFlip(), K.RandomGrayscale(p=0.2),
                                         K.ColorJitter(0.8, 0.8, 0.8, 0.2, p=0.8))
        found["kornia, the whole batch (no antialias)"] = lambda x: batch(x.float().div(255))
    return found


def views(size: int, passes: int) -> list[list]:
    """The rows of `--views`: seconds, images a second, and of what."""
    images = torch.randint(0, 256, (256, 3, size, size), dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    args = fedgala.arguments(["--dataset", "pacs", "--steps", "3", "--batch-size", "64", "--image-size", str(size), "--device", "cpu"])
    clients, _ = common.make_clients(dataclasses.replace(args, target="b"), [
        common.Domain(name, images, torch.arange(256) % 7) for name in "ab"], 7)
    common.seed_all(0)
    net = fedgala.build(args, 3, 7).to(memory_format=torch.channels_last)
    server, client = fedgala.Server(args, net, 1), fedgala.Client(args, net, 0, clients[0])
    server.update({0: client.train(server.download(0), 0)}, 0)  # from the second round on gradients are aligned
    x = torch.rand(128, 3, 32, 32).contiguous(memory_format=torch.channels_last)

    def bare():
        model, opt = net.train(), common.adam(net, args, 1)
        for _ in range(args.steps):
            with common.autocast(args):
                loss = model.loss(*x.chunk(2))
            opt.zero_grad()
            loss.backward()
            opt.step()

    rows = {name: (lambda call=call: call(images[:64].repeat(2, 1, 1, 1)), 64) for name, call in candidates().items()}
    rows |= {"bare steps": (bare, 64 * args.steps), "FedGaLA's steps": (lambda: client.train(server.download(0), 1), 64 * args.steps)}
    seconds = {name: [] for name in rows}
    for n in range(-1, passes):
        for name, (call, _) in rows.items():
            started = time.perf_counter()
            call()
            seconds[name] += [time.perf_counter() - started] * (n >= 0)
    middle = {name: statistics.median(s) for name, s in seconds.items()}
    first = {True: middle["bare steps"], False: next(iter(middle.values()))}
    return [[name, s, rows[name][1] / s, s / first["steps" in name]] for name, s in middle.items()]


def write(path: str, rows: list[list]) -> None:
    common.write_json(Path(path), {"rows": rows, "command": common.command()} | common.provenance(
        fedavg.arguments(["--device", "cpu"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--archives", default="", help="folder with the Office-Caltech10 archive")
    parser.add_argument("--data", default="data", help="folder of the decoded cache (default: data)")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images, in pixels (default: 224)")
    parser.add_argument("--rounds", type=int, default=3, help="passes over all rows, of which the median is shown (default: 3)")
    parser.add_argument("--only", choices=tuple(METHODS), help="only this method's rows (default: fedavg and fdse)")
    parser.add_argument("--out", default="", help="JSON file for the figures")
    parser.add_argument("--methods", action="store_true", help="compare all methods on one backbone")
    parser.add_argument("--views", action="store_true", help="compare ways to make two views, and FedGaLA's steps with bare ones")
    flags = parser.parse_args()
    common.keep_freed_memory()
    if flags.views:
        rows = views(flags.size, flags.rounds)
        print(tabulate(rows, ["row", "seconds", "images/s", "of the first or bare row"], floatfmt=("", ".4f", ".0f", ".2f")))
        if flags.out:
            write(flags.out, rows)
        return
    if flags.methods:
        rows = compare(flags.rounds)
        print(tabulate(rows, ["method", "seconds", "of FedAvg's", "arithmetic", "over arithmetic", "adds to FedAvg"], floatfmt=".2f"))
        if flags.out:
            write(flags.out, rows)
        return
    made = {}
    for method in [flags.only] if flags.only else METHODS:
        module, _ = METHODS[method]
        for precision in ("fp32", "bf16"):
            made[method, precision] = module.arguments([
                "--dataset", "officecaltech", "--precision", precision, "--image-size", str(flags.size), "--device", "cpu",
                "--data", flags.data, "--archives", flags.archives, "--checkpoint-every", "0"])
    args = next(iter(made.values()))
    data, classes = common.load_domains(args)
    clients, _ = common.make_clients(args, data, len(classes))
    sizes = [len(b) for c in clients for b in torch.arange(len(c.train)).split(args.batch_size)]
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        federations = {key: Ours(key[0], a, data, classes, folder / "-".join(key)) for key, a in made.items()}
        archive = domains.find_archive(args, domains.FOLDERS["officecaltech"].archive)
        if archive:
            zipfile.ZipFile(archive).extractall(folder)
        for n in range(-1, flags.rounds):  # the first pass warms up and does not count
            for (method, precision), a in made.items():
                seconds = bare(method, a, sizes), *federations[method, precision].round()
                for row, s in zip(("bare", "ours, training", "ours, whole round"), seconds) if n >= 0 else ():
                    times.setdefault(f"{method} {precision}: {row}", []).append(s)
                    print(f"{method} {precision}: {row}: {s:.2f} s", file=sys.stderr)
            if archive and flags.only != "fdse":
                seconds = usual(args, clients, folder)
                if n >= 0:
                    times.setdefault("fedavg fp32: usual pipeline", []).append(seconds)
    middle = {row: statistics.median(seconds) for row, seconds in times.items()}
    table = [(row, f"{s:.2f}", f"{s / middle[row.split(':')[0] + ': bare']:.3f}", f"{sum(sizes) / s:.0f}") for row, s in middle.items()]
    print(tabulate(table, ["row", "seconds", "of bare", "images/s"], disable_numparse=True))
    if "fedavg fp32: usual pipeline" in middle:
        default = common.choose_precision("auto", "cpu")
        ratio = middle["fedavg fp32: usual pipeline"] / middle[f"fedavg {default}: ours, training"]
        print(f"fedavg at the default precision ({default}) is {ratio:.2f} times as fast as the usual pipeline")
    if flags.out:
        figures = {"seconds": times, "images": sum(sizes), "command": common.command()} | common.provenance(args)
        common.write_json(Path(flags.out), figures)


if __name__ == "__main__":
    main()
