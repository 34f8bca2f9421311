"""The pages of docs/build.py: every equation is beside its lines, links are checked, nothing is fetched from
elsewhere, colours can be read. In a browser, where there is one (-m browser): pages open, formulas are drawn,
nothing is wider than a phone, the search finds."""

import json
import math
import re
from html import unescape
from pathlib import Path

import fdse
import fedgala
import fedsr
from docs import equations
from docs.equations import METHODS, ROOT
from reproduce import claims_pages
from reproduce.drawing import OTHERS, PALETTE
from tests.conftest import RUNS, stops
from tests.pages import opened, words_of

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from docs import methods_pages
from docs.pages import Site

LONGEST = 60_000  # pixels of a page, on a phone
SIZE, OF_A_RUN = 5e6, 6e3  # bytes of all pages: without a run, and more for each that is on record


@pytest.fixture(scope="module")
def pages(site) -> dict[str, str]:
    return {str(path.relative_to(site)): path.read_text() for path in site.rglob("*.html")}


def of_method(method: str) -> str:
    return f"docs/methods/{method}.html"


def test_every_claim_has_its_gain_on_its_page(pages):
    """The first one also on its method's page."""
    assert pages["index.html"].count("<math") == len(METHODS)
    for method, claims in methods_pages.read_answers().items():
        page = words_of(pages[f"results/claims/{method}.html"])
        for claim in claims:
            assert str(claim.claim.says) in page and f"{claim.printed:+.1f}" in page
            for one in claim.measured:
                if one.gains:
                    assert claims_pages.gain_words(one) in page
        verdict = claims_pages.sentence_of(claims[0]).partition("**")[2].partition("**")[0]
        assert verdict in words_of(pages[of_method(method)])


@pytest.mark.parametrize("method", METHODS)
def test_a_note_has_the_table_of_its_equations(method):
    """As equations.toml has it: `python docs/build.py` writes it."""
    assert methods_pages.with_table(method) == (ROOT / "papers" / method / "differences.md").read_text()


@pytest.mark.parametrize("link", ["gone.html", "#gone", "page.html#gone"])
def test_a_link_that_leads_nowhere_ends_the_build(tmp_path, link):
    made = Site(tmp_path)
    made.write(Path("page.html"), "file.html", "Page", note=Path("x.md"), text="# x", file=None)
    made.links = {"page.html": [link]}
    stops(f"1 links of the pages lead nowhere: page.html: {link}", made.finish)
    made.links = {"page.html": ["#x", "page.html#x", "https://example.org"]}
    made.finish()


def test_the_site_is_small_and_loads_nothing_from_elsewhere(site, pages):
    size = SIZE + OF_A_RUN * len(RUNS.read_text().splitlines())
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < size
    for text in pages.values():
        assert text.count("<script") == 1 + ('class="play"' in text)
        assert not re.search(r'<(?:img|script|link)[^>]* (?:src|href)="[^"]*//', text)
        ids = re.findall(r' id="([^"]*)"', text)
        assert len(ids) == len(set(ids))


def test_the_search_knows_sections_and_their_words(site):
    words = (site / "search.js").read_text()
    found = {address: text for _, _, address, text, _ in json.loads(words.partition(" = ")[2])}
    assert "a negative product with it" in found["docs/methods/fdse.html#eq-8"]
    assert "<" not in found["docs/start.html#the-problem"]


@pytest.mark.parametrize("method", METHODS)
def test_each_equation_is_beside_its_lines_and_tests(site, pages, method):
    of, text = equations.table(method), pages[of_method(method)]
    formulas = [latex for entry in of.entries for latex in equations.formulas(entry, of)]
    assert text.count("<math") == len(formulas) + 1  # that of its card
    cards = dict(re.findall(r'<article class="row">.*?<h3 id="([^"]*)">(.*?)</article>', text, flags=re.S))
    assert len(cards) == len(of.entries)
    for entry in of.entries:
        card = cards[equations.slug(entry["tag"])]
        for kind, heading in equations.KINDS.items():
            assert (kind in entry) == (f"<em>{heading}:</em>" in card)
        for file, _, lines in equations.located(entry, of) + equations.located(entry, of, "official"):
            address = f"../../{file}.html"
            assert {f"{address}#L{n}" for n in lines} <= set(re.findall(r'href="([^"]*)"', card))
        for test in entry["tests"]:
            assert f'<a href="#{equations.slug(test)}">' in card
    used, whole, _ = equations.counts(of)
    assert f"{whole} of the {used} equations and lines that the method uses are shown with their code" in text


