"""Representations by t-SNE: of a source and of the target domain (FedSR, App. C.2, Fig. 1), or of all domains
together (FDSE, Fig. 4)."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from common import seed_all
from plumbing.errors import Stop
from reproduce.drawing import new_figure, write_figure
from reproduce.measures.finished import Rebuilt, all_rebuilt
from reproduce.measures.pad import proxy_a_distance, represented

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor

SHAPES = ["o", "^", "s", "D", "v", "P"]  # of the domains


@dataclass
class Points:
    """The representations of a domain's images, and their places in the figure."""

    domain: str
    z: Tensor  # [N, D]
    y: Tensor  # [N], their classes
    places: np.ndarray | None = None  # [N, 2]

    def as_json(self) -> dict:
        return {"place": np.round(self.places.astype(float), 3).tolist(), "class": self.y.tolist()}


@dataclass
class Space:
    """What a run makes of some domains: one t-SNE."""

    method: str
    run: str  # dataset, scale and seed
    domains: list[Points]
    classes: tuple[str, ...]  # their names


def space_of(run: Rebuilt, part: str, most: int) -> Space:
    """The representations of all domains by a run; at most `most` images of each, drawn by the run's seed."""
    domains, args = [], run.args
    for client, model in run.tested():
        name = client.data.name
        z, y = represented(client, model, args, part)
        keep = torch.randperm(len(y), generator=seed_all(args.seed, "figure", name))[:most]
        domains.append(Points(name, z[keep], y[keep]))
    words = f"{args.dataset}, {args.scale} scale, seed {args.seed}"
    return Space(run.label, words, domains, run.federation.classes)


def pair_of(run: Rebuilt, space: Space, source: str, target: str) -> Space:
    """Source and target alone. Without a name they are the run's first client, and the domain that it has
    left out."""
    fed = run.federation
    source = source or fed.names[0]
    if not target and fed.has_target:
        target = fed.names[fed.K]
    by_name = {points.domain: points for points in space.domains}
    for flag, domain in (("--source", source), ("--target", target)):
        if domain not in by_name:
            raise Stop(f"{run.folder}: {flag} is {domain!r}; its domains are {', '.join(by_name)}", 2)
    if source == target:
        raise Stop(f"{run.folder}: source and target are both {source}: give another one of them", 2)
    return Space(space.method, space.run, [by_name[source], by_name[target]], space.classes)


def embed(space: Space) -> None:
    """One t-SNE of all domains together, so that equal places are equal representations."""
    from sklearn.manifold import TSNE
    z = torch.cat([points.z for points in space.domains])
    if len(z) < 5:
        raise Stop(f"a t-SNE needs at least 5 images; there are {len(z)}", 2)
    tsne = TSNE(init="pca", perplexity=min(30, (len(z) - 1) / 3), random_state=0)
    sizes = [len(points.y) for points in space.domains]
    for points, places in zip(space.domains, np.split(tsne.fit_transform(z.numpy()), np.cumsum(sizes)[:-1])):
        points.places = places


def silhouettes(domains: list[Points]) -> tuple[float, float]:
    """The mean silhouette of the representations by class, and by domain: 1 where groups lie apart, 0 where
    they overlap."""
    from sklearn.metrics import silhouette_score
    z = torch.cat([points.z for points in domains]).numpy()
    y = torch.cat([points.y for points in domains]).numpy()
    of_domain = np.repeat(np.arange(len(domains)), [len(points.y) for points in domains])
    return float(silhouette_score(z, y)), float(silhouette_score(z, of_domain))


# The figures


def draw_pairs(path, pairs: list[Space]) -> None:
    """FedSR, App. C.2, Fig. 1: the representations of a source domain (left) and of the target (right), a row
    for each run. Its two panels have the same axes; a t-SNE's have no unit and get no numbers."""
    figure = new_figure(8.2, 3.7 * len(pairs))
    colours = colours_of(pairs)
    for pair, panels in zip(pairs, figure.subplots(len(pairs), 2, squeeze=False)):
        both = np.concatenate([points.places for points in pair.domains])
        middle = (both.max(0) + both.min(0)) / 2
        reach = 0.54 * (both.max(0) - both.min(0)).max()
        for panel, points, role in zip(panels, pair.domains, ("source", "target")):
            plot_points(panel, points, colours)
            panel.set_title(f"{pair.method}: {points.domain} ({role})", fontsize=10)
            panel.set(xticks=[], yticks=[], aspect="equal")
            panel.set_xlim(middle[0] - reach, middle[0] + reach)
            panel.set_ylim(middle[1] - reach, middle[1] + reach)
    name_classes(figure, colours, pairs[0].classes)
    write_figure(path, figure)


