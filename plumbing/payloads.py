"""What travels between server and clients: its layout, its bytes, and what an answer must be."""

from __future__ import annotations

import contextlib
import math

from plumbing.errors import Stop
from plumbing.files import tensors_of

import torch
from torch import Tensor, nn


def layout(payload: dict) -> dict[str, str]:
    """{part or part.name: dtype and shape, or "no tensor"} of what is in a payload."""
    found = {}
    for part, value in payload.items():
        of_part = value if isinstance(value, dict) else {"": value}
        for name, v in of_part.items():
            name = f"{part}.{name}" if name else part
            found[name] = f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else "no tensor"
    return found


def to_device(value, device):
    """Tensors anywhere in nested dicts, lists and tuples moved to the device."""
    if isinstance(value, dict):
        return {k: to_device(v, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_device(v, device) for v in value)
    return value.to(device) if isinstance(value, Tensor) else value


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


def check_answer(whose: str, up: dict, numbers: dict[str, float], expected: dict[str, str]) -> None:
    """Stop unless a client's upload has the expected layout, `n` counts images, and numbers are finite."""
    found = layout(up)
    for name in expected | found:
        if found.get(name) != expected.get(name):
            raise Stop(f"{whose}: expected {expected.get(name, 'nothing')} in {name} of the upload; found "
                       f"{found.get(name, 'nothing')}: mend the client's train")
    if "n" in up and up["n"].min() < 1:
        raise Stop(f"{whose}: n is {up['n'].tolist()} in the upload; expected at least 1")
    if not all(map(math.isfinite, numbers.values())) or not is_finite(up):
        raise Stop(f"{whose}: the loss or the weights are no longer finite; the last good checkpoint, if "
                   "one was due before, is in the output folder: lower --lr, or set --clip")


def check_state(when: str, state: dict, at_start: dict[str, str]) -> None:
    """Stop if a tensor that the server keeps has another dtype or shape than at the start, or is gone."""
    found = layout(state)
    for name, expected in at_start.items():
        if expected != "no tensor" and found.get(name) != expected:
            raise Stop(f"{when}: expected {expected} in {name} of what the server keeps; found "
                       f"{found.get(name, 'nothing')}: mend its update (counters of BN are integers)")


@contextlib.contextmanager
def nothing_forgotten(member, t: int, what: str):
    """Stop if, in the first two rounds, a server or a client changes tensors in an attribute that `keeps`
    does not name: a resumed run would have other numbers. Networks and `log` are not looked at."""
    before = unnamed_tensors(member) if t < 2 else {}
    yield
    after = unnamed_tensors(member) if t < 2 else {}
    for name, tensors in after.items():
        pairs = zip(before.get(name, []), tensors)
        if len(before.get(name, [])) != len(tensors) or not all(torch.equal(a, b) for a, b in pairs):
            raise Stop(f"{what} changes {name}, which `keeps` does not name: a resumed run would have other "
                       f"numbers. Add {name!r} to keeps, or make it a local variable")


def unnamed_tensors(member) -> dict[str, list[Tensor]]:
    """Copies of the tensors in each attribute that `keeps` does not name; those of its networks aside."""
    of_networks = set()
    for value in vars(member).values():
        if isinstance(value, nn.Module):
            of_networks |= {v.data_ptr() for v in value.state_dict().values()}
    found = {}
    for name, value in vars(member).items():
        tensors = [v.detach().clone() for v in tensors_of(value) if v.data_ptr() not in of_networks]
        if tensors and name not in (*member.keeps, "log"):
            found[name] = tensors
    return found


def shared(value, first):
    """A client's value at the start with the first client's tensors, where they are equal."""
    if isinstance(value, dict) and isinstance(first, dict):
        return {name: shared(v, first.get(name)) for name, v in value.items()}
    both = isinstance(value, Tensor) and isinstance(first, Tensor) and value.dtype == first.dtype
    return first if both and torch.equal(value, first) else value
