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
from plumbing.settings import Args, shown_value
from plumbing.trained import arguments_from, fitting, refuse_other_images, refuse_other_weights
from reproduce.methods import builder_of, method

import numpy as np
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
        if result["best"]["round"] > 0 and result["method"] == result["args"]["method"]:
            return result
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise Stop(f"{path} is missing or damaged: give the output folder of a finished run", 2)


def history(folder) -> list[dict]:
    """The lines of metrics.jsonl, one for each round of a finished run."""
    path = Path(folder) / "metrics.jsonl"
    try:
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        if [entry["round"] for entry in entries] == list(range(1, finished(folder)["last"]["round"] + 1)):
            return entries
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise Stop(f"{path} is missing or damaged: expected one line of metrics for each round", 2)


def numbers_of(entry: dict) -> dict[str, float]:
    """What a round's line of metrics.jsonl says, by name: accuracies (val, ALL, AVG, target, `photo 0.1` of
    runs without labels), and the means over the clients of what they log."""
    test = entry.get("test", {})
    found = {name: test[name] for name in ("ALL", "AVG") if name in test}
    if "val" in entry:
        found["val"] = entry["val"]["ALL"]
    if "target" in entry:
        found["target"] = entry["target"]
    for domain, accuracies in entry.get("linear", {}).items():
        for ratio, accuracy in accuracies.items():
            found[f"{domain} {ratio}"] = accuracy
    logs = {}
    for log in entry["clients"].values():
        for name, value in log.items():
            logs.setdefault(name, []).append(value)
    for name, values in logs.items():
        found[name] = float(np.mean(values))  # as plumbing/results.py
    return found


def arguments_of(folder, data: str, archives: str) -> Args:
    """The arguments of a finished run from its result. A GPU is used if the run had one and one is here."""
    key, file = finished(folder)["args"], Path(folder) / "result.json"
    args = arguments_from(key, file, "cpu" if key.get("device") == "cpu" else "auto", data, archives)
    refuse_other_weights(args, key)
    refuse_other_images(args, key)
    return args


def training_sizes(args: Args) -> dict[str, int]:
    """{client: its training images}."""
    domains, classes = common.load_domains(args)
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
    saved = load_file(path, "checkpoint")
    open_device(args)
    set_precision(args)
    domains, classes = common.load_domains(args)
    with fitting(path, result["method"]):
        if json.loads(saved["identity"]) != result["args"] or saved["round"] != result[which]["round"]:
            raise Stop(f"{path} and result.json beside it are of different runs or rounds", 2)
        fed = common.federation(module.Server, module.Client, args, builder_of(module), domains, classes)
        fed.load_state_dict(to_device(saved, args.device))
    return fed


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
    result = finished(folder)
    name = name_of(result["method"], result["args"].get("variant"))
    return Rebuilt(str(folder), which, result[which]["round"], name, fed)


def all_rebuilt(flags) -> list[Rebuilt]:
    """The runs of a command, labelled so that they can be told apart."""
    runs = []
    for folder, name in zip(flags.folders, labels(flags.folders)):
        run = rebuilt(folder, flags.which, flags.data, flags.archives)
        run.label = name
        runs.append(run)
    return runs


# Names


def name_of(method_name: str, variant: str | None) -> str:
    """A method as the papers write it: the first word of its file, or the ablation that its variant is, or
    both."""
    module = method(method_name)
    if variant in ABLATIONS:
        return ABLATIONS[variant]
    name = (module.__doc__ or method_name).split(":")[0].split("\n")[0]
    if variant in (None, getattr(module.Args, "variant", None)):
        return name
    return f"{name} ({variant})"


def labels_of(keys: list[dict]) -> list[str]:
    """For each set of arguments the method, and where several are of one method, the arguments in which these
    differ."""
    plain = [name_of(key["method"], key.get("variant")) for key in keys]
    names = []
    for name, key in zip(plain, keys):
        same = [other for other, of_other in zip(keys, plain) if of_other == name]
        different = []
        for argument in sorted(set().union(*same) - {"seed"}):
            if any(other.get(argument) != key.get(argument) for other in same):
                different.append(f"{argument.strip('_')} {shown_value(key.get(argument))}")
        names.append(f"{name}, {', '.join(different)}" if different else name)
    return names


def labels(folders) -> list[str]:
    """The labels of several finished runs; those that are equal get the folder's name."""
    names = labels_of([finished(folder)["args"] for folder in folders])
    unique = []
    for folder, name in zip(folders, names):
        unique.append(f"{name} [{Path(folder).resolve().name}]" if names.count(name) > 1 else name)
    return unique
