"""docs/methods.md: every method is on it, with its file, its note and the tables that it has rows in."""

import re

from tests.conftest import MODULES, ROOT


PAGE = ROOT / "docs" / "methods.md"


def test_every_method_has_a_row_in_every_table():
    """Every file with a method in it, whether or not the other tests know it."""
    no_methods = {"__init__", "common"}  # common.py says how a baseline is started
    files = {path.stem for path in (ROOT / "baselines").glob("*.py")} - no_methods
    files |= {name for name in MODULES if "." not in name}
    assert files == {name.removeprefix("baselines.") for name in MODULES}
    for table in PAGE.read_text().split("\n## ")[1:]:
        notes = re.findall(r"^\| \[[^]]+\]\(\.\./papers/(\w+)/(\w+)\.md\)", table, flags=re.M)
        rows = [paper if name == "differences" else name for paper, name in notes]
        assert sorted(rows) == sorted(files)


def test_the_tests_that_pages_name_are_there():
    defined = set()
    for path in (ROOT / "tests").rglob("*.py"):
        defined |= {path.stem, *re.findall(r"^def (test_\w+)", path.read_text(), flags=re.M)}
    for path in [*(ROOT / "docs").rglob("*.md"), *(ROOT / "papers").rglob("*.md")]:
        named = set(re.findall(r"\btest_\w+", path.read_text()))
        assert named <= defined, f"{path.name}: {named - defined}"
