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
from types import SimpleNamespace

import common
from common import UserError
from reproduce.compare import read
from tests.conftest import metrics, run_here
from tests.machinery.test_flower import Grid, deployed, same_run
from tests.own_images import FLAGS, write_images

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

    def __init__(self, honest: dict, question: str, spoil, liar: int, registered=NAMES):
        self.honest, self.spoiled, self.spoil = honest, (question, liar), spoil
        self.registered = registered

    def get_nodes(self):
        return [SimpleNamespace(node_id=node, name=name) for node, name in enumerate(self.registered, 1)]

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


def replayed(recorded, what: str, spoil, liar: int = 1, **how) -> tuple[set, str]:
    """Who is believed, and what the server's log says."""
    fed, honest = recorded
    fed.grid, fed.ids, fed.layouts = Replay(honest, what, spoil, liar, **how), {}, {}
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


TELL = ["", "[]", "3", "{}", "[" * 100_000, '{"name": "b"}', {"name": "a"}, {"fixed": {}},
        {"fixed": {"code": ["x"]}}, {"size": 0}, {"name": "\x1b[2J\nb"}]  # more: test_payloads.py


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
TRAIN = [*ANYTHING, ("n is more than told", part("n", {"": torch.tensor(10**9)})), ("no n", part("n", None)),
         ("n is an int32", part("n", {"": torch.tensor(16, dtype=torch.int32)})), ("no w", part("w", None)),
         ("w is a tensor", part("w", {"": torch.zeros(2)})), ("w is empty", part("w", {})),
         ("another shape", tensor([1.0, 1, 1])), ("another dtype", tensor([1, 1])),
         ("NaN", tensor([1.0, torch.nan])), ("no file of numpy's", bias(array(b"x" * 80))),
         ("no bytes", bias(array(b""))), ("4 TiB declared", bias(array(declared("(1099511627776,)")))),
         ("a negative size", bias(array(declared("(-2,)")))), ("a pickle", bias(array(b"\x80\x04N."))),
         ("strings", bias(array(b"", stype="text"))), ("a loss in a list", numbers({"loss": [1.0, 2.0]})),
         ("NaN as loss", numbers({"loss": float("nan")}))]
TEST = [*ANYTHING, ("more right than there are", numbers({"test": 10**6})), ("no val", numbers({}, "val")),
        ("a list", numbers({"test": [1, 1]})), ("a tensor", part("x", {"": torch.zeros(1)}))]
ROWS = [("train", *row) for row in TRAIN] + [("test", *row) for row in TEST]


@pytest.mark.parametrize("what, _, spoil", ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS])
def test_an_answer_that_does_not_fit_leaves_out_its_node_alone(recorded, what, _, spoil):
    check_left_out(*replayed(recorded, what, spoil))


@pytest.mark.parametrize("what", ["tell", "train", "test"])
def test_honest_answers_are_believed(recorded, what):
    assert replayed(recorded, what, lambda reply: None) == (set(NAMES), "")


@pytest.mark.parametrize("spoil", [part("more", {"": torch.zeros(1)}), part("n", {"": torch.tensor(16.0)})])
def test_the_first_answer_is_no_template(recorded, spoil):
    """Most nodes say what an upload looks like, whoever comes first."""
    who, _ = replayed(recorded, "train", spoil, liar=0)
    assert who == {"b", "c"}


def test_what_the_server_knows_is_not_asked(recorded):
    """Bytes and sizes of test parts are its own; numbers that nobody asked for are forgotten."""
    fed, honest = recorded
    lie = numbers({"bytes_up": 5, "bytes_down": -1})
    fed.grid, fed.ids = Replay(honest, "train", lie, 1), {}
    sent = {k: log for k, (_, log) in ask(fed, "train").items()}
    assert sent[1]["bytes_up"] == sent[0]["bytes_up"] > 5 and sent[1]["bytes_down"] == sent[0]["bytes_down"]
    fed.grid = Replay(honest, "test", numbers({"test_of": 10**6, "odd": 1}, "val_of"), 1)
    counted = {k: found for k, (_, found) in ask(fed, "test").items()}
    assert counted[1].keys() == {"val", "test", "val_of", "test_of"}
    assert counted[1]["test_of"] == sum(fed.told["b"]["tested"])


