"""Replies of nodes that lie, fail or come back, in one process: each leaves out its node alone.

A fake of Flower's engine (test_flower.py) gives each message to a node. Three nodes have answered honestly
once; then the answer of `b` is spoiled, and the server is asked what it believes.
"""

import contextlib
import importlib
import io
import json
from copy import deepcopy
from pathlib import Path

import common
from common import UserError
from plumbing.payloads import agreed, check_told
from reproduce.compare import read
from tests.conftest import metrics, parsed, run_here
from tests.finished_runs import once
from tests.machinery.test_flower import Grid, deployed, same_run
from tests.own_images import FLAGS, write_images

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs pip install -r requirements-deploy.txt")
NAMES = ("a", "b", "c")


def images(folder: Path) -> list:
    """The flags of a run on the images of three small hospitals."""
    if not (folder / "images").exists():
        write_images(folder / "images", NAMES)
    return ["--dataset", f"folder:{folder / 'images'}", *FLAGS, "--data", folder / "data"]


def on_nodes(folder: Path, out: str, *flags, method: str = "fedavg", **how) -> Grid:
    """A run of two rounds on three nodes."""
    flags = [*images(folder), "--rounds", 2, *flags]
    return deployed(folder / out, method, *flags, names=NAMES, classes=("healthy", "ill"), **how)


class Replay:
    """Honest answers from memory, but that of one node to one question, which `spoil` changes."""

    def __init__(self, honest: dict, question: str, spoil, liar: int):
        self.honest, self.spoiled, self.spoil = honest, (question, liar), spoil

    def get_node_ids(self):
        return [1, 2, 3]

    def push_messages(self, messages):
        return [(message.content["asked"]["what"], message.metadata.dst_node_id - 1) for message in messages]

    def pull_messages(self, asked):
        reply = deepcopy(self.honest[asked[0]])
        return asked[0] == self.spoiled and self.spoil(reply) or [reply]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple:
    """The server of a run, after a message of each kind, and the honest answers of its three nodes."""
    flower, folder = importlib.import_module("deploy.flower"), tmp_path_factory.mktemp("nodes")
    flags = [f"--only {name} --state {folder / 'state'}" for name in NAMES]
    grid, honest = Grid(flower, flags, lambda node, what, t: ""), {}
    pull = grid.pull_messages

    def pulled(asked):
        (reply,), (what, _, node, _) = pull(asked), grid.asked[int(asked[0][1:])]
        honest[what, node] = deepcopy(reply)
        return [reply]
    grid.pull_messages = pulled
    words = ["fedavg", "--scale", "smoke", "--precision", "fp32", *map(str, images(folder)), "--rounds", "3",
             "--nodes", "a,b,c", "--classes", "healthy,ill"]
    with contextlib.redirect_stdout(io.StringIO()):
        fed = flower.Remote(grid, words)
        ask(fed, "train")
        ask(fed, "test")
    return fed, honest


def ask(fed, what: str) -> dict:
    return fed.ask(what, {k: fed.server.download(k) for k in range(3)}, 1)


def replayed(recorded, what: str, spoil, liar: int = 1) -> tuple[set, str]:
    """Who is believed, and what the server's log says."""
    fed, honest = recorded
    fed.grid, fed.ids, fed.layouts = Replay(honest, what, spoil, liar), {}, {}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        if what == "tell":
            fed.told = {}
            fed.meet()
            return set(fed.ids), said.getvalue()
        return {NAMES[k] for k in ask(fed, what)}, said.getvalue()


def check_left_out(who: set, said: str) -> None:
    """The others are believed; the log has one short line without signs that act on a terminal."""
    assert who == {"a", "c"}
    assert said.count("is left out: ") == said.count("\n") == 1
    assert said.strip().isprintable() and len(said) < 500


def telling(change):
    """Another answer to `tell`: the text, or some of its values."""
    def spoil(reply):
        told = reply.content["told"]
        told["json"] = change if isinstance(change, str) else json.dumps(json.loads(told["json"]) | change)
    return spoil


TELL = ["", "no json", "[]", "null", "3", "{}", "[" * 100_000, '{"name": "b"}', "NaN", {"more": 1},
        {"name": 3}, {"name": ["b"]}, {"name": "a"}, {"name": "z"}, {"name": "\x1b[2J\nb"}, {"unseen": True},
        {"unseen": "no"}, {"size": 0}, {"size": -16}, {"size": 1e30}, {"size": 10**12}, {"size": 16.5},
        {"size": True}, {"size": "16"}, {"size": [16]}, {"size": float("nan")}, {"validated": 0},
        {"validated": -1}, {"tested": 2}, {"tested": [2]}, {"tested": [3, -1]}, {"tested": [0, 0]},
        {"tested": [[1], [1]]}, {"tested": ["1", "1"]}, {"channels": 0}, {"channels": -3},
        {"channels": 10**12}, {"content": None}, {"content": ["x"]}, {"fixed": {}}, {"fixed": ["code"]},
        {"fixed": {"code": ["x"]}}]


