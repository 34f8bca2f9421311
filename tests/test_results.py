"""The numbers of results/findings.md are those of the recorded runs; test_rendering.py looks at what is
rendered."""

import json
import re
import statistics
import subprocess

from reproduce.records import Records
from reproduce.statistics import paired
from reproduce.tables import read_tables
from tests.conftest import ROOT
from tests.small_table import recorded

import pytest

LINES = recorded(ROOT / "results" / "runs.jsonl")
RECORDS = list(Records(ROOT / "results" / "runs.jsonl").by_key.values())  # the newest of each run
FDSE_1 = next(table for table in read_tables() if table.id == "fdse-1")
FINDINGS = (ROOT / "results" / "findings.md").read_text()


def start_of(method: str) -> str:
    """With what a method's command begins."""
    if (ROOT / "baselines" / f"{method}.py").exists():
        return f"python -m baselines.{method} "
    return f"python {method}.py "


def test_every_record_says_where_it_comes_from():
    assert len({(run["id"], run["finished"]) for run in LINES}) == len(LINES)
    for run in LINES:
        assert run["command"].startswith(start_of(run["method"]))
        dirty = run["dirty"] if "dirty" in run else run["uncommitted_changes"]  # its name until 0.2.0
        assert run["commit"] and not dirty
        assert run["curve"]["round"][-1] == run["args"]["rounds"]
        assert {"torch", "numpy"} <= run["versions"].keys()


def test_no_record_ever_vanishes():
    """Each that history once had is in runs.jsonl, or in withdrawn.jsonl with a reason."""
    command = ["git", "log", "-p", "--format=", "--", "results/runs.jsonl"]
    history = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    removed = set(re.findall(r'^-\{"id": "([0-9a-f]+)"', history, re.MULTILINE))
    withdrawn = [json.loads(line) for line in (ROOT / "results" / "withdrawn.jsonl").open()]
    assert all(record["withdrawn"]["reason"] for record in withdrawn) and len(withdrawn) == 238
    kept = {record["id"] for record in (*LINES, *withdrawn)}
    assert removed <= kept


def test_a_records_best_round_is_that_of_its_curve():
    for run in RECORDS:
        curve, best = run["curve"], run["best"]
        if run["args"]["protocol"] == "linear":  # without labels, no validation: the last round
            assert best == run["last"] and abs(curve["target"][-1] - run["last"]["target"]) < 1e-5
        else:
            i = curve["val"].index(max(curve["val"]))
            assert curve["round"][i] == best["round"] and abs(curve["ALL"][i] - best["ALL"]) < 1e-5


def of(method: str, **args) -> list[dict]:
    """The records of a method with these arguments."""
    chosen = []
    for run in RECORDS:
        same = all(run["args"].get(name) == value for name, value in args.items())
        if run["method"] == method and same:
            chosen.append(run)
    return chosen


def accuracies(runs: list[dict], outcome: str, measure: str) -> list[float]:
    """In percent."""
    return [100 * run[outcome][measure] for run in runs]


def spread(values: list[float]) -> str:
    """Mean and deviation as the findings show them; one value alone, - for none."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def gain(ours: dict[int, float], others: dict[int, float], form: str = "{:+.1f} ({:+.1f} to {:+.1f})") -> str:
    """The mean difference by seed and its interval, as the findings have it."""
    found = paired(ours, others)
    return form.format(found.difference, *found.interval)


def words_of(start: str, end: str = "\n## ") -> str:
    """What the findings say from a heading on, in one line."""
    return " ".join(FINDINGS.split(start, 1)[1].split(end)[0].split())


def split_line(line: str) -> list[str]:
    """The cells of a line of a table."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows_below(title: str) -> list[list[str]]:
    """The lines of the first table of the findings below the line that has `title`, its head first."""
    rows = []
    for line in FINDINGS.split(title, 1)[1].splitlines():
        if line.startswith("|"):
            rows.append(split_line(line))
        elif rows:
            break
    return [rows[0], *rows[2:]]


def cells(title: str) -> dict[str, dict[str, str]]:
    """The same as {row: {column: cell}}; columns of the same name get their number before it."""
    head, *rows = rows_below(title)
    names = []
    for i, name in enumerate(head):
        names.append(f"{i} {name}" if head.count(name) > 1 else name)
    return {row[0]: dict(zip(names, row)) for row in rows}


