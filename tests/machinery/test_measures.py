"""python -m reproduce.measures: what it shows and writes, and its numbers against independent ones."""

import dataclasses
import json

import common
import fdse
import fedgala
from common import batches, flatten, load, seed_all
from plumbing.errors import UserError
from reproduce.measures.command import main
from reproduce.measures.finished import finished, history, labels_of, numbers_of, rebuilt
from reproduce.measures.gradients import gradient_pairs, mutual_information
from reproduce.measures.overhead import cost_to_reach, counter, training_flops
from reproduce.measures.pad import proxy_a_distance
from reproduce.measures.risks import local_risks
from tests.conftest import fails, run_here
from tests.finished_runs import labelled_runs, unlabelled_runs

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy


@pytest.fixture
def runs(tmp_path_factory):
    return labelled_runs(tmp_path_factory)


@pytest.fixture
def unlabelled(tmp_path_factory):
    return unlabelled_runs(tmp_path_factory) / "paper"


def shown(*flags) -> None:
    """Run the command."""
    main([str(flag) for flag in flags])


def test_tsne_of_some_domains(runs, tmp_path):
    out, numbers = tmp_path / "sub" / "t.png", tmp_path / "t.json"
    shown("tsne", runs / "fedavg-lodo", runs / "fdse-lodo", "--domains", "d15,d0", "--images", 5, "--out",
          out, "--json", numbers)
    assert out.read_bytes().startswith(b"\x89PNG") and [*out.parent.iterdir()] == [out]
    found = json.loads(numbers.read_text())["runs"]
    assert [(one["method"], one["domains"]) for one in found] == [("FedAvg", ["d15", "d0"]),
                                                                  ("FDSE", ["d15", "d0"])]


def test_pad_and_risk_draw_and_show_a_table(runs, tmp_path, capsys):
    """Of the pairs of clients, and of each client and the mixture; the left-out domain is no client."""
    folders, numbers = (runs / "fedavg-lodo", runs / "fdse-lodo"), tmp_path / "p.json"
    shown("pad", *folders, "--part", "all", "--out", tmp_path / "p.svg", "--json", numbers)
    shown("risk", *folders, "--out", tmp_path / "r.pdf")
    assert b"</svg>" in (tmp_path / "p.svg").read_bytes()
    assert (tmp_path / "r.pdf").read_bytes().startswith(b"%PDF")
    said = capsys.readouterr().out
    assert "mean of mixture and client" in said and "d0 (left out)" in said
    table = json.loads(numbers.read_text())["runs"][0]
    assert len(table["pairs"]) == 10 and len(table["global"]) == 5 and "d0" not in table["global"]
    assert table["mean_pairs"] == pytest.approx(np.mean(list(table["pairs"].values())))


def test_confusion_matrices(runs, tmp_path, capsys):
    """Of a run with a left-out domain: the pooled one is the sum of the clients' and has the recorded AVG and
    ALL of their test images; the target's is beside it."""
    folder, numbers = runs / "fdse-lodo", tmp_path / "c.json"
    shown("confusion", folder, "--out", tmp_path / "c.png", "--json", numbers)
    (found,), best = json.loads(numbers.read_text())["runs"], finished(folder)["best"]
    matrices = {name: np.array(matrix) for name, matrix in found["confusion"].items()}
    target, pooled = matrices.pop("d0"), matrices.pop("all clients")
    assert (pooled == sum(matrices.values())).all() and len(matrices) == 5
    assert target.trace() / target.sum() == best["target"]
    assert pooled.trace() / pooled.sum() == best["ALL"]
    said = capsys.readouterr().out.splitlines()
    assert said[3].split() == ["0", *map(str, pooled[0])]
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_measures_of_a_run_without_labels(unlabelled, tmp_path, capsys):
    """Of all domains, the left-out one last."""
    numbers = tmp_path / "t.json"
    shown("tsne", unlabelled, "--out", tmp_path / "t.png", "--images", 5, "--json", numbers)
    domains = json.loads(numbers.read_text())["runs"][0]["domains"]
    assert domains == ["d15", "d30", "d45", "d60", "d75", "d0"]
    shown("pad", unlabelled, "--part", "all")
    capsys.readouterr()
    fails(capsys, 2, "has no confusion matrices", shown, "confusion", unlabelled)

def test_the_numbers_of_a_round():
    """Accuracies and the means of what the clients that trained have logged."""
    entry = {"round": 2, "val": {"ALL": 0.5}, "test": {"ALL": 0.25, "AVG": 0.75, "clients": {"a": 1.0}},
             "target": 0.1, "clients": {"a": {"loss": 1.0, "bytes_up": 3}, "b": {"loss": 2.0}}}
    assert numbers_of(entry) == {"val": 0.5, "ALL": 0.25, "AVG": 0.75, "target": 0.1, "loss": 1.5}
    linear = {"round": 1, "target": 0.5, "linear": {"d0": {"0.1": 0.25}}, "clients": {}}
    assert numbers_of(linear) == {"target": 0.5, "d0 0.1": 0.25}


