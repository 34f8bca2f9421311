"""The claims as pages: results/claims/<paper>.md, each with a specification curve; the table of all claims;
the plot and the five sentences of the README."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable
from pathlib import Path

from plumbing.files import write_text
from plumbing.results import empty_figure
from reproduce.claims import (CLAIMS, COMMITTED, MARGIN, NEAR, Answer, Measured, Paper, accuracies,
                              metric_of, runs_for)
from reproduce.drawing import new_panel, write_figure
from reproduce.plan import seconds_of
from reproduce.records import Records
from reproduce.statistics import LEVEL, mean, paired
from reproduce.tables import PAPERS
from reproduce.elsewhere import Reported

from jinja2 import Environment, StrictUndefined
from tabulate import tabulate

NOTHING = "not measured yet"
HEAD = ["paper", "what it says", "printed", "measured (95%)", "above 0?", "as printed?", "seeds", "notes"]
HEAD_OF_ONE = ["specification", "differs in", "seeds", "gain (95%)", "corrected", "above 0?", "as printed?",
               "over the control", "baseline", "slope of the gain"]
INK, PALE = "#1b5e9b", "#8a8a8a"  # a gain; the printed one
LEGEND = (f"""How to read it ([the rule](../../claims/RULE.md) of {COMMITTED[:10]}):

- We judge in the paper's own setting. Where its text is silent we use the first released code.
- A gain is the mean difference by seed, with Student's 95% interval, which decides. *Corrected* is
  wider, for {CLAIMS} claims together; it decides nothing.
- *Above 0?* and *as printed?* (above the printed gain less {MARGIN:g} point): *open* if the interval
  holds the threshold, *smaller* if all of it lies below. With fewer than the planned seeds nothing is
  decided.
- *Older*: run before the rule was fixed, when its gain was known. Runs that the current code fails to
  reproduce are left out.
- *Over the control*: the gain over the same network without what the claim is about. A baseline is
  marked * within {NEAR:g} points of print. *Slope*: the points by which the gain rises over the last
  fifth of the rounds.""")


def write_pages(papers: list[Paper], every: list[Answer], out: Path, records: Records,
                elsewhere: dict[tuple, list[Reported]]) -> None:
    """A page and a specification curve for each paper, and the plot of answers A."""
    for paper in papers:
        own = [one for one in every if one.paper is paper]
        draw_specifications(own[0], out / "claims" / f"{paper.id}.png")
        write_text(out / "claims" / f"{paper.id}.md", page(paper, own, records, elsewhere))
    draw_own(every, out / "claims.png")


# Words


def name_of(paper: Paper) -> str:
    return PAPERS[paper.id].split(" (")[0]


def table(lines: list[list], head: list[str]) -> str:
    return tabulate(lines, head, "github", disable_numparse=True)


def gain_words(one: Measured, over: str = "", level: float = LEVEL) -> str:
    """The gain with its interval; without one its mean and how many seeds there are."""
    gain = one.gain(level, over)
    if gain:
        return str(gain)
    if over or one.difference is None:
        return NOTHING
    seeds = "1 seed" if len(one.gains) == 1 else f"{len(one.gains)} seeds"
    return f"{one.difference:+.1f} (no interval: {seeds})"


def answer_words(one: Measured) -> tuple[str, str]:
    """The answers to the rule's two questions: above 0, as large as printed."""
    if not one.gains:
        return "not measured", "not measured"
    if not one.decided:
        undecided = f"not decided, {len(one.gains)} of {one.claim.seeds} seeds"
        return undecided, undecided
    return one.above_zero, one.as_printed


def notes_of(answer: Answer) -> str:
    """What a reader of answer A should know: levels, slope, and how many seeds are older than the rule."""
    one, notes = answer.own, []
    if not one.gains:
        return "-"
    for name, printed in zip(one.claim.methods, answer.levels):
        below = mean(one.values[name]) - printed
        if abs(below) > NEAR:
            notes.append(f"{name} is {abs(below):.1f} points {'below' if below < 0 else 'above'} print")
    if one.slope and one.slope.interval[0] > 0:
        notes.append(f"the gain still rises, {one.slope} in the last fifth")
    if one.older:
        notes.append(f"{one.older} seeds are older than the rule")
    if one.deviation is None:
        notes.append("without a printed deviation")
    return "; ".join(notes) or "-"


