"""The tables as text: pages in markdown, csv, the terminal, results/README.md and the block between two marks
in README.md."""

from __future__ import annotations

import csv
import io
import tomllib
from dataclasses import dataclass
from pathlib import Path

from plumbing.errors import Stop
from plumbing.files import write_whole
from plumbing.settings import SCALES
from reproduce import figures
from reproduce.cells import Cell, FilledBlock, FilledRow, filled, run_of
from reproduce.records import Records, Run
from reproduce.statistics import paired
from reproduce.tables import PAPERS, Row, Table

from tabulate import tabulate

# Each paper's own method.
OWN = {"fedsr": "FedSR", "fedadg": "FedADG", "fedgala": "FedGaLA", "fedcir": "FedCiR", "fdse": "FDSE"}
MARKS = "<!-- results: written by reproduce_tables.py -->", "<!-- end of results -->"
SMALLER = "smaller images, fewer rounds; not comparable with the published numbers"
LEGEND = ("A cell: published mean ± deviation / ours ± deviation (seeds), difference; - is not printed or "
          "not measured; * is a difference of more than two combined standard errors, ? one that cannot be "
          "tested (one seed here, or no deviation or number of trials in the paper).")
SMALLER_LEGEND = ("A cell: published mean ± deviation / ours ± deviation (seeds) at this scale, without a "
                  "difference.")
FAR = {True: " *", False: "", None: " ?"}  # the mark behind a difference
CSV_HEAD = ["table", "scale", "block", "method", "column", "published_mean", "published_deviation", "mean",
            "deviation", "seeds", "difference", "beyond_two_standard_errors", "module"]
SUMMARY_HEAD = ["cells of the tables of", "all", "measured", "computed", "measured at laptop scale",
                "of baselines not written yet", "not run"]
README_HEAD = ["paper", "published cells measured at its scale", "at laptop scale", "does it agree?"]


@dataclass
class Page:
    """A table at a scale, as markdown."""

    scale: str
    name: str
    text: str
    measured: bool  # whether any cell has a value


@dataclass
class Picture:
    """A figure at a scale."""

    scale: str
    table: Table
    name: str  # of its file


@dataclass
class Tally:
    """How many cells the tables of a paper have at a scale, without those that the paper quotes or does not
    have."""

    cells: int = 0
    measured: int = 0
    computed: int = 0
    unwritten: int = 0  # of baselines that are not implemented

    @property
    def not_run(self) -> int:
        return self.cells - self.measured - self.computed - self.unwritten

    def count(self, blocks: list[FilledBlock]) -> None:
        """Add the cells of a table."""
        for block in blocks:
            for line in block.rows:
                if not line.row.quoted and not line.row.ours:
                    self.count_row(line)

    def count_row(self, line: FilledRow) -> None:
        self.cells += len(line.cells)
        if not line.row.implemented:
            self.unwritten += len(line.cells)
        for cell in line.cells:
            if cell.values and cell.computed:
                self.computed += 1
            elif cell.values:
                self.measured += 1


# All tables


def render(tables: list[Table], records: Records, out: Path, whole: bool = True) -> str:
    """Write tables/*.md and *.csv, the figures and, if these are all tables, README.md into `out`; returns
    the text for the terminal."""
    shown, pages, pictures, tallies = [], [], [], {}
    for scale in SCALES:
        tallies[scale] = {paper: Tally() for paper in PAPERS}
        for table in tables:
            blocks = filled(table, records, scale)
            name = table.file_name(scale)
            if table.figure:
                path = out / "figures" / f"{name}.png"
                if figures.draw(table, blocks, path, scale):
                    pictures.append(Picture(scale, table, path.name))
                    shown.append(f"{title(table, scale)}: {path}")
                continue
            tallies[scale][table.paper].count(blocks)
            measured = any(block.measured for block in blocks)
            if scale == "paper" or measured:
                page = Page(scale, name, as_markdown(table, blocks, scale), measured)
                write_text(out / "tables" / f"{name}.md", page.text)
                write_text(out / "tables" / f"{name}.csv", as_csv(table, blocks, scale))
                pages.append(page)
                shown.append(as_text(table, blocks, scale))
    counts = summary(tallies)
    if whole:
        as_github = tabulate(counts, SUMMARY_HEAD, "github")
        if out.name == "results" and (out.parent / "README.md").exists():
            update_readme(out.parent / "README.md", tallies, read_agreement(out / "agreement.toml"))
        write_text(out / "README.md", overview(pages, pictures, as_github, records))
    return "\n\n".join(shown) + "\n\n" + tabulate(counts, SUMMARY_HEAD)


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda file: file.write(text.encode()))


