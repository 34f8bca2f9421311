"""What all figures and tables share: an empty figure, a line with its band, a forest plot, the file that a
figure becomes; a table as text."""

from __future__ import annotations

import io
import statistics
from pathlib import Path
from typing import NamedTuple

from plumbing.run.errors import UserError
from plumbing.run.files import output_file, write_whole
from plumbing.run.results import empty_figure

import numpy as np
from tabulate import tabulate

OURS = "CleanFDG"  # the mark of figures that a flag names
REACH = 30.0  # points: an interval of few seeds may be longer, and is cut off here

# One colour for each method, in every figure; the pages begin with the same four (docs/page.css).
PALETTE = {"fdse": "#0b5cba", "fedavg": "#b5432f", "fedsr": "#1b7837", "fedadg": "#7a4fa3",
           "fedgala": "#8f6000", "fedcir": "#00798c"}
OTHERS = ("#c2185b", "#59636e", "#1f2328")  # of all other methods
INK, PALE = PALETTE["fdse"], "#8a8a8a"  # what is measured; beside it


def colour_of(method: str) -> str:
    """The colour of a method, by the name of its file."""
    name = method.rpartition(".")[2]
    return PALETTE.get(name) or OTHERS[sum(map(ord, name)) % len(OTHERS)]


def table_text(lines: list[list], heads: list[str], form: str = "github") -> str:
    """A table in markdown or another form of tabulate; numbers stand as they are given."""
    return tabulate(lines, heads, form, disable_numparse=True)


def new_panel(width: float, height: float):
    """The only panel of an empty figure, in inches; the figure is `panel.figure`."""
    return empty_figure((width, height)).subplots()


def draw_line(panel, points: dict[int, list[float]], label: str, method: str) -> None:
    """A method's mean over the seeds at each place, and where there are three seeds their deviation; of one
    seed a thin line. `points`: {place: the values of the seeds}; without any nothing is drawn."""
    if not points:
        return
    places, colour, seeds = list(points), colour_of(method), max(map(len, points.values()))
    means = np.array([statistics.mean(values) for values in points.values()])
    marker = "." if len(places) < 30 else None
    earlier = [line.get_color() for line in panel.lines].count(colour)
    dashes = ("-", "--", ":", "-.")[earlier % 4]
    panel.plot(places, means, linewidth=1.4 if seeds > 1 else 0.8, label=label, marker=marker, color=colour,
               linestyle=dashes)
    if seeds > 2:
        spread = [statistics.stdev(values) if len(values) > 2 else 0 for values in points.values()]
        panel.fill_between(places, means - spread, means + spread, alpha=0.2, color=colour)
    panel.xaxis.get_major_locator().set_params(integer=True)


def percentages(rounds, curves: list[list]) -> dict[int, list[float]]:
    """{round: the curves' values there, in percent}, of the rounds that all curves have."""
    points = {}
    for t, values in zip(rounds, zip(*curves)):
        if None not in values:
            points[t] = [100 * value for value in values]
    return points


class Line(NamedTuple):
    """A row of a forest plot, in points."""

    label: str
    values: list[float]  # a dot for each
    interval: tuple[float, ...] = ()
    printed: float | None = None
    hollow: bool = False
    cross: bool = False  # a cross instead of the dot
    wider: tuple[float, ...] = ()  # a second interval, drawn thin


class Signs(NamedTuple):
    """What the signs of a forest plot mean, for its legend."""

    printed: str = ""
    value: str = ""
    cross: str = ""
    hollow: str = ""


def draw_forest(path: Path, lines: list[Line], xlabel: str, band: tuple[float, float] | None = None,
                mark: str | None = None, signs: Signs = Signs()) -> None:
    """A row for each line, the first one at the top; `band` is shaded in all of them. `signs` make a legend
    of those that are drawn."""
    panel = new_panel(5.4, 0.5 * len(lines) + (1.9 if signs.value else 1.2))
    panel.axvline(0, color="0.5", linewidth=0.8)
    if band:
        panel.axvspan(*band, color=PALE, alpha=0.3)
    printed = {line.printed for line in lines} - {None}
    if len(printed) == 1:
        panel.axvline(*printed, color="black", linewidth=1.2, linestyle="--", label=signs.printed)
    reach = max([REACH, *(1.2 * abs(value) for line in lines for value in line.values)])
    for i, line in enumerate(lines):
        for interval, width in ((line.wider, 0.9), (line.interval, 2.4)):
            panel.plot(np.clip(interval, -reach, reach), [i] * len(interval), color=INK, linewidth=width)
            for end in interval:
                if abs(end) > reach:  # it goes on
                    panel.plot([np.sign(end) * reach], [i], ">" if end > 0 else "<", color=INK, markersize=6)
        inside = "white" if line.hollow else INK
        shape = "X" if line.cross else "o"
        word = signs.value
        if line.hollow or line.cross:
            word = signs.cross if line.cross else signs.hollow
        if line.values:
            panel.plot(line.values, [i] * len(line.values), shape, color=INK, markersize=7,
                       markerfacecolor=inside, label=word, zorder=3)
        if line.printed is not None and len(printed) > 1:
            panel.plot([line.printed], [i], "|", color="black", markersize=11, markeredgewidth=2,
                       label=signs.printed, zorder=4)
        # Above its line: beside it a phone would show the label alone. White, so that no line crosses it.
        panel.text(0.01, i - 0.2, line.label, transform=panel.get_yaxis_transform(), fontsize=8, va="bottom",
                   bbox=dict(facecolor="white", linewidth=0, pad=0))
    panel.set_yticks([])
    panel.set(ylim=(max(len(lines), 1) - 0.5, -0.9), xlabel=xlabel)
    handles, labels = panel.get_legend_handles_labels()
    drawn = dict(zip(labels, handles))
    if drawn:
        panel.figure.legend(drawn.values(), drawn, loc="lower center", fontsize=8, frameon=False)
    # Margins in inches. A layout that measures every text takes as long as the drawing.
    panel.figure.set_layout_engine("none")
    height, below = panel.figure.get_figheight(), 0.5 + 0.19 * len(drawn)
    panel.set_position((0.03, below / height, 0.94, 1 - (below + 0.06) / height))
    write_figure(path, panel.figure, mark)


def write_figure(path, figure, mark: str | None = OURS) -> None:
    """Write a figure whole, in the format of the file's ending: png, pdf or svg. `mark` stands in it for who
    made it, instead of matplotlib and its version: the same figure has the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # which --help does not need
    content, ending = io.BytesIO(), figure_format(path)
    made_by = {"Software" if ending == "png" else "Creator": mark}
    figure.set_dpi(150)
    if ending == "png":
        FigureCanvasAgg(figure).print_png(content, metadata=made_by)  # savefig would draw it twice
    else:
        figure.savefig(content, format=ending, metadata=made_by)
    write_whole(Path(path), lambda file: file.write(content.getvalue()))


def check_figure_path(path) -> None:
    """Stop if a flag's path cannot be a figure, or is a file that is no figure of ours."""
    figure_format(path)
    output_file(Path(path), lambda start: OURS.encode() in start)


def figure_format(path) -> str:
    """png, pdf or svg. Stop if a path ends in something else or is a folder."""
    ending = Path(path).suffix.lower()[1:]
    if ending not in ("png", "pdf", "svg") or Path(path).is_dir():
        raise UserError(f"{path} cannot be a figure: give a file that ends in .png, .pdf or .svg", 2)
    return ending
