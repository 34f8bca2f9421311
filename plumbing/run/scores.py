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
    from sklearn import metrics  # a second, which --help does not wait for
    y, classes, predicted = y.numpy(), range(p.shape[1]), p.argmax(1).numpy()
    recall = metrics.recall_score(y, predicted, labels=classes, average=None, zero_division=np.nan)
    area = None
    if not np.isnan(recall).any():
        p = p.double() / p.double().sum(1, keepdim=True)
        area = float(metrics.roc_auc_score(y, p[:, 1] if len(classes) == 2 else p, multi_class="ovr"))
    return {"accuracy": metrics.accuracy_score(y, predicted), "balanced": float(np.nanmean(recall)),
            "f1": metrics.f1_score(y, predicted, average="macro"), "auc": area,
            "recall": [None if np.isnan(r) else r for r in recall.tolist()],
            "confusion": metrics.confusion_matrix(y, predicted, labels=classes).tolist()}


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
