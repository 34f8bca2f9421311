"""FedGaLA: federated unsupervised domain generalization by global and local alignment of gradients (Pourpanah et al., AAAI 2025).

    python fedgala.py --dataset pacs --target photo                           # SimCLR, a cell of the paper's Table 1
    python fedgala.py --dataset pacs --scale laptop --ssl byol                # another learner (Table 3), minutes

Clients learn without labels. A client discards the gradient of each layer that does not point as the global model's last change
of that layer does; the server gives more weight to the clients whose updates point as the mean update does.
Server keeps Theta (encoder, projector). Client k keeps its optimizer's state, the global model that it was sent last, and what its
learner has beside the encoder and the projector (predictor, target network, queue: learners.py).
Down: Theta. Up: Theta_k and its numbers of images and batches.

Paper                                                         This file
Alg. 1, l. 5-11 global alignment                              Server.update, aligned_weights
Alg. 1, l. 12-13 the new global model, sent to all            Server.update, Server.download
Alg. 1, l. 15-16 batch gradients of the learner's loss        Client.train, learners.py
Alg. 1, l. 17-23 local alignment                              Client.align, unaligned
Eqs. (54)-(56) L2 and proximal term                           Client.train (--l2, --prox)
App. B.1 augmentation, App. B.3 linear evaluation             augment.py (simclr), linear.py
Symbols as in the paper: Theta, g_i the update of client i (l. 5), g_ij the gradient of its batch j, g_est the reference, tau the
threshold (--tau), w_i the weights, l a layer.

With --local-alignment off --no-global-alignment this IS FedSimCLR, FedMoCo, FedBYOL or FedSimSiam (--ssl), the baselines of Table
1 (FedEMA: baselines/fedema.py). Table 3: --ssl. Table 4: each alignment switched off alone. Table 5: --epochs, --rounds. Table 6:
--local-alignment reweight --reweight-factor 0.001. Table 7: --l2, --prox. Fig. 2(a): measures.py gradients; 2(b): the logged
`discarded`, measures.py curve; 2(c): --batch-size; 2(d): --tau, --epochs; 3(a): --ga-iterations; 3(b), 3(d): the accuracies of a run;
3(c): --label-ratio 0.1/0.2/0.3/0.4/0.5/0.6. Left out: the centralized rows of Table 2, which the paper quotes.

Where paper, official code (MahdiyarMM/FedGaLA) and this file differ
  what                  paper                        official code               here (default)       flag
  sign of line 19       cos(gradient, change) > tau  as printed                  as printed           --alignment-sign
                        is kept: the step then goes                                                   descent: cos of minus
                        AGAINST the last change;                                                      the gradient
                        the text says the contrary
  a layer               not said                     each tensor                 module: weight and   --align-unit tensor
                                                                                 bias together
  discard, with Adam    not said                     no gradient: the tensor's   as the code          --discard zero
                                                     moments and step stand still
  cos = tau             line 19 discards, text keeps kept                        discarded, but for   -
                                                                                 a layer that did not
                                                                                 change: all is kept
  first rounds          no g_est yet; not said       no discarding in two        none in the first    -
                                                     rounds
  g_est of a client     Theta^t - Theta^(t-1)        the same, all take part     the change since its -
   that skipped rounds                                                           last round
  global alignment of   not said                     each tensor, BN's           the whole update,    --ga-unit layer,
                                                     statistics too              parameters alone     tensor
  its vectors           g_i, from FedAvg's mean      p_i g_i (p_i: weights of    the paper's          --ga-vectors scaled
                                                     line 6), from their plain
                                                     mean; in the first round
                                                     the models, not updates
  its iterations        as printed each gives the    feeds the result back       as the code          --ga-iterations
                        same; three (Sec. 3.3)
  line 6, "FedAVG"      "averaging all"              by number of full batches   by images            --average batches,
                                                                                                      uniform
  Theta of lines 5, 12  t - 1 and t                  the model that was sent     the model sent       -
  optimizer's state     not said                     kept over the rounds        kept                 --no-keep-optimizer
  optimizers, rates     Adam 3e-3; SGD 0.025 (MoCo), Adam 1e-4; SGD 0.03 (MoCo,  the paper's          --variant official
                        0.03, decay 3e-4             BYOL), 0.025, decay 1e-4   (laptop: Adam 3e-4)
  optimizer of FedGaLA  not said                     that of the learner         that of the learner  --optimizer, --lr
   with MoCo, BYOL
  start of the network  not said                     PyTorch's layers' own       as the code          -
  views                 crop, flip, colour           and greyscale, 0.2          as the code          --augment
  proximal term         mu ||Theta_i - Theta_g||^2   norms of each tensor, not   the paper's          -
                                                     squared
  temperature           not said                     0.07                        0.07                 --temperature
  projector, predictor  two layers                   512-4096-2048; SimSiam      512-4096-2048 and    --hidden, --dim
                                                     has three layers, MoCo one  2048-4096-2048, all
  predictor             not averaged (Sec. 4)        SimSiam's averaged; BYOL's  local, not aligned   --predictor shared
                                                     local but aligned
  MoCo                  not said                     queue 65536, momentum       4096 and 0.99 as     --queue, --ema
                                                     0.999; averaged with the    EasyFL (not its two-
                                                     model until batches fail    way loss and reset
                                                                                 keys), local
  BYOL's target         moving average               never updated (--ema 1)     0.99 (EasyFL)        --ema
  last, smaller batch   not said                     left out                    left out             --no-drop-last
  linear classifier on  the frozen encoder, which    projector (2048)            encoder (512)        --probe projector
                        ends in the two-layer MLP
  its rate              3e-3                         1e-4                        3e-3                 --linear-lr
  10% of the labels     not said                     PACS: the first of a list   drawn, class by      --seed
                                                                                 class
  evaluation            after training               10% of the labels: mean of  one classifier       --eval-every
                                                     10 classifiers, each 10
                                                     rounds
  DomainNet's sources   painting, real, sketch       all other five domains      the paper's          --sources
  pixels                not said                     [0, 1]                      [0, 1]               --normalize
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import common
from common import (ClientData, Payload, adam, arg, autocast, average, batches, cut_batches, optimizer_state, parse, run, sgd,
                    state)
from learners import LEARNERS, Learner
from networks import backbone


@dataclass
class Args(common.LinearArgs):
    variant: str = arg("paper", "settings: the paper's, or the official code's", choices=("paper", "official"))
    ssl: str = arg("simclr", "self-supervised learner", choices=LEARNERS)
    optimizer: str = arg("", "local optimizer; empty: adam for simclr, sgd for the others", choices=("adam", "sgd"))
    lr: float = arg(3e-3, "learning rate of the first round; Adam 0.003 (0.0003 at laptop scale), SGD 0.03, with --ssl moco 0.025", above=0)
    momentum: float = arg(0.0, "momentum of the local SGD; SGD 0.9", low=0, high=1)
    weight_decay: float = arg(0.0, "weight decay of the local optimizer; SGD 0.0003", low=0)
    keep_optimizer: bool = arg(True, "keep the optimizer's state on each client over the rounds, else start it anew")
    local_alignment: str = arg("discard", "gradients that are not aligned: discard them, reweight them (Table 6), or off",
                               choices=("discard", "reweight", "off"))
    alignment_sign: str = arg("paper", "paper: keep gradients whose cosine with the last global change is above tau (line 19 as "
                              "printed); descent: those whose negative's is", choices=("paper", "descent"))
    tau: float = arg(0.0, "threshold of the local alignment", low=-1, high=1)
    align_unit: str = arg("layer", "what is discarded as one: a layer's tensors together, or each tensor", choices=("layer", "tensor"))
    discard: str = arg("skip", "a discarded gradient: skip the tensors' step with its moments and weight decay, or make it zero",
                       choices=("skip", "zero"))
    reweight_factor: float = arg(0.1, "factor on gradients that are not aligned, with --local-alignment reweight", low=0)
    global_alignment: bool = arg(True, "weights of the average by the cosines of the clients' updates with the mean update")
    ga_iterations: int = arg(3, "iterations of the global alignment, line 7", low=1)
    ga_unit: str = arg("model", "what has one weight: the whole update, each layer, or each tensor", choices=("model", "layer", "tensor"))
    ga_vectors: str = arg("updates", "what the cosines compare: the updates, or these times FedAvg's weights (official code)",
                          choices=("updates", "scaled"))
    average: str = arg("samples", "FedAvg's weights, where the global alignment starts: by images, by batches, or uniform",
                       choices=("samples", "batches", "uniform"))
    l2: float = arg(0.0, "lambda of the L2 regularizer, Eq. (54)", low=0)
    prox: float = arg(0.0, "mu of the proximal term, Eq. (56)", low=0)
    predictor: str = arg("local", "the predictor of byol and simsiam: stays on its client, or is averaged", choices=("local", "shared"))
    temperature: float = arg(0.07, "temperature of simclr and moco", above=0)
    hidden: int = arg(4096, "width of the hidden layer of projector and predictor", low=1)
    dim: int = arg(2048, "outputs of projector and predictor", low=1)
    queue: int = arg(4096, "keys in moco's queue (65536 of 2048 numbers are 512 MiB on each client)", low=1)
    ema: float = arg(0.99, "momentum m of the target network of moco and byol", low=0, high=1)


# App. B.1 to B.3; the images are kept at 224x224 and cropped to 32x32.
IMAGES = dict(backbone="resnet18_3x3", image_size=224, rounds=100, epochs=7, batch_size=128, eval_every=10)
PAPER = {
    "digits": dict(rounds=20, batch_size=64, crop=28, hidden=256, dim=128, queue=512, eval_every=5),  # ours
    "pacs": IMAGES,
    "officehome": IMAGES,
    "terrainc": IMAGES,
    "domainnet20": dict(**IMAGES, sources="painting,real,sketch"),
}
OFFICIAL = dict(average="batches", align_unit="tensor", ga_unit="tensor", ga_vectors="scaled", probe="projector", linear_lr=1e-4,
                queue=65536)
VARIANTS = {"official": {d: PAPER[d] | OFFICIAL for d in PAPER}}
LAPTOP = {"pacs": dict(image_size=64, rounds=10, epochs=1, steps=4, batch_size=64, eval_every=5, queue=1024)} | {
    d: dict(image_size=64, rounds=10, steps=4, batch_size=64, eval_every=5, queue=1024) for d in ("officehome", "terrainc",
                                                                                                 "domainnet20")}
SMOKE = {d: dict(image_size=64, hidden=64, dim=32, queue=64, epochs=1, eval_every=1) for d in PAPER if d != "digits"} | {
    "digits": dict(eval_every=1)}


def by_learner(values: dict) -> dict:
    """The optimizer of a learner, App. B.3; with --variant official the code's, and its target network and predictor."""
    ssl, official = values["ssl"], values["variant"] == "official"
    found = {}
    if official:
        found = dict(simclr={}, moco=dict(ema=0.999), byol=dict(ema=1.0), simsiam=dict(predictor="shared"))[ssl]
    if (values["optimizer"] or ("adam" if ssl == "simclr" else "sgd")) == "adam":
        short = values["scale"] == "laptop" and values["dataset"] in LAPTOP  # at 3e-3 forty steps leave SimCLR's loss at that of chance
        return found | dict(optimizer="adam", lr=1e-4 if official else 3e-4 if short else 3e-3, momentum=0.0, weight_decay=0.0)
    lr = {"moco": 0.03, "simsiam": 0.025} if official else {"moco": 0.025}
    return found | dict(optimizer="sgd", lr=lr.get(ssl, 0.03), momentum=0.9, weight_decay=1e-4 if official else 3e-4)


