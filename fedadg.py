"""FedADG: federated adversarial domain generalization (Zhang et al., arXiv 2111.10487).

    python fedadg.py --dataset pacs                                 # the paper's Table 4, from ImageNet weights
    python fedadg.py --dataset pacs --scale laptop                  # minutes on two cores

On each client a discriminator tells extracted features from those of a distribution generator; the extractor learns to pass
for the generator, whose distribution, common to all clients, is the reference that aligns the domains, class by class.
Server keeps w = (w_f, w_c, w_g). Client k keeps its discriminator w_d. Down: w. Up: w_k. (The random projection is drawn from
the run's seed, the same for all clients, and does not travel.)

Paper                                                         This file
Sec. 3.1, 5.1  feature extractor, classifier                  build (F is the backbone's body, C its head)
Sec. 3.1, 5.1  distribution generator, discriminator          Generator, Discriminator
Eqs. (1)-(3)   adversarial losses                             loss_d, loss_f, loss_g
Sec. 3.2 (2)   L_err with label smoothing                     Client.train
Eq. (4)        the sum of all losses                          - (never minimized as one; Alg. 1 alternates its terms)
Alg. 1         s1; s2; s3                                     Server.__init__; common.Loop.round; Server.update
               c1; c2-c9                                      Client.__init__; Client.train
Symbols as in the paper: F, C, G, D, S_x, S_z, h = F(x), h' = G(z, y), lambda_0, lambda_1, E0, K.
Table 5: FedAvg --no-adversarial; w/o RP --projection none; w/o one-hot --no-onehot. Table 6: --reference gaussian, uniform,
laplace. Fig. 4: --projection-size. Left out: nothing. FedSR's tables have FedADG as a baseline, by settings that are not
published: on rotatedmnist the defaults are FedSR's (momentum kept over the rounds, 5 local iterations, of which E0 = 2).

Where paper, official code (wzml/FedADG; read in the copy Haoxiang-Wang/FedADG) and this file differ; --variant official sets
those with a flag but --keep-momentum and --target-part, on VLCS its program's for VLCS, elsewhere its program's for PACS
  what                  paper                        official code                 here (default)     flag
  L_adv_d, L_adv_g      Eqs. (1), (3): D and G both  VLCS: Eq. (1); Eq. (3) on a   the game of [23],  --d-loss printed,
                        drive D(h') to 1; nothing    detached h' (G never          D with a sigmoid:  --g-loss printed,
                        bounds D. Text, Fig. 2: h'   learns). PACS: the least      only that moves    detached
                        moves towards the features;  squares game of [23]. D has   h' towards h
                        loss "from [23]"             a sigmoid in both
  (Eq. (1) with the opposite of Eq. (3) ends in D = 0 on both, where Eq. (1) is at its minimum -1 and the sigmoid is flat.)
  lambda_0, lambda_1    0.85 adversarial, 0.15 L_err  0.15 adversarial, 0.85 L_err  0.85, 0.15        --lambda0, --lambda1
  order                 (F, C), D, G                 D, (F, C), G                  as the paper       --order official
  lr of F, C            VLCS 0.01, PACS 0.001        VLCS 0.001, PACS 0.01         as the paper       --lr
  lr of D, G            VLCS 0.007, PACS 0.0007      VLCS 0.0007, PACS 0.007       as the paper       --lr-adversarial
  lr schedule           none                         a warm-up that starts again   none               -
                                                     in each round, never ends
  momentum, decay       not given                    0.9, 1e-5; D's goes on over   0, 0; new in each  --momentum,
                                                     the rounds                    round              --weight-decay,
                                                                                                      --keep-momentum (all)
  E0, E1                mini-batches; no values      epochs: VLCS 5, 10; PACS      epochs: as the     --E0, --epochs,
                                                     3, 7                          code               --steps
  rounds, batch         not given                    VLCS 20, 16; PACS 30, 10      as the code        --rounds
  label smoothing       value not given              VLCS 0.2; PACS 0.01; over     0.1, over all      --smoothing
                                                     the other classes             classes
  random projection     no formula                   a trained linear layer,       fixed, N(0, 1/P),  --projection trained
                                                     drawn by each client          common to all
  its size              "around 1000"                1024                          1000 for AlexNet   --projection-size
  one-hot               1                            VLCS 0.6, PACS 0.7            1                  --onehot-value
  label enters D        not said                     VLCS before, PACS after the   after              --label-at before
                                                     projection
  noise of G            uniform; size not given      2048                          half of h's size   --noise
  hidden layers         as wide as h; ReLU           G 4096; D 1024; leaky ReLU    as h; leaky ReLU   -
  G's last layer        not said                     ReLU, as the features         as the features    -
  D                     local (Alg. 1); submitted    local, drawn by each client   local, the same    -
                        (Sec. 6)                                                   at the start
  classifier            last FC layer of AlexNet,    two new layers, 4096-4096-    as the paper;      -
                        4096-1000, and an output     classes                       other backbones:
                        layer                                                      one layer
  F for D's step        not said                     evaluation mode               as the code (with  -
                                                                                   BN this shows in
                                                                                   the first rounds)
  AlexNet               torchvision's or Caffe's,    Caffe's, with LRN             torchvision's      --backbone
                        not said
  split                 VLCS 70/30; PACS [16]'s      lists                         0.7/0.15/0.15;     --split
                                                                                   0.9/0.05/0.05
  target                its 30% or all: not said     its test list                 all its images     --target-part
  tested model          not said                     best of the clients' means    both are kept:     -
                                                     before aggregation            best and last
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, leaky_relu, one_hot
from torch.nn.utils import clip_grad_norm_

import common
from basics import seed_all
from common import ClientData, Payload, Stop, arg, autocast, average, batches, cut_batches, optimizer_state, parse, run, sgd, state
from networks import Net, backbone


@dataclass
class Args(common.Args):
    variant: str = arg("paper", "choices where paper and official code differ", choices=("paper", "official"))
    adversarial: bool = arg(True, "G and D; without them FedADG is FedAvg with label smoothing (Table 5)")
    E0: int = arg(1, "warm-up of a round, steps c2-c3: mini-batches with --steps, else epochs; the rest is E1", low=0)
    lambda0: float = arg(0.85, "weight of L_adv_f in step c5", low=0)
    lambda1: float = arg(0.15, "weight of L_err in step c5", low=0)
    lr_adversarial: float = arg(0.0, "learning rate of D and G; 0: 0.7 times --lr, as in the paper", low=0)
    d_loss: str = arg("lsgan", "L_adv_d: the least squares of its source [23], or Eq. (1) as printed",
                      choices=("lsgan", "printed"))
    g_loss: str = arg("opposite", "L_adv_g: D(h')^2, Eq. (3) as printed, or (3) without gradient, so that G never learns",
                      choices=("opposite", "printed", "detached"))
    order: str = arg("paper", "steps c5, c7, c8 in this order, or D before (F, C)", choices=("paper", "official"))
    reference: str = arg("generated", "h': generated, or drawn from N(0,I), U[-1,1], Laplace(1/sqrt 2) (Table 6)",
                         choices=("generated", "gaussian", "uniform", "laplace"))
    projection: str = arg("fixed", "random projection in front of D: fixed, trained with D, or none (Table 5)",
                          choices=("fixed", "trained", "none"))
    projection_size: int = arg(16, "outputs of the random projection", low=1)
    label_at: str = arg("after", "the one-hot label enters D after or before the projection", choices=("after", "before"))
    onehot: bool = arg(True, "give the label to G and D (Table 5)")
    onehot_value: float = arg(1.0, "value that stands for 1 in the one-hot label", above=0)
    noise: int = arg(0, "dimensions of the noise z; 0: half of the features'", low=0)
    keep_momentum: bool = arg(False, "keep each client's SGD momentum over the rounds, else start it anew")
    smoothing: float = arg(0.1, "label smoothing of L_err", low=0, high=1)


# Sec. 5.1; E0, E1, rounds, batch and split, which it does not give, are the official code's.
SHARED = dict(backbone="alexnet", weights="imagenet", normalize="imagenet", augment="jigen", protocol="lodo", image_size=224,
              projection_size=1000)
MNIST = dict(backbone="smallcnn", protocol="lodo", image_size=28, rounds=1500, steps=5, E0=2, batch_size=64, lr=0.001,
             momentum=0.9, keep_momentum=True, split="0.9/0.05/0.05", eval_every=50)  # FedSR, Sec. 4.2
PAPER = {
    "digits": dict(rounds=60, epochs=2, lr=0.05, batch_size=32),  # ours
    "rotatedmnist": MNIST,
    "rotatedmnist-t10k": MNIST,
    "pacs": dict(**SHARED, lr=0.001, rounds=30, E0=3, epochs=10, batch_size=10, split="0.9/0.05/0.05"),
    "vlcs": dict(**SHARED, lr=0.01, rounds=20, E0=5, epochs=15, batch_size=16, split="0.7/0.15/0.15"),
    "officecaltech": dict(**SHARED, lr=0.001, rounds=30, E0=3, epochs=10, batch_size=10, split="0.9/0.05/0.05"),  # as PACS
    "officehome": dict(**SHARED, lr=0.001, rounds=30, E0=3, epochs=10, batch_size=10, split="0.9/0.05/0.05"),
    "domainnet": dict(**SHARED, lr=0.001, rounds=30, E0=3, epochs=10, batch_size=10, split="0.9/0.05/0.05"),
}
OFFICIAL = dict(lambda0=0.15, lambda1=0.85, order="official", projection="trained", momentum=0.9, weight_decay=1e-5)
PACS = dict(**OFFICIAL, d_loss="lsgan", g_loss="opposite", onehot_value=0.7, smoothing=0.01)
VLCS = dict(**OFFICIAL, d_loss="printed", g_loss="detached", label_at="before", onehot_value=0.6, smoothing=0.2)
VARIANTS = {"official": {d: PACS for d in PAPER} | {
    d: dict(**PACS, projection_size=1024, lr=0.01, lr_adversarial=0.007) for d in ("pacs", "officecaltech", "officehome", "domainnet")} | {
    "vlcs": dict(**VLCS, projection_size=1024, lr=0.001, lr_adversarial=0.0007)}}
# AlexNet needs its ImageNet weights to learn in so few rounds; a ResNet18 learns from scratch.
LAPTOP = {d: dict(backbone="resnet18", weights="none", image_size=64, rounds=10, steps=10, E0=3, batch_size=32, lr=0.01,
                  momentum=0.9, projection_size=128) for d in ("pacs", "officecaltech", "vlcs", "officehome", "domainnet")} | {
    d: dict(rounds=150) for d in ("rotatedmnist", "rotatedmnist-t10k")}
SMOKE = {d: dict(E0=1, epochs=2) for d in PAPER if "steps" not in PAPER[d]}


def loss_d(real: Tensor, reference: Tensor, form: str) -> Tensor:
    """L_adv_d of D(h|y) and D(h'|y), both [B] in [0, 1]: Eq. (1) as printed, or least squares. Both: D(h) -> 0, D(h') -> 1."""
    if form == "printed":
        return -((1 - real).square().mean() + reference.square().mean())  # Eq. (1)
    return real.square().mean() + (1 - reference).square().mean()


def loss_f(real: Tensor) -> Tensor:
    """L_adv_f of D(h|y) [B], Eq. (2): the extractor wants its features taken for the reference."""
    return (1 - real).square().mean()


def loss_g(reference: Tensor, form: str) -> Tensor:
    """L_adv_g of D(h'|y) [B]: Eq. (3) as printed, or its opposite, by which the reference approaches the features."""
    return reference.square().mean() if form == "opposite" else (1 - reference).square().mean()


class Generator(nn.Module):
    """G: noise and one-hot label -> h' [B, D], two layers as wide as the features (Sec. 5.1). It ends with ReLU as they do."""

    def __init__(self, noise: int, labels: int, dim: int, relu: bool):
        super().__init__()
        self.noise, self.first, self.second, self.relu = noise, nn.Linear(noise + labels, dim), nn.Linear(dim, dim), relu

    def forward(self, code: Tensor) -> Tensor:
        z = torch.rand(len(code), self.noise, device=code.device)  # S_z, uniform on [0, 1) (Sec. 3.2)
        h = self.second(leaky_relu(self.first(torch.cat([z, code], 1))))
        return h.relu() if self.relu else h


class Discriminator(nn.Module):
    """D: features and one-hot label -> the probability [B] that they are of the reference; a random projection in front."""

    def __init__(self, args: Args, labels: int, dim: int):
        super().__init__()
        self.before = args.label_at == "before"
        wide = dim + labels * self.before
        self.project = nn.Identity()
        if args.projection != "none":
            self.project = nn.Linear(wide, args.projection_size, bias=False)
            seed_all(args.seed, "projection")  # the same on all clients
            nn.init.normal_(self.project.weight, std=args.projection_size ** -0.5)  # keeps lengths on average
            self.project.requires_grad_(args.projection == "trained")
            wide = args.projection_size
        self.first, self.second = nn.Linear(wide + labels * (not self.before), dim), nn.Linear(dim, 1)

    def forward(self, h: Tensor, code: Tensor) -> Tensor:
        h = self.project(torch.cat([h, code], 1)) if self.before else torch.cat([self.project(h), code], 1)
        return torch.sigmoid(self.second(leaky_relu(self.first(h)))[:, 0].float())


class FedADG(nn.Module):
    """What is shared: F and C in `net`, and G; the discriminator D beside them is each client's own."""

    def __init__(self, args: Args, net: Net, dim: int, classes: int):
        super().__init__()
        labels = classes if args.onehot else 0
        self.net, self.dim, self.classes, self.labels = net, dim, classes, labels
        if args.adversarial:
            if args.reference == "generated":
                self.G = Generator(args.noise or dim // 2, labels, dim, relu=args.backbone not in ("smallcnn", "vit_b8"))
            self.D = Discriminator(args, labels, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def features(self, x: Tensor) -> Tensor:
        return self.net.features(x)


def build(args: Args, channels: int, classes: int) -> FedADG:
    """F, C, G and D on the chosen backbone. AlexNet's classifier is its last ImageNet layer and an output layer (Sec. 5.1)."""
    if args.adversarial and args.E0 > (args.steps or args.epochs):
        raise Stop(f"--E0 is {args.E0}, more than the round's {args.steps or args.epochs} "
                   f"{'--steps' if args.steps else '--epochs'}, of which it is a part", 2)
    net = backbone(args, channels, classes, keep_last=args.backbone == "alexnet")
    return FedADG(args, net, 4096 if args.backbone == "alexnet" else net.head.in_features, classes)


class Client:
    def __init__(self, args: Args, net: FedADG, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        self.w_d = state(net.D) if args.adversarial else {}  # step c1: the initial, later the own discriminator
        self.momentum = {}  # of each module's parameters, with --keep-momentum

    def train(self, down: Payload, t: int) -> Payload:
        """ClientUpdate(k, w) of Alg. 1."""
        args, model = self.args, self.load(down).train()
        modules = {"FC": model.net} | {name: getattr(model, name) for name in "DG" if hasattr(model, name)}
        parameters = {name: [p for p in m.parameters() if p.requires_grad] for name, m in modules.items()}
        opts = {name: sgd(m, args, t, self.momentum.get(name)) for name, m in modules.items()}
        for name in opts.keys() - {"FC"}:
            opts[name].param_groups[0]["lr"] *= (args.lr_adversarial or 0.7 * args.lr) / args.lr
        losses = {name: [] for name in ("loss", "adv_f", "adv_d", "adv_g")}

        def update(name, loss):
            """A step of one module alone."""
            opts[name].zero_grad()
            loss.backward(inputs=parameters[name])
            if args.clip:
                clip_grad_norm_(parameters[name], args.clip)
            opts[name].step()

        def step_c5():
            """w_f and w_c on lambda_0 L_adv_f + lambda_1 L_err."""
            with autocast(args):
                h = model.features(x)  # [B, D]
                err = cross_entropy(model.net.classify(h), y, label_smoothing=args.smoothing)
                adv = loss_f(model.D(h, code))  # Eq. (2)
            update("FC", args.lambda0 * adv + args.lambda1 * err)
            losses["loss"].append(err.detach())
            losses["adv_f"].append(adv.detach())

        def step_c7():
            """w_d on L_adv_d, with the features of the extractor as it is now."""
            model.net.eval()  # no dropout, and BN's statistics are those of training alone
            with autocast(args):
                with torch.no_grad():
                    h = model.features(x)
                loss = loss_d(model.D(h, code), model.D(h_ref.detach(), code), args.d_loss)  # Eq. (1)
            model.net.train()
            update("D", loss)
            losses["adv_d"].append(loss.detach())

        def step_c8():
            """w_g on L_adv_g, with the S_z and y of step c7."""
            with autocast(args):
                loss = loss_g(model.D(h_ref, code), args.g_loss)  # Eq. (3)
            if args.g_loss != "detached":
                update("G", loss)
            losses["adv_g"].append(loss.detach())

        steps = [step_c5, step_c7] if args.order == "paper" else [step_c7, step_c5]
        steps += [step_c8] if "G" in modules else []
        warm = args.E0 if args.steps else args.E0 * len(cut_batches(torch.arange(len(self.data.train)), args))
        for i, (x, y) in enumerate(batches(self.data.train, args, t, self.k)):  # steps c2, c4: S_x; x [B, C, H, W], y [B]
            if i < warm or not args.adversarial:
                with autocast(args):
                    err = cross_entropy(model.net(x), y, label_smoothing=args.smoothing)
                update("FC", err)  # step c3
                losses["loss"].append(err.detach())
                continue
            code = one_hot(y, model.classes)[:, :model.labels].float() * args.onehot_value  # [B, C], or [B, 0]
            with autocast(args):
                h_ref = self.reference(code)  # step c6 and h' = G(z, y) [B, D]; step c5 does not use or change them
            for step in steps:  # on this x, y, code and h_ref
                step()
        self.w_d = state(model.D) if args.adversarial else {}
        if args.keep_momentum:
            self.momentum = {name: optimizer_state(m, opts[name]) for name, m in modules.items()}
        self.log = {name: torch.stack(values).mean() for name, values in losses.items() if values}
        return {"w": self.shared()}  # step c9

    def reference(self, code: Tensor) -> Tensor:
        """h' [B, D]: of the generator, or of a fixed distribution (Table 6)."""
        shape, device = (len(code), self.net.dim), code.device
        match self.args.reference:
            case "generated":
                return self.net.G(code)
            case "gaussian":
                return torch.randn(shape, device=device)
            case "uniform":
                return torch.rand(shape, device=device) * 2 - 1
        return torch.distributions.Laplace(0.0, 0.5 ** 0.5).sample(shape).to(device)

    def shared(self) -> dict[str, Tensor]:
        """w_f, w_c and w_g as they are in the network."""
        return {n: v for n, v in state(self.net).items() if not n.startswith("D.")}

    def load(self, down: Payload) -> FedADG:
        self.net.load_state_dict(down["w"] | {f"D.{n}": v for n, v in self.w_d.items()})
        return self.net

    def model(self, down: Payload) -> nn.Module:
        return self.load(down)

    def state_dict(self) -> dict:
        return {"w_d": self.w_d, "momentum": self.momentum}

    def load_state_dict(self, saved: dict) -> None:
        self.w_d, self.momentum = saved["w_d"], saved["momentum"]


class Server:
    def __init__(self, args: Args, net: FedADG, clients: int):
        self.w = {n: v for n, v in state(net).items() if not n.startswith("D.")}  # step s1

    def download(self, k: int) -> Payload:
        return {"w": self.w}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        K = len(uploads)
        self.w = average([up["w"] for up in uploads.values()], torch.full((K,), 1 / K))  # step s3

    def state_dict(self) -> dict:
        return {"w": self.w}

    def load_state_dict(self, saved: dict) -> None:
        self.w = saved["w"]


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS, laptop=LAPTOP, smoke=SMOKE)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
