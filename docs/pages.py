"""The pages of docs/build.py: Markdown, formulas and code as HTML, links from page to page, and what the
search knows (search.js: title, heading, address and words of each section)."""

import functools
import json
import os
import re
import shutil
import tomllib
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

from docs import equations
from docs.equations import ROOT
from plumbing.run.errors import UserError
from reproduce.tables import papers

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markdown_it import MarkdownIt
from markupsafe import Markup, escape
from math_core import LatexToMathML
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

TITLES = {"fedavg": "FedAvg"}
for paper, title in papers().items():  # FDSE (Wang et al., CVPR 2025)
    TITLES[paper] = title.partition(" (")[0]
MARKDOWN = MarkdownIt("commonmark").enable("table")
TEMPLATES = Environment(loader=FileSystemLoader(ROOT / "docs" / "templates"),
                        autoescape=select_autoescape(["html", "svg"]), undefined=StrictUndefined)
NAV = {"docs/start.html": "Start", "docs/methods.html": "Methods", "results/README.html": "Results",
       "docs/errata.html": "Errata", "docs/own.html": "Your data", "docs/words.html": "Words"}  # at the top
ORDER = {"index.html": "CleanFDG", "docs/start.html": "Start", "docs/exercises.html": "Exercises",
         **{f"docs/methods/{method}.html": title for method, title in TITLES.items()},
         "results/README.html": "Results", "docs/errata.html": "Errata"}  # of reading
CLAIMS = {"results/README.html": "Results", **{f"results/claims/{method}.html": f"{title}'s claims"
                                               for method, title in [*TITLES.items()][1:]}}
SIGNS = dict(zip("alpha beta gamma delta Delta epsilon eta theta Theta lambda mu nu pi sigma tau sum".split(),
                 "αβγδΔεηθΘλμνπστΣ"))
SYMBOL = re.compile(rf"(?<![\w-])({'|'.join(SIGNS)}|BN|var|[A-Za-z])(?:_([A-Za-z0-9]+(?:,[a-z])?))?(?![\w-])")
HEADING = re.compile(r'<h([23])[^>]*? id="([^"]+)"[^>]*>(.*?)</h\1>', flags=re.S)
PLAIN = re.compile(r'<span class="(?:n|p|o|w)">([^<]*)</span>')  # a token that docs/page.css gives no colour


def note_of(method: str) -> Path:
    """The note of a method, relative to the root."""
    if method in equations.METHODS:
        return Path("papers") / method / "differences.md"
    return Path("papers/baselines") / f"{method}.md"


def source_of(note: Path) -> Path:
    """The file of a method's note, relative to the root."""
    if note.name == "differences.md":
        return Path(f"{note.parent.name}.py")
    return Path("baselines") / f"{note.stem}.py"


def is_note(source: Path) -> bool:
    """Whether a file is the note of a method."""
    return source.name == "differences.md" or source.parent == Path("papers/baselines")


def page_of(source: Path) -> Path:
    """Where a file of the repository is in the site, both relative to their roots."""
    if is_note(source):
        return Path("docs/methods") / f"{source_of(source).stem}.html"
    if source.suffix == ".md":
        return source.with_suffix(".html")
    note = note_of(source.stem)
    if source.parent == Path("baselines") and (ROOT / note).exists():
        return page_of(note)  # beside its note
    if source.suffix == ".py":
        return source.with_name(source.name + ".html")
    return source


def relative(target: Path | str, page: Path) -> str:
    """The address of a page, seen from another one."""
    return os.path.relpath(target, page.parent)


def formula(latex: str) -> Markup:
    """MathML of a displayed formula; a mistake in it is an error."""
    return Markup(LatexToMathML().convert_with_local_state(latex.strip(), displaystyle=True))


@functools.cache
def coloured(path: Path) -> list[str]:
    """The lines of a Python file as HTML with a class for each kind of token."""
    text = (ROOT / path).read_text(encoding="utf-8")
    html = highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    return PLAIN.sub(r"\1", html).rstrip("\n").split("\n")


