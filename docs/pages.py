"""The pages of docs/build.py: Markdown, formulas and code as HTML, and links from page to page."""

import functools
import os
import re
from collections import Counter
from pathlib import Path

from docs import equations
from docs.equations import ROOT
from docs.notes import NOTES, TEMPLATES

from markdown_it import MarkdownIt
from markupsafe import Markup
from math_core import LatexToMathML
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

TITLES = {"fedavg": "FedAvg", "fedsr": "FedSR", "fedadg": "FedADG", "fedgala": "FedGaLA", "fedcir": "FedCiR",
          "fdse": "FDSE"}
MARKDOWN = MarkdownIt("commonmark").enable("table")


def source_of(note: Path) -> Path:
    """The file of a method's note, relative to the root."""
    folder = Path("") if note.stem in equations.METHODS else Path("baselines")
    return folder / f"{note.stem}.py"


def page_of(source: Path) -> Path:
    """Where a file of the repository is in the site, both relative to their roots."""
    if source.suffix == ".md":
        return source.with_suffix(".html")
    note = NOTES / f"{source.stem}.md"
    if source.suffix == ".py" and note.exists() and source == source_of(note):
        return page_of(note.relative_to(ROOT))
    if source.suffix == ".py":
        return source.with_name(source.name + ".html")
    return source


def relative(target: Path | str, page: Path) -> str:
    """The address of a page, seen from another one."""
    return os.path.relpath(target, page.parent)


def heading_anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading: "What it does" -> what-it-does."""
    words = re.sub(r"[`*\\]", "", heading).lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def formula(latex: str) -> Markup:
    """MathML of a displayed formula; a mistake in it is an error."""
    return Markup(LatexToMathML().convert_with_local_state(latex.strip(), displaystyle=True))


@functools.cache
def coloured(path: Path) -> list[str]:
    """The lines of a Python file as HTML with a class for each kind of token."""
    text = (ROOT / path).read_text()
    return highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).rstrip("\n").split("\n")


def code(path: Path, numbers: list[int] | None = None, address: str = "") -> Markup:
    """Lines of a file, each with its number. A whole file has an anchor for each line; in a part of it the
    numbers lead to its page."""
    lines = coloured(path)
    html = []
    for n in numbers or range(1, len(lines) + 1):
        if numbers and html and n - 1 not in numbers:
            html.append('<span class="gap">...</span>')
        anchor = "" if numbers else f' id="L{n}"'
        html.append(f'<span class="line"{anchor}><a class="number" href="{address}#L{n}">{n}</a>'
                    f"{lines[n - 1]}\n</span>")
    return Markup(f'<pre class="code">{"".join(html)}</pre>')


class Site:
    """The pages, and what they link to."""

    def __init__(self, out: Path):
        self.out = out
        self.waiting, self.seen = [], set()
        self.anchors = Counter()  # of (page, anchor)

    def add(self, source: Path) -> None:
        """A file of the repository, relative to its root, that the site needs."""
        if source not in self.seen:
            self.seen.add(source)
            self.waiting.append(source)

    def link(self, page: Path, source: Path, anchor: str = "") -> str:
        """The address of a file's page, seen from another page."""
        self.add(source)
        return relative(page_of(source), page) + (f"#{anchor}" if anchor else "")

    def markdown(self, text: str, source: Path, page: Path) -> Markup:
        """HTML of Markdown from a source; links lead to the pages of their targets."""
        tokens = MARKDOWN.parse(text)
        for i, token in enumerate(tokens):
            if token.type == "heading_open":
                name = heading_anchor(tokens[i + 1].content)
                count = self.anchors[page, name]
                self.anchors[page, name] += 1
                token.attrSet("id", f"{name}-{count}" if count else name)
            if token.type == "fence" and token.info == "math":
                token.type, token.content = "html_block", f'<div class="math">{formula(token.content)}</div>'
            for child in token.children or []:
                self.relink(child, source, page)
        html = MARKDOWN.renderer.render(tokens, MARKDOWN.options, {})
        html = html.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
        return Markup(html)

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
        if target.suffix == ".py" and page_of(target) == page:
            anchor = anchor or "L1"  # the file of a method's note is on the same page
        token.attrSet(name, self.link(page, target, anchor))

    def write(self, page: Path, template: str, title: str, **values) -> None:
        path = self.out / page
        path.parent.mkdir(parents=True, exist_ok=True)
        nav = {relative(f"docs/methods/{method}.html", page): name for method, name in TITLES.items()}
        nav[relative("results.html", page)] = "Results"
        style = Markup((ROOT / "docs" / "page.css").read_text())
        made = TEMPLATES.get_template(template).render(title=title, style=style, nav=nav, here=page.name,
                                                       page=page, site=self, **values)
        path.write_text(made)


TEMPLATES.globals |= {"code": code, "formula": formula, "relative": relative, "Path": Path}
TEMPLATES.filters["slug"] = equations.slug
