"""What travels between server and clients: its layout, its bytes, and what an answer must be."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable

from plumbing.run.errors import UserError, printable
from plumbing.run.files import tensors_of
from plumbing.run.settings import Args, ratios
from plumbing.run.several import targets_of

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only


TRAINED = "after_training/"  # begins the names of a client's counts of the network that it has just trained


def layout(payload: dict) -> dict[str, str]:
    """{part or part.name: dtype and shape, or "no tensor"} of what is in a payload."""
    layout_of = {}
    for part, value in payload.items():
        of_part = value if isinstance(value, dict) else {"": value}
        for name, v in of_part.items():
            name = f"{part}.{name}" if name else part
            layout_of[name] = f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else "no tensor"
    return layout_of


def to_device(value, device):
    """Tensors anywhere in nested dicts, lists and tuples moved to the device."""
    return tree_map_only(Tensor, lambda v: v.to(device), value)


def nbytes(payload: dict) -> int:
    """Bytes of a payload on the wire."""
    return sum(t.nbytes for t in tensors_of(payload))


def is_finite(payload: dict) -> bool:
    """Whether all numbers are finite: mostly by their norms, which are a twentieth of the work."""
    floats = [v for v in tensors_of(payload) if v.is_floating_point() and v.numel()]
    norms = torch.stack(torch._foreach_norm(floats)) if floats else torch.zeros(1)
    return bool(norms.isfinite().all()) or all(v.isfinite().all() for v in floats)


def expected_layout(down: dict, up: dict) -> dict[str, str]:
    """What all uploads look like, by the first one: each part like the download's of that name, if there is
    one. Where that is no tensor, one is expected, so that the upload is refused."""
    like = {}
    for part, value in up.items():
        shared = layout({part: down.get(part, {})}).keys() & layout({part: value}).keys()
        like[part] = down[part] if shared else value
    return {name: v.replace("no tensor", "a tensor") for name, v in layout(like).items()}


def agreed(layouts: Iterable[dict[str, str]]) -> dict[str, str]:
    """The layout that most clients send; of their uploads none is better than another. Stop at a tie."""
    counts = Counter(tuple(sorted(layout.items())) for layout in layouts)
    (most, often), *rest = counts.most_common(2)
    if rest and rest[0][1] == often:
        raise UserError(f"there are different uploads, each of {often} clients; expected one that most send")
    return dict(most)


def check_answer(whose: str, up: dict, numbers: dict[str, float], expected: dict[str, str]) -> None:
    """Stop unless a client's upload has the expected layout, `n` counts images, and numbers are finite."""
    got = layout(up)
    for name in expected | got:
        if got.get(name) != expected.get(name):
            raise UserError(f"{whose}: expected {expected.get(name, 'nothing')} in {name} of the upload; "
                            f"found {got.get(name, 'nothing')}: mend the client's train")
    n = up.get("n", torch.ones(1))
    if not isinstance(n, Tensor) or n.is_complex() or not n.numel() or n.min() < 1:
        shown = n.tolist() if isinstance(n, Tensor) else type(n).__name__
        raise UserError(f"{whose}: n is {shown} in the upload; expected at least 1")
    if not all(map(math.isfinite, numbers.values())) or not is_finite(up):
        raise UserError(f"{whose}: the loss or the weights are no longer finite; the last good checkpoint, "
                        "if one was due before, is in the output folder: lower --lr, or set --clip")


# What nodes send, of which a server knows nothing before: deploy/flower.py

TOLD = {"name": str, "unseen": bool, "size": int, "validated": int, "tested": list, "channels": int,
        "content": str, "fixed": dict}  # what a node tells of itself
NUMBERS, LARGEST = 50, 10**7  # at most: numbers in an answer, images of a node