@pytest.mark.parametrize("method", METHODS)
def test_a_test_can_be_read_and_run(pages, method):
    """Its lines are those of its file, the command has its name."""
    of = equations.table(method)
    for test in {test for entry in of.entries + of.parts for test in entry["tests"]}:
        file, name = equations.file_of(test), test.partition("::")[2]
        _, _, rest = pages[of_method(method)].partition(f'<details id="{equations.slug(test)}">')
        shown = re.sub(r'<span class="number">\d+</span>|<[^>]*>', "", rest.partition("</details>")[0])
        first, last = equations.code(file, method).spans[name]
        lines = (ROOT / file).read_text().splitlines()[first - 1:last]
        assert unescape(shown).endswith(f"python -m pytest {file} -k {name}\n" + "\n".join(lines) + "\n")


def test_code_is_shown_as_it_is(site):
    """Without its tags a page has the lines of its file."""
    text = (site / "common.py.html").read_text()
    lines = re.findall(r'<span class="line[^>]*><a [^>]*>\d+</a>(.*?\n)</span>', text, flags=re.S)
    assert unescape(re.sub(r"<[^>]*>", "", "".join(lines))) == (ROOT / "common.py").read_text()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_pages_open_and_nothing_is_wider_than_the_window(browser, site, pages, width, scheme):
    with opened(browser, site, "index.html", width, color_scheme=scheme) as (tab, complaints):
        for page in sorted(pages):
            if not page.startswith(("docs/", "index", "papers/", "results/")):
                continue
            tab.goto(f"file://{site / page}")
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, page
            assert tab.evaluate("document.documentElement.scrollHeight") < LONGEST, page
        assert complaints == []


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", ["index.html", of_method("fdse"), "results/README.html",
                                  "results/claims/fdse.html", "results/tables/fdse-1.html", "docs/start.html",
                                  of_method("fedgala")])
def test_axe_finds_no_violation(browser, site, page, scheme):
    """Contrast, headings, names of what can be reached by the keyboard: WCAG 2, levels A and AA."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with opened(browser, site, page, 390, color_scheme=scheme) as (tab, complaints):
        found = axe.run(tab, options={"runOnly": ["wcag2a", "wcag2aa"]})
        assert found.violations_count == 0, found.generate_report()


@pytest.mark.browser
def test_the_search_finds_and_escape_closes_it(browser, site):
    """By the keyboard, from a page in a folder."""
    with opened(browser, site, of_method("fdse")) as (tab, complaints):
        tab.keyboard.press("/")
        tab.wait_for_function("typeof SECTIONS !== 'undefined'")
        tab.keyboard.type("consensus maximization")
        first = tab.locator(".found a").first
        assert "Eq. (8)" in first.inner_text()
        assert first.get_attribute("href") == "../../docs/methods/fdse.html#eq-8"
        for word in ("theta_v", "θv"):
            tab.locator("input").first.fill(f"{word} dse modules")
            assert "θv" in tab.locator(".found").inner_text()
        for word, address in (("temperature", "docs/methods/fdse.html#eq-9"),  # of this page before others
                              ("results", "results/README.html")):  # a heading before all
            tab.locator("input").first.fill(word)
            assert first.get_attribute("href") == f"../../{address}"
        tab.keyboard.press("Escape")
        assert tab.locator(".found a").count() == 0
        assert complaints == []


@pytest.mark.browser
def test_a_leaderboard_is_sorted_by_its_heads(browser, site):
    """By a click, and by the keyboard; a screen reader is told."""
    with opened(browser, site, "results/README.html") as (tab, complaints):
        table = tab.locator("#leaderboards ~ .wide table").first
        assert table.locator("th").last.get_attribute("aria-sort") == "descending"
        head = table.locator("th").nth(2)
        head.locator("button").click()
        tab.keyboard.press("Enter")  # turns it round
        values = [float(words.split()[0]) for words in table.locator("td:nth-child(3)").all_inner_texts()]
        assert values == sorted(values) and head.get_attribute("aria-sort") == "ascending"


def terms(p: torch.Tensor, r: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """FedSR's two terms in one dimension, weighted; two z with the mean and the deviation of p(z|x)."""
    z = p[0] + p[1] * torch.tensor([[1.0], [-1.0]])
    kl = fedsr.gaussian_kl(*p.view(2, 1, 1), *r.view(2, 1, 1))
    return weights[0] * fedsr.l2r(z) + weights[1] * kl[0]


