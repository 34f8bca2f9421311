"""FedCiR: client-invariant representation learning for federated non-IID features (Li et al., IEEE TMC).

    python fedcir.py --dataset officecaltech --scale laptop                                  # minutes on two cores
    python fedcir.py --dataset pacs --variant fedreg                                         # one of its two ablations
    python fedcir.py --dataset pacs --clients-per-domain 12 --dirichlet 0.5 --participation 0.2   # label skew, Figs. 6, 8

A generator at the server learns, from the uploaded classifiers alone, representations that all clients classify alike. Clients
train their classifiers on its samples (L_reg) and pull their Gaussian encoders to class-wise Gaussians fitted to them (L_align).
Server keeps w (encoder w1, classifier w2), the generator w_g and {mu_g(y), sigma_g(y)}. Client k keeps nothing.
Down: w, w_g, {mu_g(y), sigma_g(y)} (only what has a weight; none in round 1). Up: w_k.

Paper                                                     This file
Sec. 5.1        p(z|x), a Gaussian                        networks.GaussianNet
Eq. (8)         prediction as a mean over z               networks.GaussianNet.forward
Eqs. (4)-(5)    local steps, the uniform mean             Client.train, Server.update
Eqs. (9)-(10)   L_fl                                      Client.train (one sample of z in the place of the mean, as in the text)
Eq. (12)        L_reg                                     Client.train
Eqs. (14), (17) L_align                                   networks.gaussian_kl, Client.train
Eq. (15)        L_g on the ensemble of the classifiers    ensemble_loss
Eqs. (16), (18) the objectives                            Client.train
Algorithm 1     lines 1; 2-7; 8-10; 11; 12                Server.__init__; common.Loop.round; Server.train_generator; moments;
                                                          Server.update
                ClientUpdate                              Client.train
Eqs. (1)-(3), (6)-(7), (11), (13) define or bound risks; nothing of them is computed.
Symbols as in the paper: w = w1 o w2, G, w_g, epsilon, E local steps (--steps), E_g, K_t, C classes, gamma (--lr), gamma_g.
--variant fedreg: L_reg alone; fedalign: L_align alone (Table 1). With both weights 0 it is FedAvg on the Gaussian network; FedAvg
on a plain ResNet18 by this paper's settings is fedavg.py --variant fedcir, FedSR is fedsr.py --variant fedcir.
Figs. 5-10: --clients-per-domain (of each domain, so 48 or 52 clients on PACS, 48 or 54 on DomainNet in place of 50), --dirichlet,
--participation, --steps. Figs. 11, 12 and Table 3: python measures.py risk, pad, cost. Left out: nothing. No official code is known.

What the paper leaves open or prints differently, and what is done here
  what                  paper                               here (default)                              flag
  round 1               line 6 sends what line 11 computes  neither regularizer                         --reg-from 0: the untrained
                        first after round 1                                                             generator's
  line 9                no gradient sign                    w_g - gamma_g grad L_g                      -
  its optimizer         line 9 is plain SGD; rate not       Adam, 1e-3                                  --generator-optimizer,
                        given                                                                           --generator-lr
  p^(y|k,z) in Eq. 15   "logit"                             a probability: the mean of softmaxes is     -
                                                            inside the logarithm
  p(k) in Eq. 15        not said; sum over all clients      1/|K_t|, over the uploaded classifiers      -
  Eq. (17)              log sigma(y); no sum over z         log sigma(x); summed, as FedSR              -
  Eq. (18)              last term outside the mean          mean over the batch                         -
  size of G             not given; Table 3 implies 3/4 of   64 noise dimensions and the one-hot label,  --noise, --width
                        the model                           256 wide (1.3% of ResNet18), no output
                                                            activation
  ResNet18              initial weights, augmentation,      from scratch, none, unit pixels; BN         --weights, --augment,
                        pixels, BN's statistics: not said   averaged with w                             --normalize
  momentum              over the rounds: not said           new in each round                           -
  clients of Table 1    active ratio not given              all                                         --participation
  BN of G               not said                            batch statistics while it is trained,       -
                                                            running ones for samples
  MLE                   samples not given                   1,000 of each class                         --mle-samples
  sigma_g               no lower limit                      at least 0.001                              --sigma-min
  z, sigma              not given                           512 (ResNet18), softplus of half of one     -
                                                            linear layer
  prediction            Eq. (8), samples not given          20 samples of z                             --samples
  L_reg's gradient      Fig. 2, text: not clear             the classifier's alone: G is fixed          -
  average               p(k) (Eq. 2), uniform (Eq. 5,       uniform                                     -
                        line 12)
  DomainNet             classes not said                    FedBN's ten: domainnet10                    --dataset
  test data, split      not said                            0.8/0.1/0.1 in each client, its own test    --split
                                                            part
  lambdas on PACS       App. E: 5e-7, 0.5; Sec. 6.3: above  App. E's                                    --lambda-align
                        1e-6 is better (E = 100)
At App. E's lambda_align the term adds less than 0.01 to the loss. A large one (0.01 on digits) needs a trained generator, else
all classes are pulled to one Gaussian: raise --reg-from or --generator-lr with it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, relu
from torch.nn.utils import clip_grad_norm_

import common
from common import (ClientData, Payload, arg, autocast, average, batches, going_on, load, optimizer_state, parse, run, sgd,
                    state)
from networks import GaussianNet, backbone, gaussian_kl


@dataclass
class Args(common.Args):
    variant: str = arg("fedcir", "fedcir, or one of its ablations", choices=("fedcir", "fedreg", "fedalign"))
    lambda_reg: float = arg(0.5, "weight of L_reg, Eq. (18)", low=0)
    lambda_align: float = arg(5e-7, "weight of L_align, Eq. (18)", low=0)
    reg_from: int = arg(1, "first round with the regularizers, counted from 0; 1: once the generator has been trained", low=0)
    generator_steps: int = arg(5, "steps E_g of the generator in a round", low=1)
    generator_optimizer: str = arg("adam", "optimizer of the generator: adam, or sgd as line 9 is printed",
                                   choices=("adam", "sgd"))
    generator_lr: float = arg(1e-3, "learning rate gamma_g of the generator", above=0)
    noise: int = arg(64, "dimensions of the generator's noise epsilon", low=1)
    width: int = arg(256, "width of the generator's hidden layer", low=1)
    mle_samples: int = arg(1000, "generated representations of each class behind mu_g(y) and sigma_g(y)", low=2)
    sigma_min: float = arg(1e-3, "lower limit of sigma_g(y)", above=0)
    samples: int = arg(20, "samples of z behind a prediction, Eq. (8); 0: the mean of z", low=0)


# Sec. 6.1 and App. E (the pairs of its search set are printed in swapped order, the values that it chose are not).
IMAGES = dict(backbone="resnet18", image_size=128, rounds=300, steps=20, batch_size=32, lr=0.01, momentum=0.9,
              weight_decay=5e-4, lambda_reg=0.5)
PAPER = {
    "digits": dict(rounds=60, lr=0.05, batch_size=32, lambda_align=1e-3, generator_lr=0.01),  # ours
    "officecaltech": dict(**IMAGES, lambda_align=5e-7),
    "pacs": dict(**IMAGES, lambda_align=5e-7),
    "domainnet10": dict(**IMAGES, lambda_align=1e-6),
    "domainnet": dict(**IMAGES, lambda_align=1e-6),
    "camelyon17": dict(**IMAGES, lambda_align=5e-7),
    "iwildcam": dict(**IMAGES, lambda_align=1e-6),
}
VARIANTS = {"fedreg": {d: dict(lambda_align=0.0) for d in PAPER}, "fedalign": {d: dict(lambda_reg=0.0) for d in PAPER}}
# A thirtieth of the rounds, so the generator learns faster.
LAPTOP = {d: dict(image_size=64, rounds=10, generator_lr=0.01) for d in ("pacs", "officecaltech")}


class Generator(nn.Module):
    """G(y, epsilon) -> z [B, D]: two linear layers with BN and ReLU between them (Sec. 6.1)."""

    def __init__(self, noise: int, classes: int, width: int, dim: int):
        super().__init__()
        self.noise, self.classes = noise, classes
        self.first, self.bn, self.second = nn.Linear(noise + classes, width), nn.BatchNorm1d(width), nn.Linear(width, dim)

    def forward(self, y: Tensor) -> Tensor:
        """Labels y [B] -> representations z [B, D] for new noise."""
        epsilon = torch.randn(len(y), self.noise, device=y.device)
        h = self.first(torch.cat([epsilon, one_hot(y, self.classes).float()], 1))
        return self.second(relu(self.bn(h)))


def ensemble_loss(z: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """L_g of Eq. (15), with p(k) = 1/K: z [B, D], labels y [B], the K classifiers' weight [K, C, D] and bias [K, C]."""
    logits = torch.einsum("bd,kcd->kbc", z, weight) + bias[:, None]  # [K, B, C]
    log_p = logits.log_softmax(2)[:, torch.arange(len(y)), y]  # [K, B]: log p^(y|k,z)
    return -(log_p.logsumexp(0) - math.log(len(log_p))).mean()