def check_told(told: dict, settings: Args, nodes: list[str], classes: list[str]) -> tuple[str, dict]:
    """The name of the node and its settings, taken out of what it tells of itself. ValueError unless that can
    be true."""
    name, tested, target = told["name"], told["tested"], told["name"] in targets_of(settings, nodes)
    counts = [told["size"], told["validated"], *tested]
    fits = {part: type(value) for part, value in told.items()} == TOLD and told["unseen"] == target
    fits = fits and name in nodes and len(tested) == len(classes) and 0 < told["channels"] < 100
    fits = fits and all(type(n) is int and 0 <= n <= LARGEST for n in counts)
    if settings.protocol != "linear":  # there a client has one part of the three
        fits = fits and sum(tested) and (target or told["size"] and told["validated"])
    if not fits:
        raise ValueError(f"what it tells of itself does not fit the run: {told}")
    return name, told.pop("fixed")


def checked_numbers(what: str, told: dict, settings: Args, down: dict, up: dict, numbers: dict) -> dict:
    """The numbers of an answer to `what`. ValueError unless they can be true; those that the server knows are
    its own, and others than asked for are forgotten."""
    known, highest, counts = {}, {"chance_loss": math.inf}, {}
    if what == "train":
        known = {"bytes_down": nbytes(down), "bytes_up": nbytes(up)}
        highest = {name: math.inf for name in numbers if not name.startswith(TRAINED)}
        if settings.after_training and any(name.startswith(TRAINED) for name in numbers):
            counts = {f"{TRAINED}val": told["validated"], f"{TRAINED}test": sum(told["tested"])}
            highest |= counts
            known |= {f"{name}_of": n for name, n in counts.items()}
    elif what == "fit":
        highest = {str(ratio): 1 for ratio in ratios(settings.label_ratio)}
    elif what != "start":
        highest = {} if told["unseen"] else {"val": told["validated"]}
        if what == "test":
            highest["test"] = sum(told["tested"])
        known = {f"{part}_of": n for part, n in highest.items()}
    lowest = {name: -math.inf if what == "train" and name not in counts else 0 for name in highest}
    fits = len(numbers) <= NUMBERS and up.get("n", told["size"]) == told["size"]
    if not fits or not all(lowest[name] <= numbers[name] <= high for name, high in highest.items()):
        raise ValueError(f"expected numbers up to {highest}, n {told['size']}; found {numbers}")
    return {printable(name): numbers[name] for name in highest} | known


def kept(member) -> dict:
    """What outlives a round of a server or a client: the attributes that it names in `keeps`."""
    return {name: getattr(member, name) for name in member.keeps}


def restore(member, saved: dict, device: str) -> None:
    """The attributes of a server or a client as `kept` gave them. A tensor goes where it is at the start of a
    run, which may be the main memory; tensors in dicts go to `device`."""
    if saved.keys() != set(member.keeps):
        raise KeyError(f"expected {', '.join(member.keeps)}; found {', '.join(saved)}")
    for name, value in saved.items():
        at_start = getattr(member, name)
        setattr(member, name, to_device(value, at_start.device if isinstance(at_start, Tensor) else device))


def check_keeps(member, what: str) -> None:
    """Stop unless `keeps` is a tuple of attributes that a checkpoint can hold."""
    if not isinstance(member.keeps, tuple | list):
        raise UserError(f"`keeps` of the {what} is {member.keeps!r}; expected a tuple of names: ('w',)", 2)
    for name in member.keeps:
        if not hasattr(member, name):
            raise UserError(f"`keeps` of the {what} names {name}, which its __init__ does not set", 2)
        for value in tree_leaves(getattr(member, name)):
            if not isinstance(value, Tensor | int | float | str | None):
                raise UserError(f"{name} in `keeps` of the {what} has a {type(value).__name__}; expected "
                                "tensors, numbers or strings, in dicts or lists (of a module or an optimizer "
                                "its state_dict())", 2)


def copy_kept(member) -> None:
    """Give a client tensors of its own for what it keeps. Others may hold them too: at the start all clients
    have the same ones, and what has travelled is on both sides."""
    for name, value in kept(member).items():
        setattr(member, name, tree_map_only(Tensor, Tensor.clone, value))


@contextlib.contextmanager
def unchanged(payload: dict, what: str):
    """Stop if tensors are changed in place that others hold too."""
    versions = [(v, v._version) for v in tensors_of(payload)]
    yield
    if any(v._version != version for v, version in versions):
        raise UserError(f"{what} in place: make a new tensor, or clone it before")


