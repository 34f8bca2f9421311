"""docs/errata.md: its numbers, flags and equations are those of the repository. Its links are checked
with those of all pages (docs/build.py)."""

import csv
import dataclasses
import re
import shlex
from collections import defaultdict

from docs import equations
from docs.equations import ROOT
from plumbing.settings import flag_of
from tests.conftest import MODULES, OFFICIAL

import pytest

PAGE = ROOT / "docs" / "errata.md"
PAPERS = ("fedsr", "fedadg", "fedgala", "fedcir", "fdse")  # in the page's order
ENTRY = re.compile(r'^(\d+)\. <a id="([\w-]+)"></a>((?:.*\n(?:   .*\n)*))', re.M)
CODE = re.compile(r"`([^`]+)`")


def sections() -> dict[str, str]:
    """{paper: its section}"""
    parts = re.split(r"^## (.*)\n", PAGE.read_text(), flags=re.M)
    return {heading.lower(): text for heading, text in zip(parts[1::2], parts[2::2])}


def entries(paper: str) -> list[tuple[str, str, str]]:
    """Number, anchor and text of the entries of a paper."""
    return [(number, anchor, " ".join(text.split())) for number, anchor, text in
            ENTRY.findall(sections()[paper])]


def flags_in(text: str) -> list[list[str]]:
    """What stands in backticks and begins with --, in words: [["--norm", "plain"], ["--clip"]]."""
    return [shlex.split(code) for code in CODE.findall(text) if code.startswith("--")]


@pytest.mark.parametrize("paper", PAPERS)
def test_its_flags_are_the_methods(paper):
    """Each flag is one of the method's, or of its program in official/."""
    modules = [MODULES[paper], OFFICIAL.get(f"official.{paper}", MODULES[paper])]
    names = {flag_of(f.name) for module in modules for f in dataclasses.fields(module.Args)}
    for words in flags_in(sections()[paper]):
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        assert all(flag in names or flag.replace("--no-", "--") in names for flag in flags), (paper, words)


@pytest.mark.parametrize("paper", PAPERS)
def test_the_equations_it_names_are_the_papers(paper):
    of = equations.table(paper)
    printed = set(of.printed())
    for number, _, text in entries(paper):
        place = text.split("*Here:*")[0]
        unknown = set(of.tags_in(place)) - printed
        assert not unknown, f"{paper} {number}: {sorted(unknown)}"


def test_the_averages_it_has_are_those_that_do_not_match():
    """A printed average that is not the mean of its row, by more than rounding, is in the paper's section."""
    found = 0
    of_papers = set((ROOT / "tables" / "published").glob("*-*.csv"))  # elsewhere.csv is others'
    for path in sorted(of_papers):
        rows = defaultdict(dict)
        for cell in csv.DictReader(path.open()):
            if cell["mean"]:
                key = (cell["dataset"], cell["setting"], cell["method"])
                rows[key][cell["column"].lower().strip(".")] = cell["mean"]
        paper = path.stem.partition("-")[0]
        for key, row in rows.items():
            for name in {"avg", "ave", "average"} & set(row):
                columns = [float(value) for column, value in row.items() if column != name]
                if len(columns) < 3:  # beside ALL
                    continue
                mean = sum(columns) / len(columns)
                if abs(mean - float(row[name])) > 0.15:
                    found += 1
                    section = " ".join(sections()[paper].split())
                    assert row[name] in section, (path.stem, key)
                    assert f"{mean:.1f}" in section or f"{mean:.2f}" in section, (path.stem, key)
    assert found == 10
