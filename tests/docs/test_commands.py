"""Every command of the documentation and the docstrings: each one parses (quick), each one runs (slow;
the first training is quick, so that what all of them use cannot rot).

They are read from the files, so that none can rot. What stands for a value of the reader's is replaced, by
commands.toml.
"""

import argparse
import importlib
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import common
import reproduce_tables
from plumbing.data.catalog import FOLDERS, OWN
from tests.commands import Command, all_commands
from tests.committed import PAPERS, TABLES
from tests.conftest import PROGRAMS, ROOT, run_here
from tests.small_table import two_tables

import pytest
import torch

COMMANDS = all_commands()
IDS = [table.id for table in TABLES] + [f"claim-{claim.id}" for paper in PAPERS for claim in paper.claims]

KNOWN = tomllib.loads((ROOT / "tests" / "commands.toml").read_text())
SUBSTITUTES, NOT_RUN, FOLDER_OF = KNOWN["substitutes"], KNOWN["not_run"], KNOWN["folder_of"]
A_RUN = re.compile(r"runs/(\w+)-\.\.\.")  # runs/fdse-...: RUN fdse
SHOWING = {"--help", "--help-all", "--show-settings", "--version"}  # with which a method trains nothing


def substituted(command: Command, runs: Path) -> list[str]:
    """The words of a command with what stands for the reader's values replaced; `runs` has the folders."""
    words = []
    for word in command.words:
        a_run = A_RUN.fullmatch(word)
        words += [f"RUN {a_run[1]}"] if a_run else SUBSTITUTES.get(word, [word])
    if words[1:3] == ["-m", "reproduce.measures"] and len(words) == 4:
        words += FOLDER_OF[words[3]]
    return [str(runs / word.removeprefix("RUN ")) if word.startswith("RUN ") else word for word in words]


def program_of(words: list[str]) -> tuple[str, list[str]]:
    """The program that a command starts, and its flags: a module by its name, a file by its path."""
    if not words[0].startswith("python"):
        return words[0], words[1:]
    if words[1] == "-m":
        return words[2], words[3:]
    return words[1].removesuffix(".py").replace("/", "."), words[2:]


def stands_for(start: str, command: str) -> bool:
    """Whether a command is this one, with other flags or not."""
    return f"{command} ".startswith((f"{start} ", f"{start}.", f"{start}-"))


def is_run(command: Command) -> bool:
    return not any(stands_for(start, str(command)) for start in NOT_RUN)


def test_the_commands_are_found():
    """In documents and docstrings; every exception of commands.toml is of one of them."""
    shown = {str(command) for command in COMMANDS}
    assert len(shown) > 180 and {"python fdse.py", "ruff check .", "python -m official.fdse"} <= shown
    assert all(any(stands_for(start, line) for line in shown) for start in NOT_RUN)
    assert {*SUBSTITUTES} <= {word for command in COMMANDS for word in command.words}


# They parse


class Parsed(Exception):
    """A program has taken its flags."""


def files_are_there(names: list[str]) -> None:
    for name in names:
        assert (ROOT / name).exists(), name


def parse_flower(flags: list[str]) -> None:
    pytest.importorskip("flwr", reason="needs pip install -r requirements-deploy.txt")
    importlib.import_module("deploy.flower").parsed([*flags, "--nodes", "a,b", "--classes", "c,d"])


def parse_node(flags: list[str]) -> None:
    pytest.importorskip("flwr", reason="needs pip install -r requirements-deploy.txt")
    importlib.import_module("deploy.node").arguments(flags)


OTHER_PROGRAMS = {
    "pytest": lambda flags: files_are_there([flag for flag in flags if "/" in flag]),
    "venv": lambda flags: None,
    "pip": lambda flags: files_are_there(flags[2:] if flags[1] == "-r" else []),
    "ruff": lambda flags: files_are_there(flags[1:]),
    "bash": lambda flags: files_are_there(flags[:1]),
    "diff": files_are_there,
    "deploy.flower": parse_flower,
    "deploy.node": parse_node,
}


def parse_method(program: str, flags: list[str]) -> None:
    try:
        args = PROGRAMS[program].arguments(flags)
    except SystemExit as end:
        assert end.code == 0 and SHOWING & {*flags}
        return
    if not args.dataset.startswith(OWN):
        known = common.known_domains(args.dataset)
        common.targets_of(args, known)  # stops if --target or --sources is no domain


def parse_module(name: str, flags: list[str]) -> None:
    """Another program of the repository: up to where its parser has taken the flags."""
    path = ROOT / name.replace(".", "/")
    assert path.with_suffix(".py").exists() or path.is_dir(), name
    parse_args = argparse.ArgumentParser.parse_args

    def stop(*words, **how):
        parse_args(*words, **how)
        raise Parsed
    if name == "docs.build":
        pytest.importorskip("markdown_it", reason="needs pip install -r requirements-docs.txt")
    module = importlib.import_module(f"{name}.__main__" if path.is_dir() else name)
    expected = (Parsed, SystemExit) if "--help" in flags else Parsed
    with pytest.MonkeyPatch.context() as patch, pytest.raises(expected):
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [name, *flags])
        module.main()


