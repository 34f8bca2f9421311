r"""FedSR: a simple representation for federated domain generalization (Nguyen et al., NeurIPS 2022).

    python fedsr.py --dataset rotatedmnist --target m0                # Table 1; 8 to 30 minutes on one core
    python fedsr.py --dataset pacs --scale laptop --variant fedcmi    # one of its two ablations

The encoder gives each image a Gaussian p(z|x). ||z|| is kept small (L2R), and p(z|x) close to one Gaussian
r(z|y) for each class (CMI), so that z has little room for what is particular to a domain.
Server keeps w (encoder, classifier) and r(z|y). Client k keeps its momentum, and with --reference local its
own r(z|y). Down: w, r(z|y). Up: both as trained.

Paper                                                      This file
Eq. (1)         the plain mean over the clients            Server.update
Eqs. (4)-(5)    p(z|x); the prediction as a mean over z    GaussianNet
Eq. (6)         the loss -log E[p(y|z)]                    - (its bound, Eq. (7), as in the paper)
Eqs. (7)-(8)    cross-entropy of one sample of z           Client.train
Eq. (9)         the local objective                        Client.train
Eqs. (10)-(11)  L2R                                        l2r
Eqs. (17)-(18)  CMI, with the r(z|y) of App. B             cmi, Reference
Eq. (46)        KL of two Gaussians                        gaussian_kl
Eqs. (2)-(3), (12)-(16), (19)-(45) define, bound or prove; nothing of them is computed.
Symbols as in the paper: w, mu, sigma, r(z|y), K clients, E local iterations (--steps). --variant fedl2r: L2R
alone, on a deterministic network (Sec. 3.3.2); fedcmi: CMI alone; fedavg: neither, deterministic too, the
FedAvg row of the tables; fedcir: FedSR as in FedCiR's Table 1. Left out: Fig. 1 of App. C.2 (docs/runs.md has
a t-SNE), regression, r(z|y) as a network or a mixture, L2R with entropy.

What moves a number; all differences from paper and code: papers/fedsr/differences.md
  what                  paper             official code (DIRT's)   here                    flag
  r(z|y)                no index i: one   each client's own        averaged with w         --reference local
  momentum              not said          kept over the rounds     kept over the rounds    --no-keep-momentum
  RotatedMNIST: network 3x3, one linear   (5x5, linear after ReLU) 3x3, linear after ReLU  --backbone
  its optimizer         SGD, lr 0.001     (Adam, lr 0.001)         SGD, lr 0.001           --optimizer, --lr
  parts of a client     90% train,        the same                 90/5/5, the last to     --split
                        10% validation                             test
In brackets the code that the paper cites: the official code has no RotatedMNIST.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import common
from common import (ClientData, Net, Payload, UserError, adam, arg, autocast, average, backbone, batches,
                    load, optimizer_state, parse, run, schedules, sgd, source, sourced, state,
                    uniform, xavier)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    variant: str = arg("fedsr", "fedsr, an ablation, fedavg (no regularizer), or fedcir (fedsr with the "
                                "settings of FedCiR's Table 1)",
                       choices=("fedsr", "fedl2r", "fedcmi", "fedavg", "fedcir"))
    optimizer: str = arg("sgd", "local optimizer: sgd (Sec. 4.2), or adam as in DIRT and DIVA, from which "
                                "this RotatedMNIST comes", choices=("sgd", "adam"), source="text, Sec. 4.2")
    alpha_l2r: float = arg(0.01, "weight of L2R, Eq. (9)", low=0, source="ours, as on PACS")
    alpha_cmi: float = arg(0.001, "weight of CMI, Eq. (9)", low=0, source="ours, as on PACS")
    reference: str = arg("shared", "r(z|y): shared (averaged with the model) or local (kept by each client, "
                                   "official code)", choices=("shared", "local"),
                         source="text, Eqs. (17)-(19), where r has no index i")
    samples: int = arg(20, "samples of z for a prediction, Eq. (5); 0: use the mean of z", low=0,
                       source="code ba8d894, src/argument.py")
    keep_momentum: bool = arg(True, "keep each client's momentum (Adam's moments) between rounds instead of "
                                    "resetting it", source="code ba8d894, src/methods/base.py")


# The code's newest release, ba8d894, has what is taken from it here as the first one, 3956931, has it.
CHOSEN = "text, App. C.1"
# 500 epochs of a client's 15 batches are 1,500 rounds of 5 steps. At the text's rate FedSR's accuracy still
# rises when they end. A setting that gets further: --lr 0.01 --clip 5 --weight-decay 0
# (papers/fedsr/differences.md).
MNIST = sourced({
    "rotatedmnist": dict(backbone="smallcnn3", protocol="lodo", rounds=1500, steps=5, batch_size=64,
                         lr=0.001, optimizer="sgd", momentum=0.9, keep_momentum=True, clip=0.0,
                         weight_decay=5e-4, image_size=28, augment="none", split="0.9/0.05/0.05",
                         eval_every=50, alpha_l2r=0.1, alpha_cmi=0.3),
    "rotatedmnist-t10k": dict(backbone="smallcnn3", protocol="lodo", rounds=1500, steps=5, batch_size=64,
                              lr=0.001, optimizer="sgd", momentum=0.9, keep_momentum=True, clip=0.0,
                              weight_decay=5e-4, image_size=28, augment="none", split="0.9/0.05/0.05",
                              eval_every=50, alpha_l2r=0.1, alpha_cmi=0.3),
}, {
    "text, Sec. 4.2": "protocol steps batch_size lr optimizer",
    "text, Sec. 4.2, and cited code, DIRT 2635178": "backbone",
    "ours, of the text's 500 epochs": "rounds",
    "code ba8d894, src/methods/base.py": "momentum keep_momentum",
    "code ba8d894, src/methods/FedSR.py": "clip",
    "code ba8d894, src/argument.py": "weight_decay",
    "cited code, DIRT 2635178, domain_gen_rotatedmnist": "image_size augment",
    "ours, of the text's 90/10": "split",
    "ours": "eval_every",
    CHOSEN: "alpha_l2r alpha_cmi",
})
# 5,000 iterations are 1,000 rounds of 5.
IMAGES = sourced({
    "pacs": dict(normalize="imagenet", augment="fedsr", protocol="lodo", image_size=224, rounds=1000,
                 steps=5, batch_size=64, lr=0.01, momentum=0.9, weight_decay=5e-4, weights="imagenet",
                 keep_momentum=True, split="0.9/0.05/0.05", eval_every=20, backbone="resnet18",
                 alpha_l2r=0.01, alpha_cmi=0.001),
    "officehome": dict(normalize="imagenet", augment="fedsr", protocol="lodo", image_size=224, rounds=1000,
                       steps=5, batch_size=64, lr=0.01, momentum=0.9, weight_decay=5e-4,
                       weights="imagenet", keep_momentum=True, split="0.9/0.05/0.05", eval_every=20,
                       backbone="resnet50", alpha_l2r=0.05, alpha_cmi=0.0005),
    "domainnet": dict(normalize="imagenet", augment="fedsr", protocol="lodo", image_size=224, rounds=1000,
                      steps=5, batch_size=64, lr=0.01, momentum=0.9, weight_decay=5e-4,
                      weights="imagenet", keep_momentum=True, split="0.9/0.05/0.05", eval_every=20,
                      backbone="resnet50", alpha_l2r=0.01, alpha_cmi=0.0005),
}, {
    "text, Sec. 4.2":
        "normalize protocol image_size rounds steps batch_size lr momentum weight_decay backbone",
    "text, Sec. 4.2, with the ranges of code ba8d894, src/datasets.py": "augment",
    "code ba8d894, src/methods/base.py": "weights keep_momentum",
    "ours, of the text's 90/10": "split",
    "ours": "eval_every",
    CHOSEN: "alpha_l2r alpha_cmi",
})
PAPER = {
    **schedules.FEDSR_IN_FEDCIR,  # except on PACS, which the paper has
    **MNIST,
    **IMAGES,
    "digits": source("ours", rounds=60, lr=0.05, batch_size=32),
}
ON_MNIST = ("rotatedmnist", "rotatedmnist-t10k")
VARIANTS = {
    "fedl2r": dict.fromkeys(PAPER, source("ours, as on PACS", alpha_l2r=0.01, alpha_cmi=0.0))
    | dict.fromkeys(ON_MNIST, source(CHOSEN, alpha_l2r=0.1, alpha_cmi=0.0)) | {
        "pacs": source(CHOSEN, alpha_l2r=0.01, alpha_cmi=0.0),
        "officehome": source(CHOSEN, alpha_l2r=0.05, alpha_cmi=0.0),
        "domainnet": source(CHOSEN, alpha_l2r=0.01, alpha_cmi=0.0),
    },
    # alpha_cmi is FedSR's, except on two datasets
    "fedcmi": dict.fromkeys(PAPER, source("text, by definition", alpha_l2r=0.0))
    | dict.fromkeys((*ON_MNIST, "officehome"), source(CHOSEN, alpha_l2r=0.0)) | {
        "pacs": source(CHOSEN, alpha_l2r=0.0, alpha_cmi=0.01),
        "domainnet": source(CHOSEN, alpha_l2r=0.0, alpha_cmi=0.005),
    },
    "fedavg": dict.fromkeys(PAPER, source("text, Eq. (9)", alpha_l2r=0.0, alpha_cmi=0.0)),
    "fedcir": schedules.FEDSR_IN_FEDCIR,
}
LAPTOP = {
    "pacs": dict(weights="none", image_size=64, rounds=10, steps=10, batch_size=32, eval_every=1),
    "officecaltech": dict(image_size=64, rounds=10),
}


# The network


class Reference(nn.Module):
    """r(z|y) = N(z; mu_y, sigma_y^2), y = 1..C, learned with the network (App. B). The paper does not say how
    they start; these values are the official code's. sigma_y has no floor, as Eq. (46) grows where it is near
    0."""

    def __init__(self, classes: int, dim: int):
        super().__init__()
        self.mu = nn.Parameter(torch.zeros(classes, dim))  # [C, D]
        self.raw = nn.Parameter(torch.ones(classes, dim))  # [C, D]: sigma_y = softplus(1) = 1.31

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Labels y [B] -> mu_y and sigma_y [B, D]."""
        return self.mu[y], softplus(self.raw[y])


