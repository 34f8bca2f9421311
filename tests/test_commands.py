"""Every command of the documentation and the docstrings: each one parses (quick), each one runs (slow).

They are read from the files, so that none can rot. What stands for a value of the reader's is replaced by
SUBSTITUTES; a program that is in none of the tables below fails the test.
"""

import argparse
import importlib
import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import common
import reproduce_tables
from bench import bench
from docs import build
from plumbing.catalog import FOLDERS, OWN
from reproduce.measures import command as measures
from reproduce.tables import read_tables
from tests.commands import Command, all_commands, commands_in_backticks, commands_of_line
from tests.conftest import MODULES, ROOT, run_here
from tests.mutations import __main__ as mutations
from tests.small_table import two_tables

import pytest
import torch

COMMANDS = all_commands()

# What stands for something of the reader's, and what takes its place here; RUN is the folder of a finished
# run of a method.
SUBSTITUTES = {
    "DIR": ["archives"],
    "F": ["f.png"],
    "NAME": ["fedprox"],
    "baselines.NAME": ["baselines.fedprox"],
    "baselines.mine": ["baselines.fedprox"],  # test_start.py makes it
    "runs/of-three-seeds": ["RUN fedavg"],
    "cuda": ["cpu"],
    "cuda:1": ["cpu"],
    "<paper>-<number>": ["fdse-1"],
    "FOLDER": ["RUN fedavg"],
    "FEDCIR": ["RUN fedcir"],
    "FEDAVG": ["RUN fedavg"],
    "...": [],  # further flags
}
A_RUN = re.compile(r"runs/(\w+)-\.\.\.")  # runs/fdse-...: RUN fdse
# Commands of reproduce.measures that a sentence names without a folder.
FOLDER_OF = {"adaptation": "fdse"}

# Commands that are not for every machine, and why.
NEITHER = {
    "python baselines/NAME.py": "it says how a baseline is started; test_errors.py runs it",
}
NOT_RUN = {
    "pip": "it fetches from the network; .ci/run installs from the files",
    "python3 -m venv": "an environment of its own; .ci/run makes one",
    "python fdse.py --dataset folder:my_images": "it needs images; test_own_images.py has some",
    "python -m reproduce.predict": "it needs images; test_predict.py has some",
    "python fedavg.py --rounds 100 --extend": "it needs a shorter run; test_extending.py goes on with one",
    "python reproduce_tables.py --run --gpus": "it needs a GPU",
    "python -m bench": "it takes minutes, or an archive; test_bench.py runs it on small images",
}


def substituted(command: Command) -> list[str]:
    """The words of a command with what stands for the reader's values replaced."""
    words = []
    for word in command.words:
        if A_RUN.fullmatch(word):
            words.append(f"RUN {A_RUN.fullmatch(word)[1]}")
        else:
            words += SUBSTITUTES.get(word, [word])
    if words[1:3] == ["-m", "reproduce.measures"] and len(words) == 4:
        words.append(f"RUN {FOLDER_OF[words[3]]}")
    return words


def program_of(words: list[str]) -> tuple[str, list[str]]:
    """The program that a command starts, and its flags: a module by its name, a file by its path."""
    if words[0] == "torchrun":
        return program_of(["python", *words[2:]])
    if not words[0].startswith("python"):
        return words[0], words[1:]
    if words[1] == "-m":
        return words[2], words[3:]
    return words[1].removesuffix(".py"), words[2:]


def reason_not_to(command: Command, reasons: dict[str, str]) -> str:
    """Why a command is left out; empty: it is not."""
    for beginning, reason in reasons.items():
        if f"{command} ".startswith((f"{beginning} ", f"{beginning}.")):
            return reason
    return ""


SHOWING = {"--help", "--show-settings", "--version"}  # with which a method trains nothing
TRIED = [command for command in COMMANDS if not reason_not_to(command, NEITHER)]


# They are found

# One of each way in which they stand there.
EXPECTED = [
    "python fdse.py",
    "ruff check .",
    "python -m baselines.fedprox --dataset pacs --mu 0.1",
    "python -m baselines.ditto --dataset domainnet10",
    "torchrun --nproc-per-node=4 fdse.py ...",
    "python -m baselines.feddg_ga --dataset officecaltech --protocol lodo --target-part test",
    "python -m reproduce.measures adaptation runs/fdse-...",
]


def test_the_commands_are_found():
    shown = [str(command) for command in COMMANDS]
    assert len(shown) > 180
    for expected in EXPECTED:
        assert expected in shown


def test_reasons_are_of_commands_that_there_are():
    shown = [str(command) for command in COMMANDS]
    for beginning in [*NEITHER, *NOT_RUN]:
        assert any(f"{line} ".startswith((f"{beginning} ", f"{beginning}.")) for line in shown), beginning
    for word in SUBSTITUTES:
        assert any(word in command.words for command in COMMANDS), word


