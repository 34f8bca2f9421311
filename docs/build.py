"""Static pages that show each method beside its code: `python docs/build.py`, then open site/index.html.

    pip install -r requirements-docs.txt
    python docs/build.py                  # writes the notes (docs/notes.py) and the pages
    python docs/build.py --times          # and how long the runs would take that are not recorded
    python docs/build.py --notes          # the notes alone, which needs nothing installed

A method's page has, left, its note and each equation of docs/equations/<method>.toml, right, its file, and
equations stand beside the code that computes them. Pointing at an equation marks its lines, a click keeps
them marked. A style sheet does that: there is no script, and nothing is fetched from anywhere. A baseline's
page has its note beside its file. What notes link to, tests, findings and tables, comes along. The results
(site/results.html) are in docs/results_page.py.
"""

import argparse
import ast
import functools
import os
import re
import shutil
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `python docs/build.py` has docs/ there

from docs import equations, notes  # noqa: E402
from docs.equations import Table  # noqa: E402

TITLES = {"fedavg": "FedAvg", "fedsr": "FedSR", "fedadg": "FedADG", "fedgala": "FedGaLA", "fedcir": "FedCiR",
          "fdse": "FDSE"}
RUNS = Path("docs/runs.md")
STYLE = Path(__file__).parent / "page.css"


# Names


def slug(tag: str) -> str:
    """A tag as an anchor: "Alg. 1 line 7" -> alg-1-line-7."""
    return re.sub(r"[^a-z0-9]+", "-", tag.lower()).strip("-")


def page_of(source: Path) -> Path:
    """Where a file of the repository is in the site, both relative to their roots."""
    if source.suffix == ".md":
        return source.with_suffix(".html")
    if source.suffix == ".py":
        note = note_of(source)
        if note.exists():
            return page_of(note.relative_to(ROOT))
        return source.with_name(source.name + ".html")
    return source


def note_of(source: Path) -> Path:
    """The note of a method's file."""
    return notes.NOTES / f"{source.stem}.md"


def source_of(note: Path) -> Path:
    """The file of a method's note, relative to the root."""
    if note.stem in equations.METHODS:
        return Path(f"{note.stem}.py")
    return Path("baselines") / f"{note.stem}.py"


def link(page: Path, target: Path, anchor: str = "") -> str:
    """The address of a file's page, seen from another page."""
    path = os.path.relpath(page_of(target), page.parent)
    if anchor:
        return f"{path}#{anchor}"
    return path


def heading_anchor(heading: str) -> str:
    """The anchor of a heading: "What it does" -> what-it-does."""
    words = re.sub(r"[`*\\]", "", heading).lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


# Markdown and formulas


@functools.cache
def parser():
    from markdown_it import MarkdownIt
    return MarkdownIt("commonmark").enable("table")


@functools.cache
def converter():
    from math_core import LatexToMathML
    return LatexToMathML()


def formula(latex: str) -> str:
    """MathML of a displayed formula."""
    mathml = converter().convert_with_local_state(latex.strip(), displaystyle=True)
    return f'<div class="math">{mathml}</div>'


