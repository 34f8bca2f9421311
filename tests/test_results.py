"""The numbers of results/findings.md are those of the recorded runs; test_reproduce.py looks at what is rendered."""

import itertools
import json
import statistics

from tests.conftest import ROOT

RECORDS = [json.loads(line) for line in (ROOT / "results" / "runs.jsonl").read_text().splitlines()]


def test_every_record_says_where_it_comes_from():
    assert len({r["id"] for r in RECORDS}) == len(RECORDS)
    for r in RECORDS:
        start = f"python -m baselines.{r['method']} " if (ROOT / "baselines" / f"{r['method']}.py").exists() else f"python {r['method']}.py "
        assert r["command"].startswith(start) and r["commit"] and not r["uncommitted_changes"]
        assert r["curve"]["round"][-1] == r["args"]["rounds"] and {"torch", "numpy"} <= r["versions"].keys()
        if r["args"]["protocol"] == "linear":  # without labels, no validation: the last round
            assert r["best"] == r["last"] and abs(r["curve"]["target"][-1] - r["last"]["target"]) < 1e-5
        else:
            i = r["curve"]["val"].index(max(r["curve"]["val"]))
            assert r["curve"]["round"][i] == r["best"]["round"] and abs(r["curve"]["ALL"][i] - r["best"]["ALL"]) < 1e-5


def test_fdses_table_is_of_the_records():
    findings = (ROOT / "results" / "findings.md").read_text()
    for method in ("fedavg", "fdse"):
        runs = [r for r in RECORDS if r["method"] == method and r["args"]["dataset"] == "officecaltech" and
                (r["args"]["scale"], r["args"]["image_size"]) == ("laptop", 160) and r["args"]["precision"] == "bf16"]
        assert sorted(r["args"]["seed"] for r in runs) == [0, 1, 2]
        for outcome in ("best", "last"):
            for measure in ("ALL", "AVG"):
                values = [100 * r[outcome][measure] for r in runs]
                assert f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}" in findings, (method, outcome, measure)


def cells(title: str) -> dict[str, dict[str, str]]:
    """The rows of the first table of the findings below the line that has `title`: {row: {column: cell}}."""
    below = (ROOT / "results" / "findings.md").read_text().split(title, 1)[1].splitlines()
    lines = itertools.takewhile(lambda line: line.startswith("|"), itertools.dropwhile(lambda line: not line.startswith("|"), below))
    table = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip([f"{i} {c}" if table[0].count(c) > 1 else c for i, c in enumerate(table[0])], row))
            for row in table[2:]}


def of(records, method: str, variant: str, **args) -> list[dict]:
    return [r for r in records if r["method"] == method and r["args"].get("variant") == variant and
            all(r["args"].get(name) == value for name, value in args.items())]


def spread(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else "-"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def test_fedcirs_table_is_of_the_records():
    """The last round's ALL and AVG, mean and deviation over the recorded seeds."""
    for row, shown in cells("## FedCiR").items():
        for dataset, column in (("officecaltech", "Office"), ("pacs", "PACS")):
            method, variant = {"FedAvg": ("fedavg", "fedcir"), "FedSR": ("fedsr", "fedcir" if dataset == "pacs" else "fedsr"),
                               "FedReg": ("fedcir", "fedreg"), "FedAlign": ("fedcir", "fedalign"), "FedCiR": ("fedcir", "fedcir")}[row]
            runs = of(RECORDS, method, variant, dataset=dataset, scale="laptop", image_size=64, protocol="indomain", steps=20,
                      **({"lambda_align": 0.0 if row == "FedReg" else 5e-7} if method == "fedcir" else {}))  # not those of Table 2
            assert int(shown[f"{column} seeds"]) == len(runs) == len({r["args"]["seed"] for r in runs})
            for measure in ("ALL", "AVG"):
                assert shown[f"{column} {measure}"] == spread([100 * r["last"][measure] for r in runs]), (row, dataset, measure)


def test_fedadgs_switches_are_of_the_records():
    """The last round's accuracy on each left-out domain of `digits`."""
    for row, shown in cells("## FedADG").items():
        flags = row.split("`")[1].split() if "`" in row else []
        runs = {r["args"]["target"]: r for r in of(RECORDS, "fedadg", "paper", dataset="digits")
                if r["command"].split(" --record")[0].split()[8:] == flags}
        assert len(runs) == 6, row
        for target, run in runs.items():
            assert shown[target] == f"{100 * run['last']['target']:.1f}", (row, target)
        assert shown["mean"] == f"{100 * statistics.mean(r['last']['target'] for r in runs.values()):.1f}", row


def test_fedadgs_laptop_table_is_of_the_records():
    """The last round's accuracy on each left-out domain, mean over the seeds that have all four."""
    for row, shown in cells("(a ResNet18 from scratch instead of AlexNet").items():
        choice = ("fedsr", "fedsr", {}) if row == "FedSR" else ("fedadg", "paper", {"adversarial": False}) if "FedAvg" in row else (
            "fedadg", "paper", {"adversarial": True, "reference": "generated", "projection": "fixed", "onehot": True,
                                "lambda0": 0.15 if "0.15" in row else 0.85})
        values = list(shown.values())
        for dataset, targets, found in (("officecaltech", ("amazon", "caltech", "dslr", "webcam"), values[1:7]),
                                        ("pacs", ("photo", "art_painting", "cartoon", "sketch"), values[7:])):
            runs = of(RECORDS, *choice[:2], dataset=dataset, scale="laptop", protocol="lodo", **choice[2])
            by_seed = {}
            for r in runs:
                by_seed.setdefault(r["args"]["seed"], {})[r["args"]["target"]] = 100 * r["last"]["target"]
            whole = [by_target for by_target in by_seed.values() if len(by_target) == 4]
            means = [statistics.mean(w[t] for w in whole) for t in targets] if whole else []
            expected = [f"{m:.1f}" for m in [*means, statistics.mean(means)]] if whole else ["-"] * 5
            assert found == [str(len(whole)), *expected], (row, dataset)


def test_fedgalas_table_is_of_the_records():
    """The linear classifier's accuracy on photo after ten rounds, and the share of discarded gradients, means over the seeds."""
    below = (ROOT / "results" / "findings.md").read_text().split("## FedGaLA", 1)[1]
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in below.splitlines() if line.startswith("| ") and "`" in line]
    runs = [r for r in RECORDS if r["args"]["dataset"] == "pacs" and r["args"]["protocol"] == "linear" and r["args"]["rounds"] == 10
            and r["args"]["scale"] == "laptop"]
    assert len(rows) == 13
    for _, flags, seeds, tenth, third, early, late in rows:
        flags = flags.strip("`")
        found = [r for r in runs if (r["method"] == "fedema" if flags == "baselines.fedema" else f"photo {flags} --seed" in r["command"])]
        assert len(found) == int(seeds) == len({r["args"]["seed"] for r in found}) == 2, flags
        for share, cell in (("0.1", tenth), ("0.3", third)):
            assert cell == spread([100 * r["last"]["linear"]["photo"][share] for r in found]), (flags, share)
        for cell, part in ((early, slice(1, 4)), (late, slice(7, 10))):
            values = [v for r in found for v in r["logs"].get("discarded", [])[part]]
            assert cell == (f"{100 * statistics.mean(values):.0f}%" if values else "-"), flags