def draw_together(path, spaces: list[Space]) -> None:
    """FDSE, Fig. 4: a panel for each run with all its domains; colours are classes, shapes are domains."""
    columns = min(2, len(spaces))
    figure = new_figure(4.6 * columns + 1.4, 4.2 * math.ceil(len(spaces) / columns))
    panels = figure.subplots(math.ceil(len(spaces) / columns), columns, squeeze=False).flatten()
    colours = colours_of(spaces)
    for space, panel in zip(spaces, panels):
        for points, shape in zip(space.domains, SHAPES * len(space.domains)):
            plot_points(panel, points, colours, marker=shape, s=14)
            panel.scatter([], [], c="0.3", marker=shape, s=22, label=points.domain)
        panel.set_title(f"{space.method}: {space.run}", fontsize=10)
        panel.set(xticks=[], yticks=[])
        panel.legend(fontsize=7)
    for panel in panels[len(spaces):]:
        panel.set_visible(False)
    name_classes(figure, colours, spaces[0].classes)
    write_figure(path, figure)


def plot_points(panel, points: Points, colours: list, **style) -> None:
    """A domain's points in the colours of their classes, in a random order: else the last class would lie
    over all others."""
    order = np.random.default_rng(0).permutation(len(points.y))
    of_points = [colours[int(c)] for c in points.y[order]]
    style = dict(s=7, alpha=0.75, linewidths=0) | style
    panel.scatter(*points.places[order].T, c=of_points, **style)


def colours_of(spaces: list[Space]) -> list:
    """A colour for each class."""
    import matplotlib
    count = max(len(space.classes) for space in spaces)
    if count <= 20:
        return list(matplotlib.colormaps["tab10" if count <= 10 else "tab20"].colors)
    return [matplotlib.colormaps["turbo"](c / (count - 1)) for c in range(count)]


def name_classes(figure, colours: list, classes: tuple[str, ...]) -> None:
    """A legend of the classes beside the panels, if they are few."""
    if len(classes) > 20:
        return
    from matplotlib.lines import Line2D
    marks = []
    for colour, name in zip(colours, classes):
        marks.append(Line2D([], [], linestyle="", marker="o", color=colour, label=name))
    figure.legend(handles=marks, loc="outside right center", title="class", fontsize=8, frameon=False)


# The command


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", default="", help="domain on the left, or all: one panel of all domains "
                                                     "for each run [the first client]")
    parser.add_argument("--target", default="", help="domain on the right [the one that was left out]")
    parser.add_argument("--images", type=int, default=1000, help="most images of each domain [1000]")
    parser.add_argument("--part", default="all", choices=("test", "all"),
                        help="images of each client: its test images, or all [all]")


def show(flags) -> dict:
    """The figure, a table, and the numbers: the proxy A-distance of source and target, or how well classes
    and domains stand apart."""
    together, spaces, table, runs = flags.source == "all", [], [], []
    if flags.images < 4:
        raise Stop(f"--images is {flags.images}; it must be at least 4", 2)
    for run in all_rebuilt(flags):
        space = space_of(run, flags.part, flags.images)
        if not together:
            space = pair_of(run, space, flags.source, flags.target)
        embed(space)
        spaces.append(space)
        if together:
            by_class, by_domain = silhouettes(space.domains)
            measured = {"silhouette_of_classes": by_class, "silhouette_of_domains": by_domain}
        else:
            source, target = space.domains
            measured = {"source": source.domain, "target": target.domain,
                        "pad": proxy_a_distance(source.z, target.z)}
        table.append([run.label, space.run, *measured.values()])
        points = {points.domain: points.as_json() for points in space.domains}
        runs.append({"folder": run.folder, "method": run.label, "run": space.run, **measured,
                     "points": points})
    if len({space.classes for space in spaces}) > 1:
        raise Stop("the runs have different classes: draw those of one dataset together", 2)
    out = flags.out or str(Path(flags.folders[0]) / "tsne.png")
    (draw_together if together else draw_pairs)(out, spaces)
    print(tabulate(table, ["method", "run", *measured], floatfmt=".3f"))
    return {"runs": runs}