def check(command: Command, runs: Path) -> None:
    """An error unless the command's program has its flags and takes their values."""
    program, flags = program_of(substituted(command, runs))
    if program in PROGRAMS:
        parse_method(program, flags)
    elif program in OTHER_PROGRAMS:
        OTHER_PROGRAMS[program](flags)
    elif program == "reproduce_tables":
        reproduce_tables.chosen(IDS, reproduce_tables.parsed(flags).only)
    else:
        parse_module(program, flags)


# It says how a baseline is started; test_errors.py runs it.
TRIED = [command for command in COMMANDS if str(command) != "python baselines/NAME.py"]


@pytest.mark.parametrize("command", TRIED, ids=str)
def test_each_command_parses(command, tmp_path, capsys):
    check(command, tmp_path)


# They run

# What makes a training quick, behind the command's own flags: the last one counts.
SHORT = "--scale smoke --rounds 1 --epochs 1 --steps 0 --batch-size 16 --device cpu".split()
SHORTER = {"pytest": ["--collect-only", "-q"], "tests.mutations": ["--help"], "bash": ["-n"]}
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "data", "runs", "site", "__pycache__", "*.tmp")
RUN = [command for command in TRIED if is_run(command)]
TRAINING = [command for command in RUN if command.words[0] == "python" and not SHOWING & {*command.words}
            and program_of(substituted(command, ROOT))[0] in PROGRAMS]
OTHERS = [command for command in RUN if command not in TRAINING]


def tiny_dataset(args: common.Args) -> common.Dataset:
    """Instead of common.open_dataset: domains of noise with the names and classes of the dataset."""
    names = common.known_domains(args.dataset) or [f"camera_{i}" for i in range(10)]
    folders = FOLDERS.get(args.dataset)
    classes = folders and folders.classes or tuple("0123456789")
    count = max(400 if args.clients_per_domain > 1 else 40, 2 * len(classes))  # one to fit, one to test
    shape = (count, 3 if folders else 1, args.image_size, args.image_size)
    labels = torch.arange(count) % len(classes)
    domains = [common.Domain(name, torch.randint(0, 256, shape, dtype=torch.uint8), labels) for name in names]
    return common.Dataset(domains, classes)


@pytest.mark.parametrize("command", TRAINING[:1] + [pytest.param(one, marks=pytest.mark.slow)
                                                    for one in TRAINING[1:]], ids=str)
def test_each_training_runs(command, tmp_path, monkeypatch, capsys):
    """As its own program, in this process; an exit code would be a SystemExit."""
    program, flags = program_of(substituted(command, tmp_path))
    file, short = PROGRAMS[program].__file__, [*SHORT, "--out", str(tmp_path / "run")]
    if PROGRAMS[program].arguments(flags).dataset in FOLDERS:
        short += ["--image-size", "160" if program.startswith("official") else "64"]
    if program.endswith("fedadg"):
        short += ["--E0", "1", "--epochs", "2"]  # at least one epoch is adversarial
    monkeypatch.setattr(sys, "argv", [file, *flags, *short])
    monkeypatch.setattr(common, "open_dataset", tiny_dataset)
    runpy.run_path(file, run_name="__main__")
    assert [*(tmp_path / "run").rglob("result.json")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A finished run of each method that a command looks at, whose target is d0."""
    place = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "fedsr", "fedcir", "fdse"):
        run_here(method, place / method, "--protocol", "lodo", "--target", "d0")
    run_here("fedgala", place / "fedgala", "--target", "d0", "--rounds", "3")
    return place


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the repository, in which programs may write."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("copy") / "tree", ignore=NOT_COPIED)


@pytest.mark.slow
@pytest.mark.parametrize("command", OTHERS, ids=str)
def test_each_other_command_runs(command, tmp_path, runs, copy):
    words = substituted(command, runs)
    program, flags = program_of(words)
    begin = words[:len(words) - len(flags)]
    if program not in ("bash", "diff"):
        begin = [sys.executable, *(begin[1:] or ["-m", program])]
    flags = [*SHORTER.get(program, []), *flags]
    if program == "reproduce_tables" and "--run" in flags:  # what trains table rows gets two small tables
        flags += map(str, two_tables(tmp_path, with_failing=False)[2:])
        flags += ["--only", "fdse-91"] if "--only" in flags else []
    if program == "docs.build" and "--notes" not in flags:
        pytest.importorskip("markdown_it", reason="needs `pip install -r requirements-docs.txt`")
    done = subprocess.run([*begin, *flags], cwd=copy, capture_output=True, text=True)
    expected = 1 if program == "diff" else 0  # the files differ
    assert done.returncode == expected, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
