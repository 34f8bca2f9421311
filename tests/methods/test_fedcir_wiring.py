"""FedCiR's wiring: two rounds of Algorithm 1 recomputed in plain torch, with every coefficient and every
switch away from its neutral value. The batches and the order in which random numbers are drawn are the
file's."""

import common
import fedcir
from tests.plain_torch import (State, adam_step, body_of_smallcnn_bn, generated, in_double, leaves_of, linear,
                               log_probability)
from tests.three_clients import ROUNDS, Beside, assert_near, mean, shares_of

import pytest
import torch
from torch.nn.functional import softplus

C, D = 10, 64
OWN = ("--momentum", 0.8, "--clip", 8, "--generator-steps", 4, "--generator-lr", 0.02, "--noise", 5,
       "--width", 12, "--mle-samples", 30, "--sigma-min", 0.3, "--samples", 3)


def drawn(*shape):
    return torch.randn(*shape).double()


def code_of(y, args):
    """New noise and one-hot labels, from which G makes z."""
    return torch.cat([drawn(len(y), args.noise), torch.eye(C).double()[y]], 1)


def eq17(mu, sigma, mu_g, sigma_g):
    """The divergence of two diagonal Gaussians, coordinate by coordinate, summed [B]."""
    trace = (sigma / sigma_g) ** 2 + ((mu - mu_g) / sigma_g) ** 2 - 1
    return 0.5 * (trace + 2 * torch.log(sigma_g / sigma)).sum(1)


class ByHand:
    """ClientUpdate on a download: `encode` makes z of a batch, `terms` the two regularizers of it."""

    def __init__(self, args, down: State):
        self.args, self.down = args, down

    def encode(self, x, leaves, w):
        out = linear(body_of_smallcnn_bn(x, leaves, w), leaves, "last")
        self.mu, self.sigma = out[:, :D], softplus(out[:, D:]) + 1e-6
        return self.mu + self.sigma * drawn(len(x), D)

    def terms(self, x, y, z, leaves):
        terms, down = {}, self.down
        if "w_g" in down:
            y_g = torch.randint(C, (len(y),))
            z_g = generated(code_of(y_g, self.args), down["w_g"], down["w_g"], training=False)
            reg = -log_probability(linear(z_g, leaves, "head"), y_g).mean()
            terms["reg"] = (self.args.lambda_reg, reg)
        if "mu_g" in down:
            align = eq17(self.mu, self.sigma, down["mu_g"][y], down["sigma_g"][y]).mean()
            terms["align"] = (self.args.lambda_align, align)
        return terms


def generator_by_hand(w_g, adam, uploads, args):
    """Lines 8 to 10 on the uploaded classifiers; changes `w_g` and `adam`."""
    for _ in range(args.generator_steps):
        y = torch.randint(C, (args.batch_size,))
        leaves = leaves_of(w_g)
        z = generated(code_of(y, args), leaves, w_g, training=True)
        p = 0
        for w in uploads:
            p = p + log_probability(linear(z, w, "head"), y).exp() / len(uploads)
        loss = -p.log().mean()  # Eq. (15)
        for name, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values()))):
            if args.generator_optimizer == "sgd":
                w_g[name] = w_g[name] - args.generator_lr * g
                continue
            w_g[name] = w_g[name] - args.generator_lr * adam_step(adam, name, g)


def moments_by_hand(w_g, args):
    """Line 11, class after class."""
    mus, sigmas = [], []
    for c in range(C):
        z = generated(code_of(torch.full((args.mle_samples,), c), args), w_g, w_g, training=False)
        mus.append(z.mean(0))
        sigmas.append((z - z.mean(0)).square().mean(0).sqrt().clamp(min=args.sigma_min))
    return torch.stack(mus), torch.stack(sigmas)


@pytest.mark.parametrize("variant,terms,optimizer,reg_from", [
    ("fedcir", {"reg", "align"}, "adam", 1),
    ("fedcir", {"reg", "align"}, "sgd", 0),
    ("fedreg", {"reg"}, "adam", 0),
    ("fedalign", {"align"}, "sgd", 1),
    ("control", set(), "adam", 0),
])
def test_two_rounds_by_hand(variant, terms, optimizer, reg_from):
    """Every parameter and every statistic of uploads, model and generator, the moments and the logged terms,
    after each round; the calculation resumes from its own numbers, never from the file's."""
    flags = ["--variant", variant, "--generator-optimizer", optimizer, "--reg-from", reg_from]
    if "reg" in terms:
        flags += ["--lambda-reg", 0.7]
    if "align" in terms:
        flags += ["--lambda-align", 0.003]
    of = Beside(fedcir, *OWN, *flags)
    server, args = of.server, of.args
    elsewhere = fedcir.build(args, 1, C)  # as in another process: the server's values must travel
    of.clients = [fedcir.Client(args, elsewhere, k, of.data[k]) for k in range(3)]
    w, w_g, adam = in_double(server.w), in_double(server.w_g), {}
    mu_g, sigma_g = server.mu_g.double(), server.sigma_g.double()
    for t, chosen in enumerate(ROUNDS):
        down = {"w": w}
        if t >= reg_from and "reg" in terms:
            down["w_g"] = w_g
        if t >= reg_from and "align" in terms:
            down |= {"mu_g": mu_g, "sigma_g": sigma_g}
        assert server.download(chosen[0]).keys() == down.keys()
        by_hand = ByHand(args, down)
        hands = of.play(t, chosen, [w] * 3, more=by_hand.terms, also=(), body=by_hand.encode)
        common.seed_all(0, "server", t)
        if terms:
            generator_by_hand(w_g, adam, hands, args)
        if "align" in terms:
            mu_g, sigma_g = moments_by_hand(w_g, args)
        w = mean(hands, shares_of(chosen, "uniform"))
        assert_near(in_double(server.w), w)
        assert_near(in_double(server.w_g), w_g)
        assert_near(server.mu_g.double(), mu_g)
        assert_near(server.sigma_g.double(), sigma_g)
    of.some_were_clipped()
    if "align" in terms:
        assert (sigma_g == args.sigma_min).any() and (sigma_g > args.sigma_min).any()


def test_eq15_does_not_overflow():
    """Logits of 1000: the loss is 1000."""
    weight = torch.tensor([[[-1000.0], [0.0]], [[0.0], [1000.0]]])
    loss = fedcir.ensemble_loss(torch.ones(1, 1), torch.tensor([0]), weight, torch.zeros(2, 2))
    assert loss.item() == 1000
