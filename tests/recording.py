"""A method that records all that the round loop does with it, on images that say which one they are; and the
second computation of seeds, splits and rounds in plain Python. Nothing of common.py is in that one."""

import hashlib
import math
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import common

import numpy as np
import torch
from torch import Tensor, nn

CLASSES = 4
STEPS = 2 ** 40 + 1  # of an integer buffer at the start: more digits than a float32 has
SIZES = {"north": 230, "south": 90, "west": 230, "east": 61}
DATA = """
import torch
from common import Domain
from tests.recording import label_of

def load(args):
    domains, first = [], 0
    for name, n in {sizes}.items():
        image = torch.arange(first, first + n)
        pixels = torch.stack([image // 256, image % 256, label_of(image), 0 * image], 1)
        domains.append(Domain(name, pixels.to(torch.uint8).view(n, 1, 2, 2), label_of(image)))
        first += n
    return domains, ("a", "b", "c", "d")
"""


def write_data(path: Path, sizes: dict[str, int] = SIZES) -> Path:
    """A file for --dataset: domains of these sizes; the numbers of the images go through all of them."""
    path.write_text(DATA.format(sizes=sizes))
    return path


def label_of(image):
    """Of the image with this number; the classes have unequal shares."""
    return image * image // 3 % CLASSES


def images_in(x: Tensor) -> list[int]:
    """The numbers of the images in a batch."""
    pixels = (x.flatten(1) * 255).round().long()
    return (256 * pixels[:, 0] + pixels[:, 1]).tolist()


def settings_of(data: Path, out: Path, **values) -> common.Args:
    """The settings of a run on these data."""
    usual = dict(device="cpu", precision="fp32", figures=False, rounds=3, batch_size=16, split="0.6/0.2/0.2")
    return common.Args(dataset=str(data), out=str(out), **usual | values)


# The recording method


def first_numbers() -> tuple[float, float, float]:
    """What torch, numpy and random give next."""
    return torch.rand(1).item(), np.random.rand(), random.random()


class Read(nn.Module):
    """Reads an image's label off it, and gives another one where `right(image)` is false."""

    def __init__(self, right: Callable[[int], bool], batches: list):
        super().__init__()
        self.right, self.batches = right, batches

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training and not torch.is_grad_enabled()
        images = images_in(x)
        self.batches.append(images)
        answers = [label_of(image) + (not self.right(image)) for image in images]
        return nn.functional.one_hot(torch.tensor(answers) % CLASSES, CLASSES).float()


def recording(log: dict, right: Callable[[int, int], bool]) -> tuple:
    """Server, Client and `build` of a method whose model after t rounds is right where right(image, t) is.

    `log` gets what happens, by what it is and when: ("train", seed, t, k) and so on.
    """
    class Server:
        keeps = ("w", "t")

        def __init__(self, args, net, clients):
            self.args, self.t = args, 0
            self.w = {"x": net.x.detach().clone(), "count": torch.tensor(STEPS)}
            log["start", args.seed, args.target] = net.x.tolist()

        def download(self, k):
            return {"w": self.w, "t": torch.tensor(self.t), "k": torch.tensor([k], dtype=torch.int8)}

        def tested(self, k):
            return self.download(k) | {"tested": torch.tensor(True)}

        def update(self, uploads, t):
            log["server", self.args.seed, t] = first_numbers()
            log["drawn", self.args.seed, t] = list(uploads)
            n = torch.stack([up["n"] for up in uploads.values()]).double()
            mean = common.average([up["w"] for up in uploads.values()], n / n.sum())
            log["w", self.args.seed, t] = mean
            for name, v in mean.items():
                self.w[name].copy_(v)  # in place: what is kept of a round must be a copy
            self.t = t + 1

    class Client:
        keeps = ("rounds",)

        def __init__(self, args, net, k, data):
            self.args, self.k, self.data, self.rounds = args, k, data, 0

        def train(self, down, t):
            key = self.args.seed, t, self.k
            assert (int(down["t"]), int(down["k"])) == (t, self.k)
            log["train", *key] = first_numbers()
            log["batches", *key] = []
            for x, y in common.batches(self.data.train, self.args, t, self.k):
                images = images_in(x)
                assert y.tolist() == [label_of(image) for image in images]
                log["batches", *key].append(images)
            self.rounds += 1
            self.log = {"loss": torch.tensor(self.k + t / 4)}
            w = {"x": down["w"]["x"] + self.k, "count": down["w"]["count"] + len(log["batches", *key])}
            return {"w": w, "n": torch.tensor(len(self.data.train))}

        def model(self, down):
            t = int(down["t"])
            key = self.args.seed, t, self.k
            if "tested" in down:  # else it is looked whether a saved state fits
                log["evaluate", *key] = first_numbers()
            batches = []
            log.setdefault(("tested", *key), batches)  # the measures at the end test two rounds once more
            return Read(lambda image: right(image, t), batches)

    def build(args, channels, classes):
        log["build", args.seed] = first_numbers()
        net = nn.Linear(4, classes)
        net.x = nn.Parameter(torch.rand(3))
        net.forward = lambda x: nn.Linear.forward(net, x.flatten(1))
        return net
    return Server, Client, build


