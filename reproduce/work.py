"""How much a run computes, without computing it: its steps are taken on tensors that have a shape and no
values (torch's "meta" device), and what each operator would do is counted.

Not counted: the decoding and augmentation of images, what the server does, and what FedCiR's and FedGaLA's
clients do from the second round on alone (a generator's pass, an alignment: below 5% of a step).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import sys
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace

import common
from common import ClientData, Data
from plumbing.catalog import FOLDERS, own_folder
from plumbing.disk import copies
from plumbing.settings import Args, ratios, shares
from reproduce.measures.overhead import conv_backward
from reproduce.methods import builder_of

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# Images of each domain where the catalogue has no count that could be checked; for plans alone.
DIGITS = {"d0": 300, "d15": 300, "d30": 300, "d45": 299, "d60": 299, "d75": 299}
MNIST = {"m0": 1000, "m15": 1000, "m30": 1000, "m45": 1000, "m60": 1000, "m75": 1000}
TERRAINC = {"location_38": 9767, "location_43": 4020, "location_46": 6122, "location_100": 4879}
CAMERAS = {f"camera {n}": 2000 for n in range(10)}  # of FedCiR's choice, which is not published
REAL = {"domainnet10": 4900, "domainnet20": 9638}  # what FedGaLA's total leaves for `real`, and its share
CLASSES = 10  # of all networks here: more classes change a step by less than 1%
BETTER = 2.0  # evaluations of n that are better than those before, over the root of n (1.4 to 2.4 in records)
LINEAR_OPERATORS = 15  # of a step of the linear classifier


# The images of a run


def is_grey(dataset: str) -> bool:
    return dataset == "digits" or dataset.startswith("rotatedmnist")


def counts_of(dataset: str) -> tuple[dict[str, int], bool]:
    """The images of each domain, and whether some of them are a guess."""
    if dataset == "digits":
        return DIGITS, False
    if dataset.startswith("rotatedmnist"):
        return MNIST, False
    if dataset == "terrainc":
        return TERRAINC, True
    if dataset == "iwildcam":
        return CAMERAS, True
    counts, guessed = {}, False
    for domain, (_, count) in FOLDERS[dataset].domains.items():
        if count is None:
            count, guessed = REAL[dataset], True
        counts[domain] = count
    return counts, guessed


@dataclass
class Images:
    """What a run trains on and evaluates."""

    train: list[int] = field(default_factory=list)  # of each client
    val: int = 0  # of all clients
    test: int = 0
    targets: list[int] = field(default_factory=list)


def images_of(args: Args) -> Images:
    """The numbers of images of a run; a client's share of a domain is an even one."""
    counts, _ = counts_of(args.dataset)
    targets = common.targets_of(args, list(counts)) if args.target in {"all", *counts} else [args.target]
    sources = args.sources.split(",") if args.sources else list(counts)
    train, val, test = shares(args.split)
    of_target = {"all": 1.0, "test": test, "heldout": val + test}[args.target_part]
    images = Images()
    for domain, count in counts.items():
        count = min(count, args.limit or count)
        if domain in targets:
            images.targets.append(int(of_target * count))
        elif domain in sources:
            each = count // args.clients_per_domain
            if args.protocol == "linear":
                images.train += [each] * args.clients_per_domain
                continue
            images.train += [int(train * each)] * args.clients_per_domain
            images.val += int(val * each) * args.clients_per_domain
            images.test += int(test * each) * args.clients_per_domain
    return images


# Counting


@dataclass(frozen=True)
class Work:
    """What is computed: 2 FLOPs for each multiply-add of matrix products and convolutions; the bytes that the
    operators read and write; how many operators are called."""

    flops: float = 0.0
    bytes: float = 0.0
    operators: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.operators + other.operators)

    def times(self, n: float) -> Work:
        return Work(self.flops * n, self.bytes * n, self.operators * n)


aten = torch.ops.aten
COPIES = (aten.clone, aten.copy_)  # of whole states, before and after the steps


