"""FedGen: rounds by hand in plain torch, its losses against the formulas, and where it is FedAvg."""

import dataclasses

import common
from baselines import fedgen
from plumbing.runfolder import copied
from tests.conftest import parsed
from tests.plain_torch import adam_step, generated, in_double, leaves_of, linear, log_probability
from tests.three_clients import ROUNDS, Beside, mean, shares_of

import pytest
import torch
from torch.testing import assert_close

NAME = "baselines.fedgen"
C = 10
OWN = ("--momentum", 0.8, "--lambda-reg", 0.7, "--lambda-kd", 1.6, "--lambda-decay", 0.5, "--diversity", 3,
       "--generator-steps", 4, "--generator-lr", 0.02, "--noise", 5, "--width", 12)
OTHER = ("--teacher", "logits", "--labels", "uniform", "--epsilon", "uniform", "--generator-relu",
         "--average", "uniform")


def noise_by_hand(args, B):
    if args.epsilon == "uniform":
        return torch.rand(B, 5).double()
    return torch.randn(B, 5).double()


def features_of(args, leaves, w_g, y, epsilon, training):
    """G(y, epsilon) [B, D]."""
    z = generated(torch.cat([epsilon, torch.eye(C).double()[y]], 1), leaves, w_g, training)
    return z.clamp(min=0) if args.generator_relu else z


def diversity_by_hand(epsilon, z):
    """Pair by pair."""
    total = 0
    for i in range(len(z)):
        for j in range(len(z)):
            total = total + (epsilon[i] - epsilon[j]).pow(2).mean() * (z[i] - z[j]).abs().mean()
    return (-total / len(z) ** 2).exp()


def generator_by_hand(args, w_g, adam, uploads, counts, p):
    """The generator's steps on the uploaded classifiers; changes `w_g` and `adam`."""
    shares = counts.double() / counts.sum(0).clamp(min=1)
    for _ in range(args.generator_steps):
        y = torch.multinomial(p, args.batch_size, replacement=True)
        epsilon = noise_by_hand(args, len(y))
        leaves = leaves_of(w_g)
        z = features_of(args, leaves, w_g, y, epsilon, training=True)
        loss, logits = 0, 0
        for share, w in zip(shares, uploads):
            loss = loss - (share[y] * log_probability(linear(z, w, "head"), y)).mean()
            logits = logits + linear(z, w, "head") / len(uploads)
        if args.teacher == "logits":
            loss = -log_probability(logits, y).mean()
        loss = loss + 3 * diversity_by_hand(epsilon, z)
        for name, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values()))):
            w_g[name] = w_g[name] - 0.02 * adam_step(adam, name, g)


@pytest.mark.parametrize("flags", [(), OTHER], ids=["usual", "other"])
def test_rounds_by_hand(flags):
    """Downloads, uploads, model, generator and p^(y) of three rounds, in the second and third with the terms:
    every coefficient and, in the second case, every switch away from its neutral value."""
    of = Beside(fedgen, *OWN, *flags)
    args, server = of.args, of.server
    w, w_g, adam = in_double(server.w), in_double(server.w_g), {}
    assert torch.equal(server.p, torch.full((C,), 0.1))
    for t, chosen in enumerate(ROUNDS):
        uploads, hands, counts = {}, [], []
        for k in chosen:
            down, labels = copied(server.download(k)), []
            assert down.keys() == ({"w", "w_g", "p"} if t else {"w"})

            def more(x, y, z, leaves, down=down, labels=labels, t=t):
                labels.append(y)
                if t == 0:
                    return {}
                y_g = torch.multinomial(down["p"], len(y), replacement=True)
                fixed = in_double(down["w_g"])
                z_g = features_of(args, fixed, fixed, y_g, noise_by_hand(args, len(y)), training=False)
                z_y = features_of(args, fixed, fixed, y, noise_by_hand(args, len(y)), training=False)
                reg = -log_probability(linear(z_g, leaves, "head"), y_g).mean()
                q = torch.softmax(linear(z_y, leaves, "head"), 1).detach()
                p = torch.softmax(linear(z, leaves, "head"), 1)
                kd = (q * (q / p).log()).sum() / len(y)
                return {"reg": (0.5 ** t * 0.7, reg), "kd": (0.5 ** t * 1.6, kd)}

            uploads[k], hand = of.train(t, k, w, more, also=("n", "c"))
            counts.append(torch.cat(labels).bincount(minlength=C))
            assert torch.equal(uploads[k]["c"], counts[-1])
            hands.append(hand)
        common.seed_all("server", t)
        server.update(uploads, t)
        counts = torch.stack(counts)
        p = counts.sum(0) / counts.sum()
        if args.labels == "uniform":
            p = (counts.sum(0) > 0) / (counts.sum(0) > 0).sum()
        assert_close(server.p, p.float())
        common.seed_all("server", t)
        generator_by_hand(args, w_g, adam, hands, counts, server.p)
        w = mean(hands, shares_of(chosen, args.average))
        assert_close(in_double(server.w_g), w_g, atol=1e-4, rtol=1e-3)  # Adam divides small gradients
        of.check(w)
    of.some_were_clipped()


@pytest.mark.parametrize("off", [[], ["--lambda-reg", 0], ["--lambda-kd", 0]])
def test_one_term_is_enough(off):
    """For the generator to be sent; with --reg-from 0 untrained and with uniform labels, at once."""
    assert Beside(fedgen, "--reg-from", 0, *off).server.download(0).keys() == {"w", "w_g", "p"}


@pytest.mark.parametrize("backbone", ["smallcnn", "smallcnn_bn"])
def test_classifiers_of_uploads(backbone):
    """Each says what its client's network says of z, also where the classifier begins with a ReLU."""
    args = parsed(NAME, "--backbone", backbone)
    nets = [common.backbone(args, 1, C) for _ in range(2)]
    z = torch.randn(3, 64)
    heads = [fedgen.classifier_of(common.state(net)) for net in nets]
    logits = fedgen.logits_of(nets[0].head, heads, z)
    assert_close(logits, torch.stack([net.classify(z) for net in nets]))
    assert not torch.equal(logits[0], logits[1])


def test_labels_that_no_client_has():
    """They are never drawn; of the others each once, or as often as the clients have drawn them."""
    server = Beside(fedgen).server
    c = torch.zeros(2, C, dtype=torch.long)
    c[0, 3], c[1, 3], c[1, 7] = 1, 2, 1
    p = server.label_distribution(c)
    assert p[3] == 0.75 and p[7] == 0.25 and p.sum() == 1
    server.args = dataclasses.replace(server.args, labels="uniform")
    p = server.label_distribution(c)
    assert p[3] == 0.5 and p[7] == 0.5 and p.sum() == 1
