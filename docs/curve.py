"""The curve of a recorded run as a small drawing (docs/templates/curve.svg): accuracies over the rounds.

Each line has its own dashes beside its colour, which is a class of docs/page.css.
"""

import math

from docs.notes import TEMPLATES

from markupsafe import Markup

LEFT, RIGHT, TOP, BOTTOM = 40, 324, 34, 138  # of the panel within the drawing
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 25, 50)  # between two ticks of the y axis, in percent
LINES = 4  # as many styles has docs/page.css

Curves = dict[str, list[tuple[int, float]]]  # {name: [(round, percent)]}


def curves_of(record: dict, logged: str = "") -> Curves:
    """What a record has of its rounds, in percent, without gaps and without a curve that is there twice.

    `logged`: of its logs the one to take in place of the accuracies, a share as well.
    """
    curve = dict(record["curve"])
    rounds = curve.pop("round", [])
    if logged:
        values = record.get("logs", {}).get(logged, [])
        rounds, curve = range(1, len(values) + 1), {logged: values}
    if "val" in curve:
        curve["validation"] = curve.pop("val")  # the last one
    found = {}
    for name, values in curve.items():
        points = [(t, 100 * value) for t, value in zip(rounds, values) if value is not None]
        if len(points) > 1 and points not in found.values():
            found[name] = points
    return found


def draw(curves: Curves, best: int | None, ylabel: str = "accuracy, %") -> Markup:
    """The drawing; empty without a line. `best`: the best validation round."""
    if not curves:
        return Markup()
    curves = dict(list(curves.items())[:LINES])
    rounds, values = zip(*(point for points in curves.values() for point in points))
    first, last = min(rounds), max(rounds)
    ticks = ticks_of(min(values), max(values))

    def x(t: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (t - first) / (last - first), 1)

    def y(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (value - ticks[0]) / (ticks[-1] - ticks[0]), 1)

    labels = dict.fromkeys([first, (first + last) // 2, last])
    made = TEMPLATES.get_template("curve.svg").render(curves=curves, best=best, ylabel=ylabel, ticks=ticks,
                                                      rounds=labels, x=x, y=y)
    return Markup(made)


def ticks_of(low: float, high: float) -> list[float]:
    """Round numbers from below the lowest to above the highest value, at most six."""
    for step in STEPS:
        start, end = math.floor(low / step), math.ceil(high / step)
        if end - start <= 5:
            break
    return [round(n * step, 1) for n in range(start, max(end, start + 1) + 1)]
