"""The papers' equations and lines, the tags and formulas in the code and the tests: docs/equations.py and its
tables."""

import ast
import re
import textwrap

from docs import equations
from docs.equations import METHODS, ROOT, Code

from tests.mutations.__main__ import mutations_of, names

import pytest

MEASURED = re.compile(r"[0-9]%|±|[ (][-+][0-9]|(?<!Eq. )[0-9]\.[0-9]")  # a number that was measured
KEYS = {"tag", "name", "latex", "says", "why", *equations.KINDS, "place", "mark", "official", "tests"}
ENTRIES = [(method, entry) for method in METHODS for entry in equations.table(method).entries]
every_entry = pytest.mark.parametrize("method, entry", ENTRIES,
                                      ids=[f"{method}-{entry['tag']}" for method, entry in ENTRIES])


@pytest.mark.parametrize("method", METHODS)
def test_every_number_of_the_paper_is_computed_or_has_a_reason(method):
    of = equations.table(method)
    tags = []
    for entry in of.entries + of.unused:
        tags += of.tags_of(entry)
    assert len(tags) == len(set(tags))
    if of.numbers:
        assert sorted(tags) == sorted(of.printed())
    assert all(entry["why"] for entry in of.unused)
    for test in [test for entry in of.entries + of.parts for test in entry["tests"]]:
        line, words = equations.test_of(test)
        assert line and words, test
    used, whole, _ = equations.counts(of)
    assert used == whole > 8
    known = set(tags)
    assert [tag for tag, _, _ in equations.code(of.file, method).mentions if tag not in known] == []


@every_entry
def test_every_equation_has_its_place_and_its_tests(method, entry):
    of = equations.table(method)
    assert set(entry) <= KEYS and entry["name"] and entry["says"].endswith(".")
    assert not MEASURED.search(entry.get("measured", ""))
    seen = set()
    for file, name, _ in equations.located(entry, of):
        source = equations.code(file, method)
        if name in entry.get("mark", {}):
            first, last = source.spans[name]
            for mark in entry["mark"][name].split(" ... "):
                assert "\n".join(source.lines[first - 1:last]).count(mark) == 1, mark
            seen |= set(of.tags_of(entry))
        seen |= {tag for tag, owner, _ in source.mentions if equations.within(owner, name)}
    assert set(of.tags_of(entry)) <= seen


@every_entry
def test_what_is_shown_of_an_equation_are_whole_statements(method, entry):
    """Also where something is left out between them, for which an ellipsis stands."""
    of = equations.table(method)
    for file, name, lines in equations.located(entry, of) + equations.located(entry, of, "official"):
        shown = equations.code(file, method).shown(lines)
        assert [n for n, _ in shown if n] == lines
        assert ast.parse(textwrap.dedent("\n".join(text for _, text in shown))).body, name


@every_entry
def test_every_equation_has_one_formula_and_it_renders(method, entry):
    """In the docstring of the function that computes it. A line of an algorithm may do without."""
    pages = pytest.importorskip("docs.pages", reason="needs `pip install -r requirements-docs.txt`")
    found = equations.formulas(entry, equations.table(method))
    assert len(found) == 1 or ("Eq" not in entry["tag"] and not found)
    for latex in found:
        assert "<math" in pages.formula(latex)


@pytest.mark.parametrize("method", METHODS)
def test_every_formula_belongs_to_an_entry(method):
    of = equations.table(method)
    for owner, tag, _ in equations.code(of.file, method).formulas:
        entry, = [entry for entry in of.entries if equations.slug(entry["tag"]) == tag]
        assert any(equations.within(owner, place) for place in entry["place"]), (tag, owner)


@pytest.mark.parametrize("method", METHODS)
def test_every_part_has_its_place_and_its_tests(method):
    of = equations.table(method)
    for part in of.parts:
        assert part["place"] and part["tests"]
        for place in part["place"]:
            file, name = equations.place_of(place, of)
            source = equations.code(file, method)
            assert name in source.spans or any(line.startswith(f"{name} = ") for line in source.lines)


def test_the_sums_in_the_readme():
    """Of equations, and of planted mistakes."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    planted = sum(len(mutations_of(name)) for name in names())
    assert equations.sentence() in readme and f"must notice {planted} planted one-line mistakes" in readme


SOURCE = r'''"""Eq. (1)."""


def outer(x):
    r"""As $$ a
        = b \tag{2} $$ and no more."""
    # Eq. (3)
    y = (x +
         1)
    for i in y:  # line 6
        y = i
    return y


class Client:
    def adapt(self):
        return 1  # line 7
'''


@pytest.fixture
def source(tmp_path, monkeypatch) -> Code:
    (tmp_path / "fdse.py").write_text(SOURCE)
    monkeypatch.setattr(equations, "ROOT", tmp_path)
    return Code("fdse.py", equations.table("fdse"))


@pytest.mark.parametrize("entry,lines", [
    ({"tag": "Eq. (3)"}, [7, 8, 9]),  # a comment by itself goes with the next statement
    ({"tag": "Alg. 1 line 6"}, [10]),  # a loop is its head
    ({"tag": "Eq. (2)", "mark": {"outer": "return y"}}, [12]),
    ({"tag": "Eq. (2)", "mark": {"outer": "y = i ... return y"}}, [10, 11, 12]),  # with its loop
    ({"tag": "Eq. (2)"}, [4, 7, 8, 9, 10, 11, 12]),  # it is in the docstring alone
])
def test_lines_of_an_entry(source, entry, lines):
    assert source.lines_in("outer", entry) == lines
