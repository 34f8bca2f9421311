"""FedADG: federated adversarial domain generalization (Zhang et al., arXiv 2111.10487).

    python fedadg.py --dataset pacs                     # the paper's Table 4, from ImageNet weights
    python fedadg.py --dataset pacs --scale laptop      # minutes on two cores

On each client a discriminator D tells extracted features from those of a distribution generator G; the
extractor F learns to pass for G. Its distribution, common to all clients, aligns the domains, class by class.
Server keeps w = (w_f, w_c, w_g). Client k keeps its discriminator w_d. Down: w. Up: w_k. (The random
projection RP in front of D is drawn from the run's seed, the same for all clients, and does not travel.)

Paper                                           This file
Sec. 3.1, 5.1   F and classifier C; G; D, RP    build; Generator; Discriminator
Eqs. (1)-(3)    adversarial losses              loss_d, loss_f, loss_g
Sec. 3.2 (2)    L_err with label smoothing      Client.step_c3, Client.step_c5
Eq. (4)         the sum of all losses           - (never minimized as one; Alg. 1 alternates its terms)
Alg. 1          s1; s2; s3                      Server.__init__; common.rounds; Server.update
                c1; c2-c9                       Client.__init__, Client.model; Client.train
Symbols as in the paper: F, C, G, D, S_x, S_z, h = F(x), h' = G(z, y), lambda_0, lambda_1, E0, K.
Table 5: FedAvg --no-adversarial; w/o RP --projection none; w/o one-hot --no-onehot. Table 6: --reference
gaussian, uniform, laplace. Fig. 4: --projection-size. Control without an adversary: --lambda0 0. Left out:
nothing. FedSR's tables have FedADG as a baseline; on rotatedmnist the defaults are FedSR's.

Where paper, official code (wzml/FedADG) and this file differ, as far as a flag switches it; all else and the
reasons: docs/methods/fedadg.md. Neither of the code's two programs goes with the paper; what the paper leaves
open is the code's where it says so, else ours. --variant official: the code's settings (not its networks and
data), on VLCS those of its program for VLCS, elsewhere those of that for PACS; all rows but the last two.
  what             paper                  official: VLCS; PACS     here             flag
  L_adv_d          Eq. (1), least -2      Eq. (1); least squares   least squares    --d-loss
  L_adv_g          Eq. (3)                no gradient; D(h')^2     D(h')^2          --g-loss
  lambda_0, _1     0.85, 0.15             0.15, 0.85; all versions as the paper     --lambda0, --lambda1
  order            (F, C), D, G           D, (F, C), G             as the paper     --order
  lr of F and C    VLCS 0.01, PACS 0.001  0.001; 0.01              as the paper     --lr
  lr of D and G    0.7 times that         0.7 times that           as the paper     --lr-adversarial
  warm-up of lr    none                   to 14/500; to 9/100      none             --warmup
  momentum, decay  not given              0.9, 1e-5                0, 0             --momentum, --weight-decay
  momentum kept    not said               that of D                none             --keep-momentum, ...-d
  E0, E1           mini-batches           5, 10; 3, 7 epochs       as the code      --E0, --epochs, --steps
  rounds, batch    not given              20, 16; 30, 10           as the code      --rounds, --batch-size
  label smoothing  value not given        0.25; 0.012 as ours      0.1              --smoothing
  hidden layers    ReLU                   leaky ReLU               leaky ReLU       --slope
  RP, its size P   no formula, ca. 1000   a trained layer, 1024    N(0, 1/P), 1000  --projection(-size)
  one-hot          1                      0.6; 0.7                 1                --onehot-value
  label enters D   not said               before; after RP         after            --label-at
  noise of G       uniform; no size       uniform, 2048            half of h's size --noise
  split, target    VLCS 70/30; PACS's     70/30; lists             see PAPER        --split, --target-part
  AlexNet          not said which         Caffe's, with LRN        torchvision's    --backbone
"""

from dataclasses import dataclass

import common
from common import (BACKBONES, ClientData, Net, Payload, Stop, arg, autocast, average, backbone, batches,
                    load, optimizer_state, parse, run, seed_all, sgd, state, steps_in_epoch, uniform)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, leaky_relu, one_hot
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD


