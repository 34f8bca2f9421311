"""A finished run from its output folder: what it has recorded, its server and clients, and its name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import common
from plumbing.run.errors import UserError
from plumbing.run.results import curves, mean_logs
from plumbing.run.runfolder import read_result
from plumbing.run.settings import Args, shown_value
from reproduce import loading
from reproduce.methods import method

from torch import nn


def finished(folder) -> dict:
    """result.json of a run's folder. Stop if there is none or it is no result."""
    result = read_result(Path(folder))
    if not result:
        raise UserError(f"{Path(folder) / 'result.json'} is missing or damaged: give the output folder of a "
                        "finished run", 2)
    return result


def numbers_of(entry: dict) -> dict[str, float]:
    """What a round's line of metrics.jsonl says, by name, to five digits: accuracies (val, ALL, AVG, target,
    `photo 0.1` of runs without labels), and the means over the clients of what they log."""
    curve_of = mean_logs([entry])
    if "val" in entry or "linear" in entry:
        curve_of = curves([entry]) | curve_of
    return {name: value for name, (value,) in curve_of.items() if name != "round"}


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
        return self.federation.settings

    def tested(self) -> Iterator[tuple[common.ClientProtocol, nn.Module]]:
        """(client, the network it was tested with) for each client of a run and last for its targets. Use a
        network before the next is asked for: they share their memory."""
        for k, client in self.federation.clients.items():
            yield client, common.tested_model(self.federation, k, self.round)

    def heading(self) -> dict[str, str]:
        """With what the numbers of a run begin."""
        return {"folder": self.folder, "method": self.label, "which": self.which}


def rebuilt(folder, which: str = "best", data: str = "data", archives: str = "",
            any_code: bool = False) -> Rebuilt:
    """The finished run in `folder`, after its best validation round or its last one. A GPU is used if the run
    had one and one is here."""
    key = finished(folder)["args"]
    device = "cpu" if key["device"] == "cpu" else "auto"
    fed, saved = loading.rebuilt(folder, which, None, device, data, archives, any_code, images=True)
    return Rebuilt(str(folder), which, saved["round"], name_of(key), fed)


def all_rebuilt(flags) -> list[Rebuilt]:
    """The runs of a command, labelled so that they can be told apart."""
    labels, runs = labels_of([finished(folder)["args"] for folder in flags.folders]), []
    for folder, label in zip(flags.folders, labels):
        runs.append(rebuilt(folder, flags.which, flags.data, flags.archives, flags.any_code))
        runs[-1].label = label
    return runs


# Names


def name_of(key: dict) -> str:
    """A method as its file's first word, and its variant if that is not the file's own. A method of a file
    elsewhere has the name that its runs have."""
    try:
        module, variant = method(key["method"]), key.get("variant")
    except UserError:
        return key["method"]
    name = (module.__doc__ or key["method"]).split(":")[0].split("\n")[0]
    return name if variant in (None, getattr(module.Args, "variant", None)) else f"{name} ({variant})"


def labels_of(keys: list[dict], left_out: tuple[str, ...] = ()) -> list[str]:
    """For each set of arguments the method; dataset, protocol and target where they are not the same for all;
    and the other arguments in which those of one method differ, but for those that are left out. The digest
    of a custom file stands there only if it tells two apart."""
    labels, methods = [], {}
    for key in keys:
        methods.setdefault(name_of(key), set()).add(key["method"])
    # The copy of a file has its docstring, too: the files' names tell them apart.
    names = [key["method"] if len(methods[name_of(key)]) > 1 else name_of(key) for key in keys]
    for key, name in zip(keys, names):
        same = [other for other, of_other in zip(keys, names) if of_other == name]
        words = [name]
        for argument in sorted(set().union(*same) - set(left_out)):
            others = keys if argument in ("dataset", "protocol", "target") else same
            if any(other.get(argument) != key.get(argument) for other in others):
                value = shown_value(key.get(argument))
                words.append(f"{argument.strip('_')} {value.rpartition('/')[2]}")  # a file without its folder
        labels.append(", ".join(words))
    short = [re.sub(r" [0-9a-f]{16}\b", "", label) for label in labels]
    return short if len(set(short)) == len(set(labels)) else labels
