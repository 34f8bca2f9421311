"""The pages of the methods: a method's has its note, and each equation beside the statements that compute it.
A baseline's has its note beside its file. Files that these link to have a page each."""

import re
import shutil
from pathlib import Path

from docs import equations
from docs.equations import ROOT
from docs.pages import NAV, ORDER, TEMPLATES, TITLES, Site, is_note, note_of, page_of, source_of
from reproduce.claims import Answer, answers, read_claims
from reproduce.claims_pages import functions, gain_words, learned_words, sentence_of, where_learned
from reproduce.records import Records
from reproduce.tables import read_tables


def with_table(method: str) -> str:
    """A method's note, in which the table of its equations is made anew of its equations.toml."""
    text = (ROOT / note_of(method)).read_text(encoding="utf-8")
    before, start, rest = text.partition("<!-- equations -->\n\n")
    _, end, after = rest.partition("\n<!-- end of equations -->")
    made = TEMPLATES.get_template("equations.md").render(entries=equations.table(method).entries)
    return before + start + made + end + after


def with_numbers(text: str, call: dict) -> str:
    """A text of equations.toml with the measured numbers that it asks for, as the claims do."""
    return TEMPLATES.from_string(text).render(call)


def method_page(site: Site, method: str, claims: list[Answer]) -> None:
    """The note: its idea and its picture, then the equations beside their code, then the rest."""
    note = note_of(method)
    of, text = equations.table(method), (ROOT / note).read_text(encoding="utf-8")
    before, _, after = text.partition("<!-- end of equations -->")
    head, what, who, *_ = before.split("\n## ")  # the last one is what GitHub shows in place of the equations
    used, whole, unused = equations.counts(of)
    site.write(page_of(note), "method.html", TITLES[method], of=of, head=head, what=what, who=who,
               after=after, note=note, used=used, whole=whole, unused=unused, claims=claims,
               call=functions(claims))


def baselines() -> dict[Path, str]:
    """{note: title} of the notes whose file is in baselines/."""
    titles = {}
    for path in sorted((ROOT / "papers" / "baselines").glob("*.md")):
        note = path.relative_to(ROOT)
        titles[note] = re.match(r"# (.*)", path.read_text(encoding="utf-8")).group(1)
    return titles


def file_page(site: Site, source: Path) -> None:
    """What a page links to: a note, beside the file of a baseline, a file of Python, or else as it is."""
    page = page_of(source)
    if source.suffix not in (".md", ".py"):
        (site.out / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / source, site.out / page)
        return
    note, file = source, None
    if source.suffix == ".py":
        note, file = note_of(source.stem), source
        if page_of(note) != page:
            note = page.with_suffix(".md")  # there is none
    elif is_note(source):
        file = source_of(source)
    text = (ROOT / note).read_text(encoding="utf-8") if (ROOT / note).exists() else f"# {source}"
    site.write(page, "file.html", re.match(r"# (.*)", text)[1], note=note, text=text, file=file)


def read_answers() -> dict[str, list[Answer]]:
    """{paper: its claims with what is measured of them}."""
    papers = read_claims()
    every = answers(papers, read_tables(), Records(ROOT / "results" / "runs.jsonl"))
    return {paper.id: [answer for answer in every if answer.paper is paper] for paper in papers}


def build(out: Path) -> None:
    """Write the site: the methods' pages, and what these link to."""
    site, known = Site(out), read_answers()
    for method in equations.METHODS:
        method_page(site, method, known.get(method, []))
    site.write(Path("index.html"), "index.html", "Federated domain generalization", titles=TITLES,
               answers=known, baselines=baselines(), sentence=equations.sentence(), table=equations.table)
    for address in NAV | ORDER:
        site.add(Path(address).with_suffix(".md"))
    while site.waiting:
        source = site.waiting.pop()
        if str(page_of(source)) not in site.ids:
            file_page(site, source)
    site.finish()


for function in (gain_words, learned_words, sentence_of, where_learned, with_numbers):
    TEMPLATES.globals[function.__name__] = function