def summary(tallies: dict[str, dict[str, Tally]]) -> list[list]:
    """A row of SUMMARY_HEAD for each paper with tables."""
    rows = []
    for paper, tally in tallies["paper"].items():
        if tally.cells:
            at_laptop_scale = tallies["laptop"][paper].measured
            rows.append([PAPERS[paper], tally.cells, tally.measured, tally.computed, at_laptop_scale,
                         tally.unwritten, tally.not_run])
    return rows


def overview(pages: list[Page], pictures: list[Picture], counts: str, records: Records) -> str:
    """results/README.md: the summary, then every table and figure that has something."""
    origin = (f"Made by `python reproduce_tables.py` from {records.count} recorded runs; in words: "
              f"[findings.md](findings.md).")
    parts = ["# Results", origin, counts]
    for scale, head in (("paper", "## Paper scale"), ("laptop", f"## Laptop scale ({SMALLER})")):
        parts.append(head)
        of_scale = [page for page in pages if page.scale == scale]
        parts += [below(page.text, "###") for page in of_scale if page.measured]
        parts += [with_notes(picture) for picture in pictures if picture.scale == scale]
        empty = [f"[{page.name}](tables/{page.name}.md)" for page in of_scale if not page.measured]
        if empty:
            parts.append(f"Nothing is measured yet of {', '.join(empty)}.")
    return "\n\n".join(parts) + "\n"


def with_notes(picture: Picture) -> str:
    """A figure in results/README.md."""
    table = picture.table
    heading = f"### {title(table, picture.scale)}"
    image = f"![{table.title}](figures/{picture.name})"
    return "\n\n".join([heading, image, *table.notes])


def update_readme(readme: Path, tallies: dict[str, dict[str, Tally]], agreement: dict[str, str]) -> None:
    """The state of the results, between the two marks of the repository's README: of each paper how many of
    its published cells were measured, and in a sentence (results/agreement.toml) whether they agree."""
    content = readme.read_text()
    first, last = MARKS
    if content.count(first) != 1 or content.count(last) != 1:
        raise Stop(f"{readme} has lost a mark of its results: expected one {first} and one {last}")
    rows = []
    for paper, tally in tallies["paper"].items():
        if tally.cells:
            measured = f"{tally.measured + tally.computed} of {tally.cells}"
            rows.append([PAPERS[paper], measured, tallies["laptop"][paper].measured, agreement[paper]])
    table = tabulate(rows, README_HEAD, "pipe")
    before = content.split(first)[0] + first
    after = last + content.split(last)[1]
    write_text(readme, "\n\n".join([before, table, after]))


def read_agreement(path: Path) -> dict[str, str]:
    """Of each paper the sentence that says whether what was measured agrees with it."""
    try:
        agreement = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as e:
        raise Stop(f"{path} cannot be read ({e}); expected a line paper = \"sentence\" for each paper", 2)
    missing = [paper for paper in PAPERS if not isinstance(agreement.get(paper), str)]
    if missing:
        raise Stop(f"{path} has no sentence for {', '.join(missing)}", 2)
    return agreement


def below(page: str, level: str) -> str:
    """A page as a part of another: its title at this level of headings, its own one deeper."""
    return page.replace("\n## ", f"\n{level}# ").replace("# ", f"{level} ", 1).strip()


# One table


def title(table: Table, scale: str) -> str:
    if scale == "paper":
        return table.title
    return f"{table.title} - at {scale.upper()} scale, not comparable with the published numbers"


def as_text(table: Table, blocks: list[FilledBlock], scale: str) -> str:
    """A table for the terminal."""
    parts = [title(table, scale), table.protocol]
    for block in blocks:
        parts.append(f"{block.block.title}\n{grid(block, scale, 'simple')}")
    return "\n".join(parts)


def as_markdown(table: Table, blocks: list[FilledBlock], scale: str) -> str:
    """A page; at a smaller scale only the blocks in which something is measured."""
    legend = LEGEND if scale == "paper" else SMALLER_LEGEND
    parts = [f"# {title(table, scale)}", f"{table.protocol[:1].upper()}{table.protocol[1:]}. {legend}"]
    for block in blocks:
        if scale != "paper" and not block.measured:
            continue
        parts += [f"## {block.block.title}", grid(block, scale, "github")]
        run = first_run(block, scale)
        if run:
            parts.append(f"First row and column, seed 0: `{run.command}`")
        compared = comparisons(table, block)
        if compared:
            parts.append(bullets(compared))
    notes = list(table.notes)
    for block in table.blocks:
        notes += [f"{row.method}: {row.note}" for row in block.rows if row.note]
    if notes:
        parts.append(bullets(list(dict.fromkeys(notes))))  # each once
    return "\n\n".join(parts) + "\n"


