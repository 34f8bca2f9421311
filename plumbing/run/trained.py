"""A run read from its output folder, whether it is finished or not: its method, settings and state.

Nothing in a folder can have code run: states are tensors and numbers, and a method is a file of this
repository, known by its name.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from pathlib import Path
from types import ModuleType

from plumbing.data.catalog import named
from plumbing.run.devices import choose_device
from plumbing.run.errors import UserError
from plumbing.run.files import check_regular
from plumbing.run.networks import canonical_network, hash_of, network_file
from plumbing.run.provenance import ROOT, code
from plumbing.run.runfolder import DAMAGED, check_same_code, read_state
from plumbing.run.settings import Args, canonical, method_name

PARTS = ("Server", "Client", "Args", "arguments")  # what a method's file has


def file_of(module: str) -> Path:
    """The file of a module of this repository, whether there is one or not: fedavg, baselines.fedbn."""
    return ROOT / (module.replace(".", "/") + ".py")


def method(name) -> ModuleType:
    """The module of the method that a record or result names: fdse, fedprox, official.fdse. These are only
    data: they cannot have anything else imported."""
    if isinstance(name, str) and name.removeprefix("official.").isidentifier():
        for module_name in (name, f"baselines.{name}"):
            if not file_of(module_name).is_file():
                continue
            module = importlib.import_module(module_name)
            if all(hasattr(module, part) for part in PARTS) and method_name(module.__file__) == name:
                return module
    raise UserError(f"{str(name)[:60]!r} is no method of this repository: expected the name of a file with "
                    "Server, Client and Args; load_run and predict take a file elsewhere as script", 2)


def read_run(folder, which: str) -> dict:
    """The best or the last state in a run's folder, and `data`, who takes part. Stop if there is none."""
    folder, advice = Path(folder), "give the output folder of a run"
    if which not in ("best", "last"):
        raise UserError(f"which is {which!r}; expected best or last", 2)
    saved = read_state(folder / "checkpoint.pt", advice)
    if which == "best" and saved["identity"]["protocol"] != "linear":
        saved = read_state(folder / "best.pt", advice)
    check_regular(folder / "settings.json")
    try:
        settings = json.loads((folder / "settings.json").read_bytes())
        dataset = str(settings["settings"]["dataset"]["value"])  # where the data were
        return saved | {"data": settings["data"], "dataset": dataset, "folder": folder}
    except (OSError, *DAMAGED) as e:
        raise UserError(f"{folder / 'settings.json'} cannot be read ({type(e).__name__}): {advice}", 2)


def settings_from(run: dict, device: str, data: str, archives: str, any_code: bool,
                  module: ModuleType | None, backbone: str, dataset: str) -> tuple[ModuleType, Args]:
    """The method of a run and its settings. Missing fields get defaults; unknown fields are ignored. What is
    no number of the run (folders), and the device, come from the caller; so does the file of a network of
    one's own. Stop if the run is by other code, unless `any_code`."""
    key = run["identity"]
    module = module or method(key["method"])
    if not any_code:
        check_same_code(run["folder"], run["code"], code(Path(module.__file__)))
    values = {"data": data, "archives": archives, "out": str(run["folder"]), "device": choose_device(device)}
    for f in dataclasses.fields(module.Args):
        if f.name in key and f.name != "device":
            values[f.name] = key[f.name]
    values["dataset"] = run["dataset"]
    if bool(named(values["dataset"]).file) != bool(dataset):
        raise UserError(f"the data of this run are {values['dataset']}: dataset= of load_run names them "
                        "again if they are a file of one's own, and only then", 2)
    if dataset:
        values["dataset"] = canonical(dataset, ())
    values["weights"] = "none"  # the state has all of them
    if network_file(values["backbone"]) or backbone:
        values["backbone"] = allowed_file(values["backbone"], backbone, any_code)
    return module, module.Args(**values)


def allowed_file(of_run: str, given: str, any_code: bool) -> str:
    """The file of a network of one's own. It is code, so the caller names it again: a folder cannot."""
    name, _, content = of_run.rpartition(" ")
    if not given or not network_file(of_run):
        raise UserError(f"the network of this run is {name or content}: backbone= of load_run, or --backbone "
                        "of predict, names it again if it is a file of one's own, and only then", 2)
    try:
        given = canonical_network(given, ())
    except argparse.ArgumentTypeError as e:
        raise UserError(f"backbone: {e}", 2)
    if not any_code and hash_of(network_file(given)) != content:
        raise UserError(f"{given} has another content than when the run was made", 2)
    return given
