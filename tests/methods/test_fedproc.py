"""FedProc: rounds by hand in plain torch, its loss against the formula, and where it is FedAvg."""

import dataclasses

from baselines import fedproc
from tests.conftest import parsed
from tests.plain_torch import body_in_evaluation, in_double, linear
from tests.three_clients import CLOSE, Beside, mean

import pytest
import torch
from torch.testing import assert_close

NAME = "baselines.fedproc"


def l_gpc_by_hand(z, prototypes, label):
    """Of one image, z [D]; `prototypes` by their classes."""
    similarities = {c: (z @ v / z.norm() / v.norm()).exp() for c, v in prototypes.items()}
    return -(similarities[label] / sum(similarities.values())).log()


def without(data, missing):
    """The client's data without the training images of one class."""
    keep = data.train.labels != missing
    train = dataclasses.replace(data.train, index=data.train.index[keep], labels=data.train.labels[keep])
    return dataclasses.replace(data, train=train)


def more_by_hand(args, t, prototypes, features):
    """What is added to the cross-entropy: of each image with a prototype alpha (L_gpc - L_ce). Collects the
    features that were trained on."""
    alpha = args.alpha * max(0, 1 - t / (args.fade or args.rounds))

    def more(x, y, z, leaves):
        log_p = linear(z, leaves, "head").log_softmax(1)
        added, logged = 0, 0
        for i, label in enumerate(y.tolist()):
            features.append((label, (z[i] / z[i].norm()).detach()))
            if label in prototypes:
                l_gpc = l_gpc_by_hand(z[i], prototypes, label)
                added = added + (l_gpc + log_p[i, label]) / len(y)
                logged = logged + l_gpc / len(y)
        return {"": (alpha, added), "prototypical": (0, logged)} if prototypes and alpha else {}
    return more


@pytest.mark.parametrize("source,fade,average", [("pass", 0, "samples"), ("batches", 2, "uniform")])
def test_rounds_by_hand(source, fade, average):
    """Uploads, the server's model and prototypes over three rounds. Class 0 is with client 2 alone, who is
    not in the first round: it has no prototype until then. Class 9 is with client 0 alone, who is not in the
    second one: its prototype stays as it was. With --fade 2 the last round has no term."""
    of = Beside(fedproc, "--momentum", 0.8, "--alpha", 0.9, "--rounds", 4, "--fade", fade,
                "--prototypes", source, "--average", average)
    of.data = [without(of.data[0], 0), without(without(of.data[1], 0), 9), without(of.data[2], 9)]
    w, prototypes = in_double(of.server.w), {}
    assert of.server.prototypes.shape == (10, 64) and not of.server.prototypes.any()
    for t, chosen in enumerate(((0, 1), (2, 1), (0, 2))):
        uploads, hands, collected = {}, [], []
        for k in chosen:
            client, data, features = of.clients[k], of.data[k], []
            client.data = data
            more = more_by_hand(of.args, t, prototypes, features)
            uploads[k], hand = of.train(t, k, w, more, also=("n", "sums", "counts"))
            if source == "pass":
                x, y = data.train.batch(torch.arange(len(data.train)))
                z = body_in_evaluation(hand, x.double())
                features = [(label, v / v.norm()) for label, v in zip(y.tolist(), z)]
            for c in range(10):
                of_class = [v for label, v in features if label == c]
                assert uploads[k]["counts"][c] == len(of_class)
                assert_close(uploads[k]["sums"][c].double(), sum(of_class, torch.zeros(64).double()), **CLOSE)
            assert ("prototypical" in client.log) == (t == 1 or (t == 2 and not fade))
            hands.append(hand)
            collected += features
        of.server.update(uploads, t)
        sizes = [len(of.data[k].train) for k in chosen]
        shares = [n / sum(sizes) for n in sizes] if average == "samples" else [0.5, 0.5]
        w = mean(hands, shares)
        for c in range(10):
            of_class = [v for label, v in collected if label == c]
            if of_class:
                prototypes[c] = sum(of_class) / len(of_class)
        assert (0 in prototypes) == (t > 0)
        for c in range(10):
            by_hand = prototypes.get(c, torch.zeros(64).double())
            assert_close(of.server.prototypes[c].double(), by_hand, **CLOSE)
        of.check(w)
    of.some_were_clipped()


def test_weight_of_the_loss():
    """1 - t/T; with --fade 100 as in the authors' code, whatever T; --alpha is where it starts."""
    args = parsed(NAME, "--rounds", 300)
    assert [fedproc.alpha_of_round(args, t) for t in (0, 75, 150, 225)] == [1, 0.75, 0.5, 0.25]
    args = parsed(NAME, "--rounds", 300, "--fade", 100, "--alpha", 0.5)
    assert [fedproc.alpha_of_round(args, t) for t in (0, 50, 100, 299)] == [0.5, 0.25, 0, 0]