def as_csv(table: Table, blocks: list[FilledBlock], scale: str) -> str:
    """A line for each cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_HEAD)
    for block in blocks:
        for line in block.rows:
            for column, cell in zip(block.block.columns, line.cells):
                where = [table.id, scale, block.block.title, line.row.method, column.name]
                writer.writerow([*where, *numbers_of(cell, scale), line.row.module])
    return out.getvalue()


def numbers_of(cell: Cell, scale: str) -> list:
    """Of a line of the csv: published mean and deviation, ours, the seeds, the difference and whether it is
    far."""
    published = [*cell.published, "", ""][:2]
    seeds = " ".join(map(str, cell.values))
    difference, far = "", ""
    if scale == "paper" and cell.difference is not None and not cell.elsewhere:
        difference = fixed(cell.difference)
        if cell.far is not None:
            far = int(cell.far)
    return [*published, fixed(cell.mean), fixed(cell.deviation), seeds, difference, far]


def fixed(value: float | None) -> str:
    """Four decimals; empty if there is no value."""
    return "" if value is None else f"{value:.4f}"


def bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def grid(block: FilledBlock, scale: str, style: str) -> str:
    """The rows and columns of a block, in a style of tabulate."""
    lines = []
    for line in block.rows:
        digits = decimals(line.row)
        cells = [cell_text(cell, digits, with_difference=scale == "paper") for cell in line.cells]
        lines.append([label(line.row), *cells])
    head = ["", *(column.name for column in block.block.columns)]
    return tabulate(lines, head, style, disable_numparse=True)


def label(row: Row) -> str:
    if row.quoted:
        return f"{row.method} (quoted)"
    if row.ours:
        return f"{row.method} (ours)"
    if not row.implemented:
        return f"{row.method} (not implemented yet: {row.module})"
    return row.method


def decimals(row: Row) -> int:
    """With how many decimals the paper prints a row: the most of its numbers."""
    most = 0
    for cell in row.published:
        for value in cell:
            if value % 1:
                most = max(most, len(str(float(value)).partition(".")[2]))
    return most


def cell_text(cell: Cell, digits: int, with_difference: bool) -> str:
    """Published mean and deviation, then ours with the number of seeds, then the difference and its mark."""
    published = " ± ".join(f"{value:.{digits}f}" for value in cell.published) or "-"
    if not cell.values:
        return f"{published} / -"
    ours = number(cell.mean)
    if cell.deviation is not None:
        ours += f" ± {number(cell.deviation)}"
    if not cell.computed:
        ours += f" ({len(cell.values)})"
    if cell.difference is None or cell.elsewhere or not with_difference:
        return f"{published} / {ours}"
    mark = "" if cell.computed else FAR[cell.far]
    return f"{published} / {ours}, {cell.difference:+.2f}{mark}"


def number(value: float) -> str:
    """Two decimals, none from a thousand on."""
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"


def first_run(block: FilledBlock, scale: str) -> Run | None:
    """The run of the first row that has one in the first column."""
    for line in block.rows:
        if line.row.implemented:
            run = run_of(block.block, line.row, block.block.columns[0], scale, 0)
            if run:
                return run
    return None


def comparisons(table: Table, block: FilledBlock) -> list[str]:
    """The paper's method against each other row, where both have runs of the same seeds."""
    own = own_row(table, block)
    lines = []
    for line in block.rows:
        if own is None or line is own:
            continue
        for column, mine, theirs in zip(block.block.columns, own.cells, line.cells):
            pair = paired(mine.values, theirs.values)
            if pair and not mine.computed:
                low, high = pair.interval
                lines.append(f"{OWN[table.paper]} minus {line.row.method}, {column.name}: "
                             f"{pair.difference:+.2f}, 95% interval {low:.2f} to {high:.2f} ({pair.seeds} "
                             f"paired seeds)")
    return lines


def own_row(table: Table, block: FilledBlock) -> FilledRow | None:
    """The row of the paper's own method, whatever is behind its name in brackets."""
    for line in block.rows:
        if line.row.implemented and line.row.method.split(" (")[0] == OWN[table.paper]:
            return line
    return None