# The second computation


def number(*key) -> int:
    """The seed of what this key names: what the records of all runs rest on."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") // 2


def numbers_of(*key) -> tuple[float, float, float]:
    """The first random numbers of torch, numpy and random under this key."""
    seed = number(*key)
    drawn = torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()
    return drawn, np.random.RandomState(seed % 2 ** 32).rand(), random.Random(seed).random()


def shuffled(n: int, *key) -> list[int]:
    """0 .. n - 1 in the order of this key."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(number(*key))).tolist()


def cut(images: list[int], split: str) -> list[list[int]]:
    """Shares of train, validation and test: test and then train are rounded down."""
    train, _, test = map(Fraction, split.split("/"))
    n = len(images)
    tested = math.floor(n * test)
    trained = math.floor((n - tested) * train / (1 - test))
    return [images[:trained], images[trained:n - tested], images[n - tested:]]


def piles_of(s: common.Args, name: str, images: list[int]) -> list[list[int]]:
    """A domain's shuffled images, dealt out to its clients."""
    M = s.clients_per_domain
    if not s.dirichlet:
        return [images[m::M] for m in range(M)]
    rng = np.random.default_rng(number(s.seed, "dirichlet", name))
    enough = False
    while not enough:
        piles = [[] for _ in range(M)]
        for c in range(CLASSES):
            of_class = [image for image in images if label_of(image) == c]
            begin, share = 0, 0.0
            for m, drawn in enumerate(rng.dirichlet([s.dirichlet] * M)):
                share += drawn
                end = len(of_class) if m == M - 1 else math.floor(share * len(of_class) + 1e-9)
                piles[m] += of_class[begin:end]
                begin = end
        sizes = [[len(part) for part in cut(pile, s.split)] for pile in piles]
        enough = all(train >= 2 and val and test for train, val, test in sizes)
    generator = torch.Generator().manual_seed(number(s.seed, "dirichlet order", name))
    return [[pile[i] for i in torch.randperm(len(pile), generator=generator)] for pile in piles]


def parts_of(s: common.Args, sizes: dict[str, int] = SIZES) -> tuple[dict, dict]:
    """{name: its images to train, validate and test with} of the clients, and of the target."""
    clients, targets, first = {}, {}, 0
    for name, n in sizes.items():
        images = list(range(first, first + n))
        if s.limit:
            images = [images[i] for i in shuffled(n, s.seed, "limit", name)[:s.limit]]
        images = [images[i] for i in shuffled(len(images), s.seed, "split", name)]
        if name == s.target:
            train, val, test = cut(images, s.split)
            parts = {"all": [[], [], images], "test": [train, val, test], "heldout": [train, [], val + test]}
            targets[name] = parts[s.target_part]
        else:
            for m, pile in enumerate(piles_of(s, name, images)):
                clients[name if s.clients_per_domain == 1 else f"{name}-{m}"] = cut(pile, s.split)
        first += n
    return clients, targets


