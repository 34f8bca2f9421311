"""What travels between server and clients: its layout, its bytes, and what an answer must be."""

from __future__ import annotations

import math

from plumbing.errors import Stop
from plumbing.files import tensors_of

import torch
from torch import Tensor


def layout(payload: dict) -> dict[str, str]:
    """{part or part.name: dtype and shape, or "no tensor"} of what is in a payload."""
    found = {}
    for part, value in payload.items():
        of_part = value if isinstance(value, dict) else {"": value}
        for name, v in of_part.items():
            name = f"{part}.{name}" if name else part
            found[name] = f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else "no tensor"
    return found


def nbytes(payload: dict) -> int:
    """Bytes of a payload on the wire."""
    return sum(t.nbytes for t in tensors_of(payload))


def is_finite(payload: dict) -> bool:
    """Whether all numbers are finite: mostly by their norms, which are a twentieth of the work."""
    floats = [v for v in tensors_of(payload) if v.is_floating_point() and v.numel()]
    norms = torch.stack(torch._foreach_norm(floats)) if floats else torch.zeros(1)
    return bool(norms.isfinite().all()) or all(v.isfinite().all() for v in floats)


def expected_layout(down: dict, up: dict) -> dict[str, str]:
    """What all uploads look like, by the first one: each part like the download's of that name, if there is
    one. Where that is no tensor, one is expected, so that the upload is refused."""
    like = {}
    for part, value in up.items():
        shared = layout({part: down.get(part, {})}).keys() & layout({part: value}).keys()
        like[part] = down[part] if shared else value
    return {name: v.replace("no tensor", "a tensor") for name, v in layout(like).items()}


def refuse_answer(whose: str, up: dict, numbers: dict[str, float], expected: dict[str, str]) -> None:
    """Stop unless a client's upload has the expected layout, `n` counts images, and numbers are finite."""
    found = layout(up)
    for name in expected | found:
        if found.get(name) != expected.get(name):
            raise Stop(f"{whose}: expected {expected.get(name, 'nothing')} in {name} of the upload; found "
                       f"{found.get(name, 'nothing')}: mend the client's train")
    n = up.get("n", torch.ones(1))
    if not isinstance(n, Tensor) or n.is_complex() or not n.numel() or n.min() < 1:
        shown = n.tolist() if isinstance(n, Tensor) else type(n).__name__
        raise Stop(f"{whose}: n is {shown} in the upload; expected at least 1")
    if not all(map(math.isfinite, numbers.values())) or not is_finite(up):
        raise Stop(f"{whose}: the loss or the weights are no longer finite; the last good checkpoint, if "
                   "one was due before, is in the output folder: lower --lr, or set --clip")


def shared(value, first):
    """A client's value at the start with the first client's tensors, where they are equal."""
    if isinstance(value, dict) and isinstance(first, dict):
        return {name: shared(v, first.get(name)) for name, v in value.items()}
    both = isinstance(value, Tensor) and isinstance(first, Tensor) and value.dtype == first.dtype
    return first if both and torch.equal(value, first) else value
