"""The papers' equations and lines of algorithms: what each says, where it is in the code, what tests it.

docs/equations/<method>.toml has every number that the paper prints: an [[entry]] for what the method
computes, with its places and its tests; an [[unused]] for the rest, with the reason; and a [[part]] for what
has no number, a section or a table of layers. Of an entry `says` has the shapes, `differs` where paper,
official code and file part, `contradicts` where a formula and the paper's words do, `measured` what that
changes, with a link to the recorded runs.

A place is a function or a class of the method's file. The tag stands there in a comment, a docstring or a
flag's help, as the paper prints it: `Eq. (8)`, `line 7`, `step c5`. Where the paper prints no number, or the
place is in another file (common.rounds), the entry has a `mark`: code that stands there once.

tests/test_equations.py holds tables, code and tests together; docs/notes.py and docs/build.py make pages.
"""

import ast
import functools
import io
import re
import tokenize
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = {"differs": "Differs", "contradicts": "Formula and words contradict each other",
         "measured": "Measured"}  # {key of an entry: its heading}
METHODS = ("fedavg", "fedsr", "fedadg", "fedgala", "fedcir", "fdse")

NUMBERS = r"\d+(?:-\d+)?(?:(?:,|;| and) \d+(?:-\d+)?(?![\d:]))*"
BRACKETS = r"\(\d+\)(?:-\(\d+\))?(?:(?:,|;| and) \(\d+\)(?:-\(\d+\))?)*"
TAG = re.compile(rf"(?<!\d\d\d\d, )(?:(?P<source>[A-Z]\w+),? )?Eqs?\. (?P<equations>{BRACKETS})"
                 rf"|(?:(?P<box>Alg\. \d|ClientUpdate),? )?(?:[Ll]ines?|l\.) (?P<lines>{NUMBERS})"
                 rf"|\b(?P<first>[sc]\d)(?:-(?P<last>[sc]\d))?\b")


# Tags


def expanded(numbers: str) -> list[int]:
    """The numbers of "1; 3-5" or "(1), (3)-(5)": 1, 3, 4, 5."""
    found = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", re.sub(r"[()]", "", numbers)):
        found += range(int(first), int(last or first) + 1)
    return found


@dataclass
class Table:
    """One of docs/equations/*.toml."""

    method: str
    says: str  # of its symbols
    numbers: dict[str, str]  # what the paper prints: {"Eq.": "1-9", "Alg. 1": "1-13"}
    travels: dict[str, list[str]]  # server, client, down, up: for the diagram
    entries: list[dict]
    parts: list[dict]
    unused: list[dict]

    @property
    def file(self) -> str:
        return f"{self.method}.py"

    def tags_in(self, text: str, box: str = "") -> list[str]:
        """The tags in a text, one for each number: of "Eqs. (5)-(6), line 7" Eq. (5), Eq. (6), Alg. 1 line 7.

        A line without its algorithm is of the one named before in the text, else of `box`, else of the first.
        """
        if not box:
            boxes = [name for name in self.numbers if not name.endswith("Eq.")]
            box = boxes[0] if boxes else ""
        tags = []
        for found in TAG.finditer(" ".join(text.split())):
            if found["equations"]:
                source = ""
                if f"{found['source']} Eq." in self.numbers:
                    source = found["source"] + " "
                tags += [f"{source}Eq. ({n})" for n in expanded(found["equations"])]
            elif found["lines"]:
                box = found["box"] or box
                tags += [f"{box} line {n}" for n in expanded(found["lines"])]
            elif "step c" in self.numbers:
                first, last = found["first"], found["last"] or found["first"]
                tags += [f"step {first[0]}{n}" for n in range(int(first[1]), int(last[1]) + 1)]
        return tags

    def tags_of(self, entry: dict) -> list[str]:
        """The tags of an entry, one for each number; where the paper has no numbers, its name as it is."""
        return self.tags_in(entry["tag"]) or [entry["tag"]]

    def printed(self) -> list[str]:
        """All tags that the paper prints."""
        tags = []
        for name, numbers in self.numbers.items():
            for n in expanded(numbers):
                if name.endswith("Eq."):
                    tags.append(f"{name} ({n})")
                elif name.startswith("step"):
                    tags.append(f"{name}{n}")
                else:
                    tags.append(f"{name} line {n}")
        return tags


@functools.cache
def table(method: str) -> Table:
    read = tomllib.loads((ROOT / "docs" / "equations" / f"{method}.toml").read_text())
    return Table(method, read["says"], read["numbers"], read["travels"], read["entry"], read.get("part", []),
                 read.get("unused", []))


# Places in the code


@dataclass
class Mention:
    """A tag in a comment at a line; or, with line 0, in a string of a function or class ("": the module)."""

    tag: str
    owner: str
    line: int


