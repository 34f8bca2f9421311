"""What every method stands on: data loaders, backbones, averaging and evaluation, the round loop, in this
order.

A method file brings a `Server` and a `Client` that share nothing but two payloads, the download and the
upload; `run` is their only caller. What they must offer is said by the two `Protocol` classes above the round
loop. From `python fdse.py` to its loss it is four calls: run, run_targets, rounds, Client.train.

Flags and their origins are in plumbing/settings.py, files and resume in plumbing/runfolder.py, archives and
decoding in plumbing/archives.py and decoding.py, augmentation in plumbing/augment.py; method files import all
they need from here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from plumbing.archives import download, find_archive
from plumbing.augment import AUGMENTATIONS, Augmentation, augment
from plumbing.catalog import source_of
from plumbing.decoding import load_folders
from plumbing.errors import Stop, ending, out_of_memory, said_if_long, speaks
from plumbing.extending import extend
from plumbing.processes import from_server, merged, open_device, prepare, process, set_precision, to_device
from plumbing.runfolder import RunFolder, beginning, folder_of, of_target, several_runs
from plumbing.seeds import of_seed, refuse_summary, show_seeds
from plumbing.settings import (Args, LinearArgs, arg, content_of, method_name, parse, ratios, seed_numbers,
                               shares)
from plumbing.signals import Interrupted, handled, interrupt
from plumbing.sources import files_of, hash_of, method_file
from plumbing.tensors import copied, entrywise, overwrite, parts_of
from plumbing.trained import (
    arguments_from,
    fitting,
    method,
    read_kept,
    refuse_other_code,
    refuse_other_images,
)
from plumbing.weights import load_pretrained, read_weights

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import update_bn

__all__ = ["Args", "LinearArgs", "arg", "entrywise", "parse"]  # for method files, beside what is defined here

Payload = dict[str, "Tensor | dict[str, Tensor]"]  # what travels: plain tensors, nothing else


def seed_all(*key) -> torch.Generator:
    """Seed torch, numpy and random from a key such as (seed, "train", t, k); returns a CPU generator of torch
    of the same seed.

    Randomness is counter-based: no generator state is carried from one client or round to the next, so a
    result depends neither on the order in which clients are trained nor on an interruption.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    torch.manual_seed(number)
    np.random.seed(number % 2 ** 32)
    random.seed(number)
    return torch.Generator().manual_seed(number)


# Data: domains


@dataclass
class Domain:
    """One domain: its name, images uint8 [N, C, H, W] (stored channels last) and labels int64 [N]."""

    name: str
    images: Tensor
    labels: Tensor


ANGLES = (0, 15, 30, 45, 60, 75)  # degrees, counter-clockwise (FedSR, Sec. 4.1)
PUBLISHED_ROWS = Path(__file__).parent / "plumbing" / "rotated_mnist_indices.csv"


def load_domains(args: Args) -> tuple[list[Domain], tuple[str, ...]]:
    """The domains of `args.dataset` at `args.image_size`, and the class names."""
    if args.archives and not Path(args.archives).is_dir():
        raise Stop(f"--archives {args.archives} is not a folder", 2)
    if args.dataset == "digits":
        domains, classes = load_digits(args.image_size), tuple("0123456789")
    elif args.dataset in ("rotatedmnist", "rotatedmnist-t10k"):
        images, labels = read_mnist(args, train=args.dataset == "rotatedmnist")
        rows = rows_of_rotated_mnist(args, labels)
        domains, classes = rotated_mnist(images[rows], labels[rows], args.image_size), tuple("0123456789")
    else:
        decoded, classes = load_folders(args, source_of(args.dataset))
        domains = [Domain(name, images, labels) for name, images, labels in decoded]
    for d in domains:
        if args.limit:
            generator = seed_all(args.seed, "limit", seed_name(args, d.name))
            keep = torch.randperm(len(d.labels), generator=generator)[:args.limit]
            d.images, d.labels = d.images[keep], d.labels[keep]
        if len(d.labels) < len(classes):
            advice = "raise --limit" if args.limit else "look at its folder"
            raise Stop(f"domain {d.name} has {len(d.labels)} images, fewer than the "
                       f"{len(classes)} classes; {advice}")
    return domains, classes


def known_domains(dataset: str) -> list[str]:
    """The names of a dataset's domains, as far as they are known before it is read: else none."""
    if dataset == "digits":
        return [f"d{angle}" for angle in ANGLES]
    if dataset in ("rotatedmnist", "rotatedmnist-t10k"):
        return [f"m{angle}" for angle in ANGLES]
    return list(source_of(dataset).domains)


def seed_name(args: Args, domain: str) -> str:
    """What stands for a domain in the seeds of its split. RotatedMNIST's domains are rotations of the same
    images: they are limited, dealt out and split alike, so that none of a source's validation and test images
    is trained on in another source. (The target has all of them, as in the papers.)"""
    return "" if args.dataset.startswith("rotatedmnist") else domain


def rotate(images: Tensor, angle: float, size: int, interpolation: str = "bilinear") -> Tensor:
    """uint8 [N, 1, h, w] -> [N, 1, size, size], resized and turned counter-clockwise by `angle` degrees."""
    from torchvision.transforms.v2 import InterpolationMode, functional
    if images.shape[-2:] != (size, size):
        images = functional.resize(images, [size, size], antialias=True)
    if angle:
        images = functional.rotate(images, angle, interpolation=InterpolationMode(interpolation))
    return images.contiguous(memory_format=torch.channels_last)


def load_digits(size: int) -> list[Domain]:
    """scikit-learn's 1,797 handwritten digits (8x8), dealt out to six rotations: no image is in two
    domains."""
    from sklearn.datasets import load_digits as sklearn_digits
    bunch = sklearn_digits()
    images = torch.from_numpy(bunch.images * (255 / 16)).round().to(torch.uint8)[:, None]  # [1797, 1, 8, 8]
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=seed_all("digits"))
    domains = []
    for i, angle in enumerate(ANGLES):
        rows = order[i::6]
        domains.append(Domain(f"d{angle}", rotate(images[rows], angle, size), labels[rows]))
    return domains


def rows_of_rotated_mnist(args: Args, labels: Tensor) -> Tensor:
    """Which 1,000 images, 100 of each class, make RotatedMNIST: rows [1000] of MNIST's images.

    FedSR takes "the same version of the dataset" as DIRT and DIVA: ten lists of rows of the training set,
    which both repositories hold (atuannguyen/DIRT @ 2635178, data/roatedmnist_sup_inds). The seed picks the
    list, as in DIRT: seed 0 the first. Of the test set, for `rotatedmnist-t10k`, ours are drawn with a fixed
    seed.
    """
    if args.dataset == "rotatedmnist":
        lists = np.loadtxt(PUBLISHED_ROWS, delimiter=",", skiprows=1, dtype=np.int64)  # [1000, 10]
        return torch.from_numpy(lists[:, args.seed % 10].copy())
    order = torch.randperm(len(labels), generator=seed_all("rotatedmnist"))
    of_classes = []
    for c in range(10):
        of_classes.append(order[labels[order] == c][:100])
    rows = torch.cat(of_classes)
    if len(rows) < 1000:
        counts = labels.bincount().tolist()
        raise Stop(f"MNIST: expected at least 100 images of each of 10 classes, found {counts}")
    return rows


def rotated_mnist(images: Tensor, labels: Tensor, size: int) -> list[Domain]:
    """FedSR's protocol: the same images uint8 [1000, 1, 28, 28] are turned by each of six angles, by the
    nearest pixel as in DIRT and DIVA. An image is in all domains, once in each."""
    return [Domain(f"m{a}", rotate(images, a, size, "nearest"), labels) for a in ANGLES]


