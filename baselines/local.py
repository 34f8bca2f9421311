"""Local: each client trains alone, on its own images (the first row of FDSE's Table 1).

    python -m baselines.local --dataset officecaltech --scale laptop

No federation: what the others gain is measured against it. Server keeps nothing. Client k keeps w_k and the
best w_k so far by its own validation images, of the rounds after which there is an evaluation. Down: nothing.
Up: nothing. If a domain is left out, the w_k that are tested go up after each round, and its client gets them
all: it takes the mean of their class probabilities.

FDSE                                                       This file
Sec. A7.3  "each client independently trains its local     Client.train
           model"
(ours)     an unseen domain: the mean over the clients     Ensemble
A round is E more epochs of each client from where it was, at the learning rate that a round of FedAvg has:
after T rounds it has seen as many images as there. All start from the same random w. The optimizer is new in
each round, which matters with momentum alone. Left out: early stopping, which saves time and
could change a row only where the validation accuracy would have risen later.

Where FDSE, its code (algorithm/standalone.py), PFLlib and this file differ; in full:
papers/baselines/local.md
  what             FDSE       its code          PFLlib       here                       flag
  model tested     not said   own best epoch    current one  own best, by validation,   --select last
                                                             of rounds that are tested  --eval-every
  epochs           not said   --num_epochs,     --rounds     T rounds of E epochs       --rounds, --epochs
                              1 or 5 in its
                              settings
  decay of lr      .998       none              none         .998                       --lr-decay
  learning rate    tuned      not given         .005         .1; .05 on DomainNet       --lr
"""

from dataclasses import dataclass

import common
from common import (ClientData, Payload, UserError, arg, autocast, batches, correct, is_evaluated, load,
                    parse, run, schedules, sgd, source, state)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    select: str = arg("own", "network that a client is tested with: own (its best so far on its validation "
                             "images) or last (its current one)", choices=("own", "last"),
                      source="code of FDSE, algorithm/standalone.py")

    def validate(self) -> None:
        if self.after_training and self.select == "own":
            raise UserError("--after-training tests a network right after its training, --select own an "
                            "earlier one: give --select last too", 2)


# FedAvg's settings without an average. FLGo-Bench, by FDSE's author, tuned the rate of clients alone.
BENCH = "cited code, FLGo-Bench"
PAPER = {
    "digits": schedules.DIGITS,
    "rotatedmnist": schedules.OF_MNIST,
    "rotatedmnist-t10k": schedules.OF_MNIST,
    "officecaltech": schedules.FDSE["officecaltech"] | source(BENCH, lr=0.1),
    "pacs": schedules.FDSE["pacs"] | source(BENCH, lr=0.1),
    "domainnet10": schedules.FDSE["domainnet10"] | source(BENCH, lr=0.05),
}


class Ensemble(nn.Module):
    """The mean over the clients' models of their class probabilities, for a domain that no client has."""

    def __init__(self, net: nn.Module, models: list[dict[str, Tensor]]):
        super().__init__()
        self.net, self.models = net, models

    def forward(self, x: Tensor) -> Tensor:
        p = 0
        for w_k in self.models:
            p = p + load(self.net, w_k)(x).float().softmax(1)  # [B, C]
        return p / len(self.models)


class Client:
    keeps = ("w", "best", "best_right")

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        self.w = state(net)  # w_k; the same at the start for all
        self.best, self.best_right = self.w, -1  # the best w_k, and how many validation images it has right

    def train(self, down: Payload, t: int) -> Payload:
        """E more epochs of w_k."""
        args = self.args
        model = load(self.net, self.w).train()
        opt = sgd(model, args, t)
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
            opt.step()  # w_k <- w_k - eta grad l(w_k; b)
        self.log = {"loss": torch.stack(losses).mean()}
        self.w = state(model)
        if args.select == "own" and is_evaluated(args, t + 1):
            right = correct(model, self.data.val, args)
            if right > self.best_right:  # the first of equals
                self.best, self.best_right = self.w, right
        if args.protocol == "lodo":
            return {"w": self.tested()}  # for the unseen client
        return {}

    def tested(self) -> dict[str, Tensor]:
        """The state that the client is tested with. Before its first evaluated round it has no best."""
        if self.args.select == "own" and self.best_right >= 0:
            return self.best
        return self.w

    def model(self, down: Payload) -> nn.Module:
        if self.data.unseen:
            return Ensemble(self.net, list(down.values()) or [self.w])  # at first the network of the start
        return load(self.net, self.tested())


class Server:
    keeps = ("models",)

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.args, self.clients = args, clients
        self.models = {}  # of each client that has trained, for the unseen one

    def download(self, k: int) -> Payload:
        if k < self.clients:
            return {}
        return {str(client): w_k for client, w_k in self.models.items()}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        """Nothing is aggregated."""
        for k, up in uploads.items():
            if up:
                self.models[k] = up["w"]


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv)


if __name__ == "__main__":
    run(Server, Client, arguments())