def batches_of(s: common.Args, images: list[int], t: int, k: int) -> list[list[int]]:
    """The batches of client k in round t: epochs, or steps."""
    found, epoch, epochs = [], 0, 10 ** 9 if s.steps else s.epochs
    while epoch < epochs and (not s.steps or len(found) < s.steps):
        order = [images[i] for i in shuffled(len(images), s.seed, "batches", t, k, epoch)]
        of_epoch = [order[i:i + s.batch_size] for i in range(0, len(order), s.batch_size)]
        if len(of_epoch) > 1 and len(of_epoch[-1]) == 1:
            of_epoch[-2:] = [of_epoch[-2] + of_epoch[-1]]
        found += of_epoch
        epoch += 1
    return found[:s.steps] if s.steps else found


def drawn_in(s: common.Args, K: int, t: int) -> list[int]:
    """Who trains in round t: the share of K, rounded (a half to the even number), at least one."""
    share = Fraction(str(s.participation)) * K
    return sorted(shuffled(K, s.seed, "sample", t)[:max(1, round(share))])


def by_hand(s: common.Args, right: Callable[[int, int], bool], sizes: dict[str, int] = SIZES,
            begin: tuple[float, ...] = (0.0,)) -> SimpleNamespace:
    """What a whole run must record and write; `begin` is the network at the start."""
    clients, targets = parts_of(s, sizes)
    names, K = list(clients), len(clients)
    log, lines, count, images, x = {}, [], STEPS, 0, list(begin)
    for t in range(s.rounds):
        S_t = drawn_in(s, K, t)
        n = {k: len(clients[names[k]][0]) for k in S_t}
        logs, means, steps = {}, 0.0, Fraction()
        for k in S_t:
            found = batches_of(s, clients[names[k]][0], t, k)
            log["train", s.seed, t, k] = numbers_of(s.seed, "train", t, k)
            log["batches", s.seed, t, k] = found
            images += sum(map(len, found))
            means += k * n[k] / sum(n.values())
            steps += Fraction(n[k], sum(n.values())) * len(found)
            logs[names[k]] = {"bytes_down": 29, "bytes_up": 28, "loss": k + t / 4}
        log["server", s.seed, t] = numbers_of(s.seed, "server", t)
        log["drawn", s.seed, t] = S_t
        x = [value + means for value in x]
        count = round(count + steps)  # a mean of integers
        log["w", s.seed, t] = x, count
        entry = {"round": t + 1, "lr": s.lr * s.lr_decay ** t, "clients": logs}
        if (t + 1) % s.eval_every == 0 or t + 1 == s.rounds:
            for k, (_, val, test) in enumerate([*clients.values(), *targets.values()]):
                log["evaluate", s.seed, t + 1, k] = numbers_of(s.seed, "evaluate", t + 1, k)
                parts = [test] if k >= K else [val, test]
                log["tested", s.seed, t + 1, k] = [part[i:i + 100] for part in parts
                                                   for i in range(0, len(part), 100)]
            entry |= accuracies(clients, targets, lambda image, t=t: right(image, t + 1))
        lines.append(entry)
    return SimpleNamespace(log=log, lines=lines, images=images, clients=clients, targets=targets)


def accuracies(clients: dict, targets: dict, right: Callable[[int], bool]) -> dict:
    """ALL pools the images, AVG averages the clients."""
    entry = {}
    for p, part in ((1, "val"), (2, "test")):
        hits = {name: sum(map(right, parts[p])) for name, parts in clients.items()}
        n = {name: len(parts[p]) for name, parts in clients.items()}
        each = {name: hits[name] / n[name] for name in n}
        entry[part] = {"ALL": sum(hits.values()) / sum(n.values()), "AVG": sum(each.values()) / len(each),
                       "clients": each}
    for _, _, test in targets.values():
        entry["target"] = sum(map(right, test)) / len(test)
    return entry
