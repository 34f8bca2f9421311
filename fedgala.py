r"""FedGaLA: domain generalization without labels by aligned gradients (Pourpanah et al., AAAI 2025).

    python fedgala.py --dataset pacs --target photo                # SimCLR, a cell of the paper's Table 1
    python fedgala.py --target d0                                  # digits, minutes on two cores

Clients learn without labels. A client compares the gradient of each layer with the global model's last change
and drops it unless their cosine is above tau. A step is minus the gradient: as printed, the steps that are
kept go against that change (--alignment-sign descent keeps those that go on with it). The server gives more
weight to clients whose updates point as the mean update does. Tested is a linear classifier on the frozen
encoder, fitted to 10% or 30% of the target's labels.
Server keeps Theta (encoder, projector). Client k keeps its optimizer's state, the global model it was sent
last, and what else its learner has (predictor, target network, queue). Down: Theta. Up: Theta_i and the
client's numbers of images and batches.

Paper                                                  This file
Alg. 1, l. 15-16  gradients of the learner's loss      Client.train, Learner.loss
Alg. 1, l. 17-23  local alignment                      Client.align, unaligned (line 18: Client.train)
Alg. 1, l. 5-12   global alignment, the new model      global_alignment
Alg. 1, l. 13     it is sent to all                    Server.download
Eqs. (54)-(56)    L2 and proximal term (Table 7)       Client.train, squared_norm (--l2, --prox)
App. B.1, B.3     augmentation, linear evaluation      --augment simclr, common.fit_client
Symbols: Theta_i model of client i (our k), l a layer, g_i update, g_ij gradient of batch j, g_est the global
model's last change, tau threshold of the cosine.
--local-alignment off --no-global-alignment is FedSimCLR, FedMoCo, FedBYOL or FedSimSiam (--ssl) of Table 1;
one of the two flags is Table 4. Table 5: --epochs, --rounds. Table 6: --local-alignment reweight. Figs. 2, 3:
--batch-size, --tau, --ga-iterations, --label-ratio. Left out: Fig. 2(a), the rows that Table 2 quotes.

What moves a number; all differences from paper and code: papers/fedgala/differences.md
  what                paper                        official code             here            flag
  sign of line 19     a step against the global    the same                  as printed      --alignment-sign
                      model's last change
  a layer             "layer"                      each tensor               weight and bias --align-unit
  line 10 into 8      printed no, Sec. 3.3 yes     yes                       yes, 3 times    --ga-iterations
  one w_i for         the whole update             each tensor, BN's too     the update      (official)
  FedAVG in line 6    "averaging all"              by full batches           by batches      --average
  optimizer           Adam 3e-3, SGD 0.025-0.03    Adam 1e-4                 the paper's     --optimizer, --lr
  images that fit     not said                     augmented, later plain    augmented; on   --linear-views
  the classifier                                                             digits plain
"""

import copy
import math
from collections import defaultdict
from dataclasses import dataclass

