"""The tables as text: pages in markdown, results.csv, results/README.md and the block between two marks in
README.md."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from plumbing.files import output_folder, write_csv, write_text
from plumbing.settings import SCALES
from reproduce import figures
from reproduce.cells import SEEDS, WIDE, Cell, FilledBlock, FilledRow, cells_in, chance, filled, run_of
from reproduce.claims import COMMITTED, Answer, Paper, answers
from reproduce.claims_pages import answer_words, name_of, paper_sentence, table_of_all, write_pages
from reproduce.records import Records, command_of
from reproduce.scoreboard import counts_of, outcome, sentence
from reproduce.statistics import BySeed, deviation, mean, paired
from reproduce.tables import PAPERS, Row, Table
from reproduce.elsewhere import Reported, attach, draw_reported, reported_page

from tabulate import tabulate

MADE_BY = "Made by `python reproduce_tables.py`"  # stands in results/README.md
MARKS = "<!-- results: written by reproduce_tables.py -->", "<!-- end of results -->"
SMALLER = "smaller images, fewer rounds; not comparable with the published numbers"
CODE_MARK = "† the current code gives other numbers (`reproduce_tables.py --check`)."
LEGEND = ("A cell: published mean ± deviation [printed elsewhere] / ours ± deviation (seeds), then the "
          "difference with its 95% interval (Welch's) and a mark; - is not printed or not measured. = 0 is "
          f"in the interval, * it is not, ~ 0 is in it and it is wider than ±{WIDE:g} points, ? nothing is "
          f"decided (fewer than {SEEDS} seeds here, or no deviation or number of trials in the paper). One "
          "interval in twenty leaves 0 out by chance. The deviation of a printed mean is that of its "
          "columns, as if they were independent. " + CODE_MARK)
SMALLER_LEGEND = (f"A cell: ours ± deviation (seeds) at this scale; - is not measured. {CODE_MARK} The last "
                  "row: guessing one of the classes.")
LEGENDS = {True: LEGEND, False: SMALLER_LEGEND}  # by whether the scale is the paper's
# Behind a difference.
VERDICT_MARKS = {"agrees": " =", "unclear": " ~", "differs": " *", "untested": " ?", "": ""}
CSV_HEAD = ["kind", "paper", "table", "scale", "block", "method", "column", "published",
            "published_deviation", "printed_elsewhere", "ours", "ours_deviation", "seeds", "values",
            "difference", "low", "high", "status", "precision", "differs_now", "runs", "commits", "module"]


# All tables


def render(tables: list[Table], records: Records, out: Path, whole: bool = True,
           papers: list[Paper] | None = None, elsewhere: dict[tuple, list[Reported]] | None = None) -> str:
    """Write tables/*.md, the figures and, if these are all tables, results.csv, README.md and
    the pages of the papers' claims into `out`; returns the text for the terminal."""
    shown, of_scales, counts, seen, lines = [], {}, Counter(), set(), [CSV_HEAD]
    at = {scale: [filled(table, records, scale) for table in tables] for scale in SCALES}
    for table, blocks in zip(tables, at["paper"]):
        attach(elsewhere or {}, table, blocks)
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
                counts += counts_of(blocks, smaller, seen)
            if any(block.measured for block in blocks):
                pages += [f"### {head}", "\n\n".join(parts).replace("## ", "#### ")]
            elif scale == "paper":
                empty.append(f"[{name}](tables/{name}.md)")
            else:  # what records that are no longer there have left
                (out / "tables" / f"{name}.md").unlink(missing_ok=True)
                continue
            shown += [f"# {head}", *parts]
            lines += cell_lines(table, blocks, scale)
            write_text(out / "tables" / f"{name}.md", as_markdown(table, parts, scale))
    state = sentence(counts)
    if whole:
        every = answers(papers or [], tables, records)
        if every:
            write_pages(papers, every, out, records, elsewhere or {})
        if elsewhere:
            write_text(out / "elsewhere.md", reported_page(elsewhere, tables))
            draw_reported(elsewhere, tables, out / "elsewhere.png")
        write_csv(out / "results.csv", lines + claim_lines(every))
        write_text(out / "README.md", overview(of_scales, state, records, every))
        readme = out.parent / "README.md"
        if out.name == "results" and readme.exists() and MARKS[0].encode() in readme.read_bytes():
            content, (first, last) = readme.read_text(), MARKS
            before, after = content.split(first)[0], content.split(last)[1]
            text = f"{readme_words(papers or [], every)}\n\n{textwrap.fill(state, 150)}"
            write_text(readme, f"{before}{first}\n{text}\n{last}{after}")
    return "\n\n".join([*shown, state] if whole else shown) or "Claims are rendered without --only."


def claim_folder(out: Path) -> None:
    """Stop if the folder has files of something else: they might be lost. By its README.md it is known."""
    output_folder(out, "README.md", MADE_BY)
    if not (out / "README.md").exists():
        write_text(out / "README.md", f"# Results\n\n{MADE_BY}.\n")


def readme_words(papers: list[Paper], every: list[Answer]) -> str:
    """The README's block: a plot of answers A, and a sentence for each paper."""
    picture = "![Gain of every claim: printed, and measured in the paper's own setting](results/claims.png)"
    lines = [paper_sentence([one for one in every if one.paper is paper]) for paper in papers]
    filled_lines = [textwrap.fill(f"- {line}", 150, subsequent_indent="  ") for line in lines]
    return "\n".join([picture, "", *filled_lines])


def overview(of_scales: dict[str, tuple], state: str, records: Records, every: list[Answer]) -> str:
    """results/README.md: the claims, the counts, then every table and figure that has something."""
    text = ["# Results"]
    if every:
        papers = {one.paper.id: name_of(one.paper) for one in every}
        pages = ", ".join(f"[{name}](claims/{paper}.md)" for paper, name in papers.items())
        text += [f"Does it hold? A page for each paper: {pages}. By [one rule](../claims/RULE.md) of "
                 f"{COMMITTED[:10]}; runs that are older are marked. "
                 "[How far published values lie apart](elsewhere.md).",
                 "![Gain of every claim: printed, and measured in the paper's own setting](claims.png)",
                 table_of_all(every)]
    text += [state,
             f"{MADE_BY} from {len(records.every)} recorded runs. Every number, one a line: "
             "[results.csv](results.csv). "
             f"{checked_words(records)}"]
    for scale, head in (("paper", "## Paper scale"), ("laptop", f"## Laptop scale ({SMALLER})")):
        pages, pictures, empty = of_scales[scale]
        text += [head, LEGENDS[scale == "paper"], *pages, *pictures]
        if empty:
            text.append(f"Nothing is measured yet of {', '.join(empty)}.")
    return "\n\n".join(text) + "\n"


def checked_words(records: Records) -> str:
    """What --check has found, and how many records are withdrawn."""
    settings = {record["setting"]: record for record in records.every}
    outcomes = Counter(records.check_of(record).get("outcome") for record in settings.values())
    found = outcomes["equal"], outcomes["differs"]
    words = (f"`--check` has begun one run of {sum(found)} of the {len(settings)} settings again: {found[0]} "
             f"give the recorded digits, {found[1]} differ (†). {outcomes['not comparable']} more ran on "
             "another processor than the one that checked.")
    withdrawn = records.path.with_name("withdrawn.jsonl")
    if withdrawn.exists():
        lines = len(withdrawn.read_text().splitlines())
        words += f" {lines} withdrawn records, each with its reason: [withdrawn.jsonl](withdrawn.jsonl)."
    return words


# One table


def title(table: Table, scale: str) -> str:
    if scale == "paper":
        return table.title
    return f"{table.title} - at {scale.upper()} scale, not comparable with the published numbers"


def as_markdown(table: Table, parts: list[str], scale: str) -> str:
    """A page."""
    where_from = "The runs behind each cell: [results.csv](../results.csv), by their ids in runs.jsonl."
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
        verdicts = Counter(cell.verdict for cell in measured if not cell.computed)
        said = [outcome(verdicts), f"{verdicts['']} without a published number" if verdicts[""] else ""]
        words += f": {', '.join(filter(None, said))}" if any(said) else ""
    differing = sum(cell.differs_now for cell in measured)
    if differing:
        words += f"; {differing} that the current code does not give (†)"
    return words + "."


def cell_lines(table: Table, blocks: list[FilledBlock], scale: str) -> list[list]:
    """Of each cell: what is published, ours with its seeds, the difference, and the runs."""
    lines = []
    for block in blocks:
        for line in block.rows:
            for column, cell in zip(block.block.columns, line.cells):
                printed, difference, interval = ["", ""], None, None
                if scale == "paper":
                    printed, difference = [*cell.printed, "", ""][:2], cell.difference
                    interval = cell.interval
                lines.append([
                    "cell", table.paper, table.id, scale, block.block.title, line.row.method, column.name,
                    *printed, " ".join(cell.elsewhere),
                    *measured(cell.values, difference, interval, cell.verdict, cell.behind, cell.differs_now),
                    line.row.module])
    return lines


def claim_lines(every: list[Answer]) -> list[list]:
    """Of each claim under each specification: the printed gain, ours by seed, and what it says."""
    lines = []
    for answer in every:
        for one in answer.measured:
            gain, status = one.gain(), "; ".join(dict.fromkeys(answer_words(one)))
            lines.append([
                "claim", answer.paper.id, answer.claim.id, "", one.specification.name,
                " minus ".join(answer.claim.methods), answer.claim.metric, fixed(answer.printed),
                fixed(one.deviation), "",
                *measured(one.gains, one.difference, gain and gain.interval, status, one.records, False), ""])
    return lines


def measured(values: BySeed, difference: float | None, interval: tuple[float, float] | None, status: str,
             records: list[dict], differs_now: bool) -> list:
    """The columns from `ours` to `commits`."""
    low, high = interval or (None, None)
    return [
        fixed(mean(values)), fixed(deviation(values)),
        " ".join(map(str, values)), " ".join(map(fixed, values.values())),
        fixed(difference), fixed(low), fixed(high), status,
        each_once(record["args"]["precision"] for record in records),
        int(differs_now) if records else "",
        each_once(record["id"] for record in records),
        each_once(record["commit"][:12] for record in records),
    ]


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
    columns, text = block.block.columns, ours
    if scale == "paper" and not block.block.ours:
        text = cell_text
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
    return row.method


def cell_text(cell: Cell) -> str:
    """Published mean and deviation, what others print of it, then ours with the number of seeds, the
    difference and the marks."""
    published = " ± ".join(cell.printed) or "-"
    if cell.elsewhere:
        published += f" [{', '.join(cell.elsewhere)}]"
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
        if cell.interval:
            words += " ({:+.2f} to {:+.2f})".format(*cell.interval)
    return words + VERDICT_MARKS[cell.verdict] + (" †" if cell.differs_now else "")


def number(value: float) -> str:
    """Two decimals, none from a thousand on."""
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"


def first_command(block: FilledBlock, scale: str) -> str:
    """The command of the first row shown that has one in the first column; where it is recorded, the one that
    gives the recorded bytes."""
    for line in shown_rows(block, scale):
        if line.row.module:
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
    """The paper's method against each other row, where both have runs of the same seeds and precision; in the
    mean column alone, where there is one."""
    has_mean = any(column.kind == "mean" for column in block.block.columns)
    name, lines = PAPERS[table.paper].split(" (")[0], []
    rows = [line for line in block.rows if line.row.module]
    own = next((line for line in rows if line.row.method.split(" (")[0] == name), None)
    for line in rows if own else []:
        for column, mine, theirs in zip(block.block.columns, own.cells, line.cells):
            pair = paired(mine.values, theirs.values)
            if column.kind != "mean" and has_mean:
                continue
            if pair and line is not own and mine.precision == theirs.precision:
                low, high = pair.interval
                lines.append(f"{name} minus {line.row.method}, {column.name}: {pair.difference:+.2f}, "
                             f"95% interval {low:.2f} to {high:.2f} ({pair.seeds} paired seeds)")
    return lines
