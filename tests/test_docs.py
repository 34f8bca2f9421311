"""The pages of docs/build.py: every link lands, every equation is beside its lines, nothing is fetched. In a
real browser, where there is one (-m browser): they open, formulas are drawn, marks appear, nothing is wider
than a phone."""

import os
import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote

from docs import equations
from docs.equations import METHODS, ROOT
from tests.pages import Opened, Read

import pytest

pytest.importorskip("markdown_it", reason="needs `pip install -r requirements-docs.txt`")
pytest.importorskip("pygments", reason="needs `pip install -r requirements-docs.txt`")
math_core = pytest.importorskip("math_core", reason="needs `pip install -r requirements-docs.txt`")

from docs import build  # noqa: E402

pytestmark = pytest.mark.xdist_group("docs")  # the pages are made once


@pytest.fixture(scope="module")
def pages(site) -> dict[str, Read]:
    return {str(path.relative_to(site)): Read(path) for path in site.rglob("*.html")}


def of_method(method: str) -> str:
    return f"docs/methods/{method}.html"


# What stands in them


def test_every_method_and_baseline_has_a_page(pages):
    files = [*METHODS, *(path.stem for path in (ROOT / "baselines").glob("*.py"))]
    for name in files:
        if (ROOT / "docs" / "methods" / f"{name}.md").exists():
            assert of_method(name) in pages
            assert {of_method(name)} <= {os.path.normpath(link) for link in pages["index.html"].links}


def test_the_first_page_leads_to_start_and_errata(pages):
    assert {"docs/start.html", "docs/errata.html"} <= set(pages["index.html"].links)


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


def test_the_sum_is_that_of_the_readme(site):
    sentence = equations.sentence()
    assert sentence in (site / "index.html").read_text()
    assert sentence in " ".join((ROOT / "README.md").read_text().split())


def test_nothing_is_run_or_fetched(pages):
    for read in pages.values():
        assert read.scripts == 0
        assert not [address for address in read.loads if "//" in address]
        assert len(read.ids) == len(set(read.ids))


@pytest.mark.parametrize("method", METHODS)
def test_each_equation_is_beside_its_lines(site, pages, method):
    of, read = equations.table(method), pages[of_method(method)]
    assert read.formulas == len(of.entries)
    for entry in of.entries:
        name = build.slug(entry["tag"])
        assert name in read.ids
        for file, numbers in equations.lines_of(entry, of).items():
            prefix = "L" if file == of.file else "common-L"
            for n in numbers:
                assert f"e-{name}" in read.classes[f"{prefix}{n}"]
        for test in entry["tests"]:
            file, _, _ = test.partition("::")
            assert f"../../tests/{file}.py.html#L{equations.test_line(test)}" in read.links
    text = (site / of_method(method)).read_text()
    used, whole, _ = equations.counts(of)
    assert f"{whole} of {used} equations and lines located and tested</h2>" in text
    for entry in of.entries:
        assert f'<tr class="e-{build.slug(entry["tag"])}">' in text


@pytest.mark.parametrize("method", METHODS)
def test_the_file_is_there_line_by_line(pages, method):
    """All lines but blank ones between functions."""
    shown = {name for name in pages[of_method(method)].ids if name.startswith("L")}
    for n, line in enumerate((ROOT / f"{method}.py").read_text().splitlines(), 1):
        assert f"L{n}" in shown or not line


def test_a_page_leads_to_its_sections_and_its_file(site):
    """Those that it has; the first link of the file is to its first line."""
    strip = re.search(r'<p class="jumps sections">(.*?)</p>', (site / of_method("fedsr")).read_text())[1]
    assert re.findall(r'href="([^"]*)">([^<]*)', strip) == [
        ("#what-it-does", "What it does"), ("#who-keeps-and-sends-what", "Who keeps and sends what"),
        ("#code", "The paper beside the code"),
        ("#where-paper-official-code-and-this-file-differ", "Where they differ"),
        ("#how-to-run-the-tables", "How to run"), ("#left-out", "Left out"), ("#coverage", "Coverage"),
        ("../errata.html#fedsr", "Errata"), ("../../results/findings.html#fedsr-fedl2r-fedcmi", "Findings")]
    for page, name in (("fedsr", "fedsr.py"), ("fedprox", "baselines/fedprox.py")):
        assert f'<a href="{page}.html#L1">{name}</a>' in (site / of_method(page)).read_text()