import common
from common import (ClientData, Net, Payload, adam, arg, autocast, average, backbone, batches, flatten,
                    group_by, load, optimizer_state, parse, run, sgd, source, sourced,
                    state, steps_in_epoch)

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, interpolate, normalize
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.LinearArgs):  # plumbing/run/settings.py: views, crop, linear classifier, labels
    ssl: str = arg("simclr", "self-supervised learner", choices=("simclr", "moco", "byol", "simsiam"),
                   source="text, Sec. 4")
    optimizer: str = arg("", "local optimizer; empty: adam for simclr, sgd for the others",
                         choices=("adam", "sgd"), source="text, App. B.3")
    lr: float = arg(3e-3, "learning rate of the first round; with sgd 0.03; some learners and datasets have "
                          "others (--show-settings)", above=0, source="text, App. B.3")
    momentum: float = arg(0.0, "momentum of the local SGD; with sgd 0.9", low=0, high=1)
    weight_decay: float = arg(0.0, "weight decay of the local optimizer; with sgd 0.0003", low=0)
    keep_optimizer: bool = arg(True, "keep each client's optimizer state between rounds; otherwise reset it",
                               source="code f3ec1e1, main.py")
    local_alignment: str = arg("discard", "what to do with gradients that are not aligned: discard them, "
                                          "reweight them (Table 6), or off",
                               choices=("discard", "reweight", "off"), source="text, Alg. 1, lines 17-23")
    alignment_sign: str = arg("paper", "paper: keep gradients whose cosine with the last global change is "
                                       "above tau, as printed in line 19; descent: compare minus the "
                                       "gradient", choices=("paper", "descent"),
                              source="text, Alg. 1, line 19")
    tau: float = arg(0.0, "threshold of the local alignment", low=-1, high=1, source="text, Sec. 5.4")
    align_unit: str = arg("layer", "what is discarded together: all tensors of a layer, or each tensor",
                          choices=("layer", "tensor"), source="ours, of the text's layer")
    reweight_factor: float = arg(0.1, "factor on unaligned gradients, with --local-alignment reweight", low=0,
                                 source="ours, of the text's Table 6")
    global_alignment: bool = arg(True, "weight clients by the cosine of their update with the mean update",
                                 source="text, Alg. 1, lines 5-11")
    ga_iterations: int = arg(3, "iterations of the global alignment, line 7", low=1, source="text, Sec. 3.3")
    average: str = arg("samples", "FedAvg's weights, with which the global alignment starts: by images, by "
                                  "batches, or uniform", choices=("samples", "batches", "uniform"),
                       source="ours")
    l2: float = arg(0.0, "lambda of the L2 regularizer, Eq. (54)", low=0, source="text, Table 7 alone has it")
    prox: float = arg(0.0, "mu of the proximal term, Eq. (56)", low=0, source="text, Table 7 alone has it")
    temperature: float = arg(0.07, "temperature of simclr and moco", above=0,
                             source="code f3ec1e1, models.py")
    hidden: int = arg(4096, "width of the hidden layer of projector and predictor", low=1,
                      source="code f3ec1e1, models.py")
    dim: int = arg(2048, "outputs of projector and predictor", low=1, source="code f3ec1e1, models.py")
    queue: int = arg(65536, "keys in moco's queue (65536 of 2048 numbers: 512 MiB on each client)", low=1,
                     source="code f3ec1e1, models.py")
    ema: float = arg(0.99, "momentum m of the target network; 0.99 for byol, 0.999 for moco", low=0, high=1,
                     source="code f3ec1e1, models.py")


# The images are kept at 224x224 and cropped to 32x32. On digits our values make the loss fall. There 10% of a
# target are 30 or 100 images, one batch: 100 epochs would be 100 steps of the linear classifier, too few to
# tell a trained network from an untrained one.
PAPER = sourced({
    "pacs": dict(backbone="resnet18_3x3", rounds=100, epochs=7, batch_size=128, image_size=224,
                 eval_every=10, average="batches", linear_views="augmented"),
    "officehome": dict(backbone="resnet18_3x3", rounds=100, epochs=7, batch_size=128, image_size=224,
                       eval_every=10, average="batches", linear_views="augmented"),
    "terrainc": dict(backbone="resnet18_3x3", rounds=100, epochs=7, batch_size=128, image_size=224,
                     eval_every=10, average="batches", linear_views="augmented"),
    "domainnet20": dict(backbone="resnet18_3x3", rounds=100, epochs=7, batch_size=128, image_size=224,
                        eval_every=10, average="batches", linear_views="augmented",
                        sources="painting,real,sketch"),
    "digits": dict(rounds=30, epochs=2, batch_size=64, crop=28, augment="crops", temperature=0.2,
                   hidden=256, dim=128, queue=512, ema=0.99, eval_every=10, linear_epochs=1000),
    "rotatedmnist": dict(rounds=30, epochs=2, batch_size=64, crop=28, augment="crops", temperature=0.2,
                         hidden=256, dim=128, queue=512, ema=0.99, eval_every=10, linear_epochs=1000),
}, {
    "text, App. B.2 and B.3": "backbone rounds epochs batch_size",
    "ours, before the text's crop, App. B.1": "image_size",
    "ours": "digits rotatedmnist",
    "code f3ec1e1, main.py": "average eval_every",
    "code f3ec1e1, utils.py": "linear_views",
    "text, Sec. 4": "sources",
})
OF_IMAGES = ("pacs", "officehome", "terrainc", "domainnet20")
LAPTOP = dict.fromkeys(OF_IMAGES, dict(image_size=64, rounds=10, steps=4, batch_size=64, eval_every=5,
                                       queue=1024, linear_views="plain"))