def test_labels_say_in_what_runs_differ():
    keys = [{"method": "fdse", "target": "d0", "seed": 0}, {"method": "fdse", "target": "all", "seed": 1},
            {"method": "fedsr", "variant": "fedl2r", "target": "d0", "lr": 0.2}]
    assert labels_of(keys, ("seed",)) == ["FDSE, target d0", "FDSE, target all", "FedSR (fedl2r), target d0"]
    assert labels_of(keys[:2])[0] == "FDSE, seed 0, target d0"
    one, other = [{"method": "fdse", "backbone": f"net.py:build {digit * 16}"} for digit in "12"]
    assert labels_of([one, one | {"backbone": "vit"}])[0] == "FDSE, backbone net.py:build"
    assert labels_of([one, other])[1].endswith("build 2222222222222222")

def flops(model: nn.Module, shape: tuple[int, ...]) -> tuple[int, int]:
    """(forward, training step) FLOPs of a network for a batch."""
    x = torch.zeros(shape)
    with counter() as forward, torch.no_grad():
        model.eval()(x)
    with counter() as step:
        model.train()(x).sum().backward()
    return forward.get_total_flops(), step.get_total_flops()


def test_flops_by_hand():
    """Two FLOPs for a multiply-add; the first layer's input has no gradient. Groups divide a convolution's
    products."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, groups=8), nn.Flatten(),
        nn.Linear(16 * 36, 5))
    B = 4
    first = 2 * B * 36 * 8 * 3 * 9
    grouped = 2 * B * 36 * 16 * 1 * 9
    linear = 2 * B * 16 * 36 * 5
    assert flops(net, (B, 3, 6, 6)) == (first + grouped + linear, 2 * first + 3 * (grouped + linear))


@pytest.mark.parametrize("method", ["fedavg", "fdse"])
def test_training_flops_are_those_of_a_step(runs, method):
    """FedAvg trains by one forward and backward pass; FDSE's L_Con adds no products, so its step is that of
    its network."""
    run = rebuilt(runs / f"{method}-indomain", "last")
    server, client = run.federation.server, run.federation.clients[0]
    _, step = flops(client.model(server.download(0)), (16, 1, 28, 28))
    assert training_flops(run) == pytest.approx(step / 16)


def test_cost_by_hand(runs, tmp_path, capsys):
    """Of both rounds: 32 images of six clients in each, and the bytes that the rounds have logged."""
    folder, numbers = runs / "fedavg-indomain", tmp_path / "c.json"
    entries, run = history(folder), rebuilt(folder, "last")
    accuracy = entries[-1]["test"]["AVG"]
    shown("cost", folder, runs / "fedavg-lodo", "--accuracy", accuracy, "--json", numbers)
    cost = json.loads(numbers.read_text())["runs"][0]["cost"]
    done = entries[:cost["round"]]
    assert done[-1]["test"]["AVG"] >= accuracy
    exchanged = sum(log["bytes_up"] + log["bytes_down"] for one in done for log in one["clients"].values())
    assert cost["tflops"] == pytest.approx(32 * len(done) * training_flops(run) / 1e12)
    assert cost["gb"] == pytest.approx(exchanged / 6 / 1e9) and cost["gpu_memory_mib"] is None
    assert "FedAvg, protocol indomain, target all" in capsys.readouterr().out
    assert cost_to_reach(run, 1.1) is None

def gaussians(n, dim, distance, seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, n, dim))
    b[:, 0] += distance
    return a, b


def test_pad_of_known_sets():
    same = [proxy_a_distance(*gaussians(4000, 4, 0, s), seed=s) for s in range(4)]
    assert abs(np.mean(same)) < 0.06 and max(map(abs, same)) < 0.15
    assert proxy_a_distance(*gaussians(200, 4, 40)) == 2
    # unit Gaussians at a distance of 2: the best linear rule errs with probability Phi(-1) = 0.15866
    near = [proxy_a_distance(*gaussians(4000, 4, 2, s), seed=s) for s in range(4)]
    assert abs(np.mean(near) - 2 * (1 - 2 * 0.15866)) < 0.04


def test_pad_is_balanced_repeats_and_takes_tensors():
    a, b = gaussians(3000, 3, 0)
    assert abs(proxy_a_distance(a, b[:300])) < 0.35  # unbalanced sets would give a test error of 1/11
    assert abs(proxy_a_distance(a[:300], b)) < 0.35
    first = proxy_a_distance(a, b, 3)
    assert first == proxy_a_distance(torch.from_numpy(a), torch.from_numpy(b), 3)
    assert first != proxy_a_distance(a, b, 4)
    scale = [1, 1e6, 1e-6]
    assert proxy_a_distance(a * scale + 7, b * scale + 7, 3) == pytest.approx(first, abs=1e-9)
    with pytest.raises(UserError, match="needs 4 images"):
        proxy_a_distance(a[:3], b)

def test_risks_are_the_cross_entropies_of_the_tested_networks(runs):
    run = rebuilt(runs / "fdse-lodo")
    risks = local_risks(run)
    for client, model in run.tested():
        data = client.data
        if data.unseen:
            continue
        for part in (data.train, data.test):
            x, y = part.batch(torch.arange(len(part)))
            loss = cross_entropy(model.eval()(x), y).item()
            name = "train" if part is data.train else "test"
            assert risks["clients"][data.name][name] == pytest.approx(loss, rel=1e-5)


def test_the_share_of_fdses_consistency(tmp_path, capsys):
    """Against both gradients of the second step, with the first one by hand."""
    run_here("fdse", tmp_path / "run", "--rounds", 2, "--clip", 3.0, "--batch-size", 8)
    shown("shares", tmp_path / "run", "--coefficient", "lambda", "--which", "last", "--step", 2, "--json",
          tmp_path / "n.json")
    (found,) = json.loads((tmp_path / "n.json").read_text())["runs"]
    run = rebuilt(tmp_path / "run", "last")
    client, args = run.federation.clients[0], dataclasses.replace(run.args, steps=2)
    model = load(client.net, client.theta(run.federation.server.download(0))).train()
    optimizer, hat = common.sgd(model, args, run.round), None
    glob = fdse.bn_dfe_statistics(client.blocks)
    seed_all(args.seed, "shares", 0)
    for x, y in batches(client.data.train, args, run.round, 0):
        task = cross_entropy(model.classify(model.features(x)), y)
        term, hat = fdse.consistency([b.statistics for b in client.blocks], glob, hat, args.beta)
        norms = [norm_of_gradient(loss, model, optimizer) for loss in (args.lambda_ * term, task)]
        norm_of_gradient(task + args.lambda_ * term, model, optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
    assert found["clients"][client.data.name] == pytest.approx(norms[0] / norms[1], rel=1e-3)
    assert set(found["clients"]) == {c.data.name for c in run.federation.clients.values()}
    assert found["mean"] == pytest.approx(sum(found["clients"].values()) / len(found["clients"]))
    assert "mean" in capsys.readouterr().out


def norm_of_gradient(loss: torch.Tensor, model: nn.Module, optimizer) -> float:
    """The norm of a loss's gradient, which the parameters have afterwards."""
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    return float(flatten([p.grad for p in model.parameters() if p.grad is not None]).norm())


