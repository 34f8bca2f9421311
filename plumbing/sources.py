"""Which code made a number: a hash of the sources that decide the numbers of a method.

They are the method's file and all files of this repository that it imports, directly or not, without those
in AROUND; and the tables of numbers beside them (which digits RotatedMNIST has). What cannot change a number
is left out of each file: comments and docstrings, the words of errors, and the tables of settings, whose
values a record names one by one.

Other sources may give the same numbers all the same, after a refactoring: results/equivalent_sources.toml has
sets of hashes of which that was seen, by a short run of the method (reproduce/short_runs.py).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
import tomllib
from pathlib import Path

from plumbing.errors import Stop

ROOT = Path(__file__).resolve().parent.parent

# Modules that are around the numbers: they fetch and keep files, parse, resume and show.
AROUND = {"plumbing.archives", "plumbing.disk", "plumbing.errors", "plumbing.extending", "plumbing.files",
          "plumbing.processes", "plumbing.provenance", "plumbing.results", "plumbing.runfolder",
          "plumbing.scalars", "plumbing.seeds", "plumbing.settings", "plumbing.signals",
          "plumbing.sources", "plumbing.trained"}
TABLES = {"PAPER", "VARIANTS", "LAPTOP"}  # of settings, and their parts: MNIST = dict(...)
PLAIN = {"int", "float", "str", "bool"}  # types of a field of Args


def module_file(name: str) -> Path | None:
    """The file of a module of this repository, fdse or plumbing.augment; None if it is not one."""
    path = ROOT.joinpath(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def imported(tree: ast.Module) -> set[tuple[int, str]]:
    """(level, name) of the modules that a file may import; the level is the number of dots in front."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(0, alias.name) for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            start = f"{node.module}." if node.module else ""
            names.add((node.level, node.module or ""))
            names |= {(node.level, start + alias.name) for alias in node.names}
    return names


def absolute(file: Path, level: int, name: str) -> str:
    """The whole name of a module that `file` imports by its name with so many dots in front."""
    if not level or not file.is_relative_to(ROOT):
        return name
    package = file.relative_to(ROOT).parts[:-level]
    return ".".join([*package, name])


def names_of(line: ast.stmt) -> set[str]:
    """The names that a line NAME = value gives values."""
    if not isinstance(line, ast.Assign):
        return set()
    return {target.id for target in line.targets if isinstance(target, ast.Name)}


def read_in(nodes: list[ast.AST]) -> set[str]:
    """The names whose values these lines read, but for what is handed to `parse`."""
    found = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "parse":
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        waiting += ast.iter_child_nodes(node)
    return found


def without_settings(body: list[ast.stmt]) -> list[ast.stmt]:
    """A file's lines without its tables of settings and the dict(...) that are parts of them alone."""
    settings = [line for line in body if names_of(line) and names_of(line) <= TABLES]
    parts = read_in(settings)
    for line in body:
        value = getattr(line, "value", None)
        of_dict = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict"
        if of_dict and names_of(line) and names_of(line) <= parts:
            settings.append(line)
    while True:
        kept = [line for line in body if line not in settings]
        read = read_in(kept)
        left = [line for line in settings if not names_of(line) & read]
        if left == settings:
            return kept
        settings = left


def is_setting(node: ast.stmt) -> bool:
    """Whether a line of Args is a field, whose value a record names."""
    if not isinstance(node, ast.AnnAssign) or getattr(node.annotation, "id", "") not in PLAIN:
        return False
    if isinstance(node.value, ast.Call):
        return getattr(node.value.func, "id", "") == "arg"
    return node.value is None or isinstance(node.value, ast.Constant)


class WithoutWords(ast.NodeTransformer):
    """A file's syntax without what cannot change a number."""

    def visit_Module(self, node):
        node.body = without_settings(node.body)
        for line in node.body:
            if isinstance(line, ast.ClassDef) and line.name == "Args":
                line.body = [inner for inner in line.body if not is_setting(inner)]
        return self.generic_visit(node)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Constant):  # a docstring
            return None
        return self.generic_visit(node)

    def visit_Raise(self, node):
        return ast.Raise()


@functools.cache
def parts_of(text: str) -> tuple[frozenset[tuple[int, str]], str]:
    """Of a file's text the modules that it may import, and its syntax without what cannot change a number."""
    tree = ast.parse(text)
    names = frozenset(imported(tree))
    return names, ast.dump(WithoutWords().visit(tree))


def files_of(file: Path) -> list[Path]:
    """The files that decide the numbers of the method in `file`, in a fixed order, it among them."""
    found, waiting = set(), [file]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        names, _ = parts_of(path.read_text())
        for level, name in names:
            whole = absolute(path, level, name)
            other = module_file(whole) if whole else None
            if other and whole not in AROUND:
                waiting.append(other)
    return sorted(found)


def data_files() -> list[Path]:
    """Tables of numbers that the code reads."""
    return sorted((ROOT / "plumbing").glob("*.csv"))


@functools.cache
def hash_of(file: Path) -> str:
    """The hash of the sources that decide the numbers of the method in `file`, 12 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=6)
    for path in files_of(file):
        _, syntax = parts_of(path.read_text())
        digest.update(syntax.encode())
    for path in data_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def equivalent_to(sources: str) -> set[str]:
    """The hashes of all sources that give the numbers of these ones, they among them."""
    for _, same in read_equivalents(ROOT / "results" / "equivalent_sources.toml"):
        if sources in same:
            return set(same)
    return {sources}


def read_equivalents(path: Path) -> list[tuple[str, list[str]]]:
    """(method, hashes) of each set in a file of equivalent sources; none if there is no file."""
    if not path.exists():
        return []
    try:
        sets = tomllib.loads(path.read_text()).get("same", [])
        return [(same["method"], list(same["sources"])) for same in sets]
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as e:
        raise Stop(f"{path} has no sets of hashes ({e}); expected [[same]] with a method and its sources = "
                   "[one, other]", 2)


def method_file(args) -> Path:
    """The file of the method that these arguments are of."""
    return Path(sys.modules[type(args).__module__].__file__).resolve()
