"""Many tensors at once: torch's _foreach_ operators take a list of them in few kernels where a loop has one
for each, so that on a GPU a round's copies and averages are a few launches instead of some hundred."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def copied(value):
    """The same nested dicts and lists with a copy of each tensor, which no training changes."""
    old, new = [], []
    twin = with_empty_tensors(value, old, new)
    overwrite(new, old)
    return twin


def with_empty_tensors(value, old: list[Tensor], new: list[Tensor]):
    """The value with new tensors of the same shapes, types and strides; both are appended to the lists."""
    if isinstance(value, dict):
        return {k: with_empty_tensors(v, old, new) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(with_empty_tensors(v, old, new) for v in value)
    if not isinstance(value, Tensor):
        return value
    old.append(value.detach())
    new.append(torch.empty_like(old[-1]))
    return new[-1]


@torch.no_grad()
def entrywise(formula: Callable[..., Tensor], *states: dict[str, Tensor]) -> dict[str, Tensor]:
    """formula(a, b, ...) of the entries with the first state's names, for all of them at once: a formula that
    looks at each number by itself gets a vector of each state. The entries of a state are of one type."""
    first = states[0]
    vectors = [as_vector([tensors[name] for name in first]) for tensors in states]
    result = formula(*vectors)
    entries = {name: torch.empty_like(v, dtype=result.dtype) for name, v in first.items()}
    overwrite(list(entries.values()), parts_of(result, list(first.values())))
    return entries


def as_vector(tensors: list[Tensor]) -> Tensor:
    """All numbers of some tensors, in a new vector."""
    vector = tensors[0].new_empty(sum(v.numel() for v in tensors))
    overwrite(parts_of(vector, tensors), tensors)
    return vector


def parts_of(vector: Tensor, like: list[Tensor]) -> list[Tensor]:
    """A vector in parts of the shapes of some tensors; they are views."""
    parts = vector.split([v.numel() for v in like])
    return [part.view(v.shape) for part, v in zip(parts, like)]


@torch.no_grad()
def overwrite(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Write each value into its tensor; one call for each type of tensor, as a kernel takes one."""
    of_type = {}
    for v, value in zip(tensors, values, strict=True):
        into, source = of_type.setdefault(v.dtype, ([], []))
        into.append(v)
        source.append(value)
    for into, source in of_type.values():
        torch._foreach_copy_(into, source)
