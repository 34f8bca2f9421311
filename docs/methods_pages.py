"""The pages of the methods: a method's has its note, each equation beside the lines that compute it, then the
whole file. A baseline's has its note beside its file. Files that these link to have a page each."""

import re
import shutil
from pathlib import Path

from docs import equations, notes, results
from docs.equations import ROOT
from docs.pages import TITLES, Site, page_of, source_of


def method_page(site: Site, method: str) -> None:
    """The note, with its equations beside their code in the place of the written section."""
    note = Path("docs/methods") / f"{method}.md"
    page, text = page_of(note), (ROOT / note).read_text()
    of = equations.table(method)
    before, _, rest = text.partition(notes.BEGIN)
    before = before.rpartition("\n## ")[0]  # the heading of the written section
    _, _, after = rest.partition(notes.END)
    used, whole, unused = equations.counts(of)
    site.write(page, "method.html", TITLES[method], of=of, before=before, after=after, note=note, used=used,
               whole=whole, unused=unused)


def baselines() -> dict[Path, str]:
    """{note: title} of the notes whose file is in baselines/."""
    found = {}
    for path in sorted(notes.NOTES.glob("*.md")):
        note = path.relative_to(ROOT)
        if note.stem not in equations.METHODS and (ROOT / source_of(note)).exists():
            found[note] = re.match(r"# (.*)", path.read_text()).group(1)
    return found


def file_page(site: Site, source: Path) -> None:
    """What a page links to: another note, a file of Python, or anything else as it is."""
    page = page_of(source)
    if source.suffix in (".md", ".py"):
        cells = None
        if source.parent == Path("results/tables"):
            cells = Path("cells") / f"{source.stem.removesuffix('-laptop')}.html"
        elif source.parent == Path("results"):
            cells = Path("results.html")
        text = (ROOT / source).read_text()
        site.write(page, "file.html", source.stem, source=source, text=text, cells=cells)
    else:
        (site.out / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / source, site.out / page)


def build(out: Path) -> None:
    """Write the site: the methods' pages, the baselines', the results', and what these link to."""
    site = Site(out)
    made = set()
    for method in equations.METHODS:
        method_page(site, method)
        made |= {Path("docs/methods") / f"{method}.md", Path(f"{method}.py")}
    for note, title in baselines().items():
        site.write(page_of(note), "baseline.html", title, text=(ROOT / note).read_text(), note=note,
                   file=source_of(note))
        made |= {note, source_of(note)}
    site.write(Path("index.html"), "index.html", "Methods", titles=TITLES, baselines=baselines(),
               sentence=equations.sentence())
    results.build(site)
    while site.waiting:
        source = site.waiting.pop()
        if source not in made:
            file_page(site, source)