class Site:
    """The pages, and what they link to."""

    def __init__(self, out: Path):
        self.out = out
        self.waiting, self.seen = [], set()
        self.anchors = {}  # {page: its anchors}

    def add(self, source: Path) -> None:
        """A file of the repository, relative to its root, that the site needs."""
        if source not in self.seen:
            self.seen.add(source)
            self.waiting.append(source)

    def markdown(self, text: str, source: Path, page: Path) -> str:
        """HTML of Markdown from a source; links lead to the pages of their targets."""
        tokens = parser().parse(text)
        for i, token in enumerate(tokens):
            if token.type == "heading_open":
                token.attrSet("id", self.anchor(page, tokens[i + 1].content))
            for child in token.children or []:
                self.relink(child, source, page)
        html = []
        for token in split_at_fences(tokens):
            if isinstance(token, list):
                html.append(parser().renderer.render(token, parser().options, {}))
            elif token.info == "math":
                html.append(formula(token.content))
            else:
                html.append(f"<pre>{escape(token.content)}</pre>\n")
        made = "".join(html).replace("<table>", '<div class="wide"><table>')
        return made.replace("</table>", "</table></div>")

    def anchor(self, page: Path, heading: str) -> str:
        """The anchor that GitHub gives a heading; a second one of the same words ends in -1."""
        name = heading_anchor(heading)
        taken = self.anchors.setdefault(page, [])
        taken.append(name)
        before = taken.count(name) - 1
        return f"{name}-{before}" if before else name

    def relink(self, token, source: Path, page: Path) -> None:
        name = {"link_open": "href", "image": "src"}.get(token.type)
        if not name or re.match(r"[a-z]+:|#", token.attrGet(name)):
            return
        path, _, anchor = token.attrGet(name).partition("#")
        target = (ROOT / source.parent / path).resolve()
        if target.is_dir():
            target = target / "README.md"
        if not target.is_file():
            del token.attrs[name]
            return
        target = target.relative_to(ROOT)
        self.add(target)
        if target.suffix == ".py" and page_of(target) == page:
            anchor = anchor or "L1"  # the file of a method's note is on the same page
        token.attrSet(name, link(page, target, anchor))

    def write(self, page: Path, title: str, body: str, style: str = "") -> None:
        path = self.out / page
        path.parent.mkdir(parents=True, exist_ok=True)
        home = os.path.relpath("index.html", page.parent)
        path.write_text(PAGE.format(title=escape(title), style=STYLE.read_text() + style, home=home,
                                    nav=self.nav(page), body=body))

    def nav(self, page: Path) -> str:
        links = []
        for method, title in TITLES.items():
            here = ' aria-current="page"' if page.stem == method else ""
            address = link(page, Path("docs/methods") / f"{method}.md")
            links.append(f'<a href="{address}"{here}>{title}</a>')
        here = ' aria-current="page"' if page.stem == "results" else ""
        links.append(f'<a href="{os.path.relpath("results.html", page.parent)}"{here}>Results</a>')
        return "\n".join(links)


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} - CleanFDG</title>
<style>
{style}
</style>
</head>
<body>
<nav><a class="home" href="{home}">CleanFDG</a>
{nav}
</nav>
<main>
{body}
</main>
</body>
</html>
"""


def split_at_fences(tokens: list) -> list:
    """Lists of tokens, and the fences between them by themselves."""
    parts = [[]]
    for token in tokens:
        if token.type == "fence":
            parts += [token, []]
        else:
            parts[-1].append(token)
    return parts


def sections(text: str) -> dict[str, str]:
    """{heading: text} of a note; what is before the first has the heading ""."""
    parts = re.split(r"^## (.*)\n", text, flags=re.M)
    found = {"": parts[0]}
    for heading, body in zip(parts[1::2], parts[2::2]):
        found[heading] = body
    return found


# Code


@functools.cache
def coloured(path: Path) -> list[str]:
    """The lines of a Python file as HTML with a class for each kind of token."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer
    text = (ROOT / path).read_text()
    return highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).split("\n")


def code(path: Path, first: int, last: int, marks: dict[int, list[str]], prefix: str = "L") -> str:
    """Lines of a file; each number is a link to its line. `marks`: {line: the equations it is of}."""
    lines = coloured(path)
    html = []
    for n in range(first, last + 1):
        kinds = " ".join(["line"] + [f"e-{mark}" for mark in marks.get(n, [])])
        html.append(f'<span class="{kinds}" id="{prefix}{n}"><a class="number" href="#{prefix}{n}">{n}</a>'
                    f"{lines[n - 1]}\n</span>")
    return f'<pre class="code">{"".join(html)}</pre>'


def chunks(text: str, whole: set[str]) -> list[tuple[int, int, str]]:
    """(first line, last line, name) of the parts of a file: what stands before its first class or function,
    each function, each class up to its first method, each method. Comments before a part belong to it. The
    classes in `whole` are one part."""
    lines = text.splitlines()
    starts = [(1, "docstring and imports")]
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            starts.append((node.lineno, node.targets[0].id))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            starts.append((node.lineno - len(node.decorator_list), node.name))
        if isinstance(node, ast.ClassDef) and node.name not in whole:
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    starts.append((part.lineno - len(part.decorator_list), f"{node.name}.{part.name}"))
        if isinstance(node, ast.If):
            starts.append((node.lineno, "main"))
    begun = []
    for line, name in starts:
        while line > 1 and re.match(r"\s*(#|$)", lines[line - 2]):
            line -= 1
        begun.append((line, name))
    ends = [line - 1 for line, _ in begun[1:]] + [len(lines)]
    found = []
    for (first, name), last in zip(begun, ends):
        while not lines[first - 1]:
            first += 1
        found.append((first, last, name))
    return found


