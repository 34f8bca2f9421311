"""FedHEAL: rounds by hand in plain Python, which updates are kept, the weights, and the settings in which it
is FedAvg."""

import common
from baselines import fedheal
from plumbing.run.runfolder import copied
from tests.conftest import parsed
from tests.plain_torch import in_double

import pytest
import torch
from torch import nn
from torch.testing import assert_close

NAME = "baselines.fedheal"


class ByHand:
    """The server in plain Python: of each client its updates' signs, and its weight."""

    def __init__(self, tau: float, beta: float, first_counts: int, trained: list[str]):
        self.tau, self.beta, self.first_counts, self.trained = tau, beta, first_counts, trained
        self.signs, self.distances, self.weight, self.step = {}, {}, {}, {}

    def keeps(self, k: int, name: str, increases: torch.Tensor) -> torch.Tensor:
        """1 where client k's update of an entry is kept, else 0; the update is then part of its past."""
        past = self.signs.setdefault((k, name), [])
        kept = torch.ones_like(increases)
        if past:
            share = torch.stack(past).double().mean(0)
            kept = (torch.where(increases > 0, share, 1 - share) > self.tau + 1e-9).double()
        times = 1 if past else self.first_counts
        past += [increases] * times
        return kept

    def update(self, w: dict, states: dict[int, dict]) -> dict:
        kept, distances = {}, self.distances  # of all that ever trained
        for k, w_k in states.items():
            distances[k] = 0
            for name in w:
                delta = w_k[name] - w[name]
                kept[k, name] = self.keeps(k, name, (delta >= 0).double())
                if name in self.trained:
                    distances[k] += float((kept[k, name] * delta).square().sum().sqrt())
        for k in states:
            part = distances[k] / sum(distances.values())
            self.step[k] = (1 - self.beta) * self.step.get(k, 0) + self.beta * part
            self.weight[k] = self.weight.get(k, 1 / len(states)) + self.step[k]
        new = {}
        for name in w:
            weights = {k: self.weight[k] * kept[k, name] for k in states}
            total = sum(weights.values())
            moved = sum(weights[k] * (states[k][name] - w[name]) for k in states)
            new[name] = w[name] + torch.where(total > 0, moved / total.clamp(min=1e-9), 0)
            if "num_batches" in name:
                new[name] = new[name].round()
        return new


@pytest.mark.parametrize("flags", [["--tau", 0.3, "--beta", 0.4],
                                   ["--tau", 0.1, "--beta", 1, "--first-counts", 2]])
def test_many_rounds_by_hand(flags):
    """Eleven rounds of made-up uploads, in which the clients of a round change: a client's past is that of
    its own rounds, and shares of exactly tau occur (1 of 10)."""
    args = parsed(NAME, "--device", "cpu", *flags)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    server = fedheal.Server(args, net, 4)
    names = [name for name, _ in net.named_parameters()]
    hand = ByHand(args.tau, args.beta, args.first_counts, names)
    common.seed_all("many rounds")
    leaning = [torch.randn(56).sign() for _ in range(4)]  # where a client's updates mostly go
    nobody = 0
    for t in range(11):
        before, uploads = copied(server.w), {}
        for k in range(4):
            if k == 0 or (t + k) % 3:
                w_k = {}
                for name, v in before.items():
                    if "num_batches" in name:
                        w_k[name] = v + 3 + k
                    else:
                        w_k[name] = v + 0.1 * (torch.randn(v.shape) + leaning[k][:v.numel()].view(v.shape))
                uploads[k] = {"w": w_k}
        server.update(uploads, t)
        states = {k: in_double(up["w"]) for k, up in uploads.items()}
        expected = hand.update(in_double(before), states)
        assert_close(in_double(server.w), expected, atol=1e-6, rtol=1e-5)
        nobody += int((server.w["0.weight"] == before["0.weight"]).sum())
        assert server.count == {k: len(hand.signs[k, names[0]]) for k in server.count}
    assert nobody > 0  # entries that all clients have discarded


def test_clients_that_did_not_move_have_equal_weights():
    still = fedheal.Server(parsed(NAME, "--device", "cpu"), nn.Linear(1, 1), 2)
    still.d = {0: 0.0, 1: 0.0}
    assert still.weights([0, 1]).tolist() == [0.5, 0.5]


def test_parameters_alone():
    """With --masked parameters the statistics of BN are averaged whatever their past."""
    for masked, mean in (("all", 1.0), ("parameters", 0.0)):
        net = nn.BatchNorm1d(1)
        server = fedheal.Server(parsed(NAME, "--device", "cpu", "--masked", masked, "--beta", 0), net, 2)
        for t, steps in enumerate(((1, 1), (-1, 1))):
            uploads = {}
            for k, step in enumerate(steps):
                uploads[k] = {"w": server.w | {"running_mean": server.w["running_mean"] + step}}
            server.update(uploads, t)
        assert server.w["running_mean"] - 1 == mean
