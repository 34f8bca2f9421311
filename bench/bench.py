"""What a round costs beside what its arithmetic costs, all in one run on one machine.

    python -m bench.bench --archives DIR            # Office-Caltech10 at paper scale: 224x224, batch 50
    python -m bench.bench --archives DIR --size 96 --rounds 1 --only fedavg
    python -m bench.bench --methods                 # all methods on one backbone, against FedAvg
    python -m bench.bench --views --size 224        # two views of each image, and FedGaLA's steps
    python -m bench.bench --every                   # every method's local training, against bare arithmetic

With `--device cuda` all of it on a GPU, of which the clock waits until it has computed; a table and a file
have the figures of one device.

Rows: `bare` is forward, backward, clipping and step of the same model on synthetic tensors of the same
batches (for FDSE with its loss), nothing else; `ours, training` is what `Client.train` takes, with batches,
loading and copying of states; `ours, whole round` adds aggregation, evaluation of every client, logs and
checkpoints; `usual pipeline` is ImageFolder, Resize, ToTensor and a DataLoader with two workers around a
plain fp32 loop. Rows alternate; figures are medians over `--rounds` passes after a first one that does not
count; ratios are to the bare row of the same precision.

With `--methods`: the local training of one client and round, 20 steps of a ResNet18 on 64x64 images that are
made up, batch 32. `arithmetic` is the number of FLOPs in matrix products and convolutions of exactly this
training, `over arithmetic` the time ratio divided by the FLOP ratio, both against FedAvg: what a method costs
beyond the passes that it adds.

With `--views`: seconds for the two 32x32 views of 64 images of `--size` pixels, by plumbing/augment.py, by
torchvision's v2 transforms image by image, and by kornia if it is installed; then a training step of FedGaLA
with SimCLR on them (batches, views, alignment) against forward, backward and step of the same network on
synthetic tensors.

With `--every`: the training of `--methods`, with the settings that each method has for Office-Caltech10, for
all methods of the repository that train with labels, beside the same steps of the bare backbone on synthetic
tensors.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import statistics
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import common
import fdse
import fedadg
import fedavg
import fedcir
import fedgala
import fedsr
from plumbing.archives import find_archive
from plumbing.augment import AUGMENTATIONS, augment
from plumbing.catalog import FOLDERS
from plumbing.errors import Stop, ending
from plumbing.files import write_json
from plumbing.processes import prepare
from plumbing.provenance import cpu_name, provenance
from plumbing.results import command
from plumbing.settings import Parser, choose_device, choose_precision
from reproduce.measures.overhead import counter
from reproduce.methods import builder_of, method, modules, short_name

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_


def now(device: str) -> float:
    """The clock, in seconds, once the device has computed all that it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(call: Callable, device: str) -> float:
    started = now(device)
    call()
    return now(device) - started


def medians(calls: dict[str, Callable], passes: int, device: str) -> dict[str, float]:
    """The median seconds of each call. In a pass they come one after the other; a first pass does not
    count."""
    seconds = {name: [] for name in calls}
    for n in range(-1, passes):
        for name, call in calls.items():
            spent = seconds_of(call, device)
            if n >= 0:
                seconds[name].append(spent)
    return {name: statistics.median(of_row) for name, of_row in seconds.items()}


def random_images(n: int, size: int) -> Tensor:
    """uint8 [n, 3, size, size], as a decoded domain has them."""
    images = torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8)
    return images.contiguous(memory_format=torch.channels_last)


# A round of Office-Caltech10

METHODS = {"fedavg": (fedavg, common.backbone), "fdse": (fdse, fdse.build)}
ROWS = ("bare", "ours, training", "ours, whole round")


