"""The device and the precision of a run, and what a process sets for them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re

from plumbing.run.errors import UserError

import torch


def choose_device(device: str) -> str:
    """'auto' becomes cuda:N or cpu; a GPU that is named must exist. It is not opened for this: a program that
    only plans runs takes none of its memory."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device, re.ASCII):
        raise UserError(f"--device is {device}; expected auto, cpu, cuda or cuda:N", 2)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return device
    count = torch.cuda.device_count()
    number = device.partition(":")[2]
    if int(number or 0) >= count:
        raise UserError(f"--device {device} cannot be used here: PyTorch finds {count} GPUs", 2)
    return f"cuda:{int(number or 0)}"


def choose_precision(precision: str, device: str) -> str:
    """'auto' becomes bf16 where the processor has bf16 instructions, else fp32; tf32 needs a GPU."""
    cuda = device.startswith("cuda")
    if precision == "tf32" and not cuda:
        raise UserError(f"--precision tf32 needs a GPU; the device is {device}: use fp32 or bf16", 2)
    if precision != "auto":
        return precision
    has_bf16 = torch.cuda.is_bf16_supported() if cuda else torch.cpu._is_avx512_bf16_supported()
    return "bf16" if has_bf16 else "fp32"


def prepare(args) -> None:
    """What a process sets once, before it computes: threads, GPU, precision, memory.

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
        raise UserError(f"--device {args.device} cannot be used here: {str(e).splitlines()[0]}", 2)
