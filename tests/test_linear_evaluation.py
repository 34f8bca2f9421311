"""The linear evaluation: which labels are fitted, the classifier, and what it is tested on."""

from plumbing import linear
from plumbing.errors import Stop
from plumbing.settings import LinearArgs, ratios

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import cross_entropy, one_hot


def test_stratified():
    """Of each class the share, rounded, at least one; a smaller share is part of a larger one; each seed
    draws its own."""
    counts = [100, 37, 4, 2, 55]
    labels = torch.arange(5).repeat_interleave(torch.tensor(counts))[torch.randperm(198)]
    for ratio in (0.1, 0.3, 0.6):
        rows, rest = linear.stratified(labels, ratio, seed=3)
        assert sorted([*rows.tolist(), *rest.tolist()]) == list(range(198))
        expected = [max(1, round(ratio * n)) for n in counts]
        assert labels[rows].bincount(minlength=5).tolist() == expected

    def fitted(ratio, seed) -> set[int]:
        return set(linear.stratified(labels, ratio, seed=seed)[0].tolist())

    assert fitted(0.1, seed=3) < fitted(0.3, seed=3)
    assert fitted(0.1, seed=3) != fitted(0.1, seed=4)
    with pytest.raises(Stop, match="none of which is left"):
        linear.stratified(torch.arange(3), 0.5)


def test_fit_reaches_the_optimum_of_logistic_regression():
    """The loss after many epochs is that of scikit-learn's exact solution."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(200, 5))
    y = (z @ rng.normal(size=(5, 3)) + rng.normal(size=(200, 3))).argmax(1)
    best = LogisticRegression(C=1e9, max_iter=5000).fit(z, y)
    exact = -np.log(best.predict_proba(z)[np.arange(200), y]).mean()
    z, y = torch.tensor(z).float(), torch.tensor(y)
    how = dict(lr=0.03, epochs=600, batch=200)
    layer = linear.fit_linear(z, y, 3, 0, **how)
    assert exact - 1e-6 < cross_entropy(layer(z), y).item() < exact + 1e-3
    assert torch.equal(layer.weight, linear.fit_linear(z, y, 3, 0, **how).weight)


def test_accuracy_is_of_the_rest():
    """Classes far apart are all found; labels that say nothing about z are not, though the fitted part is
    learned by heart."""
    y = torch.arange(400) % 4
    z = one_hot(y, 4).float() + 0.1 * torch.randn(400, 4)
    args = LinearArgs(linear_lr=0.1, linear_epochs=100, linear_batch=64)
    assert linear.accuracies(z, y, 4, args, 0)["0.1"] == 1
    assert linear.accuracies(torch.randn(400, 300), y, 4, args, 0)["0.3"] < 0.4


def test_ratios():
    assert ratios("0.1/0.3") == [0.1, 0.3]
    for wrong in ("", "0.1/", "1", "0", "a", "0.2/0.2", "nan"):
        with pytest.raises(Stop, match="--label-ratio"):
            ratios(wrong)
