"""What is measured of runs, and --metric, which chooses the round that counts."""

import common
import fedavg
from plumbing.run.results import best_of, summary
from plumbing.run.scores import scores
from reproduce.measures.finished import rebuilt
from tests.conftest import fails, metrics, parsed, run_here, saved_in, stops

import pytest
import torch
from torch import nn, tensor


def test_measures_by_hand():
    """Class 0: 3 of 4 found; class 1: 1 of 1; class 2 has no images, and is predicted once."""
    p = tensor([[.7, .2, .1], [.6, .3, .1], [.5, .3, .2], [.1, .2, .7], [.2, .7, .1]])
    found = scores(p, tensor([0, 0, 0, 0, 1]))
    assert found["accuracy"] == 0.8 and found["recall"] == [0.75, 1.0, None]
    assert found["balanced"] == 0.875 and found["auc"] is None
    assert found["f1"] == pytest.approx((6 / 7 + 1 + 0) / 3)
    assert found["confusion"] == [[3, 0, 1], [0, 1, 0], [0, 0, 0]]


def test_a_class_that_nobody_has_and_nobody_names_is_no_part_of_f1():
    """Of three classes two are there; else a perfect network would have 2/3."""
    assert scores(tensor([[.8, .1, .1], [.2, .7, .1]]), tensor([0, 1]))["f1"] == 1


def test_the_final_scores_are_of_the_rounds_random_numbers(tmp_path, monkeypatch):
    """A network may draw some: those of the best round are the ones that it was tested with."""
    tested, asked = common.tested_model, []

    def noting(fed, k, t, down=None):
        asked.append(t)
        return tested(fed, k, t, down)
    monkeypatch.setattr(common, "tested_model", noting)
    flags = ["--rounds", "5", "--lr", "0.4", "--seed", "3"]
    best = run_here("fedavg", tmp_path / "run", *flags)["best"]["round"]
    assert best < 5 and asked[-12:] == [5] * 6 + [best] * 6


@pytest.mark.parametrize("p, y, auc", [
    ([[.9, .1], [.4, .6], [.6, .4], [.4, .6]], [0, 0, 1, 1], 2.5 / 4),
    ([[.5, .3, .2], [.2, .55, .25], [.35, .4, .25], [.1, .6, .3]], [0, 0, 1, 2], (3 / 4 + 1 / 3 + 1) / 3),
])
def test_auc_of_two_and_of_three_classes(p, y, auc):
    """Of two the share of pairs in order, equal ones half; of three the mean of each against the rest."""
    assert scores(tensor(p), tensor(y))["auc"] == pytest.approx(auc)


@pytest.mark.parametrize("name, value", [("body.1.running_var", -1.0), ("head.bias", torch.nan)])
def test_a_network_that_gives_nan_is_not_scored(tmp_path, monkeypatch, capsys, name, value):
    """As by a server that does to BN's variances what it does to the weights; NaN would count as class 0."""
    update = fedavg.Server.update
    words = "gives numbers that are not finite"

    def clever(self, uploads, t: int) -> None:
        update(self, uploads, t)
        self.w[name] = torch.full_like(self.w[name], value)
    monkeypatch.setattr(fedavg.Server, "update", clever)
    fails(capsys, 1, words, run_here, "fedavg", tmp_path / "run")
    data = common.Data(torch.zeros(4, 1, 28, 28), torch.arange(4), torch.zeros(4).long(), "cpu", "unit")
    args = parsed("fedavg")
    net = common.backbone(args, 1, 10)
    net.state_dict()[name].fill_(value)  # the network's own tensor
    stops(words, common.probabilities, net, data, args)


def test_a_result_has_them_of_every_client_and_of_the_target(tmp_path):
    """After the best round and after the last: as the accuracies of both, and as load_run's network."""
    flags = ["--protocol", "lodo", "--target", "d30", "--rounds", "5", "--lr", "0.4", "--seed", "3"]
    result = run_here("fdse", tmp_path / "run", *flags)
    assert result["best"]["round"] < 5
    for which in ("best", "last"):
        found = result["measures"][which]
        accuracies = result[which]["clients"] | {"d30": result[which]["target"]}
        assert [*found] == [*accuracies]
        assert {name: of_client["accuracy"] for name, of_client in found.items()} == pytest.approx(accuracies)
        assert sum(map(sum, found["d30"]["confusion"])) == 40
    assert result["measures"]["best"] != result["measures"]["last"]


