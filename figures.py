"""The figures of the papers, drawn from the records: curves over the rounds, accuracy over a parameter, a radar of the domains. Those that
measures.py makes need the runs' folders: `measured` draws them after a run, `draw` only shows them."""

from __future__ import annotations

import contextlib
import io
import math
import shlex
import statistics
from pathlib import Path

import measures


def draw(table, blocks: list, path: Path, scale: str) -> bool:
    """Draw a figure into `path` from [(block, [(row, cells)])]; whether there is one."""
    if table.figure == "measure":
        return path.exists()
    least = 2 if table.figure == "parameter" else 1  # points of a line, else there is nothing to see
    shown = [(b, rows) for b, rows in blocks if any(sum(bool(c.records) for c in cells) >= least for _, cells in rows)]
    if not shown:
        return False
    from matplotlib.figure import Figure
    columns = min(3, len(shown))
    lines = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * lines + 0.3), layout="constrained")
    figure.suptitle(table.title + (f", {scale} scale" if scale != "paper" else ""), fontsize=10)
    for i, (block, rows) in enumerate(shown):
        panel = figure.add_subplot(lines, columns, i + 1, projection="polar" if table.figure == "radar" else None)
        DRAW[table.figure](panel, table, block, rows)
        panel.set_title(block.title, fontsize=9)
        panel.legend(fontsize=7, **(dict(loc="upper left", bbox_to_anchor=(0.95, 1.1)) if table.figure == "radar" else {}))
    measures.write_figure(path, figure)
    return True


def curves(panel, table, block, rows) -> None:
    """The mean over the seeds of a curve of the record (`curve/ALL`, `logs/discarded`) over the rounds, and its deviation."""
    kind, _, name = block.columns[0].value.partition("/")
    for row, cells in rows:
        found = [r[kind][name] for r in cells[0].records.values() if name in r.get(kind, {})]
        if not found:
            continue
        record = next(iter(cells[0].records.values()))
        rounds = record["curve"]["round"] if kind == "curve" else range(1, len(found[0]) + 1)
        points = [(t, v) for t, v in zip(rounds, zip(*found)) if None not in v]
        x, mean = [t for t, _ in points], [100 * statistics.mean(v) for _, v in points]
        line, = panel.plot(x, mean, linewidth=1.4, label=f"{row.method} ({len(found)})", marker="." if len(x) < 30 else None)
        if len(found) > 1:
            spread = [100 * statistics.stdev(v) for _, v in points]
            panel.fill_between(x, [m - s for m, s in zip(mean, spread)], [m + s for m, s in zip(mean, spread)], alpha=0.2,
                               color=line.get_color())
    panel.set(xlabel="round", ylabel=f"{table.axis} (%)")
    panel.xaxis.get_major_locator().set_params(integer=True)


def parameter(panel, table, block, rows) -> None:
    """A line for each row: mean and deviation over the seeds at each value of the parameter; published points as crosses."""
    names = [c.name for c in block.columns]
    for row, cells in rows:
        known = [(i, c) for i, c in enumerate(cells) if c.values]
        if known:
            panel.errorbar([i for i, _ in known], [c.mean for _, c in known], [c.deviation or 0 for _, c in known], marker="o", markersize=4,
                           linewidth=1.2, capsize=2, label=row.method)
        published = [(i, c.published[0]) for i, c in enumerate(cells) if c.published]
        if published:
            panel.plot(*zip(*published), "x", color="0.3", label=f"{row.method}, published")
    panel.set_xticks(range(len(names)), names)
    panel.set(xlabel=table.axis or block.title.rpartition(", ")[2], ylabel="accuracy (%)")


def radar(panel, table, block, rows) -> None:
    """Accuracy on each domain, each axis scaled by its largest value: the mean over the seeds."""
    found = {row.method: [r["best"]["clients"] for r in cells[0].records.values()] for row, cells in rows if cells[0].records}
    names = [n for n in next(iter(found.values()))[0] if all(n in r for runs in found.values() for r in runs)]
    means = {m: [statistics.mean(r[n] for r in runs) for n in names] for m, runs in found.items()}
    top = [max(v[i] for v in means.values()) or 1 for i in range(len(names))]
    angles = [2 * math.pi * i / len(names) for i in range(len(names))]
    for method, values in means.items():
        scaled = [v / t for v, t in zip(values, top)]
        panel.plot([*angles, angles[0]], [*scaled, scaled[0]], linewidth=1.3, label=f"{method} ({len(found[method])})")
    panel.set_xticks(angles, [f"{n}\n{100 * t:.1f}%" for n, t in zip(names, top)], fontsize=7)
    panel.set_yticklabels([])


def measured(table, folders: list[Path], path: Path, place) -> list[str]:
    """Let measures.py draw the figure from its runs' folders, unless it is newer than they are; returns what went wrong, or nothing."""
    results = [folder / "result.json" for folder in folders]
    gone = [str(f.parent) for f in results if not f.exists()]
    if gone:
        return [] if path.exists() else [f"{table.id}: the runs are recorded, but not here is {', '.join(gone)}"]
    if path.exists() and path.stat().st_mtime > max(f.stat().st_mtime for f in results):
        return []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            what, *flags = shlex.split(table.measure)
            places = ["--data", place.data, "--archives", place.archives] if what not in ("curve",) else []
            measures.main([what, *map(str, folders), *flags, *places, "--out", str(path)])
        except SystemExit:
            return [f"{table.id}: {said.getvalue().strip()}"]
    return []


DRAW = {"curves": curves, "parameter": parameter, "radar": radar, "measure": None}