# The page of a method


def method_page(site: Site, method: str) -> None:
    of = equations.table(method)
    note = Path("docs/methods") / f"{method}.md"
    page = page_of(note)
    parts = sections((ROOT / note).read_text())
    site.add(Path("common.py"))
    used, whole, unused = equations.counts(of)
    strip = strip_of_sections(site, page, [heading for heading in parts if heading])
    body = [site.markdown(parts.pop(""), note, page), strip,
            f'<p class="sum">{whole} of {used} equations and lines located and tested '
            f'(<a href="#coverage">which</a>); {unused} of the paper are not computed.</p>']
    if method != "fedavg":
        body.append(f'<p>The numbers of its paper, and what was measured here: '
                    f'<a href="{os.path.relpath("results.html", page.parent)}#{method}">results</a>.</p>')
    if "laptop scale" in (ROOT / note).read_text():
        site.add(RUNS)
        body.append(f'<p>Laptop scale: smaller images and fewer rounds than the paper, minutes on two cores '
                    f'(<a href="{link(page, RUNS)}">runs</a>).</p>')
    body.append(jumps(of))
    left = []
    for heading in ("What it does", "Who keeps and sends what"):
        left.append(site.markdown(f"## {heading}\n{parts.pop(heading)}", note, page))
    equation_part = parts.pop("Equations, and the tests that check them")
    says = site.markdown(of.says, note, page)
    body += ['<h2 id="code">The paper beside the code</h2>', f'<div class="says">{says}</div>']
    body += rows(site, of, page, "".join(left))
    _, _, how = equation_part.partition(notes.END)
    body += ['<div class="text">', site.markdown(how, note, page), "</div>", coverage(site, of, page)]
    body.append('<div class="text">')
    for heading, text in parts.items():
        body.append(site.markdown(f"## {heading}\n{text}", note, page))
    body.append("</div>")
    site.write(page, TITLES[method], "\n".join(body), marking(of))


def strip_of_sections(site: Site, page: Path, headings: list[str]) -> str:
    """A line of links to the sections of a page, and to what is said of the method elsewhere."""
    links = []
    for heading in headings:
        address, words = f"#{heading_anchor(heading)}", heading
        if heading.startswith("Equations") and page.stem in TITLES:
            address, words = "#code", "The paper beside the code"
        elif " differ" in heading:
            words = "Where they differ"
        elif heading.startswith("How to run"):
            words = "How to run"
        links.append(f'<a href="{address}">{escape(words)}</a>')
    if page.stem in TITLES:
        links.append('<a href="#coverage">Coverage</a>')
    for source, words in ((Path("docs/errata.md"), "Errata"), (Path("results/findings.md"), "Findings")):
        for heading in sections((ROOT / source).read_text()):
            if heading.partition(",")[0] == TITLES.get(page.stem):
                site.add(source)
                links.append(f'<a href="{link(page, source, heading_anchor(heading))}">{words}</a>')
    return f'<p class="jumps sections">{" ".join(links)}</p>'


def jumps(of: Table) -> str:
    """A line of links to all equations of a page."""
    links = [f'<a href="#{slug(entry["tag"])}">{escape(entry["tag"])}</a>' for entry in of.entries]
    return f'<p class="jumps">{" ".join(links)}</p>'


def rows(site: Site, of: Table, page: Path, beginning: str) -> list[str]:
    """The file in parts, each with its equations beside it; parts without any are folded."""
    file = Path(of.file)
    text = (ROOT / file).read_text()
    marks, homes = line_marks(of), homes_of(of)
    html, folded = [], []
    for first, last, name in chunks(text, {entry["place"][0] for entry in of.entries + of.parts} | {"Args"}):
        notes_here = [f'<div class="text">{beginning}</div>'] if first == 1 else []
        shown = {slug(entry["tag"]) for n in range(first, last + 1) for entry in homes.get(n, [])}
        if first > 1:
            notes_here += also(of, marks, shown, range(first, last + 1))
        if not shown and not notes_here:
            folded.append((first, last, name))
            continue
        html += fold(file, folded, marks)
        folded = []
        for start, end in cuts(first, last, homes):
            cards = [card(site, of, entry, page) for n in range(start, end + 1) for entry in homes.get(n, [])]
            if end == last:
                cards += notes_here
            html.append(row("".join(cards), code(file, start, end, marks), end - start, start > first))
    html += fold(file, folded, marks)
    return html + common_rows(site, of, page)


