"""FedDG-GA: the weights of the average follow the generalization gaps (Zhang et al., CVPR 2023).

    python -m baselines.feddg_ga --dataset officecaltech --scale laptop --protocol lodo

FedAvg in which a client whose images the averaged model fits worse than the client's own model does has
more weight in the next average.
Server keeps w, the weights a_k of all K clients, and of each client of the last round the loss of its trained
model. Client k keeps nothing. Down: w. Up: w_k, and on its validation images the loss of w and that of w_k.

FL4Health and the authors' code                                          This file
G_k = l_k(w^(t+1)) - l_k(w_k), l_k on the validation images of client k  gaps, error, Client.train
a'_k = a_k + d^t (G_k - mean G) / max_j |G_j - mean G|                   adjusted
a_k = max(a'_k, 0) / sum_j max(a'_j, 0)                                  adjusted
d^t = (1 - t/T) d/K                                                      step_of_round
a_k = 1/K at the start                                                   Server.__init__
w^(t+1) = sum_k a_k w_k                                                  Server.update
A client measures w^(t+1) when it has it, at the start of round t+1, so that nothing is sent twice; the new
weights act in that round's average. With --participation below 1 the weights of the round's clients are
divided by their sum, and those of clients that were in both rounds change, among themselves. With --step-size
0 the parameters are those of FedAvg with --average uniform, bit for bit; BN's counters of batches may be
rounded otherwise with K = 6, 7, 13, ... clients. The validation images both steer the weights and choose the
round that is reported. The unseen client of --protocol lodo has the global model. Left out: the adjustment on
other methods than FedAvg; the authors have it on FedProx, SCAFFOLD, RSC and AM too.

The paper's text was not at hand: its formulas are as FL4Health (VectorInstitute/FL4Health @ 04a45f1) has
them, which says where it departs from the authors' code. Where both (the authors': MediaBrain-SJTU/FedDG-GA
@ 8d03a24) and this file differ; in full: papers/baselines/feddg_ga.md
  what              authors' code              FL4Health        here                 flag
  mean of the gaps  not subtracted             subtracted       subtracted           --rule code
  d^t               (1 - (t-1)/T) d/3          (1 - t/T) d      (1 - t/T) d/K        --step, --rule
  d                 0.2, of 3 clients          0.2              0.2                  --step-size
  a'_k above 1      is 1                       is 1             stays                --rule code
  gap of            accuracy, or the loss      the loss         the loss             --gap error
  all gaps 0        0/0                        a_k stays        a_k stays            -
  some clients      no                         refused          yes, as above        --participation
  optimizer         kept over the rounds       new each round   new each round       -
"""

from dataclasses import dataclass

import common
from common import (ClientData, Data, Payload, arg, autocast, average, batches, in_order, load, parse, run,
                    schedules, sgd, source, state)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    step_size: float = arg(0.2, "step size d of the weights in the first round; it falls to 0 over the "
                                "rounds; 0: uniform weights", low=0, source="code of FedDG-GA")
    step: str = arg("share", "largest change of a weight: share (1/K of --step-size) or whole (all of it)",
                    choices=("share", "whole"), source="code of FedDG-GA, of K = 3 clients")
    gap: str = arg("loss", "quantity of the gap: loss (cross-entropy) or error (1 - accuracy)",
                   choices=("loss", "error"), source="FL4Health's account of the paper")
    rule: str = arg("paper", "how the weights change: as in the paper, or as in the authors' code, which "
                             "does not subtract the mean gap", choices=("paper", "code"),
                    source="FL4Health's account of the paper")

    def depends_on_rounds(self) -> str:
        return "the step d^t = (1 - t/T) d falls to 0 over all rounds T" if self.step_size else ""


