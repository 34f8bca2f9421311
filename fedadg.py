r"""FedADG: federated adversarial domain generalization (Zhang et al., arXiv 2111.10487).

    python fedadg.py --dataset pacs                     # the paper's Table 4, from ImageNet weights
    python fedadg.py --dataset pacs --scale laptop      # minutes on two cores

On each client a discriminator D tells extracted features from those of a distribution generator G; the
extractor F learns to pass for G. G starts a round alike on all clients, so the domains are aligned, class by
class.
Server keeps w = (w_f, w_c, w_g). Client k keeps its discriminator w_d, and momentum where --keep-momentum or
--keep-momentum-d says so. Down: w. Up: w_k. (The random projection RP in front of D is drawn from the run's
seed, the same for all clients, and does not travel.)

Paper                                           This file
Eqs. (1)-(3)    adversarial losses              loss_d, loss_f, loss_g
Eq. (4)         the sum of all losses           - (never minimized as one; Alg. 1 alternates its terms)
Alg. 1          c1; c2-c9                       Client.__init__, Client.model; Client.train
                s1; s2; s3                      Server.__init__; common.train_client; Server.update
Sec. 3.2 (2)    L_err with label smoothing      Client.train
Sec. 3.1, 5.1   F and classifier C; G; D, RP    build; Generator; Discriminator
Symbols as in the paper: F, C, G, D, S_x, S_z, h = F(x), h' = G(z, y) (printed G(z)), lambda_0, lambda_1, E0,
K.
Table 5: FedAvg --no-adversarial; w/o RP --projection none; w/o one-hot --no-onehot. Table 6: --reference
gaussian, uniform, laplace. Fig. 4: --projection-size. Control without an adversary, L_err at 0.15 in E1 as in
FedADG: --lambda0 0. Left out: nothing. FedSR's tables have FedADG as a baseline; on rotatedmnist the defaults
are FedSR's.

What moves a number; all differences from paper and code: papers/fedadg/differences.md. Eqs. (1) and (3) as
printed: official/fedadg.py.
  what            paper                  official: VLCS; PACS  here               flag
  losses of D, G  as printed             as printed, G not     least squares      official, --d-loss, --g-loss
                                         trained; least squares
  E0, E1          mini-batches           epochs: 5, 10; 3, 7   epochs, the code's --E0, --epochs; --steps
  warm-up of lr   none                   never ends            none               official, --warmup
  lambda_0, _1    0.85, 0.15             0.15, 0.85            0.85, 0.15         --lambda0, --lambda1
  lr of F and C   VLCS 0.01, PACS 0.001  0.001; 0.01           0.01; 0.001        --lr
  hidden layers   ReLU                   leaky ReLU            ReLU               --slope
  random          no formula; on PACS    trained, 512; 1000,   N(0, 1/P), 512;    --projection,
  projection RP   about 1000 numbers     later 1024            1000               --projection-size
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import islice

import common
from common import (BACKBONES, ClientData, Net, Payload, UserError, arg, autocast, average, backbone, batches,
                    load, optimizer_state, parse, run, seed_all, sgd, source, sourced, state,
                    steps_in_epoch, uniform)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, leaky_relu, one_hot
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD


@dataclass
class Args(common.Args):
    adversarial: bool = arg(True, "train G and D; without them FedADG is FedAvg with label smoothing (Table "
                                  "5)", source="text, Alg. 1")
    E0: int = arg(1, "length of a round's first loop, steps c2-c3: in mini-batches with --steps, else in "
                     "epochs; the rest of the round is E1", low=0, source="ours")
    lambda0: float = arg(0.85, "weight of L_adv_f in step c5; 0: D and G have no effect on F and C", low=0,
                         source="text, Sec. 5.1")
    lambda1: float = arg(0.15, "weight of L_err in step c5", low=0, source="text, Sec. 5.1")
    lr_adversarial: float = arg(0.0, "learning rate of D and G; 0: use 0.7 times --lr, as in the paper",
                                low=0, source="text, Sec. 5.1")
    reference: str = arg("generated", "reference features h': generated, or drawn from N(0,I), U[-1,1], "
                                      "Laplace(1/sqrt 2) (Table 6)",
                         choices=("generated", "gaussian", "uniform", "laplace"), source="text, Sec. 3.1")
    projection: str = arg("fixed", "random projection before D: fixed, or none (Table 5)",
                          choices=("fixed", "none"), source="text, Sec. 3.1, with weights of ours")
    projection_size: int = arg(16, "output dimensions P of the random projection", low=1, source="ours")
    label_at: str = arg("after", "the one-hot label enters D after or before the projection",
                        choices=("after", "before"), source="code a69a54a, pacs-ours/Nets.py")
    onehot: bool = arg(True, "give the label to G and D (Table 5)", source="text, Sec. 3.1")
    noise: int = arg(0, "dimensions of the noise z; 0: half as many as the features have", low=0,
                     source="ours")
    slope: float = arg(0.0, "negative slope of the leaky ReLU in G and D; 0: ReLU", low=0,
                       source="text, Sec. 5.1")
    keep_momentum: bool = arg(False, "keep each client's SGD momentum between rounds instead of resetting it",
                              source="code a69a54a, pacs-ours/localTrain.py")
    keep_momentum_d: bool = arg(False, "keep the momentum of D's optimizer between rounds; it stays on the "
                                       "client", source="code a69a54a, pacs-ours/localTrain.py")
    smoothing: float = arg(0.1, "label smoothing of L_err", low=0, high=1, source="ours")

    def __post_init__(self):
        """A 0 that stands for a value derived from others becomes that value.

        `dataclasses.replace(args, lr=...)` keeps the number that lr_adversarial has become.
        """
        if self.lr_adversarial == 0:
            self.lr_adversarial = 0.7 * self.lr  # Sec. 5.1: 0.007 to 0.01, 0.0007 to 0.001
        if self.noise == 0 and self.backbone in BACKBONES:
            self.noise = BACKBONES[self.backbone].dim // 2

    def validate(self) -> None:
        length, unit = self.epochs, "--epochs"
        if self.steps:
            length, unit = self.steps, "--steps"
        if self.adversarial and self.E0 >= length:
            raise UserError(f"--E0 is {self.E0} of the round's {length} {unit}: nothing is left for the "
                            "adversarial steps c4-c8; give a smaller --E0, or --no-adversarial", 2)


# The shares of the validation parts are ours, and those of PACS, which the paper splits as another one does.
# The code spreads the smoothing, 0.1 on PACS and 0.2, over the other classes, PyTorch over all: so 0.1 * 7/6
# and 0.2 * 5/4 here.
IMAGES = sourced({
    "pacs": dict(backbone="alexnet", weights="imagenet", augment="jigen", protocol="lodo",
                 projection_size=1000, lr=0.001, rounds=30, E0=3, epochs=10, batch_size=10, momentum=0.9,
                 weight_decay=1e-5, smoothing=0.7 / 6, image_size=222, normalize="imagenet",
                 split="0.9/0.05/0.05"),
    "vlcs": dict(backbone="alexnet", weights="imagenet", augment="jigen", protocol="lodo",
                 projection_size=512, lr=0.01, rounds=20, epochs=15, batch_size=16, momentum=0.9,
                 weight_decay=1e-5, smoothing=0.25, keep_momentum_d=True, E0=5, keep_momentum=False,
                 label_at="before", image_size=225, normalize="imagenet", target_part="heldout",
                 split="0.7/0.15/0.15"),
}, {
    "text, Sec. 5.1": "backbone weights augment protocol lr",
    "text, Sec. 5.5": "projection_size",
    "code a69a54a, pacs-ours/train.py": "rounds E0 epochs batch_size momentum weight_decay smoothing",
    "code a69a54a, pacs-ours/data_loader.py": "image_size normalize",
    "ours": "split",
    "code a69a54a, src/train.py":
        "keep_momentum_d vlcs.rounds vlcs.epochs vlcs.batch_size vlcs.momentum vlcs.weight_decay "
        "vlcs.smoothing",
    "code a69a54a, src/localTrain.py": "keep_momentum vlcs.E0",
    "code a69a54a, models/Nets.py": "label_at vlcs.projection_size",
    "code a69a54a, utils/sampling.py": "target_part vlcs.image_size vlcs.normalize",
    "ours, of the text's 70/30": "vlcs.split",
})
# FedADG in FedSR's Table 1: that table's rounds, steps and optimizer, as fedsr.py.
MNIST = sourced({
    "rotatedmnist": dict(backbone="smallcnn3", protocol="lodo", rounds=1500, steps=5, batch_size=64,
                         lr=0.001, momentum=0.9, keep_momentum=True, weight_decay=5e-4, image_size=28,
                         split="0.9/0.05/0.05", E0=2, eval_every=50),
    "rotatedmnist-t10k": dict(backbone="smallcnn3", protocol="lodo", rounds=1500, steps=5, batch_size=64,
                              lr=0.001, momentum=0.9, keep_momentum=True, weight_decay=5e-4,
                              image_size=28, split="0.9/0.05/0.05", E0=2, eval_every=50),
}, {
    "text of FedSR, Sec. 4.2": "protocol steps batch_size lr",
    "text of FedSR, Sec. 4.2, and its cited code, DIRT": "backbone",
    "ours, of FedSR's 500 epochs": "rounds",
    "code of FedSR ba8d894, src/methods/base.py": "momentum keep_momentum",
    "code of FedSR ba8d894, src/argument.py": "weight_decay",
    "cited code, DIRT 2635178, domain_gen_rotatedmnist": "image_size",
    "ours, of FedSR's 90/10": "split",
    "ours": "E0 eval_every",
})
AS_PACS = source("ours, as on PACS", **{name: of.value for name, of in IMAGES["pacs"].items()})
PAPER = {
    **IMAGES,
    **MNIST,
    "officecaltech": AS_PACS,  # these three are in none of its tables
    "officehome": AS_PACS,
    "domainnet": AS_PACS,
    "digits": source("ours", rounds=60, epochs=2, lr=0.05, batch_size=32),
}
# AlexNet needs its ImageNet weights to learn in so few rounds; a ResNet18 learns from scratch. Without
# momentum: the velocity of E0's full steps would go on while step c5 weighs L_err by 0.15, and the loss rise.
RESNET = dict(backbone="resnet18", weights="none", image_size=32, rounds=24, steps=20, E0=6, batch_size=32,
              lr=0.1, momentum=0.0, weight_decay=0.0, smoothing=0.1, projection_size=128, eval_every=4)
LAPTOP = dict.fromkeys(("pacs", "vlcs", "officecaltech", "officehome", "domainnet"), RESNET)
BOTH_PHASES = dict(E0=1, epochs=2)
SMOKE = dict.fromkeys(("digits", "pacs", "vlcs", "officecaltech", "officehome", "domainnet"), BOTH_PHASES)


# The networks


class Generator(nn.Module):
    """G: noise and one-hot label -> h' [B, dim], two layers as wide as the features (Sec. 5.1). It ends with
    ReLU where the backbone's features come out of one; with networks outside BACKBONES it has none."""

    def __init__(self, args: Args, label_dim: int, dim: int):
        super().__init__()
        self.noise = args.noise or dim // 2  # 0: of a network that BACKBONES does not list
        self.slope = args.slope
        self.relu = args.backbone in BACKBONES and BACKBONES[args.backbone].relu
        self.first = nn.Linear(self.noise + label_dim, dim)
        self.second = nn.Linear(dim, dim)

    def forward(self, label: Tensor) -> Tensor:
        """One-hot labels [B, C] -> h' [B, dim], of new noise."""
        z = torch.rand(len(label), self.noise, device=label.device)  # S_z, uniform on [0, 1) (Sec. 3.2)
        hidden = leaky_relu(self.first(torch.cat([z, label], 1)), self.slope)  # [B, dim]
        h = self.second(hidden)
        if self.relu:
            return h.relu()
        return h