@pytest.mark.browser
def test_the_played_equations_compute_what_python_does(browser, site):
    """On random numbers, and where updates or changes are 0, opposite or alike. At the least sum of FedSR's
    terms their gradient is 0."""
    torch.manual_seed(0)
    odd = [[[1, 0], [-1, 0], [0, 0]], [[0, 3], [0, 0], [0, 0]], [[0, 0]] * 3, [[1, 2]] * 3]
    cases = torch.cat([torch.randn(200, 3, 2, dtype=torch.float64), torch.tensor(odd).double()])
    with opened(browser, site, of_method("fdse")) as (tab, complaints):
        for i, delta in enumerate(cases):
            step = tab.evaluate("delta => consensus(delta).step", delta.tolist())
            assert step == pytest.approx(fdse.consensus(delta).tolist(), abs=1e-9)
            tau = 10 ** (3 * math.sin(i))
            theta = tab.evaluate("given => personalize(...given).next", [delta.tolist(), tau])
            assert np.array(theta) == pytest.approx(fdse.personalize(delta, tau)[0].numpy(), abs=1e-9)
            p, r, weights = delta.abs() + 0.1
            p[0] -= 1
            found = tab.evaluate("given => simplicity(...given)", [p.tolist(), r.tolist(), *weights.tolist()])
            assert found["sum"] == pytest.approx(terms(p, r, weights).item(), rel=1e-6)
            best = torch.tensor(found["best"], requires_grad=True)
            assert torch.autograd.grad(terms(best, r, weights), best)[0].abs().max() < 1e-4
        for i, (g, change) in enumerate(zip(cases, cases[1:])):
            tau, sign = math.sin(i), ("paper", "descent")[i % 2]
            bad = fedgala.unaligned(dict(enumerate(g)), dict(enumerate(change)), [[0], [1], [2]], tau, sign)
            given = [g.tolist(), change.tolist(), tau, sign]
            assert tab.evaluate("given => unaligned(...given)", given) == bad.tolist()


@pytest.mark.browser
@pytest.mark.parametrize("method, play, words", [
    ("fdse", "consensus", "against client 3"), ("fdse", "personalize", "0.57, 0.56, 0.96"),
    ("fedsr", "simplicity", "the noise drowns the mean"), ("fedgala", "unaligned", "-0.24, discarded")])
def test_an_equation_is_played_with_by_pointer_and_keys(browser, site, method, play, words):
    with opened(browser, site, of_method(method), 390) as (tab, complaints):
        figure = tab.locator(f"[data-play={play}]")
        says, handle = figure.locator("figcaption"), figure.locator("[role=slider]").nth(1)
        first = says.inner_text()
        assert words in first and "Drag" in first
        handle.drag_to(figure.locator("svg"))
        dragged = says.inner_text()
        handle.press("ArrowUp")
        assert len({first, dragged, says.inner_text()}) == 3
        assert complaints == []


def test_a_line_of_a_figure_can_be_seen_on_white():
    """With a contrast of 3, by WCAG 2."""
    for colour in (*PALETTE.values(), *OTHERS):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        assert 1.05 / (np.dot((0.2126, 0.7152, 0.0722), linear) + 0.05) > 3
