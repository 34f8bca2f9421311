"""The pages of docs/build.py: every equation is beside its lines, links are checked, nothing is fetched from
elsewhere, colours can be read. In a browser, where there is one (-m browser): pages open, formulas are drawn,
nothing is wider than a phone, the search finds."""

import json
import re
from html import unescape
from pathlib import Path

from docs import equations
from docs.equations import METHODS, ROOT
from tests.pages import Opened, Read

import pytest

for library in ("markdown_it", "pygments", "math_core"):
    pytest.importorskip(library, reason="needs `pip install -r requirements-docs.txt`")

from docs import methods_pages  # noqa: E402
from docs.pages import Site  # noqa: E402
from plumbing.errors import UserError  # noqa: E402

SIZE, OF_A_RUN = 5e6, 6e3  # bytes of all pages: without a run, and more for each that is on record


@pytest.fixture(scope="module")
def pages(site) -> dict[str, Read]:
    return {str(path.relative_to(site)): Read(path) for path in site.rglob("*.html")}


def of_method(method: str) -> str:
    return f"docs/methods/{method}.html"

def test_the_first_page_has_each_method_with_its_formula_and_what_is_measured_of_its_claims(site, pages):
    """Each method's page has the lines of the table on its page of claims."""
    assert pages["index.html"].formulas == len(METHODS)
    for method, (idea, claims) in methods_pages.summaries().items():
        assert idea.endswith(".") and unescape(idea) in unescape((site / "index.html").read_text())
        if method != "fedavg":
            page = (ROOT / "results" / "claims" / f"{method}.md").read_text()
            shown = unescape((site / of_method(method)).read_text())
            assert claims and all(f"<td>{cell}</td>" in shown for line in claims for cell in line)
            for line in claims:
                row = next(row for row in page.splitlines() if row.startswith(f"| {line[0]} "))
                assert [cell.strip() for cell in row.strip("|").split("|")] == line


@pytest.mark.parametrize("link", ["gone.html", "#gone", "page.html#gone"])
def test_a_link_that_leads_nowhere_ends_the_build(tmp_path, link):
    made = Site(tmp_path)
    made.write(Path("page.html"), "file.html", "Page", note=Path("x.md"), text="# x", file=None)
    made.links = {"page.html": [link]}
    with pytest.raises(UserError, match=f"1 links of the pages lead nowhere: page.html: {link}"):
        made.finish()
    made.links = {"page.html": ["#x", "page.html#x", "https://example.org"]}
    made.finish()


def test_the_site_is_small_and_loads_nothing_from_elsewhere(site, pages):
    size = SIZE + OF_A_RUN * len((ROOT / "results" / "runs.jsonl").read_text().splitlines())
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < size
    for read in pages.values():
        assert read.scripts == 1  # docs/page.js
        assert not [address for address in read.loads if "//" in address]
        assert len(read.ids) == len(set(read.ids))


def test_the_search_knows_sections_and_their_words(site):
    words = (site / "search.js").read_text()
    found = {address: text for _, _, address, text in json.loads(words.partition(" = ")[2])}
    assert "a negative product with it" in found["docs/methods/fdse.html#eq-8"]
    assert "<" not in found["docs/start.html#the-problem"]