def docstring(path: Path) -> int:
    """How many lines stand before the imports of a file, which are folded."""
    match = re.match(r'r?""".*?"""\n', (ROOT / path).read_text(encoding="utf-8"), flags=re.S)
    return match[0].count("\n") if match else 0


def statements(file: str, method: str, lines: list[int]) -> list[tuple[int, str]]:
    """(number, HTML) of some statements of a file without their indentation; 0 for what is left out."""
    shown = equations.code(file, method).shown(lines)
    margin = min(len(text) - len(text.lstrip()) for _, text in shown if text)
    return [(n, coloured(Path(file))[n - 1][margin:] if n else text[margin:]) for n, text in shown]


def symbols(text: str) -> Markup:
    """Prose in which theta_u is θ with an index."""
    def as_printed(match: re.Match) -> str:
        name, index = match.groups()
        if index:
            return f"{SIGNS.get(name, name)}<sub>{index}</sub>"
        return name if name == "sum" else SIGNS.get(name, name)
    return SYMBOL.sub(as_printed, str(escape(text)))


def contents(html: str) -> list[tuple[str, str, str]]:
    """(level, anchor, words) of the headings of a page."""
    return [(level, anchor, Markup(re.sub(r"</?(?!sub\b)[a-z][^>]*>", "", words)))
            for level, anchor, words in HEADING.findall(html)]


def alone(heading: str) -> list[str]:
    """Of "Eqs. (10)-(11) L2R" what a reader may search for: "Eq. (10) L2R", "Eq. (11) L2R"."""
    tag = equations.TAG.match(heading)
    if not tag or not tag["equations"]:
        return []
    return [f"Eq. ({n}){heading[tag.end():]}" for n in equations.expanded(tag["equations"])]


def indented(html: str) -> int:
    """The spaces before a coloured line."""
    return len(re.match(r"(?:<[^>]*>)*( *)", html)[1])


