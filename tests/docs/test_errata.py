"""docs/errata.md: its flags are those of the methods. Its links are checked with those of all pages
(docs/build.py)."""

import dataclasses
import re
import shlex

from docs.equations import ROOT
from plumbing.settings import flag_of
from tests.conftest import MODULES, OFFICIAL

import pytest

PAGE = ROOT / "docs" / "errata.md"
PAPERS = ("fedsr", "fedadg", "fedgala", "fedcir", "fdse")  # in the page's order


def sections() -> dict[str, str]:
    """{paper: its section}"""
    parts = re.split(r"^## (.*)\n", PAGE.read_text(), flags=re.M)
    return {heading.lower(): text for heading, text in zip(parts[1::2], parts[2::2])}


@pytest.mark.parametrize("paper", PAPERS)
def test_its_flags_are_the_methods(paper):
    """Each flag is one of the method's, or of its program in official/."""
    modules = [MODULES[paper], OFFICIAL.get(f"official.{paper}", MODULES[paper])]
    names = {flag_of(f.name) for module in modules for f in dataclasses.fields(module.Args)}
    codes = re.findall(r"`(--[^`]+)`", sections()[paper])
    flags = {word.partition("=")[0] for code in codes for word in shlex.split(code) if word.startswith("--")}
    assert {flag for flag in flags if flag.replace("--no-", "--") not in names} <= names
