"""What every method stands on, in this order: data loaders, backbones, averaging, evaluation, the contract
of a method file, the round loop. Each has its heading.

A method file has a `Server` and a `Client`. All that passes between them are two dicts of tensors, the
download and the upload. The round loop below calls both; `ServerProtocol` and `ClientProtocol` say which
functions it needs. CONTRIBUTING.md, "The path of one run", follows a command to its result. Three values go
through the program, each made once: the settings, `Args` (plumbing/run/settings.py), `Dataset`, and `Run`, a
run's folder (plumbing/run/runfolder.py). Method files import all they need from here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from plumbing import schedules
from plumbing.data.augment import AUGMENTATIONS, Augmentation, augment
from plumbing.data.catalog import named
from plumbing.data.custom_data import open_custom_data
from plumbing.data.decoding import open_images
from plumbing.data.domains import Dataset, Domain, scaled
from plumbing.data.mixing import pool
from plumbing.data.mnist import load_digits, rotate, rotated_mnist
from plumbing.data.splits import (Rows, complete_split, limited, parts_of, placed_images, shares_of,
                                  source_rows, target_rows)
from plumbing.run import linear
from plumbing.run.devices import prepare
from plumbing.run.errors import UserError, no_exit, one_line_on_failure
from plumbing.run.federation import Federation
from plumbing.run.networks import (built, custom_network, from_torchvision, imagenet_weights, last_linear,
                                   load_pretrained, read_weights)
from plumbing.run.optimizers import OptimizerState, adam, optimizer_state, restore_optimizer, sgd
from plumbing.run.payloads import TRAINED, check_keeps, kept, layout, shared, take_counts
from plumbing.run.results import best_of
from plumbing.run.runfolder import Run, check_outputs
from plumbing.run.scores import as_probabilities, check_classes, final_measures, joined, validation_score
from plumbing.run.seeding import seed_all
from plumbing.run.settings import (Args, LinearArgs, arg, identity, method_file, method_name, parse, source,
                                   sourced)
from plumbing.run.several import expand_seeds, expand_targets, known_domains, show_means, targets_of

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

__all__ = ["LinearArgs", "OptimizerState", "adam", "arg", "optimizer_state", "parse", "restore_optimizer",
           "rotate", "schedules", "sgd", "source", "sourced"]  # for method files

Payload = dict[str, "Tensor | dict[str, Tensor]"]  # what travels: plain tensors, nothing else
Reply = tuple[Payload, dict[str, float]]  # of a client: what it sends, and numbers


# Data: opening a dataset


def open_dataset(settings: Args) -> Dataset:
    """The dataset of a run at its image size, with --limit."""
    return limited(read_dataset(settings), settings)


def read_dataset(settings: Args) -> Dataset:
    """All domains of a dataset, each with its images [N, C, H, W] and labels [N]."""
    name, size, data = settings.dataset, settings.image_size, settings.data
    if name == "digits":
        return load_digits(size)
    if name.startswith("rotatedmnist"):
        return rotated_mnist(name, settings.seed, size, data, settings.archives)
    if named(name).file:
        return open_custom_data(named(name).file, settings)
    return open_images(name, size, data, settings.archives, settings.skip_broken)


# Data: what a client holds


@dataclass
class Data:
    """A part of a domain or of several: the images uint8 [N, C, H, W], and their rows `index` [n] with
    `labels` [n]."""

    images: Tensor
    index: Tensor
    labels: Tensor
    device: str
    normalize: str
    prepare: Callable[[Tensor], Tensor] = scaled

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, i: Tensor | slice, how: Augmentation | None = None) -> tuple[Tensor, Tensor]:
        """Positions i [B], or a range of them -> x float32 [B, C, H, W] in [0, 1] (or normalized), augmented,
        channels last, and y [B]."""
        x = self.prepare(self.images[self.index[i]].to(self.device, non_blocking=True))
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
    domains: tuple[Domain, ...] = ()  # whose images it has, in the order of their rows


def split(dataset: Dataset, settings: Args) -> tuple[list[ClientData], list[ClientData]]:
    """The clients and, for `lodo` and `linear`, the targets."""
    targets = targets_of(settings, dataset.names)
    clients, unseen = clients_of(dataset, settings, targets)
    check_classes(clients, dataset.classes, settings)
    return clients, unseen


def clients_of(dataset: Dataset, settings: Args,
               targets: list[str]) -> tuple[list[ClientData], list[ClientData]]:
    """The clients of each domain, or its target. Every image of a domain is in exactly one part of one
    client. With --sources, domains that are neither source nor target are left out."""
    clients, unseen = [], []
    for d in dataset.domains:
        is_target = d.name in targets
        if settings.sources and d.name not in settings.sources.split(",") and not is_target:
            continue
        if settings.device.startswith("cuda") and d.images.nbytes < torch.cuda.mem_get_info()[0] / 4:
            d = dataclasses.replace(d, images=d.images.to(settings.device))  # the decoded pixels, on the GPU
        seed_name, given = dataset.seed_name(d.name), d.given
        order = torch.randperm(len(d.labels), generator=seed_all(settings.seed, "split", seed_name))
        of_split = shares_of(settings, is_target)
        if given is not None:  # by a split.csv
            given = complete_split(given, order, d.labels, of_split)
        in_parts = partial(parts_of, given, d.labels if named(settings.dataset).custom else None, of_split)
        if is_target:
            rows = target_rows(settings, d.name, d.labels, in_parts, order)
            unseen.append(client_data(settings, d, d.name, rows, unseen=True))
            continue
        of_domain = source_rows(settings, d.name, d.labels, in_parts, order, len(dataset.classes), seed_name)
        for name, rows in of_domain.items():
            clients.append(client_data(settings, d, name, rows))
    return clients, unseen


def client_data(settings: Args, d: Domain, name: str, rows: Rows, unseen: bool = False) -> ClientData:
    """A client whose train, val and test are these rows of a domain."""
    parts = []
    for of_part in rows:
        index = of_part.to(d.images.device)
        labels = d.labels[of_part].to(d.images.device)
        parts.append(Data(d.images, index, labels, settings.device, settings.normalize, d.prepare))
    return ClientData(name, *parts, unseen=unseen, domains=(d,))


# Data: loading batches


def batches(data: Data, settings: Args, t: int, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The training batches (x, y) of client k in round t: E epochs, or exactly `--steps` batches; a new order
    each epoch. A method with two views of each image gets x [2B, C, H, W], the first views before the second
    ones."""
    how = view_of(settings)
    steps = settings.steps or settings.epochs * steps_in_epoch(len(data), settings)
    done, epoch = 0, 0
    while done < steps:
        generator = seed_all(settings.seed, "batches", t, k, epoch)  # of augmentation and noise too
        order = torch.randperm(len(data), generator=generator)
        for i in cut_batches(order.to(data.index.device), settings)[:steps - done]:
            x, y = data.batch(i.repeat(settings.views), how)
            yield x, y[:len(i)]
            done += 1
        epoch += 1


