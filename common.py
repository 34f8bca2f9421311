"""What every method shares: arguments, splits, small federated tools and the round loop.

A method file brings a `Server` and a `Client` that share nothing but two payloads, the download and the upload:

    class Server:                                                   class Client:
        __init__(args, net, clients)                                    __init__(args, net, k, data)
        download(k) -> Payload                                          train(down, t) -> Payload
        update(uploads, t)                                              model(down) -> nn.Module
        state_dict() / load_state_dict(state)                           state_dict() / load_state_dict(state)

`run(Server, Client, args)` is their only caller. `net` is a scratch module shared by all of them, so nothing may be
kept in it between calls; what outlives a call is in the two state dicts, plain tensors and numbers. A client may set
`self.log`, a dict of scalar tensors (its mean training loss, say), which the loop records and which does not travel.

Order of this file: arguments; splits and clients; federated tools; processes; the round loop; records and figures. Errors,
seeds and files are in basics.py, the datasets in domains.py, augmentation in augment.py, the networks in networks.py.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import hashlib
import io
import json
import math
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torchvision
from torch import Tensor
from tqdm import tqdm

import linear
from augment import AUGMENTATIONS, Augmentation, augment
from basics import Stop, ending, load_file, locked, out_of_memory, save, seed_all, write_json, write_whole
from domains import Domain, load_domains, seed_name
from networks import BACKBONES, backbone

Payload = dict[str, "Tensor | dict[str, Tensor]"]  # what travels: plain tensors, nothing else


# Arguments


def arg(default, text: str, *, choices=None, low=None, high=None, above=None, numbers=True):
    """A field of `Args`: its default, its help text and its limits.

    `low`/`high` are included limits, `above` an excluded one. `numbers=False` marks what cannot change any number of a
    run (folders, checkpoint interval): such fields may differ between a run and the run that resumes it.
    """
    meta = dict(text=text, choices=choices, low=low, high=high, above=above, numbers=numbers)
    return field(default=default, metadata=meta)


@dataclass
class Args:
    """What every run has. Method files extend it; `parse` turns it into a command line."""

    dataset: str = arg("digits", "dataset; digits needs no download")
    scale: str = arg("paper", "paper: the paper's setting; laptop: minutes on two cores; smoke: seconds",
                     choices=("paper", "laptop", "smoke"))
    protocol: str = arg("indomain", "indomain: each client is tested on its own test part; lodo: leave one domain out",
                        choices=("indomain", "lodo"))
    target: str = arg("all", "lodo, linear: the domain that is left out, by name; all: each in turn")
    target_part: str = arg("all", "lodo, linear: images of the target that are used: all, or only its test part by --split",
                           choices=("all", "test"))
    split: str = arg("0.8/0.1/0.1", "shares of train/validation/test in each client")
    clients_per_domain: int = arg(1, "clients that share one domain", low=1)
    dirichlet: float = arg(0.0, "concentration of the label skew between the clients of a domain; 0: no skew", low=0)
    participation: float = arg(1.0, "share of the clients that train in a round", above=0, high=1)
    limit: int = arg(0, "images used of each domain, drawn by the seed; 0: all", low=0)
    backbone: str = arg("smallcnn_bn", "network that is trained", choices=())
    weights: str = arg("none", "initial weights: none (random), imagenet (torchvision's), or a file of weights")
    normalize: str = arg("unit", "pixels: unit ([0,1]) or imagenet (ImageNet's mean and deviation)",
                         choices=("unit", "imagenet"))
    augment: str = arg("none", "augmentation of the training images, drawn anew for each image and batch",
                       choices=("none", *AUGMENTATIONS))
    image_size: int = arg(28, "height and width of the images, in pixels", low=8, high=4096)
    rounds: int = arg(100, "communication rounds T", low=1)
    epochs: int = arg(1, "local epochs E in a round", low=1)
    steps: int = arg(0, "local steps in a round, in place of epochs; 0: use epochs", low=0)
    batch_size: int = arg(50, "images in a batch B", low=2, high=1_000_000)
    lr: float = arg(0.1, "learning rate of the first round", above=0)
    lr_decay: float = arg(1.0, "factor on the learning rate after each round", above=0, high=1)
    momentum: float = arg(0.0, "momentum of the local SGD", low=0, high=1)
    weight_decay: float = arg(0.0, "weight decay of the local SGD", low=0)
    clip: float = arg(0.0, "largest norm of the gradient over all parameters; 0: no clipping", low=0)
    seed: int = arg(0, "seed of the split, the initial weights, the batches and all other randomness", low=0)
    device: str = arg("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1, ...")
    precision: str = arg("auto", "fp32, tf32 (GPU), bf16 (autocast), or auto: bf16 where the processor has it, else fp32",
                         choices=("auto", "fp32", "tf32", "bf16"))
    eval_every: int = arg(1, "rounds between evaluations; the last round is always evaluated", low=1)
    data: str = arg("data", "folder of the datasets, the downloads and the decoded cache", numbers=False)
    archives: str = arg("", "folder with archives downloaded before; looked at before the network", numbers=False)
    out: str = arg("", "output folder; empty: runs/<method>-<dataset>-...-<hash of the arguments>", numbers=False)
    resume: bool = arg(True, "go on with the run in the output folder; --no-resume starts it afresh", numbers=False)
    checkpoint_every: float = arg(30.0, "seconds between checkpoints, at least; 0: after each round", low=0,
                                  numbers=False)
    record: str = arg("", "JSONL file to which the finished run is added as one line", numbers=False)

    views, crop, drop_last, sources = 1, 0, False, ""  # flags of methods without labels, see `LinearArgs`


@dataclass
class LinearArgs(Args):
    """What every run of a method without labels has: it trains on views of the images, and a linear classifier on the frozen
    network says how good the representation of a domain is that it has not seen (FedGaLA, Sec. 4 and App. B.3)."""

    protocol: str = arg("linear", "linear: train without labels, then fit a linear classifier to a part of the target's labels",
                        choices=("linear",))
    sources: str = arg("", "domains of the clients, such as painting,real,sketch; empty: all but the target. With --target all "
                           "one run then evaluates all the other domains")
    crop: int = arg(32, "height and width of the views, and of the images in the evaluation, in pixels", low=8, high=4096)
    augment: str = arg("simclr", "augmentation of the views, drawn anew for each view and batch",
                       choices=("none", *AUGMENTATIONS))
    drop_last: bool = arg(True, "leave out the last batch of an epoch if it is smaller than the others")
    label_ratio: str = arg("0.1/0.3", "shares of the target's labels to which classifiers are fitted, one after the other; they "
                                      "are tested on the rest")
    probe: str = arg("encoder", "what the classifier sees: the encoder's output or the projector's",
                     choices=("encoder", "projector"))
    linear_lr: float = arg(3e-3, "learning rate of the classifier's Adam", above=0)
    linear_epochs: int = arg(100, "epochs of the classifier", low=1)
    linear_batch: int = arg(512, "images in a batch of the classifier", low=1)

    views = 2  # of each image, stacked in a batch


# Settings by dataset for the smaller scales; they go over a method's PAPER table and under the flags that are given.
SCALES = {
    "paper": {},
    "laptop": {
        "officecaltech": dict(image_size=160, rounds=60),
        "pacs": dict(image_size=160, rounds=15, epochs=1),
    } | {d: dict(image_size=64, rounds=20, epochs=1, limit=2000, weights="none", eval_every=2) for d in (
        "vlcs", "officehome", "terrainc", "domainnet", "domainnet10", "domainnet20", "camelyon17", "iwildcam")},
    "smoke": {d: dict(rounds=2, limit=40, batch_size=16, weights="none") for d in (
        "digits", "rotatedmnist", "rotatedmnist-t10k")} | {
        d: dict(image_size=160, rounds=2, limit=40, epochs=1, steps=0, weights="none") for d in (
            "officecaltech", "pacs", "vlcs", "terrainc", "domainnet10", "domainnet20", "camelyon17", "iwildcam")} | {
        d: dict(image_size=160, rounds=2, limit=n, epochs=1, steps=0, weights="none") for d, n in (
            ("officehome", 100), ("domainnet", 400))},
}


def parse(cls: type[Args], paper: dict[str, dict], argv: list[str] | None = None, *,
          variants: dict[str, dict[str, dict]] | None = None, laptop: dict[str, dict] | None = None,
          smoke: dict[str, dict] | None = None, follows=None) -> Args:
    """The arguments of a run from the command line.

    A value comes from the first of these that has one: the flag, the method's own `laptop` or `smoke` settings, `SCALES`, the
    settings of the chosen `--variant` (if the method has variants), the method's `paper` settings of the dataset, what
    `follows(values)` derives from the values of the choices, the dataclass. Bad usage ends the program with one line on stderr and exit code 2.
    """
    own = {"laptop": laptop or {}, "smoke": smoke or {}, "paper": {}}
    scales = {scale: {d: SCALES[scale].get(d, {}) | own[scale].get(d, {}) for d in paper} for scale in SCALES}
    module = sys.modules[cls.__module__]
    name = Path(module.__file__).stem
    fields = dataclasses.fields(cls)
    choices = {f.name: f.metadata["choices"] for f in fields}
    choices |= {"dataset": tuple(paper), "backbone": tuple(BACKBONES)}
    parser = Parser(prog=name, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                     description=(module.__doc__ or "").split("\nPaper  ")[0])
    for f in fields:
        special = "; ".join([f"{d}: {s[f.name]}" for d, s in paper.items() if f.name in s] +
                            [f"{d} at laptop scale: {s[f.name]}" for d, s in scales["laptop"].items() if f.name in s])
        text = with_default(f.metadata["text"], f.default, special).replace("%", "%%")
        flag = "--" + f.name.strip("_").replace("_", "-")
        if isinstance(f.default, bool):
            parser.add_argument(flag, dest=f.name, help=text, default=argparse.SUPPRESS,
                                action=argparse.BooleanOptionalAction)
        else:
            kind = canonical if f.name == "dataset" else type(f.default)
            parser.add_argument(flag, dest=f.name, help=text, default=argparse.SUPPRESS, type=kind,
                                choices=choices[f.name], metavar=None if choices[f.name] else type(f.default).__name__)
    argv = sys.argv[1:] if argv is None else argv
    parser.set_flags()
    given = vars(parser.parse_args(argv))
    dataset, scale = given.get("dataset", cls.dataset), given.get("scale", cls.scale)
    values = dict(paper[dataset])
    chosen = given.get("variant", getattr(cls, "variant", None))
    if chosen in (variants or {}):
        if dataset not in variants[chosen]:
            parser.error(f"--variant {chosen} has no settings for {dataset}; it has for {', '.join(variants[chosen])}")
        values |= variants[chosen][dataset]
    values |= scales[scale][dataset]
    if follows:
        values = follows({f.name: f.default for f in fields} | values | given) | values
    args = cls(**(values | given))
    for f in fields:
        value, low, high, above = getattr(args, f.name), *(f.metadata[m] for m in ("low", "high", "above"))
        if isinstance(value, float) and not math.isfinite(value) or low is not None and value < low \
                or high is not None and value > high or above is not None and value <= above:
            limits = [f"at least {low}" if low is not None else "", f"above {above}" if above is not None else "",
                      f"at most {high}" if high is not None else ""]
            parser.error(f"--{f.name.strip('_').replace('_', '-')} is {value}; it must be a finite number "
                         f"{' and '.join(x for x in limits if x)}")
    try:
        shares(args.split)
        if args.protocol == "linear":
            linear.ratios(args.label_ratio)
        args.device = choose_device(args.device)
        args.precision = choose_precision(args.precision, args.device)
    except Stop as stop:
        parser.error(str(stop))
    return args


def canonical(dataset: str) -> str:
    """The name of a dataset; officecaltech10 is another name of officecaltech."""
    return {"officecaltech10": "officecaltech"}.get(dataset, dataset)


def with_default(text: str, default, special: str = "") -> str:
    """A help text that ends with the flag's default, and with where it is another one."""
    return f"{text} (default: {default if default != '' else 'empty'}{'; ' + special if special else ''})"


