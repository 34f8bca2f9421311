"""docs/methods.md: every method is on it, with its file, its note and the tables that it has rows in."""

import re

from reproduce.tables import PAPERS, read_tables
from tests.conftest import MODULES, ROOT

import pytest

PAGE = ROOT / "docs" / "methods.md"
NAMES = {"fedsr": "FedSR", "fedadg": "FedADG", "fedgala": "FedGaLA", "fedcir": "FedCiR", "fdse": "FDSE"}


def tables_of() -> dict[str, list[str]]:
    """The ids of the tables in which a module has a row of the paper."""
    tables = {}
    for table in read_tables():
        for block in table.blocks:
            for row in block.rows:
                published = row.module and not row.quoted and not row.ours and not block.ours
                if published and table.id not in tables.setdefault(row.module, []):
                    tables[row.module].append(table.id)
    return tables


def number_of(name: str) -> tuple:
    """What names of tables are sorted by: 2 before 10 before A8."""
    letters, digits, rest = re.fullmatch(r"([A-Z]*)(\d+)([a-z]?)", name).groups()
    return letters, int(digits), rest


def in_words(ids: list[str]) -> str:
    """Ids as the page has them: fdse-1, fdse-A8, fdse-fig3 -> FDSE 1, A8, Fig. 3."""
    words = []
    for paper in PAPERS:
        ours = [id.removeprefix(f"{paper}-") for id in ids if id.startswith(f"{paper}-")]
        tables = sorted([name for name in ours if not name.startswith("fig")], key=number_of)
        figures = sorted([name.removeprefix("fig") for name in ours if name.startswith("fig")], key=number_of)
        if figures:
            tables.append("Fig. " + ", ".join(figures))
        if tables:
            words.append(f"{NAMES[paper]} {', '.join(tables)}")
    return "; ".join(words)


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


@pytest.mark.parametrize("method", MODULES)
def test_file_and_tables_of_a_method(method):
    cells = sections()[0][method.removeprefix("baselines.")]
    file = method.replace(".", "/") + ".py"
    assert cells[1] == f"[{file}](../{file})"
    assert cells[3] == in_words(tables_of().get(method, []))


def test_no_link_is_broken():
    links = re.findall(r"\]\(([^)]+)\)", PAGE.read_text())
    assert len(links) > 3 * len(MODULES)
    for link in links:
        assert (PAGE.parent / link).exists(), link
