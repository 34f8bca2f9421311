"""Representations by t-SNE: of two domains (FedSR, App. C.2, Fig. 1), or of all (FDSE, Fig. 4)."""

from __future__ import annotations

import argparse
from pathlib import Path

from common import seed_all
from plumbing.errors import UserError
from plumbing.results import empty_figure
from reproduce.drawing import write_figure
from reproduce.measures.finished import Rebuilt, all_rebuilt
from reproduce.measures.pad import represented

import numpy as np
import torch
from torch import Tensor

SHAPES = "o^sDvPX*<>"  # of the domains
Points = dict[str, tuple[Tensor, Tensor]]  # {domain: (representations [N, D], classes [N])}


def points_of(run: Rebuilt, domains: list[str], part: str, most: int) -> Points:
    """The representations of some domains by a run, of all without names; at most `most` images of each."""
    points, names = {}, run.federation.names
    for name in set(domains) - set(names):
        raise UserError(f"{run.folder}: --domains names {name!r}; its domains are {', '.join(names)}", 2)
    for client, model in run.tested():
        name = client.data.name
        if not domains or name in domains:
            z, y = represented(client, model, run.args, part)
            keep = torch.randperm(len(y), generator=seed_all(run.args.seed, "figure", name))[:most]
            points[name] = z[keep], y[keep]
    return points


def embed(points: Points) -> dict[str, np.ndarray]:
    """{domain: places [N, 2]} by one t-SNE of all, so that equal places are equal representations."""
    from sklearn.manifold import TSNE
    z = torch.cat([z for z, _ in points.values()])
    if len(z) < 5:
        raise UserError(f"a t-SNE needs at least 5 images; there are {len(z)}", 2)
    places = TSNE(init="pca", perplexity=min(30, (len(z) - 1) / 3), random_state=0).fit_transform(z.numpy())
    ends = np.cumsum([len(y) for _, y in points.values()])
    return dict(zip(points, np.split(places, ends[:-1])))


def draw(path, runs: list[Rebuilt], points: list[Points], places: list[dict[str, np.ndarray]]) -> None:
    """A panel for each run; colours are classes, shapes are domains. A t-SNE's axes have no unit."""
    import matplotlib
    figure = empty_figure((4.8 * len(runs) + 1.2, 4.4))
    panels = figure.subplots(1, len(runs), squeeze=False)[0]
    classes = runs[0].federation.dataset.classes
    colours = matplotlib.colormaps["tab10"]
    if len(classes) > 10:
        colours = matplotlib.colormaps["turbo"].resampled(len(classes))
    for run, panel, of_run, at in zip(runs, panels, points, places):
        for i, (domain, (_, y)) in enumerate(of_run.items()):
            shape = SHAPES[i % len(SHAPES)]
            order = np.random.default_rng(0).permutation(len(y))  # else the last class lies over all others
            panel.scatter(*at[domain][order].T, c=colours(y.numpy()[order]), marker=shape, s=12, alpha=0.75,
                          linewidths=0)
            panel.scatter([], [], c="0.3", marker=shape, s=22, label=domain)
        panel.set_title(f"{run.label}: {run.args.dataset}, seed {run.args.seed}", fontsize=10)
        panel.set(xticks=[], yticks=[])
        panel.legend(fontsize=7)
    if len(classes) <= 20:
        marks = [panels[0].scatter([], [], color=colours(i)) for i in range(len(classes))]
        figure.legend(marks, classes, loc="outside right center", title="class", fontsize=8, frameon=False)
    write_figure(path, figure)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--domains", default="", help="domains to draw, such as m15,m0 [all]")
    parser.add_argument("--images", type=int, default=1000, help="largest number of images from each domain "
                                                                 "[1000]")
    parser.add_argument("--part", default="all", choices=("test", "all"),
                        help="images of each client: its test images, or all [all]")


def show(flags) -> list[dict]:
    """The figure, and what it shows."""
    if flags.images < 4:
        raise UserError(f"--images is {flags.images}; it must be at least 4", 2)
    domains, runs = flags.domains.split(",") if flags.domains else [], all_rebuilt(flags)
    if len({run.federation.dataset.classes for run in runs}) > 1:
        raise UserError("the runs have different classes: draw those of one dataset together", 2)
    points = [points_of(run, domains, flags.part, flags.images) for run in runs]
    out = flags.out or str(Path(flags.folders[0]) / "tsne.png")
    draw(out, runs, points, [embed(of_run) for of_run in points])
    print(f"figure in {out}")
    return [run.heading() | {"domains": list(of_run)} for run, of_run in zip(runs, points)]
