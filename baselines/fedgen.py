"""FedGen: data-free knowledge distillation for heterogeneous federated learning (Zhu, Hong, Zhou, ICML 2021).

    python -m baselines.fedgen --dataset officecaltech --scale laptop
    python -m baselines.fedgen --dataset pacs                          # a row of FedCiR's Table 1

FedAvg in which the server learns, from the uploaded classifiers alone, to generate representations of each
label, and clients train their classifiers on its samples too.
Server keeps w, the generator w_g, its Adam's moments, p^(y). Client k keeps nothing between rounds. Down: w;
from round 2 on (--reg-from 1) w_g, p^(y). Up: w_k, n_k and c_k, how often it has drawn each label.

Paper, from memory                                               This file
Eq. (4)      the generator's objective J(w_g)                    loss_of_mean_logits (--teacher logits)
its code     the same, a loss of each classifier                 loss_of_labels (--teacher losses)
App.         diversity of what is generated                      diversity
Eq. (5)      local objective: loss, and that of generated z      Client.train
its code     and of the images against generated z               distillation, Client.train
Alg. 1       counter c_k; the mean of w_k and p^(y); w_g         Client.train; Server.update; train_generator
Symbols: w the model and w_g the generator (theta and w in the paper), epsilon noise, z representations, the
input of the classifier; alpha_k^y = c_k^y / sum_j c_j^y; lambda_reg, lambda_kd: FedCiR's, App. E. With both 0
it is FedAvg, bit for bit, and neither generator nor counts travel. A client that is unseen has w.
Left out: a student in the authors' code, of weight 0 there; sharing the classifier alone; decay of the
generator's weights and rate.

Where paper, codes (the authors', zhuangdizhu/FedGen @ dd5807c; PFLlib @ d832e76) and this file differ; in
full: papers/baselines/fedgen.md. The paper was not at hand: its numbers of equations and lines are from
memory.
  what                 paper         authors' code     PFLlib       here           flag
  generator's loss     mean logits   sum_k of losses   logits       sum_k          --teacher
  a sample's share     -             the batch's mean  -            its label's    -
  p^(y)                by c_k        uniform           by n_k^y     by c_k         --labels
  distillation         none          KL                none         KL             --lambda-kd 0
  weights              1, -          10, 10 x 0.98^t   1, -         FedCiR's       --lambda-reg, --lambda-kd,
                                                                                   --lambda-decay
  diversity            yes           1                 none         1              --diversity
  noise                normal        uniform, 32       uniform      normal, 64     --epsilon, --noise
  generator: steps     -             50                1,000        5 (FedCiR)     --generator-steps
  generator: width     -             128 to 512        512          256            --width
  generator: rate      -             3e-4, decaying    0.005        1e-3           --generator-lr
  its z                -             any sign          any sign     any sign       --generator-relu
  first round          all           neither term      all          neither        --reg-from
  average              1/|A|         n_k/m_t           n_k/m_t      1/|A|; digits  --average
                                                                    n_k/m_t
  BN's statistics      -             not sent          not sent     averaged       -
"""

from dataclasses import dataclass

import common
from common import (ClientData, Payload, arg, autocast, average, backbone, batches, load, optimizer_state,
                    parse, restore_optimizer, run, schedules, sgd, source, state)
from fedcir import ModelAndGenerator

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, one_hot, relu
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    average: str = arg("samples", "weights of the average: samples (n_k/m_t) or uniform (1/K)",
                       choices=("samples", "uniform"), source="ours, as fedavg.py")
    lambda_reg: float = arg(1.0, "weight of the classifier's loss on generated representations, Eq. "
                                 "(5)", low=0, source="ours")
    lambda_kd: float = arg(1.0, "weight of the divergence between the predictions for an image and for a "
                                "generated representation of its label; 0: the paper's text", low=0,
                           source="ours")
    lambda_decay: float = arg(1.0, "factor on both weights in each round; the authors' code: 0.98", above=0,
                              source="ours")
    reg_from: int = arg(1, "first round with the two terms, counted from 0; 1: after the generator's first "
                           "training", low=0, source="code of FedGen")
    teacher: str = arg("losses", "the generator's loss: losses (sum of the classifiers' losses, weighted by "
                                 "their share of the label) or logits (loss of their mean logits, Eq. (4))",
                       choices=("losses", "logits"), source="code of FedGen")
    labels: str = arg("counts", "distribution p^(y) of drawn labels: counts (of the clients' labels) or "
                                "uniform over the labels that a client has", choices=("counts", "uniform"),
                      source="text of FedGen, from memory")
    diversity: float = arg(1.0, "weight eta of the diversity loss of the generator; 0: none", low=0,
                           source="code of FedGen")
    generator_steps: int = arg(5, "steps of the generator in a round", low=1,
                               source="text of FedCiR, Sec. 6.1")
    generator_lr: float = arg(1e-3, "learning rate of the generator's Adam", above=0, source="ours")
    generator_relu: bool = arg(False, "use a ReLU behind the generator, as behind most backbones' z",
                               source="code of FedGen")
    noise: int = arg(64, "dimensions of the generator's noise epsilon", low=1, source="ours, as fedcir.py")
    width: int = arg(256, "width of the generator's hidden layer", low=1, source="ours, as fedcir.py")
    epsilon: str = arg("normal", "distribution of the noise: normal, or uniform in [0, 1)",
                       choices=("normal", "uniform"), source="text of FedGen, from memory")


