"""FedOpt: FedAvgM, FedAdagrad, FedYogi and FedAdam, an optimizer on the server (Reddi et al., ICLR 2021;
arXiv 2003.00295v5; FedAvgM: Hsu et al., arXiv 1909.06335).

    python -m baselines.fedopt --dataset officecaltech --scale laptop                     # FedAdam
    python -m baselines.fedopt --variant fedavgm --dataset officecaltech --scale laptop

FedAvg whose server takes the mean of the clients' changes for a gradient, and makes a step of its own.
Server keeps w = (x, BN's statistics), m and v. Client k keeps nothing between rounds. Down: w. Up: w_k, n_k.

Paper                                                            This file
Alg. 1, 2  Delta_t = mean of x_k - x_t                           Server.update
Alg. 2     m_t = beta1 m_(t-1) + (1 - beta1) Delta_t             first_moment
Alg. 2     v_t of FedAdagrad, FedYogi, FedAdam                   second_moment
Alg. 2     x_(t+1) = x_t + eta m_t / (sqrt(v_t) + tau)           Server.update
FedAvgM    m_t = beta1 m_(t-1) + Delta_t,
           x_(t+1) = x_t + eta m_t                               Server.update
Symbols as in the paper: x parameters, Delta_t pseudo-gradient, eta the server's rate (--lr is eta_l), m, v
moments, beta1, beta2 their decays, tau degree of adaptivity. FedAvgM with --beta1 0 is FedAvg, but for
rounding. BN's statistics are no part of a step: they are averaged as in fedavg.py. Left out: nothing.

Where the paper, its code (google-research/federated, optimization/, @ 0f29cad) and this file differ (in full:
papers/baselines/fedopt.md)
  what              paper            code                        here           flag
  the mean          1/|S|; in the    by the number of images     by the number  --average uniform
                    experiments by
                    images
  m, v at t = 0     0, tau^2         0, 0                        0, tau^2       -
  their bias        stays            Adam and Yogi divide it out stays          -
  beta2             .99              .999                        .99            --beta2
  tau               .001             .001; tuned .1 to .00001    .001           --tau
  eta               tuned            tuned                       ours           --server-lr
  BN's statistics   no BN            not sent                    averaged       -
"""

from dataclasses import dataclass
from functools import partial

import common
from common import (ClientData, Payload, arg, autocast, average, batches, entrywise, load, parameters, parse,
                    run, schedules, sgd, source, state)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    variant: str = arg("fedadam", "the server's optimizer",
                       choices=("fedavgm", "fedadagrad", "fedyogi", "fedadam"))
    server_lr: float = arg(0.01, "eta, the server's learning rate", above=0, source="ours")
    beta1: float = arg(0.9, "decay of m, the mean change", low=0, high=0.9999, source="text, Sec. 5")
    beta2: float = arg(0.99, "decay of v, the mean square (not used by fedavgm and fedadagrad)", low=0,
                       high=0.9999, source="text, Sec. 5")
    tau: float = arg(0.001, "degree of adaptivity (not used by fedavgm): changes below it are not scaled up",
                     above=0, source="text, Sec. 5")
    average: str = arg("samples", "weights of the mean: samples (n_k/m_t) or uniform (1/K)",
                       choices=("samples", "uniform"), source="text, Sec. 5")


PAPER = {"digits": schedules.DIGITS, **schedules.MNIST, **schedules.FDSE}
OF_VARIANT = {
    "fedavgm": source("ours, where the first step is FedAvg's", server_lr=1.0),
    "fedadagrad": source("text, Sec. 5", beta1=0.0),
    "fedyogi": {},
    "fedadam": {},
}
VARIANTS = {variant: dict.fromkeys(PAPER, values) for variant, values in OF_VARIANT.items()}


def first_moment(m: Tensor, delta: Tensor, beta1: float) -> Tensor:
    """m_t of Alg. 2."""
    return beta1 * m + (1 - beta1) * delta


def second_moment(v: Tensor, delta: Tensor, variant: str, beta2: float) -> Tensor:
    """v_t of Alg. 2: of FedAdagrad, FedYogi or FedAdam."""
    square = delta.square()
    if variant == "fedadagrad":
        return v + square
    if variant == "fedyogi":
        return v - (1 - beta2) * square * torch.sign(v - square)
    return beta2 * v + (1 - beta2) * square


class Client:
    keeps = ()  # nothing outlives a round

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data

    def train(self, down: Payload, t: int) -> Payload:
        """Local SGD from x_t; its change x_k - x_t is formed on the server."""
        args = self.args
        model = self.model(down).train()
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
            opt.step()  # w <- w - eta_l grad l(w; b)
        self.log = {"loss": torch.stack(losses).mean()}
        return {"w": state(model), "n": torch.tensor(len(self.data.train))}

    def model(self, down: Payload) -> nn.Module:
        return load(self.net, down["w"])


class Server:
    keeps = ("w", "m", "v")

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.args = args
        self.w = state(net)
        x = parameters(net)
        self.m = entrywise(torch.zeros_like, x)
        self.v = entrywise(lambda x: torch.full_like(x, args.tau ** 2), x)  # v_(-1)

    def download(self, k: int) -> Payload:
        return {"w": self.w}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        """The server's part of Alg. 2; m and v have no entry for BN's statistics, which are averaged."""
        args = self.args
        n = torch.stack([up["n"] for up in uploads.values()]).double()  # [K]
        if args.average == "samples":
            p = n / n.sum()  # differs, see "the mean"
        else:
            p = torch.full_like(n, 1 / len(n))
        mean = average([up["w"] for up in uploads.values()], p)
        x = {name: self.w[name] for name in self.m}
        delta = entrywise(torch.sub, {name: mean[name] for name in x}, x)  # Delta_t = mean of x_k - x_t
        if args.variant == "fedavgm":
            self.m = entrywise(lambda m, d: args.beta1 * m + d, self.m, delta)
            x = entrywise(lambda x, m: x + args.server_lr * m, x, self.m)
        else:
            self.m = entrywise(partial(first_moment, beta1=args.beta1), self.m, delta)
            second = partial(second_moment, variant=args.variant, beta2=args.beta2)
            self.v = entrywise(second, self.v, delta)
            x = entrywise(lambda x, m, v: x + args.server_lr * m / (v.sqrt() + args.tau), x, self.m, self.v)
        self.w = mean | x


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS)


if __name__ == "__main__":
    run(Server, Client, arguments())
