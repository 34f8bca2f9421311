"""What scikit-learn measures of a classifier on some images."""

from __future__ import annotations

import warnings

import numpy as np
from torch import Tensor

METRICS = ("accuracy", "balanced", "f1", "auc")  # by which the best round may be chosen


def scores(p: Tensor, y: Tensor) -> dict:
    """The probabilities p [N, C] of all classes and the labels y [N] -> accuracy, balanced accuracy,
    macro-F1, AUC (of several classes the mean of one against the rest), the recall of each class and the
    confusion matrix, a row for each true class. None where a class without images leaves it undefined."""
    from sklearn import metrics  # a second, which --help does not wait for
    p, y = p.double().numpy(), y.numpy()
    classes, predicted = range(p.shape[1]), p.argmax(1)
    matrix = metrics.confusion_matrix(y, predicted, labels=classes)
    there = matrix.sum(1) > 0
    auc = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that are predicted and not there
        recall = metrics.recall_score(y, predicted, labels=classes, average=None, zero_division=0)
        f1 = metrics.f1_score(y, predicted, average="macro", zero_division=0)
        balanced = metrics.balanced_accuracy_score(y, predicted)
    if there.all():
        of_class = p[:, 1] if len(classes) == 2 else p / p.sum(1, keepdims=True)
        auc = float(metrics.roc_auc_score(y, of_class, multi_class="ovr"))
    return {"accuracy": float(np.mean(predicted == y)), "balanced": float(balanced), "f1": float(f1),
            "auc": auc, "recall": [float(r) if has else None for r, has in zip(recall, there)],
            "confusion": matrix.tolist()}