@torch.no_grad()
def moments(G: Generator, samples: int, sigma_min: float, device) -> tuple[Tensor, Tensor]:
    """Algorithm 1, line 11: maximum likelihood mu_g(y) and sigma_g(y) [C, D] of generated representations of each class."""
    G.eval()
    found = []
    for c in range(G.classes):
        z = G(torch.full((samples,), c, device=device))  # [S, D]
        found.append((z.mean(0), z.std(0, correction=0)))  # the MLE divides by S
    mu, sigma = (torch.stack(part) for part in zip(*found))
    return mu, sigma.clamp_min(sigma_min)


def build(args: Args, channels: int, classes: int) -> GaussianNet:
    """Encoder w1 and classifier w2, and the generator beside them."""
    net = GaussianNet(backbone(args, channels, classes), True, args.samples)
    net.G = Generator(args.noise, classes, args.width, net.head.in_features)
    return net


def split(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The network's entries: w, and w_g with the generator's own names."""
    return ({n: v for n, v in tensors.items() if not n.startswith("G.")},
            {n[2:]: v for n, v in tensors.items() if n.startswith("G.")})


class Client:
    def __init__(self, args: Args, net: GaussianNet, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data

    def train(self, down: Payload, t: int) -> Payload:
        """ClientUpdate of Algorithm 1: E steps of Eq. (18)."""
        args, model = self.args, self.load(down).train()
        model.G.eval().requires_grad_(False)
        opt = sgd(model, args, t)
        losses = {"loss": [], "reg": [], "align": []}
        for x, y in batches(self.data.train, args, t, self.k):  # x [B, C, H, W]; y [B]
            with autocast(args):
                mu, sigma = model.encode(x)  # p(z|k, x): [B, D], [B, D]
                z = mu + sigma * torch.randn_like(mu)  # one sample, reparameterized
                loss = cross_entropy(model.classify(z), y)  # Eq. (9)
            losses["loss"].append(loss.detach())
            if "w_g" in down:
                with autocast(args):
                    y_g = torch.randint(model.G.classes, y.shape, device=y.device)  # p(y) uniform
                    reg = cross_entropy(model.classify(model.G(y_g)), y_g)  # Eq. (12)
                losses["reg"].append(reg.detach())
                loss = loss + args.lambda_reg * reg
            if "mu_g" in down:
                align = gaussian_kl(mu, sigma, down["mu_g"][y], down["sigma_g"][y]).mean()  # Eqs. (14), (17)
                losses["align"].append(align.detach())
                loss = loss + args.lambda_align * align  # Eq. (18)
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_([p for p in model.parameters() if p.requires_grad], args.clip)
            opt.step()
        self.log = {name: torch.stack(values).mean() for name, values in losses.items() if values}
        return {"w": split(state(model))[0]}

    def load(self, down: Payload) -> GaussianNet:
        w_g = down.get("w_g") or self.net.G.state_dict()  # without one the generator has no part in what follows
        self.net.load_state_dict(down["w"] | {f"G.{n}": v for n, v in w_g.items()})
        return self.net

    def model(self, down: Payload) -> nn.Module:
        return self.load(down)

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, saved: dict) -> None:
        pass


class Server:
    def __init__(self, args: Args, net: GaussianNet, clients: int):
        self.args, self.net, self.t = args, net, 0
        self.w, self.w_g = split(state(net))  # line 1
        self.adam = {}  # first and second moments of Adam and its steps, by the generator's parameters
        self.mu_g, self.sigma_g = moments(net.G, args.mle_samples, args.sigma_min, args.device)

    def download(self, k: int) -> Payload:
        """Line 6: what a weight of Eq. (18) asks for; in the rounds before --reg-from the model alone."""
        ready = self.t >= self.args.reg_from
        return {"w": self.w} | ({"w_g": self.w_g} if ready and self.args.lambda_reg else {}) | (
            {"mu_g": self.mu_g, "sigma_g": self.sigma_g} if ready and self.args.lambda_align else {})

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        args = self.args
        if args.lambda_reg or args.lambda_align:
            G = self.train_generator([up["w"] for up in uploads.values()])
        if args.lambda_align:
            self.mu_g, self.sigma_g = moments(G, args.mle_samples, args.sigma_min, args.device)  # line 11
        K = len(uploads)
        self.w = average([up["w"] for up in uploads.values()], torch.full((K,), 1 / K))  # line 12, Eq. (5)
        self.t = t + 1

    def train_generator(self, uploaded: list[dict[str, Tensor]]) -> Generator:
        """Lines 8-10: E_g steps on the ensemble of the uploaded classifiers."""
        args, G = self.args, load(self.net.G, self.w_g).train().requires_grad_(True)
        weight, bias = (torch.stack([w[f"head.{n}"] for w in uploaded]) for n in ("weight", "bias"))  # [K, C, D], [K, C]
        kind = torch.optim.Adam if args.generator_optimizer == "adam" else torch.optim.SGD
        opt = going_on(kind(G.parameters(), lr=args.generator_lr), G, self.adam)
        for _ in range(args.generator_steps):
            y = torch.randint(G.classes, (args.batch_size,), device=args.device)  # p(y) uniform
            loss = ensemble_loss(G(y), y, weight, bias)  # Eq. (15)
            opt.zero_grad()
            loss.backward()
            opt.step()  # line 9
        self.adam = optimizer_state(G, opt)
        self.w_g = state(G)
        return G

    def state_dict(self) -> dict:
        return {"t": self.t, "w": self.w, "w_g": self.w_g, "adam": self.adam, "mu_g": self.mu_g, "sigma_g": self.sigma_g}

    def load_state_dict(self, saved: dict) -> None:
        self.t, self.w, self.w_g, self.adam = saved["t"], saved["w"], saved["w_g"], saved["adam"]
        self.mu_g, self.sigma_g = saved["mu_g"], saved["sigma_g"]


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS, laptop=LAPTOP)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