def test_another_metric_chooses_the_round(tmp_path):
    """The training is the same; best.pt and the result are of the round whose F1 is best."""
    flags = ["--rounds", "5", "--lr", "0.3", "--limit", "60", "--test-rounds", "best", "--seed", "1"]
    plain_result = run_here("fedavg", tmp_path / "accuracy", *flags)
    result = run_here("fedavg", tmp_path / "f1", *flags, "--metric", "f1")
    plain, chosen = metrics(tmp_path / "accuracy"), metrics(tmp_path / "f1")
    assert "metric" not in plain[0]["val"]
    assert [line["clients"] for line in plain] == [line["clients"] for line in chosen]
    curve = [line["val"]["metric"] for line in chosen]
    best = 1 + curve.index(max(curve))
    assert result["best"]["round"] == best != plain_result["best"]["round"]
    assert result["best"]["metric"] == max(curve)
    assert f"best validation round {best} (validation f1 {max(curve):.3f}): ALL" in summary(result)
    assert "accuracy" not in summary(plain_result)
    assert saved_in(tmp_path / "f1" / "best.pt")["round"] == best


VALIDATED = [(0.5, 0.4), (1.0, 0.6), (1.0, 0.2), (1.0, 0.3), (1.0, 0.2), (0.9, 0.1)]  # score and loss


@pytest.mark.parametrize("name, best", [("ALL", 2), ("metric", 5)])
def test_of_equal_rounds(name, best):
    """Accuracies: the first, on which records stand. Another metric: the lower loss, then the later one."""
    history = []
    for t, (score, loss) in enumerate(VALIDATED):
        history.append({"round": t + 1, "val": {"ALL": 0.1, "loss": loss} | {name: score}})
    assert best_of(history) == {"round": best, "val": 1.0}


def test_a_saturated_metric_is_decided_by_the_loss(tmp_path):
    """On two classes that any network ranks: the loss is that of all validation images together, and the
    test parts are there for the round that counts."""
    (tmp_path / "two.py").write_text(TWO_BLOBS)
    file = tmp_path / "two.py"
    flags = ["--dataset", file, "--backbone", f"{file}:build", "--metric", "auc"]
    result = run_here("fedavg", tmp_path / "run", *flags, "--rounds", "4", "--test-rounds", "best")
    lines = metrics(tmp_path / "run")
    assert [line["val"]["metric"] for line in lines] == [1.0] * 4
    losses = [line["val"]["loss"] for line in lines]
    assert losses == sorted(losses, reverse=True) and result["best"]["round"] == 4
    assert all("test" in line for line in lines)


TWO_BLOBS = """
import torch
from torch import nn
from common import Domain, Net


def load(args):
    y = torch.arange(60) % 2
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)) / 9 + y[:, None]
    return [Domain(name, x, y) for name in "ab"], ("healthy", "ill")


def build(args, channels, classes):
    net = Net(nn.Sequential(nn.Linear(channels, 4), nn.Identity()), 4, classes)
    nn.init.constant_(net.body[0].weight, 0.5)
    nn.init.constant_(net.head.weight, 0.1)
    net.head.weight.data[0] = -0.1
    return net
"""


def test_it_is_measured_on_all_validation_images_together(tmp_path):
    run_here("fedavg", tmp_path / "run", "--rounds", "1", "--metric", "balanced")
    run = rebuilt(tmp_path / "run", "last")
    pairs = [common.probabilities(model, client.data.val, run.args) for client, model in run.tested()]
    expected = scores(*common.joined(pairs))
    val = metrics(tmp_path / "run")[0]["val"]
    assert val["metric"] == pytest.approx(expected["balanced"]) and val["ALL"] == expected["accuracy"]
    p, y = common.joined(pairs)
    assert val["loss"] == pytest.approx(float(nn.functional.nll_loss(p.log(), y)))


class Says(nn.Module):
    """A network whose outputs for two images are these."""

    def __init__(self, outputs: torch.Tensor):
        super().__init__()
        self.outputs = outputs

    def forward(self, x):
        return self.outputs


def test_logits_become_probabilities_and_an_ensembles_probabilities_stay():
    """Logits that are all positive, or whose sum is 1, are none."""
    pixels, rows = torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.arange(2)
    data = common.Data(pixels, rows, rows, "cpu", "unit")
    for of_first, already in (([0.2, 0.8], True), ([2.0, 3.0], False), ([-1.0, 2.0], False)):
        outputs = tensor([of_first, [1.0, 0.0]])
        found, _ = common.probabilities(Says(outputs), data, common.Args(device="cpu", precision="fp32"))
        torch.testing.assert_close(found, outputs if already else outputs.softmax(1))