def test_a_card_says_what_a_test_is_held_against_and_what_was_not_measured(site):
    text = (site / of_method("fedsr")).read_text()
    card = re.search(r'<article class="card" id="eqs-17-18">.*?</article>', text, flags=re.S)[0]
    assert "</a>: Against torch.distributions.kl_divergence, image by image.</li>" in card
    assert "<strong>Measured.</strong> No.</p>" in card


def test_a_formula_that_is_wrong_is_an_error():
    with pytest.raises(math_core.LatexError):
        build.formula(r"\frac{1}{2")


def test_code_is_shown_as_it_is(site):
    """Without its tags a page has the lines of its file."""
    text = (site / "tests" / "test_fdse_official.py.html").read_text()
    shown = []
    for line in re.findall(r'<span class="line[^>]*><a [^>]*>\d+</a>(.*?)\n</span>', text, flags=re.S):
        shown.append(unescape(re.sub(r"<[^>]*>", "", line)))
    assert shown == (ROOT / "tests" / "test_fdse_official.py").read_text().splitlines()


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
            wide = opened.tab.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, page
            too_wide = opened.tab.evaluate(
                "[...document.querySelectorAll('.math, .line, pre, .card')]"
                ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.closest('[id]').id)")
            assert too_wide == [], page
        assert opened.complaints == []


@pytest.mark.browser
@pytest.mark.parametrize("method", METHODS)
def test_formulas_are_drawn(browser, site, method):
    with Opened(browser, site, of_method(method), 390) as opened:
        heights = opened.tab.evaluate(
            "[...document.querySelectorAll('math')].map(e => e.getBoundingClientRect().height)")
        assert len(heights) == len(equations.table(method).entries)
        assert min(heights) > 5
        fractions = opened.tab.evaluate(
            "[...document.querySelectorAll('mfrac')].map(e => [e.children[0].getBoundingClientRect().bottom, "
            "e.children[1].getBoundingClientRect().top])")
        assert fractions
        assert all(numerator <= denominator + 2 for numerator, denominator in fractions)


def background(tab, selector: str) -> str:
    return tab.evaluate(f"getComputedStyle(document.querySelector('{selector}')).backgroundColor")


def border_of(tab, selector: str) -> str:
    return tab.evaluate(f"getComputedStyle(document.querySelector('{selector}')).borderTopColor")


@pytest.mark.browser
def test_pointing_at_an_equation_marks_its_lines(browser, site):
    """So does a click, which stays; and a line that is pointed at marks its equation."""
    with Opened(browser, site, of_method("fdse")) as opened:
        tab = opened.tab
        plain = background(tab, ".line.e-eq-9")
        tab.hover("#eq-9 h3")
        marked = background(tab, ".line.e-eq-9")
        assert marked != plain
        assert background(tab, "tr.e-eq-9") == background(tab, "#eq-9 .tests a") == marked
        assert background(tab, ".line.e-eq-8") == plain
        border = border_of(tab, "#eq-8")
        tab.hover(".line.e-eq-8")
        assert border_of(tab, "#eq-8") != border
        assert background(tab, ".line.e-eq-9") == plain
        tab.click("#eq-9 h3 a")
        tab.hover("h1")
        assert background(tab, ".line.e-eq-9") == marked


@pytest.mark.browser
@pytest.mark.parametrize("script", [True, False])
@pytest.mark.parametrize("anchor", ["eq-8", "folded", "rounds", "coverage"])
def test_anchors_land(browser, site, anchor, script):
    """Also at a line that is folded; with scripts switched off too."""
    first, _ = equations.code("common.py", "fdse").spans["rounds"]
    settings, _ = equations.code("fdse.py", "fdse").spans["Args"]
    anchor = {"folded": f"L{settings}", "rounds": f"common-L{first}"}.get(anchor, anchor)
    with Opened(browser, site, of_method("fdse"), java_script_enabled=script) as opened:
        opened.tab.goto(f"{opened.address}#{anchor}")
        box = opened.tab.locator(f"#{anchor}").bounding_box()
        assert box and -1 <= box["y"] < 900 and box["height"] > 0
