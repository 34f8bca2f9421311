"""The scoreboard: the state of each published cell, counted and said."""

from collections import Counter

from reproduce.cells import filled
from reproduce.records import Records
from reproduce.scoreboard import Board, as_markdown, counts_of, sentence
from reproduce.tables import read_tables
from tests.small_table import PUBLISHED, TABLE, small_folder, write_table


def board_of_small_table(tmp_path) -> Board:
    """The small table twice."""
    records = Records(small_folder(tmp_path) / "runs.jsonl")
    (table,) = read_tables(tmp_path / "tables")
    return 2 * [(table, counts_of(filled(table, records, "paper"), filled(table, records, "laptop")))]


def test_quoted_rows_and_rows_of_ours_are_not_counted(tmp_path):
    (_, counts), _ = board_of_small_table(tmp_path)
    assert counts == {"differs": 1, "untested": 3, "lost": 2, "no method": 3}
    of_ours = TABLE.replace('flags = "--lambda 0"', 'flags = "--lambda 0"\nours = true')
    others = [line for line in PUBLISHED.splitlines() if "FDSE without C" not in line]
    write_table(tmp_path / "tables", "fdse-9", of_ours, "\n".join(others))
    (table,) = read_tables(tmp_path / "tables")
    blocks = filled(table, Records(tmp_path / "runs.jsonl"), "paper")
    assert counts_of(blocks, blocks).total() == 6


def test_a_number_that_two_tables_have_counts_once(tmp_path):
    """The same run, place and digits; where the digits differ, twice."""
    records = Records(small_folder(tmp_path) / "runs.jsonl")
    changed = PUBLISHED.replace("fdse,9,", "fdse,8,").replace("percent,90.0,2.0", "percent,91.0,2.0")
    write_table(tmp_path / "tables", "fdse-8", TABLE, changed)
    blocks = [filled(table, records, "paper") for table in read_tables(tmp_path / "tables")]
    seen = set()
    first, second = (counts_of(of, of, seen) for of in blocks)
    assert first.total() == 9
    assert second == {"differs": 1, "lost": 2, "no method": 3}


def test_the_sentence_and_the_table_have_the_counts(tmp_path):
    board = board_of_small_table(tmp_path)
    words = sentence(board)
    for part in ("Of the 14 accuracies", "8 are measured", "(2 that differ, 6 without an interval)",
                 "Of 0 costs",
                 "6 are of methods", "4 more were lost when the papers were read as text"):
        assert part in words, words
    assert "not written" not in sentence([(board[0][0], Counter(agrees=1))])
    rows = [line for line in as_markdown(board).splitlines() if line.startswith("| ")]
    last = [cell.strip() for cell in rows[-1].split("|")[1:-1]]
    assert last == ["all", "18", "0", "0", "2", "6", "0", "0", "0", "0", "6", "4"]
