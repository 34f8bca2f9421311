"""What travels: its layout, by most of those who send it, and what the answer of a node may be."""

import json

from plumbing.run.payloads import agreed, check_answer, check_told, checked_numbers, expected_layout, layout
from tests.conftest import parsed, stops

import pytest
import torch

NAMES, CLASSES = ("a", "b", "c"), ("healthy", "ill")
TOLD = {"name": "b", "unseen": False, "size": 16, "validated": 2, "tested": [1, 1], "channels": 3,
        "content": "x", "fixed": {"code": "y"}}
# What a node cannot tell of itself, each instead of a value of the above.
LIES = [{"more": 1}, {"name": 3}, {"name": ["b"]}, {"name": "z"}, {"name": "\x1b[2J\nb"}, {"unseen": True},
        {"unseen": "no"}, {"size": 0}, {"size": -16}, {"size": 1e30}, {"size": 10**12}, {"size": 16.5},
        {"size": True}, {"size": "16"}, {"size": [16]}, {"size": float("nan")}, {"validated": 0},
        {"validated": -1}, {"tested": 2}, {"tested": [2]}, {"tested": [3, -1]}, {"tested": [0, 0]},
        {"tested": [[1], [1]]}, {"tested": ["1", "1"]}, {"channels": 0}, {"channels": -3},
        {"channels": 10**12}, {"content": None}, {"content": ["x"]}, {"fixed": ["code"]}]
WRONG = (ValueError, TypeError, LookupError, RuntimeError)


def told(change: dict, *flags) -> tuple:
    return check_told(json.loads(json.dumps(TOLD)) | change, parsed("fedavg", *flags), NAMES, CLASSES)


@pytest.mark.parametrize("change", LIES, ids=str)
def test_what_cannot_be_true_of_a_node(change):
    with pytest.raises(WRONG):
        told(change)


def test_what_can_be_true_of_a_node():
    assert told({}) == ("b", {"code": "y"})
    lodo = ("--protocol", "lodo", "--target", "b")
    assert told({"unseen": True, "size": 0, "validated": 0}, *lodo) == ("b", {"code": "y"})
    with pytest.raises(WRONG):
        told({}, *lodo)


def believed(what: str, numbers: dict, up: dict | None = None, **change) -> dict:
    down = {"w": torch.zeros(3)}
    return checked_numbers(what, TOLD | change, parsed("fedgala"), down, up or {}, numbers)


def test_numbers_that_the_server_knows_are_its_own():
    up = {"w": torch.zeros(2), "n": torch.tensor(16)}
    sent = {"bytes_down": 5, "bytes_up": 10**9, "loss": -0.5}
    assert believed("train", sent, up) == {"bytes_down": 12, "bytes_up": 16, "loss": -0.5}
    assert list(believed("train", sent, up)) == list(sent)  # the bytes of metrics.jsonl
    assert believed("train", {}, up) == {"bytes_down": 12, "bytes_up": 16}
    expected = {"val": 2, "val_of": 2, "test": 1, "test_of": 2}
    assert believed("test", {"val": 2, "test": 1, "test_of": 10**6, "odd": 7}) == expected
    assert believed("test", {"test": 0}, unseen=True) == {"test": 0, "test_of": 2}
    assert believed("validate", {"val": 0, "test": 1}) == {"val": 0, "val_of": 2}
    assert believed("fit", {"0.1": 1.0, "0.3": 0.0}) == {"0.1": 1.0, "0.3": 0.0}
    assert believed("start", {"chance_loss": 2.5}) == {"chance_loss": 2.5}


def counts_believed(val, test, *flags: str) -> dict:
    """What stays of a client's counts of the network that it has trained."""
    numbers = {"loss": 1.0, "after_training/val": val, "after_training/test": test}
    down = {"w": torch.zeros(3)}
    told = checked_numbers("train", TOLD, parsed("fedavg", *flags), down, {}, numbers)
    return {name: n for name, n in told.items() if name.startswith("after_training")}


