"""FedEMA: divergence-aware federated self-supervised learning (Zhuang, Wen, Zhang, ICLR 2022).

    python -m baselines.fedema --dataset pacs --target photo           # a cell of FedGaLA's Table 1
    python -m baselines.fedema --dataset pacs --scale laptop

FedBYOL in which a client does not replace its online network by the global one but mixes both; the further
it has diverged, the more it keeps of its own.
Server keeps w (online encoder, projector, predictor). Client k keeps its optimizer's state, its online
network, what that was when its last round began, its target network, lambda_k and the number of that round.
Down: w. Up: w_k and its number of images n_k.

Paper                                                  This file
Eqs. (1)-(2)  mixture of global and local network      Client.mix
Eq. (3)       mu_k = min(lambda_k d_k, 1)              Client.mix, divergence (d_k)
Sec. 4        autoscaler, lambda_k = tau / d_k         Client.mix
Sec. 3        BYOL on the client                       Client.train, fedgala.Learner
Sec. 3        FedAvg on the server                     Server.update
Symbols: d_k how far the own encoder is from the global one, tau the mu_k of the first mixture (--autoscale),
m momentum of the target network (--ema). --autoscale 0 does not mix: FedBYOL with a shared predictor, also
python -m official.fedgala --variant paper --ssl byol --predictor shared --local-alignment off
--no-global-alignment on digits. Left out: nothing.

Where FedEMA's paper, other codes and this file differ (in full: papers/baselines/fedema.md)
  what             paper; EasyFL, the authors' code; FedGaLA's code    here                flag
  d_k              ||w - w_k|| of the encoders; mean of the norms of   the paper's         --divergence
                   what the last round changed in each convolution;
                   with the projectors
  lambda_k         tau / d_k, once; the same; none, and mu_k falls     the paper's         -
                   with the divergence
  tau              0.7; 0.8 or 0.7; 0.7                                0.7                 --autoscale
  BN's statistics  not said; the global ones; mixed with mu_k          the global ones     -
  optimizer state  not said; new in each round; kept                   kept                --keep-optimizer
  SGD              0.032, cosine, decay 5e-4; the same; 0.03, 1e-4     0.03, 3e-4: those   --lr, --lr-decay,
                                                                       of FedGaLA's paper  --weight-decay
  target network   moving average, m 0.99; the same; never updated     m 0.99              --ema
  a round missed   mixes; begins anew from w if it chooses so          mixes               --stale
  mu_k above 0.5   not said; the predictor's statistics are the own    the global ones     -
                   ones; mixed with mu_k
"""

from dataclasses import dataclass

import common
from common import (ClientData, Payload, adam, arg, autocast, average, backbone, batches, load,
                    optimizer_state, parameters, parse, run, sgd, source, state)
from fedgala import Learner, chance_loss

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.LinearArgs):
    autoscale: float = arg(0.7, "tau: share mu_k of the client's own network in its first mixture; 0: no "
                                "mixture", low=0, high=1, source="text of FedEMA")
    divergence: str = arg("full", "d_k: full (norm of the difference between own and global encoder) or "
                                  "conv-mean (mean norm of the change of the convolutions in the client's "
                                  "last round, EasyFL)", choices=("full", "conv-mean"),
                          source="text of FedEMA, Eq. (3), our reading")
    stale: str = arg("mix", "a client that missed the last round: mix as usual, or restart from the global "
                            "network as in its first round (EasyFL)", choices=("mix", "restart"),
                     source="text of FedEMA, Sec. 4")
    optimizer: str = arg("sgd", "local optimizer", choices=("adam", "sgd"), source="text of FedGaLA, B.3")
    lr: float = arg(0.03, "learning rate of the first round", above=0, source="text of FedGaLA, B.3")
    momentum: float = arg(0.9, "momentum of the local SGD", low=0, high=1, source="text of FedGaLA, B.3")
    weight_decay: float = arg(3e-4, "weight decay of the local optimizer", low=0,
                              source="text of FedGaLA, B.3")
    keep_optimizer: bool = arg(True, "keep each client's optimizer state between rounds; otherwise reset it",
                               source="code of FedGaLA, main.py")
    hidden: int = arg(4096, "width of the hidden layer of projector and predictor", low=1,
                      source="text of FedEMA, Sec. 5")
    dim: int = arg(2048, "outputs of projector and predictor", low=1, source="text of FedEMA, Sec. 5")
    ema: float = arg(0.99, "momentum m of the target network", low=0, high=1, source="text of FedEMA, Sec. 5")

    ssl = "byol"  # what fedgala.Learner asks for; no flag


# All of FedGaLA's baselines have its rounds, epochs, batch and images.
IMAGES = (source("text of FedGaLA, App. B.2 and B.3", backbone="resnet18_3x3", rounds=100, epochs=7,
                 batch_size=128)
          | source("ours, as fedgala.py", image_size=224)
          | source("code of FedGaLA, main.py", eval_every=10)
          | source("code of FedGaLA, utils.py", linear_views="augmented"))
DIGITS = source("ours, as fedgala.py", rounds=30, epochs=2, batch_size=64, crop=28, augment="crops",
                hidden=256, dim=128, eval_every=10, linear_epochs=1000)
