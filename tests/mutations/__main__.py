"""Apply every mutation of the lists, one at a time, and say whether the tests notice it. See __init__.py."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
AT_THE_TOP = {".git", "runs", "data", "results", "site"}


def not_copied(folder: str, names: list[str]) -> set[str]:
    """What a broken copy goes without."""
    caches = {name for name in names if name in ("__pycache__", ".pytest_cache", ".ruff_cache")}
    tops = {name for name in names if name in AT_THE_TOP or name.startswith(".venv")}
    return caches | (tops if Path(folder) == ROOT else set())


@dataclass(frozen=True)
class Mutation:
    """A mistake in a file of the repository, and the tests that must notice it."""

    file: str  # relative to the repository: fdse.py
    what: str  # in words
    old: str  # occurs once in the file
    new: str
    tests: tuple[str, ...]


def file_of(name: str) -> str:
    """The file of a list: fdse -> fdse.py, fedema -> baselines/fedema.py, augment -> plumbing/data/."""
    folders = ("", "baselines/", "plumbing/data/", "plumbing/run/", "reproduce/", "deploy/")
    places = [f"{folder}{name}.py" for folder in folders]
    return next(place for place in places if (ROOT / place).exists())


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def mutations_of(name: str) -> list[Mutation]:
    """The list of a method; `file` names another one. A ValueError if a line to change does not occur exactly
    once."""
    listed = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    mutations = []
    for entry in listed["mutation"]:
        file = entry.get("file", file_of(name))
        occurs = (ROOT / file).read_text().count(entry["old"])
        if occurs != 1 or entry["old"] == entry["new"]:
            raise ValueError(f"{name}.toml, {entry['what']}: its line occurs {occurs} times in {file}, not "
                             "once, or does not change")
        mutations.append(Mutation(file, entry["what"], entry["old"], entry["new"], tuple(listed["tests"])))
    return mutations


def failing(tree: Path, tests: tuple[str, ...]) -> str:
    """The first of these tests that fails in a copy of the repository; empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # no test was run, or pytest itself failed
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}")
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode:
        return found[1] if found else "the collection of the tests"
    return ""


def noticed(mutation: Mutation) -> str:
    """The test that fails in a copy of the repository with this mistake; empty if none does."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=not_copied)
        (tree / "results").symlink_to(ROOT / "results")
        path = tree / mutation.file
        path.write_text(path.read_text().replace(mutation.old, mutation.new))
        return failing(tree, mutation.tests)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", default="all", choices=["all", *names()],
                        help="files whose lists are tried, of %(choices)s (default: %(default)s)")
    args = parser.parse_args(argv)
    survived = 0
    print("| file | mistake | noticed by |\n|---|---|---|", flush=True)
    for name in names() if "all" in args.names else args.names:
        mutations = mutations_of(name)
        broken = noticed(replace(mutations[0], new=mutations[0].old))
        if broken:
            sys.exit(f"{broken} fails in a copy without a mutation; make it pass first")
        for mutation in mutations:
            found = noticed(mutation)
            survived += not found
            print(f"| {mutation.file} | {mutation.what} | {found or 'SURVIVED'} |", flush=True)
    if survived:
        sys.exit(f"{survived} survived: no test notices them")


if __name__ == "__main__":
    main()
