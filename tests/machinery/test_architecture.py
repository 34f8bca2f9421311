"""The architecture: who imports whom, that files look alike; the broken copies, noticed in a long test."""

import ast
import graphlib
import subprocess
from pathlib import Path

from tests.conftest import PROGRAMS, ROOT
from tests.mutations.__main__ import mutations_of, names, noticed

import pytest

METHOD_FILES = ["fedavg.py", "fedsr.py", "fedadg.py", "fedgala.py", "fedcir.py", "fdse.py"]
# Folders that git does not know: caches, runs and data.
NO_SOURCE = {"__pycache__", ".pytest_cache", ".ruff_cache", ".venv", "build", "data", "runs", "site"}

# The floors that each floor may import from; tests may import everything.
BELOW = {
    "plumbing": {"plumbing"},
    "common": {"plumbing"},
    "method": {"common"},
    "official": {"common", "method"},
    "baselines": {"common", "method"},
    "reproduce": {"reproduce", "common", "plumbing"},  # methods by the names in tables
    "reproduce_tables": {"reproduce", "common", "plumbing"},
    "docs": {"docs", "reproduce", "plumbing"},
    "deploy": {"deploy", "reproduce", "common", "plumbing"},
    "bench": {"bench", "reproduce", "method", "common", "plumbing"},
}


def tracked() -> list[str]:
    """The files of the repository: what git knows, or else what lies there and is no cache, run or data."""
    if not (ROOT / ".git").exists():
        below = [path.relative_to(ROOT) for path in sorted(ROOT.rglob("*")) if path.is_file()]
        return [str(path) for path in below if not NO_SOURCE & {*path.parts}]
    words = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    return [line for line in subprocess.run(words, capture_output=True, text=True).stdout.splitlines()
            if (ROOT / line).exists()]


def floor_of(module: str) -> str:
    """The floor of a module of this repository by its dotted name; another library has none."""
    first = module.split(".")[0]
    if f"{first}.py" in METHOD_FILES:
        return "method"
    return first if first in BELOW else ""


def imports_of(path: str) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    modules = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    return modules


def python_files() -> list[str]:
    return [path for path in tracked() if path.endswith(".py") and not path.startswith("tests/")]


def test_arrows_go_down_only():
    wrong = []
    for path in python_files():
        floor = floor_of(path.removesuffix(".py").replace("/", "."))
        for module in imports_of(path):
            other = floor_of(module)
            if other and other not in BELOW[floor]:
                wrong.append(f"{path} imports {module}")
    assert not wrong


def test_there_is_no_circle():
    """Within a floor too: following the imports from a file never leads back to it."""
    names = {path.removesuffix(".py").replace("/", "."): path for path in python_files()}
    names |= {name.removesuffix(".__init__"): path for name, path in names.items()}
    graph = {name: imports_of(path) & names.keys() for name, path in names.items()}
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the files


MACHINERY = ("common.py", "plumbing/", "reproduce/", "reproduce_tables.py", "bench/", "docs/",
             "deploy/")
SCHEDULES = "plumbing/schedules.py"  # settings of methods, which stood in fedavg.py


def nodes_in(places: tuple[str, ...]) -> int:
    """The syntax nodes of Python in these files and folders: what a reader has to take in, however it is
    spread over lines."""
    found = 0
    for path in tracked():
        if path.endswith(".py") and path.startswith(places) and path != SCHEDULES:
            found += sum(1 for _ in ast.walk(ast.parse((ROOT / path).read_text())))
    return found


def test_the_machinery_grows_no_further():
    """What is added needs an answer: who would miss it, which library has it, and what leaves for it?"""
    assert nodes_in(MACHINERY) <= 118_200


def test_the_weight_of_the_tests():
    """What another test makes idle leaves for what is added."""
    assert nodes_in(("tests/",)) <= 151_700


@pytest.mark.parametrize("method", PROGRAMS)
def test_a_file_started_by_itself_has_its_own_network(method):
    """The tests hand over `build`; the command of the docs must do it too."""
    module = PROGRAMS[method]
    last = Path(module.__file__).read_text().splitlines()[-1]
    own = ", build" if hasattr(module, "build") else ""
    assert last == f"    run(Server, Client, arguments(){own})"


@pytest.mark.parametrize("name", names())
def test_each_mutation_has_its_line(name):
    mutations = mutations_of(name)  # an error if a line is not there once
    assert len(mutations) >= 5
    assert len({mutation.what for mutation in mutations}) == len(mutations)
    assert all((ROOT / test).exists() for test in mutations[0].tests)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_each_broken_copy_is_noticed(name):
    if name == "flower":
        pytest.importorskip("flwr", reason="needs pip install -r requirements-deploy.txt")
    survived = [mutation.what for mutation in mutations_of(name) if not noticed(mutation)]
    assert not survived