class Code:
    """A Python file: its functions and classes, its statements, and the tags in it."""

    def __init__(self, path: str, of: Table):
        self.table = of
        self.text = (ROOT / path).read_text()
        self.lines = self.text.splitlines()
        self.spans = {}  # {qualified name: (first line, last line)}
        self.statements = []  # (first line, last line) of each; a loop or a condition ends before its body
        tree = ast.parse(self.text)
        self.walk(tree, "")
        self.mentions = self.in_comments() + self.in_strings(tree)

    def walk(self, node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}".removeprefix(".")
                first = min([child.lineno] + [decorator.lineno for decorator in child.decorator_list])
                self.spans[inner] = (first, child.end_lineno)
            if isinstance(child, ast.stmt):
                last = child.end_lineno
                if getattr(child, "body", None):
                    last = max(child.lineno, child.body[0].lineno - 1)
                self.statements.append((child.lineno, last))
            self.walk(child, inner)

    def owner(self, line: int) -> str:
        """The innermost function or class around a line."""
        around = []
        for name, (first, last) in self.spans.items():
            if first <= line <= last:
                around.append((last - first, name))
        return min(around)[1] if around else ""

    def box(self, owner: str) -> str:
        """The algorithm whose lines the table puts into a function; "" if that is none, or several."""
        boxes = set()
        for entry in self.table.entries:
            if any(within(owner, place) for place in entry["place"]):
                boxes |= {tag.split(" line ")[0] for tag in self.table.tags_of(entry) if " line " in tag}
        return boxes.pop() if len(boxes) == 1 else ""

    def in_comments(self) -> list[Mention]:
        found = []
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                found += self.tagged(token.string, token.start[0], token.start[0])
        return found

    def in_strings(self, tree: ast.Module) -> list[Mention]:
        found = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += self.tagged(node.value, node.lineno, 0)
        return found

    def tagged(self, text: str, line: int, of_comment: int) -> list[Mention]:
        owner = self.owner(line)
        return [Mention(tag, owner, of_comment) for tag in self.table.tags_in(text, self.box(owner))]

    def tags_within(self, place: str) -> set[str]:
        return {mention.tag for mention in self.mentions if within(mention.owner, place)}

    def statement(self, line: int) -> range:
        """The lines of the innermost statement at a line; of a comment by itself, and the next statement."""
        if self.lines[line - 1].strip().startswith("#"):
            following = [(first, last) for first, last in self.statements if first > line]
            _, last = min(following)
            return range(line, last + 1)
        around = [(last - first, first, last) for first, last in self.statements if first <= line <= last]
        _, first, last = min(around)
        return range(first, last + 1)

    def marked(self, place: str, mark: str) -> list[int]:
        """The lines of a place that have the text of a mark."""
        first, last = self.spans[place]
        return [n for n in range(first, last + 1) if mark in self.lines[n - 1]]


def within(owner: str, place: str) -> bool:
    return owner == place or owner.startswith(place + ".")


@functools.cache
def code(path: str, method: str) -> Code:
    return Code(path, table(method))


def place_of(place: str, of: Table) -> tuple[str, str]:
    """File and function of a place: common.rounds is in common.py, any other one in the method's file."""
    if place.startswith("common."):
        return "common.py", place.removeprefix("common.")
    return of.file, place


def lines_of(entry: dict, of: Table) -> dict[str, list[int]]:
    """{file: the lines of an entry}: the statements at its mark or its tags; the whole of a function that has
    the tag in its docstring alone."""
    lines = {}
    for place in entry["place"]:
        file, name = place_of(place, of)
        source = code(file, of.method)
        if name in source.spans:
            lines.setdefault(file, set()).update(lines_in(source, name, entry))
    return {file: sorted(numbers) for file, numbers in lines.items()}


def lines_in(source: Code, name: str, entry: dict) -> set[int]:
    tags = source.table.tags_of(entry)
    at = []
    if "mark" in entry:
        at = source.marked(name, entry["mark"])
    else:
        for mention in source.mentions:
            if mention.line and mention.tag in tags and within(mention.owner, name):
                at.append(mention.line)
    lines = set()
    for line in at:
        lines.update(source.statement(line))
    if not lines and source.tags_within(name) & set(tags):
        first, last = source.spans[name]
        lines.update(range(first, last + 1))
    return lines


# What is wrong


def faults(of: Table) -> list[str]:
    """What does not hold between a paper's table, the code and the tests, a line each."""
    return numbers_missing(of) + places_missing(of) + tests_missing(of) + tags_dangling(of)


