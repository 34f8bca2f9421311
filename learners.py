"""What FedGaLA and FedEMA learn with, without labels: SimCLR, MoCo, BYOL and SimSiam."""

import copy
import math

from common import Net

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, interpolate, normalize

LEARNERS = ("simclr", "moco", "byol", "simsiam")


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """The projector's and the predictor's shape: two layers with BN and ReLU between them (App. B.2)."""
    return nn.Sequential(nn.Linear(inputs, hidden, bias=False),  # BN takes its mean away, and a bias with it
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

    def begin(self) -> None:
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
        r"""The target network follows, of BYOL too. MoCo's keys take the oldest ones' places.

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


def nt_xent(z: Tensor, tau: float) -> Tensor:
    r"""SimCLR: z [2B, D], row i and row i + B of the same image; the mean over all rows.

    $$ \ell_{i,j} = -\log \frac{\exp(\mathrm{sim}(z_i, z_j)/\tau)}{\sum_{k \neq i} \exp(\mathrm{sim}(z_i,
       z_k)/\tau)}
       \tag{SimCLR Eq. 1} $$
    """
    B = len(z) // 2
    with torch.autocast(z.device.type, enabled=False):  # float32 also where autocast would make products bf16
        z = normalize(z.float())
        similarity = (z @ z.T / tau).fill_diagonal_(float("-inf"))  # [2B, 2B]
        other_view = torch.arange(2 * B, device=z.device).roll(B)
        return cross_entropy(similarity, other_view)


def info_nce(q: Tensor, k: Tensor, queue: Tensor, tau: float) -> Tensor:
    r"""MoCo: queries q [B, D], their keys k [B, D], old keys [M, D] of unit length; the mean over queries.

    $$ \mathcal{L}_q = -\log \frac{\exp(q \cdot k_+ / \tau)}{\sum_{i=0}^{M} \exp(q \cdot k_i / \tau)}
       \tag{MoCo Eq. 1} $$
    """
    with torch.autocast(q.device.type, enabled=False):
        q, k = normalize(q.float()), normalize(k.float())
        own = (q * k).sum(1, keepdim=True)  # [B, 1]
        logits = torch.cat([own, q @ queue.T], 1) / tau  # [B, 1 + M]
        return cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


def chance_loss(args, n: int) -> float:
    """The learner's loss for a client of n images when all features are alike (simclr, moco), or when p and
    its target are at right angles (byol, simsiam; alike, they are at their minimum)."""
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
