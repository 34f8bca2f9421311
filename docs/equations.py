r"""The papers' equations and lines of algorithms: what each says, where it is in the code, what tests it.

A formula stands once, in the docstring of the function that computes it, with the paper's number. What has
none has the name of its entry, as in \tag{Alg. 1, line 7}:

    $$ L = \frac{1}{B} \sum_i l_i \tag{6} $$

papers/<method>/equations.toml has every number that the paper prints. An [[entry]] is computed here; it has
places and tests. An [[unused]] is not, for a reason. A [[part]] has no number. `why` says what the paper
wants with it, and what to watch in a run's logs; `says` has the shapes,
`differs` where paper, official code and file part, `contradicts` where a formula and the paper's words do,
`measured` what that changes. A link #note-some-words leads to the note's paragraph **Some words**.

A place is a function or class of the method's file, or of another module: `common.rounds`. The tag stands
there in a comment or docstring: `Eq. (8)`, `line 7`, `step c5`. Where it does not say enough, the entry has a
`mark` of the place: code that stands there once, or the first and the last statement, "mu = ... var =".
What the released code has in its place is in `official`. tests/docs/test_equations.py holds all of it
together.
"""

import ast
import functools
import io
import re
import tokenize
import tomllib
from dataclasses import dataclass

from plumbing.run.provenance import ROOT
from reproduce.tables import papers

KINDS = {"differs": "Differs", "contradicts": "Formula and words contradict each other",
         "measured": "Measured"}  # {key of an entry: its heading}
METHODS = ("fedavg", *papers())

FORMULA = re.compile(r"\$\$(.*?)\\tag\{([^}]*)\}\s*\$\$", flags=re.S)
LONGEST = 16  # lines: two statements with more between them are shown with a gap
NUMBERS = r"\d+(?:-\d+)?(?:(?:,|;| and) \d+(?:-\d+)?(?![\d:]))*"
BRACKETS = r"\(\d+\)(?:-\(\d+\))?(?:(?:,|;| and) \(\d+\)(?:-\(\d+\))?)*"
TAG = re.compile(rf"(?<!\d\d\d\d, )(?:(?P<source>[A-Z]\w+),? )?Eqs?\. (?P<equations>{BRACKETS})"
                 rf"|(?:(?P<box>Alg\. \d|ClientUpdate),? )?(?:[Ll]ines?|l\.) (?P<lines>{NUMBERS})"
                 rf"|\b(?P<first>[sc]\d)(?:-(?P<last>[sc]\d))?\b")


# Tags


def expanded(numbers: str) -> list[int]:
    """The numbers of "1; 3-5" or "(1), (3)-(5)": 1, 3, 4, 5."""
    all_numbers = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", re.sub(r"[()]", "", numbers)):
        all_numbers += range(int(first), int(last or first) + 1)
    return all_numbers


def canonical(tag: str) -> str:
    """A tag with its word: "6" -> Eq. (6); "9-10" -> Eqs. (9)-(10); SimCLR Eq. 1 -> SimCLR Eq. (1)."""
    if not re.fullmatch(r"[\d(), and-]+", tag):
        return re.sub(r"Eq\. (\d+)$", r"Eq. (\1)", tag)
    numbers = re.sub(r"\(?(\d+)\)?", r"(\1)", tag)
    return f"Eqs. {numbers}" if len(expanded(tag)) > 1 else f"Eq. {numbers}"


