"""Every results table of the five papers: the published numbers, what was measured here, and what is missing.

    python reproduce_tables.py                                  # render all from results/runs.jsonl; nothing is trained
    python reproduce_tables.py --plan --scale laptop            # what is missing, its commands and what it would take
    python reproduce_tables.py --run --only fdse-1 --scale laptop --seeds 3 --jobs 2

The tables are files in tables/ (cells.py reads them); results/runs.jsonl has a line for each finished run and is only ever appended to.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import fnmatch
import io
import json
import math
import sys
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

import common
import domains
import figures
import measures
import runner
from basics import Stop, ending, locked, write_whole
from cells import PAPERS, ROOT, Block, Records, Run, Table, arguments, cells_of, every_cell, paired, read_tables, run_of

OWN = {"fedsr": "FedSR", "fedadg": "FedADG", "fedgala": "FedGaLA", "fedcir": "FedCiR", "fdse": "FDSE"}  # each paper's method


# Rendering


def render(tables: list[Table], records: Records, out: Path, whole: bool = True) -> str:
    """Write tables/*.md and *.csv, the figures and, if these are all tables, README.md into `out`; returns the text for the terminal."""
    shown, pages, pictures, summary = [], [], [], []
    counts = {scale: {paper: [0, 0, 0, 0] for paper in PAPERS} for scale in common.SCALES}  # measured, computed, all, not implemented
    for scale in common.SCALES:
        for table in tables:
            blocks = [(b, [(r, cells_of(table, b, r, records, scale, [])) for r in b.row]) for b in table.block]
            name = table.id if scale == "paper" else f"{table.id}-{scale}"
            if table.figure:
                path = out / "figures" / f"{name}.png"
                if figures.draw(table, blocks, path, scale):
                    pictures.append((scale, table, path.name))
                    shown.append(f"{title(table, scale)}: {path}")
                continue
            for row, cells in (r for _, rows in blocks for r in rows if not r[0].quoted):
                found = [c for c in cells if c.values]
                for i, n in enumerate((sum(not c.computed for c in found), sum(c.computed for c in found), len(cells),
                                       0 if row.implemented else len(cells))):
                    counts[scale][table.paper][i] += n
            measured = any(c.values for _, rows in blocks for _, cells in rows for c in cells)
            if scale == "paper" or measured:
                text = as_markdown(table, blocks, scale)
                write_whole(out / "tables" / f"{name}.md", lambda f: f.write(text.encode()))
                write_whole(out / "tables" / f"{name}.csv", lambda f: f.write(as_csv(table, blocks, scale).encode()))
                pages.append((scale, name, text, measured))
                shown.append(as_text(table, blocks, scale))
    for paper, (measured, computed, cells, without) in counts["paper"].items():
        if cells:
            summary.append([PAPERS[paper], cells, measured, computed, counts["laptop"][paper][0], without, cells - without - measured - computed])
    head = ["cells of the tables of", "all", "measured", "computed", "measured at laptop scale", "of baselines not written yet", "not run"]
    if whole:
        if out.name == "results" and (out.parent / "README.md").exists():
            update_readme(out.parent / "README.md", pages, pictures, tabulate(summary, head, "github"))
        write_whole(out / "README.md", lambda f: f.write(overview(pages, pictures, tabulate(summary, head, "github"), records).encode()))
    return "\n\n".join(shown) + "\n\n" + tabulate(summary, head)


def measure(tables: list[Table], records: Records, out: Path, scale: str, seeds: list[int], place: runner.Place) -> list[str]:
    """What needs the output folders of the runs, not only their records: the figures of measures.py, and FedCiR's Table 3 into reach.jsonl.
    Returns a line for each that could not be made."""
    said = []
    for table in tables:
        rows = [(b, r) for b in table.block for r in b.row if r.implemented]
        if table.figure == "measure":
            runs = [run_of(b, r, b.columns[0], scale, 0) for b, r in rows]
            if all(run and records.get(run) for run in runs):
                name = f"{table.id}{'' if scale == 'paper' else f'-{scale}'}.png"
                said += figures.measured(table, [folder_of(run) for run in runs], out / "figures" / name, place)
        for block, row in rows if any(c.value.startswith("reach/") for b in table.block for c in b.columns) else ():
            for run in (run_of(block, row, block.columns[0], scale, seed) for seed in seeds):
                record = run and records.get(run)
                if record and record["id"] not in records.reach:
                    try:
                        found = reach(folder_of(run), place)
                    except Stop as stop:
                        said.append(f"{table.id}, {row.method}: {stop}")
                        continue
                    with locked(records.path.with_name(".reach.jsonl.lock")), open(records.path.with_name("reach.jsonl"), "a") as f:
                        f.write(json.dumps({"id": record["id"], "reach": found}) + "\n")
    return said


def reach(folder: Path, place: runner.Place) -> dict[str, float]:
    """FedCiR's Table 3: what a client spends until the mean over the clients is 60%; empty if it never is."""
    flops = measures.training_flops(folder, place.data, place.archives)
    found = measures.cost_to_reach(folder, 0.6, flops, data=place.data, archives=place.archives) or {}
    memory = found.pop("gpu_memory_mib", None)
    return found | ({"gpu_memory_gb": memory * 2 ** 20 / 1e9} if memory else {})


def folder_of(run: Run) -> Path:
    """The output folder of a run."""
    return ROOT / common.folder_of(dataclasses.replace(arguments(run.module, run.flags), seed=run.seed))


MARKS = "<!-- results: written by reproduce_tables.py -->", "<!-- end of results -->"


def update_readme(readme: Path, pages: list, pictures: list, summary: str) -> None:
    """The state of the results, between the two marks of the repository's README: how many cells, the tables of the paper scale
    that have any, links to the others."""
    content = readme.read_text()
    if not all(content.count(mark) == 1 for mark in MARKS):
        raise Stop(f"{readme} has lost a mark of its results: expected one {MARKS[0]} and one {MARKS[1]}")
    links = lambda scale: ", ".join(f"[{name}](results/tables/{name}.md)" for s, name, _, measured in pages if s == scale and measured) or "none"
    drawn = ", ".join(f"[{path}](results/figures/{path})" for _, _, path in pictures) or "none"
    parts = [summary, *(below(text, "###") for scale, _, text, measured in pages if scale == "paper" and measured),
             f"Tables with measured cells at laptop scale (smaller images, fewer rounds; not comparable with the published numbers): "
             f"{links('laptop')}. Figures: {drawn}. All of them on one page: [results/README.md](results/README.md)."]
    start, end = content.split(MARKS[0])[0] + MARKS[0], MARKS[1] + content.split(MARKS[1])[1]
    write_whole(readme, lambda f: f.write("\n\n".join([start, *parts, end]).encode()))


def below(page: str, level: str) -> str:
    """A page as a part of another: its title at this level of headings, its own one deeper."""
    return page.replace("\n## ", f"\n{level}# ").replace("# ", f"{level} ", 1).strip()


def comparisons(table: Table, block: Block, rows: list) -> list[str]:
    """The paper's method against each other row, where both have runs of the same seeds."""
    own = next((cells for row, cells in rows if row.method.split(" (")[0] == OWN[table.paper] and row.implemented), None)
    found = []
    for row, cells in rows if own else ():
        for column, mine, theirs in zip(block.columns, own, cells):
            if theirs is not mine and not mine.computed and (p := paired(mine.values, theirs.values)):
                found.append(f"{OWN[table.paper]} minus {row.method}, {column.name}: {p[0]:+.2f}, 95% interval {p[0] - p[1]:.2f} to "
                             f"{p[0] + p[1]:.2f} ({p[2]} paired seeds)")
    return found


def title(table: Table, scale: str) -> str:
    return table.title + (f" - at {scale.upper()} scale, not comparable with the published numbers" if scale != "paper" else "")


LEGEND = ("A cell: published mean ± deviation / ours ± deviation (seeds), difference; - is not printed or not measured; * is a "
          "difference of more than two combined standard errors, ? one that cannot be tested (one seed here, or no deviation or number of "
          "trials in the paper).")
OTHER = "A cell: published mean ± deviation / ours ± deviation (seeds) at this scale, without a difference."


def body(rows: list, scale: str) -> list[list[str]]:
    label = lambda r: r.method + (" (quoted)" if r.quoted else "" if r.implemented else f" (not implemented yet: {r.module})")
    decimals = lambda row: max((len(str(float(v)).partition(".")[2]) for c in row.published for v in c if float(v) % 1), default=0)
    return [[label(row), *(c.text(decimals(row), scale != "paper") for c in cells)] for row, cells in rows]


def as_text(table: Table, blocks: list, scale: str) -> str:
    parts = [title(table, scale), f"{table.protocol}"]
    for block, rows in blocks:
        parts.append(f"{block.title}\n" + tabulate(body(rows, scale), ["", *(c.name for c in block.columns)], disable_numparse=True))
    return "\n".join(parts)


def as_markdown(table: Table, blocks: list, scale: str) -> str:
    """A page; at a smaller scale only the blocks in which something is measured."""
    parts = [f"# {title(table, scale)}", f"{table.protocol[:1].upper()}{table.protocol[1:]}. {LEGEND if scale == 'paper' else OTHER}"]
    for block, rows in blocks:
        if scale != "paper" and not any(c.values for _, cells in rows for c in cells):
            continue
        parts += [f"## {block.title}", tabulate(body(rows, scale), ["", *(c.name for c in block.columns)], "github", disable_numparse=True)]
        run = next((run for row, _ in rows if row.implemented and (run := run_of(block, row, block.columns[0], scale, 0))), None)
        parts += [f"First row and column, seed 0: `{run.command}`"] if run else []
        compared = comparisons(table, block, rows)
        parts += ["".join(f"- {line}\n" for line in compared).rstrip()] if compared else []
    notes = dict.fromkeys([*table.notes, *(f"{r.method}: {r.note}" for b in table.block for r in b.row if r.note)])
    parts += ["".join(f"- {n}\n" for n in notes).rstrip()] if notes else []
    return "\n\n".join(parts) + "\n"


def as_csv(table: Table, blocks: list, scale: str) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "scale", "block", "method", "column", "published_mean", "published_deviation", "mean", "deviation", "seeds",
                     "difference", "beyond_two_standard_errors", "module"])
    for block, rows in blocks:
        for row, cells in rows:
            for column, c in zip(block.columns, cells):
                published = [*c.published, "", ""][:2]
                difference = "" if scale != "paper" or c.difference is None or c.elsewhere else f"{c.difference:.4f}"
                writer.writerow([table.id, scale, block.title, row.method, column.name, *published, "" if c.mean is None else f"{c.mean:.4f}",
                                 "" if c.deviation is None else f"{c.deviation:.4f}", " ".join(map(str, c.values)), difference,
                                 "" if not difference or c.far is None else int(c.far), row.module])
    return out.getvalue()


def overview(pages: list, pictures: list, summary: str, records: Records) -> str:
    """results/README.md: the summary, then every table and figure that has something."""
    parts = ["# Results", f"Made by `python reproduce_tables.py` from {records.count} recorded runs; in words: [findings.md](findings.md).", summary]
    for scale, head in (("paper", "## Paper scale"),
                        ("laptop", "## Laptop scale (smaller images, fewer rounds; not comparable with the published numbers)")):
        parts.append(head)
        empty = [name for s, name, _, measured in pages if s == scale and not measured]
        parts += [below(text, "###") for s, _, text, measured in pages if s == scale and measured]
        parts += [f"### {title(t, s)}\n\n![{t.title}](figures/{name})" + "".join(f"\n\n{n}" for n in t.notes) for s, t, name in pictures
                  if s == scale]
        parts += [f"Nothing is measured yet of {', '.join(f'[{n}](tables/{n}.md)' for n in empty)}."] if empty else []
    return "\n\n".join(parts) + "\n"


# Running


def missing(tables: list[Table], records: Records, scale: str, seeds: list[int]) -> dict[str, tuple[Run, list[str]]]:
    """The runs that are not recorded, each once, with the tables that need it: {key: (run, table ids)}, in the tables' order."""
    found = {}
    for table, _, _, cells in every_cell(tables, records, scale, seeds):
        for cell in cells:
            for run in cell.missing:
                ids = found.setdefault(run.key, (run, []))[1]
                ids += [table.id] * (table.id not in ids)
    return found


def show_plan(todo: dict, times: dict, downloads: dict[str, int], gone: dict[str, tuple[str, int]]) -> str:
    """The missing runs and their times, bytes to download and on disk, and the datasets that are left out: {name: (why, runs)}."""
    rows = [[runner.clock(times[key]), ", ".join(ids), run.command] for key, (run, ids) in todo.items()]
    known = [t for t in times.values() if t]
    lines = [tabulate(rows, ["time here", "tables", "command"], disable_numparse=True)] if rows else [] if gone else ["Nothing is missing."]
    lines += [f"{len(rows)} runs, {runner.clock(sum(known))} one after the other, by a calibration of single steps on this machine" +
              (f"; {len(rows) - len(known)} of unknown size" if len(known) < len(rows) else "")] if rows else []
    sizes = {}
    for run, _ in todo.values():
        args = arguments(run.module, run.flags)
        counts = {d: n for d, (_, n) in domains.FOLDERS[args.dataset].domains.items()} if args.dataset in domains.FOLDERS else {}
        if counts and None not in counts.values():
            sizes[args.dataset, args.image_size] = sum(counts.values()) * 3 * args.image_size ** 2
    if downloads:
        lines.append("To download: " + ", ".join(f"{d} {runner.size(n)}" for d, n in downloads.items()))
    if sizes:
        lines.append("Decoded images on disk: " + ", ".join(f"{d} at {s}x{s} {runner.size(n)}" for (d, s), n in sorted(sizes.items())))
    return "\n".join(lines + [f"Left out, {dataset} ({n} runs): {why}" for dataset, (why, n) in gone.items()])


def main(argv: list[str] | None = None) -> None:
    """The command line. Exit code 2 for bad usage, 1 if a run has failed, 130 after Ctrl-C."""
    parser = common.Parser(prog="reproduce_tables", allow_abbrev=False, description=__doc__.split("\n\n")[0],
                           epilog="Without --plan or --run it renders what is recorded and trains nothing.")
    flag = parser.add_argument

    def add(name: str, default, text: str, **how) -> None:
        flag(name, default=default, type=type(default), help=common.with_default(text, default), **how)

    flag("--plan", action="store_true", help="show the runs that are missing, their commands and the time they would take here")
    flag("--run", action="store_true", help="run them, cheapest first, and render")
    add("--only", "", "ids of tables, such as 'fdse-1,fedsr-*'; empty: all")
    add("--scale", "paper", "scale of --plan and --run", choices=tuple(common.SCALES))
    add("--seeds", 1, "seeds of each cell, 0 to SEEDS - 1")
    add("--jobs", 0, "runs at a time; 0: one for each GPU of --gpus, or one")
    add("--gpus", "", "GPUs that the runs take in turn, such as 0,1; with slurm the number that a job asks for; empty: the methods' own "
        "choice, with slurm 1")
    add("--executor", "local", "this machine, or jobs of a Slurm cluster through submitit", choices=("local", "slurm"))
    add("--data", "data", "folder of the datasets and of the decoded cache")
    add("--archives", "", "folder with archives downloaded before; looked at before the network")
    add("--tables", "tables", "folder of the tables")
    add("--records", "results/runs.jsonl", "JSONL file of the finished runs")
    add("--out", "results", "folder of what is rendered")
    parser.set_flags()
    flags = parser.parse_args(argv)
    if flags.seeds < 1:
        parser.error(f"--seeds is {flags.seeds}; it must be at least 1")
    if flags.jobs < 0:
        parser.error(f"--jobs is {flags.jobs}; it must be at least 0")
    gpus = [g.strip() for g in flags.gpus.split(",")] if flags.gpus else []
    if not all(g.isascii() and g.isdigit() for g in gpus) or len(set(gpus)) < len(gpus) or flags.executor == "slurm" and len(gpus) > 1:
        parser.error(f"--gpus is {flags.gpus}; expected numbers of GPUs such as 0,1" +
                     (", with slurm one number, how many a job asks for" if flags.executor == "slurm" else ""))
    if (flags.tables, flags.records) != ("tables", "results/runs.jsonl") and flags.out == "results":
        parser.error("with other --tables or --records give another --out too: results/ is of results/runs.jsonl")
    try:
        sys.exit(work(flags, gpus))
    except (Stop, OSError, KeyboardInterrupt, MemoryError, RuntimeError) as e:
        message, code = ending(e, "every finished run is recorded")
    print(f"reproduce_tables: {message}", file=sys.stderr)
    sys.exit(code)


def work(flags: argparse.Namespace, gpus: list[str]) -> int:
    """What the command line asks for; returns the exit code."""
    every = read_tables(ROOT / flags.tables)
    path = (ROOT / flags.records).resolve()
    wanted = [w.strip() for w in flags.only.split(",") if w.strip()]
    for one in wanted:
        if not any(fnmatch.fnmatch(t.id, one) for t in every):
            raise Stop(f"--only {one} is no table; there are {', '.join(t.id for t in every)}", 2)
    tables = [t for t in every if not wanted or any(fnmatch.fnmatch(t.id, one) for one in wanted)]
    if path.is_dir():
        raise Stop(f"--records {flags.records} is a folder; expected a JSONL file", 2)
    records, code = Records(path), 0
    for line in records.damaged:
        print(f"reproduce_tables: {line}", file=sys.stderr)
    if flags.plan or flags.run:
        data = ROOT / "data" if flags.data == "data" else Path(flags.data).resolve()
        place = runner.Place(str(data), str(Path(flags.archives).resolve()) if flags.archives else "", str(path))
        seeds = list(range(flags.seeds))
        todo = missing(tables, records, flags.scale, seeds)
        dataset_of = {key: arguments(run.module, run.flags).dataset for key, (run, _) in todo.items()}
        found = {d: runner.availability(d, place) for d in dict.fromkeys(dataset_of.values())}
        gone = {d: (why, list(dataset_of.values()).count(d)) for d, (why, _) in found.items() if why}
        for dataset, (why, n) in gone.items() if flags.run else ():
            print(f"left out, {dataset} ({n} runs): {why}", file=sys.stderr)
        todo = {key: v for key, v in todo.items() if dataset_of[key] not in gone}
        executor = (runner.Slurm(flags.jobs or 1, gpus=int(gpus[0]) if gpus else 1) if flags.executor == "slurm" else
                    runner.Local(flags.jobs or len(gpus) or 1, gpus))
        clock = runner.Times()
        times = {key: clock.of(run, arguments) for key, (run, _) in tqdm(todo.items(), "calibration", disable=None, leave=False)}
        todo = dict(sorted(todo.items(), key=lambda item: times[item[0]] or math.inf))  # cheapest first
        if flags.plan:
            print(show_plan(todo, times, {d: n for d, (_, n) in found.items() if n}, gone))
            return 0
        counts = executor.run([run for run, _ in todo.values()], place, lambda run: Records(path).get(run) is not None, times)
        print(", ".join(f"{n} {what}" for what, n in counts.items() if n and what not in ("running", "stopped")) or "nothing to run")
        code = 130 if counts["stopped"] else 1 if counts["failed"] else 0
        if not counts["stopped"]:
            for line in measure(tables, Records(path), ROOT / flags.out, flags.scale, seeds, place):
                print(f"reproduce_tables: not made: {line}", file=sys.stderr)
        records = Records(path)
    print(render(tables if wanted else every, records, ROOT / flags.out, whole=not wanted))
    return code


if __name__ == "__main__":
    main()
