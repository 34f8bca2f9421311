"""The claims as pages: results/claims/<paper>.md by templates/page.md.jinja, with two figures for each claim
that has runs; the table of all claims and the sentences of the README."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from plumbing.run.files import write_text
from reproduce import claims as rule
from reproduce.claims import BEHIND, Answer, Measured, Paper, metric_of, runs_for, runs_of
from reproduce.drawing import (Line, Signs, draw_forest, draw_line, new_panel, percentages, table_text,
                               write_figure)
from reproduce.intervals import mean, paired
from reproduce.methods import ROOT
from reproduce.plan import hours_of
from reproduce.records import Records, by_training
from reproduce.templates import TEMPLATES

NOTHING = "not measured"
OWN = "the paper's own setting"
HEAD = ["gain", "printed", "here, in the paper's own setting (95%)", "on the sources, method / baseline",
        "here, in other settings"]
SIGNS = Signs("printed", "measured here, 95% interval",
              f"behind: more than {BEHIND:g} points below its baseline on the sources",
              "answers no claim: other data or scale, not tested alike, or too few seeds")


def write_pages(papers: Sequence[Paper], every: list[Answer], out: Path, records: Records) -> None:
    """A page for each paper."""
    template = TEMPLATES.get_template("page.md.jinja")
    folder = out / "claims"
    for paper in papers:
        of_paper = [answer for answer in every if answer.paper is paper]
        words = template.render(paper=paper, every=of_paper, records=records, call=functions(every))
        write_text(folder / f"{paper.id}.md", words)


# Words


def gain_words(measured: Measured, over: str = "") -> str:
    """The gain with its interval; without one its mean and how many seeds there are."""
    gain = measured.gain(over)
    if gain:
        return str(gain)
    gains = measured.gains_over(over or measured.claim.methods[1])
    if not gains:
        return NOTHING
    return f"{mean(gains):+.1f} (no interval: {len(gains)} of {measured.claim.seeds} seeds)"


def answer_words(measured: Measured) -> str:
    """gains, as printed; with fewer seeds than planned how many there are."""
    if not measured.gains:
        return NOTHING
    if not measured.decided:
        return f"{len(measured.gains)} of {measured.claim.seeds} seeds"
    return ", ".join(word for word in (measured.verdict, measured.beside_print) if word)


def sentence_of(answer: Answer) -> str:
    """The verdict in the paper's own setting, with its number."""
    own, printed = answer.own, f"{answer.printed:+.1f}"
    a, b = answer.claim.methods
    if not own.gains:
        words = f"**Not measured yet in the paper's own setting.** The paper prints {printed} points."
        other = instead(answer)
        if not other:
            return words
        return (f"{words} In another setting ({other.specification.name}) the gain is {gain_words(other)}; "
                "this answers no claim.")
    if not own.decided:
        return f"**Not decided**: {gain_words(own)} points so far. The paper prints {printed}."
    verdict = {"gains": f"{a} gains over {b}", "loses": f"{a} loses against {b}",
               "open": f"Open whether {a} gains over {b}"}[own.verdict]
    beside = f", {own.beside_print}" if own.beside_print else ""
    return f"**{verdict}**: {own.gain()} points{beside}. The paper prints {printed}."


def instead(answer: Answer) -> Measured | None:
    """The first setting with runs beside the paper's own."""
    return next((other for other in [*answer.others, *answer.illustrations] if other.gains), None)


def learned_words(measured: Measured) -> str:
    """Whether the method had learned in a setting: training loss and accuracy on the sources, of both."""
    a, b = measured.claim.methods
    mine, theirs = measured.learned(a), measured.learned(b)
    if None in (mine.loss, theirs.loss):
        return ""
    words = f"training loss after the last round {loss(mine.loss)} ({b} {loss(theirs.loss)})"
    if mine.sources is not None and theirs.sources is not None:
        words += f", accuracy on the source domains {mine.sources:.1f}% ({b} {theirs.sources:.1f}%)"
    if measured.not_learned:
        return f"**{a} was behind on its source domains**: {words}."
    return f"{a} had {'learned its source domains' if mine.sources is not None else 'trained'}: {words}."