def cuts(first: int, last: int, homes: dict[int, list[dict]]) -> list[tuple[int, int]]:
    """A long part in pieces, so that each equation is beside its own lines."""
    starts = [first]
    if last - first >= 25:
        starts += [n for n in range(first + 1, last + 1) if n in homes]
    ends = [n - 1 for n in starts[1:]] + [last]
    return list(zip(starts, ends))


def also(of: Table, marks: dict[int, list[str]], shown: set[str], lines: range) -> list[str]:
    """Links to the equations of these lines that are shown elsewhere."""
    here = {mark for n in lines for mark in marks.get(n, [])} - shown
    links = []
    for entry in of.entries:
        name = slug(entry["tag"])
        if name in here:
            links.append(f'<a href="#{name}">{escape(entry["tag"])}</a>')
    if not links:
        return []
    return [f'<p class="also">Also here: {", ".join(links)}</p>']


def row(note: str, lines: str, height: int = 1000, goes_on: bool = False) -> str:
    """A note beside lines of code; code of fewer than 40 lines stays in sight while one scrolls."""
    kind = "row"
    if height < 40:
        kind += " short"
    if goes_on:
        kind += " goes-on"
    return f'<div class="{kind}"><div class="note">{note}</div><div>{lines}</div></div>'


def fold(file: Path, parts: list[tuple[int, int, str]], marks: dict[int, list[str]]) -> list[str]:
    """Parts without an equation, as one that opens at a click."""
    if not parts:
        return []
    first, last = parts[0][0], parts[-1][1]
    names = ", ".join(dict.fromkeys(name for _, _, name in parts))
    return [f'<details class="fold"><summary>Lines {first} to {last}: <code>{escape(names)}</code></summary>'
            f"{code(file, first, last, marks)}</details>"]


def common_rows(site: Site, of: Table, page: Path) -> list[str]:
    """The functions of common.py that have lines of the paper, beside these."""
    source = equations.code("common.py", of.method)
    places = {}
    for entry in of.entries:
        for place in entry["place"]:
            if place.startswith("common."):
                places.setdefault(place.removeprefix("common."), []).append(entry)
    html = []
    for name, entries in places.items():
        first, last = source.spans[name]
        marks = {}
        for entry in entries:
            for n in equations.lines_in(source, name, entry):
                marks.setdefault(n, []).append(slug(entry["tag"]))
        cards = "".join(card(site, of, entry, page) for entry in entries)
        html += [f"<h3>In common.py: {name}</h3>",
                 row(cards, code(Path("common.py"), first, last, marks, "common-L"), last - first)]
    return html


def line_marks(of: Table) -> dict[int, list[str]]:
    """{line of the method's file: the equations that it is of}"""
    marks = {}
    for entry in of.entries:
        for n in equations.lines_of(entry, of).get(of.file, []):
            marks.setdefault(n, []).append(slug(entry["tag"]))
    return marks


def homes_of(of: Table) -> dict[int, list[dict]]:
    """{line of the method's file: the entries and parts beside it}: the first line of their first place."""
    source = equations.code(of.file, of.method)
    homes = {}
    for entry in of.entries + of.parts:
        place = entry["place"][0]
        if place.startswith("common."):
            continue
        if place not in source.spans:  # PAPER
            line = source.text[:source.text.index(f"\n{place} = ")].count("\n") + 2
        elif entry in of.entries:
            line = min(equations.lines_in(source, place, entry))
        else:
            line, _ = source.spans[place]
        homes.setdefault(line, []).append(entry)
    return homes


