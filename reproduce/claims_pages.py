"""The claims as pages: results/claims/<paper>.md with a forest plot each, and the block of the README."""

from __future__ import annotations

from pathlib import Path

from plumbing.files import write_text
from reproduce.claims import STILL_RISING, VERDICTS, Judged, Measured, Paper, Reading, verdict_of
from reproduce.drawing import new_panel, write_figure
from reproduce.statistics import LEVEL, mean, paired
from reproduce.tables import PAPERS

from jinja2 import Environment, StrictUndefined
from tabulate import tabulate

HEAD = ["reading", "seeds", "gain (95%)", "over CONTROL", "would have shown", "rise", "alone", "corrected"]
HEAD_OF_ALL = ["paper", "what it says", "printed", "measured (corrected)", "reading", "verdict"]
DIFFERS = "†: the code of now gives other numbers."
RULE = ("A gain is the mean difference by seed, with Student's 95% interval. *Holds*: above 0, the printed "
        "one not above the interval. *Holds, smaller*: above 0, below the printed one. *Not found*: 0 inside,"
        " it above. *Cannot tell*: both inside. *Reverse*: below 0. A curve that rises by over "
        f"{STILL_RISING:g} point in its last fifth (*rise*, of either; with few evaluations the last three) "
        "has no verdict: *not converged*. *Corrected*: by intervals that hold together for all claims that "
        "can be tested (Bonferroni). *Would have shown*: the smallest gain outside one. The verdict is the "
        "corrected one of the first reading here with three seeds and curves at their end, else the first "
        "with three seeds is shown, else with runs. How many seeds there are was not fixed beforehand. *Too "
        "few seeds*: under three. *No curve*: under three evaluations. " + DIFFERS)


def write_pages(papers: list[Paper], judged: list[Judged], out: Path) -> None:
    """A page and a plot for each paper, and the plot of all claims."""
    for paper in papers:
        own = [one for one in judged if one.paper == paper.id]
        draw_paper(paper, own, out / "claims" / f"{paper.id}.png")
        write_text(out / "claims" / f"{paper.id}.md", page(paper, own))
    draw_all(judged, out / "claims.png")


# Words


def gain_words(one: Measured, over: str = "", level: float = LEVEL) -> str:
    """The gain of a reading with its interval; without one its mean and how many seeds there are."""
    gain = one.gain(level, over)
    if gain:
        return str(gain)
    if over or one.difference is None:
        return "not measured yet"
    seeds = "1 seed" if one.seeds == 1 else f"{one.seeds} seeds"
    return f"{one.difference:+.1f} (no interval: {seeds})"


def summary(one: Judged) -> list[str]:
    """What a claim says, the printed gain, the measured one, and its reading."""
    return [one.claim.says, f"{one.printed:+.1f}", gain_words(one.shown, level=one.level), name_of(one.shown)]


def name_of(one: Measured) -> str:
    return one.reading.name + (" †" if one.differs_now else "")


def functions(judged: list[Judged]) -> dict:
    """What the templates of a claims file may call, so that no number is typed."""
    of_reading = {(one.claim.id, of.reading.name): of for one in judged for of in one.measured}

    def level(claim: str, reading: str, method: str) -> str:
        values = of_reading[claim, reading].values[method]
        return f"{mean(values):.1f}" if values else "not measured yet"

    def between(claim: str, reading: str, one: str, other: str) -> str:
        values = of_reading[claim, reading].values
        return str(paired(values[one], values[other]) or "not measured yet")

    return {
        "gain": lambda *of: gain_words(of_reading[of]),
        "control": lambda *of: gain_words(of_reading[of], of_reading[of].claim.control),
        "least": lambda *of: (f"{gain.half_width:.1f}" if (gain := of_reading[of].gain())
                              else "not measured yet"),
        "level": level,
        "between": between,
    }


# A paper's page


def page(paper: Paper, judged: list[Judged]) -> str:
    """The claims of a paper on one screen; below it, folded, each reading with its commands and runs."""
    fill = Environment(undefined=StrictUndefined).from_string
    known = functions(judged)
    text = [f"# {PAPERS[paper.id]}: does it hold?", paper.idea,
            f"![Gain of each claim, printed and measured]({paper.id}.png)"]
    lines = [[*summary(one), f"**{one.verdict}**"] for one in judged]
    text.append(tabulate(lines, HEAD_OF_ALL[1:], "github", disable_numparse=True))
    decides = [f"- {fill(line).render(known)}" for line in paper.decides]
    text.append("**What bears on it** (plain 95% intervals).\n\n" + "\n".join(decides))
    text.append("To run what is missing, three seeds of each claim: "
                f"`python reproduce_tables.py --run --only 'claim-{paper.id}-*' --seeds 3`. The tables: "
                + ", ".join(f"[{name}](../tables/{name}.md)" for name in paper.tables) + ".")
    for one in judged:
        text.append(details(one))
    text.append("<details><summary>The readings, nearest to the text first, and their commands</summary>")
    for name, reading in paper.readings.items():
        measured = [of for one in judged for of in one.measured if of.reading.name == name]
        text.append(reading_words(reading, measured))
    text += ["</details>", RULE + " The runs behind each gain: [results.csv](../results.csv)."]
    return "\n\n".join(text) + "\n"


