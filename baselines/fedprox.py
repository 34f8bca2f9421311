"""FedProx: local training with a proximal term (Li et al., MLSys 2020; arXiv 1812.06127v5).

    python -m baselines.fedprox --dataset officecaltech --scale laptop
    python -m baselines.fedprox --dataset pacs --variant fedcir             # a row of FedCiR's Table 1

FedAvg in which each client is pulled towards the model that it received.
Server keeps w. Client k keeps nothing between rounds. Down: w. Up: w_k, n_k.

Paper                                                        This file
Eq. (2)  h_k(w; w^t) = F_k(w) + mu/2 ||w - w^t||^2           proximal, Client.train
Alg. 2   the average of the round's clients                  Server.update
Symbols as in the paper: w global model, w_k local model, w^t the model as received in round t. --mu 0 is
FedAvg, bit for bit. BN's statistics are no part of the term; they are averaged as in fedavg.py.
Left out: clients that stop early (the paper's gamma_k-inexact solutions); no table of ours has them.

Where the paper, codes (the authors'; FLGo 0.3.29, FDSE's framework; med-air/FedBN on Office) and this file
differ (in full: papers/baselines/fedprox.md)
  what           paper      authors'   FLGo       med-air         here                    flag
  the term       squared    squared    squared    not squared;    squared                 -
                                                  not in round 1
                                                  nor in step 1
  mu             1 or less  given      0.1        0.001           .1 Office, 1e-4 PACS,   --mu
                                                                  .01 DomainNet; FedCiR:
                                                                  .1, Office .5,
                                                                  Camelyon17 .9
  clients        by size    uniform    all        all             uniform, none twice     --participation
  average        1/K        n_k/m_t    1/K        1/K             n_k/m_t; of FedCiR 1/K  --average uniform
  clipping       -          -          10         none            10, of both gradients   --clip
Values without a paper are those on FDSE's data; --show-settings has those of each dataset.
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
    variant: str = arg("usual", "settings: usual, or those of FedCiR's Table 1", choices=("usual", "fedcir"))
    mu: float = arg(0.01, "weight of the proximal term, Eq. (2); 0: FedAvg", low=0, source="ours")
    average: str = arg("samples", "weights of the average: samples (n_k/m_t) or uniform (1/K)",
                       choices=("samples", "uniform"), source="text of FDSE, Eq. (1)")


# FDSE tuned mu and lr and does not say what it found (A7.4); FLGo-Bench is by the same author.
BENCH, CHOSEN = "cited code, FLGo-Bench", "text of FedCiR, App. E"
OF_FEDCIR = {
    "officecaltech": schedules.FEDCIR["officecaltech"] | source(CHOSEN, mu=0.5),
    "pacs": schedules.FEDCIR["pacs"] | source(CHOSEN, mu=0.1),
    "domainnet10": schedules.FEDCIR["domainnet10"] | source(CHOSEN, mu=0.1),
    "camelyon17": schedules.FEDCIR["camelyon17"] | source(CHOSEN, mu=0.9),
    "iwildcam": schedules.FEDCIR["iwildcam"] | source(CHOSEN, mu=0.1),
}
PAPER = {
    "digits": schedules.DIGITS,
    **schedules.MNIST,
    "officecaltech": schedules.FDSE["officecaltech"] | source(BENCH, mu=0.1, lr=0.1),
    "pacs": schedules.FDSE["pacs"] | source(BENCH, mu=1e-4, lr=0.05),
    "domainnet10": schedules.FDSE["domainnet10"] | source(BENCH, mu=0.01, lr=0.1),
    "camelyon17": OF_FEDCIR["camelyon17"],
    "iwildcam": OF_FEDCIR["iwildcam"],
}
VARIANTS = {"fedcir": OF_FEDCIR}


def proximal(w_k: list[Tensor], w: list[Tensor]) -> Tensor:
    """||w_k - w||^2 over all parameters: the term of Eq. (2), a scalar."""
    return torch.stack([(a - b).square().sum() for a, b in zip(w_k, w)]).sum()


class Client:
    keeps = ()  # nothing outlives a round

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data

    def train(self, down: Payload, t: int) -> Payload:
        """An inexact minimum of h_k(w; w^t), Eq. (2)."""
        args = self.args
        model = self.model(down).train()
        parameters = list(model.parameters())
        w = [p.detach().clone() for p in parameters]  # w^t, fixed in the round
        opt = sgd(model, args, t)
        losses, terms = [], []
        for x, y in batches(self.data.train, args, t, self.k):  # x [B, C, H, W]; y [B]
            with autocast(args):
                z = model.features(x)  # [B, D]
                loss = cross_entropy(model.classify(z), y)  # F_k
            losses.append(loss.detach())
            if args.mu:
                term = args.mu / 2 * proximal(parameters, w)
                terms.append(term.detach())
                loss = loss + term  # h_k, Eq. (2)
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()  # w <- w - eta grad h_k(w; b)
        self.log = {"loss": torch.stack(losses).mean()}
        if terms:
            self.log["proximal"] = torch.stack(terms).mean()
        return {"w": state(model), "n": torch.tensor(len(self.data.train))}

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
        n = torch.stack([up["n"] for up in uploads.values()]).double()  # [K]
        if self.args.average == "samples":
            p = n / n.sum()  # differs, see "average"
        else:
            p = torch.full_like(n, 1 / len(n))
        self.w = average([up["w"] for up in uploads.values()], p)  # Alg. 2; BN's statistics too


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS)


if __name__ == "__main__":
    run(Server, Client, arguments())
