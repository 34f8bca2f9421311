"""FedEMA: divergence-aware federated self-supervised learning (Zhuang, Wen, Zhang, ICLR 2022), a baseline of FedGaLA's Table 1.

    python -m baselines.fedema --dataset pacs --target photo
    python -m baselines.fedema --dataset pacs --scale laptop

FedBYOL in which a client does not replace its online network by the global one but mixes both; the further it has diverged,
the more it keeps of its own.
Server keeps w (online encoder, projector, predictor). Client k keeps its online network, its target network and lambda_k.
Down: w. Up: w_k and its number of images.

Paper                                                         This file
Eqs. (1)-(2)  the mixture of global and local network         Client.mix
Eq. (3)       mu_k = min(lambda_k d_k, 1)                     Client.mix
Sec. 4        autoscaler, lambda_k = tau / d_k                Client.mix
Sec. 3        BYOL on the client, FedAvg on the server        learners.py, Server.update
Symbols: d_k divergence of the own encoder from the global one, tau the mu_k that the first mixture has (--autoscale).
Without mixing (--autoscale 0) it is FedBYOL with a shared predictor: fedgala.py --ssl byol --predictor shared
--local-alignment off --no-global-alignment.

Where paper, other code and this file differ
  what                  FedEMA's paper               code                        here (default)       flag
  d_k                   ||w - w_k|| over the online  EasyFL, the authors': mean  EasyFL's; the        --divergence full
                        encoder                      over convolutions (not of   shortcuts' too; with
                                                     shortcuts) of the norms of  few local steps the
                                                     what the last round changed paper's makes mu_k 1
  optimizer's state     not said                     EasyFL: new in each round;  kept                 --no-keep-optimizer
                                                     FedGaLA: kept
  lambda_k              measured once, in round 1    EasyFL: the same. FedGaLA:  the paper's          -
                                                     none, and mu_k falls with
                                                     the divergence
  tau                   0.7                          EasyFL: 0.8 or 0.7          0.7                  --autoscale
  BN's statistics       not said                     EasyFL: the global ones     the global ones      -
  SGD                   0.032, cosine, 5e-4          FedGaLA: 0.03, 1e-4         FedGaLA's paper:     --lr, --lr-decay,
                                                                                 0.03, 3e-4           --weight-decay
  target network        moving average, 0.99         FedGaLA: never updated      0.99                 --ema
  projector, predictor  two layers of 4096 and 2048  the same                    the same             --hidden, --dim
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import common
from common import ClientData, Payload, adam, arg, autocast, average, batches, optimizer_state, parse, run, sgd, state
from learners import Learner
from networks import backbone


@dataclass
class Args(common.LinearArgs):
    autoscale: float = arg(0.7, "tau: the share mu_k of the own network in the first mixture of a client; 0: no mixture", low=0,
                           high=1)
    divergence: str = arg("conv-mean", "d_k: how far the client's last round moved its convolutions (mean of the norms), or the norm of "
                          "its encoder's difference to the global one", choices=("conv-mean", "full"))
    optimizer: str = arg("sgd", "local optimizer", choices=("adam", "sgd"))
    lr: float = arg(0.03, "learning rate of the first round", above=0)
    momentum: float = arg(0.9, "momentum of the local SGD", low=0, high=1)
    weight_decay: float = arg(3e-4, "weight decay of the local optimizer", low=0)
    keep_optimizer: bool = arg(True, "keep the optimizer's state on each client over the rounds, else start it anew")
    hidden: int = arg(4096, "width of the hidden layer of projector and predictor", low=1)
    dim: int = arg(2048, "outputs of projector and predictor", low=1)
    ema: float = arg(0.99, "momentum m of the target network", low=0, high=1)

    ssl = "byol"


# FedGaLA, App. B.1 to B.3: all of its baselines have its rounds, epochs, batch and images.
IMAGES = dict(backbone="resnet18_3x3", image_size=224, rounds=100, epochs=7, batch_size=128, eval_every=10)
PAPER = {
    "digits": dict(rounds=20, batch_size=64, crop=28, hidden=256, dim=128, eval_every=5),  # ours
    "pacs": IMAGES,
    "officehome": IMAGES,
    "terrainc": IMAGES,
    "domainnet20": dict(**IMAGES, sources="painting,real,sketch"),
}
LAPTOP = {d: dict(image_size=64, rounds=10, epochs=1, steps=4, batch_size=64, eval_every=5) for d in PAPER if d != "digits"}
SMOKE = {d: dict(image_size=64, hidden=64, dim=32, epochs=1, eval_every=1) for d in PAPER if d != "digits"} | {
    "digits": dict(eval_every=1)}


def build(args: Args, channels: int, classes: int) -> Learner:
    """Online encoder f, projector g, predictor q, and the target network."""
    return Learner(backbone(args, channels, classes), args)


def travels(name: str) -> bool:
    """Whether an entry of the learner's state is of the online network, not of the target."""
    return not name.startswith("target.")


