"""LG-FedAvg: local representations below, a global model on top (Liang et al., 2020; arXiv 2001.01523).

    python -m baselines.lgfedavg --dataset officecaltech --scale laptop
    python -m baselines.lgfedavg --dataset officecaltech --shared bottom       # the other way round: FedPer

Each client has lower layers of its own, which make its representation; the layers above are averaged.
Server keeps theta_g, the shared layers. Client k keeps theta_k, the others, with the statistics of their
batch normalization. Down: theta_g. Up: theta_g,k and n_k.

Paper                                                         This file
Sec. 3  local representation theta_k, global model theta_g    layers_of, shared_entries
Alg. 1  the client trains theta_k and theta_g together        Client.train
Alg. 1  theta_g = sum_k n_k/n theta_g,k                       Server.update
--shared all is FedAvg. With --protocol lodo clients send theta_k too: the unseen client has the mean over
the clients of the last round, so that it is tested with an average of whole networks. Left out: losses on the
representation beside cross-entropy (self-supervised, adversarial); no table needs them.

Where paper, codes (the authors', pliang279/LG-FedAvg @ 7af0568; FLGo @ ea07f1d) and this file differ; in
full: papers/baselines/lgfedavg.md
  what             paper    authors' code           FLGo              here              flag
  shared layers    the top  MLP: top 3 of 5; CNN:   the classifier    the classifier    --shared, --layers
                            the convolutions
  start            random   a trained FedAvg model  random            random            --weights
  average          n_k/n    uniform                 n_k/n             n_k/n             --average uniform
  tested model     -        after the average       before it         after it          --after-training
  learning rate    -        0.1, MNIST 0.05         tuned             0.1               --lr
  momentum         -        0.5                     allowed           none              --momentum
"""

from dataclasses import dataclass

import common
from common import (ClientData, Payload, UserError, arg, autocast, average, batches, group_by, load, parse,
                    pick, run, schedules, sgd, state)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    shared: str = arg("top", "layers that travel: top (the last --layers), bottom (all others), or all",
                      choices=("top", "bottom", "all"), source="text of LG-FedAvg, Sec. 3")
    layers: int = arg(1, "number of layers in the top; 1: the classifier", low=1, source="cited code, FLGo")
    average: str = arg("samples", "weights of the average: samples (n_k/n) or uniform (1/K)",
                       choices=("samples", "uniform"), source="text of LG-FedAvg, Alg. 1")


# FDSE says nothing of its settings: FedAvg's.
PAPER = {"digits": schedules.DIGITS, **schedules.FDSE}


def module_of(name: str) -> str:
    """The module that an entry of a state belongs to."""
    return name.rpartition(".")[0]


def layers_of(w: dict[str, Tensor]) -> list[list[str]]:
    """The entries of a state by layer, from the bottom to the classifier. A layer is a module with a weight
    of two or more axes, and what follows it, such as its batch normalization."""
    layers = []
    for names in group_by(list(w), module_of).values():
        axes = max(w[name].ndim for name in names)
        if axes > 1 or not layers:
            layers.append([])
        layers[-1] += names
    return layers


def shared_entries(w: dict[str, Tensor], args: Args) -> list[str]:
    """The names of theta_g; all other entries are theta_k."""
    layers = layers_of(w)
    if args.layers > len(layers):
        raise UserError(f"--layers is {args.layers}; --backbone {args.backbone} has {len(layers)} layers", 2)
    if args.shared == "top":
        layers = layers[-args.layers:]
    elif args.shared == "bottom":
        layers = layers[:-args.layers]
    return [name for layer in layers for name in layer]


class Client:
    keeps = ("own",)

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        w = state(net)
        self.shared = shared_entries(w, args)
        self.own = self.local(w)  # theta_k

    def local(self, w: dict[str, Tensor]) -> dict[str, Tensor]:
        """theta_k of a whole state."""
        return {name: v for name, v in w.items() if name not in self.shared}

    def train(self, down: Payload, t: int) -> Payload:
        """Alg. 1: theta_k and theta_g together."""
        args = self.args
        model = load(self.net, self.mixture(down)).train()
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
            opt.step()
        self.log = {"loss": torch.stack(losses).mean()}
        w = state(model)
        self.own = self.local(w)
        up = {"w": pick(w, self.shared), "n": torch.tensor(len(self.data.train))}
        if args.protocol == "lodo":
            up["local"] = self.local(w)  # for the unseen client
        return up

    def mixture(self, down: Payload) -> dict[str, Tensor]:
        """(theta_k, theta_g); an unseen client has no theta_k and gets a mean."""
        if self.data.unseen:
            return down["local"] | down["w"]
        return self.own | down["w"]

    def model(self, down: Payload) -> nn.Module:
        return load(self.net, self.mixture(down))


class Server:
    keeps = ("w", "local")

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.args, self.clients = args, clients
        w = state(net)
        shared = shared_entries(w, args)
        self.w = pick(w, shared)
        self.local = {name: v for name, v in w.items() if name not in shared}  # for the unseen client

    def download(self, k: int) -> Payload:
        if k < self.clients:
            return {"w": self.w}
        return {"w": self.w, "local": self.local}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        n = torch.stack([up["n"] for up in uploads.values()]).double()  # [K]
        if self.args.average == "samples":
            p = n / n.sum()
        else:
            p = torch.full_like(n, 1 / len(n))
        self.w = average([up["w"] for up in uploads.values()], p)  # Alg. 1
        if self.args.protocol == "lodo":
            self.local = average([up["local"] for up in uploads.values()], p)


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv)


if __name__ == "__main__":
    run(Server, Client, arguments())
