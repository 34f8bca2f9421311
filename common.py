"""What every method stands on: data loaders, backbones, averaging and evaluation, the round loop, in this
order.

A method file brings a `Server` and a `Client` that share nothing but two payloads, the download and the
upload; `run` is their only caller. What they must offer is said by the two `Protocol` classes above the round
loop. Three values go through the program, each made once: `Settings` (plumbing/settings.py), `Dataset`, and
`Run`, a run's folder (plumbing/runfolder.py). Method files import all they need from here.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from plumbing import linear
from plumbing.augment import AUGMENTATIONS, Augmentation, augment
from plumbing.catalog import own_folder, source_of
from plumbing.decoding import open_images
from plumbing.dirichlet import skewed
from plumbing.errors import Stop, out_of_memory
from plumbing.mnist import ANGLES, load_digits, rotate, rotated_mnist
from plumbing.processes import from_server, gathered, one_line_on_failure, prepare, process, to_device
from plumbing.runfolder import Run, folder_of, tensors_of
from plumbing.seeding import seed_all
from plumbing.several import expand_seeds, expand_targets, show_seeds, show_targets, targets_of
from plumbing.settings import Args, LinearArgs, arg, identity, name_and_file, parse, ratios, shares, source
from plumbing.weights import load_pretrained, read_weights

import torch
from torch import Tensor, nn

__all__ = ["LinearArgs", "arg", "parse", "rotate", "source", "to_device"]  # for method files

Payload = dict[str, "Tensor | dict[str, Tensor]"]  # what travels: plain tensors, nothing else
Settings = Args  # what a method reads: fixed once it is parsed; its JSON is the identity of a run


# Data: domains


@dataclass
class Domain:
    """One domain: its name, images uint8 [N, C, H, W] (stored channels last) and labels int64 [N]."""

    name: str
    images: Tensor
    labels: Tensor


@dataclass
class Dataset:
    """The images of a run, before they are split: download -> decode -> this, never back."""

    domains: list[Domain]
    classes: tuple[str, ...]  # in the order of the labels
    fingerprint: str = ""  # of one's own images, which may change: by their names, sizes and times
    same_images: bool = False  # the domains are versions of the same images, row by row

    @property
    def names(self) -> list[str]:
        return [d.name for d in self.domains]

    def seed_name(self, domain: str) -> str:
        """What stands for a domain in the seeds of its split. Versions of the same images are split alike:
        none of a source's test images is trained on in another source."""
        return "" if self.same_images else domain


DIGITS = tuple("0123456789")


def open_dataset(settings: Args) -> Dataset:
    """The dataset of a run at its image size, with --limit. Stop if a domain has too few images."""
    if settings.archives and not Path(settings.archives).is_dir():
        raise Stop(f"--archives {settings.archives} is not a folder", 2)
    name, size, data = settings.dataset, settings.image_size, settings.data
    if name == "digits":
        dataset = Dataset([Domain(*domain) for domain in load_digits(size)], DIGITS)
    elif name.startswith("rotatedmnist"):
        domains = rotated_mnist(name, settings.seed, size, data, settings.archives)
        dataset = Dataset([Domain(*domain) for domain in domains], DIGITS, same_images=True)
    else:
        images = open_images(name, size, data, settings.archives)
        domains = [Domain(*domain) for domain in images.domains]
        dataset = Dataset(domains, images.classes, images.fingerprint)
    for d in dataset.domains:
        if settings.limit:
            generator = seed_all(settings.seed, "limit", dataset.seed_name(d.name))
            rows = torch.randperm(len(d.labels), generator=generator)[:settings.limit]
            d.images, d.labels = d.images[rows], d.labels[rows]
        if len(d.labels) < len(dataset.classes):
            advice = "raise --limit" if settings.limit else "look at its folder"
            raise Stop(f"domain {d.name} has {len(d.labels)} images, fewer than the "
                       f"{len(dataset.classes)} classes; {advice}")
    return dataset


def load_domains(settings: Args) -> tuple[list[Domain], tuple[str, ...]]:
    """The domains and the class names of a run's dataset."""
    dataset = open_dataset(settings)
    return dataset.domains, dataset.classes


