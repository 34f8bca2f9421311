"""Replies of nodes that lie, fail or come back, in one process: each leaves out its node alone.

A fake of Flower's engine (test_flower.py) gives each message to a node. Three nodes have answered honestly
once; then the answer of `b` is spoiled, and the server is asked what it believes.
"""

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import common
from common import UserError
from plumbing.run.files import load_file
from reproduce.compare import read
from reproduce.loading import load_run
from tests.conftest import ROOT, metrics, run_here, stops, write_files
from tests.machinery.test_flower import Grid, deployed, same_run
from tests.own_images import FLAGS, write_images
from tests.three_clients import same

import pytest
import torch

pytest.importorskip("flwr", reason="needs pip install -r requirements-deploy.txt")
flower, node, signing = map(importlib.import_module, ("deploy.flower", "deploy.node", "deploy.signing"))
SERVER, OTHER = signing.Ed25519PrivateKey.generate(), signing.Ed25519PrivateKey.generate()
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
    folder = tmp_path_factory.mktemp("nodes")
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
    lie = numbers({"bytes_up": 5, "bytes_down": -1, "\x1b[2J": 1.0})
    fed.grid, fed.ids = Replay(honest, "train", lie, 1), {}
    sent = {k: log for k, (_, log) in ask(fed, "train").items()}
    assert sent[1]["bytes_up"] == sent[0]["bytes_up"] > 5 and sent[1]["bytes_down"] == sent[0]["bytes_down"]
    assert r"\x1b[2J" in sent[1]
    fed.grid = Replay(honest, "test", numbers({"test_of": 10**6, "odd": 1}, "val_of"), 1)
    counted = {k: found for k, (_, found) in ask(fed, "test").items()}
    assert counted[1].keys() == {"val", "test", "val_of", "test_of"}
    assert counted[1]["test_of"] == sum(fed.told["b"]["tested"])


def test_an_answer_far_larger_than_the_network_is_not_fetched(recorded, monkeypatch):
    """Flower fetches it in pieces, of which the server takes two here."""
    fetched = []

    def piece(request):
        fetched.append(request)
        return SimpleNamespace(object_content=bytes(5 << 20))

    def larger(reply):
        for number in range(60):
            fed.grid._runtime_client.PullObject(number)
    fed, _ = recorded
    monkeypatch.setattr(Replay, "_runtime_client", SimpleNamespace(PullObject=piece), raising=False)
    check_left_out(*replayed(recorded, "train", larger))
    assert fetched == [0, 1] and fed.grid._runtime_client.PullObject is piece


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
    (file,) = (tmp_path / "nodes-state").glob("b-*.pt")
    undone = load_run(tmp_path / "nodes", "b", "last", state=file)
    on_nodes(tmp_path, "nodes", **how)
    with pytest.raises(SystemExit):
        run_here("baselines.ditto", tmp_path / "here", *images(tmp_path), "--rounds", 2, "--stop-after", 1)
    assert same(common.state(undone), common.state(load_run(tmp_path / "here", "b", "last")))
    run_here("baselines.ditto", tmp_path / "here", *images(tmp_path), "--rounds", 2)
    assert same_run(tmp_path / "nodes", tmp_path / "here")

    net = load_run(tmp_path / "nodes", "b", "last", state=file)
    assert same(common.state(net), common.state(load_run(tmp_path / "here", "b", "last")))
    stops("were on separate machines.*--state of predict", load_run, tmp_path / "nodes", "b", "last", code=2)
    torch.save(load_file(file, "kept state") | {"round": 4}, file)
    stops("of round 4 and the state of the run of round 2.*--which last", load_run, tmp_path / "nodes", "b",
          "last", state=file, code=2)


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


# What a node obeys


def instruction(run=1, to=2, key=SERVER, change=lambda content: None):
    """What the server asks the second node in run 1; it is changed after it was signed."""
    from flwr.app import ConfigRecord, Message
    identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    identity.run_id, identity.node_id, identity.task_id = run, 0, 0
    content = flower.records({"w": torch.zeros(2)})
    content["asked"] = ConfigRecord({"what": "train", "t": 1})
    message = Message(content, to, "query")
    signing.sign(message, key)
    change(content)
    return message