SMOKE = dict.fromkeys(PAPER, dict(eval_every=1, linear_epochs=100)) | dict.fromkeys(
    OF_IMAGES, dict(image_size=64, hidden=64, dim=32, queue=64, epochs=1, eval_every=1,
                    linear_views="plain"))

# What follows from the learner and its optimizer (pairs that App. B.3 does not name are ours).
OF_TEXT = "text, App. B.3"
OPTIMIZER = {"simclr": "adam", "moco": "sgd", "byol": "sgd", "simsiam": "sgd"}
OF_OPTIMIZER = {
    "adam": source("code f3ec1e1, main.py", momentum=0.0, weight_decay=0.0),
    "sgd": source(OF_TEXT, momentum=0.9, weight_decay=3e-4),
}


def by_learner(values: dict) -> dict:
    """Values that follow from others: the learner's optimizer, and what goes with it."""
    optimizer = values["optimizer"] or OPTIMIZER[values["ssl"]]
    derived = source(OF_TEXT, optimizer=optimizer) | OF_OPTIMIZER[optimizer]
    if values["ssl"] == "moco":
        derived |= source("code f3ec1e1, models.py", ema=0.999)
    return derived | learning_rate(values, optimizer)


def learning_rate(values: dict, optimizer: str) -> dict:
    if optimizer == "sgd" and values["ssl"] == "moco":
        return source(OF_TEXT, lr=0.025)
    if optimizer == "sgd":
        return source(OF_TEXT, lr=0.03)
    if values["dataset"] in ("digits", "rotatedmnist"):
        return source("ours", lr=1e-3)
    if values["scale"] == "laptop" and values["dataset"] in LAPTOP:
        return source("ours", lr=3e-4)  # at 3e-3 forty steps leave SimCLR's loss at that of chance
    return source(OF_TEXT, lr=3e-3)


# The learners


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """The projector's and the predictor's shape: two layers with BN and ReLU between them (App. B.2),
    [B, inputs] -> [B, outputs]."""
    return nn.Sequential(nn.Linear(inputs, hidden, bias=False),  # BN would subtract a bias
                         nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, outputs))


