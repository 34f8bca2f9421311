r"""FDSE: Federated Learning with Domain Shift Eraser (Wang et al., CVPR 2025).

    python fdse.py --dataset officecaltech                                  # the paper's setting
    python fdse.py --dataset officecaltech --scale laptop                   # minutes on two cores
    python fdse.py --dataset officecaltech --protocol lodo --target dslr    # an unseen domain, Table 2

Each layer becomes a domain-agnostic feature extractor (DFE), shared by all, and a domain-specific skew eraser
(DSE), one for each client. Server keeps theta_u (DFE, BN_DFE scale and shift, head), BN_DFE statistics, and
of each client theta_v,k (DSE, BN_DSE scale and shift, a bias before BN_DFE). Client k keeps its BN_DSE
statistics. Down: theta_u, BN_DFE statistics, theta_v,k. Up: the same, trained. If a domain is left out,
BN_DSE's statistics go up too, and its client gets means over the clients.

Paper                                                            This file
Eqs. (2)-(3), Tables A6, A7    a layer in two modules, networks  DSEBlock, build
Eqs. (4)-(7)                   consistency, C in Table 3         batch_statistics, consistency
Eq. (8)                        consensus maximization, A         consensus, min_norm
Eq. (9)                        personalization, B                personalize
Alg. 1                         rounds; client; server            common.rounds; Client.train; Parts, Server
Alg. 3                         adaptation without labels         Client.adapt
Symbols as in the paper: S, T channels in and out, G, lambda, tau, beta, theta_u, theta_v, N clients; mu_g,
var_g global and mu_hat, var_hat running statistics of the input of BN_DFE; gamma = 1 - BN momentum = 0.9.
Table 3: without A --no-consensus, B --no-similarity, C --lambda 0. Left out: nothing (Alg. 2 is FedBN's).

What moves a number; all differences from paper and code: papers/fdse/differences.md
  what               paper            first release      here                   flag
  lambda; tau        0.01, 0.1 or 1;  10; 10, in lists   0.1; 0.1               --lambda, --tau
                     0.001 to 0.5     also 0.1; 0.1
  tested network     not said         the client's own   what the server sends  --after-training
                                      or the server's
  "layer", Eqs. 8-9  becomes DFE      a tensor           a block, or the head   --unit tensor
                     and DSE
  lr decay; image    0.998; 224       0.9998; 256        0.998; 224             --lr-decay, --image-size
  adaptation         several epochs   none               5 epochs, lr 1         --adapt-epochs, --adapt-lr
"""

import dataclasses
import math
from collections import defaultdict
from dataclasses import dataclass

import common
from common import (ClientData, GroupedConv2d, Net, Payload, UserError, arg, autocast, average, backbone,
                    batches, flatten, group_by, load, parse, pick, run, sgd, sourced, state, uniform)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    lambda_: float = arg(0.1, "weight of L_Con in the loss, Alg. 1 line 7; 0: Table 3 without part C", low=0,
                         source="code dd266a2, config/algo_para.yml, of the text's grid, A7.4")
    beta: float = arg(0.001, "growth of L_Con's weights with depth, Eq. (7); 0: equal in all layers", low=0,
                      source="text, A7.4")
    tau: float = arg(0.1, "temperature of Eq. (9); near 0 each client keeps its own theta_v", low=0.0001,
                     source="code dd266a2, config/algo_para.yml, of the text's grid, A7.4")
    consensus: bool = arg(True, "aggregate theta_u by Eq. (8), A in Table 3; otherwise by the plain mean",
                          source="text, Eq. (8)")
    similarity: bool = arg(True, "aggregate theta_v by Eq. (9), B in Table 3; otherwise clients keep it",
                           source="text, Eq. (9)")
    unit: str = arg("layer", "what Eqs. (8) and (9) take as a layer: layer (all tensors of theta_u, or of "
                             "theta_v, in a block) or tensor (each one alone)",
                    choices=("layer", "tensor"), source="text, Sec. 4.3")
    con_from: int = arg(1, "first round with L_Con, counted from 0; 1: after BN_DFE has statistics", low=0,
                        source="code dd266a2, algorithm/fdse.py")
    block_bias: bool = arg(True, "use one bias before BN_DFE instead of a bias in the DSE convolution",
                           source="code dd266a2, algorithm/fdse.py")
    own_bias: bool = arg(True, "with --block-bias: this bias belongs to theta_v instead of to theta_u",
                         source="code dd266a2, algorithm/fdse.py")
    adapt_epochs: int = arg(5, "lodo: epochs of Algorithm 3 on the target's images; 0: no adaptation", low=0,
                            at_test=True, source="ours, for the text's \"several\", A7.5")
    adapt_lr: float = arg(1.0, "lodo: learning rate of Algorithm 3; 0: adapt only BN_DSE's statistics", low=0,
                          at_test=True, source="ours")