class Meter(TorchDispatchMode):
    """Counts what the operators called inside it would do, and the bytes that are alive at most."""

    def __init__(self, alive: int = 0):
        super().__init__()
        self.flops = self.bytes = self.operators = 0
        self.alive, self.most = alive, alive
        self.storages = set()

    @property
    def work(self) -> Work:
        return Work(self.flops, self.bytes, self.operators)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator is aten._local_scalar_dense.default:
            return 1.0  # a number of a tensor without values, such as the norm to clip by
        packet = operator._overloadpacket
        if packet is aten._to_copy and args[0].is_meta:
            kwargs = kwargs | {"device": "meta"}  # such as to the main memory
        if packet is aten.native_batch_norm:
            out = normalized(*args)
        elif packet is aten.native_batch_norm_backward:
            out = normalized_backward(*args)
        else:
            out = operator(*args, **kwargs)
        if packet is aten.convolution_backward:
            shapes = [value.shape if isinstance(value, Tensor) else value for value in args]
            self.flops += conv_backward(*shapes)
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        made = out if isinstance(out, tuple | list) else [out]
        for tensor in made:
            if isinstance(tensor, Tensor):
                self.hold(tensor)
        if not operator.is_view and packet not in COPIES:
            self.operators += 1
            self.bytes += size_of([*made, *args])
        return out

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's memory as long as it is there."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.storages:
            return
        self.storages.add(storage._cdata)
        self.alive += storage.nbytes()
        self.most = max(self.most, self.alive)
        weakref.finalize(storage, self.release, storage._cdata, storage.nbytes())

    def release(self, name: int, count: int) -> None:
        self.storages.discard(name)
        self.alive -= count

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step, whose fused kernel knows no tensors without values: it reads and writes each
        parameter and what is remembered of it."""
        remembered = ()
        if isinstance(optimizer, torch.optim.Adam):
            remembered = ("exp_avg", "exp_avg_sq")
        elif optimizer.param_groups[0]["momentum"]:
            remembered = ("momentum_buffer",)
        self.operators += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self.bytes += size_of([parameter]) * (3 + 2 * len(remembered))
                for name in remembered:
                    if name not in optimizer.state[parameter]:
                        optimizer.state[parameter][name] = torch.empty_like(parameter)


def normalized(x: Tensor, weight, *_) -> tuple[Tensor, ...]:
    """What BN returns; torch's own way to these shapes takes half of all counting."""
    return torch.empty_like(x), x.new_empty(x.shape[1]), x.new_empty(x.shape[1])


def normalized_backward(grad, x: Tensor, weight: Tensor, *_) -> tuple[Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def size_of(values: list) -> int:
    """Bytes of the tensors among some values."""
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


def size_of_state(value) -> int:
    """Bytes of the tensors in nested dicts."""
    if isinstance(value, dict):
        return sum(size_of_state(inner) for inner in value.values())
    return size_of([value])


@contextlib.contextmanager
def without_values(meter: Meter):
    """Let training run on tensors without values: neither the optimizers' kernels nor autocast nor lists of
    numbers know them."""
    autocast, tolist, optimizers = torch.autocast, Tensor.tolist, (torch.optim.SGD, torch.optim.Adam)
    steps = [optimizer.step for optimizer in optimizers]
    torch.autocast = lambda *_, **__: contextlib.nullcontext()
    Tensor.tolist = lambda tensor: [1.0] * len(tensor) if tensor.is_meta else tolist(tensor)
    for optimizer in optimizers:
        optimizer.step = lambda self: meter.step(self)
    try:
        with meter:
            yield
    finally:
        torch.autocast, Tensor.tolist = autocast, tolist
        for optimizer, step in zip(optimizers, steps):
            optimizer.step = step


class Shapes(Data):
    """Images that have a shape alone, of the size in which the network sees them."""

    def fetch(self, i: Tensor | slice) -> tuple[Tensor, Tensor]:
        y = self.labels[i]
        x = torch.empty(len(y), *self.images.shape[1:], device="meta")
        return x.contiguous(memory_format=torch.channels_last), y

    def prepared(self, pixels: Tensor, how=None) -> Tensor:
        return pixels


# A method's step


@dataclass(frozen=True)
class Parts:
    """What a method computes and keeps, for one batch."""

    step: Work  # a training step
    first: Work  # a step of the first part of FedADG's rounds, in which F and C alone train; else the same
    forward: Work  # the network that is tested, on one image of a batch of an evaluation
    adaptation: Work  # of the network that is tested on an unseen domain, for each of its images
    memory: int  # bytes alive in a step: network, gradients, activations; in float32
    server: int  # bytes of the server's state with one client
    more: int  # and for each further one
    client: int  # bytes of a client's state
    idle: int  # and of that of a client that has not trained


# What is set for the counting, whatever the run has.
SET = dict(device="meta", precision="fp32", augment="none", weights="none", normalize="unit", steps=1,
           epochs=1)
NOT_READ = {*SET, "dataset", "image_size", "seed", "rounds"}  # by what decides a step
LENGTHS = {"E0", "adapt_epochs"}  # how often a step is taken


def deciding(args: Args) -> dict:
    """What may decide a step; of weights, rates and lengths only whether they are 0."""
    values = {"grey": is_grey(args.dataset), "side": args.crop or args.image_size}
    for f in dataclasses.fields(args):
        value = getattr(args, f.name)
        if f.name in LENGTHS or isinstance(value, float):
            value = bool(value)
        values[f.name] = value
    return values


def noting(args: Args) -> tuple[Args, set[str]]:
    """The arguments, and the set of the names that are read of them, which grows as they are read."""
    read = set()

    class Noted(type(args)):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)
    noted = copy.copy(args)
    noted.__class__ = Noted
    return noted, read