class Discriminator(nn.Module):
    """D: features and one-hot label -> the probability [B] that they are of the reference; a random
    projection RP to P dimensions is in front."""

    def __init__(self, args: Args, label_dim: int, dim: int):
        super().__init__()
        self.before, self.slope = args.label_at == "before", args.slope
        width = dim
        if self.before:
            width += label_dim
        self.project = nn.Identity()
        if args.projection != "none":
            self.project = nn.Linear(width, args.projection_size, bias=False)
            seed_all(args.seed, "projection")  # of the seed alone; D's layers below go on with it
            nn.init.normal_(self.project.weight, std=args.projection_size ** -0.5)  # keeps lengths on average
            self.project.requires_grad_(False)
            width = args.projection_size
        if not self.before:
            width += label_dim
        self.first = nn.Linear(width, dim)
        self.second = nn.Linear(dim, 1)

    def forward(self, h: Tensor, label: Tensor) -> Tensor:
        """D(h|y) [B] in [0, 1] of h [B, dim] and one-hot labels [B, C]."""
        if self.before:
            projected = self.project(torch.cat([h, label], 1))  # [B, P]
        else:
            projected = torch.cat([self.project(h), label], 1)  # [B, P + C]
        hidden = leaky_relu(self.first(projected), self.slope)  # [B, dim]
        return torch.sigmoid(self.second(hidden)[:, 0].float())