# FDSE's Tables 1 and 3 at laptop scale: {row: its records}; the control is FDSE's network without its terms.
OFFICE = dict(dataset="officecaltech", scale="laptop", image_size=160, precision="bf16")
OF_TABLE_3 = {
    "FedAvg": of("fedavg", **OFFICE),
    "FDSE's network, none of A, B, C": of("fdse", consensus=False, similarity=False, lambda_=0.0, **OFFICE),
    "without A (`--no-consensus`)": of("fdse", consensus=False, lambda_=0.1, **OFFICE),
    "without B (`--no-similarity`)": of("fdse", similarity=False, lambda_=0.1, **OFFICE),
    "without C (`--lambda 0`)": of("fdse", consensus=True, lambda_=0.0, **OFFICE),
    "FDSE": of("fdse", consensus=True, similarity=True, lambda_=0.1, **OFFICE),
}


def test_fdses_table_is_of_the_records():
    rows = cells("**Tables 1 and 3.**")
    assert set(rows) == set(OF_TABLE_3)
    for name, runs in OF_TABLE_3.items():
        assert int(rows[name]["seeds"]) == len({run["args"]["seed"] for run in runs}) == len(runs)
        shown = list(rows[name].values())[2:]
        for outcome in ("best", "last"):
            for measure in ("ALL", "AVG"):
                values = accuracies(runs, outcome, measure)
                assert shown.pop(0) == f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}", name
        for t in (10, 20, 30):
            assert shown.pop(0) == spread([100 * run["curve"]["ALL"][t - 1] for run in runs]), (name, t)
        assert not shown


def outcome_by_seed(runs: list[dict], outcome: str, measure: str) -> dict[int, float]:
    """{seed: accuracy in percent}; an outcome is best, last or a round."""
    found = {}
    for run in runs:
        value = run["curve"][measure][outcome - 1] if isinstance(outcome, int) else run[outcome][measure]
        found[run["args"]["seed"]] = 100 * value
    return found


def test_what_fdses_terms_add_is_of_the_records():
    """Differences by seed, mean and interval; an outcome is the best validation round or a round."""
    control, without_a = "FDSE's network, none of A, B, C", "without A (`--no-consensus`)"
    without_b, without_c = "without B (`--no-similarity`)", "without C (`--lambda 0`)"
    between = [
        ("FDSE", control, "best", "+0.1 to ALL (-1.3 to +1.5) and +1.9 to AVG (+0.6 to +3.3)"),
        (control, "FedAvg", "best", "without the three terms +1.1 (-2.2 to +4.4) and +6.4 (+1.3 to +11.5)"),
        ("FDSE", "FedAvg", "best",
         "+1.2 above FedAvg by ALL (95% -2.2 to +4.6) and +8.3 by AVG (+3.7 to +13.0)"),
        ("FDSE", without_a, "best",
         "-1.2 (-3.9 to +1.5) by ALL and +0.9 (-1.9 to +3.7) by AVG from the run without A"),
        ("FDSE", without_b, "best", "-1.3 (-5.1 to +2.4) and -0.5 (-3.2 to +2.3) from that without B"),
        ("FDSE", without_c, "best", "-1.7 (-4.7 to +1.3) and -0.7 (-3.8 to +2.3) from that without C"),
        (without_a, "FDSE", 10, "ALL after 10 rounds +17.6 without it, +5.6 to +29.7"),
        (without_a, control, 10, "+2.2, -7.6 to +12.1 after 10"),
        ("FedAvg", without_a, 5, "ALL without A is still 31.1 below FedAvg (19.0 to 43.1)"),
        ("FedAvg", without_a, 10, "after 10 9.4 (-0.9 to 19.7)"),
        ("FedAvg", "FDSE", 5, "where FDSE is 38.3 (28.4 to 48.3)"),
        (without_a, without_b, 10, "after 10 rounds by 15.5, 2.6 to 28.5"),
        (without_a, without_c, 10, "and 14.5, 0.6 to 28.3"),
    ]
    text = " ".join(FINDINGS.split())
    for pair, number in ((without_c, "+3.4 (+0.6 to +6.2)"), (without_b, "+3.2 (+0.2 to +6.1)")):
        found = gain(*(outcome_by_seed(OF_TABLE_3[n], "best", "AVG") for n in (pair, control)))
        assert number in text and number == found
    for name, other, outcome, words in between:
        assert words in text
        for measure in ("ALL", "AVG") if outcome == "best" else ("ALL",):
            both = (outcome_by_seed(OF_TABLE_3[n], outcome, measure) for n in (name, other))
            found = gain(*both, "{:+.1f}|{:+.1f} to {:+.1f}")
            numbers = (found if "+" in words else found.replace("+", "")).split("|")
            assert all(number in words for number in numbers), (words, numbers)


