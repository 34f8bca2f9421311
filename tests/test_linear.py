"""The linear evaluation."""

import linear
import numpy as np
import pytest
import torch
from basics import Stop
from sklearn.linear_model import LogisticRegression


def test_stratified():
    """Of each class the share, rounded, at least one; a smaller share is part of a larger one; each seed draws its own."""
    labels = torch.arange(5).repeat_interleave(torch.tensor([100, 37, 4, 2, 55]))[torch.randperm(198)]
    for ratio in (0.1, 0.3, 0.6):
        rows, rest = linear.stratified(labels, ratio, seed=3)
        assert sorted([*rows.tolist(), *rest.tolist()]) == list(range(198))
        assert labels[rows].bincount(minlength=5).tolist() == [max(1, round(ratio * n)) for n in (100, 37, 4, 2, 55)]
    small, large = (set(linear.stratified(labels, r, seed=3)[0].tolist()) for r in (0.1, 0.3))
    assert small < large and small != set(linear.stratified(labels, 0.1, seed=4)[0].tolist())
    with pytest.raises(Stop, match="none of which is left"):
        linear.stratified(torch.arange(3), 0.5)


def test_fit_reaches_the_optimum_of_logistic_regression():
    """The loss after many epochs is that of scikit-learn's exact solution."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(200, 5))
    y = (z @ rng.normal(size=(5, 3)) + rng.normal(size=(200, 3))).argmax(1)
    best = LogisticRegression(C=1e9, max_iter=5000).fit(z, y)
    exact = -np.log(best.predict_proba(z)[np.arange(200), y]).mean()
    layer = linear.fit(torch.tensor(z).float(), torch.tensor(y), 3, 0, lr=0.03, epochs=600, batch=200)
    found = torch.nn.functional.cross_entropy(layer(torch.tensor(z).float()), torch.tensor(y))
    assert exact - 1e-6 < found.item() < exact + 1e-3
    same = linear.fit(torch.tensor(z).float(), torch.tensor(y), 3, 0, lr=0.03, epochs=600, batch=200)
    assert torch.equal(layer.weight, same.weight)


def test_accuracy_is_of_the_rest():
    """Classes far apart are all found; labels that say nothing about z are not, though the fitted part is learned by heart."""
    y = torch.arange(400) % 4
    z = torch.nn.functional.one_hot(y, 4).float() + 0.1 * torch.randn(400, 4)
    how = dict(lr=0.1, epochs=100, batch=64)
    assert linear.accuracy(z, y, 4, 0.1, 0, **how) == 1
    assert linear.accuracy(torch.randn(400, 300), y, 4, 0.3, 0, **how) < 0.4


def test_ratios():
    assert linear.ratios("0.1/0.3") == [0.1, 0.3]
    for wrong in ("", "0.1/", "1", "0", "a", "0.2/0.2", "nan"):
        with pytest.raises(Stop, match="--label-ratio"):
            linear.ratios(wrong)
