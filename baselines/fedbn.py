"""FedBN: batch normalization stays on its client (Li, Jiang, Zhang, Kamp, Dou, ICLR 2021; arXiv 2102.07623).

    python -m baselines.fedbn --dataset officecaltech --scale laptop
    python -m baselines.fedbn --dataset officecaltech --protocol lodo --target dslr --adapt-momentum 0.1
                                                                    # FDSE's Table 2

FedAvg of all layers but batch normalization (BN), whose scale, shift and statistics are each client's own.
Server keeps w, all entries but BN's. Client k keeps its BN entries. Down: w. Up: w_k, n_k. If a domain is
left out, BN's entries go up too, and its client gets their mean: where FDSE's adaptation without labels
begins.

Paper                                                          This file
Alg. 1  client: SGD on all layers                              Client.train
Alg. 1  server: the average of the layers that are not BN      Server.update
Alg. 1  BN stays                                               bn_entries, Client.whole
FDSE, Alg. 2  statistics of the unseen domain's images         Client.adapt
BN layers are found by their class: in torchvision's ResNets the one of a shortcut is called downsample.1. A
network without BN, such as a ViT (its LayerNorms are not BN), makes it FedAvg, bit for bit. Left out:
nothing.

Where the paper, codes (the authors' med-air/FedBN; FDSE's algorithm/fedbn.py) and this file differ (in full:
papers/baselines/fedbn.md)
  what               paper; authors' code    FDSE's text   FDSE's code        here             flag
  average            1/K                     its Eq. (1)   n_k/n              n_k/n            --average
  model tested       after the average       not said      by its logger      after it         --after-
                                                                                               training
  BN found by        its name (bn)           -             its name           its class        -
  lr                 0.01                    tuned         0.1                0.1              --lr
  unseen: scale      mean over the clients   not said      not shown          the mean         -
  unseen: passes     statistics of its own   1             5                  1                --adapt-epochs
  unseen: momentum   -                       not said      0.1                none            --adapt-momentum
"""

import dataclasses
from dataclasses import dataclass

import common
from common import (ClientData, Payload, arg, autocast, average, batches, load, parse, pick, run, schedules,
                    sgd, state, uniform)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    average: str = arg("samples", "weights of the average: samples (n_k/n) or uniform (1/K)",
                       choices=("samples", "uniform"), source="text of FDSE, Eq. (1)")
    adapt_epochs: int = arg(1, "lodo: passes over the target's images for BN's statistics, FDSE's Algorithm "
                               "2; 0: use the clients' mean", low=0, at_test=True,
                            source="text of FDSE, A7.5")
    adapt_momentum: float = arg(0.0, "lodo: momentum of these statistics, starting from the clients' mean; "
                                     "0: the plain mean over the batches", low=0, high=1, at_test=True,
                                source="ours")


# FedAvg's; FDSE's code has the same rate for FedBN (config/*/fedbn.yml).
PAPER = {"digits": schedules.DIGITS, **schedules.MNIST, **schedules.FDSE}


def bn_layers(net: nn.Module) -> dict[str, nn.Module]:
    """The BN layers of a network by name."""
    layers = {}
    for name, module in net.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            layers[name] = module
    return layers


def bn_entries(net: nn.Module) -> list[str]:
    """The names of BN's entries of a state: scale, shift, statistics and the counter of batches."""
    names = []
    for layer, module in bn_layers(net).items():
        names += [f"{layer}.{name}" for name in module.state_dict()]
    return names


class Client:
    keeps = ("bn",)

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        self.names = bn_entries(net)
        self.bn = pick(state(net), self.names)  # own BN; the same at the start for all

    def whole(self, down: Payload) -> dict[str, Tensor]:
        """The received layers with the client's own BN."""
        return down["w"] | self.bn

    def train(self, down: Payload, t: int) -> Payload:
        """Local SGD on all layers."""
        args = self.args
        model = load(self.net, self.whole(down)).train()
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
        after = state(model)
        w_k = {name: v for name, v in after.items() if name not in self.names}
        self.bn = pick(after, self.names)
        up = {"w": w_k, "n": torch.tensor(len(self.data.train))}
        if args.protocol == "lodo":
            up["bn"] = self.bn  # for the unseen client
        return up

    def model(self, down: Payload) -> nn.Module:
        if self.data.unseen:
            model = load(self.net, down["w"] | down["bn"])
            self.adapt(model)
            return model
        return load(self.net, self.whole(down))

    @torch.no_grad()
    def adapt(self, model: nn.Module) -> None:
        """FDSE's Alg. 2: BN's statistics of the client's own test images, without labels."""
        args = dataclasses.replace(self.args, epochs=self.args.adapt_epochs, steps=0, augment="none")
        layers = list(bn_layers(model).values())
        if not layers or not args.adapt_epochs:
            return
        momenta = [layer.momentum for layer in layers]
        for layer in layers:
            layer.momentum = args.adapt_momentum
            if not args.adapt_momentum:
                layer.reset_running_stats()
                layer.momentum = None  # PyTorch's sign for the plain mean
        model.eval()
        for layer in layers:
            layer.train()  # nothing else, dropout for example
        for x, _ in batches(self.data.test, args, 0, self.k):  # labels are not looked at
            with autocast(args):
                model.features(x)
        for layer, momentum in zip(layers, momenta):
            layer.momentum = momentum


class Server:
    keeps = ("w", "bn")

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.args, self.clients = args, clients
        w, names = state(net), bn_entries(net)
        if not names:
            print("fedbn: the network has no batch normalization, so this is FedAvg", flush=True)
        self.w = {name: v for name, v in w.items() if name not in names}
        self.bn = {}  # with a domain left out: the mean of the round's clients' BN
        if args.protocol == "lodo":
            self.bn = pick(w, names)

    def download(self, k: int) -> Payload:
        if k < self.clients:
            return {"w": self.w}
        return {"w": self.w, "bn": self.bn}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        n = torch.stack([up["n"] for up in uploads.values()]).double()  # [K]
        if self.args.average == "samples":
            p = n / n.sum()
        else:
            p = torch.full_like(n, 1 / len(n))
        self.w = average([up["w"] for up in uploads.values()], p)  # w_{t+1} = sum_k p_k w_k, without BN
        if self.args.protocol == "lodo":
            self.bn = average([up["bn"] for up in uploads.values()], uniform(len(uploads)))


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv)


if __name__ == "__main__":
    run(Server, Client, arguments())
