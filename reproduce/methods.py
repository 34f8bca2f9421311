"""The methods of this repository by name, and the arguments that their commands stand for."""

from __future__ import annotations

import contextlib
import functools
import io
from types import ModuleType

import common
from plumbing.run.errors import UserError
from plumbing.run.provenance import ROOT
from plumbing.run.settings import Args
from plumbing.run.trained import file_of, method

__all__ = ["ROOT", "arguments", "builder_of", "file_of", "method", "short_name"]


def short_name(module: str) -> str:
    """The name that a method has in its records: fedbn of baselines.fedbn, but official.fdse."""
    return module.removeprefix("baselines.")


def builder_of(module: ModuleType):
    """What makes a method's network: build(args, channels, classes)."""
    return getattr(module, "build", common.backbone)


@functools.cache
def arguments(module: str, flags: tuple[str, ...]) -> Args:
    """The arguments of a method's command; Stop with its line if it is none."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return method(short_name(module)).arguments(list(flags))
    except SystemExit:
        raise UserError(f"{module} {' '.join(flags)}: {said.getvalue().strip()}", 2)
