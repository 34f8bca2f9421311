"""What all figures share: an empty one, a line with its band, and the file that it becomes."""

from __future__ import annotations

import io
import statistics
from pathlib import Path

from plumbing.errors import Stop
from plumbing.files import write_whole

import numpy as np


def new_figure(width: float, height: float):
    """An empty figure, in inches; matplotlib is loaded when the first one is drawn."""
    from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


def draw_line(panel, places: list, values: list[list[float]], label: str) -> None:
    """The mean over the seeds at each place, and where there are three seeds their deviation."""
    if not places:
        return
    means = np.array([statistics.mean(of_seeds) for of_seeds in values])
    marker = "." if len(places) < 30 else None
    line, = panel.plot(places, means, linewidth=1.4, label=label, marker=marker)
    if max(map(len, values)) > 2:
        spread = np.array([statistics.stdev(of_seeds) if len(of_seeds) > 2 else 0 for of_seeds in values])
        panel.fill_between(places, means - spread, means + spread, alpha=0.2, color=line.get_color())
    panel.xaxis.get_major_locator().set_params(integer=True)


def write_figure(path, figure) -> None:
    """Write a figure whole, in the format of the file's ending: png, pdf or svg."""
    content = io.BytesIO()
    figure.savefig(content, dpi=150, format=figure_format(path))
    write_whole(Path(path), lambda file: file.write(content.getvalue()))


def figure_format(path) -> str:
    """png, pdf or svg. Stop if a path ends in something else or is a folder."""
    ending = Path(path).suffix.lower()[1:]
    if ending not in ("png", "pdf", "svg") or Path(path).is_dir():
        raise Stop(f"{path} cannot be a figure: give a file that ends in .png, .pdf or .svg", 2)
    return ending
