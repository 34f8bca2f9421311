"""The pages of docs/build.py: every equation is beside its lines, links are checked, nothing is fetched from
elsewhere, colours can be read. In a browser, where there is one (-m browser): pages open, formulas are drawn,
nothing is wider than a phone, the search finds."""

import json
import math
import re
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import fdse
import fedgala
from docs import equations
from docs.equations import METHODS, ROOT
from reproduce import claims_pages
from tests.pages import Opened, Read

import pytest
import torch
from markupsafe import escape

for library in ("markdown_it", "pygments", "math_core"):
    pytest.importorskip(library, reason="needs `pip install -r requirements-docs.txt`")

from docs import answers, methods_pages  # noqa: E402
from docs.pages import Site, clause, symbols  # noqa: E402
from plumbing.errors import UserError  # noqa: E402

LONGEST = 60_000  # pixels of a page, on a phone
SIZE, OF_A_RUN = 5e6, 6e3  # bytes of all pages: without a run, and more for each that is on record


@pytest.fixture(scope="module")
def pages(site) -> dict[str, Read]:
    return {str(path.relative_to(site)): Read(path) for path in site.rglob("*.html")}


def of_method(method: str) -> str:
    return f"docs/methods/{method}.html"

def words_of(html: str) -> str:
    """What a reader sees, in one line."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def test_every_claim_has_its_gain_printed_and_measured_and_its_setting(site, pages):
    """On its method's page, on that of all results, and the first one on the first page. A dot is hollow
    where data or scale are not the paper's."""
    assert pages["index.html"].formulas == len(METHODS)
    for method, claims in answers.read_answers().items():
        pages_with = {"index.html": claims[:1], of_method(method): claims, "results/README.html": claims}
        for page, shown in pages_with.items():
            text = (site / page).read_text()
            for claim, one in answers.by_claim(shown):
                row = next(row for row in re.findall(r"<tr>.*?</tr>", text, flags=re.S)
                           if f'<th scope="row">{escape(claim.claim.says)}' in row)
                words = f"{claims_pages.gain_words(one)} , printed {claim.printed:+.1f}"
                assert words in words_of(row) and one.specification.dataset in row
                assert one.specification.other_data == "" or "Not the paper's data or scale" in words_of(row)
                assert row.count("<circle") == bool(one.gains)
                assert row.count("hollow") == bool(one.specification.other_data)


def test_a_learning_curve_is_the_mean_over_seeds_and_targets():
    """Of the rounds that all runs have; or by the megabytes that travelled until then, up and down."""
    def record(*values):
        return {"args": {"target": "d0"}, "bytes": {"up_per_round": 2e6, "down_per_round": 1e6},
                "curve": {"round": [1, 2, 4], "AVG": values}}
    first = record(0.1, 0.2, 0.3)
    cases = {"a": [{0: first, 1: record(0.3, 0.4, 0.5)}], "b": [{0: first, 1: record(0.3, None, 0.5)}]}
    one = SimpleNamespace(claim=SimpleNamespace(methods=["a", "b"], metric="best/AVG"), gains={0: 1, 1: 1},
                          specification=SimpleNamespace(part=""), cases=cases)
    curves = answers.learning(one) | {"MB": answers.learning(one, megabytes=True)["b"]}
    assert {name: dict(points) for name, points in curves.items()} == {
        "a": pytest.approx({1: 20, 2: 30, 4: 40}), "b": pytest.approx({1: 20, 4: 40}),
        "MB": pytest.approx({3: 20, 12: 40})}


def test_greek_letters_stand_as_signs_in_prose():
    text = "Delta theta_u,k<1, the sum, sum_j of lambda; dfe_bias, --tau, BN_DSE"
    signs = "Δ θ<sub>u,k</sub>&lt;1, the sum, Σ<sub>j</sub> of λ; dfe_bias, --tau, BN<sub>DSE</sub>"
    assert symbols(text) == signs


def test_the_first_clause_stands_before_what_unfolds():
    assert clause("By Eq. (3) and `a. b` (see c; d). Then.") == ("By Eq. (3) and `a. b` (see c; d).", "Then.")


