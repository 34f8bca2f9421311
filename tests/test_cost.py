"""What missing runs would take: their datasets, the plan in words and for a program."""

import dataclasses
import email.message
import http.client
import json

from reproduce import cost, work
from reproduce.cards import Card
from reproduce.cells import Missing, run_with
from reproduce.records import Place, Records

import pytest


def test_times_in_words():
    words = [cost.clock(seconds) for seconds in (None, 5, 119, 120, 7200, 200000)]
    assert words == ["?", "5 s", "119 s", "2.0 min", "2.0 h", "2.3 days"]


class Answer:
    """What a source answers."""

    def __init__(self, kind: str):
        self.headers = email.message.Message()
        self.headers["Content-Type"], self.headers["Content-Length"] = kind, "12345"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def answer(monkeypatch, kind: str = "", error: Exception | None = None) -> None:
    """Let every source answer so, or fail."""
    def urlopen(request, timeout):
        if error:
            raise error
        return Answer(kind)
    monkeypatch.setattr(cost.urllib.request, "urlopen", urlopen)


def test_what_can_be_had(monkeypatch, tmp_path):
    """An archive that is there; one that its source would send, with its size; a page in its place; no
    answer."""
    place = Place(str(tmp_path / "data"), str(tmp_path))
    answer(monkeypatch, "application/zip")
    assert cost.availability("pacs", {64}, place) == ("", 12345)
    assert cost.availability("digits", {64}, place) == ("", 0)
    assert cost.availability("rotatedmnist", {64}, place) == ("", 2 * 12345)
    answer(monkeypatch, "text/html; charset=utf-8")
    assert "by hand from https://drive" in cost.availability("vlcs", {64}, place)[0]
    answer(monkeypatch, error=OSError("no route"))
    assert "cannot be downloaded here (no route)" in cost.availability("pacs", {64}, place)[0]
    answer(monkeypatch, error=http.client.BadStatusLine("what a proxy says"))
    assert "cannot be downloaded here (what a proxy says)" in cost.availability("pacs", {64}, place)[0]
    (tmp_path / "Homework3-PACS-master.zip").touch()
    assert cost.availability("pacs", {64}, place) == ("", 0)
    (tmp_path / "VLCS").mkdir()  # empty: of an archive, say
    assert "cannot be downloaded here" in cost.availability("vlcs", {64}, place)[0]
    folder = tmp_path / "data" / "vlcs"
    folder.mkdir(parents=True)
    assert cost.availability("vlcs", {64}, place) == (f"{folder} has no files", 0)
    (folder / "0.jpg").touch()
    assert cost.availability("vlcs", {64}, place) == ("", 0)


def test_decoded_images_are_enough(monkeypatch, tmp_path):
    """Of all sizes that the runs need; the archive may be gone."""
    place = Place(str(tmp_path))
    answer(monkeypatch, error=OSError("no route"))
    for size in (64, 96):
        cache = tmp_path / "cache" / f"vlcs-{size}-0123456789ab"
        cache.mkdir(parents=True)
        assert "no route" in cost.availability("vlcs", {64, size}, place)[0]
        (cache / "index.json").write_text("{}")
        assert cost.availability("vlcs", {64, size}, place) == ("", 0)
    assert "no route" in cost.availability("vlcs", {64, 96, 128}, place)[0]


def small_plan(monkeypatch, tmp_path) -> cost.Plan:
    """Runs of three datasets, of which one cannot be had."""
    answers = {"digits": ("", 0), "pacs": ("", 3 << 30), "vlcs": ("a page", 0)}
    monkeypatch.setattr(cost, "availability", lambda dataset, sizes, place: answers[dataset])
    names = {"pacs": ["fdse-1", "fdse-3"], "vlcs": ["fedadg-3"], "digits": ["fdse-9"]}
    missing = []
    for dataset, tables in names.items():
        missing.append(Missing(run_with("fedavg", ["--dataset", dataset], 0), tables))
    plan = cost.planned(missing, Place())
    plan.time_runs(Records(tmp_path / "none.jsonl"), "h200", 100)
    return plan