@contextlib.contextmanager
def watched(member, net: nn.Module, t: int, what: str):
    """Stop if a step of a server or a client leaves a state with which a run cannot resume. A tensor that
    `keeps` names has another dtype or shape; or, in the first two rounds, an attribute that it does not name
    has another value. `net` is the network that all clients train."""
    layout_before, before = layout(kept(member)), unnamed(member, net) if t < 2 else {}
    yield
    for name, got in layout(kept(member)).items():
        expected = layout_before.get(name, got)  # a dict may get and lose entries
        if expected not in ("no tensor", got):
            raise UserError(f"{what} leaves {got} in {name}; expected {expected}, as it was (of batch "
                            "normalization a state has statistics and counters: average them, and let only "
                            "parameters take steps)")
    for name, values in unnamed(member, net).items() if t < 2 else ():
        if values != before.get(name):
            raise UserError(f"{what} changes {name}, which `keeps` does not name: a resumed run may have "
                            f"other numbers. Add {name!r} to keeps (of a network its state(model), of an "
                            "optimizer optimizer_state(model, opt)), or make it a local variable")


@contextlib.contextmanager
def guarded(member, net: nn.Module, t: int, what: str, others: dict, whose: str):
    """A step of a server or a client under `watched`; and `others`, which is `whose`, is `unchanged`."""
    with watched(member, net, t, what), unchanged(others, f"{what} changes {whose}"):
        yield


def check_upload(whose: str, up, member) -> None:
    """Stop if an upload is none, or if tensors of it, or of what the client keeps, are those of a network:
    later training, of other clients too, changes them."""
    if not isinstance(up, dict):
        raise UserError(f"{whose}: expected a dict of tensors from its train; found {type(up).__name__}")
    value = up | kept(member)
    networks = [v for v in vars(member).values() if isinstance(v, nn.Module)]
    theirs = {v.data_ptr() for network in networks for v in tensors_of(network.state_dict()) if v.numel()}
    if theirs & {v.data_ptr() for v in tensors_of(value)}:
        raise UserError(f"{whose}: its train gives or keeps tensors of a network itself, which later "
                        "training changes: copy them, by state(model) instead of model.state_dict()")


def logged(whose: str, member) -> dict[str, float]:
    """What a client or a server has in its `log`, as numbers."""
    log = {}
    for name, value in getattr(member, "log", {}).items():
        try:
            log[name] = float(value)
        except (TypeError, ValueError) as e:
            raise UserError(f"{whose}: expected a number in its log as {name!r}; {e}") from e
    return log


def take_counts(logs: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """The counts of each client's network right after its training, taken out of what the clients log."""
    counts = {}
    for k, log in logs.items():
        names = [name for name in log if name.startswith(TRAINED)]
        if names:
            counts[k] = {name.removeprefix(TRAINED): log.pop(name) for name in names}
    return counts


def unnamed(member, net: nn.Module) -> dict[str, list]:
    """What each attribute holds that `keeps` does not name: numbers, strings and the bytes of tensors, those
    of networks and optimizers too. `log` and the tensors of `net` aside."""
    of_net, held = {v.data_ptr() for v in tensors_of(net.state_dict())}, {}
    for name in sorted(vars(member).keys() - {*member.keeps, "log"}):
        value = tree_map_only((nn.Module, Optimizer), lambda part: part.state_dict(), getattr(member, name))
        held[name] = []
        for v in tree_leaves(value):
            if isinstance(v, int | float | str):
                held[name].append(repr(v))
            elif isinstance(v, Tensor) and v.data_ptr() not in of_net:
                held[name].append(v.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return held


def shared(value, first):
    """A client's value at the start with the first client's tensors, where they are equal."""
    if isinstance(value, dict) and isinstance(first, dict):
        return {name: shared(v, first.get(name)) for name, v in value.items()}
    both = isinstance(value, Tensor) and isinstance(first, Tensor) and value.dtype == first.dtype
    return first if both and torch.equal(value, first) else value
