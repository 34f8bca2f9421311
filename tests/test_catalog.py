"""The facts about the image datasets agree with each other and with what the literature says."""


from plumbing.catalog import FOLDERS

import pytest


@pytest.mark.parametrize("dataset, classes, images", [
    ("officecaltech", 10, 2533), ("pacs", 7, 9991), ("vlcs", 5, 10729), ("officehome", 65, 15588),
    ("terrainc", 10, None), ("domainnet", 345, 586575), ("domainnet10", 10, None), ("domainnet20", 20, None),
    ("camelyon17", 2, 455954),
])
def test_counts_add_up_and_classes_are_distinct(dataset, classes, images):
    names = FOLDERS[dataset].classes
    assert len(names) == len(set(names)) == classes
    counts = [count for _, count in FOLDERS[dataset].domains.values()]
    assert (None if None in counts else sum(counts)) == images


def test_domainnets_classes_have_the_numbers_of_its_lists():
    classes = FOLDERS["domainnet"].classes
    numbers = {"aircraft_carrier": 0, "bird": 31, "The_Eiffel_Tower": 308, "t-shirt": 327, "zigzag": 344}
    assert {c: classes.index(c) for c in numbers} == numbers
    for part in ("domainnet10", "domainnet20"):
        assert set(FOLDERS[part].classes) < set(classes) and FOLDERS[part].files == FOLDERS["domainnet"].files
