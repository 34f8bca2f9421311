"""FedADG as released (wzml/FedADG @ 1d34f2a): where its two programs do not do what the paper says.

    python -m official.fedadg --dataset pacs     # pacs-ours/train.py
    python -m official.fedadg --dataset vlcs     # src/train.py

Neither program goes with the paper. All else is that of fedadg.py, whose flags also have the release's values
here; networks and data are not the release's. On other datasets it has the settings of the program for PACS.

What differs (localTrain.py, Nets.py)  paper             VLCS; PACS                   flag
L_adv_d (train_step)                   Eq. (1)           Eq. (1); least squares       --d-loss
L_adv_g (train_step)                   Eq. (3)           (3) without gradient;        --g-loss
                                                         D(h')^2
order of the steps                     (F, C), D, G      D, (F, C), G                 --order
weights (train_step)                   0.85, 0.15        0.15, 0.85                   --lambda0, --lambda1
lr of F and C (README)                 0.01; 0.001       0.001; 0.01                  --lr
warm-up (utilss.py), in each round     none              to 14/500; to 9/100          --warmup
random projection (Nets.py)            random            a trained layer, 1024        --projection(-size)
one-hot label (train_step)             1                 0.6; 0.7 (0.5 before 604073b) --onehot-value
label smoothing (README)               no value          0.2; 0.01 (0.1 in train.py)  --smoothing
Hidden layers of G and D have a leaky ReLU where the paper has ReLU (--slope).
fedadg.py itself has the losses of the program for PACS; here they can be had as printed, too.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice

import fedadg
from common import (Net, Payload, arg, autocast, backbone, batches, optimizer_state, parse, run, source,
                    state, steps_in_epoch)
from fedadg import PAPER, SMOKE, FedADG, Server, loss_d, loss_f, loss_g, minimize, reference_features, shared

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import SGD


@dataclass
class Args(fedadg.Args):
    variant: str = arg("official", "settings of the released code, or of the paper",
                       choices=("official", "paper"))
    warmup: int = arg(0, "length of the official code's learning-rate warm-up, in the unit of --E0; it "
                         "restarts in each round; 0: no warm-up", low=0,
                      source="ours, as the text names none")
    d_loss: str = arg("lsgan", "L_adv_d: lsgan (least squares, as in its source) or printed (Eq. (1))",
                      choices=("lsgan", "printed"), source="code a69a54a, pacs-ours/localTrain.py")
    g_loss: str = arg("opposite", "L_adv_g: opposite (D(h')^2), printed (Eq. (3)), or detached (Eq. (3) "
                                  "without gradient, so that G never learns)",
                      choices=("opposite", "printed", "detached"),
                      source="code a69a54a, pacs-ours/localTrain.py")
    order: str = arg("paper", "order of the steps: c5, c7, c8 (paper), or D before (F, C) (official)",
                     choices=("paper", "official"), source="text, Alg. 1")
    projection: str = arg("fixed", "random projection before D: fixed, trained with D, or none (Table 5)",
                          choices=("fixed", "trained", "none"), source="text, Sec. 3.1")
    onehot_value: float = arg(1.0, "value of the nonzero entry of the one-hot label", above=0,
                              source="text, Alg. 1")


# They spread the smoothing, 0.01 and 0.2, over the other classes (7 and 5 in all), PyTorch over all.
OF_PACS = (source("code 1d34f2a, pacs-ours/localTrain.py", lambda0=0.15, lambda1=0.85, order="official",
                  d_loss="lsgan", g_loss="opposite", onehot_value=0.7)
           | source("code 1d34f2a, pacs-ours/Nets.py", projection="trained", slope=0.01)
           | source("code 1d34f2a, pacs-ours/train.py", momentum=0.9, weight_decay=1e-5, keep_momentum_d=True)
           | source("code 1d34f2a, README.md", smoothing=0.07 / 6))
OF_PACS_ALEXNET = OF_PACS | source("code 1d34f2a, README.md", projection_size=1024, lr=0.01, warmup=100)
OF_VLCS = (source("code 1d34f2a, src/localTrain.py", lambda0=0.15, lambda1=0.85, order="official",
                  d_loss="printed", g_loss="detached", onehot_value=0.6)
           | source("code 1d34f2a, models/Nets.py", projection="trained", slope=0.01, label_at="before")
           | source("code 1d34f2a, src/train.py", momentum=0.9, weight_decay=1e-5, keep_momentum_d=True)
           | source("code 1d34f2a, README.md", smoothing=0.25, projection_size=1024, lr=0.001, warmup=500))
VARIANTS = {
    "official": dict.fromkeys(PAPER, OF_PACS_ALEXNET) | {
        "vlcs": OF_VLCS,
        "digits": OF_PACS,
        "rotatedmnist": OF_PACS,
        "rotatedmnist-t10k": OF_PACS,
    },
}
LAPTOP = {dataset: dict(values, warmup=0) for dataset, values in fedadg.LAPTOP.items()}


def printed_loss_d(d_h: Tensor, d_ref: Tensor) -> Tensor:
    """L_adv_d of D(h|y) and D(h'|y), both [B]: Eq. (1) as printed, and in the program for VLCS."""
    return -((1 - d_h).square().mean() + d_ref.square().mean())


def printed_loss_g(d_ref: Tensor) -> Tensor:
    """L_adv_g of D(h'|y) [B]: Eq. (3) as printed."""
    return (1 - d_ref).square().mean()


def warm_up_steps(i: int, E0: int, name: str) -> int:
    """The step of the warm-up in epoch i of a round: for F and C 1, 1, 1, 2, ..., E0 - 1, then E0 + 1, ...;
    for D and G, which begin after E0, 1, 1, 2, 3, ..."""
    if name != "FC":
        return max(i - E0, 1)
    if i <= E0:
        return max(i - 1, 1)
    return i


def warm(lr: float, done: int, steps: int) -> float:
    """The learning rate at step `done` of the `steps` from 1e-7 to `lr`."""
    return 1e-7 + (lr - 1e-7) * min(done / steps, 1)


class Client(fedadg.Client):

    def train(self, down: Payload, t: int) -> Payload:
        """As in fedadg.py, with --warmup, --order, --d-loss and --g-loss."""
        args = self.args
        model = self.model(down).train()
        modules = self.modules(model)
        opts = self.optimizers(modules, t)
        if args.warmup:
            for name, opt in opts.items():
                self.warm_up(name, opt)
        log = defaultdict(list)
        data = batches(self.data.train, args, t, self.k)  # x [B, C, H, W]; y [B]
        for x, y in islice(data, self.first_batches()):
            with autocast(args):
                h = model.features(x)  # [B, dim]
                err = cross_entropy(model.classify(h), y, label_smoothing=args.smoothing)
            minimize(err, model.net, opts["FC"], args.clip)
            log["loss"].append(err.detach())
        for x, y in data:
            label = model.label(y)  # [B, C]
            if args.order == "paper":
                err, adv_f = self.step_c5(model, opts["FC"], x, y, label)
            with autocast(args):
                h_ref = reference_features(args, model, label)  # [B, dim]
            adv_d = self.step_c7(model, opts["D"], x, h_ref, label)
            if args.order == "official":
                err, adv_f = self.step_c5(model, opts["FC"], x, y, label)
            log["loss"].append(err)
            log["adv_f"].append(adv_f)
            log["adv_d"].append(adv_d)
            if model.generates:
                log["adv_g"].append(self.step_c8(model, opts["G"], h_ref, label))
        self.log = {name: torch.stack(values).mean() for name, values in log.items()}
        if args.adversarial:
            self.w_d = state(model.D)
        for name in opts:
            if args.keep_momentum or (args.keep_momentum_d and name == "D"):
                self.momentum[name] = optimizer_state(modules[name], opts[name])
        return {"w": shared(model)}

    def warm_up(self, name: str, opt: SGD) -> None:
        """An optimizer sets its next learning rate after each of its steps."""
        args, unit, full = self.args, 1, opt.param_groups[0]["lr"]
        if not args.steps:
            unit = steps_in_epoch(len(self.data.train), args)  # mini-batches in what --E0 counts
        E0 = args.E0
        if not args.adversarial:
            E0 = args.steps or args.epochs
        begins = 0 if name == "FC" else E0
        steps = itertools.count()

        def set_rate(*_) -> None:
            i = begins + next(steps) // unit
            opt.param_groups[0]["lr"] = warm(full, warm_up_steps(i, E0, name), args.warmup)

        set_rate()
        opt.register_step_post_hook(set_rate)

    def step_c5(self, model: FedADG, opt: SGD, x: Tensor, y: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Returns L_err and L_adv_f."""
        args = self.args
        with autocast(args):
            h = model.features(x)  # [B, dim]
            err = cross_entropy(model.classify(h), y, label_smoothing=args.smoothing)
            adv_f = loss_f(model.D(h, label))
        minimize(args.lambda0 * adv_f + args.lambda1 * err, model.net, opt, args.clip)
        return err.detach(), adv_f.detach()

    def step_c7(self, model: FedADG, opt: SGD, x: Tensor, h_ref: Tensor, label: Tensor) -> Tensor:
        """Returns L_adv_d."""
        args = self.args
        model.net.eval()
        with autocast(args):
            with torch.no_grad():
                h = model.features(x)  # [B, dim]
            of_d = printed_loss_d if args.d_loss == "printed" else loss_d
            adv_d = of_d(model.D(h, label), model.D(h_ref.detach(), label))
        model.net.train()
        minimize(adv_d, model.D, opt, args.clip)
        return adv_d.detach()

    def step_c8(self, model: FedADG, opt: SGD, h_ref: Tensor, label: Tensor) -> Tensor:
        """Returns L_adv_g; with --g-loss detached G never learns."""
        args = self.args
        with autocast(args):
            of_g = loss_g if args.g_loss == "opposite" else printed_loss_g
            adv_g = of_g(model.D(h_ref, label))
        if args.g_loss != "detached":
            minimize(adv_g, model.G, opt, args.clip)
        return adv_g.detach()


class Network(FedADG):

    def __init__(self, args: Args, net: Net, dim: int, classes: int):
        super().__init__(args, net, dim, classes)
        self.onehot_value = args.onehot_value
        if args.adversarial and args.projection == "trained":
            self.D.project.requires_grad_(True)

    def label(self, y: Tensor) -> Tensor:
        """One-hot with --onehot-value instead of 1."""
        return super().label(y) * self.onehot_value


def build(args: Args, channels: int, classes: int) -> Network:
    net = backbone(args, channels, classes, keep_last=args.backbone == "alexnet")
    linear = net.head[0] if args.backbone == "alexnet" else net.head
    return Network(args, net, linear.in_features, classes)


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS, laptop=LAPTOP, smoke=SMOKE)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