G = 2  # channels that each DFE channel becomes (Table A6)
GAMMA = 0.9  # 1 - PyTorch's momentum of BN; the value of gamma is not given

# The paper's three datasets, and ours; who says each value stands below.
ROWS = {
    "officecaltech": dict(rounds=500, epochs=1, batch_size=50, lr=0.1, lr_decay=0.998, momentum=0.0,
                          weight_decay=1e-3, clip=10.0, backbone="alexnet_bn", image_size=224,
                          split="0.8/0.1/0.1", target_part="test"),
    "pacs": dict(rounds=500, epochs=5, batch_size=50, lr=0.05, lr_decay=0.998, momentum=0.0,
                 weight_decay=1e-3, clip=10.0, backbone="alexnet_bn", image_size=224,
                 split="0.8/0.1/0.1", target_part="test"),
    "domainnet10": dict(rounds=500, epochs=5, batch_size=50, lr=0.1, lr_decay=0.998, momentum=0.0,
                        weight_decay=1e-3, clip=10.0, backbone="alexnet_bn", image_size=224,
                        split="0.8/0.1/0.1", target_part="test"),
    "digits": dict(rounds=60, lr=0.05, batch_size=32),
    "rotatedmnist": dict(protocol="lodo", rounds=300, steps=5, batch_size=64, lr=0.05, eval_every=10),
    "rotatedmnist-t10k": dict(protocol="lodo", rounds=300, steps=5, batch_size=64, lr=0.05, eval_every=10),
}
PAPER = sourced(ROWS, {
    "text, Sec. 5.1 and A7.4": "rounds batch_size lr_decay clip",
    "text, Sec. 5.1": "epochs",
    "text, A7.1": "image_size split",
    "text, A7.2 and Table A6": "backbone",
    "numbers, Table 2": "target_part",  # they are shares of the target's 10%
    "code of FLGo 0.3.29, flgo/utils/fflow.py": "momentum",
    "code dd266a2, config/run_office.yml": "officecaltech.lr officecaltech.weight_decay",
    "code dd266a2, config/run_pacs.yml": "pacs.lr pacs.weight_decay",
    "code dd266a2, config/domainnet.yml": "domainnet10.lr domainnet10.weight_decay",
    "ours": "digits rotatedmnist rotatedmnist-t10k",
})


# The layers


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    r"""x [B, T(, h, w)] -> mean [T] and biased variance [T] of each channel over batch and positions.

    $$ \begin{aligned}
       \mu_{k,b}^{(l)} &= \frac{1}{B}\sum_{i} \mathbb{X}_{k,b,i}^{(l)} \\
       \sigma_{k,b}^{(l)2} &= \frac{1}{B}\sum_{i} \left(\mathbb{X}_{k,b,i}^{(l)} - \mu_{k,b}^{(l)}\right)^2
       \end{aligned} \tag{4} $$

    torch.var_mean gives the same; with it a training step of FDSE takes 1.3 to 1.7 times as long
    (papers/fdse/differences.md).
    """
    return BatchStatistics.apply(x)  # Eq. (4)


