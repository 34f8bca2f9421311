"""FedCiR: client-invariant representation learning for federated non-IID features (Li et al., IEEE TMC).

    python fedcir.py --dataset officecaltech --scale laptop               # minutes on two cores
    python fedcir.py --dataset pacs --variant fedreg                      # one of its two ablations
    python fedcir.py --dataset pacs --clients-per-domain 13 --dirichlet 0.5 --participation 0.2
                                             # as in Fig. 8, with 52 clients: its 50 is no multiple of 4

A generator at the server learns, from the uploaded classifiers alone, representations that all clients
classify alike. Clients train their classifiers on its samples (L_reg) and pull their encoders to class-wise
Gaussians fitted to them (L_align).
Server keeps w (encoder w1, classifier w2), generator w_g with its optimizer's state, {mu_g(y), sigma_g(y)};
client k nothing. Down: w; from the second round on (--reg-from 1) w_g and {mu_g(y), sigma_g(y)}, each if its
term has a weight. Up: w_k.

Paper                                                      This file
Sec. 5.1, Eq. (8)   p(z|x); the prediction, a mean over z  GaussianNet
Eqs. (4)-(5)        local steps; the uniform mean          Client.train; Server.update
Eqs. (9)-(10)       L_fl                                   Client.train (of one sample of z, as in the text)
Eq. (12)            L_reg                                  Client.train
Eqs. (14), (17)     L_align                                gaussian_kl, Client.train
Eq. (15)            L_g, of the ensemble of classifiers    ensemble_loss
Eqs. (16), (18)     the objectives                         Client.train
Alg. 1              lines 1; 2-7; 6                        Server.__init__; common.rounds; Server.download
                    lines 8-10; 11; 12                     Server.train_generator; moments; Server.update
                    ClientUpdate                           Client.train
Eqs. (1)-(3), (6)-(7), (11), (13) define or bound risks; nothing of them is computed.
Symbols as in the paper: w = w1 o w2, G, w_g, epsilon, E local steps (--steps), E_g, K_t, C classes, eta and
gamma (--lr), gamma_g. --variant fedreg: L_reg alone; fedalign: L_align alone; control: neither, FedAvg on
FedCiR's network. Table 1's FedAvg and FedSR: fedavg.py and fedsr.py with --variant fedcir. Figs. 5-10:
--clients-per-domain, --dirichlet, --participation, --steps. Table 3: python -m reproduce.measures cost. Left
out: Figs. 11 and 12. Official code: none known.

What moves a number; all that the paper leaves open or prints differently: papers/fedcir/differences.md
  what                  paper                       here                                      flag
  L_align, Eq. (17)     no sum over the dimensions  the sum over z's dimensions, as in FedSR  --lambda-align
  on PACS               5e-7 (App. E); at E = 100   5e-7                                      --lambda-align
                        above 1e-6 (Sec. 6.3)
  generator's step      printed bare, no rate       plain SGD at 0.01                         --generator-lr
  clients of Table 1    not said                    all train in each round                   --participation
  reported accuracy     which round is not said     best validation round, mean over clients  --eval-every
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import common
from common import (BACKBONES, ClientData, Net, Payload, UserError, arg, autocast, average, backbone, batches,
                    load, optimizer_state, parse, restore_optimizer, run, sgd, source, sourced,
                    state, uniform)

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, relu, softplus
from torch.nn.utils import clip_grad_norm_


@dataclass
class Args(common.Args):
    variant: str = arg("fedcir", "fedcir, one of its ablations, or control (its network without the "
                                 "regularizers)", choices=("fedcir", "fedreg", "fedalign", "control"))
    lambda_reg: float = arg(0.5, "weight of L_reg, Eq. (18)", low=0, source="text, App. E")
    lambda_align: float = arg(5e-7, "weight of L_align, Eq. (18)", low=0, source="text, App. E")
    reg_from: int = arg(1, "first round with the regularizers, counted from 0; 1: after the generator's "
                           "first training", low=0, source="text, Sec. 5.4")
    generator_steps: int = arg(5, "steps E_g of the generator in a round", low=1, source="text, Sec. 6.1")
    generator_optimizer: str = arg("sgd", "optimizer of the generator: sgd, for the bare step of line 9, or "
                                          "adam",
                                   choices=("adam", "sgd"), source="ours, of the bare step in line 9")
    generator_lr: float = arg(0.01, "learning rate gamma_g of the generator", above=0,
                              source="ours, as the clients'")
    noise: int = arg(64, "dimensions of the generator's noise epsilon", low=1, source="ours")
    width: int = arg(256, "width of the generator's hidden layer", low=1, source="ours")
    mle_samples: int = arg(1000, "generated representations of each class for the estimates mu_g(y) and "
                                 "sigma_g(y)", low=2, source="ours")
    sigma_min: float = arg(1e-3, "lower limit of sigma_g(y)", above=0, source="ours")
    samples: int = arg(20, "samples of z for a prediction, Eq. (8); 0: use the mean of z", low=0,
                       source="ours, as FedSR's code")

    def validate(self) -> None:
        if self.backbone in BACKBONES and BACKBONES[self.backbone].head is not nn.Linear:
            raise UserError(f"--backbone {self.backbone} has a classifier with a ReLU, and the loss of the "
                            "generator, Eq. (15), takes linear ones: use smallcnn_bn", 2)


# The pairs of the paper's search set of the two lambdas are printed in swapped order. To evaluate Camelyon17
# in each round would be 90% of the run.
PAPER = sourced({
    "digits": dict(rounds=60, lr=0.05, batch_size=32, lambda_align=1e-3, generator_lr=0.1),
    "officecaltech": dict(backbone="resnet18", image_size=128, rounds=300, steps=20, batch_size=32, lr=0.01,
                          momentum=0.9, weight_decay=5e-4, lambda_reg=0.5, lambda_align=5e-7),
    "pacs": dict(backbone="resnet18", image_size=128, rounds=300, steps=20, batch_size=32, lr=0.01,
                 momentum=0.9, weight_decay=5e-4, lambda_reg=0.5, lambda_align=5e-7),
    "domainnet10": dict(backbone="resnet18", image_size=128, rounds=300, steps=20, batch_size=32, lr=0.01,
                        momentum=0.9, weight_decay=5e-4, lambda_reg=0.5, lambda_align=1e-6),
    "domainnet": dict(backbone="resnet18", image_size=128, rounds=300, steps=20, batch_size=32, lr=0.01,
                      momentum=0.9, weight_decay=5e-4, lambda_reg=0.5, lambda_align=1e-6),
    "camelyon17": dict(backbone="resnet18", image_size=128, rounds=300, steps=20, batch_size=32, lr=0.01,
                       momentum=0.9, weight_decay=5e-4, lambda_reg=0.5, lambda_align=5e-7,
                       eval_every=10),
    "iwildcam": dict(backbone="resnet18", image_size=128, rounds=300, steps=20, batch_size=32, lr=0.01,
                     momentum=0.9, weight_decay=5e-4, lambda_reg=0.5, lambda_align=1e-6),
}, {
    "text, Sec. 6.1": "backbone image_size rounds steps batch_size lr momentum weight_decay",
    "text, App. E": "lambda_reg lambda_align",
    "ours": "eval_every digits",
})
VARIANTS = {
    "fedreg": dict.fromkeys(PAPER, source("text, by definition", lambda_align=0.0)),
    "fedalign": dict.fromkeys(PAPER, source("text, by definition", lambda_reg=0.0)),
    "control": dict.fromkeys(PAPER, source("ours", lambda_reg=0.0, lambda_align=0.0)),
}
# A twelfth of the rounds, so the generator learns faster.
LAPTOP = {
    "pacs": dict(image_size=32, rounds=24, generator_lr=0.1),
    "officecaltech": dict(image_size=32, rounds=24, generator_lr=0.1),
}


# The networks


class GaussianNet(nn.Module):
    """p(z|x) = N(z; mu(x), sigma(x)), the encoder w1 of Sec. 5.1, and a linear classifier w2 on z.

    mu and sigma come from one linear layer `last` behind the backbone; that, the softplus and the dimensions
    of z, the backbone's D (512 of ResNet18), are ours: the paper does not say.
    """

    def __init__(self, net: Net, samples: int):
        super().__init__()
        self.samples, self.head = samples, net.head
        self.body, D = net.body, net.head.in_features
        self.last = nn.Linear(D, 2 * D)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x -> mu [B, D] and sigma [B, D], float32."""
        mu, raw = self.last(self.body(x)).float().chunk(2, 1)
        return mu, softplus(raw) + 1e-6  # not 0, whose logarithm is in Eq. (17)

    def features(self, x: Tensor) -> Tensor:
        """The mean of p(z|x) [B, D]."""
        return self.encode(x)[0]

    def classify(self, z: Tensor) -> Tensor:
        return self.head(z)

    def forward(self, x: Tensor) -> Tensor:
        r"""log p^(y|x) [B, C]: of the mean probability over `samples` draws of z. With 0 samples the logits
        of the mean of z.

        $$ \hat{p}(y|x) = \mathbb{E}_{p(z|x)}\, \hat{p}(y|z) \tag{8} $$
        """
        mu, sigma = self.encode(x)
        if not self.samples:
            return self.classify(mu)
        z = mu + sigma * torch.randn(self.samples, *mu.shape, device=mu.device)  # [S, B, D]
        log_p = self.classify(z).float().log_softmax(2)  # [S, B, C]
        return log_p.logsumexp(0) - math.log(self.samples)


