"""tables/published: a line of README.md for each file, with its counts."""

import csv
from pathlib import Path

PUBLISHED = Path(__file__).parents[1] / "tables" / "published"


def test_the_readme_has_a_line_for_each_file():
    """How many numbers each has, and how many of them are lost and quoted."""
    said = {}
    for line in (PUBLISHED / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells and cells[0].endswith(".csv"):
            said[cells[0]] = [int(cell) for cell in cells[2:5]]
    counted = {}
    for path in PUBLISHED.glob("*-*.csv"):
        with open(path) as file:
            rows = list(csv.DictReader(file))
        lost = [row for row in rows if not row["mean"]]
        quoted = [row for row in rows if row["kind"] == "quoted"]
        counted[path.name] = [len(rows), len(lost), len(quoted)]
    assert said == counted and len(said) == 25