class BatchStatistics(torch.autograd.Function):
    """The mean is the BN kernel's. The backward pass is one affine map of x, rounded to x's precision. In
    bf16 the variance's gradient loses digits where |mean| is far above the deviation; FDSE's x is fp32 unless
    --no-block-bias."""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(x.dtype, torch.float32)
        ones = torch.ones(x.shape[1], dtype=exact, device=x.device)
        zeros = torch.zeros(x.shape[1], dtype=exact, device=x.device)
        _, mean, inverse_std = torch.native_batch_norm(x, ones, zeros, None, None, True, 0.0, 1e-8)
        ctx.save_for_backward(x, mean)
        return mean, (inverse_std ** -2 - 1e-8).clamp_min(0)  # epsilon 0: 1/std would be 0 for a dead channel

    @staticmethod
    def backward(ctx, grad_mean: Tensor, grad_variance: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        n = x.numel() // x.shape[1]
        slope = 2 * grad_variance / n  # d mean/d x = 1/n, d variance/d x = 2 (x - mean)/n
        offset = grad_mean / n - slope * mean
        offset, slope = per_channel(offset.to(x.dtype), x), per_channel(slope.to(x.dtype), x)
        return torch.addcmul(offset, x, slope)


def per_channel(v: Tensor, x: Tensor) -> Tensor:
    """v [T] in the shape in which it goes with the channels of x [B, T(, h, w)]."""
    return v.view([-1] + [1] * (x.dim() - 2))


class DSEBlock(nn.Module):
    """A layer S -> T with its BN and ReLU, decomposed (Table A7): x [B, S, h, w] -> [B, T, h', w']. A block
    without a kernel is a linear layer: x [..., S] -> [..., T]. A BN is named after the module that it feeds:
    BN_DSE stands between DFE and DSE, BN_DFE behind the DSE, before the next block's DFE."""

    def __init__(self, args: Args, S: int, T: int, kernel: int = 0, stride: int = 1, padding: int = 0,
                 last_relu: bool = True):
        super().__init__()
        self.T, self.linear, self.last_relu = T, kernel == 0, last_relu
        T_DFE = math.ceil(T / G)
        if self.linear:
            self.dfe = nn.Linear(S, T_DFE)
            Conv, BatchNorm, dw = nn.Conv1d, nn.BatchNorm1d, 1  # a weight for each channel, as in Table A6
        else:
            self.dfe = nn.Conv2d(S, T_DFE, kernel, stride, padding)
            Conv, BatchNorm, dw = GroupedConv2d, nn.BatchNorm2d, 3
        self.bn_dse = BatchNorm(T_DFE)
        T_DSE = T_DFE * (G - 1)  # of a channel's G one is itself (Sec. A7.2); if T is odd, one is left over
        self.dse = Conv(T_DFE, T_DSE, dw, 1, dw // 2, groups=T_DFE, bias=not args.block_bias)
        self.bias = None
        if args.block_bias:
            # In training BN_DFE subtracts the batch mean, and so this bias: L_Con and weight decay alone move
            # it. In tests it acts, because BN_DFE then subtracts a mean over clients and batches.
            self.bias = nn.Parameter(torch.zeros(T))
        self.bn_dfe = BatchNorm(T)
        self.statistics = None  # mean and variance of the last batch in training, Eq. (4)

    def forward(self, x: Tensor) -> Tensor:
        r"""
        $$ \mathbb{X}_{\text{DFE}} = f_{\text{DFE}} * \mathbb{X},
           \qquad T_{\text{DFE}} = \lceil T/G \rceil \tag{2} $$
        $$ \begin{aligned}
           \mathbb{X}_{\text{DSE},i} &=
           f_{\text{DSE},i} * \mathrm{ReLU}\left(\mathrm{BN}_{\text{DSE}}(\mathbb{X}_{\text{DFE},i})\right) \\
           \mathbb{X}_{\text{out}} &=
           \mathrm{ReLU}\left(\mathrm{BN}_{\text{DFE}}(\mathrm{Concat}\{\mathbb{X}_{\text{DSE},i}\})\right)
           \end{aligned} \tag{3} $$
        """
        if self.linear:
            lead = x.shape[:-1]
            x = x.flatten(0, -2)  # a ViT's [B, tokens, S]: the tokens of all images are one batch
        x_dfe = self.dfe(x)  # Eq. (2): [B, T_DFE(, h', w')]
        h = relu(self.bn_dse(x_dfe))  # Eq. (3)
        x_dse = torch.cat([h, self.filtered(h)], 1)  # Concat of Eq. (3), behind the identity: Table A7
        out = x_dse[:, :self.T]  # [B, T(, h', w')]
        if self.bias is not None:
            out = out + per_channel(self.bias, out)
        if self.training:
            self.statistics = batch_statistics(out)  # Eq. (4): [T], [T], over batch and places, as BN does
        out = self.bn_dfe(out)
        if self.last_relu:
            out = relu(out, inplace=True)  # X_out, Eq. (3)
        if self.linear:
            out = out.unflatten(0, lead)
        return out

    def filtered(self, h: Tensor) -> Tensor:
        """Each channel by filters of its own; in a linear block a channel is a single number."""
        if self.linear:
            return self.dse(h[..., None]).squeeze(-1)
        return self.dse(h)


class Parts:
    r"""The names of a network's entries by what happens to them.

    $$ \theta^0 = (\theta_u^0, \theta_v^0) \tag{Alg. 1, line 1} $$
    """

    def __init__(self, net: nn.Module, unit: str, own_bias: bool = False):
        self.block_names = [name for name, module in net.named_modules() if isinstance(module, DSEBlock)]
        trained = list(dict(net.named_parameters()))
        statistics = [name for name in net.state_dict() if name not in trained]
        self.v = [name for name in trained if ".dse." in name or ".bn_dse." in name]  # theta_v
        if own_bias:
            self.v += [f"{block}.bias" for block in self.block_names if f"{block}.bias" in trained]
        self.u = [name for name in trained if name not in self.v]  # theta_u
        self.bn_dse = [name for name in statistics if ".bn_dse." in name]  # the client's; lodo sends copies
        self.bn_dfe = [name for name in statistics if ".bn_dse." not in name]  # averaged; other BNs' too
        owner = self.layer if unit == "layer" else (lambda name: name)
        self.u_layers = group_by(self.u, owner)  # {l: its names}, the layers of Eq. (8)
        self.v_layers = group_by(self.v, owner)  # and those of Eq. (9)

    def layer(self, name: str) -> str:
        """The block that an entry is in; outside the blocks its module."""
        for block in self.block_names:
            if name.startswith(block + "."):
                return block
        return name.rpartition(".")[0]


# The consistency term


def depth_weights(layers: int, beta: float) -> list[float]:
    """w_l of Eq. (7), l = 1..L; they sum to 1."""
    l = torch.arange(1, layers + 1, dtype=torch.float64)
    return torch.softmax(beta * l, 0).tolist()


def consistency(batch: list, glob: list, hat: list | None, beta: float, gamma: float = GAMMA):
    r"""L_Con of a batch, and the running statistics, which the next batch takes as `hat`.

    `batch`, `glob`, `hat`: (mean [T], variance [T]) of each block l. Without `hat` they start from `glob`.

    $$ \begin{aligned}
       \hat\mu_{k,b}^{(l)} &= \gamma\,\hat\mu_{k,b-1}^{(l)} + (1-\gamma)\,\mu_{k,b}^{(l)} \\
       \hat\sigma_{k,b}^{(l)2} &= \gamma\,\hat\sigma_{k,b-1}^{(l)2} + (1-\gamma)\,\sigma_{k,b}^{(l)2}
       \end{aligned} \tag{5} $$
    $$ \begin{aligned}
       \mathcal{L}_{\text{Con}}^{(l)} = {} & \frac{1}{d}\left\|\hat\mu_{k,b}^{(l)} - \mu_g^{(l)}\right\|^2 \\
       & + \left(\frac{\|\hat\sigma_{k,b}^{(l)2}\|_1 - \|\sigma_g^{(l)2}\|_1}{d}\right)^2
       \end{aligned} \tag{6} $$
    $$ \mathcal{L}_{\text{Con}} = \sum_{l=1}^{L} w_l\,\mathcal{L}_{\text{Con}}^{(l)},
       \qquad
       w_l = \frac{\exp(\beta l)}{\sum_{l'=1}^{L} \exp(\beta l')} \tag{7} $$
    """
    if hat is None:
        hat = glob
    loss, running = 0, []
    for l, w_l in enumerate(depth_weights(len(batch), beta)):
        mu_b, var_b = batch[l]  # Eq. (4)
        mu_g, var_g = glob[l]
        mu, var = hat[l]  # after the batch before
        mu_hat = gamma * mu + (1 - gamma) * mu_b  # Eq. (5)
        var_hat = gamma * var + (1 - gamma) * var_b
        center = (mu_hat - mu_g).square().mean()  # ||mu_hat - mu_g||^2 / d
        size = (var_hat.mean() - var_g.mean()).square()  # variances are >= 0: L1 norm / d is their mean
        l_con = center + size  # Eq. (6)
        loss = loss + w_l * l_con  # Eq. (7)
        running.append((mu_hat.detach(), var_hat.detach()))
    return loss, running


def bn_dfe_statistics(blocks: list) -> list[tuple[Tensor, Tensor]]:
    """The running statistics of each block's BN_DFE: as received they are (mu_g, var_g)."""
    return [(b.bn_dfe.running_mean.clone(), b.bn_dfe.running_var.clone()) for b in blocks]


def forget_batch(blocks: list) -> None:
    """Free the last batch's statistics, and with them its graph."""
    for b in blocks:
        b.statistics = None


class Client:
    keeps = ("bn_dse",)

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        self.parts = Parts(net, args.unit, args.own_bias)
        self.blocks = [module for module in net.modules() if isinstance(module, DSEBlock)]
        self.initial = pick(state(net), self.parts.bn_dse)
        self.bn_dse = {}  # own BN_DSE statistics; empty before the first training

    def theta(self, down: Payload) -> dict[str, Tensor]:
        """theta_k = (theta_u, theta_v,k) with the global BN_DFE statistics and the client's own of BN_DSE."""
        bn_dse = self.initial
        if self.data.unseen:
            bn_dse = down["bn_dse"]
        elif self.bn_dse:
            bn_dse = self.bn_dse
        return down["u"] | down["v"] | down["bn_dfe"] | bn_dse

    def train(self, down: Payload, t: int) -> Payload:
        r"""
        $$ i = 0, 1, \ldots, E-1 \tag{Alg. 1, line 6} $$
        $$ \mathcal{L}_k = \mathcal{L}_{\text{task}} + \lambda\,\mathcal{L}_{\text{Con}}
           \tag{Alg. 1, line 7} $$
        $$ \theta_{k,i+1}^t \leftarrow \theta_{k,i}^t - \eta_t \nabla\mathcal{L}_k(\theta_{k,i}^t)
           \tag{Alg. 1, line 8} $$
        $$ \theta_k^{t+1} = \theta_{k,E}^t \tag{Alg. 1, line 10} $$
        """
        args = self.args
        model = load(self.net, self.theta(down)).train()
        opt = sgd(model, args, t)
        glob, hat = bn_dfe_statistics(self.blocks), None  # model is self.net, these are its blocks
        log = defaultdict(list)
        for x, y in batches(self.data.train, args, t, self.k):  # line 6: x [B, C, H, W]; y [B]
            with autocast(args):
                z = model.features(x)  # [B, D]; leaves each block's statistics, Eq. (4)
                l_task = cross_entropy(model.classify(z), y)
            log["loss"].append(l_task.detach())
            l_con = 0
            if args.lambda_ and t >= args.con_from:
                l_con, hat = consistency([b.statistics for b in self.blocks], glob, hat, args.beta)
                log["consistency"].append(l_con.detach())
            loss = l_task + args.lambda_ * l_con  # line 7
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()  # line 8
            forget_batch(self.blocks)
        self.log = {name: torch.stack(values).mean() for name, values in log.items()}
        w = state(model)
        self.bn_dse = pick(w, self.parts.bn_dse)
        up = {"u": pick(w, self.parts.u), "v": pick(w, self.parts.v), "bn_dfe": pick(w, self.parts.bn_dfe)}
        if args.protocol == "lodo":
            up["bn_dse"] = self.bn_dse  # for the unseen client
        return up  # line 10

    def model(self, down: Payload) -> nn.Module:
        model = load(self.net, self.theta(down))
        if self.data.unseen and self.args.adapt_epochs:
            self.adapt(model)  # Alg. 3, before each test
        return model

    def adapt(self, model: Net) -> None:
        r"""Alg. 3 on the client's own test images, without labels.

        $$ \theta_u,\ \mathrm{BN}_{\text{DFE}} \text{ fixed} \tag{Alg. 3, line 1} $$
        $$ (\mathbb{X}, y) \in \mathcal{D}_{\text{target}} \tag{Alg. 3, lines 2-3} $$
        $$ \mathcal{M}(\mathbb{X}) \tag{Alg. 3, line 4} $$
        $$ \mathcal{L}_{\text{Con}}\left(\{\mathbb{X}_k^{(l)}\}\right) \tag{Alg. 3, lines 5-6} $$
        $$ \theta_v \leftarrow \theta_v - \eta \nabla_{\theta_v}\mathcal{L}_{\text{Con}}
           \tag{Alg. 3, line 7} $$
        """
        args = dataclasses.replace(self.args, epochs=self.args.adapt_epochs, steps=0, augment="none")
        model.train()
        adapting = [b.bn_dse for b in self.blocks]
        for module in model.modules():  # line 1: BN_DFE, and any BN outside the blocks, use what they have
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)) and module not in adapting:
                module.eval()
        theta_v = list(pick(dict(model.named_parameters()), self.parts.v).values())
        glob, hat = bn_dfe_statistics(self.blocks), None
        for x, _ in batches(self.data.test, args, 0, self.k):  # lines 2-3; labels are not looked at
            with autocast(args):
                model.features(x)  # line 4
            l_con, hat = consistency([b.statistics for b in self.blocks], glob, hat, args.beta)  # lines 5-6
            gradients = torch.autograd.grad(l_con, theta_v)
            with torch.no_grad():
                for p, gradient in zip(theta_v, gradients):
                    p.sub_(gradient, alpha=args.adapt_lr)  # line 7
        forget_batch(self.blocks)
        if not torch.isfinite(flatten(theta_v)).all():
            raise UserError(f"the adaptation to {self.data.name} diverges: lower --adapt-lr or "
                            "--adapt-epochs")