class Generator(nn.Module):
    """G(y, epsilon) -> z [B, D], a sample of q(z|y) (Sec. 5.3): two linear layers with BN and ReLU between
    them (Sec. 6.1)."""

    def __init__(self, noise: int, classes: int, width: int, dim: int):
        super().__init__()
        self.noise, self.classes = noise, classes
        self.first = nn.Linear(noise + classes, width, bias=False)  # BN takes off what a bias would add
        self.bn = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, dim)

    def forward(self, y: Tensor) -> Tensor:
        """Labels y [B] -> representations z [B, D] of new noise."""
        epsilon = torch.randn(len(y), self.noise, device=y.device)  # [B, noise], N(0, I)
        label = one_hot(y, self.classes).float()  # [B, C]
        h = self.first(torch.cat([epsilon, label], 1))  # [B, width]
        return self.second(relu(self.bn(h)))


class ModelAndGenerator(nn.Module):
    """The model w = w1 o w2 and, beside it, the generator G: two networks with a state each. As one network,
    for what the round loop tries on a batch, it is the model."""

    def __init__(self, model: GaussianNet, G: Generator):
        super().__init__()
        self.model, self.G = model, G

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


# The divergence of the alignment


def gaussian_kl(mu: Tensor, sigma: Tensor, mu_r: Tensor, sigma_r: Tensor) -> Tensor:
    r"""D_KL(N(mu, sigma) || N(mu_r, sigma_r)), diagonal, sigma deviations, each [B, D]; summed over D -> [B].
    The paper's log sigma(y) is read as log sigma(x).

    $$ \begin{aligned}
       & \log \sigma_g(y) - \log \sigma_{w_1}(x) \\
       & + \frac{\sigma_{w_1}^2(x) + \left(\mu_{w_1}(x) - \mu_g(y)\right)^2}{2\sigma_g^2(y)} - \frac{1}{2}
       \end{aligned} \tag{17} $$
    """
    ratio = (sigma.square() + (mu - mu_r).square()) / (2 * sigma_r.square())
    return (sigma_r.log() - sigma.log() + ratio - 0.5).sum(1)  # Eq. (17)


