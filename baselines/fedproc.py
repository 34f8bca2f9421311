"""FedProc: prototypical contrastive federated learning (Mu et al., FGCS 2023; arXiv 2109.12273).

    python -m baselines.fedproc --dataset officecaltech --scale laptop
    python -m baselines.fedproc --projection --fade 100      # on digits: nearest to the authors' code

FedAvg in which a client pulls its features to the prototype of their class, the mean feature over all
clients, and pushes them from those of the other classes; the further training is, the less.
Server keeps w and the prototypes c [C, D]. Client k keeps nothing between rounds. Down: w, c. Up: w_k, n_k,
and of each class the sum of the features and how many there are.

Authors' code, others' accounts of the paper                                This file
local network: encoder, projection head, classifier                         build (--projection)
L_gpc = -log exp(z c_y) / sum_j exp(z c_j), z and c_j of length 1           prototypical
L = alpha_t L_gpc + (1 - alpha_t) L_ce, alpha_t = 1 - t/T                   hybrid, alpha_of_round
c_j = sum_k sum_(i in D_k^j) z_i / sum_k n_k^j, z by the trained w_k        class_sums, Server.update
w^(t+1) = sum_k n_k/n w_k                                                   Server.update
Symbols as in the paper: z feature, c_j prototype of class j, D_k^j the n_k^j images of class j of client k,
t round, T rounds; c_j is the mean over the clients of the round, and stays as it was if they have none of its
images. An image of a class without a prototype has its L_ce alone, so all have in the first round. --alpha 0
is FedAvg, but for the prototypes, which then, and after --fade, still cost and travel. The unseen client of
--protocol lodo has the global model. Left out: nothing.

The paper's text was not at hand: its formulas are as the authors' code and others' accounts have them. Where
the codes (the authors', MuXutong/FedProc @ 3223a34; RethinkFL, WenkeHuang/RethinkFL @ 1119dbd), what FedCiR
ran, and this file differ; in full: papers/baselines/fedproc.md
  what             authors            RethinkFL            FedCiR       here               flag
  z is the output  projection, which  encoder              silent       encoder            --projection
                   the classifier
                   sees
  alpha_t          1 - t/100          1 - t/(T-1)          silent       1 - t/T            --fade 100
  prototypes from  a pass in training the last local       costs        the round's        --prototypes
                   mode, augmented    epoch as it was      suggest no   batches; digits: a pass
                                      trained              pass         pass in evaluation
  mean over        images             clients              silent       images             -
  its features     of length 1        as they are          silent       of length 1        -
  first round      L_ce               nothing: 0 L_ce      silent       L_ce               -
  average of w_k   n_k/n              n_k/n                1/|K_t|      1/K; digits n_k/n  --average
"""

from dataclasses import dataclass

import common
from common import (ClientData, Payload, arg, autocast, average, backbone, batches, load, parse,
                    representations, run, schedules, sgd, source, state)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    alpha: float = arg(1.0, "weight of L_gpc at the start; it falls over the rounds; 0: FedAvg", low=0,
                       high=1, source="accounts of the paper")
    fade: int = arg(0, "number of rounds in which the weight of L_gpc falls to 0; 0: all rounds", low=0,
                    source="accounts of the paper")
    prototypes: str = arg("pass", "features for the prototypes: pass (over the training images with the "
                                  "trained network) or batches (of the round's training)",
                          choices=("pass", "batches"), source="accounts of the paper")
    projection: bool = arg(False, "use the paper's projection head between encoder and classifier: two "
                                  "linear layers to 256 numbers, then length 1",
                           source="ours: FedCiR is silent")
    average: str = arg("samples", "weights of the average: samples (n_k/n) or uniform (1/K)",
                       choices=("samples", "uniform"), source="code of FedProc")

    def depends_on_rounds(self) -> str:
        if self.fade or not self.alpha:
            return ""
        return "alpha_t = 1 - t/T falls to 0 over all rounds T (--fade sets another number)"


# FedCiR gives no settings of FedProc. The TFLOPs per GB in its Table 3 are FedAvg's to three digits, which
# suggests no further pass; what is counted there, it does not say.
NO_PASS = source("numbers of FedCiR, Table 3", prototypes="batches")
PAPER = {
    "digits": schedules.DIGITS,
    "officecaltech": schedules.FEDCIR["officecaltech"] | NO_PASS,
    "pacs": schedules.FEDCIR["pacs"] | NO_PASS,
    "domainnet10": schedules.FEDCIR["domainnet10"] | NO_PASS,
    "camelyon17": schedules.FEDCIR["camelyon17"] | NO_PASS,
    "iwildcam": schedules.FEDCIR["iwildcam"] | NO_PASS,
}
LAPTOP = {  # as fedcir.py
    "pacs": dict(image_size=32, rounds=24),
    "officecaltech": dict(image_size=32, rounds=24),
}


