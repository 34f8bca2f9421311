"""FDSE: Federated Learning with Domain Shift Eraser (Wang et al., CVPR 2025).

    python fdse.py --dataset officecaltech                                  # the paper's setting
    python fdse.py --dataset officecaltech --scale laptop                   # minutes on two cores
    python fdse.py --dataset officecaltech --protocol lodo --target dslr    # an unseen domain, Table 2

Each layer is split into a domain-agnostic feature extractor (DFE), shared by all clients, and a small domain-specific
skew eraser (DSE), personal to each.
Server keeps theta_u (DFE modules, BN_DFE scale and shift, head), the BN_DFE statistics, and for each client k its
theta_v,k (DSE convolutions, BN_DSE scale and shift) and a copy of its BN_DSE statistics. Client k keeps its BN_DSE statistics.
Down: theta_u, BN_DFE statistics, theta_v,k (an unseen client: the means over all clients of theta_v and BN_DSE statistics).
Up: all of these as trained, and the BN_DSE statistics, which are used for unseen clients only.

Paper                                                    This file
Eqs. (2)-(3), Table A7  DSEBlock                         DSEBlock
Table A6, Sec. A8.1     the networks                     build
Eq. (4)                 statistics of a batch            BatchStatistics
Eqs. (5)-(7)            consistency regularization       consistency
Eq. (8)                 consensus maximization, A        min_norm, consensus
Eq. (9)                 similarity-aware aggregation, B  personalize
Algorithm 1             lines 1-2; 4; 6-10; 12           Parts, Server.__init__; Server.download; Client.train;
                        (3, 5: common.Loop)              Server.update
Algorithm 3             adaptation without labels        Client.adapt
Symbols as in the paper: S, T channels in and out, G, lambda, tau, beta, theta_u, theta_v, N clients; mu_g, var_g the global
and mu_hat, var_hat the running statistics of the input of BN_DFE; gamma = 1 - BN momentum = 0.9.
Table 3: without A --no-consensus (the plain mean of theta_u), without B --no-similarity (each client gets its own theta_v
back; the paper does not say what replaces A and B), without C --lambda 0. Table 2, row "- align": --adapt-epochs 0.
Left out: nothing. Algorithm 2 is FedBN's.

Where paper, official code (WwZzz/FDSE_CVPR25 @ c0bd90b) and this file differ; --variant official sets all that have a flag
  what                 paper                        official code                 here (default)     flag
  L_Con                Eq. 6                        a KL-like form of scalars     Eq. 6              --con-loss
                                                    shared by all layers
  L_Con in round 1     not said                     off                           on                 --con-from 1
  start of Eq. 5       not said                     the first batch's             mu_g, var_g        (--con-loss)
  statistics, Eq. 4    over the batch; biased       over channels of the means    over the batch and -
                                                                                  positions; biased
  mu_g, var_g          "global statistics"          BN_DFE's running ones         BN_DFE's running   -
                                                                                  ones (unbiased)
  L_Con acts on        "each DSE module"            each BN_DFE's input           each BN_DFE's      -
                                                                                  input (identity
                                                                                  half, FC blocks)
  BN scale and shift   not said                     BN_DSE theta_v, BN_DFE        as the code, by    -
                                                    theta_u                       the BNs' names
  ReLU after BN_DSE    yes (Eq. 3)                  no                            yes                --no-dse-relu
  padding, layers 3-5  1 (Table A6)                 0; needs 160 pixels           1                  --no-pad
  padding, layers 7-8  1 (Table A6), on a 1x1 map   0                             linear layers      -
  biases               not said                     DFE conv, and T a block       both convs         --block-bias
  one channel of G is  the identity (Table A7),     the identity                  the identity       --no-fc-identity
                       no identity (Eq. 3)          (first version, dd266a2: not in linear blocks)
  DSE convolution      dense as printed (Table A7)  depthwise                     depthwise (Eq. 3)  -
  "layer" of Eqs. 8-9  not said                     each tensor                   a module's tensors --unit tensor
  argmin of Eq. 8      no constraint (0 solves it)  simplex, interior point       simplex, by NNLS   -
  update of norm 0     not said                     in the hull as 0              out of the hull    -
  evaluated model      not said                     after local training          after aggregation  --evaluated
  lr decay per round   0.998                        0.9998                        0.998              --lr-decay
  weight decay         not given                    1e-3                          0                  --weight-decay
  lr                   tuned, value not given       0.1 Office, 0.05 PACS         as the code        --lr
  lambda               in {.01,.1,1}, not given     0.05 Office, 0.5 PACS         0.1 (ours)         --lambda
  tau                  in {.001,.01,.1,.5}, not     0.5                           0.5                --tau
                       given
  beta                 0.001                        0.05 Office, 0.001 PACS       0.001              --beta
  image size           224 (its Table 4: 256)       256                           224                --image-size
  E of Alg. 1          epochs (input), iterations   epochs                        epochs             --epochs, --steps
                       (line 6)
  Sec. A8.1            "replace the last operator   no such code                  a whole DSEBlock   -
                       with DSE module"                                           without last ReLU
  unseen client        start not said               no such code                  means of theta_v   -
                                                                                  and BN_DSE's
  adaptation           "several epochs", no lr      no such code                  5 epochs, lr 1     --adapt-epochs, -lr
  its BNs              BN_DFE fixed                 no such code                  BN_DFE normalizes  -
                                                                                  by global, BN_DSE
                                                                                  by batch statistics
                                                                                  that it re-estimates
Table 4 counts as MiB the whole state of the first version's AlexNet (--block-bias --no-fc-identity without bias in the DSE
convolutions: 24.87; ours has 24.86) and multiply-adds of a batch of 50 at 256x256.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.nn.utils import clip_grad_norm_

import common
from common import ClientData, Payload, Stop, arg, autocast, average, batches, flatten, parse, run, sgd, state
from networks import Net, backbone


@dataclass
class Args(common.Args):
    variant: str = arg("paper", "choices where paper and official code differ", choices=("paper", "official"))
    G: int = arg(2, "channels that each DFE channel becomes, Eq. (3); 1: the identity alone", low=1)
    lambda_: float = arg(0.1, "weight of L_Con in the loss, Alg. 1 line 7; 0 is without C", low=0)
    beta: float = arg(0.001, "growth of L_Con's weights with depth, Eq. (7); 0: the same for all layers", low=0)
    tau: float = arg(0.5, "temperature of Eq. (9); towards 0 each client keeps its own theta_v", low=0.0001)
    consensus: bool = arg(True, "A: aggregate theta_u by Eq. (8), else by the plain mean")
    similarity: bool = arg(True, "B: aggregate theta_v by Eq. (9), else leave it to its client")
    unit: str = arg("layer", "a 'layer' of Eqs. (8) and (9): all tensors of a module, or each tensor",
                    choices=("layer", "tensor"))
    con_loss: str = arg("eq6", "L_Con: Eq. (6), or the official code's", choices=("eq6", "official"))
    con_from: int = arg(0, "first round with L_Con, counted from 0", low=0)
    dse_relu: bool = arg(True, "ReLU between BN_DSE and the DSE convolution, Eq. (3)")
    pad: bool = arg(True, "padding of 1 in AlexNet's layers 3 to 5, Table A6; without it images need 160 pixels")
    block_bias: bool = arg(False, "a bias of T channels before BN_DFE in place of the DSE convolution's")
    fc_identity: bool = arg(True, "keep one identity channel of G in linear blocks too")
    evaluated: str = arg("aggregated", "model that is tested: aggregated (the next round's) or trained (the last local)",
                         choices=("aggregated", "trained"))
    adapt_epochs: int = arg(5, "lodo: epochs of Algorithm 3 on the target's images; 0: no adaptation", low=0)
    adapt_lr: float = arg(1.0, "lodo: learning rate of Algorithm 3", above=0)


# Sec. 5.1 and A7: batch 50, 500 rounds, E of 1 (Office) and 5 (PACS), decay 0.998, clipping at 10, 224x224; lr and tau are
# those of the official config (config/*/fdse.yml), lambda is ours, from the paper's grid. Table 2 tests the target's 10%.
SHARED = dict(backbone="alexnet_bn", image_size=224, rounds=500, batch_size=50, lr_decay=0.998, clip=10.0,
              target_part="test")
MNIST = dict(protocol="lodo", rounds=300, steps=5, batch_size=64, lr=0.05, eval_every=10)  # ours
PAPER = {
    "digits": dict(rounds=60, lr=0.05, batch_size=32),  # ours
    "rotatedmnist": MNIST,
    "rotatedmnist-t10k": MNIST,
    "officecaltech": dict(**SHARED, epochs=1, lr=0.1),
    "pacs": dict(**SHARED, epochs=5, lr=0.05),
    "domainnet10": dict(**SHARED, epochs=5, lr=0.1),  # Sec. 5.1; lr as on Office, the official code has none
}
OFFICIAL = dict(con_loss="official", con_from=1, dse_relu=False, pad=False, block_bias=True, unit="tensor",
                evaluated="trained", weight_decay=1e-3, lr_decay=0.9998)
VARIANTS = {"official": {
    "digits": OFFICIAL, "rotatedmnist": OFFICIAL, "rotatedmnist-t10k": OFFICIAL,
    "officecaltech": dict(**OFFICIAL, image_size=256, lambda_=0.05, beta=0.05),
    "pacs": dict(**OFFICIAL, image_size=256, lambda_=0.5),
    "domainnet10": dict(**OFFICIAL, image_size=256),
}}


class DSEBlock(nn.Module):
    """A layer S -> T with BN and ReLU, decomposed (Table A7). Linear blocks (kernel 0) take x [..., S]."""

    def __init__(self, args: Args, S: int, T: int, kernel: int = 0, stride: int = 1, padding: int = 0, dw: int = 3,
                 last_relu: bool = True):
        super().__init__()
        self.T, self.linear, self.dse_relu, self.last_relu = T, kernel == 0, args.dse_relu, last_relu
        self.watch = args.lambda_ > 0 or args.protocol == "lodo" and args.adapt_epochs > 0  # L_Con needs the statistics
        self.statistics = None
        mid = math.ceil(T / args.G)  # T_DFE
        self.identity = args.fc_identity or not self.linear
        ghosts = mid * (args.G - self.identity)
        self.dfe = nn.Linear(S, mid) if self.linear else nn.Conv2d(S, mid, kernel, stride, padding)
        self.bn_dse = nn.BatchNorm1d(mid) if self.linear else nn.BatchNorm2d(mid)
        conv, dw = (nn.Conv1d, 1) if self.linear else (nn.Conv2d, dw)
        self.dse = conv(mid, ghosts, dw, 1, dw // 2, groups=mid, bias=not args.block_bias) if ghosts else None
        self.bias = nn.Parameter(torch.zeros(T)) if args.block_bias else None
        self.bn_dfe = nn.BatchNorm1d(T) if self.linear else nn.BatchNorm2d(T)

    def forward(self, x: Tensor) -> Tensor:
        lead = x.shape[:-1]
        h = self.bn_dse(self.dfe(x.flatten(0, -2) if self.linear else x))  # BN_DSE of X_DFE, Eq. (2)
        h = relu(h) if self.dse_relu else h  # [B, T_DFE(, h, w)]
        parts = [h] if self.identity else []
        if self.dse is not None:
            parts.append(self.dse(h[..., None]).squeeze(-1) if self.linear else self.dse(h))  # X_DSE, Eq. (3)
        out = torch.cat(parts, 1)[:, :self.T]  # Table A7, layer 3: [B, T(, h, w)]
        if self.bias is not None:
            out = out + (self.bias if self.linear else self.bias[:, None, None])
        if self.training and self.watch:
            self.statistics = BatchStatistics.apply(out)
        out = self.bn_dfe(out)
        out = relu(out, inplace=True) if self.last_relu else out  # X_out, Eq. (3)
        return out.unflatten(0, lead) if self.linear and len(lead) > 1 else out


def build(args: Args, channels: int, classes: int) -> Net:
    """AlexNet of Table A6; the small CNN with its layers as blocks; ResNet and ViT with the last operator of each residual
    block and of each feed-forward layer replaced (Sec. A8.1)."""
    def block(*shape, **kw):
        return DSEBlock(args, *shape, **kw)

    if args.backbone == "alexnet_bn" and channels == 3 and args.weights == "none":
        p = 1 if args.pad else 0
        body = nn.Sequential(block(3, 64, 11, 4, 2), nn.MaxPool2d(3, 2), block(64, 192, 5, 1, 2), nn.MaxPool2d(3, 2),
                             block(192, 384, 3, 1, p), block(384, 256, 3, 1, p), block(256, 256, 3, 1, p),
                             nn.MaxPool2d(3, 2), nn.AdaptiveAvgPool2d(6), nn.Flatten(), block(9216, 1024),
                             block(1024, 1024))
        return Net(body, 1024, classes)
    if args.backbone == "smallcnn_bn" and args.weights == "none":
        body = nn.Sequential(block(channels, 32, 3, 1, 1), nn.MaxPool2d(2), block(32, 64, 3, 1, 1), nn.MaxPool2d(2),
                             nn.AdaptiveAvgPool2d(7), nn.Flatten(), block(3136, 64))
        return Net(body, 64, classes)
    if args.backbone in ("resnet18", "resnet50", "resnet18_3x3"):
        net = backbone(args, channels, classes)
        for stage in (net.body.layer1, net.body.layer2, net.body.layer3, net.body.layer4):
            for residual in stage:
                last = "3" if hasattr(residual, "conv3") else "2"
                conv = getattr(residual, f"conv{last}")
                setattr(residual, f"conv{last}", block(conv.in_channels, conv.out_channels, conv.kernel_size[0], 1,
                                                       conv.padding[0], last_relu=False))
                setattr(residual, f"bn{last}", nn.Identity())
        return net
    if args.backbone == "vit_b8":
        net = backbone(args, channels, classes)
        for layer in net.body.encoder.layers:
            layer.mlp[3] = block(layer.mlp[3].in_features, layer.mlp[3].out_features, last_relu=False)
        return net
    raise Stop(f"fdse builds alexnet_bn (colour images), smallcnn_bn, resnet18, resnet50, resnet18_3x3 and vit_b8, the first "
               f"two without --weights; not --backbone {args.backbone} --weights {args.weights} on {args.dataset}", 2)


# The objective's terms and the two aggregations


class BatchStatistics(torch.autograd.Function):
    """x [B, T(, h, w)] -> mean and biased variance of each channel, [T] and [T], over the batch and all positions: Eq. (4).

    The forward pass takes them from the BN kernel and the backward pass is one affine map of x, rounded to x's precision:
    on a CPU in bf16 that takes a thirtieth (first block) to a third (linear blocks) of autograd through torch.var_mean,
    and the relative error of the gradient is below 1% while a channel's mean is below 5 of its deviations.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(x.dtype, torch.float32)
        ones, zeros = (f(x.shape[1], dtype=exact, device=x.device) for f in (torch.ones, torch.zeros))
        _, mean, inverse_std = torch.native_batch_norm(x, ones, zeros, None, None, True, 0.0, 1e-8)
        ctx.save_for_backward(x, mean)
        return mean, (inverse_std ** -2 - 1e-8).clamp_min(0)  # epsilon 0 would give 1/std = 0 for a dead channel

    @staticmethod
    def backward(ctx, grad_mean: Tensor, grad_variance: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        n, shape = x.numel() // x.shape[1], [-1] + [1] * (x.dim() - 2)
        slope = 2 * grad_variance / n  # d variance / d x = 2 (x - mean) / n
        offset = grad_mean / n - slope * mean
        return torch.addcmul(offset.to(x.dtype).view(shape), x, slope.to(x.dtype).view(shape))


def depth_weights(layers: int, beta: float) -> list[float]:
    """w_l of Eq. (7), l = 1..L; they sum to 1."""
    return torch.softmax(beta * torch.arange(1, layers + 1, dtype=torch.float64), 0).tolist()


def consistency(batch: list, glob: list, hat: list | None, beta: float, gamma: float = 0.9) -> tuple[Tensor, list]:
    """L_Con of Eqs. (5)-(7), and the running statistics that the next batch takes as `hat` (None: start from `glob`).

    `batch`, `glob`, `hat`: for each block l its (mean [T], variance [T]).
    """
    loss, running = 0, []
    for w, (mu_b, var_b), (mu_g, var_g), (mu, var) in zip(depth_weights(len(batch), beta), batch, glob, hat or glob):
        mu_hat, var_hat = gamma * mu + (1 - gamma) * mu_b, gamma * var + (1 - gamma) * var_b  # Eq. (5)
        l_con = (mu_hat - mu_g).square().mean() + (var_hat.mean() - var_g.mean()).square()  # Eq. (6); variances are >= 0
        loss = loss + w * l_con  # Eq. (7)
        running.append((mu_hat.detach(), var_hat.detach()))
    return loss, running


def consistency_official(batch: list, glob: list, hat: list | None, beta: float, gamma: float = 0.9):
    """L_Con of the official code: the mean and variance over a layer's channel means, one running pair for all layers."""
    loss, (f, v) = 0, hat or (None, None)
    for w, (mu_b, _), (mu_g, var_g) in zip(depth_weights(len(batch), beta), batch, glob):
        f = mu_b.mean() if f is None else gamma * f + (1 - gamma) * mu_b.mean()
        v = mu_b.var() if v is None else gamma * v + (1 - gamma) * mu_b.var()
        mean_part = ((mu_g.square() - f.square()) / (2 * v)).mean()
        variance_part = 0.5 * (torch.log(v / (var_g + 1e-8)) + var_g / (v + 1e-8)).mean()
        loss = loss + w * (mean_part + variance_part)
    return loss, (f.detach(), v.detach())


def min_norm(gram: Tensor) -> Tensor:
    """u [N] on the simplex that minimizes u' gram u: the min-norm point of the hull of N vectors.

    For v = s u the sum ||D v||^2 + (1'v - 1)^2 is smallest, over s, at q/(1+q) with q = ||D u||^2, which grows with q: so
    non-negative least squares of [D; 1'] v = [0; 1], an active-set method, has the direction of u.
    """
    values, vectors = torch.linalg.eigh(gram.cpu())
    root = values.clamp_min(0).sqrt()[:, None] * vectors.T  # root' root = gram
    v = nnls(torch.cat([root, torch.ones(1, len(gram), dtype=torch.float64)]).numpy(), [0.0] * len(gram) + [1.0])[0]
    return torch.from_numpy(v / v.sum())


def consensus(delta: Tensor) -> Tensor:
    """The clients' updates of a layer [N, P] -> its aggregated update [P], Eq. (8). An update of norm 0 has no direction:
    it counts in the mean norm but is no corner of the hull (it would stop the layer for everybody)."""
    gram = sum((part := columns.double()) @ part.T for columns in delta.split(1 << 20, dim=1))  # [N, N], float64 in pieces
    norms = gram.diagonal().sqrt()  # [N]
    moved = norms > 0
    if not moved.any():
        return torch.zeros_like(delta[0])
    u = min_norm(gram[moved][:, moved] / torch.outer(norms[moved], norms[moved])).to(gram)  # products of the d_k
    weights = torch.zeros_like(norms)
    weights[moved] = norms.mean() * u / norms[moved]  # mean norm, u_k, and 1/norm of d_k
    return weights.to(delta) @ delta


def personalize(V: Tensor, tau: float) -> Tensor:
    """The clients' theta_v of a layer [N, P] -> the next ones [N, P]: attention between clients, Eq. (9)."""
    Q = V.double() / V.double().norm(dim=1, keepdim=True).clamp_min(1e-12)  # a small tau magnifies rounding
    return torch.softmax(Q @ Q.T / tau, dim=1).to(V) @ V


class Parts:
    """The names of a network's entries by what happens to them, and the layers of theta_u and theta_v."""

    def __init__(self, net: nn.Module, unit: str):
        blocks = {n: m for n, m in net.named_modules() if isinstance(m, DSEBlock)}
        trainable = [n for n, _ in net.named_parameters()]
        inside = lambda n, *modules: any(n.startswith(f"{b}.{m}.") for b in blocks for m in modules)
        self.v = [n for n in trainable if inside(n, "dse", "bn_dse")]
        self.u = [n for n in trainable if n not in set(self.v)]
        buffers = [n for n in net.state_dict() if n not in set(trainable)]
        self.bn_dse = [n for n in buffers if inside(n, "bn_dse")]  # statistics that stay local
        self.bn_dfe = [n for n in buffers if n not in set(self.bn_dse)]  # statistics that are averaged
        owner = lambda n: n if unit == "tensor" else next((b for b in blocks if n.startswith(b + ".")), n.rpartition(".")[0])
        self.u_layers, self.v_layers = ({o: [n for n in names if owner(n) == o] for o in map(owner, names)}
                                        for names in (self.u, self.v))


def pick(tensors: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    return {n: tensors[n] for n in names}


def vector_to(names: list[str], vector: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `flatten` over the entries `names`, in the shapes of `like`."""
    pieces = vector.split([like[n].numel() for n in names])
    return {n: piece.view(like[n].shape).clone() for n, piece in zip(names, pieces)}  # a view would be saved with all of `vector`


class Client:
    def __init__(self, args: Args, net: Net, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data
        self.parts, self.blocks = Parts(net, args.unit), [m for m in net.modules() if isinstance(m, DSEBlock)]
        self.con = consistency if args.con_loss == "eq6" else consistency_official
        self.bn_dse = {}  # own BN_DSE statistics; empty before the first training
        self.trained = {}  # own model after local training, only for --evaluated trained
        self.initial = pick(state(net), self.parts.bn_dse)

    def assemble(self, down: Payload) -> Net:
        """theta_k = (theta_u, theta_v,k) with the global BN_DFE and the own BN_DSE statistics."""
        own = self.bn_dse or down.get("bn_dse") or self.initial
        self.net.load_state_dict(down["u"] | down["v"] | down["bn_dfe"] | own)
        return self.net

    def global_statistics(self) -> list[tuple[Tensor, Tensor]]:
        """(mu_g, var_g) of each block: the BN_DFE statistics of the received model."""
        return [(b.bn_dfe.running_mean.clone(), b.bn_dfe.running_var.clone()) for b in self.blocks]

    def train(self, down: Payload, t: int) -> Payload:
        """Algorithm 1, lines 6-10."""
        args = self.args
        model = self.assemble(down).train()
        glob, hat = self.global_statistics(), None
        opt = sgd(model, args, t)
        losses, cons = [], []
        for x, y in batches(self.data.train, args, t, self.k):  # x [B, C, H, W] in [0, 1]; y [B]
            with autocast(args):
                z = model.features(x)  # [B, D]
                loss = cross_entropy(model.classify(z), y)  # L_task
            losses.append(loss.detach())
            if args.lambda_ and t >= args.con_from:
                l_con, hat = self.con([b.statistics for b in self.blocks], glob, hat, args.beta)
                loss = loss + args.lambda_ * l_con  # line 7
                cons.append(l_con.detach())
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()  # line 8
            for b in self.blocks:
                b.statistics = None  # frees the graph
        after = state(model)
        self.bn_dse = pick(after, self.parts.bn_dse)
        self.trained = after if args.evaluated == "trained" else {}
        self.log = {"loss": torch.stack(losses).mean()} | ({"consistency": torch.stack(cons).mean()} if cons else {})
        return {part: pick(after, getattr(self.parts, part)) for part in ("u", "v", "bn_dfe", "bn_dse")}  # line 10

    def model(self, down: Payload) -> nn.Module:
        if self.trained:
            self.net.load_state_dict(self.trained)
            return self.net
        model = self.assemble(down)
        if "bn_dse" in down and self.args.adapt_epochs:  # an unseen client
            self.adapt(model)
        return model

    def adapt(self, model: Net) -> None:
        """Algorithm 3 on the client's own test images, without labels: DSE modules follow the global statistics."""
        args = dataclasses.replace(self.args, epochs=self.args.adapt_epochs, steps=0)
        model.train()
        for module in model.modules():  # line 1: BN_DFE, and any BN outside the blocks, keep their statistics
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module not in [b.bn_dse for b in self.blocks]:
                module.eval()
        theta_v = [p for n, p in model.named_parameters() if n in set(self.parts.v)]
        glob, hat = self.global_statistics(), None
        for x, _ in batches(self.data.test, args, 0, self.k):  # lines 2-3; labels are not looked at
            with autocast(args):
                model.features(x)  # lines 4-5
            l_con, hat = self.con([b.statistics for b in self.blocks], glob, hat, args.beta)  # line 6
            gradients = torch.autograd.grad(l_con, theta_v)
            with torch.no_grad():
                for p, g in zip(theta_v, gradients):
                    p.sub_(g, alpha=args.adapt_lr)  # line 7
        for b in self.blocks:
            b.statistics = None
        if not torch.isfinite(flatten(theta_v)).all():
            raise Stop(f"the adaptation to {self.data.name} diverges: lower --adapt-lr or --adapt-epochs")

    def state_dict(self) -> dict:
        return {"bn_dse": self.bn_dse, "trained": self.trained}

    def load_state_dict(self, saved: dict) -> None:
        self.bn_dse, self.trained = saved["bn_dse"], saved["trained"]


class Server:
    def __init__(self, args: Args, net: Net, clients: int):
        self.args, self.parts = args, Parts(net, args.unit)
        start = state(net)
        self.u, self.bn_dfe = pick(start, self.parts.u), pick(start, self.parts.bn_dfe)
        self.v, self.bn_dse = ({k: pick(start, names) for k in range(clients)}  # line 2
                               for names in (self.parts.v, self.parts.bn_dse))

    def download(self, k: int) -> Payload:
        """Line 4; an unseen client gets the means of theta_v and of the BN_DSE statistics."""
        if k in self.v:
            return {"u": self.u, "bn_dfe": self.bn_dfe, "v": self.v[k]}
        v, bn_dse = (average(list(x.values()), torch.full((len(x),), 1 / len(x))) for x in (self.v, self.bn_dse))
        return {"u": self.u, "bn_dfe": self.bn_dfe, "v": v, "bn_dse": bn_dse}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        """Line 12, layer by layer; BN_DFE's statistics are directly averaged (Sec. 4.3.2)."""
        N = len(uploads)
        for names in self.parts.u_layers.values():
            old = flatten([self.u[n] for n in names])  # [P]
            delta = old.new_empty(N, len(old))  # [N, P]
            for row, up in zip(delta, uploads.values()):
                torch.sub(flatten([up["u"][n] for n in names]), old, out=row)
            new = old + (consensus(delta) if self.args.consensus else delta.mean(0))  # Eq. (8)
            self.u = self.u | vector_to(names, new, self.u)
        for k, up in uploads.items():
            self.v[k], self.bn_dse[k] = up["v"], up["bn_dse"]
        for names in self.parts.v_layers.values() if self.args.similarity else ():
            V = torch.stack([flatten([up["v"][n] for n in names]) for up in uploads.values()])  # [N, P]
            for k, theta in zip(uploads, personalize(V, self.args.tau)):  # Eq. (9)
                self.v[k] = self.v[k] | vector_to(names, theta, self.v[k])
        self.bn_dfe = average([up["bn_dfe"] for up in uploads.values()], torch.full((N,), 1 / N))

    def state_dict(self) -> dict:
        return {"u": self.u, "v": self.v, "bn_dfe": self.bn_dfe, "bn_dse": self.bn_dse}

    def load_state_dict(self, saved: dict) -> None:
        self.u, self.v, self.bn_dfe, self.bn_dse = saved["u"], saved["v"], saved["bn_dfe"], saved["bn_dse"]


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