class FedADG(nn.Module):
    """What is shared: F and C in `net`, and G; the discriminator D beside them is each client's own.

    Without `--adversarial` there is neither G nor D, with a fixed reference distribution no G.
    """

    def __init__(self, args: Args, net: Net, dim: int, classes: int):
        super().__init__()
        self.net, self.dim, self.classes = net, dim, classes
        self.label_dim = classes if args.onehot else 0
        self.generates = args.adversarial and args.reference == "generated"
        if self.generates:
            self.G = Generator(args, self.label_dim, dim)
        if args.adversarial:
            self.D = Discriminator(args, self.label_dim, dim)

    def features(self, x: Tensor) -> Tensor:
        return self.net.features(x)

    def classify(self, z: Tensor) -> Tensor:
        return self.net.classify(z)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def label(self, y: Tensor) -> Tensor:
        """Labels y [B] as G and D get them: one-hot [B, C], or [B, 0] with `--no-onehot`."""
        return one_hot(y, self.classes)[:, :self.label_dim].float()


def shared(net: FedADG) -> dict[str, Tensor]:
    """w = (w_f, w_c, w_g), a copy: all but the discriminator."""
    return {name: v for name, v in state(net).items() if not name.startswith("D.")}


def trainable(module: nn.Module) -> list[Tensor]:
    """The parameters of a module, without a fixed random projection."""
    return [p for p in module.parameters() if p.requires_grad]


