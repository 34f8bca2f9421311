"""The claims as pages: results/claims/<paper>.md by templates/page.md.jinja, each with a
specification curve; the table of all claims; the plot and the sentences of the README."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from plumbing.data.catalog import FOLDERS
from plumbing.data.splits import cut
from plumbing.run.files import write_text
from plumbing.run.settings import shares
from reproduce import claims as rule
from reproduce.claims import (CLAIMS, MARGIN, NEAR, Answer, Measured, Paper, Specification, accuracies,
                              metric_of, runs_for)
from reproduce.drawing import INK, PALE, Line, draw_forest, new_panel, table_text, write_figure
from reproduce.methods import arguments
from reproduce.plan import ANY_GPU, seconds_of
from reproduce.records import Records
from reproduce.intervals import LEVEL, mean, paired
from reproduce.tables import papers as titles
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
        own = [answer for answer in every if answer.paper is paper]
        bears = [TEMPLATES.from_string(line).render(functions(every)) for line in paper.decides]
        words = template.render(title=titles()[paper.id], paper=paper, every=own, records=records,
                                bears=[line for line in bears if NOTHING not in line])
        write_text(out / "claims" / f"{paper.id}.md", words)
        draw_specifications(own[0], out / "claims" / f"{paper.id}.png")
        for answer in own:
            draw_domains(answer, out / "claims" / f"{answer.claim.id}-domains.png")
    lines = []
    for answer in every:
        label = textwrap.fill(f"{answer.claim.says}: {answer_words(answer.own)[0]}", 62)
        lines.append(line_of_plot(label, answer, answer.own))
    draw_forest(out / "claims.png", lines, "gain, points: printed |, measured o (95%)")


# Words


def name_of(paper: Paper) -> str:
    return titles()[paper.id].split(" (")[0]


def gain_words(measured: Measured, over: str = "") -> str:
    """The gain with its interval; without one its mean and how many seeds there are."""
    gain = measured.gain(over=over)
    if gain:
        return str(gain)
    gains = measured.gains_over(over or measured.claim.methods[1])
    if not gains:
        return NOTHING
    return f"{mean(gains):+.1f} (no interval: {len(gains)} of {measured.claim.seeds} seeds)"


def answer_words(measured: Measured) -> tuple[str, str]:
    """The answers to the rule's two questions: above 0, as large as printed."""
    if not measured.gains:
        return "not measured", "not measured"
    if not measured.decided:
        undecided = f"not decided, {len(measured.gains)} of {measured.claim.seeds} seeds"
        return undecided, undecided
    return measured.above_zero, measured.as_printed


def line_of(answer: Answer) -> list:
    """A claim's line in the table of all."""
    own = answer.own
    return [name_of(answer.paper), answer.claim.says, f"{answer.printed:+.1f}", gain_words(own),
            *answer_words(own), f"{len(own.gains)} of {own.claim.seeds}", in_words("notes", answer)]


def table_of_all(every: Iterable[Answer], own_column: bool = True) -> str:
    """Answers A; the page of a paper has no column with its name."""
    start = 0 if own_column else 1
    return table_text([line_of(answer)[start:] for answer in every], HEAD[start:])


def functions(every: list[Answer]) -> dict:
    """What the templates of a claims file may call, so that no number is typed."""
    known = {(answer.claim.id, measured.specification.name): measured
             for answer in every for measured in answer.measured}

    def between(claim: str, name: str, first: str, other: str) -> str:
        values = known[claim, name].values
        return str(paired(values[first], values[other]) or NOTHING)

    return {
        "gain": lambda *key: gain_words(known[key]),
        "control": lambda *key: gain_words(known[key], known[key].claim.control),
        "between": between,
    }


# A paper's page


def table_of_specifications(answer: Answer, every: list[Measured]) -> str:
    """A line for each specification of a claim."""
    lines = []
    for measured in every:
        specification, baseline = measured.specification, mean(measured.values[measured.claim.methods[1]])
        choices = [f"{axis}: {value}" for axis, value in specification.choices.items()]
        differs = specification.other_data or ", ".join(choices)
        near = answer.is_near(measured) and not specification.other_data
        level = "-" if baseline is None else f"{baseline:.1f}{' *' * near}"
        answers = ("-", "-") if specification.other_data else answer_words(measured)
        control = gain_words(measured, measured.claim.control) if measured.claim.control else "-"
        seeds = f"{len(measured.gains)} ({measured.older} older)" if measured.older else len(measured.gains)
        corrected = measured.gain(LEVEL / CLAIMS) or "-"
        lines.append([specification.name, differs or "-", seeds, gain_words(measured), corrected, *answers,
                      control, level, measured.slope or "-"])
    return table_text(lines, HEAD_OF_ONE)


