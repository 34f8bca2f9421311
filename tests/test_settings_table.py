"""tests/settings.csv against the command lines: of every method, data set, variant and scale each value, and
who says it."""

import csv
import functools

from tests.conftest import PROGRAMS, parsed
from tests.settings_table import FILE, HEADS, USUAL, commands, resolved

import pytest


@functools.cache
def table() -> dict[tuple, tuple[str, str]]:
    """{(method, data set, flags, scale, setting): value and origin} of all rows."""
    found = {}
    with open(FILE, newline="") as file:
        reader = csv.reader(file)
        assert next(reader) == HEADS
        for methods, flags, scale, setting, value, origin, datasets in reader:
            for method in methods.split():
                for dataset in datasets.split():
                    key = method, dataset, flags, scale, setting
                    assert key not in found, key
                    found[key] = value, origin
    return found


@pytest.mark.parametrize("method", PROGRAMS)
def test_commands_lead_to_the_values_of_the_table(capsys, method):
    """A scale's row goes before the paper's, a variant's before the usual one, a default comes last."""
    rows, name, used = table(), method.removeprefix("baselines."), set()
    for command in commands(method):
        _, dataset, flags, scale = command
        refused = (name, dataset, flags, scale, "")
        values = resolved(command)
        assert (refused in rows) == (not values)
        used |= {refused} & rows.keys()
        for setting, found in values.items():
            keys = [(name, dataset, flags, scale), (name, dataset, flags, "paper"),
                    (name, dataset, USUAL, "paper"), (name, "*", "", "")]
            key = next((*key, setting) for key in keys if (*key, setting) in rows)
            used.add(key)
            assert found == rows[key], (command, setting)
    stale = {key for key in rows if key[0] == name and key[1] != "*"} - used
    assert not stale, "the command `python -m tests.settings_table` writes the table anew"


def test_flags_win_over_the_table():
    """And they win over what follows from others."""
    flags = ["--dataset", "pacs", "--scale", "laptop", "--variant", "official"]
    args = parsed("official.fdse", *flags, "--beta", "0.2", "--rounds", "3")
    assert (args.beta, args.rounds, args.origins["beta"], args.origins["rounds"]) == (0.2, 3, "flag", "flag")
    assert args.origins["image_size"] == "laptop"  # over the variant's
    byol = parsed("fedgala", "--dataset", "pacs", "--ssl", "byol", "--optimizer", "adam", "--momentum", "0.5")
    assert (byol.lr, byol.momentum, byol.weight_decay) == (3e-3, 0.5, 0)
    assert byol.origins["lr"] == "derived: text, App. B.3"
