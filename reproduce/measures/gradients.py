"""Gradients of the domains against the mutual information of their images (FedGaLA, Theorem 1, Sec. 5.2, Fig.
2(a))."""

from __future__ import annotations

import argparse
import dataclasses
import itertools

from common import Data, autocast, batches, seed_all
from plumbing.errors import UserError
from reproduce.drawing import new_panel, write_figure
from reproduce.measures.finished import Rebuilt, all_rebuilt

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate


def gradient_pairs(run: Rebuilt, number: int = 16) -> dict:
    """For each pair of a run's domains, the covariance of their gradients and the mutual information of their
    images, in nats. The paper does not say how it measured them.

    The gradient of a domain is the mean over `number` batches of the global model's training loss on it, one
    vector over all parameters that travel; covariance and cosine of two of them are over the coordinates.
    """
    travelling = run.federation.server.download(0).get("w")
    if travelling is None:
        raise UserError(f"{run.folder} is a run of {run.label}, whose clients do not get a whole "
                        f"network w; gradients needs one, as of fedavg, fedsr, fedcir or fedgala", 2)
    gradients, parts = {}, {}
    for k, (client, model) in enumerate(run.tested()):
        data = client.data
        parts[data.name] = data.test if data.unseen else data.train
        gradients[data.name] = gradient(run, k, model, parts[data.name], travelling, number).double()
    pairs = {}
    for a, b in itertools.combinations(gradients, 2):
        u, v = gradients[a], gradients[b]
        shared, chance = mutual_information(parts[a], parts[b], seed=run.args.seed)
        pairs[f"{a} / {b}"] = {"covariance": float(((u - u.mean()) * (v - v.mean())).mean()),
                               "cosine": float(u @ v / (u.norm() * v.norm())),
                               "information": shared, "chance": chance}
    return run.heading() | {"pairs": pairs}


def gradient(run: Rebuilt, k: int, model: nn.Module, part: Data, travelling: dict[str, Tensor],
             number: int) -> Tensor:
    """The mean over batches of the gradient of client k's training loss, one vector over the parameters that
    travel."""
    args = dataclasses.replace(run.args, steps=number, batch_size=min(run.args.batch_size, len(part)))
    seed_all(args.seed, "gradients", k)
    model.train().zero_grad()
    for x, y in batches(part, args, 0, k):
        with autocast(args):
            if args.protocol == "linear":
                loss = model.loss(*x.chunk(2))
            else:
                loss = cross_entropy(model(x), y)
        (loss / number).backward()
    sent = [p.grad for name, p in model.named_parameters() if name in travelling and p.grad is not None]
    return torch.cat([grad.flatten() for grad in sent])


def mutual_information(a: Data, b: Data, size: int = 32, seed: int = 0) -> tuple[float, float]:
    """FedGaLA's Lemma 1, Eq. (3), in nats: -1/2 sum_f log(1 - rho_f^2) over the features f of pairs of images
    of two domains, and what it is by chance.

    Features are the pixels at `size` x `size`. A pair is two images of the same class, as many as the smaller
    domain of a class has; rho_f is the correlation of feature f over the pairs. By chance: the mean over five
    random pairings of the same images.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = {}  # of each class the images of the smaller domain
    for c in a.labels.unique():
        counts[int(c)] = min(int((a.labels == c).sum()), int((b.labels == c).sum()))
    x, y = pixels(a, counts, generator, size), pixels(b, counts, generator, size)
    if len(x) < 8:
        raise UserError(f"two domains have {len(x)} pairs of images of the same class; the mutual "
                        f"information needs at least 8", 2)
    shuffled = [y[torch.randperm(len(y), generator=generator)] for _ in range(5)]
    return information(x, y), float(np.mean([information(x, other) for other in shuffled]))


def information(x: Tensor, y: Tensor) -> float:
    """-1/2 sum_f log(1 - rho_f^2) of features x and y [n, F] over their n pairs."""
    covariance = ((x - x.mean(0)) * (y - y.mean(0))).mean(0)
    rho = covariance / (x.std(0, correction=0) * y.std(0, correction=0)).clamp(min=1e-12)
    return float(-0.5 * torch.log1p(-rho.square().clamp(max=1 - 1e-12)).sum())


def pixels(part: Data, counts: dict[int, int], generator: torch.Generator, size: int) -> Tensor:
    """Random images of `part`, so many of each class, as features float64 [n, C * size * size] in [0, 1]."""
    features = []
    for c, n in counts.items():
        of_class = (part.labels.cpu() == c).nonzero()[:, 0]
        drawn = of_class[torch.randperm(len(of_class), generator=generator)[:n]]
        x, _ = part.batch(drawn.to(part.index.device))
        features.append(interpolate(x.cpu(), (size, size), mode="area").flatten(1).double())
    return torch.cat(features)


def draw_gradients(path, runs: list[dict]) -> None:
    """FedGaLA, Fig. 2(a): the gradients' covariance against the mutual information, a point for each pair of
    domains."""
    panel = new_panel(5.4, 4.2)
    for run in runs:
        points = [(pair["information"], pair["covariance"]) for pair in run["pairs"].values()]
        panel.scatter(*zip(*points), s=36, label=run["method"])
    panel.set(xlabel="mutual information of the images, Eq. (3) (nats)", ylabel="covariance of the gradients")
    panel.legend(fontsize=8)
    write_figure(path, panel.figure)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, default=16, help="number of batches for the gradient of a "
                                                                "domain [16]")


def show(flags) -> list[dict]:
    """A table, the figure, and the numbers."""
    if flags.batches < 1:
        raise UserError(f"--batches is {flags.batches}; it must be at least 1", 2)
    runs, table = [], []
    for run in all_rebuilt(flags):
        found = gradient_pairs(run, flags.batches)
        runs.append(found)
        for domains, pair in found["pairs"].items():
            table.append([run.label, domains, *pair.values()])
    if flags.out:
        draw_gradients(flags.out, runs)
    head = ["method", "domains", "covariance", "cosine", "information (nats)", "by chance"]
    print(tabulate(table, head, floatfmt=("", "", ".3e", ".3f", ".1f", ".1f")))
    return runs