class Parser(argparse.ArgumentParser):
    """argparse with errors in one line: what is wrong, the nearest flag, where the help is; exit code 2."""

    def set_flags(self):
        self.flags = [o for a in self._actions for o in a.option_strings]

    def error(self, message):
        if message.startswith("unrecognized arguments: "):
            flag = message.split(": ", 1)[1].split()[0].split("=")[0]
            near = difflib.get_close_matches(flag, self.flags, n=1, cutoff=0.75)
            message = f"{flag} is not a flag of {self.prog}" + (f"; did you mean {near[0]}?" if near else "")
        first = os.environ.get("LOCAL_RANK", "0") == "0"  # with torchrun one process of a machine speaks for all
        self.exit(2, f"{self.prog}: {message} (--help explains every flag)\n" if first else None)


def method_name(args: Args) -> str:
    """The method file's name, without .py."""
    return Path(sys.modules[type(args).__module__].__file__).stem


def identity(args: Args) -> dict:
    """The arguments that decide the numbers of a run; two runs are the same when these are."""
    key = {"method": method_name(args)} | {f.name: getattr(args, f.name) for f in dataclasses.fields(args)
                                           if f.metadata["numbers"]}
    if Path(args.weights).is_file():
        key["weights"] += " " + hashlib.blake2b(Path(args.weights).read_bytes(), digest_size=8).hexdigest()
    return key | {"device": args.device.split(":")[0]}