def bare(method: str, args, sizes: list[int]) -> float:
    """Seconds of one step for each batch of `sizes` on synthetic tensors."""
    build = METHODS[method][1]
    net = build(args, 3, 10).to(args.device, memory_format=torch.channels_last).train()
    blocks = [m for m in net.modules() if isinstance(m, fdse.DSEBlock)]
    glob = [(b.bn_dfe.running_mean.clone(), b.bn_dfe.running_var.clone()) for b in blocks]
    hat = None
    batches = {}
    for n in set(sizes):
        x = torch.rand(n, 3, args.image_size, args.image_size, device=args.device)
        y = torch.randint(0, 10, (n,), device=args.device)
        batches[n] = x.contiguous(memory_format=torch.channels_last), y
    opt = common.sgd(net, args, 0)
    started = now(args.device)
    for n in sizes:
        x, y = batches[n]
        with common.autocast(args):
            loss = cross_entropy(net(x), y)
        if blocks:
            l_con, hat = fdse.consistency([b.statistics for b in blocks], glob, hat, args.beta)
            loss = loss + args.lambda_ * l_con
        opt.zero_grad()
        loss.backward()
        clip_grad_norm_(net.parameters(), args.clip)
        opt.step()
    return now(args.device) - started


class Ours:
    """A federation whose rounds are run one at a time, by the round loop itself.

    The loop has a thread of its own, which waits before the first local training of each round.
    """

    def __init__(self, method: str, args, domains: list[common.Domain], classes: tuple[str, ...]):
        self.go, self.waits = threading.Semaphore(0), threading.Semaphore(0)
        self.t, self.training, self.error = -1, 0.0, None
        self.device = args.device
        loop = threading.Thread(target=self.run, args=(method, args, domains, classes), daemon=True)
        quiet = io.StringIO()  # the settings and the progress bar
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            loop.start()
            self.wait()

    def run(self, method: str, args, domains: list[common.Domain], classes: tuple[str, ...]) -> None:
        module, build = METHODS[method]
        try:
            common.rounds(module.Server, self.timed(module.Client), args, build, domains, classes)
        except BaseException as e:
            self.error = e
        self.waits.release()

    def timed(self, Client: type) -> type:
        """The method's client, which waits for its round and counts the seconds of its training."""
        ours = self

        class Timed(Client):
            def train(self, down, t):
                if t > ours.t:
                    ours.t = t
                    ours.waits.release()
                    ours.go.acquire()
                started = now(ours.device)
                up = super().train(down, t)
                ours.training += now(ours.device) - started
                return up

        return Timed

    def wait(self) -> None:
        """Until the loop waits for the next round."""
        self.waits.acquire()
        if self.error:
            raise self.error

    def round(self) -> tuple[float, float]:
        """Seconds of training and of everything in the next round."""
        self.training, started = 0.0, now(self.device)
        self.go.release()
        self.wait()
        return self.training, now(self.device) - started


def usual(args, clients: list[common.ClientData], folder: Path) -> float:
    """Seconds of a round of the usual pipeline: four ImageFolders, DataLoaders with two workers, fp32."""
    from torchvision import datasets, transforms
    resize = transforms.Resize((args.image_size, args.image_size))
    transform = transforms.Compose([resize, transforms.ToTensor()])
    images = {}
    for domain, (name, _) in FOLDERS["officecaltech"].domains.items():
        images[domain] = datasets.ImageFolder(next(folder.rglob(name)), transform)
    net = common.backbone(args, 3, 10).to(args.device).train()
    started = now(args.device)
    for client in clients:
        subset = torch.utils.data.Subset(images[client.name], client.train.index.tolist())
        loader = torch.utils.data.DataLoader(subset, args.batch_size, shuffle=True, num_workers=2)
        opt = torch.optim.SGD(net.parameters(), lr=args.lr)
        for x, y in loader:
            x, y = x.to(args.device), y.to(args.device)
            loss = cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            clip_grad_norm_(net.parameters(), args.clip)
            opt.step()
    return now(args.device) - started