class Counted:
    """The parts of the methods' steps. Steps are counted once for all runs that agree in what was read of
    their arguments meanwhile."""

    def __init__(self):
        self.of_module = {}
        self.failed = {}  # {module: why its steps cannot be counted}

    def of(self, module: str, args: Args) -> Parts | None:
        """None if an operator of the method needs values."""
        values = deciding(args)
        known = self.of_module.setdefault(module, [])
        for theirs, parts in known:
            if all(values[name] == value for name, value in theirs.items()):
                return parts
        try:
            parts, read = parts_of(module, args)
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as e:
            self.failed[module] = f"{type(e).__name__}: {e}".splitlines()[0][:80]
            return None
        read |= {"grey", "side", "batch_size", "protocol"}
        known.append(({name: value for name, value in values.items() if name in read - NOT_READ}, parts))
        return parts


def parts_of(module: str, args: Args) -> tuple[Parts, set[str]]:
    """Count one batch of a client's training, of an evaluation and of an adaptation; the second value has the
    names of the arguments that were read."""
    method = sys.modules[module]
    channels = 1 if is_grey(args.dataset) else 3
    side = args.crop or args.image_size
    args = dataclasses.replace(args, **SET)
    if getattr(args, "adapt_epochs", 0):
        args = dataclasses.replace(args, adapt_epochs=1)
    first_part = bool(getattr(args, "E0", 0))
    if first_part:
        args = dataclasses.replace(args, E0=1)
    second_part = args
    if first_part:
        second_part = dataclasses.replace(args, E0=0)
    args, read = noting(args)
    with torch.device("meta"):
        net = builder_of(method)(args, channels, CLASSES)
    size = size_of_state(net.state_dict())
    images = torch.empty(args.batch_size, channels, side, side, dtype=torch.uint8, device="meta")
    with without_values(Meter()):
        server, of_two = method.Server(args, net, 1), method.Server(args, net, 2)
        client = method.Client(args, net, 0, client_data(images))
        down = server.download(0)
    idle = size_of_state(common.kept(client))
    step = Meter(size)
    with without_values(step):
        client.train(down, 0)
    first = step
    if first_part:
        step = Meter(size)
        with without_values(step):
            method.Client(second_part, net, 0, client_data(images)).train(down, 0)
    forward, adaptation = Meter(), Meter()
    with without_values(adaptation):
        model = client.model(down)
        if args.protocol == "lodo":
            unseen = method.Client(args, net, 1, client_data(images, unseen=True))
            model = unseen.model(server.download(1))
    evaluated = max(args.batch_size, 100)
    with without_values(forward), torch.no_grad():
        model.eval()(torch.empty(evaluated, channels, side, side, device="meta"))
    state = size_of_state(common.kept(server))
    more = size_of_state(common.kept(of_two)) - state
    parts = Parts(step.work, first.work, forward.work.times(1 / evaluated),
                  adaptation.work.times(1 / len(images)), max(step.most, forward.most), state, more,
                  size_of_state(common.kept(client)), idle)
    return parts, read