def line_of(answer: Answer) -> list:
    """A claim's line in the table of all."""
    one = answer.own
    return [name_of(answer.paper), answer.claim.says, f"{answer.printed:+.1f}", gain_words(one),
            *answer_words(one), f"{len(one.gains)} of {one.claim.seeds}", notes_of(answer)]


def table_of_all(every: Iterable[Answer]) -> str:
    """All claims: answers A."""
    return table([line_of(one) for one in every], HEAD)


def paper_sentence(every: list[Answer]) -> str:
    """What holds of a paper, by its first claim: answer A, then answer B."""
    one = every[0]
    own = one.own
    words = f"**{name_of(one.paper)}** prints {one.printed:+.1f} points: {one.claim.says}."
    if not own.gains:
        words += " In the paper's own setting it is not measured."
    elif not own.decided:
        words += (f" In the paper's own setting it is not decided: {gain_words(own)} with "
                  f"{len(own.gains)} of {own.claim.seeds} seeds.")
    else:
        above = {"yes": "above 0", "no": "below 0", "open": "0 is in the interval"}[own.above_zero]
        as_large = {"yes": "as large as printed", "smaller": "smaller than printed",
                    "open": "it may be as large as printed"}[own.as_printed]
        words += f" In the paper's own setting it is {own.gain()}: {above}, {as_large}."
        if notes_of(one) != "-":
            words += f" There {notes_of(one)}."
    return f"{words} {others_words(one)} [More](results/claims/{one.paper.id}.md)."


def others_words(answer: Answer) -> str:
    """Answer B in a sentence."""
    planned, run = len(answer.others), answer.with_runs
    if not run:
        few = "One other setting is" if planned == 1 else f"{planned} other settings are"
        return f"{few} planned at its data and scale; none has runs."
    if len(run) == 1:
        near = f", with a baseline within {NEAR:g} points of print" * answer.is_near(run[0])
        words = f"{run[0].specification.name}, {gain_words(run[0])}{near}"
        return f"Of {planned} other settings one has runs: {words}."
    run = sorted(run, key=lambda one: one.difference)
    gains = [one.difference for one in run]
    positive = sum(v > 0 for v in gains)
    words = (f"Of {planned} other settings {len(run)} have runs; in {positive} the mean gain is above 0. Its "
             f"median is {statistics.median(gains):+.1f}, from {gains[0]:+.1f} "
             f"({run[0].specification.name}) to {gains[-1]:+.1f} ({run[-1].specification.name}).")
    for one in run:
        if answer.is_near(one):
            words += (f" In {one.specification.name}, where {answer.claim.methods[1]} is within {NEAR:g} "
                      f"points of its printed accuracy, the gain is {gain_words(one)}.")
    if all(one.older == len(one.gains) for one in run):
        words += " All these runs are older than the rule."
    return words


def functions(every: list[Answer]) -> dict:
    """What the templates of a claims file may call, so that no number is typed."""
    known = {(one.claim.id, of.specification.name): of for one in every for of in one.measured}

    def between(claim: str, name: str, one: str, other: str) -> str:
        values = known[claim, name].values
        return str(paired(values[one], values[other]) or NOTHING)

    return {
        "gain": lambda *of: gain_words(known[of]),
        "control": lambda *of: gain_words(known[of], known[of].claim.control),
        "least": lambda *of: f"{gain.half_width:.1f}" if (gain := known[of].gain()) else NOTHING,
        "between": between,
    }


# A paper's page