def test_counts_of_a_trained_network():
    """The server knows of how many images; without the flag nobody has asked for them."""
    assert counts_believed(2, 0, "--after-training") == {
        "after_training/val": 2, "after_training/val_of": 2, "after_training/test": 0,
        "after_training/test_of": 2}
    assert counts_believed(2, 0) == {}
    for val, test in ((3, 0), (0, -1), (float("nan"), 0)):
        with pytest.raises(WRONG):
            counts_believed(val, test, "--after-training")


@pytest.mark.parametrize("what, numbers, up", [
    ("test", {"val": 3, "test": 1}, {}), ("test", {"val": 2, "test": -1}, {}), ("test", {"val": 2}, {}),
    ("test", {"test": 2}, {}), ("validate", {"val": float("nan")}, {}), ("validate", {"val": [1]}, {}),
    ("fit", {"0.1": 1.0}, {}), ("fit", {"0.1": 1.0, "0.3": 1.01}, {}), ("start", {}, {}),
    ("start", {"chance_loss": -1}, {}), ("train", {f"n{i}": 0.0 for i in range(60)}, {}),
    ("train", {"loss": float("nan")}, {}), ("train", {"loss": "low"}, {}),
    ("train", {}, {"n": torch.tensor(17)}), ("train", {}, {"n": torch.tensor([16, 16])}),
    ("train", {}, {"n": {"x": torch.tensor(16)}}),
])
def test_numbers_that_cannot_be_true(what, numbers, up):
    with pytest.raises(WRONG):
        believed(what, numbers, up)


def test_most_clients_say_what_an_upload_looks_like():
    """As many for one layout as for another: nobody knows."""
    assert agreed([{"w": "b"}, {"w": "a", "n": "c"}, {"n": "c", "w": "a"}]) == {"w": "a", "n": "c"}
    stops("different uploads, each of 2 clients", agreed, [{"w": "a"}, {"w": "b"}, {"w": "a"}, {"w": "b"}])


def test_what_comes_down_says_how_it_comes_back():
    down = {"w": {"x": torch.zeros(2)}, "z": torch.zeros(1)}
    up = {"w": {"x": torch.zeros(3)}, "n": torch.tensor(1)}
    expected = expected_layout(down, up)
    assert expected == layout({"w": down["w"], "n": up["n"]})
    stops(r"client b: expected torch.float32 \(2,\) in w.x of the upload", check_answer, "client b", up, {},
          expected)


BIAS, COUNT = torch.zeros(2), torch.tensor(16)


@pytest.mark.parametrize("up, words", [
    ({"w": {"b": torch.zeros(1)}, "n": COUNT}, r"torch.float32 \(2,\) in w.b .*; found torch.float32 \(1,\)"),
    ({"w": {"b": BIAS.double()}, "n": COUNT}, r"torch.float32 \(2,\) in w.b .*; found torch.float64 \(2,\)"),
    ({"w": {}, "n": COUNT}, r"expected torch.float32 \(2,\) in w.b of the upload; found nothing"),
    ({"w": {"b": BIAS, "more": BIAS}, "n": COUNT}, "expected nothing in w.more of the upload"),
    ({"w": {"b": BIAS}}, r"expected torch.int64 \(\) in n of the upload; found nothing"),
    ({"w": {"b": BIAS}, "n": 5}, r"expected torch.int64 \(\) in n of the upload; found no tensor"),
    ({"w": {"b": BIAS + torch.inf}, "n": COUNT}, "no longer finite"),
])
def test_an_upload_that_does_not_fit(up, words):
    """The layout is that of the first upload."""
    expected = expected_layout({"w": {"b": BIAS}}, {"w": {"b": BIAS}, "n": COUNT})
    stops(words, check_answer, "client b", up, {}, expected)


@pytest.mark.parametrize("n, shown", [
    (torch.tensor(0), "0"), (torch.zeros(0), r"\[\]"), (torch.tensor(1j), "1j"),
    ({"a": torch.ones(1)}, "dict"),
])
def test_counts_that_are_none(n, shown):
    stops(f"n is {shown} in the upload; expected at least 1", check_answer, "client b", {"n": n}, {},
          layout({"n": n}))