def known_domains(dataset: str) -> list[str]:
    """The names of a dataset's domains, as far as they are known before it is read: else none."""
    if dataset == "digits":
        return [f"d{angle}" for angle in ANGLES]
    if dataset.startswith("rotatedmnist"):
        return [f"m{angle}" for angle in ANGLES]
    return [] if own_folder(dataset) else list(source_of(dataset).domains)


# Data: splits and clients


@dataclass
class Data:
    """A part of a domain: its images uint8 [N, C, H, W], and the rows `index` [n] with `labels` [n] of it."""

    images: Tensor
    index: Tensor
    labels: Tensor
    device: str
    normalize: str

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, i: Tensor | slice, how: Augmentation | None = None) -> tuple[Tensor, Tensor]:
        """Positions i [B], or a range of them -> x float32 [B, C, H, W] in [0, 1] (or normalized), augmented,
        channels last, and y [B]."""
        pixels = self.images[self.index[i]].to(self.device, non_blocking=True)
        x = pixels.float().div_(255)
        if how:
            x = augment(x, how)
        if self.normalize == "imagenet":
            from torchvision.transforms.v2.functional import normalize
            x = normalize(x, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225], inplace=True)
        return x, self.labels[i].to(self.device, non_blocking=True)


@dataclass
class ClientData:
    """What client k holds: the name (its domain's, numbered if there are several clients) and three parts."""

    name: str
    train: Data
    val: Data
    test: Data
    unseen: bool = False  # the client of a domain that is left out: it never trains


def split(dataset: Dataset, settings: Args) -> tuple[list[ClientData], list[ClientData]]:
    """The clients and, for `lodo` and `linear`, the targets. Every image of a domain is in exactly one part
    of one client. With --sources, domains that are neither source nor target are left out."""
    if settings.dirichlet and settings.clients_per_domain == 1:
        raise Stop(f"--dirichlet {settings.dirichlet} needs several clients in a domain: set "
                   "--clients-per-domain", 2)
    targets = targets_of(settings, dataset.names)
    of_sources, of_targets = [], []
    for d in dataset.domains:
        if settings.sources and d.name not in settings.sources.split(",") and d.name not in targets:
            continue
        if settings.device.startswith("cuda") and d.images.nbytes < torch.cuda.mem_get_info()[0] / 4:
            d = Domain(d.name, d.images.to(settings.device), d.labels)  # the decoded pixels, on the GPU
        seed_name = dataset.seed_name(d.name)
        order = torch.randperm(len(d.labels), generator=seed_all(settings.seed, "split", seed_name))
        if d.name in targets:
            of_targets.append(target_client(settings, d, order))
        else:
            of_sources += source_clients(settings, d, order, len(dataset.classes), seed_name)
    return of_sources, of_targets


def client_data(settings: Args, d: Domain, name: str, rows: tuple[Tensor, ...], unseen: bool) -> ClientData:
    """A client whose train, val and test are these rows [n] of a domain."""
    parts = []
    for of_part in rows:
        index = of_part.to(d.images.device)
        labels = d.labels[of_part].to(d.images.device)
        parts.append(Data(d.images, index, labels, settings.device, settings.normalize))
    return ClientData(name, *parts, unseen=unseen)


def target_client(settings: Args, d: Domain, order: Tensor) -> ClientData:
    """The client of a target. Its train and val are empty; with `--target-part test` or `heldout` they are
    what nobody uses."""
    train, val, test = order[:0], order[:0], order
    if settings.target_part != "all":
        train, val, test = cut(order, shares(settings.split))
    if settings.target_part == "heldout":
        val, test = val[:0], torch.cat([val, test])
    if len(test) < 2:
        raise Stop(f"the target {d.name} has {len(test)} images to test; it needs 2: raise --limit or the "
                   "share in --split")
    if settings.protocol == "linear":
        for ratio in ratios(settings.label_ratio):
            linear.stratified(d.labels[test], ratio, d.name)  # stops if it leaves too few
    return client_data(settings, d, d.name, (train, val, test), unseen=True)


