"""PartialFed: each client loads a part of the global model (Sun, Huo, Yang, Bai, NeurIPS 2021).

    python -m baselines.partialfed --dataset officecaltech --scale laptop
    python -m baselines.partialfed --dataset officecaltech --strategy adaptive

Known of it: FDSE says that it "adaptively loads partial parameters instead of the entire model for each local
training" (its related work). There is no public code, and its text was not at hand; the rest is what others
tell of it. All layers of all clients are averaged, but a client begins a round with the global values of some
layers and with its own of the others. Which ones is fixed by hand (PartialFed-Fix) or learned by each client
(-Adaptive).
Server keeps w. Client k keeps the layers of w_k that it does not load; with adaptive all of w_k, two scores
of each layer and their Adam's moments. Down: w. Up: w_k, n_k.

What others tell of it                                           This file
Initialization  layer l of w_k is A_l w + (1 - A_l) w_k          Client.start
Fix             A by hand, the same for all clients              fixed_entries
Adaptive        A_l by Gumbel softmax, learned by gradient       mixture, Client.learn_strategy, kept_layers
Aggregation     w = sum_k n_k/n w_k, all layers                  Server.update
Symbols: w_k client k's model after its last round; A_l in {0, 1} whether layer l is loaded. In a client's
first round all is loaded. --strategy none keeps nothing: FedAvg; bn is FedBN if all clients train in each
round (a late client's BN is the received one here, the initial one there). The unseen client of --protocol
lodo loads all of w. FDSE does not say whether its row is Fix or Adaptive: the default is Fix with batch
normalization and classifier kept. Left out: detection.

Where this file had to choose; in full: papers/baselines/partialfed.md
  what            told by others                       here                           flag
  layers of Fix   several, some BN and classifier      BN and classifier              --strategy
  Adaptive mixes  a layer's outputs with w and w_k     the weights: the same for      -
                                                       convolutions and linear layers
  learns from     not known                            its validation images          -
  its optimizer   not known                            Adam 0.1, kept, 5 steps a      --strategy-lr, -steps
                                                       round
  temperature     annealed; AdaShare's code: from 5,   the same, at least 0.5         --temperature, -decay,
                  times 0.965                                                         -floor
  tested model    the client's, moment not known       kept layers, the averaged w    --after-training
  learning rate   -                                    FedAvg's, 0.1                  --lr
"""

import dataclasses
from dataclasses import dataclass

import common
from common import (ClientData, Payload, UserError, adam, arg, autocast, average, batches, group_by, load,
                    optimizer_state, parse, pick, run, schedules, sgd, state)

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, gumbel_softmax
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    strategy: str = arg("bn+head", "layers that a client keeps: batch normalization (bn), the classifier "
                                   "(head), both, none, or learned ones (adaptive)",
                        choices=("bn+head", "bn", "head", "none", "adaptive"), source="ours")
    strategy_lr: float = arg(0.1, "with adaptive: learning rate of Adam for the scores", above=0,
                             source="ours")
    strategy_steps: int = arg(5, "with adaptive: steps on the scores before the local training of a round",
                              low=1, source="ours")
    temperature: float = arg(5.0, "with adaptive: temperature of the Gumbel softmax in the first round",
                             above=0, source="code of AdaShare")
    temperature_decay: float = arg(0.965, "with adaptive: factor on the temperature after each round",
                                   above=0, high=1, source="code of AdaShare")
    temperature_floor: float = arg(0.5, "with adaptive: lowest temperature; without a limit the scores "
                                        "freeze after some 200 rounds", above=0, source="ours")


# FDSE says nothing of its settings: FedAvg's.
PAPER = {"digits": schedules.DIGITS, **schedules.FDSE}


def module_of(name: str) -> str:
    """The module that an entry of a state belongs to: a layer."""
    return name.rpartition(".")[0]