def units(names: list[str], unit: str) -> dict[str, list[str]]:
    """Entries of a state by the unit that they belong to: {unit: names}. A layer is a module: conv1.weight and conv1.bias."""
    key = {"model": lambda n: "", "layer": lambda n: n.rpartition(".")[0], "tensor": lambda n: n}[unit]
    found = {}
    for n in names:
        found.setdefault(key(n), []).append(n)
    return found


def unaligned(gradient: dict[str, Tensor], change: dict[str, Tensor], groups: list[list[str]], tau: float, sign: str) -> Tensor:
    """Alg. 1, line 19, for each group of tensors: bool [L], whether cos(g_ij, g_est) <= tau; with sign "descent" cos(-g_ij, g_est).

    A group whose change is zero has no direction; none of its gradients is unaligned.
    """
    total = lambda products: torch.stack([torch.stack([products[n] for n in group]).sum() for group in groups])  # [L]
    norms = [total({n: v.square().sum() for n, v in vectors.items()}).sqrt() for vectors in (gradient, change)]
    dot = total({n: torch.dot(gradient[n].flatten(), change[n].flatten()) for n in gradient})
    cosine = (-dot if sign == "descent" else dot) / (norms[0] * norms[1]).clamp(min=1e-30)
    return (cosine <= tau) & (norms[1] > 0)


