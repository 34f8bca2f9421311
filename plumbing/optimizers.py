"""Local optimizers at the rate of a round, and what they remember between rounds."""

from __future__ import annotations

from collections import defaultdict

from plumbing.errors import UserError
from plumbing.settings import Args

import torch
from torch import Tensor, nn

OptimizerState = dict[str, dict[str, Tensor]]  # by the parameter's name


def sgd(module: nn.Module, settings: Args, t: int, kept: OptimizerState | None = None) -> torch.optim.SGD:
    """Local SGD at the learning rate of round t, lr * lr_decay^t; it resumes from what `optimizer_state` has
    kept."""
    trained = [p for p in module.parameters() if p.requires_grad]
    rate = settings.lr * settings.lr_decay ** t
    opt = torch.optim.SGD(trained, lr=rate, momentum=settings.momentum, weight_decay=settings.weight_decay,
                          fused=True)
    return restore_optimizer(on_device(opt, settings, rate), module, kept)


def adam(module: nn.Module, settings: Args, t: int, kept: OptimizerState | None = None) -> torch.optim.Adam:
    """The same with Adam."""
    trained = [p for p in module.parameters() if p.requires_grad]
    rate = settings.lr * settings.lr_decay ** t
    opt = torch.optim.Adam(trained, lr=rate, weight_decay=settings.weight_decay, fused=True)
    return restore_optimizer(on_device(opt, settings, rate), module, kept)


def on_device(opt: torch.optim.Optimizer, settings: Args, rate: float) -> torch.optim.Optimizer:
    """The optimizer; on a GPU its rate is a tensor there, so that a recorded step (plumbing/capture.py) reads
    the round's."""
    if settings.device.startswith("cuda"):
        group = opt.param_groups[0]
        group["lr"] = torch.full((), rate, dtype=torch.float32, device=settings.device)
        if "capturable" in group:
            group["capturable"] = True
            opt._warned_capturable_if_run_uncaptured = True  # most methods record nothing: no warning
    return opt


def restore_optimizer(opt: torch.optim.Optimizer, module: nn.Module,
                      kept: OptimizerState | None) -> torch.optim.Optimizer:
    """The optimizer with what another one of the same module remembered; a copy, as its steps change it in
    place."""
    parameters = dict(module.named_parameters())
    for name, values in (kept or {}).items():
        opt.state[parameters[name]] = {what: v.clone() for what, v in values.items()}
    return opt


def optimizer_state(module: nn.Module, opt: torch.optim.Optimizer) -> OptimizerState:
    """What the optimizer remembers of each parameter (momentum; Adam's moments and number of steps), by its
    name."""
    kept = {}
    for name, p in module.named_parameters():
        if opt.state.get(p):
            kept[name] = {what: v.clone() for what, v in opt.state[p].items()}
    return kept


def memory_of(opt: torch.optim.Optimizer) -> list[tuple[Tensor, list[dict[str, Tensor]]]]:
    """Of each group of parameters the tensor of its rate, and what is remembered of each parameter."""
    memory = []
    for group in opt.param_groups:
        if not isinstance(group["lr"], Tensor):
            raise UserError("a recorded step needs an optimizer of common.sgd or common.adam, or --capture "
                            "off")
        memory.append((group["lr"], [dict(opt.state.get(p, {})) for p in group["params"]]))
    return memory


def adopt(opt: torch.optim.Optimizer, memory: list[tuple[Tensor, list[dict[str, Tensor]]]]) -> None:
    """Copy the optimizer's rate and state into another one's tensors, which are its own from then on. Zeros
    stand for what it does not remember yet: a first step is the same with them."""
    to, values, absent = [], [], []
    for group, (rate, states) in zip(opt.param_groups, memory):
        to.append(rate)
        values.append(group["lr"])
        group["lr"] = rate
        for p, own in zip(group["params"], states):
            given = opt.state.get(p, {})
            for name, v in own.items():
                if name in given:
                    to.append(v)
                    values.append(given[name])
                else:
                    absent.append(v)
            opt.state[p] = given | own
    copy(to, values)
    if absent:
        torch._foreach_zero_(absent)


def copy(to: list, values: list) -> None:
    """Copy tensors into others, those of a dtype together: few kernels. What is no tensor is left out."""
    pairs = defaultdict(list)
    for own, v in zip(to, values):
        if isinstance(own, Tensor):
            pairs[own.dtype].append((own, v))
    with torch.no_grad():
        for of_dtype in pairs.values():
            torch._foreach_copy_(*map(list, zip(*of_dtype)))
