"""Ditto: a personal model beside the global one (T. Li, Hu, Beirami, Smith, ICML 2021; arXiv 2012.04221).

    python -m baselines.ditto --dataset officecaltech --scale laptop

FedAvg makes a global model. Beside it each client trains a personal one, which is pulled towards the global
one and never leaves; clients are tested with it.
Server keeps w. Client k keeps v_k, its personal model with the statistics of its batch normalization. Down:
w. Up: w_k, n_k. An unseen client has no v_k and is tested with w.

Paper                                                             This file
Eq. (2)  h_k(v_k; w) = F_k(v_k) + lambda/2 ||v_k - w||^2          proximal, Client.epochs
Alg. 1   w_k: local steps from w^t; v_k: steps on h_k(v_k; w^t)   Client.train
Alg. 1   the average of the round's w_k                           Server.update
Symbols as in the paper: w^t the model as received in round t, which is the centre of the term for the whole
round. FDSE calls lambda mu. v_k begins as the initial w, the input of Alg. 1. w is FedAvg's, bit for bit,
with any lambda; with --lambda 0 v_k is the model of a client that trains alone (local.py).
Left out: a lambda for each client, chosen by validation; the robust averages against attacks.

Where the paper, codes (the authors'; FLGo 0.3.29, FDSE's framework) and this file differ (in full:
papers/baselines/ditto.md)
  what             paper    authors'   FLGo                 here                         flag
  lambda           tuned    given      1; of FDSE .01 and   .01 Office, DomainNet;       --lambda
                                       1e-4                 1e-4 PACS
  start of v_k     input    initial w  the first received   the initial w                -
  steps on v_k     s        as on w_k  as on w_k            as on w_k, same batches      -
  average          1/K      1/K        1/K                  n_k/n                        --average uniform
  clipping         -        -          10, each model's     10, each model's gradient    --clip
"""

from dataclasses import dataclass

import common
from common import (ClientData, Payload, arg, autocast, average, batches, load, parse, run, schedules, sgd,
                    source, state)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    lambda_: float = arg(0.1, "weight of the personal model's proximal term, Eq. (2); 0: each client trains "
                              "alone", low=0, source="ours")
    average: str = arg("samples", "weights of the average: samples (n_k/n) or uniform (1/K)",
                       choices=("samples", "uniform"), source="text of FDSE, Eq. (1)")


# FDSE's code has no settings of Ditto on DomainNet: there lambda is that of Office-Caltech10.
PAPER = {
    "digits": schedules.DIGITS,
    **schedules.MNIST,
    "officecaltech": schedules.FDSE["officecaltech"]
    | source("code of FDSE, config/office/ditto.yml", lambda_=0.01),
    "pacs": schedules.FDSE["pacs"] | source("code of FDSE, config/pacs/ditto.yml", lambda_=1e-4, lr=0.05),
    "domainnet10": schedules.FDSE["domainnet10"] | source("ours, as Office-Caltech10", lambda_=0.01),
}


def proximal(v_k: list[Tensor], w: list[Tensor]) -> Tensor:
    """||v_k - w||^2 over all parameters: the term of Eq. (2), a scalar."""
    return torch.stack([(a - b).square().sum() for a, b in zip(v_k, w)]).sum()


class Client:
    keeps = ("v",)

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        self.v = state(net)  # v_k: the initial w

    def train(self, down: Payload, t: int) -> Payload:
        """Alg. 1: the local model w_k from w^t, and then the personal one."""
        model = load(self.net, down["w"]).train()
        loss = self.epochs(model, t)
        w_k = state(model)
        model = self.model(down).train()
        w = [down["w"][name] for name, _ in model.named_parameters()]  # w^t, not w_k
        personal = self.epochs(model, t, w)
        self.v = state(model)
        self.log = {"loss": loss, "personal": personal}
        return {"w": w_k, "n": torch.tensor(len(self.data.train))}

    def epochs(self, model: nn.Module, t: int, w: list[Tensor] | None = None) -> Tensor:
        """E local epochs on F_k or, with the centre w, on h_k(.; w), Eq. (2). Returns the mean of F_k. Both
        passes have the same batches, augmentation and dropout: `batches` seeds them by round and client."""
        args = self.args
        parameters = list(model.parameters())
        opt = sgd(model, args, t)
        losses = []
        for x, y in batches(self.data.train, args, t, self.k):  # x [B, C, H, W]; y [B]
            with autocast(args):
                z = model.features(x)  # [B, D]
                loss = cross_entropy(model.classify(z), y)  # F_k
            losses.append(loss.detach())
            if w is not None and args.lambda_:
                loss = loss + args.lambda_ / 2 * proximal(parameters, w)  # h_k, Eq. (2)
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()
        return torch.stack(losses).mean()

    def model(self, down: Payload) -> nn.Module:
        return load(self.net, down["w"] if self.data.unseen else self.v)


class Server:
    keeps = ("w",)

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.args = args
        self.w = state(net)

    def download(self, k: int) -> Payload:
        return {"w": self.w}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        n = torch.stack([up["n"] for up in uploads.values()]).double()  # [K]
        if self.args.average == "samples":
            p = n / n.sum()
        else:
            p = torch.full_like(n, 1 / len(n))
        self.w = average([up["w"] for up in uploads.values()], p)  # w_{t+1} = sum_k p_k w_k; BN's too


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv)


if __name__ == "__main__":
    run(Server, Client, arguments())