# Of FedCiR's weights lambda_reg is taken for Eq. (5), as its own L_reg, and lambda_kd for the divergence.
# Noise and width are those of fedcir.py: FedCiR has one generator for both methods and gives none.
CHOSEN = "text of FedCiR, App. E"
PAPER = {
    "digits": schedules.DIGITS | source("ours", generator_lr=0.01),
    "officecaltech": schedules.FEDCIR["officecaltech"] | source(CHOSEN, lambda_kd=0.5, lambda_reg=1.0),
    "pacs": schedules.FEDCIR["pacs"] | source(CHOSEN, lambda_kd=1.0, lambda_reg=0.5),
    "domainnet10": schedules.FEDCIR["domainnet10"] | source(CHOSEN, lambda_kd=1.0, lambda_reg=0.5),
    "camelyon17": schedules.FEDCIR["camelyon17"] | source(CHOSEN, lambda_kd=1.0, lambda_reg=1.0),
    "iwildcam": schedules.FEDCIR["iwildcam"] | source(CHOSEN, lambda_kd=1.0, lambda_reg=1.0),
}
# As of FedCiR: a twelfth of the rounds, so the generator learns faster.
LAPTOP = {
    "pacs": dict(image_size=32, rounds=24, generator_lr=0.01),
    "officecaltech": dict(image_size=32, rounds=24, generator_lr=0.01),
}


class Generator(nn.Module):
    """G(y, epsilon) -> z [B, D]: two linear layers with BN and ReLU between them (FedCiR, Sec. 6.1)."""

    def __init__(self, args: Args, classes: int, dim: int):
        super().__init__()
        self.noise, self.classes = args.noise, classes
        self.uniform, self.relu = args.epsilon == "uniform", args.generator_relu
        self.first = nn.Linear(args.noise + classes, args.width, bias=False)  # BN takes off what it would add
        self.bn = nn.BatchNorm1d(args.width)
        self.second = nn.Linear(args.width, dim)

    def draw(self, B: int, device) -> Tensor:
        """New noise epsilon [B, noise]."""
        if self.uniform:
            return torch.rand(B, self.noise, device=device)
        return torch.randn(B, self.noise, device=device)

    def forward(self, y: Tensor, epsilon: Tensor) -> Tensor:
        label = one_hot(y, self.classes).float()  # [B, C]
        h = self.first(torch.cat([epsilon, label], 1))  # [B, width]
        z = self.second(relu(self.bn(h)))  # [B, D]
        if self.relu:
            z = relu(z)
        return z


