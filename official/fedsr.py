"""FedSR as released (atuannguyen/FedSR @ ba8d894): where its code does not do what the paper says.

    python -m official.fedsr --dataset pacs

All else is that of fedsr.py, whose flags also have the release's values here.

What differs (src/methods/FedSR.py)   paper                official              flag
L2R (FedSR and FedL2R.train_client)   ||z||^2, Eq. (10)    ||z||                 --norm plain
mu, sigma in CMI (FedSR.train_client) as they are          times a learned       --kl-scale
                                                           scalar
Where the paper is silent: r(z|y) and the scalar stay on their client (--reference local). On all datasets
weight decay is 5e-4 and momentum 0.9, kept over the rounds. Its schedule of RotatedMNIST is not released:
those settings, and the splits, are fedsr.py's. Its FedL2R: --variant fedl2r --norm plain.
"""

from collections import defaultdict
from dataclasses import dataclass

import fedsr
from common import Payload, adam, arg, autocast, batches, optimizer_state, parse, run, sgd, source, state
from fedsr import LAPTOP, PAPER, GaussianNet, Server, cmi, l2r, shared_and_own

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(fedsr.Args):
    variant: str = arg("official", "settings of the released code, or a variant of fedsr.py",
                       choices=("official", "fedsr", *fedsr.VARIANTS))
    norm: str = arg("squared", "L2R: the squared norm of z, Eq. (10), or the plain norm",
                    choices=("squared", "plain"), source="text, Eq. (10)")
    kl_scale: bool = arg(False, "multiply mu and sigma by a learned scalar before the KL divergence",
                         source="text, Eq. (18)")


OFFICIAL = (source("code ba8d894, src/methods/FedSR.py", norm="plain", kl_scale=True)
            | source("code ba8d894, src/methods/base.py", reference="local", momentum=0.9, keep_momentum=True)
            | source("code ba8d894, src/argument.py", optimizer="sgd", weight_decay=5e-4))
VARIANTS = fedsr.VARIANTS | {"official": dict.fromkeys(PAPER, OFFICIAL)}


def plain_l2r(z: Tensor) -> Tensor:
    """z [B, D] -> the mean length over the batch; its gradient is finite at 0."""
    return (z.float().square().sum(1) + 1e-12).sqrt().mean()


class Client(fedsr.Client):

    def train(self, down: Payload, t: int) -> Payload:
        """As in fedsr.py, but for the lines of --norm and --kl-scale."""
        args = self.args
        model = self.model(down).train()
        if args.optimizer == "sgd":
            opt = sgd(model, args, t, self.momentum)
        else:
            opt = adam(model, args, t, self.momentum)
        log = defaultdict(list)
        for x, y in batches(self.data.train, args, t, self.k):  # x [B, C, H, W]; y [B]
            with autocast(args):
                mu, sigma = model.encode(x)  # [B, D], [B, D]
                z = mu
                if sigma is not None:
                    z = mu + sigma * torch.randn_like(mu)  # [B, D]
                f = cross_entropy(model.classify(z), y)
            log["loss"].append(f.detach())
            l_l2r = l_cmi = 0
            if args.alpha_l2r:
                l_l2r = plain_l2r(z) if args.norm == "plain" else l2r(z)  # --norm
                log["l2r"].append(l_l2r.detach())
            if args.alpha_cmi:
                if args.kl_scale:  # --kl-scale
                    mu, sigma = model.r.scale * mu, model.r.scale * sigma
                l_cmi = cmi(mu, sigma, y, model.r)
                log["cmi"].append(l_cmi.detach())
            loss = f + args.alpha_l2r * l_l2r + args.alpha_cmi * l_cmi
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()
        if args.keep_momentum:
            self.momentum = optimizer_state(model, opt)
        self.log = {name: torch.stack(values).mean() for name, values in log.items()}
        w, self.r = shared_and_own(state(model), args)
        return {"w": w}


class Reference(fedsr.Reference):
    """r(z|y) and, beside it, the scalar."""

    def __init__(self, classes: int, dim: int):
        super().__init__(classes, dim)
        self.scale = nn.Parameter(torch.ones(()))


def build(args: Args, channels: int, classes: int) -> GaussianNet:
    net = fedsr.build(args, channels, classes)
    if args.kl_scale and net.probabilistic:
        net.r = Reference(classes, net.head.in_features)
    return net


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS, laptop=LAPTOP)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