def shares(split: str) -> tuple[float, float, float]:
    """'0.8/0.1/0.1' -> (0.8, 0.1, 0.1); they must be positive and sum to 1."""
    try:
        train, val, test = (float(s) for s in split.split("/"))
        if not (min(train, val, test) > 0 and abs(train + val + test - 1) < 1e-6):  # also for nan
            raise ValueError
    except ValueError:
        raise Stop(f"--split is {split}; expected three positive shares that sum to 1, such as 0.8/0.1/0.1", 2)
    return train, val, test


def choose_device(device: str) -> str:
    """'auto' becomes cuda or cpu; a GPU that is named must exist."""
    if device != "auto" and device.split(":")[0] not in ("cpu", "cuda"):
        raise Stop(f"--device is {device}; expected auto, cpu, cuda or cuda:N", 2)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":  # with torchrun each process takes its own GPU
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % max(torch.cuda.device_count(), 1)}"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:
        raise Stop(f"--device {device} cannot be used here: {str(e).splitlines()[0]}", 2)
    return device


def choose_precision(precision: str, device: str) -> str:
    """'auto' becomes bf16 where the processor has bf16 instructions, else fp32; tf32 needs a GPU."""
    cuda = device.startswith("cuda")
    if precision == "auto":
        has = torch.cuda.is_bf16_supported() if cuda else device == "cpu" and torch.cpu._is_avx512_bf16_supported()
        precision = "bf16" if has else "fp32"
    if precision == "tf32" and not cuda:
        raise Stop(f"--precision tf32 needs a GPU; the device is {device}: use fp32 or bf16", 2)
    return precision


# Splits and clients


@dataclass
class Data:
    """A part of a domain: the domain's images uint8 [N, C, H, W], and the rows `index` [n] with `labels` [n] of it."""

    images: Tensor
    index: Tensor
    labels: Tensor
    device: str
    normalize: str

    def __post_init__(self):
        if self.normalize == "imagenet":
            self.mean = torch.tensor([0.485, 0.456, 0.406], device=self.device)[:, None, None]
            self.deviation = torch.tensor([0.229, 0.224, 0.225], device=self.device)[:, None, None]

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, i: Tensor, how: Augmentation | None = None) -> tuple[Tensor, Tensor]:
        """Positions i [B] -> x float32 [B, C, H, W] in [0, 1] (or normalized), augmented, channels last, and y [B]."""
        x = self.images[self.index[i]].to(self.device).float().div_(255)
        if how:
            x = augment(x, how)
        if self.normalize == "imagenet":
            x = x.sub_(self.mean).div_(self.deviation)
        return x, self.labels[i].to(self.device)


@dataclass
class ClientData:
    """What client k holds: the name (its domain's, numbered if there are several clients) and three parts."""

    name: str
    train: Data
    val: Data
    test: Data


def targets_of(args: Args, names: list[str]) -> list[str]:
    """The domains that a run evaluates without training on them. Stop if the flags name a domain that there is not."""
    sources = args.sources.split(",") if args.sources else []
    for flag, name in [("--target", args.target)] * (args.target != "all") + [("--sources", n) for n in sources]:
        if name not in names:
            raise Stop(f"{flag} {name} is not a domain of {args.dataset}; its domains are {', '.join(names)}", 2)
    if args.protocol == "indomain":
        if args.target != "all":
            raise Stop(f"--target {args.target} goes with --protocol lodo; the protocol is {args.protocol}", 2)
        return []
    rest = [n for n in names if n not in sources] if sources else names
    if not rest or len(set(sources)) < len(sources) or args.target in sources:
        raise Stop(f"--sources {args.sources} leaves no target: expected some of {', '.join(names)}, each once, and a --target "
                   f"that is none of them", 2)
    return rest if args.target == "all" else [args.target]


def several_runs(args: Args) -> bool:
    """Whether `--target all` stands for a run on each target, not for one run or for one that evaluates several."""
    return args.protocol != "indomain" and args.target == "all" and not args.sources


def make_clients(args: Args, domains: list[Domain], classes: int) -> tuple[list[ClientData], list[ClientData]]:
    """The clients and, for `lodo` and `linear`, the targets. Every image of a domain is in exactly one part of one client.

    A target's `train` and `val` are empty unless `--target-part test`, where they are the parts that nobody uses. With `linear`
    all images of a client are for training, because it has no labels to validate or test with.
    """
    if args.dirichlet and args.clients_per_domain == 1:
        raise Stop(f"--dirichlet {args.dirichlet} needs several clients in a domain: set --clients-per-domain", 2)
    clients, targets, names = [], [], targets_of(args, [d.name for d in domains])
    for d in domains:
        if args.sources and d.name not in [*args.sources.split(","), *names]:
            continue
        if args.device.startswith("cuda") and d.images.nbytes < torch.cuda.mem_get_info(args.device)[0] / 4:
            d = Domain(d.name, d.images.to(args.device), d.labels)  # decoded pixels stay on the device
        order = torch.randperm(len(d.labels), generator=seed_all(args.seed, "split", seed_name(args, d.name)))
        part = lambda rows: Data(d.images, rows.to(d.images.device), d.labels[rows].to(d.images.device), args.device,
                                 args.normalize)
        if d.name in names:
            train, val, test = cut(order, args.split) if args.target_part == "test" else (order[:0], order[:0], order)
            targets.append(ClientData(d.name, part(train), part(val), part(test)))
            if len(test) < 2:
                raise Stop(f"the target {d.name} has {len(test)} images to test; it needs 2: raise --limit or the share in --split")
            if args.protocol == "linear":
                for ratio in linear.ratios(args.label_ratio):
                    linear.stratified(d.labels[test], ratio, d.name)  # fails if it leaves too few
            continue
        for m, rows in enumerate(skewed(args, d, order, classes)):
            name = d.name if args.clients_per_domain == 1 else f"{d.name}-{m}"
            unlabelled = args.protocol == "linear"
            train, val, test = (part(r) for r in ((rows, rows[:0], rows[:0]) if unlabelled else cut(rows, args.split)))
            if len(train) < 2 or not unlabelled and (len(val) < 1 or len(test) < 1):
                has, needs = (f"{len(train)} images to train on", "2") if unlabelled else (
                    f"{len(train)}/{len(val)}/{len(test)} images to train, validate and test", "2/1/1")
                raise Stop(f"client {name} has {has}; it needs at least {needs}: fewer --clients-per-domain, a larger --dirichlet "
                           f"or --limit")
            clients.append(ClientData(name, train, val, test))
    return clients, targets


