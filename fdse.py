"""FDSE: Federated Learning with Domain Shift Eraser (Wang et al., CVPR 2025).

    python fdse.py --dataset officecaltech                                  # the paper's setting
    python fdse.py --dataset officecaltech --scale laptop                   # minutes on two cores
    python fdse.py --dataset officecaltech --protocol lodo --target dslr    # an unseen domain, Table 2

Each layer is split into a domain-agnostic feature extractor (DFE), shared by all, and a domain-specific skew
eraser (DSE), one for each client. Server keeps theta_u (DFE modules, BN_DFE scale and shift, head), BN_DFE
statistics, and of each client theta_v,k (DSE convolutions, BN_DSE scale and shift). Client k keeps its BN_DSE
statistics. Down: theta_u, BN_DFE statistics, theta_v,k. Up: the same, trained. If a domain is left out,
BN_DSE's statistics go up too, and its client gets their mean and that of theta_v.

Paper                                                            This file
Eqs. (2)-(3), Table A7    a layer in two modules                 DSEBlock
Table A6, Sec. A8.1       the networks                           build
Eq. (4)                   statistics of a batch                  BatchStatistics
Eqs. (5)-(7)              consistency regularization, C          consistency
Eq. (8)                   consensus maximization, A              consensus, min_norm
Eq. (9)                   similarity-aware personalization, B    personalize
Alg. 1                    lines 1; 2; 3 and 5                    Parts; Server.__init__; common.rounds
Alg. 1                    lines 4; 6-10; 12                      Server.download; Client.train; Server.update
Alg. 3                    adaptation without labels              Client.adapt
Symbols as in the paper: S, T channels in and out, G, lambda, tau, beta, theta_u, theta_v, N clients; mu_g,
var_g global and mu_hat, var_hat running statistics of the input of BN_DFE; gamma = 1 - BN momentum = 0.9.
Table 3: without A --no-consensus, B --no-similarity, C --lambda 0. Table 2: "- align" is --adapt-epochs 0.
Left out: nothing (Alg. 2 is FedBN's).

Where paper, official code (WwZzz/FDSE_CVPR25) and this file differ (in full: docs/methods/fdse.md). The first
version of the code, dd266a2, has the paper's ReLU, padding of layers 3-5, squares in L_Con and the megabytes
of Table 4; c0bd90b rewrote it. --variant first and official take their sides of all rows but the last two.
What the paper leaves open is as in dd266a2, or, if outside the paper's grid, as in c0bd90b; * are ours.
  what                    paper          dd266a2      c0bd90b        here           flag
  L_Con                   Eq. (6)        its squares  KL-like        Eq. (6)        --con-loss
  its first round *       not said       the second   the second     the first      --con-from 1
  lambda *                .01, .1 or 1   10           .05, PACS .5   .1             --lambda
  beta; tau               .001; a grid   .5; 10       .05, .001; .5  .001; .5       --beta, --tau
  ReLU after BN_DSE       yes, Eq. (3)   yes          no             yes            --no-dse-relu
  padding, layers 1; 3-5  2; 1, Table A6 5; 1         2; 0           2; 1           --stem-padding, --no-pad
  bias of a block *       not said       theta_v      theta_u        DSE conv.'s    --block-bias, --own-bias
  identity in FC blocks   yes, A7        no           yes            yes            --no-fc-identity
  "layer", Eqs. (8)-(9) * not said       a tensor     a tensor       a module       --unit tensor
  model that is tested *  not said       trained      trained        aggregated     --evaluated trained
  lr and weight decay *   .998; -        .9998; 1e-3  .9998; 1e-3    .998; 0        --lr-decay, --weight-decay
  image; E on DomainNet   224; 5         256; 1       256; 1         224; 5         --image-size, --epochs
  lr                      not said       .1, PACS .05 .1, PACS .05   .1, PACS .05   --lr
  adaptation *            several epochs none         none           5 epochs, lr 1 --adapt-epochs, -lr
"""

import dataclasses
import math
from dataclasses import dataclass