def read_mnist(args: Args, train: bool) -> tuple[Tensor, Tensor]:
    """MNIST from its gzip files (in --archives, else downloaded): images uint8 [N, 1, 28, 28], labels int64
    [N]."""
    kind, count = ("train", 60000) if train else ("t10k", 10000)
    images = read_idx(args, f"{kind}-images-idx3-ubyte.gz", magic=2051, header=16, count=count)
    labels = read_idx(args, f"{kind}-labels-idx1-ubyte.gz", magic=2049, header=8, count=count)
    return images.view(count, 1, 28, 28), labels.long()


def read_idx(args: Args, name: str, magic: int, header: int, count: int) -> Tensor:
    """The bytes behind the header of one of MNIST's files, uint8. Stop if the file is damaged or another
    one."""
    from torchvision.datasets import MNIST
    path = find_archive(args, name)
    if path is None:
        path = download(MNIST.mirrors[-1] + name, Path(args.data) / "downloads" / name)
    expected = dict(MNIST.resources)[name]
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    if md5 != expected:
        raise Stop(f"{path}: expected md5 {expected}, found {md5}; the file is damaged, get it again")
    with gzip.open(path) as file:
        raw = file.read()
    if int.from_bytes(raw[:4], "big") != magic or int.from_bytes(raw[4:8], "big") != count:
        raise Stop(f"{path}: not the MNIST file of {count} {name.split('-')[1]}")
    return torch.frombuffer(bytearray(raw[header:]), dtype=torch.uint8)


# Data: splits and clients

ACTIVATIONS = 256  # of an evaluation, bytes for each pixel: four of ResNet50's largest layers in float32
DIRICHLET_DRAWS = 1000  # until every client has enough; then the run ends with a line that says who has not