FORGED = {"of another run": dict(run=2), "of another node": dict(to=3), "by another key": dict(key=OTHER),
          "not signed": dict(change=lambda content: content.pop("signature")),
          "a text as signature": dict(change=lambda content: content["signature"].update(ed25519="x")),
          "an old one as new": dict(change=lambda content: content["asked"].update(sent=2**62)),
          "other weights": dict(change=lambda content: content.update(flower.records({"w": torch.ones(2)})))}


@pytest.fixture
def obeyed(tmp_path, monkeypatch):
    """What the second node does with a message: it gives its own flags instead of an answer."""
    monkeypatch.setattr(node, "answered", lambda content, own: own["flags"])
    words = ["--secret", "s", "--server-key", "k", "--only", "b", "--state", str(tmp_path), "--device", "cpu"]
    return partial(node.obeyed, context=SimpleNamespace(run_id=1, node_id=2), args=node.arguments(words),
                   key=SERVER.public_key())


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_a_node_obeys_the_server_alone(obeyed, forged):
    with pytest.raises(UserError, match="--server-key has not signed"):
        obeyed(instruction(**forged))


def test_an_instruction_that_is_sent_again_is_not_obeyed(obeyed, tmp_path):
    """Unless it is the newest: Flower may bring one twice."""
    first, second = instruction(), instruction()
    for message in (first, first, second):
        assert obeyed(message) == f"--device cpu --only b --state {tmp_path}"
    with pytest.raises(UserError, match="older than the newest"):
        obeyed(first)


def test_the_server_signs_what_it_asks(recorded, monkeypatch):
    """With the precision that it has chosen: another machine might choose another."""
    fed, honest = recorded
    asked, push = [], Replay.push_messages
    monkeypatch.setattr(Replay, "push_messages", lambda grid, sent: asked.extend(sent) or push(grid, sent))
    monkeypatch.setattr(fed, "key", SERVER)
    assert replayed(recorded, "train", lambda reply: None) == (set(NAMES), "")
    assert len(asked) == 6  # who are you, and train
    for message in asked:
        text = signing.text_of(message.content, 1, message.metadata.dst_node_id)
        SERVER.public_key().verify(message.content["signature"]["ed25519"], text)
        assert message.content["asked"]["words"][-2:] == ["--precision", "fp32"]


@pytest.mark.parametrize("t, last", [(10**6, 0), (3, 0), (-1, -1), (0, 1)])
def test_a_round_that_cannot_be_is_not_trained(recorded, tmp_path, t, last):
    """Of three."""
    from flwr.app import ConfigRecord, RecordDict
    asked = {"what": "train", "words": recorded[0].words, "t": t, "last": [last] * 3, "clients": [*NAMES],
             "targets": []}
    with pytest.raises(UserError, match="that cannot be"):
        flower.answered(RecordDict({"asked": ConfigRecord(asked)}), {"flags": f"--only b --state {tmp_path}"})
    assert not [*tmp_path.iterdir()]


def test_a_key_that_is_missing_or_of_another_kind():
    words = "fedavg --nodes a,b --classes c,d"
    with pytest.raises(UserError, match="expected --sign FILE"):
        flower.on_server(None, SimpleNamespace(run_config={"run": words}))
    with pytest.raises(UserError, match="expected the public half of an Ed25519 key"):
        signing.key_of(ROOT / "requirements.txt", private=False)


# The commands and files of deploy/


def test_another_version_of_flower_is_refused(tmp_path):
    """In one line, before its inner parts are imported."""
    write_files(tmp_path, {"flwr-1.43.0.dist-info/METADATA": "Name: flwr\nVersion: 1.43.0\n"})
    done = subprocess.run([sys.executable, "-m", "deploy.node"], cwd=ROOT, text=True, capture_output=True,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and done.stderr == (
        "deploy.node: expected Flower 1.42, with which this was tried; found 1.43.0: pip install -r "
        "requirements-deploy.txt\n")
    assert "flwr[simulation]>=1.42,<1.43" in (ROOT / "requirements-deploy.txt").read_text()


def test_the_page_has_the_limits_of_nginx():
    """And a piece of Flower's fits in a body."""
    from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
    page, file = ((ROOT / "deploy" / name).read_text() for name in ("README.md", "nginx.conf"))
    table = page[page.index("| from whom | limit |"):]
    limits = re.findall(r"`(\w+ [\w ]+|max_conns=\d+)`", table[:table.index("\n\n")])
    assert len(limits) == 7 and all(f" {limit};" in file for limit in limits)
    (most,) = re.findall(r"client_max_body_size (\d+)m;", file)
    assert FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE == 5 << 20 < int(most) << 20
