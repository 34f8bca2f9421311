"""How large the gradient of one term of a loss is."""

import dataclasses
import json

import common
import fdse
from common import batches, flatten, load, seed_all
from reproduce.measures.command import main
from reproduce.measures.finished import rebuilt
from tests.conftest import run_here

import pytest
import torch
from torch.nn.functional import cross_entropy


def test_the_share_of_fdses_consistency(tmp_path, capsys):
    """Against both gradients of the third step, with the first two by hand."""
    run_here("fdse", tmp_path / "run", "--rounds", 2, "--clip", 3.0, "--batch-size", 8)
    main(["shares", str(tmp_path / "run"), "--coefficient", "lambda", "--which", "last", "--step", "3",
          "--json", str(tmp_path / "n.json")])
    (found,) = json.loads((tmp_path / "n.json").read_text())["runs"]
    run = rebuilt(tmp_path / "run", "last")
    client, args = run.federation.clients[0], dataclasses.replace(run.args, steps=3)
    model = load(client.net, client.theta(run.federation.server.download(0))).train()
    optimizer = common.sgd(model, args, run.round)
    glob, hat = client.bn_dfe_statistics(), None
    seed_all(args.seed, "shares", 0)
    for step, (x, y) in enumerate(batches(client.data.train, args, run.round, 0)):
        task = cross_entropy(model.classify(model.features(x)), y)
        term, hat = fdse.consistency([b.statistics for b in client.blocks], glob, hat, args.beta)
        parameters = [p for p in model.parameters() if p.requires_grad]
        if step == 2:
            of_term = torch.autograd.grad(args.lambda_ * term, parameters, retain_graph=True,
                                          allow_unused=True)
            of_task = torch.autograd.grad(task, parameters)
            break
        optimizer.zero_grad()
        (task + args.lambda_ * term).backward()
        torch.nn.utils.clip_grad_norm_(parameters, args.clip)
        optimizer.step()
    share = flatten([g for g in of_term if g is not None]).norm() / flatten(of_task).norm()
    assert found["clients"][client.data.name] == pytest.approx(float(share), rel=1e-3)
    assert set(found["clients"]) == {c.data.name for c in run.federation.clients.values()}
    assert found["mean"] == pytest.approx(sum(found["clients"].values()) / len(found["clients"]))
    assert "mean" in capsys.readouterr().out