@pytest.mark.parametrize("method", METHODS)
def test_a_note_has_the_table_of_its_equations(method):
    """As docs/equations/ has it: `python docs/build.py` writes it."""
    assert methods_pages.with_table(method) == (ROOT / "docs" / "methods" / f"{method}.md").read_text()


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
    played = {of_method(name) for name in ("fdse", "fedgala")}  # by docs/interactive.js
    for page, read in pages.items():
        assert read.scripts == 1 + (page in played)
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
            assert (kind in entry) == (f"<em>{heading}:</em>" in cards[equations.slug(entry["tag"])])
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
            assert opened.tab.evaluate("document.documentElement.scrollHeight") < LONGEST, page
        assert opened.complaints == []


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", ["index.html", of_method("fdse"), "results.html", "results/claims/fdse.html",
                                  "cells/fdse-1.html", "docs/start.html", of_method("fedgala")])
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
        for word in ("theta_v", "θv"):
            opened.tab.locator("input").first.fill(f"{word} dse modules")
            assert "θv" in opened.tab.locator(".found").inner_text()
        opened.tab.keyboard.press("Escape")
        assert opened.tab.locator(".found a").count() == 0
        assert opened.complaints == []


@pytest.mark.browser
def test_the_played_equations_compute_what_python_does(browser, site):
    """On random numbers, and where updates or changes are 0, opposite or alike."""
    generator = torch.Generator().manual_seed(0)
    cases = [torch.randn(3, 2, generator=generator, dtype=torch.float64) for _ in range(200)]
    for case in ([[1, 0], [-1, 0], [0, 0]], [[0, 3], [0, 0], [0, 0]], [[0, 0]] * 3, [[1, 2]] * 3):
        cases.append(torch.tensor(case, dtype=torch.float64))
    with Opened(browser, site, of_method("fdse")) as opened:
        for delta in cases:
            found = opened.tab.evaluate("delta => consensus(delta)", delta.tolist())
            assert found["step"] == pytest.approx(fdse.consensus(delta).tolist(), abs=1e-9)
            assert sum(found["u"]) == pytest.approx(float(delta.any()))
    with Opened(browser, site, of_method("fedgala")) as opened:
        for i, g in enumerate(cases):
            change, tau, sign = cases[i - 1], math.sin(i), ("paper", "descent")[i % 2]
            of_layers = [{str(l): vector for l, vector in enumerate(of)} for of in (g, change)]
            bad = fedgala.unaligned(*of_layers, [["0"], ["1"], ["2"]], tau, sign)
            words = "([g, change, tau, sign]) => unaligned(g, change, tau, sign)"
            assert opened.tab.evaluate(words, [g.tolist(), change.tolist(), tau, sign]) == bad.tolist()


@pytest.mark.browser
@pytest.mark.parametrize("method, words", [("fdse", "against client 3"), ("fedgala", "-0.24, discarded")])
def test_an_equation_is_played_with_by_pointer_and_keys(browser, site, method, words):
    with Opened(browser, site, of_method(method), 390) as opened:
        says = opened.tab.locator(".play figcaption")
        handle = opened.tab.locator(".play [role=slider]").nth(1)
        texts = [says.inner_text()]
        assert words in texts[0]
        handle.scroll_into_view_if_needed()
        box = handle.bounding_box()
        opened.tab.mouse.move(box["x"] + 5, box["y"] + 5)
        opened.tab.mouse.down()
        opened.tab.mouse.move(box["x"] - 40, box["y"] - 30, steps=3)
        opened.tab.mouse.up()
        texts.append(says.inner_text())
        handle.focus()
        for _ in range(6):
            opened.tab.keyboard.press("ArrowLeft")
        texts.append(says.inner_text())
        assert len(set(texts)) == 3
        assert opened.complaints == []


def luminance(colour: str) -> float:
    """Of #rrggbb, relative, by WCAG 2."""
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1])
def test_text_has_the_contrast_that_wcag_asks_for(scheme):
    """4.5 for every colour of text on every ground that it stands on, 3 for what is drawn, light and dark."""
    css = (ROOT / "docs" / "page.css").read_text()
    pairs = re.findall(r"--([a-z0-9-]+): light-dark\((#\w+), (#\w+)\)", css)
    colours = {name: pair[scheme] for name, *pair in pairs}
    grounds = {"back": ["text", "soft", "accent"], "differs": ["text", "soft", "accent"],
               "measured": ["text", "soft", "accent"],
               "panel": ["text", "soft", "accent", "keyword", "string", "comment", "number", "name"]}
    graphics = ["agrees", "unclear", "differs-sq", "untested", "laptop", "edge", "accent", "c1", "c2", "c3"]
    expected = [(ground, word, 4.5) for ground, words in grounds.items() for word in words]
    for ground, word, least in expected + [("back", word, 3) for word in graphics]:
        low, high = sorted([luminance(colours[word]), luminance(colours[ground])])
        assert (high + 0.05) / (low + 0.05) >= least, (word, ground)