# The client


class Client:
    keeps = ()  # nothing outlives a round

    def __init__(self, args: Args, net: nn.Module, k: int, data: ClientData):
        self.args, self.net, self.k, self.data = args, net, k, data

    def train(self, down: Payload, t: int) -> Payload:
        r"""ClientUpdate of Alg. 1: E steps of Eq. (18), the client's share of Eq. (16).

        $$ \mathbf{w}_k^{t,e} \leftarrow \mathbf{w}_k^{t,e-1}
           - \eta \nabla \ell(\mathbf{w}_k^{t,e-1}; \xi_k^{t,e}) \tag{4} $$

        $$ \begin{aligned}
           \mathcal{L}_k &= \mathbb{E}_{p(x, y|k)} \left[-\log \mathbb{E}_{p(z|x)}\, \hat{p}(y|k, z)\right] \\
           \mathcal{L}_{fl} &= \sum_{k \in \mathcal{K}} p(k)\, \mathcal{L}_k
           \end{aligned} \tag{9-10} $$

        $$ \mathcal{L}_{reg} = \sum_{k} p(k)\, \mathbb{E}_{p(y)}\, \mathbb{E}_{q(z|y)}
           \left[-\log \hat{p}(y|k, z)\right] \tag{12} $$

        $$ \mathcal{L}_{align} = \sum_{k} p(k)\, \mathbb{E}_{p(x, y|k)}
           D_{\text{KL}}\left(p(z|k, x)\,\|\,q(z|y)\right) \tag{14} $$

        $$ \begin{aligned}
           \mathcal{L}_k = {} & \mathbb{E}_{(x_i, y_i)}
           \left[-\log \mathbb{E}_{p(z|x_i)}\, \hat{p}(y|k, z)\right] \\
           & + \lambda_{reg}\, \mathbb{E}_{p(y)}\, \mathbb{E}_{q(z|y)} \left[-\log \hat{p}(y|k, z)\right] \\
           & + \lambda_{align}\, D_{\text{KL}}\left(p(z|k, x_i)\,\|\,q(z|y_i)\right)
           \end{aligned} \tag{16, 18} $$
        """
        args = self.args
        model = self.model(down).train()
        if "w_g" in down:
            G = load(self.net.G, down["w_g"]).eval().requires_grad_(False)
        opt = sgd(model, args, t)
        log = defaultdict(list)
        for x, y in batches(self.data.train, args, t, self.k):  # x [B, C, H, W]; y [B]
            with autocast(args):
                mu, sigma = model.encode(x)  # of p(z|k, x): [B, D], [B, D]
                z = mu + sigma * torch.randn_like(mu)  # [B, D], one sample, reparameterized (Sec. 5.1)
                l_fl = cross_entropy(model.classify(z), y)  # Eqs. (9)-(10), bounded by one z for each x
            log["loss"].append(l_fl.detach())
            l_reg = l_align = 0  # a term that does not act is not computed
            if "w_g" in down:
                with autocast(args):
                    y_g = torch.randint(G.classes, y.shape, device=y.device)  # [B], p(y) uniform
                    z_g = G(y_g)  # [B, D], from q(z|y); G is fixed, so the gradient is the classifier's alone
                    l_reg = cross_entropy(model.classify(z_g), y_g)  # L_reg, Eq. (12)
                log["reg"].append(l_reg.detach())
            if "mu_g" in down:
                mu_g, sigma_g = down["mu_g"][y], down["sigma_g"][y]  # [B, D], [B, D], of q(z|y)
                l_align = gaussian_kl(mu, sigma, mu_g, sigma_g).mean()  # L_align, Eq. (14)
                log["align"].append(l_align.detach())
            loss = l_fl + args.lambda_reg * l_reg + args.lambda_align * l_align  # Eq. (18)
            opt.zero_grad()
            loss.backward()
            if args.clip:
                clip_grad_norm_(model.parameters(), args.clip)
            opt.step()  # ClientUpdate, line 2; Eq. (4)
        self.log = {name: torch.stack(values).mean() for name, values in log.items()}
        return {"w": state(model)}

    def model(self, down: Payload) -> nn.Module:
        return load(self.net.model, down["w"])


