"""FedAvg: local SGD from the common model, averaged at the server (McMahan et al., AISTATS 2017, v4).

    python fedavg.py --dataset officecaltech --scale laptop

Server keeps w (parameters, BN's statistics). Client k keeps nothing between rounds. Down: w. Up: w_k, n_k.

Paper                                               This file
Alg. 1  "Server executes", last line: the average   Server.update
Alg. 1  ClientUpdate(k, w): E epochs of batches B   Client.train
Alg. 1  the rounds, the random set S_t of clients   common.rounds
Symbols as in the paper: w global model, w_k local model, n_k samples of client k, m_t their sum over the
round's clients, E local epochs, B batch size. Left out: nothing.

Where the papers that compare with FedAvg, and this file, differ (in full: papers/fedavg/differences.md)
  what              papers                                       here              flag
  average           n_k/m_t (FDSE), 1/K (FedSR, FedADG,          n_k/m_t; 1/K with --average uniform
                    FedCiR), not said (FedGaLA)                  FedSR's, FedCiR's
                                                                 settings
  learning rate     FDSE: tuned, value not given; its code 0.1   0.1               --lr
  its decay, size   FDSE: 0.998, 224; its code 0.9998, 256       0.998, 224        --lr-decay, --image-size
  momentum, decay   FDSE: not given; its code 0 and 1e-3         0 and 1e-3        --momentum, --weight-decay
  RotatedMNIST:     FedSR: 500 epochs of 15 batches              1,500 rounds of   --rounds, --steps
                                                                 5 batches
    its momentum    FedSR: not said; its code 0.9                0.9, from 0 in    --momentum
                                                                 each round
    its decay       FedSR: not said; its code 5e-4               5e-4              --weight-decay
Values without a paper are those on FDSE's data; --show-settings has those of each dataset.
"""

from dataclasses import dataclass

import common
from common import (ClientData, Payload, arg, autocast, average, batches, load, parse, run, schedules, sgd,
                    state)

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    variant: str = arg("usual", "settings: usual, or those of FedCiR's Table 1", choices=("usual", "fedcir"))
    average: str = arg("samples", "weights of the average: samples (n_k/m_t) or uniform (1/|S_t|)",
                       choices=("samples", "uniform"), source="text of FedAvg, Alg. 1")


PAPER = {
    "digits": schedules.DIGITS,  # 60 rounds, lr 0.05, batches of 32 (plumbing/schedules.py)
    **schedules.MNIST,
    **schedules.FDSE,
    "camelyon17": schedules.FEDCIR["camelyon17"],
    "iwildcam": schedules.FEDCIR["iwildcam"],
    **schedules.FEDSR,
}
VARIANTS = {"fedcir": schedules.FEDCIR}


class Client:
    keeps = ()  # nothing outlives a round

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):  # net is shared
        self.args, self.net, self.k, self.data = args, net, k, data

    def train(self, down: Payload, t: int) -> Payload:
        r"""ClientUpdate(k, w) of Alg. 1.

        $$ w \leftarrow w - \eta \nabla \ell(w; b) \tag{ClientUpdate: step} $$
        """
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
            opt.step()  # w <- w - eta grad l(w; b)
        self.log = {"loss": torch.stack(losses).mean()}
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
        r"""The weighted mean of the round's clients.

        $$ m_t \leftarrow \sum_{k \in S_t} n_k, \qquad
           w_{t+1} \leftarrow \sum_{k \in S_t} \frac{n_k}{m_t} w_{t+1}^k \tag{Server executes: average} $$
        """
        n = torch.stack([up["n"] for up in uploads.values()]).double()  # [|S_t|]
        if self.args.average == "samples":
            p = n / n.sum()
        else:
            p = torch.full_like(n, 1 / len(n))
        self.w = average([up["w"] for up in uploads.values()], p)  # w_{t+1} = sum_k p_k w_k; BN's too


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS)


if __name__ == "__main__":
    run(Server, Client, arguments())