# The two aggregations


def consensus(delta: Tensor) -> Tensor:
    r"""The clients' updates delta_k of a layer, [N, P] -> the aggregated update [P].

    Why a least norm is a maximal consensus: of all directions, that of the least point in the hull of the d_k
    has the largest inner product with the d_k that agrees least with it.

    $$ \begin{aligned}
       \bar{d}_u^{(l)} &= \frac{1}{N}\sum_{k} \|\Delta\theta_{u,k}^{(l)}\|_2,
       \qquad
       \mathbb{d}_{u,k}^{(l)} = \frac{\Delta\theta_{u,k}^{(l)}}{\|\Delta\theta_{u,k}^{(l)}\|_2} \\
       \mathbb{u}^{(l)} &=
       \underset{\mathbb{u}}{\mathrm{argmin}} \left\|\sum_{k} u_k\,\mathbb{d}_{u,k}^{(l)}\right\|_2^2 \\
       \Delta\theta_u^{(l)} &= \bar{d}_u^{(l)} \sum_{k} u_k^{(l)}\,\mathbb{d}_{u,k}^{(l)}
       \end{aligned} \tag{8} $$

    The u_k are >= 0 and sum to 1, as in MGDA, which the paper cites: as printed, u = 0 would do. An update of
    norm 0 has no direction. It counts in the mean norm but is no corner of the hull.
    """
    exact = delta.to(torch.float64, copy=True)  # [N, P]; becomes d
    norms = exact.norm(dim=1, keepdim=True)  # ||delta_k||, [N, 1]
    d_bar = norms.mean()
    d = exact.div_(norms.where(norms > 0, math.inf))  # d_k, [N, P]; 0 where the norm is 0
    u = min_norm(d)  # [N]: argmin ||sum_k u_k d_k||^2
    return (d_bar * (u @ d)).to(delta)