def where_learned(answer: Answer) -> str:
    """Where the method was behind on its sources and where not, in the other settings that have all seeds and
    runs of their own: how many there are, and their gains."""
    learned, lost = [], []
    for measured in answer.others:
        of_own_runs = measured.records == answer.own.records  # by another round
        if not of_own_runs and measured.decided and measured.alike and not measured.specification.other_data:
            (lost if measured.not_learned else learned).append(measured.difference)
    parts = [f"not behind in {len(learned)} ({reach(learned)})" if learned else "",
             f"behind in {len(lost)} ({reach(lost)})" if lost else ""]
    return ", ".join(filter(None, parts))


def reach(gains: list[float]) -> str:
    """+4.6, or -0.4 to +2.6."""
    if len(gains) == 1:
        return f"{gains[0]:+.1f}"
    return f"{min(gains):+.1f} to {max(gains):+.1f}"


def loss(value: float | None) -> str:
    """Two digits: 1.32, 0.0041."""
    return "-" if value is None else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def missing_words(answer: Answer, records: Records) -> str:
    """What would decide a claim in the paper's own setting: the trainings that it lacks, and their time."""
    claim, own = answer.claim, answer.own.specification
    asked = runs_for([replace(answer.paper, claims=[claim])], {f"claim-{claim.id}"}, None, records)
    lacking = [(part, run) for part, run in asked if not records.get(run)]
    of_own = by_training([run for part, run in lacking if part == f"claim-{claim.id}, {claim.own}"])
    of_methods = by_training([run for part, run in lacking if not part.endswith(", control")])
    of_all = by_training([run for _, run in lacking])
    others, controls = len(of_methods) - len(of_own), len(of_all) - len(of_methods)
    command = f"`python reproduce_tables.py --run --only claim-{claim.id} --seeds paper`"
    needs = f" It needs {claim.needs}." if claim.needs else ""
    further = f" The other settings lack {count(others)}." if others else ""
    if controls:
        named = f" ({claim.control})" if claim.control != "control" else ""
        further += f" The control{named} lacks {count(controls)}."
    if not of_all:
        return "Nothing is missing."
    if not of_own:
        return f"Both methods' own setting is whole.{further} {command} trains the rest.{needs}"
    hours, unknown = hours_of([group[0] for group in of_own], records)
    where = "a GPU" if own.device == "gpu" else "one processor core"
    time = "time unknown"
    if hours:
        time = f"{hours:.1f} hours" + f" and {unknown} of unknown time" * bool(unknown)
    return (f"{command} begins with the paper's own setting: {count(len(of_own))} on {where} ({time})."
            f"{further}{needs}")


def count(n: int, what: str = "training") -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def row_of(answer: Answer, folder: str) -> list[str]:
    """A claim's row in the table of those with runs; its page is in `folder`."""
    own, claim, other = answer.own, answer.claim, instead(answer)
    place = claim.place.rpartition("; ")[2] + f", {claim.columns[0]}" * (len(claim.columns) == 1)
    name = f"[{' over '.join(claim.methods)}]({folder}/{answer.paper.id}.md), {claim.dataset} ({place})"
    words, sources, elsewhere = gain_words(own), "-", where_learned(answer)
    if own.gains:
        verdict = "loses" if own.decided and own.verdict == "loses" else answer_words(own)
        words = f"{verdict}{', **behind**' * own.not_learned}: {words}"
    elif other:
        elsewhere = f"{other.specification.name}: {gain_words(other)}"
    mine, theirs = (own.learned(method) for method in claim.methods)
    if None not in (mine.sources, theirs.sources):
        sources = f"{mine.sources:.1f} / {theirs.sources:.1f}%"
    return [name, f"{answer.printed:+.1f}", words, sources, elsewhere or "-"]


def table_of_all(every: list[Answer], folder: str) -> str:
    """The claims with runs at the paper's data and scale."""
    return table_text([row_of(answer, folder) for answer in every if answer.has_runs], HEAD)


def remarks(every: list[Answer]) -> list[str]:
    """The papers' sentences for the README."""
    papers = {answer.paper.id: answer.paper for answer in every}.values()
    return [TEMPLATES.from_string(line).render(functions(every)) for paper in papers for line in paper.readme]


def lines_of(method: str) -> int:
    """How many lines the file of a method has."""
    return len((ROOT / f"{method}.py").read_text(encoding="utf-8").splitlines())


