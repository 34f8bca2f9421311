"""The linear evaluation of a representation: one linear layer on frozen features (FedGaLA, Sec. 4 and App. B.3).

A share of the target's labels trains the layer, with Adam and cross-entropy; the rest of the images tests it. The share is
drawn anew for each seed, class by class; a smaller share is part of a larger one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from basics import Stop


def ratios(text: str) -> list[float]:
    """'0.1/0.3' -> [0.1, 0.3]; each is between 0 and 1, none comes twice."""
    try:
        found = [float(r) for r in text.split("/")]
        if not all(0 < r < 1 for r in found) or len(set(found)) < len(found):
            raise ValueError
    except ValueError:
        raise Stop(f"--label-ratio is {text}; expected shares between 0 and 1, each once, such as 0.1/0.3", 2)
    return found


def stratified(labels: Tensor, ratio: float, name: str = "the target", seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows to fit and rows to test: of each class a share `ratio`, rounded, at least one image, for the fit; labels [N]."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for c in labels.unique():
        rows = order[labels[order] == c]
        chosen[rows[:max(1, round(ratio * len(rows)))]] = True
    if chosen.all():
        raise Stop(f"{name} has {len(labels)} images, none of which is left to test with {ratio:g} of the labels: lower "
                   f"--label-ratio, or raise --limit", 2)
    return chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0]


def fit(z: Tensor, y: Tensor, classes: int, seed: int, *, lr: float, epochs: int, batch: int) -> nn.Linear:
    """The linear layer after `epochs` epochs of Adam on features z [n, D] and labels y [n], in batches of a new order each."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(z.shape[1], classes)
    with torch.no_grad():  # nn.Linear's own distribution, from this generator
        for p in layer.parameters():
            p.uniform_(-z.shape[1] ** -0.5, z.shape[1] ** -0.5, generator=generator)
    opt = torch.optim.Adam(layer.parameters(), lr=lr, fused=True)
    for _ in range(epochs):
        for i in torch.randperm(len(z), generator=generator).split(batch):
            opt.zero_grad()
            cross_entropy(layer(z[i]), y[i]).backward()
            opt.step()
    return layer


def accuracy(z: Tensor, y: Tensor, classes: int, ratio: float, seed: int, **how) -> float:
    """The share of the test rows that a layer fitted to `ratio` of the labels classifies correctly; z [N, D], y [N]."""
    rows, rest = stratified(y, ratio, seed=seed)
    layer = fit(z[rows], y[rows], classes, seed, **how)
    with torch.no_grad():
        return float((layer(z[rest]).argmax(1) == y[rest]).double().mean())
