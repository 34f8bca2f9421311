"""The facts about the image datasets agree with each other and with what the literature says."""

import re

from plumbing.catalog import DOMAINNET, DOMAINNET10, DOMAINNET20, DOMAINNET_MD5, FOLDERS
from plumbing.listings import LAYOUTS

import pytest


@pytest.mark.parametrize("dataset, images", [("officecaltech", 2533), ("pacs", 9991), ("vlcs", 10729),
                                             ("officehome", 15588), ("domainnet", 586575),
                                             ("camelyon17", 455954)])
def test_counts_add_up(dataset, images):
    assert sum(count for _, count in FOLDERS[dataset].domains.values()) == images


@pytest.mark.parametrize("dataset", ["officecaltech", "pacs"])
def test_counts_of_classes_add_up(dataset):
    source = FOLDERS[dataset]
    assert source.of_class.keys() == source.domains.keys()
    for domain, (_, count) in source.domains.items():
        assert sum(source.of_class[domain]) == count and len(source.of_class[domain]) == len(source.classes)


@pytest.mark.parametrize("dataset, classes", [("officecaltech", 10), ("pacs", 7), ("vlcs", 5),
                                              ("officehome", 65), ("terrainc", 10), ("domainnet", 345),
                                              ("domainnet10", 10), ("domainnet20", 20), ("camelyon17", 2)])
def test_classes_are_complete_and_distinct(dataset, classes):
    names = FOLDERS[dataset].classes
    assert len(names) == len(set(names)) == classes


@pytest.mark.parametrize("source", FOLDERS.values(), ids=FOLDERS)
def test_layouts_and_names_of_domains_are_usable(source):
    assert source.layout in LAYOUTS
    for domain in source.domains:
        assert re.fullmatch("[a-z0-9_]+", domain)


def test_parts_of_domainnet_have_its_classes():
    assert set(DOMAINNET10) < set(DOMAINNET) and set(DOMAINNET20) < set(DOMAINNET)


def test_domainnets_classes_have_the_numbers_of_its_lists():
    numbers = {"aircraft_carrier": 0, "bird": 31, "The_Eiffel_Tower": 308, "t-shirt": 327, "zigzag": 344}
    assert {c: DOMAINNET.index(c) for c in numbers} == numbers


def test_md5s_are_md5s():
    sums = [md5 for of_domain in DOMAINNET_MD5.values() for md5 in of_domain]
    assert len(set(sums)) == 18
    assert all(re.fullmatch("[0-9a-f]{32}", md5) for md5 in sums)