def client_data(images: Tensor, unseen: bool = False) -> ClientData:
    """A client each of whose parts is one batch of these images."""
    rows = torch.empty(len(images), dtype=torch.int64, device="meta")
    part = Shapes(images, rows, rows, "meta", "unit")
    return ClientData("client", part, part, part, unseen)


# A run


@dataclass(frozen=True)
class RunWork:
    """What a run computes, keeps in memory and writes to disk."""

    train: Work
    evaluate: Work
    retest: Work  # two evaluations of the target alone
    memory: int
    disk: int  # at most, while it runs
    kept: int  # when it is finished

    @property
    def total(self) -> Work:
        return self.train + self.evaluate


def work_of(module: str, args: Args, counted: Counted) -> RunWork | None:
    """What a run of all its rounds computes; None if that cannot be counted, as of images of one's own."""
    if own_folder(args.dataset):
        return None
    images, parts = images_of(args), counted.of(module, args)
    if parts is None:
        return None
    steps = 0
    for count in images.train:
        if args.steps:
            steps += args.steps
        else:
            steps += args.epochs * steps_in_epoch(count, args.batch_size, args.drop_last)
    steps *= args.rounds * args.participation
    first = getattr(args, "E0", 0) / (args.steps or args.epochs)
    train = parts.first.times(first * steps) + parts.step.times((1 - first) * steps)
    evaluate = evaluations(args, images, parts)
    clients = len(images.train)
    state = parts.server + parts.more * (clients - 1) + parts.client * clients
    state += parts.idle * len(images.targets)
    pixels = sum(counts_of(args.dataset)[0].values()) * args.image_size ** 2
    if not is_grey(args.dataset):
        pixels *= 3
    retest = on_target(args, images, parts).times(2)
    most, finished = copies(args.protocol)
    in_memory = finished * state  # the state of now, and that of the best round
    return RunWork(train, evaluate, retest, parts.memory + in_memory + pixels, most * state, finished * state)


def retest_of(work: RunWork) -> RunWork:
    """What it computes to test a trained run again on its target: after its best round and after the last."""
    return dataclasses.replace(work, train=Work(), evaluate=work.retest, disk=0, kept=0)


@functools.cache
def steps_in_epoch(count: int, batch_size: int, drop_last: bool) -> int:
    return common.steps_in_epoch(count, SimpleNamespace(batch_size=batch_size, drop_last=drop_last))


def evaluations(args: Args, images: Images, parts: Parts) -> Work:
    """All evaluations of all clients and targets."""
    count = math.ceil(args.rounds / args.eval_every)
    tested = count
    if args.test_rounds == "best":
        tested = min(count, BETTER * count ** 0.5)
    if args.protocol == "linear":
        if args.test_rounds == "best":
            tested = 1
        return linear(args, images, parts).times(tested)
    test = parts.forward.times(images.test) + on_target(args, images, parts)
    return parts.forward.times(images.val * count) + test.times(tested)


def on_target(args: Args, images: Images, parts: Parts) -> Work:
    """One evaluation of the targets, with the adaptation to them."""
    count = sum(images.targets)
    test = parts.forward.times(count)
    if args.protocol == "lodo":
        test += parts.adaptation.times(getattr(args, "adapt_epochs", 0) * count)
    return test


def linear(args: Args, images: Images, parts: Parts) -> Work:
    """One evaluation of a method without labels."""
    seen = parts.forward.times(sum(images.targets))
    dim = common.BACKBONES[args.backbone].dim
    for count in images.targets:
        for ratio in ratios(args.label_ratio):
            fitted = ratio * count * args.linear_epochs  # images, forward and backward
            steps = args.linear_epochs * math.ceil(ratio * count / args.linear_batch)
            seen += Work(6 * dim * CLASSES * fitted, 12 * dim * fitted, LINEAR_OPERATORS * steps)
    return seen