def source_clients(settings: Args, d: Domain, order: Tensor, classes: int,
                   seed_name: str) -> list[ClientData]:
    """The clients of a source domain. With `linear` all images are for training: there are no labels to
    validate with."""
    of_split, M = shares(settings.split), settings.clients_per_domain
    if settings.protocol == "linear":
        of_split = (1, 0, 0)
    if M > len(order):
        raise Stop(f"--clients-per-domain is {M}, more than the {len(order)} images of domain {d.name}: give "
                   "fewer")
    fewest = (2, 0, 0) if settings.protocol == "linear" else (2, 1, 1)  # BN needs two images to train

    def enough(rows: Tensor) -> bool:
        return all(len(part) >= least for part, least in zip(cut(rows, of_split), fewest))

    piles = [order[m::M] for m in range(M)]
    if settings.dirichlet:
        key = (settings.seed, seed_name)
        piles = skewed(order, d.labels, classes, M, settings.dirichlet, key, enough)
    clients = []
    for m, rows in enumerate(piles):
        name = d.name if M == 1 else f"{d.name}-{m}"
        parts = cut(rows, of_split)
        if not enough(rows):
            has = "/".join(str(len(part)) for part in parts)
            needs = "/".join(map(str, fewest))
            raise Stop(f"client {name} has {has} images to train, validate and test; it needs at least "
                       f"{needs}: fewer --clients-per-domain, a larger --dirichlet or --limit")
        clients.append(client_data(settings, d, name, parts, unseen=False))
    return clients


def cut(rows: Tensor, of_split: tuple[float, float, float]) -> tuple[Tensor, Tensor, Tensor]:
    """Shuffled rows -> train, validation, test. Test and then train are rounded down, validation gets the
    rest: 0.8/0.1/0.1 of 157 images gives 126/16/15, as in FDSE's official code."""
    train, _, test = of_split
    n = len(rows)
    n_test = int(n * test + 1e-9)
    n_train = int((n - n_test) * train / (1 - test) + 1e-9)
    return rows[:n_train], rows[n_train:n - n_test], rows[n - n_test:]


# Data: batches


