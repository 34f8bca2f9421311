"""What a round asks of a device, counted without one: kernels, copies from the host, reads by the host.

    python -m bench.launches                                     # all methods: minutes
    python -m bench.launches --only fedavg,fdse --out launches.json

Kernels: a round as on Office-Caltech10 at paper scale, of four clients with 42 steps (two of each client are
counted), and the evaluation of its validation parts. Batches have 4 images of 64x64 instead of 50 of 224x224,
which changes what an operator computes and not which ones are called; they are called on the CPU, in bf16.
The second round is counted: all terms are there then. An operator that is no view counts as one kernel, with
lists of tensors as one for each 48 of them: a lower bound, but that what a method computes on the host (the
orders of its batches; FDSE's small matrices, some 20 operators in a layer) is counted too.

`steps` are the loops over batches in local training; `own` is what a few algorithms compute besides, a
generator's steps at the server or a client's losses on its validation part (OWN names the functions);
`around` is all else: states loaded and copied, logs, the server, the evaluation. FedGaLA and FedEMA, the
`linear` methods, have three clients and a target, as on PACS, and their evaluation comes at the end alone.

Copies and reads: two steps of one local training in the second round on tensors that have a shape and no
values (torch's "meta" device), with FedSR's augmentation or the method's own. A copy brings numbers from the
host, at a read the host would wait for the device. The order of its images, one copy an epoch, is left out,
and so is what a copy into a tensor that is there, or an index on the host, brings.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import common
import fedavg
from plumbing.files import write_json
from plumbing.processes import to_device
from plumbing.provenance import provenance
from plumbing.results import command
from reproduce.methods import builder_of, modules
from reproduce.work import Meter, client_data, without_values

import torch
from tabulate import tabulate
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

SIZES = (80, 90, 15, 25)  # images of the four domains: 64, 72, 12 and 20 to train on
STEPS = 42  # in a round of Office-Caltech10: 16, 18, 3 and 5; two of each client are counted
CLASSES = tuple("0123456789")
SAME = """
    --rounds 3 --steps 2 --batch-size 4 --image-size 64 --normalize unit --weights none
    --split 0.8/0.1/0.1 --device cpu --precision bf16 --threads 1 --checkpoint-every 3600 --no-figures
"""
# What an algorithm computes outside its local steps, and not in order to average or to test.
OWN = {
    "fedcir": ["Server.train_generator", "moments"],  # Alg. 1, lines 8-11
    "baselines.fedgen": ["Server.train_generator"],
    "baselines.feddg_ga": ["error"],  # l_k of the received and of the trained network
    "baselines.local": ["correct"],  # of a client's validation part, which chooses its round
}
OF_ONE_KERNEL = 48  # tensors of a list
# Operators that are no views and launch nothing: memory, names of what is there, reads.
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias",
             "_local_scalar_dense", "_unsafe_view", "_reshape_alias", "lift_fresh", "set_"}


@dataclass
class Launches:
    """Of one round: kernels in the steps, of the algorithm's own passes and around them, and what around is
    made of; of one batch: copies from the host and reads by the host."""

    steps: int
    own: int
    around: int
    parts: dict[str, int]
    copies: float
    reads: float

    @property
    def share(self) -> float:
        """Of all kernels of the round those around the steps."""
        return self.around / (self.steps + self.own + self.around)


def arguments(module: ModuleType, *flags: str) -> common.Args:
    """A method's arguments for the counting."""
    words = ["--dataset", "officecaltech", "--protocol", "indomain", *SAME.split(), *flags]
    if issubclass(module.Args, common.LinearArgs):
        words[:4] = ["--dataset", "pacs", "--target", "d"]
    if hasattr(module.Args, "E0"):
        words += ["--E0", "0"]  # otherwise the one epoch would be its first part alone
    return module.arguments(words)


# Kernels