def test_fdses_thirteen_methods_are_of_the_records():
    """Office-Caltech10, 64x64, 40 rounds, each method at its tuned values: accuracies, and their differences
    from FedAvg's."""
    of_paper = [row for row in FDSE_1.blocks[1].rows if not row.ours]
    by_name = {row.method: row.module.rpartition(".")[2] for row in of_paper}
    tuned = {row.method: row.laptop.replace("--", "").split() for row in of_paper}
    accuracy = {}
    for name, method in by_name.items():
        values = dict(zip(tuned[name][::2], map(float, tuned[name][1::2])))
        runs = of(method, dataset="officecaltech", scale="laptop", image_size=64, rounds=40, **values)
        for measure in ("ALL", "AVG"):
            accuracy[name, measure] = {run["args"]["seed"]: 100 * run["best"][measure] for run in runs}
    rows = cells("**Thirteen methods.**")
    assert set(rows) == set(by_name)
    for name, shown in rows.items():
        row = next(row for row in FDSE_1.blocks[1].rows if row.method == name)
        assert shown["flags"] == f"`{row.laptop}`"
        assert int(shown["seeds"]) == len(accuracy[name, "ALL"])
        for n, measure in enumerate(("ALL", "AVG")):
            values = list(accuracy[name, measure].values())
            assert shown[("ALL", "4 AVG")[n]] == spread(values), name
            words = "-"
            if len(values) > 2 and name != "FedAvg":
                words = gain(accuracy[name, measure], accuracy["FedAvg", measure])
            assert shown[f"{measure} - FedAvg's"] == words, name
            column = FDSE_1.blocks[1].columns[n]
            assert column.name == measure
            assert shown[("paper: ALL", "8 AVG")[n]] == row.published[n][0]


ADAPTED = {  # columns of the findings, and Algorithm 3's epochs and rate there
    "none": (0, 1.0),
    "statistics alone": (5, 0.0),
    "gradient, lr 1": (5, 1.0),
    "gradient, lr 1000": (5, 1000.0),
}
GAINS = {  # differences of two columns
    "statistics - none": ("statistics alone", "none"),
    "lr 1 - statistics": ("gradient, lr 1", "statistics alone"),
    "lr 1000 - statistics": ("gradient, lr 1000", "statistics alone"),
}


def test_what_fdses_adaptation_gains_is_of_the_records():
    """Accuracy on each domain of Office-Caltech10 that is left out, by what Algorithm 3 does there."""
    means = {column: dict.fromkeys(range(3), 0) for column in ADAPTED}
    runs = of("fdse", dataset="officecaltech", protocol="lodo", rounds=20)
    for target in ("amazon", "caltech", "dslr", "webcam"):
        found = {}
        for column, (epochs, rate) in ADAPTED.items():
            found[column] = {}
            for run in runs:
                args = run["args"]
                if (args["target"], args["adapt_epochs"], args["adapt_lr"]) == (target, epochs, rate):
                    found[column][args["seed"]] = 100 * run["last"]["target"]
                    means[column][args["seed"]] += 100 * run["last"]["target"] / 4
        for name, (one, other) in GAINS.items():
            found[name] = {seed: found[one][seed] - found[other][seed] for seed in range(3)}
        shown = cells("**Algorithm 3 (Table 2).**")[f"Office, {target}"]
        for column, values in found.items():
            assert shown[column] == spread(list(values.values())), (target, column)
    words = words_of("**Algorithm 3 (Table 2).**", "**The slow start.**").replace("(95% ", "(")
    for one, other in GAINS.values():
        assert gain(means[one], means[other])[:-1] in words