def batches(data: Data, settings: Args, t: int, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The training batches (x, y) of client k in round t: E epochs, or exactly `--steps` of them; a new order
    each epoch. A method with two views of each image gets x [2B, C, H, W], the first views before the second
    ones."""
    how = AUGMENTATIONS.get(settings.augment)
    if settings.crop:
        how = dataclasses.replace(how or Augmentation(ratio=(1.0, 1.0)), size=settings.crop)
    steps = settings.steps or settings.epochs * steps_in_epoch(len(data), settings)
    done, epoch = 0, 0
    while done < steps:
        order = torch.randperm(len(data), generator=seed_all(settings.seed, "batches", t, k, epoch))
        for i in cut_batches(order.to(data.index.device), settings)[:steps - done]:
            x, y = data.batch(i.repeat(settings.views), how)
            yield x, y[:len(i)]
            done += 1
        epoch += 1


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


def in_order(data: Data, settings: Args) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches (x, y) of an evaluation: every image once."""
    size = max(settings.batch_size, 100)
    for begin in range(0, len(data), size):
        yield data.batch(slice(begin, min(begin + size, len(data))))


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


def smallcnn(channels: int, size: int, kernel: int = 5) -> nn.Module:
    """The network of DIRT (atuannguyen/DIRT @ 2635178) and DIVA for RotatedMNIST, with z of 64. FedSR's text
    calls it so and says 3x3 (Sec. 4.2): smallcnn3. ReLU stands behind the pooling: the same values for a
    quarter of the work."""
    def block(s, t):
        return nn.Conv2d(s, t, kernel, bias=False), nn.BatchNorm2d(t), nn.MaxPool2d(2), nn.ReLU(inplace=True)

    side = ((size - kernel + 1) // 2 - kernel + 1) // 2  # of 28 pixels: 4, with a kernel of 3 it is 5
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


class LinearOfReLU(nn.Linear):
    """The classifier of DIRT's network: z [B, D] -> logits [B, C] of ReLU(z)."""

    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z.relu())


def classifier_of_dirt(dim: int, classes: int) -> nn.Module:
    return xavier(LinearOfReLU(dim, classes))


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


def of_torchvision(name: str, channels: int, size: int) -> nn.Module:
    from torchvision import models
    return models.get_model(name)


alexnet = partial(of_torchvision, "alexnet")
resnet18 = partial(of_torchvision, "resnet18")
resnet50 = partial(of_torchvision, "resnet50")


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
    "smallcnn3": Backbone(partial(smallcnn, kernel=3), 64, relu=False, gray=True, head=classifier_of_dirt),
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


def state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's parameters and buffers, which later training does not change."""
    return {name: v.clone() for name, v in module.state_dict().items()}


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's parameters by their names, without the buffers."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def load(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """Load a whole state into `module` and return it. RuntimeError if names or shapes do not fit."""
    module.load_state_dict(tensors)
    return module


def average(states: list[dict[str, Tensor]], weights: Tensor) -> dict[str, Tensor]:
    """sum_k weights[k] * states[k], entry by entry; the result of an integer buffer is rounded."""
    mean, p = {}, weights.tolist()
    for name, first in states[0].items():
        dtype = first.dtype if first.is_floating_point() else torch.float64
        total = first.to(dtype) * p[0]
        for tensors, p_k in zip(states[1:], p[1:]):
            total.add_(tensors[name].to(dtype), alpha=p_k)
        mean[name] = total if dtype == first.dtype else total.round().to(first.dtype)
    return mean


def entrywise(formula: Callable[..., Tensor], *states: dict[str, Tensor]) -> dict[str, Tensor]:
    """formula(a, b, ...) of the entries of each name in the first state."""
    with torch.no_grad():
        return {name: formula(*(tensors[name] for tensors in states)) for name in states[0]}


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


def nbytes(payload: Payload) -> int:
    """Bytes of a payload on the wire."""
    return sum(t.nbytes for t in tensors_of(payload))


Kept = dict[str, dict[str, Tensor]]  # what an optimizer remembers of each parameter, by the parameter's name


def sgd(module: nn.Module, settings: Args, t: int, kept: Kept | None = None) -> torch.optim.SGD:
    """Local SGD at the learning rate of round t, lr * lr_decay^t; it goes on from what `optimizer_state` has
    kept."""
    trained = [p for p in module.parameters() if p.requires_grad]
    opt = torch.optim.SGD(trained, lr=settings.lr * settings.lr_decay ** t,
                          momentum=settings.momentum, weight_decay=settings.weight_decay, fused=True)
    return going_on(opt, module, kept)


def adam(module: nn.Module, settings: Args, t: int, kept: Kept | None = None) -> torch.optim.Adam:
    """The same with Adam."""
    trained = [p for p in module.parameters() if p.requires_grad]
    opt = torch.optim.Adam(trained, lr=settings.lr * settings.lr_decay ** t,
                           weight_decay=settings.weight_decay, fused=True)
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
def correct(model: nn.Module, data: Data, settings: Args) -> int:
    """The number of images that `model` classifies correctly, in eval mode."""
    model.eval()
    hits = torch.zeros((), dtype=torch.long, device=settings.device)
    with autocast(settings):  # one for all batches: the casts of the weights are kept within it
        for x, y in in_order(data, settings):
            hits += (model(x).argmax(1) == y).sum()
    return int(hits)


@torch.no_grad()
def representations(model: nn.Module, data: Data, settings: Args) -> tuple[Tensor, Tensor]:
    """z float32 [N, D] and labels y [N], on the CPU, of all images of `data`: model.features in eval mode,
    where a probabilistic network gives its mean; precision and batches are those of `correct`."""
    model.eval()
    zs, ys = [], []
    for x, y in in_order(data, settings):
        with autocast(settings):
            z = model.features(x)
        zs.append(z.float().flatten(1).cpu())
        ys.append(y.cpu())
    return torch.cat(zs), torch.cat(ys)


def tested_model(fed: Federation, k: int, t: int) -> nn.Module:
    """The network that is tested on client k after t rounds."""
    seed_all(fed.settings.seed, "evaluate", t, k)
    down = getattr(fed.server, "tested", fed.server.download)(k)
    return fed.clients[k].model(down)


def evaluate_classifiers(fed: Federation, t: int, best: float) -> dict:
    """Validation and test accuracy of the models of all clients after t rounds, and of the target. With
    `--test-rounds best` the test parts, and the target, only where the validation is better than `best`, the
    best of the rounds before, and in the last round."""
    if fed.settings.test_rounds == "best" and t < fed.settings.rounds:
        entry = accuracies(fed, t, ("val",))
        if not from_server(bool(entry) and entry["val"]["ALL"] > best):
            return entry
    return accuracies(fed, t, ("val", "test"))


def accuracies(fed: Federation, t: int, parts: tuple[str, ...]) -> dict:
    """The accuracies of these parts after t rounds, in process 0: ALL is pooled over the images, AVG the mean
    over the clients. An unseen client has a test part alone."""
    hits = {}  # of each client and part: the correct and all images
    for k, client in fed.clients.items():
        own = tuple(part for part in parts if part == "test" or not client.data.unseen)
        model = tested_model(fed, k, t) if own else None
        hits[k] = {}
        for part in own:
            data = getattr(client.data, part)
            hits[k][part] = correct(model, data, fed.settings), len(data)
    hits = gathered(hits)
    if process()[0]:
        return {}
    entry = {}
    for part in parts:
        of_clients = [hits[k][part] for k in range(fed.K)]
        each = [right / n for right, n in of_clients]
        pooled = sum(right for right, _ in of_clients) / sum(n for _, n in of_clients)
        entry[part] = {"ALL": pooled, "AVG": sum(each) / fed.K, "clients": dict(zip(fed.names, each))}
    if "test" in parts and fed.has_target:
        right, n = hits[fed.K]["test"]
        entry["target"] = right / n
    return entry


# The contract of a method file


class ServerProtocol(Protocol):
    """The server of a method. It sees nothing of the clients but their uploads."""

    keeps: tuple[str, ...]  # the attributes that outlive a round: tensors, numbers, strings, in nested dicts

    def __init__(self, args: Args, net: nn.Module, clients: int): ...  # their number; `net`: see below

    def download(self, k: int) -> Payload: ...  # what client k receives, also one that never trained

    def tested(self, k: int) -> Payload: ...  # may be left out: what it is tested with, if that is another

    def update(self, uploads: dict[int, Payload], t: int) -> None: ...  # with round t's uploads


class ClientProtocol(Protocol):
    """Client k of a method. `net` is one scratch network that server and clients share: nothing may stay in
    it between calls. What outlives a call is named in `keeps`. The tensors of `down` are the server's own:
    they are read and never changed in place."""

    keeps: tuple[str, ...]  # the attributes that outlive a round
    data: ClientData
    log: dict[str, Tensor]  # may be left out: scalars of the last local training, which do not travel
    pooled: bool  # may be left out: client 0 has the training images of all, the others have none

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData): ...

    def train(self, down: Payload, t: int) -> Payload: ...  # local training in round t; returns the upload

    def model(self, down: Payload) -> nn.Module: ...  # what it is tested with, also if it is data.unseen

    def chance_loss(self) -> float: ...  # `linear` alone: the loss of features that say nothing