class Site:
    """The pages, and what they link to."""

    def __init__(self, out: Path):
        self.out = out
        self.waiting, self.seen = [], set()
        self.anchors = Counter()  # of (page, anchor)
        self.ids, self.links, self.sections = {}, {}, []  # of each page written; what the search knows
        urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
        self.repository = urls.get("Repository", "")

    def add(self, source: Path) -> None:
        """A file of the repository, relative to its root, that the site needs."""
        if source not in self.seen:
            self.seen.add(source)
            self.waiting.append(source)

    def link(self, page: Path, source: Path, anchor: str = "") -> str:
        """The address of a file's page, seen from another page."""
        self.add(source)
        return relative(page_of(source), page) + (f"#{anchor}" if anchor else "")

    def address(self, page: Path, source: Path, anchor: str = "") -> str:
        """The same, of a file without a page in the repository; empty if its address is not known. Tests, the
        machinery behind the methods, and all records have none."""
        machinery = source.suffix == ".py" and source.parts[0] in ("tests", "plumbing", "reproduce", "bench")
        if not machinery and source.suffix != ".jsonl":
            return self.link(page, source, anchor)
        if not self.repository:
            return ""
        return f"{self.repository}/blob/main/{source}" + (f"#{anchor}" if anchor else "")

    def markdown(self, text: str, source: Path, page: Path) -> Markup:
        """HTML of Markdown from a source; links lead to the pages of their targets."""
        tokens = MARKDOWN.parse(text)
        for i, token in enumerate(tokens):
            if token.type == "heading_open":
                heading = re.sub(r"[`*\\]", "", tokens[i + 1].content).lower()
                name = re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")  # as GitHub has it: what-it-does
                count = self.anchors[page, name]
                self.anchors[page, name] += 1
                token.attrSet("id", f"{name}-{count}" if count else name)
            if token.type == "fence" and token.info == "math":
                token.type, token.content = "html_block", f'<div class="math">{formula(token.content)}</div>'
            named = re.match(r"\*\*([^*]+)\*\*", token.content)
            if named and is_note(source):
                tokens[i - 1].attrSet("id", f"note-{equations.slug(named[1])}")
            for child in token.children or []:
                if child.type == "text":
                    child.type, child.content = "html_inline", symbols(child.content)
                self.relink(child, source, page)
        html = MARKDOWN.renderer.render(tokens, MARKDOWN.options, {})
        html = re.sub("(<table>.*?</table>)", r'<div class="wide" tabindex="0">\1</div>', html, flags=re.S)
        html = html.replace("<th></th>", "<td></td>")
        html = html.replace("<td>Measured", '<td class="measured">Measured')
        html = html.replace("<p><img ", '<p class="figure" tabindex="0"><img ')
        html = re.sub(r'<a href="">(.*?)</a>', r"\1", html, flags=re.S)  # what has no page and no address
        html = re.sub(r"(?<=[ >])--[a-z][\w-]*(?=[^<]*</code>)", r'<span class="flag">\g<0></span>', html)
        return Markup(html)

    def relink(self, token, source: Path, page: Path) -> None:
        name = {"link_open": "href", "image": "src"}.get(token.type)
        if not name or re.match(r"[a-z]+:|#", token.attrGet(name)):
            return
        path, _, anchor = token.attrGet(name).partition("#")
        target = (ROOT / source.parent / path).resolve()
        if target.is_dir():
            target /= "README.md"
        elif not target.exists():
            return  # as it is, so that the build ends with it
        target = target.relative_to(ROOT)
        if target.suffix == ".py" and page_of(target) == page:
            anchor = anchor or "L1"  # the file of a method's note is on the same page
        token.attrSet(name, self.address(page, target, anchor) if (ROOT / target).exists() else "")

    def write(self, page: Path, template: str, title: str, **values) -> None:
        path = self.out / page
        path.parent.mkdir(parents=True, exist_ok=True)
        order = ORDER if str(page) in ORDER else CLAIMS
        made = TEMPLATES.get_template(template).render(title=title, nav=NAV, order=order, page=page,
                                                       site=self, **values)
        path.write_text(made, encoding="utf-8")
        self.ids[str(page)] = set(re.findall(r' id="([^"]+)"', made))
        self.links[str(page)] = re.findall(r' (?:href|src)="([^"]+)"', made)
        if page.parts[0] in ("docs", "index.html", "papers", "results"):
            self.remember(page, title, made)

    def remember(self, page: Path, title: str, html: str) -> None:
        """The sections of a page for the search: their words without code and formulas."""
        left_out = re.compile(r'<div class="code">.*?</div>|<math.*?</math>|<svg.*?</svg>|'
                              r'<ul class="tests">.*?</ul>', flags=re.S)
        pieces = HEADING.split(left_out.sub(" ", html.partition("<main")[2]))
        heads = [("", ""), *zip(pieces[2::4], pieces[3::4])]
        for (anchor, heading), text in zip(heads, pieces[::4]):
            words = Markup("<p " + text if not anchor else text).striptags()
            heading = Markup(heading).striptags()
            self.sections.append([title, heading, f"{page}#{anchor}".rstrip("#"), words, alone(heading)])

    def finish(self) -> None:
        """The files that all pages load. Stop if a link leads nowhere."""
        for name in ("page.css", "page.js", "interactive.js"):
            shutil.copyfile(ROOT / "docs" / name, self.out / name)
        known = json.dumps(self.sections, ensure_ascii=False)
        (self.out / "search.js").write_text(f"const SECTIONS = {known}\n", encoding="utf-8")
        lost = []
        for page, links in self.links.items():
            for link in links:
                path, _, anchor = unquote(link).partition("#")
                target = os.path.normpath(Path(page).parent / path) if path else page
                known = (self.out / target).is_file() and (not anchor or anchor in self.ids.get(target, ()))
                if not known and not re.match(r"https?:", link):
                    lost.append(f"{page}: {link}")
        if lost:
            raise UserError(f"{len(lost)} links of the pages lead nowhere: {'; '.join(lost[:5])}")


for function in (coloured, docstring, indented, statements, symbols, contents, formula, relative,
                 equations.formulas, equations.test_of, equations.file_of, equations.located, equations.code):
    TEMPLATES.globals[function.__name__] = function
TEMPLATES.globals |= {"Path": Path, "KINDS": equations.KINDS}
TEMPLATES.filters["slug"] = equations.slug
