"""Networks from elsewhere: `--backbone torchvision:NAME`, or a function in one's own file; and initial
weights: torchvision's ImageNet weights, or a file."""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

from plumbing.errors import UserError
from plumbing.files import load_file
from plumbing.own_data import module_in

import torch
from torch import Tensor, nn

ELSEWHERE = "torchvision:NAME or FILE.py:FUNCTION"


def canonical_network(name: str, ours: tuple[str, ...]) -> str:
    """A value of --backbone. A file is the same one from wherever a command is given."""
    origin, _, inside = name.rpartition(":")
    if name in ours or origin == "torchvision":
        return name
    if not origin.endswith(".py"):
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {', '.join(ours)}, "
                                         f"{ELSEWHERE})")
    path = os.path.abspath(os.path.expanduser(origin))
    if not os.path.isfile(path):
        raise argparse.ArgumentTypeError(f"{path}: no such file")
    return f"{path}:{inside}"


def network_file(backbone: str) -> Path | None:
    """The file of one's own that a value of --backbone names, if it names one."""
    origin = backbone.rpartition(":")[0]
    return Path(origin) if origin and origin != "torchvision" else None


def hash_of(file: Path) -> str:
    """What stands for a file's content in the identity of a run."""
    return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()


def from_torchvision(name: str) -> nn.Module:
    """A classifier of torchvision with random weights."""
    from torchvision import models
    if name not in models.list_models(module=models):
        raise UserError(f"--backbone torchvision:{name}: torchvision has no such classifier", 2)
    return models.get_model(name)


def imagenet_weights(name: str) -> str:
    """The name of a network's newest ImageNet weights in torchvision; empty if there are none."""
    from torchvision import models
    return str(getattr(models.get_model_weights(name), "DEFAULT", ""))


def last_linear(name: str) -> tuple[str, int]:
    """The name of the last linear layer of torchvision's classifier, and its inputs. No weights are made."""
    with torch.device("meta"):
        layers = from_torchvision(name).named_modules()
    linear = [(layer, module) for layer, module in layers if isinstance(module, nn.Linear)]
    if not linear or linear[-1][1].out_features != 1000:
        raise UserError(f"--backbone torchvision:{name} does not end with a linear layer, which would be "
                        "replaced", 2)
    layer, module = linear[-1]
    return layer, module.in_features


def custom_network(args, channels: int, classes: int, Net: type) -> nn.Module:
    """The network of a file of one's own, a `Net`. With `--weights FILE` it has the state in that file."""
    file, _, name = args.backbone.rpartition(":")
    net = getattr(module_in(Path(file), name), name)(args, channels, classes)
    if not isinstance(net, Net):
        raise UserError(f"--backbone {args.backbone} gives {type(net).__name__}; expected common.Net(body, "
                        "dim, classes)", 2)
    if args.weights not in ("none", "imagenet"):
        load_pretrained(net, read_weights(args.weights, ""), skip="head", origin=args.weights)
    return net


def read_weights(origin: str, imagenet: str) -> dict[str, Tensor] | None:
    """The weights that `--weights origin` names: none, imagenet (torchvision's weights `imagenet`), or a
    file."""
    if origin == "none":
        return None
    if origin == "imagenet":
        import torchvision
        try:
            return torchvision.models.get_weight(imagenet).get_state_dict(progress=True, check_hash=True)
        except (OSError, RuntimeError) as e:
            raise UserError(f"could not get the weights {imagenet} ({e}); download them by hand and give "
                            "--weights FILE")
    weights = load_file(Path(origin), "weights")
    if not isinstance(weights, dict) or not all(isinstance(v, Tensor) for v in weights.values()):
        raise UserError(f"--weights {origin} is no file of weights: expected a dict of names and tensors", 2)
    return weights


def load_pretrained(module: nn.Module, weights: dict, skip: str | None, origin: str) -> None:
    """Load weights into `module`. Those of the layer `skip` are left out if their shape differs; all others
    must fit."""
    own = {name: value for name, value in module.state_dict().items() if skip and name.startswith(f"{skip}.")}
    kept = dict(own)
    for name, value in weights.items():
        if not skip or not name.startswith(f"{skip}.") or (name in own and value.shape == own[name].shape):
            kept[name] = value
    try:
        module.load_state_dict(kept)
    except RuntimeError as e:
        why = " ".join(str(e).split())[:200]
        raise UserError(f"--weights {origin} does not fit the network ({why})", 2)