# FDSE gives no settings of FedDG-GA; its one table with it leaves a domain out.
LEFT_OUT = source("text of FDSE, Table A9", protocol="lodo")
PAPER = {
    "digits": schedules.DIGITS,
    "officecaltech": schedules.FDSE["officecaltech"] | LEFT_OUT,
    "pacs": schedules.FDSE["pacs"] | source("ours, as Table A9, which has no PACS", protocol="lodo"),
    "domainnet10": schedules.FDSE["domainnet10"] | LEFT_OUT,
}


@torch.no_grad()
def error(model: nn.Module, data: Data, args: Args) -> Tensor:
    """l_k: the mean loss of the images of `data`, or the share that is wrong, in eval mode; a scalar."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=args.device)
    for x, y in in_order(data, args):
        with autocast(args):
            logits = model(x)  # [B, C]
        if args.gap == "loss":
            total += cross_entropy(logits.float(), y, reduction="sum")
        else:
            total += (logits.argmax(1) != y).sum()
    return total / len(data)


def gaps(after: dict[int, Tensor], before: dict[int, Tensor]) -> dict[int, float]:
    """G_k of the clients that are in both: the error of the averaged model minus that of the client's own."""
    gap_of = {}
    for k in after:
        if k in before:
            gap_of[k] = float(after[k]) - float(before[k])
    return gap_of


def step_of_round(args: Args, t: int, clients: int) -> float:
    """d^t = (1 - t/T) d/K; in the authors' code a round behind. A step of d itself empties weights of 1/K."""
    if args.rule == "code":
        t = t - 1
    d = args.step_size
    if args.step == "share":
        d = d / clients
    return (1 - t / args.rounds) * d


def adjusted(a: Tensor, gap: Tensor, step: float, rule: str) -> Tensor:
    """The new weights [R] of the clients whose gaps [R] are known. Their sum, 1 if these are all clients,
    stays what it was."""
    if rule == "paper":
        gap = gap - gap.mean()
    largest = gap.abs().max()
    if largest < 1e-12:  # all the same, but for rounding
        return a
    new = (a + step * gap / largest).clamp(min=0)  # max(a'_k, 0)
    if rule == "code":
        new = new.clamp(max=1)
    return shares(new) * a.sum()


def shares(a: Tensor) -> Tensor:
    """The weights [R] divided by their sum; all the same if none has any."""
    if not a.any():
        return torch.full_like(a, 1 / len(a))
    return a / a.sum()


class Client:
    keeps = ()  # nothing outlives a round

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data

    def train(self, down: Payload, t: int) -> Payload:
        args = self.args
        model = self.model(down)
        of_received = error(model, self.data.val, args)  # l_k(w^t)
        model.train()
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
        of_trained = error(model, self.data.val, args)  # l_k(w_k)
        self.log = {"loss": torch.stack(losses).mean(), "received": of_received, "trained": of_trained}
        return {"w": state(model), "received": of_received, "trained": of_trained}

    def model(self, down: Payload) -> nn.Module:
        return load(self.net, down["w"])


class Server:
    keeps = ("w", "a", "trained")

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.args, self.clients = args, clients
        self.w = state(net)
        self.a = torch.full((clients,), 1 / clients, dtype=torch.float64)  # [K]
        self.trained = {}  # l_k(w_k) of the clients of the last round

    def download(self, k: int) -> Payload:
        return {"w": self.w}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        args = self.args
        G = gaps({k: up["received"] for k, up in uploads.items()}, self.trained)
        if G:
            known = list(G)
            step = step_of_round(args, t - 1, self.clients)  # the gaps are of the round before
            gap = torch.tensor(list(G.values()), dtype=torch.float64)
            self.a[known] = adjusted(self.a[known], gap, step, args.rule)
        self.trained = {k: up["trained"] for k, up in uploads.items()}
        p = shares(self.a[list(uploads)])
        self.w = average([up["w"] for up in uploads.values()], p)  # BN's statistics too


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv)


if __name__ == "__main__":
    run(Server, Client, arguments())