def fixed_entries(net: nn.Module, strategy: str) -> list[str]:
    """PartialFed-Fix: the names of the entries that no client loads. Batch normalization is found by its
    type, since not all of it is called bn (the shortcuts of ResNet)."""
    kept = []
    for module_name, module in net.named_modules():
        is_bn = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if (is_bn and "bn" in strategy) or (module_name == "head" and "head" in strategy):
            kept += [f"{module_name}.{entry}" for entry in module.state_dict()]
    return kept


def mixture(u: Tensor, layers: list[list[str]], w: dict[str, Tensor],
            own: dict[str, Tensor]) -> dict[str, Tensor]:
    """The network whose layer l is u[l, 0] times the global one plus u[l, 1] times the own one; u [L, 2]."""
    mixed = {}
    for (of_global, of_own), names in zip(u, layers):
        for name in names:
            mixed[name] = of_global * w[name] + of_own * own[name]
    return mixed


class Client:
    keeps = ("own", "scores", "opt")

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        bn_of_vectors = any(isinstance(module, nn.BatchNorm1d) for module in net.modules())
        if args.strategy == "adaptive" and bn_of_vectors and len(data.val) == 1:
            raise UserError(f"{data.name} has one image to validate; --strategy adaptive trains its scores "
                            f"on these, and {args.backbone} needs two, for BN: give a larger share in "
                            "--split", 2)
        w = state(net)
        self.layers = group_by(list(w), module_of)
        self.fixed = fixed_entries(net, args.strategy)
        self.needed = self.fixed  # what must be kept of w_k
        if args.strategy == "adaptive":
            self.needed = list(w)
        self.own = {}  # that part of w_k; empty before the first training
        self.scores = torch.zeros(len(self.layers), 2)  # adaptive: log pi of loading and keeping each layer
        self.opt = {}  # adaptive: the state of the scores' Adam

    def train(self, down: Payload, t: int) -> Payload:
        """Partial initialization, then local training of all layers."""
        args = self.args
        if args.strategy == "adaptive" and self.own:
            self.learn_strategy(down["w"], t)
        model = load(self.net, self.start(down)).train()
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
        w_k = state(model)
        self.own = pick(w_k, self.needed)
        return {"w": w_k, "n": torch.tensor(len(self.data.train))}

    def learn_strategy(self, w: dict[str, Tensor], t: int) -> None:
        """Adaptive: steps on the scores alone, on images that w_k was not trained on.

        Each batch sees a network of which every layer is the global or the own one, as drawn. The gradient is
        that of the draw's softmax (straight through).
        """
        args = self.args
        model = load(self.net, w).train()
        trained = dict(model.named_parameters())
        layers = [[name for name in names if name in trained] for names in self.layers.values()]
        scores = nn.ParameterDict({"scores": self.scores.clone()})
        few = dataclasses.replace(args, lr=args.strategy_lr, lr_decay=1.0, weight_decay=0.0, augment="none",
                                  steps=args.strategy_steps)
        opt = adam(scores, few, t, self.opt)
        temperature = max(args.temperature * args.temperature_decay ** t, args.temperature_floor)
        for x, y in batches(self.data.val, few, t, self.k):
            u = gumbel_softmax(scores["scores"], temperature, hard=True)  # [L, 2], drawn on the host
            mixed = mixture(u.to(args.device), layers, w, self.own)
            with autocast(args):
                loss = cross_entropy(functional_call(model, mixed, (x,)), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        self.scores = scores["scores"].detach()
        self.opt = optimizer_state(scores, opt)

    def kept_layers(self) -> list[str]:
        """The entries that the client does not load."""
        if not self.own:
            return []
        if self.args.strategy != "adaptive":
            return self.fixed
        keeps = self.scores[:, 1] > self.scores[:, 0]
        return [name for names, keep in zip(self.layers.values(), keeps) if keep for name in names]

    def start(self, down: Payload) -> dict[str, Tensor]:
        """The global model with the layers that the client keeps."""
        return down["w"] | pick(self.own, self.kept_layers())

    def model(self, down: Payload) -> nn.Module:
        return load(self.net, self.start(down))


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
        self.w = average([up["w"] for up in uploads.values()], p)  # all layers, also those that nobody loads


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv)


if __name__ == "__main__":
    run(Server, Client, arguments())