def kept(member: ServerProtocol | ClientProtocol) -> dict:
    """What outlives a round of a server or a client: the attributes that it names in `keeps`."""
    return {name: getattr(member, name) for name in member.keeps}


def restore(member: ServerProtocol | ClientProtocol, saved: dict, device: str) -> None:
    """The attributes of a server or a client as `kept` gave them. A tensor goes where it is at the start of a
    run, which may be the main memory; tensors in dicts go to `device`."""
    if saved.keys() != set(member.keeps):
        raise KeyError(f"expected {', '.join(member.keeps)}; found {', '.join(saved)}")
    for name, value in saved.items():
        at_start = getattr(member, name)
        setattr(member, name, to_device(value, at_start.device if isinstance(at_start, Tensor) else device))


# The round loop


def run(Server, Client, settings: Args, build=None) -> list[dict]:
    """Train and evaluate a method as `settings` say; the main of every method file. Returns the results, one
    per seed of `--seeds` and target.

    `build(args, channels, classes)` makes the network(s), by default `backbone`. When it cannot go on, it
    ends the program with one line on stderr: exit code 2 for bad usage, 1 for failures, 130 for Ctrl-C.
    """
    with one_line_on_failure(Path(getattr(sys.modules[Client.__module__], "__file__", "run")).stem):
        method, file = name_and_file(Server, Client)
        prepare(settings)
        of_seeds, folders = {}, []
        for of_seed in expand_seeds(settings):
            if process()[0] == 0:
                machine = f"{of_seed.device}, {of_seed.precision}, threads: {torch.get_num_threads()}"
                print(f"{method} on {of_seed.dataset}, {of_seed.protocol}, seed {of_seed.seed}\n{machine}",
                      flush=True)
            known = known_domains(of_seed.dataset)
            if known:
                targets_of(of_seed, known)  # a wrong name is refused before minutes of decoding
            dataset = open_dataset(of_seed)
            results = of_seeds[of_seed.seed] = []
            for one in expand_targets(of_seed, dataset.names):
                key = identity(one, method, dataset.fingerprint)
                folders.append(str(folder_of(one, key)))
                with Run.open(one, key, file) as progress:
                    results.append(rounds(Server, Client, one, build or backbone, dataset, progress))
            if process()[0] == 0:
                show_targets(method, of_seed, results)
        if settings.seeds and process()[0] == 0:
            show_seeds(settings, method, of_seeds, folders)
    return sum(of_seeds.values(), [])