def card(site: Site, of: Table, entry: dict, page: Path) -> str:
    """An equation, or a part without a number: formula, what it says, where it is, its tests."""
    note = Path("docs/methods") / f"{of.method}.md"
    if "latex" not in entry:
        return (f'<div class="card part"><p><b>{escape(entry["tag"])}</b> {escape(entry["says"])}</p>'
                f"{tests_list(site, entry, page)}</div>")
    name = slug(entry["tag"])
    html = [f'<article class="card" id="{name}">',
            f'<h3><a href="#{name}">{escape(entry["tag"])}</a> {escape(entry["name"])}</h3>',
            formula(entry["latex"]), site.markdown(entry["says"], note, page)]
    kinds = {heading: kind for kind, heading in equations.KINDS.items()}
    for heading, words in equations.remarks(entry).items():
        text = site.markdown(f"**{heading}.** {words}", note, page)
        html.append(f'<div class="{kinds[heading]}">{text}</div>')
    html += [f'<p class="where">{where(of, entry)}</p>', tests_list(site, entry, page), "</article>"]
    return "\n".join(html)


def where(of: Table, entry: dict) -> str:
    """Links to the lines of an entry, with the names of its places."""
    links = []
    for place in entry["place"]:
        file, name = equations.place_of(place, of)
        source = equations.code(file, of.method)
        prefix = "L" if file == of.file else "common-L"
        numbers = sorted(equations.lines_in(source, name, entry))
        spans = [f'<a href="#{prefix}{first}">{first if first == last else f"{first}-{last}"}</a>'
                 for first, last in spans_of(numbers)]
        links.append(f"<code>{escape(place)}</code> {', '.join(spans)}")
    return "; ".join(links)


def spans_of(numbers: list[int]) -> list[tuple[int, int]]:
    """[3, 4, 5, 9] -> (3, 5), (9, 9)"""
    spans = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], n)
        else:
            spans.append((n, n))
    return spans


def tests_list(site: Site, entry: dict, page: Path, with_words: bool = True) -> str:
    """Links to the tests of an entry. `with_words`: with what each is held against."""
    items = []
    for test in entry["tests"]:
        says = equations.test_says(test) if with_words else ""
        words = f": {escape(says)}" if says else ""
        items.append(f"<li>{test_link(site, test, page)}{words}</li>")
    return f'<ul class="tests">{"".join(items)}</ul>'


def test_link(site: Site, test: str, page: Path) -> str:
    file, _, name = test.partition("::")
    source = Path("tests") / f"{file}.py"
    site.add(source)
    address = link(page, source, f"L{equations.test_line(test)}")
    return f'<a href="{address}" title="tests/{file}.py">{escape(name)}</a>'


def coverage(site: Site, of: Table, page: Path) -> str:
    """A line for each equation: where it is, what tests it; and what is not computed, with the reason."""
    used, whole, unused = equations.counts(of)
    html = [f'<h2 id="coverage">{whole} of {used} equations and lines located and tested</h2>',
            '<table class="coverage"><thead><tr><th>Paper</th><th>Lines</th><th>Tests</th></tr></thead>',
            "<tbody>"]
    for entry in of.entries:
        name = slug(entry["tag"])
        html.append(f'<tr class="e-{name}"><td><a href="#{name}">{escape(entry["tag"])}</a> '
                    f'{escape(entry["name"])}</td><td>{where(of, entry)}</td>'
                    f"<td>{tests_list(site, entry, page, with_words=False)}</td></tr>")
    html.append("</tbody></table>")
    if of.unused:
        note = Path("docs/methods") / f"{of.method}.md"
        items = "\n".join(f"- {entry['tag']}: {entry['why']}" for entry in of.unused)
        html += [f'<div class="text"><p>Not computed, {unused} of the paper:</p>',
                 site.markdown(items, note, page), "</div>"]
    return "\n".join(html)


def marking(of: Table) -> str:
    """The style that marks lines, table row and card of an equation together."""
    rules = []
    for entry in of.entries:
        name = slug(entry["tag"])
        rules.append(f"main:has(#{name}:is(:hover, :target, :focus-within)) .e-{name} "
                     "{ background: var(--marked) }")
        rules.append(f"main:has(.e-{name}:hover) #{name} {{ border-color: var(--accent) }}")
    return "\n".join(rules)


# Other pages


def baseline_page(site: Site, note: Path) -> None:
    page = page_of(note)
    file = source_of(note)
    lines = len((ROOT / file).read_text().splitlines())
    parts = sections((ROOT / note).read_text())
    head = site.markdown(parts.pop(""), note, page) + strip_of_sections(site, page, list(parts))
    text = "".join(site.markdown(f"## {heading}\n{part}", note, page) for heading, part in parts.items())
    title = re.match(r"# (.*)", (ROOT / note).read_text()).group(1)
    body = head + row(f'<div class="text">{text}</div>', code(file, 1, lines, {}))
    site.write(page, title, body)