def slug(words: str) -> str:
    """Words as an anchor: "Alg. 1 line 7" -> alg-1-line-7."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


@dataclass
class Table:
    """One of papers/*/equations.toml."""

    method: str
    says: str  # of its symbols
    card: str  # the tag of its formula on the first page
    most: str  # the tag of what differs most from the released code; empty for FedAvg
    idea: str  # in a sentence; empty where claims.toml has it
    numbers: dict[str, str]  # what the paper prints: {"Eq.": "1-9", "Alg. 1": "1-13"}
    entries: list[dict]
    parts: list[dict]
    unused: list[dict]

    @property
    def file(self) -> str:
        return f"{self.method}.py"

    @property
    def steps(self) -> list[dict]:
        """The lines of the paper's algorithms."""
        return [entry for entry in self.entries if "Eq" not in entry["tag"]]

    def tags_in(self, text: str, box: str = "") -> list[str]:
        """The tags in a text, one for each number: of "Eqs. (5)-(6), line 7" Eq. (5), Eq. (6), Alg. 1 line 7.

        A line without its algorithm is of the one named before in the text, else of `box`, else of the first.
        """
        boxes, tags = [name for name in self.numbers if not name.endswith("Eq.")], []
        box = box or (boxes[0] if boxes else "")
        for match in TAG.finditer(" ".join(text.split())):
            if match["equations"]:
                source = f"{match['source']} " if f"{match['source']} Eq." in self.numbers else ""
                tags += [f"{source}Eq. ({n})" for n in expanded(match["equations"])]
            elif match["lines"]:
                box = match["box"] or box
                tags += [f"{box} line {n}" for n in expanded(match["lines"])]
            elif "step c" in self.numbers:
                first, last = match["first"], match["last"] or match["first"]
                tags += [f"step {first[0]}{n}" for n in range(int(first[1]), int(last[1]) + 1)]
        return tags

    def tags_of(self, entry: dict) -> list[str]:
        """The tags of an entry, one for each number; where the paper has no numbers, its name as it is."""
        return self.tags_in(entry["tag"]) or [entry["tag"]]

    def printed(self) -> list[str]:
        """All tags that the paper prints."""
        tags = []
        for name, numbers in self.numbers.items():
            form = "{} line {}"
            if name.endswith("Eq."):
                form = "{} ({})"
            elif name.startswith("step"):
                form = "{}{}"
            tags += [form.format(name, n) for n in expanded(numbers)]
        return tags


@functools.cache
def table(method: str) -> Table:
    read = tomllib.loads((ROOT / "papers" / method / "equations.toml").read_text(encoding="utf-8"))
    lists = [read.get(name, []) for name in ("entry", "part", "unused")]
    return Table(method, read["says"], read["card"], read.get("most", ""), read.get("idea", ""),
                 read["numbers"], *lists)


# Places in the code


class Code:
    """A Python file: its functions and classes, statements, formulas, and the tags in it."""

    def __init__(self, path: str, of: Table):
        self.table = of
        text = (ROOT / path).read_text(encoding="utf-8")
        self.lines = text.splitlines()
        self.spans = {}  # {qualified name: (first line, last line)}
        self.docstrings = set()  # the lines of all docstrings
        self.statements = []  # (first line, last line) of each; a loop or a condition ends before its body
        self.heads = {}  # {last line of such a head: indentation of its body}
        self.blocks = []  # of each body the (first line, last line) of its statements, which are whole here
        self.mentions = []  # (tag, function or class, line of a comment; 0: in a string)
        self.formulas = []  # (function or class, slug of its tag, LaTeX)
        tree = ast.parse(text)
        self.walk(tree, "")
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                self.mention(token.string, token.start[0], token.start[0])
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.mention(FORMULA.sub(lambda match: canonical(match[2]), node.value), node.lineno, 0)

    def walk(self, node: ast.AST, name: str) -> None:
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(block, list) and block:
                self.blocks.append([(statement.lineno, statement.end_lineno) for statement in block])
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}".removeprefix(".")
                first = min([child.lineno] + [decorator.lineno for decorator in child.decorator_list])
                self.spans[inner] = (first, child.end_lineno)
                docstring = ast.get_docstring(child) or ""
                if docstring:
                    self.docstrings.update(range(child.body[0].lineno, child.body[0].end_lineno + 1))
                for latex, tag in FORMULA.findall(docstring):
                    self.formulas.append((inner, slug(canonical(tag)), latex.strip()))
                    if re.fullmatch(r"[A-Z]\w+ Eq\. \d+", tag):  # of another paper
                        self.mentions.append((canonical(tag), inner, 0))
            if isinstance(child, ast.stmt):
                last = child.end_lineno
                if getattr(child, "body", None):
                    last = max(child.lineno, child.body[0].lineno - 1)
                    self.heads[last] = child.body[0].col_offset
                self.statements.append((child.lineno, last))
            self.walk(child, inner)

    def owner(self, line: int) -> str:
        """The innermost function or class around a line."""
        around = [(last - first, name) for name, (first, last) in self.spans.items() if first <= line <= last]
        return min(around)[1] if around else ""

    def box(self, owner: str) -> str:
        """The algorithm whose lines the table puts into a function; "" if that is none, or several."""
        boxes = set()
        for entry in self.table.entries:
            if any(within(owner, place) for place in entry["place"]):
                boxes |= {tag.split(" line ")[0] for tag in self.table.tags_of(entry) if " line " in tag}
        return boxes.pop() if len(boxes) == 1 else ""

    def mention(self, text: str, line: int, of_comment: int) -> None:
        owner = self.owner(line)
        for tag in self.table.tags_in(text, self.box(owner)):
            self.mentions.append((tag, owner, of_comment))

    def statement(self, line: int) -> range:
        """The lines of the innermost statement at a line; of a comment by itself, and the next statement."""
        if self.lines[line - 1].strip().startswith("#"):
            return range(line, min(span for span in self.statements if span[0] > line)[1] + 1)
        around = [(last - first, first, last) for first, last in self.statements if first <= line <= last]
        _, first, last = min(around)
        return range(first, last + 1)

    def filled(self, lines: set[int]) -> set[int]:
        """Statements of one body with what stands between them, unless that is long."""
        written = [n for n in lines if not self.lines[n - 1].strip().startswith("#")]
        low, high = min(written), max(written)
        around = [block for block in self.blocks if block[0][0] <= low and high <= block[-1][1]]
        body = min(around, key=lambda block: block[-1][1] - block[0][0])
        spans = [span for span in body if span[1] >= low and span[0] <= high]
        whole = set(range(spans[0][0], spans[-1][1] + 1)) | lines
        return whole if len(whole) <= LONGEST else lines

    def shown(self, lines: list[int]) -> list[tuple[int, str]]:
        """Lines with their numbers. What is left out is an ellipsis with number 0, so that they parse."""
        picked = []
        for n, following in zip(lines, [*lines[1:], 0]):
            picked.append((n, self.lines[n - 1]))
            if following != n + 1 and (following or n in self.heads):
                text = self.lines[following - 1]
                indent = self.heads.get(n, len(text) - len(text.lstrip()))
                picked.append((0, " " * indent + "..."))
        return picked

    def lines_in(self, place: str, entry: dict) -> list[int]:
        """The lines of an entry in a place: the statements at its mark or its tags. They are the whole
        place without its docstring if that alone has the tag, or a function is for this formula alone."""
        if place not in self.spans:
            return []
        first, last = self.spans[place]
        tags = self.table.tags_of(entry)
        own = [tag for owner, tag, _ in self.formulas if owner == place]
        if place in entry.get("mark", {}):
            marks = entry["mark"][place].split(" ... ")
            at = [n for n in range(first, last + 1) if any(mark in self.lines[n - 1] for mark in marks)]
        elif "." not in place and own == [slug(entry["tag"])]:
            at = [0]
        else:
            at = [line for tag, owner, line in self.mentions if tag in tags and within(owner, place)]
        statements = {self.statement(line) for line in at if line}
        lines = set().union(*statements)
        if len(statements) > 1:
            lines = self.filled(lines)
        elif at and not lines:
            return self.whole(place)
        return sorted(lines)

    def whole(self, place: str) -> list[int]:
        """The lines of a function or class without its docstring."""
        first, last = self.spans[place]
        return sorted(set(range(first, last + 1)) - self.docstrings)


def within(owner: str, place: str) -> bool:
    return owner == place or owner.startswith(place + ".")


@functools.cache
def code(path: str, method: str) -> Code:
    return Code(path, table(method))


def place_of(place: str, of: Table) -> tuple[str, str]:
    """File and function of a place: plumbing.run.linear.fit_linear is in plumbing/run/linear.py,
    Client.train in the method's file."""
    parts = place.split(".")
    for i in range(len(parts) - 1, 0, -1):
        path = "/".join(parts[:i]) + ".py"
        if (ROOT / path).is_file():
            return path, ".".join(parts[i:])
    return of.file, place


def located(entry: dict, of: Table, kind: str = "place") -> list[tuple[str, str, list[int]]]:
    """(file, function, lines) of each place of an entry; "official": what the released code has."""
    places = []
    for place in entry.get(kind, []):
        file, name = place_of(place, of)
        source = code(file, of.method)
        lines = source.whole(name) if kind == "official" else source.lines_in(name, entry)
        places.append((file, name, lines))
    return places


def formulas(entry: dict, of: Table) -> list[str]:
    """The formulas of an entry in the docstrings of its places, in LaTeX."""
    of_entry = [entry["latex"].strip()] if "latex" in entry else []  # of a place in common.py
    for place in entry["place"]:
        file, name = place_of(place, of)
        for owner, tag, latex in code(file, of.method).formulas:
            if tag == slug(entry["tag"]) and within(owner, name):
                of_entry.append(latex)
    return of_entry


# Tests and the sum


def file_of(test: str) -> str:
    """The file of "test_fdse::test_eq9_three_clients_by_hand"; empty if there is none."""
    name, _, _ = test.partition("::")
    return next((str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob(f"*/{name}.py")), "")