def test_a_node_that_comes_back_is_the_one_that_went(recorded):
    """Other images than before, the name of another one's key, or other code: it stays out."""
    fed, honest = recorded
    replayed(recorded, "tell", lambda reply: None)
    told = dict(fed.told)
    for change in ({"size": 15}, {"content": "other"}):
        fed.ids, fed.told = {}, dict(told)
        fed.grid = Replay(honest, "tell", telling(change), 1)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert fed.meet() == ["b"]
        assert "images" in said.getvalue()
    who, said = replayed(recorded, "tell", lambda reply: None, registered=("a", "c", ""))
    assert who == {"a", "c"}
    who, said = replayed(recorded, "tell", telling({"fixed": fed.same | {"code": "0" * 12}}))
    assert who == {"a", "c"} and "b is another node's, or has another ['code']" in said
    replayed(recorded, "tell", lambda reply: None)
    fed.grid.registered = ("a", "b")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert fed.meet() == ["c"] and said.getvalue() == "c has gone\n"


def test_why_a_node_cannot_answer_stays_with_it(tmp_path, capsys):
    """A patient's name in that of a file does not leave the hospital."""
    flags = images(tmp_path)
    (tmp_path / "images" / "b" / "ill" / "mueller_1950.png").write_text("no image")
    flower = importlib.import_module("deploy.flower")
    grid = Grid(flower, [f"--only {name} --state {tmp_path}" for name in NAMES], lambda *_: "")
    words = ["fedavg", "--scale", "smoke", *map(str, flags), "--nodes", "a,b,c"]
    for wrong in (["--classes", "healthy,ill"], ["--no-such-flag"]):
        fed = SimpleNamespace(grid=grid, words=[*words, *wrong], own=SimpleNamespace(patience=9),
                              key=None, most=0)
        assert flower.Remote.send(fed, "tell", {"b": {}}, {"b": 2}) == {}
        out = capsys.readouterr().out
        (said,) = [line for line in out.splitlines() if line.startswith("b is left out: ")]
        number = said.removesuffix("')")[-8:]
        assert f"{number}: " in out.replace(said, "") and "under" in said and "ill" not in said


def test_a_round_with_an_absent_node_is_a_round(tmp_path):
    """It has no accuracies, and says of whom. The run goes on from it, is finished, is shown and compared."""
    def absent(who, what, t):
        return "before" if who == 2 and (what, t) in [("train", 1), ("test", 2)] else ""

    def killed(who, what, t):
        return absent(who, what, t) or ("lost" if who and (what, t) == ("train", 2) else "")
    how = dict(own=["--min-clients", 2])
    on_nodes(tmp_path, "whole", "--rounds", 4, fault=absent, **how)
    lines = metrics(tmp_path / "whole")
    for name in ("dropped", "untested"):
        assert [entry.get(name) for entry in lines] == [None, ["c"], None, None]
    assert ["val" in entry for entry in lines] == [True, False, True, True]
    with pytest.raises(UserError, match="round 3: 1 of 3"):
        on_nodes(tmp_path, "resumed", "--rounds", 4, fault=killed, **how)
    assert len(read(tmp_path / "resumed").rounds) == 2
    on_nodes(tmp_path, "resumed", "--rounds", 4, **how)
    assert same_run(tmp_path / "whole", tmp_path / "resumed")
    assert "holds this run, finished" in on_nodes(tmp_path, "resumed", "--rounds", 4, **how).said


def test_a_client_that_keeps_rejoins_in_its_own_round(tmp_path):
    """The server tells each node which of its rounds it has: a training whose answer was lost is undone."""
    def lost(who, what, t):
        return "lost" if (who, what, t) == (1, "train", 1) else ""
    how = dict(method="baselines.ditto", own=["--min-clients", 3])
    with pytest.raises(UserError, match="round 2: 2 of 3"):
        on_nodes(tmp_path, "nodes", fault=lost, **how)
    on_nodes(tmp_path, "nodes", **how)
    run_here("baselines.ditto", tmp_path / "here", *images(tmp_path), "--rounds", 2)
    assert same_run(tmp_path / "nodes", tmp_path / "here")


def test_versions_of_the_same_images_are_split_alike(tmp_path, monkeypatch):
    """As on one machine, though a node has one version alone."""
    limited = common.limited

    def versions(*words):
        dataset = limited(*words)
        dataset.same_images = True
        return dataset
    monkeypatch.setattr(common, "limited", versions)
    monkeypatch.setattr(common.linear, "accuracies",  # which labels are drawn
                        lambda z, y, classes, settings, seed, view: {"0.1": seed % 997 / 997, "0.3": 0.0})
    flags = ["--rounds", 1, "--target", "b", "--linear-epochs", 20]
    on_nodes(tmp_path, "nodes", *flags, method="fedgala")
    run_here("fedgala", tmp_path / "here", *images(tmp_path), *flags)
    assert same_run(tmp_path / "nodes", tmp_path / "here")