@dataclass
class Args(common.Args):
    variant: str = arg("paper", "settings where paper and code differ", choices=("paper", "official"))
    adversarial: bool = arg(True, "G and D; without them FedADG is FedAvg with label smoothing (Table 5)")
    E0: int = arg(1, "warm-up of a round, steps c2-c3: mini-batches with --steps, else epochs; the rest is "
                     "E1", low=0)
    lambda0: float = arg(0.85, "weight of L_adv_f in step c5; 0: D and G do not act on F and C", low=0)
    lambda1: float = arg(0.15, "weight of L_err in step c5", low=0)
    lr_adversarial: float = arg(0.0, "learning rate of D and G; 0: 0.7 times --lr, as in the paper", low=0)
    warmup: int = arg(0, "length of the official code's warm-up of the learning rates, in what --E0 counts; "
                         "it starts anew in each round; 0: none", low=0)
    d_loss: str = arg("lsgan", "L_adv_d: lsgan, the least squares of its source; or printed: Eq. (1)",
                      choices=("lsgan", "printed"))
    g_loss: str = arg("opposite", "L_adv_g: opposite, D(h')^2; printed: Eq. (3); detached: (3) without "
                                  "gradient, so that G never learns",
                      choices=("opposite", "printed", "detached"))
    order: str = arg("paper", "steps c5, c7, c8 in this order, or D before (F, C)",
                     choices=("paper", "official"))
    reference: str = arg("generated", "h': generated, or drawn from N(0,I), U[-1,1], Laplace(1/sqrt 2) "
                                      "(Table 6)", choices=("generated", "gaussian", "uniform", "laplace"))
    projection: str = arg("fixed", "random projection in front of D: fixed, trained with D, or none (Table "
                                   "5)", choices=("fixed", "trained", "none"))
    projection_size: int = arg(16, "outputs P of the random projection", low=1)
    label_at: str = arg("after", "the one-hot label enters D after or before the projection",
                        choices=("after", "before"))
    onehot: bool = arg(True, "give the label to G and D (Table 5)")
    onehot_value: float = arg(1.0, "value that stands for 1 in the one-hot label", above=0)
    noise: int = arg(0, "dimensions of the noise z; 0: half of the features'", low=0)
    slope: float = arg(0.01, "negative slope of the leaky ReLU in G and D; 0: ReLU", low=0)
    keep_momentum: bool = arg(False, "keep each client's SGD momentum over the rounds, else start it anew")
    keep_momentum_d: bool = arg(False, "keep that of D alone")
    smoothing: float = arg(0.1, "label smoothing of L_err", low=0, high=1)

    def __post_init__(self):
        """A 0 that stands for a value derived from others becomes that value.

        `dataclasses.replace(args, lr=...)` keeps the number that lr_adversarial has become.
        """
        if self.lr_adversarial == 0:
            self.lr_adversarial = 0.7 * self.lr  # Sec. 5.1: 0.007 to 0.01, 0.0007 to 0.001
        if self.noise == 0:
            self.noise = BACKBONES[self.backbone].dim // 2

    def refuse(self) -> None:
        length, unit = self.epochs, "--epochs"
        if self.steps:
            length, unit = self.steps, "--steps"
        if self.adversarial and self.E0 > length:
            raise Stop(f"--E0 is {self.E0}, more than the round's {length} {unit}, of which it is a part", 2)


# Sec. 5.1. E0, E1 (E0 + E1 = epochs), rounds and batch, which it does not give, are the official code's. It
# splits VLCS 70/30 and PACS as [16]. A validation part is ours, and so are the shares of PACS; that a target
# of VLCS is tested on its 30% is the code's.
ALEXNET = dict(backbone="alexnet", weights="imagenet", normalize="imagenet", augment="jigen", protocol="lodo",
               image_size=224, projection_size=1000)
PACS = dict(**ALEXNET, lr=0.001, rounds=30, E0=3, epochs=10, batch_size=10, split="0.9/0.05/0.05")
VLCS = dict(**ALEXNET, lr=0.01, rounds=20, E0=5, epochs=15, batch_size=16, split="0.7/0.15/0.15",
            target_part="heldout")