def view_of(settings: Args) -> Augmentation | None:
    """What happens to an image that is trained on."""
    how = AUGMENTATIONS.get(settings.augment)
    if settings.crop:
        how = dataclasses.replace(how or Augmentation(ratio=(1.0, 1.0)), size=settings.crop)
    return how


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


# Networks (backbones): features(x) -> z [B, D] and classify(z) -> logits [B, classes]


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


class GroupedConv2d(nn.Conv2d):
    """A convolution in groups. On a GPU it works in NCHW order, for which PyTorch has kernels of its own:
    with channels last cuDNN prepares each batch size, and a first round took 36 s instead of 8 (docs/gpu.md).
    """

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return super().forward(x)
        return self.in_nchw(x).contiguous(memory_format=torch.channels_last)

    def in_nchw(self, x: Tensor) -> Tensor:
        weight = self.weight.flatten(1).view_as(self.weight)  # a view has the strides of NCHW
        return conv2d(x.contiguous(), weight, self.bias, self.stride, self.padding, groups=self.groups)


def smallcnn(channels: int, size: int, kernel: int = 5) -> nn.Module:
    """The network of DIRT (atuannguyen/DIRT @ 2635178) and DIVA for RotatedMNIST, with z of 64. FedSR's text
    calls it so and says 3x3 (Sec. 4.2): smallcnn3. ReLU stands behind the pooling: the same values for a
    quarter of the work."""
    def block(s, t):
        return nn.Conv2d(s, t, kernel, bias=False), nn.BatchNorm2d(t), nn.MaxPool2d(2), nn.ReLU(inplace=True)

    side = ((size - kernel + 1) // 2 - kernel + 1) // 2  # of 28 pixels: 4, with a kernel of 3 it is 5
    if side < 1:
        raise UserError(f"--backbone smallcnn needs images of at least 16x16, not {size}x{size}", 2)
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


def linear_as_dirt(dim: int, classes: int) -> nn.Module:
    """FedSR's text: "a single linear layer", with no ReLU before it."""
    return xavier(nn.Linear(dim, classes))


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
    "smallcnn3_linear": Backbone(partial(smallcnn, kernel=3), 64, relu=False, gray=True, head=linear_as_dirt),
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
    is the backbone's `head`, a new one; with `keep_last` it is behind torchvision's last layer (4096 -> 1000
    in AlexNet), which keeps its weights."""
    origin, _, name = args.backbone.rpartition(":")
    if origin and origin != "torchvision":
        return custom_network(args, channels, classes, Net)
    chosen = of_any_torchvision(name) if origin else BACKBONES[args.backbone]
    if channels != 3 and not chosen.gray:
        raise UserError(f"--backbone {args.backbone} takes colour images; those of {args.dataset} have one "
                        "channel: use smallcnn or smallcnn_bn", 2)
    body = chosen.build(channels, args.crop or args.image_size)
    if args.weights == "imagenet" and not chosen.imagenet:
        there = ", ".join(name for name, entry in BACKBONES.items() if entry.imagenet)
        raise UserError(f"there are no ImageNet weights for --backbone {args.backbone}; there are for "
                        f"{there}", 2)
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


def of_any_torchvision(name: str) -> Backbone:
    """Any classifier of torchvision, whose last linear layer a new one replaces."""
    last, dim = last_linear(name)
    return Backbone(lambda *_: from_torchvision(name), dim, last, imagenet_weights(name), relu=False)


def autocast(args: Args):
    """The context of forward passes and losses: bf16 autocast with `--precision bf16`, else nothing."""
    return torch.autocast(args.device.split(":")[0], torch.bfloat16, enabled=args.precision == "bf16")


# Averaging: the states of networks


def state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's parameters and buffers, which later training does not change."""
    return {name: v.clone() for name, v in module.state_dict().items()}


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's parameters by their names, without the buffers."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def load(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """Copy a whole state into `module` and return it. RuntimeError if names or shapes do not fit."""
    own = module.state_dict()
    if layout(own) != layout(tensors):
        module.load_state_dict(tensors)  # says what does not fit
    for name, v in own.items():
        v.copy_(tensors[name])
    torch.clear_autocast_cache()  # within autocast: else it keeps its casts of what was there
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


# Evaluation


@torch.no_grad()
def outputs_of(call: Callable, model: nn.Module, batches: Iterable, settings: Args) -> tuple[Tensor, Tensor]:
    """call(x) float32 [N, ...] of all batches (x, y) by `model` in eval mode, and the labels y [N], on the
    CPU. Stop if they are not finite; a logit may be minus infinity."""
    model.eval()
    with autocast(settings):  # one for all batches: the casts of the weights are kept within it
        outputs, y = joined([(call(x).float(), y) for x, y in batches])
    if not outputs.flatten(1).amax(1).isfinite().all():  # NaN would count as class 0
        raise UserError("the network that is tested gives numbers that are not finite: lower --lr, or set "
                        "--clip")
    return outputs.cpu(), y.cpu()


def correct(model: nn.Module, data: Data, settings: Args) -> int:
    """The number of images that `model` classifies correctly, in eval mode."""
    logits, y = outputs_of(model, model, in_order(data, settings), settings)
    return int((logits.argmax(1) == y).sum())


def probabilities(model: nn.Module, data: Data, settings: Args) -> tuple[Tensor, Tensor]:
    """Of all images of `data` the probability of each class, float32 [N, C], and labels [N], on the CPU."""
    logits, y = outputs_of(model, model, in_order(data, settings), settings)
    return as_probabilities(logits), y


def representations(model: nn.Module, data: Data, settings: Args,
                    views_of: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """z float32 [N, D] and labels y [N], on the CPU, of all images of `data`: model.features in eval mode,
    where a probabilistic network gives its mean. With `views_of`, of new augmented views of these rows."""
    loaded = in_order(data, settings)
    if views_of is not None:
        parts = views_of.to(data.index.device).split(max(settings.batch_size, 100))
        loaded = (data.batch(i, view_of(settings)) for i in parts)
    z, y = outputs_of(model.features, model, loaded, settings)
    return z.flatten(1), y


def tested_model(fed: Federation, k: int, t: int, down: Payload | None = None) -> nn.Module:
    """The network that is tested on client k after t rounds; `down` is what it has got, if not from here."""
    down = fed.tested_with(k) if down is None else down
    seed_all(fed.settings.seed, "evaluate", t, k)
    return fed.clients[k].model(down)


def evaluate(fed: Federation, t: int, history: list[dict]) -> dict:
    """Validation and test accuracy of the models of all clients after t rounds, and of the target. With
    `test_rounds` best the test parts, and the target, only where the validation is better than in the
    rounds before, `history`, and in the last round. Without labels: linear classifiers, on each target."""
    settings = fed.settings
    if settings.protocol == "linear":
        return linear.evaluate(fed, fit_client, t)
    if settings.test_rounds == "best" and t < settings.rounds:
        entry = accuracies(fed, t, validate_client, range(fed.K))
        if best_of([*history, {"round": t} | entry])["round"] < t:
            return entry
    return accuracies(fed, t, test_client, range(len(fed.names)))


def accuracies(fed: Federation, t: int, of_client: Callable, who: range) -> dict:
    """The accuracies after t rounds on val, or val and test. With another --metric the validation has it
    too: of the images of all clients together."""
    answers, settings = fed.test(of_client, who, t), fed.settings
    entry = accuracies_of(fed, {k: counts for k, (_, counts) in answers.items()}, who)
    if "val" in entry and settings.metric != "accuracy":
        outputs = []
        for k in range(fed.K):
            outputs.append(probabilities(tested_model(fed, k, t), fed.clients[k].data.val, settings))
        entry["val"] |= validation_score(settings.metric, outputs)
    return entry


def accuracies_of(fed: Federation, counts: dict[int, dict[str, int]], who: range) -> dict:
    """From what each of these clients counted, the correct and all images of a part: ALL is pooled over the
    images, AVG the mean over the clients. Unless all have answered the names of the others alone."""
    if len(counts) < len(who):
        return {"untested": [fed.names[k] for k in who if k not in counts]}
    entry = {}
    for part in ("val", "test") if "test" in counts[0] else ("val",):
        of_clients = [(counts[k][part], counts[k][f"{part}_of"]) for k in range(fed.K)]
        each = [right / n for right, n in of_clients]
        pooled = sum(right for right, _ in of_clients) / sum(n for _, n in of_clients)
        entry[part] = {"ALL": pooled, "AVG": sum(each) / fed.K, "clients": dict(zip(fed.names, each))}
    if len(who) > fed.K:
        entry["target"] = counts[fed.K]["test"] / counts[fed.K]["test_of"]
    return entry


def tested_outputs(fed: Federation, k: int, t: int) -> tuple[Tensor, Tensor]:
    """The `probabilities` of client k's test images after t rounds, and their labels."""
    return probabilities(tested_model(fed, k, t), fed.clients[k].data.test, fed.settings)


# The contract of a method file


class ServerProtocol(Protocol):
    """The server of a method. It sees nothing of the clients but their uploads."""

    keeps: tuple[str, ...]  # the attributes that outlive a round: tensors, numbers, strings, in nested dicts
    log: dict[str, Tensor]  # may be left out: scalars of the last update

    def __init__(self, args: Args, net: nn.Module, clients: int): ...  # their number; `net`: see below

    def download(self, k: int) -> Payload: ...  # what client k receives, also one that never trained

    def tested(self, k: int) -> Payload: ...  # may be left out: what it is tested with, if that is another

    def update(self, uploads: dict[int, Payload], t: int) -> None: ...  # with round t's uploads


class ClientProtocol(Protocol):
    """Client k of a method. `net` is one scratch network that server and clients share: nothing may stay in
    it between calls. What outlives a call is named in `keeps`. The tensors of `down` are the server's own:
    the run stops if they are changed in place."""

    keeps: tuple[str, ...]  # the attributes that outlive a round
    data: ClientData
    log: dict[str, Tensor]  # may be left out: scalars of the last local training, beside the upload
    pooled: bool  # may be left out: client 0 has the training images of all, the others have none

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData): ...

    def train(self, down: Payload, t: int) -> Payload: ...  # local training in round t; returns the upload

    def model(self, down: Payload) -> nn.Module: ...  # what it is tested with, also if it is data.unseen

    def chance_loss(self) -> float: ...  # `linear` alone: the loss of features that say nothing


# The round loop


def run(Server, Client, settings: Args, build=None) -> list[dict]:
    """Train and evaluate a method as `settings` say; the main of every method file. Returns the results, one
    per seed of `--seeds` and target.

    `build(args, channels, classes)` makes the network(s), by default `backbone`. When it cannot go on, it
    ends the program with one line on stderr: exit code 2 for bad usage, 1 for failures, 130 for Ctrl-C.
    """
    file = method_file(Server, Client, build)
    with one_line_on_failure(file.stem), no_exit():
        method, results = method_name(file), []
        prepare(settings)
        check_outputs(settings)
        for seed_settings in expand_seeds(settings):
            print(f"{method} on {seed_settings.dataset}, {seed_settings.protocol}, seed "
                  f"{seed_settings.seed}\n{seed_settings.device}, {seed_settings.precision}, threads: "
                  f"{torch.get_num_threads()}", flush=True)
            # a wrong name stops before the decoding
            targets_of(seed_settings, known_domains(seed_settings.dataset))
            dataset = open_dataset(seed_settings)
            for run_settings in expand_targets(seed_settings, dataset.names):
                key = identity(run_settings, method, dataset.content)
                with Run.open(run_settings, key, file) as progress:
                    if progress.result:
                        results.append(progress.show())
                    else:
                        results.append(rounds(federation(Server, Client, run_settings, build or backbone,
                                                         dataset), progress))
        show_means(method, settings.dataset, results)
    return results


def rounds(fed: Federation, progress: Run) -> dict:
    """One run: the rounds up to settings.rounds, or what is left of them. Returns its result."""
    settings = fed.settings
    progress.start(fed)  # prints and writes the settings; from a checkpoint: t, what server and clients keep
    for t in range(progress.t, settings.rounds):
        entry = {"round": t + 1, "lr": settings.lr * settings.lr_decay ** t}
        if t == 0 and settings.protocol == "linear":
            entry["start"] = linear.evaluate_start(fed, fit_client, start_client)

        S_t = sampled_clients(settings, fed.K, t)
        uploads, logs = fed.train(train_client, S_t, t)  # each of S_t: download, local training, upload
        counts = take_counts(logs)  # with --after-training
        entry |= fed.who_trained(S_t, logs)
        entry |= fed.update(uploads, t)  # the server: from the uploads to the next round's downloads

        if is_evaluated(settings, t + 1):
            entry |= evaluate(fed, t + 1, progress.history)
            if settings.after_training:
                entry["after_training"] = accuracies_of(fed, counts, range(fed.K))
        fed.lap("evaluate")
        images = sum(images_in_round(fed.sizes[k], settings) for k in logs)
        progress.log(entry, images)
        progress.save(fed)
    measures = final_measures(fed, progress, tested_outputs)
    return progress.finish(fed.of_classes, measures, fed.dataset.content)


def sampled_clients(settings: Args, K: int, t: int) -> list[int]:
    """S_t: the clients that train in round t."""
    count = max(1, round(settings.participation * K))
    order = torch.randperm(K, generator=seed_all(settings.seed, "sample", t))
    return order[:count].sort().values.tolist()


def is_evaluated(settings: Args, t: int) -> bool:
    """Whether there is an evaluation after t rounds."""
    if t == settings.rounds:
        return True
    if settings.protocol == "linear" and settings.test_rounds == "best":
        return False  # the last round's alone is reported
    return t % settings.eval_every == 0


# The round loop: who takes part


def federation(Server, Client, settings: Args, build, dataset: Dataset) -> Federation:
    """The server and the clients at the start of a run, made in a fixed order: they draw random numbers."""
    sources, targets = split(dataset, settings)
    placed = []
    for client in sources + targets if named(settings.dataset).custom else ():
        placed += placed_images(client)
    if getattr(Client, "pooled", False):
        pool(sources)
    first = dataset.domains[0]
    example = first.prepare(torch.zeros(2, *first.images.shape[1:], dtype=first.images.dtype))
    fed = federation_of(Server, Client, settings, build, dataset, sources, targets, example)
    fed.placed = placed
    return fed


def federation_of(Server, Client, settings: Args, build, dataset: Dataset, sources: list[ClientData],
                  targets: list[ClientData], example: Tensor) -> Federation:
    """The server and the clients of these data; `example` is a batch as theirs, [2, C, H, W]."""
    seed_all(settings.seed, "init")
    net = built(build, settings, len(dataset.classes), example)
    net.to(settings.device, memory_format=torch.channels_last)
    server = Server(settings, net, len(sources))
    check_keeps(server, "server")
    clients = {}
    for k, data in enumerate(sources + targets):
        clients[k] = Client(settings, net, k, data)
        check_keeps(clients[k], "client")
        for name, value in kept(clients[k]).items():  # equal tensors are held once, not K times
            setattr(clients[k], name, shared(value, getattr(clients[0], name)))
    names = [data.name for data in sources + targets]
    if len(set(names)) < len(names):
        raise UserError(f"two of {', '.join(names)} have one name: rename a domain, it is named as a "
                        "client", 2)
    sizes = [len(data.train) for data in sources]
    tested = sum(len(data.test) for data in targets)
    labels = torch.cat([data.test.labels.cpu() for data in targets or sources])
    of_classes = labels.bincount(minlength=len(dataset.classes)).tolist()
    return Federation(settings, dataset, net, server, clients, names, len(sources), sizes, example.shape[1],
                      tested, of_classes)


def images_in_round(n: int, settings: Args) -> int:
    """How many images a client of n training images trains on in a round."""
    sizes = [len(part) for part in cut_batches(torch.arange(n), settings)]
    if settings.steps:
        return sum(sizes[i % len(sizes)] for i in range(settings.steps))
    return settings.epochs * sum(sizes)


# The round loop: what a client does with its download after t rounds. It sends tensors and numbers


def train_client(fed: Federation, k: int, t: int, down: Payload) -> Reply:
    """Local training in round t: the upload; the bytes both ways and what the client has logged. In a round
    with an evaluation, and --after-training, the counts of `test_trained` too."""
    seed_all(fed.settings.seed, "train", t, k)
    with fed.watching(k, t, down):
        up = fed.clients[k].train(down, t)
    log = fed.log_of(k, t, down, up)
    if fed.settings.after_training and is_evaluated(fed.settings, t + 1):
        log |= test_trained(fed, k, t + 1, down, up)
    return up, log


def test_trained(fed: Federation, k: int, t: int, down: Payload, up: Payload) -> dict[str, int]:
    """The counts of `test_client` for the network that client k has right after its local training, which is
    what `model` makes of its own upload. (`net` itself would not do: nobody says what training leaves in it.)
    Parts that go up alone, as n_k, are for the server."""
    own = {part: v for part, v in up.items() if part in down}
    _, counts = test_client(fed, k, t, down | own)
    return {TRAINED + name: count for name, count in counts.items()}


def test_client(fed: Federation, k: int, t: int, down: Payload, parts=("val", "test")) -> Reply:
    """The correct and all images of these parts, of an unseen client of its test part."""
    model, counts = tested_model(fed, k, t, down), {}
    for part in parts:
        data = getattr(fed.clients[k].data, part)
        if part == "test" or not fed.clients[k].data.unseen:
            counts |= {part: correct(model, data, fed.settings), f"{part}_of": len(data)}
    return {}, counts


def validate_client(fed: Federation, k: int, t: int, down: Payload) -> Reply:
    return test_client(fed, k, t, down, ("val",))


def fit_client(fed: Federation, k: int, t: int, down: Payload) -> Reply:
    """Of a target without labels: the accuracies of linear classifiers on the frozen network."""
    return {}, linear.fit(fed, k, down, representations)


def start_client(fed: Federation, k: int, t: int, down: Payload) -> Reply:
    """Without labels, before the first step: statistics of batch normalization, and the loss of features that
    say nothing."""
    with autocast(fed.settings):
        statistics = linear.running_statistics(fed, k, down, batches)
    return {"statistics": statistics}, {"chance_loss": fed.clients[k].chance_loss()}
