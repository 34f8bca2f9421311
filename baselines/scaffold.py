"""SCAFFOLD: control variates against client drift (Karimireddy et al., ICML 2020; arXiv 1910.06378).

    python -m baselines.scaffold --dataset officecaltech --scale laptop

c_k estimates the gradient of client k, c that of all clients; each local step is corrected by c - c_k.
Server keeps w = (x, BN's statistics) and c. Client k keeps c_k. c and c_k have an entry for each
parameter, and start at 0. Down: w, c. Up: w_k, the change of c_k.

Paper                                                            This file
Eq. (3)          y <- y - eta_l (g_k(y) - c_k + c)               Client.train
Eq. (4), opt. II c_k+ = c_k - c + (x - y_k) / (S eta_l)          control_variate
Eq. (5)          x <- x + eta_g mean_k (y_k - x)                 Server.update
Eq. (5)          c <- c + 1/K sum_k (c_k+ - c_k)                 Server.update
Symbols as in the paper, but for k, K and S, which are its i, N and K: client k of K, x the server's
parameters, y_k the client's, S local steps at the rate eta_l. The paper sends y_k - x instead of y_k.
The unseen client of --protocol lodo has the server's model. Left out: option I, c_k+ as the gradient at x
over all images of the client; the paper's experiments have option II.

Where paper, codes (FLGo 0.3.29, FDSE's framework; PFLlib @ d832e76; that of FedDyn's authors,
alpemreacar/FedDyn @ 48a19fa) and this file differ; in full: papers/baselines/scaffold.md
  what              paper      FLGo       PFLlib      FedDyn's     here                           flag
  eta_l in option   of the     of the     of the      of the       of the round                   -
  II                round      round      first one   first one
  clipping          none       corrected  none        corrected    the gradient, before the       --clip
                               gradient               gradient     correction
  momentum          none       allowed    none        none         refused                        -
  c                 mean c_k   mean c_k   mean c_k    by images    mean c_k                       -
  BN's statistics   -          averaged   not sent    no BN        averaged                       -
  eta_g             1          1          1           1            1                              --eta-g
  learning rate     tuned      tuned      0.005       tuned        0.1                            --lr
"""

from dataclasses import dataclass
from functools import partial

import common
from common import (ClientData, Payload, UserError, arg, autocast, average, batches, entrywise, load,
                    parameters, parse, pick, run, schedules, sgd, source, state, uniform)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    eta_g: float = arg(1.0, "the server's step eta_g, Eq. (5); 1: the mean of the clients' parameters",
                       above=0, source="text of SCAFFOLD, its experiments")

    def validate(self) -> None:
        if self.momentum:
            raise UserError(f"--momentum {self.momentum} does not go with SCAFFOLD: c_k is the way of a "
                            "client divided by its steps, which with momentum is no mean of gradients", 2)


# FDSE says nothing of its settings; FLGo-Bench, by the same author, has the rate 0.1 on all three.
BENCH = source("cited code, FLGo-Bench", lr=0.1)
PAPER = {
    "digits": schedules.DIGITS,
    "officecaltech": schedules.FDSE["officecaltech"] | BENCH,
    "pacs": schedules.FDSE["pacs"] | BENCH,
    "domainnet10": schedules.FDSE["domainnet10"] | BENCH,
}


def control_variate(c_k: Tensor, c: Tensor, x: Tensor, y: Tensor, steps: int, eta: float) -> Tensor:
    """c_k+, Eq. (4), option II: what the mean gradient of the steps from x to y was."""
    return c_k - c + (x - y) / (steps * eta)


class Client:
    keeps = ("c_k",)

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        self.c_k = {}  # empty, which is 0, before the first training

    def train(self, down: Payload, t: int) -> Payload:
        """Alg. 1, lines 6-14."""
        args = self.args
        model = self.model(down).train()
        opt = sgd(model, args, t)
        x_t, c = parameters(model), down["c"]
        c_k = self.c_k or {name: torch.zeros_like(v) for name, v in c.items()}
        correction = entrywise(torch.sub, c, c_k)  # c - c_k
        losses = []
        for x, y in batches(self.data.train, args, t, self.k):  # images x [B, C, H, W], labels y [B]
            with autocast(args):
                z = model.features(x)  # [B, D]
                loss = cross_entropy(model.classify(z), y)
            losses.append(loss.detach())
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)  # differs, see "clipping"
            for name, p in model.named_parameters():
                if p.grad is not None:  # else it is frozen or unused, and its c and c_k are 0
                    p.grad.add_(correction[name])  # Eq. (3): g_k(y) - c_k + c
            opt.step()
        self.log = {"loss": torch.stack(losses).mean()}
        eta = args.lr * args.lr_decay ** t
        new = partial(control_variate, steps=len(losses), eta=eta)
        c_plus = entrywise(new, c_k, c, x_t, parameters(model))  # Eq. (4), y_k the trained parameters
        change = entrywise(torch.sub, c_plus, c_k)
        self.c_k = entrywise(torch.add, c_k, change)  # c_k+, rounded as the server's c
        return {"w": state(model), "change": change}

    def model(self, down: Payload) -> nn.Module:
        return load(self.net, down["w"])


class Server:
    keeps = ("w", "c")

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.args, self.clients = args, clients
        self.w = state(net)
        self.c = {name: torch.zeros_like(v) for name, v in parameters(net).items()}

    def download(self, k: int) -> Payload:
        return {"w": self.w, "c": self.c}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        """Alg. 1, lines 16-17, Eq. (5)."""
        p = uniform(len(uploads))
        mean = average([up["w"] for up in uploads.values()], p)  # BN's statistics too
        change = average([up["change"] for up in uploads.values()], p)
        share = len(uploads) / self.clients  # |S_t| / K
        step = partial(torch.lerp, weight=self.args.eta_g)
        mean |= entrywise(step, pick(self.w, list(self.c)), mean)  # x + eta_g mean_k (y_k - x)
        self.c = entrywise(lambda c, mean_change: c + share * mean_change, self.c, change)
        self.w = mean


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv)


if __name__ == "__main__":
    run(Server, Client, arguments())