class Learner(nn.Module):
    """Encoder f, projector g, and what else the self-supervised learner `args.ssl` has.

    Learner   trained   kept by the client       loss                    source
    SimCLR    f, g      -                        nt_xent                 Chen et al., ICML 2020, Eq. (1)
    MoCo      f, g      target f', g'; queue     info_nce                He et al., CVPR 2020, Eqs. (1)-(2)
    BYOL      f, g, q   predictor q, f', g'      regression, both ways   Grill et al., NeurIPS 2020, Eq. (2)
    SimSiam   f, g, q   predictor q              -cosine / 2, both ways  Chen & He, CVPR 2021, Eqs. (1)-(4)
    """

    travels = ("f.", "g.")  # what the names of the entries that are sent begin with

    def __init__(self, net: Net, args):
        super().__init__()
        self.args = args
        self.f = net.body
        self.g = mlp(net.head.in_features, args.hidden, args.dim)
        if args.ssl in ("byol", "simsiam"):
            self.q = mlp(args.dim, args.hidden, args.dim)
        if args.ssl in ("byol", "moco"):
            copies = {"f": copy.deepcopy(self.f), "g": copy.deepcopy(self.g)}
            self.target = nn.ModuleDict(copies).requires_grad_(False)
        if args.ssl == "moco":
            self.register_buffer("queue", normalize(torch.randn(args.queue, args.dim)))
            self.register_buffer("position", torch.zeros((), dtype=torch.long))  # of the oldest key

    def project(self, x: Tensor) -> Tensor:
        """x [B, C, H, W] -> z [B, D']."""
        return self.g(self.f(x))

    def features(self, x: Tensor) -> Tensor:
        """What the linear classifier sees of images x [B, C, H, W] of any size: f(x), or g(f(x)) with
        `--probe projector`."""
        size = self.args.crop
        if x.shape[2:] != (size, size):
            x = interpolate(x, (size, size), mode="bilinear", antialias=True)
        if self.args.probe == "encoder":
            return self.f(x)
        return self.project(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)

    def first_round(self) -> None:
        """A client's first round: the target network is the received one, the queue has random keys."""
        if self.args.ssl in ("byol", "moco"):
            self.target["f"].load_state_dict(self.f.state_dict())
            self.target["g"].load_state_dict(self.g.state_dict())
        if self.args.ssl == "moco":
            self.queue.copy_(normalize(torch.randn(self.queue.shape)))
            self.position.zero_()

    def loss(self, x1: Tensor, x2: Tensor) -> Tensor:
        r"""The learner's loss for two views [B, C, H, W]. MoCo remembers the keys for `after_step`.

        $$ \begin{aligned}
           \mathcal{D}(p_1, z_2) &= -\frac{p_1}{\|p_1\|_2} \cdot \frac{z_2}{\|z_2\|_2} \\
           \mathcal{L} &= \tfrac{1}{2} \mathcal{D}(p_1, \mathrm{stopgrad}(z_2)) \\
           &\quad + \tfrac{1}{2} \mathcal{D}(p_2, \mathrm{stopgrad}(z_1))
           \end{aligned} \tag{SimSiam Eqs. 1-4} $$
        """
        ssl = self.args.ssl
        if ssl == "simclr":
            return nt_xent(self.project(torch.cat([x1, x2])), self.args.temperature)
        if ssl == "moco":
            self.keys = self.target_projection(x2)
            return info_nce(self.project(x1), self.keys, self.queue, self.args.temperature)
        if ssl == "byol":
            one_way = regression(self.q(self.project(x1)), self.target_projection(x2))
            other_way = regression(self.q(self.project(x2)), self.target_projection(x1))
            return one_way + other_way
        z1, z2 = self.project(x1), self.project(x2)
        one_way = mean_cosine(self.q(z1), z2.detach())  # stop-gradient: SimSiam, Eq. (4)
        other_way = mean_cosine(self.q(z2), z1.detach())
        return -(one_way + other_way) / 2

    @torch.no_grad()
    def target_projection(self, x: Tensor) -> Tensor:
        """The target network's g'(f'(x)) [B, D'], in training mode as the network itself; no gradient."""
        return self.target["g"](self.target["f"](x))

    @torch.no_grad()
    def after_step(self) -> None:
        r"""The target network follows (MoCo, BYOL). MoCo's keys take the oldest ones' places.

        $$ \theta_k \leftarrow m\,\theta_k + (1 - m)\,\theta_q \tag{MoCo Eq. 2} $$
        """
        if self.args.ssl in ("byol", "moco"):
            trained = [*self.f.parameters(), *self.g.parameters()]
            targets = [*self.target["f"].parameters(), *self.target["g"].parameters()]
            torch._foreach_lerp_(targets, trained, 1 - self.args.ema)
        if self.args.ssl == "moco":
            turn = torch.arange(len(self.keys), device=self.queue.device)
            places = (self.position + turn) % len(self.queue)
            newest = slice(-len(self.queue), None)  # if a batch has more keys than there are places
            self.queue[places[newest]] = normalize(self.keys[newest].float())
            self.position.add_(len(self.keys)).remainder_(len(self.queue))
            self.keys = None


