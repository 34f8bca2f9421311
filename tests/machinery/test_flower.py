"""What the round loop and separate machines share, and the machines themselves: deploy/flower.py."""

import contextlib
import dataclasses
import importlib
import io
import os
from pathlib import Path
from types import SimpleNamespace

import common
from common import UserError
from deploy.domain import open_domain
from plumbing.run.files import tensors_of
from tests.conftest import (METHODS, metrics, one_run, parsed, quick_for, read_json, run_here, saved_in,
                            small_images)
from tests.own_images import FLAGS as OWN_FLAGS, write_images
from tests.methods.test_every_method import ALL, keeping, same_metrics

import pytest
import torch

DOMAINS = [f"d{15 * k}" for k in range(6)]

# What a round demands beside the two dicts


class WithoutSome(common.Federation):
    """A federation in which some uploads are lost after the training, as nodes' may be."""

    def train(self, of_client, S_t, t):
        uploads, logs = super().train(of_client, S_t, t)
        kept = [k for k in S_t if (k + t) % 3]
        return {k: uploads[k] for k in kept}, {k: logs[k] for k in kept}



FEDERATED = [name for name in METHODS if name != "baselines.centralized"]


@pytest.mark.parametrize("method", quick_for(("fedavg",), FEDERATED))
def test_every_method_goes_on_without_some_uploads(tmp_path, monkeypatch, method):
    monkeypatch.setattr(common, "Federation", WithoutSome)
    run_here(method, tmp_path, "--rounds", 4, *one_run(method))
    rounds = metrics(tmp_path)
    assert any("dropped" in entry for entry in rounds)
    assert all(entry["clients"].keys().isdisjoint(entry.get("dropped", ())) for entry in rounds)
    if method == "fedavg":  # images whose upload was lost do not count
        trained = saved_in(tmp_path / "checkpoint.pt")["images"]
        assert trained == 32 * sum(len(entry["clients"]) for entry in rounds)


def test_a_node_opens_its_own_domain_alone(tmp_path, monkeypatch):
    """Of a folder nothing else is even listed; its clients' images are those of the whole dataset."""
    folder = write_images(tmp_path / "images", ("a", "b", "c"))
    (folder / "b" / "ill").rename(folder / "b" / "odd")  # of which the other nodes know nothing
    args = parsed("fedavg", "--dataset", f"folder:{folder}", *OWN_FLAGS, "--data", tmp_path / "data")
    with pytest.raises(UserError, match="expected the domain d7 and the classes 0, 1; found d0, d15"):
        open_domain(dataclasses.replace(args, dataset="digits", image_size=8), "d7", ("0", "1"))
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(str(path)) or scandir(path))
    one = open_domain(args, "c", ("healthy", "ill"))
    assert listed and all(path.startswith(str(folder / "c")) for path in listed if str(folder) in path)
    assert one.names == ["c"] and one.classes == ("healthy", "ill")
    with pytest.raises(UserError, match="two domains"):
        open_domain(args, "b", ("healthy", "ill"))  # odd is none of the agreed classes


class Grid:
    """Flower's engine in this process: each message builds a node's client anew. `fault(node, what, t)` says
    what happens to an answer: "lost" on its way, "before" it was begun, or "" for none."""

    def __init__(self, flower, node_flags: list[str], fault):
        self.flower, self.flags, self.fault = flower, node_flags, fault
        self.contexts, self.replies, self.asked = {}, {}, []
        identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
        identity.run_id = identity.node_id = identity.task_id = 1  # as a process of Flower's has them

    def get_nodes(self):
        return [SimpleNamespace(node_id=node, name="") for node in range(len(self.flags), 0, -1)]

    def push_messages(self, messages):
        from flwr.app import Context, Error, Message, RecordDict
        (message,) = messages
        node, asked = message.metadata.dst_node_id, message.content["asked"]
        context = Context(0, node, {"flags": self.flags[node - 1]}, RecordDict(), {})
        message.metadata.__dict__["_message_id"] = f"m{len(self.asked)}"
        fault = self.fault(node - 1, asked["what"], asked.get("t", -1))
        reply = Message(Error(0, "no answer"), reply_to=message)
        if fault != "before":
            answered = self.flower.client_app(message, self.contexts.setdefault(node, context))
            reply = answered if fault != "lost" else reply
        self.replies[message.metadata.message_id] = reply
        self.asked.append((asked["what"], asked.get("t", -1), node - 1, fault))
        return [message.metadata.message_id]

    def pull_messages(self, asked):
        return [self.replies.pop(one) for one in asked]


