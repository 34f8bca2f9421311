"""What all figures share: an empty one, and the file that it becomes."""

from __future__ import annotations

import io
from pathlib import Path

from plumbing.errors import Stop
from plumbing.files import write_whole


def new_figure(width: float, height: float):
    """An empty figure, in inches; matplotlib is loaded when the first one is drawn."""
    from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


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