def office_args(flags, method: str, precision: str, out: Path):
    """The arguments of a run of `--size` with a checkpoint after each round."""
    words = ["--dataset", "officecaltech", "--device", flags.device, "--checkpoint-every", "0"]
    words += ["--precision", precision, "--image-size", str(flags.size), "--out", str(out)]
    words += ["--data", flags.data, "--archives", flags.archives]
    return METHODS[method][0].arguments(words)


def measure_rounds(flags) -> None:
    """The rows of a round of Office-Caltech10: a table, and `--out`."""
    methods = [flags.only] if flags.only else list(METHODS)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        settings = {}
        for method in methods:
            for precision in ("fp32", "bf16"):
                out = folder / f"{method}-{precision}"
                settings[method, precision] = office_args(flags, method, precision, out)
        args = next(iter(settings.values()))
        domains, classes = common.load_domains(args)
        clients, _ = common.make_clients(args, domains, len(classes))
        sizes = []
        for client in clients:
            sizes += [len(part) for part in common.cut_batches(torch.arange(len(client.train)), args)]
        federations = {}
        for (method, precision), of_row in settings.items():
            federations[method, precision] = Ours(method, of_row, domains, classes)
        archive = find_archive(args, FOLDERS["officecaltech"].archive)
        with_usual = archive is not None and "fedavg" in methods
        if with_usual:
            zipfile.ZipFile(archive).extractall(folder)
        times: dict[str, list[float]] = {}
        for n in range(-1, flags.rounds):  # the first pass warms up and does not count
            figures = {}
            for (method, precision), of_row in settings.items():
                spent = bare(method, of_row, sizes), *federations[method, precision].round()
                for row, s in zip(ROWS, spent):
                    figures[f"{method} {precision}: {row}"] = s
            if with_usual:
                figures["fedavg fp32: usual pipeline"] = usual(args, clients, folder)
            if n < 0:
                continue
            for row, s in figures.items():
                print(f"{row}: {s:.2f} s", file=sys.stderr)
                times.setdefault(row, []).append(s)
    show_rounds(times, sum(sizes), flags.device)
    if flags.out:
        figures = {"device": flags.device, "seconds": times, "images": sum(sizes), "command": command()}
        write_json(Path(flags.out), figures | provenance(args))


def show_rounds(times: dict[str, list[float]], images: int, device: str) -> None:
    """The table of a round's rows, and how it compares with the usual pipeline."""
    middle = {row: statistics.median(seconds) for row, seconds in times.items()}
    table = []
    for row, s in middle.items():
        method_and_precision, _, _ = row.partition(":")
        of_bare = s / middle[f"{method_and_precision}: bare"]
        table.append([row, f"{s:.2f}", f"{of_bare:.3f}", f"{images / s:.0f}"])
    print(tabulate(table, ["row", "seconds", "of bare", "images/s"], disable_numparse=True))
    if "fedavg fp32: usual pipeline" in middle:
        default = choose_precision("auto", device)
        ratio = middle["fedavg fp32: usual pipeline"] / middle[f"fedavg {default}: ours, training"]
        print(f"fedavg at the default precision ({default}) is {ratio:.2f} times as fast as the usual "
              "pipeline")


# All methods on one backbone

# What each method's local training adds to FedAvg's, and the flags of its row.
COMPARED = {
    "FedAvg": (fedavg, common.backbone, [], "one forward and backward pass"),
    "FedL2R": (fedsr, fedsr.build, ["--variant", "fedl2r", "--alpha-l2r", "0.01"], "a linear layer to z"),
    "FedSR": (fedsr, fedsr.build, ["--alpha-l2r", "0.01", "--alpha-cmi", "0.001"],
              "a linear layer to mu and sigma"),
    "FedCiR": (fedcir, fedcir.build, [], "the same, and the generator's forward pass"),
    "FedADG": (fedadg, fedadg.build, ["--projection-size", "128", "--E0", "6"],
               "in 14 of 20 steps: a second forward pass of F, four of D, one of G, and their backward "
               "passes"),
    "FDSE": (fdse, fdse.build, [], "blocks with half of the channels, L_Con"),
}
SAME_FOR_ALL = """
    --dataset officecaltech --protocol indomain --image-size 64 --normalize unit --augment none
    --backbone resnet18 --weights none --batch-size 32 --clip 0 --lr 0.01 --momentum 0.9
    --weight-decay 0.0005
"""