def kernels(operator, args: tuple) -> int:
    """How many kernels an operator launches on a GPU, at least."""
    if operator.is_view or operator._overloadpacket.__name__ in NO_KERNEL:
        return 0
    lists = [len(value) for value in args if isinstance(value, list | tuple) and of_tensors(value)]
    return math.ceil(max(lists, default=1) / OF_ONE_KERNEL)


def of_tensors(values: list | tuple) -> bool:
    return bool(values) and isinstance(values[0], Tensor)


class Kernels(TorchDispatchMode):
    """Counts the kernels of each part of a round."""

    def __init__(self):
        super().__init__()
        self.parts, self.count = ["loop"], Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count[self.parts[-1]] += kernels(operator, args)
        return operator(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def part(self, name: str):
        self.parts.append(name)
        try:
            yield
        finally:
            self.parts.pop()

    def of(self, name: str, function: Callable) -> Callable:
        """The function, whose kernels count for a part."""
        def counted(*args, **kwargs):
            with self.part(name):
                return function(*args, **kwargs)
        return counted

    def of_steps(self, loop: Callable) -> Callable:
        """The loop over batches, whose body and the making of its batches count as steps."""
        def counted(*args, **kwargs):
            with self.part("steps"):
                yield from loop(*args, **kwargs)
        return counted


def made_domains() -> list[common.Domain]:
    """Four domains of random images."""
    generator = torch.Generator().manual_seed(0)
    domains = []
    for name, n in zip("abcd", SIZES):
        images = torch.randint(0, 256, (n, 3, 64, 64), dtype=torch.uint8, generator=generator)
        images = images.contiguous(memory_format=torch.channels_last)
        domains.append(common.Domain(name, images, torch.arange(n) % len(CLASSES)))
    return domains


def kernels_of_a_round(module: ModuleType, *flags: str) -> Counter:
    """The kernels of the second round, by its parts."""
    counted, after = Kernels(), {}

    class Client(module.Client):
        train = counted.of("local", module.Client.train)

    class Server(module.Server):
        update = counted.of("server", module.Server.update)

    log = common.RunFolder.log

    def noting(folder, entry):
        after[entry["round"]] = Counter(counted.count)
        if entry["round"] == 2:
            raise Enough
        folder.best = {"round": 1, "val": 2.0}  # none is better, so that no test part is evaluated
        return log(folder, entry)

    with tempfile.TemporaryDirectory() as out, contextlib.ExitStack() as stack:
        swap = Swapped(stack)
        swap(module, "batches", counted.of_steps(common.batches))
        for name in OWN.get(module.__name__, []):
            *owner, function = name.split(".")
            place = getattr(module, owner[0]) if owner else module
            swap(place, function, counted.of("own", getattr(place, function)))
        swap(common, "evaluate", counted.of("evaluation", common.evaluate))
        swap(common, "on_gpu", lambda args: True)
        swap(common, "evaluation_batch", lambda args: 1000)
        swap(common.RunFolder, "log", noting)
        args = arguments(module, "--out", out, "--test-rounds", "best", *flags)
        if args.protocol == "linear":
            args = dataclasses.replace(args, eval_every=args.rounds)
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(contextlib.suppress(Enough))
        stack.enter_context(counted)
        common.rounds(Server, Client, args, builder_of(module), made_domains(), CLASSES)
    return after[2] - after[1]


class Enough(Exception):
    """The rounds that are counted are over."""


class Swapped:
    """Puts other values into modules and classes until a stack of contexts is left."""

    def __init__(self, stack: contextlib.ExitStack):
        self.stack = stack

    def __call__(self, place, name: str, value) -> None:
        self.stack.callback(setattr, place, name, getattr(place, name))
        setattr(place, name, value)


# Copies and reads


class Transfers(TorchDispatchMode):
    """Counts what crosses between the host and tensors without values."""

    def __init__(self):
        super().__init__()
        self.copies = self.reads = 0

    def of_list(self, tolist: Callable) -> Callable:
        """Tensor.tolist, which is no operator: a read."""
        def counted(tensor: Tensor) -> list:
            self.reads += tensor.is_meta
            return tolist(tensor)
        return counted

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self.reads += 1
            return 1.0
        if operator is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            to_host = torch.device(kwargs["device"]).type == "cpu"
            if args[0].is_meta and to_host:
                self.reads += 1
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            self.copies += not args[0].is_meta and not to_host
        return operator(*args, **kwargs)


def transfers_of_a_batch(module: ModuleType, *flags: str) -> tuple[float, float]:
    """Copies and reads in the steps of the second round, for each batch, but for the one copy of an epoch."""
    args = arguments(module, "--precision", "fp32", *flags)
    if args.augment == "none":
        args = dataclasses.replace(args, augment="fedsr")
    build, domains = builder_of(module), made_domains()
    fed = common.federation(module.Server, module.Client, args, build, domains, CLASSES)
    common.seed_all(0)
    fed.server.update({0: fed.clients[0].train(fed.server.download(0), 0)}, 0)
    down = to_device(fed.server.download(0), "meta")
    kept = to_device(common.kept(fed.clients[0]), "meta")

    args = dataclasses.replace(args, device="meta")
    with torch.device("meta"):
        net = build(args, 3, len(CLASSES))
    images = torch.empty(2 * args.batch_size, 3, 64, 64, dtype=torch.uint8, device="meta")
    rows = torch.empty(len(images), dtype=torch.int64, device="meta")
    part = common.Data(images, rows, rows, "meta", "unit")
    data = dataclasses.replace(client_data(images), train=part)
    with Transfers():  # some keep their state on the host
        client = module.Client(args, net, 0, data)
        client.load_state_dict(kept)

    seen, batches = Transfers(), 0

    def watched(*args, **kwargs) -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal batches
        with seen:
            for batch in common.batches(*args, **kwargs):
                batches += 1
                yield batch

    with contextlib.ExitStack() as stack:
        swap = Swapped(stack)
        swap(module, "batches", watched)
        if hasattr(module, "correct"):  # behind the steps: Local's choice of a round
            swap(module, "correct", lambda model, parts, args: [0] * len(parts))
        stack.enter_context(without_values(Meter()))
        swap(Tensor, "tolist", seen.of_list(Tensor.tolist))
        client.train(down, 1)
    epochs = batches // 2  # of two batches each
    return (seen.copies - epochs) / batches, seen.reads / batches


# The command


def launches_of(name: str, *flags: str) -> Launches:
    module = importlib.import_module(name)
    count = kernels_of_a_round(module, *flags)
    clients = len(SIZES)  # who train
    if getattr(module.Client, "pooled", False):
        clients = 1
    elif issubclass(module.Args, common.LinearArgs):
        clients -= 1  # the target's is tested alone
    steps = count.pop("steps") * STEPS // (2 * clients)
    own = count.pop("own", 0)
    return Launches(steps, own, sum(count.values()), dict(count), *transfers_of_a_batch(module))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.launches", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="modules, separated by commas: fedavg,baselines.fedbn")
    parser.add_argument("--out", default="", help="JSON file for the counts")
    flags = parser.parse_args(argv)
    names = flags.only.split(",") if flags.only else modules()
    unknown = sorted(set(names) - set(modules()))
    if unknown:
        there = ", ".join(modules())
        parser.exit(2, f"{parser.prog}: --only {','.join(unknown)}: expected some of {there}\n")
    rows, counts = [], {}
    for name in tqdm(names, unit="method"):
        found = launches_of(name)
        counts[name] = dataclasses.asdict(found)
        parts = " ".join(f"{part} {n}" for part, n in sorted(found.parts.items()))
        rows.append([name, found.steps, found.own, found.around, f"{100 * found.share:.1f}%", found.copies,
                     found.reads, parts])
    heads = ["method", "in steps", "own passes", "around", "share", "copies a batch", "reads a batch",
             "around: parts"]
    print(tabulate(rows, heads))
    if flags.out:
        args = fedavg.arguments(["--device", "cpu"])
        write_json(Path(flags.out), {"counts": counts, "command": command()} | provenance(args))


if __name__ == "__main__":
    main()