# The losses


def loss_d(d_h: Tensor, d_ref: Tensor) -> Tensor:
    r"""L_adv_d of D(h|y) and D(h'|y), both [B] in [0, 1], by least squares. The paper prints

    $$ \begin{aligned}
       \mathcal{L}_{adv_d} = -\Big( & \mathbb{E}_{x \sim p(h)}\left[(1 - D(h|y))^2\right] \\
       & + \mathbb{E}_{z \sim p(h')}\left[D(h'|y)^2\right] \Big)
       \end{aligned} \tag{1} $$

    Both have their minimum at D(h) = 0 and D(h') = 1. Where D cannot tell h from h', least squares prefers
    D = 1/2, which Eq. (1) avoids.
    """
    return d_h.square().mean() + (1 - d_ref).square().mean()  # instead of Eq. (1)


def loss_f(d_h: Tensor) -> Tensor:
    r"""L_adv_f of D(h|y) [B]: the extractor wants its features taken for the reference.

    $$ \mathcal{L}_{adv_f} = \mathbb{E}_{x \sim p(h)}\left[(1 - D(h|y))^2\right] \tag{2} $$
    """
    return (1 - d_h).square().mean()


def loss_g(d_ref: Tensor) -> Tensor:
    r"""L_adv_g of D(h'|y) [B], by which the reference approaches the features. The paper prints another
    goal, D(h') = 1, which is also Eq. (1)'s:

    $$ \mathcal{L}_{adv_g} = \mathbb{E}_{z \sim p(h')}\left[(1 - D(h'|y))^2\right] \tag{3} $$
    """
    return d_ref.square().mean()  # instead of Eq. (3)


