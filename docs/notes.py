"""What docs/methods/*.md have from docs/equations/*.toml and the docstrings: the section of equations,
between two marks. `python docs/build.py` writes it."""

from pathlib import Path

from docs import equations
from docs.equations import ROOT, Table

from jinja2 import Environment, FileSystemLoader, select_autoescape

NOTES = ROOT / "docs" / "methods"
BEGIN = "<!-- equations: written by docs/build.py from docs/equations -->"
END = "<!-- end of equations -->"
TEMPLATES = Environment(loader=FileSystemLoader(ROOT / "docs" / "templates"),
                        autoescape=select_autoescape(["html", "svg"]), keep_trailing_newline=True)
TEMPLATES.globals |= {"formulas": equations.formulas, "remarks": equations.remarks, "KINDS": equations.KINDS,
                      "test_of": equations.test_of, "located": equations.located}


def section(of: Table) -> str:
    """Every equation and line of a method as GitHub shows it."""
    used, whole, _ = equations.counts(of)
    return TEMPLATES.get_template("section.md").render(of=of, used=used, whole=whole, tests=tests).strip()


def tests(of: list[str]) -> str:
    """Tests by their files: "[test_fdse](...): `test_a`, `test_b`; [test_common](...): `test_c`"."""
    files: dict[str, list[str]] = {}
    for test in of:
        file, _, name = test.partition("::")
        files.setdefault(file, []).append(f"`{name}`")
    return "; ".join(f"[{file}](../../tests/{file}.py): {', '.join(found)}" for file, found in files.items())


def with_section(text: str, made: str) -> str:
    """A note with this section between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def written() -> dict[Path, str]:
    """{note: what it should have}, of those that have something else."""
    files = {}
    for method in equations.METHODS:
        note = NOTES / f"{method}.md"
        text = with_section(note.read_text(), section(equations.table(method)))
        if text != note.read_text():
            files[note] = text
    return files
