"""Local optimizers at the rate of a round, and what they remember between rounds."""

from __future__ import annotations

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
    return restore_optimizer(opt, module, kept)


def adam(module: nn.Module, settings: Args, t: int, kept: OptimizerState | None = None) -> torch.optim.Adam:
    """The same with Adam."""
    trained = [p for p in module.parameters() if p.requires_grad]
    rate = settings.lr * settings.lr_decay ** t
    opt = torch.optim.Adam(trained, lr=rate, weight_decay=settings.weight_decay, fused=True)
    return restore_optimizer(opt, module, kept)


def restore_optimizer(opt: torch.optim.Optimizer, module: nn.Module,
                      kept: OptimizerState | None) -> torch.optim.Optimizer:
    """The optimizer with what another one of the same module remembered: a copy, as its steps change it in
    place, where the parameter is."""
    parameters = dict(module.named_parameters())
    for name, values in (kept or {}).items():
        p = parameters[name]
        opt.state[p] = {what: v.to(p.device, copy=True) for what, v in values.items()}
    return opt


def optimizer_state(module: nn.Module, opt: torch.optim.Optimizer) -> OptimizerState:
    """What the optimizer remembers of each parameter (momentum; Adam's moments and number of steps), by its
    name."""
    kept = {}
    for name, p in module.named_parameters():
        if opt.state.get(p):
            kept[name] = {what: v.clone() for what, v in opt.state[p].items()}
    return kept