def in_short(answer: Answer, records: Records) -> str:
    """The first claim in five lines: verdict, setting, measured against printed, what it takes, doubts."""
    one, claim = answer.own, answer.claim
    doubts = [notes_of(answer)] if notes_of(answer) != "-" else []
    if not one.decided:
        doubts.append(f"{claim.seeds - len(one.gains)} of {claim.seeds} seeds are missing")
    above, as_printed = answer_words(one)
    return "\n".join([
        f"- **Verdict** ({claim.says}): above 0: {above}; as large as printed: {as_printed}.",
        f"- **Setting**: {one.specification.dataset}; {one.specification.why}.",
        f"- **Measured**: {gain_words(one)}; printed {answer.printed:+.1f}. {others_words(answer)}",
        f"- **What it takes**: {missing_words(answer, records)}",
        f"- **Doubts**: {'; '.join(doubts) or 'none noted'}."])


def page(paper: Paper, every: list[Answer], records: Records, elsewhere: dict[tuple, list[Reported]]) -> str:
    """The claims of a paper on one screen; below it each with its specifications, and their commands."""
    fill = Environment(undefined=StrictUndefined).from_string
    known = functions(every)
    text = [f"# {PAPERS[paper.id]}: does it hold?", paper.idea,
            in_short(every[0], records), table([line_of(one)[1:] for one in every], HEAD[1:]), LEGEND,
            f"![Gain of each specification of the first claim]({paper.id}.png)"]
    bears = [fill(line).render(known) for line in paper.decides]
    bears = [f"- {line}" for line in bears if NOTHING not in line]
    if bears:
        text.append("**What bears on it** (plain 95% intervals).\n\n" + "\n".join(bears))
    links = ", ".join(f"[{name}](../tables/{name}.md)" for name in paper.tables)
    text.append(f"Tables: {links}. Specifications that are not planned:\n\n"
                + "\n".join(f"- {line}" for line in paper.not_planned))
    for one in every:
        text.append(details(one, records, elsewhere))
    text.append("<details><summary>The specifications and their commands</summary>")
    text += [specification_words(paper, name, every) for name in paper.specifications]
    text += ["</details>", "The runs behind each gain: [results.csv](../results.csv)."]
    return "\n\n".join(text) + "\n"


def details(answer: Answer, records: Records, elsewhere: dict[tuple, list[Reported]]) -> str:
    """A claim with all its specifications."""
    claim, deviation = answer.claim, answer.own.deviation
    spread = f" ± {deviation:.1f}, by the printed deviations" if deviation else ""
    columns = " and ".join(claim.columns) if len(claim.columns) < 3 else f"{len(claim.columns)} columns"
    quoted = f'> {claim.quotation}\n\n' if claim.quotation else ""
    own = answer.own.specification
    parts = [f"## {claim.says}",
             f"{quoted}{claim.place}: printed {answer.printed:+.1f}{spread}. {claim.methods[0]} minus "
             f"{claim.methods[1]}, mean over {columns}, `{claim.metric}` of a record.",
             f"The paper's own setting: {own.dataset}; {own.why}.", missing_words(answer, records)]
    lines = [specification_line(answer, one) for one in [answer.own, *answer.others]]
    parts.append(table(lines, HEAD_OF_ONE))
    most = answer.moves_most()
    if most:
        axis, one, other = most
        parts.append(f"Of single choices *{axis}* moves the gain most: {one.difference:+.1f} "
                     f"({one.specification.name}) and {other.difference:+.1f} ({other.specification.name}).")
    parts += by_domain(answer.own)
    if answer.illustrations:
        lines = [specification_line(answer, one) for one in answer.illustrations]
        parts.append("Illustrations, on other data or at another scale, which are not counted:\n\n"
                     + table(lines, HEAD_OF_ONE))
    return "\n\n".join(parts + reported(answer, elsewhere))