import common
from common import (ClientData, Net, Payload, Stop, arg, autocast, average, backbone, batches, flatten,
                    group_by, load, parse, pick, run, sgd, state, uniform)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    variant: str = arg("paper", "choices where paper and official code differ; official: the code as it is, "
                                "first: its first version", choices=("paper", "official", "first"))
    G: int = arg(2, "channels that each DFE channel becomes, Eq. (3); 1: the identity alone", low=1)
    lambda_: float = arg(0.1, "weight of L_Con in the loss, Alg. 1 line 7; 0: Table 3 without C", low=0)
    beta: float = arg(0.001, "growth of L_Con's weights with depth, Eq. (7); 0: all layers alike", low=0)
    tau: float = arg(0.5, "temperature of Eq. (9); towards 0 each client keeps its own theta_v", low=0.0001)
    consensus: bool = arg(True, "Table 3's A: aggregate theta_u by Eq. (8), else by the plain mean")
    similarity: bool = arg(True, "Table 3's B: aggregate theta_v by Eq. (9), else leave it to its client")
    unit: str = arg("layer", "a 'layer' of Eqs. (8) and (9): all tensors of a module, or each tensor",
                    choices=("layer", "tensor"))
    con_loss: str = arg("eq6", "L_Con: Eq. (6), or that of the official code, or of its first version",
                        choices=("eq6", "official", "first"))
    con_from: int = arg(0, "first round with L_Con, counted from 0", low=0)
    dse_relu: bool = arg(True, "ReLU between BN_DSE and the DSE convolution, Eq. (3)")
    stem_padding: int = arg(2, "padding of AlexNet's first layer, Table A6", low=0)
    pad: bool = arg(True, "padding of 1 in AlexNet's layers 3 to 5, Table A6; else images need 160 pixels")
    block_bias: bool = arg(False, "one bias before BN_DFE instead of one in the DSE convolution")
    own_bias: bool = arg(False, "with --block-bias: the client's own, in theta_v, instead of in theta_u")
    fc_identity: bool = arg(True, "keep one identity channel of G in linear blocks too")
    evaluated: str = arg("aggregated", "what is tested: aggregated (the server's) or trained (the client's "
                                       "own model)", choices=("aggregated", "trained"))
    adapt_epochs: int = arg(5, "lodo: epochs of Algorithm 3 on the target's images; 0: no adaptation", low=0,
                            at_test=True)
    adapt_lr: float = arg(1.0, "lodo: learning rate of Algorithm 3; 0: BN_DSE's statistics alone", low=0,
                          at_test=True)

    def refuse(self) -> None:
        if self.backbone == "alexnet_bn" and not self.pad and self.image_size < 160:
            raise Stop("without padding in layers 3 to 5 (--no-pad, --variant official) images need 160 "
                       f"pixels, not {self.image_size}: give --image-size 160, or --pad", 2)


# FDSE, Sec. 5.1 and A7: batch 50, 500 rounds, E of 1 (Office) and 5 (PACS, DomainNet), decay 0.998, clipping
# at 10, 224x224; lr and tau are the code's (config/*/fdse.yml, for DomainNet config/domainnet.yml), lambda is
# ours, from the paper's grid. Table 2 tests the target's 10%.
FDSE = dict(backbone="alexnet_bn", image_size=224, rounds=500, batch_size=50, lr_decay=0.998, clip=10.0,
            target_part="test")
MNIST = dict(protocol="lodo", rounds=300, steps=5, batch_size=64, lr=0.05, eval_every=10)  # ours
PAPER = {
    "digits": dict(rounds=60, lr=0.05, batch_size=32),  # ours
    "rotatedmnist": MNIST,
    "rotatedmnist-t10k": MNIST,
    "officecaltech": dict(**FDSE, epochs=1, lr=0.1),
    "pacs": dict(**FDSE, epochs=5, lr=0.05),
    "domainnet10": dict(**FDSE, epochs=5, lr=0.1),
}
CODE = dict(con_from=1, block_bias=True, unit="tensor", evaluated="trained", weight_decay=1e-3,
            lr_decay=0.9998)
OFFICIAL = dict(**CODE, con_loss="official", dse_relu=False, pad=False)
FIRST = dict(**CODE, con_loss="first", own_bias=True, fc_identity=False, stem_padding=5, lambda_=10.0,
             beta=0.5, tau=10.0)
