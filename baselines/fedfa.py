"""FedFA: noise on the statistics of features, as wide as batch and clients differ (Zhou, Konukoglu, "FedFA:
Federated Feature Augmentation", ICLR 2023; arXiv 2301.12995).

    python -m baselines.fedfa --dataset officecaltech --scale laptop

In training, layers between those of the network draw new means and deviations for each image's channels from
normal distributions; their variance is the batch's, more so in channels in which the clients' means differ.
Server keeps w, of which are, for each such layer: the clients' running statistics and their variances, four
vectors of C channels. Client k keeps nothing between rounds. Down: w. Up: w_k, n_k.

Paper                                                             This file
mu, sigma of an image's channels                                  channel_statistics
variances of mu and sigma in the batch, Sigma                     FFALayer.forward
running means of mu and sigma on a client                         FFALayer.remember
their variances across the clients, bar Sigma                     variance_of_clients, Server.update
gamma from bar Sigma; (gamma + 1) Sigma                           fusion, FFALayer.forward
beta ~ N(mu, .), alpha ~ N(sigma, .), alpha (x - mu)/sigma + beta FFALayer.forward
the layers' places in AlexNet                                     PLACES
The server's variances stay as they are in a round of one client. A layer does nothing with a batch of one
image or with maps of one pixel, and never in evaluation. With --prob 0 it is FedAvg, bit for bit. The unseen
client of --protocol lodo has the server's model. Left out: the paper's U-Net for segmentation. It has no
ResNet and no ViT; their places in PLACES are ours.

Where paper (its Algorithm 1 as ar5iv renders it), codes (the authors' tfzhou/FedFA @ 57e9582; FDSE's
WwZzz/FDSE_CVPR25 @ dd266a2) and this file differ; in full: papers/baselines/fedfa.md
  what                      paper          authors' code    FDSE's code   here            flag
  bar Sigma                 each channel's one number of    as authors'   each channel's  --variance one
                                           all channels
  running statistics begin  at 0 and 1     from average     from average  at 0 and 1      --statistics
  a round
  the server sends          gamma          bar Sigma        bar Sigma     bar Sigma,      -
                                                                          the same
  average                   -              uniform          uniform       n_k/n           --average uniform
  these three together      paper          code             code          paper           --variant code
  optimizer                 -              kept             new           new             -
  learning rate             -              0.01 on Office   tuned         0.1             --lr
"""

from dataclasses import dataclass

import common
from common import (ClientData, Net, Payload, UserError, arg, autocast, average, backbone, batches, load,
                    parse, run, schedules, sgd, source, state)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

EPS = 1e-6


@dataclass
class Args(common.Args):
    variant: str = arg("paper", "paper, or code: variance, average and statistics of both released codes, "
                                "which made FDSE's row", choices=("paper", "code"))
    prob: float = arg(0.5, "probability that a layer changes a batch; 0: FedAvg", low=0, high=1,
                      source="code of FedFA")
    memory: float = arg(0.99, "momentum of the running statistics", low=0, high=1, source="code of FedFA")
    variance: str = arg("channels", "variance across the clients: for each channel, or one for all channels "
                                    "and clients, as in both codes, which makes gamma 1",
                        choices=("channels", "one"), source="text of FedFA, Alg. 1")
    statistics: str = arg("new", "start of the running statistics in a client's round: new (0 and 1) or "
                                 "average (of the clients)", choices=("new", "average"),
                          source="text of FedFA, Alg. 1")
    average: str = arg("samples", "weights of the average: samples (n_k/n) or uniform (1/K)",
                       choices=("samples", "uniform"), source="text of FDSE, Eq. (1)")


# FDSE tuned the learning rate alone, and its code has no file of settings for FedFA: FedAvg's.
PAPER = {"digits": schedules.DIGITS, **schedules.MNIST, **schedules.FDSE}
CODE = source("code of FedFA, and of FDSE, algorithm/fedfa.py", variance="one", statistics="average",
              average="uniform")
VARIANTS = {"code": dict.fromkeys(PAPER, CODE)}


# The layers and their places

RESNET = ("maxpool", "layer1", "layer2", "layer3", "layer4")
PLACES = {  # behind which modules of a backbone there is a layer: {name: channels}
    # both codes: behind the pooling of blocks 1, 2 and 5, and behind blocks 3 and 4
    "alexnet_bn": {"3": 64, "7": 192, "10": 384, "13": 256, "17": 256},
    "alexnet": {"features.2": 64, "features.5": 192, "features.7": 384, "features.9": 256,
                "features.12": 256},
    # ours: behind each block; a stem and four stages; every third layer
    "smallcnn": {"3": 32, "7": 64},
    "smallcnn3": {"3": 32, "7": 64},
    "smallcnn3_linear": {"3": 32, "7": 64},
    "smallcnn_bn": {"3": 32, "7": 64},
    "resnet18": dict(zip(RESNET, (64, 64, 128, 256, 512))),
    "resnet18_3x3": dict(zip(RESNET, (64, 64, 128, 256, 512))),
    "resnet50": dict(zip(RESNET, (64, 256, 512, 1024, 2048))),
    "vit_b8": {f"encoder.layers.encoder_layer_{i}": 768 for i in (2, 5, 8, 11)},
}


def channel_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """mu and sigma of each channel over the pixels of x [B, C, h, w] -> [B, C, 1, 1], or over the tokens of
    x [B, N, C] -> [B, 1, C]."""
    pixels = (2, 3) if x.dim() == 4 else (1,)
    return x.mean(pixels, keepdim=True), (x.var(pixels, keepdim=True) + EPS).sqrt()


