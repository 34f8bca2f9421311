"""Centralized: one network trained on the images of all clients together (a row of FedCiR's Table 1).

    python -m baselines.centralized --dataset officecaltech --scale laptop

No federation: what the others lose is measured against it. Server keeps w. Client 0 stands for the place that
has the training images of all, and keeps the optimizer's state; the others have none to train on and are
tested with w. Down: w. Up: w, by client 0 alone. These bytes are of the simulation and of no network; what
would travel, once, are the images.

FedCiR                                          This file
Sec. 6.2  "centralized training"                Client.train, common.pool
A round is a stretch of one training of T rounds, after which it is tested: --steps batches drawn from all
images, as many as each client of FedAvg takes, or E epochs of all images, as many images as all its clients
see. Splits, tests and the start are those of the federated methods. The learning rate falls with the rounds.
Left out: nothing.

Where FedCiR (there is no code) and this file differ (in full: papers/baselines/centralized.md)
  what             FedCiR       here                                                 flag
  how long         not said     300 rounds of 20 steps of batches of 32              --rounds, --steps
  batches          not said     from the pool, so large domains come more often      -
"""

from dataclasses import dataclass

import common
from common import (ClientData, Payload, UserError, autocast, batches, load, optimizer_state, parse, run,
                    schedules, sgd, source, state)

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    def validate(self) -> None:
        if self.participation < 1:
            raise UserError("centralized training has all images in each round: --participation is 1", 2)
        if self.after_training:
            raise UserError("centralized training has one network for all clients, which is tested anyway: "
                            "--after-training adds nothing", 2)


# FedCiR's settings of its federated methods, which it does not repeat for this row.
PAPER = {
    "digits": schedules.DIGITS,
    "officecaltech": schedules.OF_FEDCIR,
    "pacs": schedules.OF_FEDCIR,
    "domainnet10": schedules.OF_FEDCIR,
    "camelyon17": schedules.OF_FEDCIR | source("ours, as fedavg.py", eval_every=10),
    "iwildcam": schedules.OF_FEDCIR,
}
LAPTOP = {  # as fedcir.py
    "officecaltech": dict(image_size=32, rounds=24),
    "pacs": dict(image_size=32, rounds=24),
}


class Client:
    keeps = ("opt",)
    pooled = True  # client 0 has the training images of all, the others have none

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        self.opt = {}  # the optimizer's state by parameter: one training, so momentum goes on over the rounds

    def train(self, down: Payload, t: int) -> Payload:
        """The next steps of the training."""
        args = self.args
        if not len(self.data.train):
            return {}
        model = self.model(down).train()
        opt = sgd(model, args, t, self.opt)
        losses = []
        for x, y in batches(self.data.train, args, t, self.k):  # x [B, C, H, W]; y [B]
            with autocast(args):
                z = model.features(x)  # [B, D]
                loss = cross_entropy(model.classify(z), y)
            losses.append(loss.detach())
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()  # w <- w - eta grad l(w; b)
        self.log = {"loss": torch.stack(losses).mean()}
        self.opt = optimizer_state(model, opt)
        return {"w": state(model)}

    def model(self, down: Payload) -> nn.Module:
        return load(self.net, down["w"])


class Server:
    keeps = ("w",)

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.args = args
        self.w = state(net)

    def download(self, k: int) -> Payload:
        return {"w": self.w}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        self.w = uploads[0]["w"]  # of the client that has the images


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, laptop=LAPTOP)


if __name__ == "__main__":
    run(Server, Client, arguments())
