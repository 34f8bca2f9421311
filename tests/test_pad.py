"""Representations and proxy A-distances, of sets whose distance is known and of finished runs."""

from plumbing.errors import Stop
from reproduce.measures.finished import rebuilt
from reproduce.measures.pad import pad_table, proxy_a_distance
from tests.finished_runs import labelled_runs

import numpy as np
import pytest
import torch


@pytest.fixture
def runs(tmp_path_factory):
    return labelled_runs(tmp_path_factory)


def gaussians(n, dim, distance, seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, n, dim))
    b[:, 0] += distance
    return a, b


def test_pad_of_known_sets():
    same = [proxy_a_distance(*gaussians(4000, 4, 0, s), seed=s) for s in range(4)]
    assert abs(np.mean(same)) < 0.06 and max(map(abs, same)) < 0.15
    assert proxy_a_distance(*gaussians(200, 4, 40)) == 2
    # unit Gaussians at a distance of 2: the best linear rule errs with probability Phi(-1) = 0.15866
    near = [proxy_a_distance(*gaussians(4000, 4, 2, s), seed=s) for s in range(4)]
    assert abs(np.mean(near) - 2 * (1 - 2 * 0.15866)) < 0.04


def test_pad_is_balanced_repeats_and_takes_tensors():
    a, b = gaussians(3000, 3, 0)
    assert abs(proxy_a_distance(a, b[:300])) < 0.35  # unbalanced sets would give a test error of 1/11
    assert abs(proxy_a_distance(a[:300], b)) < 0.35
    first = proxy_a_distance(a, b, 3)
    assert first == proxy_a_distance(torch.from_numpy(a), torch.from_numpy(b), 3)
    assert first != proxy_a_distance(a, b, 4)
    scale = [1, 1e6, 1e-6]
    assert proxy_a_distance(a * scale + 7, b * scale + 7, 3) == pytest.approx(first, abs=1e-9)
    with pytest.raises(Stop, match="needs 4 images"):
        proxy_a_distance(a[:3], b)


def test_pad_table(runs):
    table = pad_table(rebuilt(runs / "fdse-lodo"), part="all")
    assert len(table["pairs"]) == 10 and len(table["global"]) == 5
    assert "d0" not in table["global"]  # the target is no client
    assert table["mean_pairs"] == pytest.approx(np.mean(list(table["pairs"].values())))
    assert table["method"] == "FDSE"
