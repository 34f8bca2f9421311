"""FedProc: rounds by hand in plain torch, its loss against the formula, and where it is FedAvg."""

import dataclasses

import common
from baselines import fedproc
from plumbing.runfolder import copied
from tests.conftest import parsed
from tests.plain_torch import body_in_evaluation, in_double, linear
from tests.three_clients import CLOSE, FLAGS, assert_tested, federation, mean, train_by_hand

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


def more_by_hand(args, t, batch_labels, prototypes, terms, features):
    """What is added to the cross-entropy: of each image with a prototype alpha (L_gpc - L_ce). Collects the
    terms and the features that were trained on."""
    last = args.fade or args.rounds
    alpha = args.alpha * max(0, 1 - t / last)
    labels = iter(batch_labels)

    def more(x, z, leaves):
        y = next(labels)
        log_p = linear(z, leaves, "head").log_softmax(1)
        total, total_gpc = 0, 0
        for i, label in enumerate(y.tolist()):
            features.append((label, (z[i] / z[i].norm()).detach()))
            if label in prototypes:
                l_gpc = l_gpc_by_hand(z[i], prototypes, label)
                total = total + alpha * (l_gpc + log_p[i, label])
                total_gpc += float(l_gpc.detach())
        if prototypes and alpha:
            terms.append(total_gpc / len(y))
        return total / len(y)
    return more


@pytest.mark.parametrize("source,fade,average", [("pass", 0, "samples"), ("batches", 2, "uniform")])
def test_rounds_by_hand(source, fade, average):
    """Uploads, the server's model and prototypes over three rounds. Class 0 is with client 2 alone, who is
    not in the first round: it has no prototype until then. Class 9 is with client 0 alone, who is not in the
    second one: its prototype stays as it was. With --fade 2 the last round has no term."""
    args = parsed(NAME, *FLAGS, "--momentum", 0.8, "--alpha", 0.9, "--rounds", 4, "--fade", fade,
                  "--prototypes", source, "--average", average)
    server, clients, data = federation(fedproc, args, fedproc.build)
    data = [without(data[0], 0), without(without(data[1], 0), 9), without(data[2], 9)]
    w, prototypes, norms = in_double(server.w), {}, []
    assert server.prototypes.shape == (10, 64) and not server.prototypes.any()
    for t, chosen in enumerate(((0, 1), (2, 1), (0, 2))):
        uploads, hands, collected = {}, [], []
        for k in chosen:
            clients[k].data = data[k]
            uploads[k] = clients[k].train(copied(server.download(k)), t)
            labels = [y for _, y in common.batches(data[k].train, args, t, k)]
            terms, features = [], []
            more = more_by_hand(args, t, labels, prototypes, terms, features)
            hand, losses, of_client = train_by_hand(w, args, data[k], t, k, more)
            if source == "pass":
                x, y = data[k].train.batch(torch.arange(len(data[k].train)))
                z = body_in_evaluation(x.double(), hand)
                features = [(label, v / v.norm()) for label, v in zip(y.tolist(), z)]
            up = uploads[k]
            assert up.keys() == {"w", "n", "sums", "counts"} and up["n"] == len(data[k].train)
            assert_close(in_double(up["w"]), hand, **CLOSE)
            for c in range(10):
                of_class = [v for label, v in features if label == c]
                assert up["counts"][c] == len(of_class)
                assert_close(up["sums"][c].double(), sum(of_class, torch.zeros(64).double()), **CLOSE)
            assert_close(float(clients[k].log["loss"]), sum(losses) / 3, **CLOSE)
            assert ("prototypical" in clients[k].log) == bool(terms) == (t == 1 or (t == 2 and not fade))
            if terms:
                assert_close(float(clients[k].log["prototypical"]), sum(terms) / 3, **CLOSE)
            hands.append(hand)
            collected += features
            norms += of_client
        server.update(uploads, t)
        sizes = [len(data[k].train) for k in chosen]
        shares = [n / sum(sizes) for n in sizes] if average == "samples" else [0.5, 0.5]
        w = mean(hands, shares)
        for c in range(10):
            of_class = [v for label, v in collected if label == c]
            if of_class:
                prototypes[c] = sum(of_class) / len(of_class)
        assert (0 in prototypes) == (t > 0)
        assert_close(in_double(server.w), w, **CLOSE)
        for c in range(10):
            by_hand = prototypes.get(c, torch.zeros(64).double())
            assert_close(server.prototypes[c].double(), by_hand, **CLOSE)
        assert_tested(server, clients, [w] * 3)
    assert min(norms) < args.clip < max(norms)  # some steps are clipped, some are not


def test_weight_of_the_loss():
    """1 - t/T; with --fade 100 as in the authors' code, whatever T; --alpha is where it starts."""
    args = parsed(NAME, "--rounds", 300)
    assert [fedproc.alpha_of_round(args, t) for t in (0, 75, 150, 225)] == [1, 0.75, 0.5, 0.25]
    args = parsed(NAME, "--rounds", 300, "--fade", 100, "--alpha", 0.5)
    assert [fedproc.alpha_of_round(args, t) for t in (0, 50, 100, 299)] == [0.5, 0.25, 0, 0]
