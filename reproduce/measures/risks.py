"""The risk of a global model on the clients' images, and the training loss over the rounds (FedCiR, Sec. 6.4,
Fig. 11)."""

from __future__ import annotations

import argparse

from common import Data, autocast, in_order
from plumbing.errors import Stop
from plumbing.settings import Args
from reproduce.drawing import Curves, new_figure, plot_curves, write_figure
from reproduce.measures.finished import Rebuilt, all_rebuilt, history, numbers_of

import numpy as np
import torch
from tabulate import tabulate
from torch import nn
from torch.nn.functional import cross_entropy


@torch.no_grad()
def risk(model: nn.Module, data: Data, args: Args) -> float:
    """The mean cross-entropy of `model` on `data`, in eval mode, in nats."""
    model.eval()
    total = 0.0
    for x, y in in_order([data], args):
        with autocast(args):
            logits = model(x)
        total += float(cross_entropy(logits.float(), y, reduction="sum"))
    return total / len(data)


def local_risks(run: Rebuilt) -> dict:
    """Cross-entropy of the network that each client is tested with on its images, in nats, their mean, and
    that on the images of a left-out domain."""
    if run.args.protocol == "linear":
        raise Stop(f"{run.folder} was trained without labels: its networks have no classifier and no "
                   f"cross-entropy", 2)
    clients, target = {}, {}
    for client, model in run.tested():
        data = client.data
        on_test = risk(model, data.test, run.args)
        if data.unseen:
            target = {"target": {"name": data.name, "test": on_test}}
        else:
            clients[data.name] = {"train": risk(model, data.train, run.args), "test": on_test}
    mean = {}
    for part in ("train", "test"):
        mean[part] = float(np.mean([risks[part] for risks in clients.values()]))
    return run.heading() | {"clients": clients, "mean": mean} | target


def draw_risks(path, runs: list[dict], curves: Curves) -> None:
    """FedCiR, Fig. 11. Left: for each result of `local_risks` the global model's cross-entropy on the test
    images of each client and its mean, a dot where that of the training images is; right: the clients' mean
    training loss over the rounds."""
    names = {}  # of all clients, as an ordered set
    for run in runs:
        names |= dict.fromkeys(run["clients"])
    names = list(names)
    widths = max(5.0, 0.9 * len(names) + 2.6), 4.4
    figure = new_figure(sum(widths), 3.8)
    left, right = figure.subplots(1, 2, width_ratios=widths)
    width = 0.8 / len(runs)
    for i, run in enumerate(runs):
        x, test, train = [], [], []
        for j, name in enumerate([*names, "mean"]):
            risks = run["mean"] if name == "mean" else run["clients"].get(name)
            if risks:
                x.append(j + (i + 0.5) * width - 0.4)
                test.append(risks["test"])
                train.append(risks["train"])
        left.bar(x, test, 0.9 * width, color=f"C{i}", label=run["method"])
        dots = "on its training images" if run is runs[-1] else None  # once in the legend
        left.plot(x, train, ".", color="0.2", label=dots)
    left.set_xticks(range(len(names) + 1), [*names, "mean"], rotation=20 if len(names) > 4 else 0)
    left.set(ylabel="cross-entropy of the global model (nats)")
    left.legend(fontsize=8)
    plot_curves(right, curves, "training loss of the local models")
    write_figure(path, figure)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """It has none of its own."""


def show(flags) -> dict:
    """A table, the figure, and the numbers."""
    runs, curves, table = [], {}, []
    for rebuilt in all_rebuilt(flags):
        run = local_risks(rebuilt)
        name = run["method"]
        losses = {entry["round"]: numbers_of(entry).get("loss") for entry in history(run["folder"])}
        rounds = [t for t, loss in losses.items() if loss is not None]
        losses = [losses[t] for t in rounds]
        runs.append(run | {"curve": {"round": rounds, "loss": losses}})
        curves[name] = rounds, losses
        for client, risks in run["clients"].items():
            table.append([name, client, risks["train"], risks["test"]])
        if "target" in run:
            table.append([name, f"{run['target']['name']} (left out)", None, run["target"]["test"]])
        table.append([name, "mean of the clients", run["mean"]["train"], run["mean"]["test"]])
    if flags.out:
        draw_risks(flags.out, runs, curves)
    print(tabulate(table, ["method", "client", "train risk", "test risk"], floatfmt=".4f"))
    return {"runs": runs}