FEDADG = [  # dataset, flags of a row, those of the row from which it differs, by how much
    ("digits", "", "--no-adversarial", "-8.4 (-13.6 to -3.3)"),
    ("digits", "", "--lambda0 0.15 --lambda1 0.85", "-8.0 (-13.5 to -2.6)"),
    ("digits", "", "--lambda0 0", "-5.4 (-7.6 to -3.2)"),
    ("digits", "--lambda0 0", "--no-adversarial", "-3.0 (-6.6 to +0.6)"),
    ("digits", "--lambda0 0.15 --lambda1 0.85", "--no-adversarial", "-0.4 (-2.0 to +1.2)"),
    ("digits", "--lambda1 1", "--no-adversarial", "-3.7 (-6.6 to -0.9)"),
    ("officecaltech", "", "--no-adversarial", "-3.1 (-10.9 to +4.8)"),
    ("officecaltech", "", "--lambda0 0.15 --lambda1 0.85", "-3.8 (-7.3 to -0.3)"),
    ("officecaltech", "", "--lambda0 0", "+2.7 (-1.0 to +6.4)"),
    ("officecaltech", "--lambda0 0", "--no-adversarial", "-5.8 (-16.6 to +5.1)"),
    ("officecaltech", "--lambda0 0.15 --lambda1 0.85", "--no-adversarial", "+0.8 (-8.0 to +9.5)"),
]


def left_out(dataset: str, flags: str) -> dict[int, dict[str, float]]:
    """{seed: {target: accuracy of the last round}} of FedADG's runs with these flags beside those of all."""
    by_seed = {}
    for run in of("fedadg", dataset=dataset) + of("official.fedadg", dataset=dataset):
        words = re.sub(r" --(seed|precision|threads|record) \S+", "", run["command"]).split()
        if words[8:] == flags.split():  # behind those that all of them have
            of_seed = by_seed.setdefault(run["args"]["seed"], {})
            of_seed[run["args"]["target"]] = 100 * run["last"]["target"]
    return by_seed


@pytest.mark.parametrize("title, dataset", [
    ("**Digits.**", "digits"),
    ("**Office-Caltech10, left out.**", "officecaltech"),
])
def test_fedadgs_tables_are_of_the_records(title, dataset):
    """Means over the seeds, and the spread of the seeds' means."""
    for row, shown in cells(title).items():
        by_seed = left_out(dataset, row.split("`")[1] if "`" in row else "")
        assert int(shown["seeds"]) == len(by_seed), row
        for target in by_seed[0]:
            mean = statistics.mean(of_seed[target] for of_seed in by_seed.values())
            assert shown[target] == f"{mean:.1f}", (row, target)
        means = [statistics.mean(of_seed.values()) for of_seed in by_seed.values()]
        assert shown["mean"] == spread(means), row


@pytest.mark.parametrize("dataset, flags, other, words", FEDADG)
def test_what_fedadg_adds_is_of_the_records(dataset, flags, other, words):
    """Differences of the means over the targets, by seed, and their intervals."""
    means = []
    for of_row in (left_out(dataset, flags), left_out(dataset, other)):
        means.append({seed: statistics.mean(of_seed.values()) for seed, of_seed in of_row.items()})
    assert words == gain(*means) and words in words_of("## FedADG")


def share_discarded(runs: list[dict], rounds: slice) -> str:
    """The mean share of discarded gradients in some rounds; - if none was logged."""
    values = []
    for run in runs:
        values += run["logs"].get("discarded", [])[rounds]
    return f"{100 * statistics.mean(values):.0f}%" if values else "-"