def divergence(a: dict[str, Tensor], b: dict[str, Tensor], kind: str) -> Tensor:
    """d_k of two online networks: the norm of the difference of the encoders, or the mean of those of their convolutions."""
    names = [n for n in b if n.startswith("f.") and (kind == "full" or b[n].ndim == 4)]
    norms = torch.stack([(a[n] - b[n]).norm() for n in names])
    return norms.norm() if kind == "full" else norms.mean()


class Client:
    def __init__(self, args: Args, net: Learner, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        self.target = {n: v for n, v in state(net).items() if not travels(n)}
        self.own = {}  # w_k: the parameters of the own online network after the client's last round
        self.start = {}  # those with which that round began
        self.scale = None  # lambda_k
        self.opt = {}

    def train(self, down: Payload, t: int) -> Payload:
        """BYOL from the mixture of the global and the own network, E local epochs."""
        args = self.args
        model = self.model(down).train()
        if not self.own:
            model.begin()
        else:
            self.mix(model, down["w"])
        self.start = online(model)
        opt = (sgd if args.optimizer == "sgd" else adam)(model, args, t, self.opt)
        losses = []
        for x, _ in batches(self.data.train, args, t, self.k):  # x [2B, C, crop, crop]: two views
            with autocast(args):
                loss = model.loss(*x.chunk(2))
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()
            model.after_step()
            losses.append(loss.detach())
        self.log = {"loss": torch.stack(losses).mean()} | ({"mu": self.mu} if self.own else {})
        self.opt = optimizer_state(model, opt) if args.keep_optimizer else {}
        self.own, after = online(model), state(model)
        self.target = {n: v for n, v in after.items() if not travels(n)}
        return {"w": {n: v for n, v in after.items() if travels(n)}, "n": torch.tensor(len(self.data.train))}

    def mix(self, model: Learner, w: dict[str, Tensor]) -> None:
        """The online network becomes (1 - mu_k) w + mu_k w_k, encoder, projector and predictor."""
        d = divergence(self.start, self.own, "conv-mean") if self.args.divergence == "conv-mean" else divergence(w, self.own, "full")
        if self.scale is None:
            self.scale = self.args.autoscale / d.clamp(min=1e-12)  # the autoscaler, once
        self.mu = (self.scale * d).clamp(max=1)
        with torch.no_grad():
            for n, p in model.named_parameters():
                if travels(n):
                    p.copy_(torch.lerp(w[n], self.own[n], self.mu))

    def model(self, down: Payload) -> nn.Module:
        """The global online network with the client's target network."""
        self.net.load_state_dict(down["w"] | self.target)
        return self.net

    def state_dict(self) -> dict:
        scale = {} if self.scale is None else {"scale": self.scale}
        return {"target": self.target, "own": self.own, "start": self.start, "lambda": scale, "opt": self.opt}

    def load_state_dict(self, saved: dict) -> None:
        self.target, self.own, self.start, self.opt = saved["target"], saved["own"], saved["start"], saved["opt"]
        self.scale = saved["lambda"].get("scale")


def online(model: Learner) -> dict[str, Tensor]:
    """A copy of the parameters of the online network."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if travels(n)}


class Server:
    def __init__(self, args: Args, net: Learner, clients: int):
        self.w = {n: v for n, v in state(net).items() if travels(n)}

    def download(self, k: int) -> Payload:
        return {"w": self.w}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        """FedAvg of the online networks, by images; BN's statistics too."""
        n = torch.stack([up["n"] for up in uploads.values()]).double()
        self.w = average([up["w"] for up in uploads.values()], n / n.sum())

    def state_dict(self) -> dict:
        return {"w": self.w}

    def load_state_dict(self, saved: dict) -> None:
        self.w = saved["w"]


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, laptop=LAPTOP, smoke=SMOKE)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
