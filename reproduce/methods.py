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
from plumbing.trained import file_of, is_method, method

__all__ = ["ROOT", "arguments", "builder_of", "file_of", "is_method", "method", "modules", "short_name"]
ROOT = Path(__file__).resolve().parent.parent


def short_name(module: str) -> str:
    """The name that a method has in its records: fedbn of baselines.fedbn, but official.fdse."""
    return module.removeprefix("baselines.")


def modules() -> list[str]:
    """All methods of this repository but those of official/, by the names of their modules."""
    found = []
    for path in [*sorted(ROOT.glob("*.py")), *sorted(ROOT.glob("baselines/*.py"))]:
        if "\nclass Client" in path.read_text() and path.stem != "common":
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if is_method(importlib.import_module(name)):
                found.append(name)
    return found


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