def details(judged: Judged) -> str:
    """A claim with all its readings, folded."""
    claim, lines = judged.claim, []
    for one in judged.measured:
        against = gain_words(one, claim.control) if claim.control else "-"
        corrected = one.gain(judged.level)
        lines.append([name_of(one), one.seeds, gain_words(one), against,
                      f"{corrected.half_width:.1f}" if corrected else "-",
                      "-" if one.rise is None else ", ".join(f"{k} {v:+.1f}" for k, v in one.rises.items()),
                      verdict_of(judged, one, LEVEL),
                      verdict_of(judged, one) + (f": {corrected}" if corrected else "")])
    deviation = f" ± {judged.deviation:.1f}, by the printed deviations" if judged.deviation else ""
    columns = " and ".join(claim.columns) if len(claim.columns) < 3 else f"{len(claim.columns)} columns"
    head = [words.replace("CONTROL", claim.control or "a control") for words in HEAD]
    return "\n\n".join([
        f"<details><summary>{claim.says}: printed {judged.printed:+.1f}{deviation}</summary>",
        f"> {claim.quotation}",
        f"{claim.place}. {claim.methods[0]} minus {claim.methods[1]}, mean over {columns}, `{claim.metric}`.",
        tabulate(lines, head, "github", disable_numparse=True), "</details>"])


def reading_words(reading: Reading, measured: list[Measured]) -> str:
    """Why it is a reading, and a command of each method."""
    words, commands = f"**{reading.name}**: {reading.why}.", {}
    if reading.other_data:
        words += f" In the place of the paper's data and scale: {reading.other_data}."
    for one in measured:
        for name, runs in one.runs.items():
            commands[name] = f"- {name}: `{runs[0].command}`"
    return "\n".join([words, "", *commands.values()])


# The README


def of_all(judged: list[Judged]) -> str:
    """All claims: the plot, and a line for each."""
    lines = []
    for one in judged:
        name = PAPERS[one.paper].split(" (")[0]
        lines.append([name, *summary(one), f"[{one.verdict}](results/claims/{one.paper}.md)"])
    table = [" | ".join(cells) for cells in [HEAD_OF_ALL, ["---"] * len(HEAD_OF_ALL), *lines]]
    picture = "![Gain of every claim: printed, and measured with its interval](results/claims.png)"
    marked = ["", DIFFERS] if any(one.shown.differs_now for one in judged) else []
    return "\n".join([picture, "", *(f"| {line} |" for line in table), *marked])


# Forest plots


def draw_paper(paper: Paper, judged: list[Judged], path: Path) -> None:
    """For each claim a row for print and one for each reading with runs."""
    rows = []
    for one in judged:
        rows.append((one.claim.says, one, None))
        rows += [(f"{of.reading.name} ({of.seeds})", one, of) for of in one.measured if of.seeds]
        if not any(of.seeds for of in one.measured):
            rows.append(("not measured", one, None))
    title = f"{PAPERS[paper.id]}. Thick: 95% interval, thin: corrected. In brackets: seeds."
    draw(rows, title, path, with_print=True)


def draw_all(judged: list[Judged], path: Path) -> None:
    """A row for each claim: the reading whose verdict counts."""
    rows = []
    for one in judged:
        name = PAPERS[one.paper].split(" (")[0]
        shown = one.shown if one.shown.seeds else None
        seeds = f" ({shown.seeds})" if shown else ""
        rows.append((f"{name}: {one.claim.says}{seeds}", one, shown))
    title = "Gain in points. Thick: 95% interval, thin: corrected for all claims. In brackets: seeds."
    draw(rows, title, path)


def draw(rows: list[tuple[str, Judged, Measured | None]], title: str, path: Path,
         with_print: bool = False) -> None:
    """A line for each row: the printed gain as a bar, the measured one in the colour of its verdict."""
    panel = new_panel(9.5, 0.27 * len(rows) + 1.3)
    panel.axvline(0, color="0.5", linewidth=0.8)
    colours, ends, spans = {}, [0.0], []
    for i, (_, judged, one) in enumerate(rows):
        ends.append(judged.printed)
        if one is None or not with_print:
            panel.plot([judged.printed], [i], "|", color="black", markersize=11, markeredgewidth=2)
        if one is None:
            continue
        words = verdict_of(judged, one)
        colours[words] = colour = VERDICTS[words][1]
        gain = one.gain()
        if gain:
            spans.append((i, one.gain(judged.level).interval, colour))
            panel.plot(spans[-1][1], [i, i], color=colour, linewidth=0.9)
            panel.plot(gain.interval, [i, i], color=colour, linewidth=2.6)
            ends += [max(-16.0, min(16.0, end)) for end in gain.interval]  # of three seeds it may be endless
        panel.plot([one.difference], [i], "o", color=colour, markersize=6)
        ends.append(one.difference)
    panel.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=8)
    for label, (_, _, one) in zip(panel.get_yticklabels(), rows):
        label.set_fontweight("bold" if with_print and one is None else "normal")
    left, right = min(ends) - 1, max(ends) + 1
    for i, (low, high), colour in spans:  # an interval that goes on outside the frame ends in an arrow
        for end, mark in [(left, "<")] * (low < left) + [(right, ">")] * (high > right):
            panel.plot([end], [i], mark, color=colour, markersize=8, clip_on=False)
    panel.set(ylim=(len(rows) - 0.5, -0.5), xlim=(left, right), xlabel="gain, points")
    panel.figure.suptitle(title, fontsize=9)
    marks = [panel.plot([], [], "o-", color=colour, label=words)[0] for words, colour in colours.items()]
    marks.append(panel.plot([], [], "|", color="black", markersize=9, markeredgewidth=2, label="printed")[0])
    panel.figure.legend(handles=marks, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    write_figure(path, panel.figure, None)