# The server


def ensemble_loss(z: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    r"""L_g with p(k) = 1/K: z [B, D], labels y [B], weight [K, C, D] and bias [K, C] of the K classifiers
    that are uploaded.

    $$ \mathcal{L}_g = \mathbb{E}_{p(y)}\, \mathbb{E}_{q(z|y)}
       \left[-\log \sum_{k \in \mathcal{K}} p(k)\, \hat{p}(y|k, z)\right] \tag{15} $$
    """
    K, B = len(weight), len(y)
    logits = torch.einsum("bd,kcd->kbc", z, weight) + bias[:, None]  # [K, B, C]
    log_p = logits.log_softmax(2)  # [K, B, C]
    of_label = log_p[:, torch.arange(B), y]  # [K, B]: log p^(y|k, z)
    ensemble = of_label.logsumexp(0) - math.log(K)  # [B]: log sum_k p(k) p^(y|k, z)
    return -ensemble.mean()


@torch.no_grad()
def moments(G: Generator, samples: int, sigma_min: float, device: str) -> tuple[Tensor, Tensor]:
    r"""Maximum likelihood mu_g(y) and sigma_g(y), both [C, D], of generated representations of each class y.

    $$ \begin{aligned}
       \mu_g(y) &= \frac{1}{S} \sum_{s} z_s, \quad z_s \sim q(z|y) \\
       \sigma_g^2(y) &= \frac{1}{S} \sum_{s} \left(z_s - \mu_g(y)\right)^2
       \end{aligned} \tag{Alg. 1, line 11} $$
    """
    G.eval()
    mus, sigmas = [], []
    for c in range(G.classes):
        y = torch.full((samples,), c, device=device)  # [S]
        z = G(y)  # [S, D]
        mus.append(z.mean(0))
        sigmas.append(z.std(0, correction=0))  # the MLE divides by S
    return torch.stack(mus), torch.stack(sigmas).clamp_min(sigma_min)


class Server:
    keeps = ("t", "w", "w_g", "g_optimizer", "mu_g", "sigma_g")

    def __init__(self, args: Args, net: nn.Module, clients: int):
        self.args = args
        self.net = net
        self.t = 0  # rounds that are over
        self.w = state(net.model)  # line 1
        self.w_g = state(net.G)  # line 1
        self.g_optimizer = {}  # its state, by the generator's parameters
        # Of the untrained G; sent before the first update with --reg-from 0 alone.
        self.mu_g, self.sigma_g = moments(net.G, args.mle_samples, args.sigma_min, args.device)

    def download(self, k: int) -> Payload:
        """Line 6: w, and from round --reg-from on what each regularizer of Eq. (18) with a weight needs."""
        if self.t < self.args.reg_from:  # the generator is not trained yet
            return {"w": self.w}
        down = {"w": self.w}
        if self.args.lambda_reg:
            down["w_g"] = self.w_g
        if self.args.lambda_align:
            down["mu_g"] = self.mu_g
            down["sigma_g"] = self.sigma_g
        return down

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        r"""Lines 8-12: the generator, its moments, and the uniform mean.

        $$ \mathbf{w}^{t+1} = \frac{1}{|\mathcal{K}_t|} \sum_{k \in \mathcal{K}_t} \mathbf{w}_k^t \tag{5} $$
        """
        args = self.args
        if args.lambda_reg or args.lambda_align:
            G = self.train_generator([up["w"] for up in uploads.values()])  # lines 8-10
        if args.lambda_align:
            self.mu_g, self.sigma_g = moments(G, args.mle_samples, args.sigma_min, args.device)  # line 11
        p = uniform(len(uploads))  # [K]
        self.w = average([up["w"] for up in uploads.values()], p)  # line 12, Eq. (5): 1/|K_t| each, BN's too
        self.t = t + 1

    def train_generator(self, uploaded: list[dict[str, Tensor]]) -> Generator:
        r"""Lines 8-10: E_g steps on the ensemble of the uploaded classifiers; returns the trained G.

        $$ w_{g,e} = w_{g,e-1} - \gamma_g \nabla \mathcal{L}_g(w_{g,e-1}) \tag{Alg. 1, line 9} $$
        """
        args = self.args
        weight = torch.stack([w["head.weight"] for w in uploaded])  # [K, C, D]
        bias = torch.stack([w["head.bias"] for w in uploaded])  # [K, C]
        G = load(self.net.G, self.w_g).train().requires_grad_(True)
        if args.generator_optimizer == "adam":
            opt = torch.optim.Adam(G.parameters(), lr=args.generator_lr, foreach=True)  # few kernels
        else:
            opt = torch.optim.SGD(G.parameters(), lr=args.generator_lr)
        restore_optimizer(opt, G, self.g_optimizer)
        B = args.batch_size
        for _ in range(args.generator_steps):  # line 8: e = 1, ..., E_g
            y = torch.randint(G.classes, (B,), device=args.device)  # [B], p(y) uniform
            z = G(y)  # [B, D], from q(z|y)
            loss = ensemble_loss(z, y, weight, bias)  # L_g, Eq. (15)
            opt.zero_grad()
            loss.backward()
            opt.step()  # line 9: w_g <- w_g - gamma_g grad L_g
        self.g_optimizer = optimizer_state(G, opt)
        self.w_g = state(G)
        return G


def build(args: Args, channels: int, classes: int) -> ModelAndGenerator:
    """The model w, and the generator w_g."""
    model = GaussianNet(backbone(args, channels, classes), args.samples)
    G = Generator(args.noise, classes, args.width, model.head.in_features)
    return ModelAndGenerator(model, G)


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS, laptop=LAPTOP)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