def table_of_settings(answer: Answer) -> str:
    """A row for each setting of a claim."""
    a, b = answer.claim.methods
    heads = ["setting", "gain (95%)", "answer", f"training loss, {a} / {b}", "on the sources, %",
             f"{b}, here / printed {answer.levels[1]:.1f}", "seeds", "precision, device"]
    return table_text([setting_row(answer, measured) for measured in answer.measured], heads)


def setting_row(answer: Answer, measured: Measured) -> list[str]:
    name = measured.specification.name
    if measured.specification.other_data:
        name = f"*{name}* (other data or scale)"
    if measured.not_learned:
        name += " ✕"
    mine, theirs = (measured.learned(method) for method in measured.claim.methods)
    has_losses = mine.loss is not None or theirs.loss is not None
    losses = f"{loss(mine.loss)} / {loss(theirs.loss)}" if has_losses else "-"
    sources = "-"
    if mine.sources is not None or theirs.sources is not None:
        sources = " / ".join("-" if of.sources is None else f"{of.sources:.1f}" for of in (mine, theirs))
    level = measured.level(measured.claim.methods[1])
    answered = "-"
    if measured.alike and not measured.specification.other_data:
        answered = answer_words(measured)
    seeds = f"{len(measured.gains)} of {measured.claim.seeds}"
    return [name, gain_words(measured), answered, losses, sources, "-" if level is None else f"{level:.1f}",
            seeds, f"{measured.specification.precision}, {measured.specification.device}"]


def functions(every: list[Answer]) -> dict:
    """What the sentences of a claims file may call, so that no number is typed."""
    known = {(answer.claim.id, measured.specification.name): measured
             for answer in every for measured in answer.measured}
    printed_levels = {answer.claim.id: answer.levels[1] for answer in every}

    def gain(claim: str, name: str) -> str:
        measured = known[claim, name]
        if measured.decided or not measured.gain():
            return gain_words(measured)
        return f"{str(measured.gain())[:-1]}; {len(measured.gains)} of {measured.claim.seeds} seeds)"

    def between(claim: str, name: str, first: str, other: str) -> str:
        values = known[claim, name].values
        return str(paired(values[first], values[other]) or NOTHING)

    def over(claim: str, other: str, name: str) -> str:
        """The method of a claim over that of another claim, in one setting."""
        a, b = (known[of, name].values[known[of, name].claim.methods[0]] for of in (claim, other))
        return str(paired(a, b) or NOTHING)

    def level(claim: str, name: str) -> str:
        """The baseline's accuracy in a setting."""
        measured = known[claim, name]
        return f"{measured.level(measured.claim.methods[1]):.1f}%"

    return {
        "gain": gain,
        "control": lambda *key: gain_words(known[key], known[key].claim.control),
        "between": between,
        "over": over,
        "level": level,
        "printed_level": lambda claim: f"{printed_levels[claim]:.1f}%",
        "own": OWN,
    }


def why(answer: Answer, call: dict) -> list[str]:
    """The sentences of a claim whose numbers are measured."""
    sentences = [TEMPLATES.from_string(line).render(call) for line in answer.claim.why]
    return [sentence for sentence in sentences if NOTHING not in sentence]


def commands_of(answer: Answer, records: Records) -> list[tuple[str, str, dict[str, str]]]:
    """Of each setting its name, why it is one, and the command of the first run of each method; of searched
    values of each target's."""
    of_settings = []
    for measured in answer.measured:
        commands = {}
        searched = measured.specification.search
        for name in searched or answer.claim.names:
            runs = runs_of(answer.paper, answer.claim, measured.specification, name, 0, records)
            if runs:
                before = " (before its first step)" if answer.paper.methods[name].start else ""
                for run in runs if searched else runs[:1]:  # each target has its own draw
                    of_target = f", {run.args.target}" if searched else ""
                    commands[name + before + of_target] = run.command
        of_settings.append((measured.specification.name, measured.specification.why, commands))
    return of_settings


def differing(command: str, first: str) -> str:
    """The flags of a command that the first one lacks or has with another value; the whole command if flags
    do not make it of the first one."""
    start, *mine = command.split(" --")
    of_first, *theirs = first.split(" --")
    mine, theirs = (dict(flag.partition(" ")[::2] for flag in flags) for flags in (mine, theirs))
    if start != of_first or theirs.keys() - mine.keys():
        return command
    return " ".join(f"--{flag} {mine[flag]}".strip() for flag in mine if theirs.get(flag) != mine[flag])


