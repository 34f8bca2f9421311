"""What a round asks of a device, counted without one: operators, copies from the host, reads by the host.

    python -m bench.launches                     # every method
    python -m bench.launches --only fedavg,fdse --out launches.json

A round as on Office-Caltech10: four clients, 42 steps (16, 18, 3 and 5), then validation and test of each.
Batches have 4 images of 64x64 instead of 50 of 224x224, which changes what an operator computes and not which
ones are called. Counted is the second round, in which all terms are there.

An operator that is no view launches one kernel or more on a GPU; one that is given a list of tensors is
counted once for each 48 of them, as many as a kernel takes. `steps` are those between the first batch of a
local training and the end of its last step, `around` all others of the round: loading and copying states,
the server, checks and evaluation. A method's own passes over images or generated representations at the
server are steps too.

Copies and reads are counted on tensors that have a shape and no values (torch's "meta" device), of one local
training: `copies` bring numbers from the host, `reads` make the host wait for the device.
"""

import argparse
import contextlib
import importlib
import io
import math
import sys
import tempfile
from collections import Counter
from pathlib import Path

import common
from plumbing.files import write_json
from plumbing.provenance import provenance
from plumbing.results import command
from reproduce.methods import builder_of, modules, short_name

import torch
from tabulate import tabulate
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SIZES = (80, 90, 15, 25)  # images of the domains: 64, 72, 12 and 20 to train on
FLAGS = """
    --rounds 3 --epochs 1 --steps 0 --batch-size 4 --image-size 64 --augment none --normalize unit
    --weights none --device cpu --precision fp32 --threads 1 --checkpoint-every 3600 --no-figures
"""
A_KERNEL = 48  # tensors
# Operators that are no views and have no kernel either: memory, names of what is there, reads.
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias",
             "_local_scalar_dense", "_unsafe_view", "_reshape_alias", "lift_fresh", "set_"}


def kernels(operator, args) -> int:
    """How many kernels an operator launches on a GPU, at least."""
    if operator.is_view or operator._overloadpacket.__name__ in NO_KERNEL:
        return 0
    lists = [len(value) for value in args if isinstance(value, list | tuple) and holds_tensors(value)]
    return math.ceil(max(lists, default=1) / A_KERNEL)


def holds_tensors(values: list | tuple) -> bool:
    return bool(values) and isinstance(values[0], Tensor)


class Launches(TorchDispatchMode):
    """Counts operators by the phase in which they are called."""

    def __init__(self):
        super().__init__()
        self.phases, self.count, self.names = ["loop"], Counter(), {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        phase, n = self.phases[-1], kernels(operator, args)
        self.count[phase] += n
        self.names.setdefault(phase, Counter())[operator._overloadpacket.__name__] += n
        return operator(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def phase(self, name: str):
        self.phases.append(name)
        try:
            yield
        finally:
            self.phases.pop()

    def during(self, name: str, function):
        """The function, whose operators count for a phase."""
        def counted(*args, **kwargs):
            with self.phase(name):
                return function(*args, **kwargs)
        return counted

    def steps(self, loop):
        """A loop over batches whose body counts as steps, with the making of the batches."""
        def counted(*args, **kwargs):
            self.phases.append("steps")
            try:
                yield from loop(*args, **kwargs)
            finally:
                self.phases.pop()
        return counted


class Transfers(TorchDispatchMode):
    """Counts, of a computation on tensors without values, what crosses between host and device."""

    def __init__(self):
        super().__init__()
        self.copies, self.reads = Counter(), Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operator._overloadpacket.__name__
        place = caller()
        if name == "_local_scalar_dense" and args[0].is_meta:
            self.reads[name, place] += 1
            return 1.0
        if name == "_to_copy":
            to = kwargs.get("device", args[0].device)
            if args[0].is_meta and to is not None and torch.device(to).type == "cpu":
                self.reads[name, place] += 1
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            if not args[0].is_meta and to is not None and torch.device(to).type == "meta":
                self.copies[name, place] += 1
        return operator(*args, **kwargs)


def caller():
    frame = sys._getframe(2)
    while frame and ("/torch/" in frame.f_code.co_filename or "launches" in frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""
