"""The tables as text: pages in markdown, csv, results/README.md and the block between two marks in
README.md."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from plumbing.errors import Stop
from plumbing.files import write_whole
from plumbing.settings import SCALES
from reproduce import figures, scoreboard
from reproduce.cells import Cell, FilledBlock, FilledRow, cells_in, chance, filled, run_of
from reproduce.records import Records, command_of
from reproduce.scoreboard import counts_of, outcome, sentence
from reproduce.statistics import paired
from reproduce.tables import PAPERS, Row, Table

from tabulate import tabulate

MADE_BY = "Made by `python reproduce_tables.py`"  # stands in results/README.md
MARKS = "<!-- results: written by reproduce_tables.py -->", "<!-- end of results -->"
SMALLER = "smaller images, fewer rounds; not comparable with the published numbers"
CODE_MARK = "† the code of now gives other numbers (`reproduce_tables.py --check`)."
LEGEND = ("A cell: published mean ± deviation / ours ± deviation (seeds), difference and marks; - is not "
          "printed or not measured. = no difference is found, * it differs (Welch's test, corrected by Holm "
          "to 5% for all tests of a page together), ~ it differs by its own test alone, ? cannot be tested "
          f"(one seed here, or no deviation or number of trials in the paper). {CODE_MARK}")
SMALLER_LEGEND = (f"A cell: ours ± deviation (seeds) at this scale; - is not measured. {CODE_MARK} The last "
                  "row: guessing one of the classes.")
LEGENDS = {True: LEGEND, False: SMALLER_LEGEND}  # by whether the scale is the paper's
# Behind a difference.
VERDICT_MARKS = {"agrees": " =", "unclear": " ~", "differs": " *", "untested": " ?", "": ""}
CSV_HEAD = ["table", "scale", "block", "method", "column", "published_mean", "published_deviation", "mean",
            "deviation", "seeds", "values", "difference", "verdict", "corrected_probability", "precision",
            "differs_now", "runs", "commits", "module"]
PICTURE = "A bar for each table: no difference found, unclear, differs, not testable, laptop only, not run"


# All tables


def render(tables: list[Table], records: Records, out: Path, whole: bool = True) -> str:
    """Write tables/*.md and *.csv, the figures and, if these are all tables, README.md and the scoreboard
    into `out`; returns the text for the terminal."""
    shown, of_scales, board = [], {}, []
    at = {scale: [filled(table, records, scale) for table in tables] for scale in SCALES}
    for scale in SCALES:
        pages, pictures, empty = of_scales[scale] = [], [], []  # of README.md
        for table, blocks, smaller in zip(tables, at[scale], at["laptop"]):
            name, head = table.file_name(scale), title(table, scale)
            if table.figure:
                path = out / "figures" / f"{name}.png"
                if figures.draw(table, blocks, path, scale):
                    pictures += [f"### {head}", f"![{table.title}](figures/{path.name})", *table.notes]
                    shown.append(f"{head}: {path}")
                continue
            parts = contents(table, blocks, scale)
            if scale == "paper":
                board.append((table, counts_of(blocks, smaller)))
            if any(block.measured for block in blocks):
                pages += [f"### {head}", "\n\n".join(parts).replace("## ", "#### ")]
            elif scale == "paper":
                empty.append(f"[{name}](tables/{name}.md)")
            else:  # what records that are no longer there have left
                for ending in ("md", "csv"):
                    (out / "tables" / f"{name}.{ending}").unlink(missing_ok=True)
                continue
            shown += [f"# {head}", *parts]
            write_text(out / "tables" / f"{name}.md", as_markdown(table, parts, scale))
            write_text(out / "tables" / f"{name}.csv", as_csv(table, blocks, scale))
    state = sentence(board)
    if whole:
        scoreboard.draw(board, out / "scoreboard.png")
        write_text(out / "scoreboard.md", scoreboard.as_markdown(board))
        write_text(out / "README.md", overview(of_scales, state, len(records.every)))
        readme = out.parent / "README.md"
        if out.name == "results" and readme.exists() and MARKS[0].encode() in readme.read_bytes():
            update_readme(readme, state, tomllib.loads((out / "agreement.toml").read_text()))
    return "\n\n".join([*shown, state])


def refuse_other_readme(out: Path) -> None:
    """Stop if the folder has a README.md that is none of results: it would be lost."""
    readme = out / "README.md"
    if readme.exists() and MADE_BY.encode() not in readme.read_bytes():
        raise Stop(f"{readme} is not of these tables, and would be replaced: give another --out", 2)


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda file: file.write(text.encode()))


def overview(of_scales: dict[str, tuple], state: str, count_of_runs: int) -> str:
    """results/README.md: the scoreboard, then every table and figure that has something."""
    origin = (f"{MADE_BY} from {count_of_runs} recorded runs; in words: "
              f"[findings.md](findings.md); the counts of each table: [scoreboard.md](scoreboard.md).")
    text = ["# Results", state, f"![{PICTURE}](scoreboard.png)", origin]
    for scale, head in (("paper", "## Paper scale"), ("laptop", f"## Laptop scale ({SMALLER})")):
        pages, pictures, empty = of_scales[scale]
        text += [head, LEGENDS[scale == "paper"], *pages, *pictures]
        if empty:
            text.append(f"Nothing is measured yet of {', '.join(empty)}.")
    return "\n\n".join(text) + "\n"


def update_readme(readme: Path, state: str, agreement: dict[str, str]) -> None:
    """The state of the results, between the two marks of the repository's README: the sentence, the picture,
    and of each paper (results/agreement.toml) whether what was measured agrees with it."""
    content, (first, last) = readme.read_text(), MARKS
    picture = f"[![{PICTURE}](results/scoreboard.png)](results/scoreboard.md)"
    lines = bullets([f"{PAPERS[paper]}: {agreement[paper]}." for paper in PAPERS])
    before, after = content.split(first)[0], content.split(last)[1]
    write_text(readme, "\n\n".join([before + first, state, picture, lines, last + after]))


# One table


def title(table: Table, scale: str) -> str:
    if scale == "paper":
        return table.title
    return f"{table.title} - at {scale.upper()} scale, not comparable with the published numbers"


def as_markdown(table: Table, parts: list[str], scale: str) -> str:
    """A page."""
    name = table.file_name(scale)
    where_from = f"The runs behind each cell: [{name}.csv]({name}.csv), ids of [runs.jsonl](../runs.jsonl)."
    if scale == "paper":
        where_from += " Where the published ones stand: [tables/published](../../tables/published)."
    return "\n\n".join([f"# {title(table, scale)}", LEGENDS[scale == "paper"], *parts, where_from]) + "\n"


def contents(table: Table, blocks: list[FilledBlock], scale: str) -> list[str]:
    """The parts of a page between its legend and its last line; at a smaller scale only the blocks in which
    something is measured."""
    protocol = table.protocol[:1].upper() + table.protocol[1:]
    parts = [f"{protocol}. {state_of(blocks, scale)}"]
    for block in blocks:
        if scale != "paper" and not block.measured:
            continue
        parts += [f"## {block.block.title}", grid(block, scale)]
        if scale != "paper":
            parts.append(budgets(block, scale))
        command = first_command(block, scale)
        if command:
            parts.append(f"First row and column, seed 0: `{command}`")
        compared = comparisons(table, block)
        if compared:
            parts.append(bullets(compared))
    if table.notes:
        parts.append(bullets(table.notes))
    return parts


def state_of(blocks: list[FilledBlock], scale: str) -> str:
    """How many cells of a page have a value, what they say, and how many of them later code does not give."""
    measured = [cell for cell in cells_in(blocks) if cell.values]
    if not measured:
        return "Nothing is measured yet."
    words = count(len(measured), "cell") + " measured"
    if scale == "paper":
        verdicts = Counter(cell.verdict for cell in measured)
        tests = sum(cell.corrected is not None for cell in measured)
        words += f": {outcome(verdicts)} ({count(tests, 'test')})"
        if verdicts[""]:
            words += f", {verdicts['']} without a published number"
    differing = sum(cell.differs_now for cell in measured)
    if differing:
        words += f"; {differing} that the code of now does not give (†)"
    return words + "."


def as_csv(table: Table, blocks: list[FilledBlock], scale: str) -> str:
    """A line for each cell: what is published, ours with its seeds, the difference, and the runs."""
    lines = [CSV_HEAD]
    for block in blocks:
        for line in block.rows:
            for column, cell in zip(block.block.columns, line.cells):
                printed, difference = ["", ""], ""
                if scale == "paper":
                    printed, difference = [*cell.printed, "", ""][:2], fixed(cell.difference)
                lines.append([
                    table.id, scale, block.block.title, line.row.method, column.name, *printed,
                    fixed(cell.mean), fixed(cell.deviation), " ".join(map(str, cell.values)),
                    " ".join(map(fixed, cell.values.values())), difference, cell.verdict,
                    fixed(cell.corrected), each_once(record["args"]["precision"] for record in cell.behind),
                    int(cell.differs_now) if cell.behind else "",
                    each_once(record["id"] for record in cell.behind),
                    each_once(record["commit"][:12] for record in cell.behind), line.row.module])
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


def each_once(words: Iterable[str]) -> str:
    return " ".join(dict.fromkeys(words))


def fixed(value: float | None) -> str:
    """Four decimals; empty if there is no value."""
    return "" if value is None else f"{value:.4f}"


def bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def grid(block: FilledBlock, scale: str) -> str:
    """The rows and columns of a block; at a smaller scale without the published numbers and the rows of which
    nothing is measured."""
    columns, text = block.block.columns, cell_text if scale == "paper" else ours
    lines = []
    for line in shown_rows(block, scale):
        lines.append([label(line.row), *(text(cell) or "-" for cell in line.cells)])
    if scale != "paper":
        accuracies = [chance(block.block, column) for column in columns]
        lines.append(["chance", *("-" if accuracy is None else number(accuracy) for accuracy in accuracies)])
    return tabulate(lines, ["", *(column.name for column in columns)], "github", disable_numparse=True)


def shown_rows(block: FilledBlock, scale: str) -> list[FilledRow]:
    """All rows at the paper's scale, at a smaller one those of which something is measured."""
    return [line for line in block.rows if scale == "paper" or any(cell.values for cell in line.cells)]


def label(row: Row) -> str:
    if row.quoted:
        return f"{row.method} (quoted)"
    if row.ours:
        return f"{row.method} (ours)"
    if not row.implemented:
        return f"{row.method} (not implemented yet: {row.module})"
    return row.method


def cell_text(cell: Cell) -> str:
    """Published mean and deviation, then ours with the number of seeds, the difference and the marks."""
    published = " ± ".join(cell.printed) or "-"
    return f"{published} / {ours(cell) or '-'}"


def ours(cell: Cell) -> str:
    """Our mean and deviation with the number of seeds, then, where the cell is compared, the difference and
    what it says, and the marks of its code; empty if nothing is measured."""
    if not cell.values:
        return ""
    words = number(cell.mean)
    if cell.deviation is not None:
        words += f" ± {number(cell.deviation)}"
    if not cell.computed:
        words += f" ({len(cell.values)})"
    if cell.verdict:
        words += f", {cell.difference:+.2f}"
    return words + VERDICT_MARKS[cell.verdict] + (" †" if cell.differs_now else "")


def number(value: float) -> str:
    """Two decimals, none from a thousand on."""
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"


def first_command(block: FilledBlock, scale: str) -> str:
    """The command of the first row shown that has one in the first column; where it is recorded, the one that
    gives the recorded bytes."""
    for line in shown_rows(block, scale):
        if line.row.implemented:
            run = run_of(block.block, line.row, block.block.columns[0], scale, 0)
            record = line.cells[0].records.get(0)
            if record or run:
                return command_of(record) if record else run.command
    return ""


def budgets(block: FilledBlock, scale: str) -> str:
    """How long the rows of a block with numbers were trained at a smaller scale, in words."""
    rows_of = {}
    for line in block.rows:
        for column, cell in zip(block.block.columns, line.cells):
            run = run_of(block.block, line.row, column, scale, 0) if cell.values else None
            if run:
                rows_of.setdefault(budget(json.loads(run.work)[1]), {})[line.row.method] = True
    parts = [f"{', '.join(names)}: {words}" for words, names in rows_of.items()]
    return f"Budget: {'; '.join(rows_of if len(rows_of) == 1 else parts)}."


def budget(args: dict) -> str:
    """24 rounds of 20 steps of 32 images, 64x64."""
    steps = count(args["steps"], "step") if args["steps"] else count(args["epochs"], "epoch")
    size = args.get("crop") or args["image_size"]
    return f"{count(args['rounds'], 'round')} of {steps} of {args['batch_size']} images, {size}x{size}"


def count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def comparisons(table: Table, block: FilledBlock) -> list[str]:
    """The paper's method against each other row, where both have runs of the same seeds and precision."""
    name, lines = PAPERS[table.paper].split(" (")[0], []
    rows = [line for line in block.rows if line.row.implemented]
    own = next((line for line in rows if line.row.method.split(" (")[0] == name), None)
    for line in rows if own else []:
        for column, mine, theirs in zip(block.block.columns, own.cells, line.cells):
            pair = paired(mine.values, theirs.values)
            if pair and line is not own and mine.precision == theirs.precision:
                low, high = pair.interval
                lines.append(f"{name} minus {line.row.method}, {column.name}: {pair.difference:+.2f}, "
                             f"95% interval {low:.2f} to {high:.2f} ({pair.seeds} paired seeds)")
    return lines
