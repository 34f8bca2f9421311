"""FedHEAL: updates against a client's past are discarded, and clients that go far count more (Chen, Huang,
Ye, "Fair Federated Learning under Domain Skew with Local Consistency and Domain Diversity", CVPR 2024).

    python -m baselines.fedheal --dataset officecaltech --scale laptop

Server keeps w, and of each client that has trained: how often each entry of w increased, the number of its
rounds, its last distance d_k, its weight p_k and that weight's last change. Client k keeps nothing between
rounds. Down: w. Up: w_k.

Both codes                                                        This file
Parameter-harmonized learning (FPHL)
  P_k, the share of its rounds in which an entry increased        Server.mask
  an update is kept if its direction's share is above tau         consistent
  the other updates are discarded, entry by entry                 aggregate
Aggregation-equalized learning (FAEL)
  d_k, the distance of w_k from w in what is kept                 distance (sum of the tensors' norms)
  Delta p_k <- (1-beta) Delta p_k + beta d_k / sum_j d_j,
  p_k <- p_k + Delta p_k                                          reweighted
  the average with p_k / sum_j p_j                                Server.weights, aggregate
Symbols as in the paper. An entry of w gets the average of the clients that keep their update of it, their
weights divided by their sum, and stays as it is if none does. A client's first update is kept whole. With
--tau -1 --beta 0 the parameters are FedAvg's with uniform weights, bit for bit; BN's counters of batches may
be rounded otherwise with K = 6, 7, 13, ... clients. With --participation below 1 a client's p_k grows only in
its rounds, so it depends on how often it was drawn, as in the authors' rule. The unseen client of --protocol
lodo has the server's model. Left out: FedHEAL on top of other methods than FedAvg.

The paper's text was not at hand; d_k is as both codes have it. Where the codes (the authors'
yuhangchen0/FedHEAL @ fa4f640; FDSE's WwZzz/FDSE_CVPR25 @ dd266a2) and this file differ; in full:
papers/baselines/fedheal.md
  what                    authors' code         FDSE's code          here                    flag
  first round in P_k      counts once           counts twice         once                    --first-counts 2
  rounds in P_k           of the run            of the run           of the client           -
  discarded too           BN's statistics       BN's statistics      BN's statistics         --masked
  sum over j              all that ever trained all                  all that ever trained   -
  tau                     0.3                   0.2 (Office), 0.1    as FDSE's code, 0.3     --tau
                                                (PACS)               on DomainNet
  beta                    0.4                   0.4                  0.4                     --beta
  learning rate           0.001                 0.1                  0.1                     --lr
  momentum, decay         0.9, 1e-5             0, 1e-3              0, 1e-3                 --momentum, ...
"""

from dataclasses import dataclass
from functools import partial

import common
from common import (ClientData, Payload, arg, autocast, average, batches, entrywise, load, parse, pick, run,
                    schedules, sgd, source, state)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    tau: float = arg(0.3, "keep an entry of an update if its direction was the same in more than this share "
                          "of the client's earlier rounds; -1: discard nothing", low=-1, high=1,
                     source="code of FedHEAL")
    beta: float = arg(0.4, "how fast the weights follow the distances; 0: uniform weights", low=0, high=1,
                      source="code of FedHEAL")
    masked: str = arg("all", "entries that may be discarded: all (parameters and BN's statistics) or "
                             "parameters alone", choices=("all", "parameters"), source="code of FedHEAL")
    first_counts: int = arg(1, "number of rounds for which a client's first round counts in P_k; 2: FDSE's "
                               "code", low=1, high=1_000_000, source="code of FedHEAL")


# FDSE tuned tau on 0.1, 0.2, ..., 0.5 and does not say what it found (A7.4). Its code has no settings of
# FedHEAL on DomainNet: there tau is what both codes begin with.
PAPER = {
    "digits": schedules.DIGITS,
    "officecaltech": schedules.FDSE["officecaltech"]
    | source("code of FDSE, config/office/fedheal.yml", tau=0.2),
    "pacs": schedules.FDSE["pacs"] | source("code of FDSE, config/pacs/fedheal.yml", tau=0.1),
    "domainnet10": schedules.FDSE["domainnet10"] | source("code of FedHEAL", tau=0.3),
}


def consistent(increased: Tensor, rises: Tensor, count: int, tau: float) -> Tensor:
    """Which entries keep their update: `rises` says where it is an increase, `increased` in how many of the
    `count` rounds before there was one."""
    alike = torch.where(rises, increased, count - increased)  # rounds in its direction: P_k or 1 - P_k
    return alike > tau * count