def specification_line(answer: Answer, one: Measured) -> list:
    """A line of a claim's table."""
    of, baseline = one.specification, mean(one.values[one.claim.methods[1]])
    differs = of.other_data or ", ".join(f"{axis}: {value}" for axis, value in of.choices.items())
    near = answer.is_near(one) and not of.other_data
    level = "-" if baseline is None else f"{baseline:.1f}{' *' * near}"
    answers = ("-", "-") if of.other_data else answer_words(one)
    control = gain_words(one, one.claim.control) if one.claim.control else "-"
    seeds = f"{len(one.gains)} ({one.older} older)" if one.older else len(one.gains)
    return [of.name, differs or "-", seeds, gain_words(one), one.gain(LEVEL / CLAIMS) or "-",
            *answers, control, level, one.slope or "-"]


def missing_words(answer: Answer, records: Records) -> str:
    """What would decide answer A: the runs that it lacks, and their time by recorded ones."""
    claim = answer.claim
    if answer.own.decided:
        return "Answer A has all its seeds."
    lone = Paper(**vars(answer.paper) | {"claims": [claim]})
    own = len(claim.names) * claim.seeds * len(answer.own.specification.cases or claim.cases)
    runs = [run for _, _, run in list(runs_for([lone], {f"claim-{claim.id}"}, None, records))[:own]]
    lacking = [run for run in runs if not records.by_precision(run)]
    times = []
    for on_gpu, unit, words in ((False, 3600, "hours on a processor"), (True, 60, "minutes on a GPU")):
        seconds = [seconds_of(run, records, on_gpu) for run in lacking]
        if None not in seconds:
            times.append(f"{sum(seconds) / unit:.0f} {words}")
    time = " or ".join(times) or "an unknown time"
    return (f"To reach {claim.seeds} seeds: {len(lacking)} runs (with any control), about {time} by recorded "
            f"ones; it may still be open then. `python reproduce_tables.py --run --only claim-{claim.id} "
            f"--seeds {claim.seeds}`")


def by_domain(one: Measured) -> list[str]:
    """The gain of each client of answer A, where the number is a mean over clients."""
    metric = metric_of(one.claim, one.specification)
    if not metric.endswith("/AVG") or not one.gains:
        return []
    a, b = one.claim.methods
    words = []
    for name in sorted(one.records[0]["last"]["clients"]):
        path = metric.replace("AVG", f"clients/{name}")
        of_a, of_b = (accuracies(one.cases[method][0], path) for method in (a, b))
        words.append(f"{name} {paired(of_a, of_b) or 'without an interval'}")
    return [f"By domain: {', '.join(words)}."]


def reported(answer: Answer, elsewhere: dict[tuple, list[Reported]]) -> list[str]:
    """What others print of the two rows in nearly the paper's setting, and the gain between the two."""
    lines, by_source = [], {}
    for row in answer.claim.rows:
        for column in answer.claim.columns:
            place = answer.claim.table, answer.claim.dataset, row, column
            for one in elsewhere.get(place, []):
                if one.near == "yes":
                    by_source.setdefault((one.source.split(",")[0], column), {})[row] = float(one.value)
                    lines.append([row, column, one.value, one.source, one.protocol])
    if not lines:
        return []
    gains = []
    for (source, column), of in by_source.items():
        if len(of) == 2:
            a, b = (of[row] for row in answer.claim.rows)
            gains.append(f"{a - b:+.1f} by {column} ({source})")
    words = f"Reported elsewhere, gains of {', '.join(gains)}:" if gains else "Reported elsewhere:"
    head = ["method", "column", "accuracy", "where", "protocol"]
    return [f"{words}\n\n{table(lines, head)}\n\n[All that others print](../elsewhere.md)."]


def specification_words(paper: Paper, name: str, every: list[Answer]) -> str:
    """Why it is a specification, and a command of each method."""
    of, commands = paper.specifications[name], {}
    for answer in every:
        for one in answer.measured:
            if one.specification is of:
                commands |= {method: f"- {method}: `{runs[0].command}`" for method, runs in one.runs.items()}
    words = f"**{name}**: {of.why}."
    if of.other_data:
        words += f" Instead of the paper's data and scale: {of.other_data}."
    for axis, value in of.choices.items():
        words += f" {axis[0].upper()}{axis[1:]} {value}: {paper.axes[axis][value]}."
    return "\n".join([words, "", *commands.values()])