class GaussianNet(nn.Module):
    r"""The probabilistic encoder, a linear classifier p^(y|z), and r(z|y) as `r`.

    $$ p_i(x, y, z) = p_i(x, y)\,p(z|x) \tag{4} $$

    p(z|x) is the Gaussian N(z; mu(x), sigma^2(x)), the example of Sec. 3.2 and the choice of App. B.
    mu and sigma come from one linear layer `last` behind the backbone (App. B: "both from the final layer").
    Without `probabilistic` z is mu(x), and there is no r (Sec. 3.3.2). z has the backbone's D dimensions: 64
    of smallcnn, 512 of ResNet18, 2048 of ResNet50 (Sec. 4.2).
    """

    def __init__(self, net: Net, probabilistic: bool, samples: int):
        super().__init__()
        self.probabilistic, self.samples, self.head = probabilistic, samples, net.head
        D = net.head.in_features
        outputs = 2 * D if probabilistic else D
        ends_linear = isinstance(net.body, nn.Sequential) and isinstance(net.body[-1], nn.Linear)
        if not ends_linear:
            self.body, self.last = net.body, nn.Linear(D, outputs)
        elif probabilistic:  # instead of smallcnn's own layer to z
            self.body, self.last = net.body[:-1], nn.Linear(net.body[-1].in_features, outputs)
        else:
            self.body, self.last = net.body[:-1], net.body[-1]
        if probabilistic:
            self.r = Reference(net.head.out_features, D)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x -> mu [B, D] and sigma [B, D] (None if not probabilistic), float32."""
        out = self.last(self.body(x)).float()
        if not self.probabilistic:
            return out, None
        mu, raw = out.chunk(2, 1)
        return mu, softplus(raw) + 1e-6  # not 0, whose logarithm is in Eq. (46)

    def features(self, x: Tensor) -> Tensor:
        """The mean of p(z|x) [B, D]."""
        return self.encode(x)[0]

    def classify(self, z: Tensor) -> Tensor:
        return self.head(z)

    def forward(self, x: Tensor) -> Tensor:
        r"""log p^(y|x) [B, C] of the mean probability over `samples` draws of z. With 0 samples, or not
        probabilistic, the logits of the mean of z.

        $$ \hat{p}(y|x) = \mathbb{E}_{p(z|x)}\left[\hat{p}(y|z)\right] \tag{5} $$
        """
        mu, sigma = self.encode(x)
        if sigma is None or not self.samples:
            return self.classify(mu)
        z = mu + sigma * torch.randn(self.samples, *mu.shape, device=mu.device)  # [S, B, D]
        log_p = self.classify(z).float().log_softmax(2)  # [S, B, C]
        return log_p.logsumexp(0) - math.log(self.samples)


# The terms of the objective


def l2r(z: Tensor) -> Tensor:
    r"""z [B, D] -> the mean squared length over the batch.

    $$ \ell_i^{L2R} = \mathbb{E}_{p_i(x)}\, \mathbb{E}_{p(z|x)} \left[\|z\|_2^2\right]
       \approx \frac{1}{N_i} \sum_{n=1}^{N_i} \|z_i^{(n)}\|_2^2 \tag{10-11} $$
    """
    return z.float().square().sum(1).mean()


def cmi(mu: Tensor, sigma: Tensor, y: Tensor, r: nn.Module) -> Tensor:
    r"""mu, sigma [B, D] and labels y [B] -> the mean distance to the Gaussians of the labels.

    $$ \begin{aligned}
       & I_i(x, z|y) \le \ell_i^{CMI} \\
       & \ell_i^{CMI} = \mathbb{E}_{p_i(x, y)} \mathrm{KL}\left[p(z|x)\,|\,r(z|y)\right] \\
       & \approx \frac{1}{N_i} \sum_{n=1}^{N_i} \mathrm{KL}\left[p(z|x_i^{(n)})\,|\,r(z|y_i^{(n)})\right]
       \end{aligned} \tag{17-18} $$
    """
    mu_y, sigma_y = r(y)
    return gaussian_kl(mu, sigma, mu_y, sigma_y).mean()


def gaussian_kl(mu: Tensor, sigma: Tensor, mu_r: Tensor, sigma_r: Tensor) -> Tensor:
    r"""KL[N(mu, sigma^2) | N(mu_r, sigma_r^2)], diagonal, each [B, D]; summed over D -> [B].

    $$ \begin{aligned}
       & \log \sigma_y - \log \sigma_{w_1}(x_0) \\
       & + \frac{\sigma_{w_1}^2(x_0) + \left(\mu_{w_1}(x_0) - \mu_y\right)^2}{2\sigma_y^2} - \frac{1}{2}
       \end{aligned} \tag{46} $$
    """
    ratio = (sigma.square() + (mu - mu_r).square()) / (2 * sigma_r.square())
    return (sigma_r.log() - sigma.log() + ratio - 0.5).sum(1)  # Eq. (46)


# Client and server


def shared_and_own(tensors: dict[str, Tensor], args: Args) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The network's entries: what travels, and what stays on its client (r(z|y) with --reference local)."""
    travels, stays = {}, {}
    for name, v in tensors.items():
        if name.startswith("r.") and args.reference == "local":
            stays[name] = v
        else:
            travels[name] = v
    return travels, stays