def min_norm(d: Tensor) -> Tensor:
    """u [N] on the simplex that minimizes ||sum_k u_k d_k||^2, of directions d [N, P]: the point of least
    norm in their hull. A d_k of zeros has u_k = 0; if all are, so are all u_k.

    With D = [d_1 ... d_N] and R'R = D'D it is ||R u||^2. Non-negative least squares finds the v >= 0 with the
    least ||R v||^2 + (1'v - 1)^2. Write v = s u with 1'u = 1, and q = ||R u||^2. The best s is 1 / (1 + q),
    where the sum is q / (1 + q). It grows with q, so the best v has the u with the least q: u = v / 1'v.
    """
    from scipy.optimize import nnls  # a quarter of a second, which --help does not wait for
    products = (d @ d.T).cpu()  # D'D, [N, N]; waits for a GPU
    moved = products.diagonal() > 0
    u = torch.zeros_like(products[0])  # [N]
    N = int(moved.sum())
    if N == 0:
        return u.to(d)
    values, vectors = torch.linalg.eigh(products[moved][:, moved])
    R = values.clamp_min(0).sqrt()[:, None] * vectors.T  # [N, N], R'R = D'D
    ones = torch.ones(1, N, dtype=torch.float64)  # 1'
    A = torch.cat([R, ones])  # [N + 1, N], [R; 1']
    b = torch.tensor([0.0] * N + [1.0], dtype=torch.float64)  # [N + 1], [0; 1]
    v, _ = nnls(A.numpy(), b.numpy())  # the v >= 0 with the least ||A v - b||^2
    u[moved] = torch.from_numpy(v / v.sum())
    return u.to(d)


