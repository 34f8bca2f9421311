"""The claims as pages: results/claims/<paper>.md by the template claims/page.md.jinja, each with a
specification curve; the table of all claims; the plot and the sentences of the README."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from plumbing.catalog import FOLDERS
from plumbing.files import write_text
from plumbing.settings import shares
from plumbing.splits import cut
from reproduce import claims as rule
from reproduce.claims import (CLAIMS, MARGIN, NEAR, Answer, Measured, Paper, Specification, accuracies,
                              metric_of, runs_for)
from reproduce.drawing import INK, PALE, Line, draw_forest, new_panel, table_text, write_figure
from reproduce.methods import arguments
from reproduce.plan import seconds_of
from reproduce.records import Records
from reproduce.statistics import LEVEL, mean, paired
from reproduce.tables import PAPERS
from reproduce.templates import TEMPLATES, in_words

NOTHING = "not measured yet"
HEAD = ["paper", "what it says", "printed", "measured (95%)", "above 0?", "as printed?", "seeds", "notes"]
HEAD_OF_ONE = ["specification", "differs in", "seeds", "gain (95%)", "corrected", "above 0?", "as printed?",
               "over the control", "baseline", "slope of the gain"]
HEAD_ELSEWHERE = ["method", "column", "accuracy", "where", "protocol"]


def write_pages(papers: list[Paper], every: list[Answer], out: Path, records: Records) -> None:
    """A page and a specification curve for each paper, bars by domain, and the plot of answers A."""
    template = TEMPLATES.get_template("page.md.jinja")
    for paper in papers:
        own = [one for one in every if one.paper is paper]
        bears = [TEMPLATES.from_string(line).render(functions(every)) for line in paper.decides]
        words = template.render(title=PAPERS[paper.id], paper=paper, every=own, records=records,
                                bears=[line for line in bears if NOTHING not in line])
        write_text(out / "claims" / f"{paper.id}.md", words)
        draw_specifications(own[0], out / "claims" / f"{paper.id}.png")
        for answer in own:
            draw_domains(answer, out / "claims" / f"{answer.claim.id}-domains.png")
    lines = []
    for one in every:
        label = textwrap.fill(f"{one.claim.says}: {answer_words(one.own)[0]}", 62)
        lines.append(line_of_plot(label, one, one.own))
    draw_forest(out / "claims.png", lines, "gain, points: printed |, measured o (95%)")


# Words


def name_of(paper: Paper) -> str:
    return PAPERS[paper.id].split(" (")[0]


def gain_words(one: Measured, over: str = "") -> str:
    """The gain with its interval; without one its mean and how many seeds there are."""
    gain = one.gain(over=over)
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


def line_of(answer: Answer) -> list:
    """A claim's line in the table of all."""
    one = answer.own
    return [name_of(answer.paper), answer.claim.says, f"{answer.printed:+.1f}", gain_words(one),
            *answer_words(one), f"{len(one.gains)} of {one.claim.seeds}", in_words("notes", answer)]


def table_of_all(every: Iterable[Answer], own_column: bool = True) -> str:
    """Answers A; the page of a paper has no column with its name."""
    start = 0 if own_column else 1
    return table_text([line_of(one)[start:] for one in every], HEAD[start:])


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


def table_of_specifications(answer: Answer, every: list[Measured]) -> str:
    """A line for each specification of a claim."""
    lines = []
    for one in every:
        of, baseline = one.specification, mean(one.values[one.claim.methods[1]])
        differs = of.other_data or ", ".join(f"{axis}: {value}" for axis, value in of.choices.items())
        near = answer.is_near(one) and not of.other_data
        level = "-" if baseline is None else f"{baseline:.1f}{' *' * near}"
        answers = ("-", "-") if of.other_data else answer_words(one)
        control = gain_words(one, one.claim.control) if one.claim.control else "-"
        seeds = f"{len(one.gains)} ({one.older} older)" if one.older else len(one.gains)
        lines.append([of.name, differs or "-", seeds, gain_words(one), one.gain(LEVEL / CLAIMS) or "-",
                      *answers, control, level, one.slope or "-"])
    return table_text(lines, HEAD_OF_ONE)


def missing_words(answer: Answer, records: Records) -> str:
    """What would decide answer A: the runs that it lacks, and their time by recorded ones."""
    claim = answer.claim
    if answer.own.decided:
        return "Answer A has all its seeds."
    lone = replace(answer.paper, claims=[claim])
    own = len(claim.names) * claim.seeds * len(answer.own.specification.cases or claim.cases)
    runs = [run for _, _, run in runs_for([lone], {f"claim-{claim.id}"}, None, records)]
    every = {run.key for run in runs if not records.get(run)}
    lacking = [run for run in runs[:own] if run.key in every]
    of_flags = {(run.module, run.flags): run for run in lacking}  # all seeds take the same time
    times = []
    for on_gpu, unit, words in ((False, 3600, "hours on a processor"), (True, 60, "minutes on a GPU")):
        of_run = {key: seconds_of(run, records, on_gpu) for key, run in of_flags.items()}
        seconds = [of_run[run.module, run.flags] for run in lacking]
        if None not in seconds:
            times.append(f"{sum(seconds) / unit:.0f} {words}")
    time = f"about {' or '.join(times)}" if times else "unknown"
    args = arguments(runs[0].module, runs[0].flags)
    needs = f"{args.dataset} and ImageNet's weights" if args.weights == "imagenet" else args.dataset
    command = f"python reproduce_tables.py --run --only claim-{claim.id} --seeds paper"
    control = ", those of the control included" if claim.control else ""
    return (f"`{command}` begins with the paper's own setting on {needs}. {len(lacking)} runs are missing "
            f"for {claim.seeds} seeds{control}; the time is {time}. With the other settings {len(every)} are "
            "missing. Then `python reproduce_tables.py` writes the answer, which may still be open.")


