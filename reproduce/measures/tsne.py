"""Representations by t-SNE: of a source and of the target domain (FedSR, App. C.2, Fig. 1), or of all domains
together (FDSE, Fig. 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common import seed_all
from plumbing.errors import Stop
from reproduce.drawing import new_figure, write_figure
from reproduce.measures.finished import Rebuilt, labels, rebuilt
from reproduce.measures.pad import proxy_a_distance, represented

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor


SHAPES = ["o", "^", "s", "D", "v", "P"]  # of the domains


@dataclass
class Points:
    """The representations of a domain's images."""

    domain: str
    z: Tensor  # [N, D]
    y: Tensor  # [N], their classes


@dataclass
class Pair:
    """What a run makes of a source and of a target domain: a row of the figure."""

    method: str
    source: Points
    target: Points
    classes: tuple[str, ...]  # their names


def pick_domains(run: Rebuilt, name: str, source: str, target: str, part: str, most: int) -> Pair:
    """The representations of two domains by a run that the figure calls `name`; at most `most` images of
    each, drawn by the run's seed. Without a source it is the run's first client, without a target the domain
    that it has left out."""
    fed = run.federation
    source = source or fed.names[0]
    if not target and not fed.has_target:
        refuse_domain(run, "--target", "empty and the run left no domain out")
    target = target or fed.names[fed.K]
    for flag, domain in (("--source", source), ("--target", target)):
        if domain not in fed.names:
            refuse_domain(run, flag, domain)
    if source == target:
        raise Stop(f"{run.folder}: source and target are both {source}: give another --source or --target", 2)
    points = {}
    for client, model in run.tested():
        domain = client.data.name
        if domain in (source, target):
            z, y = represented(client, model, run.args, part)
            keep = torch.randperm(len(y), generator=seed_all(run.args.seed, "figure", domain))[:most]
            points[domain] = Points(domain, z[keep], y[keep])
    return Pair(name, points[source], points[target], fed.classes)


def refuse_domain(run: Rebuilt, flag: str, value: str) -> None:
    raise Stop(f"{run.folder}: {flag} is {value}; its domains are {', '.join(run.federation.names)}", 2)


