"""docs/methods.md: every method is on it, with its file, its note and the tables that it has rows in."""

import re

from tests.conftest import MODULES, ROOT


PAGE = ROOT / "docs" / "methods.md"


def sections() -> list[dict[str, list[str]]]:
    """The rows of the page's tables: {name of the note: its cells}."""
    found = []
    for part in PAGE.read_text().split("\n## ")[1:]:
        rows = {}
        for line in part.splitlines():
            note = re.match(r"\| \[[^]]+\]\(methods/(\w+)\.md\)", line)
            if note:
                assert note[1] not in rows, f"{note[1]} has two rows"
                rows[note[1]] = [cell.strip() for cell in line.strip("|").split("|")]
        found.append(rows)
    return found


def test_every_method_has_a_row_in_every_table():
    """Every file with a method in it, whether or not the other tests know it."""
    no_methods = {"__init__", "common"}  # common.py says how a baseline is started
    files = {path.stem for path in (ROOT / "baselines").glob("*.py")} - no_methods
    files |= {name for name in MODULES if "." not in name}
    assert files == {name.removeprefix("baselines.") for name in MODULES}
    papers, travels, costs = sections()
    assert set(papers) == set(travels) == set(costs) == files
    for rows in (papers, travels, costs):
        assert not [cells for cells in rows.values() if "" in cells]


def test_the_tests_that_pages_name_are_there():
    defined = set()
    for path in (ROOT / "tests").rglob("*.py"):
        defined |= {path.stem, *re.findall(r"^def (test_\w+)", path.read_text(), flags=re.M)}
    for path in (ROOT / "docs").rglob("*.md"):
        named = set(re.findall(r"\btest_\w+", path.read_text()))
        assert named <= defined, f"{path.name}: {named - defined}"
