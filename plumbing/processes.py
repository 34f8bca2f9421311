"""Processes: with torchrun, client k belongs to process k mod P, and process 0 runs the server."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading

from plumbing.errors import Stop
from plumbing.signals import leave_to_the_system

import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  before a group begins, see join_processes
from torch import Tensor

SAID_AFTER = 3.0  # seconds of waiting for the other processes until that is said


def process() -> tuple[int, int]:
    """The rank of this process and their number P; (0, 1) without torchrun."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def join_processes() -> None:
    """With torchrun: join the other processes. Stop if they do not come.

    The group ends before Python does, and its threads with it: one that still released a tensor while Python
    ended aborted the process ("terminate called without an active exception"; pytorch#190489). They end only
    if nothing holds the group. torch.distributed.nn, which an optimizer imports, would: a group that is there
    at its import becomes a default argument of its functions. Hence its import above, where there is none.
    """
    count = os.environ.get("WORLD_SIZE", "1")
    if not (count.isascii() and count.isdigit() and int(count)):
        raise Stop(f"WORLD_SIZE is {count!r}; expected the number of processes, as torchrun sets it: unset "
                   "it, or start with torchrun", 2)
    if int(count) == 1 or dist.is_initialized():
        return
    waiting = threading.Timer(SAID_AFTER, print, [f"waiting for all {count} processes to start"],
                              {"file": sys.stderr, "flush": True})
    waiting.start()
    try:
        leave_to_the_system()  # it waits in code that is not Python's
        dist.init_process_group("gloo")  # gives up after half an hour
        atexit.register(dist.destroy_process_group)
    except (ValueError, RuntimeError) as e:
        why = str(e).splitlines()[0][:80]
        raise Stop(f"WORLD_SIZE is {count!r}, but the processes cannot meet ({why}): "
                   "start them with torchrun, or unset WORLD_SIZE", 2)
    finally:
        waiting.cancel()


def merged(mine: dict) -> dict:
    """The dicts of all processes merged, sorted by key, in process 0; elsewhere an empty one."""
    rank, size = process()
    if size == 1:
        return mine
    parts = [None] * size if rank == 0 else None
    with others_alive():
        dist.gather_object(to_cpu(mine), parts)
    if rank:
        return {}
    together = {}
    for part in parts:
        together |= part
    return dict(sorted(together.items()))


def from_server(value):
    """The value that process 0 has, in every process."""
    rank, size = process()
    if size == 1:
        return value
    box = [to_cpu(value) if rank == 0 else None]
    with others_alive():
        dist.broadcast_object_list(box)
    return box[0]


@contextlib.contextmanager
def others_alive():
    """Stop when a collective fails because another process has gone."""
    try:
        yield
    except RuntimeError as e:
        why = str(e)[:60].splitlines()[0]
        raise Stop(f"process {process()[0]} ends because another one has gone, see its line ({why})")


def to_cpu(value):
    """Tensors anywhere in nested dicts, lists and tuples moved to the CPU."""
    if isinstance(value, dict):
        return {k: to_cpu(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_cpu(v) for v in value)
    return value.cpu() if isinstance(value, Tensor) else value


def to_device(value, device: str):
    """Tensors anywhere in nested dicts moved to the device."""
    if isinstance(value, dict):
        return {k: to_device(v, device) for k, v in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def prepare(args) -> None:
    """What a process sets once, before it computes: its peers, its threads, its GPU, its precision,
    its memory."""
    keep_freed_memory()
    join_processes()
    if args.threads:
        torch.set_num_threads(args.threads)
    open_device(args)
    set_precision(args)


def open_device(args) -> None:
    """Open the GPU, if it is one, and choose how cuDNN and cuBLAS compute on it. Stop if it cannot be used.

    cuDNN times its algorithms for each shape of batch when that comes first, which pays because shapes recur;
    which one wins may differ between two runs, so not with --deterministic. Where PyTorch has no
    deterministic algorithm for an operator it warns, and the operator is computed all the same.
    """
    if not args.device.startswith("cuda"):
        return
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.set_deterministic_debug_mode("warn")
        torch.utils.deterministic.fill_uninitialized_memory = False  # it is not read
    torch.backends.cudnn.benchmark = not args.deterministic
    try:
        torch.cuda.set_device(args.device)
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError) as e:
        raise Stop(f"--device {args.device} cannot be used here: {str(e).splitlines()[0]}", 2)


def set_precision(args) -> None:
    """TF32 with `--precision tf32` and only then: cuDNN's is on by default, and then fp32 would not be
    fp32."""
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = args.precision == "tf32"


def keep_freed_memory() -> None:
    """Ask glibc to keep large freed blocks instead of giving them back to the kernel.

    Each training step frees and takes the same activations; without this every step pays their page faults
    again (measured: 5 to 20% of a step on two cores). One arena, because what the backward pass's thread
    frees is then there for the forward pass (another 5 to 20% of a small network's step). No effect where the
    C library has no mallopt.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-8, 1)  # M_ARENA_MAX
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