def aligned_weights(gram: Tensor, start: Tensor, iterations: int) -> Tensor:
    """Alg. 1, lines 7-11: the weights w [K] from the inner products <g_i, g_j> [K, K] of the updates.

    The global update of each iteration is sum_j w_j g_j, so its products with the g_i are gram w, and its square is w gram w.
    """
    w = start
    for _ in range(iterations):
        norms = gram.diagonal().sqrt() * (w @ gram @ w).clamp(min=0).sqrt()
        w = ((gram @ w) / norms.clamp(min=1e-300) + 1) / 2  # line 8
        w = w / w.sum() if w.sum() > 0 else start  # line 9
    return w


def build(args: Args, channels: int, classes: int) -> Learner:
    """Encoder, projector, and what the learner has beside them."""
    return Learner(backbone(args, channels, classes), args)


def shared(name: str, args: Args) -> bool:
    """Whether an entry of the learner's state travels: encoder and projector, and the predictor with --predictor shared."""
    return name.startswith(("f.", "g.", "q.") if args.predictor == "shared" else ("f.", "g."))


def gram_of(g: Tensor) -> Tensor:
    """The inner products [K, K] of the rows of g [K, P], in float64, on the CPU."""
    return sum(part.double() @ part.double().T for part in g.split(2 ** 20, 1)).cpu()


