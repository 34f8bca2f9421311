"""What is measured of a classifier on some images."""

from __future__ import annotations

from collections.abc import Callable

from plumbing.run.errors import UserError

import numpy as np
import torch
from torch import Tensor

METRICS = ("accuracy", "balanced", "f1", "auc")  # by which the best round may be chosen


def scores(p: Tensor, y: Tensor) -> dict:
    """The probabilities p [N, C] of all classes and the labels y [N] -> accuracy, balanced accuracy,
    macro-F1, AUC (of several classes the mean of one against the rest), the recall of each class and the
    confusion matrix, a row for each true class. None where a class without images leaves it undefined."""
    classes = p.shape[1]
    confusion = torch.bincount(classes * y + p.argmax(1), minlength=classes**2).view(classes, classes)
    found, there, named = confusion.diagonal(), confusion.sum(1), confusion.sum(0)  # [C] each
    recall = found.double() / there  # NaN for a class without images
    f1 = 2 * found.double() / (there + named)  # NaN for a class that nobody has and nobody names
    area = None
    if there.all():
        areas = [area_under_curve(p[:, c].numpy(), (y == c).numpy()) for c in range(classes)]
        area = areas[1] if classes == 2 else sum(areas) / classes
    return {"accuracy": found.sum().item() / len(y), "balanced": recall.nanmean().item(),
            "f1": f1.nanmean().item(), "auc": area,
            "recall": [None if np.isnan(r) else r for r in recall.tolist()],
            "confusion": confusion.tolist()}


def area_under_curve(p: np.ndarray, is_class: np.ndarray) -> float:
    """AUC: how often an image of a class has a higher probability p [N] of it than an image of another class;
    equal probabilities count half."""
    others = np.sort(p[~is_class])
    below = np.searchsorted(others, p[is_class], "left")
    below_or_equal = np.searchsorted(others, p[is_class], "right")
    return float((below + below_or_equal).mean() / 2 / len(others))


def joined(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The first ones and the second ones, each as one tensor."""
    return torch.cat([first for first, _ in pairs]), torch.cat([second for _, second in pairs])


def as_probabilities(outputs: Tensor) -> Tensor:
    """Logits [B, C], or an ensemble's mean probabilities (baselines/local.py) -> float32, on the CPU."""
    outputs = outputs.float().cpu()
    sums = outputs.sum(1)
    if (outputs >= 0).all() and torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
        return outputs
    return outputs.softmax(1)


LACKS_A_CLASS = ("--metric auc needs images of every class to validate with, and {} has none: choose another "
                 "metric, a larger share for validation in --split, or parts in split.csv")


def check_classes(clients: list, classes: tuple[str, ...], settings) -> None:
    """Stop if the clients (ClientData) cannot learn, or cannot be validated, for want of classes."""
    trained, validated = set(), set()
    for client in clients:
        trained.update(client.train.labels.tolist())
        validated.update(client.val.labels.tolist())
    if settings.protocol != "linear" and len(trained) < 2:
        raise UserError(f"the training images of {settings.dataset} are of one class: nothing can be learned")
    lacking = [name for c, name in enumerate(classes) if c not in validated]
    if settings.metric == "auc" and lacking:
        raise UserError(f"seed {settings.seed}: {LACKS_A_CLASS.format(', '.join(lacking))}", 2)


def final_measures(fed, progress, outputs: Callable) -> dict:
    """{"best": {client or target: the `scores` of its test part}, "last": ...} of these rounds; empty without
    labels, or if the clients are on other machines. outputs(fed, k, t): probabilities and labels."""
    if fed.settings.protocol == "linear" or not fed.clients:
        return {}
    last = best = {fed.names[k]: scores(*outputs(fed, k, progress.t)) for k in fed.clients}
    saved = progress.best()
    if saved["round"] < progress.t:
        fed.restore(saved)
        best = {fed.names[k]: scores(*outputs(fed, k, saved["round"])) for k in fed.clients}
    progress.lap("evaluate")
    return {"best": best, "last": last}


def validation_score(metric: str, outputs: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """What --metric says of the validation images of all clients together, by each client's probabilities
    and labels, and their mean cross-entropy, by which equals are told apart."""
    p, y = joined(outputs)
    score = scores(p, y)[metric]
    if score is None:
        raise UserError(LACKS_A_CLASS.format("one"), 2)
    of_true = p[torch.arange(len(y)), y].clamp(min=1e-12)
    return {"metric": score, "loss": float(-of_true.log().mean())}
