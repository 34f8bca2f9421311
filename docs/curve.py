"""The curve of a recorded run as a small drawing (SVG) inside a page: accuracies over the rounds.

Its colours are classes of docs/results.css, so that it is readable on a light and on a dark page, and each
line has its own dashes beside its colour.
"""

import math
from html import escape

WIDTH, HEIGHT = 340, 170
LEFT, RIGHT, TOP, BOTTOM = 40, 324, 34, 138  # of the panel within the drawing
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 25, 50)  # between two ticks of the y axis, in percent
NAMES = {"val": "validation", "ALL": "ALL", "AVG": "AVG", "target": "target"}
LINES = 4  # as many styles has docs/results.css
LETTER = 5.6  # width of one in the legend


Curves = dict[str, list[tuple[int, float]]]  # {name: [(round, percent)]}


def curves_of(record: dict, logged: str = "") -> Curves:
    """What a record has of its rounds, in percent, without gaps and without a curve that is there twice.

    `logged`: of its logs the one to take in place of the accuracies, a share as well.
    """
    if logged:
        values = record.get("logs", {}).get(logged, [])
        points = points_of(range(1, len(values) + 1), values)
        return {logged: points} if points else {}
    curve = record["curve"]
    found = {}
    for name in sorted(curve, key=lambda name: name == "val"):  # the validation is the last
        points = points_of(curve["round"], curve[name])
        if name != "round" and points and points not in found.values():
            found[NAMES.get(name, name)] = points
    return found


def points_of(rounds, values: list) -> list[tuple[int, float]]:
    """The points of a curve where it has a value."""
    points = []
    for t, value in zip(rounds, values):
        if value is not None:
            points.append((t, 100 * value))
    return points


def draw(curves: Curves, best: int | None, ylabel: str = "accuracy, %") -> str:
    """The drawing; empty if a line would have fewer than two points. `best`: the best validation round."""
    curves = {name: points for name, points in list(curves.items())[:LINES] if len(points) > 1}
    if not curves:
        return ""
    every = [point for points in curves.values() for point in points]
    first, last = min(t for t, _ in every), max(t for t, _ in every)
    ticks = ticks_of(min(y for _, y in every), max(y for _, y in every))

    def place(t: float, y: float) -> str:
        x = LEFT + (RIGHT - LEFT) * (t - first) / (last - first)
        return f"{x:.1f},{BOTTOM - (BOTTOM - TOP) * (y - ticks[0]) / (ticks[-1] - ticks[0]):.1f}"

    html = [f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(in_words(curves, best, ylabel))}">']
    for tick in ticks:
        height = place(first, tick).partition(",")[2]
        html.append(f'<path class="grid" d="M{LEFT},{height}H{RIGHT}"/>'
                    f'<text x="{LEFT - 5}" y="{float(height) + 3.5:.1f}" text-anchor="end">{tick:g}</text>')
    for t in dict.fromkeys([first, (first + last) // 2, last]):
        x = place(t, 0).partition(",")[0]
        html.append(f'<path class="axis" d="M{x},{BOTTOM}v4"/>'
                    f'<text x="{x}" y="{BOTTOM + 15}" text-anchor="middle">{t}</text>')
    html.append(f'<path class="axis" d="M{LEFT},{TOP}V{BOTTOM}H{RIGHT}"/>'
                f'<text x="{(LEFT + RIGHT) / 2:.0f}" y="{HEIGHT - 3}" text-anchor="middle">round</text>'
                f'<text x="2" y="{TOP - 8}">{escape(ylabel)}</text>')
    if best is not None and first <= best <= last:
        x = place(best, 0).partition(",")[0]
        html.append(f'<path class="best" d="M{x},{TOP}V{BOTTOM}"/>')
    x = LEFT
    for i, (name, points) in enumerate(curves.items()):
        line = " ".join(place(t, y) for t, y in points)
        html.append(f'<polyline class="c{i}" points="{line}"/>'
                    f'<path class="c{i}" d="M{x},9h18"/><text x="{x + 22}" y="12.5">{escape(name)}</text>')
        x += round(36 + LETTER * len(name))
    html.append("</svg>")
    return "".join(html)


def ticks_of(low: float, high: float) -> list[float]:
    """Round numbers from below the lowest to above the highest value, at most six."""
    for step in STEPS:
        start, end = math.floor(low / step), math.ceil(high / step)
        if end - start <= 5:
            break
    return [round(n * step, 1) for n in range(start, max(end, start + 1) + 1)]


def in_words(curves: Curves, best: int | None, ylabel: str) -> str:
    """What the drawing shows, for who cannot see it."""
    parts = []
    for name, points in curves.items():
        (first, start), (last, end) = points[0], points[-1]
        highest = max(y for _, y in points)
        parts.append(f"{name} {start:.1f} in round {first}, {end:.1f} in round {last}, at most {highest:.1f}")
    words = f"{ylabel} over the rounds: " + "; ".join(parts)
    if best is not None:
        words += f"; best validation in round {best}"
    return words
