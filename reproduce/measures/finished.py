"""A finished run from its output folder: what it has recorded, and its server and clients put together
again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import common
from plumbing.errors import Stop
from plumbing.files import load_file
from plumbing.processes import open_device, set_precision, to_device
from plumbing.settings import Args
from plumbing.trained import arguments_from, fitting, refuse_other_images, refuse_other_weights
from reproduce.methods import builder_of, method

from torch import nn

FILES = {"best": "best.pt", "last": "checkpoint.pt"}  # where a run keeps its state after these rounds
# Variants that have a name of their own.
ABLATIONS = {"fedavg": "FedAvg", "fedl2r": "FedL2R", "fedcmi": "FedCMI", "fedreg": "FedReg",
             "fedalign": "FedAlign"}


# What a run has recorded


def finished(folder) -> dict:
    """result.json of a run's folder. Stop if there is none or it is no result."""
    path = Path(folder) / "result.json"
    try:
        result = json.loads(path.read_text())
        whole = result["best"]["round"] > 0 and result["last"]["round"] > 0
        if whole and result["method"] == result["args"]["method"]:
            return result
    except (FileNotFoundError, NotADirectoryError):
        raise Stop(f"{path}: no such file; give the output folder of a finished run", 2)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise Stop(f"{path} is damaged or no result of a run: give the output folder of a finished run", 2)


def history(folder) -> list[dict]:
    """The lines of metrics.jsonl, one for each round."""
    path = Path(folder) / "metrics.jsonl"
    try:
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        rounds = [entry["round"] for entry in entries if isinstance(entry["clients"], dict)]
        if rounds == list(range(1, finished(folder)["last"]["round"] + 1)):
            return entries
    except (FileNotFoundError, NotADirectoryError):
        raise Stop(f"{path}: no such file; give the output folder of a finished run", 2)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise Stop(f"{path} is damaged: expected one line of metrics for each round", 2)


def arguments_of(folder, data: str, archives: str) -> Args:
    """The arguments of a finished run from its result. A GPU is used if the run had one and one is here."""
    key, file = finished(folder)["args"], Path(folder) / "result.json"
    args = arguments_from(key, file, "cpu" if key.get("device") == "cpu" else "auto", data, archives)
    refuse_other_weights(args, key)
    refuse_other_images(args, key)
    return args


def domains_of(args: Args) -> tuple[list[common.Domain], tuple[str, ...]]:
    """The domains of a finished run, and the class names."""
    try:
        return common.load_domains(args)
    except KeyError as e:
        raise Stop(f"{Path(args.out) / 'result.json'}: there is no dataset {e} here", 2)


def training_sizes(args: Args) -> dict[str, int]:
    """{client: its training images}."""
    domains, classes = domains_of(args)
    clients, _ = common.make_clients(args, domains, len(classes))
    return {client.name: len(client.train) for client in clients}


# Put together again


def federation(folder, which: str = "best", data: str = "data", archives: str = "") -> common.Federation:
    """The server and clients of the finished run in `folder`, after its best validation round or its last
    one.

    `federation.clients[k].model(federation.server.download(k))` is the network that client k was tested with.
    One scratch network is shared by all of them, so a call of model() overwrites what the call before
    returned. `data` and `archives` as the flags of a run. Stop if the folder does not hold a whole finished
    run.
    """
    if which not in FILES:
        raise Stop(f"which is {which!r}; expected best or last", 2)
    result = finished(folder)
    module = method(result["method"])
    args = arguments_of(folder, data, archives)
    file = FILES["last" if args.protocol == "linear" else which]  # without labels the last round is the best
    path = Path(folder) / file
    saved = read_state(path, result, which)
    open_device(args)
    set_precision(args)
    domains, classes = domains_of(args)
    with fitting(path, result["method"]):
        build = builder_of(module)
        fed = common.federation(module.Server, module.Client, args, build, domains, classes)
        fed.load_state_dict(to_device(saved, args.device))
    return fed


def read_state(path: Path, result: dict, which: str) -> dict:
    """{"server": its state, "clients": {k: state}}. Stop if the file is of another run or round than the
    result."""
    saved = load_file(path, "checkpoint")
    try:
        same = json.loads(saved["identity"]) == result["args"] and saved["round"] == result[which]["round"]
    except (KeyError, TypeError, ValueError):
        raise Stop(f"{path} is no whole checkpoint: give the output folder of a finished run", 2)
    if not same:
        raise Stop(f"{path} and result.json beside it are of different runs or rounds: let the run finish "
                   f"first", 2)
    return saved


@dataclass
class Rebuilt:
    """A finished run, put together again as it was after one of its rounds: what the measures look at."""

    folder: str
    which: str  # best or last
    round: int
    label: str  # the method, as the papers write it
    federation: common.Federation

    @property
    def args(self) -> Args:
        return self.federation.args

    def tested(self) -> Iterator[tuple[common.ClientProtocol, nn.Module]]:
        """(client, the network it was tested with) for each client of a run and last for its targets, seeded
        as the round loop does. Use a network before the next is asked for: they share their memory."""
        for k, client in self.federation.clients.items():
            common.seed_all(self.args.seed, "evaluate", self.round, k)  # as common.evaluate
            yield client, client.model(self.federation.server.download(k))

    def heading(self) -> dict[str, str]:
        """With what the numbers of a run begin."""
        return {"folder": self.folder, "method": self.label, "which": self.which}


def rebuilt(folder, which: str = "best", data: str = "data", archives: str = "") -> Rebuilt:
    """The finished run in `folder` with its `federation`."""
    fed = federation(folder, which, data, archives)
    return Rebuilt(str(folder), which, finished(folder)[which]["round"], label(folder), fed)


# Its name


def label(folder) -> str:
    """A run's method as the papers write it: the first word of its file, or the ablation that its variant is,
    or both."""
    result = finished(folder)
    return name_of(result["method"], result["args"].get("variant"))


def name_of(method_name: str, variant: str | None) -> str:
    """The name of a method and its variant, as above."""
    module = method(method_name)
    if variant in ABLATIONS:
        return ABLATIONS[variant]
    name = (module.__doc__ or method_name).split(":")[0].split("\n")[0]
    if variant in (None, getattr(module.Args, "variant", None)):
        return name
    return f"{name} ({variant})"


def labels(folders) -> list[str]:
    """The labels of several runs; those that are equal get the arguments in which the runs differ, or the
    folder's name."""
    plain = [label(folder) for folder in folders]
    keys = [finished(folder)["args"] for folder in folders]
    names = []
    for folder, name, key in zip(folders, plain, keys):
        same = [other for other, of_other in zip(keys, plain) if of_other == name]
        if len(same) > 1:
            name = f"{name} [{difference(key, same) or base_name(folder)}]"
        names.append(name)
    unique = []
    for folder, name in zip(folders, names):
        unique.append(f"{name} [{base_name(folder)}]" if names.count(name) > 1 else name)
    return unique


def difference(key: dict, others: list[dict]) -> str:
    """The first three arguments in which one of the other runs differs, with the run's values."""
    differ = [name for name in key if any(other.get(name) != key[name] for other in others)]
    return ", ".join(f"{name} {key[name]}" for name in differ[:3])


def base_name(folder) -> str:
    return Path(folder).resolve().name