def distance(kept: list[Tensor]) -> float:
    """d_k of the kept updates of the parameters: the sum of the tensors' norms."""
    return float(torch.stack(torch._foreach_norm(kept)).double().sum())


def reweighted(p: float, change: float, share: float, beta: float) -> tuple[float, float]:
    """p_k and Delta p_k after a round in which d_k is this share of all clients'."""
    change = (1 - beta) * change + beta * share
    return p + change, change


def mean_of_kept(w: Tensor, mean: Tensor, states: list[Tensor], masks: list[Tensor], p: Tensor) -> Tensor:
    """The average of what the masks [K] keep of the states [K], entry by entry."""
    total, weight = torch.zeros_like(w), torch.zeros_like(w)
    for w_k, m_k, p_k in zip(states, masks, p.tolist()):
        m = m_k.to(total.dtype)
        total.add_(m * w_k, alpha=p_k)
        weight.add_(m, alpha=p_k)
    some = torch.where(weight > 0, total / weight, w)  # w if all have discarded it
    every = torch.stack(masks).all(0)
    return torch.where(every, mean, some)


def aggregate(w: dict[str, Tensor], states: list[dict[str, Tensor]], masks: list[dict[str, Tensor]],
              p: Tensor) -> dict[str, Tensor]:
    """The average of what is kept; what has no mask is averaged as in FedAvg."""
    mean, K = average(states, p), len(p)

    def of_vectors(w, mean, *states_and_masks):
        return mean_of_kept(w, mean, states_and_masks[:K], states_and_masks[K:], p)

    return mean | entrywise(of_vectors, pick(w, list(masks[0])), mean, *states, *masks)


class Client:
    keeps = ()  # nothing outlives a round

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data

    def train(self, down: Payload, t: int) -> Payload:
        """FedAvg's local training."""
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
            opt.step()
        self.log = {"loss": torch.stack(losses).mean()}
        return {"w": state(model)}

    def model(self, down: Payload) -> nn.Module:
        return load(self.net, down["w"])


class Server:
    keeps = ("w", "increased", "count", "d", "p", "change")

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.args = args
        self.w = state(net)
        self.parameters = [name for name, _ in net.named_parameters()]
        self.masked = self.parameters
        if args.masked == "all":
            self.masked = [name for name, v in self.w.items() if v.is_floating_point()]  # not BN's counters
        self.increased = {}  # of client k and an entry: rounds in which it increased; int32
        self.count = {}  # of client k: its rounds
        self.d = {}  # of client k: d_k of its last round
        self.p = {}  # of client k: its weight, before the division by their sum
        self.change = {}  # of client k: Delta p_k

    def download(self, k: int) -> Payload:
        return {"w": self.w}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        masks = []
        for k, up in uploads.items():
            delta = entrywise(torch.sub, pick(up["w"], self.masked), self.w)
            mask = self.mask(k, delta)
            kept = entrywise(torch.mul, pick(delta, self.parameters), mask)
            self.d[k] = distance(list(kept.values()))
            masks.append(mask)
        self.w = aggregate(self.w, [up["w"] for up in uploads.values()], masks, self.weights(list(uploads)))

    def mask(self, k: int, delta: dict[str, Tensor]) -> dict[str, Tensor]:
        """FPHL: which entries client k keeps; its update becomes part of its past."""
        rises = entrywise(lambda v: v >= 0, delta)
        if k not in self.count:
            mask = entrywise(torch.ones_like, rises)
            increased = entrywise(lambda v: self.args.first_counts * v.int(), rises)
            self.count[k] = self.args.first_counts
        else:
            past = self.increased[k]
            mask = entrywise(partial(consistent, count=self.count[k], tau=self.args.tau), past, rises)
            increased = entrywise(torch.add, past, rises)
            self.count[k] += 1
        self.increased[k] = increased
        return mask

    def weights(self, clients: list[int]) -> Tensor:
        """FAEL: the weights [K] of the round's clients from the distances of all that ever trained."""
        total = max(sum(self.d.values()), 1e-12)
        for k in clients:
            p, change = self.p.get(k, 1 / len(clients)), self.change.get(k, 0.0)
            self.p[k], self.change[k] = reweighted(p, change, self.d[k] / total, self.args.beta)
        p = torch.tensor([self.p[k] for k in clients], dtype=torch.float64)
        return p / p.sum()


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv)


if __name__ == "__main__":
    run(Server, Client, arguments())