def cut(rows: Tensor, split: str) -> tuple[Tensor, Tensor, Tensor]:
    """Shuffled rows -> train, validation, test. Test and then train are rounded down, validation gets the rest.

    (0.8/0.1/0.1 of 157 images gives 126/16/15, as in FDSE's official code.)
    """
    train, _, test = shares(split)
    n_test = int(len(rows) * test + 1e-9)
    n_train = int((len(rows) - n_test) * train / (1 - test) + 1e-9)
    return rows[:n_train], rows[n_train:len(rows) - n_test], rows[len(rows) - n_test:]


def skewed(args: Args, domain: Domain, order: Tensor, classes: int) -> list[Tensor]:
    """A domain's rows dealt out to its clients: evenly, or each class by shares drawn from Dirichlet(beta)."""
    m = args.clients_per_domain
    if m == 1 or args.dirichlet == 0:
        return [order[i::m] for i in range(m)]
    rng = np.random.default_rng(seed_all(args.seed, "dirichlet", seed_name(args, domain.name)).initial_seed())
    piles = [[] for _ in range(m)]
    for c in range(classes):
        rows = order[domain.labels[order] == c]
        ends = np.floor(np.cumsum(rng.dirichlet([args.dirichlet] * m)) * len(rows) + 1e-9).astype(int)[:-1]
        for pile, rows_of_client in zip(piles, np.split(rows.numpy(), ends)):
            pile.append(torch.from_numpy(rows_of_client))
    shuffle = seed_all(args.seed, "dirichlet order", seed_name(args, domain.name))
    return [(r := torch.cat(p))[torch.randperm(len(r), generator=shuffle)] for p in piles]


def batches(data: Data, args: Args, t: int, k: int):
    """The training batches (x, y) of client k in round t: E epochs, or exactly `--steps` of them; a new order each epoch. A
    method with two views of each image gets x [2B, C, H, W], the first views before the second ones."""
    how = AUGMENTATIONS.get(args.augment)
    if args.crop:
        how = dataclasses.replace(how or Augmentation(ratio=(1.0, 1.0)), size=args.crop)
    done, epoch = 0, 0
    while done < args.steps if args.steps else epoch < args.epochs:
        order = torch.randperm(len(data), generator=seed_all(args.seed, "batches", t, k, epoch)).to(data.index.device)
        parts = cut_batches(order, args)
        for i in parts[:args.steps - done] if args.steps else parts:
            x, y = data.batch(i.repeat(args.views), how)
            yield x, y[:len(i)]
            done += 1
        epoch += 1


def cut_batches(order: Tensor, args: Args) -> list[Tensor]:
    """An epoch's order in batches. A last batch of one image is joined to the batch before it, because BN cannot take the
    variance of one value; with `drop_last` one that is not full is left out, if it is not the only one."""
    parts = list(order.split(args.batch_size))
    if args.drop_last:
        return parts[:-1] if len(parts) > 1 and len(parts[-1]) < args.batch_size else parts
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def images_in_round(n: int, args: Args) -> int:
    """How many images a client of n training images trains on in a round."""
    sizes = [len(p) for p in cut_batches(torch.arange(n), args)]
    return sum(sizes[i % len(sizes)] for i in range(args.steps)) if args.steps else args.epochs * sum(sizes)


# Federated tools


def state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's parameters and buffers, which later training does not change."""
    return {k: v.detach().clone() for k, v in module.state_dict().items()}


def load(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """Load a whole state into `module` and return it."""
    module.load_state_dict(tensors)
    return module


def average(states: list[dict[str, Tensor]], weights: Tensor) -> dict[str, Tensor]:
    """sum_k weights[k] * states[k], entry by entry; the result of an integer buffer is rounded."""
    out = {}
    for name, first in states[0].items():
        mixed = torch.zeros_like(first, dtype=first.dtype if first.is_floating_point() else torch.float64)
        for s, p in zip(states, weights.tolist()):
            mixed.add_(s[name], alpha=p)
        out[name] = mixed if first.is_floating_point() else mixed.round().to(first.dtype)
    return out


def flatten(tensors: list[Tensor]) -> Tensor:
    """All entries as one vector."""
    return torch.cat([t.reshape(-1) for t in tensors])


def copied(value):
    """A deep copy of nested dicts of tensors, numbers and strings."""
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def tensors_of(payload) -> list[Tensor]:
    """All tensors of a payload."""
    return [t for v in payload.values() for t in (tensors_of(v) if isinstance(v, dict) else [v])]


def nbytes(payload: Payload) -> int:
    """Bytes of a payload on the wire."""
    return sum(t.numel() * t.element_size() for t in tensors_of(payload))


def sgd(module: nn.Module, args: Args, t: int, kept: dict[str, dict[str, Tensor]] | None = None) -> torch.optim.SGD:
    """Local SGD at the learning rate of round t, lr * lr_decay^t; it goes on from what `optimizer_state` has kept."""
    opt = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=args.lr * args.lr_decay ** t,
                          momentum=args.momentum, weight_decay=args.weight_decay, fused=True)
    return going_on(opt, module, kept)


def adam(module: nn.Module, args: Args, t: int, kept: dict[str, dict[str, Tensor]] | None = None) -> torch.optim.Adam:
    """The same with Adam."""
    opt = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=args.lr * args.lr_decay ** t,
                           weight_decay=args.weight_decay, fused=True)
    return going_on(opt, module, kept)


def going_on(opt: torch.optim.Optimizer, module: nn.Module, kept: dict[str, dict[str, Tensor]] | None) -> torch.optim.Optimizer:
    """The optimizer with what another one of the same module remembered; a copy, as its steps change it in place."""
    named = dict(module.named_parameters())
    for n, values in (kept or {}).items():
        opt.state[named[n]] = {name: v.clone() for name, v in values.items()}
    return opt


