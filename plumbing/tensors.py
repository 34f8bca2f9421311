"""Many tensors at once: torch's _foreach_ operators take a list of them in few kernels where a loop has one for
each, so that on a GPU a round's copies and averages are a few launches instead of some hundred."""

from __future__ import annotations

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
def overwrite(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Write each value into its tensor; one call for each type of tensor, as a kernel takes one."""
    of_type = {}
    for v, value in zip(tensors, values, strict=True):
        into, source = of_type.setdefault(v.dtype, ([], []))
        into.append(v)
        source.append(value)
    for into, source in of_type.values():
        torch._foreach_copy_(into, source)