# ClientUpdate and the server


def reference_features(args: Args, model: FedADG, label: Tensor) -> Tensor:
    """h' [B, dim] of the one-hot labels: of the generator, or of a fixed distribution (Table 6)."""
    shape, device = (len(label), model.dim), label.device
    match args.reference:
        case "generated":
            return model.G(label)
        case "gaussian":
            return torch.randn(shape, device=device)
        case "uniform":
            return torch.rand(shape, device=device) * 2 - 1
    return torch.distributions.Laplace(0.0, 0.5 ** 0.5).sample(shape).to(device)


def minimize(loss: Tensor, module: nn.Module, opt: SGD, clip: float) -> None:
    """A step on the parameters of this module alone: in step c5 D and G stay, in c7 F, C and G, in c8 F, C
    and D."""
    opt.zero_grad()
    loss.backward(inputs=trainable(module))
    if clip:
        clip_grad_norm_(module.parameters(), clip)
    opt.step()


class Client:
    keeps = ("w_d", "momentum")

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        r"""
        $$ \text{Initialize or use the local } w_d \tag{step c1} $$
        """
        self.args, self.net, self.k, self.data = args, net, k, data
        self.w_d = {}
        if args.adversarial:
            self.w_d = state(net.D)  # step c1: initialized; from then on what the last round left
        self.momentum = {}  # of F and C, of D, of G

    def train(self, down: Payload, t: int) -> Payload:
        r"""ClientUpdate(k, w) of Alg. 1.

        $$ S_x \sim S_k, \quad i = 1, \ldots, E_0 \tag{step c2} $$
        $$ \min_{w_f, w_c} \mathcal{L}_{err} \tag{step c3} $$
        $$ S_x \sim S_k, \quad j = 1, \ldots, E_1 \tag{step c4} $$
        $$ \min_{w_f, w_c} \lambda_0 \mathcal{L}_{adv_f} + \lambda_1 \mathcal{L}_{err} \tag{step c5} $$
        $$ S_z \sim U[0, 1) \tag{step c6} $$
        $$ \min_{w_d} \mathcal{L}_{adv_d} \tag{step c7} $$
        $$ \min_{w_g} \mathcal{L}_{adv_g} \tag{step c8} $$
        $$ \mathbf{w} = \{w_f, w_c, w_g\} \tag{step c9} $$

        Step c7 has the features of the extractor as step c5 leaves it.
        """
        args = self.args
        model = self.model(down).train()  # w of the server, w_d of step c1
        modules = self.modules(model)
        opts = self.optimizers(modules, t)
        log = defaultdict(list)
        data = batches(self.data.train, args, t, self.k)  # x [B, C, H, W]; y [B]
        for x, y in islice(data, self.first_batches()):  # step c2: S_x
            with autocast(args):
                h = model.features(x)  # [B, dim]
                err = cross_entropy(model.classify(h), y, label_smoothing=args.smoothing)  # L_err, step c3
            minimize(err, model.net, opts["FC"], args.clip)  # step c3
            log["loss"].append(err.detach())
        for x, y in data:  # step c4: S_x
            label = model.label(y)  # [B, C]
            with autocast(args):
                h = model.features(x)  # [B, dim]
                err = cross_entropy(model.classify(h), y, label_smoothing=args.smoothing)  # L_err, step c5
                adv_f = loss_f(model.D(h, label))  # L_adv_f, Eq. (2)
            loss = args.lambda0 * adv_f + args.lambda1 * err  # step c5
            minimize(loss, model.net, opts["FC"], args.clip)  # step c5
            log["loss"].append(err.detach())
            log["adv_f"].append(adv_f.detach())

            with autocast(args):
                h_ref = reference_features(args, model, label)  # step c6: S_z and of it h' [B, dim]
            model.net.eval()  # as the code: no dropout; BN has its running statistics, which stay
            with autocast(args):
                with torch.no_grad():
                    h = model.features(x)  # [B, dim]
                adv_d = loss_d(model.D(h, label), model.D(h_ref.detach(), label))  # L_adv_d, step c7
            model.net.train()
            minimize(adv_d, model.D, opts["D"], args.clip)  # step c7
            log["adv_d"].append(adv_d.detach())

            if model.generates:
                with autocast(args):
                    adv_g = loss_g(model.D(h_ref, label))  # L_adv_g of the same S_z and y, step c8
                minimize(adv_g, model.G, opts["G"], args.clip)  # step c8
                log["adv_g"].append(adv_g.detach())
        self.log = {name: torch.stack(values).mean() for name, values in log.items()}
        if args.adversarial:
            self.w_d = state(model.D)
        for name in opts:
            if args.keep_momentum or (args.keep_momentum_d and name == "D"):
                self.momentum[name] = optimizer_state(modules[name], opts[name])
        return {"w": shared(model)}  # step c9

    def modules(self, model: FedADG) -> dict[str, nn.Module]:
        """What has an optimizer of its own."""
        modules = {"FC": model.net}
        if self.args.adversarial:
            modules["D"] = model.D
        if model.generates:
            modules["G"] = model.G
        return modules

    def optimizers(self, modules: dict[str, nn.Module], t: int) -> dict[str, SGD]:
        """Of D and G at --lr-adversarial, which falls over the rounds as --lr does."""
        args, opts = self.args, {}
        for name, module in modules.items():
            opts[name] = sgd(module, args, t, self.momentum.get(name))
            if name != "FC":
                opts[name].param_groups[0]["lr"] *= args.lr_adversarial / args.lr
        return opts

    def first_batches(self) -> int | None:
        """The mini-batches of the first loop; without an adversary all (None): there is no second loop."""
        args = self.args
        if not args.adversarial:
            return None
        if args.steps:
            return args.E0
        return args.E0 * steps_in_epoch(len(self.data.train), args)

    def model(self, down: Payload) -> nn.Module:
        """w from the server, and the client's own w_d."""
        own = {f"D.{name}": v for name, v in self.w_d.items()}
        return load(self.net, down["w"] | own)


class Server:
    keeps = ("w",)

    def __init__(self, args: Args, net: nn.Module, clients: int):
        r"""
        $$ \mathbf{w}_1 = \{w_f, w_c, w_g\} \tag{step s1} $$
        """
        self.w = shared(net)  # step s1

    def download(self, k: int) -> Payload:
        return {"w": self.w}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        r"""
        $$ \mathbf{w}_{t+1} \leftarrow \frac{1}{K} \sum_{k=1}^{K} \mathbf{w}_{t+1}^k \tag{step s3} $$
        """
        p = uniform(len(uploads))  # 1/K of those that have answered
        self.w = average([up["w"] for up in uploads.values()], p)  # step s3, BN's statistics too


def build(args: Args, channels: int, classes: int) -> FedADG:
    """F, C, G and D on the chosen backbone. AlexNet's classifier is its last ImageNet layer and an output
    layer (Sec. 5.1)."""
    net = backbone(args, channels, classes, keep_last=args.backbone == "alexnet")
    linear = net.head[0] if args.backbone == "alexnet" else net.head
    return FedADG(args, net, linear.in_features, classes)


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, laptop=LAPTOP, smoke=SMOKE)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
