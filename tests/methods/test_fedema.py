"""FedEMA: the mixture of the global and the own network. Its rounds are in test_authors.py; without the
mixture it is BYOL (test_fedgala.py)."""

import math

import common
from baselines import fedema
from fedgala import Learner
from tests.conftest import parsed
from tests.methods.test_authors import FLAGS, Images, two_layers
from tests.plain_torch import in_double, is_trained

import pytest
import torch
from torch import nn
from torch.testing import assert_close


@pytest.mark.parametrize("stale", ["mix", "restart"])
def test_after_a_round_without_it_a_client_mixes_unless_it_restarts(stale, monkeypatch):
    args = parsed("baselines.fedema", *FLAGS, "--stale", stale)
    monkeypatch.setattr(fedema, "batches", lambda *_: [(torch.randn(8, 2), None)])
    net = Learner(common.Net(nn.Linear(2, 3), 3, 3), args)
    client = fedema.Client(args, net, 0, Images(0, (2,)))
    for t in (0, 2):
        client.train(fedema.Server(args, net, 1).download(0), t)
    assert ("mu" in client.log) == (stale == "mix")


def test_eqs_1_to_3_by_hand():
    """mu is tau at first, then it goes with the distance of the encoders, and is at most 1."""
    args = parsed("baselines.fedema", *FLAGS, "--divergence", "full", "--autoscale", 0.4)
    net = Learner(two_layers(), args)
    client, w = fedema.Client(args, net, 0, Images(0, (2,))), fedema.online(net)
    for distance, expected in ((1.0, 0.4), (2.0, 0.8), (3.0, 1.0)):
        entries = sum(v.numel() for name, v in w.items() if name.startswith("f."))
        client.own = {name: v + 1 for name, v in w.items()}
        client.own |= {name: w[name] + distance / math.sqrt(entries) for name in w if name.startswith("f.")}
        assert float(client.mix(net, w)) == pytest.approx(expected)
        mixed = {name: (1 - expected) * w[name] + expected * client.own[name] for name in w}
        found = {name: v for name, v in net.state_dict().items() if is_trained(name) and fedema.travels(name)}
        assert_close(in_double(found), in_double(mixed))
