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

from dataclasses import dataclass

import fedsr
from common import arg, parse, run, source
from fedsr import LAPTOP, PAPER, GaussianNet, Server

from torch import Tensor, nn


@dataclass
class Args(fedsr.Args):
    variant: str = arg("official", "settings: the release's, or a variant of fedsr.py",
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

    def regularizers(self, model: nn.Module, z: Tensor, mu: Tensor, sigma: Tensor | None,
                     y: Tensor) -> dict[str, Tensor]:
        if self.args.kl_scale and sigma is not None:
            mu, sigma = model.r.scale * mu, model.r.scale * sigma
        terms = super().regularizers(model, z, mu, sigma, y)
        if self.args.norm == "plain" and "l2r" in terms:
            terms["l2r"] = plain_l2r(z)
        return terms


def build(args: Args, channels: int, classes: int) -> GaussianNet:
    net = fedsr.build(args, channels, classes)
    if net.probabilistic:
        net.r.scale.requires_grad_(args.kl_scale)
    return net


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS, laptop=LAPTOP)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