def table_of_elsewhere(answer: Answer) -> str:
    """What others print of the two rows, in nearly the paper's setting."""
    lines = [[one.method, one.column, one.value, one.source, one.protocol] for one in answer.elsewhere]
    return table_text(lines, HEAD_ELSEWHERE)


def gains_elsewhere(answer: Answer) -> list[str]:
    """The gain between the two rows by each source that prints both."""
    by_source, gains = {}, []
    for one in answer.elsewhere:
        by_source.setdefault((one.source.split(",")[0], one.column), {})[one.method] = float(one.value)
    a, b = answer.claim.rows
    for (source, column), of in by_source.items():
        if len(of) == 2:
            gains.append(f"{of[a] - of[b]:+.1f} by {column} ({source})")
    return gains


def commands_of(of: Specification, every: list[Answer]) -> dict[str, str]:
    """{method: the command of its first run} under a specification."""
    commands = {}
    for answer in every:
        for one in answer.measured:
            if one.specification is of:
                commands |= {method: runs[0].command for method, runs in one.runs.items()}
    return commands


def by_domain(one: Measured) -> list[Line]:
    """Of answer A, where its number is a mean over clients: the gain by ALL and by AVG, then of each client
    with the number of its test images."""
    metric, gain = metric_of(one.claim, one.specification), one.gain()
    if not metric.endswith("/AVG") or not gain:
        return []
    a, b = (one.cases[name][0] for name in one.claim.methods)
    args, lines = one.records[0]["args"], []
    for name in ("ALL", "AVG", *sorted(one.records[0]["last"]["clients"])):
        path, label = metric.replace("AVG", name), name
        if name not in ("ALL", "AVG"):
            path, label = metric.replace("AVG", f"clients/{name}"), f"{name} ({tested(args, name)} images)"
        of_name = paired(accuracies(a, path), accuracies(b, path))
        lines.append(Line(f"{label} {of_name}", [of_name.difference], of_name.interval))
    return lines


def tested(args: dict, domain: str) -> int:
    """How many images of a domain are tested in-domain."""
    _, images = FOLDERS[args["dataset"]].domains[domain]
    return len(cut(range(images), shares(args["split"]))[2])


# Figures


def line_of_plot(label: str, answer: Answer, one: Measured) -> Line:
    """A specification's row in a plot: the printed gain, and its own with the plain interval."""
    gain = one.gain()
    values = [one.difference] if one.gains else []
    return Line(label, values, gain.interval if gain else (), printed=answer.printed,
                hollow=bool(one.specification.other_data))


def draw_specifications(answer: Answer, path: Path) -> None:
    """The specification curve of a claim: gains sorted, each with the choices in which it differs; nothing
    without a run."""
    lines, shown = [], [one for one in answer.measured if one.gains]
    if not shown:
        return path.unlink(missing_ok=True)
    for one in sorted(shown, key=lambda one: one.difference):
        of, words = one.specification, [f"{one.specification.name} ({len(one.gains)} seeds)"]
        words += [f"{axis}: {value}" for axis, value in of.choices.items() if value not in of.name]
        if answer.is_near(one):
            words.append(f"baseline within {NEAR:g} points of print")
        lines.append(line_of_plot(textwrap.fill("; ".join(words), 50), answer, one))
    words = "gain, points (95%); |: printed; grey: what counts as printed; hollow: other data or scale"
    draw_forest(path, lines, f"{textwrap.fill(answer.claim.says, 70)}\n{words}",
                (answer.printed - MARGIN, answer.printed))


def draw_domains(answer: Answer, path: Path) -> None:
    """A bar for each domain of answer A, below those of the two means; nothing where there is none."""
    lines = by_domain(answer.own)
    if lines:
        panel = new_panel(8.0, 0.4 * len(lines) + 1.0)
        ends = [(one.interval[1] - one.interval[0]) / 2 for one in lines]
        colours = [PALE if one.label[:3] in ("ALL", "AVG") else INK for one in lines]
        panel.barh([one.label for one in lines], [one.values[0] for one in lines], xerr=ends, color=colours)
        panel.axvline(0, color="0.5", linewidth=0.8)
        panel.invert_yaxis()
        panel.set_xlabel(f"{answer.claim.methods[0]} minus {answer.claim.methods[1]}, points (95%)")
        write_figure(path, panel.figure, None)


for function in (answer_words, by_domain, commands_of, gain_words, gains_elsewhere, missing_words, name_of,
                 statistics.median, table_of_all, table_of_elsewhere, table_of_specifications):
    TEMPLATES.globals[function.__name__] = function
TEMPLATES.globals["rule"] = rule
