"""Proxy A-distances between the representations of a run's clients (FedCiR, Sec. 6.4, Fig. 12)."""

from __future__ import annotations

import argparse
import itertools
import warnings

from common import ClientProtocol, representations, seed_all
from plumbing.errors import UserError
from plumbing.settings import Args
from reproduce.drawing import new_panel, write_figure
from reproduce.measures.finished import Rebuilt, all_rebuilt

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor, nn

C = 0.1  # of the SVM, see proxy_a_distance


def represented(client: ClientProtocol, model: nn.Module, args: Args, part: str) -> tuple[Tensor, Tensor]:
    """The representations z [N, D] and labels y [N] of a client's test images (`part` "test") or of all its
    images ("all")."""
    data = client.data
    parts = [data.train, data.val, data.test] if part == "all" else [data.test]
    found = [representations(model, images, args) for images in parts if len(images)]
    if not found:
        raise UserError(f"all images of {data.name} are for training: give --part all", 2)
    z, y = torch.cat([z for z, _ in found]), torch.cat([y for _, y in found])
    if not torch.isfinite(z).all():
        raise UserError(f"the representations of {data.name} are not finite: the run has diverged")
    return z, y


def proxy_a_distance(a, b, seed: int = 0) -> float:
    """PAD = 2(1 - 2 eps) between two sets of representations [N, D] and [M, D] (FedCiR, Sec. 6.4).

    eps is the test error of a linear SVM that tells the sets apart: 2 where a hyperplane separates them, 0 or
    slightly below where it is no better than chance. `seed` draws as many rows of the larger set as the
    smaller has; one half of each trains the SVM, the other tests it. The paper gives neither C nor the split.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import LinearSVC
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    n = min(len(a), len(b))
    if n < 4:
        raise UserError(f"a proxy A-distance needs 4 images of each domain; there are {len(a)} and {len(b)}: "
                        "give --part all", 2)
    generator = seed_all(seed, "pad")
    a = a[torch.randperm(len(a), generator=generator)[:n].numpy()]
    b = b[torch.randperm(len(b), generator=generator)[:n].numpy()]
    half = n // 2
    svm = make_pipeline(StandardScaler(), LinearSVC(C=C, random_state=0, max_iter=2000))
    with warnings.catch_warnings():
        # what is left of its error is far below that of a finite test half
        warnings.simplefilter("ignore", ConvergenceWarning)
        svm.fit(np.concatenate([a[:half], b[:half]]), np.repeat([0, 1], half))
    eps = 1 - svm.score(np.concatenate([a[half:], b[half:]]), np.repeat([0, 1], n - half))
    return 2 * (1 - 2 * eps)


def pad_table(run: Rebuilt, part: str) -> dict:
    """PAD between each pair of a run's clients, and between the mixture of all and each of them (Fig. 12).

    The mixture is the union of the clients' images, FedCiR's Eq. (1), the client's own too: its PAD to a
    client with the share p of all images is at most 2(1 - p) in the limit. No image is on both sides.
    """
    z, pairs, to_mixture = {}, {}, {}
    for client, model in run.tested():
        if not client.data.unseen:  # a target is no client
            z[client.data.name], _ = represented(client, model, run.args, part)
    if len(z) < 2:
        raise UserError(f"{run.folder} has one client; a distance needs two", 2)
    for a, b in itertools.combinations(z, 2):
        pairs[f"{a} / {b}"] = proxy_a_distance(z[a], z[b])
    pool = torch.cat(list(z.values()))
    owner = torch.cat([torch.full((len(rows),), k) for k, rows in enumerate(z.values())])
    order = torch.randperm(len(pool), generator=seed_all(0, "mixture"))
    for k, (name, rows) in enumerate(z.items()):
        m = int(len(rows) / (1 + len(rows) / len(pool)))  # m in the mixture leave about m of the client
        of_client = order[m:][owner[order[m:]] == k]
        to_mixture[name] = proxy_a_distance(pool[order[:m]], pool[of_client])
    return run.heading() | {"part": part, "pairs": pairs, "global": to_mixture,
                            "mean_pairs": float(np.mean(list(pairs.values()))),
                            "mean_global": float(np.mean(list(to_mixture.values())))}


def draw_pad(path, run_a: dict, run_b: dict) -> None:
    """FedCiR, Fig. 12: the PAD of method A (y) against that of method B (x). Circles: pairs of clients; the
    star: the mean PAD of the mixture and a client. Below the diagonal A's is the smaller."""
    a, b = run_a["method"], run_b["method"]
    if run_a["pairs"].keys() != run_b["pairs"].keys():
        raise UserError(f"{a} and {b} have different clients: compare runs on the same domains", 2)
    x = [run_b["pairs"][pair] for pair in run_a["pairs"]]
    panel = new_panel(4.8, 4.8)
    panel.axline((0, 0), slope=1, linestyle="--", color="0.5", linewidth=1, label="equal")
    panel.plot(x, list(run_a["pairs"].values()), "o", fillstyle="none", label="pair of clients")
    panel.plot(run_b["mean_global"], run_a["mean_global"], "*", color="hotpink", markersize=14,
               label="mixture and client (mean)")
    panel.set(xlabel=f"PAD, {b}", ylabel=f"PAD, {a}", aspect="equal")
    panel.legend(fontsize=8)
    write_figure(path, panel.figure)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", default="test", choices=("test", "all"),
                        help="images of each client: its test images, or all [test]")


def show(flags) -> list[dict]:
    """A table, the figure of two runs, and the numbers."""
    if flags.out and len(flags.folders) != 2:
        raise UserError(f"--out draws one run against another: give two folders, not {len(flags.folders)}", 2)
    runs, table = [pad_table(run, flags.part) for run in all_rebuilt(flags)], []
    for run in runs:
        means = {"mean of the pairs": run["mean_pairs"], "mean of mixture and client": run["mean_global"]}
        to_mixture = {f"mixture / {name}": distance for name, distance in run["global"].items()}
        table += [[run["method"], *line] for line in (run["pairs"] | to_mixture | means).items()]
    if flags.out:
        draw_pad(flags.out, *runs)
    print(tabulate(table, ["method", "domains", "PAD"], floatfmt=".3f"))
    return runs