def embed(a: Tensor, b: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """[N, D] and [M, D] -> [N, 2] and [M, 2]: one t-SNE of both together, so that equal places are equal
    representations."""
    flat = flattened(torch.cat([a, b]))
    return flat[:len(a)], flat[len(a):]


def flattened(z: Tensor) -> np.ndarray:
    """[N, D] -> [N, 2]: a t-SNE."""
    from sklearn.manifold import TSNE
    n = len(z)
    if n < 5:
        raise Stop(f"a t-SNE needs at least 5 images; there are {n}", 2)
    return TSNE(init="pca", perplexity=min(30, (n - 1) / 3), random_state=0).fit_transform(z.numpy())


def draw_tsne(path, pairs: list[Pair]) -> list[tuple[np.ndarray, np.ndarray]]:
    """FedSR, App. C.2, Fig. 1: the representations of a source domain (left) and of the target (right).

    A row for each run. Its two panels show one joint t-SNE of both domains, with the same axes; colours are
    classes, in all rows alike. The axes of a t-SNE have no unit and get no numbers. Returns the places of the
    points of each row.
    """
    count = 1 + max(int(torch.cat([pair.source.y, pair.target.y]).max()) for pair in pairs)
    colours = colours_of(count)
    figure = new_figure(8.2, 3.7 * len(pairs))
    panels = figure.subplots(len(pairs), 2, squeeze=False)
    embedded = []
    for pair, (left, right) in zip(pairs, panels):
        of_source, of_target = embed(pair.source.z, pair.target.z)
        embedded.append((of_source, of_target))
        plot_points(left, pair.source, of_source, colours)
        plot_points(right, pair.target, of_target, colours)
        both = np.concatenate([of_source, of_target])
        middle = (both.max(0) + both.min(0)) / 2
        reach = 0.54 * (both.max(0) - both.min(0)).max()
        for panel, points, role in ((left, pair.source, "source"), (right, pair.target, "target")):
            panel.set_title(f"{pair.method}: {points.domain} ({role})", fontsize=10)
            panel.set(xticks=[], yticks=[], aspect="equal")
            panel.set_xlim(middle[0] - reach, middle[0] + reach)
            panel.set_ylim(middle[1] - reach, middle[1] + reach)
    if count <= 20:
        name_classes(figure, colours, pairs[0].classes)
    write_figure(path, figure)
    return embedded


def plot_points(panel, points: Points, places: np.ndarray, colours: list, **style) -> None:
    """A domain's points in the colours of their classes, in a random order: else the last class would lie
    over all others."""
    order = np.random.default_rng(0).permutation(len(places))
    of_points = [colours[int(c)] for c in points.y[order]]
    style = dict(s=7, alpha=0.75, linewidths=0) | style
    panel.scatter(*places[order].T, c=of_points, **style)


def colours_of(count: int) -> list:
    """A colour for each class."""
    import matplotlib
    if count <= 10:
        return [matplotlib.colormaps["tab10"](c) for c in range(count)]
    if count <= 20:
        return [matplotlib.colormaps["tab20"](c) for c in range(count)]
    return [matplotlib.colormaps["turbo"](c / (count - 1)) for c in range(count)]


def name_classes(figure, colours: list, classes: tuple[str, ...]) -> None:
    """A legend of the classes beside the panels."""
    from matplotlib.lines import Line2D
    marks = []
    for colour, name in zip(colours, classes):
        marks.append(Line2D([], [], linestyle="", marker="o", color=colour, label=name))
    figure.legend(handles=marks, loc="outside right center", title="class", fontsize=8, frameon=False)


# All domains together


@dataclass
class Space:
    """What a run makes of all its domains: a panel of the figure."""

    method: str
    run: str  # dataset, scale and seed
    domains: list[Points]
    classes: tuple[str, ...]  # their names


def all_domains(run: Rebuilt, name: str, part: str, most: int) -> Space:
    """The representations of all domains by a run that the figure calls `name`; at most `most` images of
    each, drawn by the run's seed."""
    domains = []
    for client, model in run.tested():
        z, y = represented(client, model, run.args, part)
        keep = torch.randperm(len(y), generator=seed_all(run.args.seed, "figure", client.data.name))[:most]
        domains.append(Points(client.data.name, z[keep], y[keep]))
    args = run.args
    words = f"{args.dataset}, {args.scale} scale, seed {args.seed}"
    return Space(name, words, domains, run.federation.classes)


def draw_together(path, spaces: list[Space]) -> list[list[np.ndarray]]:
    """FDSE, Fig. 4: a panel for each run with one t-SNE of all its domains; colours are classes, shapes are
    domains. Returns the places of each panel's points, domain by domain."""
    columns = min(2, len(spaces))
    figure = new_figure(4.6 * columns + 1.4, 4.2 * math.ceil(len(spaces) / columns))
    panels = figure.subplots(math.ceil(len(spaces) / columns), columns, squeeze=False).flatten()
    embedded = []
    for space, panel in zip(spaces, panels):
        flat = flattened(torch.cat([points.z for points in space.domains]))
        places = np.split(flat, np.cumsum([len(points.y) for points in space.domains])[:-1])
        embedded.append(places)
        count = 1 + max(int(points.y.max()) for points in space.domains)
        colours = colours_of(count)
        for points, at, shape in zip(space.domains, places, SHAPES * len(places)):
            plot_points(panel, points, at, colours, marker=shape, s=14)
            panel.scatter([], [], c="0.3", marker=shape, s=22, label=points.domain)
        panel.set_title(f"{space.method}: {space.run}", fontsize=10)
        panel.set(xticks=[], yticks=[])
        panel.legend(fontsize=7)
    for panel in panels[len(spaces):]:
        panel.set_visible(False)
    if len({space.classes for space in spaces}) == 1 and count <= 20:
        name_classes(figure, colours, spaces[0].classes)
    write_figure(path, figure)
    return embedded


def show_together(flags) -> dict:
    """The command `tsne --source all`: the figure, and how well a domain's and a class's points stand apart
    from the others'."""
    if flags.target:
        raise Stop(f"--source all shows every domain: leave out --target {flags.target}", 2)
    spaces, table, runs = [], [], []
    for folder, name in zip(flags.folders, labels(flags.folders)):
        run = rebuilt(folder, flags.which, flags.data, flags.archives)
        spaces.append(all_domains(run, name, flags.part, flags.images))
    embedded = draw_together(flags.out, spaces)
    for folder, space, places in zip(flags.folders, spaces, embedded):
        by_class, by_domain = silhouettes(space.domains)
        table.append([space.method, space.run, sum(map(len, places)), by_class, by_domain])
        domains = {points.domain: as_json(points, at) for points, at in zip(space.domains, places)}
        runs.append({"folder": str(folder), "method": space.method, "run": space.run,
                     "silhouette_of_classes": by_class, "silhouette_of_domains": by_domain,
                     "points": domains})
    head = ["method", "run", "images", "silhouette of classes", "of domains"]
    print(tabulate(table, head, floatfmt=".3f"))
    return {"runs": runs}


def silhouettes(domains: list[Points]) -> tuple[float, float]:
    """The mean silhouette of the representations by class, and by domain: 1 where groups lie apart, 0 where
    they overlap."""
    from sklearn.metrics import silhouette_score
    z = torch.cat([points.z for points in domains]).numpy()
    y = torch.cat([points.y for points in domains]).numpy()
    of_domain = np.repeat(np.arange(len(domains)), [len(points.y) for points in domains])
    return float(silhouette_score(z, y)), float(silhouette_score(z, of_domain))


# The command


def show_tsne(flags) -> dict:
    """The command `tsne`: the figure, a table of the distances, and the numbers."""
    if flags.source == "all":
        return show_together(flags)
    pairs, table = [], []
    for folder, name in zip(flags.folders, labels(flags.folders)):
        run = rebuilt(folder, flags.which, flags.data, flags.archives)
        pair = pick_domains(run, name, flags.source, flags.target, flags.part, flags.images)
        pad = proxy_a_distance(pair.source.z, pair.target.z)
        pairs.append(pair)
        sizes = len(pair.source.y), len(pair.target.y)
        table.append([name, pair.source.domain, pair.target.domain, *sizes, pad])
    if len({pair.classes for pair in pairs}) > 1:
        raise Stop("the runs have different classes: draw those of one dataset together", 2)
    embedded = draw_tsne(flags.out, pairs)
    print(tabulate(table, ["method", "source", "target", "images", "images", "PAD"], floatfmt=".3f"))
    runs = []
    for folder, pair, line, (source_places, target_places) in zip(flags.folders, pairs, table, embedded):
        runs.append({"folder": str(folder), "method": pair.method, "source": pair.source.domain,
                     "target": pair.target.domain, "pad": line[-1],
                     "source_points": as_json(pair.source, source_places),
                     "target_points": as_json(pair.target, target_places)})
    return {"runs": runs}


def as_json(points: Points, places: np.ndarray) -> dict:
    """Where the points of a domain are in the figure, and their classes."""
    return {"place": np.round(places.astype(float), 3).tolist(), "class": points.y.tolist()}