@pytest.mark.parametrize("method", METHODS)
def test_each_equation_is_beside_its_lines_and_tests(site, pages, method):
    of, text = equations.table(method), (site / of_method(method)).read_text()
    formulas = [latex for entry in of.entries for latex in equations.formulas(entry, of)]
    assert pages[of_method(method)].formulas == len(formulas) + 1  # that of its card
    cards = dict(re.findall(r'<article class="row">.*?<h3 id="([^"]*)">(.*?)</article>', text, flags=re.S))
    assert len(cards) == len(of.entries)
    for entry in of.entries:
        card = Read(cards[equations.slug(entry["tag"])])
        for kind, heading in equations.KINDS.items():
            assert kind not in entry or f"<summary>{heading}</summary>" in cards[equations.slug(entry["tag"])]
        for file, _, lines in equations.located(entry, of) + equations.located(entry, of, "official"):
            address = "" if file == of.file else f"../../{file}.html"
            assert {f"{address}#L{n}" for n in lines} <= set(card.links)
        for test in entry["tests"]:
            name = test.partition("::")[2]
            line, words = equations.test_of(test)
            assert f"{equations.file_of(test)}:{line} {name}" in cards[equations.slug(entry["tag"])]
            assert words in unescape(cards[equations.slug(entry["tag"])])
    used, whole, _ = equations.counts(of)
    assert f"{whole} of {used} equations and lines located and tested" in text


def test_code_is_shown_as_it_is(site):
    """Without its tags a page has the lines of its file."""
    text = (site / "common.py.html").read_text()
    shown = []
    for line in re.findall(r'<span class="line[^>]*><a [^>]*>\d+</a>(.*?)\n</span>', text, flags=re.S):
        shown.append(unescape(re.sub(r"<[^>]*>", "", line)))
    assert shown == (ROOT / "common.py").read_text().splitlines()

@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_pages_open_and_nothing_is_wider_than_the_window(browser, site, pages, width, scheme):
    with Opened(browser, site, "index.html", width, color_scheme=scheme) as opened:
        for page in sorted(pages):
            if not page.startswith(("docs/", "index", "results.html", "results/README", "cells/")):
                continue
            opened.tab.goto(f"file://{site / page}")
            assert opened.tab.evaluate("document.documentElement.scrollWidth") <= width, page
        assert opened.complaints == []


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", ["index.html", of_method("fdse"), "results.html", "results/claims/fdse.html",
                                  "cells/fdse-1.html", "docs/start.html"])
def test_axe_finds_no_violation(browser, site, page, scheme):
    """Contrast, headings, names of what can be reached by the keyboard: WCAG 2, levels A and AA."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with Opened(browser, site, page, 390, color_scheme=scheme) as opened:
        found = axe.run(opened.tab, options={"runOnly": ["wcag2a", "wcag2aa"]})
        assert found.violations_count == 0, found.generate_report()


@pytest.mark.browser
def test_the_search_finds_and_escape_closes_it(browser, site):
    """By the keyboard, from a page in a folder."""
    with Opened(browser, site, of_method("fdse")) as opened:
        opened.tab.keyboard.press("/")
        opened.tab.wait_for_function("typeof SECTIONS !== 'undefined'")
        opened.tab.keyboard.type("consensus maximization")
        first = opened.tab.locator(".found a").first
        assert "Eq. (8)" in first.inner_text()
        assert first.get_attribute("href") == "../../docs/methods/fdse.html#eq-8"
        opened.tab.keyboard.press("Escape")
        assert opened.tab.locator(".found a").count() == 0
        assert opened.complaints == []


def luminance(colour: str) -> float:
    """Of #rrggbb, relative, by WCAG 2."""
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1])
def test_text_has_the_contrast_that_wcag_asks_for(scheme):
    """4.5 for every colour of text on every ground that it stands on, light and dark."""
    css = (ROOT / "docs" / "page.css").read_text()
    pairs = re.findall(r"--([a-z]+): light-dark\((#\w+), (#\w+)\)", css)
    colours = {name: pair[scheme] for name, *pair in pairs}
    grounds = {"back": ["text", "soft", "accent"], "differs": ["text", "soft", "accent"],
               "measured": ["text", "soft", "accent"],
               "panel": ["text", "soft", "accent", "keyword", "string", "comment", "number", "name"]}
    for ground, words in grounds.items():
        for word in words:
            low, high = sorted([luminance(colours[word]), luminance(colours[ground])])
            assert (high + 0.05) / (low + 0.05) >= 4.5, (word, ground)