def fusion(spread: Tensor) -> Tensor:
    """gamma [C] from the variances across the clients, bar Sigma [C]: larger where the clients differ more, 1
    on average."""
    r = 1 / (1 + 1 / (spread + EPS))
    return len(r) * r / r.sum()


def variance_of_clients(means: list[Tensor], how: str) -> Tensor:
    """bar Sigma [C] of the clients' running statistics [C]."""
    stacked = torch.stack(means)  # [K, C]
    if how == "one":
        return stacked.var().expand_as(means[0]).clone()
    return stacked.var(0)


@torch.no_grad()
def places_in(body: nn.Module, x: Tensor) -> dict[str, int]:
    """The places in another network (ours): behind the last module of each size of images in it, among the
    modules of body.features, or of the body."""
    prefix = "features." if isinstance(getattr(body, "features", None), nn.Module) else ""
    outputs, hooks = {}, []
    for name, module in body.get_submodule(prefix[:-1]).named_children():
        def note(module, given, out, name=prefix + name):
            outputs[name] = out
        hooks.append(module.register_forward_hook(note))
    body.eval()(x)
    for hook in hooks:
        hook.remove()
    of_size = {}
    for name, out in outputs.items():
        if isinstance(out, Tensor) and out.dim() == 4 and out[0, 0].numel() > 1:
            of_size[out.shape[2:]] = name, out.shape[1]
    return dict(of_size.values())


class FFALayer(nn.Module):
    """x [B, C, h, w] or [B, N, C] with other statistics of its channels; its buffers travel with w."""

    def __init__(self, args: Args, channels: int):
        super().__init__()
        self.prob, self.memory, self.channels = args.prob, args.memory, channels
        self.register_buffer("mean_mu", torch.zeros(channels))  # a client's running statistics
        self.register_buffer("mean_sigma", torch.ones(channels))
        self.register_buffer("spread_mu", torch.ones(channels))  # bar Sigma: their variances across clients
        self.register_buffer("spread_sigma", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.prob == 0 or len(x) == 1 or x[0].numel() == self.channels:
            return x
        if torch.rand(()) >= self.prob:
            return x
        mu, sigma = channel_statistics(x.float())  # [B, C, 1, 1] or [B, 1, C]
        self.remember(mu, sigma)
        beta = shaken(mu, self.spread_mu)
        alpha = shaken(sigma, self.spread_sigma)
        return (alpha * (x.float() - mu) / sigma + beta).to(x.dtype)

    @torch.no_grad()
    def remember(self, mu: Tensor, sigma: Tensor) -> None:
        """The running statistics after this batch."""
        self.mean_mu.lerp_(mu.mean(0).flatten(), 1 - self.memory)
        self.mean_sigma.lerp_(sigma.mean(0).flatten(), 1 - self.memory)


def shaken(v: Tensor, spread: Tensor) -> Tensor:
    """A draw from N(v, (gamma + 1) Sigma) for each image and channel; Sigma is the variance in the batch."""
    variance = v.var(0) + EPS  # [C, 1, 1] or [1, C]
    variance = (fusion(spread).view(variance.shape) + 1) * variance
    return v + variance.sqrt() * torch.randn_like(v)


def forget_statistics(model: nn.Module) -> None:
    """Let the running statistics of all layers begin anew, Alg. 1."""
    for module in model.modules():
        if isinstance(module, FFALayer):
            module.mean_mu.zero_()
            module.mean_sigma.fill_(1)


def build(args: Args, channels: int, classes: int) -> Net:
    """The network of `--backbone` with FFA layers."""
    net = backbone(args, channels, classes)
    size = args.crop or args.image_size
    try:
        places = PLACES.get(args.backbone) or places_in(net.body, torch.zeros(2, channels, size, size))
    except RuntimeError:  # it takes no images
        places = {}
    if not places:
        raise UserError("fedfa needs images, and a body in which modules, or those of body.features, give "
                        f"[B, C, h, w]; --backbone {args.backbone} has none", 2)
    for name, width in places.items():
        parent, _, last = name.rpartition(".")
        module = nn.Sequential(net.body.get_submodule(name), FFALayer(args, width))
        setattr(net.body.get_submodule(parent), last, module)
    return net


class Client:
    keeps = ()  # nothing outlives a round

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data

    def train(self, down: Payload, t: int) -> Payload:
        """FedAvg's local training, with the layers at work."""
        args = self.args
        model = self.model(down).train()
        if args.statistics == "new":
            forget_statistics(model)
        opt = sgd(model, args, t)
        losses = []
        for x, y in batches(self.data.train, args, t, self.k):  # x [B, C, H, W]; y [B]
            with autocast(args):
                z = model.features(x)  # [B, D]
                loss = cross_entropy(model.classify(z), y)
            losses.append(loss.detach())
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()
        self.log = {"loss": torch.stack(losses).mean()}
        return {"w": state(model), "n": torch.tensor(len(self.data.train))}

    def model(self, down: Payload) -> nn.Module:
        return load(self.net, down["w"])


class Server:
    keeps = ("w",)

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.args = args
        self.w = state(net)
        self.spreads = [name for name in self.w if name.endswith((".spread_mu", ".spread_sigma"))]

    def download(self, k: int) -> Payload:
        return {"w": self.w}

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        n = torch.stack([up["n"] for up in uploads.values()]).double()  # [K]
        if self.args.average == "samples":
            p = n / n.sum()
        else:
            p = torch.full_like(n, 1 / len(n))
        w = average([up["w"] for up in uploads.values()], p)  # BN's and the layers' running statistics too
        for name in self.spreads:
            w[name] = self.w[name]
            if len(uploads) > 1:
                means = [up["w"][name.replace(".spread_", ".mean_")] for up in uploads.values()]
                w[name] = variance_of_clients(means, self.args.variance)
        self.w = w


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