def classifier_of(w: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of the classifier alone."""
    return {name.removeprefix("head."): v for name, v in w.items() if name.startswith("head.")}


def logits_of(head: nn.Module, states: list[dict[str, Tensor]], z: Tensor) -> Tensor:
    """What K classifiers of these states say of z [B, D]: [K, B, C]."""
    logits = [functional_call(head, state, z) for state in states]
    return torch.stack(logits)


def loss_of_labels(logits: Tensor, y: Tensor, alpha: Tensor) -> Tensor:
    """The mean over y [B] of sum_k alpha_k^y CE_k, of K classifiers' logits [K, B, C]; alpha [K, C]."""
    log_p = logits.log_softmax(2)  # [K, B, C]
    of_label = log_p[:, torch.arange(len(y)), y]  # [K, B]
    return -(alpha[:, y] * of_label).sum(0).mean()


def loss_of_mean_logits(logits: Tensor, y: Tensor) -> Tensor:
    """J(w_g), Eq. (4): the cross-entropy of the softmax of the mean logits; logits [K, B, C], y [B]."""
    return cross_entropy(logits.mean(0), y)


def diversity(epsilon: Tensor, z: Tensor) -> Tensor:
    """exp(-1/B^2 sum_ij d(epsilon_i, epsilon_j) d(z_i, z_j)), of squared distances of noise [B, noise] and
    absolute ones of representations [B, D], both means over the dimensions. It falls as z differ."""
    of_noise = (epsilon[:, None] - epsilon).square().mean(2)  # [B, B]
    of_z = (z[:, None] - z).abs().mean(2)  # [B, B]
    return (-of_noise * of_z).mean().exp()


def distillation(logits: Tensor, target: Tensor) -> Tensor:
    """KL(softmax(target) || softmax(logits)), both [B, C], the mean over the batch."""
    log_p, log_target = logits.log_softmax(1), target.log_softmax(1)
    return (log_target.exp() * (log_target - log_p)).sum(1).mean()


def build(args: Args, channels: int, classes: int) -> ModelAndGenerator:
    """The model w, and the generator w_g of its representations."""
    model = backbone(args, channels, classes)
    return ModelAndGenerator(model, Generator(args, classes, model.head.in_features))


class Client:
    keeps = ()  # nothing outlives a round

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data

    def train(self, down: Payload, t: int) -> Payload:
        """Lines 5 to 11 of Alg. 1."""
        args = self.args
        model = self.model(down).train()
        if "w_g" in down:
            G = load(self.net.G, down["w_g"]).eval().requires_grad_(False)
        opt = sgd(model, args, t)
        decay = args.lambda_decay ** t
        c = torch.zeros(self.net.G.classes, dtype=torch.long, device=args.device)  # [C], label counter c_k
        losses = []
        regs, kds = [], []
        for x, y in batches(self.data.train, args, t, self.k):  # x [B, C, H, W]; y [B]
            c += one_hot(y, len(c)).sum(0)  # line 8
            with autocast(args):
                z = model.features(x)  # [B, D]
                logits = model.classify(z)
                loss = cross_entropy(logits, y)
            losses.append(loss.detach())
            if "w_g" in down:
                y_g = torch.multinomial(down["p"], len(y), replacement=True)  # [B], from p^(y)
                with autocast(args):
                    z_g = G(y_g, G.draw(len(y), y.device))  # [B, D]; the gradient is the classifier's alone
                    reg = cross_entropy(model.classify(z_g), y_g)  # Eq. (5), second term
                    z_y = G(y, G.draw(len(y), y.device))  # [B, D], for the labels of the images
                    target = model.classify(z_y).detach()  # [B, C], no gradient
                kd = distillation(logits.float(), target.float())
                regs.append(reg.detach())
                kds.append(kd.detach())
                loss = loss + decay * (args.lambda_reg * reg + args.lambda_kd * kd)
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()  # line 9
        self.log = {"loss": torch.stack(losses).mean()}
        if regs:
            self.log["reg"] = torch.stack(regs).mean()
            self.log["kd"] = torch.stack(kds).mean()
        up = {"w": state(model), "n": torch.tensor(len(self.data.train))}
        if args.lambda_reg or args.lambda_kd:
            up["c"] = c
        return up

    def model(self, down: Payload) -> nn.Module:
        return load(self.net.model, down["w"])


class Server:
    keeps = ("t", "w", "w_g", "adam", "p")

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.args = args
        self.net = net
        self.t = 0  # rounds that are over
        self.w = state(net.model)
        self.w_g = state(net.G)
        self.adam = {}  # moments and steps of the generator's Adam, by its parameters
        C = net.G.classes
        self.p = torch.full((C,), 1 / C, device=args.device)  # p^(y) [C], uniform at the start

    def download(self, k: int) -> Payload:
        """Line 3: w, and from round --reg-from on the generator and p^(y), if a term has a weight."""
        regularized = self.args.lambda_reg or self.args.lambda_kd
        if regularized and self.t >= self.args.reg_from:
            return {"w": self.w, "w_g": self.w_g, "p": self.p}
        return {"w": self.w}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        if self.args.lambda_reg or self.args.lambda_kd:
            c = torch.stack([up["c"] for up in uploads.values()])  # [K, C]
            self.p = self.label_distribution(c)
            self.train_generator([up["w"] for up in uploads.values()], c)
        n = torch.stack([up["n"] for up in uploads.values()]).double()  # [K]
        if self.args.average == "samples":
            p = n / n.sum()
        else:
            p = torch.full_like(n, 1 / len(n))
        self.w = average([up["w"] for up in uploads.values()], p)  # line 13; BN's too
        self.t = t + 1

    def label_distribution(self, c: Tensor) -> Tensor:
        """Line 13: p^(y) [C], of the counts c [K, C] of the round's clients."""
        total = c.sum(0)
        if self.args.labels == "uniform":
            total = (total > 0).long()
        return (total / total.sum()).float()

    def train_generator(self, uploaded: list[dict[str, Tensor]], c: Tensor) -> None:
        """Line 14, some steps of Eq. (4) with the uploaded classifiers, which stay as they are."""
        args = self.args
        alpha = c / c.sum(0).clamp_min(1)  # [K, C]: alpha_k^y, 0 where no client has drawn the label
        heads = [classifier_of(w) for w in uploaded]
        G = load(self.net.G, self.w_g).train().requires_grad_(True)
        opt = torch.optim.Adam(G.parameters(), lr=args.generator_lr, foreach=True)  # few kernels
        restore_optimizer(opt, G, self.adam)
        for _ in range(args.generator_steps):
            y = torch.multinomial(self.p, args.batch_size, replacement=True)  # [B], from p^(y)
            epsilon = G.draw(len(y), y.device)  # [B, noise]
            z = G(y, epsilon)  # [B, D]
            logits = logits_of(self.net.model.head, heads, z)  # [K, B, C]
            if args.teacher == "losses":
                loss = loss_of_labels(logits, y, alpha)
            else:
                loss = loss_of_mean_logits(logits, y)  # Eq. (4)
            loss = loss + args.diversity * diversity(epsilon, z)
            opt.zero_grad()
            loss.backward()
            opt.step()
        self.adam = optimizer_state(G, opt)
        self.w_g = state(G)


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, laptop=LAPTOP)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