def nt_xent(z: Tensor, temperature: float) -> Tensor:
    r"""SimCLR: z [2B, D], row i and row i + B of the same image; the mean over all rows.

    $$ \ell_{i,j} = -\log \frac{\exp(\mathrm{sim}(z_i, z_j)/\tau)}{\sum_{k \neq i} \exp(\mathrm{sim}(z_i,
       z_k)/\tau)}
       \tag{SimCLR Eq. 1} $$
    """
    B = len(z) // 2
    with torch.autocast(z.device.type, enabled=False):  # float32 also where autocast would make products bf16
        z = normalize(z.float())
        similarity = (z @ z.T / temperature).fill_diagonal_(float("-inf"))  # [2B, 2B]
        other_view = torch.arange(2 * B, device=z.device).roll(B)
        return cross_entropy(similarity, other_view)


def info_nce(q: Tensor, k: Tensor, queue: Tensor, temperature: float) -> Tensor:
    r"""MoCo: queries q [B, D], their keys k [B, D], old keys [M, D] of unit length; the mean over queries.

    $$ \mathcal{L}_q = -\log \frac{\exp(q \cdot k_+ / \tau)}{\sum_{i=0}^{M} \exp(q \cdot k_i / \tau)}
       \tag{MoCo Eq. 1} $$
    """
    with torch.autocast(q.device.type, enabled=False):
        q, k = normalize(q.float()), normalize(k.float())
        own = (q * k).sum(1, keepdim=True)  # [B, 1]
        logits = torch.cat([own, q @ queue.T], 1) / temperature  # [B, 1 + M]
        return cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


def chance_loss(args, n: int) -> float:
    """What `loss` is to be compared with: the learner's loss for a client of n images when all features are
    alike (simclr, moco), or when p and its target are at right angles (byol, simsiam; alike, they are at
    their minimum)."""
    if args.ssl == "simclr":
        return math.log(2 * min(args.batch_size, n) - 1)
    if args.ssl == "moco":
        return math.log(1 + args.queue)
    return {"byol": 4.0, "simsiam": 0.0}[args.ssl]


def mean_cosine(a: Tensor, b: Tensor) -> Tensor:
    """The mean cosine of the rows of a and b [B, D]."""
    return cosine_similarity(a.float(), b.float()).mean()


def regression(p: Tensor, target: Tensor) -> Tensor:
    r"""BYOL: the mean over the rows.

    $$ \left\| \bar{q}_\theta(z_\theta) - \bar{z}'_\xi \right\|_2^2
       = 2 - 2\,\frac{\langle q_\theta(z_\theta), z'_\xi \rangle}{\|q_\theta(z_\theta)\|_2\,\|z'_\xi\|_2}
       \tag{BYOL Eq. 2} $$
    """
    return 2 - 2 * mean_cosine(p, target)


def travels_and_stays(tensors: dict[str, Tensor], prefixes: tuple[str, ...]) -> tuple[dict, dict]:
    """A learner's state in two: what travels, and what stays (predictor, target network, queue)."""
    travels, stays = {}, {}
    for n, v in tensors.items():
        if n.startswith(prefixes):
            travels[n] = v
        else:
            stays[n] = v
    return travels, stays


# The local alignment


def layer_groups(names: list[str], unit: str) -> list[list[str]]:
    """Entries of a state by what they belong to: a layer (a module: conv1.weight and conv1.bias), or each
    tensor by itself."""
    if unit == "tensor":
        return [[n] for n in names]
    return list(group_by(names, module_of).values())


def module_of(name: str) -> str:
    """f.conv1.weight -> f.conv1"""
    return name.rpartition(".")[0]


