"""Networks from elsewhere: `--backbone torchvision:NAME`, `timm:NAME`, or a function in one's own file; and
initial weights: torchvision's ImageNet weights, or a file."""

from __future__ import annotations

import argparse
import copy
import difflib
import hashlib
import os
from pathlib import Path

from plumbing.data.catalog import named
from plumbing.data.custom_data import module_in, one_line_of
from plumbing.run.errors import UserError, out_of_memory
from plumbing.run.files import load_file

import torch
from torch import Tensor, nn

LIBRARIES = ("torchvision", "timm")
ELSEWHERE = "torchvision:NAME, timm:NAME (pip install timm) or FILE.py:FUNCTION"


def canonical_network(name: str, ours: tuple[str, ...]) -> str:
    """A value of --backbone. A file is the same one from wherever a command is given."""
    origin, _, inside = name.rpartition(":")
    if name in ours or (origin in LIBRARIES and inside):
        return name
    if not origin.endswith(".py") or not inside.isidentifier():
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {', '.join(ours)}, "
                                         f"{ELSEWHERE})")
    path = os.path.abspath(os.path.expanduser(origin))
    if not os.path.isfile(path):
        raise argparse.ArgumentTypeError(f"{path}: no such file")
    return f"{path}:{inside}"


def network_file(backbone: str) -> Path | None:
    """The file of one's own that a value of --backbone names, if it names one."""
    origin = backbone.rpartition(":")[0]
    return Path(origin) if origin and origin not in LIBRARIES else None


def hash_of(file: Path) -> str:
    """What stands for a file's content in the identity of a run."""
    return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()


def built(build, settings, classes: int, example: Tensor) -> nn.Module:
    """The network of build(settings, channels, classes). Stop unless it takes a batch such as `example`
    [2, C, H, W]."""
    channels = example.shape[1]
    if settings.normalize == "imagenet" and channels != 3:
        raise UserError(f"--normalize imagenet is for colour images; those of {settings.dataset} have one "
                        "channel: use unit", 2)
    try:
        net = build(settings, channels, classes)
        net.eval()(example)
    except (RuntimeError, AssertionError) as e:
        if out_of_memory(e):
            raise
        flag = "--crop" if settings.crop else "--image-size"
        why = str(e).splitlines()[0][:80]
        advice = f"another {flag}, or --backbone smallcnn_bn, which takes small images"
        if named(settings.dataset).file:
            advice = "a backbone for them"
        shape = "x".join(map(str, example.shape[1:]))
        raise UserError(f"images of {shape} do not fit --backbone {settings.backbone} ({why}): give "
                        f"{advice}", 2)
    return net


def from_torchvision(name: str, **flags) -> nn.Module:
    """A classifier of torchvision with random weights, which gives one tensor in training too."""
    from torchvision import models
    known = models.list_models(module=models)
    if name not in known:
        raise UserError(f"--backbone torchvision:{name}: torchvision has no such "
                        f"classifier{near(name, known)}", 2)
    if name in ("googlenet", "inception_v3"):
        flags = dict(aux_logits=False, init_weights=True)
    return models.get_model(name, **flags)


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


def from_timm(name: str, channels: int, pretrained: bool) -> nn.Module:
    """A network of timm without its classifier: x -> z [B, D]."""
    try:
        import timm
    except ModuleNotFoundError:
        raise UserError(f"--backbone timm:{name} needs a package that is not installed: pip install timm", 2)
    if not timm.is_model(name):
        raise UserError(f"--backbone timm:{name}: timm has no such "
                        f"network{near(name, timm.list_models())}", 2)
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0, in_chans=channels)
    except (OSError, RuntimeError) as e:
        raise UserError(f"--backbone timm:{name} cannot be made ({' '.join(str(e).split())[:120]})", 2)


def near(name: str, known: list[str]) -> str:
    """The nearest name, as the end of a line."""
    meant = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {meant[0]}?" if meant else ""


@torch.no_grad()
def check_shapes(net: nn.Module, backbone: str, x: Tensor, classes: int) -> None:
    """Stop if `net.body` does not give the z [B, D] of its head, or the head no logits [B, classes], also in
    training."""
    for training in (False, True):
        tried = copy.deepcopy(net).train(training)
        expected = {"body": (len(x), net.head.in_features), "forward": (len(x), classes)}
        for part, shape in expected.items():
            out = getattr(tried, part)(x)
            what = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            if what != shape:
                raise UserError(f"--backbone {backbone}: of two images {part} gives {what}, not {shape}", 2)


def custom_network(args, channels: int, classes: int, Net: type) -> nn.Module:
    """The network of timm, or of a file of one's own, a `Net`. With `--weights FILE` it has the state in that
    file."""
    origin, _, name = args.backbone.rpartition(":")
    x = torch.zeros(2, channels, args.crop or args.image_size, args.crop or args.image_size)
    if origin == "timm":
        body = from_timm(name, channels, args.weights == "imagenet")
        with torch.no_grad():
            net = Net(body, body.eval()(x).shape[-1], classes)
    else:
        with one_line_of(f"--backbone {args.backbone}"):
            net = getattr(module_in(Path(origin), name), name)(args, channels, classes)
    if not isinstance(net, Net) or type(net.head) is not nn.Linear:
        raise UserError(f"--backbone {args.backbone} gives {type(net).__name__}; expected common.Net(body, "
                        "dim, classes) with the head that it makes, nn.Linear", 2)
    if not named(args.dataset).file:  # whose shape is not known here
        check_shapes(net, args.backbone, x, classes)
    if args.weights not in ("none", "imagenet"):
        load_pretrained(net, read_weights(args.weights, ""), skip="head", origin=args.weights)
    return net


def read_weights(origin: str, imagenet: str) -> dict[str, Tensor] | None:
    """The weights that `--weights origin` names: none, imagenet (torchvision's weights `imagenet`), or a
    file."""
    if origin == "none":
        return None
    if not origin:
        raise UserError("--weights is empty; expected none, imagenet or a file of weights", 2)
    if origin == "imagenet":
        import torchvision
        try:
            return torchvision.models.get_weight(imagenet).get_state_dict(progress=True, check_hash=True)
        except (OSError, RuntimeError) as e:
            raise UserError(f"could not get the weights {imagenet} ({e}); download them by hand and give "
                            "--weights FILE")
    weights = load_file(Path(origin), "weights")
    named = isinstance(weights, dict) and all(isinstance(name, str) for name in weights)
    if not named or not all(isinstance(v, Tensor) for v in weights.values()):
        raise UserError(f"--weights {origin} is no file of weights: expected a dict of names and tensors", 2)
    return weights


def load_pretrained(module: nn.Module, weights: dict, skip: str, origin: str) -> None:
    """Load weights into `module`. Those of the layer `skip` (empty: of none) are left out if their shape
    differs; all others must fit."""
    have = module.state_dict()
    kept = {}
    for name, value in weights.items():
        if not name.startswith(f"{skip}.") or (name in have and value.shape == have[name].shape):
            kept[name] = value
    wrong = [name for name, v in kept.items() if name not in have or v.shape != have[name].shape]
    wrong += [name for name in have if name not in kept and not name.startswith(f"{skip}.")]
    if wrong:
        raise UserError(f"--weights {origin} does not fit the network: {len(wrong)} tensors are missing or "
                        f"do not fit, such as {wrong[0]}", 2)
    module.load_state_dict(kept, strict=False)
