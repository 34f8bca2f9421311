"""The methods of this repository by name, and the arguments that their commands stand for."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from types import ModuleType

import common
from plumbing.run.errors import UserError
from plumbing.run.provenance import ROOT
from plumbing.run.settings import Args
from plumbing.run.trained import file_of, method

__all__ = ["ROOT", "arguments", "builder_of", "file_of", "method", "setting", "short_name"]


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


@functools.cache
def setting(module: str, flags: tuple[str, ...]) -> Args:
    """What a command stands for on any machine: a device or a precision that its flags do not name is cpu or
    fp32, and those that they name need not be here. Whatever is rendered asks here."""
    named = dict(zip(flags, flags[1:]))
    args = arguments(module, (*flags, "--device", "cpu", "--precision", "fp32"))
    return dataclasses.replace(args, device=named.get("--device", "cpu"),
                               precision=named.get("--precision", "fp32"))