def numbers_missing(of: Table) -> list[str]:
    tags = []
    for entry in of.entries + of.unused:
        tags += of.tags_of(entry)
    wrong = []
    for tag in of.printed():
        if tags.count(tag) != 1:
            wrong.append(f"{tag}: the table has it {tags.count(tag)} times")
    for tag in tags:
        if of.numbers and tag not in of.printed():
            wrong.append(f"{tag}: not among the numbers of the paper")
    for entry in of.unused:
        if not entry["why"]:
            wrong.append(f"{entry['tag']}: unused, without a reason")
    return wrong


def places_missing(of: Table) -> list[str]:
    wrong = []
    for entry in of.entries + of.parts:
        if not entry["place"]:
            wrong.append(f"{entry['tag']}: no place")
        for place in entry["place"]:
            file, name = place_of(place, of)
            source = code(file, of.method)
            settings = entry in of.parts and f"\n{name} = " in source.text  # PAPER, VARIANTS
            if name not in source.spans and not settings:
                wrong.append(f"{entry['tag']}: there is no {name} in {file}")
    for entry in of.entries:
        wrong += tags_missing(entry, of)
    return wrong


def tags_missing(entry: dict, of: Table) -> list[str]:
    """Tags of an entry that stand in none of its places, and places that have none of its tags."""
    tags = of.tags_of(entry)
    wrong, seen = [], set()
    for place in entry["place"]:
        file, name = place_of(place, of)
        source = code(file, of.method)
        if name not in source.spans:
            continue
        here = source.tags_within(name) & set(tags)
        if "mark" in entry:
            here = set(tags)
            count = len(source.marked(name, entry["mark"]))
            if count != 1:
                wrong.append(f"{entry['tag']}: its mark stands {count} times in {place}")
        if not here:
            wrong.append(f"{entry['tag']}: no comment or docstring of {place} has it")
        seen |= here
    for tag in tags:
        if tag not in seen:
            wrong.append(f"{tag}: in none of its places")
    return wrong


def tests_missing(of: Table) -> list[str]:
    wrong = []
    for entry in of.entries + of.parts:
        if not entry["tests"]:
            wrong.append(f"{entry['tag']}: no test")
        for test in entry["tests"]:
            if test_line(test) == 0:
                wrong.append(f"{entry['tag']}: there is no test {test}")
    return wrong


def tags_dangling(of: Table) -> list[str]:
    """Tags in the method's file that the table does not have."""
    known = set()
    for entry in of.entries + of.unused:
        known |= set(of.tags_of(entry))
    wrong = []
    for mention in code(of.file, of.method).mentions:
        if mention.tag not in known:
            wrong.append(f"{mention.tag}: in {of.file}, {mention.owner or 'docstring'}, not in the table")
    return wrong


def test_line(test: str) -> int:
    """The line at which a test begins, of "test_fdse::test_eq8_two_clients_by_hand"; 0 if there is none."""
    file, _, name = test.partition("::")
    return tests_in(file).get(name, 0)


def test_says(test: str) -> str:
    """The first paragraph of a test's docstring: what it holds the code against; "" without one."""
    file, _, name = test.partition("::")
    for node in ast.parse((ROOT / "tests" / f"{file}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            paragraph, _, _ = (ast.get_docstring(node) or "").partition("\n\n")
            return " ".join(paragraph.split())
    return ""


@functools.cache
def tests_in(file: str) -> dict[str, int]:
    """{test: the line at which it begins} of tests/<file>.py."""
    path = ROOT / "tests" / f"{file}.py"
    found = {}
    if path.is_file():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name] = node.lineno
    return found


def remarks(entry: dict) -> dict[str, str]:
    """{heading: text} of what an entry has of KINDS; of a difference that a flag switches, whether it was
    measured."""
    found = {heading: entry[kind] for kind, heading in KINDS.items() if kind in entry}
    if "`--" in entry.get("differs", "") and "measured" not in entry:
        found[KINDS["measured"]] = "No."
    return found


# The sum


def counts(of: Table) -> tuple[int, int, int]:
    """How many equations and lines a method uses, how many of these are located and tested, and how many the
    paper has that the method does not use."""
    used = whole = unused = 0
    for entry in of.entries:
        used += len(of.tags_of(entry))
        tested = entry["tests"] and all(test_line(test) for test in entry["tests"])
        if tested and lines_of(entry, of) and not tags_missing(entry, of):
            whole += len(of.tags_of(entry))
    for entry in of.unused:
        unused += len(of.tags_of(entry))
    return used, whole, unused


def sentence() -> str:
    """The sum over all papers, as it stands in the README."""
    used = whole = unused = 0
    for method in METHODS:
        of_method = counts(table(method))
        used += of_method[0]
        whole += of_method[1]
        unused += of_method[2]
    return (f"{whole} of {used} equations and algorithm lines that the methods use are located in the code "
            f"and tested; {unused} more of the papers are definitions, bounds, proofs and ends of loops.")