def test_fedgalas_table_is_of_the_records():
    """The linear classifier's accuracy on RotatedMNIST's m0, the loss and the share of discarded gradients,
    means over five seeds, and the same runs before their first step; and the intervals of the differences."""
    rows = []
    for line in FINDINGS.split("## FedGaLA", 1)[1].split("**The sign")[0].splitlines():
        if line.startswith("| ") and "± " in line:
            rows.append(split_line(line))
    names = [row[0] for row in rows]
    assert names == ["untrained network", "plain learner", "without LA", "without GA", "FedGaLA",
                     "FedGaLA, descent sign", "digits: untrained network", "digits: plain learner",
                     "digits: FedGaLA"]
    of_rows = {"0.1": {}, "0.3": {}}  # accuracies by seed
    for name, flags, tenth, third, loss, *discarded in rows:
        words = {"-": "--local-alignment off --no-global-alignment", "none": ""}.get(flags, flags.strip("`"))
        dataset, target = "--dataset rotatedmnist --target m0", "m0"
        if name.startswith("digits: "):
            dataset, target = "--target d0", "d0"
        runs = []
        for run in RECORDS:
            of_row = " ".join(f"fedgala.py {dataset} {words}".split()) + " --seed"
            trained = run["method"] == "fedgala" and run["args"]["linear_epochs"] == 1000
            if trained and of_row in run["command"]:
                runs.append(run)
        runs.sort(key=lambda run: run["args"]["seed"])
        assert [run["args"]["seed"] for run in runs] == [0, 1, 2, 3, 4], name
        when = "start" if flags == "-" else "last"
        for share, cell in (("0.1", tenth), ("0.3", third)):
            values = [100 * run[when]["linear"][target][share] for run in runs]
            of_rows[share][name] = dict(enumerate(values))
            assert cell == spread(values), (name, share)
        if flags == "-":
            assert loss == "-" and {f"{run['start']['chance_loss']:.2f}" for run in runs} == {"4.84"}
            continue
        assert loss == f"{statistics.mean(run['logs']['loss'][-1] for run in runs):.2f}", name
        parts = (slice(1, 5), slice(5, 15), slice(15, 30), slice(29, 30))
        assert discarded == [share_discarded(runs, part) for part in parts], name
    words = words_of("## FedGaLA")
    for one, other in (("plain learner", "untrained network"), ("FedGaLA", "plain learner"),
                       ("FedGaLA, descent sign", "plain learner"),
                       ("digits: plain learner", "digits: untrained network"),
                       ("digits: FedGaLA", "digits: plain learner")):
        for of_row in of_rows.values():
            for number in gain(of_row[one], of_row[other], "{:+.1f}|{:+.1f} to {:+.1f}").split("|"):
                assert number in words, (one, other)


THREE_LISTS = "{:+.1f} (95% {:+.1f} to {:+.1f}, three lists)"


def test_fedsrs_table_is_of_the_records():
    """Accuracy on an outer target of RotatedMNIST after the last round, and over the last eleven evaluations,
    for each list of digits; the mean over the lists; and what FedSR adds."""
    rows = []
    for line in FINDINGS.split("## FedSR", 1)[1].split("## FedCiR")[0].splitlines():
        if line.startswith("| M"):
            rows.append(split_line(line))
    assert rows
    of_rows = {}
    for target, name, flags, *lists, mean, _ in rows:
        found = {}
        for seed, cell in enumerate(lists):
            command = (f"python fedsr.py --dataset rotatedmnist --target {target.lower()} {flags.strip('`')} "
                       f"--seed {seed}")
            runs = [run for run in RECORDS if run["command"].startswith(command)]
            if cell == "-":
                assert not runs, command
                continue
            run, = runs
            last = [100 * value for value in run["curve"]["target"][-11:]]
            assert run["curve"]["round"][-11] == 1000
            assert cell == (f"{last[-1]:.1f} ({min(last):.1f} to {max(last):.1f}, "
                            f"mean {statistics.mean(last):.1f})"), command
            found[seed] = 100 * run["last"]["target"]
        assert mean == spread(list(found.values())), (target, name)
        of_rows[target, name] = found
    words = words_of("## FedSR")
    for row in [(target, name) for target in ("M0", "M75") for name in ("FedSR", "FedL2R", "FedCMI")]:
        form = THREE_LISTS if row[1] == "FedSR" else "{:+.1f} ({:+.1f} to {:+.1f})"
        assert gain(of_rows[row], of_rows[row[0], "FedAvg"], form) in words, row


def test_fedsrs_gain_over_several_targets():
    """By list the mean over all targets of RotatedMNIST, the outer and the inner ones, after the last round
    and over the last eleven evaluations."""
    outer, inner = ("m0", "m75"), ("m15", "m30", "m45", "m60")
    words = words_of("## FedSR")
    for eleven in (False, True):
        for targets in ((*outer, *inner), outer, inner):
            means = {}
            for variant in ("fedavg", "fedsr"):
                by_list = {}
                for target in targets:
                    for run in of("fedsr", dataset="rotatedmnist", target=target, variant=variant, lr=0.01,
                                  augment="fedsr-crops"):
                        last = run["curve"]["target"][-11:] if eleven else [run["last"]["target"]]
                        by_list.setdefault(run["args"]["seed"], []).append(100 * statistics.mean(last))
                assert {len(values) for values in by_list.values()} == {len(targets)}
                means[variant] = {seed: statistics.mean(values) for seed, values in by_list.items()}
            form = "{:+.1f} ({:+.1f} to {:+.1f})"
            if len(targets) == 6 and not eleven:
                form = THREE_LISTS
                for variant in means:
                    assert spread(list(means[variant].values())) in words, variant
            assert gain(means["fedsr"], means["fedavg"], form) in words, (targets, eleven)