def personalize(V: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    r"""The clients' theta_v,k of a layer, [N, P] -> the next ones, [N, P], by self-attention; and the
    attention, [N, N], whose row k weighs all clients for client k.

    $$ \begin{aligned}
       \mathbb{V}_l &= \left[\theta_{v,1}^{(l)}, \ldots, \theta_{v,N}^{(l)}\right]^\top \\
       \mathbb{Q}_l = \mathbb{K}_l &= \left[\frac{\mathbb{V}_{lk}}{\|\mathbb{V}_{lk}\|_2}\right]_{k=1..N} \\
       \mathbb{V}_l^{\text{next}} &=
       \mathrm{softmax}\left(\frac{\mathbb{Q}_l \mathbb{K}_l^\top}{\tau}\right) \mathbb{V}_l
       \end{aligned} \tag{9} $$
    """
    exact = V.double()  # a small tau magnifies rounding
    Q = K = exact / exact.norm(dim=1, keepdim=True).clamp_min(1e-12)
    attention = torch.softmax(Q @ K.T / tau, dim=1)
    return attention.to(V) @ V, attention


def rows(uploads: dict[int, Payload], part: str, names: list[str]) -> Tensor:
    """The entries `names` of a part of each upload as one row: [N, P]."""
    vectors = []
    for up in uploads.values():
        vectors.append(flatten([up[part][name] for name in names]))
    return torch.stack(vectors)


def entries(row: Tensor, names: list[str], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """A row [P] as the entries `names` again, in the shapes of `like`."""
    pieces = row.split([like[name].numel() for name in names])
    tensors = {}
    for name, piece in zip(names, pieces):
        tensors[name] = piece.view(like[name].shape).clone()  # a view would be saved with the whole row
    return tensors


class Server:
    keeps = ("u", "v", "bn_dfe", "bn_dse")

    def __init__(self, args: Args, net: nn.Module, clients: int):
        r"""
        $$ \theta_{v,k}^0 = \theta_v^0, \quad k \in [N] \tag{Alg. 1, line 2} $$
        """
        self.args = args
        self.parts = Parts(net, args.unit, args.own_bias)
        w = state(net)
        self.u = pick(w, self.parts.u)
        self.bn_dfe = pick(w, self.parts.bn_dfe)
        self.v = {k: pick(w, self.parts.v) for k in range(clients)}  # line 2
        self.bn_dse = {k: pick(w, self.parts.bn_dse) for k in range(clients)}

    def download(self, k: int) -> Payload:
        r"""An unseen client has no theta_v of its own: it gets means over all clients.

        $$ \theta_k^t = (\theta_u^t, \theta_{v,k}^t) \tag{Alg. 1, line 4} $$
        """
        if k in self.v:
            return {"u": self.u, "bn_dfe": self.bn_dfe, "v": self.v[k]}
        p = uniform(len(self.v))
        v = average(list(self.v.values()), p)
        bn_dse = average(list(self.bn_dse.values()), p)
        return {"u": self.u, "bn_dfe": self.bn_dfe, "v": v, "bn_dse": bn_dse}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        r"""Layer by layer; BN_DFE's statistics are averaged with equal weights ("directly", Sec. 4.3.2).

        $$ \theta_u^{t+1} = \theta_u^t + \Delta\theta_u, \qquad
           [\theta_{v,k}^{t+1}]^\top = [\theta_{v,k,\text{next}}]^\top \tag{Alg. 1, line 12} $$
        """
        for names in self.parts.u_layers.values():
            old = flatten([self.u[name] for name in names])  # [P]
            delta = rows(uploads, "u", names).sub_(old)  # [N, P]
            if self.args.consensus:
                step = consensus(delta)  # Eq. (8)
            else:
                step = delta.mean(0)
            self.u = self.u | entries(old + step, names, self.u)
        for k, up in uploads.items():
            self.v[k] = up["v"]
            if self.args.protocol == "lodo":
                self.bn_dse[k] = up["bn_dse"]
        self.log = {}
        if self.args.similarity:
            for_itself = []  # of each layer the mean weight of a client for itself; 1/N is a plain mean
            for names in self.parts.v_layers.values():
                V_next, attention = personalize(rows(uploads, "v", names), self.args.tau)  # Eq. (9): [N, P]
                for_itself.append(attention.diagonal().mean())
                for k, theta_v in zip(uploads, V_next):  # row by row, in the order of the uploads
                    self.v[k] = self.v[k] | entries(theta_v, names, self.v[k])
            self.log = {"attention": torch.stack(for_itself).mean()}
        self.bn_dfe = average([up["bn_dfe"] for up in uploads.values()], uniform(len(uploads)))


# The networks: of the paper, and layers replaced in others


def build(args: Args, channels: int, classes: int) -> Net:
    """The network of `--backbone` in blocks."""
    if args.backbone == "alexnet_bn" and channels == 3 and args.weights == "none":
        body = nn.Sequential(  # Table A6, layers 1 to 8; 7 and 8 are linear
            DSEBlock(args, 3, 64, 11, 4, 2), nn.MaxPool2d(3, 2),
            DSEBlock(args, 64, 192, 5, 1, 2), nn.MaxPool2d(3, 2),
            DSEBlock(args, 192, 384, 3, 1, 1),
            DSEBlock(args, 384, 256, 3, 1, 1),
            DSEBlock(args, 256, 256, 3, 1, 1), nn.MaxPool2d(3, 2),
            nn.AdaptiveAvgPool2d(6), nn.Flatten(), DSEBlock(args, 9216, 1024), DSEBlock(args, 1024, 1024))
        return Net(body, 1024, classes)
    if args.backbone == "smallcnn_bn" and args.weights == "none":
        body = nn.Sequential(  # the layers of common.smallcnn_bn (ours)
            DSEBlock(args, channels, 32, 3, 1, 1), nn.MaxPool2d(2),
            DSEBlock(args, 32, 64, 3, 1, 1), nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(7), nn.Flatten(), DSEBlock(args, 3136, 64))
        return Net(body, 64, classes)
    named = ":" in args.backbone  # FILE.py:FUNCTION, torchvision:NAME, timm:NAME
    if named or args.backbone in ("resnet18", "resnet50", "resnet18_3x3", "vit_b8"):
        net = backbone(args, channels, classes)
        replace_layers(args, net)
        if any(isinstance(module, DSEBlock) for module in net.modules()):
            return net
    raise UserError("fdse builds alexnet_bn (colour images), smallcnn_bn, resnet18, resnet50, resnet18_3x3 "
                    "and vit_b8, the first two without --weights, and others that are built as torchvision's "
                    "ResNets or ViTs, or as nn.Sequential with Conv2d, BatchNorm2d, ReLU; not --backbone "
                    f"{args.backbone} --weights {args.weights} on {args.dataset}", 2)


def replace_layers(args: Args, net: Net) -> None:
    """Blocks instead of what a network has of Sec. A8.1's layers, or of Table A6's."""
    if isinstance(net.body, nn.Sequential):
        net.body = nn.Sequential(*replaced_layers(args, list(net.body)))
    elif hasattr(net.body, "layer4") or hasattr(getattr(net.body, "encoder", None), "layers"):
        replace_last_operators(args, net.body)


def replaced_layers(args: Args, layers: list[nn.Module]) -> list[nn.Module]:
    """As Table A6 of AlexNet: each convolution or linear layer with BN and ReLU behind it becomes a block."""
    replaced = []
    while layers:
        kinds = [type(layer) for layer in layers[:3]]
        layer, count = layers[0], 3
        if kinds == [nn.Linear, nn.BatchNorm1d, nn.ReLU]:
            layer = DSEBlock(args, layer.in_features, layer.out_features)
        elif kinds == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU] and is_plain(layer):
            layer = DSEBlock(args, layer.in_channels, layer.out_channels, layer.kernel_size[0],
                             layer.stride[0], layer.padding[0])
        else:
            count = 1
        replaced.append(layer)
        layers = layers[count:]
    return replaced


def is_plain(conv: nn.Conv2d) -> bool:
    """Whether a block can stand for a convolution: square, one group, zeros around it. Others stay."""
    same = all(len(set(pair)) == 1 for pair in (conv.kernel_size, conv.stride, conv.padding))
    return same and conv.groups == 1 and conv.dilation == (1, 1) and conv.padding_mode == "zeros"


def replace_last_operators(args: Args, body: nn.Module) -> None:
    """Sec. A8.1: the last convolution, with its BN, of each residual block, or the last linear layer of each
    feed-forward layer, becomes a block; without the last ReLU, as both end in an addition."""
    if not hasattr(body, "layer4"):
        for layer in body.encoder.layers:
            linear = layer.mlp[3]  # of torchvision's Linear, GELU, Dropout, Linear, Dropout
            layer.mlp[3] = DSEBlock(args, linear.in_features, linear.out_features, last_relu=False)
        return
    for residual in (*body.layer1, *body.layer2, *body.layer3, *body.layer4):
        last = 3 if hasattr(residual, "conv3") else 2
        conv = getattr(residual, f"conv{last}")
        block = DSEBlock(args, conv.in_channels, conv.out_channels, conv.kernel_size[0], 1, conv.padding[0],
                         last_relu=False)
        setattr(residual, f"conv{last}", block)
        setattr(residual, f"bn{last}", nn.Identity())


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
