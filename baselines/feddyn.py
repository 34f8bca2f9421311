"""FedDyn: dynamic regularization (Acar et al., ICLR 2021; arXiv 2111.04263).

    python -m baselines.feddyn --dataset officecaltech --scale laptop

Each client's objective gets a linear and a quadratic term that change from round to round, so that where all
clients agree each one's objective, and not its loss, has its minimum.
Server keeps w = (theta, BN's statistics) and h. Client k keeps g_k, an entry for each parameter; g_k and h
start at 0. Down: w. Up: w_k.

Paper, Alg. 1                                                         This file
theta_k = argmin L_k - <g_k, theta> + alpha/2 |theta - theta^t|^2     linear, quadratic, Client.train
g_k <- g_k - alpha (theta_k - theta^t)                                next_gradient, Client.train
h <- h - alpha/K sum_k (theta_k - theta^t)                            Server.update
theta^(t+1) = mean_k theta_k - h / alpha                              Server.update
Symbols as in the paper, but for K, its m: theta^t the server's parameters, theta_k the client's, g_k the
gradient of L_k at theta_k, K all clients, also those that miss the round. --alpha 0 is FedAvg with uniform
weights: neither terms nor the server's shift, which does not vanish when alpha only gets small. All clients,
the unseen one too, are tested with the mean of the round's models. Left out: nothing.

Where paper, codes (the authors', alpemreacar/FedDyn @ 48a19fa; FLGo @ ea07f1d, FDSE's framework; PFLlib @
d832e76) and this file differ; in full: papers/baselines/feddyn.md
  what              paper     authors           FLGo           PFLlib       here           flag
  quadratic term    squared   squared           squared        not squared  squared        -
  alpha             one       by size, times    one            one          one            -
                              mean n / n_k
  BN's statistics   -         no BN             shifted by h   not sent     averaged       -
  tested model      -         the mean          theta          theta        the mean       --evaluated
  clipping          none      10, without       10             none         FDSE's, 10     --clip
                              alpha theta
  alpha, lr         tuned     0.01, 0.1         FDSE's grids   1, 0.005     FLGo-Bench's   --alpha, --lr
"""

from dataclasses import dataclass
from functools import partial

import common
from common import (ClientData, Payload, arg, autocast, average, batches, entrywise, load, parameters,
                    parse, pick, run, schedules, sgd, source, state, uniform)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    alpha: float = arg(0.1, "weight of the quadratic term; 0: FedAvg with uniform weights", low=0,
                       source="ours")
    evaluated: str = arg("mean", "network that is tested: mean (of the round's models) or theta (the mean, "
                                 "shifted by the server)", choices=("mean", "theta"), source="code of FedDyn")


# FDSE tuned alpha on 0.001, 0.01, 0.03 and 0.1 and does not say what it found (A7.4). FLGo-Bench is by the
# same author: the same network and data, its own grids (docs/rates.md).
BENCH = "cited code, FLGo-Bench"
PAPER = {
    "digits": schedules.DIGITS,
    "officecaltech": schedules.FDSE["officecaltech"] | source(BENCH, lr=0.01, alpha=0.1),
    "pacs": schedules.FDSE["pacs"] | source(BENCH, lr=0.1, alpha=0.03),
    "domainnet10": schedules.FDSE["domainnet10"] | source(BENCH, lr=0.05, alpha=0.1),
}


def linear(g_k: dict[str, Tensor], theta: dict[str, Tensor]) -> Tensor:
    """<g_k, theta> over all parameters."""
    return torch.stack([(g_k[name] * theta[name]).sum() for name in theta]).sum()


def quadratic(theta: dict[str, Tensor], theta_t: dict[str, Tensor]) -> Tensor:
    """|theta - theta^t|^2 over all parameters."""
    return torch.stack([(theta[name] - theta_t[name]).square().sum() for name in theta]).sum()


def next_gradient(g_k: Tensor, theta_k: Tensor, theta_t: Tensor, alpha: float) -> Tensor:
    """The client's g_k after its training from theta^t to theta_k."""
    return g_k - alpha * (theta_k - theta_t)


class Client:
    keeps = ("g_k",)

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        self.g_k = {}  # empty, which is 0, before the first training

    def train(self, down: Payload, t: int) -> Payload:
        """The client's part of Alg. 1; the minimum is what E epochs of SGD come to."""
        args = self.args
        model = self.model(down).train()
        opt = sgd(model, args, t)
        theta, theta_t = dict(model.named_parameters()), parameters(model)
        g_k = self.g_k or {name: torch.zeros_like(v) for name, v in theta_t.items()}
        losses = []
        for x, y in batches(self.data.train, args, t, self.k):  # x [B, C, H, W]; y [B]
            with autocast(args):
                z = model.features(x)  # [B, D]
                loss = cross_entropy(model.classify(z), y)  # L_k
            losses.append(loss.detach())
            loss = loss - linear(g_k, theta) + args.alpha / 2 * quadratic(theta, theta_t)
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()
        self.log = {"loss": torch.stack(losses).mean()}
        self.g_k = entrywise(partial(next_gradient, alpha=args.alpha), g_k, parameters(model), theta_t)
        return {"w": state(model)}

    def model(self, down: Payload) -> nn.Module:
        return load(self.net, down["w"])


class Server:
    keeps = ("w", "h", "mean")

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.args, self.clients = args, clients
        self.w = state(net)
        self.h = {name: torch.zeros_like(v) for name, v in parameters(net).items()}
        self.mean = parameters(net)  # of the round's models: theta before the shift

    def download(self, k: int) -> Payload:
        return {"w": self.w}

    def tested(self, k: int) -> Payload:
        """The mean of the round's models, whose statistics BN has; or what is trained on, theta."""
        if self.args.evaluated == "theta":
            return self.download(k)
        return {"w": self.w | self.mean}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        """The server's part of Alg. 1; h has no entry for BN's statistics, which are averaged."""
        alpha = self.args.alpha
        w = average([up["w"] for up in uploads.values()], uniform(len(uploads)))
        self.mean = pick(w, list(self.mean))
        if alpha:
            share = len(uploads) / self.clients  # of all clients, those of the round
            # h <- h - alpha/K sum_k (theta_k - theta^t)
            self.h = entrywise(lambda h, mean, w_t: h - alpha * share * (mean - w_t), self.h, w, self.w)
            # theta^(t+1) = mean_k theta_k - h / alpha
            w |= entrywise(lambda h, mean: mean - h / alpha, self.h, w)
        self.w = w


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv)


if __name__ == "__main__":
    run(Server, Client, arguments())
