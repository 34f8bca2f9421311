"""python -m reproduce.measures: what it shows and writes, and its numbers against independent ones."""


from plumbing.run.runfolder import read_history
from reproduce.measures.command import main
from reproduce.measures.finished import finished, labels_of, numbers_of, rebuilt
from reproduce.measures.overhead import cost_to_reach, counter, training_flops
from tests.conftest import read_json

import numpy as np
import pytest
import torch
from torch import nn


def shown(*flags) -> None:
    """Run the command."""
    main([str(flag) for flag in flags])


def test_confusion_matrices(runs, tmp_path, capsys):
    """Of a run with a left-out domain: the pooled one is the sum of the clients' and has the recorded AVG and
    ALL of their test images; the target's is beside it."""
    folder, numbers = runs / "fdse-lodo", tmp_path / "c.json"
    shown("confusion", folder, "--out", tmp_path / "c.png", "--json", numbers)
    (found,), best = read_json(numbers)["runs"], finished(folder)["best"]
    matrices = {name: np.array(matrix) for name, matrix in found["confusion"].items()}
    target, pooled = matrices.pop("d0"), matrices.pop("all clients")
    assert (pooled == sum(matrices.values())).all() and len(matrices) == 5
    assert target.trace() / target.sum() == best["target"]
    assert pooled.trace() / pooled.sum() == best["ALL"]
    said = capsys.readouterr().out.splitlines()
    assert said[3].split() == ["0", *map(str, pooled[0])]
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


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


def test_the_copy_of_a_file_has_its_own_name(monkeypatch):
    monkeypatch.setattr("reproduce.measures.finished.name_of", lambda key: "FedAvg")
    assert labels_of([{"method": "fedavg", "lr": 1}, {"method": "one", "lr": 2}]) == ["fedavg", "one"]


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
    entries, run = read_history(folder), rebuilt(folder, "last")
    accuracy = entries[-1]["test"]["AVG"]
    shown("cost", folder, runs / "fedavg-lodo", "--accuracy", accuracy, "--json", numbers)
    cost = read_json(numbers)["runs"][0]["cost"]
    done = entries[:cost["round"]]
    assert done[-1]["test"]["AVG"] >= accuracy
    exchanged = sum(log["bytes_up"] + log["bytes_down"] for one in done for log in one["clients"].values())
    assert cost["tflops"] == pytest.approx(32 * len(done) * training_flops(run) / 1e12)
    assert cost["gb"] == pytest.approx(exchanged / 6 / 1e9) and cost["gpu_memory_mib"] is None
    assert "FedAvg, protocol indomain, target all" in capsys.readouterr().out
    assert cost_to_reach(run, 1.1) is None
