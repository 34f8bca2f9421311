"""The linear evaluation of a representation (FedGaLA, Sec. 4 and App. B.3): a linear classifier is fitted to
a share of the target's labels, on the frozen network's z, and tested on the rest.

`fed` is a Federation. common.py hands over what is its own: `fit` and `start`, what clients answer with
(fit_client, start_client), `representations`, which gives z, and `batches`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from plumbing.run.errors import UserError
from plumbing.run.seeding import seed_all
from plumbing.run.settings import LinearArgs, ratios

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import update_bn


def evaluate(fed, fit: Callable, t: int, also: dict | None = None) -> dict:
    """The accuracy on each target of a linear classifier on the frozen network, for each share of labels;
    `target` is the mean over the targets with the first share."""
    targets = range(fed.K, len(fed.names))
    answers = fed.test(fit, targets, t, also)
    if len(answers) < len(targets):
        return {"untested": [fed.names[k] for k in targets if k not in answers]}
    by_client = {fed.names[k]: by_ratio for k, (_, by_ratio) in answers.items()}
    first = str(ratios(fed.settings.label_ratio)[0])
    mean = sum(by_ratio[first] for by_ratio in by_client.values()) / len(by_client)
    return {"target": mean, "linear": by_client}


def evaluate_start(fed, fit: Callable, start: Callable) -> dict:
    """What a run without labels has before its first step: the linear evaluation of the network as it starts,
    and the loss of features that say nothing.

    A network that has not been trained has no statistics of batch normalization. Here it has those that a
    round's first epoch would leave if no weight moved, averaged over the clients by images.
    """
    answers, mean = fed.test(start, range(fed.K), 0), {}
    for k, (payload, _) in answers.items():
        share = fed.sizes[k] / sum(fed.sizes)
        for name, v in payload["statistics"].items():
            mean[name] = mean[name].add_(v, alpha=share) if k else v * share
    entry = evaluate(fed, fit, 0, also={"statistics": mean})
    entry["chance_loss"] = float(np.mean([numbers["chance_loss"] for _, numbers in answers.values()]))
    fed.lap("evaluate")
    return entry


def fit(fed, k: int, down: dict, representations: Callable) -> dict[str, float]:
    """The accuracies of linear classifiers on the frozen network of target k, for each share of its labels.
    `statistics` in the download are put instead of the network's own."""
    client, settings = fed.clients[k], fed.settings
    model = client.model({part: v for part, v in down.items() if part != "statistics"})
    model.load_state_dict(down.get("statistics", {}), strict=False)
    z, y = representations(model, client.data.test, settings)
    seed = seed_all(settings.seed, "linear", fed.dataset.seed_name(client.data.name)).initial_seed()

    def view(rows: Tensor) -> Tensor:
        return representations(model, client.data.test, settings, rows)[0]

    augmented = view if settings.linear_views == "augmented" else None
    return accuracies(z, y, len(fed.dataset.classes), settings, seed, augmented)


@torch.no_grad()
def running_statistics(fed, k: int, down: dict, batches: Callable) -> dict[str, Tensor]:
    """The statistics of batch normalization: plain means over client k's batches of an epoch, in a network
    that stands still."""
    settings = dataclasses.replace(fed.settings, epochs=1)
    model = fed.clients[k].model(down)
    seed_all(settings.seed, "start", k)
    update_bn(batches(fed.clients[k].data.train, settings, 0, k), model)
    return {name: v.clone() for name, v in model.named_buffers() if "running_" in name}


def accuracies(z: Tensor, y: Tensor, classes: int, args: LinearArgs, seed: int,
               view: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
    """For each share of labels, as text, the accuracy on the rest; z [N, D], y [N]. With `view`, which gives
    z of a new view of the images in some rows, the classifier is fitted to these."""
    by_ratio = {}
    for ratio in ratios(args.label_ratio):
        rows, rest = stratified(y, ratio, seed=seed)
        seed_all(seed, "linear views", ratio)  # the same views in each evaluation
        layer = fit_linear(z[rows], y[rows], classes, seed, lr=args.linear_lr, epochs=args.linear_epochs,
                           batch=args.linear_batch, view=view, rows=rows)
        with torch.no_grad():
            by_ratio[str(ratio)] = float((layer(z[rest]).argmax(1) == y[rest]).double().mean())
    return by_ratio


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
        raise UserError(f"{name} has {len(labels)} images, none of which is left to test with {ratio:g} of "
                        "the labels: lower --label-ratio, or raise --limit", 2)
    return chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0]


def fit_linear(z: Tensor, y: Tensor, classes: int, seed: int, *, lr: float, epochs: int, batch: int,
               view: Callable[[Tensor], Tensor] | None = None, rows: Tensor | None = None) -> nn.Linear:
    """`epochs` epochs of Adam and cross-entropy on features z [n, D] and labels y [n], in batches of a new
    order each. With `view` a batch's features are those of new views of its images, whose `rows` are [n]."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(z.shape[1], classes)
    with torch.no_grad():  # nn.Linear's own distribution, from this generator
        for p in layer.parameters():
            p.uniform_(-z.shape[1] ** -0.5, z.shape[1] ** -0.5, generator=generator)
    opt = torch.optim.Adam(layer.parameters(), lr=lr, fused=True)
    for _ in range(epochs):
        for i in torch.randperm(len(z), generator=generator).split(batch):
            features = view(rows[i]) if view else z[i]
            opt.zero_grad()
            cross_entropy(layer(features), y[i]).backward()
            opt.step()
    return layer
