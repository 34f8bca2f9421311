"""Where a network's initial weights come from: torchvision's ImageNet weights, or a file."""

from __future__ import annotations

from pathlib import Path

from plumbing.errors import Stop
from plumbing.files import load_file

from torch import Tensor, nn


def read_weights(origin: str, imagenet: str) -> dict[str, Tensor] | None:
    """The weights that `--weights origin` names: none, imagenet (torchvision's weights `imagenet`), or a
    file."""
    if origin == "none":
        return None
    if not origin:
        raise Stop("--weights is empty; expected none, imagenet or a file of weights", 2)
    if origin == "imagenet":
        import torchvision
        try:
            return torchvision.models.get_weight(imagenet).get_state_dict(progress=True, check_hash=True)
        except (OSError, RuntimeError) as e:
            raise Stop(f"could not get the weights {imagenet} ({e}); download them by hand and give "
                       "--weights FILE")
    weights = load_file(Path(origin), "weights")
    if not isinstance(weights, dict) or not all(isinstance(v, Tensor) for v in weights.values()):
        raise Stop(f"--weights {origin} is no file of weights: expected a dict of names and tensors", 2)
    return weights


def load_pretrained(module: nn.Module, weights: dict, skip: str | None, origin: str) -> None:
    """Load weights into `module`. Those of the layer `skip` are left out if their shape differs; all others
    must fit."""
    have = module.state_dict()
    kept = {}
    for name, value in weights.items():
        if not skip or not name.startswith(f"{skip}.") or (name in have and value.shape == have[name].shape):
            kept[name] = value
    wrong = [name for name, v in kept.items() if name not in have or v.shape != have[name].shape]
    wrong += [name for name in have if name not in kept and not (skip and name.startswith(f"{skip}."))]
    if wrong:
        raise Stop(f"--weights {origin} does not fit the network: {len(wrong)} tensors are missing or do not "
                   f"fit, such as {wrong[0]}", 2)
    module.load_state_dict(kept, strict=False)
