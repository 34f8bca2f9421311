"""What others print beside the papers' cells."""


from plumbing.errors import Stop
from reproduce.tables import read_tables
from reproduce.witnesses import HEAD, read_witnesses
from tests.small_table import small_folder

import pytest


def write(folder, *lines: str) -> None:
    (folder / "tables" / "published" / "witnesses.csv").write_text("\n".join([",".join(HEAD), *lines]) + "\n")


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
