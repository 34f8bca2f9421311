"""FDSE as released (WwZzz/FDSE_CVPR25): where its code does not do what the paper says.

    python -m official.fdse --dataset officecaltech                    # the newest version, c0bd90b
    python -m official.fdse --dataset officecaltech --variant first    # its first version, dd266a2

c0bd90b is a rewrite. dd266a2 is nearer to the paper: it has the megabytes of its Table 4, and multiply-adds
that are 1% below.
All else is that of fdse.py, whose flags also have the release's values here.

What differs (algorithm/fdse.py)      paper                dd266a2            c0bd90b   flag
L_Con (its loss in Client.train)      Eq. (6)              squares; a batch   KL-like   --con-loss
                                                           is two scalars
ReLU after BN_DSE (DSEConv)           yes, Eq. (3)         yes                no        --no-dse-relu
identity in linear blocks (DSELinear) yes, Table A7        no                 yes       --no-fc-identity
AlexNet's padding: layer 1            2, Table A6          5                  2         --stem-padding
AlexNet's padding: layers 3 to 5      1, Table A6          1                  0         --no-pad
lambda, beta (defaults, config/*)     a grid; 0.001        10; 0.5            by data   --lambda, --beta
tau (the same)                        a grid, to 0.5       10                 0.5       --tau
decay of lr; image; E on DomainNet    .998; 224; 5         .9998; 256; 1      the same  --lr-decay, ...
"layer" of Eqs. (8) and (9) (Server)  a module             a tensor           a tensor  --unit
Where the paper is silent fdse.py follows dd266a2; in c0bd90b a block's bias is in theta_u (--no-own-bias).
On the digits and RotatedMNIST, where fdse.py has no weight decay, both versions have theirs, 1e-3.
"""

import dataclasses
import math
from collections import defaultdict
from dataclasses import dataclass

import fdse
from common import (GroupedConv2d, Net, Payload, UserError, arg, autocast, batches, flatten, load, parse,
                    pick, run, sgd, source, state)
from fdse import (G, GAMMA, Server, batch_statistics, bn_dfe_statistics, consistency, depth_weights,
                  forget_batch, per_channel)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(fdse.Args):
    variant: str = arg("official", "settings of the newest version of the code, of its first version, or of "
                                   "the paper", choices=("official", "first", "paper"))
    con_loss: str = arg("eq6", "form of L_Con: of Eq. (6), of the newest version, or of the first version",
                        choices=("eq6", "official", "first"), source="text, Eq. (6)")
    dse_relu: bool = arg(True, "use a ReLU between BN_DSE and the DSE convolution, Eq. (3)",
                         source="text, Eq. (3)")
    stem_padding: int = arg(2, "padding of AlexNet's first layer, Table A6", low=0,
                            source="text, Table A6")
    pad: bool = arg(True, "use a padding of 1 in AlexNet's layers 3 to 5, Table A6; without it images need "
                          "160 pixels", source="text, Table A6")
    fc_identity: bool = arg(True, "keep one identity channel of G also in linear blocks",
                            source="text, Table A7")

    def validate(self) -> None:
        if self.backbone == "alexnet_bn" and not self.pad and self.image_size < 160:
            raise UserError("without padding in layers 3 to 5 (--no-pad, --variant official) images need 160 "
                            f"pixels, not {self.image_size}: give --image-size 160, or --pad", 2)


PAPER = fdse.PAPER
# The schedule stands in all files of both versions.
SCHEDULE = source("code dd266a2, config/domainnet.yml", weight_decay=1e-3, lr_decay=0.9998)
OFFICIAL = SCHEDULE | source("code c0bd90b, algorithm/fdse.py", unit="tensor", con_loss="official",
                             own_bias=False, dse_relu=False, pad=False, tau=0.5)
# lambda, beta and tau are the code's defaults. config/algo_para.yml has a list to tune over instead: lambda
# .1, .01, .001, 1, 10 with beta 1 and tau .1.
FIRST = SCHEDULE | source("code dd266a2, algorithm/fdse.py", unit="tensor", con_loss="first",
                          fc_identity=False, stem_padding=5, lambda_=10.0, beta=0.5, tau=10.0)
OFFICE_IMAGES = source("code dd266a2, benchmark/office_caltech10_classification/config.py", image_size=256)
PACS_IMAGES = source("code dd266a2, task/PACS_c4/config.py", image_size=256)
DOMAINNET = (source("code dd266a2, task/domainnet_c6/config.py", image_size=256)
             | source("code dd266a2, config/domainnet.yml", epochs=1))