def test_what_is_a_command():
    said = "`.venv/bin/python fdse.py --lr 1`, or\n`python fdse.py --dataset pacs --target photo`, `vlcs`."
    assert commands_in_backticks(said) == [
        ("python", "fdse.py", "--lr", "1"),
        ("python", "fdse.py", "--dataset", "pacs", "--target", "photo"),
        ("python", "fdse.py", "--dataset", "vlcs"),  # whose domains are others
    ]
    assert commands_of_line("KILLS=5 python -m pytest   # long") == [("python", "-m", "pytest")]
    assert commands_of_line("python3 -m venv .venv && .venv/bin/python fdse.py") == [
        ("python3", "-m", "venv", ".venv"), ("python", "fdse.py")]
    assert commands_of_line("the client's python") == commands_of_line("python") == []


# They parse


@pytest.fixture(scope="module")
def results_of_runs(tmp_path_factory) -> Path:
    """A folder for each method with the little of a result that a command line is checked with."""
    place = tmp_path_factory.mktemp("results")
    for name in MODULES:
        method = name.removeprefix("baselines.")
        (place / method).mkdir()
        result = {"method": method, "args": {"method": method}, "best": {"round": 1}, "last": {"round": 1}}
        (place / method / "result.json").write_text(json.dumps(result))
    return place


def with_runs(words: list[str], place: Path) -> list[str]:
    """The words with the folders of runs in `place`."""
    return [str(place / word.removeprefix("RUN ")) if word.startswith("RUN ") else word for word in words]


def domain_names(dataset: str) -> list[str]:
    if dataset == "digits":
        return [f"d{angle}" for angle in common.ANGLES]
    if dataset.startswith("rotatedmnist"):
        return [f"m{angle}" for angle in common.ANGLES]
    return list(FOLDERS[dataset].domains)


def parse_method(program: str, flags: list[str]) -> None:
    try:
        args = MODULES[program].arguments(flags)
    except SystemExit as end:
        assert end.code == 0 and SHOWING & {*flags}
        return
    if not args.dataset.startswith(OWN):
        common.targets_of(args, domain_names(args.dataset))  # stops if --target or --sources is no domain


TABLES = read_tables()


def parse_tables(flags: list[str]) -> None:
    reproduce_tables.chosen(TABLES, reproduce_tables.parsed(flags).only)


def parse_measures(flags: list[str]) -> None:
    measures.parsed(flags)


def parse_pytest(flags: list[str]) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    parser.add_argument("-m", choices=[marker.split(":")[0] for marker in markers])
    parser.add_argument("-n", type=int)
    parser.add_argument("files", nargs="*", type=Path)
    for path in parser.parse_args(flags).files:
        assert (ROOT / path).exists()


def parse_pip(flags: list[str]) -> None:
    assert flags[0] == "install"
    if flags[1] == "-r":
        assert (ROOT / flags[2]).exists()


class Parsed(Exception):
    """A program has taken its flags."""


def parse_module(name: str, flags: list[str]) -> None:
    """Another program of the repository: up to where its parser has taken the flags."""
    parse_args = argparse.ArgumentParser.parse_args

    def stop(*words, **how):
        parse_args(*words, **how)
        raise Parsed
    assert (ROOT / f"{name.replace('.', '/')}.py").exists(), f"what is {name}? list it in PARSERS"
    module = importlib.import_module(name.replace("/", "."))
    expected = (Parsed, SystemExit) if "--help" in flags else Parsed
    with pytest.MonkeyPatch.context() as patch, pytest.raises(expected):
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [name, *flags])
        module.main()


def files_are_there(flags: list[str]) -> None:
    for name in flags:
        assert (ROOT / name).exists(), name


PARSERS = {
    "reproduce_tables": parse_tables,
    "reproduce.measures": parse_measures,
    "bench.bench": bench.parsed,
    "docs/build": build.parsed,
    "tests.mutations": mutations.parsed,
    "pytest": parse_pytest,
    "venv": lambda flags: None,
    "pip": parse_pip,
    "ruff": lambda flags: files_are_there(flags[1:]),
    "bash": lambda flags: files_are_there(flags[:1]),
    "diff": files_are_there,
}


def check(command: Command, place: Path) -> None:
    """An error unless the command's program has its flags and takes their values."""
    program, flags = program_of(with_runs(substituted(command), place))
    if program in MODULES:
        parse_method(program, flags)
    elif program in PARSERS:
        PARSERS[program](flags)
    else:
        parse_module(program, flags)


@pytest.mark.parametrize("command", TRIED, ids=str)
def test_each_command_parses(command, results_of_runs, capsys):
    check(command, results_of_runs)