def unaligned(g_ij: dict[str, Tensor], g_est: dict[str, Tensor], layers: list[list[str]], tau: float,
              sign: str) -> Tensor:
    r"""Of each layer l whether line 19 is false: bool [L]. With sign "descent" it is the cosine of -g_ij. A
    layer that did not change has no direction: nothing is unaligned to it.

    $$ l = 1, \ldots, L \tag{Alg. 1, line 17} $$
    $$ \text{Cosine}\left(\mathbf{g}_{i,j}^{(l,t)}, \hat{\mathbf{g}}_{est}^{(l,t)}\right) > \tau
       \tag{Alg. 1, line 19} $$
    """
    products, norms, references = [], [], []
    for names in layers:  # line 17
        products.append(inner(g_ij, g_est, names))
        norms.append(norm(g_ij, names))
        references.append(norm(g_est, names))
    reference = torch.stack(references)  # [L]
    cosines = torch.stack(products) / (torch.stack(norms) * reference).clamp(min=1e-30)  # [L]
    if sign == "descent":
        cosines = -cosines
    return (cosines <= tau) & (reference > 0)  # the negation of line 19


def inner(a: dict[str, Tensor], b: dict[str, Tensor], names: list[str]) -> Tensor:
    """<a, b> of a layer's tensors."""
    return torch.stack([torch.dot(a[n].flatten(), b[n].flatten()) for n in names]).sum()


def norm(tensors: dict[str, Tensor], names: list[str]) -> Tensor:
    """The norm of a layer's tensors as one vector."""
    return torch.stack([tensors[n].square().sum() for n in names]).sum().sqrt()


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """||.||_2^2 of all entries: of Theta_i in Eq. (54), of Theta_i - Theta_g in Eq. (56)."""
    return sum(v.square().sum() for v in tensors)


