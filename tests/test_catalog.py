"""The facts about the image datasets agree with each other and with what the literature says."""

import re

from plumbing.catalog import FOLDERS
from plumbing.listings import LAYOUTS

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


@pytest.mark.parametrize("source", FOLDERS.values(), ids=FOLDERS)
def test_layouts_files_and_names_of_domains_are_usable(source):
    assert source.layout in LAYOUTS
    for domain in source.domains:
        assert re.fullmatch("[a-z0-9_]+", domain)
    for url, md5 in source.files.values():
        assert url.startswith("http") and (md5 is None or re.fullmatch("[0-9a-f]{32}", md5))


def test_domainnets_classes_have_the_numbers_of_its_lists():
    classes = FOLDERS["domainnet"].classes
    numbers = {"aircraft_carrier": 0, "bird": 31, "The_Eiffel_Tower": 308, "t-shirt": 327, "zigzag": 344}
    assert {c: classes.index(c) for c in numbers} == numbers
    for part in ("domainnet10", "domainnet20"):
        assert set(FOLDERS[part].classes) < set(classes) and FOLDERS[part].files == FOLDERS["domainnet"].files