VARIANTS = {
    "official": {  # lambda and beta: config/*/fdse.yml; for DomainNet there is none, so the code's defaults
        "digits": OFFICIAL,
        "rotatedmnist": OFFICIAL,
        "rotatedmnist-t10k": OFFICIAL,
        "officecaltech": dict(**OFFICIAL, image_size=256, lambda_=0.05, beta=0.05),
        "pacs": dict(**OFFICIAL, image_size=256, lambda_=0.5),
        "domainnet10": dict(**OFFICIAL, image_size=256, lambda_=0.01, beta=0.1, epochs=1),
    },
    "first": {  # lambda, beta and tau: the code's defaults, as there is no file of settings for FDSE
        "digits": FIRST,
        "rotatedmnist": FIRST,
        "rotatedmnist-t10k": FIRST,
        "officecaltech": dict(**FIRST, image_size=256),
        "pacs": dict(**FIRST, image_size=256),
        "domainnet10": dict(**FIRST, image_size=256, epochs=1),
    },
}


# The networks and their parts


class DSEBlock(nn.Module):
    """A layer S -> T with its BN and ReLU, decomposed (Table A7): x [B, S, h, w] -> [B, T, h', w']. A block
    without a kernel is a linear layer: x [..., S] -> [..., T]."""

    def __init__(self, args: Args, S: int, T: int, kernel: int = 0, stride: int = 1, padding: int = 0,
                 dw: int = 3, last_relu: bool = True):
        super().__init__()
        self.T, self.linear = T, kernel == 0
        self.dse_relu, self.last_relu = args.dse_relu, last_relu
        self.identity = args.fc_identity or not self.linear
        T_DFE = math.ceil(T / args.G)
        filters = args.G  # of the DSE convolution, for each channel of X_DFE
        if self.identity:
            filters -= 1  # one of the G channels is X_DFE's own (Sec. A7.2)
        if self.linear:
            self.dfe = nn.Linear(S, T_DFE)
            Conv, BatchNorm, dw = nn.Conv1d, nn.BatchNorm1d, 1  # dw of layers 7 and 8 in Table A6
        else:
            self.dfe = nn.Conv2d(S, T_DFE, kernel, stride, padding)
            Conv, BatchNorm = nn.Conv2d, nn.BatchNorm2d
        self.bn_dse = BatchNorm(T_DFE)
        self.dse = self.bias = None
        if filters:
            self.dse = Conv(T_DFE, T_DFE * filters, dw, 1, dw // 2, groups=T_DFE, bias=not args.block_bias)
        if args.block_bias:
            self.bias = nn.Parameter(torch.zeros(T))
        self.bn_dfe = BatchNorm(T)
        adapts = args.protocol == "lodo" and args.adapt_epochs > 0
        self.watch = args.lambda_ > 0 or adapts  # only L_Con needs the statistics
        self.statistics = None  # of the last batch in training, Eq. (4)

    def forward(self, x: Tensor) -> Tensor:
        lead = x.shape[:-1]
        if self.linear:
            x = x.flatten(0, -2)  # the tokens of all images are one batch
        x_dfe = self.dfe(x)  # X_DFE, Eq. (2): [B, T_DFE(, h', w')]
        h = self.bn_dse(x_dfe)
        if self.dse_relu:
            h = relu(h)
        parts = []
        if self.identity:
            parts.append(h)
        if self.dse is not None and self.linear:
            parts.append(self.dse(h[..., None]).squeeze(-1))
        elif self.dse is not None:
            parts.append(self.dse(h))  # X_DSE, Eq. (3): each channel by filters of its own
        out = torch.cat(parts, 1)[:, :self.T]  # Concat, Eq. (3): [B, T(, h', w')]
        if self.bias is not None:
            out = out + per_channel(self.bias, out)
        if self.training and self.watch:
            self.statistics = BatchStatistics.apply(out)
        out = self.bn_dfe(out)
        if self.last_relu:
            out = relu(out, inplace=True)  # X_out, Eq. (3)
        if self.linear:
            out = out.unflatten(0, lead)
        return out


def per_channel(v: Tensor, x: Tensor) -> Tensor:
    """v [T] in the shape in which it goes with the channels of x [B, T(, h, w)]."""
    return v.view([-1] + [1] * (x.dim() - 2))


def build(args: Args, channels: int, classes: int) -> Net:
    """The network of `--backbone` with DSE blocks. Stop if there is none."""
    if args.backbone == "alexnet_bn" and channels == 3 and args.weights == "none":
        p = int(args.pad)
        body = nn.Sequential(  # Table A6, layers 1 to 8; 7 and 8 are linear
            DSEBlock(args, 3, 64, 11, 4, args.stem_padding), nn.MaxPool2d(3, 2),
            DSEBlock(args, 64, 192, 5, 1, 2), nn.MaxPool2d(3, 2),
            DSEBlock(args, 192, 384, 3, 1, p),
            DSEBlock(args, 384, 256, 3, 1, p),
            DSEBlock(args, 256, 256, 3, 1, p), nn.MaxPool2d(3, 2),
            nn.AdaptiveAvgPool2d(6), nn.Flatten(), DSEBlock(args, 9216, 1024), DSEBlock(args, 1024, 1024))
        return Net(body, 1024, classes)
    if args.backbone == "smallcnn_bn" and args.weights == "none":
        body = nn.Sequential(  # the layers of common.smallcnn_bn (ours)
            DSEBlock(args, channels, 32, 3, 1, 1), nn.MaxPool2d(2),
            DSEBlock(args, 32, 64, 3, 1, 1), nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(7), nn.Flatten(), DSEBlock(args, 3136, 64))
        return Net(body, 64, classes)
    if args.backbone in ("resnet18", "resnet50", "resnet18_3x3", "vit_b8"):
        net = backbone(args, channels, classes)
        replace_last_operators(args, net.body)
        return net
    raise Stop("fdse builds alexnet_bn (colour images), smallcnn_bn, resnet18, resnet50, resnet18_3x3 and "
               f"vit_b8, the first two without --weights; not --backbone {args.backbone} --weights "
               f"{args.weights} on {args.dataset}", 2)


def replace_last_operators(args: Args, body: nn.Module) -> None:
    """Sec. A8.1: the last convolution, with its BN, of each residual block, or the last linear layer of each
    feed-forward layer, becomes a DSE block; without the last ReLU, as both end in an addition."""
    if args.backbone == "vit_b8":
        for layer in body.encoder.layers:
            linear = layer.mlp[3]
            layer.mlp[3] = DSEBlock(args, linear.in_features, linear.out_features, last_relu=False)
        return
    for residual in (*body.layer1, *body.layer2, *body.layer3, *body.layer4):
        last = 3 if hasattr(residual, "conv3") else 2
        conv = getattr(residual, f"conv{last}")
        block = DSEBlock(args, conv.in_channels, conv.out_channels, conv.kernel_size[0], 1, conv.padding[0],
                         last_relu=False)
        setattr(residual, f"conv{last}", block)
        setattr(residual, f"bn{last}", nn.Identity())


class Parts:
    """Alg. 1, line 1: the names of a network's entries by what happens to them."""

    def __init__(self, net: nn.Module, unit: str, own_bias: bool = False):
        self.blocks = [name for name, module in net.named_modules() if isinstance(module, DSEBlock)]
        trained = list(dict(net.named_parameters()))
        statistics = [name for name in net.state_dict() if name not in trained]
        self.v = [name for name in trained if ".dse." in name or ".bn_dse." in name]  # theta_v
        if own_bias:
            self.v += [name for name in trained if name.endswith(".bias") and name[:-5] in self.blocks]
        self.u = [name for name in trained if name not in self.v]  # theta_u
        self.bn_dse = [name for name in statistics if ".bn_dse." in name]  # they stay with the client
        self.bn_dfe = [name for name in statistics if ".bn_dse." not in name]  # averaged; other BNs' too
        owner = self.layer if unit == "layer" else str
        self.u_layers = group_by(self.u, owner)  # {l: its names}, the layers of Eq. (8)
        self.v_layers = group_by(self.v, owner)  # and those of Eq. (9)

    def layer(self, name: str) -> str:
        """The block that an entry is in; outside the blocks its module."""
        for block in self.blocks:
            if name.startswith(block + "."):
                return block
        return name.rpartition(".")[0]


# The terms of the objective


class BatchStatistics(torch.autograd.Function):
    """x [B, T(, h, w)] -> mean [T] and biased variance [T] of each channel over batch and positions: Eq. (4).

    The forward pass takes them from the BN kernel and the backward pass is one affine map of x, rounded to
    x's precision. With torch.var_mean a training step takes 1.3 to 1.8 times as long (one thread; AlexNet at
    160 and 224 pixels and the digits' network, fp32 and bf16). In bf16 the error of the gradient is below 1%
    while a channel's mean is below 5 of its deviations.
    """

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


def depth_weights(layers: int, beta: float) -> list[float]:
    """w_l of Eq. (7), l = 1..L; they sum to 1."""
    l = torch.arange(1, layers + 1, dtype=torch.float64)
    return torch.softmax(beta * l, 0).tolist()


def consistency(batch: list, glob: list, hat: list | None, beta: float, gamma: float = 0.9):
    """L_Con of Eqs. (5)-(7), and the running statistics, which the next batch takes as `hat` (None: start
    from `glob`). `batch`, `glob`, `hat`: for each block l its (mean [T], variance [T])."""
    if hat is None:
        hat = glob
    loss, running = 0, []
    for l, w in enumerate(depth_weights(len(batch), beta)):
        mu_b, var_b = batch[l]  # Eq. (4)
        mu_g, var_g = glob[l]
        mu, var = hat[l]
        mu_hat = gamma * mu + (1 - gamma) * mu_b  # Eq. (5)
        var_hat = gamma * var + (1 - gamma) * var_b
        center = (mu_hat - mu_g).square().mean()  # ||mu_hat - mu_g||^2 / d
        size = (var_hat.mean() - var_g.mean()).square()  # variances are >= 0: L1 norm / d is their mean
        l_con = center + size  # Eq. (6)
        loss = loss + w * l_con  # Eq. (7)
        running.append((mu_hat.detach(), var_hat.detach()))
    return loss, running


def consistency_official(batch: list, glob: list, hat: tuple | None, beta: float, gamma: float = 0.9):
    """L_Con of the official code: mean and variance over a layer's channel means, and one running pair that
    goes from layer to layer and on to the next batch."""
    loss = 0
    for l, w in enumerate(depth_weights(len(batch), beta)):
        mu_b, _ = batch[l]
        mu_g, var_g = glob[l]
        mean, var = mu_b.mean(), mu_b.var()
        if hat is not None:
            mean = gamma * hat[0] + (1 - gamma) * mean
            var = gamma * hat[1] + (1 - gamma) * var
        hat = mean, var
        mean_part = ((mu_g.square() - mean.square()) / (2 * var)).mean()
        variance_part = 0.5 * (torch.log(var / (var_g + 1e-8)) + var_g / (var + 1e-8)).mean()
        loss = loss + w * (mean_part + variance_part)
    return loss, (mean.detach(), var.detach())


def consistency_first(batch: list, glob: list, hat: list, beta: float, gamma: float = 0.9):
    """L_Con of the official code's first version: the squares of Eq. (6), but of the batch it takes mean and
    variance over a layer's channel means, and `hat` are BN_DFE's running statistics, which have the batch
    already."""
    loss = 0
    for l, w in enumerate(depth_weights(len(batch), beta)):
        mu_b, _ = batch[l]
        mu_g, var_g = glob[l]
        mu, var = hat[l]
        mu_hat = gamma * mu + (1 - gamma) * mu_b.mean()
        var_hat = gamma * var + (1 - gamma) * mu_b.var()
        center = (mu_hat - mu_g).square().mean()
        size = (var_hat.mean() - var_g.mean()).square()
        loss = loss + w * (center + size)
    return loss, hat


CONSISTENCY = {"eq6": consistency, "official": consistency_official, "first": consistency_first}


# The two aggregations


def min_norm(gram: Tensor) -> Tensor:
    """u [N] on the simplex that minimizes u' gram u: the min-norm point of the hull of N vectors.

    For v = s u the sum ||R v||^2 + (1'v - 1)^2, with R'R = gram, is smallest, over s, at q/(1+q) with
    q = ||R u||^2, which grows with q: so non-negative least squares of [R; 1'] v = [0; 1], an active-set
    method, has the direction of u.
    """
    from scipy.optimize import nnls  # a quarter of a second, which --help does not wait for
    N = len(gram)
    values, vectors = torch.linalg.eigh(gram.cpu())
    R = values.clamp_min(0).sqrt()[:, None] * vectors.T
    ones = torch.ones(1, N, dtype=torch.float64)
    v, _ = nnls(torch.cat([R, ones]).numpy(), [0.0] * N + [1.0])
    return torch.from_numpy(v / v.sum())


def consensus(delta: Tensor) -> Tensor:
    """The clients' updates delta_k of a layer, [N, P] -> the aggregated update [P]: Eq. (8).

    The unit vectors d_k = delta_k / ||delta_k|| are never formed: the argmin needs their products only, and
    the sum is one over the delta_k. An update of norm 0 has no direction: it counts in the mean norm but is
    no corner of the hull (it would stop the layer for everybody).
    """
    gram = 0  # delta_j . delta_k, [N, N], in float64; a float64 copy of all updates could fill the memory
    for columns in delta.split(1 << 20, dim=1):
        columns = columns.double()
        gram = gram + columns @ columns.T
    gram = gram.cpu()  # the host waits for the device here, once in a layer; the rest is a few numbers
    norms = gram.diagonal().sqrt()  # ||delta_k||, [N]
    d_bar = norms.mean()
    moved = norms > 0
    if not moved.any():
        return torch.zeros_like(delta[0])
    d_products = gram[moved][:, moved] / torch.outer(norms[moved], norms[moved])  # d_j . d_k
    u = min_norm(d_products).to(gram)  # argmin ||sum_k u_k d_k||^2
    weights = torch.zeros_like(norms)
    weights[moved] = d_bar * u / norms[moved]
    return weights.to(delta) @ delta  # d_bar sum_k u_k d_k


def personalize(V: Tensor, tau: float) -> Tensor:
    """The clients' theta_v,k of a layer, [N, P] -> the next ones, [N, P]: self-attention, Eq. (9)."""
    exact = V.double()  # a small tau magnifies rounding
    Q = K = exact / exact.norm(dim=1, keepdim=True).clamp_min(1e-12)
    attention = torch.softmax(Q @ K.T / tau, dim=1)  # [N, N]; row k is for client k
    return attention.to(V) @ V  # theta_v,k,next, Eq. (9)


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


class Client:
    keeps = ("bn_dse", "trained")

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        self.parts = Parts(net, args.unit, args.own_bias)
        self.blocks = [module for module in net.modules() if isinstance(module, DSEBlock)]
        self.initial = pick(state(net), self.parts.bn_dse)
        self.bn_dse = {}  # own BN_DSE statistics; empty before the first training
        self.trained = {}  # own model after local training, only for --evaluated trained

    def theta(self, down: Payload) -> dict[str, Tensor]:
        """theta_k = (theta_u, theta_v,k) with the global BN_DFE statistics and the client's own of BN_DSE."""
        bn_dse = self.initial
        if self.data.unseen:
            bn_dse = down["bn_dse"]
        elif self.bn_dse:
            bn_dse = self.bn_dse
        return down["u"] | down["v"] | down["bn_dfe"] | bn_dse

    def bn_dfe_statistics(self) -> list[tuple[Tensor, Tensor]]:
        """The running statistics of each block's BN_DFE: as received they are (mu_g, var_g)."""
        return [(b.bn_dfe.running_mean.clone(), b.bn_dfe.running_var.clone()) for b in self.blocks]

    def consistency(self, glob: list, hat: list | tuple | None) -> tuple[Tensor, list | tuple]:
        """L_Con of the batch that the network has just seen, and the running statistics for the next one."""
        batch = [b.statistics for b in self.blocks]
        if self.args.con_loss == "first":
            hat = self.bn_dfe_statistics()
        return CONSISTENCY[self.args.con_loss](batch, glob, hat, self.args.beta)

    def train(self, down: Payload, t: int) -> Payload:
        """Alg. 1, lines 6-10."""
        args = self.args
        model = load(self.net, self.theta(down)).train()
        opt = sgd(model, args, t)
        glob, hat = self.bn_dfe_statistics(), None
        losses = []
        cons = []
        for x, y in batches(self.data.train, args, t, self.k):  # x [B, C, H, W] in [0, 1]; y [B]
            with autocast(args):
                z = model.features(x)  # [B, D]
                loss = cross_entropy(model.classify(z), y)  # L_task
            losses.append(loss.detach())
            if args.lambda_ and t >= args.con_from:
                l_con, hat = self.consistency(glob, hat)
                cons.append(l_con.detach())
                loss = loss + args.lambda_ * l_con  # line 7
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()  # line 8
            for b in self.blocks:
                b.statistics = None  # frees the graph
        self.log = {"loss": torch.stack(losses).mean()}
        if cons:
            self.log["consistency"] = torch.stack(cons).mean()
        w = state(model)
        self.bn_dse = pick(w, self.parts.bn_dse)
        if args.evaluated == "trained":
            self.trained = w
        up = {"u": pick(w, self.parts.u), "v": pick(w, self.parts.v), "bn_dfe": pick(w, self.parts.bn_dfe)}
        if args.protocol == "lodo":
            up["bn_dse"] = self.bn_dse  # for the unseen client
        return up  # line 10

    def model(self, down: Payload) -> nn.Module:
        if self.trained:
            return load(self.net, self.trained)
        model = load(self.net, self.theta(down))
        if self.data.unseen and self.args.adapt_epochs:
            self.adapt(model)
        return model

    def adapt(self, model: Net) -> None:
        """Alg. 3 on the client's own test images, without labels."""
        args = dataclasses.replace(self.args, epochs=self.args.adapt_epochs, steps=0, augment="none")
        model.train()
        follows = [b.bn_dse for b in self.blocks]
        for module in model.modules():  # line 1: BN_DFE, and any BN outside the blocks, keep their statistics
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)) and module not in follows:
                module.eval()
        theta_v = list(pick(dict(model.named_parameters()), self.parts.v).values())
        glob, hat = self.bn_dfe_statistics(), None
        for x, _ in batches(self.data.test, args, 0, self.k):  # lines 2-3; labels are not looked at
            with autocast(args):
                model.features(x)  # line 4
            l_con, hat = self.consistency(glob, hat)  # lines 5-6
            gradients = torch.autograd.grad(l_con, theta_v)
            with torch.no_grad():
                for p, gradient in zip(theta_v, gradients):
                    p.sub_(gradient, alpha=args.adapt_lr)  # line 7
        for b in self.blocks:
            b.statistics = None
        if not torch.isfinite(flatten(theta_v)).all():
            raise Stop(f"the adaptation to {self.data.name} diverges: lower --adapt-lr or --adapt-epochs")