class Unit(nn.Module):
    """Rows [B, D] to length 1."""

    def forward(self, z: Tensor) -> Tensor:
        return normalize(z)


def build(args: Args, channels: int, classes: int) -> nn.Module:
    """The backbone; with --projection z is what two more layers make of it, of length 1."""
    net = backbone(args, channels, classes)
    if args.projection:
        dim = net.head.in_features
        net.body = nn.Sequential(net.body, nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 256), Unit())
        net.head = nn.Linear(256, classes)
    return net


def prototypical(z: Tensor, c: Tensor, y: Tensor) -> Tensor:
    """L_gpc [B] of features z [B, D] with labels y [B]; prototypes c [C, D]. One that is 0 is none: it is
    left out of the sum, and an image of its class has 0."""
    known = c.any(1)  # [C]
    cosines = normalize(z) @ normalize(c).T  # [B, C]
    l_gpc = cross_entropy(cosines.masked_fill(~known, -torch.inf), y, reduction="none")
    return torch.where(known[y], l_gpc, 0)


def hybrid(l_gpc: Tensor, l_ce: Tensor, alpha: Tensor) -> Tensor:
    """L = alpha L_gpc + (1 - alpha) L_ce of each image [B], the mean over the batch."""
    return (alpha * l_gpc + (1 - alpha) * l_ce).mean()


def alpha_of_round(args: Args, t: int) -> float:
    """alpha_t = 1 - t/T, times --alpha."""
    return args.alpha * max(1 - t / (args.fade or args.rounds), 0)


def class_sums(z: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Of each class the sum [C, D] of the features, brought to length 1, and their number [C]; z [N, D],
    y [N]."""
    of_class = y[:, None] == torch.arange(classes, device=y.device)  # [N, C]
    return of_class.T.to(z) @ normalize(z), of_class.sum(0)


class Client:
    keeps = ()  # nothing outlives a round

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data

    def train(self, down: Payload, t: int) -> Payload:
        args = self.args
        model = self.model(down).train()
        c = down["prototypes"]  # [C, D]
        known, alpha = c.any(1), alpha_of_round(args, t)
        contrasts = bool(t and alpha and known.any())
        opt = sgd(model, args, t)
        losses, terms = [], []
        zs, ys = [], []
        for x, y in batches(self.data.train, args, t, self.k):  # x [B, C, H, W]; y [B]
            with autocast(args):
                z = model.features(x)  # [B, D]
                logits = model.classify(z)
                loss = cross_entropy(logits, y)  # L_ce
            losses.append(loss.detach())
            if args.prototypes == "batches":
                zs.append(z.detach().float())
                ys.append(y)
            if contrasts:
                l_gpc = prototypical(z.float(), c, y)
                l_ce = cross_entropy(logits.float(), y, reduction="none")
                loss = hybrid(l_gpc, l_ce, alpha * known[y])
                terms.append(l_gpc.detach().mean())
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()
        self.log = {"loss": torch.stack(losses).mean()}
        if terms:
            self.log["prototypical"] = torch.stack(terms).mean()
        if zs:
            z, y = torch.cat(zs), torch.cat(ys)
        else:
            z, y = representations(model, self.data.train, args)  # differs, see "prototypes from"
        sums, counts = class_sums(z.to(args.device), y.to(args.device), len(c))
        return {"w": state(model), "n": torch.tensor(len(self.data.train)), "sums": sums, "counts": counts}

    def model(self, down: Payload) -> nn.Module:
        return load(self.net, down["w"])


class Server:
    keeps = ("w", "prototypes")

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.args = args
        self.w = state(net)
        self.prototypes = torch.zeros_like(net.head.weight.detach())  # [C, D]; 0: none yet

    def download(self, k: int) -> Payload:
        return {"w": self.w, "prototypes": self.prototypes}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        n = torch.stack([up["n"] for up in uploads.values()]).double()  # [K]
        if self.args.average == "samples":
            p = n / n.sum()
        else:
            p = torch.full_like(n, 1 / len(n))
        self.w = average([up["w"] for up in uploads.values()], p)  # BN's statistics too
        sums = torch.stack([up["sums"] for up in uploads.values()]).sum(0)  # [C, D]
        counts = torch.stack([up["counts"] for up in uploads.values()]).sum(0)[:, None]  # [C, 1]
        self.prototypes = torch.where(counts > 0, sums / counts, self.prototypes)


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, laptop=LAPTOP)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