# FedSR, Sec. 4.2, as fedsr.py: 5 local iterations, and momentum that is kept over the rounds. E0 is ours.
MNIST = dict(backbone="smallcnn", protocol="lodo", image_size=28, rounds=1500, steps=5, E0=2, batch_size=64,
             augment="fedsr-crops", lr=0.01, momentum=0.9, keep_momentum=True, clip=5.0,
             split="0.9/0.05/0.05", eval_every=50)
PAPER = {
    "digits": dict(rounds=60, epochs=2, lr=0.05, batch_size=32),  # ours
    "rotatedmnist": MNIST,
    "rotatedmnist-t10k": MNIST,
    "pacs": PACS,
    "vlcs": VLCS,
    "officecaltech": PACS,  # these three are in none of its tables: as PACS
    "officehome": PACS,
    "domainnet": PACS,
}
# The official code's programs. They spread the smoothing, 0.01 and 0.2, over the other classes (7 and 5 in
# all), PyTorch over all.
OFFICIAL = dict(lambda0=0.15, lambda1=0.85, order="official", projection="trained", momentum=0.9,
                weight_decay=1e-5, keep_momentum_d=True)
OFFICIAL_PACS = dict(**OFFICIAL, d_loss="lsgan", g_loss="opposite", onehot_value=0.7, smoothing=0.07 / 6)
OFFICIAL_PACS_ALEXNET = dict(**OFFICIAL_PACS, projection_size=1024, lr=0.01, warmup=100)
OFFICIAL_VLCS = dict(**OFFICIAL, d_loss="printed", g_loss="detached", label_at="before", onehot_value=0.6,
                     smoothing=0.25, projection_size=1024, lr=0.001, warmup=500)
VARIANTS = {
    "official": {
        "digits": OFFICIAL_PACS,
        "rotatedmnist": OFFICIAL_PACS,
        "rotatedmnist-t10k": OFFICIAL_PACS,
        "pacs": OFFICIAL_PACS_ALEXNET,
        "vlcs": OFFICIAL_VLCS,
        "officecaltech": OFFICIAL_PACS_ALEXNET,
        "officehome": OFFICIAL_PACS_ALEXNET,
        "domainnet": OFFICIAL_PACS_ALEXNET,
    },
}
# AlexNet needs its ImageNet weights to learn in so few rounds; a ResNet18 learns from scratch. Without
# momentum: the velocity of E0's full steps would go on while step c5 weighs L_err by 0.15, and the loss rise.
RESNET = dict(backbone="resnet18", weights="none", image_size=32, rounds=24, steps=20, E0=6, batch_size=32,
              lr=0.1, momentum=0.0, projection_size=128, warmup=0, eval_every=4)
LAPTOP = {
    "rotatedmnist": dict(rounds=150),
    "rotatedmnist-t10k": dict(rounds=150),
    "pacs": RESNET,
    "vlcs": RESNET,
    "officecaltech": RESNET,
    "officehome": RESNET,
    "domainnet": RESNET,
}
BOTH_PHASES = dict(E0=1, epochs=2)
SMOKE = {
    "digits": BOTH_PHASES,
    "pacs": BOTH_PHASES,
    "vlcs": BOTH_PHASES,
    "officecaltech": BOTH_PHASES,
    "officehome": BOTH_PHASES,
    "domainnet": BOTH_PHASES,
}


class Generator(nn.Module):
    """G: noise and one-hot label -> h' [B, H], two layers as wide as the features (Sec. 5.1). It ends with
    ReLU where the features do."""

    def __init__(self, args: Args, labels: int, dim: int):
        super().__init__()
        self.noise, self.slope = args.noise, args.slope
        self.relu = BACKBONES[args.backbone].relu
        self.first = nn.Linear(args.noise + labels, dim)
        self.second = nn.Linear(dim, dim)

    def forward(self, code: Tensor) -> Tensor:
        """One-hot labels [B, C] -> h' [B, H], of new noise."""
        z = torch.rand(len(code), self.noise, device=code.device)  # S_z, uniform on [0, 1) (Sec. 3.2)
        hidden = leaky_relu(self.first(torch.cat([z, code], 1)), self.slope)  # [B, H]
        h = self.second(hidden)
        if self.relu:
            return h.relu()
        return h


