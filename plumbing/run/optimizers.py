"""Local optimizers at the rate of a round, and what they remember between rounds."""

from __future__ import annotations

from plumbing.run.settings import Args

import torch
from torch import Tensor, nn

OptimizerState = dict[str, dict[str, Tensor]]  # by the parameter's name


def sgd(module: nn.Module, settings: Args, t: int, kept: OptimizerState | None = None) -> torch.optim.SGD:
    """Local SGD at the learning rate of round t, lr * lr_decay^t; it resumes from what `optimizer_state` has
    kept."""
    trained = [p for p in module.parameters() if p.requires_grad]
    opt = torch.optim.SGD(trained, lr=settings.lr * settings.lr_decay ** t, momentum=settings.momentum,
                          weight_decay=settings.weight_decay, fused=True)
    return restore_optimizer(opt, module, kept)


def adam(module: nn.Module, settings: Args, t: int, kept: OptimizerState | None = None) -> torch.optim.Adam:
    """The same with Adam."""
    trained = [p for p in module.parameters() if p.requires_grad]
    opt = torch.optim.Adam(trained, lr=settings.lr * settings.lr_decay ** t,
                           weight_decay=settings.weight_decay, fused=True)
    return restore_optimizer(opt, module, kept)


def restore_optimizer(opt: torch.optim.Optimizer, module: nn.Module,
                      kept: OptimizerState | None) -> torch.optim.Optimizer:
    """The optimizer with what another one of the same module remembered. It is a copy, as steps change it in
    place, and where the parameter is. Adam counts its steps on the CPU unless it is fused."""
    parameters = dict(module.named_parameters())
    fused = opt.param_groups[0].get("fused")
    for name, values in (kept or {}).items():
        p = parameters[name]
        for what, v in values.items():
            device = "cpu" if what == "step" and not fused else p.device
            opt.state[p][what] = v.to(device, copy=True)
    return opt


def optimizer_state(module: nn.Module, opt: torch.optim.Optimizer) -> OptimizerState:
    """What the optimizer remembers of each parameter (momentum; Adam's moments and number of steps), by its
    name."""
    kept = {}
    for name, p in module.named_parameters():
        if opt.state.get(p):
            kept[name] = dict(opt.state[p])
    return kept
