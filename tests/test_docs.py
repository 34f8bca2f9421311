"""The pages of docs/build.py: every link lands, every equation is beside its lines, nothing is fetched. In a
browser, where there is one (-m browser): they open, formulas are drawn, nothing is wider than a phone."""

import os
import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote

from docs import equations
from docs.equations import METHODS, ROOT
from tests.pages import Opened, Read

import pytest

for library in ("markdown_it", "pygments", "math_core"):
    pytest.importorskip(library, reason="needs `pip install -r requirements-docs.txt`")



@pytest.fixture(scope="module")
def pages(site) -> dict[str, Read]:
    return {str(path.relative_to(site)): Read(path) for path in site.rglob("*.html")}


def of_method(method: str) -> str:
    return f"docs/methods/{method}.html"


# What stands in them


def test_the_first_page_leads_to_every_method_and_to_start_errata_and_results(pages):
    links = set(pages["index.html"].links)
    files = [*METHODS, *(path.stem for path in (ROOT / "baselines").glob("*.py"))]
    for name in files:
        if (ROOT / "docs" / "methods" / f"{name}.md").exists():
            assert of_method(name) in pages and of_method(name) in links
    assert {"docs/start.html", "docs/errata.html", "results.html"} <= links


def test_every_link_lands(site, pages):
    lost = []
    for page, read in pages.items():
        for link in read.links + read.loads:
            if link.startswith(("https:", "http:")):
                continue
            path, _, anchor = unquote(link).partition("#")
            target = os.path.normpath(Path(page).parent / path) if path else page
            if not (site / target).is_file() or (anchor and anchor not in pages[target].ids):
                lost.append(f"{page}: {link}")
    assert lost == []


def test_nothing_is_run_or_fetched(pages):
    for read in pages.values():
        assert read.scripts == 0
        assert not [address for address in read.loads if "//" in address]
        assert len(read.ids) == len(set(read.ids))


@pytest.mark.parametrize("method", METHODS)
def test_each_equation_is_beside_its_lines_and_tests(site, pages, method):
    of, text = equations.table(method), (site / of_method(method)).read_text()
    formulas = [latex for entry in of.entries for latex in equations.formulas(entry, of)]
    assert pages[of_method(method)].formulas == len(formulas)
    cards = dict(re.findall(r'<article class="row" id="([^"]*)">(.*?)</article>', text, flags=re.S))
    assert len(cards) == len(of.entries)
    for entry in of.entries:
        card = Read(cards[equations.slug(entry["tag"])])
        for kind in equations.remarks(entry):
            assert f"<strong>{equations.KINDS[kind]}.</strong>" in cards[equations.slug(entry["tag"])]
        for file, _, lines in equations.located(entry, of):
            address = "" if file == of.file else f"../../{file}.html"
            assert {f"{address}#L{n}" for n in lines} <= set(card.links)
        for test in entry["tests"]:
            file, _, _ = test.partition("::")
            line, words = equations.test_of(test)
            assert f"../../tests/{file}.py.html#L{line}" in card.links
            assert words in unescape(cards[equations.slug(entry["tag"])])
    used, whole, _ = equations.counts(of)
    assert f"{whole} of {used} equations and lines located and tested" in text


def test_code_is_shown_as_it_is(site):
    """Without its tags a page has the lines of its file."""
    text = (site / "tests" / "test_fedcir.py.html").read_text()
    shown = []
    for line in re.findall(r'<span class="line[^>]*><a [^>]*>\d+</a>(.*?)\n</span>', text, flags=re.S):
        shown.append(unescape(re.sub(r"<[^>]*>", "", line)))
    assert shown == (ROOT / "tests" / "test_fedcir.py").read_text().splitlines()


# In a browser


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_pages_open_and_nothing_is_wider_than_the_window(browser, site, pages, width, scheme):
    with Opened(browser, site, "index.html", width, color_scheme=scheme) as opened:
        for page in sorted(pages):
            if not page.startswith(("docs/", "index", "results.html", "results/findings", "cells/")):
                continue
            opened.tab.goto(f"file://{site / page}")
            assert opened.tab.evaluate("document.documentElement.scrollWidth") <= width, page
        assert opened.complaints == []


@pytest.mark.browser
@pytest.mark.parametrize("method", METHODS)
def test_formulas_are_drawn(browser, site, method):
    with Opened(browser, site, of_method(method), 390) as opened:
        heights = opened.tab.evaluate(
            "[...document.querySelectorAll('math')].map(e => e.getBoundingClientRect().height)")
        assert heights and min(heights) > 5
        fractions = opened.tab.evaluate(
            "[...document.querySelectorAll('mfrac')].map(e => [e.children[0].getBoundingClientRect().bottom, "
            "e.children[1].getBoundingClientRect().top])")
        assert fractions
        assert all(numerator <= denominator + 2 for numerator, denominator in fractions)


@pytest.mark.browser
@pytest.mark.parametrize("anchor", ["eq-8", "L100", "file"])
def test_anchors_land(browser, site, anchor):
    """With scripts switched off."""
    with Opened(browser, site, of_method("fdse"), java_script_enabled=False) as opened:
        opened.tab.goto(f"{opened.address}#{anchor}")
        box = opened.tab.locator(f"#{anchor}").bounding_box()
        assert box and -1 <= box["y"] < 900 and box["height"] > 0
