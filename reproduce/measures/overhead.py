"""What training costs until an accuracy, in FLOPs, bytes and memory (FedCiR, Sec. 6.5, Table 3)."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from pathlib import Path

from common import images_in_round, seed_all
from plumbing.run.errors import UserError
from plumbing.run.runfolder import read_history
from reproduce.measures.finished import Rebuilt, all_rebuilt, finished
from reproduce.methods import builder_of, setting

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

# FLOPs


def conv_backward(grad, x, w, _bias, _stride, _padding, _dilation, transposed, _out_padding, _groups, mask,
                  out_shape=None):
    """FLOPs of a convolution's backward pass: each gradient costs as much as the forward pass. (torch's own
    count of the weight's gradient leaves out that the channels are in groups, which is wrong for FDSE's
    depthwise convolutions.)"""
    return (bool(mask[0]) + bool(mask[1])) * conv_flop_count(x, w, grad, transposed)


def counter() -> FlopCounterMode:
    """Counts 2 FLOPs for each multiply-add of matrix products, convolutions and attention; the rest counts
    nothing."""
    ours = {torch.ops.aten.convolution_backward: conv_backward}
    return FlopCounterMode(display=False, custom_mapping=ours)


@functools.cache
def network_cost(module: str, flags: tuple[str, ...]) -> dict[str, float]:
    """FDSE's Table 4 of a network: parameters in 1e7, MiB of its float32 state, multiply-adds of 50 images of
    256x256 in 1e10."""
    args = dataclasses.replace(setting(module, flags), image_size=256)
    net = builder_of(sys.modules[module])(args, 3, 10).eval()
    parameters = sum(p.numel() for p in net.parameters())
    floats = sum(v.numel() for v in net.state_dict().values() if v.is_floating_point())
    of_50 = 50 * multiply_adds(net, torch.zeros(1, 3, 256, 256))
    return {"parameters": parameters / 1e7, "flops": of_50 / 1e10, "mib": floats * 4 / 2 ** 20}


@torch.no_grad()
def multiply_adds(net: nn.Module, x: Tensor) -> int:
    """Multiply-adds of the convolutions and linear layers in a forward pass of x: each number of an output is
    a product with one row of the weight. (`counter` counts the same, but imports torch's compiler: 3 s.)"""
    counts = []

    def count(layer: nn.Module, _, out: Tensor) -> None:
        counts.append(out.numel() * layer.weight[0].numel())

    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(count)
    net(x)
    return sum(counts)


# FedCiR, Table 3


def training_flops(run: Rebuilt) -> float:
    """FLOPs of a run's local training for each image, all of it: the regularizers' passes and generators too.

    They are counted in one round of the client with the fewest training images, from the run's last state.
    """
    fed, args = run.federation, run.args
    k = min((k for k in range(fed.K) if fed.sizes[k]), key=fed.sizes.__getitem__)  # a pool has one
    seed_all(args.seed, "train", args.rounds - 1, k)
    with counter() as count:
        fed.clients[k].train(fed.server.download(k), args.rounds - 1)
    return count.get_total_flops() / images_in_round(fed.sizes[k], args)


def cost_to_reach(run: Rebuilt, accuracy: float) -> dict | None:
    """What a client has spent, on average, when AVG first reaches an accuracy (FedCiR, Table 3); None if it
    never does.

    The round; TFLOPs of local training and GB up and down until then, means over the clients; the peaks of
    the whole run's memory in MiB; and the FLOPs of an image.
    """
    result, entries = finished(run.folder), read_history(Path(run.folder))
    if not any("test" in entry for entry in entries):
        raise UserError(f"{run.folder}/metrics.jsonl has no accuracy AVG", 2)
    fed, images, exchanged = run.federation, 0, 0
    sizes = dict(zip(fed.names, fed.sizes))
    for entry in entries:
        for name, log in entry["clients"].items():
            images += images_in_round(sizes[name], run.args)
            exchanged += log["bytes_up"] + log["bytes_down"]
        if entry.get("test", {}).get("AVG", -1) >= accuracy:
            break
    else:
        return None
    per_image, reached = training_flops(run), entry["round"]
    return {"round": reached, "tflops": images * per_image / fed.K / 1e12, "gb": exchanged / fed.K / 1e9,
            "memory_mib": result["peak_memory_mib"],
            "gpu_memory_mib": result["hardware"]["gpu_peak_memory_mib"], "flops_per_image": per_image}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--accuracy", type=float, default=0.6, help="accuracy to reach, as a fraction [0.6]")


def show(flags) -> list[dict]:
    """A table, and the numbers."""
    if not 0 < flags.accuracy <= 1:
        raise UserError(f"the accuracy to reach is {flags.accuracy}; expected a share such as 0.6", 2)
    flags.which, runs, table = "last", [], []
    for run in all_rebuilt(flags):
        cost = cost_to_reach(run, flags.accuracy)
        runs.append(run.heading() | {"cost": cost})
        table.append([run.label, *(cost.values() if cost else [None] * 6)])
    print(f"each client until AVG reaches {100 * flags.accuracy:g}% (-: never, or no GPU)")
    head = ["method", "round", "TFLOPs", "GB up and down", "memory (MiB)", "GPU memory (MiB)",
            "FLOPs an image"]
    formats = (".0f", ".0f", ".3f", ".4f", ".0f", ".0f", ".4g")
    print(tabulate(table, head, floatfmt=formats, missingval="-"))
    return runs