# Figures


def draw_gain(panel, i: int, one: Measured, across: bool) -> None:
    """A gain with its interval, in row i or, unless `across`, in column i; hollow on other data."""
    gain, inside = one.gain(), "white" if one.specification.other_data else INK
    dot = dict(marker="o", color=INK, markersize=7, markerfacecolor=inside)
    ends = [max(-30.0, min(30.0, end)) for end in gain.interval] if gain else []  # few seeds: it may be long
    if across:
        panel.plot(ends, [i] * len(ends), color=INK, linewidth=2)
        panel.plot([one.difference], [i], **dot)
    else:
        panel.plot([i] * len(ends), ends, color=INK, linewidth=2)
        panel.plot([i], [one.difference], **dot)


def draw_own(every: list[Answer], path: Path) -> None:
    """Answers A: a row for each claim, the printed gain as a bar."""
    panel = new_panel(9.0, 0.32 * len(every) + 1.0)
    panel.axvline(0, color="0.5", linewidth=0.8)
    names = []
    for i, one in enumerate(every):
        panel.plot([one.printed], [i], "|", color="black", markersize=11, markeredgewidth=2)
        if one.own.gains:
            draw_gain(panel, i, one.own, across=True)
        names.append(textwrap.fill(f"{one.claim.says}: {answer_words(one.own)[0]}", 62))
    panel.set_yticks(range(len(every)), names, fontsize=7)
    panel.set(ylim=(len(every) - 0.5, -0.5), xlabel="gain, points: printed |, measured o (95%)")
    write_figure(path, panel.figure, None)


def draw_specifications(answer: Answer, path: Path) -> None:
    """The specification curve of a claim: gains sorted, the printed one as a line, and below the choices."""
    shown = sorted((one for one in answer.measured if one.gains), key=lambda one: one.difference)
    taken = [answer.paper.choices(one.specification) for one in shown if not one.specification.other_data]
    axes = [(axis, value) for axis, values in answer.paper.axes.items() for value in values
            if any(choices[axis] == value for choices in taken)]
    rows = [f"{axis}: {value}" for axis, value in axes]
    rows += [f"baseline within {NEAR:g} points of print", "the paper's own setting"]
    figure = empty_figure((max(7.0, 0.5 * len(shown) + 4.5), 4.0 + 0.2 * len(rows)))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 0.2 * len(rows)])
    upper.axhline(0, color="0.5", linewidth=0.8)
    upper.axhspan(answer.printed - MARGIN, answer.printed, color=PALE, alpha=0.3)
    upper.axhline(answer.printed, color=PALE, label=f"printed, {answer.printed:+.1f}")
    for i, one in enumerate(shown):
        draw_gain(upper, i, one, across=False)
        choices = answer.paper.choices(one.specification)
        for j, (axis, value) in enumerate(axes):
            if choices[axis] == value and not one.specification.other_data:
                lower.plot([i], [j], "s", color=INK, markersize=5)
        for j, marked in enumerate([answer.is_near(one), one is answer.own], len(axes)):
            if marked:
                lower.plot([i], [j], "s", color="black", markersize=5)
    names = [f"{one.specification.name} ({len(one.gains)} seeds)" for one in shown]
    lower.set_xticks(range(len(shown)), names, rotation=30, ha="right", fontsize=7)
    lower.set_yticks(range(len(rows)), rows, fontsize=7)
    lower.set(ylim=(len(rows) - 0.5, -0.5), xlim=(-0.7, max(len(shown), 1) - 0.3))
    upper.set_ylabel("gain, points")
    hollow = "; hollow: other data or scale" * any(one.specification.other_data for one in shown)
    figure.suptitle(f"{answer.claim.says}\nGains sorted, with plain 95% intervals{hollow}; grey band: what "
                    "counts as printed", fontsize=8)
    upper.legend(fontsize=8, frameon=False)
    write_figure(path, figure, None)
