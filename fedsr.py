"""FedSR: a simple representation by an L2 and a conditional mutual information regularizer (Nguyen et al., NeurIPS 2022).

    python fedsr.py --dataset rotatedmnist-t10k --target m0                   # a cell of the paper's Table 1
    python fedsr.py --dataset pacs --scale laptop --variant fedcmi            # one of its two ablations

The encoder gives each image a Gaussian p(z|x); its samples are kept short (L2R) and close to one Gaussian r(z|y) for each class
(CMI), so that the representation has little room for what is particular to a domain.
Server keeps w (encoder, classifier) and r(z|y). Client k keeps its SGD momentum (and its r(z|y) with --reference local).
Down: w, r. Up: w_k, r_k.

Paper                                                         This file
Eqs. (4)-(5)   p(z|x), prediction as a mean over z            networks.GaussianNet
Eq. (6)        the loss -log E[p(y|z)]                        - (replaced by its bound, Eq. (7), as in the paper)
Eqs. (7)-(8)   cross-entropy of one sample of z               Client.train
Eq. (9)        the local objective                            Client.train
Eqs. (10)-(11) L2R                                            l2r
Eqs. (17)-(18) CMI, with the r(z|y) of App. B                 cmi, Reference
Eq. (46)       KL of two Gaussians                            networks.gaussian_kl
Eq. (1)        the plain mean over clients                    Server.update
Symbols as in the paper: w, mu, sigma, r(z|y), K clients, E local iterations (--steps), alpha (the letter is FedCiR's).
--variant fedl2r: L2R alone, on a deterministic network (Sec. 3.3.2); fedcmi: CMI alone; fedavg: neither, the tables' FedAvg row
on the same network and optimizer (on smallcnn, with --no-keep-momentum, it is fedavg.py's with its uniform average). Figure 1 of
App. C.2: --tsne.
Left out: regression and r(z|y) as a network or a mixture, which the paper names but does not run, and L2R with an entropy term,
which it ran, found equal and advises against (Sec. 3.3.1).

Where paper, official code (atuannguyen/FedSR) and this file differ
  what                  paper                        official code               here (default)       flag
  L2R                   ||z||^2 (Eq. 10)             ||z||                       ||z||^2              --norm plain
  r(z|y)                not said whether shared;     kept local, lost on resume  averaged with w      --reference local
                        the alignment needs one r
  scale of the KL       -                            a learned scalar, start 1,  none                 --kl-scale
                                                     times mu and sigma
  start of r            not said                     mu 0, softplus(1) = 1.31    as the code          -
  its rate, decay       not said                     those of w                  those of w           -
  sigma(x) > 0          not said                     softplus                    softplus + 1e-6      -
  prediction            E over p(z|x) (Eq. 5)        mean over 20 samples        as the code          --samples
  momentum              "a total of 5000             kept over the rounds        kept: one SGD of     --no-keep-momentum
                        iterations" of each client                               5,000 iterations
  the 5 iterations      not said                     random batches, each from   the first 5 batches  -
                                                     a new shuffle               of a new shuffle
  rounds                RotatedMNIST: 500 epochs,    no such code                1,500 rounds         --rounds
                        others: 5,000 iterations     1,000 rounds                1,000 rounds
  RotatedMNIST's SGD    lr 0.001, batch 64; no word  no such code                momentum 0.9 as on   --momentum,
                        on momentum and decay                                    the others, decay 0  --weight-decay
  its network           the same as [15, 31]'s       no such code                [31]'s, with 3x3     --backbone
                                                                                 convolutions
  crops, jitter         no ranges                    area 0.7-1, 0.3 each        as the code          --augment
  start of w            not said (ImageNet implied)  ImageNet                    ImageNet             --weights
  model that is tested  RotatedMNIST: last round;    lowest validation loss,     both are recorded:   -
                        others: not said             best on target, and last    best validation
                                                                                 accuracy, and last
  splits                90% training, 10% validation  same                       90%, 5% validation,  --split
                                                                                 5% test of each source
The coefficients of App. C.1 were probably tuned with the code's norm; the table's default combines them with Eq. (10).
FedCiR's and FDSE's tables have FedSR too. FedCiR (App. E) runs it with alpha_l2r 0 and alpha_cmi 5e-7 or 1e-6, hence as FedCMI:
the defaults, with its network and schedule, on the datasets of its Table 1 except PACS, where --variant fedcir sets them.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.nn.utils import clip_grad_norm_

import common
from common import (ClientData, Payload, Stop, arg, autocast, average, batches, folders_of, optimizer_state, parse, process, run, sgd,
                    state)
from networks import GaussianNet, backbone, gaussian_kl


@dataclass
class Args(common.Args):
    variant: str = arg("fedsr", "fedsr, one of its ablations, neither regularizer, or fedsr by the settings of FedCiR's Table 1",
                       choices=("fedsr", "fedl2r", "fedcmi", "fedavg", "fedcir"))
    alpha_l2r: float = arg(0.01, "weight of L2R, Eq. (9)", low=0)
    alpha_cmi: float = arg(0.001, "weight of CMI, Eq. (9)", low=0)
    norm: str = arg("squared", "L2R: the squared norm of z, Eq. (10), or the plain norm (official code)",
                    choices=("squared", "plain"))
    reference: str = arg("shared", "r(z|y): averaged with the model, or kept local by each client (official code)",
                         choices=("shared", "local"))
    kl_scale: bool = arg(False, "multiply mu and sigma by a learned scalar before the KL divergence (official code)")
    samples: int = arg(20, "samples of z behind a prediction, Eq. (5); 0: the mean of z", low=0)
    keep_momentum: bool = arg(True, "keep each client's SGD momentum over the rounds, else start it anew")
    tsne: str = arg("", "draw tsne.png in the output folder (Fig. 1 of App. C.2), this run above the finished run of this folder "
                    "(its FedAvg, say)", numbers=False)


# Sec. 4.2 and App. C.1: RotatedMNIST has 500 epochs of 15 batches, hence 1,500 rounds of E = 5; the others 5,000 iterations.
MNIST = dict(backbone="smallcnn", protocol="lodo", image_size=28, rounds=1500, steps=5, batch_size=64, lr=0.001, momentum=0.9,
             split="0.9/0.05/0.05", eval_every=50, alpha_l2r=0.1, alpha_cmi=0.3)
IMAGES = dict(weights="imagenet", normalize="imagenet", augment="fedsr", protocol="lodo", image_size=224, rounds=1000, steps=5,
              batch_size=64, lr=0.01, momentum=0.9, weight_decay=5e-4, split="0.9/0.05/0.05", eval_every=20)
# FedCiR, Sec. 6.1 and App. E: the defaults of its datasets, and --variant fedcir.
FEDCIR = dict(backbone="resnet18", weights="none", normalize="unit", augment="none", protocol="indomain", image_size=128,
              rounds=300, steps=20, batch_size=32, lr=0.01, momentum=0.9, keep_momentum=False, weight_decay=5e-4,
              split="0.8/0.1/0.1", eval_every=1, alpha_l2r=0.0)
PAPER = {
    "digits": dict(rounds=60, lr=0.05, batch_size=32),  # ours
    "rotatedmnist": MNIST,
    "rotatedmnist-t10k": MNIST,
    "pacs": dict(**IMAGES, backbone="resnet18", alpha_l2r=0.01, alpha_cmi=0.001),
    "officehome": dict(**IMAGES, backbone="resnet50", alpha_l2r=0.05, alpha_cmi=0.0005),
    "domainnet": dict(**IMAGES, backbone="resnet50", alpha_l2r=0.01, alpha_cmi=0.0005),
    "officecaltech": dict(**FEDCIR, alpha_cmi=1e-6),
    "domainnet10": dict(**FEDCIR, alpha_cmi=5e-7),
    "camelyon17": dict(**FEDCIR, alpha_cmi=5e-7),
    "iwildcam": dict(**FEDCIR, alpha_cmi=5e-7),
}
# App. C.1: CMI alone has other coefficients than FedSR on two datasets.
VARIANTS = {"fedavg": {d: dict(alpha_l2r=0.0, alpha_cmi=0.0) for d in PAPER},
            "fedl2r": {d: dict(alpha_cmi=0.0, alpha_l2r=PAPER[d].get("alpha_l2r") or 0.01) for d in PAPER},  # FedCiR has none
            "fedcmi": {d: dict(alpha_l2r=0.0) for d in PAPER} | {"pacs": dict(alpha_l2r=0.0, alpha_cmi=0.01),
                                                                 "domainnet": dict(alpha_l2r=0.0, alpha_cmi=0.005)},
            "fedcir": {"pacs": dict(**FEDCIR, alpha_cmi=1e-6)} | {d: PAPER[d] for d in (
                "officecaltech", "domainnet10", "camelyon17", "iwildcam")}}
LAPTOP = {"pacs": dict(weights="none", image_size=64, rounds=10, steps=10, batch_size=32, eval_every=1),
          "officecaltech": dict(image_size=64, rounds=10),
          "rotatedmnist": dict(rounds=150), "rotatedmnist-t10k": dict(rounds=150)}


def l2r(z: Tensor, norm: str) -> Tensor:
    """z [B, D] -> the mean over the batch of ||z||^2, Eqs. (10)-(11); of ||z|| with norm "plain"."""
    squared = z.float().square().sum(1)
    return squared.mean() if norm == "squared" else (squared + 1e-12).sqrt().mean()


class Reference(nn.Module):
    """r(z|y) = N(mu_y, sigma_y^2), y = 1..C, learned with the network (App. B), and the official code's scalar."""

    def __init__(self, classes: int, dim: int):
        super().__init__()
        self.mu, self.raw = nn.Parameter(torch.zeros(classes, dim)), nn.Parameter(torch.ones(classes, dim))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Labels y [B] -> mu_y and sigma_y [B, D]."""
        return self.mu[y], softplus(self.raw[y])


def cmi(mu: Tensor, sigma: Tensor, y: Tensor, r: Reference) -> Tensor:
    """The mean over the batch of KL[p(z|x) | r(z|y)], Eqs. (17)-(18)."""
    return gaussian_kl(mu, sigma, *r(y)).mean()


def build(args: Args, channels: int, classes: int) -> nn.Module:
    """Encoder and classifier, and for a probabilistic encoder (FedSR's and FedCMI's) `r`."""
    if args.tsne and args.protocol != "lodo":
        raise Stop(f"--tsne draws a source and the left-out domain: give --protocol lodo, not {args.protocol}", 2)
    if args.tsne and not (Path(args.tsne) / "result.json").is_file():
        raise Stop(f"--tsne {args.tsne} is no folder of a finished run: expected a result.json in it", 2)
    probabilistic = args.variant not in ("fedl2r", "fedavg")
    if args.alpha_cmi and not probabilistic:
        raise Stop(f"--variant {args.variant} has a deterministic encoder, so CMI is infinite: leave --alpha-cmi at 0", 2)
    net = GaussianNet(backbone(args, channels, classes), probabilistic, args.samples)
    if probabilistic:
        net.r = Reference(classes, net.head.in_features)
        net.r.scale.requires_grad_(args.kl_scale)
    return net


def local(name: str, args: Args) -> bool:
    """Whether an entry of the network stays on its client: r(z|y) with --reference local."""
    return name.startswith("r.") and args.reference == "local"


class Client:
    def __init__(self, args: Args, net: GaussianNet, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        self.r = {n: v for n, v in state(net).items() if local(n, args)}  # own r(z|y), with --reference local
        self.momentum = {}  # of each parameter with --keep-momentum

    def train(self, down: Payload, t: int) -> Payload:
        """E local iterations (--steps, or --epochs) of Eq. (9)."""
        args = self.args
        model = self.load(down).train()
        opt = sgd(model, args, t, self.momentum)
        losses, l2rs, cmis = [], [], []
        for x, y in batches(self.data.train, args, t, self.k):  # x [B, C, H, W]; y [B]
            with autocast(args):
                mu, sigma = model.encode(x)  # [B, D], [B, D]
                z = mu if sigma is None else mu + sigma * torch.randn_like(mu)  # one sample, reparameterized
                loss = cross_entropy(model.classify(z), y)  # Eq. (8)
            losses.append(loss.detach())
            if args.alpha_l2r:
                l2rs.append(l2r(z, args.norm))
                loss = loss + args.alpha_l2r * l2rs[-1]  # Eq. (9), first regularizer
            if sigma is not None:
                scale = model.r.scale if args.kl_scale else 1
                cmis.append(cmi(scale * mu, scale * sigma, y, model.r))
                loss = loss + args.alpha_cmi * cmis[-1]  # Eq. (9), second regularizer
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()
        self.momentum = optimizer_state(model, opt) if args.keep_momentum else {}
        self.log = {name: torch.stack(values).mean().detach()
                    for name, values in (("loss", losses), ("l2r", l2rs), ("cmi", cmis)) if values}
        after = state(model)
        self.r = {n: v for n, v in after.items() if local(n, args)}
        return {"w": {n: v for n, v in after.items() if not local(n, args)}}

    def load(self, down: Payload) -> GaussianNet:
        """The received model, with the own r(z|y) if it is local."""
        self.net.load_state_dict(down["w"] | self.r)
        return self.net

    def model(self, down: Payload) -> nn.Module:
        return self.load(down)

    def state_dict(self) -> dict:
        return {"r": self.r, "momentum": self.momentum}

    def load_state_dict(self, saved: dict) -> None:
        self.r, self.momentum = saved["r"], saved["momentum"]


class Server:
    def __init__(self, args: Args, net: GaussianNet, clients: int):
        self.w = {n: v for n, v in state(net).items() if not local(n, args)}

    def download(self, k: int) -> Payload:
        return {"w": self.w}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        """The plain mean over the round's clients, Eq. (1); BN's statistics too."""
        K = len(uploads)
        self.w = average([up["w"] for up in uploads.values()], torch.full((K,), 1 / K))

    def state_dict(self) -> dict:
        return {"w": self.w}

    def load_state_dict(self, saved: dict) -> None:
        self.w = saved["w"]


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS, laptop=LAPTOP)


if __name__ == "__main__":
    args = arguments()
    results = run(Server, Client, args, build)
    if args.tsne and process()[0] == 0:
        import measures
        for folder in folders_of(args, results):
            measures.main(["tsne", str(folder), args.tsne, "--which", "last", "--data", args.data, "--archives", args.archives])