class Client:
    def __init__(self, args: Args, net: Learner, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        self.own = {n: v for n, v in state(net).items() if not shared(n, args)}  # predictor, target network, queue
        self.before = {}  # the global model of the client's last round
        self.opt = {}  # the optimizer's state by parameter

    def train(self, down: Payload, t: int) -> Payload:
        """Alg. 1, lines 14-25, with E local epochs."""
        args, received = self.args, down["w"]
        model = self.load(down).train()
        if not self.before:
            model.begin()
        named = dict(model.named_parameters())
        theta_g = {n: received[n] for n in named if n in received}
        change = {n: w - self.before[n] for n, w in theta_g.items()} if self.before else {}  # line 18, g_est
        opt = (sgd if args.optimizer == "sgd" else adam)(model, args, t, self.opt)
        losses, discarded = [], []
        for x, _ in batches(self.data.train, args, t, self.k):  # line 15; x [2B, C, crop, crop]: two views
            with autocast(args):
                loss = model.loss(*x.chunk(2))  # l_i
            losses.append(loss.detach())
            if args.l2:
                loss = loss + args.l2 * sum(p.square().sum() for p in named.values() if p.requires_grad)  # Eqs. (54)-(55)
            if args.prox:
                loss = loss + args.prox * sum((named[n] - w).square().sum() for n, w in theta_g.items())  # Eq. (56)
            opt.zero_grad()
            loss.backward()  # line 16, g_ij
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            if change and args.local_alignment != "off":
                discarded.append(self.align(named, change))
            opt.step()  # lines 20-21
            model.after_step()
        self.log = {"loss": torch.stack(losses).mean()} | ({"discarded": torch.stack(discarded).mean()} if discarded else {})
        self.opt = optimizer_state(model, opt) if args.keep_optimizer else {}
        after, n = state(model), len(self.data.train)
        self.own = {name: v for name, v in after.items() if not shared(name, args)}
        self.before = received
        return {"w": {name: v for name, v in after.items() if shared(name, args)}, "n": torch.tensor(n),
                "batches": torch.tensor(len(cut_batches(torch.arange(n), args)))}  # line 25

    def align(self, named: dict[str, nn.Parameter], change: dict[str, Tensor]) -> Tensor:
        """Lines 17-23: discard (or reweight) the gradients of the layers that are not aligned; returns their share."""
        args = self.args
        groups = list(units(list(change), args.align_unit).values())
        bad = unaligned({n: named[n].grad for n in change}, change, groups, args.tau, args.alignment_sign)  # [L]
        if args.local_alignment == "discard" and args.discard == "skip":
            for group in (g for g, b in zip(groups, bad.tolist()) if b):  # L booleans to the host, once in a batch
                for n in group:
                    named[n].grad = None
        else:
            factor = args.reweight_factor if args.local_alignment == "reweight" else 0
            for group, b in zip(groups, bad):
                for n in group:
                    named[n].grad.mul_(torch.where(b, factor, 1.0))
        return bad.float().mean()

    def load(self, down: Payload) -> Learner:
        """The received encoder and projector with the client's own predictor, target network and queue."""
        self.net.load_state_dict(down["w"] | self.own)
        return self.net

    def model(self, down: Payload) -> nn.Module:
        return self.load(down)

    def state_dict(self) -> dict:
        return {"own": self.own, "before": self.before, "opt": self.opt}

    def load_state_dict(self, saved: dict) -> None:
        self.own, self.before, self.opt = saved["own"], saved["before"], saved["opt"]


class Server:
    def __init__(self, args: Args, net: Learner, clients: int):
        self.args, self.w = args, {n: v for n, v in state(net).items() if shared(n, args)}
        self.parameters = {n for n, _ in net.named_parameters()}

    def download(self, k: int) -> Payload:
        return {"w": self.w}  # line 13

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        """Alg. 1, lines 4-12. The weights sum to 1, so Theta + sum_i w_i (Theta_i - Theta) is the average of the Theta_i. BN's
        statistics have the weights of their unit; as tensors, their own."""
        args, models = self.args, [up["w"] for up in uploads.values()]
        sizes = {"samples": "n", "batches": "batches"}.get(args.average)
        n = torch.stack([up[sizes] for up in uploads.values()]).double().cpu() if sizes else torch.ones(len(models)).double()
        fedavg = n / n.sum()  # line 6
        if not args.global_alignment:
            self.w = average(models, fedavg)
            return
        new = {}
        for names in units(list(self.w), args.ga_unit).values():
            vectors = [n for n in names if n in self.parameters] or [n for n in names if self.w[n].is_floating_point()]
            gram = sum(gram_of(torch.stack([(m[n] - self.w[n]).flatten() for m in models])) for n in vectors)  # of line 5's g_i
            start = fedavg
            if args.ga_vectors == "scaled":
                gram, start = gram * torch.outer(fedavg, fedavg), torch.full_like(fedavg, 1 / len(models))
            weights = aligned_weights(gram, start, args.ga_iterations) if vectors else fedavg  # lines 7-11
            new |= average([{n: m[n] for n in names} for m in models], weights)  # line 12
        self.w = new

    def state_dict(self) -> dict:
        return {"w": self.w}

    def load_state_dict(self, saved: dict) -> None:
        self.w = saved["w"]


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS, laptop=LAPTOP, smoke=SMOKE, follows=by_learner)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
