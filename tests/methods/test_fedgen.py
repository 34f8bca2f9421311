"""FedGen: labels, classifiers and losses. Its rounds are in test_authors.py."""

import dataclasses
import math

import common
from baselines import fedgen
from tests.conftest import parsed
from tests.three_clients import Beside, one_round

import pytest
import torch
from torch.testing import assert_close

NAME = "baselines.fedgen"
C = 10


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


def test_generator_with_relu():
    G = fedgen.Generator(parsed(NAME, "--generator-relu"), C, 5)
    assert G(torch.arange(C), G.draw(C, "cpu")).min() == 0


def test_the_teacher_is_eq4(monkeypatch):
    monkeypatch.delattr(fedgen, "loss_of_labels")  # the other teacher's
    of = Beside(fedgen, "--teacher", "logits")
    one_round(of.server, of.clients)


def test_eq4_by_hand():
    """Of the softmax of the mean logits (2, 0), not the mean of two losses."""
    logits = torch.tensor([[[3.0, 0.0]], [[1.0, 0.0]]])
    loss = fedgen.loss_of_mean_logits(logits, torch.tensor([1]))
    assert float(loss) == pytest.approx(math.log(1 + math.exp(2)))