def optimizer_state(module: nn.Module, opt: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """What the optimizer remembers of each parameter (momentum; Adam's moments and number of steps), by its name."""
    return {n: dict(opt.state[p]) for n, p in module.named_parameters() if opt.state.get(p)}


def autocast(args: Args):
    """The context of forward passes and losses: bf16 autocast with `--precision bf16`, else nothing."""
    return torch.autocast(args.device.split(":")[0], torch.bfloat16, enabled=args.precision == "bf16")


def in_order(data: Data, args: Args):
    """The batches of an evaluation, (x, y): every image once."""
    for i in torch.arange(len(data), device=data.index.device).split(max(args.batch_size, 100)):
        yield data.batch(i)


@torch.no_grad()
def correct(model: nn.Module, data: Data, args: Args) -> int:
    """The number of images of `data` that `model` classifies correctly, in eval mode."""
    model.eval()
    hits = torch.zeros((), dtype=torch.long, device=args.device)
    for x, y in in_order(data, args):
        with autocast(args):
            hits += (model(x).argmax(1) == y).sum()
    return int(hits)


@torch.no_grad()
def representations(model: nn.Module, data: Data, args: Args) -> tuple[Tensor, Tensor]:
    """z float32 [N, D] and labels y [N], on the CPU, of all images of `data`: model.features in eval mode, where a
    probabilistic network gives its mean; precision and batches are those of `correct`."""
    model.eval()
    zs, ys = [], []
    for x, y in in_order(data, args):
        with autocast(args):
            z = model.features(x)
        zs.append(z.float().flatten(1).cpu())
        ys.append(y.cpu())
    return torch.cat(zs), torch.cat(ys)


def keep_freed_memory() -> None:
    """Ask glibc to keep large freed blocks instead of giving them back to the kernel.

    Each training step frees and takes the same activations; without this every step pays their page faults again
    (measured: 5 to 20% of a step on two cores). One arena, because what the backward pass's thread frees is then there for the
    forward pass (another 5 to 20% of a small network's step). No effect where the C library has no mallopt.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-8, 1)  # M_ARENA_MAX
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


# Processes: with torchrun, client k belongs to process k mod P; process 0 runs the server


def process() -> tuple[int, int]:
    """The rank of this process and their number P; (0, 1) without torchrun."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def merged(mine: dict) -> dict:
    """The dicts of all processes merged, sorted by key, in process 0; elsewhere an empty one."""
    rank, size = process()
    if size == 1:
        return mine
    parts = [None] * size if rank == 0 else None
    with others_alive():
        dist.gather_object(to_cpu(mine), parts)
    return {k: v for k, v in sorted(item for part in parts for item in part.items())} if rank == 0 else {}


def from_server(value):
    """The value that process 0 has, in every process."""
    box = [to_cpu(value) if process()[0] == 0 else None]
    if process()[1] > 1:
        with others_alive():
            dist.broadcast_object_list(box)
    return box[0]


@contextlib.contextmanager
def others_alive():
    """Stop when a collective fails because another process has gone."""
    try:
        yield
    except RuntimeError as e:
        raise Stop(f"process {process()[0]} ends because another one has gone, see its line ({str(e)[:60].splitlines()[0]})")


def to_cpu(value):
    """Tensors anywhere in nested dicts, lists and tuples moved to the CPU (unchanged in a single process)."""
    if process()[1] == 1:
        return value
    if isinstance(value, dict):
        return {k: to_cpu(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_cpu(v) for v in value)
    return value.cpu() if isinstance(value, Tensor) else value


def to_device(value, device: str):
    """Tensors anywhere in nested dicts moved to the device."""
    if isinstance(value, dict):
        return {k: to_device(v, device) for k, v in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


# The round loop


def run(Server, Client, args: Args, build=backbone) -> list[dict]:
    """Train and evaluate a method as `args` says; the main of every method file. Returns the results, one per target.

    `build(args, channels, classes)` makes the network(s). Ends the program with one line on stderr when it cannot go
    on: exit code 2 for bad usage, 1 for failures, 130 for Ctrl-C (the last checkpoint is kept).
    """
    keep_freed_memory()
    try:
        join_processes()
        if args.device.startswith("cuda"):
            torch.cuda.set_device(args.device)
        torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = args.precision == "tf32"  # on by default, and then fp32 would not be fp32
        domains, classes = load_domains(args)
        names = [d.name for d in domains]
        found = targets_of(args, names)
        targets = found if several_runs(args) else [args.target]
        results = [run_one(Server, Client, of_target(args, target), build, domains, classes) for target in targets]
        if len(targets) > 1 and process()[0] == 0:
            print(f"{method_name(args)} on {args.dataset}, accuracy on each left-out domain (%): " + "  ".join(
                f"{n} {100 * r['best']['target']:.2f}" for n, r in zip(targets, results)) +
                f"  mean {100 * np.mean([r['best']['target'] for r in results]):.2f}")
        return results
    except (Stop, OSError, KeyboardInterrupt, MemoryError, RuntimeError) as e:
        message, code = ending(e, "what was written before is kept: the same command without --no-resume goes on from the last checkpoint")
    if code != 2 or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{method_name(args)}: {message}", file=sys.stderr, flush=True)
    if dist.is_initialized():
        sys.stdout.flush()
        os._exit(code)  # the other processes wait in a collective: torchrun ends them
    sys.exit(code)


def join_processes() -> None:
    """With torchrun: join the other processes."""
    try:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")
    except (ValueError, RuntimeError) as e:
        raise Stop(f"WORLD_SIZE is {os.environ['WORLD_SIZE']!r}, but the processes cannot meet ({str(e).splitlines()[0][:80]}): "
                   f"start them with torchrun, or unset WORLD_SIZE", 2)


def run_one(Server, Client, args: Args, build, domains: list[Domain], classes: tuple[str, ...]) -> dict:
    """One run: the federation, its resume, its rounds, its result. In process 0 it writes the output folder."""
    rank, size = process()
    key, out = identity(args), folder_of(args)
    with locked(out / ".lock", wait=False) if rank == 0 else contextlib.nullcontext():
        saved, result = from_server(resumed(out, key, args) if rank == 0 else None)
        if result:
            if rank == 0:
                print(f"{out} holds this run, finished: {summary(result)}")
                record(args, result)
            return result
        if args.normalize == "imagenet" and domains[0].images.shape[1] != 3:
            raise Stop(f"--normalize imagenet is for colour images; those of {args.dataset} have one channel: use unit", 2)
        clients, targets = make_clients(args, domains, len(classes))
        seed_all(args.seed, "init")
        try:
            net = build(args, domains[0].images.shape[1], len(classes))
            net.eval()(torch.zeros(2, *domains[0].images.shape[1:]))
        except (RuntimeError, AssertionError) as e:
            if out_of_memory(e):
                raise
            flag, size = ("--crop", args.crop) if args.crop else ("--image-size", args.image_size)
            raise Stop(f"images of {size}x{size} do not fit --backbone {args.backbone} ({str(e).splitlines()[0][:80]}): give another "
                       f"{flag}", 2)
        net.to(args.device, memory_format=torch.channels_last)
        server = Server(args, net, len(clients))
        members = {k: Client(args, net, k, c) for k, c in enumerate(clients + targets) if k % size == rank}  # targets never train
        return Loop(server, members, clients, targets, args, key, out, saved, len(classes)).run()


def of_target(args: Args, target: str) -> Args:
    """The arguments of one of the runs of `--target all`; its output is a folder in `--out`."""
    return dataclasses.replace(args, target=target,
                               out=str(Path(args.out) / target) if args.out and several_runs(args) else args.out)


def folders_of(args: Args, results: list[dict]) -> list[Path]:
    """The output folders of the runs that `run` has returned for `args`."""
    return [folder_of(of_target(args, r["args"]["target"])) for r in results]


def folder_of(args: Args) -> Path:
    """The output folder of a run on one target."""
    key = identity(args)
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=4).hexdigest()
    protocol = args.protocol if args.protocol == "indomain" else f"{args.protocol}-{args.target}"
    return Path(args.out or Path("runs") / f"{key['method']}-{args.dataset}-{protocol}-{args.scale}-s{args.seed}-{digest}")


def resumed(out: Path, key: dict, args: Args) -> tuple[dict | None, dict | None]:
    """What the output folder holds of this run: its checkpoint, and its result if it is finished. Stop if the folder holds
    another run."""
    if not args.resume:
        return None, None
    saved = result = None
    if (out / "checkpoint.pt").exists():
        saved = load_file(out / "checkpoint.pt", "checkpoint")
        try:
            theirs = dict(json.loads(saved["identity"]))
            whole = Loop.KEPT.keys() <= saved.keys() and all(isinstance(saved[k], kind) for k, kind in Loop.KEPT.items())
            if not whole or theirs == key and not 0 < saved["round"] <= args.rounds:
                raise ValueError
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            raise Stop(f"{out / 'checkpoint.pt'} is no whole checkpoint: give another --out, or --no-resume to replace it")
    if (out / "result.json").exists():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a damaged result is made again from the checkpoint
            found = json.loads((out / "result.json").read_text())
            if summary(found) and isinstance(found["args"], dict):
                result = found
    for other in [json.loads(saved["identity"])] if saved else [result["args"]] if result else []:
        different = [k for k in sorted(other | key) if other.get(k) != key.get(k)]
        if different:
            raise Stop(f"{out} holds a run of other arguments ("
                       f"{', '.join(f'{k} {other.get(k)}, not {key.get(k)}' for k in different[:3])}"
                       f"{', ...' if len(different) > 3 else ''}): give another --out, or --no-resume to replace it", 2)
    finished = result and result["args"] == key and (not saved or saved["round"] == args.rounds)
    return saved, result if finished else None


class Loop:
    """The rounds of one run: sample clients, download, train, upload, update, evaluate, log, checkpoint."""

    KEPT = {"identity": str, "round": int, "history": str, "seconds": dict, "images": int, "best": dict, "server": dict,
            "clients": dict}  # a checkpoint's entries
    FILES = ("result.json", "checkpoint.pt", "best.pt", "metrics.jsonl", "timing.jsonl", "curves.png")

    def __init__(self, server, members: dict, clients: list[ClientData], targets: list[ClientData], args: Args, key: dict,
                 out: Path, saved: dict | None, classes: int):
        self.server, self.clients, self.args, self.key, self.out, self.classes = server, members, args, key, out, classes
        self.K, self.has_target = len(clients), bool(targets)
        self.names = [c.name for c in clients + targets]
        self.sizes = [len(c.train) for c in clients]
        self.t, self.history, self.best, self.best_state, self.shown = 0, [], {"round": 0, "val": -1.0}, None, {}
        self.seconds = {"train": 0.0, "server": 0.0, "evaluate": 0.0, "write": 0.0}
        self.images, self.saved_at = 0, time.monotonic()
        if saved:
            try:
                self.t, self.history, self.seconds = saved["round"], json.loads(saved["history"]), saved["seconds"]
                self.images, self.best = saved["images"], {k: saved["best"][k] for k in ("round", "val")}
                self.server.load_state_dict(to_device(saved["server"], args.device))
                for k, client in self.clients.items():
                    client.load_state_dict(to_device(saved["clients"][k], args.device))
                for k in list(self.clients)[:1]:
                    self.clients[k].model(self.server.download(k))  # fails if the tensors do not fit the network
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as e:
                raise Stop(f"{out / 'checkpoint.pt'} does not fit this method ({type(e).__name__}: {e}): give another --out, or "
                           f"--no-resume to replace it")
        elif process()[0] == 0:
            for name in self.FILES:  # --no-resume, or what is left of a run without a checkpoint
                (out / name).unlink(missing_ok=True)
        if process()[0] == 0:
            for leftover in out.glob("*.tmp"):  # of a write that was killed
                leftover.unlink()
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # times of rounds that will be run again
                lines = (out / "timing.jsonl").read_text().splitlines(keepends=True)
                kept = "".join(line for line in lines if json.loads(line)["round"] <= self.t)
                write_whole(out / "timing.jsonl", lambda f: f.write(kept.encode()))

    def run(self) -> dict:
        args, rank = self.args, process()[0]
        if rank == 0:
            lines = "".join(json.dumps(h) + "\n" for h in self.history)
            write_whole(self.out / "metrics.jsonl", lambda f: f.write(lines.encode()))
        wide = bool(sys.stderr and sys.stderr.isatty())
        with tqdm(total=args.rounds, initial=self.t, unit="round", desc=f"{self.key['method']} {args.dataset}",
                  mininterval=0.2 if wide else 30, dynamic_ncols=wide, disable=rank != 0) as bar:
            while self.t < args.rounds:
                entry = self.round(self.t)
                self.t += 1
                if self.t % args.eval_every == 0 or self.t == args.rounds:
                    entry |= self.evaluate_linear(self.t) if args.protocol == "linear" else self.evaluate(self.t)
                if rank == 0:
                    self.log(entry, bar)
                self.checkpoint(entry)
        result = self.result() if rank == 0 else {}
        return from_server(result)

    def round(self, t: int) -> dict:
        """Round t; returns its line of metrics (in process 0)."""
        args = self.args
        count = max(1, round(args.participation * self.K))
        chosen = torch.randperm(self.K, generator=seed_all(args.seed, "sample", t))[:count].sort().values.tolist()
        started, uploads, logs = time.perf_counter(), {}, {}
        for k in chosen:
            if k not in self.clients:
                continue
            down = self.server.download(k)
            seed_all(args.seed, "train", t, k)
            up = self.clients[k].train(down, t)
            log = {name: float(v) for name, v in getattr(self.clients[k], "log", {}).items()}
            finite = torch.stack([torch.isfinite(v).all().to(args.device) for v in tensors_of(up)]).all()
            if not finite or not all(math.isfinite(v) for v in log.values()):
                raise Stop(f"round {t + 1}, client {self.names[k]}: the loss or the weights are no longer finite; the last good "
                           f"checkpoint, if one was due before, is kept in {self.out}: lower --lr, or set --clip")
            uploads[k], logs[k] = up, {"bytes_down": nbytes(down), "bytes_up": nbytes(up)} | log
        uploads, logs = merged(uploads), merged(logs)
        self.seconds["train"] += time.perf_counter() - started
        self.images += sum(images_in_round(self.sizes[k], args) for k in chosen)
        started = time.perf_counter()
        seed_all(args.seed, "server", t)
        if process()[0] == 0:
            self.server.update(to_device(uploads, args.device) if process()[1] > 1 else uploads, t)
        if process()[1] > 1:
            self.server.load_state_dict(to_device(from_server(self.server.state_dict()), args.device))
        self.seconds["server"] += time.perf_counter() - started
        return {"round": t + 1, "lr": args.lr * args.lr_decay ** t, "clients": {self.names[k]: v for k, v in logs.items()}}

    def evaluate(self, rounds: int) -> dict:
        """Validation and test accuracy of the models of all clients after `rounds` rounds, and of the target."""
        started, hits = time.perf_counter(), {}
        for k, client in self.clients.items():
            seed_all(self.args.seed, "evaluate", rounds, k)
            model = client.model(self.server.download(k))
            sizes = len(client.data.val), len(client.data.test)
            hits[k] = [correct(model, client.data.val, self.args) if k < self.K else 0, sizes[0],
                       correct(model, client.data.test, self.args), sizes[1]]
        hits = merged(hits)
        self.seconds["evaluate"] += time.perf_counter() - started
        if process()[0]:
            return {}
        entry = {}
        for part, i in (("val", 0), ("test", 2)):
            right, n = [hits[k][i] for k in range(self.K)], [hits[k][i + 1] for k in range(self.K)]
            each = [r / m for r, m in zip(right, n)]
            entry[part] = {"ALL": sum(right) / sum(n), "AVG": sum(each) / self.K,
                           "clients": dict(zip(self.names, each))}
        if self.has_target:
            entry["target"] = hits[self.K][2] / hits[self.K][3]
        return entry

    def evaluate_linear(self, rounds: int) -> dict:
        """The accuracy on each target of a linear classifier on the frozen network, for each share of labels; `target` is the
        mean over the targets with the first share."""
        started, found, args = time.perf_counter(), {}, self.args
        for k in [k for k in self.clients if k >= self.K]:
            client = self.clients[k]
            z, y = representations(client.model(self.server.download(k)), client.data.test, args)
            for ratio in linear.ratios(args.label_ratio):
                seed = seed_all(args.seed, "linear", seed_name(args, client.data.name)).initial_seed()
                found.setdefault(k, {})[str(ratio)] = linear.accuracy(z, y, self.classes, ratio, seed, lr=args.linear_lr,
                                                                     epochs=args.linear_epochs, batch=args.linear_batch)
        found = merged(found)
        self.seconds["evaluate"] += time.perf_counter() - started
        if process()[0]:
            return {}
        first = str(linear.ratios(args.label_ratio)[0])
        return {"target": sum(a[first] for a in found.values()) / len(found),
                "linear": {self.names[k]: accuracies for k, accuracies in found.items()}}

    def log(self, entry: dict, bar) -> None:
        """Append the round's metrics (deterministic) and times (not) to their files and show them."""
        started = time.perf_counter()
        self.history.append(entry)
        with open(self.out / "metrics.jsonl", "a") as f:
            f.write(json.dumps(entry) + "\n")
        with open(self.out / "timing.jsonl", "a") as f:
            f.write(json.dumps({"round": entry["round"], "seconds": self.seconds}) + "\n")
        losses = [c["loss"] for c in entry["clients"].values() if "loss" in c]
        shown = {"loss": f"{np.mean(losses):.3f}"} if losses else {}
        if "val" in entry:
            shown |= {"val": f"{100 * entry['val']['ALL']:.1f}", "ALL": f"{100 * entry['test']['ALL']:.1f}",
                      "AVG": f"{100 * entry['test']['AVG']:.1f}"}
        if "target" in entry:
            shown |= {"target": f"{100 * entry['target']:.1f}"}
        if "val" in entry or "target" in entry:
            self.shown = shown
        bar.set_postfix(self.shown | shown, refresh=False)
        bar.update()
        self.seconds["write"] += time.perf_counter() - started

    def snapshot(self) -> dict:
        """The federation's state: the server's and, gathered in process 0, all clients'."""
        return {"server": self.server.state_dict(), "clients": merged({k: c.state_dict() for k, c in self.clients.items()})}

    def checkpoint(self, entry: dict) -> None:
        """Keep the state of the best validation round (the first of equals); write it and the last state when it is time."""
        last = self.t == self.args.rounds
        better = "val" in entry and entry["val"]["ALL"] > self.best["val"]
        due = last or time.monotonic() - self.saved_at >= self.args.checkpoint_every
        better, due = from_server((better, due))
        if not (better or due):
            return
        started, now = time.perf_counter(), self.snapshot()
        if process()[0] == 0:
            if better:
                self.best = {"round": self.t, "val": entry["val"]["ALL"]}
                self.best_state = {"identity": json.dumps(self.key), **self.best, **copied(now)}
            if due and self.best_state:
                write_whole(self.out / "best.pt", lambda f: save(self.best_state, f))
                self.best_state = None
            if due:
                content = {"identity": json.dumps(self.key), "round": self.t, "history": json.dumps(self.history),
                           "seconds": self.seconds, "images": self.images, "best": self.best} | now
                write_whole(self.out / "checkpoint.pt", lambda f: save(content, f))
        self.saved_at = time.monotonic() if due else self.saved_at
        self.seconds["write"] += time.perf_counter() - started

    def result(self) -> dict:
        """The finished run's result, written to result.json and curves.png and added to `--record`."""
        args, evaluated = self.args, [h for h in self.history if "val" in h or "linear" in h]
        if args.protocol == "linear":  # no labels to choose a round by
            chosen, outcome = evaluated[-1], lambda h: {name: h[name] for name in ("round", "target", "linear")}
            curve = {f"{name} {ratio}": [round(h["linear"][name][ratio], 5) for h in evaluated]
                     for name, accuracies in chosen["linear"].items() for ratio in accuracies}
        else:
            chosen = next(h for h in evaluated if h["round"] == self.best["round"])
            outcome = lambda h: {"round": h["round"], "val": h["val"]["ALL"], **h["test"]} | (
                {"target": h["target"]} if self.has_target else {})
            curve = {"val": [round(h["val"]["ALL"], 5) for h in evaluated]} | {
                measure: [round(h["test"][measure], 5) for h in evaluated] for measure in ("ALL", "AVG")}
        up, down = ({h["round"]: sum(c[b] for c in h["clients"].values()) for h in self.history}
                    for b in ("bytes_up", "bytes_down"))
        seconds = {k: round(v, 3) for k, v in self.seconds.items()}
        result = {
            "id": hashlib.blake2b(json.dumps(self.key, sort_keys=True).encode(), digest_size=8).hexdigest(),
            "method": self.key["method"], "args": self.key, "command": command(),
            "best": outcome(chosen), "last": outcome(evaluated[-1]),
            "curve": {"round": [h["round"] for h in evaluated]} | curve | (
                {"target": [round(h["target"], 5) for h in evaluated]} if self.has_target else {}),
            **({"logs": self.mean_logs()} if args.protocol == "linear" else {}),
            "bytes": {"up": sum(up.values()), "down": sum(down.values()),
                      "up_per_round": sum(up.values()) / len(up), "down_per_round": sum(down.values()) / len(down)},
            "seconds": seconds, "images_per_second": round(self.images / max(seconds["train"], 1e-9), 1),
            "peak_memory_mib": peak_memory(), "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        } | provenance(args)
        draw_curves(self.out / "curves.png", self.history, f"{result['method']}, {args.dataset}, {args.scale}")
        write_json(self.out / "result.json", result)
        record(args, result)
        print(f"{self.out}: {summary(result)}")
        return result

    def mean_logs(self) -> dict[str, list]:
        """What the clients log, such as the share of discarded gradients: for each round the mean over the clients that logged
        it, or None."""
        names = sorted({n for h in self.history for c in h["clients"].values() for n in c} - {"bytes_up", "bytes_down"})
        values = lambda h, name: [c[name] for c in h["clients"].values() if name in c]
        return {n: [round(float(np.mean(v)), 5) if (v := values(h, n)) else None for h in self.history] for n in names}


# Records and figures


def summary(result: dict) -> str:
    """One line: the model of the best validation round, and the cost."""
    best, last, s = result["best"], result["last"], result["seconds"]
    target = f"target {100 * best['target']:.2f}%, " if "target" in best else ""
    if "linear" in last:
        found = "last round, linear classifier: " + "; ".join(f"{name} " + ", ".join(
            f"{100 * a:.2f}% with {100 * float(ratio):g}% of the labels" for ratio, a in accuracies.items())
            for name, accuracies in last["linear"].items())
    else:
        found = (f"best validation round {best['round']}: {target}ALL {100 * best['ALL']:.2f}%, AVG {100 * best['AVG']:.2f}%; "
                 f"last round: ALL {100 * last['ALL']:.2f}%, AVG {100 * last['AVG']:.2f}%")
    return (f"{found}; {s['train']:.0f} s training, {s['server']:.0f} s server, {s['evaluate']:.0f} s evaluation, "
            f"{result['images_per_second']:.0f} images/s, {result['peak_memory_mib']} MiB")


def record(args: Args, result: dict) -> None:
    """Append the result to `--record` unless it is there; one line, one write, under a lock."""
    if not args.record:
        return
    path = Path(args.record)
    with locked(path.with_name(f".{path.name}.lock")), open(path, "a+b") as f:
        f.seek(0)
        content = f.read()
        for line in content.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a damaged line is nobody's record
                if json.loads(line)["id"] == result["id"]:
                    return
        f.write((b"\n" if content and not content.endswith(b"\n") else b"") + json.dumps(result).encode() + b"\n")


def command() -> str:
    """The command of this run, as typed from the repository's folder, without the flags that change no number: the folders are this machine's."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    start = ["-m", spec.name] if spec and spec.name != "__main__" else [Path(sys.argv[0]).name]
    others = {"--" + f.name.replace("_", "-"): f.default for f in dataclasses.fields(Args) if not f.metadata["numbers"]}
    kept, words = [], iter(sys.argv[1:])
    for word in words:
        flag, has_value, _ = word.replace("--no-", "--").partition("=")
        if flag not in others:
            kept.append(word)
        elif not has_value and not isinstance(others[flag], bool):
            next(words, None)
    return shlex.join(["python", *start, *kept])


def peak_memory() -> int:
    """MiB of the largest resident size of this process (the mapped pixels that were read count), GPU memory apart."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def provenance(args: Args) -> dict:
    """Commit, versions and hardware: where a number comes from."""
    def git(*words):
        with contextlib.suppress(OSError):  # no git on this machine
            done = subprocess.run(["git", "-C", str(Path(__file__).parent), *words], capture_output=True, text=True)
            return done.stdout.strip() if done.returncode == 0 else None

    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), "") if Path("/proc/cpuinfo").exists() else platform.processor()
    gpu, changes = args.device.startswith("cuda"), git("status", "--porcelain", "--", "*.py")
    return {
        "commit": git("rev-parse", "HEAD"), "uncommitted_changes": None if changes is None else bool(changes),
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "torchvision": torchvision.__version__, "numpy": np.__version__},
        "hardware": {"cpu": cpu, "threads": torch.get_num_threads(), "processes": process()[1],
                     "gpu": torch.cuda.get_device_name(args.device) if gpu else None,
                     "gpu_peak_memory_mib": torch.cuda.max_memory_allocated(args.device) >> 20 if gpu else None},
    }


