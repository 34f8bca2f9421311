"""What is measured of a classifier on some images."""

from __future__ import annotations

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