@dataclass
class Data:
    """A part of a domain: its images uint8 [N, C, H, W], and the rows `index` [n] with `labels` [n] of it."""

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

    def batch(self, i: Tensor | slice, how: Augmentation | None = None) -> tuple[Tensor, Tensor]:
        """Positions i [B], or a range of them -> x float32 [B, C, H, W] in [0, 1] (or normalized), augmented,
        channels last, and y [B]."""
        pixels, y = self.fetch(i)
        return self.prepared(pixels, how), y

    def fetch(self, i: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Positions i [B], or a range of them -> pixels uint8 [B, C, H, W] and y [B] on the device; of images
        that are in the main memory, in copies for which the host does not wait."""
        pixels, y = self.images[self.index[i]], self.labels[i]
        if self.streams:
            pixels, y = pixels.pin_memory(), y.pin_memory()
        return pixels.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    @property
    def streams(self) -> bool:
        """Whether the images are in the main memory and the training on a GPU."""
        return self.device.startswith("cuda") and self.images.device.type == "cpu"

    def prepared(self, pixels: Tensor, how: Augmentation | None = None) -> Tensor:
        """Pixels -> x."""
        x = pixels.float().div_(255)
        if how:
            x = augment(x, how)
        if self.normalize == "imagenet":
            x = x.sub_(self.mean).div_(self.deviation)
        return x


@dataclass
class ClientData:
    """What client k holds: the name (its domain's, numbered if there are several clients) and three parts."""

    name: str
    train: Data
    val: Data
    test: Data
    unseen: bool = False  # the client of a domain that is left out: it never trains


def targets_of(args: Args, names: list[str]) -> list[str]:
    """The domains that a run evaluates without training on them. Stop if the flags name a domain that there
    is not."""
    sources = args.sources.split(",") if args.sources else []
    if args.target != "all":
        refuse_unknown("--target", args.target, args, names)
    for name in sources:
        refuse_unknown("--sources", name, args, names)
    if args.protocol == "indomain":
        if args.target != "all":
            raise Stop(f"--target {args.target} goes with --protocol lodo; the protocol is "
                       f"{args.protocol}", 2)
        return []
    rest = [name for name in names if name not in sources] if sources else names
    if not rest or len(set(sources)) < len(sources) or args.target in sources:
        raise Stop(f"--sources {args.sources} leaves no target: expected some of {', '.join(names)}, each "
                   "once, and a --target that is none of them", 2)
    return rest if args.target == "all" else [args.target]


def refuse_unknown(flag: str, name: str, args: Args, names: list[str]) -> None:
    if name not in names:
        raise Stop(f"{flag} {name} is not a domain of {args.dataset}; its domains are {', '.join(names)}", 2)


def make_clients(args: Args, domains: list[Domain],
                 classes: int) -> tuple[list[ClientData], list[ClientData]]:
    """The clients and, for `lodo` and `linear`, the targets. Every image of a domain is in exactly one part
    of one client. With --sources, domains that are neither source nor target are left out."""
    if args.dirichlet and args.clients_per_domain == 1:
        raise Stop(f"--dirichlet {args.dirichlet} needs several clients in a domain: set "
                   "--clients-per-domain", 2)
    targets = targets_of(args, [d.name for d in domains])
    of_sources, of_targets = [], []
    for d in domains:
        if args.sources and d.name not in args.sources.split(",") and d.name not in targets:
            continue
        d = on_device(d, args.device)
        order = torch.randperm(len(d.labels), generator=seed_all(args.seed, "split", seed_name(args, d.name)))
        if d.name in targets:
            of_targets.append(target_client(args, d, order))
        else:
            of_sources += source_clients(args, d, order, classes)
    return of_sources, of_targets


def on_device(d: Domain, device: str) -> Domain:
    """The domain with its decoded pixels on the GPU, if they take less than a quarter of what is free
    there."""
    if device.startswith("cuda") and d.images.nbytes < torch.cuda.mem_get_info(device)[0] / 4:
        return Domain(d.name, d.images.to(device), d.labels)
    return d


def client_data(args: Args, d: Domain, name: str, rows: tuple[Tensor, ...], unseen: bool) -> ClientData:
    """A client whose train, val and test are these rows [n] of a domain."""
    parts = []
    for of_part in rows:
        index = of_part.to(d.images.device)
        labels = d.labels[of_part].to(d.images.device)
        parts.append(Data(d.images, index, labels, args.device, args.normalize))
    return ClientData(name, *parts, unseen=unseen)


def target_client(args: Args, d: Domain, order: Tensor) -> ClientData:
    """The client of a target. Its train and val are empty; with `--target-part test` or `heldout` they are
    what nobody uses."""
    train, val, test = order[:0], order[:0], order
    if args.target_part != "all":
        train, val, test = cut(order, args.split)
    if args.target_part == "heldout":
        val, test = val[:0], torch.cat([val, test])
    if len(test) < 2:
        raise Stop(f"the target {d.name} has {len(test)} images to test; it needs 2: raise --limit or the "
                   "share in --split")
    if args.protocol == "linear":
        for ratio in ratios(args.label_ratio):
            stratified(d.labels[test], ratio, d.name)  # stops if it leaves too few
    return client_data(args, d, d.name, (train, val, test), unseen=True)


def source_clients(args: Args, d: Domain, order: Tensor, classes: int) -> list[ClientData]:
    """The clients of a source domain. With `linear` all images are for training: there are no labels to
    validate with."""
    if args.clients_per_domain > len(order):
        raise Stop(f"--clients-per-domain is {args.clients_per_domain}, more than the {len(order)} images of "
                   f"domain {d.name}: give fewer")
    clients = []
    for m, rows in enumerate(skewed(args, d, order, classes)):
        name = d.name if args.clients_per_domain == 1 else f"{d.name}-{m}"
        parts = parts_of_source(args, rows)
        if not enough(args, parts):
            has = "/".join(str(len(part)) for part in parts)
            needs = "/".join(str(fewest) for fewest in needed(args))
            raise Stop(f"client {name} has {has} images to train, validate and test; it needs at least "
                       f"{needs}: fewer --clients-per-domain, a larger --dirichlet or --limit")
        clients.append(client_data(args, d, name, parts, unseen=False))
    return clients


def pool(clients: list[ClientData]) -> None:
    """Give the first client the training images of all, in the main memory; the others keep none."""
    images = torch.cat([c.train.images[c.train.index].cpu() for c in clients])
    labels = torch.cat([c.train.labels.cpu() for c in clients])
    first = clients[0].train
    for c in clients:
        c.train = dataclasses.replace(c.train, index=c.train.index[:0], labels=c.train.labels[:0])
    clients[0].train = Data(images, torch.arange(len(labels)), labels, first.device, first.normalize)


def parts_of_source(args: Args, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A source client's rows to train, validate and test."""
    if args.protocol == "linear":
        return rows, rows[:0], rows[:0]
    return cut(rows, args.split)


def needed(args: Args) -> tuple[int, int, int]:
    """The fewest images that a source client can train, validate and test with: BN needs two to train."""
    if args.protocol == "linear":
        return 2, 0, 0
    return 2, 1, 1


def enough(args: Args, parts: tuple[Tensor, ...]) -> bool:
    return all(len(part) >= fewest for part, fewest in zip(parts, needed(args)))


def cut(rows: Tensor, split: str) -> tuple[Tensor, Tensor, Tensor]:
    """Shuffled rows -> train, validation, test. Test and then train are rounded down, validation gets the
    rest.

    (0.8/0.1/0.1 of 157 images gives 126/16/15, as in FDSE's official code.)
    """
    train, _, test = shares(split)
    n = len(rows)
    n_test = int(n * test + 1e-9)
    n_train = int((n - n_test) * train / (1 - test) + 1e-9)
    return rows[:n_train], rows[n_train:n - n_test], rows[n - n_test:]


def skewed(args: Args, d: Domain, order: Tensor, classes: int) -> list[Tensor]:
    """A domain's rows dealt out to its clients: evenly, or each class by shares drawn from Dirichlet(beta).

    Shares that leave a client too few images to train, validate and test are drawn again: with beta 0.1 a
    client of ten may have next to none."""
    M = args.clients_per_domain
    if M == 1 or args.dirichlet == 0:
        return [order[m::M] for m in range(M)]
    seed = seed_all(args.seed, "dirichlet", seed_name(args, d.name)).initial_seed()
    rng = np.random.default_rng(seed)
    for _ in range(DIRICHLET_DRAWS):
        piles = dirichlet_piles(args, d, order, classes, rng)
        if all(enough(args, parts_of_source(args, pile)) for pile in piles):
            break
    shuffle = seed_all(args.seed, "dirichlet order", seed_name(args, d.name))
    of_clients = []
    for pile in piles:
        of_clients.append(pile[torch.randperm(len(pile), generator=shuffle)])
    return of_clients


def dirichlet_piles(args: Args, d: Domain, order: Tensor, classes: int, rng) -> list[Tensor]:
    """One draw: of each class the clients' shares of its rows."""
    M = args.clients_per_domain
    piles = [[] for _ in range(M)]
    for c in range(classes):
        rows = order[d.labels[order] == c]
        up_to = np.cumsum(rng.dirichlet([args.dirichlet] * M))  # the share of the first m clients
        ends = np.floor(up_to * len(rows) + 1e-9).astype(int)[:-1]
        for pile, rows_of_client in zip(piles, np.split(rows.numpy(), ends)):
            pile.append(torch.from_numpy(rows_of_client))
    return [torch.cat(pile) for pile in piles]


# Data: batches


def batches(data: Data, args: Args, t: int, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The training batches (x, y) of client k in round t: E epochs, or exactly `--steps` of them; a new order
    each epoch. A method with two views of each image gets x [2B, C, H, W], the first views before the second
    ones."""
    how = AUGMENTATIONS.get(args.augment)
    if args.crop:
        how = dataclasses.replace(how or Augmentation(ratio=(1.0, 1.0)), size=args.crop)
    steps = args.steps or args.epochs * steps_in_epoch(len(data), args)
    done, epoch = 0, 0
    while done < steps:
        order = torch.randperm(len(data), generator=seed_all(args.seed, "batches", t, k, epoch))
        parts = cut_batches(order.to(data.index.device), args)[:steps - done]
        fetched = (data.fetch(i.repeat(args.views)) for i in parts)
        if data.streams:
            fetched = one_ahead(fetched, data.device)
        for pixels, y in fetched:
            yield data.prepared(pixels, how), y[:len(y) // args.views]
            done += 1
        epoch += 1


def one_ahead(fetched: Iterator[tuple[Tensor, Tensor]], device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches, each copied to the GPU on a stream of its own while the network computes on the one
    before."""
    copying, computing = torch.cuda.Stream(device), torch.cuda.current_stream(device)

    def copied_next() -> tuple[Tensor, Tensor] | None:
        with torch.cuda.stream(copying):
            return next(fetched, None)

    coming = copied_next()
    while coming:
        batch = coming
        computing.wait_stream(copying)
        for v in batch:
            v.record_stream(computing)  # its memory is free again only when the network has used it
        coming = copied_next()
        yield batch


def cut_batches(order: Tensor, args: Args) -> list[Tensor]:
    """An epoch's order in batches. A last batch of one image is joined to the batch before it, because BN
    cannot take the variance of one value; with `drop_last` one that is not full is left out, if it is not the
    only one."""
    parts = list(order.split(args.batch_size))
    if len(parts) == 1:
        return parts
    if args.drop_last and len(parts[-1]) < args.batch_size:
        return parts[:-1]
    if len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def steps_in_epoch(n: int, args: Args) -> int:
    """The batches of an epoch of n images."""
    return len(cut_batches(torch.arange(n), args))


def images_in_round(n: int, args: Args) -> int:
    """How many images a client of n training images trains on in a round."""
    sizes = [len(part) for part in cut_batches(torch.arange(n), args)]
    if args.steps:
        return sum(sizes[i % len(sizes)] for i in range(args.steps))
    return args.epochs * sum(sizes)


def in_order(parts: list[Data], args: Args) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of an evaluation, (x, y): every image of the parts once, one part after the other. Several
    parts may be in one batch."""
    size = evaluation_batch(args)
    waiting, n = [], 0
    for data in parts:
        for begin in range(0, len(data), size):
            end = min(begin + size, len(data))
            if n + end - begin > size:
                yield joined(waiting)
                waiting, n = [], 0
            waiting.append(data.batch(slice(begin, end)))
            n += end - begin
    if waiting:
        yield joined(waiting)


def joined(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Some batches as one."""
    if len(batches) == 1:
        return batches[0]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def on_gpu(args: Args) -> bool:
    return args.device.startswith("cuda")


def evaluation_batch(args: Args) -> int:
    """The images that are evaluated at once. On a GPU up to 1,000, if a quarter of its memory holds their
    activations: a small batch would leave most of it idle, and each batch costs a network's launches."""
    if not on_gpu(args):
        return max(args.batch_size, 100)
    memory = torch.cuda.get_device_properties(args.device).total_memory
    side = getattr(args, "crop", 0) or args.image_size
    fit = memory // 4 // (ACTIVATIONS * side ** 2)
    return int(min(1000, max(args.batch_size, 100, fit)))


# Backbones: features(x) -> z [B, D] and classify(z) -> logits [B, classes]


class Net(nn.Module):
    """A representation `body` (x -> z [B, D]) and a linear `head` (z -> logits)."""

    def __init__(self, body: nn.Module, dim: int, classes: int, head=nn.Linear):
        super().__init__()
        self.body, self.head = body, head(dim, classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def classify(self, z: Tensor) -> Tensor:
        return self.head(z)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))


def smallcnn(channels: int, size: int) -> nn.Module:
    """The network of the RotatedMNIST experiments: two convolutions and a linear layer to z of 64 (FedSR,
    Sec. 4.2).

    FedSR's text says "two 3x3 convolutional layers" and that the network is DIRT's and DIVA's; theirs are
    5x5, and channels, BN, pooling, no padding, Xavier's start and the ReLU before the classifier are theirs
    too (atuannguyen/DIRT @ 2635178). ReLU stands behind the pooling: the same values for a quarter of the
    work.
    """
    def block(s, t):
        return nn.Conv2d(s, t, 5, bias=False), nn.BatchNorm2d(t), nn.MaxPool2d(2), nn.ReLU(inplace=True)

    side = ((size - 4) // 2 - 4) // 2  # 28 -> 24 -> 12 -> 8 -> 4
    if side < 1:
        raise Stop(f"--backbone smallcnn needs images of at least 16x16, not {size}x{size}", 2)
    return xavier(nn.Sequential(*block(channels, 32), *block(32, 64), nn.Flatten(),
                                nn.Linear(64 * side * side, 64)))


def xavier(module: nn.Module) -> nn.Module:
    """The module, its convolutions and linear layers as DIRT's network starts: Xavier's uniform distribution,
    biases 0."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module


def classifier_of_dirt(dim: int, classes: int) -> nn.Module:
    return xavier(LinearOfReLU(dim, classes))


class LinearOfReLU(nn.Linear):
    """The classifier of DIRT's network: z [B, D] -> logits [B, C] of ReLU(z)."""

    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z.relu())


def smallcnn_bn(channels: int, size: int) -> nn.Module:
    """A padded small CNN whose z of 64 has a ReLU, for images of any size: the network of the embedded digits
    (ours)."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(64 * 7 * 7, 64), nn.ReLU())


def alexnet_bn(channels: int, size: int) -> nn.Module:
    """AlexNet with BN, FDSE Table A5, layers 1 to 8."""
    def conv(s, t, *shape):
        return nn.Conv2d(s, t, *shape), nn.BatchNorm2d(t), nn.ReLU(inplace=True)

    def fc(s, t):
        return nn.Linear(s, t), nn.BatchNorm1d(t), nn.ReLU(inplace=True)

    return nn.Sequential(
        *conv(3, 64, 11, 4, 2), nn.MaxPool2d(3, 2),
        *conv(64, 192, 5, 1, 2), nn.MaxPool2d(3, 2),
        *conv(192, 384, 3, 1, 1), *conv(384, 256, 3, 1, 1), *conv(256, 256, 3, 1, 1), nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6), nn.Flatten(), *fc(9216, 1024), *fc(1024, 1024))


def alexnet(channels: int, size: int) -> nn.Module:
    """torchvision's AlexNet (FedADG)."""
    from torchvision import models
    return models.alexnet()


def resnet18(channels: int, size: int) -> nn.Module:
    from torchvision import models
    return models.resnet18()


def resnet50(channels: int, size: int) -> nn.Module:
    from torchvision import models
    return models.resnet50()


def resnet18_3x3(channels: int, size: int) -> nn.Module:
    """ResNet18 for 32x32 images: a 3x3 stem with stride 1 and no max pooling (FedGaLA, EasyFL). The
    convolutions start as PyTorch's do, as in the code of both; torchvision's ResNet would start 2.4 times
    larger, a slower start at the same learning rate."""
    net = resnet18(channels, size)
    net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
    return net


def vit_b8(channels: int, size: int) -> nn.Module:
    """ViT-B with patches of 8x8 (FDSE, Table A8)."""
    from torchvision import models
    return models.VisionTransformer(size, patch_size=8, num_layers=12, num_heads=12, hidden_dim=768,
                                    mlp_dim=3072)


@dataclass(frozen=True)
class Backbone:
    """How a network is built, and what must be known of it."""

    build: Callable[[int, int], nn.Module]  # (channels, images' size) -> torchvision's network, or a body
    dim: int  # D of z
    last: str = ""  # the name of torchvision's last layer, which a new one replaces
    imagenet: str = ""  # the name of its ImageNet weights
    relu: bool = True  # z comes out of a ReLU, so none of it is negative
    gray: bool = False  # it takes images of one channel too
    head: Callable[[int, int], nn.Module] = nn.Linear  # the classifier: (D, classes)


BACKBONES = {
    "smallcnn": Backbone(smallcnn, 64, relu=False, gray=True, head=classifier_of_dirt),
    "smallcnn_bn": Backbone(smallcnn_bn, 64, gray=True),
    "alexnet_bn": Backbone(alexnet_bn, 1024),
    "alexnet": Backbone(alexnet, 4096, "classifier.6", "AlexNet_Weights.IMAGENET1K_V1"),
    "resnet18": Backbone(resnet18, 512, "fc", "ResNet18_Weights.IMAGENET1K_V1"),
    "resnet50": Backbone(resnet50, 2048, "fc", "ResNet50_Weights.IMAGENET1K_V1"),
    "resnet18_3x3": Backbone(resnet18_3x3, 512, "fc"),
    "vit_b8": Backbone(vit_b8, 768, "heads", relu=False),
}


def backbone(args: Args, channels: int, classes: int, keep_last: bool = False) -> Net:
    """The network named by `--backbone`, with `--weights`, for images of `channels` channels. Its classifier
    is one new linear layer; with `keep_last` it is behind torchvision's last layer (4096 -> 1000 in AlexNet),
    which keeps its weights."""
    chosen = BACKBONES[args.backbone]
    if channels != 3 and not chosen.gray:
        raise Stop(f"--backbone {args.backbone} takes colour images; those of {args.dataset} have one "
                   "channel: use smallcnn or smallcnn_bn", 2)
    body = chosen.build(channels, args.crop or args.image_size)
    if args.weights == "imagenet" and not chosen.imagenet:
        there = ", ".join(name for name, entry in BACKBONES.items() if entry.imagenet)
        raise Stop(f"there are no ImageNet weights for --backbone {args.backbone}; there are for {there}", 2)
    weights = read_weights(args.weights, chosen.imagenet)
    ours = weights is not None and any(name.startswith("body.") for name in weights)  # a state of `Net`
    if weights is not None and not ours:  # torchvision's names, so before the cut
        load_pretrained(body, weights, skip=chosen.last, origin=args.weights)
    if chosen.last:
        last = body.get_submodule(chosen.last)
        parent, _, name = chosen.last.rpartition(".")
        setattr(body.get_submodule(parent), name, nn.Identity())
    net = Net(body, chosen.dim, classes, chosen.head)
    if keep_last:
        net.head = nn.Sequential(last, nn.Linear(last.out_features, classes))
    if ours:
        load_pretrained(net, weights, skip="head", origin=args.weights)
    return net


# States, averaging, optimizers


def by_type(tensors: dict[str, Tensor]) -> dict[torch.dtype, list[str]]:
    """The names of a state by the type of their tensors: one kernel takes tensors of one type."""
    return group_by(list(tensors), lambda name: tensors[name].dtype)


def state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's parameters and buffers, which later training does not change."""
    return copied(module.state_dict())


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's parameters by their names, without the buffers."""
    return copied(dict(module.named_parameters()))


def load(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """Load a whole state into `module` and return it. RuntimeError if names or shapes do not fit."""
    own = module.state_dict()
    fits = own.keys() == tensors.keys()
    if not fits or any(own[name].shape != v.shape for name, v in tensors.items()):
        module.load_state_dict(tensors)  # says what does not fit
    overwrite(list(own.values()), [tensors[name] for name in own])
    return module


def average(states: list[dict[str, Tensor]], weights: Tensor) -> dict[str, Tensor]:
    """sum_k weights[k] * states[k], entry by entry; the result of an integer buffer is rounded."""
    mean, p = {}, weights.tolist()
    for dtype, names in by_type(states[0]).items():
        if dtype.is_floating_point:
            total = torch._foreach_mul([states[0][name] for name in names], p[0])
            for tensors, p_k in zip(states[1:], p[1:]):
                torch._foreach_add_(total, [tensors[name] for name in names], alpha=p_k)
        else:
            total = average_of_counts([[tensors[name] for name in names] for tensors in states], p)
        mean |= zip(names, total)
    return {name: mean[name] for name in states[0]}


def average_of_counts(counts: list[list[Tensor]], p: list[float]) -> list[Tensor]:
    """The same of lists of integer tensors: in float64 and rounded."""
    first = counts[0]
    total = torch.zeros(sum(v.numel() for v in first), dtype=torch.float64, device=first[0].device)
    for of_one, p_k in zip(counts, p):
        total.add_(flatten(of_one), alpha=p_k)
    return parts_of(total.round().to(first[0].dtype), first)


def uniform(K: int) -> Tensor:
    """The weights [K] of a plain mean."""
    return torch.full((K,), 1 / K)


def flatten(tensors: list[Tensor]) -> Tensor:
    """All entries as one vector."""
    return torch.cat([t.reshape(-1) for t in tensors])


def pick(tensors: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """Some entries of a state."""
    return {name: tensors[name] for name in names}


def group_by(names: list[str], owner: Callable[[str], str]) -> dict[str, list[str]]:
    """Names by what they belong to: {owner: its names}, in the order in which they come."""
    groups = {}
    for name in names:
        groups.setdefault(owner(name), []).append(name)
    return groups


def tensors_of(payload: Payload) -> list[Tensor]:
    """All tensors of a payload."""
    found = []
    for value in payload.values():
        found += tensors_of(value) if isinstance(value, dict) else [value]
    return found


def nbytes(payload: Payload) -> int:
    """Bytes of a payload on the wire."""
    return sum(t.numel() * t.element_size() for t in tensors_of(payload))


Kept = dict[str, dict[str, Tensor]]  # what an optimizer remembers of each parameter, by the parameter's name


def sgd(module: nn.Module, args: Args, t: int, kept: Kept | None = None) -> torch.optim.SGD:
    """Local SGD at the learning rate of round t, lr * lr_decay^t; it goes on from what `optimizer_state` has
    kept."""
    trained = [p for p in module.parameters() if p.requires_grad]
    opt = torch.optim.SGD(trained, lr=args.lr * args.lr_decay ** t, momentum=args.momentum,
                          weight_decay=args.weight_decay, fused=True)
    return going_on(opt, module, kept)


def adam(module: nn.Module, args: Args, t: int, kept: Kept | None = None) -> torch.optim.Adam:
    """The same with Adam."""
    trained = [p for p in module.parameters() if p.requires_grad]
    opt = torch.optim.Adam(trained, lr=args.lr * args.lr_decay ** t, weight_decay=args.weight_decay,
                           fused=True)
    return going_on(opt, module, kept)


def going_on(opt: torch.optim.Optimizer, module: nn.Module, kept: Kept | None) -> torch.optim.Optimizer:
    """The optimizer with what another one of the same module remembered; a copy, as its steps change it in
    place."""
    parameters = dict(module.named_parameters())
    for name, values in (kept or {}).items():
        opt.state[parameters[name]] = {what: v.clone() for what, v in values.items()}
    return opt


def optimizer_state(module: nn.Module, opt: torch.optim.Optimizer) -> Kept:
    """What the optimizer remembers of each parameter (momentum; Adam's moments and number of steps), by its
    name."""
    kept = {}
    for name, p in module.named_parameters():
        if opt.state.get(p):
            kept[name] = dict(opt.state[p])
    return kept


def autocast(args: Args):
    """The context of forward passes and losses: bf16 autocast with `--precision bf16`, else nothing."""
    return torch.autocast(args.device.split(":")[0], torch.bfloat16, enabled=args.precision == "bf16")


# Evaluation


@torch.no_grad()
def correct(model: nn.Module, parts: list[Data], args: Args) -> list[int]:
    """The number of images of each part that `model` classifies correctly, in eval mode."""
    model.eval()
    hits = []
    with autocast(args):  # one for all batches: the casts of the weights are kept within it
        for x, y in in_order(parts, args):
            hits.append(model(x).argmax(1) == y)  # [B]
    of_parts = torch.cat(hits).split([len(data) for data in parts])
    return torch.stack([hit.sum() for hit in of_parts]).tolist()


@torch.no_grad()
def representations(model: nn.Module, data: Data, args: Args) -> tuple[Tensor, Tensor]:
    """z float32 [N, D] and labels y [N], on the CPU, of all images of `data`: model.features in eval mode,
    where a probabilistic network gives its mean; precision and batches are those of `correct`."""
    model.eval()
    zs, ys = [], []
    for x, y in in_order([data], args):
        with autocast(args):
            z = model.features(x)
        zs.append(z.float().flatten(1).cpu())
        ys.append(y.cpu())
    return torch.cat(zs), torch.cat(ys)


def stratified(labels: Tensor, ratio: float, name: str = "the target",
               seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows to fit and rows to test: of each class a share `ratio`, rounded, at least one image, for the fit;
    labels [N]. A smaller share is part of a larger one."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for c in labels.unique():
        rows = order[labels[order] == c]
        chosen[rows[:max(1, round(ratio * len(rows)))]] = True
    if chosen.all():
        raise Stop(f"{name} has {len(labels)} images, none of which is left to test with {ratio:g} of the "
                   "labels: lower --label-ratio, or raise --limit", 2)
    return chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0]


def fit_linear(z: Tensor, y: Tensor, classes: int, seed: int, *, lr: float, epochs: int,
               batch: int) -> nn.Linear:
    """The linear classifier of the `linear` protocol (FedGaLA, Sec. 4 and App. B.3): `epochs` epochs of Adam
    and cross-entropy on features z [n, D] and labels y [n], in batches of a new order each."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(z.shape[1], classes)
    with torch.no_grad():  # nn.Linear's own distribution, from this generator
        for p in layer.parameters():
            p.uniform_(-z.shape[1] ** -0.5, z.shape[1] ** -0.5, generator=generator)
    opt = torch.optim.Adam(layer.parameters(), lr=lr, fused=True)
    for _ in range(epochs):
        for i in torch.randperm(len(z), generator=generator).split(batch):
            opt.zero_grad()
            cross_entropy(layer(z[i]), y[i]).backward()
            opt.step()
    return layer


def linear_accuracy(z: Tensor, y: Tensor, classes: int, ratio: float, seed: int, **how) -> float:
    """The share of the test rows that a layer fitted to `ratio` of the labels classifies correctly; z [N, D],
    y [N]."""
    rows, rest = stratified(y, ratio, seed=seed)
    layer = fit_linear(z[rows], y[rows], classes, seed, **how)
    with torch.no_grad():
        return float((layer(z[rest]).argmax(1) == y[rest]).double().mean())


# The contract of a method file


class ServerProtocol(Protocol):
    """The server of a method. It sees nothing of the clients but their uploads."""

    keeps: tuple[str, ...]  # the attributes that outlive a round: tensors, numbers, strings, in nested dicts

    def __init__(self, args: Args, net: nn.Module, clients: int): ...  # their number; `net`: see below

    def download(self, k: int) -> Payload: ...  # what client k receives, also one that never trained

    def update(self, uploads: dict[int, Payload], t: int) -> None: ...  # with round t's uploads


class ClientProtocol(Protocol):
    """Client k of a method. `net` is one scratch network that server and clients share: nothing may be kept
    in it between calls. What outlives a call is named in `keeps`. The tensors of `down` are the server's own:
    they are read and never changed in place."""

    keeps: tuple[str, ...]  # the attributes that outlive a round
    data: ClientData
    log: dict[str, Tensor]  # may be left out: scalars of the last local training, which do not travel
    draws: bool  # may be left out: the network that it is tested with draws random numbers
    as_received: bool  # may be left out: it is tested with what it receives alone, whatever it keeps
    pooled: bool  # may be left out: client 0 has the training images of all, the others have none

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData): ...

    def train(self, down: Payload, t: int) -> Payload: ...  # local training in round t; returns the upload

    def model(self, down: Payload) -> nn.Module: ...  # what it is tested with, also if it is data.unseen

    def chance_loss(self) -> float: ...  # `linear` alone: the loss of features that say nothing


def kept(one) -> dict:
    """What outlives a round of a server or a client: the attributes that it names in `keeps`."""
    return {name: getattr(one, name) for name in one.keeps}


def restore(one, saved: dict, device: str) -> None:
    """The attributes of a server or a client as `kept` gave them. A tensor goes where it is at the start of a
    run, which may be the main memory; tensors in dicts go to `device`."""
    if saved.keys() != set(one.keeps):
        raise KeyError(f"expected {', '.join(one.keeps)}; found {', '.join(saved)}")
    for name, value in saved.items():
        now = getattr(one, name)
        setattr(one, name, to_device(value, now.device if isinstance(now, Tensor) else device))


# The round loop


def run(Server, Client, args: Args, build=backbone) -> list[dict]:
    """Train and evaluate a method as `args` says; the main of every method file. Returns the results, one per
    seed of `--seeds` and target.

    `build(args, channels, classes)` makes the network(s). Ends the program with one line on stderr when it
    cannot go on: exit code 2 for bad usage, 1 for failures, 130 for Ctrl-C (the last checkpoint is kept).
    """
    with one_line_on_failure(args):
        refuse_unknown_code(Server, Client, args)
        hash_of(method_file(args))  # of the files as they are now: a record names the code that ran
        prepare(args)
        if args.extend and process()[0] == 0:
            extend(args)
        if not args.seeds:
            return run_targets(Server, Client, args, build)
        refuse_summary(args)
        of_seeds, every = {}, []
        for seed in seed_numbers(args.seeds):
            of_seeds[seed] = run_targets(Server, Client, of_seed(args, seed), build)
            every += of_seeds[seed]
        if process()[0] == 0:
            show_seeds(args, of_seeds)
        return every


def refuse_unknown_code(Server, Client, args: Args) -> None:
    """Stop unless the file of Args, by whose name and sources runs are known, has or imports the code of both
    classes: else a folder or a record of this run would count as one of another method."""
    file = method_file(args)
    for part in (Server, Client):
        own = getattr(sys.modules[part.__module__], "__file__", None)
        if not own or Path(own).resolve() not in files_of(file):
            raise Stop(f"{part.__name__} is of {own or part.__module__}, and Args of {file.name}, by which "
                       "runs are known: give the method's file a class Args(common.Args) of its own", 2)


def run_targets(Server, Client, args: Args, build) -> list[dict]:
    """The run of one seed, or with `--target all` one for each target. Returns the results."""
    shown = process()[0] == 0
    if shown:
        print(beginning(args), flush=True)
    known = known_domains(args.dataset)
    if known:
        targets_of(args, known)  # a wrong name is refused before minutes of decoding
    content = content_of(args.dataset)
    with said_if_long(f"reading the images of {args.dataset}", shown):
        domains, classes = load_domains(args)
    targets = [args.target]
    found = targets_of(args, [d.name for d in domains])
    if several_runs(args):
        targets = found
    results = []
    for target in targets:
        of_one = of_target(args, target)
        if content_of(args.dataset) != content:
            raise Stop(f"the images in {args.dataset} have changed since they were read: give the same "
                       "command again", 2)
        if shown and several_runs(args):
            print(f"target {target}; output in {folder_of(of_one)}", flush=True)
        results.append(rounds(Server, Client, of_one, build, domains, classes))
    if len(targets) > 1 and shown:
        accuracies = [result["best"]["target"] for result in results]
        each = "  ".join(f"{name} {100 * a:.2f}" for name, a in zip(targets, accuracies))
        print(f"{method_name(args)} on {args.dataset}, accuracy on each left-out domain (%): {each}  "
              f"mean {100 * np.mean(accuracies):.2f}")
    return results


def rounds(Server, Client, args: Args, build, domains: list[Domain], classes: tuple[str, ...]) -> dict:
    """One run: the rounds up to args.rounds, or what is left of them. Returns its result."""
    with RunFolder(args) as folder:
        if folder.result:
            return folder.finished_before()
        fed = federation(Server, Client, args, build, domains, classes)
        server, clients = fed.server, fed.clients
        folder.begin(fed)  # prints and writes the settings; restores a checkpoint
        for t in range(folder.t, args.rounds):
            start = {}
            if t == 0 and args.protocol == "linear":
                start = {"start": evaluate_start(fed)}
                folder.lap("evaluate")

            # S_t: the clients of this round
            count = max(1, round(args.participation * fed.K))
            order = torch.randperm(fed.K, generator=seed_all(args.seed, "sample", t))
            S_t = order[:count].sort().values.tolist()

            # each client: download, local training, upload
            uploads, logs, traffic = {}, {}, {}
            for k in S_t:
                if k not in clients:  # with torchrun: it belongs to another process
                    continue
                down = server.download(k)
                seed_all(args.seed, "train", t, k)
                up = clients[k].train(down, t)
                uploads[k], logs[k] = up, getattr(clients[k], "log", {})
                traffic[k] = {"bytes_down": nbytes(down), "bytes_up": nbytes(up)}
            for k, log in finite_numbers(uploads, logs, fed, t, folder).items():
                logs[k] = traffic[k] | log
            uploads, logs = merged(uploads), merged(logs)
            folder.images += sum(images_in_round(fed.sizes[k], args) for k in S_t)
            folder.lap("train")

            # the server: from the uploads to the next round's downloads
            seed_all(args.seed, "server", t)
            update_server(server, uploads, t, args.device)
            folder.lap("server")

            entry = {"round": t + 1, "lr": args.lr * args.lr_decay ** t} | start
            entry["clients"] = {fed.names[k]: log for k, log in logs.items()}
            if is_evaluated(args, t + 1):
                entry |= evaluate(fed, t + 1, folder.best["val"])
            folder.lap("evaluate")
            folder.log(entry)
            folder.checkpoint(entry, fed)
        return folder.finish()


@dataclass
class Federation:
    """Who takes part in a run. Clients 0..K-1 train; the numbers behind are the targets', who never do. With
    torchrun `clients` has only those of this process."""

    args: Args
    server: ServerProtocol
    clients: dict[int, ClientProtocol]
    K: int
    names: list[str]  # of all clients and then the targets
    sizes: list[int]  # training images of the K clients
    classes: tuple[str, ...]
    channels: int
    tested: int  # images of the targets that are tested

    @property
    def has_target(self) -> bool:
        return len(self.names) > self.K

    def state(self) -> dict:
        """{"server": what it keeps, "clients": {k: what that client keeps}}."""
        return {"server": kept(self.server), "clients": {k: kept(one) for k, one in self.clients.items()}}

    def load_state_dict(self, saved: dict) -> None:
        """Restore {"server": its state, "clients": {k: state}}. An error if the tensors do not fit the
        network."""
        restore(self.server, saved["server"], self.args.device)
        for k, client in self.clients.items():
            restore(client, saved["clients"][k], self.args.device)
        for k, client in self.clients.items():
            client.model(self.server.download(k))
            break  # one is enough to see whether the tensors fit

    def data(self) -> dict:
        """Who takes part, and what the images show: enough to build the networks without any image."""
        return {"clients": self.names[:self.K], "targets": self.names[self.K:], "classes": list(self.classes),
                "channels": self.channels}

    def described(self) -> str:
        """4 clients (amazon, caltech, dslr, webcam), 2,025 images to train on, tested on ..."""
        clients, targets = self.names[:self.K], self.names[self.K:]
        words = f"{self.K} clients ({short(clients)}), {sum(self.sizes):,} training images"
        if targets:
            words += f", tested on {short(targets)} ({self.tested:,} images), which no client has"
        return words


def short(names: list[str]) -> str:
    """Up to eight names."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def federation(Server, Client, args: Args, build, domains: list[Domain],
               classes: tuple[str, ...]) -> Federation:
    """The server and the clients at the start of a run, always in the same random order."""
    shape = domains[0].images.shape[1:]
    if args.normalize == "imagenet" and shape[0] != 3:
        raise Stop("--normalize imagenet is for colour images; those of "
                   f"{args.dataset} have one channel: use unit", 2)
    sources, targets = make_clients(args, domains, len(classes))
    if getattr(Client, "pooled", False):
        pool(sources)
    return assembled(Server, Client, args, build, sources, targets, shape, classes)


def assembled(Server, Client, args: Args, build, sources: list[ClientData], targets: list[ClientData],
              shape: tuple[int, ...], classes: tuple[str, ...]) -> Federation:
    """The server and the clients of these data, whose images have `shape` (C, H, W)."""
    seed_all(args.seed, "init")
    try:
        net = build(args, shape[0], len(classes))
        net.eval()(torch.zeros(2, *shape))
    except (RuntimeError, AssertionError) as e:
        if out_of_memory(e):
            raise
        flag, size = ("--crop", args.crop) if args.crop else ("--image-size", args.image_size)
        why = str(e).splitlines()[0][:80]
        raise Stop(f"images of {size}x{size} do not fit --backbone "
                   f"{args.backbone} ({why}): give another {flag}", 2)
    net.to(args.device, memory_format=torch.channels_last)
    if args.compile != "none":
        compile_backbone(net, args.compile)
    server = Server(args, net, len(sources))
    rank, size = process()
    clients = {}
    for k, data in enumerate(sources + targets):
        if k % size == rank:
            clients[k] = Client(args, net, k, data)
    names = [data.name for data in sources + targets]
    sizes = [len(data.train) for data in sources]
    tested = sum(len(data.test) for data in targets)
    return Federation(args, server, clients, len(sources), names, sizes, classes, shape[0], tested)


@dataclass
class Trained:
    """What is known of a network that `load_run` returns, as `net.run`."""

    args: Args  # of the run; `args.image_size` and `args.normalize` say how images are prepared
    client: str
    round: int
    classes: tuple[str, ...]  # in the order of the outputs
    channels: int  # 1: gray, 3: RGB

    def inputs(self, pixels: Tensor) -> Tensor:
        """uint8 [N, C, S, S] of the run's image size -> x float32 [N, C, S, S], as the run prepared them.
        Stop if they are others."""
        expected = (self.channels, self.args.image_size, self.args.image_size)
        if pixels.dtype != torch.uint8 or pixels.shape[1:] != expected:
            raise Stop(f"expected pixels uint8 of the shape (N, {', '.join(map(str, expected))}), as this "
                       f"run's images are; found {pixels.dtype} of the shape {tuple(pixels.shape)}", 2)
        whole = torch.arange(len(pixels))
        data = Data(pixels, whole, torch.zeros_like(whole), self.args.device, self.args.normalize)
        x, _ = data.batch(whole)
        return x


def load_run(folder, client: str | int | None = None, which: str = "best", *, device: str = "cpu",
             data: str = "data", archives: str = "", any_code: bool = False) -> nn.Module:
    """The network that a client is tested with, in eval mode, from the output folder of a run of any method,
    finished or not; what is known of it is in `net.run`, see `Trained`.

    `client` is its name or number; None is the left-out domain, or the first client where none is left out.
    `which` is best (validation round) or last; without labels the last one is taken, and the outputs are
    representations in the place of logits. The images are needed only for a network that adapts to those of
    the left-out domain, and for folders without `data` in settings.json; `data` and `archives` say where they
    are, as the flags of a run. Stop if the folder holds no run, or one by other sources without `any_code`.

    It gives the accuracies of the run with the run's precision (`autocast(net.run.args)`), but for the last
    digits that `--compile` changes. torch's random numbers start as in the run's evaluation; a network that
    draws z (FedSR's and FedCiR's) drew there first for a client's validation part and then for its test part.
    """
    run = read_kept(folder, which)
    args = arguments_from(run.key, run.file, device, data, archives)
    if not any_code:
        refuse_other_code(run, args)
    args.weights = "none"  # the state has all of them
    args.compile = "none"
    module = method(run.key["method"])
    build = getattr(module, "build", backbone)
    open_device(args)
    set_precision(args)
    fed, k = None, 0
    with fitting(run.file, run.key["method"]):
        if run.data:
            fed = without_images(module, args, build, **run.data)
            k = number_of(client, fed)
        if fed is None or (k >= fed.K and adapts(args)):
            refuse_other_images(args, run.key)
            fed = federation(module.Server, module.Client, args, build, *load_domains(args))
            k = number_of(client, fed)
        fed.load_state_dict(run.state)
    net = tested_model(fed, k, run.round).eval()
    net.run = Trained(args, fed.names[k], run.round, fed.classes, fed.channels)
    return net


def without_images(module, args: Args, build, clients: list[str], targets: list[str], classes: list[str],
                   channels: int) -> Federation:
    """Server and clients without any image, for what needs none."""
    shape = (channels, args.image_size, args.image_size)
    images, none = torch.zeros(0, *shape, dtype=torch.uint8), torch.zeros(0, dtype=torch.long)
    part = Data(images, none, none, args.device, args.normalize)
    sources = [ClientData(name, part, part, part) for name in clients]
    unseen = [ClientData(name, part, part, part, unseen=True) for name in targets]
    return assembled(module.Server, module.Client, args, build, sources, unseen, shape, tuple(classes))


def adapts(args: Args) -> bool:
    """Whether the network of a left-out domain may depend on its images."""
    return any(f.metadata["at_test"] for f in dataclasses.fields(args))


def number_of(client: str | int | None, fed: Federation) -> int:
    """The number of a client by its name or number; None: the left-out domain's, or else the first one's."""
    if client is None:
        return fed.K if fed.has_target else 0
    if client in fed.names:
        return fed.names.index(client)
    if str(client).isdecimal() and int(client) < len(fed.names):
        return int(client)
    raise Stop(f"{client!r} is no client of this run; it has {', '.join(fed.names)} (or their numbers, 0 to "
               f"{len(fed.names) - 1})", 2)


def compile_backbone(net: nn.Module, mode: str) -> None:
    """Have torch.compile make kernels of the network's backbone when it is first called: of `body`, or of
    `f` in FedGaLA's learners. What a method computes behind it stays as it is."""
    for name, module in net.named_modules():
        if name.rpartition(".")[2] in ("body", "f"):
            module.compile(mode=mode)


def finite_numbers(uploads: dict[int, Payload], logs: dict[int, dict], fed: Federation, t: int,
                   folder: RunFolder) -> dict[int, dict[str, float]]:
    """What the clients have logged, as numbers. Stop if one of them, or of the uploads, is infinite or no
    number. The host waits for the device once: the logs come with the largest entry of each tensor."""
    scalars = {}
    for k, up in uploads.items():
        logged = [v if isinstance(v, Tensor) else exactly(v) for v in logs[k].values()]
        floats = [v for v in tensors_of(up) if v.is_floating_point() and v.numel()]
        scalars[k] = logged
        if floats:
            scalars[k] += torch._foreach_norm(floats, ord=math.inf)
    numbers = {}
    for k, values in fetched(scalars, fed.args.device).items():
        if not all(math.isfinite(v) for v in values):
            raise Stop(f"round {t + 1}, client {fed.names[k]}: the loss or the weights are no longer finite; "
                       "the last good checkpoint, if one was due before, is kept in "
                       f"{folder.path}: lower --lr, or set --clip")
        numbers[k] = dict(zip(logs[k], values))  # the logs are the first of the values
    return numbers


def exactly(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def fetched(scalars: dict[int, list[Tensor]], device: str) -> dict[int, list[float]]:
    """The values of all scalars, in one copy from the device."""
    together = []
    for of_client in scalars.values():
        together += [v.detach().to(device) for v in of_client]
    values = torch.stack(together).tolist() if together else []
    found, begin = {}, 0
    for k, of_client in scalars.items():
        found[k] = values[begin:begin + len(of_client)]
        begin += len(of_client)
    return found


def update_server(server: ServerProtocol, uploads: dict[int, Payload], t: int, device: str) -> None:
    """The server's update; with torchrun in process 0, whose state the others then have."""
    rank, size = process()
    if size == 1:
        server.update(uploads, t)
        return
    if rank == 0:
        server.update(to_device(uploads, device), t)
    restore(server, from_server(kept(server)), device)


def is_evaluated(args: Args, t: int) -> bool:
    """Whether there is an evaluation after t rounds."""
    if t == args.rounds:
        return True
    if args.protocol == "linear" and args.test_rounds == "best":  # the last round's alone is reported
        return False
    return t % args.eval_every == 0


def evaluate(fed: Federation, t: int, best: float) -> dict:
    """What the protocol measures after t rounds (in process 0); `best` is the best validation accuracy of the
    rounds before."""
    if fed.args.protocol == "linear":
        return evaluate_linear(fed, t)
    return evaluate_classifiers(fed, t, best)


def evaluate_classifiers(fed: Federation, t: int, best: float) -> dict:
    """Validation and test accuracy of the models of all clients after t rounds, and of the target. With
    `--test-rounds best` the test parts, and the target, only where the validation is better than `best`, and
    in the last round.

    ALL is pooled over the images, AVG the mean over the clients.
    """
    args, entry = fed.args, {}
    validated, states = {}, {}  # of each client: correct and all validation images; the random state then
    groups = of_one_model(fed)
    for group in groups:
        if not fed.clients[group[0]].data.unseen:
            model = tested_model(fed, group[0], t)
            validated |= counted(model, {k: fed.clients[k].data.val for k in group}, args)
            states[group[0]] = random_state(args.device)
    validated = merged(validated)
    if process()[0] == 0:
        entry["val"] = accuracies_of(validated, fed)
    if args.test_rounds == "best" and t < args.rounds:
        better = from_server(process()[0] == 0 and entry["val"]["ALL"] > best)
        if not better:
            return entry
    tested = {}
    for group in groups:
        model = tested_model(fed, group[0], t)
        if group[0] in states:
            set_random_state(states[group[0]], args.device)
        tested |= counted(model, {k: fed.clients[k].data.test for k in group}, args)
    tested = merged(tested)
    if process()[0]:
        return {}
    entry["test"] = accuracies_of(tested, fed)
    if fed.has_target:
        right, n = tested[fed.K]
        entry["target"] = right / n
    return entry


def of_one_model(fed: Federation) -> list[list[int]]:
    """The clients in groups that are tested together: on a GPU those that receive the same tensors and are
    tested with nothing else, so that one network is loaded and batches are full. Elsewhere, the targets, and
    clients whose network draws, each by itself: what a client draws does not depend on the others."""
    downs, groups = {}, {}
    for k, client in fed.clients.items():
        downs[k] = fed.server.download(k)  # all are kept until the end: a freed tensor's id may come again
        key = (k,)
        draws = getattr(client, "draws", False)
        own = client.keeps and not getattr(client, "as_received", False)
        if on_gpu(fed.args) and not client.data.unseen and not own and not draws:
            key = tuple(id(v) for v in tensors_of(downs[k]))
        groups.setdefault(key, []).append(k)
    return list(groups.values())


def tested_model(fed: Federation, k: int, t: int) -> nn.Module:
    """The network that is tested on client k after t rounds."""
    seed_all(fed.args.seed, "evaluate", t, k)
    return fed.clients[k].model(fed.server.download(k))


def counted(model: nn.Module, parts: dict[int, Data], args: Args) -> dict[int, tuple[int, int]]:
    """Of each client's part: the correct and all images."""
    hits = correct(model, list(parts.values()), args)
    return {k: (right, len(data)) for (k, data), right in zip(parts.items(), hits)}


def accuracies_of(counts: dict[int, tuple[int, int]], fed: Federation) -> dict:
    """ALL, AVG and each client's accuracy, of correct and all images of the K clients."""
    right = [counts[k][0] for k in range(fed.K)]
    n = [counts[k][1] for k in range(fed.K)]
    accuracies = [r / m for r, m in zip(right, n)]
    return {"ALL": sum(right) / sum(n), "AVG": sum(accuracies) / fed.K,
            "clients": dict(zip(fed.names, accuracies))}


def random_state(device: str) -> list[Tensor]:
    """Where torch's random numbers are, so that the test part draws the same ones whether or not it is
    evaluated at once (a network may draw z)."""
    states = [torch.get_rng_state()]
    if device.startswith("cuda"):
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_random_state(states: list[Tensor], device: str) -> None:
    torch.set_rng_state(states[0])
    if device.startswith("cuda"):
        torch.cuda.set_rng_state(states[1], device)


def evaluate_start(fed: Federation) -> dict:
    """What a run without labels has before its first step: the linear evaluation of the network as it starts,
    and the loss of features that say nothing.

    A network that has not been trained has no statistics of batch normalization. Here it has those that a
    round's first epoch would leave if no weight moved, averaged over the clients by images.
    """
    statistics, chance = {}, {}
    for k, client in fed.clients.items():
        if not client.data.unseen:
            model = client.model(fed.server.download(k))
            statistics[k] = batch_statistics(model, client.data.train, fed.args, k)
            chance[k] = client.chance_loss()
    statistics, chance = merged(statistics), merged(chance)
    filled = {}
    if process()[0] == 0:
        n = torch.tensor(fed.sizes, dtype=torch.float64)
        filled = average(list(statistics.values()), n / n.sum())
    found = evaluate_linear(fed, 0, from_server(filled))
    if process()[0] == 0:
        found["chance_loss"] = float(np.mean(list(chance.values())))
    return found


@torch.no_grad()
def batch_statistics(model: nn.Module, data: Data, args: Args, k: int) -> dict[str, Tensor]:
    """The statistics of batch normalization, plain means over the batches, of an epoch (or of `--steps`
    batches) of client k's training images in a network that stands still."""
    seed_all(args.seed, "start", k)
    with autocast(args):
        update_bn(batches(data, dataclasses.replace(args, epochs=1), 0, k), model)
    return {name: v.clone() for name, v in model.named_buffers() if "running_" in name}


def evaluate_linear(fed: Federation, t: int, statistics: dict[str, Tensor] | None = None) -> dict:
    """The accuracy on each target of a linear classifier on the frozen network, for each share of labels;
    `target` is the mean over the targets with the first share. `statistics` are put in the place of the
    network's own."""
    args, accuracies = fed.args, {}
    for k, client in fed.clients.items():
        if not client.data.unseen:
            continue
        model = client.model(fed.server.download(k))
        model.load_state_dict(statistics or {}, strict=False)
        z, y = representations(model, client.data.test, args)
        accuracies[k] = {}
        how = dict(lr=args.linear_lr, epochs=args.linear_epochs, batch=args.linear_batch)
        for ratio in ratios(args.label_ratio):
            seed = seed_all(args.seed, "linear", seed_name(args, client.data.name)).initial_seed()
            accuracies[k][str(ratio)] = linear_accuracy(z, y, len(fed.classes), ratio, seed, **how)
    accuracies = merged(accuracies)
    if process()[0]:
        return {}
    first = str(ratios(args.label_ratio)[0])
    mean = sum(by_ratio[first] for by_ratio in accuracies.values()) / len(accuracies)
    return {"target": mean, "linear": {fed.names[k]: by_ratio for k, by_ratio in accuracies.items()}}


@contextlib.contextmanager
def one_line_on_failure(args: Args):
    """Errors that are no fault of the program end it with one line on stderr and an exit code."""
    try:
        with handled(interrupt):
            yield
        return
    except (Stop, OSError, KeyboardInterrupt, MemoryError, RuntimeError) as e:
        together = isinstance(e, Interrupted) and bool(e.kept)  # all processes end after the same round
        message, code = ending(e, "nothing that was written is lost: the same command without --no-resume "
                                  "goes on from the last checkpoint, if there is one")
    shown = process()[0] == 0 if together else code != 2 or speaks()
    if shown:
        with contextlib.suppress(OSError):  # the terminal has gone
            print(f"{method_name(args)}: {message}", file=sys.stderr, flush=True)
    if process()[1] > 1:
        sys.stdout.flush()
        if together:
            with contextlib.suppress(Stop):
                from_server(None)  # torchrun ends all once one has ended: not before the line is there
        os._exit(code)  # the other processes wait in a collective: torchrun ends them
    sys.exit(code)