def draw_curves(path: Path, history: list[dict], title: str) -> None:
    """Accuracy of validation, ALL, AVG and each client, or of the linear classifiers, and the mean training loss, over the
    rounds."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    evaluated = [h for h in history if "val" in h or "linear" in h]
    rounds = [h["round"] for h in evaluated]
    if "linear" in evaluated[0]:
        for name, accuracies in evaluated[0]["linear"].items():
            for ratio in accuracies:
                left.plot(rounds, [100 * h["linear"][name][ratio] for h in evaluated], ".-", label=f"{name}, {100 * float(ratio):g}% of the labels")
    else:
        for name in evaluated[0]["test"]["clients"]:
            left.plot(rounds, [100 * h["test"]["clients"][name] for h in evaluated], linewidth=0.8, alpha=0.6, label=name)
        left.plot(rounds, [100 * h["test"]["ALL"] for h in evaluated], "k", label="test ALL")
        left.plot(rounds, [100 * h["test"]["AVG"] for h in evaluated], "k--", label="test AVG")
        left.plot(rounds, [100 * h["val"]["ALL"] for h in evaluated], "r:", label="validation ALL")
        if "target" in evaluated[0]:
            left.plot(rounds, [100 * h["target"] for h in evaluated], "b", linewidth=2, label="left-out domain")
    left.set(xlabel="round", ylabel="accuracy (%)", title=title)
    left.legend(fontsize=7, ncols=2)
    for name in sorted({n for h in history for n in h["clients"]}):
        points = [(h["round"], h["clients"][name]["loss"]) for h in history if "loss" in h["clients"].get(name, {})]
        if points:
            right.plot(*zip(*points), linewidth=0.8, label=name)
    right.set(xlabel="round", ylabel="mean training loss", title="training")
    if right.lines:
        right.legend(fontsize=7)
    figure_format = io.BytesIO()
    figure.savefig(figure_format, dpi=130, format="png")
    write_whole(path, lambda f: f.write(figure_format.getvalue()))
