"""The risk of a global model on the clients' images (FedCiR, Sec. 6.4, Fig. 11)."""

from __future__ import annotations

from common import Data, autocast, in_order
from plumbing.errors import UserError
from plumbing.settings import Args
from reproduce.drawing import new_panel, write_figure
from reproduce.measures.finished import Rebuilt, all_rebuilt

import numpy as np
import torch
from tabulate import tabulate
from torch import nn
from torch.nn.functional import cross_entropy


@torch.no_grad()
def risk(model: nn.Module, data: Data, args: Args) -> float:
    """The mean cross-entropy of `model` on `data`, in eval mode, in nats."""
    total = 0.0
    for x, y in in_order(data, args):
        with autocast(args):
            logits = model.eval()(x)
        total += float(cross_entropy(logits.float(), y, reduction="sum"))
    return total / len(data)


def local_risks(run: Rebuilt) -> dict:
    """Cross-entropy of the network that each client is tested with on its images, in nats, their mean, and
    that on the images of a left-out domain."""
    if run.args.protocol == "linear":
        raise UserError(f"{run.folder} was trained without labels: its networks have no classifier and no "
                        f"cross-entropy", 2)
    clients, target = {}, {}
    for client, model in run.tested():
        data = client.data
        on_test = risk(model, data.test, run.args)
        if data.unseen:
            target = {"target": {"name": data.name, "test": on_test}}
        else:
            clients[data.name] = {"train": risk(model, data.train, run.args), "test": on_test}
    mean = {part: float(np.mean([risks[part] for risks in clients.values()])) for part in ("train", "test")}
    return run.heading() | {"clients": clients, "mean": mean} | target


def draw_risks(path, runs: list[dict]) -> None:
    """FedCiR, Fig. 11, left: of each run the global model's risk on the test images of each client and its
    mean; a dot where that of the training images is. (Right is reproduce.compare --metric loss.)"""
    names = [*runs[0]["clients"], "mean"]
    panel = new_panel(max(5.0, 0.9 * len(names) + 1.7), 3.8)
    width = 0.8 / len(runs)
    for i, run in enumerate(runs):
        risks = run["clients"] | {"mean": run["mean"]}
        if [*risks] != names:
            raise UserError("the runs have different clients: compare runs on the same domains", 2)
        x = np.arange(len(names)) + (i + 0.5) * width - 0.4
        panel.bar(x, [risks[name]["test"] for name in names], 0.9 * width, label=run["method"])
        panel.plot(x, [risks[name]["train"] for name in names], ".", color="0.2")
    panel.set_xticks(range(len(names)), names)
    panel.set(ylabel="cross-entropy (nats); dots: training images")
    panel.legend(fontsize=8)
    write_figure(path, panel.figure)


def show(flags) -> list[dict]:
    """A table, the figure, and the numbers."""
    runs, table = [local_risks(run) for run in all_rebuilt(flags)], []
    for run in runs:
        name = run["method"]
        for client, risks in run["clients"].items():
            table.append([name, client, risks["train"], risks["test"]])
        if "target" in run:
            table.append([name, f"{run['target']['name']} (left out)", None, run["target"]["test"]])
        table.append([name, "mean of the clients", run["mean"]["train"], run["mean"]["test"]])
    if flags.out:
        draw_risks(flags.out, runs)
    print(tabulate(table, ["method", "client", "train risk", "test risk"], floatfmt=".4f"))
    return runs
