"""The papers' equations and lines, the tags in the code and the tests: docs/equations.py and its tables; and
what the notes have of them: docs/notes.py."""

import copy
import dataclasses

from docs import equations, notes
from docs.equations import METHODS, ROOT, Code, Table

import pytest

# Tables, code and tests


KEYS = {"tag", "name", "latex", "says", *equations.KINDS, "place", "mark", "tests"}


@pytest.mark.parametrize("method", METHODS)
def test_every_equation_has_its_place_and_its_test(method):
    of = equations.table(method)
    assert equations.faults(of) == []
    used, whole, unused = equations.counts(of)
    assert used == whole > 8
    if of.numbers:
        assert used + unused == len(of.printed())
    assert all(equations.lines_of(entry, of) for entry in of.entries)


def test_each_entry_says_what_it_is():
    for method in METHODS:
        of = equations.table(method)
        for entry in of.entries:
            assert entry["latex"].strip() and entry["name"] and entry["says"].endswith("."), entry["tag"]
            assert set(entry) <= KEYS
            assert "findings.md#" in entry.get("measured", "findings.md#")
        assert set(of.travels) == {"server", "client", "down", "up"}


def test_every_test_says_what_it_is_held_against():
    for method in METHODS:
        of = equations.table(method)
        for entry in of.entries + of.parts:
            assert all(equations.test_says(test) for test in entry["tests"]), entry["tag"]


def test_a_difference_that_a_flag_switches_is_measured_or_not():
    assert equations.remarks({"differs": "Less (`--norm plain`)."}) == {"Differs": "Less (`--norm plain`).",
                                                                      "Measured": "No."}
    assert equations.remarks({"differs": "As printed."}) == {"Differs": "As printed."}
    said = equations.remarks({"differs": "`--norm`", "measured": "90"})
    assert said == {"Differs": "`--norm`", "Measured": "90"}


def test_the_sum_in_the_readme():
    assert equations.sentence() in " ".join((ROOT / "README.md").read_text().split())


# What would be noticed


def with_eq8(**changes) -> Table:
    """FDSE's table with other values in the entry of Eq. (8)."""
    of = copy.deepcopy(equations.table("fdse"))
    entry = next(entry for entry in of.entries if entry["tag"] == "Eq. (8)")
    entry.update(changes)
    return of


@pytest.mark.parametrize("changes,fault", [
    ({"tests": []}, "Eq. (8): no test"),
    ({"tests": ["test_fdse::test_of_nothing"]}, "Eq. (8): there is no test test_fdse::test_of_nothing"),
    ({"tests": ["test_nowhere::test_it"]}, "Eq. (8): there is no test test_nowhere::test_it"),
    ({"place": []}, "Eq. (8): no place"),
    ({"place": ["agreement"]}, "Eq. (8): there is no agreement in fdse.py"),
    ({"place": ["consensus", "personalize"]}, "Eq. (8): no comment or docstring of personalize has it"),
    ({"mark": "gram"}, "Eq. (8): its mark stands 6 times in consensus"),
    ({"tag": "Eq. (10)"}, "Eq. (10): not among the numbers of the paper"),
    ({"tag": "Eq. (9)"}, "Eq. (9): the table has it 2 times"),
])
def test_what_the_table_says_wrongly_is_noticed(changes, fault):
    assert fault in equations.faults(with_eq8(**changes))


def test_an_equation_that_the_table_lacks_is_noticed():
    of = copy.deepcopy(equations.table("fdse"))
    of.entries = [entry for entry in of.entries if entry["tag"] != "Eq. (8)"]
    found = equations.faults(of)
    assert "Eq. (8): the table has it 0 times" in found
    assert "Eq. (8): in fdse.py, consensus, not in the table" in found


def test_a_reason_that_is_lacking_is_noticed():
    of = copy.deepcopy(equations.table("fdse"))
    of.unused[0]["why"] = ""
    assert equations.faults(of) == ["Eq. (1): unused, without a reason"]


# Tags


