"""The tables as text: pages in markdown, results.csv, results/README.md with its leaderboards, and the block
between two marks in README.md."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from plumbing.run.files import output_folder, write_csv, write_text
from plumbing.run.settings import SCALES
from plumbing.run.several import BySeed, accuracies_of, by_seed, means_over_columns
from reproduce import figures
from reproduce.cells import SEEDS, WIDE, Cell, FilledBlock, cells_in, chance, filled, rows_of
from reproduce.claims import Answer, Paper, answers, metric_of
from reproduce.claims_pages import answer_words, count, draw_figures, write_pages
from reproduce.drawing import table_text
from reproduce.measures.finished import name_of as name_of_run
from reproduce.methods import method, setting
from reproduce.records import Records, command_of, flags_of
from reproduce.scoreboard import counts_of, outcome, sentence
from reproduce.intervals import deviation, mean, paired
from reproduce.tables import Row, Table
from reproduce.tables import papers as titles
from reproduce.templates import TEMPLATES

MADE_BY = "Made by `python reproduce_tables.py`"  # stands in results/README.md
BLOCKS = {"results": "readme.md.jinja", "methods": "methods.md.jinja"}  # of the README: their templates
LEGEND = ("A cell: published mean ± deviation [printed elsewhere] / ours ± deviation (seeds), then the "
          "difference with its 95% interval (Welch's) and a mark; - is not printed or not measured. = 0 is "
          f"in the interval, * it is not, ~ 0 is in it and it is wider than ±{WIDE:g} points, ? nothing is "
          f"decided (fewer than {SEEDS} seeds here, or no deviation or number of trials in the paper). One "
          "interval in twenty leaves 0 out by chance. The deviation of a printed mean is that of its "
          "columns, as if they were independent.")
SMALLER_LEGEND = ("A cell: ours ± deviation (seeds) at this scale; - is not measured. The last row: guessing "
                  "one of the classes.")
# Behind a difference.
VERDICT_MARKS = {"agrees": " =", "unclear": " ~", "differs": " *", "untested": " ?", "": ""}
CSV_HEAD = ["kind", "paper", "table", "scale", "block", "method", "column", "published",
            "published_deviation", "printed_elsewhere", "ours", "ours_deviation", "seeds", "values",
            "difference", "low", "high", "status", "precision", "runs", "commits", "module"]
LEAST = 3  # seeds of a row
PROTOCOLS = {"indomain": "in-domain", "lodo": "one domain left out", "linear": "linear evaluation"}
COMMON_FIELDS = ("rounds", "epochs", "steps", "batch_size", "image_size", "backbone")  # of all rows


# All tables


def render(tables: list[Table], records: Records, out: Path, whole: bool = True,
           papers: Sequence[Paper] = ()) -> str:
    """Write tables/*.md, the figures and, if these are all tables, results.csv, README.md and
    the pages of the papers' claims into `out`; returns the text for the terminal."""
    every = answers(papers, tables, records) if whole else []
    shown, counts, seen, lines = [], Counter(), set(), [CSV_HEAD]
    listed, pictures = [], []  # of README.md
    recorded = {scale for _, _, scale in records.worked_on}
    scales = [scale for scale in SCALES if scale != "smoke" or scale in recorded]
    at = {scale: [filled(table, records, scale) for table in tables] for scale in scales}
    for scale in scales:
        for table, blocks, smaller in zip(tables, at[scale], at["laptop"]):
            name, head = table.file_name(scale), title(table, scale)
            if table.figure:
                path = out / "figures" / f"{name}.png"
                if figures.draw(table, blocks, path, scale):
                    pictures += [f"### {head}", f"![{table.title}](figures/{path.name})", *table.notes]
                    shown.append(f"{head}: {path}")
                continue
            if scale == "paper":
                counts += counts_of(rows_of(blocks, smaller), seen)
            elif not any(block.measured for block in blocks):
                # What records that are no longer there have left.
                (out / "tables" / f"{name}.md").unlink(missing_ok=True)
                continue
            page = page_of(table, blocks, scale)
            write_text(out / "tables" / f"{name}.md", page)
            lines += cell_lines(table, blocks, scale)
            listed.append(f"[{head}](tables/{name}.md): {state_of(blocks, scale)}")
            shown.append(listed[-1] if whole else page)
    if not whole:
        return "\n\n".join(shown) or "Claims are rendered without --only."
    state = sentence(counts)
    write_pages(papers, every, out, records)
    write_csv(out / "results.csv", lines + claim_lines(every))
    page = {"every": every, "state": state, "records": records, "made_by": MADE_BY,
            "boards": leaderboards(records), "listed": listed, "pictures": pictures,
            "withdrawn": withdrawn(records), "papers": papers}
    draw_figures(every, out)
    write_text(out / "README.md", TEMPLATES.get_template("results.md.jinja").render(page))
    readme = out.parent / "README.md"
    if out.name == "results" and readme.exists():
        write_blocks(readme, page)
    return "\n\n".join([*shown, state])


def marks(block: str) -> tuple[bytes, bytes]:
    """Between which a block of the README stands."""
    return f"<!-- {block}: written by reproduce_tables.py -->".encode(), f"<!-- end of {block} -->".encode()


def write_blocks(readme: Path, page: dict) -> None:
    """Write the blocks of a README that has their marks; another one stays as it is."""
    content = readme.read_bytes()
    for block, template in BLOCKS.items():
        first, last = marks(block)
        if first in content and last in content:
            text = TEMPLATES.get_template(template).render(page).encode()
            before, after = content.split(first)[0], content.split(last)[1]
            content = before + first + b"\n" + text + last + after
    if content != readme.read_bytes():
        write_text(readme, content.decode("utf-8"))


def claim_folder(out: Path) -> None:
    """Stop if the folder has files of something else: they might be lost. By its README.md it is known."""
    output_folder(out, "README.md", MADE_BY)
    if not (out / "README.md").exists():
        write_text(out / "README.md", f"# Results\n\n{MADE_BY}.\n")


def withdrawn(records: Records) -> int:
    """How many records are withdrawn."""
    path = records.path.with_name("withdrawn.jsonl")
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


# Leaderboards


def leaderboards(records: Records) -> list[str]:
    """A table for each data set, protocol and scale; these are never mixed. Its rows have one budget, the one
    that has most of them."""
    places = {}
    for record in records.newest:
        args = record["args"]
        if "linear" not in record["best"] and not {"ALL", "AVG"} <= record["best"].keys():
            continue  # nothing to rank
        budgets = places.setdefault((args["dataset"], args["protocol"], args["scale"]), {})
        of_setting = budgets.setdefault(common_words(record), {})
        of_setting.setdefault((record["setting"], args["lr"]), []).append(record)
    text = []
    for (dataset, protocol, _), budgets in sorted(places.items()):
        boards = []
        for words, settings in budgets.items():
            heads, rows = leaderboard(list(settings.values()))
            boards.append((len(rows), words, heads, rows))
        _, words, heads, rows = max(boards)
        if len(rows) > 1:  # a row alone is compared with nothing
            text += [f"### {dataset}, {PROTOCOLS[protocol]}, {words.partition(' of ')[0]}",
                     f"All rows: {words}.", table_text(rows, heads)]
    return text


def leaderboard(settings: list[list[dict]]) -> tuple[list[str], list[list[str]]]:
    """The heads of the columns, and a row for each setting, by its records, that has LEAST seeds; the last
    column ranks them. A mean over targets has the seeds that have all of them."""
    values = [values_of(of_setting) for of_setting in settings]
    columns = sorted({name for of_columns in values for name in of_columns})
    if settings[0][0]["args"]["protocol"] == "lodo":
        for of_columns in values:
            of_columns["mean"] = means_over_columns([of_columns.get(name, {}) for name in columns])
        columns.append("mean")
    ranked = []
    for of_setting, of_columns in zip(settings, values):
        if max(map(len, of_columns.values())) >= LEAST:
            means = [mean(of_columns.get(name, {})) for name in columns]
            rank = [-math.inf if value is None else value for value in reversed(means)]
            cells = [ours(Cell([], of_columns.get(name, {}))) or "-" for name in columns]
            ranked.append((rank, [*setting_words(of_setting[0]), *cells]))
    ranked.sort(key=lambda row: row[0], reverse=True)
    return ["method", "flags", *columns], [row for _, row in ranked]


def values_of(of_setting: list[dict]) -> dict[str, BySeed]:
    """{column: {seed: percent}} of a setting's records: in-domain ALL and AVG, else each target."""
    protocol = of_setting[0]["args"]["protocol"]
    columns = by_seed(of_setting, partial(accuracies_of, which="last" if protocol == "linear" else "best"))
    return {name: of for name, of in columns.items() if protocol != "lodo" or name not in ("ALL", "AVG")}


def setting_words(record: dict) -> list[str]:
    """A record's method with a link to its note, and the flags in which it differs from the method's command
    of now."""
    args, module = record["args"], method(record["method"]).__name__
    folder, _, name = module.rpartition(".")
    note = f"baselines/{name}.md" if folder == "baselines" else f"{name}/differences.md"
    usual = [f"--dataset={args['dataset'].rsplit(' ', 1)[0]}"]  # one's own has its content behind it
    usual += [f"--{name}={args[name]}" for name in ("protocol", "scale", "variant") if name in args]
    same = {name: args[name] for name in ("dataset", "seed", "target", "eval_every", *COMMON_FIELDS)}
    known = dataclasses.replace(setting(module, tuple(usual)), **same)
    return [f"[{name_of_run(args)}](../papers/{note})", shlex.join(flags_of(record, known)) or "-"]


def common_words(record: dict) -> str:
    """What all rows of a leaderboard have in common: budget, network, precision and device."""
    args, where = record["args"], "GPU" if record["hardware"].get("gpu") else "CPU"
    return f"{budget(args)}, `--backbone {args['backbone']}`, {args['precision']} on a {where}"


# One table


def title(table: Table, scale: str) -> str:
    if scale == "paper":
        return table.title
    return f"{table.title} ({scale} scale, not comparable)"


def page_of(table: Table, blocks: list[FilledBlock], scale: str) -> str:
    """A page; at a smaller scale with the blocks alone in which something is measured."""
    shown = [block for block in blocks if scale == "paper" or block.measured]
    return TEMPLATES.get_template("table.md.jinja").render(
        table=table, blocks=shown, scale=scale, title=title(table, scale),
        legend=LEGEND if scale == "paper" else SMALLER_LEGEND, state=state_of(blocks, scale), grid=grid,
        budgets=budgets, first_command=first_command, comparisons=comparisons)


def state_of(blocks: list[FilledBlock], scale: str) -> str:
    """How many cells of a page have a value, and what they say."""
    measured = [cell for cell in cells_in(blocks) if cell.values]
    if not measured:
        return "Nothing is measured yet."
    words = count(len(measured), "cell") + " measured"
    if scale == "paper":
        verdicts = Counter(cell.verdict for cell in measured if not cell.computed)
        said = [outcome(verdicts), f"{verdicts['']} without a published number" if verdicts[""] else ""]
        words += f": {', '.join(filter(None, said))}" if any(said) else ""
    return words + "."


def cell_lines(table: Table, blocks: list[FilledBlock], scale: str) -> list[list]:
    """Of each cell: what is published, ours with its seeds, the difference, and the runs."""
    lines = []
    for cell in cells_in(blocks):
        printed, difference, interval = ["", "", ""], None, None
        if scale == "paper":
            printed = [*[*cell.printed, "", ""][:2], " ".join(cell.elsewhere)]
            difference, interval = cell.difference, cell.interval
        lines.append([
            "cell", table.paper, table.id, scale, cell.block.title, cell.row.method, cell.column.name,
            *printed,
            *measured(cell.values, difference, interval, cell.verdict, cell.behind),
            cell.row.module])
    return lines


def claim_lines(every: list[Answer]) -> list[list]:
    """Of each claim under each specification: the printed gain, ours by seed, and what it says."""
    lines = []
    for answer in every:
        for measurement in answer.measured:
            gain, of = measurement.gain(), measurement.specification
            status = answer_words(measurement)
            if of.other_data or not measurement.alike:
                status = "answers no claim"
            lines.append([
                "claim", answer.paper.id, answer.claim.id, "", of.name,
                " minus ".join(answer.claim.methods),
                metric_of(answer.claim, of, answer.claim.methods[0]), fixed(answer.printed),
                fixed(measurement.deviation), "",
                *measured(measurement.gains, measurement.difference, gain and gain.interval, status,
                          measurement.records), ""])
    return lines


def measured(values: BySeed, difference: float | None, interval: tuple[float, float] | None, status: str,
             records: list[dict]) -> list:
    """The columns from `ours` to `commits`."""
    low, high = interval or (None, None)
    return [
        fixed(mean(values)), fixed(deviation(values)),
        " ".join(map(str, values)), " ".join(map(fixed, values.values())),
        fixed(difference), fixed(low), fixed(high), status,
        each_once(record["args"]["precision"] for record in records),
        each_once(record["id"] for record in records),
        each_once(record["commit"][:12] for record in records),
    ]


def each_once(words: Iterable[str]) -> str:
    return " ".join(dict.fromkeys(words))


def fixed(value: float | None) -> str:
    """Four decimals; empty if there is no value."""
    return "" if value is None else f"{value:.4f}"


def grid(block: FilledBlock, scale: str) -> str:
    """The rows and columns of a block; at a smaller scale without the published numbers and the rows of which
    nothing is measured."""
    text = cell_text if scale == "paper" and not block.block.ours else ours
    lines = [[label(line[0].row), *(text(cell) or "-" for cell in line)] for line in shown_rows(block, scale)]
    if scale != "paper":
        accuracies = [chance(cell) for cell in block.rows[0]]
        lines.append(["chance", *("-" if accuracy is None else number(accuracy) for accuracy in accuracies)])
    return table_text(lines, ["", *(column.name for column in block.block.columns)])


def shown_rows(block: FilledBlock, scale: str) -> list[list[Cell]]:
    """All rows at the paper's scale, at a smaller one those of which something is measured."""
    return [line for line in block.rows if scale == "paper" or any(cell.values for cell in line)]


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
    return words + VERDICT_MARKS[cell.verdict]


def number(value: float) -> str:
    """Two decimals, none from a thousand on."""
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"


def first_command(block: FilledBlock, scale: str) -> str:
    """The command of the first row shown that has one in the first column; where it is recorded, the one that
    gives the recorded bytes."""
    for first, *_ in shown_rows(block, scale):
        if first.row.module:
            record, run = first.records.get(0), first.run
            if record or run:
                return command_of(record) if record else run.command
    return ""


def budgets(block: FilledBlock) -> str:
    """How long the rows of a block with numbers were trained at a smaller scale, in words."""
    rows_of = {}
    for cell in cells_in([block]):
        if cell.values and cell.run:
            rows_of.setdefault(budget(vars(cell.run.args)), {})[cell.row.method] = True
    parts = [f"{', '.join(names)}: {words}" for words, names in rows_of.items()]
    return f"Budget: {'; '.join(rows_of if len(rows_of) == 1 else parts)}."


def budget(args: dict) -> str:
    """24 rounds of 20 steps of 32 images, 64x64."""
    steps = count(args["steps"], "step") if args["steps"] else count(args["epochs"], "epoch")
    size = args.get("crop") or args["image_size"]
    return f"{count(args['rounds'], 'round')} of {steps} of {args['batch_size']} images, {size}x{size}"


def comparisons(table: Table, block: FilledBlock) -> list[str]:
    """The paper's method against each other row, where both have runs of the same seeds and precision; in the
    mean column alone, where there is one."""
    name, lines = titles()[table.paper].split(" (")[0], []
    rows = [line for line in block.rows if line[0].row.module]
    own = next((line for line in rows if line[0].row.method.split(" (")[0] == name), [])
    has_mean = any(cell.column.kind == "mean" for cell in own)
    for line in rows:
        for mine, theirs in zip(own, line):
            pair = paired(mine.values, theirs.values)
            if mine.column.kind != "mean" and has_mean:
                continue
            if pair and line is not own and mine.precision == theirs.precision:
                low, high = pair.interval
                lines.append(f"{name} minus {theirs.row.method}, {mine.column.name}: {pair.difference:+.2f}, "
                             f"95% interval {low:.2f} to {high:.2f} ({pair.seeds} paired seeds)")
    return lines
