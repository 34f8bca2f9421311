"""Processes: with torchrun, client k belongs to process k mod P, and process 0 runs the server."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys

from plumbing.errors import (Interrupted, Stop, ending, handled, interrupt, leave_to_the_system,
                             patient_output, speaks, tell)

import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  before a group begins, see join_processes
from torch import Tensor


def process() -> tuple[int, int]:
    """The rank of this process and their number P; (0, 1) without torchrun."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def join_processes() -> None:
    """Join the other processes of torchrun. Stop if they do not come.

    The group ends before Python does: a thread of it that still released a tensor while Python ended aborted
    the process (pytorch#190489). It ends only if nothing holds the group. torch.distributed.nn would, in
    default arguments, if it were imported after the group is there: hence its import above.
    """
    leave_to_the_system()  # it waits in code that is not Python's
    try:
        dist.init_process_group("gloo")  # gives up after half an hour
        atexit.register(dist.destroy_process_group)
    except (ValueError, RuntimeError) as e:
        why = str(e).splitlines()[0][:80]
        raise Stop(f"WORLD_SIZE is {os.environ['WORLD_SIZE']!r}, but the processes cannot meet ({why}): "
                   "start them with torchrun, or unset WORLD_SIZE", 2)


def gathered(mine: dict) -> dict:
    """The dicts of all processes merged, sorted by key, in process 0; elsewhere an empty one."""
    rank, size = process()
    if size == 1:
        return mine
    parts = [None] * size if rank == 0 else None
    with others_alive():
        dist.gather_object(to_device(mine, "cpu"), parts)
    together = {}
    for part in parts or []:
        together |= part
    return dict(sorted(together.items()))


def from_server(value):
    """The value that process 0 has, in every process."""
    rank, size = process()
    if size == 1:
        return value
    box = [to_device(value, "cpu") if rank == 0 else None]
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


def to_device(value, device):
    """Tensors anywhere in nested dicts, lists and tuples moved to the device."""
    if isinstance(value, dict):
        return {k: to_device(v, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_device(v, device) for v in value)
    return value.to(device) if isinstance(value, Tensor) else value


def prepare(args) -> None:
    """What a process sets once, before it computes: peers, threads, GPU, precision, memory.

    cuDNN does not time its algorithms (`cudnn.benchmark`): a step was no faster and FDSE's first round took
    57 s instead of 36 (docs/gpu.md). TF32 is used with `--precision tf32` and only then: cuDNN's is on by
    default, and then fp32 would not be fp32.
    """
    with contextlib.suppress(OSError, AttributeError):  # a C library without mallopt
        # Each step frees and takes the same activations: glibc keeps large freed blocks, else every step pays
        # their page faults again (5 to 20% of a step on two cores). One arena: the forward pass finds what
        # the backward pass's thread has freed.
        libc = ctypes.CDLL(None)
        libc.mallopt(-8, 1)  # M_ARENA_MAX
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1") and not dist.is_initialized():
        join_processes()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = args.precision == "tf32"
    if not args.device.startswith("cuda"):
        return
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.set_deterministic_debug_mode("warn")
        torch.utils.deterministic.fill_uninitialized_memory = False  # it is not read
    try:
        torch.cuda.set_device(args.device)
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError) as e:
        raise Stop(f"--device {args.device} cannot be used here: {str(e).splitlines()[0]}", 2)


@contextlib.contextmanager
def one_line_on_failure(program: str):
    """Errors that are no fault of the program end it with one line on stderr and an exit code."""
    with patient_output():
        try:
            with handled(interrupt):
                yield
            return
        except (Exception, KeyboardInterrupt) as e:
            together = isinstance(e, Interrupted) and bool(e.kept)  # all processes end after the same round
            message, code = ending(e, "nothing that was written is lost: the same command without "
                                      "--no-resume goes on from the last checkpoint, if there is one")
        rank, size = process()
        if rank == 0 if together else code != 2 or speaks():
            tell(program, message)
        if size > 1:
            sys.stdout.flush()
            if together:
                with contextlib.suppress(Stop):
                    from_server(None)  # torchrun ends all once one has ended: not before the line is there
            os._exit(code)  # the other processes wait in a collective: torchrun ends them
        sys.exit(code)
