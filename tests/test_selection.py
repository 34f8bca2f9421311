"""Four rules for the round that counts, by hand."""

from reproduce.selection import RULES, by_rules, of_datasets, page

import pytest


def record(values: list, validation: list, protocol: str = "indomain") -> dict:
    name = "target" if protocol == "lodo" else "AVG"
    return {"curve": {"round": list(range(len(values))), "val": validation, name: values},
            "args": {"dataset": "pacs", "protocol": protocol}}


def test_four_rules_by_hand():
    """Of equal validation accuracies the first round counts."""
    values = [0.9, 0.5, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.6]
    validation = [0.1, 0.8, 0.8, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.1, 0.1]
    assert by_rules(record(values, validation), "AVG") == pytest.approx(dict(zip(RULES, (50, 60, 47, 90))))


@pytest.mark.parametrize("values, validation", [
    ([0.5] * 9, [0.5] * 9), ([0.5] * 9 + [None], [0.5] * 10), ([0.5] * 10, []), ([], [0.5] * 10),
])
def test_a_curve_that_is_not_whole_does_not_count(values, validation):
    assert by_rules(record(values, validation), "AVG") is None


def test_a_left_out_domain_is_looked_at_by_itself():
    """Data sets in their order; runs without a whole curve are not in the mean."""
    whole = [0.5] * 10
    runs = [record(whole, whole, "lodo"), record(whole, whole), record([0.7] * 10, whole)]
    runs.append(record([0.1], [0.1]))
    found = of_datasets(runs)
    assert [(key, len(of)) for key, of in found.items()] == [(("pacs", "indomain"), 2), (("pacs", "lodo"), 1)]
    (line,) = [line for line in page(runs, []).splitlines() if "indomain" in line]
    assert [cell.strip() for cell in line.split("|")[3:-1]] == ["2", "60.0", "60.0", "60.0", "60.0"]
