"""The README's numbers are those of the recorded runs."""

import json
import statistics

from tests.conftest import ROOT

RECORDS = [json.loads(line) for line in (ROOT / "results" / "runs.jsonl").read_text().splitlines()]


def test_every_record_says_where_it_comes_from():
    assert len({r["id"] for r in RECORDS}) == len(RECORDS)
    for r in RECORDS:
        assert r["command"].startswith(f"python {r['method']}.py") and r["commit"] and not r["uncommitted_changes"]
        assert r["curve"]["round"][-1] == r["args"]["rounds"] and {"torch", "numpy"} <= r["versions"].keys()
        i = r["curve"]["val"].index(max(r["curve"]["val"]))
        assert r["curve"]["round"][i] == r["best"]["round"] and abs(r["curve"]["ALL"][i] - r["best"]["ALL"]) < 1e-5


def test_the_table_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    for method in ("fedavg", "fdse"):
        runs = [r for r in RECORDS if r["method"] == method and r["args"]["dataset"] == "officecaltech" and
                r["args"]["scale"] == "laptop" and r["args"]["precision"] == "bf16"]
        assert sorted(r["args"]["seed"] for r in runs) == [0, 1, 2]
        for outcome in ("best", "last"):
            for measure in ("ALL", "AVG"):
                values = [100 * r[outcome][measure] for r in runs]
                assert f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}" in readme, (method, outcome, measure)
