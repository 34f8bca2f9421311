"""What is measured of a classifier on some images."""

from __future__ import annotations

import torch
from torch import Tensor

METRICS = ("accuracy", "balanced", "f1", "auc")  # by which the best round may be chosen


def scores(p: Tensor, y: Tensor) -> dict:
    """The probabilities p [N, C] of all classes and the labels y [N] -> accuracy, balanced accuracy,
    macro-F1, AUC (of several classes the mean of one against the rest), the recall of each class and the
    confusion matrix, a row for each true class. None where a class without images leaves it undefined."""
    classes = p.shape[1]
    pairs = torch.bincount(classes * y + p.argmax(1), minlength=classes ** 2)
    matrix = pairs.view(classes, classes).double()  # [true, predicted]
    hits, images, predicted = matrix.diag(), matrix.sum(1), matrix.sum(0)
    there = images > 0
    recall = hits / images
    f1 = (2 * hits / (images + predicted))[images + predicted > 0]
    area = None
    if there.all():
        from sklearn.metrics import roc_auc_score  # a second, which --help does not wait for
        p = p.double() / p.double().sum(1, keepdim=True)
        area = float(roc_auc_score(y.numpy(), (p[:, 1] if classes == 2 else p).numpy(), multi_class="ovr"))
    return {"accuracy": float(hits.sum() / len(y)), "balanced": float(recall[there].mean()),
            "f1": float(f1.mean()), "auc": area,
            "recall": [float(r) if has else None for r, has in zip(recall, there)],
            "confusion": matrix.long().tolist()}


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