@functools.cache
def tests_in(file: str) -> dict[str, tuple[int, str]]:
    """{test: its first line, and the first paragraph of its docstring} of a file."""
    docstrings = {}
    for node in ast.parse((ROOT / file).read_bytes()).body if file else []:
        if isinstance(node, ast.FunctionDef):
            paragraph, _, _ = (ast.get_docstring(node) or "").partition("\n\n")
            docstrings[node.name] = (node.lineno, " ".join(paragraph.split()))
    return docstrings


def test_of(test: str) -> tuple[int, str]:
    """Line and words of a test: what it holds the code against."""
    return tests_in(file_of(test)).get(test.partition("::")[2], (0, ""))


def counts(of: Table) -> tuple[int, int, int]:
    """How many equations and lines a method uses, how many of these are located and tested, and how many the
    paper has that the method does not use."""
    used = whole = 0
    for entry in of.entries:
        places = [lines for _, _, lines in located(entry, of)] + [test_of(test)[0] for test in entry["tests"]]
        used += len(of.tags_of(entry))
        whole += len(of.tags_of(entry)) if entry["tests"] and all(places) else 0
    return used, whole, sum(len(of.tags_of(entry)) for entry in of.unused)


def sentence() -> str:
    """The sum over all papers, as it stands in the README."""
    used, whole, _ = map(sum, zip(*(counts(table(method)) for method in METHODS)))
    return (f"{whole} of {used} equations and algorithm lines that the methods use are located in the code "
            "and tested.")