@pytest.mark.parametrize("line", [
    "python fdse.py --no-such-flag",
    "python fdse.py --dataset pacs --protocol lodo --target dslr",
    "python -m baselines.ditto --dataset vlcs",
    "python reproduce_tables.py --only fdse-77",
    "python -m reproduce.measures risk FOLDER --accuracy 1",
    "python -m tests.mutations fedx",
    "python -m tests.gone",
    "python -m pytest -m long",
    "bash .ci/gone",
])
def test_a_command_that_has_rotted_is_noticed(line, results_of_runs, capsys):
    with pytest.raises((SystemExit, AssertionError, argparse.ArgumentError, common.Stop)):
        check(Command("here", commands_of_line(line)[0]), results_of_runs)


# They run

TINY = 40  # images of a domain, more if it has more classes
MANY = 400  # where a command deals a domain out to many clients
# What makes a training quick, behind the command's own flags: the last one counts.
SHORT = ["--scale", "smoke", "--rounds", "1", "--epochs", "1", "--steps", "0", "--batch-size", "16",
         "--device", "cpu"]
# The same for other programs; they run in a copy of the repository, where they may write.
SHORTER = {
    "reproduce_tables": [],
    "pytest": ["--collect-only", "-q"],
    "tests.mutations": ["--list"],
}
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "data", "runs", "site", "__pycache__", "*.tmp")


def tiny_domains(args: common.Args) -> tuple[list[common.Domain], tuple[str, ...]]:
    """In the place of common.load_domains: domains of noise with the names and classes of the dataset."""
    names = domain_names(args.dataset) or [f"camera_{i}" for i in range(10)]
    classes = tuple("0123456789")
    channels = 1
    if args.dataset in FOLDERS:
        classes = FOLDERS[args.dataset].classes or classes
        channels = 3
    count = max(TINY if args.clients_per_domain == 1 else MANY, 2 * len(classes))  # one to fit, one to test
    domains = []
    for name in names:
        shape = (count, args.image_size, args.image_size, channels)
        images = torch.randint(0, 256, shape, dtype=torch.uint8).permute(0, 3, 1, 2)
        domains.append(common.Domain(name, images, torch.arange(count) % len(classes)))
    return domains, classes


def train(program: str, flags: list[str], folder: Path, monkeypatch) -> None:
    """Run a method as its own program, in this process; an exit code would be a SystemExit."""
    short = [*SHORT, "--out", str(folder / "run")]
    if MODULES[program].arguments(flags).dataset in FOLDERS:
        short += ["--image-size", "64"]
    without_scale = [flag for flag in flags if flag != "laptop"]
    without_scale = [flag for flag in without_scale if flag != "--scale"]
    file = Path(MODULES[program].__file__)
    monkeypatch.setattr(sys, "argv", [str(file), *without_scale, *short])
    monkeypatch.setattr(common, "load_domains", tiny_domains)
    runpy.run_path(str(file), run_name="__main__")
    assert [*(folder / "run").rglob("result.json")]


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
    """A copy of the repository."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("copy") / "tree", ignore=NOT_COPIED)


def shortened(program: str, flags: list[str], folder: Path) -> list[str]:
    """The flags with what makes the program quick. What trains table rows gets two small tables."""
    flags = [*flags, *SHORTER.get(program, [])]
    if program == "reproduce_tables" and "--run" in flags:
        small = two_tables(folder, with_failing=False)[2:]
        if "--only" in flags:
            small = [*small, "--only", "fdse-91"]
        flags = [*flags, *map(str, small)]
    return flags


RUN = [command for command in TRIED if not reason_not_to(command, NOT_RUN)]
IN_ONE_PROCESS = [command for command in RUN if command.words[0] == "python"]
TRAINING = [command for command in IN_ONE_PROCESS
            if program_of(substituted(command))[0] in MODULES and not SHOWING & {*command.words}]
OTHERS = [command for command in RUN if command not in TRAINING]


@pytest.mark.slow
@pytest.mark.parametrize("command", TRAINING, ids=str)
def test_each_training_runs(command, tmp_path, monkeypatch, capsys):
    program, flags = program_of(substituted(command))
    train(program, flags, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("command", OTHERS, ids=str)
def test_each_other_command_runs(command, tmp_path, runs, copy):
    program, flags = program_of(with_runs(substituted(command), runs))
    flags = shortened(program, flags, tmp_path)
    if program == "docs/build" and "--notes" not in flags:
        pytest.importorskip("markdown_it", reason="needs `pip install -r requirements-docs.txt`")
    if command.words[0] == "torchrun":
        words = [*command.words[1:-1], *SHORT, "--out", str(tmp_path)]
        flags = ["-m", "torch.distributed.run", "--standalone", *words]
    elif program in ("bash", "diff"):
        flags = [program, *{"bash": ["-n"], "diff": []}[program], *flags]
    elif (copy / f"{program}.py").exists():
        flags = [f"{program}.py", *flags]
    else:
        flags = ["-m", program, *flags]
    if program not in ("bash", "diff"):
        flags = [sys.executable, *flags]
    done = subprocess.run(flags, cwd=copy, capture_output=True, text=True)
    expected = 1 if program == "diff" else 0  # the files differ
    assert done.returncode == expected, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