# Figures


def draw_figures(every: list[Answer], out: Path) -> None:
    """Two figures of each claim that has runs, and the figure of all these claims, if there are any."""
    folder = out / "claims"
    for answer in every:
        draw_specifications(answer, folder / f"{answer.claim.id}.png")
        draw_learning(answer.own, folder / f"{answer.claim.id}-curves.png")
    if every:
        draw_claims([answer for answer in every if answer.has_runs], out / "claims.png")


def line_of_plot(label: str, answer: Answer, measured: Measured) -> Line:
    """A setting's row in a plot: the printed gain, and its own with its interval."""
    gain = measured.gain()
    values = [measured.difference] if measured.gains else []
    return Line(textwrap.fill(label, 50), values, gain.interval if gain else (), printed=answer.printed,
                hollow=bool(measured.specification.other_data) or not (measured.alike and measured.decided),
                cross=measured.not_learned)


def draw_specifications(answer: Answer, path: Path) -> None:
    """The gain of a claim in each setting; nothing without a run."""
    if not any(measured.gains for measured in answer.measured):
        return path.unlink(missing_ok=True)
    lines = []
    for measured in answer.measured:
        if measured.gains:
            seeds = f"{len(measured.gains)} of {answer.claim.seeds} seeds"
            lines.append(line_of_plot(f"{measured.specification.name} ({seeds})", answer, measured))
    draw_forest(path, lines, " minus ".join(answer.claim.methods) + ", points", signs=SIGNS)


def draw_claims(every: list[Answer], path: Path) -> None:
    """The gain of each claim with runs: printed, and measured in the paper's own setting or in the first
    other one that has runs."""
    lines = []
    for answer in every:
        a, b = answer.claim.methods
        place = answer.claim.place.rpartition("; ")[2].rpartition(", ")[2]
        words, shown = f"{a} over {b}, {answer.claim.dataset}, {place}", answer.own
        if len(answer.claim.columns) == 1:
            words += f", {answer.claim.columns[0]}"
        if not answer.own.gains:
            shown = instead(answer)
            words += " (another setting)"
        lines.append(line_of_plot(words, answer, shown))
    draw_forest(path, lines, "gain, points", signs=SIGNS)


def draw_learning(measured: Measured, path: Path) -> None:
    """Both methods' accuracy over the rounds, mean over seeds and targets; nothing without a gain."""
    if not measured.gains:
        return path.unlink(missing_ok=True)
    panel = new_panel(6.0, 3.4)
    for name in measured.claim.methods:
        records = [by_seed[seed] for by_seed in measured.cases[name] for seed in measured.gains]
        metric = metric_of(measured.claim, measured.specification, name)
        curves = [curve_of(record, metric) for record in records]
        points = percentages(curves[0][0], [values for _, values in curves])
        means = {t: [sum(values) / len(values)] for t, values in points.items()}
        draw_line(panel, means, name, name.lower())  # FedSR's file is that of its FedAvg too
    panel.set(xlabel="round", ylabel="accuracy (%)", ylim=(0, 100))
    panel.grid(axis="y", color="0.9", linewidth=0.6)
    panel.legend(fontsize=8)
    write_figure(path, panel.figure, None)


def curve_of(record: dict, metric: str) -> tuple[list[int], list[float | None]]:
    """The rounds and values of a metric's curve: target of last/target, "m0 0.1" of last/linear/m0/0.1."""
    parts = metric.replace("TARGET", record["args"]["target"]).split("/")
    curve = record["curve"]
    if parts[0] == "after_training":
        curve, parts = record["after_training"]["curve"], parts[1:]
    name = " ".join(parts[2:]) if parts[1] == "linear" else parts[1]
    return curve["round"], curve.get(name, [])


for function in (answer_words, commands_of, differing, gain_words, learned_words, lines_of,
                 missing_words, remarks, sentence_of, table_of_all, table_of_settings, where_learned, why):
    TEMPLATES.globals[function.__name__] = function
TEMPLATES.globals["rule"] = rule