def second_round(module, build, flags: list[str], device: str, steps: int) -> Callable:
    """The local training of a method's only client in its second round, in which all terms are there."""
    words = [*SAME_FOR_ALL.split(), "--device", device, "--steps", str(steps), *flags]
    args = module.arguments(words)
    domain = common.Domain("made", random_images(800, 64), torch.arange(800) % 10)
    (data,), _ = common.make_clients(args, [domain], 10)
    common.seed_all(0)
    net = build(args, 3, 10).to(args.device, memory_format=torch.channels_last)
    server, client = module.Server(args, net, 1), module.Client(args, net, 0, data)
    server.update({0: client.train(server.download(0), 0)}, 0)
    return partial(client.train, server.download(0), 1)


def compare(passes: int, device: str, steps: int) -> list[list]:
    """The rows of `--methods`."""
    calls, flops = {}, {}
    for row, (module, build, flags, _) in COMPARED.items():
        calls[row] = second_round(module, build, flags, device, steps)
        with counter() as counted:
            calls[row]()
        flops[row] = counted.get_total_flops()
    seconds = medians(calls, passes, device)
    rows = []
    for row, (_, _, _, adds) in COMPARED.items():
        time_ratio, flop_ratio = seconds[row] / seconds["FedAvg"], flops[row] / flops["FedAvg"]
        rows.append([row, seconds[row], time_ratio, flop_ratio, time_ratio / flop_ratio, adds])
    return rows


# Every method beside bare arithmetic

# Flags of a method that the ones of all others do not fit.
EXCEPT = {"baselines.scaffold": ["--momentum", "0"]}


def bare_backbone(device: str, steps: int) -> Callable:
    """Forward, backward and step of FedAvg's network on one synthetic batch, as often as a method steps."""
    args = fedavg.arguments([*SAME_FOR_ALL.split(), "--device", device])
    net = common.backbone(args, 3, 10).to(args.device, memory_format=torch.channels_last).train()
    x = torch.rand(args.batch_size, 3, args.image_size, args.image_size, device=args.device)
    x, y = x.contiguous(memory_format=torch.channels_last), torch.arange(len(x), device=args.device) % 10
    opt = common.sgd(net, args, 0)

    def train() -> None:
        for _ in range(steps):
            with common.autocast(args):
                loss = cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    return train


def every(passes: int, device: str, steps: int) -> list[list]:
    """The rows of `--every`; a method that cannot be trained so is named on stderr and has none."""
    calls = {"bare": bare_backbone(device, steps)}
    for name in modules():
        module = method(short_name(name))
        if issubclass(module.Args, common.LinearArgs):
            print(f"{name}: without labels; its steps are in --views", file=sys.stderr)
            continue
        try:
            calls[name] = second_round(module, builder_of(module), EXCEPT.get(name, []), device, steps)
        except (Stop, SystemExit, RuntimeError, ValueError, TypeError, KeyError) as e:
            print(f"{name}: not measured ({type(e).__name__}: {str(e)[:80]})", file=sys.stderr)
    seconds = medians(calls, passes, device)
    return [[name, spent, spent / seconds["bare"]] for name, spent in seconds.items()]


# Views

VIEW = 32  # pixels
IMAGES = 64  # of which two views are made


def view_makers() -> dict[str, Callable]:
    """What makes SimCLR's views of uint8 images [B, 3, H, W]: float [B, 3, 32, 32] each."""
    makers = {"augment.py, the whole batch": whole_batch, "torchvision v2, image by image": image_by_image()}
    with contextlib.suppress(ImportError):
        makers["kornia, the whole batch (no antialias)"] = by_kornia()
    return makers