class Discriminator(nn.Module):
    """D: features and one-hot label -> the probability [B] that they are of the reference; a random
    projection RP to P dimensions is in front."""

    def __init__(self, args: Args, labels: int, dim: int):
        super().__init__()
        self.before, self.slope = args.label_at == "before", args.slope
        width = dim
        if self.before:
            width += labels
        self.project = nn.Identity()
        if args.projection != "none":
            self.project = nn.Linear(width, args.projection_size, bias=False)
            seed_all(args.seed, "projection")  # the same on all clients
            nn.init.normal_(self.project.weight, std=args.projection_size ** -0.5)  # keeps lengths on average
            self.project.requires_grad_(args.projection == "trained")
            width = args.projection_size
        if not self.before:
            width += labels
        self.first = nn.Linear(width, dim)
        self.second = nn.Linear(dim, 1)

    def forward(self, h: Tensor, code: Tensor) -> Tensor:
        """D(h|y) [B] in [0, 1] of h [B, H] and one-hot labels [B, C]."""
        if self.before:
            projected = self.project(torch.cat([h, code], 1))  # [B, P]
        else:
            projected = torch.cat([self.project(h), code], 1)  # [B, P + C]
        hidden = leaky_relu(self.first(projected), self.slope)  # [B, H]
        return torch.sigmoid(self.second(hidden)[:, 0].float())


class FedADG(nn.Module):
    """What is shared: F and C in `net`, and G; the discriminator D beside them is each client's own.

    Without `--adversarial` there is neither G nor D, with a fixed reference distribution no G.
    """

    def __init__(self, args: Args, net: Net, dim: int, classes: int):
        super().__init__()
        self.net, self.dim, self.classes = net, dim, classes
        self.onehot_value = args.onehot_value
        self.labels = classes if args.onehot else 0
        self.generates = args.adversarial and args.reference == "generated"
        if self.generates:
            self.G = Generator(args, self.labels, dim)
        if args.adversarial:
            self.D = Discriminator(args, self.labels, dim)

    def features(self, x: Tensor) -> Tensor:
        return self.net.features(x)

    def classify(self, z: Tensor) -> Tensor:
        return self.net.classify(z)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def code(self, y: Tensor) -> Tensor:
        """Labels y [B] as G and D get them: one-hot [B, C], or [B, 0] with `--no-onehot`."""
        return one_hot(y, self.classes)[:, :self.labels].float() * self.onehot_value


def build(args: Args, channels: int, classes: int) -> FedADG:
    """F, C, G and D on the chosen backbone. AlexNet's classifier is its last ImageNet layer and an output
    layer (Sec. 5.1)."""
    net = backbone(args, channels, classes, keep_last=args.backbone == "alexnet")
    return FedADG(args, net, BACKBONES[args.backbone].dim, classes)


def shared(net: FedADG) -> dict[str, Tensor]:
    """w = (w_f, w_c, w_g), a copy: all but the discriminator."""
    return {name: v for name, v in state(net).items() if not name.startswith("D.")}


def loss_d(real: Tensor, reference: Tensor, form: str) -> Tensor:
    """L_adv_d of D(h|y) and D(h'|y), both [B] in [0, 1]: Eq. (1) as printed, or least squares.

    Both are least at D(h) = 0 and D(h') = 1, Eq. (1) with -2. If D cannot tell h from h', least squares is
    least at D = 1/2; Eq. (1) is greatest there, and least at D = 0 and at D = 1.
    """
    if form == "printed":
        return -((1 - real).square().mean() + reference.square().mean())  # Eq. (1)
    return real.square().mean() + (1 - reference).square().mean()  # the default, in place of Eq. (1)


def loss_f(real: Tensor) -> Tensor:
    """L_adv_f of D(h|y) [B], Eq. (2): the extractor wants its features taken for the reference."""
    return (1 - real).square().mean()