def test_fedsr_without_crops():
    """FedAvg on both outer targets, and the differences of the other three from it, list by list."""
    words, found, lists = words_of("## FedSR"), {}, (0, 1)
    for run in of("fedsr", dataset="rotatedmnist", augment="none", lr=0.01, backbone="smallcnn"):
        args = run["args"]
        found[args["variant"], args["target"], args["seed"]] = run

    def gains(variant: str, outcome: str) -> str:
        of_targets = []
        for target in ("m0", "m75"):
            accuracy = [100 * found[variant, target, n][outcome]["target"] for n in lists]
            fedavg = [100 * found["fedavg", target, n][outcome]["target"] for n in lists]
            of_targets.append(", ".join(f"{ours - theirs:+.1f}" for ours, theirs in zip(accuracy, fedavg)))
        return " and ".join(of_targets)

    levels = []
    for target in ("m0", "m75"):
        levels.append(statistics.mean(100 * found["fedavg", target, n]["last"]["target"] for n in lists))
    assert "FedAvg has {:.1f} on M0 and {:.1f} on M75".format(*levels) in words
    plain = words.replace(" (M0)", "").replace(" (M75)", "")
    assert f"FedSR is {gains('fedsr', 'last')}; FedCMI {gains('fedcmi', 'last')}; " in plain
    assert f"FedL2R {gains('fedl2r', 'last')}. By the best" in plain
    assert f"validation round FedSR is {gains('fedsr', 'best')}" in plain


def test_fedcirs_table_is_of_the_records():
    """FedCiR, its parts, its control and FedAvg on Office-Caltech10: accuracies of three seeds, the terms of
    two rounds."""
    shown = 0
    for line in FINDINGS.split("## FedCiR", 1)[1].split("**PACS.**")[0].splitlines():
        if not line.startswith("| ") or "± " not in line:
            continue
        name, *cells = split_line(line)
        runs = of("fedcir", dataset="officecaltech", variant=name.lower())
        if name == "FedAvg":
            runs = of("fedavg", dataset="officecaltech", variant="fedcir", image_size=32)
        assert len(runs) == 3
        outcomes = [("best", "ALL"), ("best", "AVG"), ("last", "ALL"), ("last", "AVG")]
        for cell, (outcome, measure) in zip(cells, outcomes):
            assert cell == spread(accuracies(runs, outcome, measure)), (name, outcome, measure)
        shown_terms = []
        for term, form in (("reg", ".3g"), ("align", ".0f")):
            for i in (6, 23):
                values = [run["logs"][term][i] for run in runs if term in run["logs"]]
                shown_terms.append(format(statistics.mean(values), form) if values else "-")
        assert cells[4:] == shown_terms, name
        shown += 1
    assert shown == 5


def test_fedcirs_table_of_pacs_is_of_the_records():
    """FedCiR, its control and FedAvg, and the differences of the text, by seed."""
    budget = dict(dataset="pacs", image_size=64, rounds=60, augment="jigen", lr_decay=1.0)
    of_rows = {
        "FedCiR": of("fedcir", variant="fedcir", **budget),
        "control": of("fedcir", variant="control", **budget),
        "FedAvg": of("fedavg", variant="fedcir", **budget),
    }
    words = words_of("## FedCiR")
    shown = cells("**PACS.** `python fedcir.py")
    assert set(shown) == set(of_rows)
    for name, runs in of_rows.items():
        assert len(runs) == 3
        row = list(shown[name].values())[1:5]
        for outcome in ("best", "last"):
            for measure in ("ALL", "AVG"):
                assert row.pop(0) == spread(accuracies(runs, outcome, measure)), (name, outcome, measure)
    for name, form in (("FedAvg", "{:+.1f} from FedAvg (95% {:+.1f} to {:+.1f})"),
                       ("control", "{:+.1f} from the control ({:+.1f} to {:+.1f})")):
        both = (outcome_by_seed(of_rows[n], "best", "AVG") for n in ("FedCiR", name))
        assert gain(*both, form) in words, name