@pytest.mark.parametrize("text,tags", [
    ("by Eq. (8)", ["Eq. (8)"]),
    ("Eqs. (5)-(7), and Eq. (9)", ["Eq. (5)", "Eq. (6)", "Eq. (7)", "Eq. (9)"]),
    ("Eqs. (1)-(2), (4) and (6)", ["Eq. (1)", "Eq. (2)", "Eq. (4)", "Eq. (6)"]),
    ("Alg. 1, line 4", ["Alg. 1 line 4"]),
    ("Alg. 1     lines 1; 2; 3 and 5", [f"Alg. 1 line {n}" for n in (1, 2, 3, 5)]),
    ("Alg. 3, l. 2-3: as line 4", [f"Alg. 3 line {n}" for n in (2, 3, 4)]),
    ("Line 10's result goes back", ["Alg. 1 line 10"]),
    ("the loss, Alg. 1 line 7; 0: without", ["Alg. 1 line 7"]),
    ("another paper's, ICML 2020, Eq. (1)", []),
    ("two lines of text; step c5; layers 7 and 8", []),
])
def test_tags_in_a_text(text, tags):
    assert equations.table("fdse").tags_in(text) == tags


def test_tags_of_steps_and_of_other_papers():
    assert equations.table("fedadg").tags_in("s1; s2; Steps c7-c9, self.step_c3()") == [
        "step s1", "step s2", "step c7", "step c8", "step c9"]
    assert equations.table("fedgala").tags_in("MoCo, Eq. (2), BYOL Eq. (2), by Eq. (2)") == [
        "MoCo Eq. (2)", "BYOL Eq. (2)", "Eq. (2)"]


# Places


SOURCE = '''"""Eq. (1)."""


def outer(x):
    """Eq. (2)."""
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


def test_mentions_and_their_owners(source):
    found = [(m.tag, m.owner, m.line) for m in source.mentions]
    assert sorted(found) == [("Alg. 1 line 6", "outer", 9), ("Alg. 3 line 7", "Client.adapt", 16),
                             ("Eq. (1)", "", 0), ("Eq. (2)", "outer", 0), ("Eq. (3)", "outer", 6)]


def test_statements(source):
    """A comment by itself goes with the next statement; a loop is its head."""
    assert list(source.statement(6)) == [6, 7, 8]
    assert list(source.statement(9)) == [9]
    assert list(source.statement(16)) == [16]


@pytest.mark.parametrize("entry,lines", [
    ({"tag": "Eq. (3)"}, [6, 7, 8]),
    ({"tag": "Eq. (2)", "mark": "return y"}, [11]),
    ({"tag": "Eq. (2)"}, [4, 5, 6, 7, 8, 9, 10, 11]),  # it is in the docstring alone
])
def test_lines_of_an_entry(source, monkeypatch, entry, lines):
    monkeypatch.setattr(equations, "code", lambda path, method: source)
    entry["place"] = ["outer"]
    assert equations.lines_of(entry, equations.table("fdse")) == {"fdse.py": lines}


# Notes


@pytest.mark.parametrize("path,text", notes.written().items(), ids=lambda value: getattr(value, "name", ""))
def test_notes_are_as_the_tables_make_them(path, text):
    """`python docs/build.py --notes` writes them again."""
    assert path.read_text() == text


def test_a_note_keeps_what_stands_around_the_section():
    text = f"before\n{notes.BEGIN}\nold\n{notes.END}\nafter\n"
    assert notes.with_section(text, "new") == f"before\n{notes.BEGIN}\n\nnew\n\n{notes.END}\nafter\n"


def test_the_section_has_every_entry_part_and_reason():
    of = equations.table("fdse")
    of = dataclasses.replace(of, entries=of.entries[:1], parts=of.parts[:1], unused=of.unused[:1])
    made = notes.section(of)
    assert "### Eq. (2): the DFE module\n\n```math\n" in made
    assert "In `DSEBlock.forward`. Tests: [test_fdse](../../tests/test_fdse.py): `test_eq2" in made
    assert "| Table A6 | the AlexNet of DSE blocks | `build` |" in made
    assert "| Eq. (1) | the objective of personalized" in made


def test_the_diagram_has_all_that_is_kept_and_sent():
    of = equations.table("fedcir")
    drawn = notes.diagram(of)
    for lines in of.travels.values():
        for line in lines:
            assert f">{line}</text>" in drawn