def test_a_plan_in_words(monkeypatch, tmp_path):
    """The cheapest run first, the tables' subtotals; what is downloaded and decoded; what is not here."""
    plan = small_plan(monkeypatch, tmp_path)
    text = cost.plan_text(plan)
    assert [one.tables for one in plan.missing] == [["fdse-9"], ["fdse-1", "fdse-3"]]
    assert "3 runs, " in text and "fdse-1, fdse-3  python fedavg.py --dataset pacs --seed 0" in text
    lines = text.splitlines()
    subtotals = [line.split(None, 2) for line in lines if line.startswith(("fdse-", "fedadg-"))]
    of_pacs = cost.clock(plan.times[plan.missing[1].run.key])
    assert ["fdse-1", "1", of_pacs] in subtotals and ["fdse-3", "1", of_pacs] in subtotals
    assert "To download: pacs 3.0 GiB" in text and "pacs at 224x224 1.4 GiB" in text
    kept = sum(work.kept for work in plan.works.values())
    largest = max(work.disk for work in plan.works.values())
    assert f"when they are finished: {cost.in_units(kept)}; up to {cost.in_units(largest / 3)} more" in text
    assert "Not here, vlcs (1 runs): a page" in text and "100 TFLOPS" in text and "a guess" in text
    assert cost.plan_text(cost.planned([], Place())) == "Nothing is missing."


def test_a_plan_for_a_program(monkeypatch, tmp_path):
    plan = small_plan(monkeypatch, tmp_path)
    data = json.loads(json.dumps(cost.plan_data(plan)))
    assert data["seconds"] == pytest.approx(sum(run["seconds"] for run in data["runs"]))
    assert data["tables"]["fdse-9"] == {"runs": 1, "seconds": data["runs"][0]["seconds"]}
    assert [run["data_here"] for run in data["runs"]] == [True, True, False]
    assert all(run["flops"] > 0 and run["memory"] > run["disk"] > 0 for run in data["runs"])
    assert all(2 * run["disk"] == 3 * run["disk_finished"] for run in data["runs"])


def test_the_time_of_runs_that_share_gpus(monkeypatch, tmp_path):
    """Never less than the longest run, nor than the GPUs compute; what it stands on is said."""
    plan = small_plan(monkeypatch, tmp_path)
    alone, seconds = [plan.works[one.run.key].total for one in plan.missing], cost.total(plan, plan.missing)
    longest = max(plan.times[one.run.key] for one in plan.missing)
    cards = [Card("0", "x", 100 << 30), Card("1", "x", 100 << 30)]
    assert "2 runs at a time on GPU 0, 1 (x), at most 1 on each, as --jobs says" in plan.share(cards, 2, 4)
    assert cost.elapsed(plan, plan.missing) == (pytest.approx(max(seconds / 2, longest)), cost.ONE_EACH)
    plan.share(cards[:1], 8, 4)
    computing = sum(plan.device.seconds_of_card(work) for work in alone)
    shared = max(seconds / 8, computing, longest)
    assert cost.elapsed(plan, plan.missing) == (pytest.approx(shared), cost.WITHOUT_LOSS)
    text = cost.plan_text(plan)
    assert "8 runs at a time on GPU 0 (x)" in text and f": {cost.clock(shared)} (an assumption until" in text
    assert cost.plan_data(plan)["gpus"]["seconds"] == pytest.approx(shared)
    plan.device = dataclasses.replace(plan.device, operator=0.0)
    twice = [plan.missing[1]] * 2  # the GPU computes for one as long as for the other
    computing = 2 * plan.device.seconds_of_card(plan.works[plan.missing[1].run.key].total)
    assert computing > plan.times[plan.missing[1].run.key] > computing / 8
    assert cost.elapsed(plan, twice)[0] == pytest.approx(computing)
    plan.device = dataclasses.replace(plan.device, together=8)
    assert cost.elapsed(plan, plan.missing) == (pytest.approx(max(seconds / 8, longest)), cost.AS_MEASURED)
    plan.share(cards[:1], 4, 0)
    assert cost.elapsed(plan, plan.missing)[1] == cost.LIKE_THOSE


def test_a_method_that_cannot_be_counted_is_named(monkeypatch, tmp_path):
    def failing(*_):
        raise RuntimeError("this needs a value")
    monkeypatch.setattr(work, "parts_of", failing)
    text = cost.plan_text(small_plan(monkeypatch, tmp_path))
    assert "Not counted: fedavg (RuntimeError: this needs a value)" in text and "?     " in text