class Client:
    keeps = ("own", "before", "opt")

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        _, self.own = travels_and_stays(state(net), net.travels)  # predictor, target network, queue
        self.before = {}  # the global model of the client's last round
        self.opt = {}  # the optimizer's state by parameter

    def train(self, down: Payload, t: int) -> Payload:
        r"""Alg. 1, lines 14-25, with E local epochs; Table 7 adds one of two regularizers. Line 21 means the
        weights before the step, not those of round t-1, and the step is Adam's (`--optimizer`).

        $$ j = 1, \ldots, N_{\text{batch}} \tag{Alg. 1, line 15} $$
        $$ \mathbf{g}_{i,j}^{(t)} \leftarrow \nabla l_i(x_{i,j}, \theta_i^{(t)}) \tag{Alg. 1, line 16} $$
        $$ \hat{\mathbf{g}}_{est}^{(l,t)} = \theta^{(l,t)} - \theta^{(l,t-1)} \tag{Alg. 1, line 18} $$
        $$ \theta_i^{(l,t)} \leftarrow \theta_i^{(l,t-1)} - \eta\,\nabla l_i^{(l,t)}(x_{i,j},
           \theta_i^{(l,t)})
           \tag{Alg. 1, lines 20-21} $$
        $$ S \leftarrow \Theta_i \tag{Alg. 1, line 25} $$
        $$ \mathcal{L}_{\text{Total},i} = \mathcal{L}_{SSL,i} + \lambda \|\Theta_i\|_2^2,
           \qquad \|\Theta_i\|_2^2 = \sum_j \theta_{i,j}^2 \tag{54-55} $$
        $$ \mathcal{L}_{\text{Total},i} = \mathcal{L}_{SSL,i} + \mu \|\Theta_i - \Theta_g\|_2^2 \tag{56} $$
        """
        args = self.args
        model = self.model(down).train()
        if not self.before:
            model.first_round()
        theta_i = dict(model.named_parameters())
        theta_g = {n: down["w"][n] for n in theta_i if n in down["w"]}  # parameters that travel, as received
        g_est = {}  # stays empty in a client's first round: nothing is discarded
        if self.before:
            for n, w in theta_g.items():
                g_est[n] = w - self.before[n]  # line 18: of all layers at once, the same for all batches
        opt = self.optimizer(model, t)
        log = defaultdict(list)
        for x, _ in batches(self.data.train, args, t, self.k):  # line 15; x [2B, C, crop, crop]: two views
            with autocast(args):
                l_i = model.loss(*x.chunk(2))
            log["loss"].append(l_i.detach())
            l2 = prox = 0
            if args.l2:
                l2 = squared_norm([p for p in model.parameters() if p.requires_grad])  # the predictor too
            if args.prox:
                prox = squared_norm([theta_i[n] - w for n, w in theta_g.items()])
            loss = l_i + args.l2 * l2 + args.prox * prox  # Eqs. (54), (56)
            opt.zero_grad()
            loss.backward()  # line 16, g_ij
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)  # one factor: it changes no cosine
            if g_est and args.local_alignment != "off":
                log["discarded"].append(self.align(theta_i, g_est))  # lines 17-19; a share of the layers
            opt.step()  # lines 20-21
            model.after_step()
        self.log = {name: torch.stack(values).mean() for name, values in log.items()}
        self.opt = optimizer_state(model, opt) if args.keep_optimizer else {}
        self.before = down["w"]
        w, self.own = travels_and_stays(state(model), self.net.travels)
        n = len(self.data.train)
        return {"w": w, "n": torch.tensor(n), "batches": torch.tensor(steps_in_epoch(n, args))}  # line 25

    def optimizer(self, model: nn.Module, t: int) -> torch.optim.Optimizer:
        """Adam or SGD at the rate of round t, with what it remembers of the client's last round."""
        if self.args.optimizer == "adam":
            return adam(model, self.args, t, self.opt)
        opt = sgd(model, self.args, t, self.opt)
        for p in opt.param_groups[0]["params"]:  # fused SGD fails if a discarded gradient leaves one out
            opt.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        return opt

    def align(self, theta_i: dict[str, nn.Parameter], g_est: dict[str, Tensor]) -> Tensor:
        """Alg. 1, lines 17-23, before the step: the gradients of unaligned layers are discarded (or
        reweighted). Returns the share of these layers."""
        args = self.args
        g_ij = {n: theta_i[n].grad for n in g_est if theta_i[n].grad is not None}  # None: frozen or unused
        layers = layer_groups(list(g_ij), args.align_unit)
        is_unaligned = unaligned(g_ij, g_est, layers, args.tau, args.alignment_sign)  # line 19; [L]
        for l in is_unaligned.nonzero().flatten().tolist():  # to the host, once in a batch
            for n in layers[l]:
                if args.local_alignment == "reweight":
                    g_ij[n].mul_(args.reweight_factor)
                else:
                    theta_i[n].grad = None  # opt.step() then leaves theta_i^l and its moments alone
        return is_unaligned.float().mean()

    def model(self, down: Payload) -> nn.Module:
        """The received encoder and projector with the client's own predictor, target network and queue."""
        return load(self.net, down["w"] | self.own)

    def chance_loss(self) -> float:
        return chance_loss(self.args, len(self.data.train))


# The global alignment


