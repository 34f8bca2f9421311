"""FedCiR: Eq. (15) where it would overflow, and where FedCiR is FedAvg.

Algorithm 1 is in test_fedcir_wiring.py, the encoder and Eq. (17) are in test_gaussian_encoder.py.
"""

import dataclasses

import common
import fedavg
import fedcir
from tests.conftest import metrics, parsed, run_here
from tests.three_clients import FLAGS, ROUNDS, federation, same

import numpy as np
import pytest
import torch
from torch import tensor

def test_eq15_does_not_overflow():
    """Logits of 1000: the loss is 1000."""
    weight = tensor([[[-1000.0], [0.0]], [[0.0], [1000.0]]])
    loss = fedcir.ensemble_loss(torch.ones(1, 1), tensor([0]), weight, torch.zeros(2, 2))
    assert loss.item() == 1000

class Sampled(fedcir.GaussianNet):
    """A network whose features are a sample of z, for fedavg.py."""

    def features(self, x):
        mu, sigma = self.encode(x)
        return mu + sigma * torch.randn_like(mu)


def three_rounds(module, args, build):
    """The model after three rounds and its prediction; only w is sent."""
    server, clients, data = federation(module, args, build)
    for t, chosen in enumerate(ROUNDS):
        uploads = {}
        for k in chosen:
            down = server.download(k)
            assert down.keys() == {"w"}
            common.seed_all(0, "train", t, k)
            uploads[k] = clients[k].train(down, t)
        server.update(uploads, t)
    model = clients[2].model(server.download(2)).eval()
    x, _ = data[2].train.batch(torch.arange(8))
    torch.manual_seed(0)
    return server.w | {"prediction": model(x).detach()}


@pytest.mark.parametrize("flags", [("fedreg", "--lambda-reg", 0), ("fedalign", "--lambda-align", 0),
                                   ("control",)])
def test_without_both_terms_it_is_fedavg_on_the_gaussian_network(flags):
    """Bit for bit, also the predictions: fedavg.py with a network whose features are a sample of z."""
    args = parsed("fedcir", *FLAGS, "--variant", *flags)
    inherited = {field.name: getattr(args, field.name) for field in dataclasses.fields(common.Args)}
    ours = three_rounds(fedcir, args, fedcir.build)
    theirs = three_rounds(fedavg, fedavg.Args(**inherited, average="uniform"),
                          lambda *of: Sampled(common.backbone(*of), True, 20))
    assert same(ours, theirs)


def test_the_log_of_a_run_has_the_regularizers_from_their_round_on(tmp_path):
    result = run_here("fedcir", tmp_path / "run", "--limit", 20, "--image-size", 8, "--steps", 2,
                      "--precision", "bf16", "--lambda-align", 0.01, "--generator-optimizer", "sgd")
    first, second = metrics(tmp_path / "run")
    for line, terms in ((first, set()), (second, {"reg", "align"})):
        for log in line["clients"].values():
            assert log.keys() == {"bytes_down", "bytes_up", "loss"} | terms
    aligns = [log["align"] for log in second["clients"].values()]
    assert result["logs"].keys() == {"loss", "reg", "align"}  # also in the record
    assert result["logs"]["align"] == [None, pytest.approx(np.mean(aligns), abs=1e-5)]
