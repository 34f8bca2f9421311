"""Flags and settings: where a value comes from, what is shown of it, and every kind of bad flag;
tests/settings.csv, each value of every method, against the command lines."""

import csv
import dataclasses
import itertools
import math
import platform
import re
from fractions import Fraction

import common
import fdse
import fedadg
import fedavg
import fedcir
import fedsr
import reproduce_tables
from plumbing import schedules
from plumbing.run.settings import Args, LinearArgs, flag_of, method_name, parse
from tests.conftest import METHODS, MODULES, PROGRAMS, ROOT, fails, parsed
from tests.settings_table import FILE, HEADS, rows

import pytest
import torch

SOURCES = [ROOT / "common.py", *(ROOT / "plumbing").rglob("*.py")]


def names(cls: type[Args]) -> list[str]:
    """The names of all settings."""
    return [f.name for f in dataclasses.fields(cls)]


def shown(capsys, method, *flags) -> str:
    """What a command prints that ends with 0 before anything is run."""
    with pytest.raises(SystemExit) as end:
        parsed(method, *flags)
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("method", METHODS)
def test_help_explains_every_flag(capsys, method):
    module = MODULES[method]
    text = shown(capsys, method, "--help-all")
    assert module.__doc__.splitlines()[0] in text
    assert "This file\n" not in text  # the map of equations is for those who read the file
    lines = text.splitlines()
    assert len(lines) < 158 and max(map(len, lines)) <= 110
    for f in dataclasses.fields(module.Args):
        assert (flag_of(f.name) in text) != f.metadata["hidden"] and len(f.metadata["text"]) > 10


def test_help_is_short(capsys):
    """A method's own flags and those that most commands have; it says where the others are."""
    text = shown(capsys, "fdse", "--help")
    own = {f.name for f in dataclasses.fields(MODULES["fdse"].Args)} - {*names(Args)}
    for name in (*own, "dataset", "lr", "seeds", "out"):
        assert flag_of(name) in text
    assert "--dirichlet" not in text and "--help-all" in text
    assert len(text.splitlines()) < 80


@pytest.mark.parametrize("method", PROGRAMS)
def test_every_own_value_of_a_method_names_its_source(method):
    """On every dataset; of common flags, such as --seed, the rule says nothing."""
    module = PROGRAMS[method]
    own = {*names(module.Args)} - {*names(LinearArgs), "variant"}
    for dataset in module.PAPER:
        origins = parsed(method, "--dataset", dataset).origins
        assert [name for name in own if ": " not in origins[name]] == [], dataset


def test_show_settings_prints_each_and_stops(capsys, tmp_path):
    long = "torchvision:mobilenet_v3_small"
    flags = ["--scale", "smoke", "--lr", "0.3", "--backbone", long, "--out", tmp_path / "run"]
    _, *lines = shown(capsys, "fedavg", *flags, "--show-settings").splitlines()
    rows = [line.split() for line in lines]
    assert [row[0] for row in rows] == [flag_of(name) for name in names(MODULES["fedavg"].Args)]
    for row in ("--lr 0.3 flag", "--rounds 2 smoke", "--clip 0 default", f"--backbone {long} flag"):
        assert row.split() in rows
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", METHODS)
def test_every_field_is_read_somewhere(method):
    files = [*SOURCES, ROOT / "fedgala.py", ROOT / MODULES[method].__file__]  # fedema.py has its learner
    source = "".join(path.read_text() for path in files)
    read = {*re.findall(r"\b(?:args|self|cls|settings|of_seed)\.(?=(\w+))", source), "variant"}
    assert {*names(MODULES[method].Args)} <= read


@dataclasses.dataclass
class Plain(common.Args):
    gamma: float = 0.1


def test_a_flag_without_arg_is_named(capsys):
    fails(capsys, 2, "gamma of Args is no flag: give it as arg", parse, Plain, fedavg.PAPER, [])


def test_settings_are_fixed_once_they_are_parsed():
    args = parsed("fedavg", "--lr", "0.3")
    with pytest.raises(dataclasses.FrozenInstanceError, match="fixed once parsed, and so is lr"):
        args.lr = 0.4
    assert (args.lr, dataclasses.replace(args, lr=0.4).lr) == (0.3, 0.4)


@pytest.mark.parametrize("path,name", [("fdse.py", "fdse"), ("baselines/fedprox.py", "fedprox"),
                                       ("official/fdse.py", "official.fdse"), ("../mine.py", "mine")])