def global_alignment(models: list[dict[str, Tensor]], theta: dict[str, Tensor], parameters: list[str],
                     p: Tensor, iterations: int) -> dict[str, Tensor]:
    r"""The Theta_i of K clients and the Theta that they received -> the next Theta; line 6 averages by p [K].

    $$ \mathbf{g}_i^{(t)} \leftarrow \Theta_i^{(t)} - \Theta^{(t-1)} \tag{Alg. 1, line 5} $$
    $$ \mathbf{g}^{(t+1)} \leftarrow \sum_i p_i\,\mathbf{g}_i^{(t)} \tag{Alg. 1, line 6} $$
    $$ j = 1, \ldots, iter \tag{Alg. 1, line 7} $$
    $$ w_i \leftarrow \frac{\text{Cosine}(\mathbf{g}_i^{(t)}, \mathbf{g}^{(t+1)}) + 1}{2}
       \tag{Alg. 1, line 8} $$
    $$ w_i \leftarrow \frac{w_i}{\sum_i w_i} \tag{Alg. 1, line 9} $$
    $$ \hat{\mathbf{g}}^{(t+1)} \leftarrow \sum_{i=1}^{K} w_i\,\mathbf{g}_i^{(t)} \tag{Alg. 1, line 10} $$
    $$ \Theta^{(t+1)} \leftarrow \Theta^{(t)} + \hat{\mathbf{g}}^{(t+1)} \tag{Alg. 1, line 12} $$

    Line 5's Theta^(t-1) and line 12's Theta^(t) are one: what the clients received. Line 10's result goes
    back into line 8 (Sec. 3.3). The w_i sum to 1, so the sum of line 12 is the average of the Theta_i, BN's
    statistics too. The cosines and sums of lines 6-10 are in float64, one update at a time; the K updates
    stay float32 and take as much memory as the uploads.
    """
    g = []
    for theta_i in models:
        g.append(flatten([theta_i[n] - theta[n] for n in parameters]))  # line 5: g_i [P]
    g_mean = weighted_sum(g, p)  # line 6, FedAvg
    for _ in range(iterations):  # line 7
        cosines = torch.stack([cosine(g_i, g_mean) for g_i in g])  # [K]
        w = (cosines + 1) / 2  # line 8
        w = w / w.sum()  # line 9
        g_mean = weighted_sum(g, w)  # line 10
    return average(models, w)  # line 12


def weighted_sum(g: list[Tensor], w: Tensor) -> Tensor:
    """sum_i w_i g_i [P], in float64."""
    total = torch.zeros_like(g[0], dtype=torch.float64)
    for g_i, w_i in zip(g, w.tolist()):
        total.add_(g_i, alpha=w_i)
    return total


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """The cosine of two vectors [P], in float64; 0 if one of them is 0."""
    a, b = a.double(), b.double()
    return torch.dot(a, b) / (a.norm() * b.norm()).clamp(min=1e-300)


class Server:
    keeps = ("w",)

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.args = args
        self.w, _ = travels_and_stays(state(net), net.travels)
        trained = dict(net.named_parameters())
        self.parameters = [n for n in self.w if n in trained]

    def download(self, k: int) -> Payload:
        r"""
        $$ \Theta_i \leftarrow \Theta^{(t+1)} \tag{Alg. 1, line 13} $$
        """
        return {"w": self.w}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        """Alg. 1, lines 5-12."""
        p = self.weights_of_fedavg(uploads)
        models = [up["w"] for up in uploads.values()]  # Theta_i
        if self.args.global_alignment:
            new = global_alignment(models, self.w, self.parameters, p, self.args.ga_iterations)  # lines 5-12
        else:
            new = average(models, p)
        for name, theta in self.w.items():
            if all(torch.equal(theta_i[name], theta) for theta_i in models):
                new[name] = theta  # nobody moved it: the rounding of an average is no direction for line 18
        self.w = new

    def weights_of_fedavg(self, uploads: dict[int, Payload]) -> Tensor:
        """p [K] of line 6, by --average."""
        n = torch.stack([up["n"] for up in uploads.values()]).double()  # [K]
        if self.args.average == "samples":
            p = n / n.sum()
        elif self.args.average == "batches":
            n_batches = torch.stack([up["batches"] for up in uploads.values()]).double()
            p = n_batches / n_batches.sum()
        else:
            p = torch.full_like(n, 1 / len(n))
        return p


def build(args: Args, channels: int, classes: int) -> Learner:
    """Encoder, projector, and what the learner has beside them."""
    return Learner(backbone(args, channels, classes), args)


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, laptop=LAPTOP, smoke=SMOKE, follows=by_learner)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
