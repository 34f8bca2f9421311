"""A recording for tests on a CPU: the operators of a step, run again on the same tensors as in a CUDA graph.
What a GPU refuses while it records is refused here: to read a number."""

from plumbing import capture, optimizers

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "lift_fresh")


class Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = op.overloadpacket.__name__
        chosen = args[1] if name == "index" else ()
        if name in READS or any(i is not None and i.dtype is torch.bool for i in chosen):
            raise RuntimeError(f"{name} while a step is recorded")
        out = op(*args, **kwargs)
        self.calls.append((op, args, kwargs, out))
        return out

    def replay(self) -> None:
        with torch.no_grad():
            for op, args, kwargs, out in self.calls:
                again = op(*args, **kwargs)
                for old, new in zip(tree_flatten(out)[0], tree_flatten(again)[0]):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def record(kept, step):
    """In place of Recordings.record: recording computes the step, which a graph does not, so it is undone."""
    tensors = [v for net in capture.RECORDED for v in (*net.parameters(), *net.buffers())]
    for rate, states in kept.memory:
        tensors += [rate, *(v for of_parameter in states for v in of_parameter.values())]
    before = [v.detach().clone() for v in tensors]
    with Tape() as tape:
        result = step()
    optimizers.copy(tensors, before)
    return tape.replay, *tree_flatten(result)


def taped(monkeypatch) -> list:
    """Steps on a CPU are recorded and replayed. Returns how often each was replayed so far."""
    counts = []

    def counting(kept, step):
        replay, *result = record(kept, step)
        number = len(counts)
        counts.append(0)

        def replayed():
            counts[number] += 1
            replay()
        return replayed, *result

    def on_device(opt, settings, rate):
        opt.param_groups[0]["lr"] = torch.tensor(rate, dtype=torch.float64)
        return opt

    monkeypatch.setattr(capture, "is_recorded", lambda args, file: True)
    monkeypatch.setattr(capture.Recordings, "beside", lambda kept, step: step())
    monkeypatch.setattr(capture.Recordings, "record", counting)
    monkeypatch.setattr(optimizers, "on_device", on_device)
    return counts