def loss_g(reference: Tensor, form: str) -> Tensor:
    """L_adv_g of D(h'|y) [B]: Eq. (3) as printed, or its opposite, by which the reference approaches the
    features."""
    if form == "opposite":
        return reference.square().mean()  # the default, in place of Eq. (3)
    return (1 - reference).square().mean()  # Eq. (3)


def sgd_adversarial(module: nn.Module, args: Args, t: int, kept: common.Kept | None) -> SGD:
    """The local SGD of D or of G: at --lr-adversarial, which falls over the rounds as --lr does."""
    opt = sgd(module, args, t, kept)
    opt.param_groups[0]["lr"] *= args.lr_adversarial / args.lr
    return opt


def warm_up_steps(i: int, E0: int, name: str) -> int:
    """The step of the official code's warm-up in epoch i of a round: for F and C 1, 1, 1, 2, ..., E0 - 1,
    then E0 + 1, ...; for D and G, which begin after E0, 1, 1, 2, 3, ..."""
    if name != "FC":
        return max(i - E0, 1)
    if i <= E0:
        return max(i - 1, 1)
    return i


def warm(lr: float, done: int, steps: int) -> float:
    """The learning rate at step `done` of the `steps` from 1e-7 to `lr`."""
    return 1e-7 + (lr - 1e-7) * min(done / steps, 1)


def trainable(module: nn.Module) -> list[Tensor]:
    """The parameters of a module, without a fixed random projection."""
    return [p for p in module.parameters() if p.requires_grad]


