"""FedAvg: local SGD from the common model, averaged at the server (McMahan et al., AISTATS 2017, v4).

    python fedavg.py --dataset officecaltech --scale laptop

Server keeps w. Client k keeps nothing between rounds. Down: w. Up: w_k, n_k.

Paper                                               This file
Alg. 1  "Server executes", last line: the average   Server.update
Alg. 1  ClientUpdate(k, w): E epochs of batches B   Client.train
Alg. 1  the rounds, the random set S_t of clients   common.rounds
Symbols as in the paper: w global model, w_k local model, n_k samples of client k, m_t their sum over the
round's clients, E local epochs, B batch size. Left out: nothing.

Where the papers that compare with FedAvg, and this file, differ (in full: docs/methods/fedavg.md)
  what              papers                                       here              flag
  average           n_k/m_t (FDSE), 1/K (FedSR, FedADG,          n_k/m_t           --average uniform
                    FedCiR), not said (FedGaLA)
  learning rate     FDSE: tuned, value not given; its code 0.1   0.1               --lr
  its decay, size   FDSE: 0.998, 224; its code 0.9998, 256       0.998, 224        --lr-decay, --image-size
  momentum, decay   FDSE: not given; its code 0 and 1e-3         0 and 1e-3        --momentum, --weight-decay
  RotatedMNIST      FedSR: 500 epochs, E = 5 steps a round;      1,500 rounds      --rounds
                    momentum, decay not said, in its code        0.9, new each     --momentum
                    0.9 and 5e-4                                 round; 5e-4       --weight-decay
"""

from dataclasses import dataclass

import common
from common import (ClientData, Payload, arg, autocast, average, batches, captured, load, parse, run, sgd,
                    source, state)

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    variant: str = arg("usual", "settings: usual, or those of FedCiR's Table 1", choices=("usual", "fedcir"))
    average: str = arg("samples", "weights of the average: samples (n_k/m_t) or uniform (1/|S_t|)",
                       choices=("samples", "uniform"), source="text of FedAvg, Alg. 1")


DIGITS = source("ours", rounds=60, lr=0.05, batch_size=32)
# The schedule of FDSE's Table 1, of all its methods. Table 2's accuracies are shares of the target's 10%.
OF_FDSE = (source("text of FDSE, Sec. 5.1 and A7.4", rounds=500, batch_size=50, lr_decay=0.998, clip=10.0)
           | source("text of FDSE, A7.1", image_size=224, split="0.8/0.1/0.1")
           | source("text of FDSE, A7.2 and Table A5", backbone="alexnet_bn")
           | source("numbers of FDSE, Table 2", target_part="test")
           | source("code of FLGo ea07f1d, flgo/utils/fflow.py", momentum=0.0))
FDSE = {
    "officecaltech": (OF_FDSE | source("text of FDSE, Sec. 5.1", epochs=1)
                      | source("code of FDSE dd266a2, config/office/fedavg.yml", lr=0.1, weight_decay=1e-3)),
    "pacs": (OF_FDSE | source("text of FDSE, Sec. 5.1", epochs=5)
             | source("code of FDSE dd266a2, config/pacs/fedavg.yml", lr=0.1, weight_decay=1e-3)),
    "domainnet10": (OF_FDSE | source("text of FDSE, Sec. 5.1", epochs=5)
                    | source("code of FDSE dd266a2, config/domainnet.yml", lr=0.1, weight_decay=1e-3)),
}
# 500 epochs of a client's 15 batches are 1,500 rounds of 5 steps. FedSR's own FedAvg row keeps the momentum
# over the rounds: fedsr.py --variant fedavg.
OF_MNIST = (source("text of FedSR, Sec. 4.2", backbone="smallcnn3", protocol="lodo", rounds=1500, steps=5,
                   batch_size=64, lr=0.001)
            | source("code of FedSR ba8d894, src/methods/base.py", momentum=0.9, clip=0.0)
            | source("code of FedSR ba8d894, src/argument.py", weight_decay=5e-4)
            | source("cited code, DIRT 2635178, domain_gen_rotatedmnist", image_size=28, augment="none")
            | source("ours, of FedSR's 90/10", split="0.9/0.05/0.05")
            | source("ours", eval_every=50))
MNIST = dict.fromkeys(("rotatedmnist", "rotatedmnist-t10k"),
                      OF_MNIST | source("text of FedSR, its objective", average="uniform"))
# FedCiR: the defaults of the two datasets that only it has, and --variant fedcir.
OF_FEDCIR = (source("text of FedCiR, Sec. 6.1", backbone="resnet18", image_size=128, rounds=300, steps=20,
                    batch_size=32, lr=0.01, momentum=0.9, weight_decay=5e-4)
             | source("ours", protocol="indomain", target_part="all", lr_decay=1.0, clip=0.0))
FEDCIR = OF_FEDCIR | source("text of FedCiR, its average", average="uniform")
# To evaluate Camelyon17's 91,000 validation and test images in each round would be 90% of the run.
CAMELYON = FEDCIR | source("ours", eval_every=10)
FEDSR = (source("text of FedSR, Sec. 4.2", normalize="imagenet", augment="fedsr", protocol="lodo",
                image_size=224, rounds=1000, steps=5, batch_size=64, lr=0.01, momentum=0.9, weight_decay=5e-4)
         | source("text of FedSR, its objective", average="uniform")
         | source("code of FedSR ba8d894, src/methods/base.py", weights="imagenet")
         | source("ours, of FedSR's 90/10", split="0.9/0.05/0.05")
         | source("ours", eval_every=20))
PAPER = {
    "digits": DIGITS,
    **MNIST,
    **FDSE,
    "camelyon17": CAMELYON,
    "iwildcam": FEDCIR,
    "officehome": FEDSR | source("text of FedSR, Sec. 4.2", backbone="resnet50"),
    "domainnet": FEDSR | source("text of FedSR, Sec. 4.2", backbone="resnet50"),
    "vlcs": FEDSR | source("ours", backbone="resnet18"),  # FedADG's FedAvg: fedadg.py --no-adversarial
    "terrainc": FEDSR | source("ours", backbone="resnet18"),
    "domainnet20": FEDSR | source("ours", backbone="resnet18"),
}
VARIANTS = {
    "fedcir": {
        "officecaltech": FEDCIR,
        "pacs": FEDCIR,
        "domainnet10": FEDCIR,
        "camelyon17": CAMELYON,
        "iwildcam": FEDCIR,
    },
}


class Client:
    keeps = ()  # nothing outlives a round

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data

    def train(self, down: Payload, t: int) -> Payload:
        r"""ClientUpdate(k, w) of Alg. 1.

        $$ w \leftarrow w - \eta \nabla \ell(w; b) \tag{ClientUpdate: step} $$
        """
        args = self.args
        model = self.model(down).train()
        opt = sgd(model, args, t)

        @captured(args, model, opt)
        def step(x, y):  # x [B, C, H, W]; y [B]
            with autocast(args):
                z = model.features(x)  # [B, D]
                loss = cross_entropy(model.classify(z), y)
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()  # w <- w - eta grad l(w; b)
            return loss.detach()

        losses = [step(x, y) for x, y in batches(self.data.train, args, t, self.k)]
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