def deployed(out: Path, method: str, *flags, fault=lambda node, what, t: "", own=(), names=DOMAINS,
             classes="0123456789") -> Grid:
    """A run on nodes, as the smoke runs of conftest.py. The nodes come in another order than the clients."""
    pytest.importorskip("flwr", reason="needs pip install -r requirements-deploy.txt")
    flower = importlib.import_module("deploy.flower")
    flower.PAUSE = 0
    grid = Grid(flower, [f"--only {name} --state {out}-state" for name in names], fault)
    words = [method.removeprefix("baselines."), "--scale", "smoke", "--precision", "fp32", "--no-figures",
             "--out", out, *flags, "--nodes", ",".join(names), "--classes", ",".join(classes), *own]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        flower.serve(grid, [str(word) for word in words])
    grid.said = said.getvalue()
    return grid


def server_of(out: Path) -> list[torch.Tensor]:
    return tensors_of(saved_in(out / "checkpoint.pt")["server"])


def same_run(out: Path, other: Path) -> bool:
    """The same metrics to the byte, and the same tensors of the server to the bit."""
    tensors = zip(server_of(out), server_of(other), strict=True)
    return same_metrics(out, other) and all(torch.equal(a, b) for a, b in tensors)


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in ALL if name != "baselines.centralized"])
def test_every_method_is_the_same_on_separate_machines(tmp_path, method):
    """Its client is built anew for each message, from what it keeps; all travels in Flower's records."""
    flags = [*one_run(method), *small_images(method), "--rounds", 3, *keeping(method)]
    deployed(tmp_path / "nodes", method, *flags)
    run_here(method, tmp_path / "here", *flags)
    assert same_run(tmp_path / "nodes", tmp_path / "here")


@pytest.mark.slow
def test_the_networks_after_training_on_separate_machines(tmp_path):
    """In metrics.jsonl to the byte; a node whose answer is lost costs the reading of its round alone."""
    flags = [*small_images("fdse"), "--rounds", 3, "--eval-every", 2, "--after-training"]
    deployed(tmp_path / "nodes", "fdse", *flags)
    result = run_here("fdse", tmp_path / "here", *flags)
    assert same_run(tmp_path / "nodes", tmp_path / "here")
    assert read_json(tmp_path / "nodes" / "result.json")["after_training"] == result["after_training"]
    deployed(tmp_path / "lost", "fdse", *flags,
             fault=lambda node, what, t: "lost" if (node, what, t) == (0, "train", 1) else "")
    assert metrics(tmp_path / "lost")[1]["after_training"] == {"untested": ["d0"]}
    lost = read_json(tmp_path / "lost" / "result.json")
    assert lost["curve"]["round"] == [2, 3] and lost["after_training"]["curve"]["round"] == [3]


@pytest.mark.slow
def test_centralized_has_no_nodes(tmp_path):
    with pytest.raises(UserError, match="in one place; on one machine: python -m baselines.centralized"):
        deployed(tmp_path, "baselines.centralized")


@pytest.mark.slow
def test_images_of_ones_own_on_separate_machines(tmp_path):
    """The unseen domain is a node that never trains."""
    write_images(tmp_path / "images", ("a", "b", "c"))
    flags = ["--dataset", f"folder:{tmp_path / 'images'}", *OWN_FLAGS, "--data", tmp_path / "data",
             "--protocol", "lodo", "--target", "b", "--rounds", 2]
    grid = deployed(tmp_path / "nodes", "fdse", *flags, names=("a", "b", "c"), classes=("healthy", "ill"))
    run_here("fdse", tmp_path / "here", *flags)
    assert same_run(tmp_path / "nodes", tmp_path / "here")
    assert {(what, node) for what, _, node, _ in grid.asked if node == 1} == {("tell", 1), ("test", 1)}


@pytest.mark.slow
def test_a_state_that_is_gone_is_not_made_up(tmp_path):
    with pytest.raises(UserError, match="--min-clients"):
        deployed(tmp_path / "run", "fdse", "--rounds", 2, own=["--min-clients", 6],
                 fault=lambda node, what, t: "lost" if (node, what, t) == (0, "train", 1) else "")
    next((tmp_path / "run-state").glob("d45-*")).unlink()
    with pytest.raises(UserError, match="5 of 6 clients"):
        deployed(tmp_path / "run", "fdse", "--rounds", 2, own=["--min-clients", 6])