class Client:
    keeps = ("w_d", "momentum")

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        self.w_d = {}
        if args.adversarial:
            self.w_d = state(net.D)  # step c1: the initial, later the own discriminator
        self.momentum = {}  # of F and C, of D, of G; with --keep-momentum, that of D with --keep-momentum-d

    def train(self, down: Payload, t: int) -> Payload:
        """ClientUpdate(k, w) of Alg. 1."""
        args = self.args
        model = self.model(down).train()  # w of the server, w_d of step c1
        modules = {"FC": model.net}
        opts = {"FC": sgd(model.net, args, t, self.momentum.get("FC"))}
        if args.adversarial:
            modules["D"] = model.D
            opts["D"] = sgd_adversarial(model.D, args, t, self.momentum.get("D"))
        if model.generates:
            modules["G"] = model.G
            opts["G"] = sgd_adversarial(model.G, args, t, self.momentum.get("G"))
        rates = {name: opt.param_groups[0]["lr"] for name, opt in opts.items()}
        unit = 1  # mini-batches in what E0 counts
        if not args.steps:
            unit = steps_in_epoch(len(self.data.train), args)
        E0 = args.E0
        if not args.adversarial:
            E0 = args.steps or args.epochs  # there is no second loop
        losses = []
        losses_f, losses_d, losses_g = [], [], []
        for x, y in batches(self.data.train, args, t, self.k):  # x [B, C, H, W] in [0, 1]; y [B]
            i = len(losses) // unit
            if args.warmup:
                for name, opt in opts.items():
                    opt.param_groups[0]["lr"] = warm(rates[name], warm_up_steps(i, E0, name), args.warmup)
            if i < E0:  # Alg. 1's first loop: x, y are S_x of step c2
                losses.append(self.step_c3(model, opts["FC"], x, y))
                continue
            code = model.code(y)  # the second loop: x, y are S_x of step c4
            with autocast(args):
                h_ref = self.reference(code)  # step c6, and h' [B, H]; step c5 does not use or change them
            if args.order == "paper":
                err, adv_f = self.step_c5(model, opts["FC"], x, y, code)
                adv_d = self.step_c7(model, opts["D"], x, h_ref, code)
            else:  # the official code
                adv_d = self.step_c7(model, opts["D"], x, h_ref, code)
                err, adv_f = self.step_c5(model, opts["FC"], x, y, code)
            losses.append(err)
            losses_f.append(adv_f)
            losses_d.append(adv_d)
            if model.generates:
                losses_g.append(self.step_c8(model, opts["G"], h_ref, code))
        self.log = {"loss": torch.stack(losses).mean()}
        for name, values in (("adv_f", losses_f), ("adv_d", losses_d), ("adv_g", losses_g)):
            if values:
                self.log[name] = torch.stack(values).mean()
        if args.adversarial:
            self.w_d = state(model.D)
        for name, opt in opts.items():
            if args.keep_momentum or (args.keep_momentum_d and name == "D"):
                self.momentum[name] = optimizer_state(modules[name], opt)
        return {"w": shared(model)}  # step c9

    def step_c3(self, model: FedADG, opt: SGD, x: Tensor, y: Tensor) -> Tensor:
        """Step c3: w_f and w_c on L_err. Returns it."""
        args = self.args
        with autocast(args):
            h = model.features(x)  # [B, H]
            loss = cross_entropy(model.classify(h), y, label_smoothing=args.smoothing)  # L_err, Sec. 3.2 (2)
        opt.zero_grad()
        loss.backward()
        if args.clip:
            clip_grad_norm_(model.net.parameters(), args.clip)
        opt.step()
        return loss.detach()

    def step_c5(self, model: FedADG, opt: SGD, x: Tensor, y: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        """Step c5: w_f and w_c on lambda_0 L_adv_f + lambda_1 L_err. Returns L_err and L_adv_f."""
        args = self.args
        with autocast(args):
            h = model.features(x)  # [B, H]
            err = cross_entropy(model.classify(h), y, label_smoothing=args.smoothing)  # L_err, Sec. 3.2 (2)
            adv = loss_f(model.D(h, code))  # L_adv_f, Eq. (2)
        loss = args.lambda0 * adv + args.lambda1 * err
        opt.zero_grad()
        loss.backward(inputs=trainable(model.net))
        if args.clip:
            clip_grad_norm_(model.net.parameters(), args.clip)
        opt.step()
        return err.detach(), adv.detach()

    def step_c7(self, model: FedADG, opt: SGD, x: Tensor, h_ref: Tensor, code: Tensor) -> Tensor:
        """Step c7: w_d on L_adv_d, with the features of the extractor as it is now. Returns L_adv_d."""
        args = self.args
        model.net.eval()  # no dropout, and BN's statistics are those of training alone
        with autocast(args):
            with torch.no_grad():
                h = model.features(x)  # [B, H]
            loss = loss_d(model.D(h, code), model.D(h_ref.detach(), code), args.d_loss)  # L_adv_d, Eq. (1)
        model.net.train()
        opt.zero_grad()
        loss.backward(inputs=trainable(model.D))
        if args.clip:
            clip_grad_norm_(model.D.parameters(), args.clip)
        opt.step()
        return loss.detach()

    def step_c8(self, model: FedADG, opt: SGD, h_ref: Tensor, code: Tensor) -> Tensor:
        """Step c8: w_g on L_adv_g, with the S_z and y of step c7. Returns L_adv_g."""
        args = self.args
        with autocast(args):
            loss = loss_g(model.D(h_ref, code), args.g_loss)  # L_adv_g, Eq. (3)
        if args.g_loss == "detached":
            return loss.detach()  # G never learns
        opt.zero_grad()
        loss.backward(inputs=trainable(model.G))
        if args.clip:
            clip_grad_norm_(model.G.parameters(), args.clip)
        opt.step()
        return loss.detach()

    def reference(self, code: Tensor) -> Tensor:
        """h' [B, H] of the one-hot labels: of the generator, or of a fixed distribution (Table 6)."""
        shape, device = (len(code), self.net.dim), code.device
        match self.args.reference:
            case "generated":
                return self.net.G(code)
            case "gaussian":
                return torch.randn(shape, device=device)
            case "uniform":
                return torch.rand(shape, device=device) * 2 - 1
        return torch.distributions.Laplace(0.0, 0.5 ** 0.5).sample(shape).to(device)

    def model(self, down: Payload) -> nn.Module:
        """w from the server, and the client's own w_d."""
        own = {f"D.{name}": v for name, v in self.w_d.items()}
        return load(self.net, down["w"] | own)


class Server:
    keeps = ("w",)

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.w = shared(net)  # step s1

    def download(self, k: int) -> Payload:
        return {"w": self.w}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        p = uniform(len(uploads))  # 1/K
        self.w = average([up["w"] for up in uploads.values()], p)  # step s3, BN's statistics too


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS, laptop=LAPTOP, smoke=SMOKE)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