VARIANTS = {
    # c0bd90b has no file for DomainNet, so the defaults of its code
    "official": dict.fromkeys(PAPER, OFFICIAL) | {
        "officecaltech": OFFICIAL | OFFICE_IMAGES
        | source("code c0bd90b, config/office/fdse.yml", lambda_=0.05, beta=0.05),
        "pacs": OFFICIAL | PACS_IMAGES | source("code c0bd90b, config/pacs/fdse.yml", lambda_=0.5),
        "domainnet10": OFFICIAL | DOMAINNET
        | source("code c0bd90b, algorithm/fdse.py", lambda_=0.01, beta=0.1),
    },
    "first": dict.fromkeys(PAPER, FIRST) | {
        "officecaltech": FIRST | OFFICE_IMAGES,
        "pacs": FIRST | PACS_IMAGES | source("code dd266a2, config/run_pacs.yml", epochs=1),
        "domainnet10": FIRST | DOMAINNET,
    },
}


def consistency_official(batch: list, glob: list, hat: tuple | None, beta: float, gamma: float = GAMMA):
    """L_Con of c0bd90b: mean and variance over a layer's channel means, and one running pair that goes from
    layer to layer and on to the next batch."""
    loss = 0
    for l, w in enumerate(depth_weights(len(batch), beta)):
        mu_b, _ = batch[l]
        mu_g, var_g = glob[l]
        mean, var = mu_b.mean(), mu_b.var()
        if hat is not None:
            mean = gamma * hat[0] + (1 - gamma) * mean
            var = gamma * hat[1] + (1 - gamma) * var
        hat = mean, var
        mean_part = ((mu_g.square() - mean.square()) / (2 * var)).mean()
        variance_part = 0.5 * (torch.log(var / (var_g + 1e-8)) + var_g / (var + 1e-8)).mean()
        loss = loss + w * (mean_part + variance_part)
    return loss, (mean.detach(), var.detach())


def consistency_first(batch: list, glob: list, now: list, beta: float, gamma: float = GAMMA) -> Tensor:
    """L_Con of dd266a2: the squares of Eq. (6), but of mean and variance over a layer's channel means. `now`
    are BN_DFE's running statistics, which have the batch already."""
    loss = 0
    for l, w in enumerate(depth_weights(len(batch), beta)):
        mu_b, _ = batch[l]
        mu_g, var_g = glob[l]
        mu, var = now[l]
        mu_hat = gamma * mu + (1 - gamma) * mu_b.mean()
        var_hat = gamma * var + (1 - gamma) * mu_b.var()
        center = (mu_hat - mu_g).square().mean()
        size = (var_hat.mean() - var_g.mean()).square()
        loss = loss + w * (center + size)
    return loss


def con_loss(args: Args, blocks: list, glob: list, hat: list | tuple | None) -> tuple:
    """L_Con of the batch that the network has just seen, and what the next batch takes as `hat`."""
    batch = [b.statistics for b in blocks]
    if args.con_loss == "official":
        return consistency_official(batch, glob, hat, args.beta)
    if args.con_loss == "first":
        return consistency_first(batch, glob, bn_dfe_statistics(blocks), args.beta), None
    return consistency(batch, glob, hat, args.beta)


class Client(fdse.Client):

    def train(self, down: Payload, t: int) -> Payload:
        """As in fdse.py, with con_loss instead of consistency."""
        args = self.args
        model = load(self.net, self.theta(down)).train()
        opt = sgd(model, args, t)
        glob, hat = bn_dfe_statistics(self.blocks), None
        log = defaultdict(list)
        for x, y in batches(self.data.train, args, t, self.k):  # x [B, C, H, W]; y [B]
            with autocast(args):
                z = model.features(x)  # [B, D]
                l_task = cross_entropy(model.classify(z), y)
            log["loss"].append(l_task.detach())
            l_con = 0
            if args.lambda_ and t >= args.con_from:
                l_con, hat = con_loss(args, self.blocks, glob, hat)
                log["consistency"].append(l_con.detach())
            loss = l_task + args.lambda_ * l_con
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()
            forget_batch(self.blocks)
        self.log = {name: torch.stack(values).mean() for name, values in log.items()}
        w = state(model)
        self.bn_dse = pick(w, self.parts.bn_dse)
        up = {"u": pick(w, self.parts.u), "v": pick(w, self.parts.v), "bn_dfe": pick(w, self.parts.bn_dfe)}
        if args.protocol == "lodo":
            up["bn_dse"] = self.bn_dse
        return up

    def adapt(self, model: Net) -> None:
        """As in fdse.py, with con_loss instead of consistency; the release does not adapt."""
        args = dataclasses.replace(self.args, epochs=self.args.adapt_epochs, steps=0, augment="none")
        model.train()
        adapting = [b.bn_dse for b in self.blocks]
        for module in model.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)) and module not in adapting:
                module.eval()
        theta_v = list(pick(dict(model.named_parameters()), self.parts.v).values())
        glob, hat = bn_dfe_statistics(self.blocks), None
        for x, _ in batches(self.data.test, args, 0, self.k):
            with autocast(args):
                model.features(x)
            l_con, hat = con_loss(args, self.blocks, glob, hat)
            gradients = torch.autograd.grad(l_con, theta_v)
            with torch.no_grad():
                for p, gradient in zip(theta_v, gradients):
                    p.sub_(gradient, alpha=args.adapt_lr)
        forget_batch(self.blocks)
        if not torch.isfinite(flatten(theta_v)).all():
            raise UserError(f"the adaptation to {self.data.name} diverges: lower --adapt-lr or "
                            "--adapt-epochs")