def missing_words(answer: Answer, records: Records) -> str:
    """What would decide answer A: the runs that it lacks, and their time by recorded ones."""
    claim = answer.claim
    lone = replace(answer.paper, claims=[claim])
    own = len(claim.names) * claim.seeds * len(answer.own.specification.cases or claim.cases)
    runs = [run for _, run in runs_for([lone], {f"claim-{claim.id}"}, None, records)]
    every = {run.key for run in runs if not records.get(run)}
    lacking = [run for run in runs[:own] if run.key in every]
    if not lacking:
        return "Nothing is missing."
    of_flags = {(run.module, run.flags): run for run in lacking}  # all seeds take the same time
    times = []
    for kind, unit, words in (("CPU", 3600, "hours on a processor"), (ANY_GPU, 60, "minutes on a GPU")):
        of_run = {key: seconds_of(run, records, kind) for key, run in of_flags.items()}
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
    lines = [[reported.method, reported.column, reported.value, reported.source, reported.protocol]
             for reported in answer.elsewhere]
    return table_text(lines, HEAD_ELSEWHERE)


def gains_elsewhere(answer: Answer) -> list[str]:
    """The gain between the two rows by each source that prints both."""
    by_source, gains = {}, []
    for reported in answer.elsewhere:
        by_method = by_source.setdefault((reported.source.split(",")[0], reported.column), {})
        by_method[reported.method] = float(reported.value)
    a, b = answer.claim.rows
    for (source, column), by_method in by_source.items():
        if len(by_method) == 2:
            gains.append(f"{by_method[a] - by_method[b]:+.1f} by {column} ({source})")
    return gains


def commands_of(specification: Specification, every: list[Answer]) -> dict[str, str]:
    """{method: the command of its first run} under a specification."""
    commands = {}
    for answer in every:
        for measured in answer.measured:
            if measured.specification is specification:
                commands |= {method: runs[0].command for method, runs in measured.runs.items()}
    return commands


def by_domain(measured: Measured) -> list[Line]:
    """Of answer A, where its number is a mean over clients: the gain by ALL and by AVG, then of each client
    with the number of its test images."""
    metric, gain = metric_of(measured.claim, measured.specification), measured.gain()
    if not metric.endswith("/AVG") or not gain:
        return []
    a, b = (measured.cases[name][0] for name in measured.claim.methods)
    args, lines = measured.records[0]["args"], []
    for name in ("ALL", "AVG", *sorted(measured.records[0]["last"]["clients"])):
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


def line_of_plot(label: str, answer: Answer, measured: Measured) -> Line:
    """A specification's row in a plot: the printed gain, and its own with the plain interval."""
    gain = measured.gain()
    values = [measured.difference] if measured.gains else []
    return Line(label, values, gain.interval if gain else (), printed=answer.printed,
                hollow=bool(measured.specification.other_data))


def draw_specifications(answer: Answer, path: Path) -> None:
    """The specification curve of a claim: gains sorted, each with the choices in which it differs; nothing
    without a run."""
    lines, shown = [], [measured for measured in answer.measured if measured.gains]
    if not shown:
        return path.unlink(missing_ok=True)
    for measured in sorted(shown, key=lambda measured: measured.difference):
        name, choices = measured.specification.name, measured.specification.choices
        words = [f"{name} ({len(measured.gains)} seeds)"]
        words += [f"{axis}: {value}" for axis, value in choices.items() if value not in name]
        if answer.is_near(measured):
            words.append(f"baseline within {NEAR:g} points of print")
        lines.append(line_of_plot(textwrap.fill("; ".join(words), 50), answer, measured))
    words = "gain, points (95%); |: printed; grey: what counts as printed; hollow: other data or scale"
    draw_forest(path, lines, f"{textwrap.fill(answer.claim.says, 70)}\n{words}",
                (answer.printed - MARGIN, answer.printed))


def draw_domains(answer: Answer, path: Path) -> None:
    """A bar for each domain of answer A, below those of the two means; nothing where there is none."""
    lines = by_domain(answer.own)
    if lines:
        panel = new_panel(8.0, 0.4 * len(lines) + 1.0)
        ends = [(line.interval[1] - line.interval[0]) / 2 for line in lines]
        colours = [PALE if line.label[:3] in ("ALL", "AVG") else INK for line in lines]
        widths = [line.values[0] for line in lines]
        panel.barh([line.label for line in lines], widths, xerr=ends, color=colours)
        panel.axvline(0, color="0.5", linewidth=0.8)
        panel.invert_yaxis()
        panel.set_xlabel(f"{answer.claim.methods[0]} minus {answer.claim.methods[1]}, points (95%)")
        write_figure(path, panel.figure, None)


for function in (answer_words, by_domain, commands_of, gain_words, gains_elsewhere, missing_words, name_of,
                 statistics.median, table_of_all, table_of_elsewhere, table_of_specifications):
    TEMPLATES.globals[function.__name__] = function
TEMPLATES.globals["rule"] = rule