class Server:
    keeps = ("u", "v", "bn_dfe", "bn_dse")

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.args = args
        self.parts = Parts(net, args.unit, args.own_bias)
        w = state(net)
        self.u = pick(w, self.parts.u)
        self.bn_dfe = pick(w, self.parts.bn_dfe)
        self.v = {k: pick(w, self.parts.v) for k in range(clients)}  # line 2
        self.bn_dse = {k: pick(w, self.parts.bn_dse) for k in range(clients)}

    def download(self, k: int) -> Payload:
        """Alg. 1, line 4. An unseen client has no theta_v of its own: it gets means over all clients."""
        if k in self.v:
            return {"u": self.u, "bn_dfe": self.bn_dfe, "v": self.v[k]}
        p = uniform(len(self.v))
        v = average(list(self.v.values()), p)
        bn_dse = average(list(self.bn_dse.values()), p)
        return {"u": self.u, "bn_dfe": self.bn_dfe, "v": v, "bn_dse": bn_dse}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        """Alg. 1, line 12, layer by layer; BN_DFE's statistics are directly averaged (Sec. 4.3.2)."""
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
        if self.args.similarity:
            for names in self.parts.v_layers.values():
                V_next = personalize(rows(uploads, "v", names), self.args.tau)  # Eq. (9): [N, P]
                for k, theta_v in zip(uploads, V_next):
                    self.v[k] = self.v[k] | entries(theta_v, names, self.v[k])
        self.bn_dfe = average([up["bn_dfe"] for up in uploads.values()], uniform(len(uploads)))


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