class Client:
    keeps = ("r", "momentum")

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        _, self.r = shared_and_own(state(net), args)  # its own r(z|y), empty if that is shared
        self.momentum = {}  # of each parameter, with --keep-momentum

    def train(self, down: Payload, t: int) -> Payload:
        r"""E local iterations (--steps, or --epochs).

        $$ \begin{aligned}
           \overline{f_i}(w) &= \mathbb{E}_{p_i(x,y)}\, \mathbb{E}_{p(z|x)} \left[-\log \hat{p}(y|z)\right] \\
           &\approx \frac{1}{N_i} \sum_{n=1}^{N_i} -\log \hat{p}(y_i^{(n)} | z_i^{(n)})
           \end{aligned} \tag{7-8} $$
        $$ \overline{f_i} + \alpha^{L2R}\,\ell_i^{L2R} + \alpha^{CMI}\,\ell_i^{CMI} \tag{9} $$
        """
        args = self.args
        model = self.model(down).train()
        if args.optimizer == "sgd":
            opt = sgd(model, args, t, self.momentum)
        else:
            opt = adam(model, args, t, self.momentum)
        log = defaultdict(list)
        for x, y in batches(self.data.train, args, t, self.k):  # x [B, C, H, W]; y [B]
            with autocast(args):
                mu, sigma = model.encode(x)  # of p(z|x): [B, D], [B, D]
                z = mu
                if sigma is not None:
                    z = mu + sigma * torch.randn_like(mu)  # [B, D], one sample, reparameterized (Sec. 3.3.3)
                f = cross_entropy(model.classify(z), y)  # Eqs. (7)-(8)
            log["loss"].append(f.detach())
            l_l2r = l_cmi = 0  # a term without a weight is not computed
            if args.alpha_l2r:
                l_l2r = l2r(z)  # Eq. (11)
                log["l2r"].append(l_l2r.detach())
            if args.alpha_cmi:
                l_cmi = cmi(mu, sigma, y, model.r)  # Eq. (18)
                log["cmi"].append(l_cmi.detach())
            loss = f + args.alpha_l2r * l_l2r + args.alpha_cmi * l_cmi  # Eq. (9)
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

    def model(self, down: Payload) -> nn.Module:
        return load(self.net, down["w"] | self.r)  # with its own r(z|y), if that is local


class Server:
    keeps = ("w",)

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.w, _ = shared_and_own(state(net), args)

    def download(self, k: int) -> Payload:
        return {"w": self.w}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        r"""The parameters are averaged (Sec. 3.1, in words), without weights, as the objective is:

        $$ f(w) = \frac{1}{K} \sum_{i=1}^{K} f_i(w) \tag{1} $$
        """
        p = uniform(len(uploads))  # [K]
        self.w = average([up["w"] for up in uploads.values()], p)  # BN's statistics too


def build(args: Args, channels: int, classes: int) -> GaussianNet:
    """The network of `--variant`: FedSR's and FedCMI's encoder is probabilistic."""
    probabilistic = args.variant not in ("fedl2r", "fedavg")
    if args.alpha_cmi and not probabilistic:
        raise UserError(f"--variant {args.variant} has a deterministic encoder, so CMI is infinite: "
                        "leave --alpha-cmi at 0", 2)
    net = GaussianNet(backbone(args, channels, classes), probabilistic, args.samples)
    if probabilistic and args.backbone in ("smallcnn", "smallcnn3", "smallcnn3_linear"):
        xavier(net.last)  # as the layer to z in whose place it is
    return net


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS, laptop=LAPTOP)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