def rounds(Server, Client, settings: Args, build, dataset: Dataset, progress: Run) -> dict:
    """One run: the rounds up to settings.rounds, or what is left of them. Returns its result."""
    if progress.result:
        return progress.show()
    evaluate = evaluate_classifiers
    if settings.protocol == "linear":
        evaluate = partial(linear.evaluate, represent=representations)
    fed = federation(Server, Client, settings, build, dataset)
    server, clients = fed.server, fed.clients
    progress.begin(fed)  # prints and writes the settings; restores a checkpoint
    for t in range(progress.t, settings.rounds):
        entry = {"round": t + 1, "lr": settings.lr * settings.lr_decay ** t}
        if t == 0 and settings.protocol == "linear":
            entry["start"] = linear.evaluate_start(fed, representations, batches)
            progress.lap("evaluate")

        # S_t: the clients of this round
        count = max(1, round(settings.participation * fed.K))
        order = torch.randperm(fed.K, generator=seed_all(settings.seed, "sample", t))
        S_t = order[:count].sort().values.tolist()

        # each client: download, local training, upload
        uploads, logs = {}, {}
        for k in S_t:
            if k not in clients:  # with torchrun: it belongs to another process
                continue
            down = server.download(k)
            seed_all(settings.seed, "train", t, k)
            up = clients[k].train(down, t)
            uploads[k] = up
            logs[k] = {"bytes_down": nbytes(down), "bytes_up": nbytes(up)}
            whose = f"round {t + 1}, client {fed.names[k]}"
            logs[k] |= finite_numbers(up, getattr(clients[k], "log", {}), whose)
        uploads, logs = gathered(uploads), gathered(logs)
        progress.images += sum(images_in_round(fed.sizes[k], settings) for k in S_t)
        progress.lap("train")

        # the server: from the uploads to the next round's downloads
        if process()[0] == 0:
            seed_all(settings.seed, "server", t)
            server.update(to_device(uploads, settings.device), t)
        if process()[1] > 1:
            restore(server, from_server(kept(server)), settings.device)
        progress.lap("server")

        entry["clients"] = {fed.names[k]: log for k, log in logs.items()}
        if is_evaluated(settings, t + 1):
            entry |= evaluate(fed, t + 1, progress.best_val)
        progress.lap("evaluate")
        progress.log(entry)
        progress.save(fed)
    return progress.finish()


@dataclass
class Federation:
    """Who takes part in a run. Clients 0..K-1 train; the numbers behind are the targets', who never do. With
    torchrun `clients` has only those of this process."""

    settings: Args
    dataset: Dataset
    server: ServerProtocol
    clients: dict[int, ClientProtocol]
    names: list[str]  # of all clients and then the targets
    sizes: list[int]  # training images of the K clients
    channels: int
    tested: int  # images of the targets that are tested

    @property
    def K(self) -> int:
        return len(self.sizes)

    @property
    def has_target(self) -> bool:
        return len(self.names) > self.K

    def state(self) -> dict:
        """{"server": what it keeps, "clients": {k: what that client keeps}}."""
        clients = {k: kept(client) for k, client in self.clients.items()}
        return {"server": kept(self.server), "clients": clients}

    def restore(self, saved: dict) -> None:
        """The server and the clients as `state` gave them. An error if the tensors do not fit the network."""
        device = self.settings.device
        restore(self.server, to_device(saved["server"], device), device)
        for k, client in self.clients.items():
            restore(client, saved["clients"][k], device)
        for k, client in self.clients.items():
            client.model(self.server.download(k))
            break  # one is enough to see whether the tensors fit

    def data(self) -> dict:
        """Who takes part, and what the images show: enough to build the networks without any image."""
        return {"clients": self.names[:self.K], "targets": self.names[self.K:],
                "classes": list(self.dataset.classes), "channels": self.channels}


