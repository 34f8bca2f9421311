"""The gradient of one term of a client's loss against that of all others, such as FDSE's L_Con (Eq. (7)) or
FedCiR's alignment (Eq. (18)).

A client trains as in the run's next round. At one step the term's coefficient, a factor of the loss, is once
0 and once as the run had it; the gradients are looked at before the optimizer takes them.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses

import common
from plumbing.run.errors import UserError
from plumbing.run.settings import flag_of
from reproduce.measures.finished import Rebuilt, all_rebuilt

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

SCALE = 1024  # the coefficient times this, so that a small term is above float32's rounding


def gradient(run: Rebuilt, k: int, step: int, **changed) -> Tensor:
    """The gradient of client k's loss at a step of its training, float64 [P], with other values of flags at
    this step alone; not clipped."""
    client = copy.deepcopy(run.federation.clients[k])
    client.args = dataclasses.replace(run.args, steps=step, precision="fp32")
    changes, gradients = changed | {"clip": 0.0}, []
    taken = 0

    def look(optimizer, *_) -> None:
        nonlocal taken
        taken += 1
        if taken == step:
            gradients.extend(p.grad.double().flatten() for group in optimizer.param_groups
                             for p in group["params"] if p.grad is not None)

    def change(*_) -> None:
        if taken == step - 1:
            for name, value in changes.items():
                object.__setattr__(client.args, name, value)

    hooks = [register_optimizer_step_pre_hook(look), register_optimizer_step_post_hook(change)]
    try:
        change()  # before the first step
        common.seed_all(run.args.seed, "shares", k)
        client.train(run.federation.server.download(k), run.round)
    finally:
        for hook in hooks:
            hook.remove()
    if not gradients:
        raise UserError(f"{run.folder}: {client.data.name} takes fewer than {step} steps: give another "
                        "--step", 2)
    return torch.cat(gradients)


def shares(run: Rebuilt, name: str, step: int | None) -> dict:
    """For each client |gradient of the term| / |gradient of the loss without it|, and the mean. Step None is
    the tenth of a round, or its last one."""
    coefficient, args = getattr(run.args, name, None), run.args
    last = min(args.steps or args.epochs * common.steps_in_epoch(n, args) for n in run.federation.sizes)
    step = min(10, last) if step is None else step
    if not 1 <= step <= last:
        raise UserError(f"--step is {step}; a round of {run.folder} has the steps 1 to {last}", 2)
    if not isinstance(coefficient, float) or not coefficient:
        raise UserError(f"{flag_of(name)} is {coefficient} in {run.folder}; expected a coefficient of its "
                        "loss that is not 0", 2)
    share_of = {}
    for k, client in run.federation.clients.items():
        if not client.data.unseen:
            others = gradient(run, k, step, **{name: 0.0})
            term = (gradient(run, k, step, **{name: SCALE * coefficient}) - others) / SCALE
            share_of[client.data.name] = float(term.norm() / others.norm())
    return run.heading() | {"coefficient": name, "value": coefficient, "round": run.round, "step": step,
                            "clients": share_of,
                            "mean": float(np.mean([*share_of.values()]))}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--coefficient", required=True, metavar="FLAG",
                        help="flag of the term's coefficient, without dashes, such as lambda of fdse")
    parser.add_argument("--step", type=int, metavar="N", help="training step of the round to measure [10, or "
                                                              "the last]")


def show(flags) -> list[dict]:
    """A row for each client of each run."""
    numbers, table = [], []
    for run in all_rebuilt(flags):
        fields = {flag_of(name): name for name in vars(run.args)}
        field = fields.get("--" + flags.coefficient)
        if field is None:
            raise UserError(f"--coefficient {flags.coefficient} is no flag of {run.folder}'s method", 2)
        numbers.append(shares(run, field, flags.step))
        for client, share in [*numbers[-1]["clients"].items(), ("mean", numbers[-1]["mean"])]:
            table.append([run.label, client, share])
    print(tabulate(table, ["method", "client", "share"], floatfmt=".1e"))
    return numbers
