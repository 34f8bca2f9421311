"""What travels: its layout, and what an upload may be."""

from common import UserError
from plumbing.payloads import check_answer, expected_layout, layout

import pytest
import torch


def test_what_comes_down_says_how_it_comes_back():
    down = {"w": {"x": torch.zeros(2)}, "z": torch.zeros(1)}
    up = {"w": {"x": torch.zeros(3)}, "n": torch.tensor(1)}
    expected = expected_layout(down, up)
    assert expected == layout({"w": down["w"], "n": up["n"]})
    with pytest.raises(UserError, match=r"client b: expected torch.float32 \(2,\) in w.x of the upload"):
        check_answer("client b", up, {}, expected)


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
    with pytest.raises(UserError, match=words):
        check_answer("client b", up, {}, expected_layout({"w": {"b": BIAS}}, {"w": {"b": BIAS}, "n": COUNT}))


@pytest.mark.parametrize("n, shown", [
    (torch.tensor(0), "0"), (torch.zeros(0), r"\[\]"), (torch.tensor(1j), "1j"),
    ({"a": torch.ones(1)}, "dict"),
])
def test_counts_that_are_none(n, shown):
    with pytest.raises(UserError, match=f"n is {shown} in the upload; expected at least 1"):
        check_answer("client b", {"n": n}, {}, layout({"n": n}))
