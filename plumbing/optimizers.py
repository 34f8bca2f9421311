"""Local optimizers at the rate of a round, and what they remember between rounds."""

from __future__ import annotations

from plumbing.settings import Args

import torch
from torch import Tensor, nn

Kept = dict[str, dict[str, Tensor]]  # what an optimizer remembers of each parameter, by the parameter's name


def sgd(module: nn.Module, settings: Args, t: int, kept: Kept | None = None) -> torch.optim.SGD:
    """Local SGD at the learning rate of round t, lr * lr_decay^t; it goes on from what `optimizer_state` has
    kept."""
    trained = [p for p in module.parameters() if p.requires_grad]
    opt = torch.optim.SGD(trained, lr=settings.lr * settings.lr_decay ** t,
                          momentum=settings.momentum, weight_decay=settings.weight_decay, fused=True)
    return going_on(opt, module, kept)


def adam(module: nn.Module, settings: Args, t: int, kept: Kept | None = None) -> torch.optim.Adam:
    """The same with Adam."""
    trained = [p for p in module.parameters() if p.requires_grad]
    opt = torch.optim.Adam(trained, lr=settings.lr * settings.lr_decay ** t,
                           weight_decay=settings.weight_decay, fused=True)
    return going_on(opt, module, kept)


def going_on(opt: torch.optim.Optimizer, module: nn.Module, kept: Kept | None) -> torch.optim.Optimizer:
    """The optimizer with what another one of the same module remembered; a copy, as its steps change it in
    place."""
    parameters = dict(module.named_parameters())
    for name, values in (kept or {}).items():
        opt.state[parameters[name]] = {what: v.clone() for what, v in values.items()}
    return opt


def optimizer_state(module: nn.Module, opt: torch.optim.Optimizer) -> Kept:
    """What the optimizer remembers of each parameter (momentum; Adam's moments and number of steps), by its
    name."""
    kept = {}
    for name, p in module.named_parameters():
        if opt.state.get(p):
            kept[name] = dict(opt.state[p])
    return kept