PAPER = {
    "digits": DIGITS,
    "rotatedmnist": DIGITS,
    "pacs": IMAGES,
    "officehome": IMAGES,
    "terrainc": IMAGES,
    "domainnet20": IMAGES | source("text of FedGaLA, Sec. 4", sources="painting,real,sketch"),
}
AT_LAPTOP_SCALE = dict(image_size=64, rounds=10, epochs=1, steps=4, batch_size=64, eval_every=5,
                       linear_views="plain")
LAPTOP = {
    "pacs": AT_LAPTOP_SCALE,
    "officehome": AT_LAPTOP_SCALE,
    "terrainc": AT_LAPTOP_SCALE,
    "domainnet20": AT_LAPTOP_SCALE,
}
AT_SMOKE_SCALE = dict(image_size=64, hidden=64, dim=32, epochs=1, eval_every=1, linear_views="plain")
SMOKE = {
    "digits": dict(eval_every=1, linear_epochs=100),
    "rotatedmnist": dict(eval_every=1, linear_epochs=100),
    "pacs": AT_SMOKE_SCALE,
    "officehome": AT_SMOKE_SCALE,
    "terrainc": AT_SMOKE_SCALE,
    "domainnet20": AT_SMOKE_SCALE,
}


def build(args: Args, channels: int, classes: int) -> Learner:
    """Online encoder f, projector g, predictor q, and the target network."""
    return Learner(backbone(args, channels, classes), args)


def travels(name: str) -> bool:
    """Whether an entry of the learner's state is of the online network, not of the target."""
    return not name.startswith("target.")


def online(model: Learner) -> dict[str, Tensor]:
    """A copy of the parameters of the online network."""
    return {n: v for n, v in parameters(model).items() if travels(n)}


def divergence(a: dict[str, Tensor], b: dict[str, Tensor], kind: str) -> Tensor:
    """d_k of two online networks: the norm of the difference of their encoders (full), or the mean of those
    of their convolutions (conv-mean)."""
    encoder = [n for n in b if n.startswith("f.")]
    if kind == "full":
        return torch.stack([(a[n] - b[n]).norm() for n in encoder]).norm()
    convolutions = [n for n in encoder if b[n].ndim == 4]
    return torch.stack([(a[n] - b[n]).norm() for n in convolutions]).mean()


class Client:
    keeps = ("target", "own", "start", "scale", "opt", "last")

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        self.target = {n: v for n, v in state(net).items() if not travels(n)}
        self.own = {}  # w_k: the parameters of the own online network after the client's last round
        self.start = {}  # those with which that round began
        self.scale = None  # lambda_k
        self.opt = {}  # the optimizer's state by parameter
        self.last = -1  # the round of its last training

    def train(self, down: Payload, t: int) -> Payload:
        """BYOL from the mixture of the global and the own network, E local epochs."""
        args = self.args
        model = self.model(down).train()
        mixed = bool(self.own) and (args.stale == "mix" or self.last == t - 1)
        if mixed:
            mu = self.mix(model, down["w"])
        else:
            model.first_round()
        self.last = t
        self.start = online(model)
        if args.optimizer == "sgd":
            opt = sgd(model, args, t, self.opt)
        else:
            opt = adam(model, args, t, self.opt)
        losses = []
        for x, _ in batches(self.data.train, args, t, self.k):  # x [2B, C, crop, crop]: two views
            with autocast(args):
                loss = model.loss(*x.chunk(2))  # BYOL's loss, both ways
            losses.append(loss.detach())
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()
            model.after_step()  # the target network: w' <- m w' + (1 - m) w
        self.log = {"loss": torch.stack(losses).mean()}
        if mixed:
            self.log["mu"] = mu
        self.opt = optimizer_state(model, opt) if args.keep_optimizer else {}
        self.own = online(model)
        after = state(model)
        self.target = {n: v for n, v in after.items() if not travels(n)}
        w_k = {n: v for n, v in after.items() if travels(n)}
        return {"w": w_k, "n": torch.tensor(len(self.data.train))}

    def mix(self, model: Learner, w: dict[str, Tensor]) -> Tensor:
        """Eqs. (1)-(3): encoder, projector and predictor become (1 - mu_k) w + mu_k w_k; returns mu_k []."""
        if self.args.divergence == "conv-mean":
            d = divergence(self.start, self.own, "conv-mean")  # differs, see "d_k"
        else:
            d = divergence(w, self.own, "full")
        if self.scale is None:
            self.scale = self.args.autoscale / d.clamp(min=1e-12)  # lambda_k = tau / d_k, once
        mu = (self.scale * d).clamp(max=1)  # Eq. (3)
        with torch.no_grad():
            for n, p in model.named_parameters():
                if travels(n):
                    p.copy_(torch.lerp(w[n], self.own[n], mu))  # Eqs. (1)-(2)
        return mu

    def model(self, down: Payload) -> nn.Module:
        """The global online network with the client's target network."""
        return load(self.net, down["w"] | self.target)

    def chance_loss(self) -> float:
        return chance_loss(self.args, len(self.data.train))


class Server:
    keeps = ("w",)

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.args = args
        self.w = {n: v for n, v in state(net).items() if travels(n)}

    def download(self, k: int) -> Payload:
        return {"w": self.w}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        """FedAvg of the online networks, by images; BN's statistics too."""
        n = torch.stack([up["n"] for up in uploads.values()]).double()  # [K]
        p = n / n.sum()
        self.w = average([up["w"] for up in uploads.values()], p)


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, laptop=LAPTOP, smoke=SMOKE)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