def federation(Server, Client, settings: Args, build, dataset: Dataset) -> Federation:
    """The server and the clients at the start of a run, always in the same random order."""
    sources, targets = split(dataset, settings)
    if getattr(Client, "pooled", False):
        pool(sources)
    shape = tuple(dataset.domains[0].images.shape[1:])  # (C, H, W)
    return assembled(Server, Client, settings, build, dataset, sources, targets, shape)


def pool(clients: list[ClientData]) -> None:
    """Give the first client the training images of all, in the main memory; the others keep none."""
    images = torch.cat([c.train.images[c.train.index].cpu() for c in clients])
    labels = torch.cat([c.train.labels.cpu() for c in clients])
    first = clients[0].train
    for c in clients:
        c.train = dataclasses.replace(c.train, index=c.train.index[:0], labels=c.train.labels[:0])
    clients[0].train = Data(images, torch.arange(len(labels)), labels, first.device, first.normalize)


def assembled(Server, Client, settings: Args, build, dataset: Dataset, sources: list[ClientData],
              targets: list[ClientData], shape: tuple[int, ...]) -> Federation:
    """The server and the clients of these data, whose images have `shape` (C, H, W)."""
    if settings.normalize == "imagenet" and shape[0] != 3:
        raise Stop(f"--normalize imagenet is for colour images; those of {settings.dataset} have one "
                   "channel: use unit", 2)
    seed_all(settings.seed, "init")
    try:
        net = build(settings, shape[0], len(dataset.classes))
        net.eval()(torch.zeros(2, *shape))
    except (RuntimeError, AssertionError) as e:
        if out_of_memory(e):
            raise
        flag, size = ("--crop", settings.crop) if settings.crop else ("--image-size", settings.image_size)
        why = str(e).splitlines()[0][:80]
        raise Stop(f"images of {size}x{size} do not fit --backbone {settings.backbone} ({why}): give another "
                   f"{flag}", 2)
    net.to(settings.device, memory_format=torch.channels_last)
    server = Server(settings, net, len(sources))
    rank, size = process()
    clients = {}
    for k, data in enumerate(sources + targets):
        if k % size == rank:
            clients[k] = Client(settings, net, k, data)
    names = [data.name for data in sources + targets]
    sizes = [len(data.train) for data in sources]
    tested = sum(len(data.test) for data in targets)
    return Federation(settings, dataset, server, clients, names, sizes, shape[0], tested)


def finite_numbers(up: Payload, log: dict, whose: str) -> dict[str, float]:
    """What a client has logged, as numbers. Stop if one of them, or of the upload, is not finite."""
    numbers = {name: float(v) for name, v in log.items()}
    floats = [v for v in tensors_of(up) if v.is_floating_point() and v.numel()]
    largest = torch._foreach_norm(floats, ord=math.inf) if floats else []
    if not all(math.isfinite(v) for v in [*numbers.values(), *map(float, largest)]):
        raise Stop(f"{whose}: the loss or the weights are no longer finite; the last good checkpoint, if one "
                   "was due before, is in the output folder: lower --lr, or set --clip")
    return numbers


def images_in_round(n: int, settings: Args) -> int:
    """How many images a client of n training images trains on in a round."""
    sizes = [len(part) for part in cut_batches(torch.arange(n), settings)]
    if settings.steps:
        return sum(sizes[i % len(sizes)] for i in range(settings.steps))
    return settings.epochs * sum(sizes)


def is_evaluated(settings: Args, t: int) -> bool:
    """Whether there is an evaluation after t rounds."""
    if t == settings.rounds:
        return True
    if settings.protocol == "linear" and settings.test_rounds == "best":
        return False  # the last round's alone is reported
    return t % settings.eval_every == 0
