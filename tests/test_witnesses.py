"""What others print beside the papers' cells."""

import csv

from plumbing.errors import Stop
from reproduce.cells import cells_in, filled
from reproduce.records import Records
from reproduce.rendering import cell_text
from reproduce.tables import read_tables
from reproduce.witnesses import HEAD, attach, page, read_witnesses
from tests.conftest import ROOT
from tests.small_table import small_folder

import pytest


def write(folder, *lines: str) -> None:
    (folder / "tables" / "published" / "witnesses.csv").write_text("\n".join([",".join(HEAD), *lines]) + "\n")


def test_a_number_stands_beside_its_cell(tmp_path):
    records = Records(small_folder(tmp_path) / "runs.jsonl")
    write(tmp_path, "fdse-9,digits,FedAvg,ALL,91.5,0.5,3,a paper,twice as long",
          "fdse-9,digits,FedAvg,ALL,89,,,b,c")
    tables = read_tables(tmp_path / "tables")
    witnesses = read_witnesses(tmp_path / "tables", tables)
    blocks = filled(tables[0], records, "paper")
    attach(witnesses, tables[0], blocks)
    assert [cell.elsewhere for cell in cells_in(blocks)][:2] == [["91.5", "89"], []]
    assert cell_text(cells_in(blocks)[0]).startswith("90.0 ± 2.0 [91.5, 89] / 96.00")
    rows = [line for line in page(witnesses, tables).splitlines() if "FedAvg, ALL" in line]
    assert [cell.strip() for cell in rows[0].split("|")[4:-1]] == ["90.0", "91.5 ± 0.5", "+1.5", "a paper",
                                                                  "twice as long"]
    assert "| -1.0 " in rows[1]


@pytest.mark.parametrize("line, words", [
    ("fdse-9,digits,FedAvg,XXX,91.5,,,a,b", "no cell fdse-9, digits, FedAvg, XXX is in tables/"),
    ("fdse-9,digits,FDSE without C,AVG,91.5,,,a,b", "no cell"),
])
def test_a_number_beside_no_cell_is_refused(tmp_path, line, words):
    """Also beside one that the text has lost."""
    small_folder(tmp_path)
    write(tmp_path, line)
    with pytest.raises(Stop, match=words):
        read_witnesses(tmp_path / "tables", read_tables(tmp_path / "tables"))


def test_those_of_the_repository():
    """Sixty numbers from three sources and more; each says where it stands and under which protocol."""
    with open(ROOT / "tables" / "published" / "witnesses.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 60 and len({row["source"].split(",")[0] for row in rows}) >= 3
    assert all(row["source"] and row["protocol"] for row in rows)
    assert len(read_witnesses(ROOT / "tables", read_tables())) <= len(rows)
