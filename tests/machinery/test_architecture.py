"""The architecture: who imports whom, that files look alike; the broken copies, noticed in a long test."""

import ast
import functools
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

from reproduce.tables import papers
from tests.conftest import MODULES, PROGRAMS, ROOT, TESTED
from tests.mutations.__main__ import mutations_of, names, noticed

import pytest

FILES = ["common.py", "reproduce_tables.py", "requirements.txt", "requirements.lock",
         "README.md", "LICENSE", "CITATION.cff",
         "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml"]
METHOD_FILES = ["fedavg.py", *(f"{paper}.py" for paper in papers())]
FOLDERS = ["official", "baselines", "papers", "results", "tests", "docs", "bench", "plumbing",
           "reproduce", "deploy"]

OF_PAPERS = ["fdse", "fedsr", "fedadg", "fedgala"]  # those with a file in official/
# Folders that git does not know: caches, runs and data.
NO_SOURCE = {".pyc", ".pytest_cache", ".ruff_cache", ".venv", "build", "data", "runs", "site"}

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
        return [str(path) for path in below if not NO_SOURCE & {path.parts[0], path.suffix}]
    words = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    return [line for line in subprocess.run(words, capture_output=True, text=True).stdout.splitlines()
            if (ROOT / line).exists()]


@functools.cache
def tree_of(path: str) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse((ROOT / path).read_text())


def floor_of(module: str) -> str:
    """The floor of a module of this repository by its dotted name; another library has none."""
    first = module.split(".")[0]
    if f"{first}.py" in METHOD_FILES:
        return "method"
    return first if first in BELOW else ""


def imports_of(path: str) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    modules = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    return modules


def python_files() -> list[str]:
    return [path for path in tracked() if path.endswith(".py") and not path.startswith("tests/")]


def test_the_top_level():
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout, so other files may lie here")
    top = {path.split("/")[0] for path in tracked()}
    allowed = {*FILES, *METHOD_FILES, *FOLDERS, "requirements-docs.txt", "requirements-deploy.txt"}
    assert {name for name in top if not name.startswith(".")} <= allowed
    assert {*FILES, *METHOD_FILES, *FOLDERS} <= top


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
    below = {name: {m for m in imports_of(path) if m in names} for name, path in names.items()}
    TopologicalSorter(below).prepare()  # an error that names the circle


def code_lines(path: str) -> list[str]:
    """The lines of a file without docstrings, comments and indentation."""
    text = (ROOT / path).read_text()
    words = set()
    for node in ast.walk(tree_of(path)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            words |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("  # ")[0].strip()
        if code and not code.startswith("#") and number not in words:
            lines.append(code)
    return lines


@pytest.mark.parametrize("method", TESTED)
def test_a_diff_to_fedavg_shows_the_method(method):
    """From `class Client` on, most lines of fedavg.py recur; the parts above are each method's own.

    The fewest recur in FedADG, whose local loop alternates three optimizers, and in FDSE, which sends four
    parts instead of w.
    """
    reference = code_lines("fedavg.py")
    reference = reference[reference.index("class Client:"):]
    left, recurring = code_lines(MODULES[method].__file__), 0
    for line in reference:
        if line in left:
            left.remove(line)
            recurring += 1
    assert recurring >= TESTED[method].recurring * len(reference)


@pytest.mark.parametrize("name", OF_PAPERS)
def test_official_imports_common_and_its_method_alone(name):
    ours = {module for module in imports_of(f"official/{name}.py") if floor_of(module)}
    assert ours <= {"common", name}


MACHINERY = ("common.py", "plumbing/", "reproduce/", "reproduce_tables.py", "bench/", "docs/",
             "deploy/")
SCHEDULES = "plumbing/schedules.py"  # settings of methods, which stood in fedavg.py


def nodes_in(places: tuple[str, ...]) -> int:
    """The syntax nodes of Python in these files and folders: what a reader has to take in, however it is
    spread over lines."""
    found = 0
    for path in tracked():
        if path.endswith(".py") and path.startswith(places) and path != SCHEDULES:
            found += sum(1 for _ in ast.walk(tree_of(path)))
    return found


def test_the_machinery_grows_no_further():
    """What is added needs an answer: who would miss it, which library has it, and what leaves for it?"""
    assert nodes_in(MACHINERY) <= 109_876


def test_the_weight_of_the_tests():
    """What another test makes idle leaves for what is added."""
    assert nodes_in(("tests/",)) <= 140_770


DENSE = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp)
# Comprehensions and ternaries in 100 lines of code: a reader slows down there. A limit is not a target.
MOST_DENSE = {"methods": 3.9, "baselines": 4.6, "official": 4.0, "common": 7.0, "plumbing": 8.9,
              "reproduce": 13.4, "reproduce_tables": 12.1, "deploy": 8.5, "bench": 3.3, "docs": 11.1}


@pytest.mark.parametrize("part", MOST_DENSE)
def test_no_part_gets_denser(part):
    lines, dense = 0, 0
    for path in python_files():
        top = path.split("/")[0].removesuffix(".py")
        if top == part or (part == "methods" and path in METHOD_FILES):
            lines += len(code_lines(path))
            dense += sum(isinstance(node, DENSE) for node in ast.walk(tree_of(path)))
    assert 100 * dense / lines <= MOST_DENSE[part]


def test_sections_come_in_the_order_of_the_paper():
    """Model parts, Client, Server, builders of networks, `arguments`."""
    for path in METHOD_FILES:
        nodes = [node for node in tree_of(path).body if hasattr(node, "name")]
        names = [node.name for node in nodes]
        order = [names.index(name) for name in ("Args", "Client", "Server", "build", "arguments")
                 if name in names]
        assert order == sorted(order) and names[-1] == "arguments", path
        parts = [node.name for node in nodes if isinstance(node, ast.ClassDef) and node.bases]
        assert all(names.index(name) < names.index("Client") for name in parts), path


def test_one_round_is_on_one_screen():
    loop = next(node for node in tree_of("common.py").body if getattr(node, "name", "") == "rounds")
    assert loop.end_lineno - loop.lineno < 35


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