class Block(fdse.DSEBlock):
    """A layer with --dse-relu and --fc-identity; all else as fdse.DSEBlock, of which this is a copy."""

    def __init__(self, args: Args, S: int, T: int, kernel: int = 0, stride: int = 1, padding: int = 0):
        nn.Module.__init__(self)  # not DSEBlock's, whose DSE convolution may have another shape
        self.T, self.linear, self.dse_relu = T, kernel == 0, args.dse_relu
        self.identity = args.fc_identity or not self.linear
        T_DFE, filters = math.ceil(T / G), G
        if self.identity:
            filters = G - 1
        if self.linear:
            self.dfe = nn.Linear(S, T_DFE)
            Conv, BatchNorm, dw = nn.Conv1d, nn.BatchNorm1d, 1
        else:
            self.dfe = nn.Conv2d(S, T_DFE, kernel, stride, padding)
            Conv, BatchNorm, dw = GroupedConv2d, nn.BatchNorm2d, 3
        self.bn_dse = BatchNorm(T_DFE)
        self.dse = Conv(T_DFE, T_DFE * filters, dw, 1, dw // 2, groups=T_DFE, bias=not args.block_bias)
        self.bias = None
        if args.block_bias:
            self.bias = nn.Parameter(torch.zeros(T))
        self.bn_dfe = BatchNorm(T)
        self.statistics = None

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S(, h, w)] -> [B, T(, h', w')]."""
        h = self.bn_dse(self.dfe(x))  # [B, T_DFE(, h', w')]
        if self.dse_relu:
            h = h.relu()
        out = self.filtered(h)
        if self.identity:
            out = torch.cat([h, out], 1)
        out = out[:, :self.T]  # [B, T(, h', w')]
        if self.bias is not None:
            out = out + per_channel(self.bias, out)
        if self.training:
            self.statistics = batch_statistics(out)
        return relu(self.bn_dfe(out), inplace=True)


def build(args: Args, channels: int, classes: int) -> Net:
    """The networks of fdse.build in blocks of this file, with AlexNet's paddings."""
    if args.backbone == "alexnet_bn" and channels == 3 and args.weights == "none":
        p = int(args.pad)
        body = nn.Sequential(
            Block(args, 3, 64, 11, 4, args.stem_padding), nn.MaxPool2d(3, 2),
            Block(args, 64, 192, 5, 1, 2), nn.MaxPool2d(3, 2),
            Block(args, 192, 384, 3, 1, p),
            Block(args, 384, 256, 3, 1, p),
            Block(args, 256, 256, 3, 1, p), nn.MaxPool2d(3, 2),
            nn.AdaptiveAvgPool2d(6), nn.Flatten(), Block(args, 9216, 1024), Block(args, 1024, 1024))
        return Net(body, 1024, classes)
    if args.backbone == "smallcnn_bn" and args.weights == "none":
        body = nn.Sequential(
            Block(args, channels, 32, 3, 1, 1), nn.MaxPool2d(2),
            Block(args, 32, 64, 3, 1, 1), nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(7), nn.Flatten(), Block(args, 3136, 64))
        return Net(body, 64, classes)
    if args.dse_relu and args.fc_identity:
        return fdse.build(args, channels, classes)
    raise UserError("the released blocks are in alexnet_bn (colour images) and smallcnn_bn, without "
                    f"--weights; not in --backbone {args.backbone} --weights {args.weights} on "
                    f"{args.dataset}: add --dse-relu --fc-identity, or run fdse.py", 2)


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
