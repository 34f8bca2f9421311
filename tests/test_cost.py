"""What missing runs would take: their datasets, their time, the plan in words."""

import email.message

from reproduce import cost
from reproduce.cells import Missing, run_with
from reproduce.methods import arguments
from reproduce.records import Place

import pytest


def of(module: str, *flags: str):
    return arguments(module, flags)


def test_estimates():
    """Steps of all clients and rounds, and a third of a step for each batch that is evaluated, by hand."""
    # 0.8 of 958, 1123, 157, 295 images; batch 50, E = 1, 500 rounds
    args = of("fedavg", "--dataset", "officecaltech")
    train, evaluated = cost.images_of(args)
    assert train == [766, 898, 125, 236] and abs(evaluated - 0.2 * 2533) < 3
    steps = 500 * (16 + 18 + 3 + 5)
    assert cost.estimate(args, 0.5) == pytest.approx(cost.STARTUP + 0.5 * (steps + 500 * evaluated / 50 / 3))


def test_estimates_with_shared_domains():
    shared = of("fedcir", "--dataset", "pacs", "--clients-per-domain", "13", "--participation", "0.5")
    train, _ = cost.images_of(shared)
    assert len(train) == 52 and sum(train) == pytest.approx(0.8 * 9991, rel=0.02)
    half_of_the_clients = 300 * 20 * 26  # 20 steps each
    assert cost.estimate(shared, 1.0) == pytest.approx(cost.STARTUP + half_of_the_clients, rel=0.2)


def test_estimates_without_labels_and_without_counts():
    train, evaluated = cost.images_of(of("fedgala", "--dataset", "pacs", "--target", "photo"))
    assert sorted(train) == [2048, 2344, 3929] and evaluated == 1670
    assert cost.estimate(of("fedcir", "--dataset", "iwildcam"), 1.0) is None


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
    assert cost.availability("pacs", place) == ("", 12345) and cost.availability("digits", place) == ("", 0)
    assert cost.availability("rotatedmnist", place) == ("", 2 * 12345)
    answer(monkeypatch, "text/html; charset=utf-8")
    assert "by hand from https://drive" in cost.availability("vlcs", place)[0]
    answer(monkeypatch, error=OSError("no route"))
    assert "cannot be downloaded here (no route)" in cost.availability("pacs", place)[0]
    (tmp_path / "Homework3-PACS-master.zip").touch()
    assert cost.availability("pacs", place) == ("", 0)
    (tmp_path / "VLCS").mkdir()  # empty: of an archive, say
    assert "cannot be downloaded here" in cost.availability("vlcs", place)[0]
    (tmp_path / "data" / "vlcs").mkdir(parents=True)
    assert cost.availability("vlcs", place) == ("", 0)


def test_a_plan_in_words(monkeypatch):
    """The cheapest run first; what is downloaded and decoded; what is left out, and why."""
    answers = {"digits": ("", 0), "pacs": ("", 3 << 30), "vlcs": ("a page", 0)}
    monkeypatch.setattr(cost, "availability", lambda dataset, place: answers[dataset])
    monkeypatch.setattr(cost, "calibrated", lambda *_: 0.1)
    names = {"pacs": ["fdse-1", "fdse-3"], "vlcs": ["fedadg-3"], "digits": ["fdse-9"]}
    missing = []
    for dataset, tables in names.items():
        missing.append(Missing(run_with("fedavg", ["--dataset", dataset], 0), tables))
    plan = cost.planned(missing, Place())
    plan.time_runs()
    text = cost.plan_text(plan)
    assert [one.tables for one in plan.missing] == [["fdse-9"], ["fdse-1", "fdse-3"]]
    assert "2 runs, " in text and "fdse-1, fdse-3  python fedavg.py --dataset pacs --seed 0" in text
    assert "To download: pacs 3.0 GiB" in text and "pacs at 224x224 1.4 GiB" in text
    assert "Left out, vlcs (1 runs): a page" in text
    assert cost.plan_text(cost.planned([], Place())) == "Nothing is missing."