def whole_batch(images: Tensor) -> Tensor:
    how = dataclasses.replace(AUGMENTATIONS["simclr"], size=VIEW)
    return augment(images.float().div_(255), how)


def image_by_image() -> Callable:
    from torchvision.transforms import v2
    jitter = v2.ColorJitter(0.8, 0.8, 0.8, 0.2)
    each = v2.Compose([
        v2.RandomResizedCrop(VIEW, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.RandomApply([jitter], p=0.8),
        v2.RandomGrayscale(0.2),
    ])

    def make(images: Tensor) -> Tensor:
        return torch.stack([each(image) for image in images])

    return make


def by_kornia() -> Callable:
    import kornia.augmentation as K
    batch = K.AugmentationSequential(
        K.RandomResizedCrop((VIEW, VIEW)),
        K.RandomHorizontalFlip(),
        K.RandomGrayscale(p=0.2),
        K.ColorJitter(0.8, 0.8, 0.8, 0.2, p=0.8),
    )

    def make(images: Tensor) -> Tensor:
        return batch(images.float().div(255))

    return make


def bare_steps(net: nn.Module, args, x: Tensor) -> None:
    """Forward, backward and step of FedGaLA's network on two views x [2B, 3, 32, 32]."""
    model, opt = net.train(), common.adam(net, args, 1)
    for _ in range(args.steps):
        with common.autocast(args):
            loss = model.loss(*x.chunk(2))
        opt.zero_grad()
        loss.backward()
        opt.step()


def views(size: int, passes: int, device: str) -> list[list]:
    """The rows of `--views`: seconds, images a second, and of what."""
    images = random_images(256, size)
    words = f"--dataset pacs --steps 3 --batch-size {IMAGES} --image-size {size}"
    args = fedgala.arguments([*words.split(), "--device", device])
    domains = [common.Domain(name, images, torch.arange(256) % 7) for name in ("a", "b")]
    (data,), _ = common.make_clients(dataclasses.replace(args, target="b"), domains, 7)
    common.seed_all(0)
    net = fedgala.build(args, 3, 7).to(device, memory_format=torch.channels_last)
    server, client = fedgala.Server(args, net, 1), fedgala.Client(args, net, 0, data)
    server.update({0: client.train(server.download(0), 0)}, 0)  # from round 2 on gradients are aligned
    x = torch.rand(2 * IMAGES, 3, VIEW, VIEW, device=device).contiguous(memory_format=torch.channels_last)
    batch = images[:IMAGES].repeat(2, 1, 1, 1).to(device)

    makers = {}
    for name, make in view_makers().items():
        makers[name] = partial(make, batch)
    steps = {
        "bare steps": partial(bare_steps, net, args, x),
        "FedGaLA's steps": partial(client.train, server.download(0), 1),
    }
    seconds = medians(makers | steps, passes, device)
    rows = []
    for group, count in ((makers, IMAGES), (steps, IMAGES * args.steps)):
        first = seconds[next(iter(group))]
        for name in group:
            rows.append([name, seconds[name], count / seconds[name], seconds[name] / first])
    return rows


# The command


def write(path: str, rows: list[list], device: str) -> None:
    figures = {"device": device, "rows": rows, "command": command()}
    write_json(Path(path), figures | provenance(fedavg.arguments(["--device", device])))


def show(rows: list[list], heads: list[str], formats: tuple[str, ...] | str, flags) -> None:
    """Print a table, and write it to `--out`."""
    print(tabulate(rows, heads, floatfmt=formats))
    if flags.out:
        write(flags.out, rows, flags.device)


def described(device: str) -> str:
    """The device in words: cuda:0 (NVIDIA H200), cpu (its name), 2 threads."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name()
    return f"{device} ({name}), {torch.get_num_threads()} threads"


def refuse_another_device(out: str, device: str) -> None:
    """Stop if the file has figures of another device: what is compared is of one."""
    path = Path(out)
    if not out or not path.exists():
        return
    try:
        figures = json.loads(path.read_text())
        gpu = bool(figures["hardware"]["gpu"])
    except (ValueError, KeyError, TypeError):
        raise Stop(f"--out {out} is no file of this benchmark: give another one", 2)
    theirs = figures.get("device", "cuda" if gpu else "cpu")
    if theirs.split(":")[0] != device.split(":")[0]:
        raise Stop(f"--out {out} has figures of {theirs}, not of {device}: give another one", 2)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The flags, checked."""
    parser = Parser(prog="bench", allow_abbrev=False, description=__doc__.split("\n\nRows: ")[0],
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archives", default="", help="folder with the Office-Caltech10 archive")
    parser.add_argument("--data", default="data", help="folder of the decoded cache (default: data)")
    parser.add_argument("--size", type=int, default=224,
                        help="height and width of the images, in pixels (default: 224)")
    parser.add_argument("--rounds", type=int, default=3,
                        help="passes over all rows, of which the median is shown (default: 3)")
    parser.add_argument("--only", choices=tuple(METHODS),
                        help="only this method's rows (default: fedavg and fdse)")
    parser.add_argument("--out", default="", help="JSON file for the figures")
    parser.add_argument("--methods", action="store_true", help="compare all methods on one backbone")
    parser.add_argument("--views", action="store_true",
                        help="compare ways to make two views, and FedGaLA's steps with bare ones")
    parser.add_argument("--every", action="store_true", help="every method beside bare arithmetic")
    parser.add_argument("--steps", type=int, default=20,
                        help="steps of --methods and --every (default: 20)")
    parser.add_argument("--device", default="cpu", help="auto, cpu, cuda, cuda:1, ... (default: cpu)")
    flags = parser.parse_args(argv)
    for name, least in (("size", 32), ("rounds", 1), ("steps", 1)):
        if getattr(flags, name) < least:
            parser.error(f"--{name} is {getattr(flags, name)}; it must be at least {least}")
    asked = [f"--{name}" for name in ("methods", "views", "every") if getattr(flags, name)]
    if len(asked) > 1:
        parser.error(f"{' and '.join(asked)} are benchmarks of their own; give one of them")
    if flags.only and asked:
        parser.error(f"--only goes with the rounds of Office-Caltech10, not with {asked[0]}")
    return flags


def main(argv: list[str] | None = None) -> None:
    """The command line. Exit code 2 with one line on stderr for bad usage."""
    flags = parsed(argv)
    try:
        measure(flags)
        return
    except (Stop, OSError, KeyboardInterrupt, MemoryError, RuntimeError) as e:
        message, code = ending(e, "no figure is kept")
    print(f"bench: {message}", file=sys.stderr)
    sys.exit(code)


def measure(flags: argparse.Namespace) -> None:
    """The benchmark that the flags ask for."""
    flags.device = choose_device(flags.device)
    refuse_another_device(flags.out, flags.device)
    prepare(fedavg.arguments(["--device", flags.device]))
    print(described(flags.device))
    if flags.views:
        heads = ["row", "seconds", "images/s", "of the first or bare row"]
        show(views(flags.size, flags.rounds, flags.device), heads, ("", ".4f", ".0f", ".2f"), flags)
    elif flags.methods:
        heads = ["method", "seconds", "of FedAvg's", "arithmetic", "over arithmetic", "adds to FedAvg"]
        show(compare(flags.rounds, flags.device, flags.steps), heads, ".2f", flags)
    elif flags.every:
        heads = ["method", "seconds", "of bare"]
        show(every(flags.rounds, flags.device, flags.steps), heads, ("", ".3f", ".2f"), flags)
    else:
        measure_rounds(flags)


if __name__ == "__main__":
    main()