def index(site: Site) -> None:
    page = Path("index.html")
    rows = []
    for method, title in TITLES.items():
        of = equations.table(method)
        used, whole, unused = equations.counts(of)
        address = link(page, Path("docs/methods") / f"{method}.md")
        rows.append(f'<tr><td><a href="{address}">{title}</a></td><td>{whole} of {used}</td>'
                    f"<td>{unused}</td></tr>")
    links = []
    for note in baselines():
        title = re.match(r"# (.*)", (ROOT / note).read_text()).group(1)
        links.append(f'<a href="{link(page, note)}">{escape(title)}</a>')
    body = ["<h1>The methods beside their papers</h1>",
            "<p>Each page has the paper's equations and algorithm lines on the left, and the code that "
            "computes them on the right. Point at one to see the other.</p>",
            f"<p>{escape(equations.sentence())}</p>",
            site.markdown("New to the field: [start](docs/start.md). What papers contradict or leave out: "
                          "[errata](docs/errata.md).", page, page),
            '<p><a href="results.html">Results</a>: each published number, what was measured here, and its '
            "runs.</p>",
            "<table><thead><tr><th>Method</th><th>Equations and lines, located and tested</th>"
            "<th>Not computed</th></tr></thead>", f"<tbody>{''.join(rows)}</tbody></table>",
            f"<h2>Baselines</h2><p>{', '.join(links)}</p>"]
    site.write(page, "Methods", f'<div class="text">{"".join(body)}</div>')


def baselines() -> list[Path]:
    """The notes whose file is in baselines/."""
    found = []
    for note in sorted(notes.NOTES.glob("*.md")):
        if note.stem not in equations.METHODS and (ROOT / source_of(note)).exists():
            found.append(note.relative_to(ROOT))
    return found


def cells_link(source: Path, page: Path) -> str:
    """Above rendered results: where their numbers stand with their runs."""
    beside = ""
    if source.parent == Path("results/tables"):
        cells = Path("cells") / f"{source.stem.removesuffix('-laptop')}.html"
    elif source.parent == Path("results"):
        cells = Path("results.html")
        others = os.path.relpath("cells/other-runs.html", page.parent)
        beside = f'; <a href="{others}">the runs that no table has</a>'
    else:
        return ""
    return f'<p><a href="{os.path.relpath(cells, page.parent)}">Each number with its runs</a>{beside}</p>'


def file_page(site: Site, source: Path) -> None:
    """What a page links to: another note, a file of Python, or anything else as it is."""
    page = page_of(source)
    if source.suffix == ".md":
        html = cells_link(source, page) + site.markdown((ROOT / source).read_text(), source, page)
        site.write(page, source.stem, f'<div class="text">{html}</div>')
    elif source.suffix == ".py":
        lines = len((ROOT / source).read_text().splitlines())
        site.write(page, str(source), f"<h1>{source}</h1>{code(source, 1, lines, {})}")
    else:
        (site.out / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / source, site.out / page)


def build(out: Path, methods: tuple[str, ...] = equations.METHODS, times: bool = False) -> Site:
    """Writes the site: the methods' pages, the baselines', the results', and what these link to.

    `times`: with estimated times of runs that are not recorded."""
    from docs import results_page  # it needs torch, which the notes do without
    site = Site(out)
    for method in methods:
        method_page(site, method)
    for note in baselines():
        baseline_page(site, note)
    index(site)
    results_page.build(site, times)
    made = {Path("docs/methods") / f"{method}.md" for method in equations.METHODS} | set(baselines())
    made |= {source_of(note) for note in made}
    while site.waiting:
        source = site.waiting.pop()
        if source not in made:
            file_page(site, source)
    return site


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The flags."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the pages")
    arguments.add_argument("--notes", action="store_true", help="write the notes alone")
    arguments.add_argument("--times", action="store_true",
                           help="estimate the times of runs that are not recorded: a minute more")
    return arguments.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parsed(argv)
    for path in notes.write():
        print(f"wrote {path.relative_to(ROOT)}")
    if not args.notes:
        build(args.out, times=args.times)
        print(f"open {args.out / 'index.html'}")


if __name__ == "__main__":
    main()
