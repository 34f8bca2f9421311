"""The methods of this repository by name, and the arguments that their commands stand for."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
from pathlib import Path
from types import ModuleType

import common
from plumbing.errors import Stop
from plumbing.settings import Args

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("Server", "Client", "Args")  # the classes of a method file


def file_of(module: str) -> Path:
    """The file of a module of this repository, whether there is one or not: fedavg, baselines.fedbn."""
    return ROOT / (module.replace(".", "/") + ".py")


def short_name(module: str) -> str:
    """The name that a method has in its records: fedbn of baselines.fedbn."""
    return module.rpartition(".")[2]


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


def modules() -> list[str]:
    """All methods of this repository, by the names of their modules."""
    found = []
    for path in [*sorted(ROOT.glob("*.py")), *sorted(ROOT.glob("baselines/*.py"))]:
        if "\nclass Client" in path.read_text() and path.stem != "common":
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if is_method(importlib.import_module(name)):
                found.append(name)
    return found


def is_method(module: ModuleType) -> bool:
    """Whether a module defines what a method file does."""
    classes = [getattr(module, part, None) for part in PARTS]
    return all(isinstance(c, type) and c.__module__ == module.__name__ for c in classes)


def builder_of(module: ModuleType):
    """What makes a method's network: build(args, channels, classes)."""
    return getattr(module, "build", common.backbone)


@functools.cache
def arguments(module: str, flags: tuple[str, ...]) -> Args:
    """The arguments of a method's command; Stop with its line if it is none. They are shared: replace, do not
    change them."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return importlib.import_module(module).arguments(list(flags))
    except SystemExit:
        raise Stop(f"{module} {' '.join(flags)}: {said.getvalue().strip()}", 2)