def noise(values: np.ndarray) -> common.Data:
    """A `Data` of 1x8x8 images, each of a class of its own, from values [n, 64] of about unit variance."""
    images = torch.tensor((128 + 30 * values).clip(0, 255).round()).to(torch.uint8).view(-1, 1, 8, 8)
    rows = torch.arange(len(values))
    return common.Data(images, rows, rows, "cpu", "unit")


@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_mutual_information(rho):
    """Pixels rho-correlated over pairs of the same class: -F/2 log(1 - rho^2), Eq. (3); none: what chance
    gives, F / 2n."""
    n, F = 3000, 64
    shared, own = np.random.default_rng(0).standard_normal((2, n, F))
    other = rho * shared + np.sqrt(1 - rho ** 2) * own
    information, chance = mutual_information(noise(shared), noise(other), size=8)
    assert information == pytest.approx(-F / 2 * np.log(1 - rho ** 2) + F / 2 / n, rel=0.02, abs=0.005)
    assert chance == pytest.approx(F / 2 / n, rel=0.5)


def test_covariance_and_cosine_of_known_gradients(unlabelled, monkeypatch):
    """A loss whose gradient is a constant vector of each domain, in one tensor of all those that travel."""
    slopes = iter(range(1, 7))

    def loss(model, x1, x2):
        bias = model.get_parameter("g.3.bias")
        others = sum(0 * p.sum() for p in model.parameters())
        return others + (bias * torch.linspace(next(slopes), -1, bias.numel())).sum()
    monkeypatch.setattr(fedgala.Learner, "loss", loss)
    run = rebuilt(unlabelled)
    pair = gradient_pairs(run, 1)["pairs"]["d15 / d30"]
    fed = run.federation
    sent = [p.numel() for name, p in fed.clients[0].net.named_parameters() if name in fed.server.w]
    u, v = np.zeros((2, sum(sent)))
    u[:fed.settings.dim] = np.linspace(1, -1, fed.settings.dim)
    v[:fed.settings.dim] = np.linspace(2, -1, fed.settings.dim)
    assert pair["covariance"] == pytest.approx(np.cov(u, v, bias=True)[0, 1], rel=1e-4)
    assert pair["cosine"] == pytest.approx(u @ v / np.linalg.norm(u) / np.linalg.norm(v), rel=1e-4)
