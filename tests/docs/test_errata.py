"""papers/*/gaps.md: their numbers, flags and equations are those of the repository. Their links are checked
with those of all pages (docs/build.py)."""

import csv
import dataclasses
import re
import shlex
from collections import defaultdict
from statistics import fmean

from docs import equations
from docs.equations import ROOT
from plumbing.run.settings import flag_of
from tests.conftest import MODULES, OFFICIAL

import pytest

PAPERS = ("fedsr", "fedadg", "fedgala", "fedcir", "fdse")  # in the page's order
ENTRY = re.compile(r'^(\d+)\. <a id="([\w-]+)"></a>((?:.*\n(?:   .*\n)*))', re.M)


def gaps(paper: str) -> str:
    return (ROOT / "papers" / paper / "gaps.md").read_text()


@pytest.mark.parametrize("paper", PAPERS)
def test_its_flags_are_the_methods(paper):
    """Each flag is one of the method's, or of its program in official/."""
    modules = [MODULES[paper], OFFICIAL.get(f"official.{paper}", MODULES[paper])]
    names = {flag_of(f.name) for module in modules for f in dataclasses.fields(module.Args)}
    codes = re.findall(r"`(--[^`]+)`", gaps(paper))
    flags = {word.partition("=")[0] for code in codes for word in shlex.split(code) if word.startswith("--")}
    assert {flag for flag in flags if flag.replace("--no-", "--") not in names} <= names


@pytest.mark.parametrize("paper", PAPERS)
def test_the_equations_it_names_are_the_papers(paper):
    of = equations.table(paper)
    for number, _, text in ENTRY.findall(gaps(paper)):
        place = " ".join(text.split()).split("*Here:*")[0]
        assert set(of.tags_in(place)) <= set(of.printed()), f"{paper} {number}"


def test_the_averages_it_has_are_those_that_do_not_match():
    """A printed average that is not the mean of its row, by more than rounding, is in the paper's section."""
    found = 0
    for paper in PAPERS:
        section = " ".join(gaps(paper).split())
        rows = defaultdict(dict)
        for cell in csv.DictReader((ROOT / "papers" / paper / "printed.csv").open()):
            if cell["mean"]:
                key = (cell["table"], cell["dataset"], cell["setting"], cell["method"])
                rows[key][cell["column"].lower().strip(".")] = cell["mean"]
        for key, row in rows.items():
            printed = [row.pop(name) for name in ("avg", "ave", "average") if name in row]
            if printed and len(row) > 2:  # more than ALL beside it
                mean = fmean(map(float, row.values()))
                if abs(mean - float(printed[0])) > 0.15:
                    found += 1
                    assert printed[0] in section, (paper, key)
                    assert f"{mean:.1f}" in section or f"{mean:.2f}" in section, (paper, key)
    assert found == 10