def test_runs_are_known_by_the_name_of_the_file(path, name):
    assert method_name(ROOT / path) == name


def test_version(capsys):
    """One line, also beside flags that do not go together."""
    version = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    words = rf"fedavg: CleanFDG {re.escape(version)}( \(commit [0-9a-f]{{12,}}(, with changes)?\))?, "
    words += rf"torch {re.escape(torch.__version__)}, Python {platform.python_version()}\n"
    assert re.fullmatch(words, shown(capsys, "fedavg", "--version", "--lr", "-1"))
    with pytest.raises(SystemExit):
        reproduce_tables.main(["--version"])
    assert capsys.readouterr().out.startswith(f"reproduce_tables: CleanFDG {version}")


def test_commands_lead_to_the_values_of_the_table():
    """Every line of it, and no other one."""
    with open(FILE, newline="") as file:
        found = list(csv.reader(file))
    assert found == [HEADS, *rows()], "the command `python -m tests.settings_table` writes the table anew"


OF_PAPERS = {name for name in PROGRAMS if not name.startswith("baselines.")}


def stated(text: str) -> float:
    """The value of a row of tests/provenance.csv: 7+3 and 0.1*7/6 are computed, words stay."""
    try:
        terms = [math.prod(map(Fraction, term.split("*"))) for term in text.split("+")]
        return pytest.approx(float(sum(terms)))
    except ValueError:
        return text


def test_values_of_released_code_stand_where_their_source_says():
    """Each such value has its place in tests/provenance.csv, at the commit and in the file that its source
    names; and each place is the source of a value."""
    places, used = [], []
    with open(ROOT / "tests" / "provenance.csv", newline="") as file:
        for row in csv.DictReader(file):
            assert re.fullmatch(r"[0-9; -]+", row["line"]) and "/" in row["repository"], row
            for setting, value in (pair.split("=") for pair in row["settings"].split()):
                places.append((row["commit"], row["file"], setting, stated(value)))
    with open(FILE, newline="") as file:
        for row in csv.DictReader(file):
            said = row["origin"].split(": ")[-1]
            if said.startswith("code") and OF_PAPERS & set(row["methods"].split()):
                found = re.match(r"code (?:of \w+ )?([0-9a-f]{7}|[0-9.]+), ([^,]+)", said)
                assert found, f"{said} names no commit, or release, and file"
                value = stated(row["value"])
                key = (*found.groups(), row["setting"], getattr(value, "expected", value))
                near = [place for place in places if place == key]
                assert near, (key, row)
                used += near
    assert [place for place in places if not any(place is one for one in used)] == []


SHARED = [  # data sets' schedules, and the methods whose own they are
    ({"digits": schedules.DIGITS}, (fdse, fedsr, fedcir)),
    (schedules.FDSE, (fdse,)),
    (schedules.MNIST, (fedsr, fedadg)),
    ({name: schedules.FEDSR[name] for name in ("officehome", "domainnet")}, (fedsr,)),
    (schedules.FEDCIR, (fedcir,)),
    ({name: schedules.FEDSR_IN_FEDCIR[name] for name in schedules.FEDCIR}, (fedcir,)),
]


@pytest.mark.parametrize("of_datasets, methods", SHARED)
def test_the_shared_schedules_are_those_of_the_papers_own_files(of_datasets, methods):
    """But FDSE's rate on PACS: each method's is tuned."""
    for method, (dataset, schedule) in itertools.product(methods, of_datasets.items()):
        own = method.PAPER[dataset]
        both = schedule.keys() & own.keys() - ({"lr"} if dataset == "pacs" else set())
        assert len(both) >= 3
        assert all(schedule[name].value == own[name].value for name in both), (dataset, both)


def test_flags_win_over_the_table():
    """And they win over what follows from others."""
    flags = ["--dataset", "pacs", "--scale", "laptop", "--variant", "official"]
    args = parsed("official.fdse", *flags, "--beta", "0.2", "--rounds", "3")
    assert (args.beta, args.rounds, args.origins["beta"], args.origins["rounds"]) == (0.2, 3, "flag", "flag")
    assert args.origins["image_size"] == "laptop"  # over the variant's
    byol = parsed("fedgala", "--dataset", "pacs", "--ssl", "byol", "--optimizer", "adam", "--momentum", "0.5")
    assert (byol.lr, byol.momentum, byol.weight_decay) == (3e-3, 0.5, 0)
    assert byol.origins["lr"] == "derived: text, App. B.3"
