"""MOON: model-contrastive federated learning (Li, He, Song, CVPR 2021; arXiv 2103.16257).

    python -m baselines.moon --dataset officecaltech --scale laptop
    python -m baselines.moon --dataset officecaltech --projection      # with the paper's projection head

FedAvg in which a client pulls its representation of an image to the global model's and pushes it away from
that of its own model of the round before.
Server keeps w. Client k keeps w_k of the last round in which it trained. Down: w. Up: w_k, n_k.

Paper                                                            This file
Sec. 3.2  projection head between encoder and classifier         build (--projection)
Eq. (3)   l_con of z, z_glob and z_prev, cosine similarities     contrastive
Eq. (4)   l = l_sup + mu l_con                                   Client.train
Alg. 1    z_glob of w^t, z_prev of w_k^(t-1), not trained        frozen
Alg. 1    w^(t+1) = sum_k |D_k|/|D| w_k                          Server.update
Symbols as in the paper: z representation, w^t global model, tau temperature, mu weight. --mu 0 is FedAvg. The
first round has no l_con; to a client that trains later for the first time the initial w is its w_k^(t-1). In
the authors' code that is a random network of its own. The unseen client of --protocol lodo has the global
model. Left out: nothing.

Where paper, codes (the authors', QinbinLi/MOON @ 8fcba3c; FLGo 0.3.29, FDSE's framework; PFLlib @ d832e76)
and this file differ; in full: papers/baselines/moon.md
  what              paper        authors      FLGo            PFLlib      here          flag
  z is the output   projection   projection   encoder         encoder     encoder       --projection
  frozen networks   -            eval         own: train      train       eval          -
  first round       -            no l_con     no l_con        constant    no l_con      -
  a late client's   -            its random   no l_con        initial w   initial w     -
  z_prev is of                   network
  tested model      w            w            w               w           w             --after-training
  clipping          none         none         10              none        FDSE's, 10    --clip
  mu                5, 1, 1      1            FDSE's grid     0           0.1 or 1      --mu
  learning rate     0.01         0.1          tuned           0.005       0.05 or 0.1   --lr
"""

import copy
from dataclasses import dataclass

import common
from common import (ClientData, Payload, arg, autocast, average, backbone, batches, load, parse, run,
                    schedules, sgd, source, state)

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    mu: float = arg(1.0, "weight of the model-contrastive loss, Eq. (4); 0: FedAvg", low=0, source="ours")
    tau: float = arg(0.5, "temperature of the similarities, Eq. (3)", above=0,
                     source="text of FDSE, A7.4")
    projection: bool = arg(False, "use the paper's projection head between encoder and classifier: two "
                                  "linear layers to 256 numbers", source="cited code, FLGo-Bench")


# FDSE tuned mu on 0.1, 1, 5 and 10, with tau 0.5, and does not say what it found (A7.4). FLGo-Bench is by the
# same author.
BENCH = "cited code, FLGo-Bench"
PAPER = {
    "digits": schedules.DIGITS,
    "officecaltech": schedules.FDSE["officecaltech"] | source(BENCH, lr=0.05, mu=1.0),
    "pacs": schedules.FDSE["pacs"] | source(BENCH, lr=0.05, mu=1.0),
    "domainnet10": schedules.FDSE["domainnet10"] | source(BENCH, lr=0.1, mu=0.1),
}


def build(args: Args, channels: int, classes: int) -> nn.Module:
    """The backbone; with --projection z is what two more layers make of it (Sec. 3.2)."""
    net = backbone(args, channels, classes)
    if args.projection:
        dim = net.head.in_features
        net.body = nn.Sequential(net.body, nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 256))
        net.head = nn.Linear(256, classes)
    return net


def contrastive(z: Tensor, z_glob: Tensor, z_prev: Tensor, tau: float) -> Tensor:
    """l_con, Eq. (3), of z [B, D]: -log of the share of exp(sim(z, z_glob)/tau), the mean over the batch."""
    similarities = [cosine_similarity(z, z_glob), cosine_similarity(z, z_prev)]  # [B] each
    logits = torch.stack(similarities, 1) / tau  # [B, 2]
    return -logits.log_softmax(1)[:, 0].mean()


def frozen(net: nn.Module, w: dict[str, Tensor]) -> nn.Module:
    """Another network with the weights w, in evaluation mode, to compare with."""
    return load(copy.deepcopy(net), w).eval().requires_grad_(False)


class Client:
    keeps = ("previous",)

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        self.previous = state(net)  # w_k of the last round in which it trained

    def train(self, down: Payload, t: int) -> Payload:
        """PartyLocalTraining of Alg. 1."""
        args = self.args
        model = load(self.net, down["w"]).train()
        opt = sgd(model, args, t)
        if t:
            glob, previous = frozen(model, down["w"]), frozen(model, self.previous)
        losses = []
        cons = []
        for x, y in batches(self.data.train, args, t, self.k):  # x [B, C, H, W]; y [B]
            with autocast(args):
                z = model.features(x)  # [B, D]
                loss = cross_entropy(model.classify(z), y)  # l_sup
            losses.append(loss.detach())
            if t:  # in the first round there is no previous model
                with torch.no_grad(), autocast(args):
                    z_glob, z_prev = glob.features(x), previous.features(x)
                l_con = contrastive(z.float(), z_glob.float(), z_prev.float(), args.tau)  # Eq. (3)
                cons.append(l_con.detach())
                loss = loss + args.mu * l_con  # Eq. (4)
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()
        self.log = {"loss": torch.stack(losses).mean()}
        if cons:
            self.log["contrastive"] = torch.stack(cons).mean()
        w_k = state(model)
        self.previous = w_k
        return {"w": w_k, "n": torch.tensor(len(self.data.train))}

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
        p = n / n.sum()
        self.w = average([up["w"] for up in uploads.values()], p)  # Alg. 1; BN's too


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
