"""A run read from its output folder, whether it is finished or not: its method, arguments, state and code.

Nothing in a folder can have code run: states are tensors and numbers, and a method is a file of this
repository, known by its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from plumbing.catalog import own_folder
from plumbing.errors import Stop
from plumbing.files import load_file
from plumbing.runfolder import code_of
from plumbing.settings import Args, choose_device, content_of, identity
from plumbing.sources import ROOT, equivalent_to, hash_of, method_file

PARTS = ("Server", "Client", "Args")  # the classes of a method file
# Where a run keeps its state after these rounds; the second one while the first is being replaced.
FILES = {"best": ("best.pt",), "last": ("checkpoint.pt", "before.pt")}


# Its method


def file_of(module: str) -> Path:
    """The file of a module of this repository, whether there is one or not: fedavg, baselines.fedbn."""
    return ROOT / (module.replace(".", "/") + ".py")


def method(name) -> ModuleType:
    """The module of the method that a record or result names. These are only data: they cannot have anything
    else imported."""
    if isinstance(name, str) and name.isidentifier():
        for module_name in (name, f"baselines.{name}"):
            if not file_of(module_name).is_file():
                continue
            module = importlib.import_module(module_name)
            if Path(module.__file__).resolve() == file_of(module_name) and is_method(module):
                return module
    raise Stop(f"{str(name)[:60]!r} is no method of this repository: expected the name of a file with "
               f"Server, Client and Args", 2)


def is_method(module: ModuleType) -> bool:
    """Whether a module has what a method file does. Its Args are its own: they say which method a run is of;
    Server and Client may be another's."""
    classes = [getattr(module, part, None) for part in PARTS]
    return all(isinstance(c, type) for c in classes) and module.Args.__module__ == module.__name__


# Its arguments


def arguments_from(key: dict, file: Path, device: str, data: str, archives: str) -> Args:
    """The arguments of a run from its identity `key`, which `file` in its folder has.

    A field that the identity lacks takes its default, one that the method lacks today is left out; what is no
    number of the run (folders) comes from the caller, and so does the device.
    """
    cls = method(key["method"]).Args
    values = {}
    for f in dataclasses.fields(cls):
        if not f.metadata["numbers"] or f.name not in key:
            continue
        value, kind = key[f.name], type(f.default)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise Stop(f"{file}: {f.name} is {value!r}; expected a value like {f.default!r}", 2)
        values[f.name] = value
    args = cls(**values | {"data": data, "archives": archives, "out": str(file.parent)})
    if own_folder(args.dataset):  # its content follows its name
        args.dataset = args.dataset.rpartition(" ")[0]
    if args.weights not in ("none", "imagenet"):  # a file; its hash follows its name
        args.weights = args.weights.rpartition(" ")[0]
    args.device = choose_device(device)
    return args


def refuse_other_weights(args: Args, key: dict) -> None:
    """Stop if the file of initial weights is another one than the run's."""
    if args.weights not in ("none", "imagenet") and identity(args)["weights"] != key["weights"]:
        raise Stop(f"the run started from the weights {key['weights']}; {args.weights} is missing or another "
                   "file", 2)


def refuse_other_images(args: Args, key: dict) -> None:
    """Stop if the folder of one's own images has others than it had for the run."""
    folder = own_folder(args.dataset)
    if folder and f"{args.dataset} {content_of(args.dataset)}" != key["dataset"]:
        raise Stop(f"the images in {folder} are not those of the run in {args.out} (by their names, sizes "
                   "and times): put those back, or run it anew", 2)


# Its state


@dataclass
class Kept:
    """What a run has kept after one of its rounds."""

    file: Path
    key: dict  # the run's identity: its method and arguments
    round: int
    state: dict  # {"server": its state, "clients": {k: state}}
    data: dict  # classes, channels, clients and targets; empty if a run has not written them
    code: list[dict]  # a part for each time that the run was started


def read_kept(folder, which: str) -> Kept:
    """The state of a run after its best validation round or the last one that was kept. A run without labels
    has no best round but the last. Stop if the folder has none."""
    if which not in FILES:
        raise Stop(f"which is {which!r}; expected best or last", 2)
    folder = Path(folder)
    there = [folder / name for name in FILES[which] + FILES["last"] if (folder / name).is_file()]
    if not there:
        runs = sorted(path.parent for path in folder.glob("*/checkpoint.pt"))
        if runs:
            raise Stop(f"{folder} has several runs in it: give the folder of one, such as {runs[0]}", 2)
        raise Stop(f"{folder} has no state of a run: expected an output folder with best.pt or "
                   "checkpoint.pt; if they were deleted, the run has to be made again", 2)
    file = there[0]
    saved = load_file(file, "checkpoint")
    try:
        key = json.loads(saved["identity"])
        state = {"server": saved["server"], "clients": saved["clients"]}
        kept = Kept(file, key, saved["round"], state, {}, json.loads(saved.get("code", "[]")))
        protocol = key.get("protocol")
        whole = isinstance(key["method"], str) and isinstance(kept.round, int)
        code_of(kept.code)
        if not whole:
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise Stop(f"{file} is no whole checkpoint: give the output folder of a run", 2)
    if which == "best" and file.name != "best.pt" and protocol != "linear":
        raise Stop(f"{folder} has no best.pt, the state after the best validation round: the last round's is "
                   "there (which=\"last\")", 2)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        settings = json.loads((folder / "settings.json").read_text())
        code_of(settings["code"])
        kept.code = kept.code or settings["code"]
        kept.data = settings["data"]
    return kept


def refuse_other_code(kept: Kept, args: Args) -> None:
    """Stop unless the sources of now give the numbers of those that computed a run, by what is known."""
    now = hash_of(method_file(args))
    same = equivalent_to(now)
    others = [part["sources"] for part in kept.code if part["sources"] not in same]
    if not kept.code:
        others = ["unknown"]
    if others:
        raise Stop(f"{kept.file.parent} holds a run by other code (sources {', '.join(others)}; here {now}): "
                   "run it anew, or take its network all the same (any_code=True, --any-code)", 2)


@contextlib.contextmanager
def fitting(file: Path, method: str):
    """Stop if the state in `file` does not fit what is built for it."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as e:
        why = f"{type(e).__name__}: {str(e)[:80]}".splitlines()[0]
        raise Stop(f"{file} does not fit {method}.py as it is now ({why})", 2)