@pytest.mark.parametrize("change", TELL, ids=lambda change: str(change)[:30])
def test_a_node_that_tells_what_cannot_be_true_stays_out_alone(recorded, change):
    check_left_out(*replayed(recorded, "tell", telling(change)))


def array(data: bytes, shape=(2,), stype: str = "numpy.ndarray"):
    from flwr.app import Array
    return Array("float32", shape, stype, data)


def declared(shape: str) -> bytes:
    """A file of numpy's whose header declares a shape, with eight bytes behind it."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (117 - len(header)) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)


def part(name: str, tensors: dict | None):
    """Another part of the upload, or none."""
    def spoil(reply):
        from flwr.app import ArrayRecord
        reply.content.pop(name, None)
        if tensors is not None:
            reply.content[name] = ArrayRecord(torch_state_dict=tensors)
    return spoil


def bias(data):
    """The bias of the classifier is another array."""
    def spoil(reply):
        reply.content["w"]["head.bias"] = data
    return spoil


def tensor(value):
    """The bias of the classifier is another tensor."""
    from flwr.app import Array
    return bias(Array(torch.as_tensor(value).numpy()))


def numbers(change: dict, without: str = ""):
    """Other numbers beside the upload."""
    def spoil(reply):
        for name, value in change.items():
            reply.content["numbers"][name] = value
        if without:
            del reply.content["numbers"][without]
    return spoil


def nothing(reply):
    for name in list(reply.content):
        del reply.content[name]


def of_flower(reply):
    from flwr.app import Error, Message
    return [Message(Error(0, "its log says why, \x1b[2J under 3f"), reply_to=reply)]


def breaks(reply):
    raise RuntimeError("Unexpected set of `children`")


ANYTHING = [("nothing", nothing), ("an error", of_flower), ("no answer can be made of it", breaks)]
TRAIN = [*ANYTHING, ("n is a float", part("n", {"": torch.tensor(16.0)})),
         ("n is a vector", part("n", {"": torch.tensor([16, 16])})),
         ("n is 0", part("n", {"": torch.tensor(0)})), ("n is -16", part("n", {"": torch.tensor(-16)})),
         ("n is larger than told", part("n", {"": torch.tensor(10**9)})), ("no n", part("n", None)),
         ("n is an int32", part("n", {"": torch.tensor(16, dtype=torch.int32)})),
         ("no w", part("w", None)), ("w is a tensor", part("w", {"": torch.zeros(2)})),
         ("w has other names", part("w", {"x": torch.zeros(2)})), ("w is empty", part("w", {})),
         ("an empty array", tensor([])), ("a scalar", tensor(1.0)), ("another shape", tensor([1.0, 1, 1])),
         ("another dtype", tensor([1, 1])), ("a double", tensor(torch.zeros(2).double())),
         ("NaN", tensor([1.0, torch.nan])), ("infinity", tensor([1.0, torch.inf])),
         ("no file of numpy's", bias(array(b"x" * 80))), ("no bytes", bias(array(b""))),
         ("4 TiB declared", bias(array(declared("(1099511627776,)")))),
         ("a negative size", bias(array(declared("(-2,)")))), ("a pickle", bias(array(b"\x80\x04N."))),
         ("strings", bias(array(b"", stype="text"))), ("a loss in a list", numbers({"loss": [1.0, 2.0]})),
         ("NaN as loss", numbers({"loss": float("nan")})), ("no end", numbers({"loss": float("inf")})),
         ("a hundred numbers", numbers({f"n{i}": 1.0 for i in range(100)}))]
TEST = [*ANYTHING, ("more right than there are", numbers({"test": 10**6})), ("-1 right", numbers({"val": -1})),
        ("no val", numbers({}, "val")), ("no test", numbers({}, "test")), ("NaN", numbers({"val": float("nan")})),
        ("a list", numbers({"test": [1, 1]})), ("a tensor", part("x", {"": torch.zeros(1)}))]
ROWS = [("train", *row) for row in TRAIN] + [("test", *row) for row in TEST]


@pytest.mark.parametrize("what, _, spoil", ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS])
def test_an_answer_that_does_not_fit_leaves_out_its_node_alone(recorded, what, _, spoil):
    check_left_out(*replayed(recorded, what, spoil))


@pytest.mark.parametrize("what", ["tell", "train", "test"])
def test_honest_answers_are_believed(recorded, what):
    assert replayed(recorded, what, lambda reply: None) == (set(NAMES), "")
